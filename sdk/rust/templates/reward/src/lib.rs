//! Rewards a rewrite for being short.

use querl_sdk::{Episode, Rejection, Reward, Score, SettingError, Settings};
use std::ops::RangeInclusive;

struct Brevity {
    max_chars: f64,
}

impl Reward for Brevity {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            max_chars: settings.number("max_chars", 40.0, 1.0..=1000.0)?,
        })
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let n_chars = episode.policy.rewrite("policy")?.chars().count() as f64;
        let brevity = (1.0 - n_chars / self.max_chars).max(0.0);
        Ok(Score::new(brevity).with("brevity", brevity))
    }
}

querl_sdk::export!(reward: Brevity);

#[cfg(test)]
mod tests;
