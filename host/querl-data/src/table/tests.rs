use super::*;
use crate::dataset::SplitMix64;
use crate::dataset::export::{table_path, write_tables};
use ::parquet::basic::{Compression, Encoding, GzipLevel};
use ::parquet::data_type::{
    ByteArrayType, DataType, DoubleType, FixedLenByteArrayType, FloatType, Int32Type, Int64Type,
};
use ::parquet::file::properties::{WriterProperties, WriterVersion};
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use querl_core::config::TableFormat;
use querl_core::fsx::write_jsonl;
use querl_core::records::{Completion, RewriteRecord};
use rust_xlsxwriter::{ExcelDateTime, Format, Workbook};
use serde_json::{Value, json};
use std::path::PathBuf;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> DataConfig {
        std::fs::write(self.path(name), content).unwrap();
        config(self.path(name))
    }

    fn workbook(&self, rows: &[&[&str]]) -> DataConfig {
        let mut workbook = Workbook::new();
        let sheet = workbook.add_worksheet().set_name("题目").unwrap();
        for (row, cells) in (0..).zip(rows) {
            for (column, cell) in (0..).zip(*cells) {
                sheet.write(row, column, *cell).unwrap();
            }
        }
        workbook.save(self.path("测试集.xlsx")).unwrap();
        config(self.path("测试集.xlsx"))
    }

    /// The rows of a new file, or the error without the path of the folder.
    fn open(&self, name: &str, content: impl AsRef<[u8]>) -> Result<Vec<QueryRow>, String> {
        self.file(name, content);
        self.read(name)
    }

    fn read(&self, name: &str) -> Result<Vec<QueryRow>, String> {
        let config = config(self.path(name));
        let rows = || open_queries(&config)?.read()?.collect::<Result<Vec<_>, _>>();
        rows().map_err(|error| self.shown(&error))
    }

    /// An error without the path of the folder.
    fn shown(&self, error: &DataError) -> String {
        error.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }

    /// The error message for a file with these settings.
    fn refusal(&self, name: &str, mut settings: Value) -> String {
        settings["input"] = json!(self.path(name));
        self.shown(&open_queries(&serde_json::from_value(settings).unwrap()).unwrap_err())
    }
}

fn config(input: PathBuf) -> DataConfig {
    serde_json::from_value(json!({ "input": input })).unwrap()
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
fn workbook_rows_have_their_numbers_and_empty_queries_are_listed() {
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
    let note = "rows skipped: 1 with an empty query (row 3); 1 repeating an earlier row (row 5 (like row 2))";
    assert_eq!(findings.notes(), [note]);
}

#[test]
fn all_formats_give_the_same_rows() {
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
fn columns_of_exported_tables_are_found() {
    let folder = Folder::new();
    let text = "original_query,rewritten_query,user_profile,history_summary,gold_ids\n怎么吃,x,老人,问过,p1\n";
    let row = rows(&folder.file("a.csv", text)).remove(0);
    assert_eq!((row.original_query.as_str(), row.user_profile.as_str()), ("怎么吃", "老人"));
    assert_eq!((row.history_summary.as_str(), row.group.as_str()), ("问过", "p1"));
    let both = "original_query,问题\n甲,乙\n";
    assert_eq!(rows(&folder.file("b.csv", both))[0].original_query, "乙");
}

#[test]
fn empty_files_are_reported() {
    let folder = Folder::new();
    let expected = "the file is empty; expected a table with a header";
    for name in ["a.xlsx", "a.csv", "a.tsv", "a.jsonl"] {
        assert_eq!(message(&folder.file(name, "")).rsplit_once(": ").unwrap().1, expected, "{name}");
    }
    let cases = [
        ("b.csv", "\u{feff}\n", "b.csv: the file has no header row; expected the names of the columns"),
        ("b.jsonl", "\n\n", "b.jsonl: the file holds no object; expected one JSON object a line"),
        (
            "c.csv",
            "问题\n",
            "c.csv: none of 0 row(s) has a query in column `问题`; fill it, or name another column in data.query_column",
        ),
        (
            "d.csv",
            "问题,用户画像\n,老人\n",
            "d.csv: none of 1 row(s) has a query in column `问题`; fill it, or name another column in data.query_column",
        ),
    ];
    for (name, text, expected) in cases {
        let error = message(&folder.file(name, text));
        assert!(error.ends_with(expected), "{error}");
    }
    let error = message(&folder.workbook(&[&[]]));
    assert!(error.ends_with("sheet `题目`: is empty; expected a header row"), "{error}");
}

#[test]
fn csv_rows_are_numbered_independently_of_line_ends() {
    let folder = Folder::new();
    for end in ["\n", "\r\n"] {
        let config = folder.file("a.csv", ["问题", "怎么吃", "几天到", ""].join(end));
        let numbers: Vec<usize> = rows(&config).iter().map(|row| row.row).collect();
        assert_eq!(numbers, [2, 3], "{end:?}");
    }
}

/// Symptom: a header with a line break was listed as `前文 摘要`, and this name was not accepted.
#[test]
fn a_header_with_a_line_break_is_found_by_its_name_with_a_space() {
    let folder = Folder::new();
    let named = |config: DataConfig| DataConfig { history_column: "前文 摘要".into(), ..config };
    let csv = |header: &str| named(folder.file("a.csv", format!("问题,{header}\n怎么吃,甲,乙\n")));
    assert_eq!(rows(&csv("\"前文\n摘要\",x"))[0].history_summary, "甲");
    let xlsx = named(folder.workbook(&[&["问题", "前文\n摘要"], &["怎么吃", "甲"]]));
    assert_eq!(rows(&xlsx)[0].history_summary, "甲");
    assert_eq!(rows(&csv("\"前文\n摘要\",前文 摘要"))[0].history_summary, "乙", "an equal name is preferred");
    let alike = message(&csv("\"前文\n摘要\",前文  摘要"));
    let expected = "a.csv: columns 2 and 3 are both called `前文 摘要`, apart from white space; rename one of them";
    assert!(alike.ends_with(expected), "{alike}");
}

/// Symptom: a Korean table was read as Chinese, and the note showed no text of it.
#[test]
fn a_guessed_encoding_is_reported_with_the_first_cell_it_decoded() {
    let folder = Folder::new();
    let korean = encoding_rs::EUC_KR.encode("빨간불이 깜박거려요").0;
    let table = [&b"original_query,gold_ids\nhow long,p1\n"[..], &korean[..], &b",p2\n"[..]].concat();
    let table = open_queries(&folder.file("a.csv", table)).unwrap();
    let read = encoding_rs::GB18030.decode(&korean).0;
    let note = format!(
        "the table is read as GB18030, a guess: row 3 column `original_query` is `{read}`; save it as UTF-8 if this text is not right"
    );
    assert_eq!(table.findings().notes(), [note]);
    assert_eq!(open_queries(&folder.file("a.csv", "问题\n鱼油\n")).unwrap().findings().decoded_cell, None);
    let of_header = encoding_rs::GB18030.encode("问题\nhow long\n").0;
    let of_header = open_queries(&folder.file("a.csv", of_header)).unwrap();
    assert_eq!(of_header.findings().decoded_cell.as_deref(), Some("the header has `问题`"));
}

/// Symptom: the remedy for too many open files was to write the file again.
#[cfg(target_os = "linux")]
#[test]
fn a_missing_resource_is_not_a_damaged_parquet_file() {
    use ::parquet::errors::ParquetError;
    let read = |number| {
        formats::caught(Path::new("a.parquet"), Some(2), || {
            Err::<(), _>(ParquetError::from(std::io::Error::from_raw_os_error(number)))
        })
    };
    let full = read(24).unwrap_err().to_string();
    assert!(full.starts_with("a.parquet: cannot be read: too many files are open; raise the limit"), "{full}");
    let other = read(5).unwrap_err().to_string();
    assert!(other.starts_with("a.parquet: not a parquet file that can be read (row 2: External: "), "{other}");
}

#[test]
fn a_missing_column_error_names_sheet_columns_and_encoding() {
    let folder = Folder::new();
    let error = message(&folder.file("a.csv", encoding_rs::GB18030.encode("提问,画像\n甲,乙\n").0));
    let expected = "found `提问`, `画像` (read as GB18030, a guess); name one of these in data.query_column, or save the file as UTF-8";
    assert!(error.ends_with(expected), "{error}");
    // Symptom: the remedy for the garbled header of a short file in Big5 or EUC-JP was to name a garbled column.
    for (encoding, name) in [(encoding_rs::BIG5, "問題"), (encoding_rs::EUC_JP, "質問")] {
        let error = message(&folder.file("a.csv", encoding.encode(&format!("{name}\nhow long\n")).0));
        assert!(
            error.contains("(read as GB18030, a guess)") && error.ends_with(", or save the file as UTF-8"),
            "{error}"
        );
    }
    let error = message(&folder.file("a.csv", encoding_rs::GB18030.encode("question\n甲\n").0));
    assert!(error.ends_with("found `question`; name one of these in data.query_column"), "{error}");
    let error = message(&folder.workbook(&[&["提问", "用户画像"], &["怎么吃", ""]]));
    let expected = "测试集.xlsx: sheet `题目`: no column `问题` or `original_query` (data.query_column); found `提问`, `用户画像`; name one of these in data.query_column";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_configured_group_column_is_required() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题,批次\n甲,1\n乙,1\n");
    config.group_column = Some("组".into());
    assert!(message(&config).contains("no column `组` (data.group_column); found `问题`, `批次`"));
    config.group_column = Some("批次".into());
    assert!(rows(&config).iter().all(|row| row.group == "1"));
}

#[test]
fn groups_ignore_order_and_separators_of_gold_ids() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题,相关文档\n甲,\"p1,p2\"\n乙,p2，p1\n丙,p1\n丁,；\n");
    let groups = |config: &DataConfig| -> Vec<String> { rows(config).into_iter().map(|row| row.group).collect() };
    assert_eq!(groups(&config), ["p1,p2", "p1,p2", "p1", "丁"]);
    config.group_column = Some("相关文档".into());
    assert_eq!(groups(&config), ["p1,p2", "p1,p2", "p1", "丁"]);
}

