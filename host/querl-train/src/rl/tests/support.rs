//! Tiny models, environments with faults on demand, and runs against them.

use crate::rl::{RlData, RlSummary, RlTask, train};
use crate::testing::Recorder;
use crate::{MetricSink, TrainError};
use querl_core::config::{BaseDtype, CriticKind, RlConfig};
use querl_core::ports::{CallTimings, Environment, EnvironmentError, LogMark, PolicyResponse, ScoredResponses, Silent};
use querl_core::records::{Candidate, Episode, EpisodeRecord, Rejection, Reward};
use querl_model::{
    ComputeDevice, Decoder, LoraAdapter, LoraSettings, Mesh, RankFailure, TextTokenizer, Weights, run_ranks,
    small_model,
};
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

pub(crate) struct Model {
    pub(crate) path: PathBuf,
    pub(crate) decoder: Decoder,
    pub(crate) tokenizer: TextTokenizer,
    _folder: Option<tempfile::TempDir>,
}

/// Writes a random model. With the usual initializer range of 0.02 the logits of such a small model would hardly differ, with any adapter.
pub(crate) fn write_model((n_heads, n_kv_heads, head_dim): (usize, usize, usize)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (hidden_size, intermediate_size, n_layers, max_positions) = (32, 64, 2, 64);
    let shape =
        small_model::Shape { hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, head_dim, max_positions };
    let mut config = small_model::write_files(folder.path(), &["aaaa bbbb".to_owned()], 280, &shape).unwrap();
    config.initializer_range = 0.3;
    Decoder::init(config, 3).unwrap().save(folder.path(), small_model::STORED_DTYPE).unwrap();
    folder
}

static ALONE: LazyLock<Mesh> = LazyLock::new(Mesh::alone);
static NO_STOP: AtomicBool = AtomicBool::new(false);

impl Model {
    pub(crate) fn new() -> Self {
        Self::on(&ComputeDevice::Cpu, BaseDtype::F32)
    }

    pub(crate) fn on(device: &ComputeDevice, dtype: BaseDtype) -> Self {
        let folder = write_model((2, 1, 16));
        let decoder = Decoder::load_on(folder.path(), Weights::Frozen, dtype, device).unwrap();
        let model = Self::with_decoder(folder.path(), decoder);
        Self { _folder: Some(folder), ..model }
    }

    pub(crate) fn load(path: &Path) -> Self {
        Self::with_decoder(path, Decoder::load(path, Weights::Frozen).unwrap())
    }

    pub(crate) fn with_decoder(path: &Path, decoder: Decoder) -> Self {
        let tokenizer = TextTokenizer::load(path).unwrap();
        Self { path: path.to_owned(), decoder, tokenizer, _folder: None }
    }

    pub(crate) fn adapter(&self, settings: LoraSettings, seed: u64) -> LoraAdapter {
        LoraAdapter::new(&self.decoder, settings, seed).unwrap()
    }

    /// Eight short prompts.
    pub(crate) fn prompts(&self) -> Vec<Vec<u32>> {
        (0..8).map(|i| self.tokenizer.encode(&format!("a{i}b")).unwrap()).collect()
    }

    /// A task of one rank without checkpoints. `environments`: for training and for validation.
    pub(crate) fn task<'a>(
        &'a self,
        policy: &'a LoraAdapter,
        prompts: &'a [Vec<u32>],
        environments: [&'a dyn Environment; 2],
        config: &'a RlConfig,
        output_dir: &'a Path,
    ) -> RlTask<'a> {
        let [train, val] = environments.map(|environment| RlData { prompts, environment });
        RlTask {
            decoder: &self.decoder,
            base_path: &self.path,
            policy,
            reference: None,
            tokenizer: &self.tokenizer,
            train,
            val,
            rollouts: None,
            config,
            tokens_per_pass: 512,
            gradient_checkpointing: false,
            critic_lora: policy.settings().clone(),
            seed: 11,
            mesh: &ALONE,
            fingerprint: None,
            output_dir,
            progress: &Silent,
            stop_after: None,
            stop: &NO_STOP,
        }
    }
}

