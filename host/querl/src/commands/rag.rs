//! `querl rag check`: sends queries to the configured retrieval and reports whether its hits suffice for training and evaluation.
//! `querl rag serve` is the older form of `querl serve rag`.

use super::serve;
use crate::args::{ConfigArgs, Format};
use crate::terminal::report_new_form;
use anyhow::Context as _;
use clap::{Args, Subcommand};
use querl_core::config::{Config, EmbeddingConfig};
use querl_core::ports::RetrievalRequest;
use querl_core::records::{CallFailure, Context, Hit, QueryRow};
use querl_core::text::printable;
use querl_data::{
    LocalModels, RetrievalBackend, RetrievalLimits, Rows, ServiceContext, open_queries, open_retrieval_backend,
};
use querl_pipeline::failure::Stop;
use querl_pipeline::retrieval::{RerankEffect, local_models};
use serde::Serialize;
use std::fmt::Write as _;
use std::time::Instant;

#[derive(Debug, Subcommand)]
pub enum RagCommand {
    /// Serve knowledge bases over the general_rag interface, as `querl serve rag` does
    Serve(serve::RagArgs),
    /// Send some queries to the retrieval service of a configuration and print what its answers were parsed to
    Check(CheckArgs),
}

pub fn run(command: &RagCommand) -> anyhow::Result<()> {
    match command {
        RagCommand::Serve(args) => {
            report_new_form("querl rag serve", "querl serve rag");
            serve::rag(args)
        }
        RagCommand::Check(args) => check(args),
    }
}

/// Default number of queries of the table that are sent.
const N_QUERIES: usize = 3;
const EXCERPT_CHARS: usize = 40;
/// Maximum length of a query, an id or a failure on the terminal.
const MAX_BYTES: usize = 600;

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Send this query instead of the first queries of the table; may be given several times
    #[arg(long, value_name = "TEXT")]
    query: Vec<String>,
    /// Number of queries of the table, from its first; 30 or more with gold ids and hits show whether reranking helps
    #[arg(long = "n_queries", visible_alias = "n-queries", value_name = "N", default_value_t = N_QUERIES, conflicts_with = "query")]
    n_queries: usize,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Default)]
struct Query {
    query: String,
    context: Context,
    gold_ids: Vec<String>,
}

#[derive(Debug, Serialize)]
struct QueryResult {
    query: String,
    latency_ms: f64,
    gold_ids: Vec<String>,
    answer: Result<Vec<Hit>, CallFailure>,
}

/// Result of one check of the hits.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    name: &'static str,
    ok: bool,
    sentence: String,
}

#[derive(Debug, Serialize)]
struct Report {
    retrieval: String,
    queries: Vec<QueryResult>,
    findings: Vec<Finding>,
}

fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let config = args.config.load_for_retrieval()?;
    let questions = questions(args, &config)?;
    let models = local_models(&config.retrieval)?;
    let search =
        open_retrieval_backend(&config.retrieval, &config.tenant, &models, &ServiceContext::new(&config.calls))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime (tokio)")?;
    let queries = runtime.block_on(ask_all(search.as_ref(), questions, RetrievalLimits::of(&config.retrieval)));
    let findings = findings(&queries, &config, &models);
    let retrieval = format!("{}, tenant {}", search.name(), config.tenant);
    let report = Report { retrieval, queries, findings };
    args.format.print(&report, || text(&report))?;
    match report.queries.iter().find_map(|asked| asked.answer.as_ref().err()) {
        Some(failure) => Err(Stop::usage(failure.to_string()).into()),
        None => Ok(()),
    }
}

fn questions(args: &CheckArgs, config: &Config) -> anyhow::Result<Vec<Query>> {
    if !args.query.is_empty() {
        let question = |query: &String| Query { query: query.clone(), ..Query::default() };
        return Ok(args.query.iter().map(question).collect());
    }
    let table = open_queries(&config.data)?;
    let question = |row: QueryRow| Query {
        query: row.original_query,
        context: Context { user_profile: row.user_profile, history_summary: row.history_summary },
        gold_ids: row.gold_ids,
    };
    Ok(table.read()?.take(args.n_queries).map(|row| row.map(question)).collect::<Result<_, _>>()?)
}

