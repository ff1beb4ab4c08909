//! Calls, tokens and costs of external services, for the progress line, `metrics.jsonl` and the report.

use crate::ledger::StageName;
use crate::metrics_log::{self, MetricsLog};
use crate::run::Run;
use querl_core::ports::Progress;
use querl_core::run_dir::RunDir;
use querl_data::{Spend, SpendTracker, is_file_transfer, read_spend};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Progress of a stage that also shows the number and cost of its external calls so far.
pub(crate) struct Counted<'a> {
    pub inner: &'a dyn Progress,
    pub account: Arc<SpendTracker>,
    pub stage: StageName,
}

impl Progress for Counted<'_> {
    fn update(&self, n_done: u64, n_total: u64, note: &str) {
        let spent = self.account.of_stage(self.stage.as_str());
        if spent == Spend::default() {
            return self.inner.update(n_done, n_total, note);
        }
        let parts = [note.to_owned(), in_short(&spent)];
        let parts: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
        self.inner.update(n_done, n_total, &parts.join(", "));
    }

    fn line(&self, text: &str) {
        self.inner.line(text);
    }

    fn is_stopped(&self) -> bool {
        self.inner.is_stopped()
    }
}

/// `312 calls, 88 from the cache, cost 0.0412`.
fn in_short(spent: &Spend) -> String {
    let mut parts = vec![format!("{} calls", spent.calls)];
    if spent.cached > 0 {
        parts.push(format!("{} from the cache", spent.cached));
    }
    if spent.cost > 0.0 {
        parts.push(format!("cost {:.4}", spent.cost));
    }
    parts.join(", ")
}

/// Metrics of the external calls of one stage, for `metrics.jsonl`, such as `calls/teacher gpt-5/cost` and `cache/rewrites/hit_rate`. Empty
/// without external calls.
pub(crate) fn metrics(account: &SpendTracker, stage: StageName) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    let of_stage = account.by_stage().remove(stage.as_str()).unwrap_or_default();
    for (provider, spent) in &of_stage {
        let counts = [
            ("calls", spent.calls as f64),
            ("failed", spent.failed as f64),
            ("tries", spent.tries as f64),
            ("cached", spent.cached as f64),
            ("joined", spent.joined as f64),
            ("prompt_tokens", spent.prompt_tokens as f64),
            ("completion_tokens", spent.completion_tokens as f64),
            ("cost", spent.cost),
            ("lost_cost", spent.lost_cost),
        ];
        figures.extend(counts.map(|(name, value)| (format!("calls/{provider}/{name}"), value)));
    }
    figures.extend(hit_rates(&of_stage).map(|(table, rate)| (format!("cache/{table}/hit_rate"), rate)));
    figures
}

/// Cache hit rates by table; all teachers share one.
fn hit_rates(of_stage: &BTreeMap<String, Spend>) -> impl Iterator<Item = (&'static str, f64)> {
    let mut by_table: BTreeMap<&'static str, (u64, u64)> = BTreeMap::new();
    for (provider, spent) in of_stage {
        if let Some(table) = table_of(provider) {
            let (n_cached, n_questions) = by_table.entry(table).or_default();
            *n_cached += spent.cached;
            *n_questions += spent.cached + spent.joined + spent.calls;
        }
    }
    let asked = by_table.into_iter().filter(|(_, (_, n_questions))| *n_questions > 0);
    asked.map(|(table, (n_cached, n_questions))| (table, n_cached as f64 / n_questions as f64))
}

/// The cache table of a provider; `None` for auxiliary calls: embeddings, reranking, files of batches.
fn table_of(provider: &str) -> Option<&'static str> {
    match provider.split(' ').next() {
        _ if is_file_transfer(provider) => None,
        Some("teacher" | "fallback_teacher") => Some("rewrites"),
        Some("judge") => Some("judgements"),
        Some("retrieval") => Some("retrievals"),
        _ => None,
    }
}

