//! `querl serve WHAT`: serves rewriters, a style model, knowledge bases or rewards over HTTP. `querl style serve` and `querl rag serve` are
//! older forms.

mod request_log;
mod reward;
mod runs;

use super::release::FollowArgs;
use crate::args::{ConfigArgs, load_config, usage};
use crate::model_hub;
use crate::terminal::{self, report_new_form};
use anyhow::Context;
use clap::{Args, Subcommand};
use querl_core::config::{
    BaseDtype, Config, EmbeddingKind, Overrides, RetrievalConfig, RetrievalKind, StyleModelConfig, load_resolved,
};
use querl_core::dir_lock::DirLockError;
use querl_core::run_dir::RunDir;
use querl_core::serving::Rewriter;
use querl_core::text::{misspelt, nearest};
use querl_data::ServiceContext;
use querl_eval::classification::calibrated;
use querl_model::ServingSettings;
use querl_model::classifier::{
    BatchLimits, BatchStats, BatchWorker, Batcher, Classification, QueueError, RequestCallback,
};
use querl_pipeline::interrupt;
use querl_pipeline::release::{FollowedReleases, ReleasesFolder};
use querl_pipeline::retrieval::ModelShelf;
use querl_pipeline::serving::{ServedModels, ServedRun, ServingOptions, check_tenants};
use querl_serve::{
    ClassifiedText, GENERAL_RAG_ROUTE, KnowledgeBase, PendingRequest, RewriteOptions, RewriteService, ServeError,
    ServerLimits, StyleOptions, StyleService, SubmitError, TextClassifier, Traces, Upstream, bind, block_on,
    general_rag, serve, wait_until,
};
use querl_style::{ClassifierOptions, StyleClassifier, TOKENS_PER_PASS};
use request_log::RequestLogArgs;
use reward::RewardArgs;
pub(super) use runs::served_run;
use runs::{NamedRuns, print_tenant, reload_when_asked, report_releases, run_folders};
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct ServeArgs {
    #[command(subcommand)]
    what: Option<ServeCommand>,
    // The older form `querl serve DIR`, which serves a style model.
    #[command(flatten)]
    style: StyleArgs,
}

#[derive(Debug, Subcommand)]
enum ServeCommand {
    /// Serve the trained rewriters of runs: /v1/rewrite, OpenAI chat completions, general_rag, Dify; one base model, one adapter for each tenant
    Rewrite(RewriteArgs),
    /// Serve a style model: /predict, /classify, /health, /ready, /metrics, /openapi.json
    Style(StyleArgs),
    /// Serve knowledge bases over the general_rag interface, each under the tenant and kb_name of its configuration
    Rag(RagArgs),
    /// Score responses of other RL engines: /v1/score, OpenRLHF's remote_url, slime's rm-url, a resources server of NeMo Gym
    Reward(RewardArgs),
}

