//! RMSNorm, and RoPE alone or after the per-head norm: counterparts of [`querl_model::kernels::rms_norm_forward`] and `RopeTable::apply`.

use super::elementwise::{Element, same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::{Arg, THREADS};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr, DevicePtrMut};
use candle_core::{Result, bail};
use half::bf16;
use querl_model::kernels::RopeTable;

/// Maximum number of partial sums of the gradient of a norm's weight: a constant, so that results do not depend on the GPU.
const MAX_NORM_PARTS: usize = 256;

impl Gpu {
    /// RMSNorm, `x / sqrt(mean(x^2) + eps) * weight`, over rows of as many values as the weight has.
    pub fn rms_norm<T: Element>(
        &self,
        x: &impl DevicePtr<T>,
        weight: &impl DevicePtr<f32>,
        eps: f32,
    ) -> Result<CudaSlice<bf16>> {
        let mut y = self.alloc(x.len())?;
        self.rms_norm_into(x, weight, eps, &mut y)?;
        Ok(y)
    }

    /// Like [`Gpu::rms_norm`], into existing memory.
    pub fn rms_norm_into<T: Element>(
        &self,
        x: &impl DevicePtr<T>,
        weight: &impl DevicePtr<f32>,
        eps: f32,
        y: &mut impl DevicePtrMut<bf16>,
    ) -> Result<()> {
        let (width, n_rows) = (weight.len(), whole_rows("rms_norm", x.len(), weight.len())?);
        same_length("rms_norm", y.len(), x.len())?;
        let mut args = [self.input(x), self.input(weight), self.output(y), n_rows.into(), width.into(), eps.into()];
        let name = T::kernel(["rms_norm_f32", "rms_norm_bf16"]);
        // SAFETY: as `cuda/rms_norm.cuh` declares it; lengths are whole rows.
        unsafe { self.launch(name, [n_rows, 1, 1], THREADS, 0, &mut args) }
    }

    /// Gradients of `x`, to which `more` is added if there is any, and of the first `n_wanted` values of the weight (none or all), for the
    /// gradient of [`Gpu::rms_norm`]'s result.
    pub fn rms_norm_gradients(
        &self,
        x: &impl DevicePtr<f32>,
        weight: &impl DevicePtr<f32>,
        eps: f32,
        grad: &impl DevicePtr<f32>,
        more: Option<&CudaSlice<f32>>,
        n_wanted: usize,
    ) -> Result<(CudaSlice<f32>, CudaSlice<f32>)> {
        let (width, n_rows) = (weight.len(), whole_rows("rms_norm_gradients", x.len(), weight.len())?);
        same_length("rms_norm_gradients", grad.len(), x.len())?;
        same_length("rms_norm_gradients", more.map_or(x.len(), |more| more.len()), x.len())?;
        let mut dx = self.alloc(x.len())?;
        let mut args = vec![self.input(x), self.input(weight), self.input(grad)];
        args.extend([more.map_or(Arg::null(), |more| self.input(more)), self.output(&mut dx)]);
        args.extend([n_rows.into(), width.into(), eps.into()]);
        // SAFETY: as `cuda/rms_norm.cuh` declares it; all are whole rows of one number.
        unsafe { self.launch("rms_norm_gradients", [n_rows, 1, 1], THREADS, 0, &mut args)? };
        if n_wanted == 0 {
            return Ok((dx, self.zeros(0)?));
        }
        let dw = self.norm_weight_gradient(self.input(x), self.input(grad), n_rows, width, eps)?;
        Ok((dx, dw))
    }

    fn norm_weight_gradient(&self, x: Arg, grad: Arg, n_rows: usize, width: usize, eps: f32) -> Result<CudaSlice<f32>> {
        let n_parts = n_rows.clamp(1, MAX_NORM_PARTS);
        let mut parts = self.alloc::<f32>(n_parts * width)?;
        let mut args = [x, grad, self.output(&mut parts), n_rows.into(), width.into(), eps.into()];
        // SAFETY: as `cuda/rms_norm.cuh` declares it; each block writes one row of `parts`.
        unsafe { self.launch("norm_weight_gradient", [n_parts, 1, 1], THREADS, width * 4, &mut args)? };
        self.column_sums(&parts, width)
    }

    /// Sum over the rows of `x` `(N, width)`: `(width)`. The order of summation depends on N alone.
    pub(super) fn column_sums<T: Element>(&self, x: &impl DevicePtr<T>, width: usize) -> Result<CudaSlice<f32>> {
        let n_rows = whole_rows("column_sums", x.len(), width)?;
        let mut sums = self.alloc(width)?;
        let mut args = [self.input(x), self.output(&mut sums), n_rows.into(), width.into()];
        let name = T::kernel(["column_sums_f32", "column_sums_bf16"]);
        // SAFETY: as `cuda/rms_norm.cuh` declares it.
        unsafe { self.launch(name, [width.div_ceil(32), 1, 1], THREADS, 0, &mut args)? };
        Ok(sums)
    }
}

/// RoPE table in GPU memory: cosines and sines of every position and frequency, `(positions, D / 2)` f32 each.
pub struct DeviceRope {
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
    head_dim: usize,
    n_positions: usize,
}

/// Heads per block: one warp each.
const HEADS_PER_BLOCK: usize = 8;

/// Maximum number of partial sums of the gradient of a per-head norm's weight: a constant, so that results do not depend on the GPU.
const MAX_ROPE_PARTS: usize = 512;

