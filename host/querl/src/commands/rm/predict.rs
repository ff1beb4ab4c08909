//! `querl rm predict`: the style of texts.

use super::corpus::usage;
use super::model::{ModelArgs, OpenModel};
use crate::terminal;
use clap::Args;
use querl_data::read_dialogues;
use querl_serve::StylePrediction;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

/// Ends of names of files with dialogues; any other holds a text a line.
const DIALOGUES: [&str; 6] = ["json", "jsonl", "xlsx", "csv", "tsv", "parquet"];

/// What `querl rm predict` takes.
#[derive(Debug, Args)]
pub struct PredictArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,
    /// Dialogues (.json, .jsonl, .xlsx, .csv), or a text a line; without --text and --file, lines of stdin
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
    querl_model::set_threads(args.model.threads);
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
        let prediction = StylePrediction::new(names, &row);
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
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if DIALOGUES.contains(&extension.as_str()) {
        let dialogues = read_dialogues(path).map_err(usage)?;
        return Ok(dialogues.into_iter().map(|dialogue| dialogue.input).collect());
    }
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    Ok(text.lines().map(str::to_owned).collect())
}
