//! How well retrieval does with four ways to put a query, on the training split: the raw query, the recorded teacher, and two
//! ideals made from the gold passage's product and intent, one in the words of the knowledge base, one in general words.
//!
//! `cargo run --release -p querl-data --example retrieval_baseline [-- FOLDER]`

mod common;

use querl_core::ports::RetrievalRequest;
use querl_core::records::{Hit, QueryRow};
use querl_data::{EmbeddedRetriever, Lexicon, query_id};
use serde::Deserialize;
use std::collections::HashMap;
use std::error::Error;

#[derive(Deserialize)]
struct Recorded {
    original_query: String,
    user_profile: String,
    history_summary: String,
    rewritten_query: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let retriever = EmbeddedRetriever::open(&common::retrieval()?)?;
    let lexicon = Lexicon::read(&common::folder().join("lexicon.json"))?;
    let recorded: Vec<Recorded> = querl_core::fsx::read_jsonl(&common::folder().join("teacher_rewrites.jsonl"))?;
    let teacher: HashMap<String, String> = recorded
        .into_iter()
        .map(|row| (query_id(&row.original_query, &row.user_profile, &row.history_summary), row.rewritten_query))
        .collect();
    let rows = common::training_rows()?;
    println!("{:<10}{:>8}{:>12}{:>9}{:>9}", "rewrite", "top1", "top1_score", "quality", "gold@5");
    show("raw", &retriever, &rows, |row| row.original_query.clone())?;
    show("teacher", &retriever, &rows, |row| teacher[&row.id].clone())?;
    show("house", &retriever, &rows, |row| ideal(&lexicon, row, Words::House))?;
    show("general", &retriever, &rows, |row| ideal(&lexicon, row, Words::General))
}

#[derive(Clone, Copy)]
enum Words {
    House,
    General,
}

/// The product's name and all words for the intent; the group is `product-intent`.
fn ideal(lexicon: &Lexicon, row: &QueryRow, words: Words) -> String {
    let (product, intent) = row.group.split_once('-').unwrap_or_default();
    let product = lexicon.products().iter().find(|entry| entry.id == product);
    let intent = lexicon.intents().iter().find(|entry| entry.id == intent);
    let Some((product, intent)) = product.zip(intent) else { return row.original_query.clone() };
    let words = match words {
        Words::House => &intent.house,
        Words::General => &intent.general,
    };
    format!("{} {}", product.name, words.join(" "))
}

fn show(
    name: &str,
    retriever: &EmbeddedRetriever,
    rows: &[QueryRow],
    rewrite: impl Fn(&QueryRow) -> String,
) -> Result<(), Box<dyn Error>> {
    let (mut top1, mut top1_score, mut quality, mut found) = (0, 0.0, 0.0, 0);
    for row in rows {
        let rewritten_query = &rewrite(row);
        let context = &common::context(row);
        let request = RetrievalRequest { original_query: &row.original_query, context, rewritten_query };
        let hits = retriever.search(&request)?;
        top1 += usize::from(hits.first().is_some_and(|hit| row.gold_ids.contains(&hit.id)));
        found += usize::from(hits.iter().any(|hit| row.gold_ids.contains(&hit.id)));
        top1_score += hits.first().map_or(0.0, |hit| hit.reranker_score);
        quality += quality_of(&hits);
    }
    let n = rows.len() as f64;
    let share = |count: usize| count as f64 / n;
    println!("{name:<10}{:>8.3}{:>12.3}{:>9.3}{:>9.3}", share(top1), top1_score / n, quality / n, share(found));
    Ok(())
}

/// The competition reward's measure: 0.6 of the best score, 0.4 of the mean of the best three.
fn quality_of(hits: &[Hit]) -> f64 {
    let best = hits.iter().take(3).map(|hit| hit.reranker_score);
    let n = hits.len().clamp(1, 3) as f64;
    0.6 * hits.first().map_or(0.0, |hit| hit.reranker_score) + 0.4 * best.sum::<f64>() / n
}
