//! Running a job on the devices of this build: load the models on every rank, then train or generate.

use super::{
    Callbacks, Device, Environments, Failure, FailureKind, GenerateJob, GeneratedResponse, JobError, NoMetrics,
    Resources, ResponseCallback, RlJob, SftJob, lock,
};
use crate::rl::{self, RlData, RlSummary, RlTask, ServerRollouts};
use crate::sft::{self, SftSummary, SftTask};
use crate::{MetricSink, Policy};
use querl_core::config::{ModelConfig, SftConfig, TuningMethod};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, Progress, ScoredResponses, Silent};
use querl_core::records::Message;
use querl_model::{
    ComputeDevice, Decoder, Decoding, Engine, EngineSettings, Generated, GenerationRequest, LoraAdapter, LoraSettings,
    Mesh, ModelError, Modules, PrefixLife, RankFailure, Ranks, SamplingSettings, TextTokenizer, Weights, run_ranks,
};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Runs supervised fine-tuning; resumes an earlier job with the same fingerprint.
///
/// # Errors
/// This build does not have a device, the model cannot be loaded, or training fails or is stopped.
pub fn run_sft(job: &SftJob, resources: &Resources, callbacks: &Callbacks<'_>) -> Result<SftSummary, JobError> {
    on_each_rank(resources, &job.model, |rank| {
        let config = &job.config;
        let (decoder, adapter) = match config.method {
            TuningMethod::Lora => {
                let decoder = rank.load_decoder(Weights::Frozen)?;
                let adapter = LoraAdapter::new(&decoder, lora_settings(config), job.seed)?;
                (decoder, Some(adapter))
            }
            TuningMethod::Full => (rank.load_decoder(Weights::Trained)?, None),
        };
        let task = SftTask {
            policy: Policy { decoder: &decoder, adapter: adapter.as_ref() },
            base_path: &job.model.path,
            train: &job.train,
            val: &job.val,
            config,
            tokens_per_pass: job.model.tokens_per_pass,
            gradient_checkpointing: job.model.gradient_checkpointing,
            seed: job.seed,
            mesh: &rank.mesh,
            fingerprint: job.fingerprint.as_deref(),
            output_dir: &job.output_dir,
            progress: rank.progress(callbacks),
            stop: callbacks.stop,
        };
        rank.with_metrics(callbacks, |sink| Ok(sft::train(&task, sink)?))
    })
}

/// Runs reinforcement learning with the environments' scores as rewards; resumes an earlier job with the same fingerprint.
///
/// # Errors
/// As [`run_sft`], and those of the environments.
pub fn run_rl(
    job: &RlJob,
    resources: &Resources,
    environments: &Environments<'_>,
    callbacks: &Callbacks<'_>,
) -> Result<RlSummary, JobError> {
    on_each_rank(resources, &job.model, |rank| {
        let tokenizer = TextTokenizer::for_policy(&job.model)?;
        let decoder = rank.load_decoder(Weights::Frozen)?;
        let load_adapter = |path| load_adapter(path, &decoder);
        let reference = job.adapter.as_deref().map(load_adapter).transpose()?;
        let policy = match job.adapter.as_deref() {
            Some(path) => load_adapter(path)?,
            None => LoraAdapter::new(&decoder, lora_settings(&job.lora), job.seed)?,
        };
        let task = RlTask {
            decoder: &decoder,
            base_path: &job.model.path,
            policy: &policy,
            reference: reference.as_ref(),
            tokenizer: &tokenizer,
            train: RlData { prompts: &job.train_prompts, environment: rank.environment(environments.train) },
            val: RlData { prompts: &job.val_prompts, environment: rank.environment(environments.val) },
            rollouts: environments
                .rollouts
                .zip(job.max_mismatch_kl)
                .map(|(engine, max_mismatch_kl)| ServerRollouts { engine, max_mismatch_kl }),
            config: &job.config,
            tokens_per_pass: job.model.tokens_per_pass,
            gradient_checkpointing: job.model.gradient_checkpointing,
            critic_lora: lora_settings(&job.lora),
            seed: job.seed,
            mesh: &rank.mesh,
            fingerprint: job.fingerprint.as_deref(),
            output_dir: &job.output_dir,
            progress: rank.progress(callbacks),
            stop_after: job.stop_after,
            stop: callbacks.stop,
        };
        rank.with_metrics(callbacks, |sink| Ok(rl::train(&task, sink)?))
    })
}

