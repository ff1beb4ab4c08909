//! What a training needs to go on where it was: values and tensors by name, in files that are whole or not used.

mod file;
mod store;

pub use store::StateStore;

use crate::{TrainError, slices};
use candle_core::{Device, Tensor, Var};
use querl_model::{Ranks, Shard};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Values and f32 tensors by name. It shares storage with the tensors that were put in: write it before they change.
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
    /// As the training has it.
    Live(Tensor),
    /// As it was read, or as an optimizer holds its moments.
    Held(Arc<Vec<f32>>),
}

impl Array {
    fn tensor(&self) -> candle_core::Result<Tensor> {
        match &self.data {
            Data::Live(tensor) => Ok(tensor.clone()),
            Data::Held(values) => Tensor::from_slice(values, self.dims.as_slice(), &Device::Cpu),
        }
    }

    fn read<R>(&self, look: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
        match &self.data {
            Data::Live(tensor) => slices::read(tensor, look),
            Data::Held(values) => Ok(look(values)),
        }
    }
}

impl State {
    /// Keeps a value: counters, the loss so far, token ids. Numbers come back exactly; those that are not finite do not,
    /// since JSON has none.
    ///
    /// # Errors
    /// JSON cannot hold it.
    pub fn put<T: Serialize>(&mut self, name: &str, value: &T) -> Result<(), TrainError> {
        let value = serde_json::to_value(value).map_err(|error| misfit(name, error))?;
        self.values.insert(name.to_owned(), value);
        Ok(())
    }

    /// A value that was put in.
    ///
    /// # Errors
    /// It is not there, or is of another type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T, TrainError> {
        let value = self.values.get(name).ok_or_else(|| misfit(name, "is missing"))?;
        T::deserialize(value).map_err(|error| misfit(name, error))
    }

    /// Keeps f32 tensors under `prefix`.
    pub fn put_tensors(&mut self, prefix: &str, tensors: &BTreeMap<String, Tensor>) {
        for (name, tensor) in tensors {
            let array = Array { dims: tensor.dims().to_vec(), data: Data::Live(tensor.clone()) };
            self.arrays.insert(format!("{prefix}/{name}"), array);
        }
    }

    /// The tensors under `prefix`.
    ///
    /// # Errors
    /// One was put in that is not f32.
    pub fn tensors(&self, prefix: &str) -> Result<BTreeMap<String, Tensor>, TrainError> {
        let of_prefix = self.under(prefix);
        let tensor = |(name, array): (&str, &Array)| Ok((name.to_owned(), array.tensor()?));
        of_prefix.map(tensor).collect()
    }

    /// Keeps the values of trained variables under `prefix`.
    pub fn put_vars(&mut self, prefix: &str, vars: &BTreeMap<String, Var>) {
        self.put_tensors(prefix, &vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect());
    }

    /// The same with values of its own in the memory of this process: what it was made from may change.
    ///
    /// # Errors
    /// A tensor is not f32.
    pub(crate) fn detached(self) -> Result<Self, TrainError> {
        let detached = |(name, Array { dims, data }): (String, Array)| {
            let data = match data {
                Data::Live(tensor) => Data::Held(Arc::new(slices::read(&tensor, <[f32]>::to_vec)?)),
                held @ Data::Held(_) => held,
            };
            Ok((name, Array { dims, data }))
        };
        let arrays = self.arrays.into_iter().map(detached).collect::<Result<_, TrainError>>()?;
        Ok(Self { values: self.values, arrays })
    }

    /// Sets trained variables to the values under `prefix`.
    ///
    /// # Errors
    /// They are not those that were put in: another name or shape.
    pub fn restore_vars(&self, prefix: &str, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        if self.under(prefix).count() != vars.len() {
            let message = format!("holds {} tensors; this model trains {}", self.under(prefix).count(), vars.len());
            return Err(misfit(prefix, message));
        }
        for (name, var) in vars {
            let array = self.array(prefix, name, var.dims())?;
            array.read(|from| slices::change(var, |to| to.copy_from_slice(from)))??;
        }
        Ok(())
    }

    /// Keeps f32 values of the shape `dims` without copying them.
    pub(crate) fn put_shared(&mut self, prefix: &str, name: &str, dims: &[usize], values: Arc<Vec<f32>>) {
        self.arrays.insert(format!("{prefix}/{name}"), Array { dims: dims.to_vec(), data: Data::Held(values) });
    }

    /// All values under `prefix`, by name, with their shapes.
    pub(crate) fn shared(&self, prefix: &str) -> Result<SharedArrays, TrainError> {
        let held = |(name, array): (&str, &Array)| {
            let values = match &array.data {
                Data::Held(values) => values.clone(),
                Data::Live(tensor) => Arc::new(slices::read(tensor, <[f32]>::to_vec)?),
            };
            Ok((name.to_owned(), (array.dims.clone(), values)))
        };
        self.under(prefix).map(held).collect()
    }

    /// The state of a whole model, of whose adapters each of `ranks` holds a part: all come here, and the first gets it.
    ///
    /// # Errors
    /// A rank has failed or is elsewhere.
    pub(crate) fn whole(self, ranks: &Ranks) -> Result<Self, TrainError> {
        self.with_parts(ranks, |tensor, axis| {
            let whole = ranks.whole_of(tensor, axis)?;
            Ok(if ranks.is_first() { whole } else { tensor.clone() })
        })
    }

    /// Of the state of a whole model what one of `ranks` holds.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn part(&self, ranks: &Ranks) -> Result<Self, TrainError> {
        self.clone().with_parts(ranks, |tensor, axis| Ok(ranks.part_of(tensor, axis)?))
    }

    /// The state with something else in the place of what ranks hold in parts.
    fn with_parts(
        self,
        ranks: &Ranks,
        other: impl Fn(&Tensor, usize) -> Result<Tensor, TrainError>,
    ) -> Result<Self, TrainError> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        let renewed = |(name, array): (String, Array)| {
            let Some(axis) = Shard::adapter_axis(&name) else { return Ok((name, array)) };
            let renewed = other(&array.tensor()?, axis)?;
            Ok((name, Array { dims: renewed.dims().to_vec(), data: Data::Live(renewed) }))
        };
        let arrays = self.arrays.into_iter().map(renewed).collect::<Result<_, TrainError>>()?;
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

/// Values by name, with their shapes.
pub(crate) type SharedArrays = BTreeMap<String, (Vec<usize>, Arc<Vec<f32>>)>;

/// A state that is whole and yet not one of this training.
pub(crate) fn misfit(name: &str, what: impl std::fmt::Display) -> TrainError {
    TrainError::Data(format!("checkpoint: `{name}` {what}; run the stage anew with `--from`"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_comes_out() {
        let mut state = State::default();
        state.put("loss", &0.1f64).unwrap();
        state.put("pending", &vec![vec![1u32, 2], vec![]]).unwrap();
        assert_eq!(state.get::<f64>("loss").unwrap(), 0.1);
        assert_eq!(state.get::<Vec<Vec<u32>>>("pending").unwrap(), [vec![1, 2], vec![]]);
        let missing = state.get::<u64>("step").unwrap_err().to_string();
        assert_eq!(missing, "checkpoint: `step` is missing; run the stage anew with `--from`");
    }

    #[test]
    fn variables_of_another_shape_are_refused_and_one_prefix_is_not_part_of_another() {
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
