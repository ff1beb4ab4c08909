//! Dialogues with style labels: training data of the style classifier.

use crate::DataError;
use crate::table::open_table;
use querl_core::fsx::{NumberedLine, ReadError, UTF8_MARK, open_rows, read_text_bounded};
use serde_json::{Map, Value};
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

/// A question and its answer as one text, with style label and metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialogue {
    /// Question and answer: `用户问题：...\n回答：...`
    pub input: String,
    /// Style label of the answer, trimmed; `None` in a file without labels.
    pub label: Option<String>,
    /// The label in English; `None` if the file has none.
    pub label_english: Option<String>,
    /// Group for splits: dialogues of the same group are always in the same split. `metadata.group`, or the text itself if not set.
    pub group: String,
    /// `metadata.boundary`: the style class that this dialogue may be confused with.
    pub boundary: Option<String>,
    /// Location of the dialogue in its file, for messages.
    pub location: DialogueLocation,
}

/// Location of a dialogue in its file, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DialogueLocation {
    /// Index in a JSON list, and the line on which the item begins.
    #[allow(missing_docs)]
    Item { number: usize, line: usize },
    /// Line of a JSON lines file.
    Line(usize),
    /// Row of a table; the header is row 1.
    Row(usize),
}

impl fmt::Display for DialogueLocation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Item { number, line } => write!(formatter, "line {line}, dialogue {number}"),
            Self::Line(line) => write!(formatter, "line {line}"),
            Self::Row(row) => write!(formatter, "row {row}"),
        }
    }
}

impl DialogueLocation {
    /// The number of the list item, line or row.
    pub fn number(self) -> usize {
        match self {
            Self::Item { number, .. } | Self::Line(number) | Self::Row(number) => number,
        }
    }
}

/// Columns of a table that are read, and the metadata among them.
const COLUMNS: [&str; 7] = ["input", "question", "answer", "label", "label_english", "group", "boundary"];
const METADATA: [&str; 2] = ["group", "boundary"];

/// Maximum size of a JSON list, which is held in memory.
const MAX_LIST_BYTES: u64 = 256 << 20;

/// Reads dialogues from a JSON list or JSON lines of objects with `input`, `label`, `label_english` and `metadata`, or from a table
/// (`.xlsx`, `.csv`, `.tsv`, `.parquet`) with the columns `input` (or `question` and `answer`), `label`, `label_english`, `group` and
/// `boundary`. Other columns are ignored.
///
/// # Errors
/// The file cannot be read or is empty, or a field is missing or invalid; the message has line and field.
pub fn read_dialogues(path: &Path) -> Result<Vec<Dialogue>, DataError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    let items = match extension.as_deref() {
        Some("xlsx" | "csv" | "tsv" | "parquet") => table_items(path)?,
        _ => json_items(path)?,
    };
    if items.is_empty() {
        return Err(DataError::file(
            path,
            "holds no dialogues; expected a JSON list of {\"input\": ..., \"label\": ...}, or rows of a table",
        ));
    }
    items.into_iter().map(|(location, item)| dialogue(path, location, item)).collect()
}

fn table_items(path: &Path) -> Result<Vec<(DialogueLocation, Value)>, DataError> {
    let table = open_table(path)?;
    let position = |name: &str| table.header.iter().position(|column| column == name);
    let pair = position("question").zip(position("answer"));
    if position("input").is_none() && pair.is_none() {
        let columns = table.header.join("`, `");
        let problem = format!("has columns `{columns}`; expected `input`, or `question` and `answer`");
        return Err(DataError::file(path, problem));
    }
    let header = table.header.clone();
    let read = |index: &usize| COLUMNS.contains(&header[*index].as_str());
    let columns: Vec<usize> = (0..header.len()).filter(read).collect();
    let mut items = Vec::new();
    for row in table.rows(&columns)? {
        let (number, cells) = row?;
        let cell = |index: usize| cells.get(index).map(|cell| cell.trim()).unwrap_or_default();
        if columns.iter().any(|index| !cell(*index).is_empty()) {
            let pair = pair.map(|(question, answer)| (cell(question), cell(answer)));
            let cells = columns.iter().map(|index| (header[*index].as_str(), cell(*index)));
            items.push((DialogueLocation::Row(number), item(cells, pair)));
        }
    }
    Ok(items)
}