/// Generates responses to every prompt and passes them to `on_responses` in batches; checks the stop flag between batches.
///
/// # Errors
/// As [`run_sft`], and those of `on_responses`.
pub fn run_generate(
    job: &GenerateJob,
    resources: &Resources,
    on_responses: &mut ResponseCallback<'_>,
    callbacks: &Callbacks<'_>,
) -> Result<(), JobError> {
    let on_responses = Mutex::new(on_responses);
    on_each_rank(resources, &job.model, |rank| {
        let decoder = rank.load_decoder(Weights::Frozen)?;
        let adapter = job.adapter.as_deref().map(|path| load_adapter(path, &decoder)).transpose()?;
        let decoding = job.samples.map_or_else(|| Decoding::with_beams(job.n_beams), |_| Decoding::Sample);
        let tokenizer = TextTokenizer::for_policy(&job.model)?;
        // Prefixes are not cached between prompts, so that each response takes as long as for a single user.
        let settings = EngineSettings {
            prefix_life: PrefixLife::Call,
            max_prefix_tokens: 0,
            int8_activations: true,
            ..EngineSettings::default()
        };
        let mut engine = Engine::new(&decoder, settings)?;
        engine.set_policy(adapter.as_ref(), 0)?;
        let has_own_device = rank.device != Device::Cpu || rank.mesh.all.world_size() == 1;
        let sampling = rl::sampling(&job.limits);
        let mut generator = Generator {
            engine,
            tokenizer,
            decoding,
            sampling,
            n_per_prompt: job.n_per_prompt(),
            seed: job.samples.map_or(0, |samples| samples.seed),
            measures_latency: has_own_device,
        };
        let numbered: Vec<(u64, &Vec<Message>)> = (0..).zip(&job.prompts).collect();
        for prompts in numbered.chunks(job.batch_size.max(1)) {
            if rank.mesh.all.any(callbacks.stop.load(Ordering::Relaxed))? {
                let message = "interrupted; finished work is saved, run the same command to resume".into();
                return Err(Failure { kind: FailureKind::Interrupted, message }.into());
            }
            let responses = generator.respond_all(&rank.mesh.data, prompts)?;
            if rank.is_first() {
                lock(&on_responses)(responses)?;
            }
        }
        Ok(())
    })
}

struct Generator<'a> {
    engine: Engine<'a>,
    tokenizer: TextTokenizer,
    decoding: Decoding,
    sampling: SamplingSettings,
    n_per_prompt: usize,
    seed: u64,
    measures_latency: bool,
}

impl Generator<'_> {
    /// Generates responses to all prompts, which are distributed over the ranks. Responses to one prompt are consecutive. The index of a
    /// prompt is the seed of its samples.
    fn respond_all(
        &mut self,
        ranks: &Ranks,
        prompts: &[(u64, &Vec<Message>)],
    ) -> Result<Vec<GeneratedResponse>, ModelError> {
        let mine = prompts.iter().skip(ranks.rank()).step_by(ranks.world_size());
        let mine = mine.map(|(number, prompt)| self.respond(*number, prompt)).collect::<Result<Vec<_>, _>>()?;
        let all = ranks.all_gather(mine)?;
        let responses = |index: usize| all[index % all.len()][index / all.len()].clone();
        Ok((0..prompts.len()).flat_map(responses).collect())
    }

    /// Generates for one prompt at a time, so that the measured latency is that of a single user.
    fn respond(&mut self, number: u64, messages: &[Message]) -> Result<Vec<GeneratedResponse>, ModelError> {
        let started = Instant::now();
        let prompt = self.tokenizer.encode_prompt(messages)?;
        let seed = self.seed.wrapping_add(number);
        let request = GenerationRequest { prompt: &prompt, seed, n: self.n_per_prompt };
        let generated = self.engine.generate(&[request], self.decoding, &self.sampling, &self.tokenizer)?;
        let texts = |generated: Generated| Ok((self.tokenizer.decode(&generated.token_ids)?, generated));
        let decoded = generated.into_iter().flatten().map(texts).collect::<Result<Vec<_>, ModelError>>()?;
        let latency_ms = self.measures_latency.then(|| started.elapsed().as_secs_f64() * 1e3);
        let response = |(text, generated): (String, Generated)| GeneratedResponse {
            text: self.sampling.before_stop(&text).to_owned(),
            n_tokens: generated.token_ids.len() as u32,
            truncated: generated.truncated,
            latency_ms,
            mean_logprob: mean(&generated.logprobs),
        };
        Ok(decoded.into_iter().map(response).collect())
    }
}

/// The mean; `None` if there are no numbers or the mean is not finite.
fn mean(numbers: &[f32]) -> Option<f64> {
    let sum: f64 = numbers.iter().map(|number| f64::from(*number)).sum();
    Some(sum / numbers.len() as f64).filter(|mean| mean.is_finite())
}

struct Rank<'a> {
    model: &'a ModelConfig,
    device: Device,
    mesh: Mesh,
}

