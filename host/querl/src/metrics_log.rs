//! `metrics.jsonl`: figures of training steps, appended as they come.

use anyhow::Context;
use querl_core::fsx::write_atomic;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// The file, opened to append.
#[derive(Debug)]
pub struct MetricsLog {
    file: File,
}

impl MetricsLog {
    /// Opens the log at `path`, which may have lines of earlier stages.
    ///
    /// # Errors
    /// As the file system says.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ok(Self { file: file.with_context(|| format!("{}: cannot be written", path.display()))? })
    }

    /// Appends `{"stage": "rl", "step": 3, "actor/pg_loss": ...}`. A value that is not finite is written as null.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&mut self, stage: &str, step: u64, metrics: &BTreeMap<String, f64>) -> io::Result<()> {
        let mut line = Map::new();
        line.insert("stage".into(), stage.into());
        line.insert("step".into(), step.into());
        line.extend(metrics.iter().map(|(name, value)| (name.clone(), Value::from(*value))));
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }
}

/// Removes the lines of one stage; a missing file is fine.
///
/// # Errors
/// As the file system says.
pub fn remove_stage(path: &Path, stage: &str) -> io::Result<()> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        text => text?,
    };
    // A line that a killed process left unfinished belongs to nobody.
    let is_other = |line: &&str| serde_json::from_str::<Value>(line).is_ok_and(|value| value["stage"] != stage);
    let kept: String = text.lines().filter(is_other).flat_map(|line| [line, "\n"]).collect();
    write_atomic(path, kept.as_bytes())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_run_anew_replaces_its_own_lines_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        remove_stage(&path, "sft").unwrap();
        let mut log = MetricsLog::open(&path).unwrap();
        log.append("sft", 1, &BTreeMap::from([("loss".into(), 0.5)])).unwrap();
        log.append("rl", 1, &BTreeMap::from([("actor/pg_loss".into(), f64::NAN)])).unwrap();
        log.file.write_all(b"{\"stage\":\"rl\",\"st").unwrap();
        remove_stage(&path, "sft").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"actor/pg_loss\":null,\"stage\":\"rl\",\"step\":1}\n");
    }
}
