//! The packed form of a frozen weight, and its quantization: f32, bf16, f16, int8, fp8 (e4m3) or nf4.

#[cfg(test)]
mod tests;
mod unpack;

use super::packed_matmul::WIDTH;
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, bail};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use unpack::NF4;

/// A weight in panels of WIDTH outputs. Within a panel, the values of all outputs for one input are contiguous.
pub(super) struct Packed {
    pub(super) n_out: usize,
    pub(super) n_in: usize,
    /// Number of inputs per panel, padded to a multiple of 16. The padding is 0 and does not affect results.
    pub(super) n_in_padded: usize,
    pub(super) dtype: BaseDtype,
    data: Vec<Line>,
    /// Quantization scales: `(panels, groups, WIDTH)` for int8 and nf4, `(panels, WIDTH)` for fp8; otherwise empty.
    scales: Vec<f32>,
}

/// A cache line: the unit of alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Number of neighbouring weights of a row that share a scale in int8 and nf4; in fp8 a whole row shares one.
pub const GROUP: usize = 64;

fn n_groups(dtype: BaseDtype, n_in: usize) -> usize {
    match dtype {
        BaseDtype::F32 | BaseDtype::Bf16 | BaseDtype::F16 => 0,
        BaseDtype::Int8 | BaseDtype::Nf4 => n_in.div_ceil(GROUP),
        BaseDtype::Fp8 => 1,
    }
}

/// Numbers for which every bit pattern is valid.
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
    // SAFETY: lines are initialised bytes, aligned for every `Plain` number, and the length is their size divided by that of `T`.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines) / size_of::<T>()) }
}

fn values_mut<T: Plain>(lines: &mut [Line]) -> &mut [T] {
    // SAFETY: as in `values`; any write leaves initialised bytes.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines) / size_of::<T>()) }
}

impl Packed {
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(self.data.as_slice()) + size_of_val(self.scales.as_slice())
    }

    fn n_groups(&self) -> usize {
        n_groups(self.dtype, self.n_in)
    }

    /// Index of the quantization group of an input.
    fn group_of(&self, input: usize) -> usize {
        if self.dtype == BaseDtype::Fp8 { 0 } else { input / GROUP }
    }

    /// Offset of input `input` of a panel, in values.
    pub(super) fn offset(&self, panel: usize, input: usize) -> usize {
        (panel * self.n_in_padded + input) * WIDTH
    }

    /// Pointer to the stored values of an input of a panel, and the number of bytes per input.
    pub(super) fn stored(&self, panel: usize, input: usize) -> (*const u8, usize) {
        let bytes =
            size_of_val(self.data.as_slice()) * WIDTH / (self.n_out.next_multiple_of(WIDTH) * self.n_in_padded).max(1);
        (self.data.as_ptr().cast::<u8>().wrapping_add(self.offset(panel, input) / WIDTH * bytes), bytes)
    }

    /// Codes `(in / 4, WIDTH, 4)`, each plus 128, and scales `(groups, WIDTH)` of a panel in int8.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn int8_panel(&self, panel: usize) -> (&[u8], &[f32]) {
        debug_assert!(self.dtype == BaseDtype::Int8);
        let codes = &values(&self.data)[self.offset(panel, 0)..][..self.n_in_padded * WIDTH];
        let n_scales = self.n_groups() * WIDTH;
        (codes, &self.scales[panel * n_scales..][..n_scales])
    }

    pub(super) fn floats(&self) -> Option<&[f32]> {
        (self.dtype == BaseDtype::F32).then(|| values(&self.data))
    }
}

pub(super) fn pack(weight: &Tensor, dtype: BaseDtype) -> Result<Packed> {
    pack_rows(weight.dims2()?, dtype, |first, n| weight.narrow(0, first, n))
}

/// Packs a weight `(n_out, n_in)`. `rows(first, n)` returns `n` of its rows.
pub(super) fn pack_rows(
    (n_out, n_in): (usize, usize),
    dtype: BaseDtype,
    rows: impl Fn(usize, usize) -> Result<Tensor> + Sync,
) -> Result<Packed> {
    if n_out == 0 || n_in == 0 {
        bail!("a weight of shape ({n_out}, {n_in}) holds nothing");
    }
    let (n_panels, n_in_padded) = (n_out.div_ceil(WIDTH), n_in.next_multiple_of(16));
    let bits = match dtype {
        BaseDtype::F32 => 32,
        BaseDtype::Bf16 | BaseDtype::F16 => 16,
        BaseDtype::Int8 | BaseDtype::Fp8 => 8,
        BaseDtype::Nf4 => 4,
    };
    let lines_per_panel = n_in_padded * WIDTH * bits / 8 / size_of::<Line>();
    let scales_per_panel = n_groups(dtype, n_in) * WIDTH;
    let mut data = vec![Line([0; 64]); n_panels * lines_per_panel];
    let mut scales = vec![0f32; n_panels * scales_per_panel];
    let mut scale_parts: Vec<&mut [f32]> = match scales_per_panel {
        0 => (0..n_panels).map(|_| [].as_mut_slice()).collect(),
        n => scales.chunks_mut(n).collect(),
    };
    data.par_chunks_mut(lines_per_panel).zip(scale_parts.par_iter_mut()).enumerate().try_for_each(
        |(panel, (lines, scales))| {
            let first = panel * WIDTH;
            pack_panel(&rows(first, WIDTH.min(n_out - first))?, dtype, lines, scales)
        },
    )?;
    Ok(Packed { n_out, n_in, n_in_padded, dtype, data, scales })
}

