//! Makes a query table from the request log of `querl serve rewrite`.
//!
//! The log is read four times, so that memory holds no texts but the names of groups and the ids of passages: feedback; rewrites, which
//! become rows with their groups; names of groups; rows. A row takes about 300 bytes and 8 more for each character.

mod feedback;
mod groups;
pub(crate) mod lines;
mod read;

use crate::dataset::export::{fits_cell, write_table};
use crate::dataset::leaks::{Contexts, Shingles};
use crate::dataset::records::RecordFile;
use crate::error::DataError;
use crate::table::{MAX_ROWS, is_chat, joined_ids, query_id};
use crate::text::{hash_of, normalise};
use chrono::DateTime;
use feedback::{Feedback, Tally};
use groups::{GroupSets, Groups};
use lines::{LoggedQueryRow, LoggedRewrite, RequestLogLine};
use querl_core::config::TableFormat;
use querl_core::fsx::AtomicFile;
use querl_core::records::QueryRow;
use read::{LogFile, log_files};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::Path;

pub use read::DamagedLine;

/// Settings for a query table from a request log.
#[derive(Debug, Clone, Copy)]
pub struct LogTableSettings<'a> {
    /// Folder with the log files.
    pub folder: &'a Path,
    /// Path of the table; the extension determines the format.
    pub out: &'a Path,
    /// Tenant whose requests are used; `None` is allowed if the log has only one.
    pub tenant: Option<&'a str>,
    /// First day that is used, `YYYY-MM-DD`; `None` for the first of the log.
    pub since: Option<&'a str>,
    /// Last day that is used, `YYYY-MM-DD`; `None` for the last of the log.
    pub until: Option<&'a str>,
}

/// Maximum size of a text: far below the limit for a cell of a query table, and larger than any query that a model reads.
const MAX_TEXT_BYTES: usize = 256 << 10;
/// Maximum size of a group's name, and of the gold ids of a row: far below the limit for a cell of a workbook.
const MAX_NAME_BYTES: usize = 16 << 10;
/// Consecutive requests of a user within this time are reformulations.
const SESSION_MS: i64 = 10 * 60 * 1000;

/// Counts of what was read from the log, used for the table and left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LogTableReport {
    /// Tenant whose requests are in the table.
    pub tenant: String,
    /// Number of log files that were read.
    pub n_files: usize,
    /// First and last day of the log files, `YYYY-MM-DD`.
    pub days: [String; 2],
    /// Number of lines in the log files.
    pub n_lines: u64,
    /// Number of lines that cannot be parsed; the last line of a file may be truncated.
    pub n_damaged: u64,
    /// The first lines that cannot be parsed.
    pub damaged: Vec<DamagedLine>,
    /// Number of rewrites of other tenants or outside of the selected days.
    pub n_others: u64,
    /// Number of rewrites of the tenant in the selected days.
    pub n_rewrites: u64,
    /// Number of rewrites of the tenant that are in no row, by reason.
    pub left_out: BTreeMap<&'static str, u64>,
    /// Number of used rewrites that are a fallback: the query itself was returned.
    pub n_fallbacks: u64,
    /// Number of used rewrites that repeat an earlier query in the same context.
    pub n_repeated: u64,
    /// Number of rows in the table.
    pub n_rows: u64,
    /// Number of groups of rows.
    pub n_groups: usize,
    /// Number of rows in the largest group.
    pub n_largest_group: usize,
    /// Number of reformulations that did not join two groups, because the group would have been too large.
    pub n_unjoined: u64,
    /// Number of rows with a shared gold passage that did not join two groups, because the group would have been too large.
    pub n_unjoined_gold: u64,
    /// Number of feedback lines of the tenant.
    pub n_feedback: u64,
    /// Number of feedback lines that were not or only partly used, by reason.
    pub feedback_left_out: BTreeMap<&'static str, u64>,
    /// Number of passages with contradicting feedback, such as useful for one request and not useful for another.
    pub n_contradicting: u64,
    /// Number of rows with gold ids.
    pub n_with_gold: u64,
}