/// Writes the spend of a stage to disk, and a line of metrics if the stage itself writes none.
pub(crate) fn settle(run: &Run, stage: StageName) -> anyhow::Result<()> {
    let account = run.outside.spend_tracker();
    account.save()?;
    let figures = metrics(account, stage);
    if figures.is_empty() || matches!(stage, StageName::Sft | StageName::Rl) {
        return Ok(());
    }
    let path = run.dir.metrics();
    metrics_log::remove_lines(&path, stage.as_str())?;
    super::stage::remove(&RunDir::tensorboard(&path, stage.as_str()))?;
    MetricsLog::open(&path, stage.as_str())?.append(0, &figures)?;
    Ok(())
}

/// Table rows of the report on external calls, one per stage and provider.
pub(crate) fn report_lines(dir: &RunDir) -> anyhow::Result<Vec<(String, String)>> {
    let by_stage = read_spend(&dir.calls())?;
    let stages = StageName::ALL.into_iter().filter_map(|stage| Some((stage, by_stage.get(stage.as_str())?)));
    let lines = stages.flat_map(|(stage, providers)| {
        providers.iter().map(move |(provider, spent)| (format!("{stage}: {provider}"), in_words(spent)))
    });
    Ok(lines.collect())
}

fn in_words(spent: &Spend) -> String {
    let mut parts = vec![format!("{} calls", spent.calls)];
    let counts = [
        (spent.failed, "without an answer"),
        (spent.tries.saturating_sub(spent.calls), "further tries"),
        (spent.cached, "from the cache"),
        (spent.joined, "shared with another row"),
    ];
    parts.extend(counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")));
    if spent.prompt_tokens + spent.completion_tokens > 0 {
        let estimated = if spent.estimated > 0 { " (partly estimated)" } else { "" };
        parts.push(format!("{} + {} tokens{estimated}", spent.prompt_tokens, spent.completion_tokens));
    }
    let has_tokens = spent.prompt_tokens + spent.completion_tokens > 0;
    match spent.unpriced {
        0 if has_tokens || spent.cost > 0.0 => parts.push(format!("cost {:.4}", spent.cost)),
        0 => {}
        _ => parts.push("cost unknown".into()),
    }
    if spent.lost_cost > 0.0 {
        parts.push(format!("{} answers lost, which may have cost {:.4} more", spent.lost, spent.lost_cost));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the hit rate of a table was that of one of its providers.
    #[test]
    fn hit_rate_is_over_all_providers_of_a_table() {
        let spent = |calls, cached, joined| Spend { calls, cached, joined, ..Spend::default() };
        let of_stage = BTreeMap::from([
            ("fallback_teacher b".to_owned(), spent(1, 0, 0)),
            ("teacher a".to_owned(), spent(2, 6, 1)),
            ("teacher a (batch) files".to_owned(), spent(90, 0, 0)),
            ("retrieval".to_owned(), spent(1, 1, 0)),
            ("retrieval.rerank".to_owned(), spent(7, 0, 0)),
        ]);
        assert_eq!(hit_rates(&of_stage).collect::<Vec<_>>(), [("retrievals", 0.5), ("rewrites", 0.6)]);
    }

    #[test]
    fn spending_is_reported_as_a_sentence() {
        let spent = Spend { calls: 9, tries: 11, cached: 2, prompt_tokens: 90, cost: 0.5, ..Spend::default() };
        assert_eq!(in_words(&spent), "9 calls, 2 further tries, 2 from the cache, 90 + 0 tokens, cost 0.5000");
        let shared = Spend { joined: 3, ..spent.clone() };
        assert!(in_words(&shared).contains("2 from the cache, 3 shared with another row"), "{}", in_words(&shared));
        assert_eq!(in_short(&spent), "9 calls, 2 from the cache, cost 0.5000");
        assert_eq!(in_words(&Spend { calls: 1, tries: 1, ..Spend::default() }), "1 calls");
    }
}
