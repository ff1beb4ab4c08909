//! Tries to read clocks, random numbers, arguments, environment, files and sockets, and reports the results as components.

use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::time::{Duration, Instant, SystemTime};

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    let start = Instant::now();
    std::thread::sleep(Duration::ZERO);
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let random = RandomState::new().hash_one(&episode.id);
    Ok(Score::new(0.5)
        .with("elapsed_s", start.elapsed().as_secs_f64())
        .with("since_1970_s", since_1970.map_or(-1.0, |time| time.as_secs_f64()))
        .with("random", (random >> 11) as f64)
        .with("n_args", std::env::args().count() as f64)
        .with("n_vars", std::env::vars().count() as f64)
        .with("files", f64::from(u8::from(std::fs::read_dir("/").is_ok() || std::fs::write("x", "x").is_ok())))
        .with("stdin", std::io::stdin().read(&mut [0]).map_or(-1.0, |n| n as f64)))
}
