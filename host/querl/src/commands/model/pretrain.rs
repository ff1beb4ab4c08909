//! `querl model pretrain`: pretrains a small model for one domain on a corpus: trains a tokenizer, initialises random weights, trains.

use crate::args::usage;
use crate::new_folder::move_to;
use crate::terminal::{self, StageProgress};
use anyhow::{Context, anyhow};
use querl_core::config::SftConfig;
use querl_core::dir_lock::{DirLock, DirLockError};
use querl_core::fsx::{NumberedLine, digest_file, digest_hex, open_jsonl};
use querl_core::model_config::PRETRAIN_FOLDER;
use querl_core::records::Message;
use querl_core::text::nearest;
use querl_data::shown_keys;
use querl_model::{Decoder, DecoderConfig, Mesh, TextTokenizer, Weights, small_model};
use querl_pipeline::failure::{Stop, ending};
use querl_pipeline::interrupt;
use querl_pipeline::metrics_log::MetricsLog;
use querl_train::sft::{self, SftSummary, SftTask};
use querl_train::{BEST, Example, Policy, STATE, TrainError};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Content of the file for `querl model pretrain`. Paths are relative to the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PretrainConfig {
    corpus: PathBuf,
    output_dir: PathBuf,
    seed: u64,
    vocab_size: toml::Spanned<usize>,
    /// Share of the distinct lines that is held out to select the best weights, 0 to 0.5; 0 for none.
    #[serde(default)]
    val_share: f64,
    model: small_model::Shape,
    train: SftConfig,
}

/// A line of the corpus: a text; or a conversation, where only the last message is trained on.
#[derive(Deserialize)]
#[serde(untagged)]
enum CorpusLine {
    Text { text: String },
    Chat { messages: Vec<Message> },
}

/// The lines of a corpus, with their 1-based line numbers.
struct Corpus {
    path: PathBuf,
    numbers: Vec<usize>,
    lines: Vec<CorpusLine>,
}

impl Corpus {
    /// Reads a corpus. `pretrain`: the file that names it, for error messages.
    fn read(path: PathBuf, pretrain: &Path) -> Result<Self, Stop> {
        let shown = path.display();
        if !path.exists() {
            let remedy = format!("write it with `querl model corpus CONFIG --out {shown}`, or name another file");
            return Err(usage(format!("{}: corpus is {shown}; no such file: {remedy}", pretrain.display())));
        }
        let (mut numbers, mut lines) = (Vec::new(), Vec::new());
        for line in open_jsonl::<Value>(&path).map_err(usage)? {
            let NumberedLine { line, value, .. } = line.map_err(usage)?;
            let found = shown_keys(&value);
            let expected = "expected `text`, a string, or `messages`, a list of `role` and `content`";
            let parsed = serde_json::from_value(value);
            lines.push(parsed.map_err(|_| usage(format!("{shown}:{line}: {expected}; {found}")))?);
            numbers.push(line);
        }
        Ok(Self { path, numbers, lines })
    }
}

