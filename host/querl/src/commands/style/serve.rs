//! `querl serve style`: a classifier over HTTP.

use super::classifier::{ModelArgs, usage};
use crate::terminal;
use anyhow::Context;
use clap::Args;
use querl_eval::classification::calibrated;
use querl_model::classifier::{Asker, BatchDone, BatchLimits, BatchWorker, Batcher, Classified, NotTaken};
use querl_pipeline::failure::Stop;
use querl_pipeline::interrupt;
use querl_serve::{
    ClassifiedText, NotAccepted, ServerLimits, StyleOptions, StyleService, TextClassifier, Waiting, serve,
};
use querl_style::{ClassifierOptions, StyleClassifier, TOKENS_PER_PASS};
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpListener;

/// What `querl serve style` takes.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    #[command(flatten)]
    pub(super) options: ServeOptions,
}

/// Where and how a classifier is served.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub(crate) struct ServeOptions {
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8000")]
    addr: SocketAddr,
    /// The environment variable that holds the key that clients must send as `Authorization: Bearer KEY`
    #[arg(long, visible_alias = "api-key-env", value_name = "NAME")]
    api_key_env: Option<String>,
    /// The model's name in answers [default: the folder's]
    #[arg(long, visible_alias = "model-name", value_name = "NAME")]
    model_name: Option<String>,
    /// Texts of several requests that are classified together; 1 for each request by itself. Longer lists let others have their turn
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
    /// Seconds that an answer may take, waiting for others' included; requests under way at an interrupt have as long
    #[arg(long, visible_alias = "timeout-s", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout_s: u32,
}

