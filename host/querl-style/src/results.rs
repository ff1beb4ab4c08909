//! What was measured, as text, `eval.json` and `report.html`.

use crate::corpus::Corpus;
use anyhow::Context;
use querl_core::fsx::write_atomic;
use querl_eval::classification::{
    ClassificationReport, Examples, MeasureOptions, Measures, Mistake, argmax, classification_html,
    classification_text, measure,
};
use serde::Serialize;
use std::path::Path;

/// The figures, for programs and for people.
pub(crate) const EVAL_FILE: &str = "eval.json";
pub(crate) const REPORT_FILE: &str = "report.html";
/// Resamples of intervals and tests.
const N_RESAMPLES: usize = 2000;
/// Mistakes that the page shows.
const N_MISTAKES: usize = 20;

/// Probabilities that something gave held-out dialogues.
pub(crate) struct Judged<'a> {
    pub(crate) corpus: &'a Corpus,
    /// Positions of the dialogues; each as often as it was held out.
    pub(crate) indices: &'a [usize],
    pub(crate) n_repeats: usize,
    /// The commonest class where it was learned.
    pub(crate) majority: usize,
    pub(crate) seed: u64,
}

/// What is written beside a model.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    /// Of the classifier.
    #[serde(flatten)]
    pub(crate) model: Measures,
    /// What logits were divided by: those of `model` in an evaluation, in training those of `calibrated` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) temperature: Option<f64>,
    /// Of the classifier with temperatures that were fitted on other dialogues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) calibrated: Option<Measures>,
    /// Of TF-IDF and logistic regression on the same split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) baseline: Option<Measures>,
    /// Of the classifier that this one learned from, on the same dialogues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) teacher: Option<Measures>,
    /// Sentences to be read with the figures.
    pub(crate) notes: Vec<String>,
}

impl Judged<'_> {
    /// The figures of one row of probabilities a dialogue.
    pub(crate) fn measures(&self, probabilities: &[Vec<f64>]) -> anyhow::Result<Measures> {
        let (labels, groups) = self.corpus.of(self.indices);
        let examples = Examples {
            classes: self.corpus.classes.names(),
            labels: &labels,
            groups: &groups,
            n_repeats: self.n_repeats,
            majority: self.majority,
        };
        Ok(measure(&examples, probabilities, MeasureOptions { seed: self.seed, n_resamples: N_RESAMPLES })?)
    }

    /// What was told wrong, surest first.
    fn mistakes(&self, probabilities: &[Vec<f64>]) -> Vec<Mistake> {
        let names = self.corpus.classes.names();
        let mistake = |(&index, row): (&usize, &Vec<f64>)| {
            let (label, predicted) = (self.corpus.labels[index], argmax(row));
            let dialogue = &self.corpus.dialogues[index];
            (label != predicted).then(|| Mistake {
                text: dialogue.input.clone(),
                label: names[label].clone(),
                predicted: names[predicted].clone(),
                confidence: row[predicted],
                note: dialogue.boundary.as_ref().map_or(String::new(), |class| format!("boundary: {class}")),
            })
        };
        let mut mistakes: Vec<Mistake> = self.indices.iter().zip(probabilities).filter_map(mistake).collect();
        mistakes.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
        mistakes.truncate(N_MISTAKES);
        mistakes
    }

    /// Writes the figures, with a folder, and returns them as text.
    pub(crate) fn tell(
        &self,
        results: &Results,
        probabilities: &[Vec<f64>],
        page: Page<'_>,
        folder: Option<&Path>,
    ) -> anyhow::Result<String> {
        if let Some(folder) = folder {
            self.write(results, probabilities, page, folder)?;
        }
        Ok(text_of(results))
    }

    fn write(
        &self,
        results: &Results,
        probabilities: &[Vec<f64>],
        page: Page<'_>,
        folder: &Path,
    ) -> anyhow::Result<()> {
        let mut systems = vec![("model".to_owned(), results.model.clone())];
        let others = [
            ("model, calibrated", &results.calibrated),
            ("TF-IDF, logistic regression", &results.baseline),
            ("teacher", &results.teacher),
        ];
        let measured = |(name, measures): (&str, &Option<Measures>)| Some((name.to_owned(), measures.clone()?));
        systems.extend(others.into_iter().filter_map(measured));
        let report = ClassificationReport {
            title: page.title.to_owned(),
            facts: page.facts,
            systems,
            temperature: page.temperature,
            mistakes: self.mistakes(probabilities),
            notes: results.notes.clone(),
        };
        write(&folder.join(REPORT_FILE), &classification_html(&report)?)?;
        write(&folder.join(EVAL_FILE), &format!("{}\n", serde_json::to_string_pretty(results)?))
    }
}

/// The figures for a terminal.
fn text_of(results: &Results) -> String {
    let mut text = classification_text(&results.model) + "\n";
    if let Some(measures) = &results.calibrated {
        let (log_loss, brier, error) = (measures.log_loss, measures.brier, measures.expected_calibration_error);
        text += &format!("calibrated: log loss {log_loss:.4}, Brier score {brier:.4}, calibration error {error:.4}\n");
    }
    let others = [("TF-IDF and logistic regression", &results.baseline), ("teacher", &results.teacher)];
    for (name, measures) in others.into_iter().filter_map(|(name, measures)| Some((name, measures.as_ref()?))) {
        let (accuracy, f1) = (100.0 * measures.eval_accuracy, measures.eval_f1_macro);
        text += &format!("{name}: eval_accuracy {accuracy:.1}%, eval_f1_macro {f1:.4}\n");
    }
    text + &results.notes.iter().map(|note| format!("note: {note}\n")).collect::<String>()
}

/// What the page says besides figures.
pub(crate) struct Page<'a> {
    pub(crate) title: &'a str,
    pub(crate) facts: Vec<(String, String)>,
    /// What the logits behind the model's own figures were divided by.
    pub(crate) temperature: Option<f64>,
}

/// Writes a file whole or not at all.
pub(crate) fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    write_atomic(path, text.as_bytes()).with_context(|| format!("{}: cannot be written", path.display()))
}
