//! `querl style distill`: knowledge distillation. A small classifier (student) is trained on the logits of a large one (teacher).

use crate::classifier::{ClassifierOptions, StyleClassifier, TOKENS_PER_PASS, compute_logits, model_digest};
use crate::corpus::{Classes, Corpus};
use crate::evaluation::{EvalResults, TestSet, file_name, shortened_note};
use crate::settings::TrainConfig;
use crate::trainer::{Callbacks, Resume, Trainer, TrainingRows, is_same};
use crate::{usage, write_json};
use querl_core::dir_lock::DirLock;
use querl_core::fsx::{digest_hex, open_jsonl, write_jsonl};
use querl_core::ports::Reporter;
use querl_data::{Dialogue, read_dialogues};
use querl_eval::classification::{argmax, softmax, split_off};
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use querl_train::classify::Distillation;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// File in the output folder with the teacher's logits.
const TEACHER_FILE: &str = "teacher_logits.jsonl";
const REPORT_FILE: &str = "distillation.json";
/// Repetitions of the speed measurement, whose fastest is reported.
const N_ROUNDS: usize = 3;

/// Options of `querl style distill`: teacher, student, data and hyperparameters.
#[derive(Debug)]
pub struct DistillOptions {
    /// Folder of the teacher, a trained classifier.
    pub teacher: PathBuf,
    /// Folder of the base model, if the teacher is a PEFT adapter.
    pub teacher_base: Option<PathBuf>,
    /// Folder of the student, the model to train.
    pub student: PathBuf,
    /// File of dialogues without labels, for which the teacher's logits are the targets.
    pub unlabelled: PathBuf,
    /// File of labelled dialogues to train on; a part is held out for evaluation unless `eval_file` is set.
    pub train_file: Option<PathBuf>,
    /// File of labelled dialogues to evaluate on, instead of a held-out part of `train_file`.
    pub eval_file: Option<PathBuf>,
    /// Folder in which the student is written.
    pub output_dir: PathBuf,
    /// Temperature that divides the logits of teacher and student: 0.1 to 100.
    pub temperature: f64,
    /// Weight of the labels' cross-entropy in the loss, 0 to 1. The KL divergence from the teacher has weight `1 - hard_weight`; 1 for
    /// dialogues without label.
    pub hard_weight: f64,
    /// Other keys of [`TrainConfig`], for the training of the student.
    pub settings: toml::Table,
}

/// Content of `distillation.json`.
#[derive(Debug, Serialize)]
struct Report {
    n_labelled: usize,
    n_unlabelled: usize,
    /// Number of texts whose logits the teacher computed in this run; the other logits were read from the file of an earlier run.
    n_asked: usize,
    temperature: f64,
    hard_weight: f64,
    teacher: ModelReport,
    student: ModelReport,
    /// Share of the compared texts for which student and teacher predict the same class, 0 to 1.
    agreement: Option<f64>,
    /// Number of compared texts: the test set, or the dev split if there is none.
    n_compared: usize,
    /// Number of training and comparison texts that were truncated for the student.
    n_shortened: usize,
    /// Texts per second of the student, divided by those of the teacher.
    speedup: f64,
}

#[derive(Debug, Serialize)]
struct ModelReport {
    n_parameters: usize,
    texts_per_second: f64,
    /// Accuracy on labelled texts that the student was not trained on.
    accuracy: Option<f64>,
    f1_macro: Option<f64>,
}

/// A dialogue of the training data.
struct TrainingText<'a> {
    dialogue: &'a Dialogue,
    label: Option<usize>,
}

