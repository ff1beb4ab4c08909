//! What follows the products of a decoding layer, in few launches: low-rank changes, biases, norms, angles, and the way of keys and
//! values into their blocks.

use super::decode::CacheShape;
use super::elementwise::{same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::Arg;
use super::rope::DeviceRope;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr,
};
use candle_core::{Result, bail};
use half::bf16;

/// What a policy makes of a product's outputs `y`: `(y + scale * B low) * factor + bias`, each part where there is one. It names
/// places of the card: see [`Member::new`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Member {
    b: u64,
    bias: u64,
    factor: u64,
    rank: i32,
    first: i32,
    scale: f32,
    unused: i32,
}

// SAFETY: as `cuda/finish.cuh` declares it: plain numbers, and every byte has a meaning or is there for none.
unsafe impl DeviceRepr for Member {}

/// B of a low-rank change, `(out, rank)`.
pub struct Change<'a> {
    /// Rounded.
    pub b: &'a CudaSlice<bf16>,
    /// Columns of B.
    pub rank: usize,
    /// The first of its columns in the rows' product with A.
    pub first: usize,
    /// Factor on the product.
    pub scale: f32,
}

impl Member {
    /// Of `n_out` outputs.
    ///
    /// # Errors
    /// Lengths that do not fit.
    ///
    /// # Safety
    /// What is named here is not kept alive: it stays where it is as long as a kernel reads a table that has this member.
    pub unsafe fn new(
        gpu: &Gpu,
        n_out: usize,
        change: Option<&Change<'_>>,
        bias: Option<&CudaSlice<f32>>,
        factor: Option<&CudaSlice<f32>>,
    ) -> Result<Self> {
        let place = |values: &CudaSlice<f32>| -> Result<u64> {
            same_length("member", values.len(), n_out)?;
            Ok(values.device_ptr(gpu.stream()).0)
        };
        let (bias, factor) = (bias.map(place).transpose()?.unwrap_or(0), factor.map(place).transpose()?.unwrap_or(0));
        let Some(change) = change else {
            return Ok(Self { b: 0, bias, factor, rank: 0, first: 0, scale: 0.0, unused: 0 });
        };
        same_length("member", change.b.len(), n_out * change.rank)?;
        let b = change.b.device_ptr(gpu.stream()).0;
        let (rank, first) = (change.rank as i32, change.first as i32);
        Ok(Self { b, bias, factor, rank, first, scale: change.scale, unused: 0 })
    }
}

/// Rows of a pass as kernels here read them.
pub struct FinishRows<'a> {
    /// The rows' products with all A of the group, `(n, width)`; empty where there is none.
    pub low: CudaView<'a, bf16>,
    /// Columns of `low`.
    pub low_width: usize,
}

