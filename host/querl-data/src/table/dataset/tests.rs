//! Datasets as tables, and the parts of their rows that a run reads.

use crate::dataset::export::verl::{VerlRow, write_verl_rows};
use crate::dataset::records::Rows;
use crate::dataset::splits::RowSplits;
use crate::table::{ColumnReader, DatasetReader, open_queries};
use querl_core::config::DataConfig;
use querl_core::records::{ColumnValue, Message, QueryRow, Split};
use serde_json::{Value, json};
use std::path::Path;

fn config(dataset: Value, others: Value) -> DataConfig {
    let mut config = json!({ "dataset": dataset });
    config.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
    serde_json::from_value(config).unwrap()
}

fn rows(config: &DataConfig) -> Vec<QueryRow> {
    open_queries(config).unwrap().read().unwrap().collect::<Result<_, _>>().unwrap()
}

fn write(path: &Path, rows: &[Value]) {
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    std::fs::write(path, lines.join("\n")).unwrap();
}

fn exchange(query: &str, completion: &str) -> Value {
    let (user, answer) =
        (json!({ "role": "user", "content": query }), json!({ "role": "assistant", "content": completion }));
    json!({ "messages": [user, answer] })
}

#[test]
fn rows_are_numbered_through_the_files_and_each_file_is_a_split() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(&path("train.jsonl"), &[exchange("鱼油怎么吃", "鱼油 用法"), exchange("胶原蛋白", "胶原蛋白肽")]);
    write(&path("test.jsonl"), &[exchange("鱼油怎么吃", "鱼油 用法"), exchange("维生素", "维生素 C")]);
    let config = config(json!({ "train": path("train.jsonl"), "test": path("test.jsonl") }), json!({}));
    let table = open_queries(&config).unwrap();
    assert_eq!((table.findings().n_rows, table.findings().repeated.n), (4, 1), "a row of test that train has");
    let rows = rows(&config);
    assert_eq!(rows.iter().map(|row| row.row).collect::<Vec<_>>(), [1, 2, 4]);
    let splits = RowSplits::of(rows.iter().map(|row| Ok(row.group.clone())), &config).unwrap();
    assert_eq!(
        [0, 1, 2].map(|index| splits.split_of(&rows[index]).unwrap()),
        [Split::Train, Split::Train, Split::Test]
    );
    let mut dataset = DatasetReader::open(&config).unwrap();
    assert_eq!(dataset.read(&rows[0]).unwrap().completion.as_deref(), Some("鱼油 用法"));
    assert_eq!(dataset.read(&rows[2]).unwrap().prompt[0].content, "维生素");
}

#[test]
fn one_file_is_divided_by_the_shares() {
    let (_folder, path) = crate::scratch_file("all.jsonl");
    let queries: Vec<Value> = (0..20).map(|number| exchange(&format!("问题{number}"), "改写")).collect();
    write(&path, &queries);
    let config = config(json!({ "train": path }), json!({ "split": [0.5, 0.25, 0.25] }));
    let rows = rows(&config);
    let splits = RowSplits::of(rows.iter().map(|row| Ok(row.group.clone())), &config).unwrap();
    let n = |split| rows.iter().filter(|row| splits.split_of(row) == Some(split)).count();
    assert_eq!(Split::ALL.map(n), [10, 5, 5]);
}

#[test]
fn columns_of_the_dataset_stand_for_profile_and_gold_ids() {
    let (_folder, path) = crate::scratch_file("train.jsonl");
    let row = json!({ "prompt": "改写：鱼油", "completion": "深海鱼油", "user_profile": "52岁", "passages": ["p1", "p2"], "price": 2.5 });
    write(
        &path,
        &[
            row,
            json!({ "prompt": "q", "completion": "r", "question": "钙片" }),
            json!({ "prompt": "维生素", "question": " " }),
        ],
    );
    let config = config(json!({ "train": path }), json!({ "gold_column": "passages", "query_column": "question" }));
    let rows = rows(&config);
    // Regression: a blank column dropped its row without being counted.
    let queries: Vec<&str> = rows.iter().map(|row| row.original_query.as_str()).collect();
    assert_eq!(queries, ["改写：鱼油", "钙片", "维生素"]);
    assert_eq!(
        (rows[0].user_profile.as_str(), &rows[0].gold_ids[..]),
        ("52岁", &["p1".to_owned(), "p2".to_owned()][..])
    );
    let mut columns = ColumnReader::open(&config).unwrap();
    assert_eq!(columns.read(&rows[0]).unwrap().0, [("price".to_owned(), ColumnValue::Number(2.5))]);
    assert!(columns.read(&rows[1]).unwrap().is_empty());
}

