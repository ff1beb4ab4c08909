//! A classifier measured on labelled dialogues.

use crate::corpus::{Classes, Corpus};
use crate::model::{ClassifierOptions, StyleClassifier};
use crate::results::{Judged, Page, Results};
use anyhow::Context;
use querl_core::ports::Reporter;
use std::path::{Path, PathBuf};

/// What to measure on.
#[derive(Debug)]
pub struct EvalOptions {
    /// Labelled dialogues.
    pub file: PathBuf,
    /// Where `eval.json` and `report.html` are written.
    pub output_dir: Option<PathBuf>,
    /// Seeds the resamples.
    pub seed: u64,
}

/// Measures a classifier, writes the figures and returns them as text.
///
/// # Errors
/// Model or file cannot be used, or a file cannot be written.
pub fn evaluate(options: &ClassifierOptions, args: &EvalOptions, reporter: &dyn Reporter) -> anyhow::Result<String> {
    querl_model::set_threads(options.threads);
    let model = StyleClassifier::open(options)?;
    let corpus = Corpus::read(&args.file, Classes::OfModel(model.classifier.labels()), reporter)?;
    let texts: Vec<&str> = corpus.dialogues.iter().map(|dialogue| dialogue.input.as_str()).collect();
    let answers = model.ask(&texts)?;
    let probabilities = model.probabilities(&answers.logits);
    let indices: Vec<usize> = (0..corpus.len()).collect();
    // What the model learned from is not known here: the commonest class of this file is the harder one to beat.
    let majority = corpus.majority(&indices);
    let judged = Judged { corpus: &corpus, indices: &indices, n_repeats: 1, majority, seed: args.seed };
    let mut notes = Vec::new();
    if answers.n_shortened > 0 {
        notes.push(format!("{} text(s) were shortened to {} tokens", answers.n_shortened, model.max_length));
    }
    let temperature = options.calibrated.then_some(model.temperature);
    if let Some(temperature) = temperature {
        notes.push(format!("probabilities are calibrated: logits were divided by {temperature:.3}"));
    }
    let measures = judged.measures(&probabilities)?;
    let results = Results { model: measures, temperature, calibrated: None, baseline: None, teacher: None, notes };
    if let Some(out) = &args.output_dir {
        std::fs::create_dir_all(out).with_context(|| format!("{}: cannot be made", out.display()))?;
    }
    let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let facts = vec![
        ("model".to_owned(), name(&options.model)),
        ("dialogues".to_owned(), format!("{} of {}", corpus.len(), name(&args.file))),
        ("by class".to_owned(), corpus.counts()),
    ];
    let page = Page { title: "Style model: evaluation", facts, temperature };
    judged.tell(&results, &probabilities, page, args.output_dir.as_deref())
}
