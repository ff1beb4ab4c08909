//! Steps of a fine-tuning.

use super::operations::Computed;
use super::{Bench, Kept, kernel_times, nothing, rows, usage};
use crate::memory::Stage;
use crate::work::{Shown, lora};
use crate::{Ceilings, JobError, KernelTime, MemoryUse, Spread, Tuned};
use querl_core::config::SftConfig;
use querl_model::{LoraAdapter, Mesh};
use querl_train::sft::{self, SftTask};
use querl_train::{Example, Policy};

/// What steps came to.
struct Ran {
    kept: Kept,
    memory: MemoryUse,
    /// Of one step more.
    kernels: Vec<KernelTime>,
}

/// Each step takes all rows, so that all steps are alike but for the order.
pub(super) fn measure(bench: &Bench<'_>, ceilings: &Ceilings) -> Result<Tuned, JobError> {
    let (model, measuring) = (&bench.job.model, bench.measuring);
    let n_rows = measuring.sft.batch_size * measuring.sft.gradient_accumulation_steps;
    let train = rows::examples(n_rows, &measuring.lengths, bench.decoder.config().vocab_size, bench.job.seed);
    let config = config(&measuring.sft, measuring.repeats, &train);
    let Ran { kept, memory, kernels } = run(bench, &train, &config)?;
    // The last step ends with writing the adapter, after its figures; the first brings code and memory.
    let seconds: Vec<f64> = kept.steps.iter().skip(1).map(|(seconds, _)| *seconds).collect();
    let step_s = Spread::of(&seconds).ok_or_else(nothing)?;
    let computed = Computed::of(&train.iter().collect::<Vec<_>>(), model.tokens_per_pass);
    let operations = computed.operations(bench.decoder.config(), &config);
    let tokens = train.iter().map(Example::len).sum::<usize>();
    Ok(Tuned {
        rows: n_rows,
        tokens,
        computed_tokens: computed.rows,
        tokens_per_pass: model.tokens_per_pass,
        passes: computed.passes,
        gradient_checkpointing: model.gradient_checkpointing,
        lora_rank: config.lora_rank,
        step_s,
        tokens_per_s: step_s.rate(tokens as f64),
        computed_tokens_per_s: step_s.rate(computed.rows as f64),
        operations,
        share_of_matrix_rate: operations / step_s.median / ceilings.matrix.median,
        memory,
        kernels,
    })
}

/// One step more than is counted; nothing is evaluated or saved on the way.
fn config(asked: &SftConfig, repeats: usize, train: &[Example]) -> SftConfig {
    SftConfig {
        epochs: repeats + 1,
        max_steps: repeats + 1,
        max_length: asked.max_length.max(longest(train)),
        eval_steps: usize::MAX,
        save_steps: usize::MAX,
        ..asked.clone()
    }
}

fn longest(train: &[Example]) -> usize {
    train.iter().map(Example::len).max().unwrap_or_default()
}

fn run(bench: &Bench<'_>, train: &[Example], config: &SftConfig) -> Result<Ran, JobError> {
    let (job, measuring) = (bench.job, bench.measuring);
    usage::begin(bench.place)?;
    let adapter = LoraAdapter::new(bench.decoder, lora(config), job.seed)?;
    let task = SftTask {
        policy: Policy { decoder: bench.decoder, adapter: Some(&adapter) },
        base_path: &measuring.work_dir,
        train,
        val: &[],
        config,
        tokens_per_pass: job.model.tokens_per_pass,
        gradient_checkpointing: job.model.gradient_checkpointing,
        seed: job.seed,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: &measuring.work_dir.join("sft"),
        progress: &Shown(bench.host),
        stop: bench.host.stop(),
    };
    let mut kept = Kept::new();
    sft::train(&task, &mut kept)?;
    let memory = usage::end(bench, Stage::Sft { config: config.clone(), longest_row: longest(train) })?;
    let once = SftConfig { max_steps: 1, ..config.clone() };
    let again = SftTask { config: &once, ..task };
    let kernels = kernel_times(bench.place, || Ok(sft::train(&again, &mut Kept::new()).map(drop)?))?;
    Ok(Ran { kept, memory, kernels })
}
