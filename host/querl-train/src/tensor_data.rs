//! Direct access to the f32 values of tensors, without a graph and mostly without a copy: for optimizer and checkpoints.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, Var};
use std::cell::Cell;

/// Calls `read` with a tensor's values, row-major. Strided tensors, and tensors that are not on the CPU, are copied.
pub(crate) fn read<R>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> R) -> Result<R> {
    {
        let (storage, layout) = tensor.storage_and_layout();
        if let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
            return Ok(read(&values[start..end]));
        }
    }
    Ok(read(&tensor.flatten_all()?.to_vec1::<f32>()?))
}

/// Calls `modify` with a variable's values, row-major, to change them in place.
pub(crate) fn modify(var: &Var, modify: impl FnOnce(&mut [f32])) -> Result<()> {
    if var.device().is_cpu() {
        return var.as_tensor().inplace_op1(&Modify(Cell::new(Some(modify))));
    }
    let mut values = var.as_tensor().flatten_all()?.to_vec1::<f32>()?;
    modify(&mut values);
    var.set(&Tensor::from_vec(values, var.shape(), var.device())?)
}

struct Modify<F>(Cell<Option<F>>);

impl<F: FnOnce(&mut [f32])> InplaceOp1 for Modify<F> {
    fn name(&self) -> &'static str {
        "modify in place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { candle_core::bail!("a strided variable") };
        let CpuStorage::F32(values) = storage else { candle_core::bail!("a variable that is not f32") };
        if let Some(modify) = self.0.take() {
            modify(&mut values[start..end]);
        }
        Ok(())
    }
}