async fn ask_all(search: &dyn RetrievalBackend, questions: Vec<Query>, limits: RetrievalLimits) -> Vec<QueryResult> {
    let mut asked = Vec::with_capacity(questions.len());
    for Query { query, context, gold_ids } in questions {
        let request = RetrievalRequest { original_query: &query, context: &context, rewritten_query: &query };
        let started = Instant::now();
        let answer = search.search(&request, limits).await;
        let latency_ms = started.elapsed().as_secs_f64() * 1000.0;
        asked.push(QueryResult { query, latency_ms, gold_ids, answer });
    }
    asked
}

fn findings(queries: &[QueryResult], config: &Config, models: &LocalModels) -> Vec<Finding> {
    let hits: Vec<&Hit> = queries.iter().filter_map(|asked| asked.answer.as_ref().ok()).flatten().collect();
    let n_answers = queries.iter().filter(|asked| asked.answer.is_ok()).count();
    let mut findings = vec![answers(queries, n_answers)];
    if hits.is_empty() {
        if n_answers > 0 {
            let sentence = format!(
                "nothing was found for any query; check retrieval.kb_name, and whether scores reach \
                 retrieval.score_threshold, {:?}",
                config.retrieval.score_threshold
            );
            findings.push(Finding { name: "passages", ok: false, sentence });
        }
        return findings;
    }
    findings.extend(no_hits(queries, config.retrieval.score_threshold));
    findings.extend([ids(&hits), texts(&hits), scores(&hits)]);
    findings.extend(gold(queries));
    findings.extend(reranking(queries));
    findings.extend(query_prefix(&config.retrieval.embedding, models));
    findings
}

fn answers(queries: &[QueryResult], n_answers: usize) -> Finding {
    let sentence = format!("{n_answers} of {} queries were answered", queries.len());
    Finding { name: "answers", ok: n_answers == queries.len(), sentence }
}

/// Queries for which nothing was found; `None` if there are none.
fn no_hits(queries: &[QueryResult], score_threshold: f64) -> Option<Finding> {
    let n = queries.iter().filter(|asked| asked.answer.as_ref().is_ok_and(Vec::is_empty)).count();
    let sentence = format!(
        "nothing was found for {n} of {} queries (retrieval.score_threshold is {score_threshold:?})",
        queries.len()
    );
    (n > 0).then_some(Finding { name: "hits", ok: 2 * n <= queries.len(), sentence })
}

fn ids(hits: &[&Hit]) -> Finding {
    let n_without = hits.iter().filter(|hit| hit.id.is_empty()).count();
    let sentence = match n_without {
        0 => format!("each of {} passages has an id", hits.len()),
        _ => format!(
            "{n_without} of {} passages have no id: a gold passage among them is not recognised (top-1, MRR); have the service \
             return ids",
            hits.len()
        ),
    };
    Finding { name: "ids", ok: n_without == 0, sentence }
}

fn texts(hits: &[&Hit]) -> Finding {
    let n_without = hits.iter().filter(|hit| hit.text.is_empty()).count();
    let sentence = match n_without {
        0 => format!("each of {} passages has a text", hits.len()),
        _ => format!(
            "{n_without} of {} passages have no text: reward plugins see empty ones; have the service return texts",
            hits.len()
        ),
    };
    Finding { name: "texts", ok: n_without == 0, sentence }
}

fn scores(hits: &[&Hit]) -> Finding {
    let scores = || hits.iter().map(|hit| hit.reranker_score);
    let (low, high) = (scores().fold(1.0, f64::min), scores().fold(0.0, f64::max));
    if low == high && hits.len() > 1 {
        let sentence = format!(
            "all scores are {low:.3}: they do not distinguish rewrites; have the service return its reranker's scores"
        );
        return Finding { name: "scores", ok: false, sentence };
    }
    Finding { name: "scores", ok: true, sentence: format!("scores go from {low:.3} to {high:.3}") }
}

