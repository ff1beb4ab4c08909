//! A trained classifier with its tokenizer and temperature, loaded for inference.

use crate::usage;
use anyhow::Context;
use querl_core::config::{BaseDtype, StyleModelConfig};
use querl_core::fsx::digest_file;
use querl_eval::classification::calibrated;
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use querl_model::{Weights, is_adapter};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// File in a model's folder with the temperature fitted after training (temperature scaling).
pub(crate) const CALIBRATION_FILE: &str = "calibration.json";

/// Folder of a classifier, and inference settings.
#[derive(Debug, Clone)]
pub struct ClassifierOptions {
    /// Folder of a classifier written by `querl style train` or transformers, or of a PEFT adapter.
    pub model: PathBuf,
    /// Folder of the base model; required if `model` is a PEFT adapter, otherwise `None`.
    pub base: Option<PathBuf>,
    /// Maximum number of tokens of a text; question and answer of a longer text are truncated.
    pub max_length: u32,
    /// Divide the logits by the temperature in `calibration.json`.
    pub calibrated: bool,
    /// Worker threads; 0 for all cores.
    pub threads: usize,
}

/// Maximum number of tokens of one forward pass of a style classifier.
pub const TOKENS_PER_PASS: usize = 4096;

impl ClassifierOptions {
    /// Options of the style model that a run configures; `None` if it configures none.
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

/// Content of `calibration.json`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Calibration {
    pub(crate) temperature: f64,
    /// Number of dialogues of the dev split that the temperature was fitted on.
    pub(crate) n: usize,
}

/// A loaded style classifier with its tokenizer and temperature.
pub struct StyleClassifier {
    /// Weights and class labels.
    pub classifier: Classifier,
    /// Tokenizer of the classifier's folder or, if it has none, of the base model's folder.
    pub tokenizer: ClassifierTokenizer,
    /// Temperature that divides the logits; 1 without calibration.
    pub temperature: f64,
    /// Maximum number of tokens of a text: the requested one, at most the model's number of positions.
    pub max_length: usize,
}

/// Class logits of texts.
pub struct Answers {
    /// Logits, one row per text and one column per class.
    pub logits: Vec<Vec<f64>>,
    /// Number of texts that were truncated to the maximum length.
    pub n_shortened: usize,
}

impl StyleClassifier {
    /// Loads a classifier, or a PEFT adapter on its base model.
    ///
    /// # Errors
    /// A file is missing or damaged, the model is no classifier, or it is an adapter and no base is given.
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
        let tokenizer_folder = if folder.join("tokenizer.json").is_file() { folder } else { base };
        let max_length = max_length.min(classifier.decoder().config().max_positions);
        let tokenizer = ClassifierTokenizer::load(tokenizer_folder, max_length).map_err(usage)?;
        let temperature = if args.calibrated { temperature(folder)? } else { 1.0 };
        Ok(Self { classifier, tokenizer, temperature, max_length })
    }

    /// Computes class logits, one row per text.
    ///
    /// # Errors
    /// A text has no token, or the model fails.
    pub fn ask(&self, texts: &[&str]) -> anyhow::Result<Answers> {
        compute_logits(&self.classifier, &self.tokenizer, texts, TOKENS_PER_PASS)
    }

    /// Class probabilities: softmax of the logits, divided by the classifier's temperature.
    pub fn probabilities(&self, logits: &[Vec<f64>]) -> Vec<Vec<f64>> {
        calibrated(logits, self.temperature)
    }
}

/// Class logits of texts, in the order of the texts.
pub(crate) fn compute_logits(
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

/// Files of a model's folder that the logits depend on, other than weights.
const MODEL_FILES: [&str; 3] = ["config.json", "adapter_config.json", "tokenizer.json"];

/// Concatenated SHA-256 digests of all files of a model's folder that its logits depend on.
pub(crate) fn model_digest(folder: &Path) -> anyhow::Result<String> {
    let entries = std::fs::read_dir(folder).map_err(|error| usage(format!("{}: {error}", folder.display())))?;
    let is_weight =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors" || extension == "bin");
    let is_named = |path: &PathBuf| MODEL_FILES.iter().any(|name| path.ends_with(name));
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.is_file() && (is_weight(path) || is_named(path)));
    paths.sort();
    let digests = paths.iter().map(|path| digest_file(path).with_context(|| path.display().to_string()));
    Ok(digests.collect::<anyhow::Result<Vec<_>>>()?.concat())
}
