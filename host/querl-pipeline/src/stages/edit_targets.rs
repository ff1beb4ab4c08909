//! Targets of fine-tuning for `data.rewrite_form = "edit"`: the query where it finds its gold passage first; else of its expansion, this with what
//! the teacher adds, the query with what the teacher adds, the teacher's rewrite and the query the one that retrieves most.

use crate::interrupt;
use crate::run::Run;
use futures::{StreamExt, TryStreamExt};
use querl_core::edits::{APPEND, EXPAND, EditParts, KEEP, append, expand, is_plain, joined, with_history};
use querl_core::ports::{RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, Hit, QueryRow, ValidatedRecord, retrieval_quality};
use querl_data::{DataError, WordSegmenter};
use std::collections::{BTreeSet, HashMap};

/// Tolerance for equal qualities.
const TOLERANCE: f64 = 1e-9;

/// Fine-tuning targets by query id.
#[derive(Default)]
pub(super) struct EditTargets {
    pub by_id: HashMap<String, String>,
    /// Ids of the rows whose target is the teacher's rewrite because a lookup failed.
    pub failed: BTreeSet<String>,
}

/// Names of the forms of targets.
pub(super) const FORMS: [&str; 4] = ["keep the query", "add to the query", "expand the query", "replace the query"];

/// The form of a target, as an index into [`FORMS`].
pub(super) fn form_of(target: &str) -> usize {
    match target.trim() {
        KEEP => 0,
        target if target.starts_with(APPEND) => 1,
        target if target.starts_with(EXPAND) => 2,
        _ => 3,
    }
}

/// Chooses the target of each row that has a teacher's rewrite.
///
/// # Errors
/// Retrieval cannot be opened, or a lookup failed for a reason for which every further lookup would fail.
pub(super) fn edit_targets(run: &Run, records: Vec<ValidatedRecord>) -> anyhow::Result<EditTargets> {
    let segmenter = WordSegmenter::open(&run.config.retrieval)?;
    let retriever = run.retriever_until(interrupt::flag())?;
    let choose = |record: ValidatedRecord| {
        let (segmenter, retriever) = (&segmenter, retriever.as_ref());
        async move {
            let found = target(&record, segmenter, retriever).await;
            match found {
                Err(failure) if failure.kind.is_fatal() => Err(DataError::Service(failure)),
                Err(_) => Ok((teachers_target(&record, segmenter), true, record.rewritten.query.id)),
                Ok(target) => Ok((target, false, record.rewritten.query.id)),
            }
        }
    };
    let n_calls = run.config.retrieval.max_concurrent.max(1);
    let choosing = futures::stream::iter(records).map(choose).buffer_unordered(n_calls);
    let chosen: Result<Vec<(Option<String>, bool, String)>, DataError> = run.runtime.block_on(choosing.try_collect());
    // After an interrupt, retrieval fails.
    interrupt::check()?;
    let mut targets = EditTargets::default();
    for (target, has_failed, id) in chosen? {
        targets.failed.extend(has_failed.then(|| id.clone()));
        targets.by_id.extend(target.map(|target| (id, target)));
    }
    Ok(targets)
}

/// The teacher's rewrite, written as an edit if it could be parsed as one; `None` without a rewrite.
fn teachers_target(record: &ValidatedRecord, segmenter: &WordSegmenter) -> Option<String> {
    let rewrite = &record.rewritten.rewrite.as_ref().ok()?.text;
    if is_plain(rewrite) {
        return Some(rewrite.clone());
    }
    let added = segmenter.text_without_words_of(rewrite, &record.rewritten.query.original_query);
    Some(if added.is_empty() { KEEP.to_owned() } else { append(&added) })
}

/// Chooses the target; `None` without a rewrite or its hits. On ties, the order is: the form with the history, which a small model need not
/// copy; the form that adds; the teacher's rewrite, unless it could be parsed as an edit.
async fn target(
    record: &ValidatedRecord,
    segmenter: &WordSegmenter,
    retriever: &dyn Retriever,
) -> Result<Option<String>, CallFailure> {
    let (query, Ok(completion)) = (&record.rewritten.query, &record.rewritten.rewrite) else { return Ok(None) };
    let Some(Ok(hits_of_rewrite)) = &record.retrieval else { return Ok(None) };
    let finds_first = |worth: f64| !query.gold_ids.is_empty() && worth >= 1.0;
    let kept = worth(query, &hits_of(retriever, query, &query.original_query).await?);
    if finds_first(kept) {
        return Ok(Some(KEEP.to_owned()));
    }
    let (rewrite, original) = (&completion.text, query.original_query.as_str());
    let parts = EditParts::from(query);
    let mut best: Option<(f64, String)> = None;
    let mut offer = |worth: f64, target: String| {
        if best.as_ref().is_none_or(|(known, _)| worth > known + TOLERANCE) {
            best = Some((worth, target));
        }
    };
    if !parts.is_query_alone() {
        // A learned expansion may leave out words of query and history, which are not to be added again.
        let known = joined(&[&parts.expanded(""), &with_history(original, parts.history, "")]);
        let added = segmenter.text_without_words_of(rewrite, &known);
        let texts = if added.is_empty() { &[""][..] } else { &["", &added] };
        for added in texts {
            let worth = worth(query, &hits_of(retriever, query, &parts.expanded(added)).await?);
            // No later form can retrieve more, so they are not tried.
            if finds_first(worth) {
                return Ok(Some(expand(added)));
            }
            // If nothing is found, the teacher's words are more informative than the history's.
            if worth > TOLERANCE {
                offer(worth, expand(added));
            }
        }
    }
    let added = segmenter.text_without_words_of(rewrite, original);
    if !added.is_empty() {
        let hits = hits_of(retriever, query, &joined(&[original, &added])).await?;
        offer(worth(query, &hits), append(&added));
    }
    if is_plain(rewrite) {
        offer(worth(query, hits_of_rewrite), rewrite.clone());
    }
    offer(kept, KEEP.to_owned());
    Ok(best.map(|(_, target)| target))
}

