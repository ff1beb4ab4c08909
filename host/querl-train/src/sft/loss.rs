//! The loss of some rows and its gradient, over as many passes as memory asks for.

use super::SftTask;
use crate::fit::{StepLoss, dropout};
use crate::policy::{Example, Policy, Training, kept, passes, share};
use crate::{Gradients, TrainError};
use candle_core::Tensor;
use querl_model::{LoraAdapter, Ranks, backward};

/// Loss and gradients of one optimizer step, of which each rank computes its rows. Each pass is weighted by its tokens: the sum
/// does not depend on the split.
pub(super) fn learn(task: &SftTask<'_>, rows: &[&Example], step: u64) -> Result<StepLoss, TrainError> {
    #[cfg(test)]
    crate::fault::at(step, "pass")?;
    let (ranks, n_tokens) = (&task.mesh.data, n_answer_tokens(rows));
    let mine: Vec<&Example> = share(rows, ranks).into_iter().map(|index| rows[index]).collect();
    let recompute = kept(task.gradient_checkpointing);
    let dropout = task.policy.adapter.and_then(|_| dropout(task.config.lora_dropout, task.seed, step, ranks));
    let training = Training { dropout, recompute: Some(&recompute) };
    let (mut gradients, mut shares) = (Gradients::default(), Vec::new());
    for pass in passes(&mine, task.tokens_per_pass) {
        let rows: Vec<&Example> = pass.into_iter().map(|index| mine[index]).collect();
        let share = (negative_logprob(task.policy, &rows, training)? / n_tokens as f64)?;
        gradients.add(&backward(&share, Some(&recompute))?, task.policy.vars())?;
        shares.push(share.detach());
    }
    let loss = over_ranks(ranks, summed(&shares)?)?;
    gradients.sum_over(task.mesh, task.policy.vars())?;
    Ok(StepLoss { loss, n_tokens, gradients })
}

/// The sum of scalars, in their order. Read when all passes are on their way: a card is waited for once.
fn summed(shares: &[Tensor]) -> Result<f64, TrainError> {
    let mut sum = 0.0;
    for share in shares {
        sum += f64::from(share.to_scalar::<f32>()?);
    }
    Ok(sum)
}

/// The sum of what the ranks found, in their order.
fn over_ranks(ranks: &Ranks, mine: f64) -> Result<f64, TrainError> {
    Ok(ranks.all_gather(mine)?.iter().map(|of_rank| **of_rank).sum())
}

fn n_answer_tokens(rows: &[&Example]) -> usize {
    rows.iter().map(|row| row.response.len()).sum()
}

/// Mean loss per answer token on the validation split, without dropout.
#[cfg_attr(not(test), allow(unused_variables))] // a test names the step that lacks memory
pub(super) fn evaluate(task: &SftTask<'_>, step: u64) -> Result<f64, TrainError> {
    #[cfg(test)]
    crate::fault::at(step, "evaluation")?;
    let view = task.policy.adapter.map(LoraAdapter::without_gradient);
    let policy = Policy { decoder: task.policy.decoder, adapter: view.as_ref() };
    let (ranks, rows): (_, Vec<&Example>) = (&task.mesh.data, task.val.iter().collect());
    let mine: Vec<&Example> = share(&rows, ranks).into_iter().map(|index| rows[index]).collect();
    let mut sums = Vec::new();
    for pass in passes(&mine, task.tokens_per_pass) {
        let rows: Vec<&Example> = pass.into_iter().map(|index| mine[index]).collect();
        sums.push(negative_logprob(policy, &rows, Training::default())?.detach());
    }
    Ok(over_ranks(ranks, summed(&sums)?)? / n_answer_tokens(&rows).max(1) as f64)
}

/// Negative log-probability of the answers, summed over tokens.
fn negative_logprob(policy: Policy<'_>, rows: &[&Example], training: Training<'_>) -> Result<Tensor, TrainError> {
    Ok(policy.training_pass(rows, 1.0, training)?.logprobs.narrow(1, 0, 1)?.sum_all()?.neg()?)
}
