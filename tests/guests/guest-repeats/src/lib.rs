//! Rejects every episode; the detail is the episode in Rust's debug format.

use querl_sdk::{Episode, Input, Inputs, Rejection, Reward, Score, SettingError, Settings};
use std::ops::RangeInclusive;

struct Guest;

impl Reward for Guest {
    const INPUTS: Inputs = Inputs::NONE
        .uses(Input::Response)
        .uses(Input::Prompt)
        .uses(Input::Columns)
        .uses(Input::Baseline)
        .uses(Input::Retrieval)
        .uses(Input::Judgement)
        .uses(Input::Style);

    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        Err(Rejection::new("repeated", format!("{episode:?}")))
    }
}

querl_sdk::export!(reward: Guest);
