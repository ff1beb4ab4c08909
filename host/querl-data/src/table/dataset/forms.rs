//! Parses a row of a dataset of ms-swift, TRL or verl into prompt, completion, query and other columns.
//!
//! | keys of a row | format |
//! |---|---|
//! | `messages` | ms-swift, OpenAI; also `data/train.jsonl` of a run, whose edits are read as search texts |
//! | `query`, with `response`, `system` and `history` | ms-swift |
//! | `prompt` and `completion` as texts or lists of messages | TRL |
//! | `prompt` as a list of messages, with `reward_model` and `extra_info` | verl |
//!
//! Sources: `swift/dataset/preprocessor/core.py` of ms-swift 4.6 (`MessagesPreprocessor`, `ResponsePreprocessor`), the page "Dataset formats
//! and types" of TRL 1.16, `verl/utils/dataset/rl_dataset.py` of verl 0.9.1.

use crate::table::formats::{CellForm, Object, TableCell, typed, value_text};
use querl_core::config::RewriteForm;
use querl_core::edits;
use querl_core::records::{ColumnValue, Message, RowMetadata, Scalar};
use querl_core::scoring::{InlineQuery, RewardQuery};
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Clone)]
pub(super) struct DatasetRecord {
    /// The chat messages of the prompt; the last one is the user's.
    pub(super) prompt: Vec<Message>,
    /// The response; `None` if the row has none.
    pub(super) completion: Option<String>,
    /// Query, profile, history and gold ids (separated by commas), from the label of `querl export` or derived from the prompt.
    pub(super) texts: [String; 4],
    /// True if the row has a label of `querl export`; then no other column may replace one of `texts`.
    pub(super) has_label: bool,
    /// Names and cells of the other columns.
    pub(super) columns: Vec<(String, TableCell)>,
}

/// Parses a row. The error is the end of a sentence.
pub(super) fn parse(mut row: Object) -> Result<DatasetRecord, String> {
    row.retain(|_, value| !value.is_null());
    let Conversation { prompt, completion } = Conversation::of(&mut row)?;
    let completion = completion.map(|text| search_text(text, row.get("metadata"))).transpose()?;
    if let Some(label) = label(&mut row)? {
        let columns = label.columns.0.iter().map(|(name, value)| (name.clone(), cell_of(value))).collect();
        let completion = completion.or(label.baseline);
        let texts = [label.query, label.user_profile, label.history_summary, label.gold_ids.join(",")];
        return Ok(DatasetRecord { prompt, completion, texts, has_label: true, columns });
    }
    let texts = [asked(&prompt), String::new(), earlier_turns(&prompt), String::new()];
    Ok(DatasetRecord { prompt, completion, texts, has_label: false, columns: columns(row) })
}

struct Conversation {
    prompt: Vec<Message>,
    completion: Option<String>,
}

impl Conversation {
    /// Removes its keys from the row.
    fn of(row: &mut Object) -> Result<Self, String> {
        if let Some(value) = row.remove("messages") {
            if row.contains_key("completion") {
                return Err("has both `messages` and `completion`; leave one of them out".into());
            }
            return Self::of_messages(&value);
        }
        let has = |key: &str| row.contains_key(key);
        if has("chosen") && has("rejected") && !has("completion") && !has("response") {
            return Err(
                "is a preference pair (`chosen`), which is not read; name the chosen response `completion`".into()
            );
        }
        if let Some(value) = row.remove("prompt") {
            let prompt = match &value {
                Value::String(text) => vec![message("user", text)],
                list => messages("prompt", list)?,
            };
            let completion = row.remove("completion").map(|value| ("completion", value));
            return Self::of_prompt(prompt, completion.or_else(|| Some(("response", row.remove("response")?))));
        }
        if let Some(value) = row.remove("query") {
            let Value::String(query) = value else {
                return Err("`query` is no text; expected the text that is asked".into());
            };
            let mut prompt = history(row)?;
            prompt.push(message("user", &query));
            return Self::of_prompt(prompt, row.remove("response").map(|value| ("response", value)));
        }
        let found: Vec<String> = row.keys().map(|key| format!("`{key}`")).collect();
        let found = if found.is_empty() { "nothing".to_owned() } else { found.join(", ") };
        Err(format!(
            "has no `messages`, `prompt` or `query`; found {found}; expected messages, or query and response (ms-swift), or prompt and \
             completion (TRL), or prompt with reward_model (verl)"
        ))
    }