#[test]
fn what_an_export_to_verl_wrote_is_read_back_completely() {
    let (_folder, path) = crate::scratch_file("train.parquet");
    let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    let prompt = vec![message("system", "改写"), message("user", "提问：一天几粒")];
    let querl = r#"{"query":"一天几粒","user_profile":"52岁","history_summary":"问过鱼油","gold_ids":["p1","p2"],
                    "columns":{"shop":"五家","price":2.5,"is_new":true},"baseline":"鱼油 用量"}"#;
    let row = VerlRow {
        prompt: prompt.clone(),
        data_source: "fivedoctors".into(),
        ground_truth: "4cf6".into(),
        index: 0,
        split: "train".into(),
        querl: querl.into(),
    };
    let other = VerlRow { querl: r#"{"query":"贵吗","baseline":null}"#.into(), ..row.clone() };
    write_verl_rows(&path, &[row, other]).unwrap();
    let config = config(json!({ "train": path }), json!({}));
    let rows = rows(&config);
    let QueryRow { original_query, user_profile, history_summary, gold_ids, .. } = &rows[0];
    assert_eq!([original_query, user_profile, history_summary], ["一天几粒", "52岁", "问过鱼油"]);
    assert_eq!((gold_ids.join(","), rows[1].original_query.as_str()), ("p1,p2".to_owned(), "贵吗"));
    let mut dataset = DatasetReader::open(&config).unwrap();
    let first = dataset.read(&rows[0]).unwrap();
    assert_eq!((first.prompt, first.completion.as_deref()), (prompt, Some("鱼油 用量")));
    assert_eq!(dataset.read(&rows[1]).unwrap().completion, None);
    let mut columns = ColumnReader::open(&config).unwrap();
    let expected = [
        ("shop".to_owned(), ColumnValue::Text("五家".into())),
        ("price".to_owned(), ColumnValue::Number(2.5)),
        ("is_new".to_owned(), ColumnValue::Flag(true)),
    ];
    assert_eq!(columns.read(&rows[0]).unwrap().0, expected);
}

#[test]
fn a_row_that_cannot_be_read_is_named_with_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let error = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let error = open_queries(&config(json!({ "train": path }), json!({}))).unwrap_err().to_string();
        error.replace(&format!("{}/", folder.path().display()), "")
    };
    let good = exchange("q", "r");
    let unknown = error("a.jsonl", &format!("{good}\n\n{{\"text\": 1}}"));
    let expected = "a.jsonl:3: has no `messages`, `prompt` or `query`; found `text`; expected";
    assert!(unknown.starts_with(expected), "{unknown}");
    assert!(error("a.jsonl", &format!("{good}\n[1]")).starts_with("a.jsonl:2: not a valid record"));
    assert_eq!(error("a.jsonl", "\n"), "a.jsonl: holds no row; expected a JSON object a line, or rows of parquet");
    let csv = "a.csv: not a dataset that can be read; expected a name that ends in .jsonl or .parquet";
    assert_eq!(error("a.csv", "query,response\n"), csv);
    assert!(error("a.parquet", "PAR1").starts_with("a.parquet: not a parquet file that can be read"));
    assert_eq!(error("b.jsonl", "PAR1"), "b.jsonl: by its first bytes the file is parquet; give it that ending");
}

#[test]
fn a_dataset_that_changed_meanwhile_gives_no_row_the_completion_of_another() {
    let (_folder, path) = crate::scratch_file("train.jsonl");
    write(&path, &[exchange("鱼油", "深海鱼油"), exchange("钙片", "碳酸钙")]);
    let config = config(json!({ "train": path }), json!({}));
    let rows = rows(&config);
    write(&path, &[exchange("钙片", "碳酸钙"), exchange("鱼油", "深海鱼油")]);
    let error = DatasetReader::open(&config).unwrap().read(&rows[0]).unwrap_err().to_string();
    assert!(error.contains("row 1 of the dataset is not the query of the run"), "{error}");
}
