//! The style model of a run, which all plugin instances share, and the adapter from a style scorer plugin to a reward.

use crate::classifier::{ClassifierOptions, StyleClassifier, TOKENS_PER_PASS, compute_logits};
use anyhow::Context;
use querl_core::config::StyleModelConfig;
use querl_core::ports::{EpisodeInputs, InputUse, PluginFault, RewardModel, RewardRange, StyleModel, StyleScorer};
use querl_core::records::{
    CallFailure, Candidate, Dialogue, Episode, FailureKind, Message, Rejection, Reward, StyleProbability,
};
use querl_eval::classification::calibrated;
use querl_model::classifier::{BatchLimits, Batcher, Classifier, ClassifierTokenizer, Labels};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Maximum number of cached class distributions. A cache is useful because the responses of a run repeat.
const MAX_CACHED: usize = 100_000;

/// Limits of a batch with texts of several plugin instances. The queue needs no limit, because each instance waits for one text.
const LIMITS: BatchLimits =
    BatchLimits { max_texts: 64, tokens_per_pass: TOKENS_PER_PASS, max_waiting: usize::MAX / 2 };

const USER: &str = "user";
const ASSISTANT: &str = "assistant";

/// A style classifier that all plugin instances share, with a cache of class distributions. The dialogues of a batch are classified
/// together before the instances need them; single requests of instances are collected into batches.
///
/// The weights are loaded at the first request, so that stages without style scores, such as fine-tuning, do not keep them in memory.
pub struct SharedStyleModel {
    args: ClassifierOptions,
    /// Configuration key of the model, for error messages.
    key: &'static str,
    labels: Labels,
    loaded: OnceLock<Result<LoadedModel, String>>,
    /// Set once [`Self::check`] has succeeded.
    checked: OnceLock<()>,
    /// Class distributions by text.
    cache: Mutex<HashMap<String, Vec<StyleProbability>>>,
}

/// The loaded classifier, and a batcher for single texts.
struct LoadedModel {
    classifier: Arc<Classifier>,
    tokenizer: Arc<ClassifierTokenizer>,
    temperature: f64,
    batcher: Batcher,
}

impl SharedStyleModel {
    /// The style classifier of a configuration; `None` if it configures none. Reads only the class labels. `key`: the configuration key,
    /// which precedes error messages.
    ///
    /// # Errors
    /// There is no classifier in the folder.
    pub fn of(config: &StyleModelConfig, key: &'static str) -> anyhow::Result<Option<Self>> {
        let Some(args) = ClassifierOptions::of(config) else { return Ok(None) };
        let labels = Classifier::labels_in(&args.model, args.base.as_deref()).context(key)?;
        Ok(Some(Self { args, key, labels, loaded: OnceLock::new(), checked: OnceLock::new(), cache: Mutex::default() }))
    }

    /// Names of the classes, in the order of their ids.
    pub fn classes(&self) -> &[String] {
        self.labels.names()
    }

