//! Tables that are damaged, or not what their names say: each is refused with one sentence, or read as far as it says anything.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::dataset::export::{table_path, write_tables};
use querl_core::config::TableFormat;
use querl_core::fsx::write_jsonl;
use querl_core::records::{Completion, RewriteRecord};
use rust_xlsxwriter::{ExcelDateTime, Format, Workbook};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(&self, name: &str, content: impl AsRef<[u8]>) -> Result<Vec<QueryRow>, String> {
        std::fs::write(self.0.path().join(name), content).unwrap();
        self.read(name)
    }

    fn read(&self, name: &str) -> Result<Vec<QueryRow>, String> {
        let path = self.0.path().join(name);
        let config: DataConfig = serde_json::from_value(serde_json::json!({ "input": path })).unwrap();
        let rows = || open_queries(&config)?.read()?.collect::<Result<Vec<_>, _>>();
        rows().map_err(|error| error.to_string().replace(&format!("{}/", self.0.path().display()), ""))
    }
}

fn refused(name: &str, content: impl AsRef<[u8]>) -> String {
    Folder::new().open(name, content).unwrap_err()
}

#[test]
fn a_quote_that_is_not_closed_is_named_with_its_row() {
    let said = refused("a.csv", "问题,用户画像\n甲,乙\n\"鱼油,怎么吃\n丙,丁\n");
    let expected = "a.csv: row 3: the quote before `鱼油,怎么吃\\n丙,丁` is not closed; close it, or write a quote within a quoted cell twice";
    assert_eq!(said, expected);
    assert!(refused("a.tsv", "\"问题\t用户画像\n甲\t乙\n").starts_with("a.tsv: row 1: the quote before `问题"));
    assert!(refused("b.csv", "问题\n\"甲").starts_with("b.csv: row 2: the quote before `甲` is not closed"));
}

#[test]
fn quoted_separators_line_breaks_and_quotes_are_text() {
    let rows = Folder::new().open("a.csv", "问题,用户画像\r\n\"甲,\n乙\",\"a \"\"b\"\"\"\r\n5\" 的管子,\r\n").unwrap();
    assert_eq!((rows[0].original_query.as_str(), rows[0].user_profile.as_str()), ("甲,\n乙", "a \"b\""));
    assert_eq!(rows[1].original_query, "5\" 的管子");
}

#[test]
fn rows_may_be_shorter_than_the_header_and_not_longer() {
    let folder = Folder::new();
    let rows = folder.open("a.csv", "问题,用户画像,历史摘要\n甲\n乙,a\n丙,a,b,, ,\n").unwrap();
    assert_eq!(rows.iter().map(|row| row.row).collect::<Vec<_>>(), [2, 3, 4]);
    let said = refused("a.csv", "问题,用户画像\n甲,a\n乙,多少钱,a\n");
    let expected = "a.csv: row 3 has 3 cells, and the header 2; put quotes around a cell that holds a separator";
    assert_eq!(said, expected);
}

#[test]
fn bytes_that_are_no_text_are_named_with_their_line() {
    let said = refused("a.csv", "问题,用户画像\n甲,a\0b\n");
    let zero = "holds a zero byte, as UTF-16 without its mark does and no text; save the file again as UTF-8";
    assert_eq!(said, format!("a.csv:2: {zero}"));
    let utf16: Vec<u8> = "问题,用户画像\n甲,乙\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(refused("a.csv", &utf16), format!("a.csv:1: {zero}"));
    let marked = [&[0xff, 0xfe][..], &utf16].concat();
    assert_eq!(Folder::new().open("a.csv", &marked).unwrap()[0].user_profile, "乙");
    assert!(refused("a.csv", &marked[..marked.len() - 1]).contains("a character is not UTF-16 (little-endian); save"));
    let gbk = [&encoding_rs::GBK.encode("问题,用户画像\n甲,乙\n").0[..], b"\xff\xff,\x81\n"].concat();
    assert_eq!(refused("a.csv", gbk), "a.csv:3: a character is not UTF-8 or GB18030; save the file again as UTF-8");
}

