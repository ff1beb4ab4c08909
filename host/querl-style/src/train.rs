//! `querl style train`: a classifier from labelled dialogues, and how good it is.

use crate::corpus::Corpus;
use crate::error::usage;
use crate::fitting::{Callbacks, Resume, Rows, Sides, Trainer};
use crate::measured::{Asked, Measured};
use crate::model::{CALIBRATION_FILE, Calibration, ask};
use crate::results::write;
use crate::settings::TrainConfig;
use querl_core::dir_lock::DirLock;
use querl_core::ports::Reporter;
use querl_eval::classification::{softmax, split_off};
use querl_model::classifier::{Classifier, ClassifierTokenizer};

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

/// What a training came to.
pub struct Trained {
    /// Figures on held-out dialogues, as text; `None` where nothing was held out.
    pub figures: Option<String>,
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Texts with the probabilities of the trained classifier, where `demo_inference` is set.
    pub demo: Vec<(&'static str, Vec<f64>)>,
}

/// Trains, measures, writes.
///
/// # Errors
/// Data, model or settings cannot be used, a file cannot be written, or the user said stop.
pub fn train(config: &TrainConfig, callbacks: &Callbacks<'_>) -> anyhow::Result<Trained> {
    let reporter = callbacks.reporter;
    querl_model::set_threads(config.threads as usize);
    let corpus = Corpus::to_learn_from(&config.train_file, config.labels()?.as_ref(), reporter)?;
    reporter.message(&format!("{} dialogues: {}", corpus.len(), corpus.counts()));
    let n_folds = config.num_folds.map_or(0, |n_folds| n_folds as usize);
    if n_folds > corpus.n_groups() {
        return Err(usage(format!("num_folds is {n_folds}; expected at most {}, one group a part", corpus.n_groups())));
    }
    let trainer = Trainer::new(config, callbacks)?;
    let _lock = DirLock::take(&config.output_dir)?;
    let tokenizer = ClassifierTokenizer::load(&config.model_name_or_path, config.max_length as usize).map_err(usage)?;
    let (rest, held_out) = apart(&corpus, &(0..corpus.len()).collect::<Vec<_>>(), config.eval_share, config.seed);
    let sides = sides(config, &corpus, rest);
    reporter.message(&format!("train {}, dev {}, eval {}", sides.train.len(), sides.dev.len(), held_out.len()));
    if !held_out.is_empty() && !corpus.missing(&held_out).is_empty() {
        reporter.message(&format!("no example held out of: {}", corpus.missing(&held_out).join(", ")));
    }
    let folder = config.output_dir.join("training");
    let rows = Rows::of(&corpus, &tokenizer, &sides, (config, &folder))?;
    report_changes(config, &rows, reporter);
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
    let figures = match config.num_folds {
        Some(_) => Some(measured.by_folds(&trainer)?),
        None if held_out.is_empty() => {
            reporter.message("nothing was held out (--eval_share 0): no figures");
            None
        }
        None => Some(measured.held_out(&sides, &held_out)?),
    };
    let demo = match config.demo_inference {
        true => demonstrate(config, &fitted.classifier, &tokenizer)?,
        false => Vec::new(),
    };
    Ok(Trained { figures, classes: corpus.classes.names().to_vec(), demo })
}

fn report_changes(config: &TrainConfig, rows: &Rows, reporter: &dyn Reporter) {
    if rows.n_copies > 0 {
        reporter
            .message(&format!("{} changed copies are learned from besides; none chooses or measures", rows.n_copies));
    }
    if rows.n_shortened > 0 {
        reporter.message(&format!("{} text(s) were shortened to {} tokens", rows.n_shortened, config.max_length));
    }
}

fn demonstrate(
    config: &TrainConfig,
    classifier: &Classifier,
    tokenizer: &ClassifierTokenizer,
) -> anyhow::Result<Vec<(&'static str, Vec<f64>)>> {
    let answers = ask(classifier, tokenizer, &DEMO, config.tokens_asked())?;
    Ok(DEMO.into_iter().zip(answers.logits.iter().map(|logits| softmax(logits))).collect())
}

/// Splits some dialogues, groups whole and classes even; with a share of 0 nothing is set apart.
pub(crate) fn apart(corpus: &Corpus, indices: &[usize], share: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
    if share == 0.0 {
        return (indices.to_vec(), Vec::new());
    }
    let (labels, groups) = corpus.of(indices);
    let (rest, off) = split_off(&labels, &groups, share, seed);
    let of = |places: Vec<usize>| places.into_iter().map(|place| indices[place]).collect();
    (of(rest), of(off))
}

/// What is learned from, and what chooses among checkpoints.
pub(crate) fn sides(config: &TrainConfig, corpus: &Corpus, rest: Vec<usize>) -> Sides {
    let is_wanted = rest.len() >= ENOUGH_FOR_DEV || config.early_stopping_patience > 0;
    let default = if is_wanted { 0.1 } else { 0.0 };
    // Another seed than the held-out split's: the same dealing would put the same classes short.
    let (train, dev) = apart(corpus, &rest, config.dev_share.unwrap_or(default), config.seed.wrapping_add(1));
    Sides { train, dev }
}
