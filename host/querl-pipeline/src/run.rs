//! A run: configuration, run directory, plugins, async runtime and service clients, shared by its stages.

use crate::device::Executor;
use crate::environment::{BaselineScoring, Comparison, JudgingForm, Scorer, Services};
use crate::ledger::StageName;
use crate::pins::{OnPluginChange, Pins};
use crate::plugins::{PluginUse, Plugins};
use crate::retrieval::local_models;
use crate::training::preflight;
use anyhow::Context;
use querl_core::config::{Config, JudgeForm, JudgeKind, RetrievalKind, TeacherKind};
use querl_core::dir_lock::DirLock;
use querl_core::fsx::user_cache_folder;
use querl_core::fsx::{remove_unfinished, write_atomic};
use querl_core::ports::{Reporter, Retriever, Silent, StyleModel};
use querl_core::responses::ResponseForm;
use querl_core::run_dir::RunDir;
use querl_data::{CacheLimits, ResponseCache, ServiceContext, SpendTracker, open_retriever};
use querl_model::GpuUse;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// An open run. It holds the lock of its directory until dropped, unless it was opened to inspect or to score.
pub struct Run {
    /// The configuration, resolved and checked.
    pub config: Config,
    /// The run directory.
    pub dir: RunDir,
    /// The configured plugins, loaded.
    pub plugins: Plugins,
    /// Executor of training and generation jobs; on the CPU if no stage of this command needs a GPU.
    pub(crate) executor: Executor,
    /// Async runtime of external calls.
    pub runtime: tokio::runtime::Runtime,
    /// Clients of external services.
    pub outside: ServiceContext,
    /// Shows messages and progress.
    pub reporter: Arc<dyn Reporter>,
    /// Step after which `rl` saves its state and stops, as after an interrupt, so that a later run resumes; `None`: `rl` takes all steps.
    pub(crate) stop_after: Option<u64>,
    retriever: OnceLock<Arc<dyn Retriever>>,
    _lock: Option<DirLock>,
}

impl Run {
    /// Checks the model, opens the plugins that stages up to `last` use, and locks the run directory. Tables and services of single stages
    /// are opened by `Stage::check`, before any stage runs. Bundles are pinned next to `config_path`.
    ///
    /// # Errors
    /// The model's folder or a plugin cannot be used, another process holds the lock of the run directory, or a plugin has changed.
    pub fn open(
        config: Config,
        config_path: &Path,
        last: StageName,
        on_change: OnPluginChange,
        reporter: Arc<dyn Reporter>,
    ) -> anyhow::Result<Self> {
        preflight(&config, last)?;
        let executor = match last {
            StageName::Rl | StageName::Eval => Executor::choose(&config, GpuUse::Generation)?,
            StageName::Sft => Executor::choose(&config, GpuUse::Training)?,
            _ => Executor::in_process(),
        };
        querl_model::set_threads(config.threads);
        let runtime = async_runtime()?;
        let dir = RunDir::new(&config.output_dir);
        let pins = Pins { dir: &dir, config: config_path, on_change };
        // The first build of a plugin takes minutes, whose seconds are shown.
        let progress = reporter.stage("plugins");
        let plugins = Plugins::open(&config, PluginUse::Run(&pins))?;
        drop(progress);
        let lock = DirLock::take(dir.root())?;
        let root = dir.root();
        remove_unfinished(root).with_context(|| format!("{}: cannot be tidied", root.display()))?;
        pins.write(plugins.used(), reporter.as_ref())?;
        let outside = outside(&config, &dir.calls(), CacheUse::Full)?;
        plugins.host_functions.connect(outside.clone(), runtime.handle().clone());
        Ok(Self { executor, _lock: Some(lock), ..Self::new(config, plugins, runtime, outside, reporter) })
    }

    /// A run without a lock, which computes in this process.
    fn new(
        config: Config,
        plugins: Plugins,
        runtime: tokio::runtime::Runtime,
        outside: ServiceContext,
        reporter: Arc<dyn Reporter>,
    ) -> Self {
        Self {
            dir: RunDir::new(&config.output_dir),
            config,
            plugins,
            executor: Executor::in_process(),
            runtime,
            outside,
            reporter,
            stop_after: None,
            retriever: OnceLock::new(),
            _lock: None,
        }
    }

    /// Writes the resolved configuration to the run directory.
    pub(crate) fn write_config(&self) -> anyhow::Result<()> {
        let path = self.dir.config();
        let written = write_atomic(&path, self.config.to_toml().as_bytes());
        written.with_context(|| format!("{}: cannot be written", path.display()))
    }

