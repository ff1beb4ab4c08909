#![allow(clippy::unwrap_used)]

use super::*;
use calamine::{Data, Reader};
use querl_core::fsx::write_jsonl;
use querl_core::records::{CallFailure, Completion, FailureKind, Hit, QueryRow};

fn failure() -> CallFailure {
    CallFailure { kind: FailureKind::Timeout, message: "the service said so".into() }
}

fn record(query: &str, answered: Option<f64>) -> ValidatedRecord {
    let query = QueryRow {
        id: query.into(),
        row: 2,
        original_query: query.into(),
        user_profile: "52岁，\"糖友\"".into(),
        history_summary: String::new(),
        gold_ids: vec!["p1".into(), "p2".into()],
        group: query.into(),
    };
    let text = "=深海鱼油\t用量".to_owned();
    let done =
        Completion { text, prompt_tokens: None, completion_tokens: None, cost: None, latency_ms: None, source: None };
    let hit = |score| Hit { id: "p".into(), text: "文".into(), reranker_score: score, retrieval_score: None, rank: 1 };
    let rewrite = if answered.is_some() { Ok(done) } else { Err(failure()) };
    ValidatedRecord {
        rewritten: RewriteRecord { query, rewrite },
        retrieval: answered.map(|score| Ok(vec![hit(score)])),
    }
}

/// Writes one row that succeeded and one that failed; the files' places.
fn written(folder: &Path) -> [PathBuf; 4] {
    let output = folder.join("data/validated.jsonl");
    write_jsonl(&output, [record("鱼油怎么吃", Some(0.75)), record("贵吗", None)]).unwrap();
    write_tables::<ValidatedRecord>(&output, &TableFormat::ALL).unwrap();
    TableFormat::ALL.map(|format| table_path(&output, format))
}

#[test]
fn failures_are_shown_as_failures_in_a_workbook() {
    let folder = tempfile::tempdir().unwrap();
    let [xlsx, ..] = written(folder.path());
    let mut workbook: calamine::Xlsx<_> = calamine::open_workbook(&xlsx).unwrap();
    let range = workbook.worksheet_range("Sheet1").unwrap();
    let cell = |row: usize, column: usize| range.get((row, column)).cloned().unwrap_or(Data::Empty);
    assert_eq!(cell(0, 5), Data::String("top1_score".into()));
    assert_eq!(cell(1, 1), Data::String("=深海鱼油\t用量".into()), "a text and no formula");
    assert_eq!((cell(1, 4), cell(1, 5), cell(1, 6)), (Data::Float(1.0), Data::Float(0.75), Data::Bool(true)));
    assert_eq!((cell(2, 1), cell(2, 4), cell(2, 5)), (Data::Empty, Data::Empty, Data::Empty));
    assert_eq!((cell(2, 6), cell(2, 7)), (Data::Bool(false), Data::String("timeout: the service said so".into())));
}

#[test]
fn every_format_can_be_read_again_as_a_query_table() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Vec<(usize, Vec<String>)>> = written(folder.path())
        .iter()
        .map(|path| crate::table::open_table(path).unwrap().all_rows().map(Result::unwrap).collect())
        .collect();
    let first = ["鱼油怎么吃", "=深海鱼油\t用量", "52岁，\"糖友\"", "", "1", "0.75", "true", "", "p1,p2", "鱼油怎么吃"];
    let second = ["贵吗", "", "52岁，\"糖友\"", "", "", "", "false", "timeout: the service said so", "p1,p2", "贵吗"];
    for (format, rows) in TableFormat::ALL.iter().zip(rows) {
        let cells: Vec<Vec<String>> = rows.into_iter().map(|(_, cells)| cells).collect();
        assert_eq!(cells, [first, second], "{format:?}");
    }
}

#[test]
fn text_begins_with_a_byte_order_mark_for_spreadsheets() {
    let folder = tempfile::tempdir().unwrap();
    let [_, csv, tsv, _] = written(folder.path());
    for path in [csv, tsv] {
        assert!(std::fs::read(path).unwrap().starts_with("\u{feff}original_query".as_bytes()));
    }
}

#[test]
fn parquet_of_many_rows_has_several_groups_and_keeps_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("rewrites.jsonl");
    write_jsonl(&output, (0..20_000).map(|index| record(&index.to_string(), Some(0.5)).rewritten)).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Parquet]).unwrap();
    let table = crate::table::open_table(&table_path(&output, TableFormat::Parquet)).unwrap();
    let queries: Vec<String> = table.all_rows().map(|row| row.unwrap().1.swap_remove(0)).collect();
    assert!(queries.iter().enumerate().all(|(index, query)| *query == index.to_string()));
    assert_eq!(queries.len(), 20_000);
}

#[test]
fn text_that_no_cell_takes_is_cut_and_a_workbook_without_rows_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("rewrites.jsonl");
    write_jsonl(&output, [record(&"鱼".repeat(40_000), None).rewritten]).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Xlsx]).unwrap();
    let table = crate::table::open_table(&output.with_extension("xlsx")).unwrap();
    assert_eq!(table.all_rows().map(|row| row.unwrap().1[0].chars().count()).collect::<Vec<_>>(), [32_767]);
    write_jsonl(&output, [(); 0]).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Xlsx]).unwrap();
    assert_eq!(crate::table::open_table(&output.with_extension("xlsx")).unwrap().all_rows().count(), 0);
}

/// Regression: a cell of a csv that a spreadsheet computes, such as a link that somebody asked for.
#[test]
fn what_looks_like_a_formula_is_text_in_a_spreadsheet_and_the_same_again_here() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("rewrites.jsonl");
    let queries = ["=1+1", "'=1", "+86", "-5度能吃吗", "@客服", "\t=1", "'好吃'", "好=吃"];
    write_jsonl(&output, queries.map(|query| record(query, Some(0.5)).rewritten)).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Csv, TableFormat::Tsv]).unwrap();
    for extension in ["csv", "tsv"] {
        let path = output.with_extension(extension);
        let text = std::fs::read_to_string(&path).unwrap();
        let starts: Vec<&str> = text.lines().skip(1).map(|line| line.trim_start_matches('"')).collect();
        assert!(starts.iter().all(|line| !line.starts_with(['=', '+', '-', '@', '\t'])), "{text}");
        let read = crate::table::open_table(&path).unwrap().all_rows().map(|row| row.unwrap().1.swap_remove(0));
        assert_eq!(read.collect::<Vec<_>>(), queries);
    }
}

#[test]
fn a_table_that_cannot_be_written_keeps_no_other_away() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("rewrites.jsonl");
    write_jsonl(&output, [record("贵吗", Some(0.5)).rewritten]).unwrap();
    std::fs::create_dir_all(output.with_extension("xlsx").join("in the way")).unwrap();
    let error = write_tables::<RewriteRecord>(&output, &TableFormat::ALL).unwrap_err();
    assert!(matches!(&error, DataError::Write { path, .. } if path.ends_with("rewrites.xlsx")), "{error}");
    assert!(["csv", "tsv", "parquet"].iter().all(|extension| output.with_extension(extension).is_file()));
}
