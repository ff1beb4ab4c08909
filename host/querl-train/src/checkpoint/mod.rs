//! Checkpoints of a stage: `best` and `last`, folders that PEFT (or, after full fine-tuning, transformers) reads; and `state`, the files
//! from which a run resumes. An incomplete state file is not used.

mod store;

pub use store::StateStore;
pub(crate) use store::write_values;

use crate::{Policy, TrainError, tensor_data};
use candle_core::{DType, Device, Tensor, Var};
use querl_model::{LoraAdapter, Mesh, Ranks, Shard};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Folder of the checkpoint with the best validation result.
pub const BEST: &str = "best";

/// Folder of the newest checkpoint.
pub const LAST: &str = "last";

/// Folder of the files to resume from.
pub const STATE: &str = "state";

/// Folder of the adapter that a rollout server generates with.
pub const ROLLOUT: &str = "rollout";

/// Timer of the checkpoints that are saved every `interval_s` seconds.
#[derive(Debug)]
pub(crate) struct SaveTimer {
    pub(crate) interval: Duration,
    saved: Instant,
}

impl SaveTimer {
    /// Starts the timer; with an `interval_s` of 0 no checkpoint is ever due.
    pub(crate) fn start(interval_s: u64) -> Self {
        Self { interval: Duration::from_secs(interval_s), saved: Instant::now() }
    }

    /// True if a checkpoint is due on any rank. All ranks save together, because their clocks differ.
    pub(crate) fn is_due(&self, ranks: &Ranks) -> Result<bool, TrainError> {
        Ok(!self.interval.is_zero() && ranks.any(self.has_elapsed())?)
    }

    /// Whether a checkpoint is due by the clock of this rank.
    pub(crate) fn has_elapsed(&self) -> bool {
        !self.interval.is_zero() && self.saved.elapsed() >= self.interval
    }

    pub(crate) fn restart(&mut self) {
        self.saved = Instant::now();
    }
}

/// Name of the base in an adapter's configuration: the folder name, because a path is only valid on this machine.
pub(crate) fn base_name(base: &Path) -> String {
    base.file_name().unwrap_or(base.as_os_str()).to_string_lossy().into_owned()
}

/// Saves a policy: its adapter, or all weights with the base's other files. All ranks of a model copy call this together, and the first
/// rank writes.
pub(crate) fn save_policy(mesh: &Mesh, policy: Policy<'_>, directory: &Path, base: &Path) -> Result<(), TrainError> {
    let adapter = policy.adapter.map(LoraAdapter::whole).transpose()?;
    if !mesh.all.is_first() {
        return Ok(());
    }
    if let Some(adapter) = adapter {
        return Ok(adapter.save(directory, &base_name(base))?);
    }
    querl_model::copy_model_files(base, directory, DType::F32)?;
    Ok(policy.decoder.save(directory, DType::F32)?)
}

/// Content of a checkpoint: JSON values and f32 tensors by name. It shares storage with the tensors that were put in, so write it before
/// they change.
#[derive(Debug, Clone, Default)]
pub struct State {
    values: BTreeMap<String, Value>,
    arrays: BTreeMap<String, Array>,
}

#[derive(Debug, Clone)]
struct Array {
    dims: Vec<usize>,
    data: Data,
}

#[derive(Debug, Clone)]
enum Data {
    /// A tensor of the training.
    Tensor(Tensor),
    /// f32 values read from a file, or moments of an optimizer.
    Values(Arc<Vec<f32>>),
}

impl Array {
    fn tensor(&self) -> candle_core::Result<Tensor> {
        match &self.data {
            Data::Tensor(tensor) => Ok(tensor.clone()),
            Data::Values(values) => Tensor::from_slice(values, self.dims.as_slice(), &Device::Cpu),
        }
    }

    fn read<R>(&self, read: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
        match &self.data {
            Data::Tensor(tensor) => tensor_data::read(tensor, read),
            Data::Values(values) => Ok(read(values)),
        }
    }
}