#[test]
fn files_under_the_wrong_name_are_told_from_their_first_bytes() {
    let archive = "by its first bytes the file is a workbook or another archive; give a workbook the ending .xlsx";
    assert_eq!(refused("a.csv", b"PK\x03\x04rest"), format!("a.csv: {archive}"));
    assert!(refused("a.jsonl", b"PAR1rest").ends_with("the file is parquet; give it that ending"));
    assert!(refused("a.xlsx", [0xd0, 0xcf, 0x11, 0xe0]).ends_with("save it as .xlsx without a password"));
    assert!(
        refused("a.csv", "问题;用户画像\n甲;乙\n")
            .ends_with("save it with `,` instead of `;` between cells, or with tabs as .tsv")
    );
    assert!(refused("a.csv", "问题\t用户画像\n甲\t乙\n").contains("instead of `\\t` between cells"));
}

#[test]
fn a_column_that_counts_is_there_once() {
    let said = refused("a.csv", "问题,用户画像,问题\n甲,a,乙\n");
    assert_eq!(said, "a.csv: columns 1 and 3 are both called `问题`; rename one of them");
    assert!(Folder::new().open("a.csv", "问题,备注,备注\n甲,a,乙\n").is_ok(), "what is not read may be there twice");
}

#[test]
fn a_cell_that_is_no_text_anybody_asks_is_refused() {
    let cell = "鱼".repeat(400_000);
    let expected = "row 2 column `问题`: a cell of 1200000 bytes; expected at most 1048576";
    assert!(refused("a.csv", format!("问题\n{cell}\n")).contains(expected));
    assert!(refused("a.jsonl", format!("\n{{\"问题\": \"{cell}\"}}\n")).contains(expected));
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
    workbook.save(folder.0.path().join("a.xlsx")).unwrap();
    let row = folder.read("a.xlsx").unwrap().remove(0);
    assert_eq!((row.original_query.as_str(), row.user_profile.as_str()), ("2026-01-02", "2026-01-02 12:30:00"));
}

/// Numbers that look random and are the same each time (Steele et al. 2014, "Fast splittable pseudorandom number generators").
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n as u64) as usize
    }

    /// One to four bytes changed, put in or taken out, or the end cut off.
    fn damage(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(4) {
                0 => bytes[at] = self.below(256) as u8,
                1 => bytes.insert(at, b"\",\n\r\t\0\\{}"[self.below(9)]),
                2 => drop(bytes.remove(at)),
                _ if self.below(4) == 0 => bytes.truncate(at.max(1)),
                _ => bytes[at] ^= 1 << self.below(8),
            }
        }
        bytes
    }
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
    let (formats, output) = ([TableFormat::Xlsx, TableFormat::Parquet], folder.0.path().join("a.jsonl"));
    let records = folder.open("a.csv", text).unwrap().into_iter().map(|query| {
        let completion: Completion = serde_json::from_value(serde_json::json!({ "text": "改写" })).unwrap();
        RewriteRecord { query, rewrite: Ok(completion) }
    });
    write_jsonl(&output, records).unwrap();
    write_tables::<RewriteRecord>(&output, &formats).unwrap();
    samples.extend(formats.map(|format| {
        let path = table_path(&output, format);
        (format!("a.{}", format.extension()), std::fs::read(path).unwrap())
    }));
    samples
}

#[test]
fn damaged_files_of_every_format_are_read_or_refused_in_one_sentence() {
    let folder = Folder::new();
    let mut random = SplitMix(1);
    for (name, whole) in samples(&folder) {
        assert!(folder.open(&name, &whole).unwrap().len() >= 2, "{name}");
        for _ in 0..400 {
            let damaged = random.damage(&whole);
            if let Err(said) = folder.open(&name, &damaged) {
                assert!(said.starts_with(&name) && !said.contains('\n'), "{said:?}");
            }
        }
    }
}

