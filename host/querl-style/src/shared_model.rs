//! The run's style model.

use crate::model::{ClassifierOptions, StyleClassifier, TOKENS_PER_PASS};
use anyhow::Context;
use querl_core::config::StyleModelConfig;
use querl_core::ports::StyleModel;
use querl_core::records::{CallFailure, FailureKind, Message, StyleProbability};
use querl_eval::classification::calibrated;
use querl_model::classifier::{BatchLimits, Batcher, Classifier, ClassifierTokenizer, Labels};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Distributions that are kept: a run's answers repeat, and what is not kept is asked again.
const MAX_KNOWN: usize = 100_000;

/// Texts of several plugin instances that go together. Who waits is bounded by how many instances there may be.
const LIMITS: BatchLimits =
    BatchLimits { max_texts: 64, tokens_per_pass: TOKENS_PER_PASS, max_waiting: usize::MAX / 2 };

const USER: &str = "user";
const ASSISTANT: &str = "assistant";

/// A classifier that plugins' instances share. The dialogues of a batch go through it together, before the instances that will ask about them
/// do; what an instance asks besides shares its pass with whatever others ask at that moment. No dialogue that is known goes again.
///
/// Opened when it is first asked: what asks nobody about style, fine-tuning among it, does not hold its weights.
pub struct SharedStyleModel {
    args: ClassifierOptions,
    key: &'static str,
    labels: Labels,
    opened: OnceLock<Result<Opened, String>>,
    /// Set once it could be opened.
    checked: OnceLock<()>,
    known: Mutex<HashMap<String, Vec<StyleProbability>>>,
}

/// The weights, and who looks at single texts with them.
struct Opened {
    classifier: Arc<Classifier>,
    tokenizer: Arc<ClassifierTokenizer>,
    temperature: f64,
    batcher: Batcher,
}

impl SharedStyleModel {
    /// The classifier of a configuration, whose key names it in errors; `None` where it names none. Its classes are read, and no weight.
    ///
    /// # Errors
    /// There is no classifier in the folder.
    pub fn of(config: &StyleModelConfig, key: &'static str) -> anyhow::Result<Option<Self>> {
        let Some(args) = ClassifierOptions::of(config) else { return Ok(None) };
        let labels = Classifier::labels_in(&args.model, args.base.as_deref()).context(key)?;
        Ok(Some(Self { args, key, labels, opened: OnceLock::new(), checked: OnceLock::new(), known: Mutex::default() }))
    }

    /// Names of the classes, in the model's order.
    pub fn classes(&self) -> &[String] {
        self.labels.names()
    }

    /// Whether it can be opened: what cannot is told before hours of training, and what can is not held during them.
    ///
    /// # Errors
    /// A file is missing or damaged, or is no classifier's.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.checked.get().is_none() {
            StyleClassifier::open(&self.args).map(drop).context(self.key)?;
        }
        self.checked.get_or_init(|| ());
        Ok(())
    }

    fn opened(&self) -> Result<&Opened, CallFailure> {
        let open = || Opened::open(&self.args).map_err(|error| format!("{}: {error:#}", self.key));
        self.opened.get_or_init(open).as_ref().map_err(failed)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Vec<StyleProbability>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn distribution(&self, row: Vec<f64>) -> Vec<StyleProbability> {
        let classes = self.labels.names().iter().zip(row);
        classes.map(|(label, probability)| StyleProbability { label: label.clone(), probability }).collect()
    }

    fn keep(&self, found: impl IntoIterator<Item = (String, Vec<StyleProbability>)>) {
        let mut known = self.known();
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.extend(found);
    }

    /// Asks about texts that are not known yet, on the thread of the caller, who has all cores for it.
    fn learn(&self, texts: &[&String]) -> Result<(), CallFailure> {
        let mut unknown: Vec<&str> = {
            let known = self.known();
            texts.iter().map(|text| text.as_str()).filter(|text| !known.contains_key(*text)).collect()
        };
        unknown.sort_unstable();
        unknown.dedup();
        if !unknown.is_empty() {
            let rows = self.opened()?.look_at(&unknown).map_err(failed)?;
            let found = rows.into_iter().map(|row| self.distribution(row));
            self.keep(unknown.into_iter().map(str::to_owned).zip(found));
        }
        Ok(())
    }

    fn classify_text(&self, text: String) -> Result<Vec<StyleProbability>, CallFailure> {
        if let Some(found) = self.known().get(&text) {
            return Ok(found.clone());
        }
        let found = self.distribution(self.opened()?.ask(&text).map_err(failed)?);
        self.keep([(text, found.clone())]);
        Ok(found)
    }
}