#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
struct StyleArgs {
    /// A classifier's folder; or a run's folder or configuration, whose style model is served
    #[arg(value_name = "CONFIG|DIR")]
    path: Option<PathBuf>,
    /// A classifier's folder, or its name on the hub
    #[arg(long, value_name = "DIR", conflicts_with = "path")]
    model: Option<PathBuf>,
    /// The model that an adapter was trained on [default: the run's]
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Maximum tokens of a text; question and answer of longer ones are truncated [default: the run's, else 512]
    #[arg(long, visible_alias = "max-length", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_length: Option<u32>,
    /// Calibrate probabilities by the temperature that was fitted in training
    #[arg(long)]
    calibrated: bool,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
    #[command(flatten)]
    options: StyleServerArgs,
}

#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
struct ListenArgs {
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8000", value_parser = listen_address)]
    addr: SocketAddr,
    /// The environment variable that holds the key that clients must send as `Authorization: Bearer KEY`
    #[arg(long, visible_alias = "api-key-env", value_name = "NAME")]
    api_key_env: Option<String>,
    /// Maximum open connections; at the limit a new one replaces the oldest whose request is not complete
    #[arg(long, visible_alias = "max-connections", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(8..))]
    max_connections: u32,
    /// The same for one peer address; behind a reverse proxy set it to --max_connections [default: half of --max_connections]
    #[arg(long, visible_alias = "max-connections-per-peer", value_name = "N", value_parser = clap::value_parser!(u32).range(8..))]
    max_connections_per_peer: Option<u32>,
}

#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct StyleServerArgs {
    #[command(flatten)]
    listen: ListenArgs,
    /// The model's name in responses [default: the folder's]
    #[arg(long, visible_alias = "model-name", value_name = "NAME")]
    model_name: Option<String>,
    /// Maximum texts of a batch, which may be of several requests; 1 for no batching. Longer lists are split
    #[arg(long, visible_alias = "max-batch", value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_batch: u32,
    /// Maximum texts in the queue; further requests are answered with 429
    #[arg(long, visible_alias = "max-waiting", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_waiting: u32,
    /// Maximum texts of one request
    #[arg(long, visible_alias = "max-texts", value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_texts: u32,
    /// Maximum size of a request's body
    #[arg(long, visible_alias = "max-body-bytes", value_name = "BYTES", default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(64..))]
    max_body_bytes: u32,
    /// Time limit of a response, time in the queue included; requests in progress at an interrupt have as long
    #[arg(long, visible_alias = "timeout-s", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout_s: u32,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct RewriteArgs {
    /// Finished runs: their folders or configurations, each of another tenant; or a folder of `querl deploy`
    #[arg(value_name = "CONFIG|RUN_DIR|DIR", conflicts_with = "releases")]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    follow: FollowArgs,
    #[command(flatten)]
    listen: ListenArgs,
    /// The environment variable that holds the key of one tenant's clients, in place of --api_key_env
    #[arg(long, visible_alias = "tenant-key-env", value_name = "TENANT=NAME", value_parser = tenant_key)]
    tenant_key_env: Vec<(String, String)>,
    /// The environment variable that holds the key of /admin/tenants and /admin/releases, which are closed without one
    #[arg(long, visible_alias = "admin-key-env", value_name = "NAME")]
    admin_key_env: Option<String>,
    /// Maximum requests of the running batch
    #[arg(long, visible_alias = "max-running", value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_running: u32,
    /// Maximum requests in the queue; further ones are answered with 429
    #[arg(long, visible_alias = "max-waiting", value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_waiting: u32,
    /// Memory of the KV cache, half of it for prefixes that prompts share
    #[arg(long, visible_alias = "kv-cache-mib", value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    kv_cache_mib: u32,
    /// Time limit of a rewrite, time in the queue included; then the query itself is returned and marked as a fallback
    #[arg(long, visible_alias = "deadline-ms", value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    deadline_ms: u32,
    /// Rewrites that are kept for identical requests; 0 for none
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    cache: u32,
    /// The retrieval service behind /api/chat/general_rag and /retrieval: one of the general_rag interface, or a Dify external knowledge API
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// A file to which one JSON line is appended for each request
    #[arg(long, visible_alias = "access-log", value_name = "FILE")]
    access_log: Option<PathBuf>,
    #[command(flatten)]
    request_log: RequestLogArgs,
    /// Type of the base's weights: f32, bf16, f16, int8, fp8 or nf4 [default: as in the run]
    #[arg(long, value_name = "TYPE", value_parser = base_dtype)]
    dtype: Option<BaseDtype>,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

#[derive(Debug, Args)]
pub struct RagArgs {
    /// Configuration files: one for each knowledge base
    #[arg(value_name = "CONFIG", required = true)]
    configs: Vec<PathBuf>,
    #[command(flatten)]
    listen: ListenArgs,
    /// Replace a key of every configuration, such as retrieval.top_k=5: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    match &args.what {
        Some(ServeCommand::Style(args)) if args.model.is_none() && args.path.is_none() => {
            // `querl serve style` may also be the older form with a folder named `style`.
            let path = Some(PathBuf::from("style")).filter(|folder| folder.is_dir());
            let args = StyleArgs { path, ..args.clone() };
            style(&classifier_of(&args)?, &args.options)
        }
        Some(ServeCommand::Style(args)) => style(&classifier_of(args)?, &args.options),
        Some(ServeCommand::Rag(args)) => rag(args),
        Some(ServeCommand::Rewrite(args)) => rewrite(args),
        Some(ServeCommand::Reward(args)) => reward::reward(args),
        None => {
            report_new_form("querl serve DIR", "querl serve style DIR");
            style(&classifier_of(&args.style)?, &args.style.options)
        }
    }
}

/// Converts errors that the user must correct, such as an address in use, to usage errors (exit code 2).
fn served(result: anyhow::Result<()>) -> anyhow::Result<()> {
    result.map_err(|error| if error.is::<ServeError>() { usage(error).into() } else { error })
}

