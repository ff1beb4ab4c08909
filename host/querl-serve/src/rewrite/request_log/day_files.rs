//! Log files, one for each day, limited in number and in total size.

use chrono::{Days, NaiveDate};
use querl_data::{day_file_name, day_of_file_name};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Maximum size of all files together, in bytes.
    pub(super) max_bytes: u64,
    /// Number of days for which files are kept, today included.
    pub(super) max_days: u32,
}

/// The log files of a folder, one for each day. Files with other names are left alone.
pub(super) struct DayFiles {
    folder: PathBuf,
    bounds: Bounds,
    /// Size in bytes by day.
    sizes: BTreeMap<String, u64>,
    /// The last day that was written to.
    today: String,
}

/// The lines of a batch that were not written.
#[derive(Debug, Default)]
pub(super) struct Unwritten {
    /// Number of lines that did not fit within `max_bytes`.
    pub(super) n_beyond_limit: usize,
    /// Number of lines that the file system did not accept, and its error; `None` if there were none.
    pub(super) failed: Option<(usize, io::Error)>,
}

impl DayFiles {
    pub(super) fn open(folder: PathBuf, bounds: Bounds) -> io::Result<Self> {
        let mut files = Self { folder, bounds, sizes: BTreeMap::new(), today: String::new() };
        files.read_sizes()?;
        Ok(files)
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, day: &str) -> PathBuf {
        self.folder.join(day_file_name(day))
    }

    fn read_sizes(&mut self) -> io::Result<()> {
        self.sizes.clear();
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            if let Some(day) = entry.file_name().to_str().and_then(day_of_file_name) {
                self.sizes.insert(day.to_owned(), entry.metadata()?.len());
            }
        }
        Ok(())
    }

    /// Appends lines, each ending with its line break, to the file of a day. Removes the oldest files if a line would exceed
    /// `max_bytes`; a line that does not fit although only the file of the day is left is not written.
    pub(super) fn append<'a>(&mut self, day: &str, lines: impl ExactSizeIterator<Item = &'a [u8]>) -> Unwritten {
        if self.today != day {
            self.today = day.to_owned();
            self.remove_old(day);
        }
        let n_lines = lines.len();
        let (mut file, n_bytes) = match open_at_end(&self.path(day)) {
            Ok(opened) => opened,
            Err(error) => return Unwritten { n_beyond_limit: 0, failed: Some((n_lines, error)) },
        };
        self.sizes.insert(day.to_owned(), n_bytes);
        let (mut bytes, mut n_beyond_limit) = (Vec::new(), 0);
        for line in lines {
            match self.has_room(day, (bytes.len() + line.len()) as u64) {
                true => bytes.extend_from_slice(line),
                false => n_beyond_limit += 1,
            }
        }
        match file.write_all(&bytes) {
            Ok(()) => {
                self.sizes.insert(day.to_owned(), n_bytes + bytes.len() as u64);
                Unwritten { n_beyond_limit, failed: None }
            }
            Err(error) => {
                // Removes lines that were partly written, so that later lines do not follow an incomplete one.
                let _ = file.set_len(n_bytes);
                Unwritten { n_beyond_limit, failed: Some((n_lines - n_beyond_limit, error)) }
            }
        }
    }

    /// Removes the oldest earlier days if necessary. Returns true if `n_bytes` more can be written on this day.
    fn has_room(&mut self, day: &str, n_bytes: u64) -> bool {
        loop {
            let n_used: u64 = self.sizes.values().sum();
            if n_used.saturating_add(n_bytes) <= self.bounds.max_bytes {
                return true;
            }
            match self.sizes.keys().next().cloned() {
                Some(oldest) if oldest.as_str() < day && self.remove(&oldest) => {}
                _ => return false,
            }
        }
    }

    /// Removes the files of days that are older than `max_days` at the given day.
    pub(super) fn remove_old(&mut self, day: &str) {
        if let Err(error) = self.read_sizes() {
            tracing::warn!("{}: the request log cannot be read: {error}", self.folder.display());
        }
        let n_before = u64::from(self.bounds.max_days.saturating_sub(1));
        let day = day.parse::<NaiveDate>().ok();
        let Some(first) = day.and_then(|day| day.checked_sub_days(Days::new(n_before))) else { return };
        let first = first.to_string();
        let old: Vec<String> = self.sizes.keys().take_while(|day| **day < first).cloned().collect();
        for day in old {
            self.remove(&day);
        }
    }

    fn remove(&mut self, day: &str) -> bool {
        let path = self.path(day);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("{}: cannot be removed from the request log: {error}", path.display());
                false
            }
            _ => self.sizes.remove(day).is_some(),
        }
    }
}

