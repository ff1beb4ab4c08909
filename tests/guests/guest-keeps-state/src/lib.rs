//! Counts its calls in a static variable and reports the count.

use std::sync::atomic::{AtomicU32, Ordering};

static N_CALLS: AtomicU32 = AtomicU32::new(0);

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    let n_calls = N_CALLS.fetch_add(1, Ordering::Relaxed) + 1;
    Ok(Score::new(0.5).with("n_calls", f64::from(n_calls)).with("n_chars", episode.query.chars().count() as f64))
}
