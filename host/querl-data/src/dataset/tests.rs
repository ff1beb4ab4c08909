//! Exported tables, and leaks between splits.

use super::SplitMix64;
use super::export::{table_path, write_tables};
use super::leaks::{Leaks, MAX_LISTED, find_leaks};
use crate::DataError;
use crate::table::open_table;
use calamine::{Data, Reader};
use querl_core::config::TableFormat;
use querl_core::fsx::write_jsonl;
use querl_core::records::{CallFailure, Completion, FailureKind, Hit, QueryRow, RewriteRecord, Split, ValidatedRecord};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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
        expansion: None,
        group: query.into(),
    };
    let hit = |score| Hit { id: "p".into(), text: "文".into(), reranker_score: score, retrieval_score: None, rank: 1 };
    let rewrite = if answered.is_some() { Ok(Completion::of("=深海鱼油\t用量")) } else { Err(failure()) };
    ValidatedRecord {
        rewritten: RewriteRecord { query, rewrite },
        retrieval: answered.map(|score| Ok(vec![hit(score)])),
    }
}

/// Writes a row that succeeded and one that failed in all formats.
fn exported(folder: &Path) -> [PathBuf; 4] {
    let output = folder.join("data/validated.jsonl");
    write_jsonl(&output, [record("鱼油怎么吃", Some(0.75)), record("贵吗", None)]).unwrap();
    write_tables::<ValidatedRecord>(&output, &TableFormat::ALL).unwrap();
    TableFormat::ALL.map(|format| table_path(&output, format))
}

#[test]
fn a_workbook_shows_failures() {
    let folder = tempfile::tempdir().unwrap();
    let [xlsx, ..] = exported(folder.path());
    let mut workbook: calamine::Xlsx<_> = calamine::open_workbook(&xlsx).unwrap();
    let range = workbook.worksheet_range("Sheet1").unwrap();
    let cell = |row: usize, column: usize| range.get((row, column)).cloned().unwrap_or(Data::Empty);
    assert_eq!(cell(0, 5), Data::String("top1_score".into()));
    assert_eq!(cell(1, 1), Data::String("=深海鱼油\t用量".into()), "text, not a formula");
    assert_eq!((cell(1, 4), cell(1, 5), cell(1, 6)), (Data::Float(1.0), Data::Float(0.75), Data::Bool(true)));
    assert_eq!((cell(2, 1), cell(2, 4), cell(2, 5)), (Data::Empty, Data::Empty, Data::Empty));
    assert_eq!((cell(2, 6), cell(2, 7)), (Data::Bool(false), Data::String("timeout: the service said so".into())));
}

#[test]
fn every_format_can_be_read_again_as_a_query_table() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Vec<(usize, Vec<String>)>> = exported(folder.path())
        .iter()
        .map(|path| open_table(path).unwrap().all_rows().map(Result::unwrap).collect())
        .collect();
    let first = ["鱼油怎么吃", "=深海鱼油\t用量", "52岁，\"糖友\"", "", "1", "0.75", "true", "", "p1,p2", "鱼油怎么吃"];
    let second = ["贵吗", "", "52岁，\"糖友\"", "", "", "", "false", "timeout: the service said so", "p1,p2", "贵吗"];
    for (format, rows) in TableFormat::ALL.iter().zip(rows) {
        let cells: Vec<Vec<String>> = rows.into_iter().map(|(_, cells)| cells).collect();
        assert_eq!(cells, [first, second], "{format:?}");
    }
}

#[test]
fn delimited_text_has_a_byte_order_mark_for_spreadsheets() {
    let folder = tempfile::tempdir().unwrap();
    let [_, csv, tsv, _] = exported(folder.path());
    for path in [csv, tsv] {
        assert!(std::fs::read(path).unwrap().starts_with("\u{feff}original_query".as_bytes()));
    }
}

#[test]
fn parquet_keeps_the_order_across_row_groups() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    write_jsonl(&output, (0..20_000).map(|index| record(&index.to_string(), Some(0.5)).rewritten)).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Parquet]).unwrap();
    let table = open_table(&table_path(&output, TableFormat::Parquet)).unwrap();
    let queries: Vec<String> = table.all_rows().map(|row| row.unwrap().1.swap_remove(0)).collect();
    assert!(queries.iter().enumerate().all(|(index, query)| *query == index.to_string()));
    assert_eq!(queries.len(), 20_000);
}