impl State {
    /// Stores a value: counters, losses, token ids. Finite numbers are restored exactly; JSON has no others.
    ///
    /// # Errors
    /// The value has no JSON form.
    pub fn put<T: Serialize>(&mut self, name: &str, value: &T) -> Result<(), TrainError> {
        let value = serde_json::to_value(value).map_err(|error| misfit(name, error))?;
        self.values.insert(name.to_owned(), value);
        Ok(())
    }

    /// The value that [`put`](Self::put) stored under `name`.
    ///
    /// # Errors
    /// The value is missing, or of another type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T, TrainError> {
        let value = self.values.get(name).ok_or_else(|| misfit(name, "is missing"))?;
        T::deserialize(value).map_err(|error| misfit(name, error))
    }

    /// Stores f32 tensors under `prefix`.
    pub fn put_tensors(&mut self, prefix: &str, tensors: &BTreeMap<String, Tensor>) {
        for (name, tensor) in tensors {
            let array = Array { dims: tensor.dims().to_vec(), data: Data::Tensor(tensor.clone()) };
            self.arrays.insert(format!("{prefix}/{name}"), array);
        }
    }

    /// The tensors under `prefix`.
    ///
    /// # Errors
    /// A tensor under `prefix` is not f32.
    pub fn tensors(&self, prefix: &str) -> Result<BTreeMap<String, Tensor>, TrainError> {
        let of_prefix = self.under(prefix);
        let tensor = |(name, array): (&str, &Array)| Ok((name.to_owned(), array.tensor()?));
        of_prefix.map(tensor).collect()
    }

    /// Stores the values of variables under `prefix`.
    pub fn put_vars(&mut self, prefix: &str, vars: &BTreeMap<String, Var>) {
        self.put_tensors(prefix, &vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect());
    }

    /// Copies the state to CPU memory that is not shared with the trained tensors.
    pub(crate) fn detached(self) -> Result<Self, TrainError> {
        let detached = |(name, Array { dims, data }): (String, Array)| {
            let data = match data {
                Data::Tensor(tensor) => Data::Values(Arc::new(tensor_data::read(&tensor, <[f32]>::to_vec)?)),
                values @ Data::Values(_) => values,
            };
            Ok((name, Array { dims, data }))
        };
        let arrays = self.arrays.into_iter().map(detached).collect::<Result<_, TrainError>>()?;
        Ok(Self { values: self.values, arrays })
    }

    /// Sets variables to the values under `prefix`.
    ///
    /// # Errors
    /// Names or shapes differ.
    pub fn restore_vars(&self, prefix: &str, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        if self.under(prefix).count() != vars.len() {
            let message = format!("holds {} tensors; this model trains {}", self.under(prefix).count(), vars.len());
            return Err(misfit(prefix, message));
        }
        for (name, var) in vars {
            let array = self.array(prefix, name, var.dims())?;
            array.read(|from| tensor_data::modify(var, |to| to.copy_from_slice(from)))??;
        }
        Ok(())
    }

    /// Stores f32 values of shape `dims` without copying them.
    pub(crate) fn put_shared(&mut self, prefix: &str, name: &str, dims: &[usize], values: Arc<Vec<f32>>) {
        self.arrays.insert(format!("{prefix}/{name}"), Array { dims: dims.to_vec(), data: Data::Values(values) });
    }

    /// The f32 values under `prefix` by name, each with its shape.
    pub(crate) fn shared(&self, prefix: &str) -> Result<SharedArrays, TrainError> {
        let held = |(name, array): (&str, &Array)| {
            let values = match &array.data {
                Data::Values(values) => values.clone(),
                Data::Tensor(tensor) => Arc::new(tensor_data::read(tensor, <[f32]>::to_vec)?),
            };
            Ok((name.to_owned(), (array.dims.clone(), values)))
        };
        self.under(prefix).map(held).collect()
    }

    /// Gathers the shards of tensor-parallel `ranks` into the full state, which the first rank gets; all ranks call this together.
    pub(crate) fn gather_shards(self, ranks: &Ranks) -> Result<Self, TrainError> {
        self.map_sharded(ranks, |tensor, axis| {
            let whole = ranks.gather(tensor, axis)?;
            Ok(if ranks.is_first() { whole } else { tensor.clone() })
        })
    }

    /// This rank's shard of a full state, for tensor-parallel `ranks`.
    pub(crate) fn shard(&self, ranks: &Ranks) -> Result<Self, TrainError> {
        self.clone().map_sharded(ranks, |tensor, axis| Ok(ranks.shard_of(tensor, axis)?))
    }

    /// Replaces the tensors that are sharded over ranks.
    fn map_sharded(
        self,
        ranks: &Ranks,
        replace: impl Fn(&Tensor, usize) -> Result<Tensor, TrainError>,
    ) -> Result<Self, TrainError> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        let replaced = |(name, array): (String, Array)| {
            let Some(axis) = Shard::adapter_axis(&name) else { return Ok((name, array)) };
            let replaced = replace(&array.tensor()?, axis)?;
            Ok((name, Array { dims: replaced.dims().to_vec(), data: Data::Tensor(replaced) }))
        };
        let arrays = self.arrays.into_iter().map(replaced).collect::<Result<_, TrainError>>()?;
        Ok(Self { values: self.values, arrays })
    }

    fn under(&self, prefix: &str) -> impl Iterator<Item = (&str, &Array)> {
        let own = move |name: &'_ String| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'));
        self.arrays
            .iter()
            .filter(move |(name, _)| own(name))
            .map(move |(name, array)| (&name[prefix.len() + 1..], array))
    }

    fn array(&self, prefix: &str, name: &str, dims: &[usize]) -> Result<&Array, TrainError> {
        let name = format!("{prefix}/{name}");
        let array = self.arrays.get(&name).ok_or_else(|| misfit(&name, "is missing"))?;
        if array.dims != dims {
            return Err(misfit(&name, format!("has shape {:?}; this model expects {dims:?}", array.dims)));
        }
        Ok(array)
    }
}

