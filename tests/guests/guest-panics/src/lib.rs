//! Panics on an episode whose query is `panic`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    assert!(episode.query != "panic", "cannot stand the query `{}` \u{1b}[31min red", episode.query);
    Ok(Score::new(0.5))
}
