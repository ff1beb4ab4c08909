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
    open_queries(config).unwrap_err().to_string()
}

fn rows(config: &DataConfig) -> Vec<QueryRow> {
    open_queries(config).unwrap().read().unwrap().collect::<Result<_, _>>().unwrap()
}

fn named(list: &RowList) -> Vec<(usize, Option<usize>)> {
    assert_eq!(list.n, list.rows.len());
    list.rows.iter().map(|named| (named.row, named.earlier)).collect()
}

#[test]
fn workbook_rows_keep_their_numbers_and_empty_queries_are_recorded() {
    let folder = Folder::new();
    let config = folder.workbook(&[
        &["问题", "用户画像", "历史摘要", "相关文档"],
        &["鱼油怎么吃", "52岁", "", "p11-usage, p11-suitable；s01"],
        &["", "只有画像", "", ""],
        &[" 贵吗？ ", "", "问过鱼油", ""],
        &["鱼油怎么吃", "52岁", "", ""],
    ]);
    let (table, rows) = (open_queries(&config).unwrap(), rows(&config));
    assert_eq!(rows.iter().map(|row| row.row).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(rows[0].gold_ids, ["p11-usage", "p11-suitable", "s01"]);
    assert_eq!(rows[0].group, "p11-suitable,p11-usage,s01");
    assert_eq!((rows[1].original_query.as_str(), rows[1].group.as_str()), ("贵吗？", "贵吗"));
    let findings = table.findings();
    assert_eq!((named(&findings.empty), named(&findings.repeated)), (vec![(3, None)], vec![(5, Some(2))]));
    assert_eq!((findings.n_rows, findings.n_usable, findings.n_groups), (4, 2, 2));
    let note = "rows passed over: 1 with an empty query (row 3); 1 repeating an earlier row (row 5 (like row 2))";
    assert_eq!(findings.notes(), [note]);
}

#[test]
fn same_rows_read_alike_from_all_formats() {
    let folder = Folder::new();
    let xlsx = folder.workbook(&[&["问题", "用户画像"], &["怎么吃", "老人"]]);
    let csv = folder.file("a.csv", "\u{feff}问题,用户画像\n怎么吃,老人\n");
    let tsv = folder.file("a.TSV", "问题\t用户画像\n怎么吃\t老人\n");
    let jsonl = folder.file("a.jsonl", "{\"问题\": \"怎么吃\", \"用户画像\": \"老人\", \"其他\": 1}\n");
    let ids = [xlsx, csv, tsv, jsonl].map(|config| rows(&config).remove(0).id);
    assert_eq!(ids, [(); 4].map(|()| query_id("怎么吃", "老人", "")));
    assert_ne!(ids[0], query_id("怎么吃", "", "老人"), "profile and history are not the same thing");
}

#[test]
fn csv_of_gb18030_reads_as_that_of_utf8() {
    let folder = Folder::new();
    let text = "问题,用户画像\n怎么吃,老人\n";
    let config = folder.file("a.csv", "");
    std::fs::write(&config.input, encoding_rs::GB18030.encode(text).0).unwrap();
    assert_eq!(rows(&config), rows(&folder.file("b.csv", text)));
    assert_eq!(open_queries(&config).unwrap().findings().encoding, Some("GB18030"));
}

#[test]
fn columns_of_this_program_s_own_tables_are_found_under_the_default_names() {
    let folder = Folder::new();
    let text = "original_query,rewritten_query,user_profile,history_summary,gold_ids\n怎么吃,x,老人,问过,p1\n";
    let row = rows(&folder.file("a.csv", text)).remove(0);
    assert_eq!((row.original_query.as_str(), row.user_profile.as_str()), ("怎么吃", "老人"));
    assert_eq!((row.history_summary.as_str(), row.group.as_str()), ("问过", "p1"));
    let both = "original_query,问题\n甲,乙\n";
    assert_eq!(rows(&folder.file("b.csv", both))[0].original_query, "乙");
}

#[test]
fn empty_files_say_so() {
    let folder = Folder::new();
    let expected = "the file is empty; expected a table with a column of queries";
    for name in ["a.xlsx", "a.csv", "a.tsv", "a.jsonl"] {
        assert_eq!(message(&folder.file(name, "")).rsplit_once(": ").unwrap().1, expected, "{name}");
    }
    let said = message(&folder.file("b.csv", "\u{feff}\n"));
    assert!(said.ends_with("b.csv: the file has no header row; expected the names of the columns"), "{said}");
    let said = message(&folder.file("b.jsonl", "\n\n"));
    assert!(said.ends_with("b.jsonl: the file holds no object; expected one JSON object a line"), "{said}");
    let said = message(&folder.workbook(&[&[]]));
    assert!(said.ends_with("sheet `题目`: is empty; expected a header row"), "{said}");
    let said = message(&folder.file("c.csv", "问题\n"));
    assert!(said.contains("c.csv: none of 0 row(s) has a query in column `问题`; fill it"), "{said}");
}

#[test]
fn header_that_was_decoded_says_how() {
    let folder = Folder::new();
    let config = folder.file("a.csv", "");
    std::fs::write(&config.input, encoding_rs::GB18030.encode("提问,画像\n甲,乙\n").0).unwrap();
    let said = message(&config);
    assert!(said.contains("found `提问`, `画像` (read as GB18030); name one"), "{said}");
}

#[test]
fn csv_rows_are_counted_alike_whatever_ends_a_line() {
    let folder = Folder::new();
    for end in ["\n", "\r\n"] {
        let config = folder.file("a.csv", &["问题", "怎么吃", "几天到", ""].join(end));
        let numbers: Vec<usize> = rows(&config).iter().map(|row| row.row).collect();
        assert_eq!(numbers, [2, 3], "{end:?}");
    }
}

#[test]
fn missing_query_column_names_sheet_and_columns_found() {
    let folder = Folder::new();
    let said = message(&folder.workbook(&[&["提问", "用户画像"], &["怎么吃", ""]]));
    let expected = "测试集.xlsx: sheet `题目`: no column `问题` or `original_query` (data.query_column); found `提问`, `用户画像`; name one of these in data.query_column";
    assert!(said.ends_with(expected), "{said}");
}

#[test]
fn group_column_that_is_named_must_be_there() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题,批次\n甲,1\n乙,1\n");
    config.group_column = Some("组".into());
    assert!(message(&config).contains("no column `组` (data.group_column); found `问题`, `批次`"));
    config.group_column = Some("批次".into());
    assert!(rows(&config).iter().all(|row| row.group == "1"));
}

