//! Weights that are not trained, packed once in the form in which products read them.

mod pack;
#[cfg(test)]
mod tests;
mod unpack;

use super::cpu::Level;
use super::product::{Output, Source, Term, WIDTH, backward, forward};
use candle_core::{Device, Result, Tensor, bail};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use std::sync::Arc;

/// A frozen weight `(out, in)`. Forward and backward read one packed copy; clones share it.
///
/// | dtype | bytes a weight | a stored value |
/// |---|---|---|
/// | f32 | 4 | the weight |
/// | bf16 | 2 | rounded to 8 bits of mantissa |
/// | f16 | 2 | rounded to 11 bits of mantissa |
/// | int8 | 1.0625 | one of 255 even steps up to its group's largest |
/// | fp8 | 1 | rounded to 4 bits of mantissa (e4m3) as a share of its row's largest, which is 448 |
/// | nf4 | 0.5625 | one of 16 shares of its group's largest |
///
/// A group is 64 neighbours of one output row. Stored values are widened block by block and multiplied in f32, activations are
/// never rounded: with the bf16 dot products of Intel's fifth generation a core does 90 GFLOP/s, with f32 187.
///
/// Sources: Dettmers et al. 2022, "LLM.int8()" (symmetric absolute-maximum steps); Micikevicius et al. 2022, "FP8 Formats for Deep
/// Learning" (e4m3);
/// Dettmers et al. 2023, "QLoRA", appendix E (the 16 values).
#[derive(Clone)]
pub struct FrozenWeight {
    packed: Arc<Packed>,
    level: Level,
}

/// Panels of WIDTH outputs: for each input the values of all its outputs stand together.
pub(super) struct Packed {
    pub(super) n_out: usize,
    pub(super) n_in: usize,
    /// Inputs of a panel: a multiple of 16, those beyond the last are 0.
    pub(super) n_in_padded: usize,
    pub(super) dtype: BaseDtype,
    data: Vec<Line>,
    /// int8, nf4: `(panels, groups, WIDTH)`; fp8: `(panels, WIDTH)`.
    scales: Vec<f32>,
}

/// What a vector load reads at once.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Neighbours of a row that share a scale in int8 and nf4; in fp8 all do.
pub(crate) const GROUP: usize = 64;

impl FrozenWeight {
    /// Packs a weight. `weight`: `(out, in)` of any float type.
    ///
    /// # Errors
    /// A tensor that is not a matrix of floats, or a value that is not finite in `dtype`.
    pub fn pack(weight: &Tensor, dtype: BaseDtype) -> Result<Self> {
        Ok(Self { packed: Arc::new(pack::pack(weight, dtype)?), level: Level::detected() })
    }

    /// Outputs and inputs.
    pub fn dims(&self) -> (usize, usize) {
        (self.packed.n_out, self.packed.n_in)
    }

    /// How it is stored.
    pub fn dtype(&self) -> BaseDtype {
        self.packed.dtype
    }

    /// Bytes that it takes, padding and scales included.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(self.packed.data.as_slice()) + size_of_val(self.packed.scales.as_slice())
    }

    /// The values that are stored: `(out, in)` f32.
    ///
    /// # Errors
    /// The tensor cannot be made.
    pub fn to_tensor(&self) -> Result<Tensor> {
        let (n_out, n_in) = self.dims();
        let mut values = vec![0f32; n_out * n_in];
        values.par_chunks_mut(n_in.max(1)).enumerate().for_each(|(output, row)| self.packed.row(output, row));
        Tensor::from_vec(values, (n_out, n_in), &Device::Cpu)
    }

    /// Rows by index: `(n, in)` f32. An embedding that is also the head is held once.
    ///
    /// # Errors
    /// An index that is not below the number of rows.
    pub fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let (n_out, n_in) = self.dims();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= n_out) {
            bail!("token id {id} is outside the vocabulary of {n_out}");
        }
        let mut values = vec![0f32; ids.len() * n_in];
        values.par_chunks_mut(n_in.max(1)).zip(ids).for_each(|(row, &id)| self.packed.row(id as usize, row));
        Tensor::from_vec(values, (ids.len(), n_in), &Device::Cpu)
    }

    /// `y = keep * y + x W^T` for `x` `(N, in)` and `y` `(N, out)`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn forward(&self, x: &[f32], y: &mut [f32], keep: f32) -> Result<()> {
        forward(self.level, &[Term { left: x, weight: self.source() }], Output::new(y, keep))
    }

    /// `dx = keep * dx + grad W` for `grad` `(N, out)` and `dx` `(N, in)`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn backward(&self, grad: &[f32], dx: &mut [f32], keep: f32) -> Result<()> {
        backward(self.level, &[Term { left: grad, weight: self.source() }], Output::new(dx, keep))
    }

    pub(super) fn source(&self) -> Source<'_> {
        Source::packed(&self.packed)
    }

    pub(super) fn level(&self) -> Level {
        self.level
    }

    /// The same weight with the instructions of `level`.
    #[cfg(test)]
    pub(super) fn at_level(&self, level: Level) -> Self {
        Self { packed: self.packed.clone(), level }
    }
}

/// Scales of a row.
fn n_groups(dtype: BaseDtype, n_in: usize) -> usize {
    match dtype {
        BaseDtype::F32 | BaseDtype::Bf16 | BaseDtype::F16 => 0,
        BaseDtype::Int8 | BaseDtype::Nf4 => n_in.div_ceil(GROUP),
        BaseDtype::Fp8 => 1,
    }
}

/// Numbers that may be read from any bytes.
///
/// # Safety
/// Every bit pattern is a value, and the alignment is at most that of [`Line`].
unsafe trait Plain {}
// SAFETY: every bit pattern of these is a value.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

fn values<T: Plain>(lines: &[Line]) -> &[T] {
    // SAFETY: lines are plain initialised bytes aligned for every plain number, and the length is what they hold.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines) / size_of::<T>()) }
}

fn values_mut<T: Plain>(lines: &mut [Line]) -> &mut [T] {
    // SAFETY: as in `values`; whatever is written leaves initialised bytes.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines) / size_of::<T>()) }
}

impl Packed {
    fn n_groups(&self) -> usize {
        n_groups(self.dtype, self.n_in)
    }

    /// The group of an input, of a panel's.
    fn group_of(&self, input: usize) -> usize {
        if self.dtype == BaseDtype::Fp8 { 0 } else { input / GROUP }
    }

    /// Where input `input` of a panel begins, in values.
    pub(super) fn offset(&self, panel: usize, input: usize) -> usize {
        (panel * self.n_in_padded + input) * WIDTH
    }

    /// Where the stored values of an input of a panel begin, and the bytes that each input takes.
    pub(super) fn stored(&self, panel: usize, input: usize) -> (*const u8, usize) {
        let bytes =
            size_of_val(self.data.as_slice()) * WIDTH / (self.n_out.next_multiple_of(WIDTH) * self.n_in_padded).max(1);
        (self.data.as_ptr().cast::<u8>().wrapping_add(self.offset(panel, input) / WIDTH * bytes), bytes)
    }

    /// The panels, where they are f32.
    pub(super) fn floats(&self) -> Option<&[f32]> {
        (self.dtype == BaseDtype::F32).then(|| values(&self.data))
    }
}
