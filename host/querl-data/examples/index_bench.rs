//! How long the embedded index takes to build, to open and to answer, and what memory it needs. Passages are made from sentences of
//! the example's knowledge base, put together at random; queries are the recorded teacher's rewrites.
//!
//! `cargo run --release -p querl-data --example index_bench [-- N_PASSAGES [QUERIES]]`

use querl_core::config::RetrievalConfig;
use querl_core::ports::RetrievalRequest;
use querl_core::records::Context;
use querl_data::{EmbeddedRetriever, LocalModels, RetrievalLimits, read_passages};
use serde::Deserialize;
use serde_json::json;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Deserialize)]
struct Recorded {
    original_query: String,
    user_profile: String,
    history_summary: String,
    rewritten_query: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let n_passages = numbers.next().transpose()?.unwrap_or(100_000);
    let n_queries = numbers.next().transpose()?.unwrap_or(5_000);
    let folder = tempfile::tempdir()?;
    let example = Path::new("examples/fivedoctors");
    let n_chars = write_passages(&example.join("knowledge_base.jsonl"), &folder.path().join("kb.jsonl"), n_passages)?;
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "embedded", "knowledge_base": folder.path().join("kb.jsonl"), "lexicon": example.join("lexicon.json"),
        "index_dir": folder.path().join("indexes"),
    }))?;
    let open = || {
        let started = Instant::now();
        EmbeddedRetriever::open(&config, &LocalModels::default()).map(|retriever| (retriever, started.elapsed()))
    };
    println!("{n_passages} passages of {n_chars} characters on average; memory before: {}", memory()?);
    let (retriever, built) = open()?;
    drop(retriever);
    println!(
        "built in {:.1} s, {} MiB on disk; memory: {}",
        built.as_secs_f64(),
        size(&folder.path().join("indexes"))? >> 20,
        memory()?
    );
    let (retriever, opened) = open()?;
    println!("opened again in {:.2} s; memory: {}", opened.as_secs_f64(), memory()?);
    let queries: Vec<Recorded> = querl_core::fsx::read_jsonl(&example.join("teacher_rewrites.jsonl"))?;
    for top_k in [5, 50] {
        let (times, n_hits) = ask(&retriever, &queries, n_queries, top_k)?;
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
        println!("top_k {top_k}: {n_queries} queries, {n_hits} hits; p50 {:.2} ms, p99 {:.2} ms", at(0.5), at(0.99));
    }
    println!("memory: {}", memory()?);
    Ok(())
}

/// Times in ascending order, and the total number of hits.
fn ask(
    retriever: &EmbeddedRetriever,
    queries: &[Recorded],
    n_queries: usize,
    top_k: usize,
) -> Result<(Vec<Duration>, usize), Box<dyn Error>> {
    let limits = RetrievalLimits { top_k, score_threshold: 0.0 };
    let (mut times, mut n_hits) = (Vec::new(), 0);
    for row in queries.iter().cycle().take(n_queries) {
        let context = Context { user_profile: row.user_profile.clone(), history_summary: row.history_summary.clone() };
        let (original_query, rewritten_query) = (&row.original_query, &row.rewritten_query);
        let started = Instant::now();
        n_hits += retriever
            .search_now(&RetrievalRequest { original_query, context: &context, rewritten_query }, limits)?
            .len();
        times.push(started.elapsed());
    }
    times.sort();
    Ok((times, n_hits))
}

/// Writes passages composed of titles and sentences of others, chosen by a fixed pseudorandom series. Returns their mean length in
/// characters.
fn write_passages(from: &Path, to: &Path, n_passages: usize) -> Result<usize, Box<dyn Error>> {
    let passages = read_passages(from)?;
    let sentences: Vec<String> =
        passages.iter().flat_map(|passage| passage.text.split_inclusive(['。', '；'])).map(str::to_owned).collect();
    // Knuth's 64-bit linear congruential generator; its high bits are more random.
    let mut state = 1_u64;
    let mut choose = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let mut n_chars = 0;
    let made = (0..n_passages).map(|index| {
        let text: String = (0..3).map(|_| sentences[choose(sentences.len())].as_str()).collect();
        let title = &passages[choose(passages.len())].title;
        n_chars += title.chars().count() + text.chars().count();
        json!({"id": format!("{index}"), "title": title, "text": format!("{text}编号{index}。")})
    });
    querl_core::fsx::write_jsonl(to, made)?;
    Ok(n_chars / n_passages)
}

/// Current and peak resident memory, from the kernel: mapped pages of the index count while they are in use.
fn memory() -> Result<String, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim_start_matches(':')
            .split_whitespace()
            .next()
            .and_then(|kib| kib.parse::<u64>().ok())
            .unwrap_or_default()
            >> 10
    };
    Ok(format!("{} MiB ({} of files), at most {}", mib("VmRSS"), mib("RssFile"), mib("VmHWM")))
}

fn size(folder: &Path) -> Result<u64, Box<dyn Error>> {
    let mut n_bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        n_bytes += if entry.file_type()?.is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(n_bytes)
}
