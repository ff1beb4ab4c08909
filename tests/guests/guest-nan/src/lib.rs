//! Scores NaN for an episode whose query is `nan`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    Ok(Score::new(if episode.query == "nan" { f64::NAN } else { 0.5 }))
}