/// Reads the request log and writes the query table. An existing table is replaced.
///
/// # Errors
/// The folder has no log or no usable request, the log has several tenants and none is selected, the extension of the table is unknown,
/// or the table cannot be written.
pub fn table_from_log(settings: &LogTableSettings<'_>) -> Result<LogTableReport, DataError> {
    let format = table_format(settings.out)?;
    let files = log_files(settings.folder)?;
    let mut report = LogTableReport { n_files: files.len(), ..LogTableReport::default() };
    if let [first, ..] = &files[..] {
        let last = files.last().unwrap_or(first);
        report.days = [first.day.clone(), last.day.clone()];
    }
    let (tenants, mut feedback) = read_feedback(&files, settings.tenant, &mut report)?;
    report.tenant = tenant(settings, &tenants)?;
    feedback.keep(&report.tenant);
    let is_selected = |file: &&LogFile| {
        settings.since.is_none_or(|since| file.day.as_str() >= since)
            && settings.until.is_none_or(|until| file.day.as_str() <= until)
    };
    let mut rows = LogRows { format, ..LogRows::default() };
    for (number, file) in files.iter().enumerate() {
        rows.read(file, number, is_selected(&file), &mut feedback, &mut report)?;
    }
    feedback.finish(&mut report);
    if rows.rows.is_empty() {
        let reasons: Vec<String> = report.left_out.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
        let reasons = if reasons.is_empty() { String::new() } else { format!(" (left out: {})", reasons.join(", ")) };
        let what = format!("no request of tenant `{}` can be used{reasons}", report.tenant);
        return Err(DataError::file(settings.folder, format!("{what}; name other days, or collect more requests")));
    }
    let groups = rows.groups(&feedback, &mut report);
    let mut write = |path: &Path| rows.write(&files, path, &groups, &feedback, &mut report);
    match format {
        None => write(settings.out)?,
        Some(format) => {
            let parent = settings.out.parent().filter(|parent| !parent.as_os_str().is_empty());
            let failed = |error| DataError::write(settings.out, error);
            let folder = parent.unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder).map_err(failed)?;
            let unfinished = tempfile::tempdir_in(folder).map_err(failed)?;
            let path = unfinished.path().join("rows.jsonl");
            write(&path)?;
            write_table(&RecordFile::<LoggedQueryRow>::new(&path), settings.out, format)?;
        }
    }
    Ok(report)
}

/// The format of a table; `None` for JSON lines.
fn table_format(out: &Path) -> Result<Option<TableFormat>, DataError> {
    let extension = out.extension().map(|extension| extension.to_string_lossy().to_lowercase()).unwrap_or_default();
    let format = TableFormat::from_name(&extension);
    match (format, extension.as_str()) {
        (None, "jsonl") => Ok(None),
        (Some(format), _) => Ok(Some(format)),
        _ => Err(DataError::file(out, "expected a name that ends in .jsonl, .xlsx, .csv, .tsv or .parquet")),
    }
}

/// Maximum number of tenants in a message.
const MAX_NAMED: usize = 10;

fn tenant(settings: &LogTableSettings<'_>, tenants: &BTreeSet<String>) -> Result<String, DataError> {
    let mut names = tenants.iter().take(MAX_NAMED).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if tenants.len() > MAX_NAMED {
        names += ", ...";
    }
    let wrong = |problem: String| Err(DataError::file(settings.folder, problem));
    match (settings.tenant, tenants.len()) {
        (_, 0) => wrong("the log has no readable request; check the folder".into()),
        (Some(name), _) if tenants.contains(name) => Ok(name.to_owned()),
        (Some(name), _) => wrong(format!("the log has no request of tenant `{name}`; it has those of {names}")),
        (None, 1) => Ok(tenants.iter().next().cloned().unwrap_or_default()),
        (None, _) => wrong(format!("the log has requests of several tenants: {names}; name one with --tenant")),
    }
}

/// The first reading: tenants of rewrites, feedback of `tenant` or of all, damaged lines.
fn read_feedback(
    files: &[LogFile],
    tenant: Option<&str>,
    report: &mut LogTableReport,
) -> Result<(BTreeSet<String>, Feedback), DataError> {
    let (mut tenants, mut feedback) = (BTreeSet::new(), Feedback::default());
    for file in files {
        file.read(|_, line| {
            report.n_lines += 1;
            match line {
                Ok(RequestLogLine::Rewrite(rewrite)) if !tenants.contains(&rewrite.tenant) => {
                    tenants.insert(rewrite.tenant);
                }
                Ok(RequestLogLine::Rewrite(_)) => {}
                Ok(RequestLogLine::Feedback(line)) => {
                    if tenant.is_none_or(|tenant| line.tenant == tenant) {
                        feedback.add(line);
                    }
                }
                Err(damaged) => {
                    report.n_damaged += 1;
                    if report.damaged.len() < MAX_NAMED {
                        report.damaged.push(damaged);
                    }
                }
            }
            Ok(())
        })?;
    }
    Ok((tenants, feedback))
}

/// A distinct query in its context.
struct LogRow {
    /// Number of the file and the line of its first request.
    first: (usize, usize),
    n_requests: u64,
    n_fallbacks: u64,
    shingles: Shingles,
    gold: Vec<u32>,
    n_gold_bytes: usize,
}

