//! What an optimizer step does on a card: the norm of all gradients and one launch for all trained tensors.

use crate::checkpoint::{State, misfit};
use crate::{Gradients, TrainError};
use candle_core::{DType, Tensor, Var};
use querl_model::device::{AdamLoan, AdamWStep, Gpu, GradientNorm, Loan, whole};
use std::collections::BTreeMap;

/// Norm before and factor after clipping on the host, and both on the card.
pub(crate) type NormOnCard = ((f32, f32), GradientNorm);

/// Global norm before and factor after clipping, on the host and on the card. `None` where the gradients are not on a card; the
/// host waits for them.
pub(crate) fn gradient_norm<'a>(
    gradients: impl Iterator<Item = &'a Tensor>,
    scale: f32,
    max_norm: Option<f64>,
) -> Result<Option<NormOnCard>, TrainError> {
    let gradients: Vec<Tensor> =
        gradients.filter(|gradient| !gradient.device().is_cpu()).map(whole).collect::<Result<_, _>>()?;
    let Some(first) = gradients.first() else { return Ok(None) };
    let gpu = Gpu::of(first.device())?;
    let loans: Vec<Loan<'_>> = gradients.iter().map(Loan::of).collect::<Result<_, _>>()?;
    let views: Vec<_> = loans.iter().map(|loan| loan.as_view()).collect();
    let norm = gpu.gradient_norm(&views, scale, max_norm.map(|norm| norm as f32))?;
    Ok(Some((norm.read(&gpu)?, norm)))
}

/// A norm and a factor that the host has found, where the gradients are on a card.
pub(crate) fn known_norm<'a>(
    mut gradients: impl Iterator<Item = &'a Tensor>,
    norm: f64,
    factor: f32,
) -> Result<Option<GradientNorm>, TrainError> {
    let first = gradients.find(|gradient| !gradient.device().is_cpu());
    let known = first.map(|first| Gpu::of(first.device())?.known_norm(norm as f32, factor));
    Ok(known.transpose()?)
}

/// First and second moments by the variable's name, on its card.
#[derive(Debug, Default)]
pub(crate) struct CardMoments(BTreeMap<String, [Tensor; 2]>);

impl CardMoments {
    /// Keeps them as the host's are kept: a run may go on elsewhere.
    pub(crate) fn save(&self, prefix: &str, state: &mut State) {
        for (index, moment) in ["first", "second"].into_iter().enumerate() {
            let tensors = self.0.iter().map(|(name, moments)| (name.clone(), moments[index].clone())).collect();
            state.put_tensors(&format!("{prefix}.{moment}"), &tensors);
        }
    }

    /// Takes the host's values to the card of their variable.
    pub(crate) fn put(&mut self, name: &str, var: &Var, first: &[f32], second: &[f32]) -> Result<(), TrainError> {
        let tensor = |values: &[f32]| Tensor::from_slice(values, var.shape(), var.device());
        self.0.insert(name.to_owned(), [tensor(first)?, tensor(second)?]);
        Ok(())
    }
}

/// Takes one step. `rules`: for vectors and for matrices, what is left of a value and the numbers of the step.
pub(crate) fn step(
    moments: &mut CardMoments,
    vars: &BTreeMap<String, Var>,
    gradients: &Gradients,
    rules: [(f32, AdamWStep); 2],
) -> Result<(), TrainError> {
    let mut all = Vec::new();
    for (name, var) in vars {
        let Some((gradient, _)) = gradients.unscaled(name) else { continue };
        if !moments.0.contains_key(name) {
            let zeros = || Tensor::zeros(var.shape(), DType::F32, var.device());
            moments.0.insert(name.clone(), [zeros()?, zeros()?]);
        }
        all.push((name, var, whole(gradient)?));
    }
    let Some((_, first, _)) = all.first() else { return Ok(()) };
    let (gpu, mut tensors) = (Gpu::of(first.device())?, Vec::new());
    for (name, var, gradient) in &all {
        let [first, second] = &moments.0[*name];
        if first.dims() != var.dims() {
            let message = format!("has shape {:?}; the variable has {:?}", first.dims(), var.dims());
            return Err(misfit(name, message));
        }
        let (values, gradient) = (Loan::of(var.as_tensor())?, Loan::of(gradient)?);
        let keep = rules[usize::from(var.rank() >= 2)].0;
        tensors.push(AdamLoan { values, gradient, first: Loan::of(first)?, second: Loan::of(second)?, keep });
    }
    Ok(gpu.adamw_of_loans(&tensors, rules[0].1, gradients.on_card())?)
}
