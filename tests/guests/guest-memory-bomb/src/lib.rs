//! Allocates memory endlessly for an episode whose query is `bomb`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    let mut hoard: Vec<Vec<u8>> = Vec::new();
    if episode.query == "bomb" {
        loop {
            hoard.push(vec![1; 1 << 20]);
        }
    }
    Ok(Score::new(0.5 + hoard.len() as f64))
}
