//! Scores outside of its declared range for an episode whose query is `far`.

use querl_sdk::{Episode, Rejection, Reward, Score, SettingError, Settings};
use std::ops::RangeInclusive;

struct Guest;

impl Reward for Guest {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        Ok(Score::new(if episode.query == "far" { 1.5 } else { 0.5 }))
    }
}

querl_sdk::export!(reward: Guest);
