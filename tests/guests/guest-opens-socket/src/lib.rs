//! Opens a socket.

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
        let reached = std::net::TcpStream::connect("127.0.0.1:80").is_ok();
        assert!(!reached, "reached the network for {}", episode.id);
        Ok(Score::new(0.5))
    }
}

querl_sdk::export!(reward: Guest);
