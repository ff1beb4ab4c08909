//! `querl rm predict`: the style of texts.

use super::corpus::usage;
use super::model::{ModelArgs, OpenModel};
use crate::terminal;
use clap::Args;
use querl_data::read_dialogues;
use querl_eval::classification::argmax;
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

/// What `querl rm predict` takes.
#[derive(Debug, Args)]
pub struct PredictArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,
    /// Dialogues (.json, .jsonl), or a text a line; without --text and --file, lines of stdin
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print a JSON object a text
    #[arg(long)]
    json: bool,
    /// Name classes in English, where the model knows their English names
    #[arg(long)]
    english: bool,
}

/// Prints a prediction for each text.
///
/// # Errors
/// The model or the file cannot be used, or there is no text.
pub fn run(args: &PredictArgs) -> anyhow::Result<()> {
    let model = OpenModel::open(&args.model)?;
    let texts = texts(args)?;
    let views: Vec<&str> = texts.iter().map(String::as_str).collect();
    let answers = model.ask(&views)?;
    if answers.n_shortened > 0 {
        terminal::say(&format!(
            "{} text(s) longer than {} tokens were shortened",
            answers.n_shortened, args.model.max_length
        ));
    }
    let labels = model.classifier.labels();
    let names = match (args.english, labels.english()) {
        (true, Some(english)) => english,
        (true, None) => return Err(usage("the model has no English names of its classes; leave --english out")),
        (false, _) => labels.names(),
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for row in model.probabilities(&answers.logits) {
        let prediction = Prediction::new(names, row);
        match args.json {
            true => writeln!(out, "{}", serde_json::to_string(&prediction)?)?,
            false => write!(out, "{}", prediction.text())?,
        }
    }
    out.flush()?;
    Ok(())
}

fn texts(args: &PredictArgs) -> anyhow::Result<Vec<String>> {
    let texts = match (&args.text, &args.file) {
        (Some(text), _) => vec![text.clone()],
        (None, Some(path)) => of_file(path)?,
        (None, None) => std::io::stdin().lock().lines().collect::<Result<_, _>>()?,
    };
    let texts: Vec<String> = texts.into_iter().filter(|text| !text.trim().is_empty()).collect();
    match texts.is_empty() {
        true => Err(usage("no text to classify; give --text, --file or lines on stdin")),
        false => Ok(texts),
    }
}

fn of_file(path: &Path) -> anyhow::Result<Vec<String>> {
    let is_json = path.extension().is_some_and(|extension| extension == "json" || extension == "jsonl");
    if is_json {
        let dialogues = read_dialogues(path).map_err(usage)?;
        return Ok(dialogues.into_iter().map(|dialogue| dialogue.input).collect());
    }
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// What is said of a text: these three keys and no other.
#[derive(serde::Serialize)]
pub(super) struct Prediction<'a> {
    predicted_label: &'a str,
    confidence: f64,
    probabilities: ByClass<'a>,
}

/// Probabilities by class, in the order of the classes.
struct ByClass<'a>(&'a [String], Vec<f64>);

impl Serialize for ByClass<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.1.len()))?;
        for (name, probability) in self.0.iter().zip(&self.1) {
            map.serialize_entry(name, probability)?;
        }
        map.end()
    }
}

impl<'a> Prediction<'a> {
    /// `probabilities`: one for each of the classes that `names` has, at least one.
    pub(super) fn new(names: &'a [String], probabilities: Vec<f64>) -> Self {
        let predicted = argmax(&probabilities);
        Self {
            predicted_label: &names[predicted],
            confidence: probabilities[predicted],
            probabilities: ByClass(names, probabilities),
        }
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        let lines = self.probabilities.0.iter().zip(&self.probabilities.1);
        let lines: String = lines.map(|(name, probability)| format!("  {name}: {probability:.3}\n")).collect();
        format!("{} (confidence {:.3})\n{lines}", self.predicted_label, self.confidence)
    }
}