#[test]
fn long_cells_are_truncated_and_a_workbook_may_be_empty() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    write_jsonl(&output, [record(&"鱼".repeat(40_000), None).rewritten]).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Xlsx]).unwrap();
    let table = open_table(&output.with_extension("xlsx")).unwrap();
    assert_eq!(table.all_rows().map(|row| row.unwrap().1[0].chars().count()).collect::<Vec<_>>(), [32_767]);
    write_jsonl(&output, [(); 0]).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Xlsx]).unwrap();
    assert_eq!(open_table(&output.with_extension("xlsx")).unwrap().all_rows().count(), 0);
}

/// Regression: a spreadsheet evaluated a cell of a csv as a formula.
#[test]
fn formulas_are_escaped_and_read_back() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    let queries = ["=1+1", "'=1", "+86", "-5度能吃吗", "@客服", "\t=1", "'好吃'", "好=吃"];
    write_jsonl(&output, queries.map(|query| record(query, Some(0.5)).rewritten)).unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Csv, TableFormat::Tsv]).unwrap();
    for extension in ["csv", "tsv"] {
        let path = output.with_extension(extension);
        let text = std::fs::read_to_string(&path).unwrap();
        let starts: Vec<&str> = text.lines().skip(1).map(|line| line.trim_start_matches('"')).collect();
        assert!(starts.iter().all(|line| !line.starts_with(['=', '+', '-', '@', '\t'])), "{text}");
        let read = open_table(&path).unwrap().all_rows().map(|row| row.unwrap().1.swap_remove(0));
        assert_eq!(read.collect::<Vec<_>>(), queries);
    }
}

/// Regression: a csv with a zero byte could not be read again.
#[test]
fn zero_bytes_alone_are_removed_from_delimited_text() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    write_jsonl(&output, ["鱼\0油\u{1b}[31m\r\n怎么\t吃", "\0=1"].map(|query| record(query, Some(0.5)).rewritten))
        .unwrap();
    write_tables::<RewriteRecord>(&output, &[TableFormat::Csv, TableFormat::Tsv]).unwrap();
    for extension in ["csv", "tsv"] {
        let table = open_table(&output.with_extension(extension)).unwrap();
        let read = table.all_rows().map(|row| row.unwrap().1.swap_remove(0));
        assert_eq!(read.collect::<Vec<_>>(), ["鱼油\u{1b}[31m\r\n怎么\t吃", "=1"]);
    }
}

#[test]
fn a_failed_table_does_not_prevent_the_others() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    write_jsonl(&output, [record("贵吗", Some(0.5)).rewritten]).unwrap();
    std::fs::create_dir_all(output.with_extension("xlsx").join("in the way")).unwrap();
    let error = write_tables::<RewriteRecord>(&output, &TableFormat::ALL).unwrap_err();
    assert!(matches!(&error, DataError::Write { path, .. } if path.ends_with("rewrites.xlsx")), "{error}");
    assert!(["csv", "tsv", "parquet"].iter().all(|extension| output.with_extension(extension).is_file()));
}

fn leak_row(row: usize, query: &str, history: &str) -> QueryRow {
    QueryRow {
        id: row.to_string(),
        row,
        original_query: query.into(),
        history_summary: history.into(),
        group: row.to_string(),
        ..QueryRow::default()
    }
}

fn rows(texts: &[(&str, &str)]) -> Vec<QueryRow> {
    texts.iter().zip(2..).map(|((query, history), number)| leak_row(number, query, history)).collect()
}

fn found(train: &Vec<QueryRow>, test: &Vec<QueryRow>, least: f64) -> Leaks {
    let [leaks] = find_leaks(train, [test], least, &mut |_| Ok::<_, DataError>(())).unwrap();
    leaks
}

fn leaked(train: &[(&str, &str)], test: &[(&str, &str)], least: f64) -> Vec<(usize, usize, f64)> {
    let leaks = found(&rows(train), &rows(test), least);
    assert_eq!((leaks.n_leaked, leaks.n_rows), (leaks.rows.len(), test.len()));
    leaks.rows.iter().map(|leak| (leak.row, leak.train_row, leak.similarity)).collect()
}