/// No dialogue is nearly as long; what is longer only costs tokenizing.
const MAX_TEXT_CHARS: usize = 32_768;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until interrupted. The address is taken first, so that who waits for the model hears 503 and not silence.
pub(crate) fn run(model: &ClassifierOptions, args: &ServeOptions) -> anyhow::Result<()> {
    let service = StyleService::new(options(model, args)?);
    if !args.addr.ip().is_loopback() && args.api_key_env.is_none() {
        terminal::say("other machines may reach this address, and no key is asked for; name one with --api_key_env");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    let served = runtime.block_on(listen(model, args, &service));
    // A pass that is at work for nobody any more is not waited for.
    runtime.shutdown_background();
    served
}

async fn listen(model: &ClassifierOptions, args: &ServeOptions, service: &Arc<StyleService>) -> anyhow::Result<()> {
    let taken = |error| Stop::usage(format!("{}: cannot be listened on: {error}; give another --addr", args.addr));
    let listener = TcpListener::bind(args.addr).await.map_err(taken)?;
    println!("listening on http://{}", listener.local_addr()?);
    std::io::stdout().flush()?;
    let working = Arc::new(load(model, args, service.clone())?);
    let stop = {
        let working = working.clone();
        async move {
            while interrupt::check().is_ok() && !working.is_finished() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    let limits = ServerLimits { drain_timeout: answer_timeout(args), ..ServerLimits::default() };
    serve(listener, service.router(), limits, stop).await;
    match Arc::into_inner(working) {
        Some(thread) if thread.is_finished() => Err(end_of(thread)),
        // A load that is under way when the user says stop ends with the process.
        _ => Ok(()),
    }
}

/// Why the thread that classifies is there no more: while requests may come it has no reason to end.
fn end_of(thread: JoinHandle<anyhow::Result<()>>) -> anyhow::Error {
    match thread.join() {
        Ok(Err(error)) => error,
        Ok(Ok(())) | Err(_) => anyhow::anyhow!("the classifier panicked, and nothing can be served any more"),
    }
}

fn answer_timeout(args: &ServeOptions) -> Duration {
    Duration::from_secs(args.timeout_s.into())
}

fn options(model: &ClassifierOptions, args: &ServeOptions) -> anyhow::Result<StyleOptions> {
    let api_key = args.api_key_env.as_deref().map(key).transpose()?;
    let folder = model.model.file_name().unwrap_or(model.model.as_os_str()).to_string_lossy().into_owned();
    Ok(StyleOptions {
        model_name: args.model_name.clone().unwrap_or(folder),
        max_length: model.max_length as usize,
        max_body_bytes: args.max_body_bytes as usize,
        max_texts: args.max_texts as usize,
        max_text_chars: MAX_TEXT_CHARS,
        body_timeout: BODY_TIMEOUT,
        answer_timeout: answer_timeout(args),
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
    model: &ClassifierOptions,
    args: &ServeOptions,
    service: Arc<StyleService>,
) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
    let model = model.clone();
    let limits = BatchLimits {
        max_texts: args.max_batch as usize,
        tokens_per_pass: TOKENS_PER_PASS,
        max_waiting: args.max_waiting as usize,
    };
    let work = move || {
        // The thread that sets them is one of them: this one, which does the work.
        querl_model::set_threads(model.threads);
        let (classifier, worker) = open(&model, limits, &service)?;
        service.set_ready(Arc::new(classifier));
        terminal::say("the model is loaded");
        drop(service);
        worker.run();
        Ok(())
    };
    std::thread::Builder::new().name("classifier".into()).spawn(work).context("no thread to load the model on")
}

fn open(
    model: &ClassifierOptions,
    limits: BatchLimits,
    service: &Arc<StyleService>,
) -> anyhow::Result<(Shared, BatchWorker)> {
    let StyleClassifier { classifier, tokenizer, temperature, .. } = StyleClassifier::open(model)?;
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

/// A request's handler, which hears of probabilities and not of logits.
struct Handler {
    waiting: Box<dyn Waiting>,
    temperature: f64,
}

impl Asker for Handler {
    fn is_waiting(&self) -> bool {
        self.waiting.is_there()
    }

    fn hear(self: Box<Self>, found: Result<Vec<Classified>, String>) {
        let text = |found: Classified| {
            let probabilities = calibrated(std::slice::from_ref(&found.logits), self.temperature).concat();
            let Classified { logits: scores, n_tokens, n_left_out } = found;
            ClassifiedText { probabilities, scores, n_tokens, n_left_out }
        };
        self.waiting.hear(found.map(|found| found.into_iter().map(text).collect()));
    }
}

/// A classifier that requests share.
struct Shared {
    batcher: Batcher,
    temperature: f64,
}

impl TextClassifier for Shared {
    fn submit(&self, texts: &[&str], waiting: Box<dyn Waiting>) -> Result<(), NotAccepted> {
        let handler = Handler { waiting, temperature: self.temperature };
        self.batcher.submit(texts, Box::new(handler)).map_err(|reason| match reason {
            NotTaken::Busy { .. } => NotAccepted::Busy(reason.to_string()),
            NotTaken::Text(_) => NotAccepted::Text(reason.to_string()),
            NotTaken::Ended => NotAccepted::Gone,
        })
    }

    fn is_alive(&self) -> bool {
        self.batcher.is_alive()
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Keeps away: a server that says for ever that its model is being loaded, when the thread that loads it is gone.
    #[test]
    fn a_thread_that_panicked_is_an_error_and_one_that_failed_says_why() {
        let panicked = std::thread::spawn(|| -> anyhow::Result<()> { panic!("as a damaged file may have it") });
        let failed = std::thread::spawn(|| Err(usage("style: no model there")));
        let error = end_of(panicked);
        assert_eq!(error.to_string(), "the classifier panicked, and nothing can be served any more");
        assert_eq!(querl_pipeline::failure::ending_of(&error), querl_pipeline::failure::Ending::Failed);
        let error = end_of(failed);
        assert_eq!(error.to_string(), "style: no model there");
        assert_eq!(querl_pipeline::failure::ending_of(&error), querl_pipeline::failure::Ending::Usage);
    }
}