    /// A message of the assistant at the end is the completion.
    fn of_messages(value: &Value) -> Result<Self, String> {
        let mut prompt = messages("messages", value)?;
        let completion = match prompt.last() {
            Some(last) if last.role == "assistant" => prompt.pop().map(|last| last.content),
            _ => None,
        };
        Self::checked(prompt, "messages", completion)
    }

    fn of_prompt(prompt: Vec<Message>, completion: Option<(&str, Value)>) -> Result<Self, String> {
        Self::checked(prompt, "prompt", completion.map(|(key, value)| completion_text(key, value)).transpose()?)
    }

    fn checked(prompt: Vec<Message>, key: &str, completion: Option<String>) -> Result<Self, String> {
        check_order(&prompt, key)?;
        if asked(&prompt).trim().is_empty() {
            return Err("the last message of the user is empty; write one, or leave the row out".into());
        }
        match &completion {
            Some(text) if text.trim().is_empty() => {
                Err("the response of the assistant is empty; write one, or leave the row out".into())
            }
            _ => Ok(Self { prompt, completion }),
        }
    }
}

/// The completion as a search text. Only rows that a run wrote can have edits: those with the fields of [`RowMetadata`]. A row of an earlier
/// version does not name the form: its completion is an edit if it has a marker.
fn search_text(completion: String, metadata: Option<&Value>) -> Result<String, String> {
    match metadata.map(RowMetadata::deserialize) {
        Some(Ok(RowMetadata { query, rewrite_form, .. })) if rewrite_form != Some(RewriteForm::Full) => {
            let text = edits::search_text(&completion, (&query).into());
            text.map_err(|rejection| format!("{}; write one, or leave the row out", rejection.detail))
        }
        _ => Ok(completion),
    }
}

fn completion_text(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        // ms-swift takes the first of several.
        Value::Array(items) if items.first().is_some_and(Value::is_string) => Ok(value_text(&items[0])),
        list => match &messages(key, &list)?[..] {
            [only] if only.role == "assistant" => Ok(only.content.clone()),
            several => Err(format!("`{key}` has {} message(s); expected one of the assistant", several.len())),
        },
    }
}

fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into() }
}

fn messages(key: &str, value: &Value) -> Result<Vec<Message>, String> {
    let expected = "expected a list of messages with `role` and `content`";
    let list = match value {
        Value::Array(list) if list.is_empty() => return Err(format!("`{key}` is empty; {expected}")),
        Value::Array(list) => list,
        _ => return Err(format!("`{key}` is no list; {expected}")),
    };
    let read = |(index, item): (usize, &Value)| {
        let text = |name: &str| item.get(name).and_then(Value::as_str);
        match (text("role"), text("content")) {
            (Some(role @ ("system" | "user" | "assistant")), Some(content)) => Ok(message(role, content)),
            (Some(role), Some(_)) => {
                Err(format!("`{key}[{index}].role` is `{role}`; expected `system`, `user` or `assistant`"))
            }
            _ => Err(format!("`{key}[{index}]` lacks `role` or `content` as text; {expected}")),
        }
    };
    list.iter().enumerate().map(read).collect()
}

/// Checks that user and assistant alternate after at most one system message, and that the last message is the user's.
fn check_order(prompt: &[Message], key: &str) -> Result<(), String> {
    let first = usize::from(prompt.first().is_some_and(|first| first.role == "system"));
    for (index, message) in prompt.iter().enumerate().skip(first) {
        let expected = if (index - first).is_multiple_of(2) { "user" } else { "assistant" };
        if message.role != expected {
            let order = "user and assistant take turns, after one system message at most";
            return Err(format!("`{key}[{index}].role` is `{}`; expected `{expected}`: {order}", message.role));
        }
    }
    match prompt.last() {
        Some(last) if last.role == "user" => Ok(()),
        _ => Err(format!("`{key}` does not ask anything: expected a message of the user before the response")),
    }
}

/// `system` and the pairs of `history`: query and response of earlier turns.
fn history(row: &mut Object) -> Result<Vec<Message>, String> {
    const NO_PAIRS: &str = "`history` is no list of pairs of texts; expected query and response of each earlier turn";
    let mut prompt = Vec::new();
    match row.remove("system") {
        None => {}
        Some(Value::String(system)) => prompt.push(message("system", &system)),
        Some(_) => return Err("`system` is no text; expected the text of the system message".into()),
    }
    let turns = match row.remove("history") {
        None => Vec::new(),
        Some(Value::Array(turns)) => turns,
        Some(_) => return Err(NO_PAIRS.into()),
    };
    for turn in &turns {
        match turn.as_array().map(Vec::as_slice) {
            Some([Value::String(query), Value::String(response)]) => {
                prompt.extend([message("user", query), message("assistant", response)]);
            }
            _ => return Err(NO_PAIRS.into()),
        }
    }
    Ok(prompt)
}

