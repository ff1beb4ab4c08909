//! Sleeps for an hour if the query is `sleep`.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    if episode.query == "sleep" {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
    Ok(Score::new(0.5))
}