/// Trains the student, compares it with the teacher, writes student and comparison, and returns the comparison as text.
///
/// # Errors
/// Models, data or settings cannot be used, a file cannot be written, or the stop flag was set.
pub fn distill(args: &DistillOptions, callbacks: &Callbacks<'_>) -> anyhow::Result<String> {
    let reporter = callbacks.reporter;
    let config = &config(args)?;
    let distillation = Distillation { temperature: args.temperature, hard_weight: args.hard_weight };
    querl_model::set_threads(config.threads as usize);
    if is_same(&args.teacher, &args.output_dir) {
        let output = args.output_dir.display();
        return Err(usage(format!("{output}: output_dir is the teacher's own folder; name another")));
    }
    let trainer = Trainer::new(config, callbacks)?;
    let _lock = DirLock::take(&args.output_dir)?;
    let of_teacher = ClassifierOptions {
        model: args.teacher.clone(),
        base: args.teacher_base.clone(),
        max_length: config.max_length,
        calibrated: false,
        threads: config.threads as usize,
    };
    let mut teacher = Teacher::open(&of_teacher, &args.output_dir.join(TEACHER_FILE))?;
    let labels = teacher.model.classifier.labels().clone();
    let read = |path: &PathBuf| Corpus::read(path, Classes::OfModel(&labels), reporter);
    let labelled = args.train_file.as_ref().map(read).transpose()?;
    let eval_corpus = args.eval_file.as_ref().map(read).transpose()?;
    let unlabelled = read_dialogues(&args.unlabelled).map_err(usage)?;
    let tokenizer = ClassifierTokenizer::load(&args.student, config.max_length as usize).map_err(usage)?;

    // 1. Split into training data and test set.
    let (learned, held_out) = labelled.as_ref().map_or((Vec::new(), Vec::new()), |corpus| {
        corpus.split_off(&(0..corpus.len()).collect::<Vec<_>>(), config.eval_share, config.seed)
    });
    let test = match (&eval_corpus, &labelled) {
        (Some(corpus), _) => Some((corpus, (0..corpus.len()).collect())),
        (None, Some(corpus)) if !held_out.is_empty() => Some((corpus, held_out)),
        _ => None,
    };
    let (lessons, n_left_out) = lessons(labelled.as_ref(), &learned, &unlabelled, test.as_ref());
    if n_left_out > 0 {
        reporter.message(&format!(
            "{n_left_out} unlabelled dialogue(s) left out: duplicates, or of a group in the test set"
        ));
    }

    // 2. Compute the teacher's logits.
    let texts: Vec<&str> = lessons.iter().map(|lesson| lesson.dialogue.input.as_str()).collect();
    let teacher_logits = teacher.logits(&texts)?;
    let n_labelled = lessons.iter().filter(|lesson| lesson.label.is_some()).count();
    reporter.message(&format!(
        "{n_labelled} labelled and {} unlabelled dialogues; the teacher computed logits of {} now",
        lessons.len() - n_labelled,
        teacher.n_asked
    ));

    if teacher.n_shortened > 0 {
        reporter.message(&format!("{} of them were shortened for the teacher", teacher.n_shortened));
    }

    // 3. Train the student.
    let (rows, dev) = rows(config, (&lessons, &teacher_logits), &tokenizer, reporter)?;
    let folder = args.output_dir.join("training");
    let checkpoint = trainer.fit(labels, &rows, Some(distillation), (&folder, Resume::FromFolder))?;
    trainer.publish(&checkpoint)?;

    // 4. Compare student and teacher on texts that the student was not trained on.
    let compared: Vec<&str> = match &test {
        Some((corpus, indices)) => corpus.texts(indices),
        None => dev.iter().map(|&index| texts[index]).collect(),
    };
    let timed: &[&str] = if compared.is_empty() { &texts } else { &compared };
    let (mut report, probabilities) = compare(args, (&teacher, &checkpoint.classifier, &tokenizer), &compared, timed)?;
    (report.n_labelled, report.n_unlabelled) = (n_labelled, lessons.len() - n_labelled);
    // Without a test set the compared texts are the dev split, which `rows` has counted.
    report.n_shortened = rows.n_shortened + if test.is_some() { report.n_shortened } else { 0 };
    let figures = match &test {
        Some((corpus, indices)) => measure(args, config, (corpus, indices), &probabilities, &mut report)?,
        None => String::new(),
    };
    write_json(&args.output_dir.join(REPORT_FILE), &report)?;
    Ok(format!("{figures}{}\n", text(&report)))
}