    /// Opens a run for an estimate: takes no lock, writes nothing and needs no API key. Plugins must be built.
    pub(crate) fn open_to_look(config: Config, outside: ServiceContext) -> anyhow::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().build().context("cannot start the async runtime (tokio)")?;
        let plugins = Plugins::open(&config, PluginUse::DryRun)?;
        Ok(Self::new(config, plugins, runtime, outside, Arc::new(Silent)))
    }

    /// Opens a run to score responses of other engines. It takes no lock, so several processes can open the run. Plugins must be built and
    /// be the pinned ones. Each process has its own file of spend; only the process that opens the response cache first can use it.
    pub(crate) fn open_for_scoring(
        config: Config,
        config_path: &Path,
        reporter: Arc<dyn Reporter>,
    ) -> anyhow::Result<Self> {
        querl_model::set_threads(config.threads);
        let runtime = async_runtime()?;
        let dir = RunDir::new(&config.output_dir);
        let pins = Pins { dir: &dir, config: config_path, on_change: OnPluginChange::Refuse };
        let plugins = Plugins::open(&config, PluginUse::Scoring(&pins))?;
        let outside = outside_for_scoring(&config)?;
        plugins.host_functions.connect(outside.clone(), runtime.handle().clone());
        Ok(Self::new(config, plugins, runtime, outside, reporter))
    }

    /// Opens the retrieval backend.
    ///
    /// # Errors
    /// Retrieval cannot be opened.
    pub fn retriever(&self) -> anyhow::Result<Arc<dyn Retriever>> {
        if let Some(open) = self.retriever.get() {
            return Ok(open.clone());
        }
        let models = local_models(&self.config.retrieval)?;
        let opened = open_retriever(&self.config.retrieval, &self.config.tenant, &models, &self.outside)?;
        Ok(self.retriever.get_or_init(|| opened).clone())
    }

    /// As [`retriever`](Self::retriever), but starts no new external calls once `stop` is set, for data stages. Training does not use it,
    /// so that no episode is lost.
    pub(crate) fn retriever_until(&self, stop: &'static AtomicBool) -> anyhow::Result<Arc<dyn Retriever>> {
        let config = &self.config;
        if config.retrieval.kind != RetrievalKind::Http {
            return self.retriever();
        }
        let (models, outside) = (local_models(&config.retrieval)?, self.outside.clone().until(stop));
        Ok(open_retriever(&config.retrieval, &config.tenant, &models, &outside)?)
    }

    /// A scorer of the parts that the rewards read, with the deadline of episodes.
    pub(crate) fn reward_scorer(&self) -> anyhow::Result<Scorer> {
        let deadline = Some(Duration::from_millis(self.config.rl.episode_deadline_ms));
        let services = Services { deadline, ..self.services()? }.read_by_rewards();
        Ok(Scorer::new(services, self.runtime.handle().clone()))
    }

    pub(crate) fn services(&self) -> anyhow::Result<Services> {
        let config = &self.config;
        let retriever = self.retriever()?;
        Ok(Services {
            retriever: (config.retrieval.kind != RetrievalKind::None).then_some(retriever),
            judge: querl_data::open_judge(&config.judge, &config.retrieval, &self.outside)?,
            form: match config.judge.form {
                JudgeForm::Score => JudgingForm::Score,
                JudgeForm::Compare => {
                    JudgingForm::Compare(Comparison { dimensions: config.judge.dimensions.clone(), seed: config.seed })
                }
            },
            prompts: self.plugins.prompts.clone(),
            response_form: ResponseForm::of(config),
            rewards: self.plugins.rewards.clone(),
            style: self.plugins.style.clone().map(|model| model as Arc<dyn StyleModel>),
            baseline: BaselineScoring::Always,
            host_functions: self.plugins.host_functions.clone(),
            n_retrievals: config.retrieval.max_concurrent,
            n_judgements: config.judge.max_concurrent,
            deadline: None,
        })
    }
}

/// A runtime for external calls, with a thread for each core.
pub(crate) fn async_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.context("cannot start the async runtime (tokio)")
}

/// The service context of an estimate, which calls no service: the response cache is only read, and API keys are not read.
pub(crate) fn outside_to_look(config: &Config) -> anyhow::Result<ServiceContext> {
    Ok(outside(config, &RunDir::new(&config.output_dir).calls(), CacheUse::Look)?.without_keys())
}

/// The service context of a process that scores or plans while the run may be in use: its spend is in a file of its own.
pub(crate) fn outside_for_scoring(config: &Config) -> anyhow::Result<ServiceContext> {
    let outside = outside(config, &RunDir::new(&config.output_dir).scoring_calls(), CacheUse::Full)?;
    outside.spend_tracker().begin("scoring");
    Ok(outside)
}

/// Path of the response cache; `None` if the user has no cache folder.
pub fn cache_path(configured: Option<&Path>) -> Option<PathBuf> {
    configured.map(Path::to_owned).or_else(|| Some(user_cache_folder()?.join("answers.redb")))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheUse {
    Full,
    Look,
}

/// The service context of a run, whose spend is kept in the file `calls`. The cache, which one process at a time can open, is opened only if external calls are possible.
fn outside(config: &Config, calls: &Path, used: CacheUse) -> anyhow::Result<ServiceContext> {
    let account = Arc::new(SpendTracker::open(calls, config.budget)?);
    let outside = ServiceContext::new(&config.calls).with_spend_tracker(account);
    let limits = CacheLimits::of(&config.cache);
    let asks_outside = config.called_teacher() == Some(TeacherKind::Openai)
        || config.fallback_teacher.base_url.is_some()
        || config.judge.kind == JudgeKind::Openai
        || config.retrieval.kind == RetrievalKind::Http;
    let cache = match cache_path(config.cache.path.as_deref()) {
        Some(path) if asks_outside && config.cache.enabled => match used {
            CacheUse::Full => ResponseCache::open(&path, limits),
            CacheUse::Look => ResponseCache::open_for_reading(&path),
        },
        _ => None,
    };
    Ok(match cache {
        Some(cache) => outside.with_cache(Arc::new(cache), limits.retrieval_ttl),
        None => outside,
    })
}
