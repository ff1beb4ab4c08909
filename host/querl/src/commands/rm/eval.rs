//! `querl rm eval`: a classifier measured on labelled dialogues.

use super::corpus::{Classes, Corpus};
use super::model::{ModelArgs, OpenModel};
use super::results::{Judged, Page, Results};
use anyhow::Context;
use clap::Args;
use std::path::PathBuf;

/// What `querl rm eval` takes.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Labelled dialogues (.json, .jsonl, .xlsx, .csv), none of which the model has learned from
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Where to write eval.json and report.html
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seeds the resamples
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
}

/// Prints the figures and writes them.
///
/// # Errors
/// Model or file cannot be used, or a file cannot be written.
pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    querl_model::set_threads(args.model.threads);
    let model = OpenModel::open(&args.model)?;
    let corpus = Corpus::read(&args.file, Classes::OfModel(model.classifier.labels()))?;
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
    let temperature = args.model.calibrated.then_some(model.temperature);
    if let Some(temperature) = temperature {
        notes.push(format!("probabilities are calibrated: logits were divided by {temperature:.3}"));
    }
    let measures = judged.measures(&probabilities)?;
    let results = Results { model: measures, temperature, calibrated: None, baseline: None, teacher: None, notes };
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("{}: cannot be made", out.display()))?;
    }
    let name = |path: &PathBuf| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let facts = vec![
        ("model".to_owned(), name(&args.model.model)),
        ("dialogues".to_owned(), format!("{} of {}", corpus.len(), name(&args.file))),
        ("by class".to_owned(), corpus.counts()),
    ];
    let page = Page { title: "Style model: evaluation", facts, temperature };
    judged.tell(&results, &probabilities, page, args.out.as_deref())
}
