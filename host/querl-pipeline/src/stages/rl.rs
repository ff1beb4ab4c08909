//! Stage 5: reinforcement learning against the teacher, scored by the reward plugins.

use super::stage::{self, Done, Stage, has_content, remove};
use super::{leaks, spending};
use crate::environment::{Baseline, Baselines, EpisodeLog, Judging, Phase, RowColumns, TrainingEnvironment};
use crate::failure::ending;
use crate::interrupt;
use crate::ledger::{Facts, Inputs, Ledger, StageName, rows_of};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use crate::training::{self, Base, memory};
use anyhow::Context;
use querl_core::config::{Config, RlConfig, RolloutConfig, RolloutEngineKind, TeacherKind};
use querl_core::fsx::digest_hex;
use querl_core::ports::{Progress, RolloutEngine};
use querl_core::records::{DatasetRow, Split};
use querl_core::run_dir::RunDir;
use querl_data::RolloutServer;
use querl_model::TextTokenizer;
use querl_train::ROLLOUT;
use querl_train::job::memory_plan::{MemoryRequest, PlannedStage};
use querl_train::job::{Callbacks, Environments, Failure, FailureKind, JobError, RlJob};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Keys that do not change the result.
const WITHOUT_EFFECT: [&str; 5] = ["pipeline_parts", "save_steps", "save_interval_s", "save_total_limit", "record"];

/// Keys of `[rollout]` that change how the server is called, not what it returns.
const OF_ROLLOUT_CALLS: [&str; 9] = [
    "base_url",
    "api_key_env",
    "api_key_file",
    "adapter",
    "adapter_dir",
    "max_concurrent",
    "timeout_s",
    "max_retries",
    "max_mismatch_kl",
];

/// Keys of `[sft]` that concern fine-tuning alone.
const OF_FINE_TUNING_ALONE: [&str; 17] = [
    "learning_rate",
    "epochs",
    "max_steps",
    "lora_dropout",
    "batch_size",
    "gradient_accumulation_steps",
    "lr_scheduler",
    "warmup_ratio",
    "weight_decay",
    "max_grad_norm",
    "max_length",
    "eval_steps",
    "save_steps",
    "save_interval_s",
    "save_total_limit",
    "early_stopping_patience",
    "on_noise",
];

pub(crate) struct Rl;

impl Stage for Rl {
    fn name(&self) -> StageName {
        StageName::Rl
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        inputs.section("rl", &run.config.rl, &WITHOUT_EFFECT)?;
        if run.config.rollout.engine != RolloutEngineKind::Local {
            inputs.section("rollout", &run.config.rollout, &OF_ROLLOUT_CALLS)?;
        }
        inputs.text("seed", run.config.seed).text("model.dtype", run.config.model.dtype.name());
        stage::add_thinking(&mut inputs, &run.config);
        inputs.section("sft", &run.config.sft, &OF_FINE_TUNING_ALONE)?;
        inputs.model("model", &run.config.model.path)?;
        stage::add_scoring(&mut inputs, run)?;
        inputs.made_by(ledger, StageName::Sft, &training::best(&run.dir.sft()))?;
        for split in [Split::Train, Split::Val] {
            inputs.made_by(ledger, StageName::Convert, &run.dir.split(split))?;
        }
        stage::add_expansion(&mut inputs, run, ledger)?;
        inputs.made_by(ledger, StageName::Validate, &run.dir.validated())?;
        Ok(inputs)
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        run.plugins.check_style()?;
        run.services()?;
        rollout_server(run).map(drop)
    }

    fn permit(&self, run: &Run, _: StageName, progress: &dyn Progress) -> anyhow::Result<Facts> {
        let facts = leaks::before_training(run, progress)?;
        let [train, val] = rows(run)?;
        let (_, request) = job(run, &train, &val, String::new())?;
        memory::check(run.executor.gpu(), &request, progress)?;
        Ok(facts)
    }

    fn reminder(&self, run: &Run, facts: &Facts) -> Option<String> {
        leaks::reminder(run, self.name(), facts)
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![training::best(&dir.rl())]
    }

