#![allow(clippy::unwrap_used)]

use super::*;
use std::path::PathBuf;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, content: &str) -> DataConfig {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        config(path)
    }

    fn workbook(&self, rows: &[&[&str]]) -> DataConfig {
        let mut workbook = rust_xlsxwriter::Workbook::new();
        let sheet = workbook.add_worksheet().set_name("题目").unwrap();
        for (row, cells) in (0..).zip(rows) {
            for (column, cell) in (0..).zip(*cells) {
                sheet.write(row, column, *cell).unwrap();
            }
        }
        let path = self.0.path().join("测试集.xlsx");
        workbook.save(&path).unwrap();
        config(path)
    }
}

fn config(input: PathBuf) -> DataConfig {
    serde_json::from_value(serde_json::json!({ "input": input })).unwrap()
}

fn message(config: &DataConfig) -> String {
    read_table(config).unwrap_err().to_string()
}

#[test]
fn workbook_rows_keep_their_numbers_and_empty_queries_are_recorded() {
    let folder = Folder::new();
    let table = read_table(&folder.workbook(&[
        &["问题", "用户画像", "历史摘要", "相关文档"],
        &["鱼油怎么吃", "52岁", "", "p11-usage, p11-suitable；s01"],
        &["", "只有画像", "", ""],
        &[" 贵吗？ ", "", "问过鱼油", ""],
        &["鱼油怎么吃", "52岁", "", ""],
    ]))
    .unwrap();
    assert_eq!(table.rows.iter().map(|row| row.row).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(table.rows[0].gold_ids, ["p11-usage", "p11-suitable", "s01"]);
    assert_eq!(table.rows[0].group, "p11-suitable,p11-usage,s01");
    assert_eq!((table.rows[1].original_query.as_str(), table.rows[1].group.as_str()), ("贵吗？", "贵吗"));
    assert_eq!((table.empty_rows.as_slice(), table.repeated_rows.as_slice()), ([3].as_slice(), [5].as_slice()));
    let note = table.skipped_note().unwrap();
    assert_eq!(note, "rows passed over: 1 with an empty query (row 3); 1 repeating an earlier row (row 5)");
}

#[test]
fn same_rows_read_alike_from_all_formats() {
    let folder = Folder::new();
    let xlsx = folder.workbook(&[&["问题", "用户画像"], &["怎么吃", "老人"]]);
    let csv = folder.file("a.csv", "\u{feff}问题,用户画像\n怎么吃,老人\n");
    let jsonl = folder.file("a.jsonl", "{\"问题\": \"怎么吃\", \"用户画像\": \"老人\", \"其他\": 1}\n");
    let ids = [xlsx, csv, jsonl].map(|config| read_table(&config).unwrap().rows[0].id.clone());
    assert_eq!(ids, [query_id("怎么吃", "老人", ""), query_id("怎么吃", "老人", ""), query_id("怎么吃", "老人", "")]);
    assert_ne!(ids[0], query_id("怎么吃", "", "老人"), "profile and history are not the same thing");
}

#[test]
fn csv_rows_are_counted_alike_whatever_ends_a_line() {
    let folder = Folder::new();
    for end in ["\n", "\r\n"] {
        let config = folder.file("a.csv", &["问题", "怎么吃", "几天到", ""].join(end));
        let rows: Vec<usize> = read_table(&config).unwrap().rows.iter().map(|row| row.row).collect();
        assert_eq!(rows, [2, 3], "{end:?}");
    }
}

#[test]
fn missing_query_column_names_sheet_and_columns_found() {
    let folder = Folder::new();
    let said = message(&folder.workbook(&[&["提问", "用户画像"], &["怎么吃", ""]]));
    let expected = "测试集.xlsx: sheet `题目`: no column `问题` (data.query_column); found `提问`, `用户画像`; name one of these in data.query_column";
    assert!(said.ends_with(expected), "{said}");
}

#[test]
fn group_column_that_is_named_must_be_there() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题,批次\n甲,1\n乙,1\n");
    config.group_column = Some("组".into());
    assert!(message(&config).contains("no column `组` (data.group_column); found `问题`, `批次`"));
    config.group_column = Some("批次".into());
    assert!(read_table(&config).unwrap().rows.iter().all(|row| row.group == "1"));
}

#[test]
fn order_and_separators_of_gold_ids_make_no_difference_to_the_group() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题,相关文档\n甲,\"p1,p2\"\n乙,p2，p1\n丙,p1\n丁,；\n");
    let groups = |config: &DataConfig| -> Vec<String> {
        read_table(config).unwrap().rows.into_iter().map(|row| row.group).collect()
    };
    assert_eq!(groups(&config), ["p1,p2", "p1,p2", "p1", "丁"]);
    config.group_column = Some("相关文档".into());
    assert_eq!(groups(&config), ["p1,p2", "p1,p2", "p1", "丁"]);
}

#[test]
fn rows_that_say_the_same_share_a_group_and_other_histories_do_not() {
    let folder = Folder::new();
    let rows = "这个咋喝,问过鱼油,p2\n这个咋喝？,问过鱼油。,p1\n这个咋喝,问过奶粉,p3\n别的,,p2\n";
    let config = folder.file("a.csv", &format!("问题,历史摘要,相关文档\n{rows}"));
    let table = read_table(&config).unwrap();
    assert_eq!(table.rows.iter().map(|row| row.group.as_str()).collect::<Vec<_>>(), ["p1", "p1", "p3", "p1"]);
}

#[test]
fn column_that_is_named_must_be_there_and_a_default_one_may_lack() {
    let folder = Folder::new();
    let config = folder.file("a.csv", "问题,标准\n甲,1\n");
    assert_eq!(read_table(&config).unwrap().rows[0].gold_ids, [""; 0]);
    for key in ["profile_column", "history_column", "gold_column"] {
        let named = serde_json::json!({ "input": config.input, key: "标准答案" });
        let said = message(&serde_json::from_value(named).unwrap());
        assert!(said.contains(&format!("no column `标准答案` (data.{key}); found `问题`, `标准`")), "{said}");
    }
}

#[test]
fn rows_of_json_lines_are_counted_with_the_empty_lines_between() {
    let folder = Folder::new();
    let config = folder.file("a.jsonl", "\n{\"问题\": \"甲\"}\n\n \n{\"问题\": \"乙\"}\n");
    let table = read_table(&config).unwrap();
    assert_eq!(table.rows.iter().map(|row| row.row).collect::<Vec<_>>(), [2, 5]);
}

#[test]
fn table_without_a_usable_row_is_an_error() {
    let folder = Folder::new();
    let said = message(&folder.file("a.csv", "问题,用户画像\n,老人\n"));
    assert!(said.ends_with("a.csv: no row has a query in column `问题`; 1 row(s) looked at"), "{said}");
}

#[test]
fn unreadable_files_say_what_is_wrong() {
    let folder = Folder::new();
    assert!(message(&folder.file("a.xlsx", "no zip")).contains("a.xlsx: not a readable xlsx workbook"));
    assert!(message(&folder.file("a.pdf", "")).contains("expected a name that ends in .xlsx, .csv or .jsonl"));
    assert!(message(&folder.file("a.jsonl", "{\"问题\": \"甲\"}\nx\n")).contains("a.jsonl:2: not a valid record"));
    let absent = config(folder.0.path().join("b.xlsx"));
    assert!(message(&absent).ends_with("b.xlsx: there is no such file; check data.input"));
}
