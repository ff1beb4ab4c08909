//! querl's side of the comparison with transformers, PEFT and TRL; `tests/reference/bench/run.py` runs both sides.
//!
//! ```sh
//! cargo run --release -p querl-train --example bench -- sft --model DIR --data FILE [--KEY VALUE]...
//! ```
//!
//! `sft` and `full` train on the rows of a file, `rollout` samples responses to its prompts, `ppo` takes whole iterations, `order`
//! prints the order in which `sft` takes the rows. The last line on stdout is `RESULT` and a JSON object: `seconds` and
//! `cpu_seconds` (of all threads) of each repetition (an epoch, a rollout, an iteration), and values to compare. Loading is not
//! measured.

#[path = "../../../tests/bench/src/same_score.rs"]
mod same_score;

use anyhow::{Context, Result, bail};
use querl_core::config::{BaseDtype, CriticKind, LrScheduler, RlConfig, SftConfig, TuningMethod};
use querl_core::ports::{LogMark, Silent};
use querl_model::{
    Decoder, Decoding, Engine, EngineSettings, GenerationRequest, LoraAdapter, Mesh, SamplingSettings, TextTokenizer,
    Weights,
};
use querl_train::rl::{self, RlData, RlTask};
use querl_train::sft::{self, SftTask};
use querl_train::{Example, MetricSink, Metrics, Policy};
use same_score::SameScore;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

// The same allocator as in querl.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<()> {
    // As in querl: candle's own thread pool would spin on the cores that querl's kernels use.
    // SAFETY: this is the program's first statement; there is no other thread that could read the environment meanwhile.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    // `mi_option_purge_delay`: freed memory is kept, as in querl.
    // SAFETY: it sets a number that the allocator reads; any number is allowed.
    unsafe { libmimalloc_sys::mi_option_set(15, -1) };
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().context("name one of sft, full, rollout, ppo, order")?;
    let options = Options::parse(arguments)?;
    querl_model::set_threads(options.get("threads", 2)?);
    let result = match command.as_str() {
        "sft" => fine_tune(&options, TuningMethod::Lora)?,
        "full" => fine_tune(&options, TuningMethod::Full)?,
        "rollout" => rollout(&options)?,
        "ppo" => ppo(&options)?,
        "order" => order(&options)?,
        other => bail!("`{other}` is unknown; expected sft, full, rollout, ppo or order"),
    };
    println!("RESULT {result}");
    Ok(())
}

struct Options(BTreeMap<String, String>);

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut pairs = BTreeMap::new();
        while let Some(key) = arguments.next() {
            let key = key.strip_prefix("--").with_context(|| format!("`{key}`: expected --KEY VALUE"))?.to_owned();
            let value = arguments.next().with_context(|| format!("--{key} has no value"))?;
            pairs.insert(key, value);
        }
        Ok(Self(pairs))
    }

    fn get<T: FromStr>(&self, key: &str, default: T) -> Result<T> {
        match self.0.get(key) {
            None => Ok(default),
            Some(text) => text.parse().ok().with_context(|| format!("--{key}: `{text}` cannot be read")),
        }
    }

    fn path(&self, key: &str) -> Result<PathBuf> {
        Ok(self.0.get(key).with_context(|| format!("--{key} is missing"))?.into())
    }

    fn dtype(&self) -> Result<BaseDtype> {
        let name: String = self.get("dtype", "f32".to_owned())?;
        Ok(serde_json::from_value(json!(name))?)
    }
}

/// Rows of a data file, at most `--limit`; a row is a prompt with its response, or a prompt alone.
fn rows(options: &Options, split: &str) -> Result<Vec<Example>> {
    let path = options.path("data")?;
    let file: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    let rows = file[split].as_array().with_context(|| format!("{} has no `{split}`", path.display()))?;
    let ids = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone());
    let example = |row: &Value| match row.is_array() {
        true => Ok(Example { prompt: ids(row)?, response: Vec::new() }),
        false => Ok(Example { prompt: ids(&row["prompt"])?, response: ids(&row["response"])? }),
    };
    rows.iter().take(options.get("limit", usize::MAX)?).map(example).collect()
}

fn prompts(options: &Options) -> Result<Vec<Vec<u32>>> {
    Ok(rows(options, "train")?.into_iter().map(|row| row.prompt).collect())
}

