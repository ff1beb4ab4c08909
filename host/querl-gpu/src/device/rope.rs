//! Rotary position embedding on the card, alone or after the norm of each head: twin of `RopeTable::apply`.

use super::elementwise::{same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr};
use candle_core::{Result, bail};
use half::bf16;
use querl_model::kernels::RopeTable;

/// Cosines and sines of every position and frequency, `(positions, D / 2)` f32 each.
pub struct DeviceRope {
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
    head_dim: usize,
    n_positions: usize,
}

/// Heads that a block turns: a warp each.
const HEADS_PER_BLOCK: usize = 8;

/// Most parts of the gradient of a norm's weight: a function of nothing but this number and that of the heads.
const MAX_PARTS: usize = 512;

impl DeviceRope {
    /// Copies a table to the card.
    ///
    /// # Errors
    /// Heads of an odd width or wider than 256, or no memory left on the card.
    pub fn new(gpu: &Gpu, table: &RopeTable) -> Result<Self> {
        let (cos, sin, head_dim) = table.tables();
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > 256 {
            bail!("rope: heads of {head_dim}; expected an even width from 2 to 256");
        }
        let n_positions = cos.len() / (head_dim / 2);
        Ok(Self { cos: gpu.upload(cos)?, sin: gpu.upload(sin)?, head_dim, n_positions })
    }

    /// Copies positions to the card.
    ///
    /// # Errors
    /// A position outside the table.
    pub fn positions(&self, gpu: &Gpu, positions: &[u32]) -> Result<CudaSlice<u32>> {
        if let Some(position) = positions.iter().find(|&&position| position as usize >= self.n_positions) {
            bail!("position {position} is beyond the model's {} positions", self.n_positions);
        }
        gpu.upload(positions)
    }

    /// Cosines and sines, and the width of a head.
    pub(super) fn tables(&self) -> (&CudaSlice<f32>, &CudaSlice<f32>, usize) {
        (&self.cos, &self.sin, self.head_dim)
    }

    /// Rotates each head of each row of `x` `(N, heads * D)` by its position, after the norm whose weight `(D)` and epsilon are
    /// given, if any. `positions`: N of them, checked by [`DeviceRope::positions`].
    ///
    /// # Errors
    /// Values that are not whole heads.
    pub fn turned(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        norm: Option<(&CudaView<'_, f32>, f32)>,
        positions: &impl DevicePtr<u32>,
    ) -> Result<CudaSlice<bf16>> {
        self.turn(gpu, x, norm, positions, 1.0)
    }

    /// Gradients of `x`, and of the first `n_wanted` values of the norm's weight (none or all), for the gradient of
    /// [`DeviceRope::turned`]'s result. Without a norm `x` is not read.
    ///
    /// # Errors
    /// As [`DeviceRope::turned`].
    pub fn turned_gradients(
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
        same_length("turned_gradients", x.len(), grad.len())?;
        same_length("turned_gradients", weight.len(), self.head_dim)?;
        let (n_heads, n_per_row) = self.heads(grad.len(), positions.len())?;
        let n_parts = if n_wanted == 0 { 0 } else { n_heads.div_ceil(HEADS_PER_BLOCK).clamp(1, MAX_PARTS) };
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
        unsafe { gpu.launch("turned_gradients", [n_blocks, 1, 1], HEADS_PER_BLOCK * 32, shared, &mut args)? };
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
            same_length("turned", weight.len(), self.head_dim)?;
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
        unsafe { gpu.launch("turned", [n_blocks, 1, 1], HEADS_PER_BLOCK * 32, 0, &mut args)? };
        Ok(y)
    }

    /// Heads of all rows, and of one.
    fn heads(&self, len: usize, n_rows: usize) -> Result<(usize, usize)> {
        let n_heads = whole_rows("rope", len, self.head_dim)?;
        if n_rows > 0 && !n_heads.is_multiple_of(n_rows) || n_rows == 0 && n_heads > 0 {
            bail!("rope: {n_rows} positions for {n_heads} heads of {}", self.head_dim);
        }
        Ok((n_heads, n_heads / n_rows.max(1)))
    }
}
