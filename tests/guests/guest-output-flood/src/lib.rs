//! Returns 32 MB for an episode whose query is `flood`.

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
        match episode.query.as_str() {
            "flood" => Err(Rejection::new("flood", "x".repeat(32 << 20))),
            _ => Ok(Score::new(0.5)),
        }
    }
}

querl_sdk::export!(reward: Guest);