#[test]
fn equal_rows_leak_unless_their_histories_differ() {
    let train = [("鱼油怎么吃？", "问过鱼油"), ("多少钱", ""), ("贵", "")];
    let test = [("鱼油怎么吃", "问过鱼油。"), ("鱼油怎么吃", "咨询益生菌"), ("多少钱！", ""), ("贵！", ""), ("廉", "")];
    assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 1.0), (4, 3, 1.0), (5, 4, 1.0)]);
}

/// Regression: with a profile per user, all queries of test could be in train without a report.
#[test]
fn equal_queries_after_another_history_are_counted_separately() {
    let train = rows(&[("鱼油怎么吃？", "问过鱼油"), ("多少钱", "")]);
    let test = rows(&[("鱼油怎么吃", "咨询益生菌"), ("多少钱！", ""), ("廉", "")]);
    let leaks = found(&train, &test, 0.8);
    assert_eq!((leaks.n_leaked, leaks.n_same_query), (1, 1), "a leak is not counted twice");
    let expected = "1 of 3 rows of test have the query of a row of train, with another profile or history, and are not leaks: \
                    row 2 `鱼油怎么吃` is like row 2 `鱼油怎么吃？` after the histories `咨询益生菌` and `问过鱼油`";
    assert_eq!(leaks.same_query_sentence(Split::Test).unwrap(), expected);
}

/// Symptom: of two equal queries with similar histories only the queries were shown, with a similarity below 1.
#[test]
fn equal_queries_are_shown_with_the_context_that_differs() {
    let mut train = rows(&[("多少钱", "用户问过深海鱼油软胶囊的价格")]);
    let mut test = rows(&[("多少钱？", "用户问过深海鱼油软胶囊的价钱")]);
    (train[0].gold_ids, test[0].gold_ids) = (vec!["p1".into()], vec!["p2".into()]);
    // 12 of 14 character bigrams.
    let expected = "1 of 1 rows of test are in train or nearly equal to a row of it: row 2 `多少钱？` is like row 2 `多少钱` after the \
                    histories `用户问过深海鱼油软胶囊的价钱` and `用户问过深海鱼油软胶囊的价格`, with other gold ids (similarity 0.86)";
    assert_eq!(found(&train, &test, 0.8).sentence(Split::Test).unwrap(), expected);
    test[0].history_summary = train[0].history_summary.clone();
    test[0].gold_ids = train[0].gold_ids.clone();
    (train[0].user_profile, test[0].user_profile) = ("甲".into(), "乙".into());
    let sentence = found(&train, &test, 0.8).sentence(Split::Test).unwrap();
    assert!(sentence.ends_with("row 2 `多少钱` with the profiles `乙` and `甲` (similarity 0.87)"), "{sentence}");
}

#[test]
fn near_duplicates_leak_from_the_threshold() {
    // 4 of 5 character bigrams.
    let (train, test) = ([("鱼油怎么吃", "")], [("鱼油怎么吃啊", "")]);
    assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 0.8)]);
    assert_eq!(leaked(&train, &test, 0.81), []);
    assert_eq!(leaked(&[("深海鱼油怎么吃", "")], &[("益生菌怎么吃呢", "")], 0.8), []);
}

#[test]
fn only_equal_rows_have_a_similarity_of_1() {
    let (train, test) = ([("哈哈", "")], [("哈哈哈", ""), ("哈哈！", "")]);
    assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 0.99), (3, 2, 1.0)]);
    assert_eq!(leaked(&train, &test, 1.0), [(3, 2, 1.0)]);
}

fn random_text(seed: u32) -> String {
    let mut rng = SplitMix64(u64::from(seed));
    (0..24).map(|_| char::from_u32(0x4e00 + rng.below(3000) as u32).unwrap()).collect()
}

/// Of 2000 pairs at a similarity of 0.83 to 0.9 nearly all must be found.
#[test]
fn few_near_duplicates_are_missed() {
    let train: Vec<QueryRow> = (0..2000).map(|seed| leak_row(seed as usize, &random_text(seed), "")).collect();
    let changed = |seed: u32| {
        random_text(seed).chars().enumerate().map(|(at, c)| if at == 11 { '改' } else { c }).collect::<String>()
    };
    let test: Vec<QueryRow> = (0..2000).map(|seed| leak_row(seed as usize, &changed(seed), "")).collect();
    let leaks = found(&train, &test, 0.8);
    assert!(leaks.n_leaked >= 1990, "{}", leaks.n_leaked);
    assert!(leaks.rows.len() == MAX_LISTED && leaks.rows.iter().all(|leak| leak.row == leak.train_row));
    let sentence = leaks.sentence(Split::Test).unwrap();
    let expected = "of 2000 rows of test are in train or nearly equal to a row of it: row 0 `";
    assert!(sentence.contains(expected), "{sentence}");
    assert_eq!(Leaks::default().sentence(Split::Test), None);
}

