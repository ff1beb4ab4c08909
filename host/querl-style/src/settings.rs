//! The settings of `querl style train`: as written, in flags or a file; then resolved and checked.

use crate::class_names;
use crate::error::usage;
use querl_core::config::{LrScheduler, SftConfig};
use querl_model::LoraSettings;
use querl_model::classifier::{Labels, Tuning};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// As the training script that people know has them.
const TRAIN_FILE: &str = "rm_data/output_data/training_data.json";
const OUTPUT_DIR: &str = "rm_train/output/Qwen2.5-0.5B-Reward";

/// The keys of the training script that people know, each of which may be missing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TrainKeys {
    pub(crate) model_name_or_path: Option<PathBuf>,
    pub(crate) train_file: Option<PathBuf>,
    pub(crate) output_dir: Option<PathBuf>,
    pub(crate) labels: Option<Vec<String>>,
    pub(crate) max_length: Option<u32>,
    pub(crate) num_train_epochs: Option<u32>,
    pub(crate) learning_rate: Option<f64>,
    pub(crate) per_device_train_batch_size: Option<u32>,
    pub(crate) per_device_eval_batch_size: Option<u32>,
    pub(crate) weight_decay: Option<f64>,
    pub(crate) seed: Option<u32>,
    pub(crate) demo_inference: Option<bool>,
    pub(crate) warmup_ratio: Option<f64>,
    pub(crate) class_weights: Option<ClassWeights>,
    pub(crate) label_smoothing: Option<f64>,
    pub(crate) augment_copies: Option<u32>,
    pub(crate) early_stopping_patience: Option<u32>,
    pub(crate) lora_rank: Option<u32>,
    pub(crate) lora_alpha: Option<f64>,
    pub(crate) lora_dropout: Option<f64>,
    pub(crate) eval_share: Option<f64>,
    pub(crate) dev_share: Option<f64>,
    pub(crate) num_folds: Option<u32>,
    pub(crate) num_repeats: Option<u32>,
    pub(crate) threads: Option<u32>,
}

/// What a dialogue of each class counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClassWeights {
    /// All alike.
    None,
    /// Classes alike.
    Balanced,
}

/// What is in force; `querl style train --help` has the meaning of each.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    pub(crate) eval_share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dev_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) num_folds: Option<u32>,
    pub(crate) num_repeats: u32,
    pub(crate) threads: u32,
}

impl TrainKeys {
    /// Reads a TOML file with these keys. Folders and files in it are relative to its own folder, but for `output_dir`, which is
    /// relative to the current one.
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
        let mut keys: Self = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
            usage(format!("{}:{line}: {message}", path.display()))
        })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for written in [&mut keys.model_name_or_path, &mut keys.train_file].into_iter().flatten() {
            *written = folder.join(&*written);
        }
        Ok(keys)
    }

    /// These, with the keys of `flags` in their place.
    fn with(&self, flags: toml::Table) -> anyhow::Result<Self> {
        let mut table = toml::Table::try_from(self)?;
        table.extend(flags);
        Ok(table.try_into()?)
    }

    /// With defaults in place of what is not given. The model has none: nothing is downloaded.
    pub(crate) fn resolve(self) -> anyhow::Result<TrainConfig> {
        let missing = "`model_name_or_path` is not given; name it with --model_name_or_path or in the configuration";
        let config = TrainConfig {
            model_name_or_path: self.model_name_or_path.ok_or_else(|| usage(missing))?,
            train_file: self.train_file.unwrap_or_else(|| TRAIN_FILE.into()),
            output_dir: self.output_dir.unwrap_or_else(|| OUTPUT_DIR.into()),
            labels: self.labels,
            max_length: self.max_length.unwrap_or(512),
            num_train_epochs: self.num_train_epochs.unwrap_or(3),
            learning_rate: self.learning_rate.unwrap_or(2e-5),
            per_device_train_batch_size: self.per_device_train_batch_size.unwrap_or(4),
            per_device_eval_batch_size: self.per_device_eval_batch_size.unwrap_or(8),
            weight_decay: self.weight_decay.unwrap_or(0.01),
            seed: self.seed.unwrap_or(42).into(),
            demo_inference: self.demo_inference.unwrap_or(false),
            warmup_ratio: self.warmup_ratio.unwrap_or(0.0),
            class_weights: self.class_weights.unwrap_or(ClassWeights::None),
            label_smoothing: self.label_smoothing.unwrap_or(0.0),
            augment_copies: self.augment_copies.unwrap_or(0),
            early_stopping_patience: self.early_stopping_patience.unwrap_or(0),
            lora_rank: self.lora_rank,
            lora_alpha: self.lora_alpha,
            lora_dropout: self.lora_dropout.unwrap_or(0.0),
            eval_share: self.eval_share.unwrap_or(if self.num_folds.is_some() { 0.0 } else { 0.2 }),
            dev_share: self.dev_share,
            num_folds: self.num_folds,
            num_repeats: self.num_repeats.unwrap_or(1),
            threads: self.threads.unwrap_or(0),
        };
        config.check()?;
        Ok(config)
    }
}