/// The query that `querl export` writes into a row: in `querl`, or in verl's `extra_info.querl`.
fn label(row: &mut Object) -> Result<Option<InlineQuery>, String> {
    let info = row.get_mut("extra_info").and_then(Value::as_object_mut);
    let of_verl = info.and_then(|info| info.remove("querl")).filter(|label| !label.is_null());
    let Some(value) = row.remove("querl").or(of_verl) else { return Ok(None) };
    match RewardQuery::of_label(&value) {
        Ok(RewardQuery::Inline(query)) => Ok(Some(*query)),
        Ok(RewardQuery::Id(id)) => Err(format!(
            "`querl` is `{id}`, the id of a query in a run; expected the query itself, as querl export writes it"
        )),
        Err(problem) => Err(format!("`querl`: {problem}")),
    }
}

/// The text of the last message.
fn asked(prompt: &[Message]) -> String {
    prompt.last().map(|last| last.content.clone()).unwrap_or_default()
}

/// The messages of user and assistant before the last one, one after another.
fn earlier_turns(prompt: &[Message]) -> String {
    let earlier = prompt.split_last().map_or(&[][..], |(_, earlier)| earlier);
    let turns = earlier.iter().filter(|turn| turn.role != "system");
    turns.map(|turn| format!("{}: {}", turn.role, turn.content)).collect::<Vec<_>>().join("\n")
}

/// Objects whose keys are columns.
const NESTED: [&str; 3] = ["extra_info", "metadata", "reward_model"];

/// The other keys, and those within [`NESTED`] by their own names.
fn columns(mut row: Object) -> Vec<(String, TableCell)> {
    if let Some(Value::Object(model)) = row.get_mut("reward_model") {
        model.remove("style");
    }
    let (mut columns, mut nested) = (Vec::<(String, TableCell)>::new(), Vec::new());
    for (name, value) in row {
        match value {
            Value::Object(fields) if NESTED.contains(&name.as_str()) => nested.extend(fields),
            value => columns.push((name, cell(&value))),
        }
    }
    for (name, value) in nested.into_iter().filter(|(_, value)| !value.is_null()) {
        if !columns.iter().any(|(known, _)| *known == name) {
            columns.push((name, cell(&value)));
        }
    }
    columns
}

fn cell(value: &Value) -> TableCell {
    TableCell { text: value_text(value), value: typed(value, CellForm::Typed) }
}

