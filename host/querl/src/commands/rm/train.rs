//! `querl rm train`: a classifier from labelled dialogues, and how good it is.

use super::corpus::{Corpus, usage};
use super::fitting::{Resume, Rows, Sides, Trainer};
use super::measured::{Asked, Measured};
use super::model::{CALIBRATION_FILE, Calibration, ask};
use super::results::write;
use super::settings::{TrainConfig, TrainKeys};
use crate::run::lock;
use crate::terminal;
use clap::Args;
use querl_core::run_dir::RunDir;
use querl_eval::classification::{softmax, split_off};
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use querl_serve::StylePrediction;
use std::path::PathBuf;

/// With fewer dialogues to learn from none is set aside by itself to choose a checkpoint by, unless training is to stop by it.
const ENOUGH_FOR_DEV: usize = 100;

/// Asked about after training with `--demo_inference`; written for this.
const DEMO: [&str; 3] = [
    "用户问题：这个产品有什么优缺点？\n回答：优点是轻，缺点也有：续航短，冬天更明显，我不想瞒您。",
    "用户问题：收到的货坏了怎么办？\n回答：很抱歉，请拍照发来，今天就给您补发，运费由我们承担。",
    "用户问题：送爸爸什么好？\n回答：这款按摩仪最受欢迎，今天下单立减一百，我帮您留一台？",
];

/// Beside the model: every setting in force.
const RESOLVED_FILE: &str = "rm.resolved.toml";

/// What `querl rm train` takes: the names and defaults of the training script that people know.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// A TOML file with the same keys; a flag goes before it
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    keys: TrainKeys,
}

impl TrainArgs {
    fn resolve(&self) -> anyhow::Result<TrainConfig> {
        match &self.config {
            Some(path) => self.keys.or(&TrainKeys::read(path)?)?.resolve(),
            None => self.keys.clone().resolve(),
        }
    }
}

/// Trains, measures, writes.
///
/// # Errors
/// Data, model or settings cannot be used, a file cannot be written, or the user said stop.
pub fn run(args: &TrainArgs) -> anyhow::Result<()> {
    let config = &args.resolve()?;
    querl_model::set_threads(config.threads as usize);
    let corpus = Corpus::to_learn_from(&config.train_file, config.labels()?.as_ref())?;
    terminal::say(&format!("{} dialogues: {}", corpus.len(), corpus.counts()));
    let n_folds = config.num_folds.map_or(0, |n_folds| n_folds as usize);
    if n_folds > corpus.n_groups() {
        return Err(usage(format!("num_folds is {n_folds}; expected at most {}, one group a part", corpus.n_groups())));
    }
    let trainer = Trainer::new(config)?;
    let _lock = lock::take(&RunDir::new(&config.output_dir))?;
    let tokenizer = ClassifierTokenizer::load(&config.model_name_or_path, config.max_length as usize).map_err(usage)?;
    let (rest, held_out) = apart(&corpus, &(0..corpus.len()).collect::<Vec<_>>(), config.eval_share, config.seed);
    let sides = sides(config, &corpus, rest);
    terminal::say(&format!("train {}, dev {}, eval {}", sides.train.len(), sides.dev.len(), held_out.len()));
    if !held_out.is_empty() && !corpus.missing(&held_out).is_empty() {
        terminal::say(&format!("no example held out of: {}", corpus.missing(&held_out).join(", ")));
    }
    let folder = config.output_dir.join("training");
    let rows = Rows::of(&corpus, &tokenizer, &sides, (config, &folder))?;
    say_changes(config, &rows);
    let fitted = trainer.fit(corpus.classes.clone(), &rows, None, (&folder, Resume::FromFolder))?;
    trainer.publish(&fitted)?;
    write(&config.output_dir.join(RESOLVED_FILE), &toml::to_string_pretty(&config.anywhere()?)?)?;
    let asked = Asked { config, corpus: &corpus, tokenizer: &tokenizer };
    let temperature = asked.temperature(&fitted.classifier, &sides.dev)?;
    if let Some(temperature) = temperature {
        let calibration = Calibration { temperature, n: sides.dev.len() };
        let text = format!("{}\n", serde_json::to_string_pretty(&calibration)?);
        write(&config.output_dir.join(CALIBRATION_FILE), &text)?;
    }
    let measured = Measured { asked, fitted: &fitted, temperature, n_copies: rows.n_copies };
    match config.num_folds {
        Some(_) => measured.by_folds(&trainer)?,
        None if held_out.is_empty() => terminal::say("nothing was held out (--eval_share 0): no figures"),
        None => measured.held_out(&sides, &held_out)?,
    }
    if config.demo_inference {
        demonstrate(config, &corpus, &fitted.classifier, &tokenizer)?;
    }
    terminal::say(&format!("written to {}", config.output_dir.display()));
    Ok(())
}

fn say_changes(config: &TrainConfig, rows: &Rows) {
    if rows.n_copies > 0 {
        terminal::say(&format!("{} changed copies are learned from besides; none chooses or measures", rows.n_copies));
    }
    if rows.n_shortened > 0 {
        terminal::say(&format!("{} text(s) were shortened to {} tokens", rows.n_shortened, config.max_length));
    }
}

fn demonstrate(
    config: &TrainConfig,
    corpus: &Corpus,
    classifier: &Classifier,
    tokenizer: &ClassifierTokenizer,
) -> anyhow::Result<()> {
    let answers = ask(classifier, tokenizer, &DEMO, config.tokens_asked())?;
    for (text, logits) in DEMO.iter().zip(&answers.logits) {
        println!("{text}\n{}", StylePrediction::new(corpus.classes.names(), &softmax(logits)).text());
    }
    Ok(())
}

/// Splits some dialogues, groups whole and classes even; with a share of 0 nothing is set apart.
pub(super) fn apart(corpus: &Corpus, indices: &[usize], share: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
    if share == 0.0 {
        return (indices.to_vec(), Vec::new());
    }
    let (labels, groups) = corpus.of(indices);
    let (rest, off) = split_off(&labels, &groups, share, seed);
    let of = |places: Vec<usize>| places.into_iter().map(|place| indices[place]).collect();
    (of(rest), of(off))
}

/// What is learned from, and what chooses among checkpoints.
pub(super) fn sides(config: &TrainConfig, corpus: &Corpus, rest: Vec<usize>) -> Sides {
    let is_wanted = rest.len() >= ENOUGH_FOR_DEV || config.early_stopping_patience > 0;
    let default = if is_wanted { 0.1 } else { 0.0 };
    // Another seed than the held-out split's: the same dealing would put the same classes short.
    let (train, dev) = apart(corpus, &rest, config.dev_share.unwrap_or(default), config.seed.wrapping_add(1));
    Sides { train, dev }
}
