//! Tests of both sides of the C interface: [`Library`] calls the library's functions, and every failure is returned as an error.

use super::*;
use querl_core::config::{ModelConfig, RlConfig, SftConfig};
use querl_core::ports::{
    Environment, EnvironmentError, FaultKind, LogMark, PluginFault, PolicyResponse, Progress, RolloutEngine,
    RolloutPrompt, RolloutResponse, RolloutSampling, ScoredResponses,
};
use querl_core::records::{CallFailure, Message};
use querl_model::{DType, Decoder, DecoderConfig, TokenizerSettings, train_tokenizer};
use querl_train::job::{
    CallbackError, Device, GenerateJob, GeneratedResponse, Library, LibraryError, NoMetrics, Resources, RlJob, SftJob,
    run_sft,
};
use querl_train::sft::SftSummary;
use querl_train::{Example, MetricSink, Metrics};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Seed with which a fine-tuning panics in tests.
const PANIC: u64 = 0xdead;

pub(super) fn panic_if_requested(work: &Work) {
    assert!(!matches!(work, Work::Sft(job) if job.seed == PANIC), "index 7 is out of bounds");
}

fn address(name: &str) -> Option<*const ()> {
    Some(match name {
        "querl_cuda_abi" => querl_cuda_abi as *const (),
        "querl_cuda_describe" => querl_cuda_describe as *const (),
        "querl_cuda_run" => querl_cuda_run as *const (),
        "querl_cuda_free" => querl_cuda_free as *const (),
        _ => return None,
    })
}

fn library() -> Library {
    // SAFETY: these are the functions themselves.
    unsafe { Library::connect(address, env!("CARGO_PKG_VERSION")) }.unwrap()
}

#[derive(Default)]
struct Lines(Mutex<Vec<String>>);

impl Progress for Lines {
    fn update(&self, _: u64, _: u64, note: &str) {
        self.0.lock().unwrap().push(note.into());
    }

    fn line(&self, text: &str) {
        self.0.lock().unwrap().push(text.into());
    }
}

#[derive(PartialEq)]
enum OnRecord {
    Keep,
    Panic,
    SetStopFlag,
    FullDisk,
}

struct Sink<'a> {
    records: Vec<(String, u64, Metrics)>,
    on_record: OnRecord,
    stop: &'a AtomicBool,
}

impl MetricSink for Sink<'_> {
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> io::Result<()> {
        match self.on_record {
            OnRecord::Panic => panic!("the log is gone"),
            OnRecord::SetStopFlag => self.stop.store(true, Ordering::Relaxed),
            OnRecord::FullDisk => return Err(io::Error::from_raw_os_error(28)),
            OnRecord::Keep => {}
        }
        self.records.push((stage.into(), step, metrics.clone()));
        Ok(())
    }

    fn mark(&mut self) -> io::Result<LogMark> {
        Ok(LogMark { length: self.records.len() as u64, crc32c: None })
    }

    fn rewind(&mut self, mark: LogMark) -> io::Result<Option<String>> {
        self.records.truncate(mark.length as usize);
        Ok(None)
    }
}

/// An environment whose plugin violates its contract.
struct Faulty;

impl Environment for Faulty {
    fn score(&self, _: u64, _: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        Err(fault())
    }
}

fn fault() -> EnvironmentError {
    let (plugin, version, message) = ("reward".into(), "1.0.0".into(), "returned 7 scores for 8 episodes".into());
    PluginFault { plugin, version, message, kind: FaultKind::TooManyDropped, log: Vec::new() }.into()
}

/// A rollout server that is down.
struct NoServer;

impl RolloutEngine for NoServer {
    fn set_policy(&self, _: u64, adapter: &Path) -> Result<(), CallFailure> {
        assert!(adapter.join("adapter_model.safetensors").is_file());
        Err(down())
    }

    fn generate(&self, _: &[RolloutPrompt], _: &RolloutSampling) -> Result<Vec<Vec<RolloutResponse>>, CallFailure> {
        Err(down())
    }
}

fn down() -> CallFailure {
    let kind = querl_core::records::FailureKind::Unreachable;
    CallFailure { kind, message: "GET http://127.0.0.1:8000/v1/models: Connection refused".into() }
}