/// The base model in the type `--dtype`, and the adapter that both training methods start from.
fn load(options: &Options) -> Result<(Decoder, LoraAdapter)> {
    let directory = options.path("model")?;
    let decoder = Decoder::load_as(&directory, Weights::Frozen, options.dtype()?)?;
    let adapter = LoraAdapter::load(&directory.join("adapter"), decoder.config())?;
    Ok((decoder, adapter))
}

/// Fine-tuning: seconds per epoch, or of all steps if `--max-steps` ends the training earlier.
fn fine_tune(options: &Options, method: TuningMethod) -> Result<Value> {
    let directory = options.path("model")?;
    let (decoder, adapter) = match method {
        TuningMethod::Lora => load(options).map(|(decoder, adapter)| (decoder, Some(adapter)))?,
        TuningMethod::Full => (Decoder::load(&directory, Weights::Trained)?, None),
    };
    let train = rows(options, "train")?;
    let config = SftConfig {
        method,
        learning_rate: options.get("learning-rate", 1e-4)?,
        epochs: options.get("epochs", 3)?,
        max_steps: options.get("max-steps", 0)?,
        batch_size: options.get("rows", 16)?,
        gradient_accumulation_steps: 1,
        lr_scheduler: LrScheduler::Cosine,
        warmup_ratio: 0.0,
        eval_steps: usize::MAX,
        save_steps: usize::MAX,
        ..SftConfig::default()
    };
    let output = tempfile::tempdir()?;
    let task = SftTask {
        policy: Policy { decoder: &decoder, adapter: adapter.as_ref() },
        base_path: &directory,
        train: &train,
        val: &[],
        config: &config,
        tokens_per_pass: options.get("tokens-per-pass", 8192)?,
        gradient_checkpointing: false,
        seed: options.get("seed", 0)?,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: output.path(),
        progress: &Silent,
        stop: &AtomicBool::new(false),
    };
    let mut steps = StepTimes::begin();
    sft::train(&task, &mut steps)?;
    let per_epoch = train.len().div_ceil(config.batch_size).min(steps.ends.len());
    let (seconds, cpu_seconds) = (steps.between(per_epoch, |at| at.wall), steps.between(per_epoch, |at| at.cpu));
    let n_steps = steps.ends.len();
    Ok(json!({ "seconds": seconds, "cpu_seconds": cpu_seconds, "losses": steps.of("loss"), "n_steps": n_steps }))
}

fn order(options: &Options) -> Result<Value> {
    let n_rows = rows(options, "train")?.len();
    let (seed, n_epochs) = (options.get("seed", 0)?, options.get("epochs", 3)?);
    Ok(json!({ "order": querl_train::training_order(n_rows, seed, n_epochs) }))
}

