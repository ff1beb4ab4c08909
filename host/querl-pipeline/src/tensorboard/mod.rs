//! TensorBoard event files: the same figures as `metrics.jsonl`, for those who watch runs in TensorBoard or W&B.
//!
//! One folder per stage holds one event file. A stage that goes on from a checkpoint cuts the file back to that checkpoint, so
//! that no reader sees a step twice.

mod record;

use prost::Message;
use record::{Records, write_record};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// First record of every event file.
const FILE_VERSION: &str = "brain.Event:2";

/// One record of an event file.
///
/// Source: TensorFlow's `event.proto`; only what scalar figures need.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

/// Source: TensorFlow's `summary.proto`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// The event file of one stage, opened to append.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Opens the event file in `folder`, or begins one; what a killed process left unfinished at its end is cut off.
    ///
    /// # Errors
    /// As the file system says.
    pub fn open(folder: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = match existing(folder)? {
            Some(path) => path,
            None => folder.join(format!("events.out.tfevents.{}.querl", seconds_since_1970() as u64)),
        };
        let file = OpenOptions::new().create(true).read(true).append(true).open(&path)?;
        let mut events = Self { file, path };
        events.keep(u64::MAX)?;
        Ok(events)
    }

    /// Appends the finite figures of one step.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&mut self, step: u64, metrics: &BTreeMap<String, f64>) -> io::Result<()> {
        let scalar = |(tag, value): (&String, &f64)| Scalar { tag: tag.clone(), simple_value: Some(*value as f32) };
        let value = metrics.iter().filter(|(_, value)| value.is_finite()).map(scalar).collect();
        self.write(Event { step: step as i64, summary: Some(Summary { value }), ..Event::now() })
    }

    /// Keeps the first `n` steps that were appended.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn rewind(&mut self, n: u64) -> io::Result<()> {
        self.keep(n)
    }

    /// Cuts the file before the first damaged record and after `n` steps; an empty one begins with the version.
    fn keep(&mut self, n: u64) -> io::Result<()> {
        let bytes = std::fs::read(&self.path)?;
        let (mut end, mut n_steps) = (0, 0);
        for (data, next) in Records::new(&bytes) {
            let Ok(event) = Event::decode(data) else { break };
            n_steps += u64::from(event.summary.is_some());
            if n_steps > n {
                break;
            }
            end = next;
        }
        self.file.set_len(end as u64)?;
        match end {
            0 => self.write(Event { file_version: Some(FILE_VERSION.into()), ..Event::now() }),
            _ => Ok(()),
        }
    }

    fn write(&mut self, event: Event) -> io::Result<()> {
        let mut record = Vec::new();
        write_record(&mut record, &event.encode_to_vec());
        self.file.write_all(&record)
    }
}

impl Event {
    fn now() -> Self {
        Self { wall_time: seconds_since_1970(), ..Self::default() }
    }
}

fn seconds_since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|time| time.as_secs_f64()).unwrap_or_default()
}

fn existing(folder: &Path) -> io::Result<Option<PathBuf>> {
    let is_event_file = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("events.out.tfevents."))
    };
    let paths: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(is_event_file).min())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn figures(value: f64) -> BTreeMap<String, f64> {
        BTreeMap::from([("actor/pg_loss".to_owned(), value), ("critic/vf_loss".to_owned(), f64::NAN)])
    }

    fn steps(events: &EventFile) -> Vec<(i64, usize)> {
        let bytes = std::fs::read(&events.path).unwrap();
        let event = |(data, _): (&[u8], usize)| Event::decode(data).unwrap();
        let with_summary = |event: Event| Some((event.step, event.summary?.value.len()));
        Records::new(&bytes).map(event).filter_map(with_summary).collect()
    }

    #[test]
    fn a_stage_that_goes_on_leaves_no_step_twice() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::open(folder.path()).unwrap();
        for step in 1..=5 {
            events.append(step, &figures(step as f64)).unwrap();
        }
        events.file.write_all(&[7; 11]).unwrap(); // what a killed process left
        let mut events = EventFile::open(folder.path()).unwrap();
        assert_eq!(steps(&events).len(), 5);
        events.rewind(3).unwrap();
        events.append(4, &figures(0.5)).unwrap();
        assert_eq!(steps(&events), [(1, 1), (2, 1), (3, 1), (4, 1)], "a value that is not finite is left out");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