#[test]
fn equal_rows_share_a_group_unless_their_histories_differ() {
    let folder = Folder::new();
    let text = "这个咋喝,问过鱼油,p2\n这个咋喝？,问过鱼油。,p1\n这个咋喝,问过奶粉,p3\n别的,,p2\n";
    let config = folder.file("a.csv", format!("问题,历史摘要,相关文档\n{text}"));
    assert_eq!(rows(&config).iter().map(|row| row.group.as_str()).collect::<Vec<_>>(), ["p1", "p1", "p3", "p1"]);
    let table = open_queries(&config).unwrap();
    assert_eq!((table.findings().n_groups, named(&table.findings().alike)), (2, vec![(3, Some(2))]));
}

#[test]
fn configured_columns_are_required_and_default_ones_optional() {
    let folder = Folder::new();
    let config = folder.file("a.csv", "问题,标准\n甲,1\n");
    assert_eq!(rows(&config)[0].gold_ids, [""; 0]);
    for key in ["profile_column", "history_column", "gold_column"] {
        let named = json!({ "input": config.input, key: "标准答案" });
        let error = message(&serde_json::from_value(named).unwrap());
        assert!(error.contains(&format!("no column `标准答案` (data.{key}); found `问题`, `标准`")), "{error}");
    }
}

#[test]
fn rows_of_json_lines_are_numbered_with_empty_lines() {
    let folder = Folder::new();
    let config = folder.file("a.jsonl", "\n{\"问题\": \"甲\"}\n\n \n{\"问题\": \"乙\"}\n");
    assert_eq!(rows(&config).iter().map(|row| row.row).collect::<Vec<_>>(), [2, 5]);
}

#[test]
fn unreadable_files_are_reported() {
    let folder = Folder::new();
    assert!(message(&folder.file("a.xlsx", "no zip")).contains("a.xlsx: not a readable xlsx workbook"));
    assert!(
        message(&folder.file("a.pdf", ""))
            .contains("expected a name that ends in .xlsx, .csv, .tsv, .jsonl or .parquet")
    );
    assert!(message(&folder.file("a.jsonl", "{\"问题\": \"甲\"}\nx\n")).contains("a.jsonl:2: not a valid record"));
    let absent = config(folder.path("b.xlsx"));
    assert!(message(&absent).ends_with("b.xlsx: there is no such file; check the path"));
}

