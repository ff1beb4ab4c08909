//! Penalty for responses that are too short or too long, linear at both ends.
//!
//! ```text
//! short    = min(0, length / min_length - 1)                               0 from min_length on, -1 at 0
//! overlong = 0 up to max_length - buffer, linear to -1 at max_length       also -1 if the token limit ended the response
//! total    = max_penalty * min(short, overlong)
//! ```
//!
//! `overlong` is the soft overlong punishment of DAPO (Yu et al., 2025, equation 13), with `buffer` for its L_cache, as in verl's
//! `overlong_buffer` (`len`, `penalty_factor`).

use querl_sdk::{Episode, FinishReason, Rejection, Reward, Score, SettingError, Settings, text};
use std::ops::RangeInclusive;

/// The reward, with its settings.
#[derive(Debug)]
pub struct Length {
    counts_tokens: bool,
    min_length: u32,
    max_length: u32,
    buffer: u32,
    max_penalty: f64,
}

impl Reward for Length {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        let length = |key, default| settings.integer(key, default, 1..=1_000_000).map(|length| length as u32);
        Ok(Self {
            counts_tokens: settings.choice("unit", "tokens", &["tokens", "characters"])? == "tokens",
            min_length: length("min_length", 4)?,
            max_length: length("max_length", 64)?,
            buffer: length("buffer", 32)?,
            max_penalty: settings.number("max_penalty", 1.0, 0.01..=10.0)?,
        })
    }

    fn range(&self) -> RangeInclusive<f64> {
        -self.max_penalty..=0.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let length = self.length(episode)?;
        let short = (f64::from(length) / f64::from(self.min_length) - 1.0).min(0.0);
        let overlong = match episode.policy.finish_reason {
            Some(FinishReason::Length) => -1.0,
            _ => text::soft_overlong(length, self.max_length, self.buffer.min(self.max_length)),
        };
        Ok(Score::new(self.max_penalty * short.min(overlong)).with("short", short).with("overlong", overlong))
    }
}

impl Length {
    /// Number of tokens of the response, or number of units of the rewrite (0 without a rewrite).
    fn length(&self, episode: &Episode) -> Result<u32, Rejection> {
        let policy = &episode.policy;
        match self.counts_tokens {
            true => policy.n_tokens.ok_or_else(|| Rejection::new("policy_tokens_missing", "")),
            false => Ok(text::units(policy.rewrite.as_deref().unwrap_or_default()).len() as u32),
        }
    }
}

querl_sdk::export!(reward: Length);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::Length;
    use querl_sdk::{Settings, testing};

    #[test]
    fn golden_cases_hold() {
        testing::golden("golden").reward::<Length>();
    }

    #[test]
    fn the_penalty_has_no_steps() {
        let reward = testing::reward::<Length>(Settings::none());
        let total = |n_tokens| {
            let episode = testing::episode("胶原咋吃").policy("胶原蛋白肽").n_tokens(n_tokens);
            reward.score(&episode).unwrap().total
        };
        assert!((0..80).all(|n_tokens| (total(n_tokens) - total(n_tokens + 1)).abs() <= 0.25));
        assert!((4..=32).all(|n_tokens| total(n_tokens) == 0.0));
    }

    #[test]
    fn a_buffer_above_the_maximum_begins_at_0() {
        let reward = testing::reward::<Length>(Settings::from_pairs([("buffer", "1000"), ("min_length", "1")]));
        let half = testing::episode("胶原咋吃").policy("胶原蛋白肽").n_tokens(32);
        assert_eq!(reward.score(&half).unwrap().total, -0.5);
    }
}
