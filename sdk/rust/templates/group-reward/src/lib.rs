//! Rewards a rewrite for differing from the other samples of its query.

use querl_sdk::{Episode, GroupReward, Rejection, Score, SettingError, Settings, text};
use std::ops::RangeInclusive;

struct Diversity {
    n: usize,
}

impl GroupReward for Diversity {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            n: settings.integer("n", 2, 1..=8)? as usize,
        })
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
        episodes
            .iter()
            .map(|episode| self.score(episode, episodes))
            .collect()
    }
}

impl Diversity {
    /// 1 minus the largest overlap with another rewrite of the group.
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