/// A parquet file of one row group with the columns that `write` fills.
fn parquet_file(
    path: &Path,
    schema: &str,
    write: impl FnOnce(&mut ::parquet::file::writer::SerializedRowGroupWriter<'_, std::fs::File>),
) {
    let schema = ::parquet::schema::parser::parse_message_type(schema).unwrap();
    let file = std::fs::File::create(path).unwrap();
    let mut writer =
        ::parquet::file::writer::SerializedFileWriter::new(file, Arc::new(schema), Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    write(&mut group);
    group.close().unwrap();
    writer.close().unwrap();
}

fn put<T: ::parquet::data_type::DataType>(
    group: &mut ::parquet::file::writer::SerializedRowGroupWriter<'_, std::fs::File>,
    value: T::T,
) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<T>().write_batch(&[value], Some(&[1]), None).unwrap();
    column.close().unwrap();
}

/// Regression: a panic over a date that stands for "no end", in a column that nobody reads.
#[test]
fn columns_of_parquet_that_are_not_read_may_hold_anything() {
    use ::parquet::data_type::{ByteArrayType, FixedLenByteArrayType, FloatType, Int32Type, Int64Type};
    let folder = Folder::new();
    let schema = "message rows { optional int32 until (DATE); optional binary original_query (UTF8); \
                  optional int64 at (TIMESTAMP_MICROS); optional fixed_len_byte_array(12) span (INTERVAL); \
                  optional float gold_ids; optional binary user_profile; }";
    let write = |name: &str, profile: &'static [u8]| {
        parquet_file(&folder.0.path().join(name), schema, |group| {
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
    assert_eq!(gold_ids, &["11"], "an id and no fraction");
    let said = |column: &str, file: &str| {
        let path = folder.0.path().join(file);
        let config = serde_json::json!({ "input": path, "group_column": column });
        let config: DataConfig = serde_json::from_value(config).unwrap();
        open_queries(&config).unwrap_err().to_string().replace(&format!("{}/", folder.0.path().display()), "")
    };
    let remedy = "write the column as text, numbers or lists of them";
    assert_eq!(said("until", "a.parquet"), format!("a.parquet: row 1 column `until` holds a date; {remedy}"));
    assert_eq!(said("at", "a.parquet"), format!("a.parquet: row 1 column `at` holds a date; {remedy}"));
    assert!(said("span", "a.parquet").starts_with("a.parquet: "));
    write("b.parquet", b"\xff\xfe");
    let expected = format!("b.parquet: row 1 column `user_profile` holds bytes that are no UTF-8 text; {remedy}");
    assert_eq!(folder.read("b.parquet").unwrap_err(), expected);
}

#[test]
fn a_table_that_is_saved_while_it_is_read_is_refused() {
    let folder = Folder::new();
    folder.open("a.csv", "问题\n甲\n乙\n").unwrap();
    let path = folder.0.path().join("a.csv");
    let config: DataConfig = serde_json::from_value(serde_json::json!({ "input": path })).unwrap();
    let table = open_queries(&config).unwrap();
    let mut rows = table.read().unwrap();
    assert_eq!(rows.next().unwrap().unwrap().original_query, "甲");
    std::fs::write(&path, "问题\n甲\n乙\n丙\n").unwrap();
    let error = rows.last().unwrap().unwrap_err().to_string();
    assert!(error.ends_with("a.csv: was changed while it was read; run the same command again"), "{error}");
    assert!(table.read().is_err());
}

#[test]
fn further_sheets_go_on_with_the_first_where_their_columns_are_its() {
    let folder = Folder::new();
    let mut workbook = Workbook::new();
    for (name, header, query) in [("一", "问题", "甲"), ("说明", "备注", "x"), ("二", "问题", "乙")] {
        let sheet = workbook.add_worksheet().set_name(name).unwrap();
        sheet.write_column(0, 0, [header, query]).unwrap();
    }
    workbook.add_worksheet().set_name("空").unwrap();
    workbook.save(folder.0.path().join("a.xlsx")).unwrap();
    let rows = folder.read("a.xlsx").unwrap();
    let queries: Vec<(usize, &str)> = rows.iter().map(|row| (row.row, row.original_query.as_str())).collect();
    assert_eq!(queries, [(2, "甲"), (1_048_578, "乙")]);
    let config = serde_json::json!({ "input": folder.0.path().join("a.xlsx") });
    let table = open_queries(&serde_json::from_value(config).unwrap()).unwrap();
    assert_eq!(table.findings().unread_sheets, ["说明"]);
    let note = "sheets passed over, as their columns are not those of the first: `说明`";
    assert!(table.findings().notes().iter().any(|said| said == note), "{:?}", table.findings().notes());
}
