//! The run's style model, and scorers of style as rewards.

use crate::commands::rm::{ModelArgs, OpenModel};
use anyhow::Context;
use querl_core::config::StyleModelConfig;
use querl_core::ports::{PluginFault, RewardModel, RewardRange, StyleModel, StyleScorer};
use querl_core::records::{CallFailure, Dialogue, Episode, FailureKind, Message, Rejection, Reward, StyleProbability};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Distributions that are kept: a run's answers repeat, and what is not kept is asked again.
const MAX_KNOWN: usize = 100_000;

const USER: &str = "user";
const ASSISTANT: &str = "assistant";

/// A classifier that plugins' instances share: the dialogues of a batch go through the model together, before the instances that will ask about
/// them do, and no dialogue goes twice.
pub struct SharedStyleModel {
    model: OpenModel,
    known: Mutex<HashMap<String, Vec<StyleProbability>>>,
}

impl SharedStyleModel {
    /// Opens the classifier of a configuration; `None` where it names none.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(config: &StyleModelConfig) -> anyhow::Result<Option<Self>> {
        let Some(path) = &config.path else { return Ok(None) };
        let args = ModelArgs {
            model: path.clone(),
            base: config.base.clone(),
            max_length: u32::try_from(config.max_length).unwrap_or(u32::MAX),
            calibrated: config.calibrated,
            threads: 0,
        };
        let model = OpenModel::open(&args).context("plugins.style_model")?;
        Ok(Some(Self { model, known: Mutex::default() }))
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<StyleProbability>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Distributions of texts, in order.
    fn ask(&self, texts: &[&str]) -> Result<Vec<Vec<StyleProbability>>, CallFailure> {
        let failed =
            |error: anyhow::Error| CallFailure { kind: FailureKind::ServerError, message: format!("{error:#}") };
        let logits = self.model.ask(texts).map_err(failed)?.logits;
        let names = self.model.classifier.labels().names();
        let distribution = |row: Vec<f64>| {
            let classes = names.iter().zip(row);
            classes.map(|(label, probability)| StyleProbability { label: label.clone(), probability }).collect()
        };
        Ok(self.model.probabilities(&logits).into_iter().map(distribution).collect())
    }

    fn keep(&self, found: impl IntoIterator<Item = (String, Vec<StyleProbability>)>) {
        let mut known = self.known();
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.extend(found);
    }

    /// Asks about texts that are not known yet.
    fn learn(&self, texts: &[String]) -> Result<(), CallFailure> {
        let mut unknown: Vec<&str> = {
            let known = self.known();
            texts.iter().map(String::as_str).filter(|text| !known.contains_key(*text)).collect()
        };
        unknown.sort_unstable();
        unknown.dedup();
        let found = self.ask(&unknown)?;
        self.keep(unknown.into_iter().map(str::to_owned).zip(found));
        Ok(())
    }
}

impl StyleModel for SharedStyleModel {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let text = text_of(turns);
        if let Some(found) = self.known().get(&text) {
            return Ok(found.clone());
        }
        let found = self.ask(&[&text])?.swap_remove(0);
        self.keep([(text, found.clone())]);
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
    let last = |role: &str| turns.iter().rev().find(|turn| turn.role == role).map(|turn| turn.content.as_str());
    let (question, answer) = (last(USER).unwrap_or_default(), last(ASSISTANT).unwrap_or_default());
    format!("用户问题：{question}\n回答：{answer}")
}

/// Query and rewrite as a dialogue.
pub fn turns_of(query: &str, rewrite: &str) -> Vec<Message> {
    vec![
        Message { role: USER.to_owned(), content: query.to_owned() },
        Message { role: ASSISTANT.to_owned(), content: rewrite.to_owned() },
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
        let turn = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        let turns = [
            turn("system", "你是客服"),
            turn(USER, "在？"),
            turn(ASSISTANT, "在"),
            turn(USER, "怎么洗"),
            turn(ASSISTANT, "冷水洗"),
        ];
        assert_eq!(text_of(&turns), "用户问题：怎么洗\n回答：冷水洗");
    }
}