impl TrainConfig {
    /// From flags and, behind them, a TOML file with the same keys; what neither names has its default.
    ///
    /// # Errors
    /// The file cannot be read, a key is unknown, or a value is out of range.
    pub fn new(flags: toml::Table, file: Option<&Path>) -> anyhow::Result<Self> {
        file.map_or(Ok(TrainKeys::default()), TrainKeys::read)?.with(flags)?.resolve()
    }

    /// Where the classifier is written.
    pub fn output_dir(&self) -> &Path {
        &self.output_dir
    }

    /// The same with paths that hold in every folder, so that what is written is a configuration wherever it stands.
    pub(crate) fn anywhere(&self) -> std::io::Result<Self> {
        let mut config = self.clone();
        for path in [&mut config.model_name_or_path, &mut config.train_file, &mut config.output_dir] {
            *path = std::path::absolute(&*path)?;
        }
        Ok(config)
    }

    fn check(&self) -> anyhow::Result<()> {
        let share = 0.0..1.0;
        let is_part = |value: &f64| *value == 0.0 || (0.02..=0.5).contains(value);
        let in_range =
            |value: Option<u32>, range: std::ops::RangeInclusive<u32>| value.is_none_or(|value| range.contains(&value));
        let checks = [
            ("max_length", self.max_length.to_string(), self.max_length > 0, "1 or more"),
            ("num_train_epochs", self.num_train_epochs.to_string(), self.num_train_epochs > 0, "1 or more"),
            (
                "learning_rate",
                self.learning_rate.to_string(),
                self.learning_rate > 0.0 && self.learning_rate <= 1.0,
                "more than 0, at most 1",
            ),
            (
                "per_device_train_batch_size",
                self.per_device_train_batch_size.to_string(),
                self.per_device_train_batch_size > 0,
                "1 or more",
            ),
            (
                "per_device_eval_batch_size",
                self.per_device_eval_batch_size.to_string(),
                self.per_device_eval_batch_size > 0,
                "1 or more",
            ),
            ("weight_decay", self.weight_decay.to_string(), share.contains(&self.weight_decay), "0 to below 1"),
            ("warmup_ratio", self.warmup_ratio.to_string(), share.contains(&self.warmup_ratio), "0 to below 1"),
            (
                "label_smoothing",
                self.label_smoothing.to_string(),
                share.contains(&self.label_smoothing),
                "0 to below 1",
            ),
            ("augment_copies", self.augment_copies.to_string(), self.augment_copies <= 16, "0 to 16"),
            ("lora_rank", text(self.lora_rank), in_range(self.lora_rank, 1..=1024), "1 to 1024"),
            (
                "lora_alpha",
                text(self.lora_alpha),
                self.lora_alpha.is_none_or(|alpha| alpha > 0.0 && self.lora_rank.is_some()),
                "more than 0, and lora_rank beside it",
            ),
            ("lora_dropout", self.lora_dropout.to_string(), share.contains(&self.lora_dropout), "0 to below 1"),
            ("eval_share", self.eval_share.to_string(), is_part(&self.eval_share), "0, or 0.02 to 0.5"),
            ("dev_share", text(self.dev_share), self.dev_share.as_ref().is_none_or(is_part), "0, or 0.02 to 0.5"),
            (
                "early_stopping_patience",
                self.early_stopping_patience.to_string(),
                self.early_stopping_patience == 0 || self.dev_share != Some(0.0),
                "0 with dev_share 0: there is nothing to stop by",
            ),
            (
                "eval_share",
                self.eval_share.to_string(),
                self.eval_share == 0.0 || self.num_folds.is_none(),
                "0 with num_folds, which measures every dialogue",
            ),
            ("num_folds", text(self.num_folds), in_range(self.num_folds, 2..=50), "2 to 50"),
            (
                "num_repeats",
                self.num_repeats.to_string(),
                self.num_repeats == 1 || self.num_folds.is_some(),
                "1 without num_folds: it counts rounds of a cross-validation",
            ),
            ("num_repeats", self.num_repeats.to_string(), (1..=100).contains(&self.num_repeats), "1 to 100"),
        ];
        self.labels()?;
        match checks.into_iter().find(|(_, _, is_good, _)| !is_good) {
            Some((key, value, _, expected)) => Err(usage(format!("{key} is {value}; expected {expected}"))),
            None => Ok(()),
        }
    }

