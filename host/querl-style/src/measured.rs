//! What a trained classifier is worth: its figures on dialogues that it has not seen, beside those of a baseline.

use crate::corpus::Corpus;
use crate::fitting::{Fitted, Sides};
use crate::model::ask;
use crate::results::{Judged, Page, Results};
use crate::settings::TrainConfig;
use querl_eval::classification::{TextBaseline, calibrated, fit_temperature, softmax};
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use std::path::Path;

/// How classifiers are asked about a corpus.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) corpus: &'a Corpus,
    pub(crate) tokenizer: &'a ClassifierTokenizer,
}

/// A training's outcome, and what figures are made from.
pub(crate) struct Measured<'a> {
    pub(crate) asked: Asked<'a>,
    pub(crate) fitted: &'a Fitted,
    /// Fitted on the training's dev, where there is one.
    pub(crate) temperature: Option<f64>,
    pub(crate) n_copies: usize,
}

/// What was said of held-out dialogues: a row of probabilities each.
#[derive(Default)]
pub(crate) struct Said {
    pub(crate) model: Vec<Vec<f64>>,
    /// The same by a temperature; empty where there is none.
    pub(crate) calibrated: Vec<Vec<f64>>,
    /// That temperature, where it was one for all.
    pub(crate) temperature: Option<f64>,
    pub(crate) baseline: Vec<Vec<f64>>,
    pub(crate) n_shortened: usize,
}

impl Asked<'_> {
    pub(crate) fn texts(&self, indices: &[usize]) -> Vec<&str> {
        indices.iter().map(|&index| self.corpus.dialogues[index].input.as_str()).collect()
    }

    /// The temperature that suits what chose the checkpoint; `None` where nothing did.
    pub(crate) fn temperature(&self, classifier: &Classifier, dev: &[usize]) -> anyhow::Result<Option<f64>> {
        if dev.is_empty() {
            return Ok(None);
        }
        let logits = ask(classifier, self.tokenizer, &self.texts(dev), self.config.tokens_asked())?.logits;
        Ok(Some(fit_temperature(&self.corpus.of(dev).0, &logits)))
    }

    /// Probabilities of logits, and of the baseline that learned from the same dialogues.
    pub(crate) fn said(&self, logits: &[Vec<f64>], temperature: Option<f64>, [learned, asked]: [&[usize]; 2]) -> Said {
        let labels = self.corpus.of(learned).0;
        let baseline = TextBaseline::fit(&self.texts(learned), &labels, self.corpus.classes.n_classes());
        Said {
            model: logits.iter().map(|logits| softmax(logits)).collect(),
            calibrated: temperature.map_or(Vec::new(), |temperature| calibrated(logits, temperature)),
            baseline: self.texts(asked).into_iter().map(|text| baseline.probabilities(text)).collect(),
            temperature,
            n_shortened: 0,
        }
    }
}

impl Measured<'_> {
    /// Figures on the dialogues that were held out from this training.
    pub(crate) fn held_out(&self, sides: &Sides, held_out: &[usize]) -> anyhow::Result<String> {
        let Asked { config, corpus, tokenizer } = self.asked;
        let learned = [sides.train.as_slice(), &sides.dev].concat();
        let answers = ask(&self.fitted.classifier, tokenizer, &self.asked.texts(held_out), config.tokens_asked())?;
        let said = self.asked.said(&answers.logits, self.temperature, [&learned, held_out]);
        let said = Said { n_shortened: answers.n_shortened, ..said };
        let majority = corpus.majority(&learned);
        let judged = Judged { corpus, indices: held_out, n_repeats: 1, majority, seed: config.seed };
        self.tell(&judged, &said, vec![])
    }

    /// Writes the figures and returns them as text.
    pub(crate) fn tell(&self, judged: &Judged<'_>, said: &Said, mut notes: Vec<String>) -> anyhow::Result<String> {
        let config = self.asked.config;
        if let Some(temperature) = self.temperature {
            notes.push(format!(
                "probabilities are the model's own; --calibrated divides logits by {temperature:.3}, fitted on dev"
            ));
        }
        if said.n_shortened > 0 {
            let (n, length) = (said.n_shortened, config.max_length);
            notes.push(format!("{n} text(s) that were asked about were shortened to {length} tokens"));
        }
        let (model, baseline) = (judged.measures(&said.model)?, judged.measures(&said.baseline)?);
        if baseline.eval_accuracy >= model.eval_accuracy {
            notes.push(
                "TF-IDF is no worse here: what single words tell is all that the figures can show of this model; more \
                 dialogues or a larger base may change that"
                    .into(),
            );
        }
        let is_calibrated = !said.model.is_empty() && said.calibrated.len() == said.model.len();
        let results = Results {
            model,
            temperature: said.temperature,
            calibrated: is_calibrated.then(|| judged.measures(&said.calibrated)).transpose()?,
            baseline: Some(baseline),
            teacher: None,
            notes,
        };
        let page = Page { title: "Style model: training", facts: self.facts(), temperature: None };
        judged.tell(&results, &said.model, page, Some(&config.output_dir))
    }

    fn facts(&self) -> Vec<(String, String)> {
        let Asked { config, corpus, .. } = self.asked;
        let summary = &self.fitted.summary;
        let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let trained = config.lora_rank.map_or("every weight".into(), |rank| format!("LoRA, rank {rank}"));
        let facts = [
            ("base", name(&config.model_name_or_path)),
            ("dialogues", format!("{} of {}", corpus.len(), name(&config.train_file))),
            ("by class", corpus.counts()),
            ("trained", trained),
            ("changed copies learned from", self.n_copies.to_string()),
            ("steps", format!("{}, best at {}", summary.n_steps, summary.best_step)),
            ("seed", config.seed.to_string()),
        ];
        facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}