impl StyleModel for SharedStyleModel {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        self.classify_text(text_of(turns)?)
    }

    fn classify_all(&self, dialogues: &[Vec<Message>]) -> Vec<Result<Vec<StyleProbability>, CallFailure>> {
        let texts: Vec<Result<String, CallFailure>> = dialogues.iter().map(|turns| text_of(turns)).collect();
        // Where the pass of all fails, each is asked by itself, and fails by itself.
        let _ = self.learn(&texts.iter().flatten().collect::<Vec<_>>());
        texts.into_iter().map(|text| self.classify_text(text?)).collect()
    }
}

impl Opened {
    fn open(args: &ClassifierOptions) -> anyhow::Result<Self> {
        let StyleClassifier { classifier, tokenizer, temperature, .. } = StyleClassifier::open(args)?;
        let (classifier, tokenizer) = (Arc::new(classifier), Arc::new(tokenizer));
        let (batcher, worker) = Batcher::new(classifier.clone(), tokenizer.clone(), LIMITS, Box::new(|_| ()));
        // It runs no plugin, so that an instance that waits for it waits for nobody that waits for an instance.
        let work = move || worker.run();
        std::thread::Builder::new().name("style-model".into()).spawn(work).context("no thread for the style model")?;
        Ok(Self { classifier, tokenizer, temperature, batcher })
    }

    /// Probabilities of texts, in order.
    fn look_at(&self, texts: &[&str]) -> Result<Vec<Vec<f64>>, String> {
        let encoded = texts.iter().map(|text| self.tokenizer.encode(text)).collect::<Result<Vec<_>, _>>();
        let encoded = encoded.map_err(|error| error.to_string())?;
        let ids: Vec<&[u32]> = encoded.iter().map(|encoded| encoded.ids.as_slice()).collect();
        let logits = self.classifier.logits_of_all(&ids, TOKENS_PER_PASS).map_err(|error| error.to_string())?;
        Ok(calibrated(&logits, self.temperature))
    }

    /// Probabilities of one text, in a pass that it shares with those of other callers.
    fn ask(&self, text: &str) -> Result<Vec<f64>, String> {
        let logits = self.batcher.classify(&[text])?.into_iter().map(|found| found.logits).collect::<Vec<_>>();
        Ok(calibrated(&logits, self.temperature).concat())
    }
}

fn failed(problem: impl ToString) -> CallFailure {
    CallFailure { kind: FailureKind::ServerError, message: problem.to_string() }
}

/// A dialogue in the form in which the classifier learned: the last answer, and the last question before it.
///
/// # Errors
/// One of them is not there.
pub fn text_of(turns: &[Message]) -> Result<String, CallFailure> {
    let last = |turns: &[Message], role: &str| turns.iter().rposition(|turn| turn.role == role);
    let missing = |what: &str| CallFailure {
        kind: FailureKind::Rejected,
        message: format!(
            "the dialogue has no {what}; a question of the user and an answer of the assistant to it are classified"
        ),
    };
    let answer = last(turns, ASSISTANT).ok_or_else(|| missing("turn of the assistant"))?;
    let question =
        last(&turns[..answer], USER).ok_or_else(|| missing("turn of the user before the assistant's last"))?;
    Ok(format!("用户问题：{}\n回答：{}", turns[question].content, turns[answer].content))
}

