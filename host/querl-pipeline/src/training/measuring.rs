//! Measurements on random models, as jobs.

use super::generator::Lines;
use super::host::StageHost;
use super::{memory, other_outcome};
use crate::device::Place;
use crate::failure::{Stop, ending};
use querl_core::config::RlConfig;
use querl_core::ports::Reporter;
use querl_device::memory::{Asked, Plan, Stage, Types};
use querl_device::{Job, Measured, Measuring, Outcome, Part, Work};
use querl_model::DecoderConfig;

/// Has a measurement done, in a folder that is thrown away.
///
/// # Errors
/// The device cannot be used, the model does not fit it, or the user said stop.
pub fn measure(place: &Place, job: &Job, name: &'static str, reporter: &dyn Reporter) -> anyhow::Result<Measured> {
    let folder = tempfile::tempdir()?;
    let mut job = job.clone();
    let Work::Measure(measuring) = &mut job.work else { return Err(other_outcome()) };
    measuring.work_dir = folder.path().to_owned();
    let stage = stages(measuring).into_iter().next();
    let asked = asked(place, &job, stage);
    let progress = reporter.stage(name);
    let host = StageHost::new(progress.as_ref());
    let done = place.run(&job, &host);
    let explained = |error| match &asked {
        Some(asked) => ending(memory::explain(place.card(), asked, error)),
        None => ending(error),
    };
    match done.map_err(explained)? {
        Outcome::Measured(measured) => Ok(*measured),
        _ => Err(other_outcome()),
    }
}

/// Tokens of a pass, most first: beyond the first a product of matrices is no faster.
const TOKENS_PER_PASS: [usize; 4] = [16_384, 8192, 4096, 2048];

/// What of a card's free memory a plan may take; what is left is for what the plan does not count.
const SHARE_OF_FREE: f64 = 0.97;

/// Sets what of passes was not asked for: the longest that fit the card by the plan, layers computed twice only where nothing
/// else fits. On the processor passes of 8192 tokens.
///
/// # Errors
/// Base and adapters alone do not fit.
pub fn fit(
    place: &Place,
    job: &mut Job,
    tokens_per_pass: Option<usize>,
    checkpointing: Option<bool>,
    reporter: &dyn Reporter,
) -> Result<(), Stop> {
    job.model.tokens_per_pass = tokens_per_pass.unwrap_or(job.model.tokens_per_pass);
    job.model.gradient_checkpointing = checkpointing.unwrap_or(false);
    let Some(free) = place.card().and_then(|used| used.free_bytes) else { return Ok(()) };
    let Work::Measure(measuring) = &job.work else { return Ok(()) };
    let stages = stages(measuring);
    let lengths = tokens_per_pass.map_or(TOKENS_PER_PASS.to_vec(), |n| vec![n]);
    let checkpointing = checkpointing.map_or(vec![false, true], |is_on| vec![is_on]);
    let limit = (free as f64 * SHARE_OF_FREE) as u64;
    for (checkpointing, tokens) in checkpointing.iter().flat_map(|on| lengths.iter().map(move |n| (*on, *n))) {
        (job.model.gradient_checkpointing, job.model.tokens_per_pass) = (checkpointing, tokens);
        let most = stages.iter().filter_map(|stage| asked(place, job, Some(stage.clone())));
        if most.map(|asked| Plan::new(&asked).total()).max().unwrap_or(0) <= limit {
            return Ok(());
        }
    }
    // The plan is an upper bound: what certainly does not fit is refused, the rest is tried.
    let Some(asked) = asked(place, job, stages.into_iter().next_back()) else { return Ok(()) };
    memory::check(place.card(), &asked, &Lines(reporter))
}

fn asked(place: &Place, job: &Job, stage: Option<Stage>) -> Option<Asked> {
    let Work::Measure(measuring) = &job.work else { return None };
    let types = if place.card().is_some() { Types::CARD } else { Types::PROCESSOR };
    let shapes = DecoderConfig::of_shape(&measuring.shape)?;
    Some(Asked { shapes, model: job.model.clone(), stage: stage?, types, n_devices: 1 })
}

/// The stages that a measurement stands for.
fn stages(measuring: &Measuring) -> Vec<Stage> {
    let Measuring { sft, rl, lengths, .. } = measuring;
    let longest_prompt = lengths.longest_prompt();
    let rl = RlConfig { n_samples: 1, ..rl.clone() };
    let tuning = Stage::Sft { config: sft.clone(), longest_row: longest_prompt + lengths.answer };
    let learning = Stage::Rl { config: Box::new(rl), lora: sft.clone(), longest_prompt };
    let stage = |part: &Part| match part {
        Part::Sft => Some(tuning.clone()),
        Part::Ppo | Part::Rollout => Some(learning.clone()),
        Part::Load => None,
    };
    measuring.parts.iter().filter_map(stage).collect()
}
