//! Weights that are not trained, in the form in which products read them.

use super::{Mat, Threads, matmul};
use candle_core::{DType, Device, Result, Tensor, bail};
use querl_core::config::BaseDtype;
use std::sync::Arc;

/// A frozen weight `(out, in)`. Forward and backward read one copy; clones share it.
#[derive(Clone)]
pub struct FrozenWeight(Arc<Stored>);

struct Stored {
    values: Vec<f32>, // (out, in), rounded to `dtype`
    n_out: usize,
    n_in: usize,
    dtype: BaseDtype,
}

impl FrozenWeight {
    /// Stores a weight. `weight`: `(out, in)` of any float type.
    ///
    /// # Errors
    /// A tensor that is not a matrix of floats.
    pub fn pack(weight: &Tensor, dtype: BaseDtype) -> Result<Self> {
        let (n_out, n_in) = weight.dims2()?;
        let rounded = match dtype {
            BaseDtype::F32 => weight.clone(),
            BaseDtype::Bf16 => weight.to_dtype(DType::BF16)?,
            BaseDtype::F16 => weight.to_dtype(DType::F16)?,
            BaseDtype::Int8 | BaseDtype::Nf4 => bail!("a frozen weight cannot be stored as {} yet", dtype.name()),
        };
        let values = rounded.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(Self(Arc::new(Stored { values, n_out, n_in, dtype })))
    }

    /// Outputs and inputs.
    pub fn dims(&self) -> (usize, usize) {
        (self.0.n_out, self.0.n_in)
    }

    /// How it is stored.
    pub fn dtype(&self) -> BaseDtype {
        self.0.dtype
    }

    /// Bytes that the values take.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(self.0.values.as_slice())
    }

    /// The values as they count in a product: `(out, in)` f32.
    ///
    /// # Errors
    /// The tensor cannot be made.
    pub fn to_tensor(&self) -> Result<Tensor> {
        Tensor::from_vec(self.0.values.clone(), self.dims(), &Device::Cpu)
    }

    /// Rows by index: `(n, in)` f32. An embedding that is also the head is held once.
    ///
    /// # Errors
    /// An index that is not below the number of rows.
    pub fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let (n_out, n_in) = self.dims();
        let mut rows = Vec::with_capacity(ids.len() * n_in);
        for &id in ids {
            if id as usize >= n_out {
                bail!("token id {id} is outside the vocabulary of {n_out}");
            }
            rows.extend_from_slice(&self.0.values[id as usize * n_in..(id as usize + 1) * n_in]);
        }
        Tensor::from_vec(rows, (ids.len(), n_in), &Device::Cpu)
    }

    /// `y = keep * y + x W^T` for `x` `(N, in)` and `y` `(N, out)`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn forward(&self, x: &[f32], y: &mut [f32], keep: f32) -> Result<()> {
        let (n_out, n_in) = self.dims();
        let weight = Mat::new(&self.0.values, n_out, n_in);
        matmul(y, keep, 1.0, Mat::new(x, x.len() / n_in, n_in), weight.t(), Threads::All)
    }

    /// `dx = keep * dx + grad W` for `grad` `(N, out)` and `dx` `(N, in)`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn backward(&self, grad: &[f32], dx: &mut [f32], keep: f32) -> Result<()> {
        let (n_out, n_in) = self.dims();
        let weight = Mat::new(&self.0.values, n_out, n_in);
        matmul(dx, keep, 1.0, Mat::new(grad, grad.len() / n_out, n_out), weight, Threads::All)
    }
}