fn gold(queries: &[QueryResult]) -> Option<Finding> {
    let known: Vec<&QueryResult> =
        queries.iter().filter(|asked| !asked.gold_ids.is_empty() && asked.answer.is_ok()).collect();
    let found = |asked: &QueryResult| asked.answer.iter().flatten().any(|hit| asked.gold_ids.contains(&hit.id));
    let n_found = known.iter().filter(|asked| found(asked)).count();
    // `ok` in any case: raw queries may miss their gold passages, which is what rewrites improve.
    let sentence = format!("a gold passage was among the hits of {n_found} of {} raw queries", known.len());
    (!known.is_empty()).then_some(Finding { name: "gold", ok: true, sentence })
}

/// Effect of reranking on gold passages, as the stage `validate` reports it, here for raw queries.
fn reranking(queries: &[QueryResult]) -> Option<Finding> {
    let mut effect = RerankEffect::default();
    for QueryResult { gold_ids, answer, .. } in queries {
        effect.add(gold_ids, answer.as_deref().unwrap_or_default());
    }
    let sentence = effect.sentence()?;
    Some(match effect.warning() {
        Some(warning) => Finding { name: "reranker", ok: false, sentence: warning },
        None => Finding { name: "reranker", ok: true, sentence },
    })
}

/// Warns about a bge model for Chinese without a query prefix: these models were trained with one, which is not in their folders.
fn query_prefix(embedding: &EmbeddingConfig, models: &LocalModels) -> Option<Finding> {
    let own = models.embedder.as_ref()?.query_prefix();
    let prefix = embedding.query_prefix.as_deref().unwrap_or(own);
    let path = embedding.path.as_deref()?.to_string_lossy().to_lowercase();
    let wants_one = path.contains("bge-") && path.contains("-zh");
    (wants_one && prefix.is_empty()).then(|| Finding {
        name: "prefix",
        ok: false,
        sentence:
            "a bge model for Chinese is given queries without the words that its model card requires before them; set \
                   retrieval.embedding.query_prefix"
                .into(),
    })
}

fn text(report: &Report) -> String {
    let mut text = format!("retrieval {}\n", report.retrieval);
    for (asked, number) in report.queries.iter().zip(1..) {
        let query = printable(&asked.query, MAX_BYTES);
        let _ = writeln!(text, "\n{number}. {query}  ({:.0} ms)", asked.latency_ms);
        match &asked.answer {
            Err(failure) => _ = writeln!(text, "   failed: {}", printable(&failure.to_string(), MAX_BYTES)),
            Ok(hits) if hits.is_empty() => text.push_str("   nothing found\n"),
            Ok(hits) => hits.iter().for_each(|hit| text.push_str(&line(hit))),
        }
    }
    text.push('\n');
    for finding in &report.findings {
        let mark = if finding.ok { "ok" } else { "--" };
        let _ = writeln!(text, "{mark}  {:<8} {}", finding.name, finding.sentence);
    }
    text
}

