//! Runs a loop for the number of turns in the query; allocates the number of KiB in the teacher's rewrite.

use querl_sdk::{Episode, Input, Inputs, Rejection, Reward, Score, SettingError, Settings};
use std::hint::black_box;
use std::ops::RangeInclusive;

struct Guest;

impl Reward for Guest {
    const INPUTS: Inputs = Inputs::NONE.uses(Input::Baseline);

    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let n_turns: u64 = episode.query.parse().unwrap_or(0);
        for turn in 0..n_turns {
            black_box(turn);
        }
        let n_kib: usize = episode
            .baseline()
            .and_then(|baseline| baseline.rewrite("baseline"))
            .map_or(0, |rewrite| rewrite.parse().unwrap_or(0));
        black_box(vec![1_u8; n_kib << 10]);
        Ok(Score::new(0.5))
    }
}

querl_sdk::export!(reward: Guest);