/// f32 arrays by name: shape and row-major values.
pub(crate) type SharedArrays = BTreeMap<String, (Vec<usize>, Arc<Vec<f32>>)>;

/// The error for a checkpoint value `name` that is valid but does not fit this training.
pub(crate) fn misfit(name: &str, what: impl std::fmt::Display) -> TrainError {
    TrainError::Data(format!("checkpoint: `{name}` {what}; rerun the stage with `--from`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_trip() {
        let mut state = State::default();
        state.put("loss", &0.1f64).unwrap();
        state.put("pending", &vec![vec![1u32, 2], vec![]]).unwrap();
        assert_eq!(state.get::<f64>("loss").unwrap(), 0.1);
        assert_eq!(state.get::<Vec<Vec<u32>>>("pending").unwrap(), [vec![1, 2], vec![]]);
        let missing = state.get::<u64>("step").unwrap_err().to_string();
        assert_eq!(missing, "checkpoint: `step` is missing; rerun the stage with `--from`");
    }

    #[test]
    fn variables_of_another_shape_are_rejected_and_a_prefix_does_not_match_a_longer_one() {
        let vars =
            |n: usize| BTreeMap::from([("w".to_owned(), Var::from_vec(vec![1f32; n], n, &Device::Cpu).unwrap())]);
        let mut state = State::default();
        state.put_vars("policy", &vars(3));
        state.put_vars("policy2", &vars(3));
        let to = BTreeMap::from([("w".to_owned(), Var::zeros(3, candle_core::DType::F32, &Device::Cpu).unwrap())]);
        state.restore_vars("policy", &to).unwrap();
        assert_eq!(to["w"].to_vec1::<f32>().unwrap(), [1.0; 3]);
        let error = state.restore_vars("policy", &vars(2)).unwrap_err().to_string();
        assert!(error.contains("`policy/w` has shape [3]; this model expects [2]"), "{error}");
        assert!(state.restore_vars("poli", &vars(3)).is_err());
    }
}
