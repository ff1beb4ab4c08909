//! The dataset of a run as prompts with their queries, which the reward functions send back to querl.

use crate::environment::RowColumns;
use querl_core::records::{Columns, DatasetRow, Message, QueryRow, ValidatedRecord};
use serde::Serialize;
use std::collections::HashMap;

/// One prompt, with what a reward needs of its query.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct PromptRow {
    #[serde(skip)]
    pub(super) id: String,
    pub(super) prompt: Vec<Message>,
    /// JSON text of [`querl_core::scoring::InlineQuery`].
    pub(super) querl: String,
}

/// The teacher's rewrites by the id of their query.
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
    columns: &'a Columns,
    baseline: Option<&'a str>,
}

fn query_text(query: &QueryRow, columns: &Columns, baseline: Option<&str>) -> String {
    let text = QueryText {
        query: &query.original_query,
        user_profile: &query.user_profile,
        history_summary: &query.history_summary,
        gold_ids: &query.gold_ids,
        columns,
        baseline,
    };
    serde_json::to_string(&text).expect("texts, numbers and lists have a JSON form")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::{dataset_row, validated};
    use querl_core::records::ColumnValue;
    use querl_core::scoring::RewardQuery;
    use serde_json::{Value, json};

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
        ]);
        let text = query_text(&dataset_row("a").metadata.query, &columns, None);
        assert_eq!(inline(&text).columns, columns);
    }
}
