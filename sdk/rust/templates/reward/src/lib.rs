//! Reward for short rewrites: `total = max(0, 1 - n_chars / max_chars)`.
//!
//! Replace `score` by your own formula. The fields of an episode: `vendor/querl-sdk/src/kinds.rs`.

use querl_sdk::{Episode, Rejection, Reward, Score, SettingError, Settings};
use std::ops::RangeInclusive;

/// The reward with its settings. querl makes a new value for each call: store no state between
/// episodes.
struct Brevity {
    max_chars: f64,
}

impl Reward for Brevity {
    // An episode has the query, its context and the policy's rewrite. Further inputs must be
    // declared here (`use querl_sdk::{Input, Inputs}`):
    // const INPUTS: Inputs = Inputs::NONE.requires(Input::Retrieval).uses(Input::Judgement);

    /// Reads all settings, each with its default and range. querl refuses a key that is not read.
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            max_chars: settings.number("max_chars", 40.0, 1.0..=1000.0)?,
        })
    }

    /// Lowest and highest total under these settings. A total outside this range stops the run.
    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    /// The score of one episode. If it cannot be computed, for example because a call failed,
    /// return a `Rejection`: that drops the episode, a score of 0 trains on it.
    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        // `rewrite` returns the rejection `policy_rewrite_missing` if the response has no rewrite.
        let n_chars = episode.policy.rewrite("policy")?.chars().count() as f64;
        let brevity = (1.0 - n_chars / self.max_chars).max(0.0);
        // A component is a named part of the score for metrics and reports.
        Ok(Score::new(brevity).with("brevity", brevity))
    }
}

querl_sdk::export!(reward: Brevity);

#[cfg(test)]
mod tests;
