//! Compares the gold ids of queries with the ids of the knowledge base, before a stage runs.

use crate::dataset::records::Rows;
use crate::error::DataError;
use crate::retrieval::scan_passages;
use querl_core::config::{Config, RetrievalKind};
use querl_core::records::QueryRow;
use querl_core::text::misspelt;
use serde::Serialize;

/// A message about gold ids of queries that no passage of the knowledge base has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnknownGoldIds {
    /// The first unknown gold id with its row, and the number of rows with an unknown one.
    pub finding: String,
    /// The proposed remedy.
    pub action: String,
    /// True if more than half of the rows with gold ids have an unknown one.
    pub in_most_rows: bool,
}

impl std::fmt::Display for UnknownGoldIds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let most = if self.in_most_rows { "most rows with gold ids have an unknown one: " } else { "" };
        write!(f, "{most}{}; {}", self.finding, self.action)
    }
}

/// Checks that all gold ids of `queries` are in the knowledge base of embedded retrieval; `None` if they are, or for other retrieval.
///
/// # Errors
/// The knowledge base or the queries cannot be read, or no row has a gold id that is in the knowledge base.
pub fn check_knowledge_base(
    config: &Config,
    queries: &dyn Rows<QueryRow>,
) -> Result<Option<UnknownGoldIds>, DataError> {
    let Some(knowledge_base) = &config.retrieval.knowledge_base else { return Ok(None) };
    if config.retrieval.kind != RetrievalKind::Embedded {
        return Ok(None);
    }
    let ids = scan_passages(knowledge_base, drop)?;
    let (mut n_with_gold, mut n_known, mut n_unknown, mut first) = (0, 0, 0, None);
    for query in queries.read()? {
        let QueryRow { row, gold_ids, .. } = query?;
        n_with_gold += usize::from(!gold_ids.is_empty());
        n_known += usize::from(gold_ids.iter().any(|id| ids.contains_key(id)));
        if let Some(unknown) = gold_ids.into_iter().find(|id| !ids.contains_key(id)) {
            n_unknown += 1;
            first.get_or_insert((row, unknown));
        }
    }
    let Some((row, id)) = first else { return Ok(None) };
    let place = match &config.data.input {
        Some(table) if !config.data.dataset.is_set() => format!("{}:{row}", table.display()),
        _ => format!("row {row} of data.dataset"),
    };
    let file = knowledge_base.file_name().unwrap_or_default().to_string_lossy();
    let problem = format!("gold id `{id}` is no id of {file} ({n_unknown} of {n_with_gold} rows with gold ids)");
    let mut known: Vec<&str> = ids.keys().map(String::as_str).collect();
    // Sorted, so that the choice between equally similar ids is deterministic.
    known.sort_unstable();
    let action = format!("correct these ids or add their passages{}", hint(&id, &known));
    let in_most_rows = 2 * n_unknown > n_with_gold;
    match n_known {
        0 => Err(DataError::File { path: place, problem: format!("{problem}; {action}") }),
        _ => Ok(Some(UnknownGoldIds { finding: format!("{place}: {problem}"), action, in_most_rows })),
    }
}

/// The reason why no passage has the id, as a clause; empty if unknown. Spreadsheets convert the id 078 to the number 78, and 1-2 to a
/// date; pandas converts the integers of a column with missing values to floats, so that a csv has 1.0 for 1.
fn hint(id: &str, known: &[&str]) -> String {
    const REMEDY: &str = "format the column as text in the spreadsheet";
    fn is_number(id: &str) -> bool {
        !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit())
    }
    if let Some(integer) = id.strip_suffix(".0").filter(|integer| known.contains(integer)) {
        return format!("; it is `{integer}` as a float: write the column as integers or text (Int64 in pandas)");
    }
    let bare = id.trim_start_matches('0');
    if is_number(id) {
        let same = known.iter().find(|other| is_number(other) && other.trim_start_matches('0') == bare);
        // Ids with different numbers are different.
        return same
            .map_or_else(String::new, |other| format!("; it differs from `{other}` in leading zeros: {REMEDY}"));
    }
    if matches!(id.split('-').map(str::len).collect::<Vec<_>>()[..], [4, 2, 2]) && id.split('-').all(is_number) {
        return format!("; it is a date: {REMEDY}");
    }
    misspelt(id, known.iter().copied()).map_or_else(String::new, |near| format!("; did you mean `{near}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::open_queries;
    use serde_json::json;

    /// Regression: the message did not mention leading zeros that a spreadsheet removed, and compared a date with the id 001.
    #[test]
    fn ids_that_a_spreadsheet_changed_are_explained() {
        let known = ["001", "0078", "078", "main-library"];
        let remedy = "format the column as text in the spreadsheet";
        assert_eq!(hint("78", &known), format!("; it differs from `0078` in leading zeros: {remedy}"));
        assert_eq!(hint("2026-01-02", &known), format!("; it is a date: {remedy}"));
        let remedy = "write the column as integers or text (Int64 in pandas)";
        assert_eq!(hint("1.0", &["1", "001"]), format!("; it is `1` as a float: {remedy}"));
        assert_eq!(hint("main library", &known), "; did you mean `main-library`?");
        assert_eq!(["999", "00x9", "library"].map(|id| hint(id, &known)), ["", "", ""]);
    }

    #[test]
    fn gold_ids_without_a_passage_are_a_warning_and_an_error_where_no_row_has_another() {
        let (folder, path) = crate::scratch_file("kb.jsonl");
        std::fs::write(&path, "{\"id\": \"main-library\", \"text\": \"x\"}\n{\"id\": \"b\", \"text\": \"y\"}\n")
            .unwrap();
        let table = folder.path().join("queries.jsonl");
        let check = |gold: [&str; 3], kind: &str| {
            let rows = ["one", "two", "three"].into_iter().zip(gold);
            let rows = rows.map(|(query, gold)| json!({"original_query": query, "gold_ids": gold}).to_string());
            std::fs::write(&table, rows.collect::<Vec<_>>().join("\n")).unwrap();
            let config: Config = serde_json::from_value(json!({
                "tenant": "t", "output_dir": "run", "data": {"input": table}, "teacher": {"kind": "recorded"},
                "retrieval": {"kind": kind, "knowledge_base": path}, "model": {"path": "m"},
                "plugins": {"prompt": {"path": "p"}, "rewards": []},
            }))
            .unwrap();
            check_knowledge_base(&config, &open_queries(&config.data).unwrap())
        };
        assert_eq!(check(["main-library,b", "b", ""], "embedded").unwrap(), None);
        let warning = check(["b", "b, main_library", ""], "embedded").unwrap().unwrap().to_string();
        let expected = "queries.jsonl:2: gold id `main_library` is no id of kb.jsonl (1 of 2 rows with gold ids); correct these \
                        ids or add their passages; did you mean `main-library`?";
        assert!(warning.ends_with(expected), "{warning}");
        let most = check(["b, x1", "b, main_library", "b"], "embedded").unwrap().unwrap();
        assert!(most.in_most_rows, "{most}");
        assert!(most.to_string().starts_with("most rows with gold ids have an unknown one: "), "{most}");
        let error = check(["", "main_library", "????"], "embedded").unwrap_err().to_string();
        assert!(error.ends_with(&expected.replace("1 of 2", "2 of 2")), "{error}");
        assert_eq!(check(["", "main_library", "????"], "http").unwrap(), None);
    }
}