fn with_callbacks<R>(stop: bool, run: impl FnOnce(&Callbacks<'_>) -> R) -> R {
    let (lines, metrics, stop) = (Lines::default(), Mutex::new(NoMetrics), AtomicBool::new(stop));
    run(&Callbacks { progress: &lines, metrics: &metrics, stop: &stop })
}

fn make_model(folder: &Path) {
    let texts = ["eat fish oil after meals".to_owned(), "when is it taken".to_owned()];
    let special_tokens = &["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let settings = TokenizerSettings { vocab_size: 280, special_tokens };
    let tokenizer = train_tokenizer(&texts, &settings, &folder.join("tokenizer.json")).unwrap();
    let config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true,
        "vocab_size": tokenizer.get_vocab_size(true), "hidden_act": "silu", "attention_bias": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let special = serde_json::json!({ "eos_token": "<|im_end|>", "chat_template": template });
    std::fs::write(folder.join("tokenizer_config.json"), special.to_string()).unwrap();
    let shapes = DecoderConfig::load(&folder.join("config.json")).unwrap();
    Decoder::init(shapes, 1).unwrap().save(folder, DType::F32).unwrap();
}

fn model(folder: &Path) -> ModelConfig {
    let path = folder.join("model");
    std::fs::create_dir(&path).unwrap();
    make_model(&path);
    serde_json::from_value(serde_json::json!({"path": path, "tokens_per_pass": 64})).unwrap()
}

fn cpu() -> Resources {
    Resources { devices: vec![Device::Cpu], threads: 1 }
}

fn sft_job(folder: &Path) -> SftJob {
    let config =
        SftConfig { lora_rank: 2, max_steps: 3, batch_size: 1, gradient_accumulation_steps: 1, ..SftConfig::default() };
    let row = |first| Example { prompt: vec![first, 5, 6], response: vec![7, 2] };
    let (train, output_dir) = ((0..4).map(row).collect(), folder.join("sft"));
    let (model, fingerprint) = (model(folder), Some("inputs".into()));
    SftJob { model, seed: 3, config, train, val: Vec::new(), fingerprint, output_dir }
}

fn generate_job(folder: &Path) -> GenerateJob {
    let prompt = |content: &str| vec![Message { role: "user".into(), content: content.into() }];
    let limits = RlConfig { max_new_tokens: 4, ..RlConfig::default() };
    let prompts = ["fish", "oil", "after"].map(prompt).into();
    GenerateJob { model: model(folder), adapter: None, prompts, n_beams: 1, samples: None, limits, batch_size: 2 }
}

/// A fine-tuning by `run`, with its metrics (times left out), progress and adapter.
type Run = fn(&SftJob, &Resources, &Callbacks<'_>) -> Result<SftSummary, JobError>;
type Outputs = (SftSummary, Vec<(String, u64, Metrics)>, Vec<String>, Vec<u8>);

fn fine_tune(run: Run, on_record: OnRecord) -> Result<Outputs, (FailureKind, String)> {
    let folder = tempfile::tempdir().unwrap();
    let (job, lines, stop) = (sft_job(folder.path()), Lines::default(), AtomicBool::new(false));
    let sink = Mutex::new(Sink { records: Vec::new(), on_record, stop: &stop });
    let summary = match run(&job, &cpu(), &Callbacks { progress: &lines, metrics: &sink, stop: &stop }) {
        Ok(summary) => summary,
        Err(JobError::Failed(Failure { kind, message })) => {
            return Err((kind, message.replace(&folder.path().display().to_string(), "FOLDER")));
        }
        Err(other) => panic!("{other:?}"),
    };
    let without_times = |metrics: Metrics| {
        let is_result = |name: &String| !name.starts_with("timing_s/") && !name.starts_with("perf/");
        metrics.into_iter().filter(|(name, _)| is_result(name)).collect::<Metrics>()
    };
    let records = sink.into_inner().unwrap().records.into_iter();
    let records = records.map(|(stage, step, metrics)| (stage, step, without_times(metrics))).collect();
    let adapter = std::fs::read(folder.path().join("sft/best/adapter_model.safetensors")).unwrap();
    Ok((summary, records, lines.0.into_inner().unwrap(), adapter))
}

fn across(job: &SftJob, resources: &Resources, callbacks: &Callbacks<'_>) -> Result<SftSummary, JobError> {
    library().run_sft(job, resources, callbacks)
}

#[test]
fn a_job_in_the_library_has_the_results_of_one_in_the_program() {
    let [across, within] = [across as Run, run_sft].map(|run| fine_tune(run, OnRecord::Keep).unwrap());
    assert_eq!(across.0.n_steps, 3);
    assert_eq!(across, within);
}

#[test]
fn a_panic_in_the_library_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let job = SftJob { seed: PANIC, ..sft_job(folder.path()) };
    let error = with_callbacks(false, |callbacks| across(&job, &cpu(), callbacks)).unwrap_err().to_string();
    assert_eq!(error, "libquerl_cuda panicked: index 7 is out of bounds; internal error, please report it");
}

#[test]
fn a_panic_of_the_host_is_caught_on_its_own_side() {
    let (kind, message) = fine_tune(across, OnRecord::Panic).unwrap_err();
    assert_eq!((kind, message.as_str()), (FailureKind::Failed, "FOLDER/sft: the host panicked: the log is gone"));
}

#[test]
fn a_stop_is_seen_while_the_job_runs_and_the_state_is_saved() {
    let (kind, message) = fine_tune(across, OnRecord::SetStopFlag).unwrap_err();
    assert_eq!(kind, FailureKind::Interrupted);
    assert!(message.starts_with("interrupted at sft step 1; the state is saved"), "{message}");
}

#[test]
fn a_full_disk_of_the_host_keeps_its_message() {
    let (kind, message) = fine_tune(across, OnRecord::FullDisk).unwrap_err();
    let expected = "FOLDER/sft: the disk or its quota is full; make room on it: No space left on device (os error 28)";
    assert_eq!((kind, message.as_str()), (FailureKind::Failed, expected));
}

#[test]
fn an_error_of_the_environment_is_returned_as_itself() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = vec![vec![3, 4, 5]; 2];
    let job = RlJob {
        model: model(folder.path()),
        seed: 3,
        config: RlConfig { max_steps: 1, batch_size: 2, max_new_tokens: 3, ..RlConfig::default() },
        lora: SftConfig { lora_rank: 2, ..SftConfig::default() },
        adapter: None,
        train_prompts: prompts.clone(),
        val_prompts: prompts,
        max_mismatch_kl: None,
        fingerprint: None,
        stop_after: None,
        output_dir: folder.path().join("rl"),
    };
    let environments = Environments { train: &Faulty, val: &Faulty, rollouts: Some(&NoServer) };
    let run = |job: &RlJob| {
        with_callbacks(false, |callbacks| library().run_rl(job, &cpu(), &environments, callbacks)).unwrap_err()
    };
    let error = run(&job);
    assert!(matches!(&error, JobError::Environment(error) if *error == fault()), "{error:?}");
    let error = run(&RlJob { max_mismatch_kl: Some(0.1), ..job });
    assert!(
        matches!(&error, JobError::Environment(EnvironmentError::Service(failure)) if *failure == down()),
        "{error:?}"
    );
}

#[test]
fn responses_come_in_batches_and_the_callback_may_reject_more() {
    let folder = tempfile::tempdir().unwrap();
    let (job, mut responses) = (generate_job(folder.path()), Vec::new());
    let mut keep = |batch: Vec<GeneratedResponse>| {
        responses.extend(batch);
        Ok(())
    };
    with_callbacks(false, |callbacks| library().run_generate(&job, &cpu(), &mut keep, callbacks)).unwrap();
    assert!(responses.len() == 3 && responses.iter().all(|response| (1..=4).contains(&response.n_tokens)));
    let mut reject = |_| Err(CallbackError("enough".into()));
    let error = with_callbacks(false, |callbacks| library().run_generate(&job, &cpu(), &mut reject, callbacks));
    assert!(matches!(&error, Err(JobError::Callback(CallbackError(message))) if message == "enough"), "{error:?}");
}

#[test]
fn a_stopped_generation_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let job = generate_job(folder.path());
    let run = |callbacks: &Callbacks<'_>| library().run_generate(&job, &cpu(), &mut |_| Ok(()), callbacks);
    let error = with_callbacks(true, run).unwrap_err();
    assert!(matches!(&error, JobError::Failed(failure) if failure.kind == FailureKind::Interrupted), "{error:?}");
}