fn is_interrupted() -> bool {
    interrupt::check().is_err()
}

fn announce(url: &str) -> std::io::Result<()> {
    terminal::begin_server_log();
    let mut stdout = std::io::stdout();
    writeln!(stdout, "listening on http://{url}").and_then(|()| stdout.flush())
}

/// Runs `querl serve rag`: serves the embedded retrieval of one or more configurations over the `general_rag` interface.
pub(super) fn rag(args: &RagArgs) -> anyhow::Result<()> {
    let mut shelf = ModelShelf::default();
    let mut open = |path: &PathBuf| knowledge_base(path, &args.set, &mut shelf);
    let knowledge_bases = args.configs.iter().map(&mut open).collect::<anyhow::Result<Vec<_>>>()?;
    for base in &knowledge_bases {
        writeln!(std::io::stdout(), "tenant {}, knowledge base {}", base.tenant, base.kb_name)?;
    }
    let app = general_rag(knowledge_bases, args.listen.api_key()?.as_deref()).map_err(usage)?;
    args.listen.warn_if_open();
    let _at_safe_points = interrupt::at_safe_points();
    served(block_on(async {
        let listener = bind(args.listen.addr).await?;
        announce(&format!("{}{GENERAL_RAG_ROUTE}", listener.local_addr()?))?;
        serve(listener, app, args.listen.limits(), wait_until(is_interrupted)).await;
        Ok(())
    }))
}

/// Opens the embedded index of a configuration, even if it configures an HTTP retrieval: the same file may be used for a run that calls
/// this server.
fn knowledge_base(path: &Path, set: &[String], shelf: &mut ModelShelf) -> anyhow::Result<KnowledgeBase> {
    let config = ConfigArgs { path: path.to_owned(), set: set.to_vec(), out: None }.load_for_retrieval()?;
    let retrieval = RetrievalConfig { kind: RetrievalKind::Embedded, ..config.retrieval };
    if retrieval.embedding.kind == EmbeddingKind::Openai {
        let problem = "retrieval.embedding.kind is \"openai\"; the embedded index that is served here makes its vectors in this process, \
                       expected local or none (--set retrieval.embedding.kind=none)";
        return Err(usage(format!("{}: {problem}", path.display())).into());
    }
    let (models, context) = (shelf.models(&retrieval)?, ServiceContext::new(&config.calls));
    let search = querl_data::open_retrieval_backend(&retrieval, &config.tenant, &models, &context)?;
    let timeout = Duration::try_from_secs_f64(retrieval.timeout_s).context("retrieval.timeout_s")?;
    Ok(KnowledgeBase { tenant: config.tenant, kb_name: retrieval.kb_name, search, timeout })
}

/// Time limit of a chat completion.
const CHAT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of a request to the retrieval service.
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_QUERIES: usize = 256;

