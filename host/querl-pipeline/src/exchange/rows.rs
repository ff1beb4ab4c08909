//! Exported dataset rows: prompts with the queries that the reward functions send to querl.

use crate::environment::RowColumns;
use querl_core::records::{ColumnValue, Columns, DatasetRow, Message, QueryRow, Scalar, ValidatedRecord};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::collections::HashMap;

/// One prompt, with the query data that a reward needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct PromptRow {
    #[serde(skip)]
    pub(super) id: String,
    pub(super) prompt: Vec<Message>,
    /// The query as JSON text of [`querl_core::scoring::InlineQuery`].
    pub(super) querl: String,
}

/// The teacher's rewrites by query id.
pub(super) struct Rewrites(HashMap<String, String>);

impl Rewrites {
    pub(super) fn of(validated: Vec<ValidatedRecord>) -> Self {
        let rewrite = |record: ValidatedRecord| Some((record.rewritten.query.id, record.rewritten.rewrite.ok()?.text));
        Self(validated.into_iter().filter_map(rewrite).collect())
    }
}

pub(super) fn prompt_rows(dataset: &[DatasetRow], columns: &RowColumns, rewrites: &Rewrites) -> Vec<PromptRow> {
    let row = |row: &DatasetRow| {
        let query = &row.metadata.query;
        let baseline = rewrites.0.get(&query.id).map(String::as_str);
        let querl = query_text(query, columns.of(query), baseline);
        PromptRow { id: query.id.clone(), prompt: row.prompt().to_vec(), querl }
    };
    dataset.iter().map(row).collect()
}

/// [`querl_core::scoring::InlineQuery`]; columns keep the order of the table.
#[derive(Serialize)]
struct QueryText<'a> {
    query: &'a str,
    user_profile: &'a str,
    history_summary: &'a str,
    gold_ids: &'a [String],
    columns: ExportedColumns<'a>,
    baseline: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expansion: Option<&'a str>,
}

/// An object in the order of the table, with integers as integers: `7`, not `7.0`.
struct ExportedColumns<'a>(&'a Columns);

impl Serialize for ExportedColumns<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(Columns(columns)) = self;
        serializer.collect_map(columns.iter().map(|(name, value)| (name, json_value(value))))
    }
}

fn json_value(value: &ColumnValue) -> Value {
    let item = |item: &Scalar| match item {
        Scalar::Number(number) => json_number(*number),
        other => json!(other),
    };
    match value {
        ColumnValue::Number(number) => json_number(*number),
        ColumnValue::Items(items) => items.iter().map(item).collect(),
        other => json!(other),
    }
}

fn json_number(number: f64) -> Value {
    // Integers of tables are numbers up to 2^53, and texts up to 2^64.
    if number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0 { json!(number as i64) } else { json!(number) }
}

fn query_text(query: &QueryRow, columns: &Columns, baseline: Option<&str>) -> String {
    let text = QueryText {
        query: &query.original_query,
        user_profile: &query.user_profile,
        history_summary: &query.history_summary,
        gold_ids: &query.gold_ids,
        columns: ExportedColumns(columns),
        baseline,
        expansion: query.expansion.as_deref(),
    };
    serde_json::to_string(&text).expect("texts, numbers and lists have a JSON form")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::{dataset_row, validated};
    use querl_core::scoring::RewardQuery;

    fn inline(text: &str) -> querl_core::scoring::InlineQuery {
        match RewardQuery::of_label(&Value::String(text.to_owned())).unwrap() {
            RewardQuery::Inline(query) => *query,
            RewardQuery::Id(id) => panic!("{id}"),
        }
    }

    #[test]
    fn a_row_has_its_prompt_and_its_query_with_the_rewrite_of_the_teacher() {
        let rewrites = Rewrites::of(vec![validated("a", Ok("better")), validated("b", Err("no answer"))]);
        let rows = prompt_rows(&[dataset_row("a"), dataset_row("b")], &RowColumns::default(), &rewrites);
        assert_eq!((rows[0].id.as_str(), rows[0].prompt.len()), ("a", 1));
        let [first, second] = [inline(&rows[0].querl), inline(&rows[1].querl)];
        assert_eq!((first.query.as_str(), first.baseline.as_deref()), ("query a", Some("better")));
        assert_eq!((second.query.as_str(), second.baseline), ("query b", None));
        let line = serde_json::to_value(&rows[0]).unwrap();
        assert_eq!(line["prompt"][0], json!({ "role": "user", "content": "a" }));
        assert_eq!(line.as_object().unwrap().len(), 2);
    }

    #[test]
    fn columns_are_read_back_with_their_types() {
        let columns = Columns(vec![
            ("shop".into(), ColumnValue::Text("五家".into())),
            ("price".into(), ColumnValue::Number(2.5)),
            ("sku".into(), ColumnValue::Number(73_228_476_468.0)),
            ("sizes".into(), ColumnValue::Items(vec![Scalar::Number(7.0), Scalar::Number(1e20), Scalar::Flag(true)])),
        ]);
        let text = query_text(&dataset_row("a").metadata.query, &columns, None);
        assert_eq!(inline(&text).columns, columns);
        // Regression: integers were written as 73228476468.0.
        assert!(text.contains(r#""sku":73228476468,"sizes":[7,1e+20,true]"#), "{text}");
    }
}