#[derive(Default)]
struct LogRows {
    format: Option<TableFormat>,
    rows: Vec<LogRow>,
    by_texts: HashMap<u64, u32>,
    contexts: Contexts,
    /// Judgements of passages by row and passage.
    tallies: BTreeMap<(u32, u32), Tally>,
    /// Time and row of the last request of each user.
    last_of_user: HashMap<u64, (i64, u32)>,
    /// Pairs of consecutive rows of a user.
    reformulations: Vec<(u32, u32)>,
}

impl LogRows {
    /// The second reading: the rewrites of a file.
    fn read(
        &mut self,
        file: &LogFile,
        number: usize,
        is_selected: bool,
        feedback: &mut Feedback,
        report: &mut LogTableReport,
    ) -> Result<(), DataError> {
        file.read(|line_number, line| {
            let Ok(RequestLogLine::Rewrite(line)) = line else { return Ok(()) };
            if line.tenant != report.tenant || !is_selected {
                report.n_others += 1;
                if line.tenant == report.tenant {
                    feedback.skip(&line.id, "for requests of other days");
                }
                return Ok(());
            }
            report.n_rewrites += 1;
            let row = match usable(&line, self.format) {
                Ok(row) => row,
                Err(reason) => {
                    *report.left_out.entry(reason).or_default() += 1;
                    feedback.skip(&line.id, "for requests that are left out");
                    return Ok(());
                }
            };
            let index = self.index_of(row, (number, line_number), file, report)?;
            let row = &mut self.rows[index as usize];
            row.n_requests += 1;
            if line.fallback.is_some() {
                row.n_fallbacks += 1;
                report.n_fallbacks += 1;
            }
            for vote in feedback.take(&line.id) {
                self.tallies.entry((index, vote.passage)).or_default().add(&vote);
            }
            self.note_user(&line, index);
            Ok(())
        })
    }

    fn index_of(
        &mut self,
        row: QueryRow,
        first: (usize, usize),
        file: &LogFile,
        report: &mut LogTableReport,
    ) -> Result<u32, DataError> {
        let key = hash_of(&(&row.original_query, &row.user_profile, &row.history_summary));
        if let Some(index) = self.by_texts.get(&key) {
            report.n_repeated += 1;
            return Ok(*index);
        }
        let index = self.rows.len() as u32;
        if index == MAX_ROWS {
            let problem = format!("the log has more than {MAX_ROWS} different queries up to here; name fewer days");
            return Err(DataError::line(&file.path, first.1, problem));
        }
        let shingles = Shingles::of(&row, &mut self.contexts);
        self.rows.push(LogRow { first, n_requests: 0, n_fallbacks: 0, shingles, gold: Vec::new(), n_gold_bytes: 0 });
        self.by_texts.insert(key, index);
        Ok(index)
    }

    fn note_user(&mut self, line: &LoggedRewrite, index: u32) {
        let Some(user) = &line.user else { return };
        let Ok(time) = DateTime::parse_from_rfc3339(&line.time) else { return };
        let time = time.timestamp_millis();
        let before = self.last_of_user.insert(hash_of(user), (time, index));
        if let Some((earlier, other)) = before
            && other != index
            && (time - earlier).abs() <= SESSION_MS
        {
            self.reformulations.push((other, index));
        }
    }

    /// Determines gold ids, and joins rows to groups.
    fn groups(&mut self, feedback: &Feedback, report: &mut LogTableReport) -> Groups {
        for ((row, passage), tally) in std::mem::take(&mut self.tallies) {
            report.n_contradicting += u64::from(tally.is_contradicting());
            if !tally.is_gold() {
                continue;
            }
            let row = &mut self.rows[row as usize];
            let n_bytes = feedback.passage_bytes(passage) + 1;
            if row.n_gold_bytes + n_bytes > MAX_NAME_BYTES {
                *report.feedback_left_out.entry("gold passages beyond 16 KiB of ids of a row").or_default() += 1;
                continue;
            }
            row.n_gold_bytes += n_bytes;
            row.gold.push(passage);
        }
        let shingles: Vec<&Shingles> = self.rows.iter().map(|row| &row.shingles).collect();
        let mut sets = GroupSets::new(&shingles);
        sets.join_equal(self.rows.iter().map(|row| (!row.gold.is_empty()).then_some(&row.gold)));
        sets.join_similar(&shingles);
        report.n_unjoined_gold = sets.join_bounded(&self.with_shared_passages());
        report.n_unjoined = sets.join_bounded(&self.reformulations);
        let groups = sets.finish();
        (report.n_groups, report.n_largest_group) = groups.sizes();
        groups
    }