/// Regression: with a profile that thousands of rows share, a row was compared with the first few only.
#[test]
fn a_common_context_hides_no_near_duplicate() {
    let context: String = (0..60).map(random_text).collect();
    let changed = |seed: u32| random_text(seed).replacen(random_text(seed).chars().nth(11).unwrap(), "改", 1);
    let train: Vec<QueryRow> =
        (0..1000).map(|seed| leak_row(seed as usize, &random_text(seed + 100), &context)).collect();
    let test: Vec<QueryRow> = (0..1000).map(|seed| leak_row(seed as usize, &changed(seed + 100), &context)).collect();
    let leaks = found(&train, &test, 0.8);
    assert!(leaks.n_leaked >= 990, "{}", leaks.n_leaked);
}

/// The same text with a different number in each row.
fn template(numbers: std::ops::Range<usize>) -> Vec<QueryRow> {
    let text = |n: usize| {
        format!(
            "请问我上个星期天在你们旗舰店里买给家里老人吃的那两瓶深海鱼油软胶囊究竟什么时候才能从仓库发货已经等了很久订单编号是第{n}位顾客"
        )
    };
    numbers.map(|n| leak_row(n, &text(n), "")).collect()
}

/// Regression: half a second per training row, days for a large table.
#[test]
fn texts_of_one_template_take_bounded_time() {
    let (train, test) = (template(0..2000), template(500_000..520_000));
    for least in [0.8, 0.95] {
        let start = Instant::now();
        let leaks = found(&train, &test, least);
        // A comparison of all pairs would take minutes.
        assert!(start.elapsed() < Duration::from_secs(20), "{:?} at {least}", start.elapsed());
        assert_eq!(leaks.n_leaked > 10_000, least == 0.8, "{}", leaks.n_leaked);
    }
    let same = [template(0..2000), template(500_777..500_778)].concat();
    assert_eq!(found(&same, &test, 1.0).rows[0].row, 500_777, "an equal row is found among thousands");
}

#[test]
fn several_splits_are_compared_in_one_reading_and_the_caller_can_interrupt() {
    let train = rows(&[("鱼油怎么吃", ""), ("多少钱", "")]);
    let (val, test) = (rows(&[("多少钱", "")]), rows(&[("贵", ""), ("鱼油怎么吃", "")]));
    let [of_val, of_test] = find_leaks(&train, [&val, &test], 0.8, &mut |_| Ok::<_, DataError>(())).unwrap();
    assert_eq!((of_val.n_rows, of_val.n_leaked, of_test.n_rows, of_test.n_leaked), (1, 1, 2, 1));
    assert_eq!((of_test.rows[0].row, of_test.rows[0].train_row), (3, 2));
    let many: Vec<QueryRow> = (0..3000).map(|seed| leak_row(seed as usize, &random_text(seed), "")).collect();
    let mut reported = Vec::new();
    let mut watch = |n_read| {
        reported.push(n_read);
        if n_read < 2048 { Ok(()) } else { Err(DataError::setting("the caller", "was interrupted")) }
    };
    assert!(find_leaks(&many, [&val], 0.8, &mut watch).is_err());
    assert_eq!(reported, [1024, 2048]);
}

#[test]
fn a_long_query_is_shortened_in_a_sentence() {
    let text = "第一行\n".to_owned() + &"鱼".repeat(200);
    let leaks = found(&rows(&[(&text, "")]), &rows(&[(&text, "")]), 0.8);
    let sentence = leaks.sentence(Split::Test).unwrap();
    assert!(sentence.contains("`第一行\\n鱼"), "{sentence}");
    assert!(sentence.contains("鱼…`"), "{sentence}");
    assert!(sentence.chars().count() < 200, "{sentence}");
    assert_eq!(leaks.rows[0].query, text, "the full query");
}