pub(crate) fn bits(adapter: &LoraAdapter) -> Vec<u32> {
    let values = adapter.vars().values().flat_map(|var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    values.map(f32::to_bits).collect()
}

pub(crate) const BATCH: usize = 10;

/// High learning rates, so that few steps have an effect.
pub(crate) fn config() -> RlConfig {
    RlConfig {
        critic: CriticKind::Head,
        max_steps: 4,
        batch_size: BATCH,
        mini_batch_size: 5,
        gradient_accumulation_steps: 2,
        ppo_epochs: 2,
        learning_rate: 1e-2,
        critic_learning_rate: 1e-2,
        max_new_tokens: 8,
        eval_steps: 2,
        save_steps: 1,
        ..RlConfig::default()
    }
}

/// Settings with which a policy learns [`plain_text`] in fifty steps.
pub(crate) fn learning_config(off_by_one: bool) -> RlConfig {
    RlConfig {
        off_by_one,
        max_steps: 50,
        batch_size: 32,
        mini_batch_size: 32,
        ppo_epochs: 4,
        learning_rate: 2e-2,
        kl_coef: 0.0,
        ent_coef: 0.0,
        max_grad_norm: 5.0,
        eval_steps: 50,
        save_steps: 50,
        ..config()
    }
}

/// Checks that the metrics of a run with [`learning_config`] show that the policy has learned.
pub(crate) fn assert_learned(what: &str, recorder: &Recorder) {
    let (first, last) = (recorder.mean("avg_reward", 1..11), recorder.mean("avg_reward", 41..51));
    assert!(last > 0.8 && last > first + 0.2, "{what}: {first} to {last}");
}

/// The episode of a response that equals its baseline and has no hits.
pub(crate) fn episode(
    id: String,
    step: u64,
    response: &PolicyResponse,
    outcome: Result<Reward, Rejection>,
) -> EpisodeRecord {
    let candidate = Candidate { n_tokens: response.n_tokens, ..Candidate::found_nothing(response.text.clone()) };
    let episode = Episode { id, policy: candidate.clone(), baseline: Some(candidate), ..Episode::default() };
    EpisodeRecord { format: EpisodeRecord::FORMAT, step, episode, calls: Vec::new(), outcome }
}

pub(crate) fn reward(total: f64) -> Reward {
    Reward { total, components: Vec::new() }
}

pub(crate) fn rejection(code: &str) -> Rejection {
    Rejection::new(code, "")
}

/// The share of ASCII characters in the response.
pub(crate) fn plain_text(response: &PolicyResponse) -> f64 {
    let n_plain = response.text.chars().filter(char::is_ascii).count();
    n_plain as f64 / response.text.chars().count().max(1) as f64
}

/// An environment without a log that scores a response from the step, its index in the call, and its text.
pub(crate) struct Scorer<F>(pub(crate) F);

impl<F: Fn(u64, usize, &PolicyResponse) -> Result<Reward, Rejection> + Send + Sync> Environment for Scorer<F> {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let record =
            |(index, response)| episode(format!("{step}/{index}"), step, response, (self.0)(step, index, response));
        Ok(responses.iter().enumerate().map(record).collect::<Vec<_>>().into())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The call with this number, from 1, and all later ones fail, as if the process were killed.
    Kill(usize),
    /// This call panics.
    Panic(usize),
    /// The stop flag is set before this call returns.
    Stop(usize),
    /// Every fourth episode is late.
    Stragglers,
    /// From this step on every training episode is rejected.
    Rejections(u64),
    /// Every call of this step fails.
    KillAtStep(u64),
}

/// Scores responses, keeps a log of episodes that outlives a process, and fails on demand.
pub(crate) struct FaultyEnvironment {
    pub(crate) log: Mutex<Vec<String>>,
    /// Responses scored by all processes.
    pub(crate) n_scored: AtomicUsize,
    n_calls: AtomicUsize,
    fault: Fault,
    /// Duration of scoring one response.
    pause: Duration,
    score: fn(&PolicyResponse) -> f64,
    stop: AtomicBool,
    /// [`RlTask::stop_after`] of the runs against it.
    pub(crate) stop_after: Option<u64>,
}

impl FaultyEnvironment {
    pub(crate) fn new(fault: Fault, pause: Duration) -> Self {
        let (log, n_scored, n_calls) = (Mutex::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        let stop = AtomicBool::new(false);
        Self { log, n_scored, n_calls, fault, pause, score: plain_text, stop, stop_after: None }
    }

    pub(crate) fn without_fault() -> Self {
        Self::new(Fault::None, Duration::ZERO)
    }

    pub(crate) fn with_score(self, score: fn(&PolicyResponse) -> f64) -> Self {
        Self { score, ..self }
    }

    fn inject_fault(&self, step: u64) -> Result<(), EnvironmentError> {
        let call = self.n_calls.fetch_add(1, Ordering::SeqCst) + 1;
        match self.fault {
            Fault::Kill(at) if call >= at => return Err(EnvironmentError::Record("killed".into())),
            Fault::KillAtStep(at) if step == at => return Err(EnvironmentError::Record("killed".into())),
            Fault::Panic(at) if call == at => panic!("call {call} of the environment"),
            Fault::Stop(at) if call == at => self.stop.store(true, Ordering::SeqCst),
            _ => {}
        }
        Ok(())
    }

    fn record(&self, split: &str, step: u64, response: &PolicyResponse) -> EpisodeRecord {
        let outcome = match self.fault {
            Fault::Stragglers if split == "step" && (response.row_index as u64 + step).is_multiple_of(4) => {
                Err(rejection("deadline"))
            }
            Fault::Rejections(from) if split == "step" && step >= from => Err(rejection("rejected")),
            _ => Ok(reward((self.score)(response))),
        };
        episode(format!("{split}-{step}/{}/{}", response.row_index, response.sample_index), step, response, outcome)
    }
}

/// One split's view of an environment.
struct Split<'a>(&'a FaultyEnvironment, &'static str);

impl Environment for Split<'_> {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let (started, Self(environment, split)) = (Instant::now(), self);
        environment.inject_fault(step)?;
        std::thread::sleep(environment.pause * responses.len() as u32);
        let records: Vec<EpisodeRecord> =
            responses.iter().map(|response| environment.record(split, step, response)).collect();
        environment.n_scored.fetch_add(records.len(), Ordering::SeqCst);
        environment.log.lock().unwrap().extend(records.iter().map(|record| serde_json::to_string(record).unwrap()));
        let timings = CallTimings { retrieve_s: started.elapsed().as_secs_f64(), ..CallTimings::default() };
        Ok(ScoredResponses { records, timings, ..ScoredResponses::default() })
    }

    fn mark(&self) -> Result<LogMark, EnvironmentError> {
        Ok(LogMark { length: self.0.log.lock().unwrap().len() as u64, crc32c: None })
    }

    fn rewind(&self, mark: LogMark) -> Result<Option<String>, EnvironmentError> {
        let (mut log, wanted) = (self.0.log.lock().unwrap(), mark.length as usize);
        if log.len() < wanted {
            return Ok(Some(format!("the log has {} of {wanted} episodes", log.len())));
        }
        log.truncate(wanted);
        Ok(None)
    }
}