fn cell_of(value: &ColumnValue) -> TableCell {
    let item_text = |item: &Scalar| match item {
        Scalar::Flag(flag) => flag.to_string(),
        Scalar::Number(number) => number.to_string(),
        Scalar::Text(text) => text.clone(),
    };
    let text = match value {
        ColumnValue::Text(text) => return text.clone().into(),
        ColumnValue::Flag(flag) => flag.to_string(),
        ColumnValue::Number(number) => number.to_string(),
        ColumnValue::Items(items) => items.iter().map(item_text).collect::<Vec<_>>().join(","),
    };
    TableCell { text, value: Some(value.clone()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(row: Value) -> Result<DatasetRecord, String> {
        parse(row.as_object().unwrap().clone())
    }

    fn roles(prompt: &[Message]) -> Vec<&str> {
        prompt.iter().map(|message| message.role.as_str()).collect()
    }

    fn value(record: &DatasetRecord, name: &str) -> Option<ColumnValue> {
        record.columns.iter().find(|(known, _)| known == name)?.1.clone().into_value()
    }

    #[test]
    fn messages_end_with_the_completion_and_earlier_turns_are_the_history() {
        let turns =
            [("system", "s"), ("user", "鱼油"), ("assistant", "好"), ("user", "一天几粒"), ("assistant", "鱼油 用量")];
        let messages: Vec<Value> = turns.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
        let whole = record(json!({ "messages": messages, "loss": null, "shop": "五家", "price": 2.5 })).unwrap();
        assert_eq!(roles(&whole.prompt), ["system", "user", "assistant", "user"]);
        assert_eq!(whole.completion.as_deref(), Some("鱼油 用量"));
        assert_eq!(whole.texts, ["一天几粒", "", "user: 鱼油\nassistant: 好", ""]);
        assert_eq!(value(&whole, "price"), Some(ColumnValue::Number(2.5)));
        assert_eq!((value(&whole, "shop"), value(&whole, "loss")), (Some(ColumnValue::Text("五家".into())), None));
        let asked_alone = record(json!({ "messages": messages[..4] })).unwrap();
        assert_eq!((asked_alone.prompt, asked_alone.completion), (whole.prompt, None));
    }

    #[test]
    fn query_and_response_of_ms_swift_are_read_with_system_and_history() {
        let row = json!({ "system": "s", "history": [["鱼油", "好"]], "query": "一天几粒", "response": "鱼油 用量" });
        let read = record(row).unwrap();
        assert_eq!(roles(&read.prompt), ["system", "user", "assistant", "user"]);
        assert_eq!((read.completion.as_deref(), read.texts[0].as_str()), (Some("鱼油 用量"), "一天几粒"));
        let first = record(json!({ "query": "q", "response": ["a", "b"] })).unwrap();
        assert_eq!(first.completion.as_deref(), Some("a"));
    }

    #[test]
    fn prompt_and_completion_of_trl_are_texts_or_messages() {
        let texts = record(json!({ "prompt": "q", "completion": "r" })).unwrap();
        assert_eq!((texts.prompt, texts.completion), (vec![message("user", "q")], Some("r".to_owned())));
        let user = json!({ "role": "user", "content": "q" });
        let answer = json!({ "role": "assistant", "content": "r" });
        let messages = record(json!({ "prompt": [user], "completion": [answer] })).unwrap();
        assert_eq!((messages.prompt.len(), messages.completion.as_deref()), (1, Some("r")));
        assert_eq!(record(json!({ "prompt": [user] })).unwrap().completion, None);
    }

    #[test]
    fn a_row_of_verl_has_its_ground_truth_and_extra_info_as_columns() {
        let row = json!({
            "prompt": [{ "role": "user", "content": "q" }], "data_source": "nq", "ability": null,
            "reward_model": { "style": "rule", "ground_truth": ["p1", "p2"] },
            "extra_info": { "index": 7, "split": "train", "answer": null },
        });
        let read = record(row).unwrap();
        let names: Vec<&str> = read.columns.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["data_source", "index", "split", "ground_truth"]);
        let items = ["p1", "p2"].map(|id| Scalar::Text(id.into())).to_vec();
        assert_eq!(value(&read, "ground_truth"), Some(ColumnValue::Items(items)));
        assert_eq!((read.completion, read.has_label), (None, false));
    }

    #[test]
    fn the_label_of_an_export_replaces_what_the_prompt_says() {
        let label = r#"{"query": "一天几粒", "user_profile": "52岁", "gold_ids": ["p1", "p2"], "baseline": "鱼油 用量",
                        "columns": {"shop": "五家", "price": 2.5, "tags": ["a", true]}}"#;
        let prompt = json!([{ "role": "user", "content": "改写：一天几粒" }]);
        let of_trl = record(json!({ "prompt": prompt, "querl": label })).unwrap();
        let of_verl = record(json!({
            "prompt": prompt, "data_source": "t", "reward_model": { "ground_truth": "4cf6" },
            "extra_info": { "index": 0, "querl": label },
        }));
        for read in [of_trl, of_verl.unwrap()] {
            assert_eq!(read.texts, ["一天几粒", "52岁", "", "p1,p2"]);
            assert_eq!((read.completion.as_deref(), read.has_label), (Some("鱼油 用量"), true));
            let names: Vec<&str> = read.columns.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, ["shop", "price", "tags"], "in the order of the text, and no others");
            let items = vec![Scalar::Text("a".into()), Scalar::Flag(true)];
            assert_eq!(value(&read, "tags"), Some(ColumnValue::Items(items)));
        }
    }

    #[test]
    fn the_dataset_of_a_run_is_read_with_its_metadata() {
        let metadata = json!({ "original_query": "q", "user_profile": "52岁", "gold_ids": ["p1"], "row": 2 });
        let messages = json!([{ "role": "user", "content": "改写：q" }, { "role": "assistant", "content": "r" }]);
        let read = record(json!({ "messages": messages, "metadata": metadata })).unwrap();
        assert_eq!(value(&read, "original_query"), Some(ColumnValue::Text("q".into())));
        assert_eq!(read.texts[0], "改写：q");
    }

    /// Symptom: the rewrites of a run with edits were `=` and `& TEXT`, and were searched literally.
    #[test]
    fn edits_of_a_run_are_read_as_search_texts() {
        let metadata = json!({ "id": "4cf6", "row": 2, "original_query": "怎么吃", "history_summary": "问过鱼油", "group": "怎么吃",
                               "top1_score": null, "source": "recorded", "rewrite_form": "edit" });
        let read = |completion: &str, metadata: &Value| {
            let messages =
                json!([{ "role": "user", "content": "改写：怎么吃" }, { "role": "assistant", "content": completion }]);
            record(json!({ "messages": messages, "metadata": metadata })).map(|read| read.completion.unwrap())
        };
        let of_form = |form: Value| {
            let mut metadata = metadata.clone();
            metadata["rewrite_form"] = form;
            metadata
        };
        let (full, mut earlier) = (of_form("full".into()), metadata.clone());
        earlier.as_object_mut().unwrap().remove("rewrite_form").unwrap();
        let mut expanded = metadata.clone();
        expanded["expansion"] = "鱼油 剂量".into();
        assert_eq!(read("& 用法", &expanded).unwrap(), "鱼油 剂量 用法");
        let foreign = json!({ "original_query": "怎么吃", "source": "web", "rewrite_form": "edit" });
        for (completion, whole) in [
            ("=", "怎么吃"),
            ("+ 用法", "怎么吃 用法"),
            ("&", "怎么吃 问过鱼油"),
            ("& 用法", "怎么吃 问过鱼油 用法"),
            ("鱼油 用法", "鱼油 用法"),
        ] {
            for of_run in [&metadata, &earlier] {
                assert_eq!(read(completion, of_run).unwrap(), whole, "{of_run}");
            }
            for other in [&full, &foreign, &Value::Null] {
                assert_eq!(read(completion, other).unwrap(), completion, "{other}");
            }
        }
        let nothing = read("+", &metadata).unwrap_err();
        assert_eq!(nothing, "the response adds nothing to the query; write one, or leave the row out");
    }

    #[test]
    fn what_cannot_be_read_is_said_in_one_sentence() {
        let error = |row: Value| record(row).unwrap_err();
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        assert_eq!(
            error(json!({ "text": "x", "label": 1 })),
            "has no `messages`, `prompt` or `query`; found `label`, `text`; expected messages, or query and response (ms-swift), or \
             prompt and completion (TRL), or prompt with reward_model (verl)"
        );
        let order = error(json!({ "messages": [message("system", "s"), message("assistant", "r")] }));
        assert_eq!(order, "`messages` does not ask anything: expected a message of the user before the response");
        let twice = error(json!({ "messages": [message("user", "a"), message("user", "b")] }));
        let expected = "`messages[1].role` is `user`; expected `assistant`: user and assistant take";
        assert!(twice.starts_with(expected), "{twice}");
        let tool = error(json!({ "messages": [message("tool", "a")] }));
        assert_eq!(tool, "`messages[0].role` is `tool`; expected `system`, `user` or `assistant`");
        let parts = error(json!({ "prompt": [{ "role": "user", "content": [{ "type": "text", "text": "q" }] }] }));
        assert!(parts.starts_with("`prompt[0]` lacks `role` or `content` as text"), "{parts}");
        for empty in [json!({ "prompt": "q", "completion": " " }), json!({ "query": "q", "response": "" })] {
            assert!(error(empty).starts_with("the response of the assistant is empty"));
        }
        // Regression: such rows were left out without being counted.
        for empty in [json!({ "prompt": " ", "completion": "r" }), json!({ "messages": [message("user", "")] })] {
            assert_eq!(error(empty), "the last message of the user is empty; write one, or leave the row out");
        }
        // Regression: these were read as prompts without a completion, and as messages alone.
        let pair = error(json!({ "prompt": "q", "chosen": "a", "rejected": "b" }));
        assert!(pair.starts_with("is a preference pair (`chosen`), which is not read"), "{pair}");
        // A flag of a prompt without a completion.
        assert_eq!(record(json!({ "prompt": "q", "chosen": true })).unwrap().completion, None);
        let both = error(json!({ "messages": [message("user", "q")], "prompt": "q", "completion": "r" }));
        assert_eq!(both, "has both `messages` and `completion`; leave one of them out");
        let two = json!({ "prompt": "q", "completion": [message("user", "a"), message("assistant", "b")] });
        assert_eq!(error(two), "`completion` has 2 message(s); expected one of the assistant");
        assert!(error(json!({ "query": "q", "history": "[]" })).starts_with("`history` is no list of pairs"));
        assert!(error(json!({ "query": 7, "response": "r" })).starts_with("`query` is no text; expected"));
        assert!(error(json!({ "query": "q", "system": ["s"] })).starts_with("`system` is no text; expected"));
        let id = error(json!({ "prompt": "q", "querl": "4cf6" }));
        assert!(id.starts_with("`querl` is `4cf6`, the id of a query in a run"), "{id}");
    }
}