#[test]
fn a_missing_model_is_for_the_user_to_correct() {
    let folder = tempfile::tempdir().unwrap();
    let job = sft_job(folder.path());
    std::fs::remove_file(folder.path().join("model/model.safetensors")).unwrap();
    let [across, within] = [across as Run, run_sft]
        .map(|run| with_callbacks(false, |callbacks| run(&job, &cpu(), callbacks)).unwrap_err());
    assert!(matches!(&across, JobError::Failed(failure) if failure.kind == FailureKind::Usage), "{across:?}");
    assert_eq!(across.to_string(), within.to_string());
}

#[test]
fn a_device_that_this_build_does_not_have_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let job = sft_job(folder.path());
    let error = |devices: Vec<Device>| {
        let resources = Resources { devices, ..cpu() };
        with_callbacks(false, |callbacks| across(&job, &resources, callbacks)).unwrap_err()
    };
    let no_gpu = error(vec![Device::Cuda(1000)]);
    let is_named = cfg!(feature = "cuda") || no_gpu.to_string().contains("no device cuda:1000");
    assert!(is_named && matches!(no_gpu, JobError::Failed(_)), "{no_gpu}");
    assert!(error(Vec::new()).to_string().contains("names no device"));
}

#[test]
fn versions_are_checked_before_anything_else() {
    extern "C" fn next() -> u32 {
        interface::ABI + 1
    }
    // Of a library with another interface version, only the version is looked up.
    let find = |name: &'static str| (name == "querl_cuda_abi").then_some(next as *const ());
    // SAFETY: the one function has the signature of the interface.
    let error = unsafe { Library::connect(find, "0.1.0") }.unwrap_err();
    assert_eq!(error, LibraryError::Abi { found: interface::ABI + 1, expected: interface::ABI });
    // SAFETY: these are the functions themselves, one of them missing.
    let error = unsafe { Library::connect(|name| address(name).filter(|_| name != "querl_cuda_run"), "0.1.0") };
    assert_eq!(error.unwrap_err(), LibraryError::Export("querl_cuda_run"));
    // SAFETY: these are the functions themselves.
    let error = unsafe { Library::connect(address, "0.0.9") }.unwrap_err();
    let expected = "0.0.9".to_owned();
    assert_eq!(error, LibraryError::Version { found: env!("CARGO_PKG_VERSION").into(), expected });
}

