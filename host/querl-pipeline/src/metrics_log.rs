//! `metrics.jsonl`: metrics of training steps, appended as they are recorded, and the same metrics for TensorBoard.

use crate::interrupt::{self, AtSafePoints};
use crate::ledger::StageName;
use crate::tensorboard::EventFile;
use anyhow::Context;
use querl_core::fsx::write_atomic;
use querl_core::ports::LogMark;
use querl_core::run_dir::RunDir;
use querl_train::{MetricSink, Metrics};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The metrics log, opened to append the lines of one stage.
pub struct MetricsLog {
    path: PathBuf,
    stage: String,
    file: File,
    /// The stage's lines, with the checksum of their texts.
    end: LogMark,
    events: EventFile,
    extra: Option<Box<dyn Fn() -> BTreeMap<String, f64> + Send>>,
    /// Interrupt guard, held from the start of the training.
    at_safe_points: Option<AtSafePoints>,
}

impl MetricsLog {
    /// Opens the metrics log at `path`, which may already have lines of this and of other stages.
    ///
    /// # Errors
    /// The file cannot be opened or written.
    pub fn open(path: &Path, stage: &str) -> anyhow::Result<Self> {
        let unwritable = || format!("{}: cannot be written", path.display());
        drop_torn_line(path).with_context(unwritable)?;
        let end = of_stage(&read(path).with_context(unwritable)?, stage).fold(START, extended);
        let file = append_to(path).with_context(unwritable)?;
        let events = RunDir::tensorboard(path, stage);
        let events = EventFile::open(&events).with_context(|| format!("{}: cannot be written", events.display()))?;
        Ok(Self {
            path: path.to_owned(),
            stage: stage.to_owned(),
            file,
            end,
            events,
            extra: None,
            at_safe_points: None,
        })
    }

    /// Adds the metrics that `extra` returns to each line that training records.
    #[must_use]
    pub fn with(self, extra: impl Fn() -> BTreeMap<String, f64> + Send + 'static) -> Self {
        Self { extra: Some(Box::new(extra)), ..self }
    }

    /// Appends `{"stage": "rl", "step": 3, "actor/pg_loss": ...}`. A value that is not finite is written as null.
    pub(crate) fn append(&mut self, step: u64, metrics: &BTreeMap<String, f64>) -> io::Result<()> {
        let mut line = Map::new();
        line.insert("stage".into(), self.stage.as_str().into());
        line.insert("step".into(), step.into());
        line.extend(metrics.iter().map(|(name, value)| (name.clone(), Value::from(*value))));
        let mut text = serde_json::to_string(&line)?;
        let end = extended(self.end, &text);
        text.push('\n');
        self.file.write_all(text.as_bytes())?;
        self.end = end;
        self.events.append(step, metrics)
    }
}

impl MetricSink for MetricsLog {
    fn record(&mut self, _stage: &str, step: u64, metrics: &Metrics) -> io::Result<()> {
        let Some(extra) = &self.extra else { return self.append(step, metrics) };
        let mut all = metrics.clone();
        all.extend(extra());
        self.append(step, &all)
    }

    fn mark(&mut self) -> io::Result<LogMark> {
        sync(&self.file)?;
        Ok(self.end)
    }

    /// Removes later lines of this stage and keeps those of other stages. Each training starts with this call; from here on an interrupt
    /// saves its state.
    fn rewind(&mut self, mark: LogMark) -> io::Result<Option<String>> {
        self.at_safe_points.get_or_insert_with(interrupt::at_safe_points);
        let text = read(&self.path)?;
        let mut end = START;
        let is_kept = |line: &&str| match stage_of(line) {
            None => false,
            Some(stage) if stage == self.stage => {
                let is_before = end.length < mark.length;
                if is_before {
                    end = extended(end, line);
                }
                is_before
            }
            Some(_) => true,
        };
        let kept: String = text.lines().filter(is_kept).flat_map(|line| [line, "\n"]).collect();
        if kept != text {
            write_atomic(&self.path, kept.as_bytes())?;
            self.file = append_to(&self.path)?;
        }
        self.end = end;
        self.events.rewind(mark.length)?;
        let (path, stage) = (self.path.display(), &self.stage);
        let LogMark { length: wanted, crc32c } = mark;
        Ok(if end.length < wanted {
            Some(format!(
                "{path}: has {} lines of {stage}, and had {wanted} when the checkpoint was written",
                end.length
            ))
        } else if crc32c.is_some() && crc32c != end.crc32c {
            Some(format!("{path}: the first {wanted} lines of {stage} were changed after the checkpoint was written"))
        } else {
            None
        })
    }
}

/// The mark of a log without lines.
const START: LogMark = LogMark { length: 0, crc32c: Some(0) };

