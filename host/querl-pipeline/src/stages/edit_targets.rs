//! Targets of fine-tuning for `data.rewrite_form = "edit"`: of the query, the query with what the teacher adds, and the teacher's rewrite, the
//! one that retrieves most.

use crate::interrupt;
use crate::ledger::rows_of;
use crate::run::Run;
use futures::StreamExt;
use querl_core::edits::{KEEP, append, appended};
use querl_core::ports::{RetrievalRequest, Retriever};
use querl_core::records::{Context, Hit, QueryRow, ValidatedRecord, retrieval_quality};
use querl_data::WordSegmenter;
use std::collections::HashMap;

/// Qualities no further apart are equal.
const TOLERANCE: f64 = 1e-9;

/// The target of each row with a rewrite, by the query's id.
pub(super) fn edit_targets(run: &Run) -> anyhow::Result<HashMap<String, String>> {
    let records: Vec<ValidatedRecord> = rows_of(&run.dir.validated())?;
    let segmenter = WordSegmenter::open(&run.config.retrieval)?;
    let retriever = run.retriever_until(interrupt::flag())?;
    let choose = |record: ValidatedRecord| {
        let (segmenter, retriever) = (&segmenter, retriever.as_ref());
        async move {
            let target = target(&record, segmenter, retriever).await?;
            Some((record.rewritten.query.id, target))
        }
    };
    let n_calls = run.config.retrieval.max_concurrent.max(1);
    let choosing = futures::stream::iter(records).map(choose).buffer_unordered(n_calls);
    let targets = run.runtime.block_on(choosing.filter_map(std::future::ready).collect());
    interrupt::check()?;
    Ok(targets)
}

/// `None` without a rewrite or its hits. Of equal forms the one that adds, then the teacher's rewrite.
async fn target(record: &ValidatedRecord, segmenter: &WordSegmenter, retriever: &dyn Retriever) -> Option<String> {
    let (query, rewrite) = (&record.rewritten.query, &record.rewritten.rewrite.as_ref().ok()?.text);
    let hits_of_rewrite = record.retrieval.as_ref()?.as_ref().ok()?;
    let added = segmenter.text_without_words_of(rewrite, &query.original_query);
    let mut best: Option<(f64, String)> = None;
    let mut offer = |worth: f64, target: String| {
        if best.as_ref().is_none_or(|(known, _)| worth > known + TOLERANCE) {
            best = Some((worth, target));
        }
    };
    if !added.is_empty() {
        let hits = hits_of(retriever, query, &appended(&query.original_query, &added)).await;
        offer(worth(query, hits.as_deref()), append(&added));
    }
    offer(worth(query, Some(hits_of_rewrite)), rewrite.clone());
    let hits = hits_of(retriever, query, &query.original_query).await;
    offer(worth(query, hits.as_deref()), KEEP.to_owned());
    best.map(|(_, target)| target)
}

/// `None` if the call failed.
async fn hits_of(retriever: &dyn Retriever, query: &QueryRow, text: &str) -> Option<Vec<Hit>> {
    let context = Context { user_profile: query.user_profile.clone(), history_summary: query.history_summary.clone() };
    let request = RetrievalRequest { original_query: &query.original_query, context: &context, rewritten_query: text };
    retriever.retrieve(request).await.ok()
}

/// Reciprocal rank of the best gold passage; where none is known, the quality of the hits. -1 if the call failed.
fn worth(query: &QueryRow, hits: Option<&[Hit]>) -> f64 {
    let Some(hits) = hits else { return -1.0 };
    if query.gold_ids.is_empty() {
        return retrieval_quality(hits);
    }
    let rank = hits.iter().position(|hit| query.gold_ids.contains(&hit.id));
    rank.map_or(0.0, |rank| 1.0 / (rank + 1) as f64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use async_trait::async_trait;
    use querl_core::records::{CallFailure, FailureKind};

    /// Finds the gold passage at the rank that the text names with its last digit; without one not at all.
    struct ByDigit;

    #[async_trait]
    impl Retriever for ByDigit {
        async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
            if request.rewritten_query.contains("fail") {
                return Err(CallFailure { kind: FailureKind::ServerError, message: "as asked".into() });
            }
            Ok(hits(request.rewritten_query))
        }

        fn name(&self) -> &str {
            "by digit"
        }
    }

    fn hits(text: &str) -> Vec<Hit> {
        let rank = text.chars().rev().find_map(|character| character.to_digit(10)).unwrap_or(9) as usize;
        let id = |position| if position == rank { "gold" } else { "other" };
        let hit = |position| Hit {
            id: id(position).into(),
            text: String::new(),
            reranker_score: 0.5,
            retrieval_score: None,
            rank: 1,
        };
        (1..=5).map(hit).collect()
    }

    fn chosen(query: &str, rewrite: &str) -> String {
        let record = serde_json::json!({"id": "q", "row": 2, "original_query": query, "user_profile": "", "history_summary": "",
            "gold_ids": ["gold"], "group": "g", "rewrite": {"Ok": {"text": rewrite}}, "retrieval": {"Ok": hits(rewrite)}});
        let record: ValidatedRecord = serde_json::from_value(record).unwrap();
        futures::executor::block_on(target(&record, &WordSegmenter::default(), &ByDigit)).unwrap()
    }

    #[test]
    fn the_form_that_retrieves_most_is_the_target() {
        assert_eq!(chosen("鱼油", "甲1"), "+ 甲1", "all equal: what adds");
        assert_eq!(chosen("鱼油1", "甲2"), "=");
        assert_eq!(chosen("鱼油3", "鱼油2"), "+ 2");
        assert_eq!(chosen("fail", "甲2"), "甲2");
    }
}
