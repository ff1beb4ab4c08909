//! Logs terminal escapes; floods the log where the query is `flood`.

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
        querl_sdk::log::warn("plain \u{1b}[31mred\u{1b}[0m\nsecond line");
        if episode.query == "flood" {
            for _ in 0..1000 {
                querl_sdk::log::info("x".repeat(1000));
            }
        }
        Ok(Score::new(0.5))
    }
}

querl_sdk::export!(reward: Guest);
