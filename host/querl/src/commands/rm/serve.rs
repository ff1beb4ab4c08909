//! `querl rm serve`: a classifier over HTTP.

use super::TOKENS_PER_PASS;
use super::corpus::usage;
use super::model::{ModelArgs, OpenModel};
use crate::failure::Stop;
use crate::interrupt;
use crate::terminal;
use anyhow::Context;
use clap::Args;
use querl_eval::classification::calibrated;
use querl_model::classifier::{BatchDone, BatchLimits, BatchWorker, Batcher, Classified, NotTaken};
use querl_serve::{
    ClassifiedText, NotAccepted, OnClassified, ServerLimits, StyleOptions, StyleService, TextClassifier, serve,
};
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;

/// What `querl rm serve` takes.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8000")]
    addr: SocketAddr,
    /// The environment variable that holds the key that clients must send as `Authorization: Bearer KEY`
    #[arg(long, visible_alias = "api-key-env", value_name = "NAME")]
    api_key_env: Option<String>,
    /// The model's name in answers [default: the folder's]
    #[arg(long, visible_alias = "model-name", value_name = "NAME")]
    model_name: Option<String>,
    /// Texts of several requests that are classified together; 1 for each request by itself
    #[arg(long, visible_alias = "max-batch", value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_batch: u32,
    /// Texts that may wait; requests beyond are answered with 429
    #[arg(long, visible_alias = "max-waiting", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_waiting: u32,
    /// Texts of one request
    #[arg(long, visible_alias = "max-texts", value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_texts: u32,
    /// Size of a request's body
    #[arg(long, visible_alias = "max-body-bytes", value_name = "BYTES", default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(64..))]
    max_body_bytes: u32,
    /// Seconds that an answer may take, waiting for others' included
    #[arg(long, visible_alias = "timeout-s", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout_s: u32,
}

/// No dialogue is nearly as long; what is longer only costs tokenizing.
const MAX_TEXT_CHARS: usize = 32_768;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until interrupted. The address is taken first, so that who waits for the model hears 503 and not silence.
///
/// # Errors
/// The model or the key cannot be used, or the address cannot be had.
pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let service = StyleService::new(options(args)?);
    if !args.addr.ip().is_loopback() && args.api_key_env.is_none() {
        terminal::say("other machines may reach this address, and no key is asked for; name one with --api_key_env");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    let served = runtime.block_on(listen(args, &service));
    // A pass that is at work for nobody any more is not waited for.
    runtime.shutdown_background();
    served
}

async fn listen(args: &ServeArgs, service: &Arc<StyleService>) -> anyhow::Result<()> {
    let taken = |error| Stop::usage(format!("{}: cannot be listened on: {error}; give another --addr", args.addr));
    let listener = TcpListener::bind(args.addr).await.map_err(taken)?;
    println!("listening on http://{}", listener.local_addr()?);
    std::io::stdout().flush()?;
    let failure = Arc::new(Mutex::new(None));
    let loading = load(args, service.clone(), failure.clone())?;
    let stop = {
        let failure = failure.clone();
        async move {
            while interrupt::check().is_ok() && lock(&failure).is_none() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    serve(listener, service.router(), ServerLimits::default(), stop).await;
    match lock(&failure).take() {
        Some(error) => Err(error),
        None => {
            // A load that is under way when the user says stop ends with the process.
            drop(loading);
            Ok(())
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn options(args: &ServeArgs) -> anyhow::Result<StyleOptions> {
    let api_key = args.api_key_env.as_deref().map(key).transpose()?;
    let folder = args.model.model.file_name().unwrap_or(args.model.model.as_os_str()).to_string_lossy().into_owned();
    Ok(StyleOptions {
        model_name: args.model_name.clone().unwrap_or(folder),
        max_length: args.model.max_length as usize,
        max_body_bytes: args.max_body_bytes as usize,
        max_texts: args.max_texts as usize,
        max_text_chars: MAX_TEXT_CHARS,
        body_timeout: BODY_TIMEOUT,
        answer_timeout: Duration::from_secs(args.timeout_s.into()),
        api_key,
    })
}

fn key(name: &str) -> anyhow::Result<String> {
    match std::env::var(name) {
        Ok(key) if !key.trim().is_empty() => Ok(key.trim().to_owned()),
        _ => Err(usage(format!("the environment variable `{name}` holds no key; set it, or leave --api_key_env out"))),
    }
}

/// Opens the model on a thread of its own, and classifies there from then on.
fn load(
    args: &ServeArgs,
    service: Arc<StyleService>,
    failure: Arc<Mutex<Option<anyhow::Error>>>,
) -> anyhow::Result<std::thread::JoinHandle<()>> {
    let model = args.model.clone();
    let limits = BatchLimits {
        max_texts: args.max_batch as usize,
        tokens_per_pass: TOKENS_PER_PASS,
        max_waiting: args.max_waiting as usize,
    };
    let work = move || {
        // The thread that sets them is one of them: this one, which does the work.
        querl_model::set_threads(model.threads);
        match open(&model, limits, &service) {
            Ok((classifier, worker)) => {
                service.set_ready(Arc::new(classifier));
                terminal::say("the model is loaded");
                drop(service);
                worker.run();
            }
            Err(error) => *lock(&failure) = Some(error),
        }
    };
    std::thread::Builder::new().name("classifier".into()).spawn(work).context("no thread to load the model on")
}

fn open(model: &ModelArgs, limits: BatchLimits, service: &Arc<StyleService>) -> anyhow::Result<(Shared, BatchWorker)> {
    let OpenModel { classifier, tokenizer, temperature } = OpenModel::open(model)?;
    // The service holds the classifier: a strong handle here would keep both for ever.
    let service = Arc::downgrade(service);
    let observer = Box::new(move |done: BatchDone| {
        if let Some(service) = service.upgrade() {
            service.note_batch(done.n_requests, done.n_texts, done.elapsed);
        }
    });
    let (batcher, worker) = Batcher::new(classifier, tokenizer, limits, observer);
    Ok((Shared { batcher, temperature }, worker))
}

/// A classifier that requests share.
struct Shared {
    batcher: Batcher,
    temperature: f64,
}

impl TextClassifier for Shared {
    fn submit(&self, texts: &[&str], answer: OnClassified) -> Result<(), NotAccepted> {
        let temperature = self.temperature;
        let text = move |found: Classified| {
            let probabilities = calibrated(std::slice::from_ref(&found.logits), temperature).concat();
            let Classified { logits: scores, n_tokens, n_left_out } = found;
            ClassifiedText { probabilities, scores, n_tokens, n_left_out }
        };
        let of_logits = move |found: Result<Vec<Classified>, String>| {
            answer(found.map(|found| found.into_iter().map(text).collect()));
        };
        self.batcher.submit(texts, Box::new(of_logits)).map_err(|reason| match reason {
            NotTaken::Busy { .. } => NotAccepted::Busy(reason.to_string()),
            NotTaken::Text(_) => NotAccepted::Text(reason.to_string()),
            NotTaken::Ended => NotAccepted::Gone,
        })
    }

    fn classes(&self) -> &[String] {
        self.batcher.labels().names()
    }

    fn english(&self) -> Option<&[String]> {
        self.batcher.labels().english()
    }

    fn n_waiting(&self) -> usize {
        self.batcher.n_waiting()
    }
}
