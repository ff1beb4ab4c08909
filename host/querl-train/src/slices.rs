//! Tensors seen as slices of f32: what optimizer and checkpoints do with them needs no graph and no copy.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, Var};
use std::cell::Cell;

/// Looks at a tensor's values, row-major. Only what lies strided, or on another device, is copied for it.
///
/// # Errors
/// The tensor is not f32.
pub(crate) fn read<R>(tensor: &Tensor, look: impl FnOnce(&[f32]) -> R) -> Result<R> {
    {
        let (storage, layout) = tensor.storage_and_layout();
        if let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
            return Ok(look(&values[start..end]));
        }
    }
    Ok(look(&tensor.flatten_all()?.to_vec1::<f32>()?))
}

/// Changes a variable's values in place, row-major.
///
/// # Errors
/// The variable is not f32.
pub(crate) fn change(var: &Var, change: impl FnOnce(&mut [f32])) -> Result<()> {
    if var.device().is_cpu() {
        return var.as_tensor().inplace_op1(&Change(Cell::new(Some(change))));
    }
    let mut values = var.as_tensor().flatten_all()?.to_vec1::<f32>()?;
    change(&mut values);
    var.set(&Tensor::from_vec(values, var.shape(), var.device())?)
}

struct Change<F>(Cell<Option<F>>);

impl<F: FnOnce(&mut [f32])> InplaceOp1 for Change<F> {
    fn name(&self) -> &'static str {
        "change in place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { candle_core::bail!("a strided variable") };
        let CpuStorage::F32(values) = storage else { candle_core::bail!("a variable that is not f32") };
        if let Some(change) = self.0.take() {
            change(&mut values[start..end]);
        }
        Ok(())
    }
}