#[test]
fn contradicting_rows_are_reported() {
    let folder = Folder::new();
    let text = "鱼油怎么吃,p1\n鱼油怎么吃,p2\n鱼油怎么吃？,\n贵吗,p3\n贵吗,p3\n贵吗！,\"p3,p4\"\n";
    let table = open_queries(&folder.file("a.csv", format!("问题,相关文档\n{text}"))).unwrap();
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
fn width_is_converted_before_rows_are_compared() {
    let folder = Folder::new();
    let mut config = folder.file("a.csv", "问题\nＶＣ怎么吃？\nVC怎么吃？\n");
    assert_eq!(rows(&config).len(), 2);
    config.width = querl_core::config::TextWidth::Letters;
    let rows = rows(&config);
    assert_eq!((rows.len(), rows[0].original_query.as_str()), (1, "VC怎么吃？"));
    assert_eq!(rows[0].id, query_id("VC怎么吃？", "", ""));
}

fn rejected(name: &str, content: impl AsRef<[u8]>) -> String {
    Folder::new().open(name, content).unwrap_err()
}

#[test]
fn an_unclosed_quote_is_reported_with_its_row() {
    let error = rejected("a.csv", "问题,用户画像\n甲,乙\n\"鱼油,怎么吃\n丙,丁\n");
    let expected = "a.csv: row 3: the quote before `鱼油,怎么吃\\n丙,丁` is not closed; close it, or write a quote within a quoted cell twice";
    assert_eq!(error, expected);
    assert!(rejected("a.tsv", "\"问题\t用户画像\n甲\t乙\n").starts_with("a.tsv: row 1: the quote before `问题"));
    assert!(rejected("b.csv", "问题\n\"甲").starts_with("b.csv: row 2: the quote before `甲` is not closed"));
}

#[test]
fn quoted_separators_line_breaks_and_quotes_are_text() {
    let rows = Folder::new().open("a.csv", "问题,用户画像\r\n\"甲,\n乙\",\"a \"\"b\"\"\"\r\n5\" 的管子,\r\n").unwrap();
    assert_eq!((rows[0].original_query.as_str(), rows[0].user_profile.as_str()), ("甲,\n乙", "a \"b\""));
    assert_eq!(rows[1].original_query, "5\" 的管子");
}

#[test]
fn rows_may_be_shorter_but_not_longer_than_the_header() {
    let folder = Folder::new();
    let rows = folder.open("a.csv", "问题,用户画像,历史摘要\n甲\n乙,a\n丙,a,b,, ,\n").unwrap();
    assert_eq!(rows.iter().map(|row| row.row).collect::<Vec<_>>(), [2, 3, 4]);
    let error = rejected("a.csv", "问题,用户画像\n甲,a\n乙,多少钱,a\n");
    let expected = "a.csv: row 3 has 3 cells, and the header 2; put quotes around a cell that holds a separator";
    assert_eq!(error, expected);
}

#[test]
fn invalid_bytes_are_reported_with_their_line() {
    let error = rejected("a.csv", "问题,用户画像\n甲,a\0b\n");
    let zero = "contains a zero byte, as UTF-16 without a byte order mark does; save the file again as UTF-8";
    assert_eq!(error, format!("a.csv:2: {zero}"));
    let utf16: Vec<u8> = "问题,用户画像\n甲,乙\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(rejected("a.csv", &utf16), format!("a.csv:1: {zero}"));
    let marked = [&[0xff, 0xfe][..], &utf16].concat();
    assert_eq!(Folder::new().open("a.csv", &marked).unwrap()[0].user_profile, "乙");
    assert!(rejected("a.csv", &marked[..marked.len() - 1]).contains("a character is not UTF-16 (little-endian); save"));
    let gbk = [&encoding_rs::GBK.encode("问题,用户画像\n甲,乙\n").0[..], b"\xff\xff,\x81\n"].concat();
    assert_eq!(rejected("a.csv", gbk), "a.csv:3: a character is not UTF-8 or GB18030; save the file again as UTF-8");
}

#[test]
fn wrong_extensions_are_detected_by_the_first_bytes() {
    let archive = "by its first bytes the file is a workbook or another archive; give a workbook the ending .xlsx";
    assert_eq!(rejected("a.csv", b"PK\x03\x04rest"), format!("a.csv: {archive}"));
    assert!(rejected("a.jsonl", b"PAR1rest").ends_with("the file is parquet; give it that ending"));
    assert!(rejected("a.xlsx", [0xd0, 0xcf, 0x11, 0xe0]).ends_with("save it as .xlsx without a password"));
    assert!(
        rejected("a.csv", "问题;用户画像\n甲;乙\n")
            .ends_with("save it with `,` instead of `;` between cells, or with tabs as .tsv")
    );
    assert!(rejected("a.csv", "问题\t用户画像\n甲\t乙\n").contains("instead of `\\t` between cells"));
}

#[test]
fn a_used_column_must_be_unique() {
    let error = rejected("a.csv", "问题,用户画像,问题\n甲,a,乙\n");
    assert_eq!(error, "a.csv: columns 1 and 3 are both called `问题`; rename one of them");
    assert!(Folder::new().open("a.csv", "问题,备注,备注\n甲,a,乙\n").is_ok(), "unused columns may be duplicates");
}

#[test]
fn a_huge_cell_is_rejected() {
    let cell = "鱼".repeat(400_000);
    let expected = "row 2 column `问题`: a cell of 1200000 bytes; expected at most 1048576";
    assert!(rejected("a.csv", format!("问题\n{cell}\n")).contains(expected));
    assert!(rejected("a.jsonl", format!("\n{{\"问题\": \"{cell}\"}}\n")).contains(expected));
}

#[test]
fn dates_of_a_workbook_read_as_dates() {
    let folder = Folder::new();
    let mut workbook = Workbook::new();
    let sheet = workbook.add_worksheet();
    sheet.write_row(0, 0, ["问题", "用户画像"]).unwrap();
    let (date, time) = (Format::new().set_num_format("yyyy-mm-dd"), Format::new().set_num_format("yyyy-mm-dd hh:mm"));
    sheet.write_with_format(1, 0, ExcelDateTime::from_ymd(2026, 1, 2).unwrap(), &date).unwrap();
    let noon = ExcelDateTime::from_ymd(2026, 1, 2).unwrap().and_hms(12, 30, 0).unwrap();
    sheet.write_with_format(1, 1, noon, &time).unwrap();
    workbook.save(folder.path("a.xlsx")).unwrap();
    let row = folder.read("a.xlsx").unwrap().remove(0);
    assert_eq!((row.original_query.as_str(), row.user_profile.as_str()), ("2026-01-02", "2026-01-02 12:30:00"));
}

/// Changes, inserts or removes one to four bytes, or cuts off the end.
fn damage(random: &mut SplitMix64, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(4) {
            0 => bytes[at] = random.below(256) as u8,
            1 => bytes.insert(at, b"\",\n\r\t\0\\{}"[random.below(9)]),
            2 => drop(bytes.remove(at)),
            _ if random.below(4) == 0 => bytes.truncate(at.max(1)),
            _ => bytes[at] ^= 1 << random.below(8),
        }
    }
    bytes
}

/// The same few rows in every format.
fn samples(folder: &Folder) -> Vec<(String, Vec<u8>)> {
    let text = "问题,用户画像\n\"鱼油,怎么吃\",老人\n钙片几天到,\n\"第一行\n第二行\",年轻人\n";
    let mut samples = vec![
        ("a.csv".to_owned(), text.as_bytes().to_vec()),
        ("b.csv".to_owned(), encoding_rs::GB18030.encode(text).0.into_owned()),
        ("a.tsv".to_owned(), format!("\u{feff}{}", text.replace(',', "\t")).into_bytes()),
        ("a.jsonl".to_owned(), "{\"问题\": \"鱼油怎么吃\", \"相关文档\": [\"p1\"]}\n{\"问题\": \"钙片\"}\n".into()),
    ];
    let (formats, output) = ([TableFormat::Xlsx, TableFormat::Parquet], folder.path("a.jsonl"));
    let records = folder
        .open("a.csv", text)
        .unwrap()
        .into_iter()
        .map(|query| RewriteRecord { query, rewrite: Ok(Completion::of("改写")) });
    write_jsonl(&output, records).unwrap();
    write_tables::<RewriteRecord>(&output, &formats).unwrap();
    samples.extend(formats.map(|format| {
        let path = table_path(&output, format);
        (format!("a.{}", format.name()), std::fs::read(path).unwrap())
    }));
    samples
}