    /// Checks that the classifier can be loaded, without keeping it in memory. For the start of a run, so that a damaged file does not stop
    /// it after hours of training.
    ///
    /// # Errors
    /// A file is missing, damaged, or not of a classifier.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.checked.get().is_none() {
            StyleClassifier::open(&self.args).map(drop).context(self.key)?;
        }
        self.checked.get_or_init(|| ());
        Ok(())
    }

    fn loaded(&self) -> Result<&LoadedModel, CallFailure> {
        let load = || LoadedModel::load(&self.args).map_err(|error| format!("{}: {error:#}", self.key));
        self.loaded.get_or_init(load).as_ref().map_err(failed)
    }

    fn cache(&self) -> MutexGuard<'_, HashMap<String, Vec<StyleProbability>>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn distribution(&self, row: Vec<f64>) -> Vec<StyleProbability> {
        let classes = self.labels.names().iter().zip(row);
        classes.map(|(label, probability)| StyleProbability { label: label.clone(), probability }).collect()
    }

    fn store(&self, found: impl IntoIterator<Item = (String, Vec<StyleProbability>)>) {
        let mut cache = self.cache();
        if cache.len() >= MAX_CACHED {
            cache.clear();
        }
        cache.extend(found);
    }

    /// Classifies texts that are not cached, on the caller's thread.
    fn fill_cache(&self, texts: &[&String]) -> Result<(), CallFailure> {
        let mut unknown: Vec<&str> = {
            let cache = self.cache();
            texts.iter().map(|text| text.as_str()).filter(|text| !cache.contains_key(*text)).collect()
        };
        unknown.sort_unstable();
        unknown.dedup();
        if !unknown.is_empty() {
            let rows = self.loaded()?.probabilities(&unknown).map_err(failed)?;
            let found = rows.into_iter().map(|row| self.distribution(row));
            self.store(unknown.into_iter().map(str::to_owned).zip(found));
        }
        Ok(())
    }

    fn classify_text(&self, text: String) -> Result<Vec<StyleProbability>, CallFailure> {
        if let Some(found) = self.cache().get(&text) {
            return Ok(found.clone());
        }
        let found = self.distribution(self.loaded()?.batched(&text).map_err(failed)?);
        self.store([(text, found.clone())]);
        Ok(found)
    }
}

impl StyleModel for SharedStyleModel {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        self.classify_text(text_of(turns)?)
    }

    fn classify_all(&self, dialogues: &[Vec<Message>]) -> Vec<Result<Vec<StyleProbability>, CallFailure>> {
        let texts: Vec<Result<String, CallFailure>> = dialogues.iter().map(|turns| text_of(turns)).collect();
        // If the batch fails, each dialogue is classified alone, so that only the faulty one fails.
        let _ = self.fill_cache(&texts.iter().flatten().collect::<Vec<_>>());
        texts.into_iter().map(|text| self.classify_text(text?)).collect()
    }
}

impl LoadedModel {
    fn load(args: &ClassifierOptions) -> anyhow::Result<Self> {
        let StyleClassifier { classifier, tokenizer, temperature, .. } = StyleClassifier::open(args)?;
        let (classifier, tokenizer) = (Arc::new(classifier), Arc::new(tokenizer));
        let (batcher, worker) = Batcher::new(classifier.clone(), tokenizer.clone(), LIMITS, Box::new(|_| ()));
        // The worker thread runs no plugin, so an instance that waits for it cannot deadlock.
        let work = move || worker.run();
        std::thread::Builder::new().name("style-model".into()).spawn(work).context("no thread for the style model")?;
        Ok(Self { classifier, tokenizer, temperature, batcher })
    }

    /// Class probabilities of texts, in their order.
    fn probabilities(&self, texts: &[&str]) -> Result<Vec<Vec<f64>>, String> {
        let answers = compute_logits(&self.classifier, &self.tokenizer, texts, TOKENS_PER_PASS);
        Ok(calibrated(&answers.map_err(|error| error.to_string())?.logits, self.temperature))
    }

    /// Class probabilities of one text, computed in a batch with the texts of other callers.
    fn batched(&self, text: &str) -> Result<Vec<f64>, String> {
        let logits = self.batcher.classify(&[text])?.into_iter().map(|found| found.logits).collect::<Vec<_>>();
        Ok(calibrated(&logits, self.temperature).concat())
    }
}

fn failed(problem: impl ToString) -> CallFailure {
    CallFailure { kind: FailureKind::ServerError, message: problem.to_string() }
}

