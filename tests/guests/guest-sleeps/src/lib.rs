//! Sleeps for an hour where the query is `sleep`.

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
        if episode.query == "sleep" {
            std::thread::sleep(std::time::Duration::from_secs(3600));
        }
        Ok(Score::new(0.5))
    }
}

querl_sdk::export!(reward: Guest);
