//! The run to export: dataset, adapter, plugins and configuration.

use super::rows::{PromptRow, Rewrites, prompt_rows};
use crate::environment::RowColumns;
use crate::failure::{Stop, run_in};
use crate::ledger::{Inputs, Ledger, StageName, rows_of};
use crate::plugins::{PluginUse, Plugins};
use crate::training::{self, Base};
use querl_core::config::{Config, RlAlgorithm, load_resolved};
use querl_core::records::{DatasetRow, Split};
use querl_core::run_dir::RunDir;
use querl_model::{DecoderConfig, Family, LoraAdapter, LoraSettings, TextTokenizer};
use std::path::{Path, PathBuf};

/// A run with finished data stages, to export to another engine.
pub struct ExportedRun {
    pub(super) config: Config,
    pub(super) dir: RunDir,
    /// Folder of the base model of reinforcement learning.
    pub(super) model: PathBuf,
    /// Architecture of the base model; `None` for one that querl itself cannot train.
    pub(super) family: Option<Family>,
    /// The tokenizer of the base model, which writes the prompts of the run.
    pub(super) tokenizer: TextTokenizer,
    pub(super) adapter: Option<SftAdapter>,
    pub(super) train: Vec<PromptRow>,
    pub(super) val: Vec<PromptRow>,
    /// Length of the longest prompt in tokens.
    pub(super) longest_prompt: usize,
}

/// The SFT adapter, the checkpoint `sft/best`.
pub(super) struct SftAdapter {
    pub(super) folder: PathBuf,
    pub(super) settings: LoraSettings,
}

impl ExportedRun {
    /// Opens the run in a folder, with the configuration stored there.
    ///
    /// # Errors
    /// There is no run, its data stages are not finished, a file of them has changed, or a plugin or the model cannot be read.
    pub fn in_folder(folder: &Path) -> anyhow::Result<Self> {
        let dir = run_in(folder)?;
        let config = load_resolved(&dir.config()).map_err(Stop::usage)?;
        Self::open(config, dir)
    }

    /// Opens the run in the `output_dir` of a configuration.
    ///
    /// # Errors
    /// As [`Self::in_folder`].
    pub fn of_config(config: Config) -> anyhow::Result<Self> {
        let dir = RunDir::new(&config.output_dir);
        Self::open(config, dir)
    }

    /// The same run with another RL algorithm.
    ///
    /// # Errors
    /// The algorithm needs groups of samples per query, and `rl.n_samples` is 1.
    pub fn with_algorithm(mut self, algorithm: RlAlgorithm) -> Result<Self, Stop> {
        let n_samples = self.config.rl.n_samples;
        if algorithm.needs_groups() && n_samples < 2 {
            let message = format!(
                "--algorithm compares samples of one query, and rl.n_samples is {n_samples}; set rl.n_samples to 2 or more in the \
                 configuration, and name it in place of the run's folder"
            );
            return Err(Stop::usage(message));
        }
        self.config.rl.algorithm = algorithm;
        Ok(self)
    }

    fn open(config: Config, dir: RunDir) -> anyhow::Result<Self> {
        let ledger = Ledger::open(&dir.stages())?;
        let read = |split| -> anyhow::Result<Vec<DatasetRow>> {
            let path = dir.split(split);
            Inputs::default().made_by(&ledger, StageName::Convert, &path)?;
            rows_of(&path)
        };
        let (train, val) = (read(Split::Train)?, read(Split::Val)?);
        if train.is_empty() {
            let path = dir.split(Split::Train);
            return Err(Stop::usage(format!("{}: has no row; there is nothing to train on", path.display())).into());
        }
        Inputs::default().made_by(&ledger, StageName::Validate, &dir.validated())?;
        let rewrites = Rewrites::of(rows_of(&dir.validated())?);
        let base = sft_base(&config, &dir, &ledger)?;
        let tokenizer = TextTokenizer::for_policy(&base.model_config(&config)).map_err(Stop::usage)?;
        let Base { model, adapter } = base;
        let family = DecoderConfig::load(&model.join("config.json")).ok().map(|shapes| shapes.family);
        let adapter = adapter.map(|folder| read_adapter(folder, &model)).transpose()?;
        let all: Vec<DatasetRow> = train.iter().chain(&val).cloned().collect();
        let longest_prompt = training::prompts(&all, &tokenizer)?.iter().map(Vec::len).max().unwrap_or(0);
        let plugins = Plugins::open(&config, PluginUse::Look)?;
        let columns = RowColumns::read(&plugins.rewards, &config.data, &all)?;
        let rows = |dataset: &[DatasetRow]| prompt_rows(dataset, &columns, &rewrites);
        let (train, val) = (rows(&train), rows(&val));
        Ok(Self { config, dir, model, family, tokenizer, adapter, train, val, longest_prompt })
    }