pub(super) async fn hits_of(retriever: &dyn Retriever, query: &QueryRow, text: &str) -> Result<Vec<Hit>, CallFailure> {
    let context = query.context();
    let request = RetrievalRequest { original_query: &query.original_query, context: &context, rewritten_query: text };
    retriever.retrieve(request).await
}

/// Reciprocal rank of the best gold passage; if none is known, the quality of the hits.
pub(super) fn worth(query: &QueryRow, hits: &[Hit]) -> f64 {
    if query.gold_ids.is_empty() {
        return retrieval_quality(hits);
    }
    let rank = hits.iter().position(|hit| query.gold_ids.contains(&hit.id));
    rank.map_or(0.0, |rank| 1.0 / (rank + 1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use async_trait::async_trait;
    use querl_core::records::FailureKind;

    /// A retriever that returns the gold passage at the rank given by the last digit of the text; without a digit not at all.
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

    fn record(query: &str, rewrite: &str) -> ValidatedRecord {
        record_after(query, "", rewrite)
    }

    fn record_after(query: &str, history: &str, rewrite: &str) -> ValidatedRecord {
        let record = serde_json::json!({"id": "q", "row": 2, "original_query": query, "user_profile": "", "history_summary": history,
            "gold_ids": ["gold"], "group": "g", "rewrite": {"Ok": {"text": rewrite}}, "retrieval": {"Ok": hits(rewrite)}});
        serde_json::from_value(record).unwrap()
    }

    fn looked_up(record: &ValidatedRecord) -> Result<Option<String>, CallFailure> {
        futures::executor::block_on(target(record, &WordSegmenter::default(), &ByDigit))
    }

    fn chosen(query: &str, rewrite: &str) -> String {
        looked_up(&record(query, rewrite)).unwrap().unwrap()
    }

    #[test]
    fn the_form_that_retrieves_most_is_the_target() {
        assert_eq!(chosen("鱼油", "甲1"), "+ 甲1", "all equal: what adds");
        assert_eq!(chosen("鱼油1", "甲2"), "=");
        assert_eq!(chosen("鱼油1", "甲1"), "=", "a query that finds its passage first");
        assert_eq!(chosen("鱼油3", "鱼油2"), "+ 2");
    }

    #[test]
    fn of_equal_forms_the_one_with_the_history_is_the_target() {
        let chosen = |history: &str, rewrite| looked_up(&record_after("鱼油", history, rewrite)).unwrap().unwrap();
        assert_eq!(chosen("甲1", "乙1"), "&");
        assert_eq!(chosen("甲2", "乙1"), "& 乙1", "history and what the teacher adds");
        assert_eq!(chosen("甲2", "1 甲"), "& 1", "the history's words are not added");
        assert_eq!(chosen("甲1", "fail"), "&", "nothing finds more: the others are not looked up");
        assert_eq!(chosen("甲", "乙"), "+ 乙", "nothing is found: what the teacher adds");
    }

    /// Regression: words that a learned expansion left out were added again.
    #[test]
    fn words_that_an_expansion_leaves_out_are_not_added() {
        let chosen = |rewrite| {
            let mut record = record_after("鱼油怎么", "退款", rewrite);
            record.rewritten.query.expansion = Some("鱼油 鱼油 2".into());
            looked_up(&record).unwrap().unwrap()
        };
        assert_eq!(chosen("怎么1"), "& 1");
        assert_eq!(chosen("怎么退款"), "&");
    }

    #[test]
    fn the_teachers_words_of_the_unsearched_part_of_a_long_history_are_added() {
        let long = format!("甲 {}2", "乙".repeat(600));
        assert_eq!(looked_up(&record_after("鱼油", &long, "甲1")).unwrap().unwrap(), "& 甲1");
    }

    #[test]
    fn a_target_keeps_the_query_adds_to_it_or_replaces_it() {
        let form = |target| FORMS[form_of(target)];
        assert_eq!([form("="), form(&append("鱼油")), form(&expand("鱼油")), form("鱼油")], FORMS);
    }

    #[test]
    fn a_failed_lookup_leaves_the_teachers_rewrite() {
        let record = record("fail", "甲2");
        assert_eq!(looked_up(&record).unwrap_err().kind, FailureKind::ServerError);
        assert_eq!(teachers_target(&record, &WordSegmenter::default()).as_deref(), Some("甲2"));
    }

    #[test]
    fn a_rewrite_that_reads_as_an_edit_is_not_a_target() {
        assert_eq!(chosen("鱼油3", "+ 鱼油2"), "+ 2");
        assert_eq!(chosen("鱼油", "="), "=", "keeps the query");
        let target = teachers_target(&record("鱼油", "+ 甲2"), &WordSegmenter::default()).unwrap();
        assert!(target.starts_with("+ 甲"), "{target}");
    }
}