/// The mark after one more line.
fn extended(mark: LogMark, line: &str) -> LogMark {
    let crc32c = mark.crc32c.map(|crc| crc32c::crc32c_append(crc, line.as_bytes()));
    LogMark { length: mark.length + 1, crc32c }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Pipes and devices cannot be synced.
fn sync(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() { file.sync_data() } else { Ok(()) }
}

/// Reads the text of a metrics log; empty for a missing file, a pipe or a device. A last line that was cut within a character is left out.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_file() || meta.is_dir() => Ok(String::from_utf8_lossy(&std::fs::read(path)?).into_owned()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(String::new()),
    }
}

/// Terminates the last line, or removes it if it is incomplete, so that the next line is not appended to it.
fn drop_torn_line(path: &Path) -> io::Result<()> {
    let text = read(path)?;
    let (whole, last) = text.split_at(text.rfind('\n').map_or(0, |end| end + 1));
    match stage_of(last) {
        _ if last.is_empty() => Ok(()),
        Some(_) => write_atomic(path, format!("{text}\n").as_bytes()),
        None => write_atomic(path, whole.as_bytes()),
    }
}

/// The stage of a line; `None` for an incomplete line of a killed process.
fn stage_of(line: &str) -> Option<String> {
    let value: Value = serde_json::from_str(line).ok()?;
    Some(value["stage"].as_str()?.to_owned())
}

fn of_stage<'a>(text: &'a str, stage: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter(move |line| stage_of(line).is_some_and(|of_line| of_line == stage))
}

/// The lines of one stage in a metrics log; empty for a missing file.
pub(crate) fn lines_of(path: &Path, stage: &str) -> io::Result<String> {
    Ok(of_stage(&read(path)?, stage).flat_map(|line| [line, "\n"]).collect())
}

/// The lines of one stage.
#[derive(Debug, Default)]
pub(crate) struct StageLines {
    /// Text of the lines, as in the file.
    pub(crate) text: String,
    /// The lines, parsed as JSON.
    pub(crate) rows: Vec<Value>,
}

/// Reads the lines of every stage, by stage name; empty for a missing file.
pub(crate) fn by_stage(path: &Path) -> io::Result<BTreeMap<String, StageLines>> {
    let mut stages: BTreeMap<String, StageLines> = BTreeMap::new();
    for line in read(path)?.lines() {
        let Ok(row) = serde_json::from_str::<Value>(line) else { continue };
        let Some(stage) = row["stage"].as_str() else { continue };
        let of_stage = stages.entry(stage.to_owned()).or_default();
        of_stage.text.push_str(line);
        of_stage.text.push('\n');
        of_stage.rows.push(row);
    }
    Ok(stages)
}

/// Removes the lines of one stage from a metrics log; does nothing for a missing file.
pub(crate) fn remove_lines(path: &Path, stage: &str) -> io::Result<()> {
    replace_lines(path, stage, "")
}