/// Query and rewrite as a dialogue.
pub fn turns_of(query: &str, rewrite: &str) -> Vec<Message> {
    vec![
        Message { role: USER.to_owned(), content: query.to_owned() },
        Message { role: ASSISTANT.to_owned(), content: rewrite.to_owned() },
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_core::config::BaseDtype;
    use querl_model::classifier::Tuning;
    use std::path::Path;

    fn turn(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    #[test]
    fn the_last_answer_and_the_question_before_it_are_classified() {
        let turns = [
            turn("system", "你是客服"),
            turn(USER, "在？"),
            turn(ASSISTANT, "在"),
            turn(USER, "怎么洗"),
            turn(ASSISTANT, "冷水洗"),
            turn(USER, "好"),
        ];
        assert_eq!(text_of(&turns).unwrap(), "用户问题：怎么洗\n回答：冷水洗");
        assert_eq!(text_of(&turns[..4]).unwrap(), "用户问题：在？\n回答：在");
    }

    #[test]
    fn a_dialogue_without_question_or_answer_fails() {
        let failure = |turns: &[Message]| text_of(turns).unwrap_err().to_string();
        let found = failure(&[turn(USER, "怎么洗")]);
        assert!(found.contains("has no turn of the assistant; a question"), "{found}");
        let found = failure(&[turn(ASSISTANT, "冷水洗"), turn(USER, "怎么洗")]);
        assert!(found.contains("has no turn of the user before the assistant's last"), "{found}");
    }

    /// A folder with a new classifier of the small model that comes with the repository.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-qwen3");
        let labels = Labels::new(["售前", "售后", "诚实"].map(str::to_owned).to_vec(), None).unwrap();
        let classifier = Classifier::fresh(&base, labels, &Tuning::Full, (BaseDtype::F32, 7)).unwrap();
        classifier.save(folder.path(), &base).unwrap();
        folder
    }

    fn shared(path: &Path) -> SharedStyleModel {
        let config = StyleModelConfig { path: Some(path.to_owned()), ..Default::default() };
        SharedStyleModel::of(&config, "plugins.style_model").unwrap().unwrap()
    }

    #[test]
    fn single_questions_of_many_threads_are_answered_as_those_of_a_batch() {
        let folder = folder();
        let dialogues: Vec<Vec<Message>> =
            (0..12).map(|n| turns_of(&format!("第{n}件怎么洗？"), "冷水手洗。")).collect();
        let together = shared(folder.path());
        assert_eq!(together.classes(), ["售前", "售后", "诚实"]);
        assert!(together.opened.get().is_none(), "nobody has asked yet");
        let expected: Vec<_> = together.classify_all(&dialogues).into_iter().map(Result::unwrap).collect();
        assert_ne!(expected[0], expected[1]);
        let single = shared(folder.path());
        std::thread::scope(|scope| {
            for (turns, expected) in dialogues.iter().zip(&expected) {
                let single = &single;
                scope.spawn(move || {
                    for (found, expected) in single.classify(turns).unwrap().iter().zip(expected) {
                        assert_eq!(found.label, expected.label);
                        assert!((found.probability - expected.probability).abs() < 1e-5, "{found:?}, {expected:?}");
                    }
                });
            }
        });
        assert_eq!(single.known().len(), 12);
    }

    #[test]
    fn one_dialogue_that_cannot_be_classified_fails_alone() {
        let folder = folder();
        let model = shared(folder.path());
        let dialogues = [turns_of("怎么洗", "冷水洗"), vec![turn(USER, "在？")], turns_of("怎么洗", "冷水洗")];
        let said = model.classify_all(&dialogues);
        assert!(said[1].is_err());
        assert_eq!(said[0].as_ref().unwrap(), said[2].as_ref().unwrap());
        let sum: f64 = said[0].as_ref().unwrap().iter().map(|class| class.probability).sum();
        assert!((sum - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_model_that_cannot_be_opened_is_told_with_its_key() {
        let folder = folder();
        std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        let model = shared(folder.path());
        let told = format!("{:#}", model.check().unwrap_err());
        assert!(told.starts_with("plugins.style_model: ") && told.contains("model.safetensors"), "{told}");
        let failure = model.classify(&turns_of("怎么洗", "冷水洗")).unwrap_err().to_string();
        assert!(failure.contains("plugins.style_model: ") && failure.contains("model.safetensors"), "{failure}");
    }
}