#[test]
fn damaged_files_of_every_format_are_read_or_rejected_in_one_sentence() {
    let folder = Folder::new();
    let mut random = SplitMix64(1);
    for (name, whole) in samples(&folder) {
        assert!(folder.open(&name, &whole).unwrap().len() >= 2, "{name}");
        for _ in 0..400 {
            let damaged = damage(&mut random, &whole);
            if let Err(error) = folder.open(&name, &damaged) {
                assert!(error.starts_with(&name) && !error.contains('\n'), "{error:?}");
            }
        }
    }
}

/// A parquet file of one row group with the columns that `write` fills.
fn parquet_file(
    path: &Path,
    schema: &str,
    properties: WriterProperties,
    write: impl FnOnce(&mut SerializedRowGroupWriter<'_, std::fs::File>),
) {
    let schema = ::parquet::schema::parser::parse_message_type(schema).unwrap();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    write(&mut group);
    group.close().unwrap();
    writer.close().unwrap();
}

fn put<T: DataType>(group: &mut SerializedRowGroupWriter<'_, std::fs::File>, value: T::T) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<T>().write_batch(&[value], Some(&[1]), None).unwrap();
    column.close().unwrap();
}

/// Regression: an out-of-range date in an unused column caused a panic.
#[test]
fn unused_parquet_columns_may_have_any_type() {
    let folder = Folder::new();
    let schema = "message rows { optional int32 until (DATE); optional binary original_query (UTF8); \
                  optional int64 at (TIMESTAMP_MICROS); optional fixed_len_byte_array(12) span (INTERVAL); \
                  optional float gold_ids; optional binary user_profile; }";
    let write = |name: &str, profile: &'static [u8]| {
        parquet_file(&folder.path(name), schema, WriterProperties::default(), |group| {
            put::<Int32Type>(group, i32::MAX);
            put::<ByteArrayType>(group, "鱼油".into());
            put::<Int64Type>(group, i64::MAX);
            put::<FixedLenByteArrayType>(group, vec![7; 12].into());
            put::<FloatType>(group, 11.0);
            put::<ByteArrayType>(group, profile.into());
        });
    };
    write("a.parquet", "52岁".as_bytes());
    let rows = folder.read("a.parquet").unwrap();
    let QueryRow { original_query, gold_ids, user_profile, .. } = &rows[0];
    assert_eq!((original_query.as_str(), user_profile.as_str()), ("鱼油", "52岁"));
    assert_eq!(gold_ids, &["11"], "an integer");
    let error = |column: &str| folder.refusal("a.parquet", json!({ "group_column": column }));
    let remedy = "write the column as text, numbers or lists of them";
    assert_eq!(error("until"), format!("a.parquet: row 1 column `until` holds a date; {remedy}"));
    assert_eq!(error("at"), format!("a.parquet: row 1 column `at` holds a date; {remedy}"));
    assert!(error("span").starts_with("a.parquet: "));
    write("b.parquet", b"\xff\xfe");
    let expected = format!("b.parquet: row 1 column `user_profile` holds bytes that are not UTF-8 text; {remedy}");
    assert_eq!(folder.read("b.parquet").unwrap_err(), expected);
}

/// Regression: a missing value of a column of floats was the gold id `NaN`.
#[test]
fn floats_read_as_missing_values_integers_or_numbers() {
    let folder = Folder::new();
    let schema =
        "message rows { optional binary original_query (UTF8); optional double gold_ids; optional float group; }";
    let read = |gold: f64, group: f32| {
        parquet_file(&folder.path("a.parquet"), schema, WriterProperties::default(), |columns| {
            put::<ByteArrayType>(columns, "鱼油".into());
            put::<DoubleType>(columns, gold);
            put::<FloatType>(columns, group);
        });
        let config = DataConfig { group_column: Some("group".into()), ..config(folder.path("a.parquet")) };
        let rows = || open_queries(&config)?.read()?.collect::<Result<Vec<_>, _>>();
        let row = rows().map_err(|error| folder.shown(&error))?.remove(0);
        Ok::<_, String>((row.gold_ids, row.group))
    };
    assert_eq!(read(f64::NAN, f32::NAN), Ok((Vec::new(), "鱼油".into())));
    assert_eq!(read(1.0, 0.1), Ok((vec!["1".into()], "0.1".into())));
    let remedy = "holds an infinite number; write a finite number, or null where a value is missing";
    assert_eq!(read(f64::INFINITY, 1.0), Err(format!("a.parquet: row 1 column `gold_ids` {remedy}")));
    assert_eq!(read(1.0, f32::NEG_INFINITY), Err(format!("a.parquet: row 1 column `group` {remedy}")));
    let lines =
        "{\"original_query\": \"鱼油\", \"gold_ids\": 1.0}\n{\"original_query\": \"钙片\", \"gold_ids\": [2.0, 2.5]}\n";
    let rows = folder.open("a.jsonl", lines).unwrap();
    assert_eq!(
        (&rows[0].gold_ids[..], &rows[1].gold_ids[..]),
        (&["1".to_owned()][..], &["2".to_owned(), "2.5".into()][..])
    );
}

/// A parquet file with the texts `鱼油` and `鱼油怎么吃`, and a row without text between them.
fn texts_file(folder: &Folder, properties: WriterProperties) -> Vec<u8> {
    let schema = "message rows { optional binary original_query (UTF8); }";
    parquet_file(&folder.path("a.parquet"), schema, properties, |group| {
        let mut column = group.next_column().unwrap().unwrap();
        let texts = ["鱼油".into(), "鱼油怎么吃".into()];
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&[1, 0, 1]), None).unwrap();
        column.close().unwrap();
    });
    std::fs::read(folder.path("a.parquet")).unwrap()
}

#[test]
fn parquet_texts_are_read_in_every_encoding_and_compression() {
    let folder = Folder::new();
    let encodings = [Encoding::PLAIN, Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY];
    let compressions = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(Default::default()),
        Compression::GZIP(GzipLevel::default()),
    ];
    for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
        for (encoding, compression) in
            encodings.into_iter().flat_map(|e| compressions.map(|compression| (e, compression)))
        {
            for has_dictionary in [false, true] {
                let properties = WriterProperties::builder().set_writer_version(version).set_encoding(encoding);
                let properties = properties.set_compression(compression).set_dictionary_enabled(has_dictionary).build();
                texts_file(&folder, properties);
                let read = folder.read("a.parquet").unwrap();
                let found: Vec<(usize, &str)> = read.iter().map(|row| (row.row, row.original_query.as_str())).collect();
                assert_eq!(found, [(1, "鱼油"), (3, "鱼油怎么吃")], "{version:?} {encoding:?} {compression:?}");
            }
        }
    }
}

