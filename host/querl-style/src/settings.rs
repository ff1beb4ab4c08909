//! Settings of `querl style train`, from flags and a TOML file. Keys that transformers' `TrainingArguments` also has keep its names.

use crate::{labels, usage};
use querl_core::config::{LrScheduler, SftConfig};
use querl_model::LoraSettings;
use querl_model::classifier::{Labels, Tuning};
use serde::{Deserialize, Deserializer, Serialize};
use std::path::{Path, PathBuf};

/// Weighting of the classes in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClassWeights {
    /// Every dialogue has the same weight.
    None,
    /// Every class has the same weight.
    Balanced,
}

/// Settings of a classifier training; `querl style train --help` describes each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Folder of the model that is trained.
    pub model_name_or_path: PathBuf,
    pub(crate) train_file: PathBuf,
    pub(crate) output_dir: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) labels: Option<Vec<String>>,
    pub(crate) max_length: u32,
    pub(crate) num_train_epochs: u32,
    pub(crate) learning_rate: f64,
    pub(crate) per_device_train_batch_size: u32,
    pub(crate) per_device_eval_batch_size: u32,
    pub(crate) weight_decay: f64,
    #[serde(deserialize_with = "seed")]
    pub(crate) seed: u64,
    pub(crate) demo_inference: bool,
    pub(crate) warmup_ratio: f64,
    pub(crate) class_weights: ClassWeights,
    pub(crate) label_smoothing: f64,
    pub(crate) augment_copies: u32,
    pub(crate) early_stopping_patience: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lora_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lora_alpha: Option<f64>,
    pub(crate) lora_dropout: f64,
    /// Share of the dialogues held out for evaluation; [`UNSET`] until it is resolved, because the default depends on `num_folds`.
    pub(crate) eval_share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dev_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) num_folds: Option<u32>,
    pub(crate) num_repeats: u32,
    pub(crate) threads: u32,
}

/// Reads a seed of 32 bits, the range of PyTorch's scripts.
fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    u32::deserialize(deserializer).map(u64::from)
}

/// Paths and values are the defaults of the training script that `querl style train` replaces. The model has no default, because nothing
/// is downloaded.
impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            model_name_or_path: PathBuf::new(),
            train_file: "rm_data/output_data/training_data.json".into(),
            output_dir: "rm_train/output/Qwen2.5-0.5B-Reward".into(),
            labels: None,
            max_length: 512,
            num_train_epochs: 3,
            learning_rate: 2e-5,
            per_device_train_batch_size: 4,
            per_device_eval_batch_size: 8,
            weight_decay: 0.01,
            seed: 42,
            demo_inference: false,
            warmup_ratio: 0.0,
            class_weights: ClassWeights::None,
            label_smoothing: 0.0,
            augment_copies: 0,
            early_stopping_patience: 0,
            lora_rank: None,
            lora_alpha: None,
            lora_dropout: 0.0,
            eval_share: UNSET,
            dev_share: None,
            num_folds: None,
            num_repeats: 1,
            threads: 0,
        }
    }
}

const UNSET: f64 = f64::NEG_INFINITY;

/// Reads the keys of a TOML file. `model_name_or_path` and `train_file` are relative to the file's folder, `output_dir` to the current
/// folder.
fn read(path: &Path) -> anyhow::Result<toml::Table> {
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    let checked = toml::from_str::<TrainConfig>(&text).and_then(|_| toml::from_str::<toml::Table>(&text));
    let mut table = checked.map_err(|error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        usage(format!("{}:{line}: {message}", path.display()))
    })?;
    let folder = path.parent().unwrap_or(Path::new(""));
    for key in ["model_name_or_path", "train_file"] {
        if let Some(value) = table.get_mut(key) {
            *value = toml::Value::try_from(folder.join(value.as_str().unwrap_or_default()))?;
        }
    }
    Ok(table)
}

impl TrainConfig {
    /// Reads settings from flags and a TOML file with the same keys. Flags override the file; keys in neither have their defaults.
    ///
    /// # Errors
    /// The file cannot be read, a key is unknown, or a value is out of range.
    pub fn new(flags: toml::Table, file: Option<&Path>) -> anyhow::Result<Self> {
        let mut table = file.map_or(Ok(toml::Table::new()), read)?;
        table.extend(flags);
        let mut config: Self = table.try_into()?;
        if config.model_name_or_path.as_os_str().is_empty() {
            return Err(usage(
                "`model_name_or_path` is not given; name it with --model_name_or_path or in the configuration",
            ));
        }
        if config.eval_share == UNSET {
            config.eval_share = if config.num_folds.is_some() { 0.0 } else { 0.2 };
        }
        config.check()?;
        Ok(config)
    }

