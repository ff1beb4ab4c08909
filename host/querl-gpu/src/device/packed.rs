//! Frozen weights in fewer bits than bf16: codes and scales are those of `kernels::FrozenWeight`.

use super::elementwise::Element;
use super::gpu::Gpu;
use super::launch::{Arg, THREADS, blocks_for};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{Result, bail};
use half::bf16;
use querl_core::config::BaseDtype;
use querl_model::kernels::GROUP;
use std::ops::Range;

/// How weights are stored in fewer bits than bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedFormat {
    /// 1.0625 bytes a weight: even steps up to the largest of 64 neighbours of a row.
    Int8,
    /// 0.5625 bytes: QLoRA's 16 shares of it.
    Nf4,
    /// 1 byte: e4m3, the largest of a row being 448.
    Fp8,
}

impl PackedFormat {
    /// `None` of a type that is no packed one.
    pub fn of(dtype: BaseDtype) -> Option<Self> {
        match dtype {
            BaseDtype::Int8 => Some(Self::Int8),
            BaseDtype::Nf4 => Some(Self::Nf4),
            BaseDtype::Fp8 => Some(Self::Fp8),
            BaseDtype::F32 | BaseDtype::Bf16 | BaseDtype::F16 => None,
        }
    }

    fn groups(self, n_in: usize) -> usize {
        if self == Self::Fp8 { 1 } else { n_in.div_ceil(GROUP) }
    }

    /// Bytes of a row's codes.
    pub(super) fn line(self, n_in: usize) -> usize {
        if self == Self::Nf4 { n_in.div_ceil(2) } else { n_in }
    }

    fn unpack_kernel(self) -> &'static str {
        match self {
            Self::Int8 => "unpack_int8",
            Self::Nf4 => "unpack_nf4",
            Self::Fp8 => "unpack_fp8",
        }
    }

    /// Of values of type `T`.
    fn pack_kernel<T: Element>(self) -> &'static str {
        T::kernel(match self {
            Self::Int8 => ["pack_int8_f32", "pack_int8_bf16"],
            Self::Nf4 => ["pack_nf4_f32", "pack_nf4_bf16"],
            Self::Fp8 => ["pack_fp8_f32", "pack_fp8_bf16"],
        })
    }
}

/// Codes and scales of a weight `(out, in)`, row by row.
pub(super) struct PackedRows {
    pub(super) format: PackedFormat,
    pub(super) codes: CudaSlice<u8>,
    pub(super) scales: CudaSlice<f32>,
    n_out: usize,
    n_in: usize,
}

impl PackedRows {
    /// Of a weight whose rows are still to be put.
    pub(super) fn new(gpu: &Gpu, (n_out, n_in): (usize, usize), format: PackedFormat) -> Result<Self> {
        if n_out == 0 || n_in == 0 {
            bail!("a weight of shape ({n_out}, {n_in}) holds nothing");
        }
        let (codes, scales) = (gpu.alloc(n_out * format.line(n_in))?, gpu.alloc(n_out * format.groups(n_in))?);
        Ok(Self { format, codes, scales, n_out, n_in })
    }

    /// Packs whole rows, the first of which is row `first`.
    pub(super) fn put<T: Element>(&mut self, gpu: &Gpu, first: usize, values: &impl DevicePtr<T>) -> Result<()> {
        let (n, line, groups) = (values.len() / self.n_in, self.format.line(self.n_in), self.format.groups(self.n_in));
        if values.len() != n * self.n_in || first + n > self.n_out {
            bail!("rows from {first} on, {} values, of a weight ({}, {})", values.len(), self.n_out, self.n_in);
        }
        let mut codes = self.codes.slice_mut(first * line..(first + n) * line);
        let mut scales = self.scales.slice_mut(first * groups..(first + n) * groups);
        let mut args = [
            gpu.input(values),
            gpu.output(&mut codes),
            gpu.output(&mut scales),
            n.into(),
            self.n_in.into(),
            line.into(),
        ];
        let n_blocks = blocks_for(values.len(), gpu.n_processors());
        // SAFETY: as `cuda/frozen.cuh` declares it; of these rows every byte of the codes and every scale is written.
        unsafe { gpu.launch(self.format.pack_kernel::<T>(), [n_blocks, 1, 1], THREADS, 0, &mut args) }
    }

    /// Widens some rows, or those of `ids`, to bf16, into the beginning of `values`.
    pub(super) fn widen(
        &self,
        gpu: &Gpu,
        ids: Option<&CudaSlice<u32>>,
        rows: Range<usize>,
        values: &mut impl DevicePtrMut<bf16>,
    ) -> Result<()> {
        let n = rows.len();
        if values.len() < n * self.n_in {
            bail!("{n} rows of {} in {} values", self.n_in, values.len());
        }
        let mut args = [
            gpu.input(&self.codes),
            gpu.input(&self.scales),
            ids.map_or(Arg::null(), |ids| gpu.input(ids)),
            rows.start.into(),
            gpu.output(values),
            n.into(),
            self.n_out.into(),
            self.n_in.into(),
            self.format.line(self.n_in).into(),
        ];
        let n_blocks = blocks_for(n * self.n_in, gpu.n_processors());
        // SAFETY: as `cuda/frozen.cuh` declares it; rows are held against `n_out` on the card.
        unsafe { gpu.launch(self.format.unpack_kernel(), [n_blocks, 1, 1], THREADS, 0, &mut args) }
    }
}
