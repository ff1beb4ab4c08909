//! Rows of a query table that are skipped or need a look: empty queries, repeats, contradictions.

use super::encoding::TextEncoding;
use serde::Serialize;

/// As many rows of one sort are named; all are counted.
const MAX_LISTED: usize = 100;

/// What was found in a query table, for people and `querl data stats`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// How the text of a csv or tsv file is encoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoding: Option<&'static str>,
    /// Further sheets of a workbook that have other columns than the first and are passed over.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unread_sheets: Vec<String>,
    /// Rows that hold anything.
    pub n_rows: usize,
    /// Rows with a query that no earlier row has in the same context.
    pub n_usable: usize,
    /// Groups of usable rows.
    pub n_groups: usize,
    /// Rows whose query is empty; passed over.
    pub empty: RowList,
    /// Rows that repeat an earlier row's query, profile and history; passed over.
    pub repeated: RowList,
    /// Rows that say what an earlier row says but for width, case, space and punctuation; kept, in its group.
    pub alike: RowList,
    /// Rows that say what an earlier row says and name other gold ids: one of the two is wrong, or both answer.
    pub conflicting: RowList,
}

/// Rows of one sort.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RowList {
    /// How many.
    pub n: usize,
    /// The first of them, as the table numbers its rows, each with the earlier row it is about where there is one.
    pub rows: Vec<RowReference>,
}

/// A row, and an earlier one that it repeats or contradicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RowReference {
    /// As a spreadsheet or editor numbers it.
    pub row: usize,
    /// The earlier row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub earlier: Option<usize>,
}

impl RowList {
    pub(super) fn add(&mut self, row: usize, earlier: Option<usize>) {
        self.n += 1;
        if self.rows.len() < MAX_LISTED {
            self.rows.push(RowReference { row, earlier });
        }
    }

    /// `rows 3, 7 (like row 2), ...`
    fn listing(&self) -> String {
        const SHOWN: usize = 10;
        let shown = |named: &RowReference| match named.earlier {
            Some(earlier) => format!("{} (like row {earlier})", named.row),
            None => named.row.to_string(),
        };
        let listed = self.rows.iter().take(SHOWN).map(shown).collect::<Vec<_>>().join(", ");
        let (word, more) = (if self.n == 1 { "row" } else { "rows" }, if self.n > SHOWN { ", ..." } else { "" });
        format!("{word} {listed}{more}")
    }
}

impl Findings {
    /// A line for a person about each sort of row that was passed over or needs a look.
    pub fn notes(&self) -> Vec<String> {
        let passed_over = [(&self.empty, "with an empty query"), (&self.repeated, "repeating an earlier row")];
        let passed_over: Vec<String> = passed_over
            .iter()
            .filter(|(rows, _)| rows.n > 0)
            .map(|(rows, what)| format!("{} {what} ({})", rows.n, rows.listing()))
            .collect();
        let mut notes = Vec::new();
        // The one encoding that is a guess: many files of one-byte encodings would pass for it.
        if let Some(guess) = self.encoding.filter(|encoding| *encoding == TextEncoding::Gb18030.name()) {
            notes.push(format!("the table is read as {guess}; save it as UTF-8 if its characters are not right"));
        }
        if !self.unread_sheets.is_empty() {
            let names: Vec<String> = self.unread_sheets.iter().map(|name| format!("`{name}`")).collect();
            notes
                .push(format!("sheets passed over, as their columns are not those of the first: {}", names.join(", ")));
        }
        if !passed_over.is_empty() {
            notes.push(format!("rows passed over: {}", passed_over.join("; ")));
        }
        if self.alike.n > 0 {
            let differ = "differ from an earlier row in width, case, space or punctuation alone";
            notes.push(format!(
                "{} row(s) {differ} and are kept in its group ({})",
                self.alike.n,
                self.alike.listing()
            ));
        }
        if self.conflicting.n > 0 {
            let what = "say what an earlier row says and name other gold ids";
            notes.push(format!("{} row(s) {what}: check {}", self.conflicting.n, self.conflicting.listing()));
        }
        notes
    }
}