pub(super) fn run(path: &Path) -> anyhow::Result<()> {
    let other_file = |problem: &str, config: &str| {
        usage(format!(
            "{}: {problem}; expected the file that `querl model corpus {config} --out corpus.jsonl --pretrain pretrain.toml --out_model \
             DIR` writes",
            path.display()
        ))
    };
    let text = std::fs::read_to_string(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => other_file("no such file", "CONFIG"),
        ErrorKind::IsADirectory => other_file("is a folder", "CONFIG"),
        ErrorKind::InvalidData => other_file("not UTF-8 text", "CONFIG"),
        _ => usage(format!("{}: cannot be read: {error}", path.display())),
    })?;
    let config: PretrainConfig = toml::from_str(&text).map_err(|error| {
        if is_run_config(&text) {
            return other_file("a configuration of `querl run`", &path.display().to_string());
        }
        if path.extension().is_none_or(|extension| extension != "toml") && text.parse::<toml::Table>().is_err() {
            return other_file("not a TOML file", "CONFIG");
        }
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        usage(format!("{}:{line}: {}", path.display(), with_usable_keys(error.message())))
    })?;
    let n_tokens = *config.vocab_size.get_ref();
    if n_tokens < small_model::MIN_VOCABULARY {
        let line = text[..config.vocab_size.span().start].matches('\n').count() + 1;
        let expected = format!("at least {}, for 256 bytes and the special tokens", small_model::MIN_VOCABULARY);
        return Err(usage(format!("{}:{line}: vocab_size is {n_tokens}; expected {expected}", path.display())).into());
    }
    check(&config).map_err(|complaint| usage(format!("{}: {complaint}", path.display())))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let output = folder.join(&config.output_dir);
    let corpus = Corpus::read(folder.join(&config.corpus), path)?;
    let texts: Vec<String> = corpus.lines.iter().flat_map(texts_of).collect();
    // The model is written to a folder of its own until it is complete, so that an earlier model is not replaced in part.
    let (work, new) = (output.join(PRETRAIN_FOLDER), output.join(PRETRAIN_FOLDER).join("model"));
    let _lock = DirLock::take(&output).map_err(|error| match error {
        DirLockError::InUse { folder, holder } => {
            anyhow!("{folder} is in use by another querl (process {holder}); wait for it, or name another output_dir")
        }
        error => error.into(),
    })?;
    std::fs::create_dir_all(&new).with_context(|| format!("{}: cannot be made", new.display()))?;
    let corpus_digest =
        digest_file(&corpus.path).with_context(|| format!("{}: cannot be read", corpus.path.display()))?;
    let fingerprint =
        digest_hex(format!("{} {} {corpus_digest} {text}", env!("CARGO_PKG_VERSION"), config.seed).as_bytes());
    let made = small_model::write_files(&new, &texts, n_tokens, &config.model)
        .map_err(|error| {
            let problem = with_own_keys(&error.to_string(), &new.join("config.json"));
            usage(format!("{}: no model can be made of it: {problem}", path.display())).into()
        })
        .and_then(|decoder_config| make(decoder_config, &corpus, &config, &new, &fingerprint));
    let summary = made.inspect_err(|_| {
        // Removes the folder unless it has a checkpoint to resume from.
        if !work.join(STATE).exists() {
            let _ = std::fs::remove_dir_all(&work);
        }
    })?;
    // No interrupt between the files: an earlier model must not be replaced in part.
    let _at_safe_points = interrupt::at_safe_points();
    move_to(&new, &output).with_context(|| format!("{}: cannot be written", output.display()))?;
    std::fs::remove_dir_all(&work).with_context(|| format!("{}: cannot be removed", work.display()))?;
    terminal::print(&format!("written to {}", output.display()));
    if let Some(note) = unfinished(&summary, &config.train, path) {
        terminal::print(&note);
    }
    Ok(())
}

