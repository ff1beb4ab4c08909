//! What every stage of one run shares: configuration, folder, plugins, a runtime for outside calls.

pub mod lock;

use crate::environment::Services;
use crate::plugins::Plugins;
use crate::stages::StageName;
use crate::training;
use anyhow::Context;
use querl_core::config::Config;
use querl_core::fsx::write_atomic;
use querl_core::run_dir::RunDir;

/// One run, with its folder held against other processes until dropped.
pub struct Run {
    /// Resolved and checked.
    pub config: Config,
    /// Where results go.
    pub dir: RunDir,
    /// The configured plugins, loaded.
    pub plugins: Plugins,
    /// Waits for outside calls.
    pub runtime: tokio::runtime::Runtime,
    _lock: lock::DirLock,
}

impl Run {
    /// Opens everything that can be wrong with what the stages up to `last` use before any of them runs, then takes the
    /// folder.
    ///
    /// # Errors
    /// The model's folder or a plugin is unusable, another process holds the folder.
    pub fn open(config: Config, last: StageName) -> anyhow::Result<Self> {
        // The data stages need no model: what they make may be what a model is first trained on.
        if last >= StageName::Sft {
            training::preflight(&config)?;
        }
        training::set_threads(config.threads);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
        let plugins = Plugins::open(&config.plugins)?;
        let dir = RunDir::new(&config.output_dir);
        let lock = lock::take(&dir)?;
        for (path, text) in [(dir.config(), config.to_toml()), (dir.lock(), plugins.lock_file())] {
            write_atomic(&path, text.as_bytes()).with_context(|| format!("{}: cannot be written", path.display()))?;
        }
        Ok(Self { config, dir, plugins, runtime, _lock: lock })
    }

    /// Whom a scorer asks.
    ///
    /// # Errors
    /// Retrieval or judge cannot be opened.
    pub fn services(&self) -> anyhow::Result<Services> {
        let config = &self.config;
        Ok(Services {
            retriever: querl_data::open_retriever(&config.retrieval, &config.tenant)?,
            judge: querl_data::open_judge(&config.judge, &config.retrieval)?,
            prompts: self.plugins.prompts.clone(),
            rewards: self.plugins.rewards.clone(),
            n_retrievals: config.retrieval.max_concurrent,
            n_judgements: config.judge.max_concurrent,
        })
    }
}
