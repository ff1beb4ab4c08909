//! Panics on an episode whose query is `panic`.

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
        assert!(episode.query != "panic", "cannot stand the query `{}` \u{1b}[31min red", episode.query);
        Ok(Score::new(0.5))
    }
}

querl_sdk::export!(reward: Guest);
