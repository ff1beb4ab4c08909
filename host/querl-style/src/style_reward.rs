//! Scorers of style as rewards.

use crate::shared_model::turns_of;
use querl_core::ports::{PluginFault, RewardModel, RewardRange, StyleModel, StyleScorer};
use querl_core::records::{CallFailure, Candidate, Dialogue, Episode, Message, Rejection, Reward, StyleProbability};

/// The code with which a scorer rejects a class that the model does not know.
const UNKNOWN_CLASS: &str = "unknown_class";

/// What one side answered to the query, as a dialogue.
pub fn turns_of_side(episode: &Episode, side: &Candidate) -> Vec<Message> {
    turns_of(&episode.query, &side.rewrite)
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
        let dialogue =
            |episode: &Episode| Dialogue { id: episode.id.clone(), turns: turns_of_side(episode, &episode.policy) };
        self.0.score_batch(&episodes.iter().map(dialogue).collect::<Vec<_>>())
    }

    fn range(&self) -> RewardRange {
        RewardRange { min: 0.0, max: 1.0 }
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}

/// A model that knows the classes of another and nothing else: each is as likely.
pub struct Undecided(pub Vec<String>);

impl StyleModel for Undecided {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let probability = 1.0 / self.0.len() as f64;
        Ok(self.0.iter().map(|label| StyleProbability { label: label.clone(), probability }).collect())
    }
}

/// Whether the settings of a scorer, which asks an [`Undecided`] model, name a class that the model does not know: its sentence. Otherwise it
/// would reject every answer, and that would show after all that comes before. Whatever else it does is for the run to meet.
pub fn unknown_class(scorer: &dyn StyleScorer) -> Option<String> {
    let turns = turns_of("羊毛衫怎么洗？", "冷水手洗，平铺晾干。");
    let said = scorer.score_batch(&[Dialogue { id: "settings".into(), turns }]).ok()?;
    match said.into_iter().next()? {
        Err(rejection) if rejection.code == UNKNOWN_CLASS => Some(rejection.detail),
        _ => None,
    }
}
