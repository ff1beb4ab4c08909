use super::*;

fn hits(scores: &[f64]) -> Vec<Hit> {
    let hit = |(index, score): (usize, &f64)| Hit {
        id: format!("d{index}"),
        text: String::new(),
        reranker_score: *score,
        retrieval_score: None,
        rank: index as u32 + 1,
    };
    scores.iter().enumerate().map(hit).collect()
}

#[test]
fn retrieval_quality_weighs_the_first_and_the_first_three() {
    assert!((retrieval_quality(&hits(&[0.9, 0.6, 0.3, 0.3])) - (0.54 + 0.24)).abs() < 1e-12);
    assert!((retrieval_quality(&hits(&[0.9])) - 0.9).abs() < 1e-12);
    assert_eq!(retrieval_quality(&[]), 0.0);
}

#[test]
fn a_better_retrieval_wins_and_an_equal_one_draws() {
    let (low, high) = (hits(&[0.5]), hits(&[0.6]));
    assert_eq!((win(&high, &low), win(&low, &high), win(&low, &hits(&[0.5 + 1e-10]))), (1.0, 0.0, 0.5));
}