/// A dialogue in the format of the training data: the assistant's last turn, and the last turn of the user before it.
///
/// # Errors
/// One of these turns is missing.
fn text_of(turns: &[Message]) -> Result<String, CallFailure> {
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

/// A query and its rewrite as a dialogue: a user turn and an assistant turn.
pub fn turns_of(query: &str, rewrite: &str) -> Vec<Message> {
    vec![
        Message { role: USER.to_owned(), content: query.to_owned() },
        Message { role: ASSISTANT.to_owned(), content: rewrite.to_owned() },
    ]
}

/// Rejection code of a scorer whose settings name a class that the model does not have.
const UNKNOWN_CLASS: &str = "unknown_class";

/// The query of an episode and the rewrite of `side` (policy or teacher) as a dialogue.
pub fn turns_of_side(episode: &Episode, side: &Candidate) -> Vec<Message> {
    turns_of(&episode.query, &side.rewrite)
}

/// Adapter from a style scorer plugin to a reward: scores the policy's rewrite.
pub struct StyleReward(Box<dyn StyleScorer>);

impl StyleReward {
    /// A reward that calls `scorer`.
    pub fn new(scorer: Box<dyn StyleScorer>) -> Self {
        Self(scorer)
    }
}

impl RewardModel for StyleReward {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
        let dialogue =
            |episode: &Episode| Dialogue { id: episode.id.clone(), turns: turns_of_side(episode, &episode.policy) };
        self.0.score_batch(&episodes.iter().map(dialogue).collect::<Vec<_>>())
    }

    /// Requests the style of episodes, so that the dialogues of a batch are classified together before the scorer requests each.
    fn inputs(&self) -> EpisodeInputs {
        EpisodeInputs { style: InputUse::Optional, ..EpisodeInputs::default() }
    }

    fn range(&self) -> RewardRange {
        RewardRange { min: 0.0, max: 1.0 }
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}

/// A style model with the given class names that returns equal probabilities for all classes.
pub struct Undecided(pub Vec<String>);

impl StyleModel for Undecided {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let probability = 1.0 / self.0.len() as f64;
        Ok(self.0.iter().map(|label| StyleProbability { label: label.clone(), probability }).collect())
    }
}

/// Checks a scorer's settings with an [`Undecided`] model: returns the scorer's message if its settings name a class that the model does
/// not have. Without this check the scorer would reject every rewrite during training. Other errors are reported by the run itself.
pub fn unknown_class(scorer: &dyn StyleScorer) -> Option<String> {
    let turns = turns_of("羊毛衫怎么洗？", "冷水手洗，平铺晾干。");
    let scores = scorer.score_batch(&[Dialogue { id: "settings".into(), turns }]).ok()?;
    match scores.into_iter().next()? {
        Err(rejection) if rejection.code == UNKNOWN_CLASS => Some(rejection.detail),
        _ => None,
    }
}

#[cfg(test)]
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

    /// A folder with a new classifier on the base `examples/tiny-qwen3`.
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
    fn single_requests_of_many_threads_have_the_results_of_a_batch() {
        let folder = folder();
        let dialogues: Vec<Vec<Message>> =
            (0..12).map(|n| turns_of(&format!("第{n}件怎么洗？"), "冷水手洗。")).collect();
        let together = shared(folder.path());
        assert_eq!(together.classes(), ["售前", "售后", "诚实"]);
        assert!(together.loaded.get().is_none(), "there was no request yet");
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
        assert_eq!(single.cache().len(), 12);
    }

    #[test]
    fn one_dialogue_that_cannot_be_classified_fails_alone() {
        let folder = folder();
        let model = shared(folder.path());
        let dialogues = [turns_of("怎么洗", "冷水洗"), vec![turn(USER, "在？")], turns_of("怎么洗", "冷水洗")];
        let found = model.classify_all(&dialogues);
        assert!(found[1].is_err());
        assert_eq!(found[0].as_ref().unwrap(), found[2].as_ref().unwrap());
        let sum: f64 = found[0].as_ref().unwrap().iter().map(|class| class.probability).sum();
        assert!((sum - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_model_that_cannot_be_loaded_is_reported_with_its_key() {
        let folder = folder();
        std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        let model = shared(folder.path());
        let message = format!("{:#}", model.check().unwrap_err());
        assert!(message.starts_with("plugins.style_model: ") && message.contains("model.safetensors"), "{message}");
        let failure = model.classify(&turns_of("怎么洗", "冷水洗")).unwrap_err().to_string();
        assert!(failure.contains("plugins.style_model: ") && failure.contains("model.safetensors"), "{failure}");
    }
}
