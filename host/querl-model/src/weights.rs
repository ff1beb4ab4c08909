//! Where a decoder's weights come from (a checkpoint, memory, or random numbers), and the form in which they are loaded.

use crate::accelerator::WeightValues;
use crate::checkpoint::StoredModel;
use crate::kernels::{FrozenWeight, Weight};
use crate::random;
use crate::sharding::{Held, Part, TensorParallel};
use crate::{ComputeDevice, DecoderConfig, ModelError, Weights};
use candle_core::{DType, Device, Error, Tensor, Var};
use querl_core::config::BaseDtype;
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

    /// A matrix, or a part of it, for an accelerator.
    ///
    /// # Errors
    /// The same.
    fn values(&self, name: &str, part: Option<&Part>) -> Result<WeightValues<'_>, ModelError>;
}

fn missing(name: &str) -> ModelError {
    Error::Msg(format!("no tensor `{name}`")).into()
}

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

    fn values(&self, name: &str, part: Option<&Part>) -> Result<WeightValues<'_>, ModelError> {
        let (dtype, shape, bytes) = self.bytes(name, part)?;
        Ok(WeightValues::Bytes { bytes, dtype, dims: matrix(name, &shape)? })
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

    fn values(&self, name: &str, part: Option<&Part>) -> Result<WeightValues<'_>, ModelError> {
        Ok(WeightValues::Tensor(self.tensor(name, part)?))
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

    fn values(&self, name: &str, part: Option<&Part>) -> Result<WeightValues<'_>, ModelError> {
        let (n_rows, width) = matrix(name, self.of_name(name)?)?;
        let (rows, columns) = match part {
            Some(Part { axis: 0, range }) => (range.clone(), 0..width),
            Some(Part { range, .. }) => (0..n_rows, range.clone()),
            None => (0..n_rows, 0..width),
        };
        let (seed, deviation) = (random::seed_of(self.seed, name), self.deviation);
        Ok(WeightValues::Random { rows, columns, width, seed, deviation })
    }
}

/// Where a decoder's tensors come from, one at a time, and what becomes of them.
pub(crate) struct WeightLoader<'a> {
    tensors: &'a dyn Tensors,
    weights: Weights,
    dtype: BaseDtype,
    pub(crate) place: &'a ComputeDevice,
    pub(crate) parallel: TensorParallel,
    pub(crate) vars: BTreeMap<String, Var>,
}

impl<'a> WeightLoader<'a> {
    pub(crate) fn new(
        tensors: &'a dyn Tensors,
        weights: Weights,
        dtype: BaseDtype,
        place: &'a ComputeDevice,
    ) -> Result<Self, ModelError> {
        place.check(weights, dtype)?;
        Ok(Self { tensors, weights, dtype, place, parallel: TensorParallel::default(), vars: BTreeMap::new() })
    }

    pub(crate) fn sharded(self, parallel: TensorParallel) -> Self {
        Self { parallel, ..self }
    }

    /// What is held here of a tensor: its part, `None` for all of it.
    fn part(&self, name: &str) -> Result<Option<Part>, ModelError> {
        match self.parallel.shard().held(name, &self.tensors.shape(name)?) {
            Held::Part(part) => Ok(Some(part)),
            Held::Whole | Held::Nothing => Ok(None),
        }
    }

    /// A bias, where it is added on this rank.
    pub(crate) fn bias(&mut self, name: &str) -> Result<Option<Tensor>, ModelError> {
        match self.parallel.shard().held(name, &self.tensors.shape(name)?) {
            Held::Nothing => Ok(None),
            Held::Whole | Held::Part(_) => self.value(name).map(Some),
        }
    }

    /// A norm or a bias: f32, a variable where weights are trained.
    pub(crate) fn value(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let part = self.part(name)?;
        let tensor = self.tensors.tensor(name, part.as_ref())?.to_dtype(DType::F32)?.to_device(&self.place.device())?;
        match self.weights {
            Weights::Frozen => Ok(tensor),
            Weights::Trained => {
                let var = Var::from_tensor(&tensor)?;
                let tensor = var.as_tensor().clone();
                self.vars.insert(name.to_owned(), var);
                Ok(tensor)
            }
        }
    }

    /// The weight of a linear layer in the form in which its products are made.
    pub(crate) fn weight(&mut self, name: &str) -> Result<Weight, ModelError> {
        self.weight_as(name, self.dtype)
    }

    /// The embedding or the head: a few bits a value would cost more in the logits than they save.
    pub(crate) fn table(&mut self, name: &str) -> Result<Weight, ModelError> {
        let dtype = match self.dtype {
            BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4 => BaseDtype::Bf16,
            dtype => dtype,
        };
        self.weight_as(name, dtype)
    }

    fn weight_as(&mut self, name: &str, dtype: BaseDtype) -> Result<Weight, ModelError> {
        if self.weights == Weights::Trained {
            return Ok(Weight::Trained(self.value(name)?));
        }
        let part = self.part(name)?;
        match self.place {
            ComputeDevice::Cpu => {
                Ok(Weight::Frozen(FrozenWeight::pack(&self.tensors.tensor(name, part.as_ref())?, dtype)?))
            }
            ComputeDevice::Accelerator(accelerator) => {
                let values = self.tensors.values(name, part.as_ref())?;
                Ok(Weight::Accelerator(accelerator.upload_weight(values, dtype)?))
            }
        }
    }
}