    /// The classes, where they are named.
    pub(crate) fn labels(&self) -> anyhow::Result<Option<Labels>> {
        let labels = self.labels.as_ref().map(|list| class_names::parse(list)).transpose();
        labels.map_err(|message| usage(format!("labels: {message}")))
    }

    /// The same in the words of fine-tuning. A learning rate that falls to 0 along a line, without warm-up, is what transformers' Trainer
    /// does by default.
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

    /// What of the model is trained.
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

    /// Most tokens of a pass in which nothing is learned.
    pub(crate) fn tokens_asked(&self) -> usize {
        self.per_device_eval_batch_size as usize * self.max_length as usize
    }
}

fn text<T: ToString>(value: Option<T>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn keys(text: &str) -> TrainKeys {
        toml::from_str(text).unwrap()
    }

    const NAMED: &str = "model_name_or_path = \"m\"\ntrain_file = \"t\"\noutput_dir = \"o\"\n";

    #[test]
    fn defaults_are_those_of_the_script() {
        let config = keys(NAMED).resolve().unwrap();
        let found =
            (config.max_length, config.num_train_epochs, config.learning_rate, config.per_device_train_batch_size);
        assert_eq!(found, (512, 3, 2e-5, 4));
        assert_eq!((config.per_device_eval_batch_size, config.weight_decay, config.seed), (8, 0.01, 42));
        let config = keys("model_name_or_path = \"m\"").resolve().unwrap();
        assert_eq!(config.train_file, Path::new("rm_data/output_data/training_data.json"));
        assert_eq!(config.output_dir, Path::new("rm_train/output/Qwen2.5-0.5B-Reward"));
        assert_eq!(keys(&format!("{NAMED}num_folds = 5")).resolve().unwrap().eval_share, 0.0);
    }

    #[test]
    fn a_flag_goes_before_the_file() {
        let flags = toml::from_str("learning_rate = 1e-3").unwrap();
        let file = keys(&format!("{NAMED}learning_rate = 1e-4\nseed = 7\ndemo_inference = true"));
        let config = file.with(flags).unwrap().resolve().unwrap();
        assert_eq!((config.learning_rate, config.seed, config.demo_inference), (1e-3, 7, true));
    }

    #[test]
    fn a_value_out_of_range_is_named() {
        let problem = |text: &str| keys(&format!("{NAMED}{text}")).resolve().unwrap_err().to_string();
        assert_eq!(problem("learning_rate = 2.0"), "learning_rate is 2; expected more than 0, at most 1");
        assert_eq!(problem("lora_alpha = 8.0"), "lora_alpha is 8; expected more than 0, and lora_rank beside it");
        assert_eq!(problem("eval_share = 0.9"), "eval_share is 0.9; expected 0, or 0.02 to 0.5");
        assert_eq!(
            problem("early_stopping_patience = 2\ndev_share = 0.0"),
            "early_stopping_patience is 2; expected 0 with dev_share 0: there is nothing to stop by"
        );
        assert_eq!(
            problem("num_folds = 5\neval_share = 0.2"),
            "eval_share is 0.2; expected 0 with num_folds, which measures every dialogue"
        );
        assert_eq!(problem("labels = [\"a\"]"), "labels: 1 labels; a classifier needs two at least");
        let nothing = TrainKeys::default().resolve().unwrap_err().to_string();
        assert_eq!(
            nothing,
            "`model_name_or_path` is not given; name it with --model_name_or_path or in the configuration"
        );
    }
}
