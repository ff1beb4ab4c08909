//! Fine-tuning steps and PPO iterations, run by the trainers of querl.

use crate::measure::{Bench, StepTimes, no_values, tokenizer};
use crate::operations::StepWork;
use crate::report::{Ceilings, MemoryUse, PpoResult, SftResult, Spread};
use crate::rows;
use crate::same_score::SameScore;
use anyhow::Result;
use querl_core::config::{RlConfig, SftConfig};
use querl_core::ports::Silent;
use querl_model::{LoraAdapter, Mesh};
use querl_train::job::lora_settings;
use querl_train::job::memory_plan::PlannedStage;
use querl_train::rl::{self, RlData, RlTask};
use querl_train::sft::{self, SftTask};
use querl_train::{Example, Policy};
use std::collections::BTreeMap;

/// Every step uses all rows, so that steps differ only in the order of rows.
pub(crate) fn sft(bench: &Bench<'_>, ceilings: &Ceilings) -> Result<SftResult> {
    let n_rows = bench.sft.batch_size * bench.sft.gradient_accumulation_steps;
    let train = rows::examples(n_rows, &bench.lengths, bench.decoder.config().vocab_size, bench.seed);
    let longest_row = train.iter().map(Example::len).max().unwrap_or_default();
    // One step of warm-up, without evaluation or checkpoint.
    let config = SftConfig {
        epochs: bench.repeats + 1,
        max_steps: bench.repeats + 1,
        max_length: bench.sft.max_length.max(longest_row),
        eval_steps: usize::MAX,
        save_steps: usize::MAX,
        ..bench.sft.clone()
    };
    bench.reset_peak_memory()?;
    let adapter = LoraAdapter::new(bench.decoder, lora_settings(&config), bench.seed)?;
    let task = SftTask {
        policy: Policy { decoder: bench.decoder, adapter: Some(&adapter) },
        base_path: bench.folder,
        train: &train,
        val: &[],
        config: &config,
        tokens_per_pass: bench.model.tokens_per_pass,
        gradient_checkpointing: bench.model.gradient_checkpointing,
        seed: bench.seed,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: &bench.folder.join("sft"),
        progress: &Silent,
        stop: bench.stop,
    };
    let mut steps = StepTimes::new();
    sft::train(&task, &mut steps)?;
    let memory = bench.memory_use(PlannedStage::Sft { config: config.clone(), longest_row })?;
    let once = SftConfig { max_steps: 1, ..config.clone() };
    let again = SftTask { config: &once, ..task };
    let kernels = bench.kernel_times(|| Ok(sft::train(&again, &mut StepTimes::new()).map(drop)?))?;
    let step_s = Spread::of(&steps.0.iter().skip(1).map(|(seconds, _)| *seconds).collect::<Vec<_>>());
    let step_s = step_s.ok_or_else(no_values)?;
    let work = StepWork::of(&train.iter().collect::<Vec<_>>(), bench.model.tokens_per_pass);
    let operations = work.operations(bench.decoder.config(), &config);
    let tokens = train.iter().map(Example::len).sum::<usize>();
    Ok(SftResult {
        rows: n_rows,
        tokens,
        computed_tokens: work.rows,
        tokens_per_pass: bench.model.tokens_per_pass,
        passes: work.passes,
        gradient_checkpointing: bench.model.gradient_checkpointing,
        lora_rank: config.lora_rank,
        step_s,
        tokens_per_s: step_s.rate(tokens as f64),
        computed_tokens_per_s: step_s.rate(work.rows as f64),
        operations,
        share_of_matrix_rate: operations / step_s.median / ceilings.matrix.median,
        memory,
        kernels,
    })
}

/// The environment. Retrieval and judge are external programs, whose time is not measured.
const SCORER: &str = "a stand-in: every response gets the same score at once";

/// Complete iterations, each with a new batch.
pub(crate) fn ppo(bench: &Bench<'_>) -> Result<PpoResult> {
    let config = RlConfig {
        max_steps: bench.repeats + 1,
        eval_steps: usize::MAX,
        save_steps: usize::MAX,
        n_samples: 1,
        ..bench.rl.clone()
    };
    let (steps, memory) = run_ppo(bench, &config)?;
    let parts_s = phases(&steps);
    Ok(PpoResult {
        answers: config.batch_size,
        epochs: config.ppo_epochs,
        updates: config.batch_size.div_ceil(config.mini_batch_size.max(1)) * config.ppo_epochs,
        max_new_tokens: config.max_new_tokens,
        scorer: SCORER.into(),
        iteration_s: parts_s.get("step").copied().ok_or_else(no_values)?,
        parts_s,
        tokens_per_pass: bench.model.tokens_per_pass,
        gradient_checkpointing: bench.model.gradient_checkpointing,
        memory,
    })
}

fn run_ppo(bench: &Bench<'_>, config: &RlConfig) -> Result<(StepTimes, MemoryUse)> {
    let prompts = rows::prompts(config.batch_size, &bench.lengths, bench.decoder.config().vocab_size, bench.seed);
    let longest_prompt = prompts.iter().map(Vec::len).max().unwrap_or_default();
    bench.reset_peak_memory()?;
    let policy = LoraAdapter::new(bench.decoder, lora_settings(&bench.sft), bench.seed)?;
    let reference = LoraAdapter::new(bench.decoder, lora_settings(&bench.sft), bench.seed)?;
    let task = RlTask {
        decoder: bench.decoder,
        base_path: bench.folder,
        policy: &policy,
        reference: Some(&reference),
        tokenizer: &tokenizer(bench.folder)?,
        train: RlData { prompts: &prompts, environment: &SameScore },
        val: RlData { prompts: &prompts[..1], environment: &SameScore },
        rollouts: None,
        config,
        tokens_per_pass: bench.model.tokens_per_pass,
        gradient_checkpointing: bench.model.gradient_checkpointing,
        critic_lora: lora_settings(&bench.sft),
        seed: bench.seed,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: &bench.folder.join("ppo"),
        progress: &Silent,
        stop_after: None,
        stop: bench.stop,
    };
    let mut steps = StepTimes::new();
    rl::train(&task, &mut steps)?;
    let stage = PlannedStage::Rl { config: Box::new(config.clone()), lora: bench.sft.clone(), longest_prompt };
    Ok((steps, bench.memory_use(stage)?))
}

/// Seconds by phase, without the first iteration (warm-up) and without evaluations.
fn phases(steps: &StepTimes) -> BTreeMap<String, Spread> {
    let iterations = steps.0.iter().filter(|(_, metrics)| metrics.contains_key("timing_s/step")).skip(1);
    let mut seconds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (name, value) in iterations.flat_map(|(_, metrics)| metrics) {
        if let Some(name) = name.strip_prefix("timing_s/") {
            seconds.entry(name.to_owned()).or_default().push(*value);
        }
    }
    seconds.into_iter().filter_map(|(name, values)| Some((name, Spread::of(&values)?))).collect()
}