/// Folder, environment and metrics of a run over all of its processes, and the result of the newest process.
pub(crate) struct Run {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) environment: FaultyEnvironment,
    pub(crate) recorder: Recorder,
    pub(crate) summary: Option<RlSummary>,
    /// Bits of the adapter in memory, by rank.
    pub(crate) adapters: Vec<Vec<u32>>,
}

impl Run {
    pub(crate) fn new(environment: FaultyEnvironment) -> Self {
        let (folder, recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
        Self { folder, environment, recorder, summary: None, adapters: Vec::new() }
    }

    /// Runs to the end without a fault.
    pub(crate) fn complete(world_size: usize, model: &Model, config: &RlConfig) -> Self {
        let mut run = Self::new(FaultyEnvironment::without_fault());
        run.start(world_size, model, config).unwrap();
        run
    }

    /// Simulates one process: starts or resumes the run with ranks on the CPU that share the model. The first rank's error is returned.
    pub(crate) fn start(&mut self, world_size: usize, model: &Model, config: &RlConfig) -> Result<(), TrainError> {
        self.start_ranks(world_size, config, |_| Ok(model))
    }

    /// As [`Run::start`]. `model` creates the model of each rank, in the rank's thread.
    pub(crate) fn start_ranks<M: Borrow<Model>>(
        &mut self,
        world_size: usize,
        config: &RlConfig,
        model: impl Fn(usize) -> Result<M, TrainError> + Sync,
    ) -> Result<(), TrainError> {
        let (environment, folder, recorder) = (&self.environment, self.folder.path(), Mutex::new(&mut self.recorder));
        let adapters = Mutex::new(BTreeMap::new());
        let ended = run_ranks(world_size, |ranks| {
            let (rank, model, mut own) = (ranks.rank(), model(ranks.rank())?, Recorder::default());
            let mut held = ranks.is_first().then(|| recorder.lock().unwrap());
            let sink = held.as_mut().map_or(&mut own, |held| &mut **held);
            let (summary, adapter) = run_rank(&Mesh::of_data(ranks), model.borrow(), config, environment, folder, sink);
            adapters.lock().unwrap().insert(rank, adapter);
            summary
        });
        self.adapters = adapters.into_inner().unwrap().into_values().collect();
        let summaries = ended.map_err(|failures| match failures.into_iter().find(|failure| failure.rank() == 0) {
            Some(RankFailure::Failed { error, .. }) => error,
            other => panic!("the first rank: {other:?}"),
        })?;
        assert!(summaries.iter().all(|summary| *summary == summaries[0]), "ranks with other summaries");
        self.summary = summaries.into_iter().next();
        Ok(())
    }

    /// Removes the fault, as after a restart; the log is kept.
    pub(crate) fn remove_fault(&mut self) {
        self.environment.fault = Fault::None;
        (self.environment.n_calls, self.environment.stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    }

    pub(crate) fn episodes(&self) -> Vec<String> {
        self.environment.log.lock().unwrap().clone()
    }

    /// The content of every file that a finished run leaves; `None` for the critic's files if there is no critic.
    fn files(&self) -> Vec<(&'static str, Option<Vec<u8>>)> {
        let names = [
            "best/adapter_config.json",
            "best/adapter_model.safetensors",
            "best/critic/value_head.safetensors",
            "last/adapter_config.json",
            "last/adapter_model.safetensors",
            "last/critic/value_head.safetensors",
        ];
        let read = |name: &str| {
            let content = std::fs::read(self.folder.path().join(name)).ok();
            assert!(content.is_some() || name.contains("critic"), "{name} is missing");
            content
        };
        names.map(|name| (name, read(name))).into()
    }

    /// The records of steps (`rl.record`), by name.
    pub(crate) fn step_records(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.folder.path().join("steps")).into_iter().flatten().flatten();
        let record =
            |entry: std::fs::DirEntry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap());
        entries.map(record).collect()
    }

