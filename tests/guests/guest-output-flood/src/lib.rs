//! Returns 32 MB for an episode whose query is `flood`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    match episode.query.as_str() {
        "flood" => Err(Rejection::new("flood", "x".repeat(32 << 20))),
        _ => Ok(Score::new(0.5)),
    }
}