/// The library's result for a program of another version, or for an invalid job.
fn answer(abi: u32, job: &[u8]) -> (i32, JobResult) {
    unsafe extern "C" fn event(_: *mut std::ffi::c_void, _: *const u8, _: usize) {}
    unsafe extern "C" fn request(_: *mut std::ffi::c_void, _: *const u8, _: usize, _: *mut Bytes) -> i32 {
        interface::FAILED
    }
    unsafe extern "C" fn free(_: Bytes) {}
    let stop = AtomicBool::new(false);
    let table = HostTable { abi, context: std::ptr::null_mut(), event, request, free, stop: &raw const stop };
    let mut out = Bytes::EMPTY;
    // SAFETY: job, table and flag outlive the call.
    let status = unsafe { querl_cuda_run(job.as_ptr(), job.len(), &raw const table, &raw mut out) };
    // SAFETY: the library wrote the bytes, and they are freed once.
    let result = serde_json::from_slice(unsafe { out.as_slice() }).unwrap();
    // SAFETY: as above.
    unsafe { querl_cuda_free(out) };
    (status, result)
}

#[test]
fn an_invalid_job_is_an_error() {
    let (status, JobResult::Failed(failure)) = answer(interface::ABI, b"{\"device\": \"tpu\"}") else {
        panic!("no failure")
    };
    assert_eq!(status, interface::FAILED);
    assert!(failure.message.starts_with("invalid job: "), "{failure}");
    let (_, JobResult::Failed(failure)) = answer(interface::ABI + 1, b"{}") else { panic!("no failure") };
    let versions = (interface::ABI + 1, interface::ABI);
    let expected = format!("the program's interface is version {} and the library's is {}", versions.0, versions.1);
    assert_eq!(failure.message, expected);
    let (_, JobResult::Failed(failure)) = answer(interface::ABI, b"") else { panic!("no failure") };
    assert!(failure.message.starts_with("invalid job: "), "{failure}");
}