impl Rank<'_> {
    fn is_first(&self) -> bool {
        self.mesh.all.is_first()
    }

    /// Loads the base model, or this rank's shard of it, on its device.
    fn load_decoder(&self, weights: Weights) -> Result<Decoder, JobError> {
        let (model, place) = (self.model, open_device(self.device)?);
        for ranks in [&self.mesh.data, &self.mesh.tensor] {
            place.connect(ranks).map_err(ModelError::from)?;
        }
        match weights {
            Weights::Frozen => Ok(Decoder::load_shard(&model.path, model.dtype, &place, &self.mesh.tensor)?),
            Weights::Trained if self.mesh.is_split() => {
                let message = "full fine-tuning does not support tensor parallelism; set model.tensor_parallel to 1";
                Err(Failure::usage(message).into())
            }
            Weights::Trained => Ok(Decoder::load_on(&model.path, weights, model.dtype, &place)?),
        }
    }

    /// The caller's progress display on the first rank; none on the others.
    fn progress<'a>(&self, callbacks: &Callbacks<'a>) -> &'a dyn Progress {
        if self.is_first() { callbacks.progress } else { &Silent }
    }

    fn environment<'a>(&self, environment: &'a dyn Environment) -> &'a dyn Environment {
        if self.is_first() { environment } else { &NoEnvironment }
    }

    /// Runs `train` with the caller's metric sink on the first rank.
    fn with_metrics<R>(
        &self,
        callbacks: &Callbacks<'_>,
        train: impl FnOnce(&mut dyn MetricSink) -> Result<R, JobError>,
    ) -> Result<R, JobError> {
        if self.is_first() { train(&mut *lock(callbacks.metrics)) } else { train(&mut NoMetrics) }
    }
}

/// Runs `work` for each device, on the calling thread if there is one, else each on a separate thread. Returns the result of the first
/// rank.
fn on_each_rank<R: Send>(
    resources: &Resources,
    model: &ModelConfig,
    work: impl Fn(&Rank<'_>) -> Result<R, JobError> + Sync,
) -> Result<R, JobError> {
    let Resources { devices, threads } = resources;
    querl_model::set_threads(*threads);
    let (n_devices, size) = (devices.len(), model.tensor_parallel);
    if !n_devices.is_multiple_of(size) {
        let message = format!("{n_devices} devices are not a multiple of model.tensor_parallel = {size}");
        return Err(Failure::usage(message).into());
    }
    match devices.as_slice() {
        [] => Err(Failure::failed("the job names no device; internal error, please report it").into()),
        [device] => work(&Rank { model, device: *device, mesh: Mesh::alone() }),
        devices => {
            if devices.iter().any(|device| *device != Device::Cpu) && querl_model::has_accelerators() {
                querl_model::nccl_version().map_err(|error| Failure::usage(error.to_string()))?;
            }
            let results = run_ranks(n_devices, |ranks| {
                let device = devices[ranks.rank()];
                work(&Rank { model, device, mesh: Mesh::new(ranks, size).map_err(ModelError::from)? })
            });
            match results {
                Ok(results) => Ok(results.into_iter().next().expect("a job has at least one rank")),
                Err(failures) => Err(decisive_failure(failures, devices)),
            }
        }
    }
}

/// The failure to report: the first rank's if it saved the state, else the earliest, which caused the others.
fn decisive_failure(failures: Vec<RankFailure<JobError>>, devices: &[Device]) -> JobError {
    let has_saved = |failure: &RankFailure<JobError>| {
        let kinds = [FailureKind::OutOfMemory, FailureKind::Interrupted];
        matches!(failure, RankFailure::Failed { rank: 0, error: JobError::Failed(failure) } if kinds.contains(&failure.kind))
    };
    let chosen = failures.iter().position(has_saved).unwrap_or(0);
    let failure = failures.into_iter().nth(chosen).expect("ranks failed");
    let name = |rank: usize| format!("rank {rank} ({})", devices[rank]);
    match failure {
        RankFailure::Failed { rank: 0, error } => error,
        RankFailure::Failed { rank, error: JobError::Failed(Failure { kind, message }) } => {
            Failure { kind, message: format!("{}: {message}", name(rank)) }.into()
        }
        RankFailure::Failed { error, .. } => error,
        RankFailure::Panicked { rank, message } => {
            let message = format!("{} panicked: {message}; internal error, please report it", name(rank));
            Failure::failed(message).into()
        }
    }
}

/// LoRA settings of new policy and critic adapters, from the SFT configuration.
pub fn lora_settings(sft: &SftConfig) -> LoraSettings {
    LoraSettings {
        use_rslora: sft.use_rslora,
        use_dora: sft.use_dora,
        dropout: sft.lora_dropout,
        target_modules: Modules::from_names(&sft.lora_target_modules),
        ..LoraSettings::all_linear(sft.lora_rank, sft.lora_alpha)
    }
}

fn open_device(device: Device) -> Result<ComputeDevice, JobError> {
    match device {
        Device::Cpu => Ok(ComputeDevice::Cpu),
        Device::Cuda(index) => Ok(ComputeDevice::open_gpu(index)?),
    }
}

/// Loads an adapter, or this rank's shard of it, on the base's device.
fn load_adapter(path: &Path, decoder: &Decoder) -> Result<LoraAdapter, ModelError> {
    LoraAdapter::load(path, decoder.config())?.for_decoder(decoder)
}

/// The environment of all ranks but the first, which do not score.
struct NoEnvironment;

impl Environment for NoEnvironment {
    fn score(&self, _: u64, _: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let message = "a rank after the first requested scores; internal error, please report it";
        Err(EnvironmentError::Record(message.into()))
    }
}
