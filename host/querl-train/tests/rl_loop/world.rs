//! An environment with a known optimum, a log, and faults on demand; and the runs that meet it.

pub(crate) use crate::recording::Recorder;
use crate::recording::episode;
pub(crate) use crate::tiny::Model;
use crate::tiny::plain_text;
use querl_core::config::{CriticKind, RlConfig};
use querl_core::ports::{CallTimings, Environment, EnvironmentError, PolicyResponse, ScoredResponses, Silent};
use querl_core::records::{EpisodeRecord, Rejection, Reward};
use querl_model::{LoraAdapter, LoraSettings, Mesh, RankFailure, run_ranks};
use querl_train::rl::{RlData, RlSummary, RlTask, train};
use querl_train::{MetricSink, Metrics, TrainError};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What an environment does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// This call of the world, from 1, finds that the power is gone; so do all later ones.
    PowerCut(usize),
    /// This call panics.
    Panic(usize),
    /// Before this call answers, somebody says stop.
    Stop(usize),
    /// Every fourth episode is late.
    Stragglers,
    /// From this step on every training episode is rejected.
    Refusal(u64),
}

/// What an answer is worth.
pub(crate) type Pay = fn(&PolicyResponse) -> Reward;

/// What outlives a process: the log of episodes.
pub(crate) struct World {
    pub(crate) log: Mutex<Vec<String>>,
    /// Responses that were scored, in all processes.
    pub(crate) n_scored: AtomicUsize,
    n_calls: AtomicUsize,
    fault: Fault,
    pause: Duration,
    /// What an answer is worth: the share of plain ASCII among its characters, where nobody says otherwise.
    pays: Pay,
    pub(crate) stop: AtomicBool,
}

impl World {
    pub(crate) fn new(fault: Fault, pause: Duration) -> Self {
        let (log, n_scored, n_calls) = (Mutex::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        Self { log, n_scored, n_calls, fault, pause, pays: plain_text, stop: AtomicBool::new(false) }
    }

    pub(crate) fn sound() -> Self {
        Self::new(Fault::None, Duration::ZERO)
    }

    /// The same world with other prices.
    pub(crate) fn paying(self, pays: Pay) -> Self {
        Self { pays, ..self }
    }

    /// The same world after a reboot: what was logged is there.
    pub(crate) fn mended(self) -> Self {
        let (n_calls, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { fault: Fault::None, n_calls, stop, ..self }
    }

    pub(crate) fn logged(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    fn meet_fault(&self) -> Result<(), EnvironmentError> {
        let call = self.n_calls.fetch_add(1, Ordering::SeqCst) + 1;
        match self.fault {
            Fault::PowerCut(at) if call >= at => return Err(EnvironmentError::Record("the power is gone".into())),
            Fault::Panic(at) if call == at => panic!("call {call} of the world"),
            Fault::Stop(at) if call == at => self.stop.store(true, Ordering::SeqCst),
            _ => {}
        }
        Ok(())
    }

    fn record(&self, phase: &str, step: u64, response: &PolicyResponse) -> EpisodeRecord {
        let is_late =
            self.fault == Fault::Stragglers && phase == "step" && (response.row_index as u64 + step).is_multiple_of(4);
        let is_refused = phase == "step" && matches!(self.fault, Fault::Refusal(from) if step >= from);
        let rejection = |code: &str| Err(Rejection { code: code.into(), detail: String::new() });
        let outcome = match (is_late, is_refused) {
            (true, _) => rejection("deadline"),
            (_, true) => rejection("refused"),
            _ => Ok((self.pays)(response)),
        };
        let id = format!("{phase}-{step}/{}/{}", response.row_index, response.sample_index);
        episode(id, step, response, outcome)
    }
}

/// One split's view of a world.
struct Split<'a> {
    world: &'a World,
    phase: &'static str,
}

impl Environment for Split<'_> {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let started = Instant::now();
        self.world.meet_fault()?;
        std::thread::sleep(self.world.pause * responses.len() as u32);
        let records: Vec<EpisodeRecord> =
            responses.iter().map(|response| self.world.record(self.phase, step, response)).collect();
        self.world.n_scored.fetch_add(records.len(), Ordering::SeqCst);
        self.world.log.lock().unwrap().extend(records.iter().map(|record| serde_json::to_string(record).unwrap()));
        let timings = CallTimings { retrieve_s: started.elapsed().as_secs_f64(), ..CallTimings::default() };
        Ok(ScoredResponses { records, timings })
    }

