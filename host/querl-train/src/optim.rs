//! The optimizer: AdamW in place, on the CPU or an accelerator, and learning-rate schedules.
//!
//! candle-nn's AdamW is not used: its moments are private, it decays norms and biases too, and a step over half a billion
//! parameters takes seconds.

use crate::checkpoint::{State, misfit};
use crate::gradients::{CHUNK, Gradients};
use crate::{TrainError, tensor_data};
use candle_core::{DType, Tensor, Var};
use querl_core::config::LrScheduler;
use querl_model::{AdamWStep, AdamWTensors, accelerator_of};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Hyperparameters of AdamW other than the learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Term added to the square root of the second moment for numerical stability.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors (norms, biases) are not decayed.
    pub weight_decay: f64,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

/// AdamW optimizer over named variables, which it updates in place.
///
/// Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; torch `AdamW`.
#[derive(Debug)]
pub struct AdamW {
    settings: AdamWSettings,
    n_steps: i32,
    moments: BTreeMap<String, Moments>,
    /// AdamW moments of variables on an accelerator.
    device_moments: DeviceMoments,
}

/// AdamW moments of a variable on the CPU. Shared with a checkpoint while it is written, and copied only if a step changes them in the
/// meantime.
#[derive(Debug, Clone)]
struct Moments {
    dims: Vec<usize>,
    first: Arc<Vec<f32>>,
    second: Arc<Vec<f32>>,
}

impl Moments {
    fn zeros(dims: &[usize]) -> Self {
        let zeros = || Arc::new(vec![0.0; dims.iter().product()]);
        Self { dims: dims.to_vec(), first: zeros(), second: zeros() }
    }
}

impl AdamW {
    /// Creates an optimizer that has taken no step.
    pub fn new(settings: AdamWSettings) -> Self {
        Self { settings, n_steps: 0, moments: BTreeMap::new(), device_moments: DeviceMoments::default() }
    }

    /// Takes one optimizer step. A variable without a gradient is unchanged.
    ///
    /// # Errors
    /// A variable or its gradient is not f32, or its shape has changed.
    pub fn step(
        &mut self,
        vars: &BTreeMap<String, Var>,
        gradients: &Gradients,
        learning_rate: f64,
    ) -> Result<(), TrainError> {
        self.n_steps += 1;
        if vars.values().any(|var| !var.device().is_cpu()) {
            let rules = [false, true].map(|decays| self.rule(learning_rate, 1.0, decays).on_device());
            let taken = self.device_moments.step(vars, gradients, rules);
            // After an out-of-memory error no kernel was launched: the step was not taken.
            return taken.inspect_err(|_| self.n_steps -= 1);
        }
        for (name, var) in vars {
            let Some((gradient, scale)) = gradients.unscaled(name) else { continue };
            let rule = self.rule(learning_rate, scale, var.rank() >= 2);
            let moments = self.moments.entry(name.clone()).or_insert_with(|| Moments::zeros(var.dims()));
            if moments.dims != var.dims() {
                let message = format!("has shape {:?}; the variable has {:?}", moments.dims, var.dims());
                return Err(misfit(name, message));
            }
            let (first, second) = (Arc::make_mut(&mut moments.first), Arc::make_mut(&mut moments.second));
            tensor_data::read(gradient, |gradient| {
                tensor_data::modify(var, |values| rule.apply(values, gradient, first, second))
            })??;
        }
        Ok(())
    }

    /// Saves moments and the number of steps under `prefix`.
    ///
    /// # Errors
    /// Never in practice: only a number without a JSON form is an error.
    pub fn save(&self, prefix: &str, state: &mut State) -> Result<(), TrainError> {
        state.put(&format!("{prefix}.n_steps"), &self.n_steps)?;
        for (name, moments) in &self.moments {
            state.put_shared(&format!("{prefix}.first"), name, &moments.dims, moments.first.clone());
            state.put_shared(&format!("{prefix}.second"), name, &moments.dims, moments.second.clone());
        }
        self.device_moments.save(prefix, state);
        Ok(())
    }

    /// Restores the moments and step count that [`save`](Self::save) stored under `prefix`. Variables that had no gradient have no moments.
    ///
    /// # Errors
    /// The saved optimizer state is missing or incomplete, or its variables have other names or shapes than `vars`.
    pub fn restore(&mut self, prefix: &str, state: &State, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        let n_steps = state.get(&format!("{prefix}.n_steps"))?;
        let mut seconds = state.shared(&format!("{prefix}.second"))?;
        let mut moments = BTreeMap::new();
        for (name, (dims, first)) in state.shared(&format!("{prefix}.first"))? {
            let var = vars.get(&name).ok_or_else(|| misfit(&name, "is not trained here"))?;
            let (second_dims, second) =
                seconds.remove(&name).ok_or_else(|| misfit(&name, "has only one of its two moments"))?;
            if dims != var.dims() || second_dims != dims {
                let shapes = format!("has moments of shapes {dims:?} and {second_dims:?}");
                return Err(misfit(&name, format!("{shapes}; the variable has {:?}", var.dims())));
            }
            moments.insert(name, Moments { dims, first, second });
        }
        if let Some(name) = seconds.keys().next() {
            return Err(misfit(name, "has only one of its two moments"));
        }
        (self.n_steps, self.moments) = (n_steps, moments);
        self.moments_to_device(vars)?;
        Ok(())
    }