/// The weights of the norms of each head, and their epsilon.
pub struct HeadNorms<'a> {
    /// Of queries and of keys, `(D)` each.
    pub weights: Option<[&'a CudaSlice<f32>; 2]>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rows that a block of `finish_heads` takes, and one of the others.
const ROWS_OF_HEADS: usize = 16;
const ROWS: usize = 8;

const THREADS: usize = 256;

impl Gpu {
    /// Finishes queries in their place `(n, heads * D)`, keys and values `(n, kv_heads * D)` into the blocks that `slots` name. A
    /// place outside the pool is left out. `members`: of the three, in this order.
    ///
    /// # Errors
    /// Lengths that do not fit, or heads that are odd or wider than 128.
    #[allow(clippy::too_many_arguments)] // a layer has so many parts
    pub fn finish_heads(
        &self,
        [q, k, v]: [&mut CudaViewMut<'_, bf16>; 3],
        rows: &FinishRows<'_>,
        members: &CudaSlice<Member>,
        norms: &HeadNorms<'_>,
        (rope, positions): (&DeviceRope, &CudaView<'_, u32>),
        slots: &CudaView<'_, u32>,
        [keys, values]: [&mut CudaViewMut<'_, bf16>; 2],
        shape: CacheShape,
    ) -> Result<()> {
        let CacheShape { n_blocks, n_kv_heads, head_dim } = shape;
        let (n, (cos, sin, of_rope)) = (slots.len(), rope.tables());
        same_length("finish_heads", of_rope, head_dim)?;
        same_length("finish_heads", positions.len(), n)?;
        same_length("finish_heads", members.len(), 3)?;
        for len in [k.len(), v.len()] {
            same_length("finish_heads", len, n * n_kv_heads * head_dim)?;
        }
        for len in [keys.len(), values.len()] {
            same_length("finish_heads", len, shape.len())?;
        }
        let n_heads = whole_rows("finish_heads", q.len(), (n * head_dim).max(1))?;
        rows.check("finish_heads", n)?;
        if head_dim > 128 || !head_dim.is_multiple_of(2) {
            bail!("finish_heads: heads of {head_dim}; expected an even width up to 128");
        }
        let [q_norm, k_norm] = match norms.weights {
            Some(weights) => {
                same_length("finish_heads", weights[0].len(), head_dim)?;
                same_length("finish_heads", weights[1].len(), head_dim)?;
                weights.map(|weight| self.input(weight))
            }
            None => [Arg::null(), Arg::null()],
        };
        let mut args = vec![self.output(q), self.output(k), self.output(v)];
        args.extend([self.input(&rows.low), rows.low_width.into(), self.input(members), q_norm, k_norm]);
        args.extend([self.input(cos), self.input(sin), self.input(positions), self.input(slots)]);
        args.extend([self.output(keys), self.output(values)]);
        args.extend([n, n_heads, n_kv_heads, head_dim, n_blocks].map(Arg::from));
        args.push(norms.eps.into());
        let grid = [n_heads + 2 * n_kv_heads, n.div_ceil(ROWS_OF_HEADS), 1];
        // SAFETY: as `cuda/finish.cuh` declares it, lengths as checked; slots are held against the pool on the card, positions
        // were checked by whoever made them.
        unsafe { self.launch("finish_heads", grid, THREADS, 0, &mut args) }
    }

    /// `silu(gate) * up` of the finished two, `(n, out)`, in the place of the gate. `members`: of gate and up.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn finish_gated(
        &self,
        gate: &mut CudaViewMut<'_, bf16>,
        up: &CudaViewMut<'_, bf16>,
        rows: &FinishRows<'_>,
        members: &CudaSlice<Member>,
        n: usize,
    ) -> Result<()> {
        same_length("finish_gated", up.len(), gate.len())?;
        same_length("finish_gated", members.len(), 2)?;
        rows.check("finish_gated", n)?;
        let n_out = gate.len() / n.max(1);
        same_length("finish_gated", gate.len(), n * n_out)?;
        let mut args = vec![self.output(gate), self.input(up), self.input(&rows.low), rows.low_width.into()];
        args.extend([self.input(members), n.into(), n_out.into()]);
        // SAFETY: as `cuda/finish.cuh` declares it, lengths as checked.
        unsafe { self.launch("finish_gated", grid_of(n, n_out), THREADS, 0, &mut args) }
    }

    /// Adds the finished `y` `(n, out)` to `sum`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn finish_added(
        &self,
        sum: &mut impl DevicePtrMut<f32>,
        y: &impl DevicePtr<bf16>,
        rows: &FinishRows<'_>,
        member: &CudaSlice<Member>,
        n: usize,
    ) -> Result<()> {
        same_length("finish_added", y.len(), sum.len())?;
        same_length("finish_added", member.len(), 1)?;
        rows.check("finish_added", n)?;
        let n_out = sum.len() / n.max(1);
        same_length("finish_added", sum.len(), n * n_out)?;
        let mut args = vec![self.output(sum), self.input(y), self.input(&rows.low), rows.low_width.into()];
        args.extend([self.input(member), n.into(), n_out.into()]);
        // SAFETY: as `cuda/finish.cuh` declares it, lengths as checked.
        unsafe { self.launch("finish_added", grid_of(n, n_out), THREADS, 0, &mut args) }
    }
}

fn grid_of(n: usize, n_out: usize) -> [usize; 3] {
    [n_out.div_ceil(THREADS), n.div_ceil(ROWS), 1]
}

impl FinishRows<'_> {
    fn check(&self, what: &str, n: usize) -> Result<()> {
        same_length(what, self.low.len(), n * self.low_width)
    }
}
