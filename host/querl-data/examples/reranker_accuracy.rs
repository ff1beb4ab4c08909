//! How often the reranker puts a gold passage above all others, on the training split.
//!
//! `cargo run --release -p querl-data --example reranker_accuracy [-- FOLDER [--misses]]`

mod common;

use querl_data::{EmbeddedRetriever, LocalModels, Passage};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let retriever = EmbeddedRetriever::open(&common::retrieval()?, &LocalModels::default())?;
    let show_misses = std::env::args().any(|argument| argument == "--misses");
    let rows = common::training_rows()?;
    let (mut n_first, mut n_product, mut gold_sum, mut best_other_sum) = (0, 0, 0.0, 0.0);
    for row in &rows {
        let query_intent =
            retriever.query_intent(&row.original_query, &common::context(row)).ok_or("the example has a lexicon")?;
        let ranked = retriever.rank_all(&query_intent)?;
        let is_gold = |passage: &Passage| row.gold_ids.contains(&passage.id);
        let gold = ranked.iter().find(|(passage, _)| is_gold(passage)).map_or(0.0, |(_, score)| *score);
        let best_other = ranked.iter().find(|(passage, _)| !is_gold(passage)).ok_or("all passages are gold")?;
        let first = gold > best_other.1;
        n_first += usize::from(first);
        // The product is the part of an id before the dash.
        n_product += usize::from(ranked[0].0.id.split('-').next() == row.group.split('-').next());
        gold_sum += gold;
        best_other_sum += best_other.1;
        if show_misses && !first {
            let (query, history, profile) = (&row.original_query, &row.history_summary, &row.user_profile);
            let (other, score) = (&best_other.0.id, best_other.1);
            println!("{} {gold:.2} < {other} {score:.2} | {query} | {history} | {profile}", row.group);
        }
    }
    let n = rows.len() as f64;
    println!("gold passage first: {n_first} of {} ({:.1}%)", rows.len(), 100.0 * n_first as f64 / n);
    println!("passage of the right product first: {:.1}%", 100.0 * n_product as f64 / n);
    println!("mean score of the gold passage {:.3}, of the best other passage {:.3}", gold_sum / n, best_other_sum / n);
    Ok(())
}