    /// Moves moments to the accelerator of their variable.
    fn moments_to_device(&mut self, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        self.device_moments = DeviceMoments::default();
        for (name, var) in vars.iter().filter(|(_, var)| !var.device().is_cpu()) {
            if let Some(Moments { first, second, .. }) = self.moments.remove(name) {
                self.device_moments.put(name, var, &first, &second)?;
            }
        }
        Ok(())
    }

    fn rule(&self, learning_rate: f64, scale: f32, decays: bool) -> Rule {
        let AdamWSettings { beta1, beta2, eps, weight_decay } = self.settings;
        Rule {
            scale,
            keep: (1.0 - if decays { learning_rate * weight_decay } else { 0.0 }) as f32,
            step_size: (learning_rate / (1.0 - beta1.powi(self.n_steps))) as f32,
            correction: (1.0 / (1.0 - beta2.powi(self.n_steps)).sqrt()) as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: eps as f32,
        }
    }
}

/// The coefficients of one step for one variable.
#[derive(Clone, Copy)]
struct Rule {
    scale: f32,
    /// Weight-decay multiplier `1 - lr * weight_decay`; 1 for vectors.
    keep: f32,
    step_size: f32,
    /// Bias correction, a factor on the square root of the second moment.
    correction: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
}

impl Rule {
    /// Weight-decay multiplier, and the coefficients of the step.
    fn on_device(self) -> (f32, AdamWStep) {
        let Self { keep, step_size, correction, beta1, beta2, eps, .. } = self;
        (keep, AdamWStep { step_size, correction, beta1, beta2, eps })
    }

    /// One pass over all values, because the optimizer step is limited by memory bandwidth.
    fn apply(self, values: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32]) {
        let moments = first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK));
        let chunks = values.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).zip(moments);
        chunks.for_each(|((values, gradient), (first, second))| self.apply_chunk(values, gradient, first, second));
    }

    fn apply_chunk(self, values: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32]) {
        let moments = first.iter_mut().zip(second);
        for ((value, gradient), (first, second)) in values.iter_mut().zip(gradient).zip(moments) {
            let gradient = gradient * self.scale;
            *first = self.beta1 * *first + (1.0 - self.beta1) * gradient;
            *second = self.beta2 * *second + (1.0 - self.beta2) * gradient * gradient;
            *value = *value * self.keep - self.step_size * *first / (second.sqrt() * self.correction + self.eps);
        }
    }
}

/// First and second moments by the variable's name, on its device.
#[derive(Debug, Default)]
struct DeviceMoments(BTreeMap<String, [Tensor; 2]>);

impl DeviceMoments {
    /// Saves the moments in the CPU's format, so that a run can be resumed on another device.
    fn save(&self, prefix: &str, state: &mut State) {
        for (index, moment) in ["first", "second"].into_iter().enumerate() {
            let tensors = self.0.iter().map(|(name, moments)| (name.clone(), moments[index].clone())).collect();
            state.put_tensors(&format!("{prefix}.{moment}"), &tensors);
        }
    }

    /// Copies moments to the device of their variable.
    fn put(&mut self, name: &str, var: &Var, first: &[f32], second: &[f32]) -> Result<(), TrainError> {
        let tensor = |values: &[f32]| Tensor::from_slice(values, var.shape(), var.device());
        self.0.insert(name.to_owned(), [tensor(first)?, tensor(second)?]);
        Ok(())
    }

    /// Takes one step. `rules`: weight-decay multiplier and coefficients of vectors, and of matrices.
    fn step(
        &mut self,
        vars: &BTreeMap<String, Var>,
        gradients: &Gradients,
        rules: [(f32, AdamWStep); 2],
    ) -> Result<(), TrainError> {
        let with_gradient = || vars.iter().filter_map(|(name, var)| Some((name, var, gradients.unscaled(name)?.0)));
        for (name, var, _) in with_gradient() {
            if !self.0.contains_key(name) {
                let zeros = || Tensor::zeros(var.shape(), DType::F32, var.device());
                self.0.insert(name.clone(), [zeros()?, zeros()?]);
            }
        }
        let mut tensors = Vec::new();
        for (name, var, gradient) in with_gradient() {
            let [first, second] = &self.0[name];
            if first.dims() != var.dims() {
                let message = format!("has shape {:?}; the variable has {:?}", first.dims(), var.dims());
                return Err(misfit(name, message));
            }
            let decay = rules[usize::from(var.rank() >= 2)].0;
            tensors.push(AdamWTensors { values: var.as_tensor(), gradient, first, second, decay });
        }
        let accelerator = tensors.first().map(|first| accelerator_of(first.values)).transpose()?.flatten();
        match accelerator {
            Some(device) => Ok(device.adamw(&tensors, rules[0].1, gradients.on_device())?),
            None => Ok(()),
        }
    }
}