/// Measures the agreement of teacher and student on `compared` and their speed on `timed`. Also returns the class probabilities of
/// teacher and student for `compared`.
fn compare(
    args: &DistillOptions,
    (teacher, student, tokenizer): (&Teacher, &Classifier, &ClassifierTokenizer),
    compared: &[&str],
    timed: &[&str],
) -> anyhow::Result<(Report, [Vec<Vec<f64>>; 2])> {
    let own = |texts: &[&str]| compute_logits(student, tokenizer, texts, TOKENS_PER_PASS);
    let (of_teacher, of_student) = (teacher.model.ask(compared)?, own(compared)?);
    let n_same = of_teacher.logits.iter().zip(&of_student.logits).filter(|(a, b)| argmax(a) == argmax(b)).count();
    let speeds = [
        texts_per_second(timed.len(), &|| teacher.model.ask(timed).map(drop))?,
        texts_per_second(timed.len(), &|| own(timed).map(drop))?,
    ];
    let side = |classifier: &Classifier, texts_per_second| ModelReport {
        n_parameters: classifier.decoder().config().n_parameters(),
        texts_per_second,
        accuracy: None,
        f1_macro: None,
    };
    let report = Report {
        n_labelled: 0,
        n_unlabelled: 0,
        n_asked: teacher.n_asked,
        temperature: args.temperature,
        hard_weight: args.hard_weight,
        teacher: side(&teacher.model.classifier, speeds[0]),
        student: side(student, speeds[1]),
        agreement: (!compared.is_empty()).then(|| n_same as f64 / compared.len() as f64),
        n_compared: compared.len(),
        n_shortened: of_student.n_shortened,
        speedup: speeds[1] / speeds[0],
    };
    let probabilities = |logits: &[Vec<f64>]| logits.iter().map(|row| softmax(row)).collect::<Vec<_>>();
    Ok((report, [probabilities(&of_teacher.logits), probabilities(&of_student.logits)]))
}

/// The configuration of the student's training, from the options.
fn config(args: &DistillOptions) -> anyhow::Result<TrainConfig> {
    let is_share = (0.0..=1.0).contains(&args.hard_weight);
    if !is_share {
        return Err(usage(format!("hard_weight is {}; expected 0 to 1", args.hard_weight)));
    }
    if !(0.1..=100.0).contains(&args.temperature) {
        return Err(usage(format!("temperature is {}; expected 0.1 to 100", args.temperature)));
    }
    let mut keys = args.settings.clone();
    for (key, path) in
        [("model_name_or_path", &args.student), ("train_file", &args.unlabelled), ("output_dir", &args.output_dir)]
    {
        keys.insert(key.to_owned(), toml::Value::try_from(path)?);
    }
    if args.eval_file.is_some() {
        keys.entry("eval_share").or_insert(toml::Value::Float(0.0));
    }
    keys.entry("dev_share").or_insert(toml::Value::Float(0.1));
    TrainConfig::new(keys, None)
}

/// The student's training data: labelled dialogues at `learned`, and unlabelled ones. Duplicates, and dialogues of a group in the test
/// set, are left out; also returns how many unlabelled ones were.
fn lessons<'a>(
    labelled: Option<&'a Corpus>,
    learned: &[usize],
    unlabelled: &'a [Dialogue],
    test: Option<&(&'a Corpus, Vec<usize>)>,
) -> (Vec<TrainingText<'a>>, usize) {
    let tested =
        test.into_iter().flat_map(|(corpus, indices)| indices.iter().map(move |&index| &corpus.dialogues[index]));
    let mut groups: BTreeSet<&str> = BTreeSet::new();
    let mut known: BTreeSet<&str> = BTreeSet::new();
    for dialogue in tested {
        groups.insert(&dialogue.group);
        known.insert(&dialogue.input);
    }
    let of_labelled = |corpus: &'a Corpus| {
        let lesson = move |&index: &usize| TrainingText {
            dialogue: &corpus.dialogues[index],
            label: Some(corpus.labels[index]),
        };
        learned.iter().map(lesson).collect::<Vec<_>>()
    };
    // The labelled file and the evaluation file may share dialogues.
    let mut lessons = labelled.map(of_labelled).unwrap_or_default();
    lessons.retain(|lesson| !groups.contains(lesson.dialogue.group.as_str()) && known.insert(&lesson.dialogue.input));
    let n_labelled = lessons.len();
    let is_new = |dialogue: &&'a Dialogue| !groups.contains(dialogue.group.as_str()) && known.insert(&dialogue.input);
    lessons.extend(unlabelled.iter().filter(is_new).map(|dialogue| TrainingText { dialogue, label: None }));
    let n_left_out = unlabelled.len() - (lessons.len() - n_labelled);
    (lessons, n_left_out)
}