/// A row as a JSON object without empty cells.
fn item<'a>(cells: impl Iterator<Item = (&'a str, &'a str)>, pair: Option<(&str, &str)>) -> Value {
    let (mut item, mut metadata) = (Map::new(), Map::new());
    for (name, value) in cells.filter(|(_, value)| !value.is_empty()) {
        let part = if METADATA.contains(&name) { &mut metadata } else { &mut item };
        part.insert(name.to_owned(), value.into());
    }
    let pair = pair.filter(|(question, answer)| !question.is_empty() && !answer.is_empty());
    if let Some((question, answer)) = pair.filter(|_| !item.contains_key("input")) {
        item.insert("input".into(), format!("用户问题：{question}\n回答：{answer}").into());
    }
    item.insert("metadata".into(), metadata.into());
    item.into()
}

fn json_items(path: &Path) -> Result<Vec<(DialogueLocation, Value)>, DataError> {
    let unreadable = |error: io::Error, remedy: &str| {
        DataError::reading(path, &error, || DataError::file(path, format!("cannot be read: {error}; {remedy}")))
    };
    if !is_list(path).map_err(|error| unreadable(error, "check the path"))? {
        let item = |row: Result<NumberedLine<Value>, ReadError>| match row {
            Ok(NumberedLine { line, value, .. }) => Ok((DialogueLocation::Line(line), value)),
            Err(ReadError::Line { line, problem, .. }) => Err(DataError::line(path, line, problem)),
            Err(error) => Err(error.into()),
        };
        return open_rows(path)?.map(item).collect();
    }
    let text = read_text_bounded(path, MAX_LIST_BYTES);
    let text = text.map_err(|error| unreadable(error, "write longer files as JSON lines, in UTF-8"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    match items(text) {
        Some(items) => Ok(items),
        // Parsing the whole text gives the error with its position.
        None => match serde_json::from_str::<Vec<Value>>(text) {
            Ok(_) => Err(DataError::file(path, "is not a list of JSON objects")),
            Err(error) => Err(DataError::file(path, error)),
        },
    }
}

/// True if the first non-blank byte begins a JSON list.
fn is_list(path: &Path) -> io::Result<bool> {
    let bytes = BufReader::new(File::open(path)?).bytes();
    let mut bytes = bytes.skip_while(|byte| byte.as_ref().is_ok_and(|byte| is_blank(*byte)));
    Ok(bytes.next().transpose()? == Some(b'['))
}

/// White space, or a byte of a byte order mark.
fn is_blank(byte: u8) -> bool {
    byte.is_ascii_whitespace() || UTF8_MARK.contains(&byte)
}

/// The values of a JSON list with the lines on which they begin; `None` if it is invalid.
fn items(text: &str) -> Option<Vec<(DialogueLocation, Value)>> {
    let (mut items, mut line) = (Vec::new(), 1);
    let mut rest = text;
    let mut skip = |rest: &mut &str, n_bytes: usize| {
        line += rest[..n_bytes].matches('\n').count();
        *rest = &rest[n_bytes..];
        let blank = rest.len() - rest.trim_start().len();
        line += rest[..blank].matches('\n').count();
        *rest = &rest[blank..];
        line
    };
    skip(&mut rest, 0);
    rest.strip_prefix('[')?;
    let mut at = skip(&mut rest, 1);
    while !rest.starts_with(']') {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let value = values.next()?.ok()?;
        items.push((DialogueLocation::Item { number: items.len() + 1, line: at }, value));
        skip(&mut rest, values.byte_offset());
        if rest.starts_with(',') {
            at = skip(&mut rest, 1);
            // A trailing comma is invalid.
            if rest.starts_with(']') {
                return None;
            }
        } else if !rest.starts_with(']') {
            return None;
        }
    }
    skip(&mut rest, 1);
    rest.is_empty().then_some(items)
}

fn dialogue(path: &Path, location: DialogueLocation, item: Value) -> Result<Dialogue, DataError> {
    let bad = |problem: String| DataError::file(path, format!("{location}: {problem}"));
    let Value::Object(row) = item else {
        return Err(bad(format!("{} is not an object; expected {{\"input\": ..., \"label\": ...}}", shown(&item))));
    };
    let nothing = Map::new();
    let metadata = match row.get("metadata") {
        None | Some(Value::Null) => &nothing,
        Some(Value::Object(metadata)) => metadata,
        Some(other) => return Err(bad(format!("`metadata` is {}; expected an object", shown(other)))),
    };
    let input = match row.get("input") {
        Some(Value::String(input)) if !input.trim().is_empty() => input.clone(),
        Some(Value::String(_)) => return Err(bad("`input` is empty; expected a question and its answer".into())),
        None | Some(Value::Null) => return Err(bad("no `input` there; expected a question and its answer".into())),
        Some(other) => return Err(bad(format!("`input` is {}; expected a text", shown(other)))),
    };
    let group = match metadata.get("group") {
        // Conversation ids may be numbers.
        Some(Value::Number(number)) => Some(number.to_string()),
        _ => text(metadata, "group", "metadata.group", "a text or a number").map_err(bad)?,
    };
    Ok(Dialogue {
        group: group.unwrap_or_else(|| input.clone()),
        boundary: text(metadata, "boundary", "metadata.boundary", "a text").map_err(bad)?,
        label: text(&row, "label", "label", "a text").map_err(bad)?,
        label_english: text(&row, "label_english", "label_english", "a text").map_err(bad)?,
        input,
        location,
    })
}

/// A field as trimmed text; `None` if it is missing, null or empty.
fn text(object: &Map<String, Value>, key: &str, name: &str, expected: &str) -> Result<Option<String>, String> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.trim()).filter(|text| !text.is_empty()).map(str::to_owned)),
        Some(other) => Err(format!("`{name}` is {}; expected {expected}", shown(other))),
    }
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: impl AsRef<[u8]>) -> Result<Vec<Dialogue>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let of_file = format!("{}: ", file.path().display());
        read_dialogues(file.path()).map_err(|error| error.to_string().replace(&of_file, ""))
    }

    #[test]
    fn a_list_and_lines_give_the_same_dialogues() {
        let rows = [
            r#"{"input": "用户问题：贵吗？\n回答：不贵。", "label": "售前", "metadata": {"group": "g1", "boundary": "honesty"}}"#,
            r#"{"input": "用户问题：坏了。\n回答：换新。", "label": "售后", "label_english": "after_sales"}"#,
        ];
        let list = read(format!("\n[\n{}\n]\n", rows.join(" ,\n\n"))).unwrap();
        let mut lines = read(rows.join("\n")).unwrap();
        let expected = ["line 3, dialogue 1", "line 5, dialogue 2"];
        assert_eq!(list.iter().map(|row| row.location.to_string()).collect::<Vec<_>>(), expected);
        assert_eq!(lines.iter().map(|row| row.location.to_string()).collect::<Vec<_>>(), ["line 1", "line 2"]);
        lines.iter_mut().zip(&list).for_each(|(line, item)| line.location = item.location);
        assert_eq!(list, lines);
        assert_eq!((list[0].group.as_str(), list[0].boundary.as_deref()), ("g1", Some("honesty")));
        assert_eq!((list[1].group.as_str(), list[1].location.number()), ("用户问题：坏了。\n回答：换新。", 2));
    }

    #[test]
    fn a_workbook_is_read_like_a_list() {
        let (folder, path) = crate::scratch_file("dialogues.xlsx");
        let rows = [
            ["question", "answer", "label", "label_english", "group", "input"],
            ["贵吗？", "不贵。", "售前", "", "g1", ""],
            ["", "", "", "", "", "用户问题：坏了。\n回答：换新。"],
        ];
        let mut workbook = rust_xlsxwriter::Workbook::new();
        let sheet = workbook.add_worksheet();
        for (row, cells) in rows.iter().enumerate() {
            for (column, cell) in cells.iter().enumerate() {
                sheet.write(row as u32, column as u16, *cell).unwrap();
            }
        }
        workbook.save(&path).unwrap();
        let found = read_dialogues(&path).unwrap();
        let first = (found[0].input.as_str(), found[0].label.as_deref(), found[0].group.as_str(), found[0].location);
        assert_eq!(first, ("用户问题：贵吗？\n回答：不贵。", Some("售前"), "g1", DialogueLocation::Row(2)));
        assert_eq!((found[1].input.as_str(), &found[1].label), ("用户问题：坏了。\n回答：换新。", &None));
        let csv = folder.path().join("dialogues.csv");
        std::fs::write(&csv, "text,label\na,b\n").unwrap();
        let error = read_dialogues(&csv).unwrap_err().to_string();
        assert!(error.contains("has columns `text`, `label`; expected `input`"), "{error}");
    }

    #[test]
    fn invalid_dialogues_are_reported_with_their_location() {
        assert!(read("[]").unwrap_err().starts_with("holds no dialogues"));
        let error = read("[{\"input\": \"a\"},\n {\"text\": \"b\"}]").unwrap_err();
        assert_eq!(error, "line 2, dialogue 2: no `input` there; expected a question and its answer");
        let expected = ":3: the line ends too early; a record is one line";
        assert!(read("{\"input\": \"a\"}\n\n{\"input\": ").unwrap_err().ends_with(expected));
        let cut = "{\"input\": \"a\"}\n{\"input\": \"问";
        let error = read(&cut.as_bytes()[..cut.len() - 1]).unwrap_err();
        assert!(error.ends_with(":2: byte 12 is not UTF-8; save the file as UTF-8"), "{error}");
        let cases = [
            (r#"[{"input": 7}]"#, "line 1, dialogue 1: `input` is 7; expected a text"),
            (r#"[{"input": " "}]"#, "line 1, dialogue 1: `input` is empty; expected a question and its answer"),
            (r#"{"input": "a", "label": 0}"#, "line 1: `label` is 0; expected a text"),
            (r#"{"input": "a", "label_english": ["b"]}"#, "line 1: `label_english` is [\"b\"]; expected a text"),
            (r#"{"input": "a", "metadata": "b"}"#, "line 1: `metadata` is \"b\"; expected an object"),
            (
                r#"{"input": "a", "metadata": {"group": true}}"#,
                "line 1: `metadata.group` is true; expected a text or a number",
            ),
            (r#"{"input": "a", "metadata": {"boundary": 3}}"#, "line 1: `metadata.boundary` is 3; expected a text"),
            ("[\n\n\"a\"]", "line 3, dialogue 1: \"a\" is not an object; expected {\"input\": ..., \"label\": ...}"),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text).unwrap_err(), expected);
        }
        for damaged in ["[{\"input\": \"a\"},\n]", "[{\"input\": \"a\"}\n{}]", "[{\"input\":\n \"a\"", "[]\n x"] {
            assert!(read(damaged).unwrap_err().contains("at line 2 column"), "{damaged}");
        }
    }

    /// Regression: numeric conversation ids were ignored, and dialogues of one conversation were in different splits.
    #[test]
    fn a_group_may_be_a_number_and_null_means_missing() {
        let found = read(
            r#"[{"input": "a", "label": " 售前\t", "metadata": {"group": 12}},
                {"input": "b", "label": null, "label_english": " ", "metadata": null},
                {"input": "c", "metadata": {"group": null, "boundary": null}}]"#,
        )
        .unwrap();
        assert_eq!(found.iter().map(|row| row.group.as_str()).collect::<Vec<_>>(), ["12", "b", "c"]);
        assert_eq!((found[0].label.as_deref(), &found[1].label, &found[1].label_english), (Some("售前"), &None, &None));
    }

    #[test]
    fn the_example_is_read_completely() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/style");
        let counts = ["dialogues", "seed26", "unlabelled"]
            .map(|name| read_dialogues(&folder.join(format!("{name}.json"))).unwrap().len());
        assert_eq!(counts, [420, 26, 181]);
    }
}