/// Runs `querl serve rewrite`: serves trained rewriters over HTTP until it is interrupted.
fn rewrite(args: &RewriteArgs) -> anyhow::Result<()> {
    if args.runs.is_empty() && args.follow.releases.is_none() {
        let what =
            "nothing to serve; name finished runs or a folder of `querl deploy`, or follow releases by --releases DIR";
        return Err(usage(what).into());
    }
    let upstream = args.upstream.as_deref().map(|url| Upstream::new(url, UPSTREAM_TIMEOUT)).transpose();
    let service_options = RewriteOptions {
        max_body_bytes: 1 << 20,
        max_queries: MAX_QUERIES,
        // As many as fit into the engine, so that a batch that fits there is not refused before.
        max_preparing: (args.max_running as usize).saturating_add(args.max_waiting as usize),
        body_timeout: BODY_TIMEOUT,
        deadline: Duration::from_millis(args.deadline_ms.into()),
        chat_timeout: CHAT_TIMEOUT,
        max_cached_rewrites: args.cache as usize,
        api_key: args.listen.api_key()?,
        admin_key: args.admin_key_env.as_deref().map(|name| key_in("--admin_key_env", name)).transpose()?,
        upstream: upstream.map_err(|problem| usage(format!("--upstream: {problem}")))?,
        access_log: args.access_log.clone(),
        candidate_limits: args.follow.limits(),
        request_log: args.request_log.open()?,
        traces: Traces::from_env().map_err(usage)?,
        server: args.listen.limits(),
    };
    let key = |(tenant, name): &(String, String)| Ok((tenant.clone(), key_in("--tenant_key_env", name)?));
    let options = ServingOptions {
        engine: ServingSettings {
            max_running: args.max_running as usize,
            kv_cache_bytes: (args.kv_cache_mib as usize) << 20,
        },
        max_waiting: args.max_waiting as usize,
        api_keys: args.tenant_key_env.iter().map(key).collect::<anyhow::Result<_>>()?,
        dtype: args.dtype,
    };
    // The releases are read first, so that a wrong path is reported before models are loaded.
    let folder = args.follow.releases.as_ref().map(ReleasesFolder::new);
    let released = folder.as_ref().map(|folder| FollowedReleases::current_runs(folder, served_run)).transpose()?;
    let loaded = released.iter().flatten().map(|(release, run)| (run.config.tenant.clone(), release.clone()));
    let followed = folder.zip(Some(loaded.collect::<Vec<_>>()));
    let paths = args.runs.iter().map(|path| run_folders(path)).collect::<anyhow::Result<Vec<_>>>()?.concat();
    let runs: Vec<ServedRun> = match released {
        Some(released) => released.into_iter().map(|(_, run)| run).collect(),
        None => paths.iter().map(|path| served_run(path)).collect::<anyhow::Result<Vec<_>>>()?,
    };
    check_tenants(&runs)?;
    let tenants: Vec<String> = runs.iter().map(|run| run.config.tenant.clone()).collect();
    check_keys(args, &tenants)?;
    let service = RewriteService::new(service_options).map_err(|error| {
        let is_in_use = matches!(error.downcast_ref::<DirLockError>(), Some(DirLockError::InUse { .. }));
        if is_in_use { usage(error).into() } else { error }
    })?;
    let named = args.runs.clone();
    let with_key = match args.listen.api_key_env {
        Some(_) => BTreeSet::new(),
        None => args.tenant_key_env.iter().map(|(name, _)| name.clone()).collect(),
    };
    let loaded: Vec<(PathBuf, String)> = paths.into_iter().zip(tenants).collect();
    let threads = args.threads;
    // SIGHUP reloads only without a terminal: with one, it means that the terminal was closed, which ends the server.
    let has_terminal = std::io::stdin().is_terminal() || std::io::stderr().is_terminal();
    let reload = (!has_terminal).then(interrupt::reload_on_hangup);
    let work = move |service: Arc<RewriteService>| {
        // This thread computes, and is one of those that it sets.
        querl_model::set_threads(threads);
        ServedModels::serve(runs, served_run, options, move |models| {
            models.tenants().iter().for_each(print_tenant);
            let releases = followed.map(|(folder, loaded)| {
                service.set_releases(Arc::new(FollowedReleases::new(folder, models.clone(), served_run, loaded)));
                // Before the first request, so that a candidate answers its users from the start.
                report_releases(service.load_releases(&*models));
                Arc::downgrade(&service)
            });
            service.set_ready(models.clone());
            drop(service);
            if let Some(reload) = reload {
                let mut named = NamedRuns::new(named, with_key, loaded, &models);
                let load = || match &releases {
                    Some(service) => {
                        service.upgrade().iter().for_each(|service| report_releases(service.reload_releases()))
                    }
                    None => named.load_again(&models),
                };
                reload_when_asked(&models, reload, load);
            }
        })
    };
    let _at_safe_points = interrupt::at_safe_points();
    served(service.run(args.listen.addr, |addr| announce(&addr.to_string()), work, is_interrupted))
}

