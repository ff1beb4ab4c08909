//! Opens a socket.

include!("../../reward.rs");

fn score(episode: &Episode) -> Result<Score, Rejection> {
    let reached = std::net::TcpStream::connect("127.0.0.1:80").is_ok();
    assert!(!reached, "reached the network for {}", episode.id);
    Ok(Score::new(0.5))
}
