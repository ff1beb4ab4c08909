//! The run's style model, and scorers of style as rewards.

use crate::commands::rm::{ModelArgs, OpenModel, TOKENS_PER_PASS};
use anyhow::Context;
use querl_core::config::StyleModelConfig;
use querl_core::ports::{PluginFault, RewardModel, RewardRange, StyleModel, StyleScorer};
use querl_core::records::{
    CallFailure, Dialogue, Episode, FailureKind, Message, Rejection, Reward, Role, StyleProbability,
};
use querl_eval::classification::calibrated;
use querl_model::classifier::{BatchLimits, Batcher};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Distributions that are kept: a run's answers repeat, and what is not kept is asked again.
const MAX_KNOWN: usize = 100_000;

/// A classifier that plugins' instances share: what several ask at once goes through the model together, and no dialogue twice.
pub struct SharedStyleModel {
    batcher: Batcher,
    temperature: f64,
    known: Mutex<HashMap<String, Vec<StyleProbability>>>,
}

impl SharedStyleModel {
    /// Opens the classifier of a configuration.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(config: &StyleModelConfig) -> anyhow::Result<Self> {
        let args = ModelArgs {
            model: config.path.clone(),
            base: config.base.clone(),
            max_length: u32::try_from(config.max_length).unwrap_or(u32::MAX),
            calibrated: config.calibrated,
            threads: 0,
        };
        let OpenModel { classifier, tokenizer, temperature } = OpenModel::open(&args).context("plugins.style_model")?;
        // Nobody is turned away: who asks is this program itself.
        let limits = BatchLimits { max_texts: 256, tokens_per_pass: TOKENS_PER_PASS, max_waiting: usize::MAX };
        let batcher =
            Batcher::start(classifier, tokenizer, limits, Box::new(|_| ())).context("no thread to classify on")?;
        Ok(Self { batcher, temperature, known: Mutex::default() })
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<StyleProbability>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn distribution(&self, logits: Vec<f64>) -> Vec<StyleProbability> {
        let probabilities = calibrated(&[logits], self.temperature).concat();
        let names = self.batcher.labels().names().iter().cloned();
        names.zip(probabilities).map(|(label, probability)| StyleProbability { label, probability }).collect()
    }

    /// Asks about texts that are not known yet.
    fn learn(&self, texts: &[String]) -> Result<(), CallFailure> {
        let mut unknown: Vec<&str> = {
            let known = self.known();
            texts.iter().map(String::as_str).filter(|text| !known.contains_key(*text)).collect()
        };
        unknown.sort_unstable();
        unknown.dedup();
        if unknown.is_empty() {
            return Ok(());
        }
        let failed = |message| CallFailure { kind: FailureKind::ServerError, message };
        let found = self.batcher.ask(&unknown).map_err(failed)?;
        let mut known = self.known();
        if known.len() + unknown.len() > MAX_KNOWN {
            known.clear();
        }
        for (text, found) in unknown.into_iter().zip(found) {
            known.insert(text.to_owned(), self.distribution(found.logits));
        }
        Ok(())
    }
}

impl StyleModel for SharedStyleModel {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let text = text_of(turns);
        if let Some(found) = self.known().get(&text) {
            return Ok(found.clone());
        }
        let failed = |message| CallFailure { kind: FailureKind::ServerError, message };
        let found = self.batcher.ask(&[&text]).map_err(failed)?.swap_remove(0);
        let found = self.distribution(found.logits);
        let mut known = self.known();
        if known.len() < MAX_KNOWN {
            known.insert(text, found.clone());
        }
        Ok(found)
    }

    fn classify_all(&self, dialogues: &[Vec<Message>]) -> Vec<Result<Vec<StyleProbability>, CallFailure>> {
        let texts: Vec<String> = dialogues.iter().map(|turns| text_of(turns)).collect();
        // Where the pass of all fails, each is asked by itself, and fails by itself.
        let _ = self.learn(&texts);
        dialogues.iter().map(|turns| self.classify(turns)).collect()
    }
}

/// A dialogue in the form in which the classifier learned: the last question, and the answer to it.
fn text_of(turns: &[Message]) -> String {
    let last = |role: Role| turns.iter().rev().find(|turn| turn.role == role).map(|turn| turn.content.as_str());
    let (question, answer) = (last(Role::User).unwrap_or_default(), last(Role::Assistant).unwrap_or_default());
    format!("用户问题：{question}\n回答：{answer}")
}

/// Query and rewrite as a dialogue.
pub fn turns_of(query: &str, rewrite: &str) -> Vec<Message> {
    vec![
        Message { role: Role::User, content: query.to_owned() },
        Message { role: Role::Assistant, content: rewrite.to_owned() },
    ]
}

/// A scorer of style in the place of a reward: the policy's answer to the query is scored.
pub struct StyleReward(Box<dyn StyleScorer>);

impl StyleReward {
    /// A reward of this scorer.
    pub fn new(scorer: Box<dyn StyleScorer>) -> Self {
        Self(scorer)
    }
}

impl RewardModel for StyleReward {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
        let dialogue = |episode: &Episode| Dialogue {
            id: episode.id.clone(),
            turns: turns_of(&episode.query, &episode.policy.rewrite),
        };
        self.0.score_batch(&episodes.iter().map(dialogue).collect::<Vec<_>>())
    }

    fn range(&self) -> RewardRange {
        RewardRange { min: 0.0, max: 1.0 }
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_question_and_its_answer_are_classified() {
        let turn = |role, content: &str| Message { role, content: content.into() };
        let turns = [
            turn(Role::System, "你是客服"),
            turn(Role::User, "在？"),
            turn(Role::Assistant, "在"),
            turn(Role::User, "怎么洗"),
            turn(Role::Assistant, "冷水洗"),
        ];
        assert_eq!(text_of(&turns), "用户问题：怎么洗\n回答：冷水洗");
    }
}