/// Replaces the lines of one stage by `lines`, which are written before the lines of later stages.
pub(crate) fn replace_lines(path: &Path, stage: &str, lines: &str) -> io::Result<()> {
    let text = read(path)?;
    let is_other = |line: &&str| stage_of(line).is_some_and(|of_line| of_line != stage);
    let order = |stage: &str| StageName::ALL.iter().position(|name| name.as_str() == stage);
    let is_earlier = |line: &&str| stage_of(line).is_some_and(|of_line| order(&of_line) < order(stage));
    let others: Vec<&str> = text.lines().filter(is_other).collect();
    let (earlier, later) = others.split_at(others.iter().take_while(|line| is_earlier(line)).count());
    let joined = |lines: &[&str]| lines.iter().flat_map(|line| [*line, "\n"]).collect::<String>();
    let kept = joined(earlier) + lines + &joined(later);
    if kept == text { Ok(()) } else { write_atomic(path, kept.as_bytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_starts_over_replaces_only_its_own_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        remove_lines(&path, "sft").unwrap();
        let none = BTreeMap::from([("actor/pg_loss".into(), f64::NAN)]);
        MetricsLog::open(&path, "sft").unwrap().append(1, &BTreeMap::from([("loss".into(), 0.5)])).unwrap();
        let mut log = MetricsLog::open(&path, "rl").unwrap();
        log.append(1, &none).unwrap();
        log.file.write_all(b"{\"stage\":\"rl\",\"st").unwrap();
        remove_lines(&path, "sft").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"actor/pg_loss\":null,\"stage\":\"rl\",\"step\":1}\n");
    }

    #[test]
    fn a_rewound_log_keeps_other_stages_and_what_was_marked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let figures = |loss: f64| BTreeMap::from([("loss".to_owned(), loss)]);
        let mut rl = MetricsLog::open(&path, "rl").unwrap();
        rl.append(1, &figures(0.5)).unwrap();
        let mark = rl.mark().unwrap();
        rl.append(2, &figures(0.25)).unwrap();
        // Fine-tuning ran again in between: the position is a number of lines of the stage, not a file offset.
        MetricsLog::open(&path, "sft").unwrap().append(1, &figures(1.5)).unwrap();
        rl.file.write_all(b"{\"stage\":\"rl\",\"st").unwrap();
        let mut again = MetricsLog::open(&path, "rl").unwrap();
        assert_eq!(again.rewind(mark).unwrap(), None);
        again.append(2, &figures(0.125)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let line =
            |stage: &str, step: u64, loss: f64| format!("{{\"loss\":{loss},\"stage\":\"{stage}\",\"step\":{step}}}\n");
        assert_eq!(text, [line("rl", 1, 0.5), line("sft", 1, 1.5), line("rl", 2, 0.125)].concat());
        assert_eq!(again.mark().unwrap().length, 2);
        let stages = by_stage(&path).unwrap();
        for (stage, lines) in &stages {
            assert_eq!((&lines.text, lines.rows.len()), (&lines_of(&path, stage).unwrap(), lines.text.lines().count()));
        }
        assert_eq!(stages.keys().collect::<Vec<_>>(), ["rl", "sft"]);
    }

    /// Regression: a log that had lost its lines, or in which a number was changed, was truncated to the checkpoint without a word.
    #[test]
    fn a_log_that_differs_from_what_it_was_at_the_mark_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::open(&path, "rl").unwrap();
        for step in [1, 2] {
            log.append(step, &BTreeMap::from([("loss".to_owned(), 0.5)])).unwrap();
        }
        let (mark, whole) = (log.mark().unwrap(), std::fs::read_to_string(&path).unwrap());
        let rewound = |text: &str, mark: LogMark| {
            std::fs::write(&path, text).unwrap();
            let difference = MetricsLog::open(&path, "rl").unwrap().rewind(mark).unwrap();
            difference.map(|text| text.replace(&path.display().to_string(), "LOG"))
        };
        let changed = whole.replacen("0.5", "0.6", 1);
        assert_eq!(rewound(&whole, mark), None);
        let expected = "LOG: has 0 lines of rl, and had 2 when the checkpoint was written";
        assert_eq!(rewound("", mark).as_deref(), Some(expected));
        let expected = "LOG: the first 2 lines of rl were changed after the checkpoint was written";
        assert_eq!(rewound(&changed, mark).as_deref(), Some(expected));
        // Checkpoints of earlier versions have no checksum.
        assert_eq!(rewound(&changed, LogMark { crc32c: None, ..mark }), None);
    }

    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::properties(64))]

        /// Regression: the first line after a kill was joined with the line that the kill had cut, and both were lost.
        #[test]
        fn a_log_that_is_cut_anywhere_keeps_its_whole_lines_and_the_next_one(
            steps in vec(btree_map("[^\\p{C}]{1,8}", -1e6..1e6_f64, 1..4), 1..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("metrics.jsonl");
            let mut log = MetricsLog::open(&path, "rl").unwrap();
            for (step, metrics) in (1..).zip(&steps) {
                let named = metrics.iter().map(|(name, value)| (format!("calls/{name}"), *value)).collect();
                log.append(step, &named).unwrap();
            }
            let bytes = std::fs::read(&path).unwrap();
            let kept = &bytes[..cut.index(bytes.len() + 1)];
            std::fs::write(&path, kept).unwrap();
            // A line that lacks only the line break is complete.
            let last = kept.rsplit(|byte| *byte == b'\n').next().unwrap();
            let is_last_whole = serde_json::from_slice::<Value>(last).is_ok();
            let n_whole = kept.iter().filter(|byte| **byte == b'\n').count() + usize::from(is_last_whole);
            MetricsLog::open(&path, "rl").unwrap().append(99, &BTreeMap::new()).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            prop_assert_eq!(lines.len(), n_whole + 1);
            for (line, metrics) in lines.iter().zip(&steps).take(n_whole) {
                for (name, value) in metrics {
                    prop_assert_eq!(line[format!("calls/{name}")].as_f64(), Some(*value));
                }
            }
            prop_assert_eq!(&lines[n_whole]["step"], 99);
        }

        #[test]
        fn any_bytes_are_a_log(bytes in vec(any::<u8>(), 0..200)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("metrics.jsonl");
            std::fs::write(&path, bytes).unwrap();
            remove_lines(&path, "sft").unwrap();
            MetricsLog::open(&path, "rl").unwrap().append(1, &BTreeMap::new()).unwrap();
            prop_assert_eq!(lines_of(&path, "rl").unwrap(), "{\"stage\":\"rl\",\"step\":1}\n");
        }
    }
}
