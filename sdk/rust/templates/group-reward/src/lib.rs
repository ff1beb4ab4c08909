//! Reward for diversity within a group, which is all samples of one query: 1 minus the largest
//! n-gram overlap (Jaccard similarity) with the rewrite of another sample.

use querl_sdk::{Episode, GroupReward, Rejection, Score, SettingError, Settings, text};
use std::ops::RangeInclusive;

/// The reward with its settings. querl makes a new value for each call: store no state between
/// groups.
struct Diversity {
    /// Length of an n-gram in units: characters, or words of ASCII letters and digits.
    n: usize,
}

impl GroupReward for Diversity {
    /// Reads all settings, each with its default and range. querl refuses a key that is not read.
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            n: settings.integer("n", 2, 1..=8)? as usize,
        })
    }

    /// Lowest and highest total under these settings. A total outside this range stops the run.
    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    /// One result per episode, in the same order. Results must not depend on the order of the
    /// episodes. A rejection drops only its own episode.
    fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
        episodes
            .iter()
            .map(|episode| self.score(episode, episodes))
            .collect()
    }
}

impl Diversity {
    /// The score of one episode of the group. A sample without a rewrite is rejected with the code
    /// `policy_rewrite_missing`, and is not compared with the others.
    fn score(&self, episode: &Episode, group: &[Episode]) -> Result<Score, Rejection> {
        let rewrite = episode.policy.rewrite("policy")?;
        let others = group.iter().filter(|other| other.id != episode.id);
        let overlap = others
            .filter_map(|other| other.policy.rewrite.as_deref())
            .map(|other| text::jaccard(rewrite, other, self.n))
            .fold(0.0, f64::max);
        Ok(Score::new(1.0 - overlap).with("overlap", overlap))
    }
}

querl_sdk::export!(group_reward: Diversity);

#[cfg(test)]
mod tests;
