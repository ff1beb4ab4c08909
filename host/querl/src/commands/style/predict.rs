//! `querl style predict`: the style of texts.

use super::classifier::{ModelArgs, usage};
use crate::terminal;
use anyhow::Context;
use clap::Args;
use querl_data::read_dialogues;
use querl_serve::StylePrediction;
use querl_style::{StyleClassifier, texts_of};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Ends of names of files with dialogues; any other holds texts as lines.
const DIALOGUES: [&str; 6] = ["json", "jsonl", "xlsx", "csv", "tsv", "parquet"];

/// What `querl style predict` takes.
#[derive(Debug, Args)]
pub struct PredictArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,
    /// Dialogues (.json, .jsonl, .xlsx, .csv), or a text a line, two for a dialogue (用户问题：... and 回答：...); without --text and --file, lines
    /// of stdin, or JSON lines there
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
pub fn run(args: &PredictArgs) -> anyhow::Result<()> {
    querl_model::set_threads(args.model.threads);
    let model = StyleClassifier::open(&args.model.options())?;
    let texts = texts(args)?;
    let views: Vec<&str> = texts.iter().map(String::as_str).collect();
    let answers = model.ask(&views).map_err(|error| place_of(error, &model, &views))?;
    if answers.n_shortened > 0 {
        terminal::say(&format!(
            "{} text(s) longer than {} tokens were shortened",
            answers.n_shortened, model.max_length
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
        (None, None) => {
            let mut bytes = Vec::new();
            std::io::stdin().lock().read_to_end(&mut bytes).context("stdin")?;
            of_lines("stdin", bytes)?
        }
    };
    if let Some(index) = texts.iter().position(|text| text.trim().is_empty()) {
        return Err(usage(format!("text {} is empty; expected a question and an answer", index + 1)));
    }
    match texts.is_empty() {
        true => Err(usage("no text to classify; give --text, --file or lines on stdin")),
        false => Ok(texts),
    }
}

fn of_lines(name: &str, bytes: Vec<u8>) -> anyhow::Result<Vec<String>> {
    let content = String::from_utf8(bytes).map_err(|error| {
        usage(format!("{name}: no UTF-8 from byte {} on; save it as UTF-8", error.utf8_error().valid_up_to()))
    })?;
    texts_of(&content).map_err(|problem| usage(format!("{name}: {problem}")))
}

/// What the tokenizer finds no token in is the caller's to mend; all else is a failure.
fn place_of(error: anyhow::Error, model: &StyleClassifier, texts: &[&str]) -> anyhow::Error {
    let refused = texts.iter().enumerate().find_map(|(index, text)| Some((index, model.tokenizer.encode(text).err()?)));
    match refused {
        Some((index, problem)) => usage(format!("text {}: {problem}", index + 1)),
        None => error,
    }
}

fn of_file(path: &Path) -> anyhow::Result<Vec<String>> {
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if DIALOGUES.contains(&extension.as_str()) {
        let dialogues = read_dialogues(path).map_err(usage)?;
        return Ok(dialogues.into_iter().map(|dialogue| dialogue.input).collect());
    }
    let name = path.display().to_string();
    of_lines(&name, std::fs::read(path).map_err(|error| usage(format!("{name}: {error}")))?)
}
