//! `querl rm train`: a classifier from labelled dialogues, and how good it is.

use super::corpus::{Corpus, usage};
use super::fitting::{Fitted, Rows, Sides, fit};
use super::model::{CALIBRATION_FILE, Calibration, ask};
use super::results::{Judged, Page, Results, write};
use super::settings::{TrainConfig, TrainKeys};
use crate::terminal;
use clap::Args;
use querl_eval::classification::{FoldSettings, TextBaseline, fit_temperature, folds, softmax, split_off};
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use querl_serve::StylePrediction;
use std::path::{Path, PathBuf};

/// With fewer dialogues to learn from none is set aside by itself to choose a checkpoint by.
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
    let corpus = Corpus::read(&config.train_file, None)?;
    terminal::say(&format!("{} dialogues: {}", corpus.len(), corpus.counts()));
    let tokenizer = ClassifierTokenizer::load(&config.model_name_or_path, config.max_length as usize).map_err(usage)?;
    let (rest, held_out) = apart(&corpus, &(0..corpus.len()).collect::<Vec<_>>(), config.eval_share, config.seed);
    let sides = sides(config, &corpus, rest);
    terminal::say(&format!("train {}, dev {}, eval {}", sides.train.len(), sides.dev.len(), held_out.len()));
    let folder = config.output_dir.join("training");
    let rows = Rows::of(&corpus, &tokenizer, &sides, (config, &folder))?;
    say_changes(config, &rows);
    let fitted = fit(config, corpus.classes.clone(), &rows, None, &folder)?;
    fitted.classifier.save(&config.output_dir, &config.model_name_or_path)?;
    write(&config.output_dir.join(RESOLVED_FILE), &toml::to_string_pretty(config)?)?;
    let temperature = calibrate(config, &corpus, &tokenizer, &fitted.classifier, &sides.dev)?;
    let measured = Measured { config, corpus: &corpus, tokenizer: &tokenizer, n_copies: rows.n_copies };
    match config.num_folds {
        Some(n_folds) => measured.by_folds(n_folds, &fitted, temperature)?,
        None if held_out.is_empty() => terminal::say("nothing was held out (--eval_share 0): no figures"),
        None => measured.held_out(&sides, &held_out, &fitted, temperature)?,
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

fn sides(config: &TrainConfig, corpus: &Corpus, rest: Vec<usize>) -> Sides {
    let default = if rest.len() >= ENOUGH_FOR_DEV { 0.1 } else { 0.0 };
    // Another seed than the held-out split's: the same dealing would put the same classes short.
    let (train, dev) = apart(corpus, &rest, config.dev_share.unwrap_or(default), config.seed.wrapping_add(1));
    Sides { train, dev }
}

/// Fits the temperature on what chose the checkpoint, and writes it beside the model.
fn calibrate(
    config: &TrainConfig,
    corpus: &Corpus,
    tokenizer: &ClassifierTokenizer,
    classifier: &Classifier,
    dev: &[usize],
) -> anyhow::Result<Option<f64>> {
    let file = config.output_dir.join(CALIBRATION_FILE);
    if dev.is_empty() {
        // One of an earlier training there is of another model.
        let _ = std::fs::remove_file(file);
        return Ok(None);
    }
    let texts: Vec<&str> = dev.iter().map(|&index| corpus.dialogues[index].input.as_str()).collect();
    let temperature =
        fit_temperature(&corpus.of(dev).0, &ask(classifier, tokenizer, &texts, config.tokens_asked())?.logits);
    let calibration = Calibration { temperature, n: dev.len() };
    write(&file, &format!("{}\n", serde_json::to_string_pretty(&calibration)?))?;
    Ok(Some(temperature))
}

/// What figures are made from.
struct Measured<'a> {
    config: &'a TrainConfig,
    corpus: &'a Corpus,
    tokenizer: &'a ClassifierTokenizer,
    n_copies: usize,
}