    /// LoRA rank and alpha of the adapter to train.
    pub(super) fn lora(&self) -> (usize, f64) {
        let sft = &self.config.sft;
        self.adapter
            .as_ref()
            .map_or((sft.lora_rank, sft.lora_alpha), |adapter| (adapter.settings.rank, adapter.settings.alpha))
    }

    /// Note on a batch that is larger than the training split; `None` if it is not.
    pub(super) fn batch_note(&self, engine: &str) -> Option<String> {
        let (batch, n_rows) = (self.config.rl.batch_size, self.train.len());
        let note = || {
            format!(
                "rl.batch_size is {batch}, and a batch of {engine} has at most the {n_rows} rows of the training split"
            )
        };
        (n_rows < batch).then(note)
    }

    /// Note on an optimizer step whose number of responses in the engine, `there`, differs from the run's; `None` if it does not.
    pub(super) fn mini_batch_note(&self, there: usize) -> Option<String> {
        let own = self.config.rl.mini_batch_size;
        let note = || format!("an optimizer step has {there} responses in place of rl.mini_batch_size = {own}");
        (there != own).then(note)
    }

    /// Note on a LoRA alpha that is rounded, for an engine that requires an integer; `None` if it is an integer.
    pub(super) fn alpha_note(&self, engine: &str) -> Option<String> {
        let alpha = self.lora().1;
        let note = || format!("lora_alpha is {alpha}, and {engine} takes an integer: it is rounded");
        (alpha.fract() != 0.0).then(note)
    }
}

/// The model after fine-tuning, or the configured model without it.
fn sft_base(config: &Config, dir: &RunDir, ledger: &Ledger) -> anyhow::Result<Base> {
    if ledger.finished(StageName::Sft).is_none() {
        return Ok(Base { model: config.model.path.clone(), adapter: None });
    }
    Inputs::default().made_by(ledger, StageName::Sft, &training::best(&dir.sft()))?;
    Ok(Base::of(config, dir, StageName::Sft)?)
}

fn read_adapter(folder: PathBuf, model: &Path) -> anyhow::Result<SftAdapter> {
    let shapes = DecoderConfig::load(&model.join("config.json")).map_err(Stop::usage)?;
    let settings = LoraAdapter::load(&folder, &shapes).map_err(Stop::usage)?.settings().clone();
    Ok(SftAdapter { folder, settings })
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use crate::serving::deployment::MINIMAL_CONFIG;

    /// A run with eight training rows, whose configuration has the additional TOML `sections`.
    pub(in crate::exchange) fn run(sections: &str) -> ExportedRun {
        let config: Config = toml::from_str(&format!("{MINIMAL_CONFIG}\n{sections}")).unwrap();
        let row = |index: usize| PromptRow { id: index.to_string(), prompt: Vec::new(), querl: "{}".into() };
        ExportedRun {
            config,
            dir: RunDir::new("none"),
            model: "none".into(),
            family: Some(Family::Qwen3),
            tokenizer: TextTokenizer::load(&example_model()).unwrap(),
            adapter: None,
            train: (0..8).map(row).collect(),
            val: Vec::new(),
            longest_prompt: 100,
        }
    }

    fn example_model() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-qwen3")
    }

    /// The tokenizer of [`run`], with another chat template.
    pub(in crate::exchange) fn tokenizer_with(template: &str) -> TextTokenizer {
        let folder = tempfile::tempdir().unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(example_model().join(file), folder.path().join(file)).unwrap();
        }
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        TextTokenizer::load(folder.path()).unwrap()
    }
}
