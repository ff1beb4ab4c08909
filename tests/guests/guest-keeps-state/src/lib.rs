//! Counts its calls in a static and reports the count.

use querl_sdk::{Episode, Rejection, Reward, Score, SettingError, Settings};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};

static N_CALLS: AtomicU32 = AtomicU32::new(0);

struct Guest;

impl Reward for Guest {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let n_calls = N_CALLS.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Score::new(0.5).with("n_calls", f64::from(n_calls)).with("n_chars", episode.query.chars().count() as f64))
    }
}

querl_sdk::export!(reward: Guest);
