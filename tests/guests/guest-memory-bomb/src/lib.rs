//! Asks for ever more memory for an episode whose query is `bomb`.

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
        let mut hoard: Vec<Vec<u8>> = Vec::new();
        if episode.query == "bomb" {
            loop {
                hoard.push(vec![1; 1 << 20]);
            }
        }
        Ok(Score::new(0.5 + hoard.len() as f64))
    }
}

querl_sdk::export!(reward: Guest);