/// Rollouts: `--n` samples per prompt, `--repeats` times. Each repetition has another version of the policy, so that nothing is cached.
fn rollout(options: &Options) -> Result<Value> {
    let (decoder, adapter) = load(options)?;
    let (prompts, n) = (prompts(options)?, options.get("n", 4)?);
    let sampling = SamplingSettings { max_new_tokens: options.get("max-new", 32)?, ..SamplingSettings::default() };
    let tokenizer = TextTokenizer::load(&options.path("model")?)?;
    let mut engine = Engine::new(&decoder, EngineSettings::default())?;
    let (mut spans, mut tokens) = (Vec::new(), Vec::new());
    for repeat in 0..options.get("repeats", 3)? {
        let request = |(row, prompt)| GenerationRequest { prompt, seed: repeat << 32 | row as u64, n };
        let requests: Vec<_> = prompts.iter().map(Vec::as_slice).enumerate().map(request).collect();
        let clock = Clock::start();
        engine.set_policy(Some(&adapter), repeat)?;
        let answers = engine.generate(&requests, Decoding::Sample, &sampling, &tokenizer)?;
        spans.push(clock.now());
        tokens.push(answers.iter().flatten().map(|answer| answer.token_ids.len()).sum::<usize>());
    }
    let (seconds, cpu_seconds): (Vec<f64>, Vec<f64>) = spans.iter().map(|span| (span.wall, span.cpu)).unzip();
    Ok(json!({ "seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens }))
}

/// Complete iterations of PPO with a reward that takes no time.
fn ppo(options: &Options) -> Result<Value> {
    let directory = options.path("model")?;
    let (decoder, policy) = load(options)?;
    let reference = LoraAdapter::load(&directory.join("adapter"), decoder.config())?;
    let prompts = prompts(options)?;
    let config = RlConfig {
        critic: CriticKind::Adapter,
        max_steps: options.get("repeats", 2)?,
        batch_size: prompts.len(),
        n_samples: options.get("n", 4)?,
        mini_batch_size: options.get("mini-batch", 64)?,
        gradient_accumulation_steps: 1,
        max_new_tokens: options.get("max-new", 32)?,
        gamma: 1.0,
        eval_steps: usize::MAX,
        save_steps: usize::MAX,
        ..RlConfig::default()
    };
    let output = tempfile::tempdir()?;
    let task = RlTask {
        decoder: &decoder,
        base_path: &directory,
        policy: &policy,
        reference: Some(&reference),
        tokenizer: &TextTokenizer::load(&directory)?,
        train: RlData { prompts: &prompts, environment: &SameScore },
        val: RlData { prompts: &prompts[..1], environment: &SameScore },
        rollouts: None,
        config: &config,
        tokens_per_pass: usize::MAX,
        gradient_checkpointing: false,
        critic_lora: policy.settings().clone(),
        seed: 0,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: output.path(),
        progress: &Silent,
        stop_after: None,
        stop: &AtomicBool::new(false),
    };
    let mut steps = StepTimes::begin();
    rl::train(&task, &mut steps)?;
    let cpu_seconds = steps.cpu_of_iterations();
    Ok(json!({ "seconds": steps.of("timing_s/step"), "cpu_seconds": cpu_seconds, "timings": steps.timings() }))
}

/// Wall-clock seconds, and CPU seconds of all threads.
#[derive(Debug, Clone, Copy, Default)]
struct Span {
    wall: f64,
    cpu: f64,
}

struct Clock {
    wall: Instant,
    cpu: f64,
}

impl Clock {
    fn start() -> Self {
        Self { wall: Instant::now(), cpu: cpu_seconds() }
    }

    fn now(&self) -> Span {
        Span { wall: self.wall.elapsed().as_secs_f64(), cpu: cpu_seconds() - self.cpu }
    }
}

/// CPU time of this process, with a resolution of 10 ms; 0 if not available.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field is the program's name in parentheses; user and system time are the 14th and 15th.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// A metric sink that records the metrics of each step and its end time.
struct StepTimes {
    clock: Clock,
    ends: Vec<Span>,
    metrics: Vec<Metrics>,
}

impl StepTimes {
    fn begin() -> Self {
        Self { clock: Clock::start(), ends: Vec::new(), metrics: Vec::new() }
    }

    /// Time of every `n_steps` steps.
    fn between(&self, n_steps: usize, of: fn(&Span) -> f64) -> Vec<f64> {
        let ends = std::iter::once(0.0).chain(self.ends.iter().map(of));
        let ends: Vec<f64> = ends.step_by(n_steps.max(1)).collect();
        ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// CPU time per iteration. Evaluations are recorded separately: the first precedes all iterations, the others are included in the
    /// iteration before.
    fn cpu_of_iterations(&self) -> Vec<f64> {
        let recorded = self.ends.iter().zip(&self.metrics).enumerate();
        let ends: Vec<f64> = recorded
            .filter(|(index, (_, metrics))| *index == 0 || metrics.contains_key("timing_s/step"))
            .map(|(_, (end, _))| end.cpu)
            .collect();
        ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    fn of(&self, name: &str) -> Vec<f64> {
        self.metrics.iter().filter_map(|metrics| metrics.get(name).copied()).collect()
    }

    fn timings(&self) -> BTreeMap<&str, Vec<f64>> {
        let names = self.metrics.iter().flat_map(|metrics| metrics.keys()).filter(|name| name.starts_with("timing_s/"));
        names.map(|name| (name.as_str(), self.of(name))).collect()
    }
}

impl MetricSink for StepTimes {
    fn record(&mut self, _stage: &str, _step: u64, metrics: &Metrics) -> std::io::Result<()> {
        self.ends.push(self.clock.now());
        self.metrics.push(metrics.clone());
        Ok(())
    }

    fn mark(&mut self) -> std::io::Result<LogMark> {
        Ok(LogMark { length: self.ends.len() as u64, crc32c: None })
    }

    fn rewind(&mut self, mark: LogMark) -> std::io::Result<Option<String>> {
        self.ends.truncate(mark.length as usize);
        self.metrics.truncate(mark.length as usize);
        Ok(None)
    }
}
