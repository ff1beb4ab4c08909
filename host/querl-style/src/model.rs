//! A classifier's folder, opened to be asked.

use crate::error::usage;
use querl_core::config::{BaseDtype, StyleModelConfig};
use querl_eval::classification::calibrated;
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use querl_model::{Weights, is_adapter};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Beside a model: how sure it is, corrected.
pub(crate) const CALIBRATION_FILE: &str = "calibration.json";

/// Which classifier, and how it is asked.
#[derive(Debug, Clone)]
pub struct ClassifierOptions {
    /// A classifier's folder, of `querl style train` or of transformers; or a PEFT adapter's.
    pub model: PathBuf,
    /// The model that an adapter was trained on.
    pub base: Option<PathBuf>,
    /// Most tokens of a text; of longer ones question and answer are shortened.
    pub max_length: u32,
    /// Whether logits are divided by the temperature that was fitted in training.
    pub calibrated: bool,
    /// Worker threads; 0 for all cores.
    pub threads: usize,
}

/// Most tokens of one pass: the classifiers that are trained here are small.
pub const TOKENS_PER_PASS: usize = 4096;

impl ClassifierOptions {
    /// Those of a run's style model, on whatever threads there are; `None` where it has none.
    pub fn of(config: &StyleModelConfig) -> Option<Self> {
        Some(Self {
            model: config.path.clone()?,
            base: config.base.clone(),
            max_length: u32::try_from(config.max_length).unwrap_or(u32::MAX),
            calibrated: config.calibrated,
            threads: 0,
        })
    }
}

/// What `calibration.json` says.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Calibration {
    /// What logits are divided by.
    pub(crate) temperature: f64,
    /// Examples that it was fitted on.
    pub(crate) n: usize,
}

/// A classifier with its tokenizer.
pub struct StyleClassifier {
    /// The weights.
    pub classifier: Classifier,
    /// Of the same folder, or of the base.
    pub tokenizer: ClassifierTokenizer,
    /// What logits are divided by.
    pub temperature: f64,
    /// Most tokens of a text: as asked for, or the model's positions.
    pub max_length: usize,
}

/// Logits of texts.
pub struct Answers {
    /// By text, then by class.
    pub logits: Vec<Vec<f64>>,
    /// Texts that were shortened.
    pub n_shortened: usize,
}

impl StyleClassifier {
    /// Opens what the arguments name.
    ///
    /// # Errors
    /// A file is missing or damaged, the model is no classifier, or it is an adapter and `--base` is not there.
    pub fn open(args: &ClassifierOptions) -> anyhow::Result<Self> {
        let (folder, max_length) = (args.model.as_path(), args.max_length as usize);
        let (classifier, base) = match (is_adapter(folder), &args.base) {
            (true, Some(base)) => {
                (Classifier::load_adapted(base, folder, BaseDtype::F32).map_err(usage)?, base.as_path())
            }
            (true, None) => {
                let message = "is an adapter: name the model that it was trained on with --base";
                return Err(usage(format!("{}: {message}", folder.display())));
            }
            (false, _) => (Classifier::load(folder, Weights::Frozen, BaseDtype::F32).map_err(usage)?, folder),
        };
        let place = if folder.join("tokenizer.json").is_file() { folder } else { base };
        // Of a model with fewer positions longer texts are shortened to these.
        let max_length = max_length.min(classifier.decoder().config().max_positions);
        let tokenizer = ClassifierTokenizer::load(place, max_length).map_err(usage)?;
        let temperature = if args.calibrated { temperature(folder)? } else { 1.0 };
        Ok(Self { classifier, tokenizer, temperature, max_length })
    }

    /// Asks about texts.
    ///
    /// # Errors
    /// A text has no token, or the model fails.
    pub fn ask(&self, texts: &[&str]) -> anyhow::Result<Answers> {
        ask(&self.classifier, &self.tokenizer, texts, TOKENS_PER_PASS)
    }

    /// Probabilities of logits, at the temperature that was asked for.
    pub fn probabilities(&self, logits: &[Vec<f64>]) -> Vec<Vec<f64>> {
        calibrated(logits, self.temperature)
    }
}

/// Logits of texts, in their order, at most so many tokens in a pass.
pub(crate) fn ask(
    classifier: &Classifier,
    tokenizer: &ClassifierTokenizer,
    texts: &[&str],
    tokens_per_pass: usize,
) -> anyhow::Result<Answers> {
    let encoded = texts.iter().map(|text| tokenizer.encode(text)).collect::<Result<Vec<_>, _>>()?;
    let ids: Vec<&[u32]> = encoded.iter().map(|encoded| encoded.ids.as_slice()).collect();
    let logits = classifier.logits_of_all(&ids, tokens_per_pass)?;
    Ok(Answers { logits, n_shortened: encoded.iter().filter(|encoded| encoded.n_left_out > 0).count() })
}

fn temperature(folder: &Path) -> anyhow::Result<f64> {
    let path = folder.join(CALIBRATION_FILE);
    let text = std::fs::read_to_string(&path).map_err(|_| {
        usage(format!("{}: not there; train with --dev_share above 0 to have a temperature fitted", path.display()))
    })?;
    let found: Calibration =
        serde_json::from_str(&text).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    match found.temperature.is_finite() && found.temperature > 0.0 {
        true => Ok(found.temperature),
        false => Err(usage(format!("{}: temperature is {}; expected more than 0", path.display(), found.temperature))),
    }
}
