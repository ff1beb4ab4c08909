//! A decoder's tensors by name: stored, in memory, or random.

use crate::checkpoint::StoredModel;
#[cfg(feature = "cuda")]
use crate::device::{DeviceWeight, Gpu};
use crate::random;
use crate::{DecoderConfig, ModelError};
use candle_core::{Device, Error, Tensor};
use std::collections::BTreeMap;

/// Tensors that are read one at a time.
pub(super) trait Tensors {
    /// A tensor of any float type, on the CPU.
    ///
    /// # Errors
    /// There is none of that name.
    fn tensor(&self, name: &str) -> Result<Tensor, ModelError>;

    /// A matrix on a card.
    ///
    /// # Errors
    /// The same, or the card has no memory left.
    #[cfg(feature = "cuda")]
    fn on_card(&self, name: &str, gpu: &Gpu) -> Result<DeviceWeight, ModelError>;
}

fn missing(name: &str) -> ModelError {
    Error::Msg(format!("no tensor `{name}`")).into()
}

#[cfg(feature = "cuda")]
fn matrix(name: &str, shape: &[usize]) -> Result<(usize, usize), ModelError> {
    match *shape {
        [n_out, n_in] => Ok((n_out, n_in)),
        _ => Err(Error::Msg(format!("`{name}` is no matrix: its shape is {shape:?}")).into()),
    }
}

impl Tensors for StoredModel {
    fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        Self::tensor(self, name)
    }

    #[cfg(feature = "cuda")]
    fn on_card(&self, name: &str, gpu: &Gpu) -> Result<DeviceWeight, ModelError> {
        let (dtype, shape, bytes) = self.bytes(name)?;
        let (n_out, n_in) = matrix(name, &shape)?;
        Ok(DeviceWeight::new(gpu.upload_floats(bytes, dtype)?, n_out, n_in)?)
    }
}

impl Tensors for BTreeMap<String, Tensor> {
    fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        self.get(name).cloned().ok_or_else(|| missing(name))
    }

    #[cfg(feature = "cuda")]
    fn on_card(&self, name: &str, gpu: &Gpu) -> Result<DeviceWeight, ModelError> {
        let tensor = self.tensor(name)?;
        let (n_out, n_in) = tensor.dims2()?;
        let values: Vec<half::bf16> = tensor.to_dtype(candle_core::DType::BF16)?.flatten_all()?.to_vec1()?;
        Ok(DeviceWeight::new(gpu.upload(&values)?, n_out, n_in)?)
    }
}

/// Random weights, made when they are asked for.
pub(super) struct RandomTensors {
    shapes: BTreeMap<String, Vec<usize>>,
    seed: u64,
    deviation: f32,
}

impl RandomTensors {
    pub(super) fn new(config: &DecoderConfig, seed: u64) -> Self {
        Self { shapes: config.tensor_shapes().into_iter().collect(), seed, deviation: config.initializer_range as f32 }
    }

    fn shape(&self, name: &str) -> Result<&[usize], ModelError> {
        self.shapes.get(name).map(Vec::as_slice).ok_or_else(|| missing(name))
    }
}

impl Tensors for RandomTensors {
    fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        let shape = self.shape(name)?;
        let n_values = shape.iter().product();
        let values = match name {
            name if name.ends_with(".bias") => vec![0.0; n_values],
            name if name.contains("norm") => vec![1.0; n_values],
            name => random::normal(n_values, random::seed_of(self.seed, name), self.deviation),
        };
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    }

    #[cfg(feature = "cuda")]
    fn on_card(&self, name: &str, gpu: &Gpu) -> Result<DeviceWeight, ModelError> {
        let (n_out, n_in) = matrix(name, self.shape(name)?)?;
        let values = gpu.normal(n_out * n_in, random::seed_of(self.seed, name), self.deviation)?;
        Ok(DeviceWeight::new(values, n_out, n_in)?)
    }
}