/// Learning-rate factor of optimizer step `step` (from 0) of `n_steps`: rises linearly over `n_warmup` steps, then falls to 0 along half a
/// cosine or linearly, or stays 1, by `kind`.
///
/// Source: transformers `get_{cosine,linear,constant}_schedule_with_warmup`.
pub fn lr_factor(kind: LrScheduler, step: u64, n_warmup: u64, n_steps: u64) -> f64 {
    if step < n_warmup {
        return step as f64 / n_warmup as f64;
    }
    let n_after = n_steps.saturating_sub(n_warmup).max(1) as f64;
    match kind {
        LrScheduler::Cosine => {
            let progress = (step - n_warmup) as f64 / n_after;
            (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
        }
        LrScheduler::Linear => n_steps.saturating_sub(step) as f64 / n_after,
        LrScheduler::Constant => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use serde_json::Value;

    fn step(optimizer: &mut AdamW, vars: &BTreeMap<String, Var>) {
        let loss = vars["w"].as_tensor().sqr().unwrap().sum_all().unwrap();
        let mut gradients = Gradients::default();
        gradients.add(&loss.backward().unwrap(), vars).unwrap();
        optimizer.step(vars, &gradients, 0.1).unwrap();
    }

    fn vars() -> BTreeMap<String, Var> {
        BTreeMap::from([("w".to_owned(), Var::from_vec(vec![1f32, -2.0, 0.5, 3.0], (2, 2), &Device::Cpu).unwrap())])
    }

    #[test]
    fn a_restored_optimizer_takes_the_same_steps() {
        let settings = AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() };
        let (mut through, through_vars) = (AdamW::new(settings), vars());
        (0..6).for_each(|_| step(&mut through, &through_vars));

        let (mut before, before_vars) = (AdamW::new(settings), vars());
        (0..3).for_each(|_| step(&mut before, &before_vars));
        let mut state = State::default();
        before.save("policy", &mut state).unwrap();
        state.put_vars("vars", &before_vars);
        let (mut after, after_vars) = (AdamW::new(settings), vars());
        after.restore("policy", &state, &after_vars).unwrap();
        state.restore_vars("vars", &after_vars).unwrap();
        (0..3).for_each(|_| step(&mut after, &after_vars));
        let bits = |vars: &BTreeMap<String, Var>| -> Vec<u32> {
            vars["w"].flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
        };
        assert_eq!(bits(&after_vars), bits(&through_vars));
    }

    #[test]
    fn moments_of_other_variables_are_rejected() {
        let (mut optimizer, vars) = (AdamW::new(AdamWSettings::default()), vars());
        step(&mut optimizer, &vars);
        let mut state = State::default();
        optimizer.save("o", &mut state).unwrap();
        let zeros = |name: &str, n: usize| {
            BTreeMap::from([(name.to_owned(), Var::zeros((n, 2), DType::F32, &Device::Cpu).unwrap())])
        };
        let mut error = |vars| optimizer.restore("o", &state, &vars).unwrap_err().to_string();
        let expected = "checkpoint: `w` has moments of shapes [2, 2] and [2, 2]; the variable has [3, 2]; rerun the stage \
                        with `--from`";
        assert_eq!(error(zeros("w", 3)), expected);
        assert!(error(zeros("v", 2)).starts_with("checkpoint: `w` is not trained here"));
        state.put_shared("o.second", "lone", &[1], Arc::new(vec![0.0]));
        let message = optimizer.restore("o", &state, &vars).unwrap_err().to_string();
        assert!(message.starts_with("checkpoint: `lone` has only one of its two moments"), "{message}");
    }

    #[test]
    fn moments_in_a_state_do_not_change_with_later_steps() {
        let (mut optimizer, vars) = (AdamW::new(AdamWSettings::default()), vars());
        step(&mut optimizer, &vars);
        let mut state = State::default();
        optimizer.save("o", &mut state).unwrap();
        let before = state.shared("o.first").unwrap()["w"].1.to_vec();
        step(&mut optimizer, &vars);
        assert_eq!(*state.shared("o.first").unwrap()["w"].1, before);
        assert_ne!(*optimizer.moments["w"].first, before);
    }

    /// Golden values: `tests/reference/sft.py`.
    #[test]
    fn schedules_are_those_of_transformers() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/sft.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let cases = golden["schedules"].as_object().unwrap();
        assert_eq!(cases.len(), 9);
        for (name, case) in cases {
            let kind: LrScheduler = serde_json::from_value(case["kind"].clone()).unwrap();
            let (n_warmup, n_steps) = (case["n_warmup"].as_u64().unwrap(), case["n_steps"].as_u64().unwrap());
            for (step, expected) in case["factors"].as_array().unwrap().iter().enumerate() {
                let found = lr_factor(kind, step as u64, n_warmup, n_steps);
                assert!((found - expected.as_f64().unwrap()).abs() < 1e-8, "{name}, step {step}: {found}");
            }
        }
    }
}