    /// Compares everything that must not depend on interruptions, in parts, to keep failure messages short.
    pub(crate) fn assert_same(&self, expected: &Self, what: &str) {
        assert_eq!(self.summary, expected.summary, "{what}: summary");
        let (metrics, expected_metrics) = (self.recorder.results(), expected.recorder.results());
        let difference = metrics.iter().zip(&expected_metrics).find(|(found, expected)| found != expected);
        assert!(difference.is_none(), "{what}: metrics: {difference:#?}");
        let (episodes, expected_episodes) = (self.episodes(), expected.episodes());
        let difference = episodes.iter().zip(&expected_episodes).find(|(found, expected)| found != expected);
        assert!(difference.is_none(), "{what}: episodes: {difference:#?}");
        let lengths = [metrics.len(), episodes.len()];
        assert_eq!(lengths, [expected_metrics.len(), expected_episodes.len()], "{what}: more or fewer lines in a log");
        assert!(self.adapters == expected.adapters, "{what}: the adapter in memory differs");
        for ((name, found), (_, expected)) in self.files().iter().zip(expected.files()) {
            assert!(*found == expected, "{what}: {name} differs");
        }
        let (records, expected_records) = (self.step_records(), expected.step_records());
        let names = |records: &BTreeMap<String, Vec<u8>>| records.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&records), names(&expected_records), "{what}: records of steps");
        let differing = records.iter().find(|(name, bytes)| expected_records[*name] != **bytes).map(|(name, _)| name);
        assert_eq!(differing, None, "{what}: the record of a step differs");
    }
}

/// One rank of a run; also returns the bits of its adapter.
pub(crate) fn run_rank(
    mesh: &Mesh,
    model: &Model,
    config: &RlConfig,
    environment: &FaultyEnvironment,
    folder: &Path,
    sink: &mut dyn MetricSink,
) -> (Result<RlSummary, TrainError>, Vec<u32>) {
    let (policy, prompts) = (model.adapter(LoraSettings::all_linear(4, 8.0), 5), model.prompts());
    let (train_split, val_split) = (Split(environment, "step"), Split(environment, "val"));
    let task = RlTask {
        mesh,
        fingerprint: Some("same"),
        stop_after: environment.stop_after,
        stop: &environment.stop,
        ..model.task(&policy, &prompts, [&train_split, &val_split], config, folder)
    };
    (train(&task, sink), bits(&policy))
}