    /// Each row of a gold passage with the row before it.
    fn with_shared_passages(&self) -> Vec<(u32, u32)> {
        let mut last_of_passage: HashMap<u32, u32> = HashMap::new();
        let mut pairs = Vec::new();
        for (row, index) in self.rows.iter().zip(0_u32..) {
            for passage in &row.gold {
                pairs.extend(last_of_passage.insert(*passage, index).map(|before| (before, index)));
            }
        }
        pairs
    }

    /// A reading of the texts of the rows, in their order.
    fn each(
        &self,
        files: &[LogFile],
        mut on_row: impl FnMut(u32, &LogRow, QueryRow) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut rows = self.rows.iter().zip(0_u32..).peekable();
        for (number, file) in files.iter().enumerate() {
            file.read(|line_number, line| {
                let Some((row, index)) = rows.next_if(|(row, _)| row.first == (number, line_number)) else {
                    return Ok(());
                };
                match &line {
                    Ok(RequestLogLine::Rewrite(line)) => {
                        on_row(index, row, usable(line, self.format).map_err(|_| changed(&file.path))?)
                    }
                    _ => Err(changed(&file.path)),
                }
            })?;
        }
        rows.next().map_or(Ok(()), |(row, _)| Err(changed(&files[row.first.0].path)))
    }

    /// The third and fourth reading: the names of groups, if they differ from those of a table without a group column, and the rows as JSON
    /// lines.
    fn write(
        &self,
        files: &[LogFile],
        path: &Path,
        groups: &Groups,
        feedback: &Feedback,
        report: &mut LogTableReport,
    ) -> Result<(), DataError> {
        let failed = |error: io::Error| DataError::write(path, error);
        // Group names by the first row of the group, and the id of that row.
        let mut names: BTreeMap<u32, (String, String)> = BTreeMap::new();
        self.each(files, |index, row, query| {
            let gold_ids = feedback.passages(&row.gold);
            let name = if gold_ids.is_empty() { normalise(&query.original_query) } else { joined_ids(&gold_ids) };
            let (known, _) = names.entry(groups.of(index)).or_insert_with(|| (name.clone(), query.id));
            if name < *known {
                *known = name;
            }
            Ok(())
        })?;
        let mut used = HashSet::new();
        for (name, id) in names.values_mut() {
            if name.len() > MAX_NAME_BYTES {
                name.clear();
            }
            // The same query after different histories is in different groups.
            if name.is_empty() || !used.insert(hash_of(name.as_str())) {
                *name = format!("{name} {id}").trim_start().to_owned();
            }
        }
        let mut table = AtomicFile::create(path).map_err(failed)?;
        self.each(files, |index, row, query| {
            let gold_ids = feedback.passages(&row.gold);
            report.n_with_gold += u64::from(!gold_ids.is_empty());
            report.n_rows += 1;
            let row = LoggedQueryRow {
                original_query: query.original_query,
                user_profile: query.user_profile,
                history_summary: query.history_summary,
                gold_ids,
                group: names[&groups.of(index)].0.clone(),
                requests: row.n_requests,
                fallbacks: row.n_fallbacks,
            };
            table.write_line(&row).map_err(failed)
        })?;
        table.commit().map_err(failed)
    }
}

fn changed(path: &Path) -> DataError {
    DataError::file(path, "was changed while it was read; run the same command again")
}

/// The texts of a rewrite as in a row of a query table, or the reason why they cannot be used.
fn usable(line: &LoggedRewrite, format: Option<TableFormat>) -> Result<QueryRow, &'static str> {
    if line.redacted.is_some() {
        return Err("without texts");
    }
    let text = |text: &Option<String>| text.as_deref().unwrap_or_default().trim().to_owned();
    let [query, profile, history] = [&line.query, &line.user_profile, &line.history].map(text);
    if query.is_empty() {
        return Err("without texts");
    }
    // The reader of query tables refuses a table with one of these.
    if is_chat(&query) || is_chat(&history) {
        return Err("with chat messages as query or history");
    }
    if [&query, &profile, &history].iter().any(|text| text.len() > MAX_TEXT_BYTES) {
        return Err("with a text of more than 256 KiB");
    }
    if format == Some(TableFormat::Xlsx) && ![&query, &profile, &history].into_iter().all(|text| fits_cell(text)) {
        return Err("with a text that a cell of a workbook cannot hold");
    }
    Ok(QueryRow {
        id: query_id(&query, &profile, &history),
        row: 0,
        group: String::new(),
        original_query: query,
        user_profile: profile,
        history_summary: history,
        gold_ids: Vec::new(),
        expansion: None,
    })
}
