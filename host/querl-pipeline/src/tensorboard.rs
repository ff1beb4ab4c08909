//! TensorBoard event files: the figures of `metrics.jsonl` for TensorBoard and W&B.
//!
//! One folder per stage holds one event file. A stage that resumes from a checkpoint cuts the file back to it, so that no reader sees a
//! step twice. Framing of a record: length, checksum of the length, data, checksum of the data. Source: TensorFlow's
//! `lib/io/record_writer.cc`.

use prost::Message;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const FILE_VERSION: &str = "brain.Event:2";

/// One record of an event file.
///
/// Source: TensorFlow's `event.proto`; only the fields for scalars.
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

/// The TensorBoard event file of one stage, opened to append.
#[derive(Debug)]
pub(crate) struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Opens or creates the event file in `folder`; an unfinished record at its end is removed.
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = match existing(folder)? {
            Some(path) => path,
            None => folder.join(format!("events.out.tfevents.{}.querl", seconds_since_1970() as u64)),
        };
        let file = OpenOptions::new().create(true).read(true).append(true).open(&path)?;
        let mut events = Self { file, path };
        events.rewind(u64::MAX)?;
        Ok(events)
    }

    /// Appends the metrics of one step that are finite.
    pub(crate) fn append(&mut self, step: u64, metrics: &BTreeMap<String, f64>) -> io::Result<()> {
        let scalar = |(tag, value): (&String, &f64)| Scalar { tag: tag.clone(), simple_value: Some(*value as f32) };
        let value = metrics.iter().filter(|(_, value)| value.is_finite()).map(scalar).collect();
        self.write(Event { step: step as i64, summary: Some(Summary { value }), ..Event::now() })
    }

    /// Truncates the file after `n` steps, or before a damaged record among these; an empty file gets the version record.
    pub(crate) fn rewind(&mut self, n: u64) -> io::Result<()> {
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

/// Bytes before the data (length and its checksum) and after it.
const HEADER: usize = 12;
const FOOTER: usize = 4;

fn write_record(out: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked_checksum(&length).to_le_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(&masked_checksum(data).to_le_bytes());
}

/// Masked CRC-32C: rotated, plus a constant, as TensorFlow stores it.
fn masked_checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Iterates over the complete records at the start of a byte buffer: data, and the offset of the next record. Stops at the first incomplete
/// or damaged record.
struct Records<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Records<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    fn read(&self) -> Option<(&'a [u8], usize)> {
        let rest = self.bytes.get(self.position..)?;
        let length = rest.get(..8)?;
        let size = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
        let end = HEADER.checked_add(size)?;
        let (data, footer) = (rest.get(HEADER..end)?, rest.get(end..end.checked_add(FOOTER)?)?);
        let is_whole = checksum_at(rest, 8)? == masked_checksum(length)
            && u32::from_le_bytes(footer.try_into().ok()?) == masked_checksum(data);
        is_whole.then_some((data, self.position + end + FOOTER))
    }
}

fn checksum_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl<'a> Iterator for Records<'a> {
    type Item = (&'a [u8], usize);

    fn next(&mut self) -> Option<Self::Item> {
        let (data, next) = self.read()?;
        self.position = next;
        Some((data, next))
    }
}

#[cfg(test)]
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
    fn a_resumed_stage_has_no_step_twice() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::open(folder.path()).unwrap();
        for step in 1..=5 {
            events.append(step, &figures(step as f64)).unwrap();
        }
        events.file.write_all(&[7; 11]).unwrap(); // the incomplete record of a killed process
        let mut events = EventFile::open(folder.path()).unwrap();
        assert_eq!(steps(&events).len(), 5);
        events.rewind(3).unwrap();
        events.append(4, &figures(0.5)).unwrap();
        assert_eq!(steps(&events), [(1, 1), (2, 1), (3, 1), (4, 1)], "a value that is not finite is left out");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_record_ends_the_file() {
        let mut bytes = Vec::new();
        write_record(&mut bytes, b"one");
        let first = bytes.len();
        write_record(&mut bytes, b"two");
        let whole: Vec<&[u8]> = Records::new(&bytes).map(|(data, _)| data).collect();
        assert_eq!(whole, [b"one", b"two"]);
        assert_eq!(Records::new(&bytes[..bytes.len() - 1]).last(), Some((&b"one"[..], first)));
        bytes[first + HEADER] ^= 1;
        assert_eq!(Records::new(&bytes).count(), 1);
    }
}