    fn owned(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.rl(), dir.episodes()]
    }

    fn is_resumable(&self, dir: &RunDir) -> bool {
        has_content(&training::state(&dir.rl()))
    }

    fn logs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.episodes()]
    }

    fn settle(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&training::state(&dir.rl()))?;
        remove(&dir.rl().join(ROLLOUT))
    }

    /// Resumes from a checkpoint of the same inputs. Without one, both logs are truncated to their start.
    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        // On a GPU the number of parts affects the shapes of matrix products, and therefore rounding.
        let n_parts = run.config.rl.pipeline_parts;
        let arithmetic = run.executor.arithmetic().map(|how| match run.executor.gpu() {
            Some(_) => format!("{how}, {n_parts} parts of a batch"),
            None => how,
        });
        let fingerprint =
            self.inputs(run, &Ledger::open(&run.dir.stages())?)?.fingerprint(&run.config.model, arithmetic);
        let log = EpisodeLog::open(&run.dir.episodes()).context("episodes.jsonl cannot be written")?;
        let baselines = Arc::new(Baselines::new(rows_of(&run.dir.validated())?, run.config.retrieval.kind));
        let (scorer, log) = (Arc::new(run.reward_scorer()?), Arc::new(log));
        let environment = |rows: &[DatasetRow], phase| -> anyhow::Result<TrainingEnvironment> {
            Ok(TrainingEnvironment {
                columns: RowColumns::read(scorer.rewards(), &run.config.data, rows)?,
                scorer: scorer.clone(),
                rows: rows.to_vec(),
                baselines: baselines.clone(),
                n_samples: if phase == Phase::Rollout { run.config.rl.n_samples.max(1) } else { 1 },
                judging: Judging::of(&run.config.judge),
                phase,
                log: log.clone(),
                meter: run.plugins.meter.clone(),
            })
        };
        let [train, val] = rows(run)?;
        let server = rollout_server(run)?;
        let environments = Environments {
            train: &environment(&train, Phase::Rollout)?,
            val: &environment(&val, Phase::Validation)?,
            rollouts: server.as_ref().map(|server| server as &dyn RolloutEngine),
        };
        let account = run.outside.spend_tracker().clone();
        let metrics = MetricsLog::open(&run.dir.metrics(), self.name().as_str())?;
        let metrics = Mutex::new(metrics.with(move || spending::metrics(&account, StageName::Rl)));
        let callbacks = Callbacks { progress, metrics: &metrics, stop: interrupt::flag() };
        let (job, request) = job(run, &train, &val, fingerprint)?;
        planned(&run.config.rl, train.len()).iter().for_each(|note| progress.line(note));
        let summary = run.executor.run_rl(&job, run.config.threads, &environments, &callbacks);
        // Also after a failure and after a stop.
        if let Some(Err(failure)) = server.as_ref().map(RolloutServer::unload) {
            progress.line(&format!("the last adapter stays loaded on the rollout server: {failure}"));
        }
        let summary = summary.map_err(|error| {
            let error = memory::explain(run.executor.gpu(), &request, error);
            let lacking = [&train, &val].map(|rows| {
                let lacks = |row: &&DatasetRow| matches!(baselines.of(&row.metadata.query.id), Baseline::Missing(_));
                (rows.iter().filter(lacks).count(), rows.len())
            });
            ending(explain_missing_baselines(&run.config, lacking, error))
        })?;
        let mut facts = Facts::default();
        facts.add("steps", summary.n_steps).add("episodes", summary.n_episodes);
        facts.add("dropped", summary.dropped.values().sum::<u64>()).add_parts(&summary.dropped);
        facts.add("val reward before", summary.first_val_reward).add("val reward best", summary.best_val_reward);
        facts.add("best step", summary.best_step);
        training::add_device(&mut facts, run);
        Ok(Done { facts, n_failed: 0 })
    }
}

/// Extends the error about too many episodes without the teacher's rewrite by the file, the number of rows, and the remedy. `lacking`:
/// numbers of rows without a rewrite and of all rows, for train and val.
fn explain_missing_baselines(config: &Config, lacking: [(usize, usize); 2], error: JobError) -> JobError {
    let rows = [Split::Train, Split::Val].into_iter().zip(lacking).filter(|(_, (n, _))| *n > 0);
    let rows: Vec<String> = rows.map(|(split, (n, all))| format!("{n} of {all} rows of {}", split.name())).collect();
    match error {
        JobError::Failed(Failure { kind: kind @ FailureKind::MissingBaselines, message }) if !rows.is_empty() => {
            let (file, remedy) = match config.called_teacher() {
                Some(TeacherKind::Recorded) => {
                    (config.teacher.path.as_deref(), "add them there, set fallback_teacher.base_url")
                }
                None => (config.data.query_files().first().copied(), "add completions there"),
                Some(_) => (None, "run again, which repeats the teacher's failed calls"),
            };
            let file = file.map_or_else(|| "data/rewrites.jsonl".to_owned(), |path| path.display().to_string());
            let message = format!(
                "{message}; {file} has no rewrite for {}: {remedy}, take rewards that do not require the baseline (such as reward-gold), or \
                 raise rl.max_drop_rate, so that training leaves these rows out",
                rows.join(" and ")
            );
            Failure { kind, message }.into()
        }
        error => error,
    }
}

/// The rollout server, if one is configured. After a stop no further requests are sent; the resuming process requests the part of the batch
/// again.
fn rollout_server(run: &Run) -> anyhow::Result<Option<RolloutServer>> {
    let config = &run.config.rollout;
    if config.engine == RolloutEngineKind::Local {
        return Ok(None);
    }
    let services = run.outside.clone().until(interrupt::flag());
    let config = RolloutConfig { adapter: adapter_name(config, run.dir.root()), ..config.clone() };
    Ok(Some(RolloutServer::open(&config, &services, run.runtime.handle().clone())?))
}