/// Tokenised training rows with the teacher's logits, and the indices of the dev split. The split is stratified by label, or by the
/// teacher's prediction for dialogues without label.
fn rows(
    config: &TrainConfig,
    (lessons, teacher_logits): (&[TrainingText<'_>], &[Vec<f64>]),
    tokenizer: &ClassifierTokenizer,
    reporter: &dyn Reporter,
) -> anyhow::Result<(TrainingRows, Vec<usize>)> {
    let classes: Vec<usize> = lessons
        .iter()
        .zip(teacher_logits)
        .map(|(lesson, logits)| lesson.label.unwrap_or_else(|| argmax(logits)))
        .collect();
    let groups: Vec<&str> = lessons.iter().map(|lesson| lesson.dialogue.group.as_str()).collect();
    let share = config.dev_share.unwrap_or_default();
    let (train, dev) = match share > 0.0 {
        true => split_off(&classes, &groups, share, config.seed),
        false => ((0..lessons.len()).collect(), Vec::new()),
    };
    let mut rows = TrainingRows::default();
    let mut found = BTreeMap::new();
    for &index in train.iter().chain(&dev) {
        let mut row = rows.row(tokenizer, &lessons[index].dialogue.input, lessons[index].label)?;
        row.teacher = Some(teacher_logits[index].iter().map(|&logit| logit as f32).collect());
        found.insert(index, row);
    }
    let mut take = |indices: &[usize]| indices.iter().filter_map(|index| found.remove(index)).collect();
    (rows.train, rows.dev) = (take(&train), take(&dev));
    shortened_note(rows.n_shortened, config.max_length as usize).iter().for_each(|note| reporter.message(note));
    Ok((rows, dev))
}

/// Texts per second in the fastest of [`N_ROUNDS`] calls of `compute`.
fn texts_per_second(n_texts: usize, compute: &dyn Fn() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let mut seconds = f64::INFINITY;
    for _ in 0..N_ROUNDS {
        let started = Instant::now();
        compute()?;
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    Ok(n_texts as f64 / seconds.max(1e-9))
}

/// Computes the metrics of teacher and student on labelled dialogues, enters them in `report`, and writes the evaluation report. Returns
/// the metrics as text.
fn measure(
    args: &DistillOptions,
    config: &TrainConfig,
    (corpus, indices): (&Corpus, &[usize]),
    [of_teacher, of_student]: &[Vec<Vec<f64>>; 2],
    report: &mut Report,
) -> anyhow::Result<String> {
    let majority = corpus.majority(indices);
    let test_set = TestSet { corpus, indices, n_repeats: 1, majority, seed: config.seed };
    let (teacher, student) = (test_set.measures(of_teacher)?, test_set.measures(of_student)?);
    for (model, measures) in [(&mut report.teacher, &teacher), (&mut report.student, &student)] {
        (model.accuracy, model.f1_macro) = (Some(measures.eval_accuracy), Some(measures.eval_f1_macro));
    }
    let facts = [
        ("teacher", file_name(&args.teacher)),
        ("base of the student", file_name(&args.student)),
        ("learned from", format!("{} labelled, {} unlabelled", report.n_labelled, report.n_unlabelled)),
        ("agreement", format!("{:.1}%", 100.0 * report.agreement.unwrap_or_default())),
        ("seed", config.seed.to_string()),
    ];
    let mut notes = vec!["the teacher may have learned from these dialogues: then its figures are too good".to_owned()];
    notes.extend(shortened_note(report.n_shortened, config.max_length as usize));
    let results = EvalResults { teacher: Some(teacher), ..EvalResults::new(student, notes) };
    test_set.report("Style model: distillation", &results, of_student, (&facts, None), Some(&args.output_dir))
}

fn text(report: &Report) -> String {
    let percent = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{:.1}%", 100.0 * value));
    let line = |name: &str, model: &ModelReport| {
        format!(
            "{name:<8} {:>12} parameters  {:>9.1} texts/s  accuracy {:>6}  macro F1 {}",
            model.n_parameters,
            model.texts_per_second,
            percent(model.accuracy),
            model.f1_macro.map_or("-".to_owned(), |f1| format!("{f1:.4}"))
        )
    };
    let agreement = format!("agreement {} of {} texts", percent(report.agreement), report.n_compared);
    let lines = [line("teacher", &report.teacher), line("student", &report.student), agreement];
    format!("{}\nthe student is {:.2} times as fast", lines.join("\n"), report.speedup)
}

/// The teacher, and a cache of its logits on disk.
struct Teacher {
    model: StyleClassifier,
    /// Everything that the logits of a text depend on: maximum length and digests of the model.
    fingerprint: String,
    file: PathBuf,
    /// Logits by [`Teacher::key`].
    saved: BTreeMap<String, Vec<f64>>,
    /// Number of texts whose logits were computed in this run.
    n_asked: usize,
    /// Number of these texts that were truncated for the teacher.
    n_shortened: usize,
}

/// A line of the file of saved logits.
#[derive(Debug, Serialize, Deserialize)]
struct SavedLogits {
    /// SHA-256 of the model's fingerprint and the text.
    key: String,
    logits: Vec<f64>,
}

impl Teacher {
    /// Loads the model, and the saved logits if `file` exists.
    fn open(args: &ClassifierOptions, file: &Path) -> anyhow::Result<Self> {
        let model = StyleClassifier::open(args)?;
        let mut fingerprint = format!("{} ", args.max_length);
        for folder in [Some(&args.model), args.base.as_ref()].into_iter().flatten() {
            fingerprint.push_str(&model_digest(folder)?);
        }
        let mut saved = BTreeMap::new();
        if file.is_file() {
            for line in open_jsonl::<SavedLogits>(file).map_err(usage)? {
                let SavedLogits { key, logits } = line.map_err(usage)?.value;
                saved.insert(key, logits);
            }
        }
        Ok(Self { model, fingerprint, file: file.to_owned(), saved, n_asked: 0, n_shortened: 0 })
    }

    /// Logits of texts, in their order. Logits that are not saved yet are computed and saved.
    fn logits(&mut self, texts: &[&str]) -> anyhow::Result<Vec<Vec<f64>>> {
        let keys: Vec<String> = texts.iter().map(|text| self.key(text)).collect();
        let unsaved: Vec<usize> = (0..texts.len()).filter(|&index| !self.saved.contains_key(&keys[index])).collect();
        if !unsaved.is_empty() {
            let new: Vec<&str> = unsaved.iter().map(|&index| texts[index]).collect();
            let computed = self.model.ask(&new)?;
            self.saved.extend(unsaved.iter().map(|&index| keys[index].clone()).zip(computed.logits));
            self.n_shortened += computed.n_shortened;
            self.n_asked += unsaved.len();
            let lines = self.saved.iter().map(|(key, logits)| SavedLogits { key: key.clone(), logits: logits.clone() });
            write_jsonl(&self.file, lines)?;
        }
        Ok(keys.iter().map(|key| self.saved[key].clone()).collect())
    }

    fn key(&self, text: &str) -> String {
        digest_hex(format!("{}\n{text}", self.fingerprint).as_bytes())
    }
}
