//! Records as spreadsheets, with the columns that the source plan's tools read.

use crate::error::DataError;
use querl_core::fsx::write_atomic;
use querl_core::records::{RewriteRecord, ValidatedRecord};
use rust_xlsxwriter::{Workbook, Worksheet, XlsxError};
use std::path::Path;

const REWRITE_COLUMNS: [&str; 5] = ["original_query", "rewritten_query", "user_profile", "history_summary", "error"];
const VALIDATED_COLUMNS: [&str; 8] = [
    "original_query",
    "rewritten_query",
    "user_profile",
    "history_summary",
    "recall_count",
    "top1_score",
    "success",
    "error",
];

/// Writes rewrites as a workbook; a failed row has an empty `rewritten_query` and its reason in `error`.
///
/// # Errors
/// The file cannot be written.
pub fn write_rewrites_xlsx(path: &Path, records: &[RewriteRecord]) -> Result<(), DataError> {
    write_sheet(path, &REWRITE_COLUMNS, |sheet| {
        for (record, row) in records.iter().zip(1..) {
            write_query(sheet, row, record)?;
            if let Err(failure) = &record.rewrite {
                sheet.write(row, 4, failure.to_string())?;
            }
        }
        Ok(())
    })
}

/// Writes validated rewrites as a workbook. `recall_count` and `top1_score` are empty where retrieval failed or was not tried;
/// `success` says whether it answered; `error` says why not.
///
/// # Errors
/// The file cannot be written.
pub fn write_validated_xlsx(path: &Path, records: &[ValidatedRecord]) -> Result<(), DataError> {
    write_sheet(path, &VALIDATED_COLUMNS, |sheet| {
        for (record, row) in records.iter().zip(1..) {
            write_query(sheet, row, &record.rewritten)?;
            if let Some(Ok(hits)) = &record.retrieval {
                sheet.write(row, 4, hits.len() as u32)?;
            }
            if let Some(score) = record.top1_score() {
                sheet.write(row, 5, score)?;
            }
            sheet.write(row, 6, matches!(&record.retrieval, Some(Ok(_))))?;
            let retrieval_failure = record.retrieval.as_ref().and_then(|retrieval| retrieval.as_ref().err());
            if let Some(failure) = record.rewritten.rewrite.as_ref().err().or(retrieval_failure) {
                sheet.write(row, 7, failure.to_string())?;
            }
        }
        Ok(())
    })
}

fn write_query(sheet: &mut Worksheet, row: u32, record: &RewriteRecord) -> Result<(), XlsxError> {
    let rewrite = record.rewrite.as_ref().map_or("", |completion| completion.text.as_str());
    let query = &record.query;
    for (column, text) in (0..).zip([&query.original_query, rewrite, &query.user_profile, &query.history_summary]) {
        sheet.write(row, column, text)?;
    }
    Ok(())
}

fn write_sheet(
    path: &Path,
    columns: &[&str],
    fill: impl FnOnce(&mut Worksheet) -> Result<(), XlsxError>,
) -> Result<(), DataError> {
    let bytes = || -> Result<Vec<u8>, XlsxError> {
        let mut workbook = Workbook::new();
        let sheet = workbook.add_worksheet();
        for (column, name) in (0..).zip(columns) {
            sheet.write(0, column, *name)?;
        }
        fill(sheet)?;
        workbook.save_to_buffer()
    };
    let bytes = bytes().map_err(|error| DataError::file(path, format!("cannot be made: {error}")))?;
    write_atomic(path, &bytes).map_err(|error| DataError::write(path, error))
}