#[test]
fn order_and_separators_of_gold_ids_make_no_difference_to_the_group() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题,相关文档\n甲,\"p1,p2\"\n乙,p2，p1\n丙,p1\n丁,；\n");
    let groups = |config: &DataConfig| -> Vec<String> { rows(config).into_iter().map(|row| row.group).collect() };
    assert_eq!(groups(&config), ["p1,p2", "p1,p2", "p1", "丁"]);
    config.group_column = Some("相关文档".into());
    assert_eq!(groups(&config), ["p1,p2", "p1,p2", "p1", "丁"]);
}

#[test]
fn rows_that_say_the_same_share_a_group_and_other_histories_do_not() {
    let folder = Folder::new();
    let text = "这个咋喝,问过鱼油,p2\n这个咋喝？,问过鱼油。,p1\n这个咋喝,问过奶粉,p3\n别的,,p2\n";
    let config = folder.file("a.csv", &format!("问题,历史摘要,相关文档\n{text}"));
    assert_eq!(rows(&config).iter().map(|row| row.group.as_str()).collect::<Vec<_>>(), ["p1", "p1", "p3", "p1"]);
    let table = open_queries(&config).unwrap();
    assert_eq!((table.findings().n_groups, named(&table.findings().alike)), (2, vec![(3, Some(2))]));
}

#[test]
fn column_that_is_named_must_be_there_and_a_default_one_may_lack() {
    let folder = Folder::new();
    let config = folder.file("a.csv", "问题,标准\n甲,1\n");
    assert_eq!(rows(&config)[0].gold_ids, [""; 0]);
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
    assert_eq!(rows(&config).iter().map(|row| row.row).collect::<Vec<_>>(), [2, 5]);
}

#[test]
fn table_without_a_usable_row_is_an_error() {
    let folder = Folder::new();
    let said = message(&folder.file("a.csv", "问题,用户画像\n,老人\n"));
    assert!(said.contains("a.csv: none of 1 row(s) has a query in column `问题`; fill it"), "{said}");
}

#[test]
fn unreadable_files_say_what_is_wrong() {
    let folder = Folder::new();
    assert!(message(&folder.file("a.xlsx", "no zip")).contains("a.xlsx: not a readable xlsx workbook"));
    assert!(
        message(&folder.file("a.pdf", ""))
            .contains("expected a name that ends in .xlsx, .csv, .tsv, .jsonl or .parquet")
    );
    assert!(message(&folder.file("a.jsonl", "{\"问题\": \"甲\"}\nx\n")).contains("a.jsonl:2: not a valid record"));
    let absent = config(folder.0.path().join("b.xlsx"));
    assert!(message(&absent).ends_with("b.xlsx: there is no such file; check the path"));
}

#[test]
fn rows_that_contradict_one_another_are_reported() {
    let folder = Folder::new();
    let text = "鱼油怎么吃,p1\n鱼油怎么吃,p2\n鱼油怎么吃？,\n贵吗,p3\n贵吗,p3\n贵吗！,\"p3,p4\"\n";
    let table = open_queries(&folder.file("a.csv", &format!("问题,相关文档\n{text}"))).unwrap();
    let findings = table.findings();
    assert_eq!(named(&findings.repeated), [(3, Some(2)), (6, Some(5))]);
    assert_eq!(named(&findings.alike), [(4, Some(2)), (7, Some(5))]);
    assert_eq!(named(&findings.conflicting), [(3, Some(2)), (7, Some(5))]);
    let last = findings.notes().pop().unwrap();
    let expected =
        "2 row(s) say what an earlier row says and name other gold ids: check rows 3 (like row 2), 7 (like row 5)";
    assert_eq!(last, expected);
}

#[test]
fn width_is_changed_before_a_row_is_told_from_others() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题\nＶＣ怎么吃？\nVC怎么吃？\n");
    assert_eq!(rows(&config).len(), 2);
    config.width = querl_core::config::TextWidth::Letters;
    let rows = rows(&config);
    assert_eq!((rows.len(), rows[0].original_query.as_str()), (1, "VC怎么吃？"));
    assert_eq!(rows[0].id, query_id("VC怎么吃？", "", ""));
}

#[test]
fn table_that_changes_between_readings_is_refused() {
    let folder = Folder::new();
    let config = folder.file("a.csv", "问题\n甲\n");
    let table = open_queries(&config).unwrap();
    assert_eq!(table.read().unwrap().count(), 1);
    folder.file("a.csv", "问题\n甲\n乙\n");
    let said = table.read().err().unwrap().to_string();
    assert!(said.ends_with("a.csv: was changed while it was read; run the same command again"), "{said}");
}
