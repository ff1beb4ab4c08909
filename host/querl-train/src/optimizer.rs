//! Gradients of an optimizer step, their clipping, and AdamW.
//!
//! candle-nn's AdamW is not used: its moments cannot be reached, it decays norms and biases with the rest, and a step over half
//! a billion parameters takes it seconds.

use crate::TrainError;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use std::collections::BTreeMap;

/// Gradients by variable name, summed over micro-batches.
#[derive(Debug, Clone, Default)]
pub struct Gradients {
    sums: BTreeMap<String, Vec<f32>>,
}

impl Gradients {
    /// Adds what one backward pass found for `vars`.
    ///
    /// # Errors
    /// A gradient cannot be read.
    pub fn add(&mut self, store: &GradStore, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        for (name, var) in vars {
            let Some(gradient) = store.get(var) else { continue };
            let values: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
            match self.sums.get_mut(name) {
                Some(sum) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
                None => drop(self.sums.insert(name.clone(), values)),
            }
        }
        Ok(())
    }

    /// Global norm over all gradients.
    pub fn norm(&self) -> f64 {
        self.sums.values().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt()
    }

    /// Scales down to a global norm of at most `max_norm`. Returns the norm before.
    ///
    /// Source: torch `clip_grad_norm_`.
    pub fn clip(&mut self, max_norm: f64) -> f64 {
        let norm = self.norm();
        let scale = (max_norm / (norm + 1e-6)).min(1.0) as f32;
        if scale < 1.0 {
            self.sums.values_mut().flatten().for_each(|g| *g *= scale);
        }
        norm
    }

    /// One variable's gradient, row-major.
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.sums.get(name).map(Vec::as_slice)
    }
}

/// What AdamW needs besides the learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices; vectors (norms, biases) are not decayed.
    pub weight_decay: f64,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

/// AdamW over named variables, in place.
///
/// Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; torch `AdamW`.
#[derive(Debug)]
pub struct AdamW {
    settings: AdamWSettings,
    n_steps: i32,
    moments: BTreeMap<String, Moments>,
}

#[derive(Debug, Default)]
struct Moments {
    first: Vec<f32>,
    second: Vec<f32>,
}

impl AdamW {
    /// An optimizer that has taken no step.
    pub fn new(settings: AdamWSettings) -> Self {
        Self { settings, n_steps: 0, moments: BTreeMap::new() }
    }

    /// Takes one step. A variable without a gradient is left as it is.
    ///
    /// # Errors
    /// A variable cannot be written.
    pub fn step(
        &mut self,
        vars: &BTreeMap<String, Var>,
        gradients: &Gradients,
        learning_rate: f64,
    ) -> Result<(), TrainError> {
        self.n_steps += 1;
        for (name, var) in vars {
            let Some(gradient) = gradients.get(name) else { continue };
            let mut values: Vec<f32> = var.as_tensor().flatten_all()?.to_vec1()?;
            let is_matrix = var.rank() >= 2;
            self.update(name, &mut values, gradient, learning_rate, is_matrix);
            var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
        }
        Ok(())
    }

    fn update(&mut self, name: &str, values: &mut [f32], gradient: &[f32], learning_rate: f64, decays: bool) {
        let AdamWSettings { beta1, beta2, eps, weight_decay } = self.settings;
        let moments = self.moments.entry(name.to_owned()).or_default();
        moments.first.resize(values.len(), 0.0);
        moments.second.resize(values.len(), 0.0);
        let keep = (1.0 - if decays { learning_rate * weight_decay } else { 0.0 }) as f32;
        let step_size = (learning_rate / (1.0 - beta1.powi(self.n_steps))) as f32;
        let correction = (1.0 - beta2.powi(self.n_steps)).sqrt() as f32;
        let (beta1, beta2, eps) = (beta1 as f32, beta2 as f32, eps as f32);
        let state = moments.first.iter_mut().zip(&mut moments.second);
        for ((value, gradient), (first, second)) in values.iter_mut().zip(gradient).zip(state) {
            *first = beta1 * *first + (1.0 - beta1) * gradient;
            *second = beta2 * *second + (1.0 - beta2) * gradient * gradient;
            *value = *value * keep - step_size * *first / (second.sqrt() / correction + eps);
        }
    }
}
