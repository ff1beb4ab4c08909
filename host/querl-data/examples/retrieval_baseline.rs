//! How well retrieval does with four ways to put a query, on the training split: the raw query, the recorded teacher, and two
//! ideals made from the gold passage's product and intent, one in the words of the knowledge base, one in general words.
//!
//! `cargo run --release -p querl-data --example retrieval_baseline [-- FOLDER]`

mod common;

use querl_core::ports::{JudgeRequest, RetrievalRequest};
use querl_core::records::{Hit, QueryRow, retrieval_quality};
use querl_data::{EmbeddedRetriever, Lexicon, LocalModels, RetrievalLimits, RubricJudge, query_id};
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
    let config = common::retrieval()?;
    let (retriever, limits) =
        (EmbeddedRetriever::open(&config, &LocalModels::default())?, RetrievalLimits::of(&config));
    let lexicon = Lexicon::read(&common::folder().join("lexicon.json"))?;
    let rubric = RubricJudge::new(lexicon.clone());
    let recorded: Vec<Recorded> = querl_core::fsx::read_jsonl(&common::folder().join("teacher_rewrites.jsonl"))?;
    let teacher: HashMap<String, String> = recorded
        .into_iter()
        .map(|row| (query_id(&row.original_query, &row.user_profile, &row.history_summary), row.rewritten_query))
        .collect();
    let rows = common::training_rows()?;
    let bench = Bench { retriever, limits, rubric, rows };
    println!(
        "top1: gold passage first; gold@k: among the top_k; q@t: mean quality of the hits with a score of t or more; judge: the rubric's points"
    );
    println!("rewrite      top1  gold@k  top1_score  q@0.0  q@0.3  q@0.5  judge");
    bench.show("raw", |row| row.original_query.clone())?;
    bench.show("teacher", |row| teacher[&row.id].clone())?;
    bench.show("house", |row| ideal(&lexicon, row, Words::House))?;
    bench.show("general", |row| ideal(&lexicon, row, Words::General))
}

#[derive(Clone, Copy)]
enum Words {
    House,
    General,
}

/// An ideal rewrite: the product's name and all words for the intent; the group is `product-intent`.
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

struct Bench {
    retriever: EmbeddedRetriever,
    limits: RetrievalLimits,
    rubric: RubricJudge,
    rows: Vec<QueryRow>,
}

impl Bench {
    /// Prints the metrics of one rewriting method.
    fn show(&self, name: &str, rewrite: impl Fn(&QueryRow) -> String) -> Result<(), Box<dyn Error>> {
        let mut sums = [0.0; 7];
        for row in &self.rows {
            let figures = self.figures(row, &rewrite(row))?;
            sums.iter_mut().zip(figures).for_each(|(sum, figure)| *sum += figure);
        }
        let [top1, found, score, all, low, high, judge] = sums.map(|sum| sum / self.rows.len() as f64);
        println!("{name:<10} {top1:>6.3} {found:>7.3} {score:>11.3} {all:>6.3} {low:>6.3} {high:>6.3} {judge:>6.2}");
        Ok(())
    }

    fn figures(&self, row: &QueryRow, rewrite: &str) -> Result<[f64; 7], Box<dyn Error>> {
        let context = &common::context(row);
        let request = RetrievalRequest { original_query: &row.original_query, context, rewritten_query: rewrite };
        let hits = self.retriever.search_now(&request, self.limits)?;
        let is_gold = |hit: &Hit| row.gold_ids.contains(&hit.id);
        let question = JudgeRequest { query: &row.original_query, context, rewrite, messages: &[] };
        Ok([
            f64::from(u8::from(hits.first().is_some_and(is_gold))),
            f64::from(u8::from(hits.iter().any(is_gold))),
            hits.first().map_or(0.0, |hit| hit.reranker_score),
            quality(&hits, 0.0),
            quality(&hits, 0.3),
            quality(&hits, 0.5),
            self.rubric.score(&question).0,
        ])
    }
}

/// Retrieval quality of the hits above a threshold; `hits` are sorted, best first.
fn quality(hits: &[Hit], threshold: f64) -> f64 {
    retrieval_quality(&hits[..hits.partition_point(|hit| hit.reranker_score >= threshold)])
}
