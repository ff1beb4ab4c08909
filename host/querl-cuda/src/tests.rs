//! The border from both sides: the program's client calls the library's functions, and whatever goes wrong comes back in words.
#![allow(clippy::unwrap_used)]

use super::*;
use querl_core::config::{BaseDtype, ModelConfig, RlConfig, SftConfig};
use querl_core::ports::{EnvironmentError, FaultKind, PluginFault, PolicyResponse, Progress, ScoredResponses};
use querl_core::records::{Message, Split};
use querl_device::{
    Answered, Device, Fitting, Generating, Host, Library, LibraryError, Outcome, Refused, Reinforcing, Work,
};
use querl_model::{DType, Decoder, DecoderConfig, TokenizerSettings, train_tokenizer};
use querl_train::{Example, Metrics};
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// A job with this seed panics, in tests.
const PANIC: u64 = 0xdead;

pub(super) fn panic_if_asked(job: &Job) {
    assert!(job.seed != PANIC, "index 7 is out of bounds");
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

/// A host that does one thing when it is asked for it, and keeps what it hears.
#[derive(Default)]
struct Told {
    stop: AtomicBool,
    lines: Mutex<Vec<String>>,
    records: Mutex<Vec<(String, u64, Metrics)>>,
    answers: Mutex<Vec<Answered>>,
    conduct: Conduct,
}

#[derive(Default, PartialEq)]
enum Conduct {
    #[default]
    Obliging,
    /// Panics when it is asked to keep figures.
    Panics,
    /// Stops when it hears figures.
    Stops,
    /// Cannot keep figures.
    FullDisk,
    /// A plugin breaks its contract.
    PluginFault,
    /// Takes no answers.
    Refuses,
}

impl Progress for Told {
    fn update(&self, _: u64, _: u64, note: &str) {
        self.lines.lock().unwrap().push(note.into());
    }

    fn line(&self, text: &str) {
        self.lines.lock().unwrap().push(text.into());
    }
}

fn fault() -> EnvironmentError {
    let (plugin, version, message) = ("reward".into(), "1.0.0".into(), "returned 7 scores for 8 episodes".into());
    PluginFault { plugin, version, message, kind: FaultKind::TooManyDropped }.into()
}

impl Host for Told {
    fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    fn record(&self, stage: &str, step: u64, metrics: &Metrics) -> io::Result<()> {
        match self.conduct {
            Conduct::Panics => panic!("the log is gone"),
            Conduct::Stops => self.stop.store(true, Ordering::Relaxed),
            Conduct::FullDisk => return Err(io::Error::from_raw_os_error(28)),
            _ => {}
        }
        self.records.lock().unwrap().push((stage.into(), step, metrics.clone()));
        Ok(())
    }

    fn mark_metrics(&self) -> io::Result<u64> {
        Ok(self.records.lock().unwrap().len() as u64)
    }

    fn rewind_metrics(&self, mark: u64) -> io::Result<()> {
        self.records.lock().unwrap().truncate(mark as usize);
        Ok(())
    }

    fn score(&self, _: Split, _: u64, _: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        Err(fault())
    }

    fn mark_episodes(&self, _: Split) -> Result<u64, EnvironmentError> {
        Ok(0)
    }

    fn rewind_episodes(&self, _: Split, _: u64) -> Result<(), EnvironmentError> {
        Ok(())
    }

    fn take(&self, answers: Vec<Answered>) -> Result<(), Refused> {
        if self.conduct == Conduct::Refuses {
            return Err(Refused("enough".into()));
        }
        self.answers.lock().unwrap().extend(answers);
        Ok(())
    }
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

/// A job in a folder of its own.
fn job(folder: &Path, work: Work) -> Job {
    let path = folder.join("model");
    std::fs::create_dir(&path).unwrap();
    make_model(&path);
    let model = ModelConfig {
        path,
        dtype: BaseDtype::F32,
        tokens_per_pass: 64,
        gradient_checkpointing: false,
        tensor_parallel: 1,
    };
    Job { devices: vec![Device::Cpu], threads: 1, model, seed: 3, work }
}

fn fitting(folder: &Path) -> Work {
    let config =
        SftConfig { lora_rank: 2, max_steps: 3, batch_size: 1, gradient_accumulation_steps: 1, ..SftConfig::default() };
    let row = |first| Example { prompt: vec![first, 5, 6], response: vec![7, 2] };
    let (train, output_dir) = ((0..4).map(row).collect(), folder.join("sft"));
    Work::Sft(Fitting { config, train, val: Vec::new(), fingerprint: Some("inputs".into()), output_dir })
}

fn generating() -> Work {
    let prompt = |content: &str| vec![Message { role: "user".into(), content: content.into() }];
    let limits = RlConfig { max_new_tokens: 4, ..RlConfig::default() };
    let prompts = ["fish", "oil", "after"].map(prompt).into();
    Work::Generate(Generating { adapter: None, prompts, n_beams: 1, limits, n_at_once: 2 })
}

/// How a fine-tuning ends with a host, and what is said then.
fn failure(conduct: Conduct) -> (Ending, String) {
    let folder = tempfile::tempdir().unwrap();
    let host = Told { conduct, ..Told::default() };
    match library().run(&job(folder.path(), fitting(folder.path())), &host) {
        Err(JobError::Failed(Failure { ending, message })) => {
            (ending, message.replace(&folder.path().display().to_string(), "FOLDER"))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_job_is_done_and_its_figures_are_those_of_one_within_the_program() {
    let [across, within] = [0, 1].map(|side| {
        let folder = tempfile::tempdir().unwrap();
        let (host, job) = (Told::default(), job(folder.path(), fitting(folder.path())));
        let outcome = if side == 0 { library().run(&job, &host) } else { querl_device::do_job(&job, &host) };
        let adapter = std::fs::read(folder.path().join("sft/best/adapter_model.safetensors")).unwrap();
        let timeless = |metrics: Metrics| {
            let is_result = |name: &String| !name.starts_with("timing_s/") && !name.starts_with("perf/");
            metrics.into_iter().filter(|(name, _)| is_result(name)).collect::<Metrics>()
        };
        let records = host.records.into_inner().unwrap().into_iter().map(|(stage, step, m)| (stage, step, timeless(m)));
        (outcome.unwrap(), adapter, records.collect::<Vec<_>>(), host.lines.into_inner().unwrap())
    });
    assert!(matches!(across.0, Outcome::Sft(ref summary) if summary.n_steps == 3), "{:?}", across.0);
    assert_eq!(across, within);
}

#[test]
fn a_panic_within_the_library_comes_back_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job { seed: PANIC, ..job(folder.path(), generating()) };
    let error = library().run(&job, &Told::default()).unwrap_err().to_string();
    let expected =
        "libquerl_cuda stopped by itself: index 7 is out of bounds; this is a fault of querl, please report it";
    assert_eq!(error, expected);
}

#[test]
fn a_panic_of_the_host_is_caught_on_its_own_side() {
    let (ending, message) = failure(Conduct::Panics);
    assert_eq!((ending, message.as_str()), (Ending::Failed, "FOLDER/sft: the host panicked: the log is gone"));
}

#[test]
fn a_stop_is_seen_while_the_job_runs_and_what_was_done_is_kept() {
    let (ending, message) = failure(Conduct::Stops);
    assert_eq!(ending, Ending::Interrupted);
    assert!(message.starts_with("interrupted at sft step 1; the state is saved"), "{message}");
}

#[test]
fn a_full_disk_of_the_host_keeps_its_words() {
    let (ending, message) = failure(Conduct::FullDisk);
    assert_eq!((ending, message.as_str()), (Ending::Failed, "FOLDER/sft: No space left on device (os error 28)"));
}

#[test]
fn an_error_of_the_host_is_its_own_again_when_it_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = vec![vec![3, 4, 5]; 2];
    let config = RlConfig { max_steps: 1, batch_size: 2, max_new_tokens: 3, ..RlConfig::default() };
    let work = Work::Rl(Box::new(Reinforcing {
        config,
        lora: SftConfig { lora_rank: 2, ..SftConfig::default() },
        adapter: None,
        train_prompts: prompts.clone(),
        val_prompts: prompts,
        fingerprint: None,
        output_dir: folder.path().join("rl"),
    }));
    let host = Told { conduct: Conduct::PluginFault, ..Told::default() };
    let error = library().run(&job(folder.path(), work), &host).unwrap_err();
    assert!(matches!(&error, JobError::Environment(error) if *error == fault()), "{error:?}");
}

#[test]
fn answers_come_some_at_once_and_a_host_may_refuse_more() {
    let folder = tempfile::tempdir().unwrap();
    let (job, host) = (job(folder.path(), generating()), Told::default());
    assert_eq!(library().run(&job, &host).unwrap(), Outcome::Generated);
    let answers = host.answers.into_inner().unwrap();
    assert!(answers.len() == 3 && answers.iter().all(|answer| (1..=4).contains(&answer.n_tokens)), "{answers:?}");
    let host = Told { conduct: Conduct::Refuses, ..Told::default() };
    let error = library().run(&job, &host).unwrap_err();
    assert!(matches!(&error, JobError::Refused(Refused(words)) if words == "enough"), "{error:?}");
}

#[test]
fn a_stopped_generation_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let host = Told { stop: AtomicBool::new(true), ..Told::default() };
    let error = library().run(&job(folder.path(), generating()), &host).unwrap_err();
    assert!(matches!(&error, JobError::Failed(failure) if failure.ending == Ending::Interrupted), "{error:?}");
}

#[test]
fn a_model_that_is_not_there_is_for_the_user_to_mend() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), fitting(folder.path()));
    std::fs::remove_file(folder.path().join("model/model.safetensors")).unwrap();
    let error = library().run(&job, &Told::default()).unwrap_err();
    assert!(matches!(&error, JobError::Failed(failure) if failure.ending == Ending::Usage), "{error:?}");
    let within = querl_device::do_job(&job, &Told::default()).unwrap_err();
    assert_eq!(error.to_string(), within.to_string());
}

