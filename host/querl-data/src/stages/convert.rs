//! Stage convert: filters keep or drop each row with a reason, and the rows become the three splits of a dataset.

use super::context;
use crate::error::DataError;
use crate::splits::assign_splits;
use querl_core::config::DataConfig;
use querl_core::ports::{Filter, PromptInput, PromptTask, Prompts};
use querl_core::records::{
    CallFailure, DatasetRow, Message, QueryRow, RowMetadata, Sample, Split, ValidatedRecord, Verdict,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The dataset, and what did not get into it.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// Train, val, test. Rows of train passed all filters; val and test hold every query, those that did not pass without an
    /// assistant's message.
    pub splits: [Vec<DatasetRow>; 3],
    /// Rows that did not pass, of all splits, in the table's order.
    pub dropped: Vec<DroppedRow>,
    /// How many rows each code stands for.
    pub counts: BTreeMap<String, usize>,
}

/// A row without a usable rewrite, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DroppedRow {
    /// The query.
    #[serde(flatten)]
    pub query: QueryRow,
    /// Its split.
    pub split: Split,
    /// The teacher's rewrite where there is one.
    pub rewritten_query: Option<String>,
    /// `rewrite`, `retrieval` or the name of a filter.
    pub by: String,
    /// A filter's code; `teacher_timeout`, `retrieval_unreachable` and the like for a failure.
    pub code: String,
    /// For a person.
    pub detail: String,
}

/// Why a row is dropped.
struct Reason {
    by: String,
    code: String,
    detail: String,
}

/// Makes the dataset. Each filter sees the rows of one split that passed those before it, in one batch.
///
/// # Errors
/// Too few groups for the splits, or a plugin broke its contract.
pub fn convert(
    records: &[ValidatedRecord],
    prompts: &dyn Prompts,
    filters: &[Arc<dyn Filter>],
    config: &DataConfig,
    teacher_name: &str,
) -> Result<Converted, DataError> {
    let rows: Vec<QueryRow> = records.iter().map(|record| record.rewritten.query.clone()).collect();
    let splits = assign_splits(&rows, config)?;
    let mut reasons: Vec<Option<Reason>> = records.iter().map(call_failure).collect();
    for split in Split::ALL {
        let of_split: Vec<usize> = (0..records.len()).filter(|index| splits[*index] == split).collect();
        run_filters(records, &of_split, filters, &mut reasons)?;
    }
    let mut converted = Converted { splits: Default::default(), dropped: Vec::new(), counts: BTreeMap::new() };
    for ((record, split), reason) in records.iter().zip(splits).zip(reasons) {
        if reason.is_none() || split != Split::Train {
            let code = reason.as_ref().map(|reason| reason.code.clone());
            converted.splits[split as usize].push(dataset_row(record, prompts, teacher_name, code)?);
        }
        if let Some(reason) = reason {
            *converted.counts.entry(reason.code.clone()).or_insert(0) += 1;
            converted.dropped.push(dropped_row(record, split, reason));
        }
    }
    Ok(converted)
}

/// What failed before any filter: the teacher's call, or retrieval's.
fn call_failure(record: &ValidatedRecord) -> Option<Reason> {
    let reason = |by: &str, who: &str, failure: &CallFailure| Reason {
        by: by.into(),
        code: format!("{who}_{}", failure.kind.to_string().replace(' ', "_")),
        detail: failure.message.clone(),
    };
    match (&record.rewritten.rewrite, &record.retrieval) {
        (Err(failure), _) => Some(reason("rewrite", "teacher", failure)),
        (Ok(_), Some(Err(failure))) => Some(reason("retrieval", "retrieval", failure)),
        (Ok(_), Some(Ok(_))) => None,
        (Ok(_), None) => Some(Reason {
            by: "retrieval".into(),
            code: "retrieval_missing".into(),
            detail: "the rewrite was never looked up; run the stage validate again".into(),
        }),
    }
}

fn run_filters(
    records: &[ValidatedRecord],
    of_split: &[usize],
    filters: &[Arc<dyn Filter>],
    reasons: &mut [Option<Reason>],
) -> Result<(), DataError> {
    for filter in filters {
        let (indices, samples): (Vec<usize>, Vec<Sample>) = of_split
            .iter()
            .filter(|index| reasons[**index].is_none())
            .filter_map(|index| Some((*index, sample(&records[*index])?)))
            .unzip();
        if samples.is_empty() {
            continue;
        }
        for (index, verdict) in indices.into_iter().zip(filter.check_batch(&samples)?) {
            if let Verdict::Drop { code, detail } = verdict {
                reasons[index] = Some(Reason { by: filter.name().to_owned(), code, detail });
            }
        }
    }
    Ok(())
}

/// `None` where rewrite or retrieval failed.
fn sample(record: &ValidatedRecord) -> Option<Sample> {
    let row = &record.rewritten.query;
    Some(Sample {
        id: row.id.clone(),
        original_query: row.original_query.clone(),
        rewritten_query: record.rewritten.rewrite.as_ref().ok()?.text.clone(),
        context: context(row),
        hits: record.retrieval.as_ref()?.as_ref().ok()?.clone(),
    })
}

fn dataset_row(
    record: &ValidatedRecord,
    prompts: &dyn Prompts,
    teacher_name: &str,
    dropped: Option<String>,
) -> Result<DatasetRow, DataError> {
    let row = &record.rewritten.query;
    let context = context(row);
    let input = PromptInput { query: &row.original_query, context: &context, rewrite: None };
    let mut messages = prompts.messages(PromptTask::PolicyRewrite, &input)?;
    if let (None, Ok(rewrite)) = (&dropped, &record.rewritten.rewrite) {
        messages.push(Message { role: "assistant".into(), content: rewrite.text.clone() });
    }
    let (query, source) = (row.clone(), teacher_name.to_owned());
    Ok(DatasetRow { messages, metadata: RowMetadata { query, top1_score: record.top1_score(), source, dropped } })
}

fn dropped_row(record: &ValidatedRecord, split: Split, reason: Reason) -> DroppedRow {
    let rewritten_query = record.rewritten.rewrite.as_ref().ok().map(|rewrite| rewrite.text.clone());
    let Reason { by, code, detail } = reason;
    DroppedRow { query: record.rewritten.query.clone(), split, rewritten_query, by, code, detail }
}
