//! Frozen weights on the card: twin of `kernels::FrozenWeight`.

use super::gpu::Gpu;
use super::launch::{Arg, THREADS, blocks_for};
use super::product::Matrix;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{Result, bail};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

/// A frozen weight `(out, in)`, row-major; clones share it.
#[derive(Clone)]
pub struct DeviceWeight {
    stored: Arc<Stored>,
    n_out: usize,
    n_in: usize,
}

enum Stored {
    Bf16(CudaSlice<bf16>),
    Packed { format: PackedFormat, codes: CudaSlice<u8>, scales: CudaSlice<f32> },
}

/// How weights are stored in fewer bits than bf16. Products widen them to bf16 first, a part of the vocabulary or a layer at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedFormat {
    /// 1.0625 bytes a weight: even steps up to the largest of 64 neighbours of a row.
    Int8,
    /// 0.5625 bytes: QLoRA's 16 shares of it.
    Nf4,
    /// 1 byte: e4m3, the largest of a row being 448.
    Fp8,
}

/// Neighbours of a row that share a scale; of fp8 all.
const GROUP: usize = 64;

impl PackedFormat {
    fn groups(self, n_in: usize) -> usize {
        if self == Self::Fp8 { 1 } else { n_in.div_ceil(GROUP) }
    }

    /// Bytes of a row's codes.
    fn line(self, n_in: usize) -> usize {
        if self == Self::Nf4 { n_in.div_ceil(2) } else { n_in }
    }

    fn kernels(self) -> (&'static str, &'static str) {
        match self {
            Self::Int8 => ("pack_int8", "unpack_int8"),
            Self::Nf4 => ("pack_nf4", "unpack_nf4"),
            Self::Fp8 => ("pack_fp8", "unpack_fp8"),
        }
    }
}

/// Some rows of a weight, as bf16.
pub(super) enum WeightRows<'a> {
    Stored(Matrix<'a>),
    Widened(CudaSlice<bf16>),
}

impl WeightRows<'_> {
    /// As a factor.
    pub(super) fn matrix(&self, gpu: &Gpu, n_in: usize) -> Result<Matrix<'_>> {
        match self {
            Self::Stored(matrix) => Ok(*matrix),
            Self::Widened(values) => Matrix::of(gpu, values, n_in),
        }
    }
}

impl DeviceWeight {
    /// `values`: `(n_out, n_in)` row-major.
    ///
    /// # Errors
    /// Another number of values.
    pub fn new(values: CudaSlice<bf16>, n_out: usize, n_in: usize) -> Result<Self> {
        if values.len() != n_out * n_in {
            bail!("a weight ({n_out}, {n_in}) of {} values", values.len());
        }
        Ok(Self { stored: Arc::new(Stored::Bf16(values)), n_out, n_in })
    }

    /// Packs values, which are not kept.
    ///
    /// # Errors
    /// As [`DeviceWeight::new`], or no memory left on the card.
    pub fn packed(
        gpu: &Gpu,
        values: &impl DevicePtr<bf16>,
        (n_out, n_in): (usize, usize),
        format: PackedFormat,
    ) -> Result<Self> {
        if values.len() != n_out * n_in || values.is_empty() {
            bail!("a weight ({n_out}, {n_in}) of {} values", values.len());
        }
        let line = format.line(n_in);
        let (mut codes, mut scales) = (gpu.alloc(n_out * line)?, gpu.alloc(n_out * format.groups(n_in))?);
        let mut args = [
            gpu.input(values),
            gpu.output(&mut codes),
            gpu.output(&mut scales),
            n_out.into(),
            n_in.into(),
            line.into(),
        ];
        let n_blocks = blocks_for(values.len(), gpu.n_processors());
        // SAFETY: as `cuda/frozen.cuh` declares it; every byte of the codes and every scale is written.
        unsafe { gpu.launch(format.kernels().0, [n_blocks, 1, 1], THREADS, 0, &mut args)? };
        Ok(Self { stored: Arc::new(Stored::Packed { format, codes, scales }), n_out, n_in })
    }

    /// Outputs and inputs.
    pub fn dims(&self) -> (usize, usize) {
        (self.n_out, self.n_in)
    }

    /// Bytes on the card.
    pub fn memory_bytes(&self) -> usize {
        match &*self.stored {
            Stored::Bf16(values) => values.num_bytes(),
            Stored::Packed { codes, scales, .. } => codes.num_bytes() + scales.num_bytes(),
        }
    }

    /// Rows by index: `(ids, in)` f32. The caller has checked that ids are below `out`, a row beyond it is zeros.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn rows_at(&self, gpu: &Gpu, ids: &CudaSlice<u32>) -> Result<CudaSlice<f32>> {
        match &*self.stored {
            Stored::Bf16(values) => gpu.rows(values, ids, self.n_in),
            Stored::Packed { .. } => gpu.to_f32(&self.widened(gpu, Some(ids), 0..ids.len())?),
        }
    }

    /// All values, `(out, in)` f32.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn to_f32(&self, gpu: &Gpu) -> Result<CudaSlice<f32>> {
        match &*self.stored {
            Stored::Bf16(values) => gpu.to_f32(values),
            Stored::Packed { .. } => gpu.to_f32(&self.widened(gpu, None, 0..self.n_out)?),
        }
    }

    /// Some outputs, for a product. What had to be widened is given back behind it.
    pub(super) fn rows(&self, gpu: &Gpu, outputs: Range<usize>) -> Result<WeightRows<'_>> {
        match &*self.stored {
            Stored::Bf16(values) => Ok(WeightRows::Stored(Matrix::of(gpu, values, self.n_in)?.part(outputs)?)),
            Stored::Packed { .. } => Ok(WeightRows::Widened(self.widened(gpu, None, outputs)?)),
        }
    }

    fn widened(&self, gpu: &Gpu, ids: Option<&CudaSlice<u32>>, rows: Range<usize>) -> Result<CudaSlice<bf16>> {
        let Stored::Packed { format, codes, scales } = &*self.stored else { bail!("a weight that is bf16 already") };
        let n = rows.len();
        let mut values = gpu.alloc(n * self.n_in)?;
        let mut args = [
            gpu.input(codes),
            gpu.input(scales),
            ids.map_or(Arg::null(), |ids| gpu.input(ids)),
            rows.start.into(),
            gpu.output(&mut values),
            n.into(),
            self.n_out.into(),
            self.n_in.into(),
            format.line(self.n_in).into(),
        ];
        let n_blocks = blocks_for(n * self.n_in, gpu.n_processors());
        // SAFETY: as `cuda/frozen.cuh` declares it; rows are held against `n_out` on the card.
        unsafe { gpu.launch(format.kernels().1, [n_blocks, 1, 1], THREADS, 0, &mut args)? };
        Ok(values)
    }
}
