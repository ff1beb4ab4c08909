//! Loops endlessly for an episode whose query is `loop`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    if episode.query == "loop" {
        let mut turns = 0_u64;
        loop {
            turns = std::hint::black_box(turns.wrapping_add(1));
        }
    }
    Ok(Score::new(0.5))
}