#[test]
fn a_device_that_this_build_has_not_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job { devices: vec![Device::Cuda(1000)], ..job(folder.path(), fitting(folder.path())) };
    let error = library().run(&job, &Told::default()).unwrap_err();
    let is_named = cfg!(feature = "cuda") || error.to_string().contains("no device cuda:1000");
    assert!(is_named && matches!(error, JobError::Failed(_)), "{error}");
    let nobody = Job { devices: Vec::new(), ..job };
    let error = library().run(&nobody, &Told::default()).unwrap_err().to_string();
    assert!(error.contains("names no device"), "{error}");
}

#[test]
fn versions_are_looked_at_before_anything_else() {
    extern "C" fn next() -> u32 {
        interface::ABI + 1
    }
    // Nothing but the version is looked up in a library of another interface.
    let find = |name: &'static str| (name == "querl_cuda_abi").then_some(next as *const ());
    // SAFETY: the one function is as the interface says.
    let error = unsafe { Library::connect(find, "0.1.0") }.unwrap_err();
    assert_eq!(error, LibraryError::Abi { found: interface::ABI + 1, expected: interface::ABI });
    // SAFETY: these are the functions themselves, and one is missing.
    let error = unsafe { Library::connect(|name| address(name).filter(|_| name != "querl_cuda_run"), "0.1.0") };
    assert_eq!(error.unwrap_err(), LibraryError::Entrance("querl_cuda_run"));
    // SAFETY: these are the functions themselves.
    let error = unsafe { Library::connect(address, "0.0.9") }.unwrap_err();
    let expected = "0.0.9".to_owned();
    assert_eq!(error, LibraryError::Version { found: env!("CARGO_PKG_VERSION").into(), expected });
}

/// What the library says to a program of another version, or to one that sends what is no job.
fn said(abi: u32, job: &[u8]) -> (i32, Ended) {
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
    // SAFETY: the library wrote the bytes, and they are given back once.
    let ended = serde_json::from_slice(unsafe { out.as_slice() }).unwrap();
    // SAFETY: as above.
    unsafe { querl_cuda_free(out) };
    (status, ended)
}

#[test]
fn what_is_not_understood_is_an_answer() {
    let (status, Ended::Failed(failure)) = said(interface::ABI, b"{\"device\": \"tpu\"}") else { panic!("no failure") };
    assert_eq!(status, interface::FAILED);
    assert!(failure.message.starts_with("the job is not understood: "), "{failure}");
    let (_, Ended::Failed(failure)) = said(interface::ABI + 1, b"{}") else { panic!("no failure") };
    assert_eq!(failure.message, "the program's interface is version 2 and the library's is 1");
    let (_, Ended::Failed(failure)) = said(interface::ABI, b"") else { panic!("no failure") };
    assert!(failure.message.starts_with("the job is not understood: "), "{failure}");
}