    /// Folder in which the classifier is written.
    pub fn output_dir(&self) -> &Path {
        &self.output_dir
    }

    /// A copy with absolute paths, so that the saved configuration can be used from any folder.
    pub(crate) fn with_absolute_paths(&self) -> std::io::Result<Self> {
        let mut config = self.clone();
        for path in [&mut config.model_name_or_path, &mut config.train_file, &mut config.output_dir] {
            *path = std::path::absolute(&*path)?;
        }
        Ok(config)
    }

    fn check(&self) -> anyhow::Result<()> {
        type Check = (&'static str, String, bool, &'static str);
        fn show<T: ToString>(value: Option<T>) -> String {
            value.map_or(String::new(), |value| value.to_string())
        }
        let positive = |key, value: u32| -> Check { (key, value.to_string(), value > 0, "1 or more") };
        let share =
            |key, value: f64| -> Check { (key, value.to_string(), (0.0..1.0).contains(&value), "0 to below 1") };
        let is_split = |value: f64| value == 0.0 || (0.02..=0.5).contains(&value);
        let split = "0, or 0.02 to 0.5";
        let in_range = |value: Option<u32>, least, most| value.is_none_or(|value| (least..=most).contains(&value));
        let (rate, patience, repeats) = (self.learning_rate, self.early_stopping_patience, self.num_repeats);
        let has_alpha_rank = self.lora_alpha.is_none_or(|alpha| alpha > 0.0 && self.lora_rank.is_some());
        let can_stop = patience == 0 || self.dev_share != Some(0.0);
        let no_folds = self.num_folds.is_none();
        let checks: [Check; 19] = [
            positive("max_length", self.max_length),
            positive("num_train_epochs", self.num_train_epochs),
            ("learning_rate", rate.to_string(), rate > 0.0 && rate <= 1.0, "more than 0, at most 1"),
            positive("per_device_train_batch_size", self.per_device_train_batch_size),
            positive("per_device_eval_batch_size", self.per_device_eval_batch_size),
            share("weight_decay", self.weight_decay),
            share("warmup_ratio", self.warmup_ratio),
            share("label_smoothing", self.label_smoothing),
            ("augment_copies", self.augment_copies.to_string(), self.augment_copies <= 16, "0 to 16"),
            ("lora_rank", show(self.lora_rank), in_range(self.lora_rank, 1, 1024), "1 to 1024"),
            ("lora_alpha", show(self.lora_alpha), has_alpha_rank, "more than 0, with lora_rank set"),
            share("lora_dropout", self.lora_dropout),
            ("eval_share", self.eval_share.to_string(), is_split(self.eval_share), split),
            ("dev_share", show(self.dev_share), self.dev_share.is_none_or(is_split), split),
            (
                "early_stopping_patience",
                patience.to_string(),
                can_stop,
                "0 with dev_share 0: there is nothing to stop by",
            ),
            (
                "eval_share",
                self.eval_share.to_string(),
                self.eval_share == 0.0 || no_folds,
                "0 with num_folds, which measures every dialogue",
            ),
            ("num_folds", show(self.num_folds), in_range(self.num_folds, 2, 50), "2 to 50"),
            (
                "num_repeats",
                repeats.to_string(),
                repeats == 1 || !no_folds,
                "1 without num_folds: it counts rounds of a cross-validation",
            ),
            ("num_repeats", repeats.to_string(), (1..=100).contains(&repeats), "1 to 100"),
        ];
        self.labels()?;
        match checks.into_iter().find(|(_, _, is_good, _)| !is_good) {
            Some((key, value, _, expected)) => Err(usage(format!("{key} is {value}; expected {expected}"))),
            None => Ok(()),
        }
    }

    /// The classes of the setting `labels`; `None` if it is not set.
    pub(crate) fn labels(&self) -> anyhow::Result<Option<Labels>> {
        let labels = self.labels.as_ref().map(|list| labels::parse(list)).transpose();
        labels.map_err(|message| usage(format!("labels: {message}")))
    }