/// Opens a file for appending, and terminates an incomplete line of a killed server. Returns the file and its length.
fn open_at_end(path: &Path) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    let n_bytes = file.metadata()?.len();
    if n_bytes == 0 {
        return Ok((file, 0));
    }
    let mut last = [0];
    file.seek(SeekFrom::Start(n_bytes - 1))?;
    file.read_exact(&mut last)?;
    if last == *b"\n" {
        return Ok((file, n_bytes));
    }
    file.write_all(b"\n")?;
    Ok((file, n_bytes + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &[u8] = b"0123456789\n";

    fn open(folder: &Path, max_bytes: u64, max_days: u32) -> DayFiles {
        DayFiles::open(folder.to_owned(), Bounds { max_bytes, max_days }).unwrap()
    }

    fn days(folder: &Path) -> Vec<String> {
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut days: Vec<String> = names.filter_map(|name| day_of_file_name(&name).map(str::to_owned)).collect();
        days.sort();
        days
    }

    #[test]
    fn the_oldest_day_is_removed_for_a_new_line_and_a_day_never_exceeds_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = open(folder.path(), 60, 30);
        for day in ["2026-11-24", "2026-11-25"] {
            assert_eq!(files.append(day, [LINE; 2].into_iter()).n_beyond_limit, 0);
        }
        let written = files.append("2026-11-26", [LINE; 3].into_iter());
        assert_eq!((written.n_beyond_limit, days(folder.path())), (0, vec!["2026-11-25".into(), "2026-11-26".into()]));
        let written = files.append("2026-11-26", [LINE; 5].into_iter());
        assert_eq!((written.n_beyond_limit, days(folder.path())), (3, vec!["2026-11-26".into()]));
        assert_eq!(std::fs::metadata(files.path("2026-11-26")).unwrap().len(), 55);
        // A shorter line still fits, also after a restart.
        let mut files = open(folder.path(), 60, 30);
        assert_eq!(files.append("2026-11-26", [LINE, b"abc\n"].into_iter()).n_beyond_limit, 1);
        assert_eq!(std::fs::metadata(files.path("2026-11-26")).unwrap().len(), 59);
    }

    #[test]
    fn days_beyond_their_number_are_removed_and_other_files_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["requests-2026-11-01.jsonl", "requests-2026-11-24.jsonl", "requests-2026-11-25.jsonl", "notes.txt"]
        {
            std::fs::write(folder.path().join(name), LINE).unwrap();
        }
        let mut files = open(folder.path(), 1000, 2);
        assert!(files.append("2026-11-26", [LINE].into_iter()).failed.is_none());
        assert_eq!(days(folder.path()), ["2026-11-25", "2026-11-26"]);
        files.remove_old("2026-12-31");
        assert_eq!(days(folder.path()), [""; 0]);
        assert!(folder.path().join("notes.txt").exists());
    }

    #[test]
    fn a_line_that_was_cut_is_ended_before_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = open(folder.path(), 1000, 2);
        std::fs::write(files.path("2026-11-26"), b"{}\n{\"a\": ").unwrap();
        files.append("2026-11-26", [LINE].into_iter());
        assert_eq!(std::fs::read(files.path("2026-11-26")).unwrap(), b"{}\n{\"a\": \n0123456789\n");
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read_a_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let mut files = open(folder.path(), 1000, 2);
        files.append("2026-11-26", [LINE].into_iter());
        assert_eq!(std::fs::metadata(files.path("2026-11-26")).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_reported_with_the_number_of_lines() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = open(folder.path(), 1000, 2);
        std::os::unix::fs::symlink("/dev/full", files.path("2026-11-26")).unwrap();
        let (n_lines, error) = files.append("2026-11-26", [LINE; 2].into_iter()).failed.unwrap();
        assert_eq!((n_lines, error.kind()), (2, io::ErrorKind::StorageFull));
    }
}
