//! Logs terminal escapes; floods the log if the query is `flood`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    querl_sdk::log::warn("plain \u{1b}[31mred\u{1b}[0m\nsecond line");
    if episode.query == "flood" {
        for _ in 0..1000 {
            querl_sdk::log::info("x".repeat(1000));
        }
    }
    Ok(Score::new(0.5))
}
