//! Reward for the policy's rewrite compared with the teacher's (the baseline).
//!
//! ```text
//! judge     = tanh(3 * (policy score - baseline score) / 5)      judge scores are 0 to 5
//! retrieval = tanh(3 * (policy quality - baseline quality))      quality = 0.6 * top1 + 0.4 * mean(top3), 0 without hits; where
//!                                                                gold passages are known, 1 / (rank of the first) instead (`gold_share`)
//! win       = 0.5, -0.3 or 0: the policy's quality is above, below or equal (within 1e-9) to the baseline's
//! total     = clip(0.35 * judge + 0.40 * retrieval + 0.25 * win, -1, 1)
//! ```
//!
//! The components of a score are `judge`, `retrieval` and `win` as above, before weighting. If neither side was judged (only a sample of
//! episodes is), `judge` is absent and the other weights are scaled up to the sum of all three (1 by default), so that the total is not
//! closer to 0 than that of a judged episode. A failed retrieval or judgement on either side is a rejection, never a 0. Every constant is
//! a setting.
//!
//! `tanh` is that of the crate libm, compiled into the component, so that results are bit-identical on every machine. `f64::tanh` of std
//! would come from the C library of the platform in native tests.

use querl_sdk::{Episode, Hit, Input, Inputs, Rejection, Reward, Score, SettingError, Settings};
use std::ops::RangeInclusive;

/// Maximum of a judge's score; the minimum is 0.
const JUDGE_SCALE: f64 = 5.0;
/// Qualities that differ by at most this are a draw, as in the host's win rates: it is above the rounding error of sums in another order.
const DRAW_TOLERANCE: f64 = 1e-9;

/// The reward, with its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Competition {
    weight_judge: f64,
    weight_retrieval: f64,
    weight_win: f64,
    tanh_scale: f64,
    win: f64,
    loss: f64,
    draw: f64,
    top1_share: f64,
    gold_share: f64,
    clip: f64,
}

/// The components of one score.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Parts {
    judge: Option<f64>,
    retrieval: f64,
    win: f64,
}

impl Reward for Competition {
    const INPUTS: Inputs = Inputs::NONE.requires(Input::Baseline).requires(Input::Retrieval).uses(Input::Judgement);

    fn new(settings: &Settings) -> Result<Self, SettingError> {
        let weight = |key, default| settings.number(key, default, 0.0..=1e6);
        let outcome = |key, default| settings.number(key, default, -1e6..=1e6);
        let plugin = Self {
            weight_judge: weight("weight_judge", 0.35)?,
            weight_retrieval: weight("weight_retrieval", 0.40)?,
            weight_win: weight("weight_win", 0.25)?,
            tanh_scale: settings.number("tanh_scale", 3.0, 1e-6..=1e6)?,
            win: outcome("win", 0.5)?,
            loss: outcome("loss", -0.3)?,
            draw: outcome("draw", 0.0)?,
            top1_share: settings.number("top1_share", 0.6, 0.0..=1.0)?,
            gold_share: settings.number("gold_share", 1.0, 0.0..=1.0)?,
            clip: settings.number("clip", 1.0, 1e-6..=1e6)?,
        };
        if plugin.weight_retrieval + plugin.weight_win > 0.0 {
            return Ok(plugin);
        }
        Err(SettingError::new(
            "weight_retrieval",
            "expected this or `weight_win` above 0: episodes without a judgement have no other part",
        ))
    }

    fn range(&self) -> RangeInclusive<f64> {
        -self.clip..=self.clip
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let parts = self.parts(episode)?;
        let mut score = Score::new(self.total(parts));
        if let Some(judge) = parts.judge {
            score = score.with("judge", judge);
        }
        Ok(score.with("retrieval", parts.retrieval).with("win", parts.win))
    }
}

impl Competition {
    fn parts(&self, episode: &Episode) -> Result<Parts, Rejection> {
        let gold = episode.gold_ids.as_deref();
        let policy = self.quality(episode.policy.hits("policy")?, gold);
        let baseline = self.quality(episode.baseline()?.hits("baseline")?, gold);
        let win = match policy - baseline {
            difference if difference > DRAW_TOLERANCE => self.win,
            difference if difference < -DRAW_TOLERANCE => self.loss,
            _ => self.draw,
        };
        let judge = judge_difference(episode)?.map(|difference| libm::tanh(self.tanh_scale * difference));
        Ok(Parts { judge, retrieval: libm::tanh(self.tanh_scale * (policy - baseline)), win })
    }

    /// Quality of a retrieval, 0 to 1; 0 if nothing was found.
    fn quality(&self, hits: &[Hit], gold: Option<&[String]>) -> f64 {
        let Some(first) = hits.first() else { return 0.0 };
        let top3 = &hits[..hits.len().min(3)];
        let mean_top3 = top3.iter().map(|hit| hit.reranker_score).sum::<f64>() / top3.len() as f64;
        let by_score = self.top1_share * first.reranker_score + (1.0 - self.top1_share) * mean_top3;
        let Some(gold) = gold else { return by_score };
        let is_gold = |hit: &&Hit| hit.id.as_deref().is_some_and(|id| gold.iter().any(|known| known == id));
        let reciprocal_rank = hits.iter().find(is_gold).map_or(0.0, |hit| 1.0 / f64::from(hit.rank));
        (1.0 - self.gold_share) * by_score + self.gold_share * reciprocal_rank
    }

    fn total(&self, parts: Parts) -> f64 {
        let without_judge = self.weight_retrieval * parts.retrieval + self.weight_win * parts.win;
        let total = match parts.judge {
            Some(judge) => self.weight_judge * judge + without_judge,
            None => {
                let remaining = self.weight_retrieval + self.weight_win;
                without_judge * ((self.weight_judge + remaining) / remaining)
            }
        };
        total.clamp(-self.clip, self.clip)
    }
}

/// The difference of the judge's scores divided by their maximum, -1 to 1; `None` if neither side was judged.
fn judge_difference(episode: &Episode) -> Result<Option<f64>, Rejection> {
    match (episode.policy.judgement("policy")?, episode.baseline()?.judgement("baseline")?) {
        (Some(policy), Some(baseline)) => Ok(Some(policy.score / JUDGE_SCALE - baseline.score / JUDGE_SCALE)),
        (None, None) => Ok(None),
        (policy, _) => {
            let missing = if policy.is_some() { "baseline" } else { "policy" };
            Err(Rejection::new("judgement_one_sided", format!("the {missing} side was not judged, the other was")))
        }
    }
}

querl_sdk::export!(reward: Competition);

#[cfg(test)]
mod tests;
