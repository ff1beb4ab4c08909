//! What every stage of one run shares: configuration, folder, plugins, a runtime for outside calls.

use crate::device::Executor;
use crate::environment::{Comparison, JudgingForm, Services};
use crate::ledger::StageName;
use crate::pins::{self, OnPluginChange};
use crate::plugins::Plugins;
use crate::retrieval::local_models;
use crate::training::preflight;
use anyhow::Context;
use querl_core::config::{Config, JudgeForm, JudgeKind, RetrievalKind, TeacherKind};
use querl_core::dir_lock::DirLock;
use querl_core::fsx::user_cache_folder;
use querl_core::fsx::{remove_unfinished, write_atomic};
use querl_core::ports::{Reporter, Retriever, Silent, StyleModel};
use querl_core::run_dir::RunDir;
use querl_data::{CacheLimits, ResponseCache, ServiceContext, SpendTracker, open_retriever};
use querl_model::GpuUse;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// One run, with its folder held against other processes until dropped, unless it is only looked at.
pub struct Run {
    /// Resolved and checked.
    pub config: Config,
    /// Where results go.
    pub dir: RunDir,
    /// The configured plugins, loaded.
    pub plugins: Plugins,
    /// Runs training and generation; on the CPU where no stage of this command needs it.
    pub(crate) executor: Executor,
    /// Waits for outside calls.
    pub runtime: tokio::runtime::Runtime,
    /// How outside services are reached.
    pub outside: ServiceContext,
    /// Shows messages and progress.
    pub reporter: Arc<dyn Reporter>,
    retriever: OnceLock<Arc<dyn Retriever>>,
    _lock: Option<DirLock>,
}

impl Run {
    /// Opens model folder and plugins, as far as the stages up to `last` use them, then takes the folder. What a stage alone
    /// needs is looked at before any stage runs, too (`Stage::check`). `config_path` is where `config` was read:
    /// bundles are pinned next to it.
    ///
    /// # Errors
    /// The model's folder or a plugin is unusable, another process holds the folder, a plugin changed.
    pub fn open(
        config: Config,
        config_path: &Path,
        last: StageName,
        on_change: OnPluginChange,
        reporter: Arc<dyn Reporter>,
    ) -> anyhow::Result<Self> {
        // The data stages need no model: what they make may be what a model is first trained on.
        let executor = match last >= StageName::Sft {
            true => {
                preflight(&config)?;
                let gpu_use = if last >= StageName::Rl { GpuUse::Generation } else { GpuUse::Training };
                Executor::choose(&config, gpu_use)?
            }
            false => Executor::in_process(),
        };
        querl_model::set_threads(config.threads);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
        let plugins = Plugins::open(&config)?;
        let dir = RunDir::new(&config.output_dir);
        let lock = DirLock::take(dir.root())?;
        let root = dir.root();
        remove_unfinished(root).with_context(|| format!("{}: cannot be tidied", root.display()))?;
        pins::pin(&dir, config_path, plugins.used(), on_change, reporter.as_ref())?;
        let path = dir.config();
        write_atomic(&path, config.to_toml().as_bytes())
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        let outside = outside(&config, &dir, CacheUse::Full)?;
        Ok(Self {
            config,
            dir,
            plugins,
            executor,
            runtime,
            outside,
            reporter,
            retriever: OnceLock::new(),
            _lock: Some(lock),
        })
    }

    /// Opens what an estimate looks at. Nothing is taken, and nothing is written.
    pub(crate) fn open_to_look(config: Config) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().context("no async runtime")?;
        let (plugins, dir) = (Plugins::open(&config)?, RunDir::new(&config.output_dir));
        let outside = outside(&config, &dir, CacheUse::Look)?;
        let executor = Executor::in_process();
        Ok(Self {
            config,
            dir,
            plugins,
            executor,
            runtime,
            outside,
            reporter: Arc::new(Silent),
            retriever: OnceLock::new(),
            _lock: None,
        })
    }

    /// Finds passages.
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

    /// The same for a stage of the data that ends at `stop`: a service outside is then not called any more. Training is not to lose
    /// episodes so.
    pub(crate) fn retriever_until(&self, stop: &'static AtomicBool) -> anyhow::Result<Arc<dyn Retriever>> {
        let config = &self.config;
        if config.retrieval.kind != RetrievalKind::Http {
            return self.retriever();
        }
        let (models, outside) = (local_models(&config.retrieval)?, self.outside.clone().until(stop));
        Ok(open_retriever(&config.retrieval, &config.tenant, &models, &outside)?)
    }

    pub(crate) fn services(&self) -> anyhow::Result<Services> {
        let config = &self.config;
        Ok(Services {
            retriever: self.retriever()?,
            judge: querl_data::open_judge(&config.judge, &config.retrieval, &self.outside)?,
            form: match config.judge.form {
                JudgeForm::Score => JudgingForm::Score,
                JudgeForm::Compare => {
                    JudgingForm::Compare(Comparison { dimensions: config.judge.dimensions.clone(), seed: config.seed })
                }
            },
            prompts: self.plugins.prompts.clone(),
            rewards: self.plugins.rewards.clone(),
            style: self.plugins.style.clone().map(|model| model as Arc<dyn StyleModel>),
            n_retrievals: config.retrieval.max_concurrent,
            n_judgements: config.judge.max_concurrent,
            deadline: None,
        })
    }
}

/// Where answers are kept; `None` where the user has no folder for such.
pub fn cache_path(configured: Option<&Path>) -> Option<PathBuf> {
    configured.map(Path::to_owned).or_else(|| Some(user_cache_folder()?.join("answers.redb")))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheUse {
    Full,
    Look,
}

/// What calls of a run share. The cache is opened only where somebody outside may be asked: one process at a time can have it.
fn outside(config: &Config, dir: &RunDir, used: CacheUse) -> anyhow::Result<ServiceContext> {
    let account = Arc::new(SpendTracker::open(&dir.calls(), config.budget)?);
    let outside = ServiceContext::new(&config.calls).with_spend_tracker(account);
    let limits = CacheLimits::of(&config.cache);
    let asks_outside = config.teacher.kind == TeacherKind::Openai
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
