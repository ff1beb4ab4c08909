//! The record of a step (`rl.record = "full"`): the values per token from which its update was computed. The script
//! `tests/reference/recompute_step.py` recomputes the update from it.
//!
//! Each step has a file of its own, `steps/step-NNNNNN.safetensors`, which is written atomically before the checkpoint of the step. A step
//! that is repeated after a kill replaces its file, and resuming removes the files of steps later than the checkpoint.

use super::RlTask;
use super::experience::{Experience, RewardShaping};
use super::losses::Rows;
use super::metrics::UpdateMetrics;
use crate::TrainError;
use candle_core::{Device, Tensor, WithDType};
use querl_model::save_tensors;
use std::collections::BTreeMap;
use std::io::ErrorKind;

/// Folder of the records in the stage's folder.
const STEPS: &str = "steps";

/// Writes the record of a step after its updates. Only the first rank writes.
pub(super) fn write(
    task: &RlTask<'_>,
    step: u64,
    experience: &Experience<'_>,
    shaping: &RewardShaping,
    updates: &UpdateMetrics,
) -> Result<(), TrainError> {
    if !task.mesh.all.is_first() {
        return Ok(());
    }
    let path = task.output_dir.join(STEPS).join(format!("step-{step:06}.safetensors"));
    Ok(save_tensors(&path, &tensors(experience, shaping, updates)?)?)
}

/// Removes the records of steps after `step`, before these steps are repeated.
pub(super) fn remove_after(task: &RlTask<'_>, step: u64) -> Result<(), TrainError> {
    let folder = task.output_dir.join(STEPS);
    let io = |source| TrainError::Io { path: folder.clone(), source };
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(io)?,
    };
    for entry in entries {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if step_of(name).is_some_and(|of_file| of_file > step) {
            std::fs::remove_file(&path).map_err(io)?;
        }
    }
    Ok(())
}

fn step_of(file: &str) -> Option<u64> {
    file.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
}

/// The tensors of a record: B responses in the order of the batch, with N tokens in total, concatenated. `docs/files.md` describes the
/// names.
fn tensors(
    experience: &Experience<'_>,
    shaping: &RewardShaping,
    updates: &UpdateMetrics,
) -> Result<BTreeMap<String, Tensor>, TrainError> {
    let rollouts = experience.rollouts;
    let tokens: Vec<u32> = rollouts.iter().flat_map(|rollout| rollout.example.response.iter().copied()).collect();
    let sampled: Vec<f32> = rollouts.iter().flat_map(|rollout| rollout.behaviour_logprobs.iter().copied()).collect();
    let ids: Vec<&str> = rollouts.iter().map(|rollout| rollout.record.episode.id.as_str()).collect();
    let mut tensors = BTreeMap::new();
    let mut put = |name: &str, tensor: Tensor| drop(tensors.insert(name.to_owned(), tensor));
    // (B)
    put("response_lengths", vector(rollouts.iter().map(|rollout| rollout.example.response.len() as u32).collect())?);
    put("rows", vector(rollouts.iter().map(|rollout| rollout.group as u32).collect())?);
    put("scores", vector(rollouts.iter().map(|rollout| rollout.score).collect())?);
    put("truncated", vector(rollouts.iter().map(|rollout| u8::from(rollout.truncated)).collect())?);
    put("episode_ids", vector(ids.join("\n").into_bytes())?);
    // (N)
    put("token_ids", vector(tokens)?);
    put("rollout_logprobs", vector(sampled)?);
    put("logprobs", by_token(&experience.old_logprobs)?);
    put("ref_logprobs", by_token(&experience.ref_logprobs)?);
    put("rewards", by_token(&experience.token_rewards)?);
    put("advantages", by_token(&experience.advantages)?);
    if let Some(critic) = &experience.critic {
        put("values", by_token(&critic.values)?);
        put("returns", by_token(&critic.returns)?);
    }
    // (1)
    put("kl_coef", vector(vec![experience.kl_coef])?);
    put("score_deviation", vector(vec![shaping.score_moments.deviation()])?);
    // The first optimizer step: its losses are those of the policy and critic with which the batch was computed.
    put("first_mini_batch", vector(updates.first_mini_batch.iter().map(|row| *row as u32).collect())?);
    let first = updates.policy.first.iter().chain(&updates.critic.first);
    for (name, value) in first.filter(|(name, _)| name.ends_with("_loss")) {
        put(&format!("first/{name}"), vector(vec![*value])?);
    }
    Ok(tensors)
}

fn by_token(rows: &Rows) -> Result<Tensor, TrainError> {
    vector(rows.concat())
}

fn vector<T: WithDType>(values: Vec<T>) -> Result<Tensor, TrainError> {
    let n = values.len();
    Ok(Tensor::from_vec(values, n, &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::step_of;

    #[test]
    fn only_records_of_steps_have_a_step() {
        assert_eq!(step_of("step-000012.safetensors"), Some(12));
        assert_eq!(step_of("step-1000000.safetensors"), Some(1_000_000));
        assert_eq!([step_of("step-12.state"), step_of("notes.safetensors"), step_of("")], [None; 3]);
    }
}
