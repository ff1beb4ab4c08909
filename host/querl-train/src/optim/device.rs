//! Optimizer steps on an accelerator: the norm of all gradients, and one step for all variables.

use crate::checkpoint::{State, misfit};
use crate::{Gradients, TrainError};
use candle_core::{DType, Tensor, Var};
use querl_model::{AdamWStep, AdamWTensors, GradientNorm, accelerator_of};
use std::collections::BTreeMap;

/// Global norm and scale of clipping; waits for the device. `None` where the gradients are on the CPU.
pub(super) fn gradient_norm<'a>(
    gradients: impl Iterator<Item = &'a Tensor>,
    scale: f32,
    max_norm: Option<f64>,
) -> Result<Option<GradientNorm>, TrainError> {
    let gradients: Vec<Tensor> = gradients.filter(|gradient| !gradient.device().is_cpu()).cloned().collect();
    let Some(first) = gradients.first() else { return Ok(None) };
    let accelerator = accelerator_of(first)?;
    let norm =
        accelerator.map(|device| device.gradient_norm(&gradients, scale, max_norm.map(|norm| norm as f32))).transpose();
    Ok(norm?)
}

/// The same with values that the host has computed.
pub(super) fn known_norm<'a>(
    mut gradients: impl Iterator<Item = &'a Tensor>,
    norm: f64,
    scale: f32,
) -> Result<Option<GradientNorm>, TrainError> {
    let Some(first) = gradients.find(|gradient| !gradient.device().is_cpu()) else { return Ok(None) };
    Ok(accelerator_of(first)?.map(|device| device.known_norm(norm as f32, scale)).transpose()?)
}

/// First and second moments by the variable's name, on its device.
#[derive(Debug, Default)]
pub(super) struct DeviceMoments(BTreeMap<String, [Tensor; 2]>);

impl DeviceMoments {
    /// Saves them in the form of the CPU's: a run may continue on another device.
    pub(super) fn save(&self, prefix: &str, state: &mut State) {
        for (index, moment) in ["first", "second"].into_iter().enumerate() {
            let tensors = self.0.iter().map(|(name, moments)| (name.clone(), moments[index].clone())).collect();
            state.put_tensors(&format!("{prefix}.{moment}"), &tensors);
        }
    }

    /// Copies moments to the device of their variable.
    pub(super) fn put(&mut self, name: &str, var: &Var, first: &[f32], second: &[f32]) -> Result<(), TrainError> {
        let tensor = |values: &[f32]| Tensor::from_slice(values, var.shape(), var.device());
        self.0.insert(name.to_owned(), [tensor(first)?, tensor(second)?]);
        Ok(())
    }

    /// Takes one step. `rules`: weight-decay multiplier and coefficients of vectors, and of matrices.
    pub(super) fn step(
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
