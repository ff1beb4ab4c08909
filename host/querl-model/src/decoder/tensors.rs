//! A decoder's tensors by name: stored, in memory, or random.

use super::shard::Part;
use crate::checkpoint::StoredModel;
#[cfg(feature = "cuda")]
use crate::device::{DeviceWeight, Gpu, PackedFormat};
use crate::random;
use crate::{DecoderConfig, ModelError};
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Device, Error, Tensor};
use std::collections::BTreeMap;

/// Tensors that are read one at a time.
pub(crate) trait Tensors {
    /// Shape of a whole tensor.
    ///
    /// # Errors
    /// There is none of that name.
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError>;

    /// A tensor of any float type, or a part of it, on the CPU.
    ///
    /// # Errors
    /// There is none of that name, or it is not long enough.
    fn tensor(&self, name: &str, part: Option<&Part>) -> Result<Tensor, ModelError>;

    /// A matrix, or a part of it, on a card: packed or in bf16.
    ///
    /// # Errors
    /// The same, or the card has no memory left.
    #[cfg(feature = "cuda")]
    fn on_card(
        &self,
        name: &str,
        part: Option<&Part>,
        gpu: &Gpu,
        format: Option<PackedFormat>,
    ) -> Result<DeviceWeight, ModelError>;
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
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        Self::shape(self, name)
    }

    fn tensor(&self, name: &str, part: Option<&Part>) -> Result<Tensor, ModelError> {
        if part.is_none() {
            return Self::tensor(self, name);
        }
        let (dtype, shape, bytes) = self.bytes(name, part)?;
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &shape, &Device::Cpu)?)
    }

    #[cfg(feature = "cuda")]
    fn on_card(
        &self,
        name: &str,
        part: Option<&Part>,
        gpu: &Gpu,
        format: Option<PackedFormat>,
    ) -> Result<DeviceWeight, ModelError> {
        let (dtype, shape, bytes) = self.bytes(name, part)?;
        let (n_out, n_in) = matrix(name, &shape)?;
        match format {
            Some(format) => Ok(gpu.upload_packed(&bytes, dtype, (n_out, n_in), format)?),
            None => Ok(DeviceWeight::new(gpu.upload_floats(&bytes, dtype)?, n_out, n_in)?),
        }
    }
}

impl Tensors for BTreeMap<String, Tensor> {
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        self.get(name).map(|tensor| tensor.dims().to_vec()).ok_or_else(|| missing(name))
    }

    fn tensor(&self, name: &str, part: Option<&Part>) -> Result<Tensor, ModelError> {
        let tensor = self.get(name).ok_or_else(|| missing(name))?;
        match part {
            Some(Part { axis, range }) => Ok(tensor.narrow(*axis, range.start, range.len())?),
            None => Ok(tensor.clone()),
        }
    }

    #[cfg(feature = "cuda")]
    fn on_card(
        &self,
        name: &str,
        part: Option<&Part>,
        gpu: &Gpu,
        format: Option<PackedFormat>,
    ) -> Result<DeviceWeight, ModelError> {
        let tensor = self.tensor(name, part)?;
        let (n_out, n_in) = tensor.dims2()?;
        let tensor = tensor.flatten_all()?;
        if let Some(format) = format {
            let values: Vec<f32> = tensor.to_dtype(DType::F32)?.to_vec1()?;
            return Ok(DeviceWeight::packed(gpu, &gpu.upload(&values)?, (n_out, n_in), format)?);
        }
        let values: Vec<half::bf16> = tensor.to_dtype(DType::BF16)?.to_vec1()?;
        Ok(DeviceWeight::new(gpu.upload(&values)?, n_out, n_in)?)
    }
}

/// Random weights, made when they are asked for.
pub(crate) struct RandomTensors {
    shapes: BTreeMap<String, Vec<usize>>,
    seed: u64,
    deviation: f32,
}

impl RandomTensors {
    pub(crate) fn new(config: &DecoderConfig, seed: u64) -> Self {
        Self { shapes: config.tensor_shapes().into_iter().collect(), seed, deviation: config.initializer_range as f32 }
    }

    fn of_name(&self, name: &str) -> Result<&[usize], ModelError> {
        self.shapes.get(name).map(Vec::as_slice).ok_or_else(|| missing(name))
    }
}

impl Tensors for RandomTensors {
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        Ok(self.of_name(name)?.to_vec())
    }

    fn tensor(&self, name: &str, part: Option<&Part>) -> Result<Tensor, ModelError> {
        let whole = self.of_name(name)?;
        let mut shape = whole.to_vec();
        if let Some(Part { axis, range }) = part {
            shape[*axis] = range.len();
        }
        let n_values = shape.iter().product();
        let values = match (name, part, whole) {
            (name, ..) if name.ends_with(".bias") => vec![0.0; n_values],
            (name, ..) if name.contains("norm") => vec![1.0; n_values],
            (name, Some(Part { axis, range }), &[n_rows, width]) => {
                let (rows, columns) = if *axis == 0 { (range.clone(), 0..width) } else { (0..n_rows, range.clone()) };
                random::normal_part(rows, columns, width, random::seed_of(self.seed, name), self.deviation)
            }
            (name, ..) => random::normal(n_values, random::seed_of(self.seed, name), self.deviation),
        };
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    }

    #[cfg(feature = "cuda")]
    fn on_card(
        &self,
        name: &str,
        part: Option<&Part>,
        gpu: &Gpu,
        format: Option<PackedFormat>,
    ) -> Result<DeviceWeight, ModelError> {
        let (n_rows, width) = matrix(name, self.of_name(name)?)?;
        let (rows, columns) = match part {
            Some(Part { axis: 0, range }) => (range.clone(), 0..width),
            Some(Part { range, .. }) => (0..n_rows, range.clone()),
            None => (0..n_rows, 0..width),
        };
        let (n_out, n_in) = (rows.len(), columns.len());
        let values = gpu.normal_part(rows, columns, width, random::seed_of(self.seed, name), self.deviation)?;
        match format {
            Some(format) => Ok(DeviceWeight::packed(gpu, &values, (n_out, n_in), format)?),
            None => Ok(DeviceWeight::new(values, n_out, n_in)?),
        }
    }
}
