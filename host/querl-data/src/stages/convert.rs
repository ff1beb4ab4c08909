//! Stage convert: filters keep or drop each row with a reason, and the kept rows become the three splits of a dataset.

use crate::dataset::records::{Rows, changed_meanwhile};
use crate::dataset::splits::RowSplits;
use crate::error::DataError;
use crate::table::{ColumnReader, DatasetReader};
use querl_core::config::DataConfig;
use querl_core::ports::{Filter, InputUse, PromptInput, PromptTask, Prompts};
use querl_core::records::{
    CallFailure, Columns, DatasetRow, FailureKind, Message, QueryRow, RowMetadata, Sample, Split, ValidatedRecord,
    Verdict,
};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of rows in a batch of a filter, which bounds memory; smaller splits are one batch. Part of the filter contract
/// (`wit/filters.wit`).
pub(crate) const BATCH_ROWS: usize = 8192;

/// Maximum size of the texts in a batch of a filter, in bytes; the guest holds them within `plugins.limits.memory_bytes`.
pub(crate) const BATCH_BYTES: usize = 32 << 20;

/// A row of the dataset, or a dropped row with the reason.
#[derive(Debug, Clone, PartialEq)]
pub enum ConvertedRow {
    /// A row of a split. A train row passed all filters, or is a row of `data.dataset` without a completion (for RL). Val and test have
    /// every query, without an assistant message if the row did not pass the filters.
    Row(Split, DatasetRow),
    /// A row of any split that has no usable rewrite or did not pass a filter.
    Dropped(DroppedRow),
}

/// A row without a usable rewrite, and the reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DroppedRow {
    /// The row of the query table.
    #[serde(flatten)]
    pub query: QueryRow,
    /// The split that the row belongs to.
    pub split: Split,
    /// The teacher's rewrite; `None` if there is none.
    pub rewritten_query: Option<String>,
    /// What dropped the row: `rewrite`, `retrieval` or the name of a filter plugin.
    pub by: String,
    /// The reason as a code, from the filter or the failure: `teacher_timeout`, `retrieval_unreachable`.
    pub code: String,
    /// The reason as a readable explanation.
    pub detail: String,
}

struct DropReason {
    by: String,
    code: String,
    detail: String,
}

/// Settings of the conversion of records into a dataset.
pub struct Conversion<'a> {
    /// Prompt plugin that writes the messages of each row; rows of `data.dataset` have their own.
    pub prompts: &'a dyn Prompts,
    /// Filter plugins in order; each gets batches of rows of one split that passed the previous filters.
    pub filters: &'a [Arc<dyn Filter>],
    /// Shares and seed of the splits, and `data.dataset` if set.
    pub config: &'a DataConfig,
    /// Name of the teacher, which is written into each row.
    pub teacher_name: &'a str,
    /// SFT targets by query id, which replace the teacher's rewrite.
    pub targets: &'a HashMap<String, String>,
    /// Expansions by query id; `None` in runs without learned expansions.
    pub expansions: Option<&'a HashMap<String, String>>,
}