    fn mark(&self) -> Result<u64, EnvironmentError> {
        Ok(self.world.log.lock().unwrap().len() as u64)
    }

    fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        self.world.log.lock().unwrap().truncate(mark as usize);
        Ok(())
    }
}

impl Recorder {
    /// All figures but those of time and memory.
    pub(crate) fn figures(&self) -> Vec<(u64, Metrics)> {
        let is_figure = |name: &String| !name.starts_with("timing_s/") && !name.starts_with("perf/");
        let of_line = |(step, metrics): &(u64, Metrics)| {
            let kept = metrics.iter().filter(|(name, _)| is_figure(name));
            (*step, kept.map(|(name, value)| (name.clone(), *value)).collect())
        };
        self.0.iter().map(of_line).collect()
    }
}

pub(crate) const BATCH: usize = 10;

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

/// What is left of a run.
pub(crate) struct Outcome {
    pub(crate) summary: Result<RlSummary, TrainError>,
    /// Bits of the adapter's values.
    pub(crate) adapter: Vec<u32>,
}

/// One process: runs, or goes on with, an optimisation in `folder`.
pub(crate) fn run(
    model: &Model,
    config: &RlConfig,
    world: &World,
    folder: &Path,
    recorder: &mut dyn MetricSink,
) -> Outcome {
    run_as(&Mesh::alone(), model, config, world, folder, recorder)
}

/// The same with several ranks of the processor, which share its model. What is told is the first rank's, and every rank's
/// adapter.
pub(crate) fn run_with_ranks(
    world_size: usize,
    model: &Model,
    config: &RlConfig,
    world: &World,
    folder: &Path,
    recorder: &mut Recorder,
) -> (Outcome, Vec<Vec<u32>>) {
    let recorder = Mutex::new(recorder);
    let outcomes = Mutex::new(BTreeMap::new());
    let ended = run_ranks(world_size, |ranks| {
        let (rank, mut own) = (ranks.rank(), Recorder::default());
        let mut held = ranks.is_first().then(|| recorder.lock().unwrap());
        let sink = held.as_mut().map_or(&mut own, |held| &mut **held);
        let Outcome { summary, adapter } = run_as(&Mesh::of_data(ranks), model, config, world, folder, sink);
        outcomes.lock().unwrap().insert(rank, adapter);
        summary
    });
    let summary = match ended {
        Ok(summaries) => Ok(summaries.into_iter().next().unwrap()),
        Err(failures) => Err(match failures.into_iter().find(|failure| failure.rank() == 0) {
            Some(RankFailure::Failed { error, .. }) => error,
            other => panic!("the first rank: {other:?}"),
        }),
    };
    let adapters: Vec<Vec<u32>> = outcomes.into_inner().unwrap().into_values().collect();
    (Outcome { summary, adapter: adapters[0].clone() }, adapters)
}

fn run_as(
    mesh: &Mesh,
    model: &Model,
    config: &RlConfig,
    world: &World,
    folder: &Path,
    recorder: &mut dyn MetricSink,
) -> Outcome {
    let settings = LoraSettings::all_linear(4, 8.0);
    let policy = LoraAdapter::new(&model.decoder, settings.clone(), 5).unwrap();
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| model.tokenizer.encode(&format!("a{i}b")).unwrap()).collect();
    let (train_split, val_split) = (Split { world, phase: "step" }, Split { world, phase: "val" });
    let task = RlTask {
        decoder: &model.decoder,
        base_path: model.folder.path(),
        policy: &policy,
        reference: None,
        tokenizer: &model.tokenizer,
        train: RlData { prompts: &prompts, environment: &train_split },
        val: RlData { prompts: &prompts, environment: &val_split },
        config,
        tokens_per_pass: 512,
        gradient_checkpointing: false,
        critic_lora: settings,
        seed: 11,
        mesh,
        fingerprint: Some("same"),
        output_dir: folder,
        progress: &Silent,
        stop: &world.stop,
    };
    let summary = train(&task, recorder);
    let values = policy.vars().values().flat_map(|var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    Outcome { summary, adapter: values.map(f32::to_bits).collect() }
}

/// Everything a finished run leaves, as bytes.
pub(crate) fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let names = [
        "best/adapter_config.json",
        "best/adapter_model.safetensors",
        "best/critic/value_head.safetensors",
        "last/adapter_config.json",
        "last/adapter_model.safetensors",
        "last/critic/value_head.safetensors",
    ];
    names.iter().map(|name| ((*name).to_owned(), std::fs::read(folder.join(name)).unwrap())).collect()
}