/// Prefix of the adapter names. If the configuration has the default, it differs between run folders, so that runs that share a server do
/// not unload each other's adapters.
fn adapter_name(config: &RolloutConfig, root: &Path) -> String {
    let RolloutConfig { adapter, adapter_dir, .. } = config;
    if *adapter != RolloutConfig::default().adapter {
        return adapter.clone();
    }
    let folder = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
    let digest = digest_hex(format!("{adapter_dir:?} {}", folder.display()).as_bytes());
    format!("{adapter}-{}", &digest[..8])
}

fn rows(run: &Run) -> anyhow::Result<[Vec<DatasetRow>; 2]> {
    Ok([rows_of(&run.dir.split(Split::Train))?, rows_of(&run.dir.split(Split::Val))?])
}

/// The job, and the request for its memory plan.
fn job(
    run: &Run,
    train: &[DatasetRow],
    val: &[DatasetRow],
    fingerprint: String,
) -> anyhow::Result<(RlJob, MemoryRequest)> {
    let config = &run.config;
    training::check_prompts(run, Split::Train, train)?;
    training::check_prompts(run, Split::Val, val)?;
    let base = Base::of(&run.config, &run.dir, StageName::Sft)?;
    let model = base.model_config(config);
    let tokenizer = TextTokenizer::for_policy(&model)?;
    let job = RlJob {
        model,
        seed: config.seed,
        config: RlConfig { max_steps: config.rl.n_steps(train.len()), ..config.rl.clone() },
        lora: config.sft.clone(),
        adapter: base.adapter,
        train_prompts: training::prompts(train, &tokenizer)?,
        val_prompts: training::prompts(val, &tokenizer)?,
        max_mismatch_kl: (config.rollout.engine != RolloutEngineKind::Local).then_some(config.rollout.max_mismatch_kl),
        fingerprint: Some(fingerprint),
        stop_after: run.stop_after,
        output_dir: run.dir.rl(),
    };
    let longest_prompt = job.train_prompts.iter().chain(&job.val_prompts).map(Vec::len).max().unwrap_or(0);
    let (rl, lora) = (Box::new(config.rl.clone()), config.sft.clone());
    let request = memory::request(config, PlannedStage::Rl { config: rl, lora, longest_prompt })?;
    Ok((job, request))
}

/// The number of steps, as text, of a training that is configured in epochs.
fn planned(rl: &RlConfig, n_rows: usize) -> Option<String> {
    let (epochs, n_steps) = (rl.epochs?, rl.n_steps(n_rows));
    let is_bounded = n_steps < RlConfig { max_steps: 0, ..rl.clone() }.n_steps(n_rows);
    let bound = if is_bounded { ", cut off by rl.max_steps" } else { "" };
    Some(format!("{n_steps} steps: {epochs} epoch(s) of {n_rows} queries in batches of {}{bound}", rl.batch_size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::deployment::MINIMAL_CONFIG;
    use querl_train::TrainError;

    #[test]
    fn the_default_name_of_adapters_is_another_one_in_each_run_folder() {
        let named = |adapter: &str, root: &str| {
            let config = RolloutConfig { adapter: adapter.into(), ..RolloutConfig::default() };
            adapter_name(&config, Path::new(root))
        };
        assert!(named("querl", "/runs/a").starts_with("querl-"));
        assert_eq!(named("querl", "/runs/a"), named("querl", "/runs/a"));
        assert_ne!(named("querl", "/runs/a"), named("querl", "/runs/b"));
        assert_eq!(named("mine", "/runs/a"), "mine");
    }

    /// Symptom: RL on a recorded teacher that lacked half of the rows ended with `baseline_missing` alone.
    #[test]
    fn rows_without_a_baseline_are_counted_with_their_file_and_what_to_do() {
        let mut config: Config = toml::from_str(MINIMAL_CONFIG).unwrap();
        config.teacher.path = Some("teacher.jsonl".into());
        let of = |reason: &str, lacking| {
            let error = TrainError::DropRate {
                step: 0,
                n_dropped: 4,
                n_episodes: 8,
                max_drop_rate: 0.1,
                reason: reason.into(),
                last: String::new(),
            };
            let message = error.to_string();
            let explained = explain_missing_baselines(&config, lacking, error.into()).to_string();
            explained.strip_prefix(&message).unwrap().to_owned()
        };
        let explained = of("baseline_missing", [(0, 24), (4, 8)]);
        let expected = "; teacher.jsonl has no rewrite for 4 of 8 rows of val: add them there, set \
                        fallback_teacher.base_url, take rewards that do not require the baseline";
        assert!(explained.starts_with(expected), "{explained}");
        assert_eq!(of("deadline", [(0, 24), (4, 8)]), "");
        assert_eq!(of("baseline_missing", [(0, 24), (0, 8)]), "");
    }
}