/// Converts records into a dataset and passes each row to `put`: rows of a split in the order of the table, dropped rows in order within
/// a batch. Returns the number of rows of `data.dataset` whose prompt differs from the one that the prompt plugin writes.
///
/// # Errors
/// Records cannot be read, there are too few groups for the splits, a plugin broke its contract, or `put` returned an error.
pub fn convert(
    records: &dyn Rows<ValidatedRecord>,
    conversion: &Conversion<'_>,
    put: &mut dyn FnMut(ConvertedRow) -> Result<(), DataError>,
) -> Result<u64, DataError> {
    let groups = records.read()?.map(|record| Ok(record?.rewritten.query.group));
    let splits = RowSplits::of(groups, conversion.config)?;
    let mut reader = conversion.reads_columns().then(|| ColumnReader::open(conversion.config)).transpose()?;
    let mut dataset = conversion.has_dataset().then(|| DatasetReader::open(conversion.config)).transpose()?;
    let mut n_other_prompts = 0;
    let mut waiting: [FilterBatch; 3] = Default::default();
    for (index, record) in records.read()?.enumerate() {
        let mut record = record?;
        if let Some(by_id) = conversion.expansions {
            let query = &mut record.rewritten.query;
            let expansion = by_id.get(&query.id).cloned();
            query.expansion = Some(expansion.ok_or_else(|| changed_meanwhile(records.path()))?);
        }
        let query = &record.rewritten.query;
        let split = splits.split_of(query).ok_or_else(|| changed_meanwhile(records.path()))?;
        let columns = reader.as_mut().map_or_else(|| Ok(Columns::default()), |reader| reader.read(query))?;
        let prompt = dataset.as_mut().map(|dataset| dataset.read(query)).transpose()?.map(|row| row.prompt);
        if let Some(own) = &prompt {
            n_other_prompts += u64::from(*own != policy_prompt(query, conversion.prompts)?);
        }
        let batch = &mut waiting[split as usize];
        batch.add(FilterRow { index, record, columns, prompt });
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
    put_dropped(dropped, put)?;
    Ok(n_other_prompts)
}

/// The policy's prompt of the first row of the query table or of `data.dataset`, as [`convert`] writes it; `None` for an empty table.
///
/// # Errors
/// The rows cannot be read, or the plugin broke its contract.
pub fn first_policy_prompt(
    rows: &dyn Rows<QueryRow>,
    config: &DataConfig,
    prompts: &dyn Prompts,
) -> Result<Option<Vec<Message>>, DataError> {
    let Some(row) = rows.read()?.next().transpose()? else { return Ok(None) };
    let prompt = match config.dataset.is_set() {
        true => DatasetReader::open(config)?.read(&row)?.prompt,
        false => policy_prompt(&row, prompts)?,
    };
    Ok(Some(prompt))
}

/// The policy's prompt for a row, from the prompt plugin.
fn policy_prompt(row: &QueryRow, prompts: &dyn Prompts) -> Result<Vec<Message>, DataError> {
    let context = row.context();
    let input = PromptInput { query: &row.original_query, context: &context, rewrite: None };
    Ok(prompts.messages(PromptTask::PolicyRewrite, &input)?)
}

struct FilterRow {
    /// Position in the records.
    index: usize,
    record: ValidatedRecord,
    /// Empty if no filter reads them.
    columns: Columns,
    /// Prompt of the row in `data.dataset`; `None` if the prompt plugin writes it.
    prompt: Option<Vec<Message>>,
}

#[derive(Default)]
struct FilterBatch {
    rows: Vec<FilterRow>,
    n_bytes: usize,
}

impl FilterBatch {
    fn add(&mut self, row: FilterRow) {
        self.n_bytes += sample_bytes(&row.record).unwrap_or_default() + row.columns.n_bytes();
        self.rows.push(row);
    }
}

/// Size of the texts that a filter gets; `None` if rewrite or retrieval failed.
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
    /// True if a filter reads the other columns of the query table.
    pub fn reads_columns(&self) -> bool {
        self.filters.iter().any(|filter| filter.reads_columns() != InputUse::Unused)
    }

    fn has_dataset(&self) -> bool {
        self.config.dataset.is_set()
    }

    /// True for a row of a dataset without a completion, which is not a failure.
    fn is_prompt_alone(&self, record: &ValidatedRecord) -> bool {
        let failure = record.rewritten.rewrite.as_ref().err();
        self.has_dataset() && failure.is_some_and(|failure| failure.kind == FailureKind::NotRecorded)
    }

    /// Passes the rows of one batch to `put` and returns dropped rows with their positions.
    fn batch(
        &self,
        split: Split,
        batch: Vec<FilterRow>,
        put: &mut dyn FnMut(ConvertedRow) -> Result<(), DataError>,
    ) -> Result<Vec<(usize, DroppedRow)>, DataError> {
        let failures = batch.iter().map(|FilterRow { record, .. }| match self.is_prompt_alone(record) {
            true => None,
            false => call_failure(record),
        });
        let mut reasons: Vec<Option<DropReason>> = failures.collect();
        for filter in self.filters {
            run_filter(filter.as_ref(), &batch, &mut reasons)?;
        }
        let mut dropped = Vec::new();
        for (FilterRow { index, record, prompt, .. }, reason) in batch.into_iter().zip(reasons) {
            // RL needs no target, but a baseline for comparison.
            let has_baseline = matches!(record.retrieval, Some(Ok(_)));
            if reason.is_none() || split != Split::Train || has_baseline {
                let code = reason.as_ref().map(|reason| reason.code.clone());
                let prompt = prompt.map_or_else(|| policy_prompt(&record.rewritten.query, self.prompts), Ok)?;
                put(ConvertedRow::Row(split, self.dataset_row(&record, prompt, code)))?;
            }
            dropped.extend(reason.map(|reason| (index, dropped_row(record, split, reason))));
        }
        Ok(dropped)
    }

    fn dataset_row(&self, record: &ValidatedRecord, prompt: Vec<Message>, dropped: Option<String>) -> DatasetRow {
        let (row, mut messages) = (&record.rewritten.query, prompt);
        if let (None, Ok(rewrite)) = (&dropped, &record.rewritten.rewrite) {
            let target = self.targets.get(&row.id).unwrap_or(&rewrite.text);
            messages.push(Message { role: "assistant".into(), content: target.clone() });
        }
        let by_another = record.rewritten.rewrite.as_ref().ok().and_then(|completion| completion.source.clone());
        let (query, source) = (row.clone(), by_another.unwrap_or_else(|| self.teacher_name.to_owned()));
        let (top1_score, rewrite_form) = (record.top1_score(), Some(self.config.rewrite_form));
        DatasetRow { messages, metadata: RowMetadata { query, top1_score, source, rewrite_form, dropped } }
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

fn run_filter(filter: &dyn Filter, batch: &[FilterRow], reasons: &mut [Option<DropReason>]) -> Result<(), DataError> {
    let uses = filter.reads_columns();
    let passing = batch.iter().enumerate().filter(|(index, _)| reasons[*index].is_none());
    let (indices, samples): (Vec<usize>, Vec<Sample>) =
        passing.filter_map(|(index, row)| Some((index, sample(row, uses)?))).unzip();
    if samples.is_empty() {
        return Ok(());
    }
    for (index, verdict) in indices.into_iter().zip(filter.check_batch(&samples)?) {
        if let Verdict::Drop { code, detail } = verdict {
            reasons[index] = Some(DropReason { by: filter.name().to_owned(), code, detail });
        }
    }
    Ok(())
}

/// The sample of a row for a filter; `None` if rewrite or retrieval failed.
fn sample(FilterRow { record, columns, .. }: &FilterRow, uses_columns: InputUse) -> Option<Sample> {
    let row = &record.rewritten.query;
    Some(Sample {
        id: row.id.clone(),
        original_query: row.original_query.clone(),
        rewritten_query: record.rewritten.rewrite.as_ref().ok()?.text.clone(),
        context: row.context(),
        hits: record.retrieval.as_ref()?.as_ref().ok()?.clone(),
        columns: if uses_columns == InputUse::Unused { Columns::default() } else { columns.clone() },
    })
}

fn dropped_row(record: ValidatedRecord, split: Split, reason: DropReason) -> DroppedRow {
    let rewritten_query = record.rewritten.rewrite.ok().map(|rewrite| rewrite.text);
    let DropReason { by, code, detail } = reason;
    DroppedRow { query: record.rewritten.query, split, rewritten_query, by, code, detail }
}
