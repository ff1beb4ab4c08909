//! Stage convert: filters keep or drop each row with a reason, and the rows become the three splits of a dataset.

use super::context;
use crate::dataset::rows::{Rows, changed_meanwhile};
use crate::dataset::splits::Splits;
use crate::error::DataError;
use querl_core::config::DataConfig;
use querl_core::ports::{Filter, PromptInput, PromptTask, Prompts};
use querl_core::records::{
    CallFailure, DatasetRow, Message, QueryRow, RowMetadata, Sample, Split, ValidatedRecord, Verdict,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Most rows of a split that filters see in one batch: the rows of a table of that size are all seen together, and the memory
/// of a larger one is bounded. The contract of filters (`wit/filters.wit`) names it too.
pub(crate) const BATCH_ROWS: usize = 8192;

/// A batch also ends where its texts have so many bytes: a guest holds them all, within `plugins.limits.memory_bytes`.
pub(crate) const BATCH_BYTES: usize = 32 << 20;

/// What the stage makes of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum ConvertedRow {
    /// A row of a split. Rows of train passed all filters; val and test hold every query, those that did not pass without an
    /// assistant's message.
    Row(Split, DatasetRow),
    /// A row that did not pass, of whichever split.
    Dropped(DroppedRow),
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
struct DropReason {
    by: String,
    code: String,
    detail: String,
}

/// What turns records into a dataset.
pub struct Conversion<'a> {
    /// Writes the messages of each row.
    pub prompts: &'a dyn Prompts,
    /// In their order; each sees the rows of one split that passed those before it, in batches.
    pub filters: &'a [Arc<dyn Filter>],
    /// Shares and seed of the splits.
    pub config: &'a DataConfig,
    /// Named in each row.
    pub teacher_name: &'a str,
}

/// Makes the dataset and hands each row to `put`: those of a split in the table's order; dropped ones too, within a batch a split.
///
/// # Errors
/// Records cannot be read, too few groups for the splits, a plugin broke its contract, or `put` says so.
pub fn convert(
    records: &dyn Rows<ValidatedRecord>,
    conversion: &Conversion<'_>,
    put: &mut dyn FnMut(ConvertedRow) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let groups = records.read()?.map(|record| Ok(record?.rewritten.query.group));
    let splits = Splits::assign(groups, conversion.config)?;
    let mut waiting: [FilterBatch; 3] = Default::default();
    for (index, record) in records.read()?.enumerate() {
        let record = record?;
        let split = splits.of(&record.rewritten.query.group).ok_or_else(|| changed_meanwhile(records.path()))?;
        let batch = &mut waiting[split as usize];
        batch.add(index, record);
        if batch.rows.len() == BATCH_ROWS || batch.n_bytes >= BATCH_BYTES {
            let dropped = conversion.batch(split, std::mem::take(batch).rows, put)?;
            put_dropped(dropped, put)?;
        }
    }
    let mut dropped = Vec::new();
    for (split, batch) in Split::ALL.into_iter().zip(waiting) {
        dropped.extend(conversion.batch(split, batch.rows, put)?);
    }
    dropped.sort_by_key(|(index, _)| *index);
    put_dropped(dropped, put)
}

/// Rows of one split that wait for the filters, with their places.
#[derive(Default)]
struct FilterBatch {
    rows: Vec<(usize, ValidatedRecord)>,
    n_bytes: usize,
}

impl FilterBatch {
    fn add(&mut self, index: usize, record: ValidatedRecord) {
        self.n_bytes += sample_bytes(&record).unwrap_or_default();
        self.rows.push((index, record));
    }
}

/// Of the texts that a filter sees; `None` where rewrite or retrieval failed.
fn sample_bytes(record: &ValidatedRecord) -> Option<usize> {
    let (query, rewrite) = (&record.rewritten.query, record.rewritten.rewrite.as_ref().ok()?);
    let hits = record.retrieval.as_ref()?.as_ref().ok()?;
    let of_query = [&query.id, &query.original_query, &query.user_profile, &query.history_summary, &rewrite.text];
    let texts = of_query.into_iter().chain(hits.iter().flat_map(|hit| [&hit.id, &hit.text]));
    Some(texts.map(String::len).sum())
}