impl DeviceRope {
    pub fn new(gpu: &Gpu, table: &RopeTable) -> Result<Self> {
        let (cos, sin, head_dim) = table.tables();
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > 256 {
            bail!("rope: head_dim is {head_dim}; expected an even number from 2 to 256");
        }
        let n_positions = cos.len() / (head_dim / 2);
        Ok(Self { cos: gpu.upload(cos)?, sin: gpu.upload(sin)?, head_dim, n_positions })
    }

    /// Copies positions to the GPU; fails if one is outside the table.
    pub fn positions(&self, gpu: &Gpu, positions: &[u32]) -> Result<CudaSlice<u32>> {
        if let Some(position) = positions.iter().find(|&&position| position as usize >= self.n_positions) {
            bail!("position {position} is beyond the model's {} positions", self.n_positions);
        }
        gpu.upload(positions)
    }

    pub(super) fn tables(&self) -> (&CudaSlice<f32>, &CudaSlice<f32>, usize) {
        (&self.cos, &self.sin, self.head_dim)
    }

    /// Applies RoPE to each head of each row of `x` `(N, heads * D)`, after a per-head RMSNorm if its weight `(D)` and epsilon are given.
    /// `positions`: N of them, checked by [`DeviceRope::positions`].
    pub fn norm_rope(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        norm: Option<(&CudaView<'_, f32>, f32)>,
        positions: &impl DevicePtr<u32>,
    ) -> Result<CudaSlice<bf16>> {
        self.turn(gpu, x, norm, positions, 1.0)
    }

    /// Gradients of `x`, and of the first `n_wanted` values of the norm's weight (none or all), for the gradient of
    /// [`DeviceRope::norm_rope`]'s result. `x` is read only with a norm.
    pub fn norm_rope_gradients(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        norm: Option<(&CudaView<'_, f32>, f32)>,
        positions: &impl DevicePtr<u32>,
        grad: &impl DevicePtr<bf16>,
        n_wanted: usize,
    ) -> Result<(CudaSlice<bf16>, CudaSlice<f32>)> {
        let Some((weight, eps)) = norm else {
            return Ok((self.turn(gpu, grad, None, positions, -1.0)?, gpu.zeros(0)?));
        };
        same_length("norm_rope_gradients", x.len(), grad.len())?;
        same_length("norm_rope_gradients", weight.len(), self.head_dim)?;
        let (n_heads, n_per_row) = self.heads(grad.len(), positions.len())?;
        let n_parts = if n_wanted == 0 { 0 } else { n_heads.div_ceil(HEADS_PER_BLOCK).clamp(1, MAX_ROPE_PARTS) };
        let n_blocks = if n_wanted == 0 { n_heads.div_ceil(HEADS_PER_BLOCK) } else { n_parts };
        let (mut dx, mut parts) = (gpu.alloc(grad.len())?, gpu.zeros::<f32>(n_parts * self.head_dim)?);
        let parts_at = if n_wanted == 0 { Arg::null() } else { gpu.output(&mut parts) };
        let mut args = [
            gpu.input(x),
            gpu.input(weight),
            gpu.input(&self.cos),
            gpu.input(&self.sin),
            gpu.input(positions),
            gpu.input(grad),
            gpu.output(&mut dx),
            parts_at,
            n_heads.into(),
            n_per_row.into(),
            self.head_dim.into(),
            eps.into(),
        ];
        let shared = if n_wanted == 0 { 0 } else { HEADS_PER_BLOCK * self.head_dim * 4 };
        // SAFETY: as `cuda/rope.cuh` declares it; positions were checked against the table, lengths here.
        unsafe { gpu.launch("norm_rope_gradients", [n_blocks, 1, 1], HEADS_PER_BLOCK * 32, shared, &mut args)? };
        let dw = if n_wanted == 0 { parts } else { gpu.column_sums(&parts, self.head_dim)? };
        Ok((dx, dw))
    }

    fn turn(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        norm: Option<(&CudaView<'_, f32>, f32)>,
        positions: &impl DevicePtr<u32>,
        direction: f32,
    ) -> Result<CudaSlice<bf16>> {
        let (n_heads, n_per_row) = self.heads(x.len(), positions.len())?;
        if let Some((weight, _)) = norm {
            same_length("norm_rope", weight.len(), self.head_dim)?;
        }
        let mut y = gpu.alloc(x.len())?;
        let mut args = [
            gpu.input(x),
            norm.map_or(Arg::null(), |(weight, _)| gpu.input(weight)),
            gpu.input(&self.cos),
            gpu.input(&self.sin),
            gpu.input(positions),
            gpu.output(&mut y),
            n_heads.into(),
            n_per_row.into(),
            self.head_dim.into(),
            norm.map_or(0.0, |(_, eps)| eps).into(),
            direction.into(),
        ];
        let n_blocks = n_heads.div_ceil(HEADS_PER_BLOCK);
        // SAFETY: as `cuda/rope.cuh` declares it; positions were checked against the table, lengths here.
        unsafe { gpu.launch("norm_rope", [n_blocks, 1, 1], HEADS_PER_BLOCK * 32, 0, &mut args)? };
        Ok(y)
    }

    fn heads(&self, len: usize, n_rows: usize) -> Result<(usize, usize)> {
        let n_heads = whole_rows("rope", len, self.head_dim)?;
        if n_rows > 0 && !n_heads.is_multiple_of(n_rows) || n_rows == 0 && n_heads > 0 {
            bail!("rope: {n_heads} heads (head_dim {}) are not a multiple of {n_rows} positions", self.head_dim);
        }
        Ok((n_heads, n_heads / n_rows.max(1)))
    }
}