fn pack_panel(rows: &Tensor, dtype: BaseDtype, lines: &mut [Line], scales: &mut [f32]) -> Result<()> {
    let n_in = rows.dim(1)?;
    match dtype {
        BaseDtype::F32 => place(&bits(rows, DType::F32)?, n_in, values_mut(lines), f32::from_bits),
        BaseDtype::F16 => place(&bits(rows, DType::F16)?, n_in, values_mut(lines), |bits| bits as u16),
        BaseDtype::Bf16 => {
            let pairs: &mut [u32] = values_mut(lines);
            for (output, row) in bits(rows, DType::BF16)?.chunks_exact(n_in).enumerate() {
                for (pair, values) in row.chunks(2).enumerate() {
                    let high = values.get(1).copied().unwrap_or_default();
                    pairs[pair * WIDTH + output] = high << 16 | values[0];
                }
            }
        }
        BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4 => {
            quantise(&bits(rows, DType::F32)?, n_in, dtype, values_mut(lines), scales)
        }
    }
    Ok(())
}

/// Converts the values of a tensor to another type; returns their bits.
fn bits(rows: &Tensor, dtype: DType) -> Result<Vec<u32>> {
    let rows = rows.to_dtype(dtype)?.contiguous()?;
    let (storage, layout) = rows.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("weights are packed on the CPU")
    };
    let (bits, exponent): (Vec<u32>, u32) = match storage {
        CpuStorage::F32(values) => (values[start..end].iter().map(|x| x.to_bits()).collect(), 0x7f80_0000),
        CpuStorage::BF16(values) => (values[start..end].iter().map(|x| u32::from(x.to_bits())).collect(), 0x7f80),
        CpuStorage::F16(values) => (values[start..end].iter().map(|x| u32::from(x.to_bits())).collect(), 0x7c00),
        _ => bail!("a weight is f32, bf16 or f16"),
    };
    if bits.iter().any(|bits| bits & exponent == exponent) {
        let advice = if dtype == DType::F16 { "; try `f32` or `bf16`" } else { "" };
        bail!("a weight holds a value that is not finite as {}{advice}", dtype.as_str());
    }
    Ok(bits)
}

/// Writes rows of the weight into the columns of a panel.
fn place<T: Copy>(bits: &[u32], n_in: usize, panel: &mut [T], value: impl Fn(u32) -> T) {
    for (output, row) in bits.chunks_exact(n_in).enumerate() {
        for (input, &bits) in row.iter().enumerate() {
            panel[input * WIDTH + output] = value(bits);
        }
    }
}

fn quantise(bits: &[u32], n_in: usize, dtype: BaseDtype, panel: &mut [u8], scales: &mut [f32]) {
    for (output, row) in bits.chunks_exact(n_in).enumerate() {
        let size = if dtype == BaseDtype::Fp8 { n_in } else { GROUP };
        for (group, bits) in row.chunks(size).enumerate() {
            let largest = bits.iter().map(|&bits| f32::from_bits(bits).abs()).fold(0f32, f32::max);
            let steps = match dtype {
                BaseDtype::Int8 => 127.0,
                BaseDtype::Fp8 => LARGEST_E4M3,
                _ => 1.0,
            };
            scales[group * WIDTH + output] = largest / steps;
            // If the largest value is 0, or so small that the inverse overflows, all codes are 0.
            let inverse = if steps / largest < f32::INFINITY { steps / largest } else { 0.0 };
            for (i, &bits) in bits.iter().enumerate() {
                let (input, share) = (group * size + i, f32::from_bits(bits) * inverse);
                match dtype {
                    // Four consecutive inputs are stored together, each plus 128, as the integer product reads them.
                    BaseDtype::Int8 => {
                        let code = share.round().clamp(-127.0, 127.0) as i8;
                        panel[input / 4 * 4 * WIDTH + 4 * output + input % 4] = code as u8 ^ 0x80;
                    }
                    BaseDtype::Fp8 => panel[input * WIDTH + output] = e4m3(share),
                    // The low 4 bits of a byte belong to an output in the panel's first half, the high 4 bits to one in its second half.
                    _ => panel[input * WIDTH / 2 + output % 32] |= nearest(share) << (output / 32 * 4),
                }
            }
        }
    }
}

const LARGEST_E4M3: f32 = 448.0;

/// Rounds to fp8 e4m3 (4 bits of exponent, 3 of mantissa): to nearest, ties to even. Values above 448 become 448.
fn e4m3(x: f32) -> u8 {
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    let (sign, size) = ((x.to_bits() >> 24) as u8 & 0x80, x.abs());
    if size < SMALLEST_NORMAL {
        return sign | (size * 512.0).round_ties_even() as u8; // steps of 2^-9
    }
    let bits = size.to_bits();
    let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
    sign | ((rounded >> 20) - (120 << 3)).min(0x7e) as u8
}

fn nearest(share: f32) -> u8 {
    NF4.windows(2).take_while(|pair| share > (pair[0] + pair[1]) / 2.0).count() as u8
}
