//! Scores outside of its declared range for an episode whose query is `far`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    Ok(Score::new(if episode.query == "far" { 1.5 } else { 0.5 }))
}
