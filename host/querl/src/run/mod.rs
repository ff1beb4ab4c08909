//! What every stage of one run shares: configuration, folder, plugins, a runtime for outside calls.

pub mod lock;
pub mod pins;

use crate::device::Place;
use crate::environment::Services;
use crate::plugins::Plugins;
use crate::retrieval::local_models;
use crate::stages::StageName;
use crate::training;
use anyhow::Context;
use querl_core::config::Config;
use querl_core::fsx::{remove_unfinished, write_atomic};
use querl_core::ports::Retriever;
use querl_core::run_dir::RunDir;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// What to do where a plugin is not the one that results were made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnPluginChange {
    /// Stop before anything is touched.
    Refuse,
    /// Go on, and record it.
    Accept,
}

/// One run, with its folder held against other processes until dropped.
pub struct Run {
    /// Resolved and checked.
    pub config: Config,
    /// Where results go.
    pub dir: RunDir,
    /// The configured plugins, loaded.
    pub plugins: Plugins,
    /// Who trains and generates; the processor where no stage of this command does.
    pub place: Place,
    /// Waits for outside calls.
    pub runtime: tokio::runtime::Runtime,
    /// Opened at first use: an index is built once for all stages.
    retriever: OnceLock<Arc<dyn Retriever>>,
    _lock: lock::DirLock,
}

impl Run {
    /// Opens model folder and plugins, as far as the stages up to `last` use them, then takes the folder. What a stage alone
    /// needs is looked at before any stage runs, too ([`crate::stages::Stage::check`]). `config_path` is where `config` was read:
    /// bundles are pinned beside it.
    ///
    /// # Errors
    /// The model's folder or a plugin is unusable, another process holds the folder, a plugin changed.
    pub fn open(
        config: Config,
        config_path: &Path,
        last: StageName,
        on_change: OnPluginChange,
    ) -> anyhow::Result<Self> {
        // The data stages need no model: what they make may be what a model is first trained on.
        let place = match last >= StageName::Sft {
            true => {
                training::preflight(&config)?;
                Place::choose(&config)?
            }
            false => Place::here(),
        };
        training::set_threads(config.threads);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
        let plugins = Plugins::open(&config)?;
        let dir = RunDir::new(&config.output_dir);
        let lock = lock::take(&dir)?;
        let root = dir.root();
        remove_unfinished(root).with_context(|| format!("{}: cannot be tidied", root.display()))?;
        pins::pin(&dir, config_path, plugins.used(), on_change)?;
        let path = dir.config();
        write_atomic(&path, config.to_toml().as_bytes())
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Self { config, dir, plugins, place, runtime, retriever: OnceLock::new(), _lock: lock })
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
        let opened = querl_data::open_retriever(&self.config.retrieval, &self.config.tenant, &models)?;
        Ok(self.retriever.get_or_init(|| opened).clone())
    }

    /// Whom a scorer asks.
    ///
    /// # Errors
    /// Retrieval or judge cannot be opened.
    pub fn services(&self) -> anyhow::Result<Services> {
        let config = &self.config;
        Ok(Services {
            retriever: self.retriever()?,
            judge: querl_data::open_judge(&config.judge, &config.retrieval)?,
            prompts: self.plugins.prompts.clone(),
            rewards: self.plugins.rewards.clone(),
            n_retrievals: config.retrieval.max_concurrent,
            n_judgements: config.judge.max_concurrent,
            deadline: None,
        })
    }
}
