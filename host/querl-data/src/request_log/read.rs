//! Reads the files of a request log line by line. Damaged lines are reported, and reading continues.

use super::lines::{RequestLogLine, day_of_file_name};
use crate::error::DataError;
use querl_core::fsx::MAX_ROW_BYTES;
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The log file of a day, up to the length that it had when it was opened, since a server may append to it.
pub(super) struct LogFile {
    pub(super) path: PathBuf,
    pub(super) day: String,
    n_bytes: u64,
}

/// A line of a request log that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DamagedLine {
    /// Name of the log file.
    pub file: String,
    /// Number of the line in the file, from 1.
    pub line: usize,
    /// The problem, as the end of a sentence.
    pub problem: String,
}

/// The log files of a folder, in the order of their days.
pub(super) fn log_files(folder: &Path) -> Result<Vec<LogFile>, DataError> {
    let unreadable = |error: io::Error| DataError::read(folder, error);
    if !folder.is_dir() {
        return Err(DataError::file(folder, "there is no such folder; name the folder of --request_log"));
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        if let Some(day) = entry.file_name().to_str().and_then(day_of_file_name)
            && let Ok(meta) = std::fs::metadata(&path)
            && meta.is_file()
        {
            files.push(LogFile { day: day.to_owned(), n_bytes: meta.len(), path });
        }
    }
    if files.is_empty() {
        let problem = "the folder has no file of a request log (requests-YYYY-MM-DD.jsonl); check the path";
        return Err(DataError::file(folder, problem));
    }
    files.sort_by(|one, other| one.day.cmp(&other.day));
    Ok(files)
}

impl LogFile {
    /// Calls `on_line` with the number and the content of each non-empty line.
    pub(super) fn read(
        &self,
        mut on_line: impl FnMut(usize, Result<RequestLogLine, DamagedLine>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let unreadable = |error: io::Error| DataError::read(&self.path, error);
        let file = File::open(&self.path).map_err(unreadable)?;
        let mut reader = BufReader::with_capacity(1 << 16, file.take(self.n_bytes));
        let mut buffer = Vec::new();
        for number in 1.. {
            buffer.clear();
            let n_bytes =
                reader.by_ref().take(MAX_ROW_BYTES as u64).read_until(b'\n', &mut buffer).map_err(unreadable)?;
            if n_bytes == 0 {
                break;
            }
            let is_ended = buffer.last() == Some(&b'\n');
            let is_long = !is_ended && n_bytes == MAX_ROW_BYTES;
            if is_long {
                skip_line(&mut reader).map_err(unreadable)?;
            }
            if buffer.trim_ascii().is_empty() {
                continue;
            }
            let parsed = match is_long {
                true => Err(format!("is longer than {MAX_ROW_BYTES} bytes")),
                false => parse(&buffer, is_ended),
            };
            on_line(number, parsed.map_err(|problem| self.damaged(number, problem)))?;
        }
        Ok(())
    }

    fn damaged(&self, line: usize, problem: String) -> DamagedLine {
        let file = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        DamagedLine { file, line, problem }
    }
}

fn parse(line: &[u8], is_ended: bool) -> Result<RequestLogLine, String> {
    let parsed: RequestLogLine = serde_json::from_slice(line.trim_ascii()).map_err(|error| {
        if error.is_eof() {
            let when = if is_ended { "" } else { ", as the last line of a server that was killed or still writes" };
            return format!("is cut{when}");
        }
        let what = error.to_string();
        format!("is no line of a request log: {}", what.split(" at line ").next().unwrap_or(&what))
    })?;
    let (RequestLogLine::Rewrite(super::lines::LoggedRewrite { id, tenant, .. })
    | RequestLogLine::Feedback(super::lines::LoggedFeedback { id, tenant, .. })) = &parsed;
    match id.is_empty() || tenant.is_empty() {
        true => Err("is no line of a request log: `id` or `tenant` is missing".into()),
        false => Ok(parsed),
    }
}

fn skip_line(reader: &mut impl BufRead) -> io::Result<()> {
    loop {
        let buffered = reader.fill_buf()?;
        if buffered.is_empty() {
            return Ok(());
        }
        match buffered.iter().position(|byte| *byte == b'\n') {
            Some(end) => {
                reader.consume(end + 1);
                return Ok(());
            }
            None => {
                let n_bytes = buffered.len();
                reader.consume(n_bytes);
            }
        }
    }
}
