//! Iterations of PPO, scored by a stand-in.

use super::{Bench, Kept, nothing, rows, usage};
use crate::memory::Stage;
use crate::work::{Shown, lora};
use crate::{JobError, Measuring, MemoryUse, Optimised, Spread};
use querl_core::config::RlConfig;
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses};
use querl_core::records::{Candidate, Context, Episode, EpisodeRecord, Reward};
use querl_model::{LoraAdapter, Mesh, TextTokenizer, small_model};
use querl_train::rl::{self, RlData, RlTask};
use std::collections::BTreeMap;

/// What scores here; retrieval and judge are other programs, whose time is not the device's.
const SCORER: &str = "a stand-in: every answer gets the same score at once";

/// Whole iterations, each on a batch of its own.
pub(super) fn measure(bench: &Bench<'_>) -> Result<Optimised, JobError> {
    let (model, measuring) = (&bench.job.model, bench.measuring);
    let config = RlConfig {
        max_steps: measuring.repeats + 1,
        eval_steps: usize::MAX,
        save_steps: usize::MAX,
        n_samples: 1,
        ..measuring.rl.clone()
    };
    let (kept, memory) = run(bench, &config)?;
    let parts_s = parts(&kept);
    Ok(Optimised {
        answers: config.batch_size,
        epochs: config.ppo_epochs,
        updates: config.batch_size.div_ceil(config.mini_batch_size.max(1)) * config.ppo_epochs,
        max_new_tokens: config.max_new_tokens,
        scorer: SCORER.into(),
        iteration_s: parts_s.get("step").copied().ok_or_else(nothing)?,
        parts_s,
        tokens_per_pass: model.tokens_per_pass,
        gradient_checkpointing: model.gradient_checkpointing,
        memory,
    })
}

fn run(bench: &Bench<'_>, config: &RlConfig) -> Result<(Kept, MemoryUse), JobError> {
    let (job, measuring) = (bench.job, bench.measuring);
    let vocab_size = bench.decoder.config().vocab_size;
    let prompts = rows::prompts(config.batch_size, &measuring.lengths, vocab_size, job.seed);
    let longest_prompt = prompts.iter().map(Vec::len).max().unwrap_or_default();
    usage::begin(bench.place)?;
    let policy = LoraAdapter::new(bench.decoder, lora(&measuring.sft), job.seed)?;
    let reference = LoraAdapter::new(bench.decoder, lora(&measuring.sft), job.seed)?;
    let task = RlTask {
        decoder: bench.decoder,
        base_path: &measuring.work_dir,
        policy: &policy,
        reference: Some(&reference),
        tokenizer: &tokenizer(measuring)?,
        train: RlData { prompts: &prompts, environment: &SameScore },
        val: RlData { prompts: &prompts[..1], environment: &SameScore },
        config,
        tokens_per_pass: job.model.tokens_per_pass,
        gradient_checkpointing: job.model.gradient_checkpointing,
        critic_lora: lora(&measuring.sft),
        seed: job.seed,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: &measuring.work_dir.join("ppo"),
        progress: &Shown(bench.host),
        stop: bench.host.stop(),
    };
    let mut kept = Kept::new();
    rl::train(&task, &mut kept)?;
    let stage = Stage::Rl { config: Box::new(config.clone()), lora: measuring.sft.clone(), longest_prompt };
    Ok((kept, usage::end(bench, stage)?))
}

/// Seconds by their names; the first iteration brings code and memory and does not count, evaluations are no iterations.
fn parts(kept: &Kept) -> BTreeMap<String, Spread> {
    let iterations = kept.steps.iter().filter(|(_, figures)| figures.contains_key("timing_s/step")).skip(1);
    let mut seconds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (name, value) in iterations.flat_map(|(_, figures)| figures) {
        if let Some(name) = name.strip_prefix("timing_s/") {
            seconds.entry(name.to_owned()).or_default().push(*value);
        }
    }
    seconds.into_iter().filter_map(|(name, values)| Some((name, Spread::of(&values)?))).collect()
}

/// Knows a few tokens of the vocabulary: where answers end, and no text for the others.
pub(super) fn tokenizer(measuring: &Measuring) -> Result<TextTokenizer, JobError> {
    let shape = small_model::Shape {
        hidden_size: 16,
        intermediate_size: 16,
        n_layers: 1,
        n_heads: 1,
        n_kv_heads: 1,
        head_dim: 16,
        max_positions: 64,
    };
    small_model::write_files(&measuring.work_dir, &["measured".to_owned()], 300, &shape)?;
    Ok(TextTokenizer::load(&measuring.work_dir)?)
}

/// Scores at once and everything alike.
struct SameScore;

impl Environment for SameScore {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        Ok(responses.iter().map(|response| record(step, response)).collect::<Vec<_>>().into())
    }
}

fn record(step: u64, response: &PolicyResponse) -> EpisodeRecord {
    let PolicyResponse { text, n_tokens, truncated, .. } = response.clone();
    let candidate = Candidate { n_tokens, truncated, ..Candidate::found_nothing(text) };
    let episode = Episode {
        id: format!("{step}/{}/{}", response.row_index, response.sample_index),
        query: String::new(),
        context: Context::default(),
        gold_ids: Vec::new(),
        policy: candidate.clone(),
        baseline: candidate,
    };
    let outcome = Ok(Reward { total: 0.5, components: Vec::new() });
    EpisodeRecord { format: EpisodeRecord::FORMAT, step, episode, outcome }
}
