//! How often the reranker puts a gold passage above all others, on the training split.
//!
//! `cargo run --release -p querl-data --example reranker_accuracy [-- FOLDER [--misses]]`

mod common;

use querl_data::EmbeddedRetriever;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let retriever = EmbeddedRetriever::open(&common::retrieval()?)?;
    let show_misses = std::env::args().any(|argument| argument == "--misses");
    let rows = common::training_rows()?;
    let (mut n_first, mut n_product, mut gold_sum, mut best_other_sum) = (0, 0, 0.0, 0.0);
    for row in &rows {
        let reranker = retriever.reranker();
        let need = reranker.need(&row.original_query, &common::context(row));
        let ranked = reranker.rank_all(&need);
        let is_gold = |index: usize| row.gold_ids.contains(&retriever.passages()[index].id);
        let gold = ranked.iter().find(|(index, _)| is_gold(*index)).map_or(0.0, |(_, score)| *score);
        let (best_other, other_score) =
            ranked.iter().find(|(index, _)| !is_gold(*index)).map_or((0, 0.0), |(index, score)| (*index, *score));
        let first = gold > other_score;
        n_first += usize::from(first);
        n_product += usize::from(product_of(&retriever, ranked[0].0) == row.group.split('-').next().map(str::to_owned));
        gold_sum += gold;
        best_other_sum += other_score;
        if show_misses && !first {
            let other = &retriever.passages()[best_other].id;
            let (query, history, profile) = (&row.original_query, &row.history_summary, &row.user_profile);
            println!("{} {gold:.2} < {other} {other_score:.2} | {query} | {history} | {profile}", row.group);
        }
    }
    let n = rows.len() as f64;
    println!("gold passage first: {n_first} of {} ({:.1}%)", rows.len(), 100.0 * n_first as f64 / n);
    println!("passage of the right product first: {:.1}%", 100.0 * n_product as f64 / n);
    println!("mean score of the gold passage {:.3}, of the best other passage {:.3}", gold_sum / n, best_other_sum / n);
    Ok(())
}

/// The part of an id before the dash, in this example the product.
fn product_of(retriever: &EmbeddedRetriever, index: usize) -> Option<String> {
    retriever.passages()[index].id.split('-').next().map(str::to_owned)
}