impl Measured<'_> {
    fn texts(&self, indices: &[usize]) -> Vec<&str> {
        indices.iter().map(|&index| self.corpus.dialogues[index].input.as_str()).collect()
    }

    /// Probabilities of a classifier, and of the baseline that learned from the same dialogues.
    fn ask_both(
        &self,
        classifier: &Classifier,
        learned: &[usize],
        asked: &[usize],
    ) -> anyhow::Result<[Vec<Vec<f64>>; 2]> {
        let texts = self.texts(asked);
        let answers = ask(classifier, self.tokenizer, &texts, self.config.tokens_asked())?;
        let labels = self.corpus.of(learned).0;
        let baseline = TextBaseline::fit(&self.texts(learned), &labels, self.corpus.classes.n_classes());
        let of_baseline = texts.iter().map(|text| baseline.probabilities(text)).collect();
        Ok([answers.logits.iter().map(|logits| softmax(logits)).collect(), of_baseline])
    }

    /// Figures on the dialogues that were held out from this training.
    fn held_out(
        &self,
        sides: &Sides,
        held_out: &[usize],
        fitted: &Fitted,
        temperature: Option<f64>,
    ) -> anyhow::Result<()> {
        let learned = [sides.train.as_slice(), &sides.dev].concat();
        let both = self.ask_both(&fitted.classifier, &learned, held_out)?;
        let majority = self.corpus.majority(&learned);
        let judged = Judged { corpus: self.corpus, indices: held_out, n_repeats: 1, majority, seed: self.config.seed };
        self.tell(&judged, &both, fitted, temperature, vec![])
    }

    /// Figures of trainings that each had another part held out.
    fn by_folds(&self, n_folds: u32, fitted: &Fitted, temperature: Option<f64>) -> anyhow::Result<()> {
        let all: Vec<usize> = (0..self.corpus.len()).collect();
        let (labels, groups) = self.corpus.of(&all);
        let n_repeats = self.config.num_repeats as usize;
        let settings = FoldSettings { n_folds: n_folds as usize, n_repeats, seed: self.config.seed };
        let (mut indices, mut both) = (Vec::new(), [Vec::new(), Vec::new()]);
        let parts = folds(&labels, &groups, settings);
        for (number, fold) in parts.iter().enumerate() {
            terminal::say(&format!("part {} of {}", number + 1, parts.len()));
            let work = tempfile::tempdir()?;
            let sides = sides(self.config, self.corpus, fold.train.clone());
            let rows = Rows::of(self.corpus, self.tokenizer, &sides, (self.config, work.path()))?;
            let of_fold = fit(self.config, self.corpus.classes.clone(), &rows, None, work.path())?;
            let [model, baseline] = self.ask_both(&of_fold.classifier, &fold.train, &fold.test)?;
            both[0].extend(model);
            both[1].extend(baseline);
            indices.extend_from_slice(&fold.test);
        }
        let majority = self.corpus.majority(&all);
        let judged = Judged { corpus: self.corpus, indices: &indices, n_repeats, majority, seed: self.config.seed };
        let note = format!(
            "cross-validation: {n_folds} parts, {n_repeats} round(s); figures are of those trainings, the written model \
             is of another one"
        );
        self.tell(&judged, &both, fitted, temperature, vec![note])
    }

    fn tell(
        &self,
        judged: &Judged<'_>,
        both: &[Vec<Vec<f64>>; 2],
        fitted: &Fitted,
        temperature: Option<f64>,
        mut notes: Vec<String>,
    ) -> anyhow::Result<()> {
        if let Some(temperature) = temperature {
            notes.push(format!(
                "probabilities are the model's own; --calibrated divides logits by {temperature:.3}, fitted on dev"
            ));
        }
        let [model, baseline] = both;
        let results = Results {
            model: judged.measures(model)?,
            baseline: Some(judged.measures(baseline)?),
            teacher: None,
            notes,
        };
        let summary = &fitted.summary;
        let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let facts = vec![
            ("base".to_owned(), name(&self.config.model_name_or_path)),
            ("dialogues".to_owned(), format!("{} of {}", self.corpus.len(), name(&self.config.train_file))),
            ("by class".to_owned(), self.corpus.counts()),
            (
                "trained".to_owned(),
                self.config.lora_rank.map_or("every weight".into(), |rank| format!("LoRA, rank {rank}")),
            ),
            ("changed copies learned from".to_owned(), self.n_copies.to_string()),
            ("steps".to_owned(), format!("{}, best at {}", summary.n_steps, summary.best_step)),
            ("seed".to_owned(), self.config.seed.to_string()),
        ];
        let page = Page { title: "Style model: training", facts, temperature: None };
        judged.tell(&results, model, page, Some(&self.config.output_dir))
    }
}