fn put_dropped(
    dropped: Vec<(usize, DroppedRow)>,
    put: &mut dyn FnMut(ConvertedRow) -> Result<(), DataError>,
) -> Result<(), DataError> {
    dropped.into_iter().try_for_each(|(_, row)| put(ConvertedRow::Dropped(row)))
}

impl Conversion<'_> {
    /// Puts the rows of one batch and returns those that did not pass, with their places.
    fn batch(
        &self,
        split: Split,
        batch: Vec<(usize, ValidatedRecord)>,
        put: &mut dyn FnMut(ConvertedRow) -> Result<(), DataError>,
    ) -> Result<Vec<(usize, DroppedRow)>, DataError> {
        let mut reasons: Vec<Option<DropReason>> = batch.iter().map(|(_, record)| call_failure(record)).collect();
        for filter in self.filters {
            run_filter(filter.as_ref(), &batch, &mut reasons)?;
        }
        let mut dropped = Vec::new();
        for ((index, record), reason) in batch.into_iter().zip(reasons) {
            if reason.is_none() || split != Split::Train {
                let code = reason.as_ref().map(|reason| reason.code.clone());
                put(ConvertedRow::Row(split, self.dataset_row(&record, code)?))?;
            }
            dropped.extend(reason.map(|reason| (index, dropped_row(record, split, reason))));
        }
        Ok(dropped)
    }

    fn dataset_row(&self, record: &ValidatedRecord, dropped: Option<String>) -> Result<DatasetRow, DataError> {
        let row = &record.rewritten.query;
        let context = context(row);
        let input = PromptInput { query: &row.original_query, context: &context, rewrite: None };
        let mut messages = self.prompts.messages(PromptTask::PolicyRewrite, &input)?;
        if let (None, Ok(rewrite)) = (&dropped, &record.rewritten.rewrite) {
            messages.push(Message { role: "assistant".into(), content: rewrite.text.clone() });
        }
        let by_another = record.rewritten.rewrite.as_ref().ok().and_then(|completion| completion.source.clone());
        let (query, source) = (row.clone(), by_another.unwrap_or_else(|| self.teacher_name.to_owned()));
        Ok(DatasetRow { messages, metadata: RowMetadata { query, top1_score: record.top1_score(), source, dropped } })
    }
}

fn call_failure(record: &ValidatedRecord) -> Option<DropReason> {
    let reason = |by: &str, who: &str, failure: &CallFailure| DropReason {
        by: by.into(),
        code: failure.kind.code(who),
        detail: failure.message.clone(),
    };
    match (&record.rewritten.rewrite, &record.retrieval) {
        (Err(failure), _) => Some(reason("rewrite", "teacher", failure)),
        (Ok(_), Some(Err(failure))) => Some(reason("retrieval", "retrieval", failure)),
        (Ok(_), Some(Ok(_))) => None,
        (Ok(_), None) => Some(DropReason {
            by: "retrieval".into(),
            code: "retrieval_missing".into(),
            detail: "the rewrite was never looked up; run the stage validate again".into(),
        }),
    }
}

fn run_filter(
    filter: &dyn Filter,
    batch: &[(usize, ValidatedRecord)],
    reasons: &mut [Option<DropReason>],
) -> Result<(), DataError> {
    let (places, samples): (Vec<usize>, Vec<Sample>) = batch
        .iter()
        .enumerate()
        .filter(|(place, _)| reasons[*place].is_none())
        .filter_map(|(place, (_, record))| Some((place, sample(record)?)))
        .unzip();
    if samples.is_empty() {
        return Ok(());
    }
    for (place, verdict) in places.into_iter().zip(filter.check_batch(&samples)?) {
        if let Verdict::Drop { code, detail } = verdict {
            reasons[place] = Some(DropReason { by: filter.name().to_owned(), code, detail });
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

fn dropped_row(record: ValidatedRecord, split: Split, reason: DropReason) -> DroppedRow {
    let rewritten_query = record.rewritten.rewrite.ok().map(|rewrite| rewrite.text);
    let DropReason { by, code, detail } = reason;
    DroppedRow { query: record.rewritten.query, split, rewritten_query, by, code, detail }
}