fn line(hit: &Hit) -> String {
    // Text of an external service: control characters are escaped, so that it cannot control the terminal.
    let words = hit.text.split_whitespace().collect::<Vec<_>>().join(" ");
    let excerpt: String = printable(&words, MAX_BYTES).chars().take(EXCERPT_CHARS).collect();
    let id = if hit.id.is_empty() { "(no id)".into() } else { printable(&hit.id, MAX_BYTES) };
    format!("   {}  {:.3}  {id}  {excerpt}\n", hit.rank, hit.reranker_score)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(id: &str, text: &str, reranker_score: f64) -> Hit {
        Hit { id: id.into(), text: text.into(), reranker_score, retrieval_score: None, rank: 1 }
    }

    /// Regression: control characters in a passage cleared the screen or overwrote the lines above.
    #[test]
    fn nothing_that_a_service_sends_steers_the_terminal() {
        let evil = "\u{1b}[2J\u{202e}x\r";
        let failure = CallFailure { kind: querl_core::records::FailureKind::ServerError, message: evil.into() };
        let asked = |answer| QueryResult { query: evil.into(), latency_ms: 1.0, gold_ids: Vec::new(), answer };
        let queries = vec![asked(Ok(vec![hit(evil, evil, 0.5)])), asked(Err(failure))];
        let said = text(&Report { retrieval: "embedded".into(), queries, findings: Vec::new() });
        assert!(said.chars().all(|c| c == '\n' || !querl_core::text::disturbs(c)), "{said:?}");
    }

    #[test]
    fn a_bge_model_for_chinese_without_its_prefix_is_named() {
        let golden =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/encoders/bert-cls");
        let embedder = std::sync::Arc::new(querl_encoder::EmbeddingModel::open(&golden, None).unwrap());
        let models = LocalModels { embedder: Some(embedder), ..LocalModels::default() };
        let config = |path: &str, query_prefix: Option<&str>| EmbeddingConfig {
            path: Some(path.into()),
            query_prefix: query_prefix.map(str::to_owned),
            ..EmbeddingConfig::default()
        };
        assert!(!query_prefix(&config("models/bge-small-zh-v1.5", None), &models).unwrap().ok);
        assert!(!query_prefix(&config("models/bge-small-zh-v1.5", Some("")), &models).unwrap().ok);
        assert_eq!(query_prefix(&config("models/bge-small-zh-v1.5", Some("为这个句子：")), &models), None);
        assert_eq!(query_prefix(&config("models/bge-m3", None), &models), None);
    }

    #[test]
    fn a_reranker_that_loses_gold_passages_is_reported_from_thirty_queries_on() {
        let scored = |id: &str, score: f64| Hit { retrieval_score: Some(score), ..hit(id, "文", 0.5) };
        let query = |gold: &str| QueryResult {
            query: "q".into(),
            latency_ms: 1.0,
            gold_ids: vec![gold.into()],
            answer: Ok(vec![scored("a", 1.0), scored("b", 2.0)]),
        };
        let queries = |n_lost: usize, n_gained: usize| -> Vec<QueryResult> {
            (0..n_lost).map(|_| query("b")).chain((0..n_gained).map(|_| query("a"))).collect()
        };
        assert!(!reranking(&queries(20, 10)).unwrap().ok);
        assert!(reranking(&queries(10, 20)).unwrap().ok);
        assert_eq!(reranking(&queries(20, 9)), None);
    }

    #[test]
    fn queries_without_hits_are_counted() {
        let asked =
            |answer| QueryResult { query: "q".into(), latency_ms: 1.0, gold_ids: Vec::new(), answer: Ok(answer) };
        let found = || asked(vec![hit("a", "甲", 0.5)]);
        assert_eq!(no_hits(&[found()], 0.5), None);
        let most = no_hits(&[found(), asked(Vec::new()), asked(Vec::new())], 0.5).unwrap();
        assert!(
            !most.ok
                && most.sentence.starts_with("nothing was found for 2 of 3 queries (retrieval.score_threshold is 0.5")
        );
        assert!(no_hits(&[found(), asked(Vec::new())], 0.5).unwrap().ok);
    }

    #[test]
    fn what_a_run_would_lack_is_reported() {
        let (bare, other) = (hit("", "", 0.5), hit("", "文", 0.5));
        let hits = [&bare, &other];
        assert!(!ids(&hits).ok && !texts(&hits).ok && !scores(&hits).ok);
        assert_eq!(
            texts(&hits).sentence,
            "1 of 2 passages have no text: reward plugins see empty ones; have the service return texts"
        );
        let (good, better) = (hit("a", "甲", 0.5), hit("b", "乙", 0.75));
        let hits = [&good, &better];
        assert!(ids(&hits).ok && texts(&hits).ok);
        assert_eq!(scores(&hits).sentence, "scores go from 0.500 to 0.750");
    }
}