/// Refuses a key for a tenant that is not served, if the name looks misspelt and no tenant can be loaded later; otherwise warns about it.
/// Also warns about tenants without a key.
fn check_keys(args: &RewriteArgs, tenants: &[String]) -> anyhow::Result<()> {
    let has_key = |tenant: &&String| args.tenant_key_env.iter().any(|(name, _)| name == *tenant);
    let without_key: Vec<&str> = tenants.iter().filter(|tenant| !has_key(tenant)).map(String::as_str).collect();
    for (name, _) in args.tenant_key_env.iter().filter(|(name, _)| !tenants.contains(name)) {
        let near = nearest(name, tenants.iter().map(String::as_str));
        let near = near.first().map_or(String::new(), |near| format!("; did you mean `{near}`?"));
        let problem = format!("--tenant_key_env: no tenant `{name}` is served{near}");
        // The tenant may be loaded later, by a reload or an admin route.
        let may_follow = args.admin_key_env.is_some() || args.follow.releases.is_some();
        match may_follow || misspelt(name, without_key.iter().copied()).is_none() {
            true => terminal::print(&format!("warning: {problem}")),
            false => return Err(usage(problem).into()),
        }
    }
    let open: Vec<String> = without_key.iter().map(|name| format!("`{name}`")).collect();
    if args.listen.api_key_env.is_none() && !open.is_empty() {
        let what = format!(
            "no key is required of tenant {}; name one with --api_key_env or --tenant_key_env",
            open.join(", ")
        );
        let address = args.listen.addr.ip();
        if !address.is_loopback() {
            terminal::print(&format!("warning: {address}: other machines may reach this address, and {what}"));
        } else if !args.tenant_key_env.is_empty() {
            terminal::print(&format!("warning: {what}"));
        }
    }
    Ok(())
}

fn listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected an IP address and a port, such as 127.0.0.1:8000".to_owned())
}

fn tenant_key(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(tenant, name)| !tenant.is_empty() && !name.is_empty());
    let (tenant, name) = parts.ok_or("expected TENANT=NAME, with the name of an environment variable")?;
    Ok((tenant.to_owned(), name.to_owned()))
}

fn base_dtype(text: &str) -> Result<BaseDtype, String> {
    BaseDtype::from_name(text).ok_or_else(|| "expected f32, bf16, f16, int8, fp8 or nf4".to_owned())
}

/// The API key in the environment variable `name`, which the option `option` names.
pub(super) fn key_in(option: &str, name: &str) -> anyhow::Result<String> {
    match std::env::var(name) {
        Ok(key) if !key.trim().is_empty() => Ok(key.trim().to_owned()),
        _ => {
            let problem = format!("the environment variable `{name}` holds no key; set it, or leave {option} out");
            Err(usage(problem).into())
        }
    }
}

fn classifier_of(args: &StyleArgs) -> anyhow::Result<ClassifierOptions> {
    let of_run = match (&args.model, &args.path) {
        (None, Some(path)) => style_model_of_run(path)?,
        _ => None,
    };
    let missing = || usage("nothing to serve; name a classifier's folder, or a run's folder or configuration");
    let model = model_hub::optional_folder(args.model.as_deref())?;
    let folder = model.or_else(|| args.path.clone()).ok_or_else(missing)?;
    let config = of_run.unwrap_or_else(|| StyleModelConfig { path: Some(folder), ..Default::default() });
    let mut model = ClassifierOptions::of(&config).expect("the path is set");
    model.base = model_hub::optional_folder(args.base.as_deref())?.or(model.base);
    model.max_length = args.max_length.unwrap_or(model.max_length);
    model.calibrated |= args.calibrated;
    model.threads = args.threads;
    Ok(model)
}

/// The style model of a run or configuration; `None` for a folder that is not a run directory.
fn style_model_of_run(path: &Path) -> anyhow::Result<Option<StyleModelConfig>> {
    let resolved = RunDir::new(path).config();
    let config: Config = match (path.is_dir(), resolved.is_file()) {
        (true, false) => return Ok(None),
        (true, true) => load_resolved(&resolved)?,
        (false, _) => load_config(path, Overrides { model_hub: Some(model_hub::find), ..Overrides::default() })?,
    };
    let style = config.plugins.style_model;
    if style.path.is_none() {
        let remedy = "name a classifier of `querl style train` as plugins.style_model.path";
        let shown = path.display();
        let message = match path.is_dir() {
            true => format!(
                "{shown}: this is a run; serve it with `querl serve rewrite {shown}`, or, to serve a style model, {remedy}"
            ),
            false => format!("{shown}: has no style model to serve; {remedy}"),
        };
        return Err(usage(message).into());
    }
    Ok(Some(style))
}