/// Regression: sizes that a page declares took memory before they were checked.
#[test]
fn sizes_that_parquet_declares_are_checked_first() {
    let folder = Folder::new();
    let properties = |encoding, compression| {
        let properties = WriterProperties::builder().set_encoding(encoding).set_compression(compression);
        properties.set_dictionary_enabled(false).build()
    };
    let refused = |bytes: &[u8]| folder.open("a.parquet", bytes).unwrap_err();
    // A page header begins with the fields 1 (type, 0) and 2 (size after decompression).
    let mut gzip = texts_file(&folder, properties(Encoding::PLAIN, Compression::GZIP(GzipLevel::default())));
    assert_eq!((&gzip[4..7], gzip[7] & 0x81), (&[0x15, 0, 0x15][..], 0));
    gzip[7] -= 2;
    let error = refused(&gzip);
    assert!(error.contains("column `original_query`: a page does not inflate to the "), "{error}");
    let plain = texts_file(&folder, properties(Encoding::PLAIN, Compression::UNCOMPRESSED));
    let mut longer = plain.clone();
    assert_eq!(longer[8], 0x15);
    longer[9] = 0x7e;
    assert!(refused(&longer).contains("a page is longer than its column"), "{}", refused(&longer));
    let mut footer = plain.clone();
    let end = footer.len() - 8;
    footer[end..end + 4].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    assert!(refused(&footer).contains("declares 2147483647 bytes of metadata; expected at most 16777216"));
    for encoding in [Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY] {
        let mut delta = texts_file(&folder, properties(encoding, Compression::UNCOMPRESSED));
        // Block size 128, 4 parts, 2 values.
        let at = delta.windows(4).position(|bytes| bytes == [0x80, 1, 4, 2]).unwrap();
        delta[at + 3] = 0x7f;
        let error = refused(&delta);
        assert!(error.contains("a page does not hold the lengths of its values"), "{error}");
    }
}

/// Regression: a file of a few kilobytes with a billion equal rows took 40 GB.
#[test]
fn the_number_of_rows_is_bounded() {
    let folder = Folder::new();
    let schema = "message rows { optional binary original_query (UTF8); }";
    parquet_file(&folder.path("a.parquet"), schema, WriterProperties::default(), |group| {
        let mut column = group.next_column().unwrap().unwrap();
        let levels = vec![0; formats::MAX_ROWS as usize + 1];
        column.typed::<ByteArrayType>().write_batch(&[], Some(&levels), None).unwrap();
        column.close().unwrap();
    });
    let error = folder.read("a.parquet").unwrap_err();
    assert!(error.contains("declares 16777217 rows; expected those of its groups, at most 16777216"), "{error}");
}

#[test]
fn a_table_that_changes_while_it_is_read_is_rejected() {
    let folder = Folder::new();
    folder.open("a.csv", "问题\n甲\n乙\n").unwrap();
    let path = folder.path("a.csv");
    let table = open_queries(&config(path.clone())).unwrap();
    let mut rows = table.read().unwrap();
    assert_eq!(rows.next().unwrap().unwrap().original_query, "甲");
    std::fs::write(&path, "问题\n甲\n乙\n丙\n").unwrap();
    let error = rows.last().unwrap().unwrap_err().to_string();
    assert!(error.ends_with("a.csv: was changed while it was read; run the same command again"), "{error}");
    assert!(table.read().is_err());
}

#[test]
fn further_sheets_with_the_same_columns_continue_the_first() {
    let folder = Folder::new();
    let mut workbook = Workbook::new();
    for (name, header, query) in [("一", "问题", "甲"), ("说明", "备注", "x"), ("二", "问题", "乙")] {
        let sheet = workbook.add_worksheet().set_name(name).unwrap();
        sheet.write_column(0, 0, [header, query]).unwrap();
    }
    workbook.add_worksheet().set_name("空").unwrap();
    workbook.save(folder.path("a.xlsx")).unwrap();
    let rows = folder.read("a.xlsx").unwrap();
    let queries: Vec<(usize, &str)> = rows.iter().map(|row| (row.row, row.original_query.as_str())).collect();
    assert_eq!(queries, [(2, "甲"), (1_048_578, "乙")]);
    let table = open_queries(&config(folder.path("a.xlsx"))).unwrap();
    assert_eq!(table.findings().unread_sheets, ["说明"]);
    let note = "sheets skipped, as their columns are not those of the first: `说明`";
    assert!(table.findings().notes().iter().any(|error| error == note), "{:?}", table.findings().notes());
}

/// Regression: hidden sheets and merged cells, whose rows were missing or empty, were not reported.
#[test]
fn hidden_sheets_and_merged_cells_are_named() {
    let folder = Folder::new();
    let mut workbook = Workbook::new();
    workbook.add_worksheet().set_name("旧").unwrap().set_hidden(true).write(0, 0, "问题").unwrap();
    let sheet = workbook.add_worksheet().set_name("新").unwrap();
    sheet.write_row(0, 0, ["问题", "备注", "相关文档"]).unwrap();
    sheet.write_column(1, 0, ["甲", "乙", "丙"]).unwrap();
    sheet.merge_range(1, 2, 2, 2, "p1", &Format::new()).unwrap();
    sheet.merge_range(1, 1, 2, 1, "x", &Format::new()).unwrap();
    sheet.set_active(true);
    workbook.save(folder.path("a.xlsx")).unwrap();
    let table = open_queries(&config(folder.path("a.xlsx"))).unwrap().with_merged_cells().unwrap();
    let expected = [
        "hidden sheets skipped: `旧`; show those that have queries",
        "merged cells C2:C3: only the first cell has the value; unmerge them and fill each row",
    ];
    assert_eq!(table.findings().notes(), expected);
}

/// Regression: a title above the header was taken for the header, and the message advised to name it in data.query_column.
#[test]
fn a_title_above_the_header_is_recognised() {
    let folder = Folder::new();
    let workbook = folder.workbook(&[&["客服问题汇总（2026年11月）"], &[], &["编号", "问题"], &["1", "甲"]]);
    let remedy = "row 3 looks like the header: delete the rows above it";
    assert!(
        message(&workbook).ends_with(&format!("found `客服问题汇总（2026年11月）`; {remedy}")),
        "{}",
        message(&workbook)
    );
    let csv = message(&folder.file("a.csv", "客服问题汇总,\n,\n编号,问题\n1,甲\n"));
    assert!(csv.ends_with(remedy), "{csv}");
    // Symptom: the message said to delete data rows above a cell with the name of another column.
    let mut below = folder.file("b.csv", "问题,备注\n甲,乙\n丙,组\n");
    below.group_column = Some("组".into());
    assert!(message(&below).ends_with("; name one of these in data.group_column"), "{}", message(&below));
}

