//! Dialogues with the style of their answers: what a classifier learns from.

use crate::DataError;
use crate::table::open_table;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A question and its answer in one text, and what is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialogue {
    /// `用户问题：...\n回答：...`
    pub input: String,
    /// The answer's style; `None` in a file without labels.
    pub label: Option<String>,
    /// The same in English, where the file has it.
    pub label_english: Option<String>,
    /// Dialogues of a group must not be on both sides of a split: `metadata.group`, else the text itself.
    pub group: String,
    /// `metadata.boundary`: the class that it might be taken for.
    pub boundary: Option<String>,
    /// Which of the file's: item of the list, line, or row; from 1.
    pub number: usize,
}

#[derive(Deserialize)]
struct Row {
    input: Option<Value>,
    label: Option<String>,
    label_english: Option<String>,
    #[serde(default)]
    metadata: BTreeMap<String, Value>,
}

/// Columns of a table that are read, and those of them that are metadata.
const COLUMNS: [&str; 7] = ["input", "question", "answer", "label", "label_english", "group", "boundary"];
const METADATA: [&str; 2] = ["group", "boundary"];

/// Reads a JSON list of objects with `input`, `label`, `label_english` and `metadata`, or such objects as JSON lines; or a table (`.xlsx`,
/// `.csv`, `.tsv`, `.parquet`) with the columns `input`, `label`, `label_english`, `group` and `boundary`; all others are left alone. In place
/// of `input` a table may have the columns `question` and `answer`.
///
/// # Errors
/// The file cannot be read or holds nothing; an item is no such object, or its `input` is no text or empty.
pub fn read_dialogues(path: &Path) -> Result<Vec<Dialogue>, DataError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    let items = match extension.as_deref() {
        Some("xlsx" | "csv" | "tsv" | "parquet") => of_table(path)?,
        _ => of_json(path)?,
    };
    if items.is_empty() {
        return Err(DataError::file(
            path,
            "holds no dialogues; expected a JSON list of {\"input\": ..., \"label\": ...}, or rows of a table",
        ));
    }
    items.into_iter().map(|(number, item)| dialogue(path, number, item)).collect()
}

/// Rows as the objects that a JSON list would have; empty cells are left out.
fn of_table(path: &Path) -> Result<Vec<(usize, Value)>, DataError> {
    let table = open_table(path)?;
    let place = |name: &str| table.header.iter().position(|column| column == name);
    let pair = place("question").zip(place("answer"));
    if place("input").is_none() && pair.is_none() {
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
            items.push((number, item(columns.iter().map(|index| (header[*index].as_str(), cell(*index))), pair)));
        }
    }
    Ok(items)
}

/// The object that a row stands for; cells that are empty are left out.
fn item<'a>(cells: impl Iterator<Item = (&'a str, &'a str)>, pair: Option<(&str, &str)>) -> Value {
    let (mut item, mut metadata) = (serde_json::Map::new(), serde_json::Map::new());
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

fn of_json(path: &Path) -> Result<Vec<(usize, Value)>, DataError> {
    let text = std::fs::read_to_string(path).map_err(|error| DataError::file(path, error))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let items: Vec<(usize, Value)> = if text.trim_start().starts_with('[') {
        let list: Vec<Value> = serde_json::from_str(text).map_err(|error| DataError::file(path, error))?;
        list.into_iter().enumerate().map(|(index, item)| (index + 1, item)).collect()
    } else {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let item = |(index, line): (usize, &str)| match serde_json::from_str(line) {
            Ok(item) => Ok((index + 1, item)),
            Err(error) => Err(DataError::file(path, format!("line {}: {error}", index + 1))),
        };
        lines.map(item).collect::<Result<_, _>>()?
    };
    Ok(items)
}

fn dialogue(path: &Path, number: usize, item: Value) -> Result<Dialogue, DataError> {
    let bad = |problem: String| DataError::file(path, format!("dialogue {number}: {problem}"));
    let row: Row = serde_json::from_value(item).map_err(|error| bad(error.to_string()))?;
    let input = match row.input {
        Some(Value::String(input)) if !input.trim().is_empty() => input,
        Some(Value::String(_)) => return Err(bad("`input` is empty; expected a question and its answer".into())),
        Some(other) => return Err(bad(format!("`input` is {other}; expected a text"))),
        None => return Err(bad("no `input` there; expected a question and its answer".into())),
    };
    let text = |key: &str| row.metadata.get(key).and_then(Value::as_str).map(str::to_owned);
    Ok(Dialogue {
        group: text("group").unwrap_or_else(|| input.clone()),
        boundary: text("boundary"),
        label: row.label,
        label_english: row.label_english,
        input,
        number,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Dialogue>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let of_file = format!("{}: ", file.path().display());
        read_dialogues(file.path()).map_err(|error| error.to_string().replace(&of_file, ""))
    }

    #[test]
    fn a_list_and_lines_hold_the_same() {
        let rows = [
            r#"{"input": "用户问题：贵吗？\n回答：不贵。", "label": "售前", "metadata": {"group": "g1", "boundary": "honesty"}}"#,
            r#"{"input": "用户问题：坏了。\n回答：换新。", "label": "售后", "label_english": "after_sales"}"#,
        ];
        let list = read(&format!("[{}]", rows.join(","))).unwrap();
        assert_eq!(list, read(&rows.join("\n")).unwrap());
        assert_eq!((list[0].group.as_str(), list[0].boundary.as_deref()), ("g1", Some("honesty")));
        assert_eq!((list[1].group.as_str(), list[1].number), ("用户问题：坏了。\n回答：换新。", 2));
    }

    #[test]
    fn a_workbook_holds_the_same_as_a_list() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dialogues.xlsx");
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
        let first = (found[0].input.as_str(), found[0].label.as_deref(), found[0].group.as_str(), found[0].number);
        assert_eq!(first, ("用户问题：贵吗？\n回答：不贵。", Some("售前"), "g1", 2));
        assert_eq!((found[1].input.as_str(), &found[1].label), ("用户问题：坏了。\n回答：换新。", &None));
        let csv = folder.path().join("dialogues.csv");
        std::fs::write(&csv, "text,label\na,b\n").unwrap();
        let error = read_dialogues(&csv).unwrap_err().to_string();
        assert!(error.contains("has columns `text`, `label`; expected `input`"), "{error}");
    }

    #[test]
    fn what_is_no_dialogue_is_named_by_its_place() {
        assert!(read("[]").unwrap_err().starts_with("holds no dialogues"));
        let error = read(r#"[{"input": "a"}, {"text": "b"}]"#).unwrap_err();
        assert_eq!(error, "dialogue 2: no `input` there; expected a question and its answer");
        assert!(read("{\"input\": \"a\"}\n\n{\"input\": ").unwrap_err().starts_with("line 3: "));
        assert_eq!(read(r#"[{"input": 7}]"#).unwrap_err(), "dialogue 1: `input` is 7; expected a text");
    }

    #[test]
    fn the_example_is_read_whole() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/style");
        let counts = ["dialogues", "seed26", "unlabelled"]
            .map(|name| read_dialogues(&folder.join(format!("{name}.json"))).unwrap().len());
        assert_eq!(counts, [420, 26, 181]);
    }
}