/// Maximum length of a text, far above that of any dialogue: longer texts would be tokenized and then truncated.
const MAX_TEXT_CHARS: usize = 32_768;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs `querl serve style`: serves a style model over HTTP until it is interrupted.
pub(super) fn style(model: &ClassifierOptions, args: &StyleServerArgs) -> anyhow::Result<()> {
    let folder = model.model.file_name().unwrap_or(model.model.as_os_str()).to_string_lossy().into_owned();
    let service = StyleService::new(StyleOptions {
        model_name: args.model_name.clone().unwrap_or(folder),
        max_length: model.max_length as usize,
        max_body_bytes: args.max_body_bytes as usize,
        max_texts: args.max_texts as usize,
        max_text_chars: MAX_TEXT_CHARS,
        body_timeout: BODY_TIMEOUT,
        answer_timeout: Duration::from_secs(args.timeout_s.into()),
        api_key: args.listen.api_key()?,
        server: args.listen.limits(),
    });
    args.listen.warn_if_open();
    let limits = BatchLimits {
        max_texts: args.max_batch as usize,
        tokens_per_pass: TOKENS_PER_PASS,
        max_waiting: args.max_waiting as usize,
    };
    let model = model.clone();
    let work = move |service: Arc<StyleService>| {
        // This thread computes, and is one of those that it sets.
        querl_model::set_threads(model.threads);
        let (classifier, worker) = open_batcher(&model, limits, &service)?;
        service.set_ready(Arc::new(classifier));
        terminal::print("the model is loaded");
        drop(service);
        worker.run();
        Ok(())
    };
    let _at_safe_points = interrupt::at_safe_points();
    served(service.run(args.listen.addr, |addr| announce(&addr.to_string()), work, is_interrupted))
}

impl ListenArgs {
    fn limits(&self) -> ServerLimits {
        let n_per_peer = self.max_connections_per_peer.unwrap_or(self.max_connections / 2).max(8);
        ServerLimits {
            max_connections: self.max_connections as usize,
            max_connections_per_peer: n_per_peer as usize,
            ..ServerLimits::default()
        }
    }

    fn api_key(&self) -> anyhow::Result<Option<String>> {
        self.api_key_env.as_deref().map(|name| key_in("--api_key_env", name)).transpose()
    }

    fn warn_if_open(&self) {
        if !self.addr.ip().is_loopback() && self.api_key_env.is_none() {
            let address = self.addr.ip();
            terminal::print(&format!(
                "{address}: other machines may reach this address, and no key is required; name one with --api_key_env"
            ));
        }
    }
}

fn open_batcher(
    model: &ClassifierOptions,
    limits: BatchLimits,
    service: &Arc<StyleService>,
) -> anyhow::Result<(BatchedClassifier, BatchWorker)> {
    let StyleClassifier { classifier, tokenizer, temperature, .. } = StyleClassifier::open(model)?;
    // Weak, because the service owns the classifier: a strong reference would be a cycle.
    let service = Arc::downgrade(service);
    let observer = Box::new(move |done: BatchStats| {
        if let Some(service) = service.upgrade() {
            service.note_batch(done.n_requests, done.n_texts, done.elapsed);
        }
    });
    let (batcher, worker) = Batcher::new(classifier, tokenizer, limits, observer);
    Ok((BatchedClassifier { batcher, temperature, max_waiting: limits.max_waiting }, worker))
}

struct BatchedClassifier {
    batcher: Batcher,
    temperature: f64,
    max_waiting: usize,
}

impl TextClassifier for BatchedClassifier {
    fn submit(&self, texts: &[&str], request: Box<dyn PendingRequest>) -> Result<(), SubmitError> {
        let request = BatchedRequest { request, temperature: self.temperature };
        self.batcher.submit(texts, Box::new(request)).map_err(|error| match error {
            QueueError::Busy { .. } => SubmitError::QueueFull(error.to_string()),
            QueueError::Text(_) => SubmitError::Text(error.to_string()),
            QueueError::Ended => SubmitError::Ended,
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

    fn is_full(&self) -> bool {
        self.batcher.n_waiting() >= self.max_waiting
    }
}

/// Completes a request of the service with probabilities from the batcher's logits.
struct BatchedRequest {
    request: Box<dyn PendingRequest>,
    temperature: f64,
}

impl RequestCallback for BatchedRequest {
    fn is_active(&self) -> bool {
        self.request.is_open()
    }

    fn on_results(self: Box<Self>, results: Result<Vec<Classification>, String>) {
        let text = |Classification { logits: scores, n_tokens, n_left_out }: Classification| {
            let probabilities = calibrated(std::slice::from_ref(&scores), self.temperature).concat();
            ClassifiedText { probabilities, scores, n_tokens, n_left_out }
        };
        self.request.complete(results.map(|texts| texts.into_iter().map(text).collect()));
    }
}