/// A workbook with the given cells as XML, and other parts.
fn workbook_of(folder: &Folder, sheet_data: &str, more: &[(&str, &[u8])]) -> Result<Vec<QueryRow>, String> {
    let mut archive = zip::ZipWriter::new(std::fs::File::create(folder.path("a.xlsx")).unwrap());
    let relations = "http://schemas.openxmlformats.org/package/2006/relationships";
    let document = "http://schemas.openxmlformats.org/officeDocument/2006/relationships";
    let main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main";
    let relation = |kind: &str, target: &str| {
        let one = format!(r#"<Relationship Id="r1" Type="{document}/{kind}" Target="{target}"/>"#);
        format!(r#"<Relationships xmlns="{relations}">{one}</Relationships>"#)
    };
    let workbook = format!(
        r#"<workbook xmlns="{main}" xmlns:r="{document}"><sheets><sheet name="s" sheetId="1" r:id="r1"/></sheets></workbook>"#
    );
    let sheet = format!(r#"<worksheet xmlns="{main}"><sheetData>{sheet_data}</sheetData></worksheet>"#);
    let parts = [
        ("_rels/.rels", relation("officeDocument", "xl/workbook.xml").into_bytes()),
        ("xl/workbook.xml", workbook.into_bytes()),
        ("xl/_rels/workbook.xml.rels", relation("worksheet", "worksheets/sheet1.xml").into_bytes()),
        ("xl/worksheets/sheet1.xml", sheet.into_bytes()),
    ];
    let more = more.iter().map(|(name, bytes)| (*name, bytes.to_vec()));
    for (name, bytes) in parts.into_iter().chain(more) {
        archive.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
        std::io::Write::write_all(&mut archive, &bytes).unwrap();
    }
    archive.finish().unwrap();
    folder.read("a.xlsx")
}

fn text_cell(address: &str, text: &str) -> String {
    format!(r#"<c r="{address}" t="inlineStr"><is><t>{text}</t></is></c>"#)
}

/// Regression: one far cell took memory for 17 billion.
#[test]
fn a_far_cell_takes_no_memory_for_the_cells_before_it() {
    let folder = Folder::new();
    let far = format!(r#"<row r="1048576">{}{}</row>"#, text_cell("A1048576", "贵吗"), text_cell("XFD1048576", "x"));
    let head = format!(r#"<row r="1">{}</row><row r="2">{}</row>"#, text_cell("A1", "问题"), text_cell("A2", "怎么吃"));
    let rows = workbook_of(&folder, &format!("{head}{far}"), &[]).unwrap();
    let found: Vec<(usize, &str)> = rows.iter().map(|row| (row.row, row.original_query.as_str())).collect();
    assert_eq!(found, [(2, "怎么吃"), (1_048_576, "贵吗")]);
    let outside = format!("{head}<row>{}</row>", text_cell("A1048577", "贵吗"));
    let expected =
        "a.xlsx: sheet `s`: row 1048577 column 1 is outside of 1048576 rows and 16384 columns; save it again as .xlsx";
    assert_eq!(workbook_of(&folder, &outside, &[]).unwrap_err(), expected);
    let expected = "a.xlsx: sheet `s`: cell A1 comes after a later row; save it again as .xlsx";
    let back = format!(r#"{far}<row r="1">{}</row>"#, text_cell("A1", "问题"));
    assert_eq!(workbook_of(&folder, &back.replace("贵吗", "问题"), &[]).unwrap_err(), expected);
}

/// Regression: a wrong checksum in a part that is not read made a workbook unreadable.
#[test]
fn only_damage_in_parts_that_are_read_is_an_error() {
    let folder = Folder::new();
    let head = format!(r#"<row r="1">{}</row><row r="2">{}</row>"#, text_cell("A1", "问题"), text_cell("A2", "怎么吃"));
    let more = [("docProps/thumbnail.jpeg", b"image".as_slice()), ("xl/printerSettings/p.bin", b"pages".as_slice())];
    assert_eq!(workbook_of(&folder, &head, &more).unwrap().len(), 1);
    let whole = std::fs::read(folder.path("a.xlsx")).unwrap();
    for (name, is_read) in more.map(|(name, _)| (name, false)).into_iter().chain([("xl/worksheets/sheet1.xml", true)]) {
        let mut damaged = whole.clone();
        // In the list of parts at the end of an archive, the checksum is 30 bytes before the name.
        let at = damaged.windows(name.len()).rposition(|bytes| bytes == name.as_bytes()).unwrap();
        damaged[at - 30] ^= 1;
        std::fs::write(folder.path("a.xlsx"), damaged).unwrap();
        match folder.read("a.xlsx") {
            Ok(rows) => assert!(!is_read && rows.len() == 1, "{name}"),
            Err(error) => {
                assert!(is_read && error.starts_with(&format!("a.xlsx: `{name}` is damaged (")), "{error}");
            }
        }
    }
}

/// Regression: parts that inflate to gigabytes, and a declared number of texts, took memory before they were checked.
#[test]
fn parts_of_a_workbook_are_bounded() {
    let folder = Folder::new();
    let head = format!(r#"<row r="1">{}</row><row r="2">{}</row>"#, text_cell("A1", "问题"), text_cell("A2", "怎么吃"));
    let refused = |name: &str, bytes: &[u8]| workbook_of(&folder, &head, &[(name, bytes)]).unwrap_err();
    let error = refused("xl/styles.xml", &vec![b' '; (16 << 20) + 1]);
    let expected = "a.xlsx: `xl/styles.xml` inflates to more than 16777216 bytes; save the table";
    assert!(error.starts_with(expected), "{error}");
    let long = format!("<sst><si><t>{}</t></si></sst>", "x".repeat(5 << 20));
    let error = refused("xl/sharedStrings.xml", long.as_bytes());
    let expected =
        "a.xlsx: `xl/sharedStrings.xml` holds a text of more than 4194304 bytes; a cell holds at most 1048576";
    assert_eq!(error, expected);
    let many = [b"<sst>", "<si/>".repeat(8_400_000).as_bytes(), b"</sst>"].concat();
    let error = refused("xl/sharedStrings.xml", &many);
    let expected = "a.xlsx: `xl/sharedStrings.xml` holds more than 8388608 texts; save the table as .csv or .parquet";
    assert_eq!(error, expected);
    let error = refused("xl/sharedStrings.xml", br#"<sst uniqueCount="999999999999"><si><t>x</t></si></sst>"#);
    let expected =
        "a.xlsx: `xl/sharedStrings.xml` does not hold the number of texts that it declares; save it again as .xlsx";
    assert_eq!(error, expected);
    assert_eq!(
        workbook_of(&folder, &head, &[("xl/sharedStrings.xml", b"<sst uniqueCount=\"0\"></sst>")]).unwrap().len(),
        1
    );
}

#[test]
fn a_formula_without_its_value_is_named() {
    let folder = Folder::new();
    let sheet = |cell: &str| {
        let names = format!("{}{}", text_cell("A1", "问题"), text_cell("C1", "备注"));
        format!(r#"<row r="1">{names}</row><row r="2">{}{cell}</row>"#, text_cell("A2", "怎么吃"))
    };
    let expected = "a.xlsx: sheet `s`: cell A3 has a formula without its value; \
                    open the workbook in a spreadsheet program, which calculates it, and save it";
    for formula in ["<f>A2</f>", "<f>A2</f><v></v>", "<f>A2</f><v/>"] {
        let row = format!(r#"</row><row r="3"><c r="A3">{formula}</c>"#);
        assert_eq!(workbook_of(&folder, &sheet(&row), &[]).unwrap_err(), expected);
    }
    let unused = r#"<c r="C2"><f>A2</f></c>"#;
    assert_eq!(workbook_of(&folder, &sheet(unused), &[]).unwrap().len(), 1, "an unused column");
    let known = r#"</row><row r="3"><c r="A3" t="str"><f>A2</f><v>贵吗</v></c>"#;
    assert_eq!(workbook_of(&folder, &sheet(known), &[]).unwrap()[1].original_query, "贵吗");
}

/// Regression: a row or line without an end was read into memory completely.
#[test]
fn rows_and_lines_have_a_maximum_length() {
    let max_bytes = querl_core::fsx::MAX_ROW_BYTES;
    let long = "x".repeat(max_bytes + 100);
    let error = rejected("a.csv", format!("问题\n\"{long}"));
    let expected = format!("a row of more than {max_bytes} bytes; look for a quote that is not closed");
    assert!(error.ends_with(&expected), "{error}");
    let error = rejected("a.jsonl", format!("{{\"问题\": \"甲\"}}\n{{\"问题\": \"{long}\"}}\n"));
    let expected =
        format!("a.jsonl:2: not a valid record: a line of more than {max_bytes} bytes; fix or remove the line");
    assert_eq!(error, expected);
    let short: String = (0..200_000).map(|row| format!("{row},{}\n", "x".repeat(400))).collect();
    assert_eq!(
        Folder::new().open("a.csv", format!("问题,备注\n{short}")).unwrap().len(),
        200_000,
        "a large file of short rows"
    );
    let wide = format!("问题{}\n甲\n", ",x".repeat(20_000));
    assert_eq!(rejected("a.csv", wide), "a.csv: the table has 20001 columns; expected at most 16384");
    let expected = "a.csv: by its first bytes the file is compressed with gzip; decompress it";
    assert_eq!(rejected("a.csv", b"\x1f\x8b\x08\x00"), expected);
}

/// Regression: chat messages were read as the text of a query.
#[test]
fn a_column_of_chat_messages_is_refused_in_every_format() {
    let folder = Folder::new();
    let remedy = "holds a list of chat messages; \
                  write the text of the last user message in a column of its own, and name that in data.query_column; \
                  a summary of the earlier messages belongs in data.history_column";
    let error = |name| folder.refusal(name, json!({"query_column": "messages"}));
    let chat = r#"[{"role": "system", "content": "改写"}, {"role": "user", "content": "怎么吃"}]"#;
    let python = chat.replace('"', "'");
    let quoted = format!("\"{}\"", chat.replace('"', "\"\""));
    folder.file("a.jsonl", format!("{{\"messages\": {chat}}}\n"));
    folder.file("a.csv", format!("messages\n{quoted}\n"));
    folder.file("b.csv", format!("messages\n\"{python}\"\n"));
    folder.workbook(&[&["messages"], &[chat]]);
    std::fs::rename(folder.path("测试集.xlsx"), folder.path("a.xlsx")).unwrap();
    for (name, row) in [("a.jsonl", 1), ("a.csv", 2), ("b.csv", 2), ("a.xlsx", 2)] {
        assert_eq!(error(name), format!("{name}: row {row} column `messages` {remedy}"));
    }
    let schema = "message rows { optional group messages (LIST) { repeated group list { optional group element { \
                  optional binary role (UTF8); optional binary content (UTF8); } } } }";
    parquet_file(&folder.path("a.parquet"), schema, WriterProperties::default(), |group| {
        for text in ["user", "怎么吃"] {
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&[text.into()], Some(&[4]), Some(&[0])).unwrap();
            column.close().unwrap();
        }
    });
    assert_eq!(error("a.parquet"), format!("a.parquet: row 1 column `messages` {remedy}"));
    // Symptom: as the history, chat messages were read as its text.
    let as_history = |name| folder.refusal(name, json!({"query_column": "q", "history_column": "prompt"}));
    folder.file("h.jsonl", format!("{{\"q\": \"怎么吃\", \"prompt\": {chat}}}\n"));
    folder.file("h.csv", format!("q,prompt\n怎么吃,\n几粒,{quoted}\n"));
    assert_eq!(as_history("h.jsonl"), format!("h.jsonl: row 1 column `prompt` {remedy}"));
    assert_eq!(as_history("h.csv"), format!("h.csv: row 3 column `prompt` {remedy}"));
    assert!(!is_chat("[产品] 怎么吃 \"role\"") && !is_chat("{怎么吃}"));
}

mod properties {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const FORMATS: [&str; 5] = ["csv", "tsv", "jsonl", "xlsx", "parquet"];

    proptest! {
        #![proptest_config(crate::properties(64))]

        #[test]
        fn any_bytes_are_read_or_rejected_in_one_sentence(bytes in vec(any::<u8>(), 0..400), at in 0..FORMATS.len()) {
            let (folder, name) = (Folder::new(), format!("a.{}", FORMATS[at]));
            let start: &[u8] = match FORMATS[at] {
                "xlsx" => b"PK\x03\x04",
                "parquet" => b"PAR1",
                _ => "问题".as_bytes(),
            };
            for content in [bytes.clone(), [start, &bytes].concat()] {
                if let Err(error) = folder.open(&name, content) {
                    prop_assert!(error.starts_with(&name) && !error.contains('\n'), "{error:?}");
                }
            }
        }

        /// Only a changed text of a parquet file goes unnoticed: its pages have no checksums.
        #[test]
        fn a_damaged_table_has_all_rows_or_is_an_error(
            (at, bit) in (any::<prop::sample::Index>(), 0..8_u32), is_cut in any::<bool>(),
        ) {
            let folder = Folder::new();
            let cells = |path: &Path| -> Result<Vec<Vec<String>>, DataError> {
                let table = open_table(path)?;
                let columns: Vec<usize> = (0..table.header.len()).collect();
                table.rows(&columns)?.map(|row| row.map(|(_, cells)| cells)).collect()
            };
            for (name, whole) in samples(&folder).into_iter().filter(|(name, _)| !name.ends_with("sv")) {
                let path = folder.path(&name);
                std::fs::write(&path, &whole).unwrap();
                let rows = cells(&path).unwrap();
                let (mut damaged, at) = (whole.clone(), at.index(whole.len()));
                match is_cut {
                    true => damaged.truncate(at),
                    false => damaged[at] ^= 1 << bit,
                }
                std::fs::write(&path, &damaged).unwrap();
                let Ok(found) = cells(&path) else { continue };
                let n_rows = match is_cut && name.ends_with("jsonl") {
                    // Cut between two lines, or before the last line end.
                    true => damaged.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count(),
                    false => rows.len(),
                };
                prop_assert_eq!(found.len(), n_rows, "{}", name);
                if name.ends_with("xlsx") {
                    prop_assert_eq!(found, rows, "{}", name);
                }
            }
        }

        #[test]
        fn exported_tables_are_read_back(queries in vec("[^\\p{C}\\s]([^\\p{C}]|\n){0,40}", 1..20)) {
            let folder = Folder::new();
            let output = folder.path("a.jsonl");
            let unique: std::collections::BTreeSet<String> = queries.iter().map(|query| query.trim().to_owned()).collect();
            let row = |(row, query): (usize, &String)| QueryRow {
                id: query_id(query, "", ""),
                row,
                original_query: query.clone(),
                group: "g".into(),
                ..QueryRow::default()
            };
            let records = (2..).zip(&unique).map(row).map(|query| RewriteRecord { query, rewrite: Ok(Completion::of("改写")) });
            write_jsonl(&output, records).unwrap();
            write_tables::<RewriteRecord>(&output, &TableFormat::ALL).unwrap();
            for format in TableFormat::ALL {
                let read = rows(&config(table_path(&output, format)));
                let found: Vec<&String> = read.iter().map(|row| &row.original_query).collect();
                prop_assert_eq!(found, unique.iter().collect::<Vec<_>>(), "{:?}", format);
            }
        }
    }
}

mod columns {
    use super::*;
    use querl_core::records::{ColumnValue, Columns, Scalar};

    fn read(config: &DataConfig) -> Result<Vec<Columns>, String> {
        let queries: Vec<QueryRow> = open_queries(config).unwrap().read().unwrap().map(Result::unwrap).collect();
        let mut reader = ColumnReader::open(config).map_err(|error| error.to_string())?;
        queries.iter().map(|query| reader.read(query)).collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    fn text(value: &str) -> ColumnValue {
        ColumnValue::Text(value.into())
    }

    fn named(columns: &Columns) -> Vec<(&str, ColumnValue)> {
        columns.0.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
    }

    #[test]
    fn lines_have_typed_values_of_all_but_the_columns_of_the_query() {
        let folder = Folder::new();
        let rows = [
            json!({"original_query": "甲", "user_profile": "孕妇", "gold_ids": "p1", "price": 12, "sku": 9_007_199_254_740_993_u64, "is_new": true, "tags": ["a", 2, false, {"b": 1}],
                "note": "早上 ", "more": {"k": [1]}}),
            json!({"original_query": "乙", "price": null, "note": " ", "other": "x"}),
        ];
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        let config = folder.file("q.jsonl", lines);
        let columns = read(&config).unwrap();
        let scalar = |text: &str| Scalar::Text(text.into());
        let tags = vec![scalar("a"), Scalar::Number(2.0), Scalar::Flag(false), scalar("{\"b\":1}")];
        let mut first = named(&columns[0]);
        first.sort_by_key(|(name, _)| *name);
        let expected = [
            ("is_new", ColumnValue::Flag(true)),
            ("more", text("{\"k\":[1]}")),
            ("note", text("早上 ")),
            ("price", ColumnValue::Number(12.0)),
            ("sku", text("9007199254740993")),
            ("tags", ColumnValue::Items(tags)),
        ];
        assert_eq!(first, expected);
        assert_eq!(named(&columns[1]), [("other", text("x"))]);
    }

    #[test]
    fn cells_of_text_formats_are_texts_and_those_of_workbooks_typed() {
        let folder = Folder::new();
        let config = folder.file("q.csv", "original_query,price,flag\n甲,12,true\n");
        assert_eq!(named(&read(&config).unwrap()[0]), [("price", text("12")), ("flag", text("true"))]);
        let mut workbook = Workbook::new();
        let sheet = workbook.add_worksheet();
        for (column, name) in (0..).zip(["original_query", "price", "flag", "day", "note"]) {
            sheet.write(0, column, name).unwrap();
        }
        sheet.write(1, 0, "甲").unwrap();
        sheet.write(1, 1, 12.5).unwrap();
        sheet.write(1, 2, true).unwrap();
        let day = ExcelDateTime::from_ymd(2024, 5, 6).unwrap();
        sheet.write_with_format(1, 3, &day, &Format::new().set_num_format("yyyy-mm-dd")).unwrap();
        sheet.write(1, 4, "x").unwrap();
        workbook.save(folder.path("q.xlsx")).unwrap();
        let found = read(&super::config(folder.path("q.xlsx"))).unwrap();
        let (price, flag) = (ColumnValue::Number(12.5), ColumnValue::Flag(true));
        let expected = [("price", price), ("flag", flag), ("day", text("2024-05-06")), ("note", text("x"))];
        assert_eq!(named(&found[0]), expected);
    }

    #[test]
    fn nan_of_parquet_is_an_empty_cell_and_an_infinite_number_is_an_error() {
        let folder = Folder::new();
        let schema = "message rows { optional binary original_query (UTF8); optional double price; }";
        let read_price = |price: f64| {
            parquet_file(&folder.path("a.parquet"), schema, WriterProperties::default(), |columns| {
                put::<ByteArrayType>(columns, "鱼油".into());
                put::<DoubleType>(columns, price);
            });
            read(&super::config(folder.path("a.parquet")))
        };
        assert!(named(&read_price(f64::NAN).unwrap()[0]).is_empty());
        assert_eq!(named(&read_price(2.0).unwrap()[0]), [("price", ColumnValue::Number(2.0))]);
        let error = read_price(f64::INFINITY).unwrap_err();
        assert!(error.contains("row 1 column `price` holds an infinite number"), "{error}");
    }

    #[test]
    fn a_table_that_changed_and_rows_beyond_the_limits_are_errors() {
        let folder = Folder::new();
        let config = folder.file("q.csv", "original_query,price\n甲,1\n乙,2\n");
        let queries: Vec<QueryRow> = open_queries(&config).unwrap().read().unwrap().map(Result::unwrap).collect();
        folder.file("q.csv", "original_query,price\n甲,1\n丙,2\n");
        let mut reader = ColumnReader::open(&config).unwrap();
        assert_eq!(named(&reader.read(&queries[0]).unwrap()), [("price", text("1"))]);
        let error = reader.read(&queries[1]).unwrap_err().to_string();
        assert!(error.contains("row 3 is not the query that the run rewrote: the table was changed since"), "{error}");
        let mut reader = ColumnReader::open(&folder.file("q.csv", "original_query,price\n甲,1\n")).unwrap();
        assert!(reader.read(&queries[1]).is_err(), "the row is gone");
        let twice = read(&folder.file("q.csv", "original_query,price,price\n甲,1,2\n")).unwrap_err();
        assert!(twice.contains("columns 2 and 3 are both called `price`"), "{twice}");
        let items = json!({"original_query": "甲", "list": vec![0; Columns::MAX_ITEMS + 1]});
        let long = read(&folder.file("q.jsonl", items.to_string())).unwrap_err();
        assert!(long.contains("row 1: column `list` has a list of 1001 entries; a plugin gets at most 1000"), "{long}");
        let header: String = (0..=Columns::MAX).map(|n| format!(",c{n}")).collect();
        let many = folder.file("q.csv", format!("original_query{header}\n甲{}\n", ",1".repeat(Columns::MAX + 1)));
        let many = read(&many).unwrap_err();
        assert!(many.contains("row 2: has 257 other columns; a plugin gets at most 256"), "{many}");
    }
}