/// Keys of `[sft]` that have no effect in `[train]`, because there is no adapter and no later stage.
const WITHOUT_EFFECT: [&str; 8] =
    ["method", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora", "on_noise"];

/// Converts the parser's message about an unknown key: adds the nearest key, and omits the keys without effect.
fn with_usable_keys(message: &str) -> String {
    let Some((what, known)) = message.split_once(", expected one of ") else { return message.to_owned() };
    let known = known.split('`').skip(1).step_by(2);
    let known: Vec<&str> = known.filter(|key| !WITHOUT_EFFECT.contains(key)).collect();
    let name = what.split('`').nth(1).unwrap_or_default();
    let near = nearest(name, known.iter().copied()).first().map(|near| format!("; did you mean `{near}`?"));
    format!("{what}{} (expected one of `{}`)", near.unwrap_or_default(), known.join("`, `"))
}

/// Converts a message about the new model's config.json: replaces its keys by those of `[model]`.
fn with_own_keys(message: &str, file: &Path) -> String {
    let keys = [
        ("num_attention_heads", "model.n_heads"),
        ("num_key_value_heads", "model.n_kv_heads"),
        ("num_hidden_layers", "model.n_layers"),
        ("max_position_embeddings", "model.max_positions"),
    ];
    let message = message.replace(&format!("{}: ", file.display()), "");
    keys.into_iter().fold(message, |message, (name, key)| message.replace(name, key))
}

/// A note if the last evaluation was the best: with more steps the loss on held-out lines would probably decrease.
fn unfinished(summary: &SftSummary, train: &SftConfig, path: &Path) -> Option<String> {
    let is_unfinished = summary.best_val_loss.is_some() && summary.best_step == summary.n_steps;
    let longer = match train.max_steps {
        n_steps if n_steps as u64 == summary.n_steps => {
            format!("more steps (max_steps = {} and enough epochs", 2 * n_steps)
        }
        _ => format!("more epochs (epochs = {}", 2 * train.epochs),
    };
    let file = path.display();
    is_unfinished
        .then(|| format!("the last step has the best held-out loss; {longer} in {file}) would probably lower it"))
}

/// True if a text is the configuration of a run, by the key `tenant`, which is required there and unknown here.
fn is_run_config(text: &str) -> bool {
    text.parse::<toml::Table>().is_ok_and(|table| table.contains_key("tenant"))
}

/// Trains a model from random weights and writes it to `new`, the folder of its tokenizer.
fn make(
    decoder_config: DecoderConfig,
    corpus: &Corpus,
    config: &PretrainConfig,
    new: &Path,
    fingerprint: &str,
) -> anyhow::Result<SftSummary> {
    let tokenizer = TextTokenizer::load(new)?;
    let Corpus { path, numbers, lines } = corpus;
    let held_out = held_out_lines(lines, config.val_share, config.seed);
    let (mut examples, limit) = (Examples::default(), config.train.max_length);
    for (number, line) in numbers.iter().zip(lines) {
        let is_held_out = !held_out.is_empty() && held_out.contains(&line_digest(line, config.seed));
        let split = if is_held_out { &mut examples.val } else { &mut examples.train };
        let example = example(line, &tokenizer)?;
        if example.len() > limit {
            let problem = format!("has {} tokens; train.max_length is {limit}", example.len());
            return Err(
                usage(format!("{}:{number}: {problem}: shorten the line or raise the limit", path.display())).into()
            );
        }
        split.push(example);
    }
    let decoder = Decoder::init(decoder_config, config.seed)?;
    let (n_parameters, n_val) = (decoder.config().n_parameters(), examples.val.len());
    let held_out = if n_val > 0 { format!(", {n_val} held out") } else { String::new() };
    terminal::print(&format!("{n_parameters} parameters, {} examples{held_out}", lines.len()));
    let summary = train(&decoder, &examples, config, new, fingerprint)?;
    if summary.best_val_loss.is_none() {
        decoder.save(new, small_model::STORED_DTYPE)?;
        return Ok(summary);
    }
    let best = new.parent().context("the folder of the new model has no parent")?.join(BEST);
    Decoder::load(&best, Weights::Trained)?.save(new, small_model::STORED_DTYPE)?;
    Ok(summary)
}

/// The examples of both splits.
#[derive(Default)]
struct Examples {
    train: Vec<Example>,
    /// Empty without `val_share`.
    val: Vec<Example>,
}

/// Digests of the held-out lines: the first `share` of the distinct digests in ascending order; at least one and not all of them. Equal
/// lines are in the same split, so that no held-out line is trained on.
fn held_out_lines(lines: &[CorpusLine], share: f64, seed: u64) -> BTreeSet<String> {
    if share <= 0.0 {
        return BTreeSet::new();
    }
    let digests: BTreeSet<String> = lines.iter().map(|line| line_digest(line, seed)).collect();
    let n = ((share * digests.len() as f64).ceil() as usize).min(digests.len().saturating_sub(1));
    digests.into_iter().take(n).collect()
}

fn line_digest(line: &CorpusLine, seed: u64) -> String {
    digest_hex(format!("{seed} {}", texts_of(line).join("\0")).as_bytes())
}

/// Checks values of `[train]` and `val_share`.
fn check(config: &PretrainConfig) -> Result<(), String> {
    let train = &config.train;
    let counts = [
        ("batch_size", train.batch_size),
        ("gradient_accumulation_steps", train.gradient_accumulation_steps),
        ("epochs", train.epochs),
    ];
    if let Some((key, _)) = counts.into_iter().find(|(_, value)| *value == 0) {
        return Err(format!("train.{key} is 0; expected at least 1"));
    }
    if !(train.learning_rate > 0.0 && train.learning_rate <= 1.0) {
        return Err(format!("train.learning_rate is {}; expected more than 0, at most 1", train.learning_rate));
    }
    if !(0.0..=0.5).contains(&config.val_share) {
        return Err(format!("val_share is {}; expected 0.0 to 0.5", config.val_share));
    }
    Ok(())
}

fn train(
    decoder: &Decoder,
    examples: &Examples,
    config: &PretrainConfig,
    new: &Path,
    fingerprint: &str,
) -> anyhow::Result<SftSummary> {
    let work = new.parent().context("the folder of the new model has no parent")?;
    let progress = StageProgress::start("pretrain");
    let task = SftTask {
        policy: Policy { decoder, adapter: None },
        base_path: new,
        train: &examples.train,
        val: &examples.val,
        config: &config.train,
        tokens_per_pass: TOKENS_PER_PASS,
        gradient_checkpointing: false,
        seed: config.seed,
        mesh: &Mesh::alone(),
        fingerprint: Some(fingerprint),
        output_dir: work,
        progress: &progress,
        stop: interrupt::flag(),
    };
    let mut sink = MetricsLog::open(&work.join("metrics.jsonl"), "sft")?;
    let summary = sft::train(&task, &mut sink).map_err(|error| match error {
        TrainError::Interrupted { step, .. } => {
            Stop::interrupted(format!("interrupted at step {step}; the same command resumes there")).into()
        }
        error => ending(error.into()),
    })?;
    let of_val = summary
        .best_val_loss
        .map(|loss| format!(", held-out loss {loss:.3} at step {}, whose weights are written", summary.best_step));
    let SftSummary { n_steps, train_loss, .. } = summary;
    terminal::print(&format!("{n_steps} steps, final loss {train_loss:.3}{}", of_val.unwrap_or_default()));
    Ok(summary)
}

/// Maximum number of tokens of a forward and backward pass. Small models need little memory per token.
const TOKENS_PER_PASS: usize = 8192;

fn texts_of(line: &CorpusLine) -> Vec<String> {
    match line {
        CorpusLine::Text { text } => vec![text.clone()],
        CorpusLine::Chat { messages } => messages.iter().map(|message| message.content.clone()).collect(),
    }
}

/// The training example of a line. A text is the response to an end-of-text token, so that all its tokens are trained on; of a conversation
/// only the last message is.
fn example(line: &CorpusLine, tokenizer: &TextTokenizer) -> anyhow::Result<Example> {
    Ok(match line {
        CorpusLine::Text { text } => {
            Example { prompt: vec![small_model::END_OF_TEXT_ID], response: tokenizer.encode(text)? }
        }
        CorpusLine::Chat { messages } => {
            let (answer, prompt) = messages
                .split_last()
                .ok_or_else(|| usage("corpus: a conversation without messages; remove its line"))?;
            Example { prompt: tokenizer.encode_prompt(prompt)?, response: tokenizer.encode_response(&answer.content)? }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> CorpusLine {
        CorpusLine::Text { text: text.to_owned() }
    }

    #[test]
    fn equal_lines_are_on_the_same_side_and_a_share_of_the_others_is_held_out() {
        let lines: Vec<CorpusLine> = (0..100).map(|n| text(&format!("line {}", n % 50))).collect();
        let held_out = held_out_lines(&lines, 0.1, 1);
        assert_eq!(held_out.len(), 5, "of 50 lines that differ");
        let n = lines.iter().filter(|line| held_out.contains(&line_digest(line, 1))).count();
        assert_eq!(n, 10);
        assert_ne!(held_out_lines(&lines, 0.1, 2), held_out, "the seed decides");
    }

    #[test]
    fn messages_name_the_keys_of_the_file() {
        let message =
            with_usable_keys("unknown field `epoch`, expected one of `method`, `epochs`, `lora_rank`, `seed`");
        assert_eq!(message, "unknown field `epoch`; did you mean `epochs`? (expected one of `epochs`, `seed`)");
        assert_eq!(with_usable_keys("missing field `seed`"), "missing field `seed`");
        let message = "out/config.json: num_attention_heads 5 is not a multiple of num_key_value_heads 2";
        let expected = "model.n_heads 5 is not a multiple of model.n_kv_heads 2";
        assert_eq!(with_own_keys(message, Path::new("out/config.json")), expected);
    }

    #[test]
    fn a_small_share_is_one_line_and_training_keeps_one() {
        let of = |n: usize, share| held_out_lines(&(0..n).map(|n| text(&n.to_string())).collect::<Vec<_>>(), share, 1);
        assert_eq!((of(3, 0.0).len(), of(3, 0.001).len(), of(2, 0.5).len(), of(1, 0.5).len()), (0, 1, 1, 0));
    }

    #[test]
    fn a_training_whose_best_step_is_the_last_is_reported_with_the_key_to_raise() {
        let of = |best_val_loss, best_step, max_steps| {
            let summary = SftSummary { n_steps: 40, train_loss: 1.0, best_val_loss, best_step, n_tokens: 9 };
            unfinished(&summary, &SftConfig { epochs: 2, max_steps, ..SftConfig::default() }, Path::new("p.toml"))
        };
        let expected =
            "the last step has the best held-out loss; more epochs (epochs = 4 in p.toml) would probably lower it";
        assert_eq!(of(Some(1.5), 40, 0).as_deref(), Some(expected));
        assert_eq!(of(Some(1.5), 40, 50).as_deref(), Some(expected));
        assert!(of(Some(1.5), 40, 40).unwrap().contains("; more steps (max_steps = 80 and enough epochs in p.toml) "));
        assert_eq!((of(Some(1.5), 20, 0), of(None, 40, 0)), (None, None));
    }
}