    /// Settings of the fine-tuning loop. The learning rate decays linearly to 0, the default of transformers' Trainer.
    pub(crate) fn sft(&self) -> SftConfig {
        SftConfig {
            learning_rate: self.learning_rate,
            epochs: self.num_train_epochs as usize,
            batch_size: self.per_device_train_batch_size as usize,
            gradient_accumulation_steps: 1,
            lr_scheduler: LrScheduler::Linear,
            warmup_ratio: self.warmup_ratio,
            weight_decay: self.weight_decay,
            max_grad_norm: 1.0,
            max_length: self.max_length as usize,
            eval_steps: 0,
            save_steps: 0,
            save_total_limit: 1,
            early_stopping_patience: self.early_stopping_patience as usize,
            lora_dropout: self.lora_dropout,
            ..SftConfig::default()
        }
    }

    pub(crate) fn tuning(&self) -> Tuning {
        match self.lora_rank {
            None => Tuning::Full,
            Some(rank) => {
                let alpha = self.lora_alpha.unwrap_or(2.0 * f64::from(rank));
                let settings = LoraSettings::all_linear(rank as usize, alpha);
                Tuning::Lora(LoraSettings { dropout: self.lora_dropout, ..settings })
            }
        }
    }

    /// Maximum number of tokens of a forward pass without gradients.
    pub(crate) fn eval_tokens_per_pass(&self) -> usize {
        self.per_device_eval_batch_size as usize * self.max_length as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMED: &str = "model_name_or_path = \"m\"\ntrain_file = \"t\"\noutput_dir = \"o\"\n";

    fn config(text: &str) -> anyhow::Result<TrainConfig> {
        TrainConfig::new(toml::from_str(text).unwrap(), None)
    }

    #[test]
    fn defaults_are_those_of_the_script() {
        let found = config(NAMED).unwrap();
        let numbers =
            (found.max_length, found.num_train_epochs, found.learning_rate, found.per_device_train_batch_size);
        assert_eq!(numbers, (512, 3, 2e-5, 4));
        assert_eq!((found.per_device_eval_batch_size, found.weight_decay, found.seed), (8, 0.01, 42));
        let found = config("model_name_or_path = \"m\"").unwrap();
        assert_eq!(found.train_file, Path::new("rm_data/output_data/training_data.json"));
        assert_eq!(found.output_dir, Path::new("rm_train/output/Qwen2.5-0.5B-Reward"));
        assert_eq!(found.eval_share, 0.2);
        assert_eq!(config(&format!("{NAMED}num_folds = 5")).unwrap().eval_share, 0.0);
    }

    #[test]
    fn a_flag_overrides_the_file_whose_paths_are_relative_to_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("style.toml");
        std::fs::write(&path, format!("{NAMED}learning_rate = 1e-4\nseed = 7\ndemo_inference = true")).unwrap();
        let found = TrainConfig::new(toml::from_str("learning_rate = 1e-3").unwrap(), Some(&path)).unwrap();
        assert_eq!((found.learning_rate, found.seed, found.demo_inference), (1e-3, 7, true));
        assert_eq!([found.model_name_or_path, found.train_file], ["m", "t"].map(|name| folder.path().join(name)));
        assert_eq!(found.output_dir, Path::new("o"));
    }

    #[test]
    fn a_value_out_of_range_is_named() {
        for (text, expected) in [
            ("learning_rate = 2.0", "learning_rate is 2; expected more than 0, at most 1"),
            ("lora_alpha = 8.0", "lora_alpha is 8; expected more than 0, with lora_rank set"),
            ("eval_share = 0.9", "eval_share is 0.9; expected 0, or 0.02 to 0.5"),
            (
                "early_stopping_patience = 2\ndev_share = 0.0",
                "early_stopping_patience is 2; expected 0 with dev_share 0: there is nothing to stop by",
            ),
            (
                "num_folds = 5\neval_share = 0.2",
                "eval_share is 0.2; expected 0 with num_folds, which measures every dialogue",
            ),
            ("labels = [\"a\"]", "labels: 1 labels; a classifier needs two at least"),
        ] {
            assert_eq!(config(&format!("{NAMED}{text}")).unwrap_err().to_string(), expected);
        }
        let missing = "`model_name_or_path` is not given; name it with --model_name_or_path or in the configuration";
        assert_eq!(config("").unwrap_err().to_string(), missing);
    }
}
