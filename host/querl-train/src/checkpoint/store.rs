//! States on disk: the file format (magic bytes, a JSON header, the tensors' values, a SHA-256 of all of it), and the folder with the
//! newest few, from which a run resumes if one is complete and has its fingerprint.

use super::{Array, Data, State};
use crate::TrainError;
use querl_core::fsx::write_atomic_with;
use querl_core::ports::Progress;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The folder with the newest checkpoint states of one training, one file per step.
#[derive(Debug)]
pub struct StateStore {
    directory: PathBuf,
    keep: usize,
    fingerprint: String,
}

impl StateStore {
    /// Opens the states in `directory`, which need not exist yet; the newest `keep` states are kept. `fingerprint` is a digest of
    /// everything that the training depends on: a state with another fingerprint is not resumed.
    pub fn open(directory: &Path, keep: usize, fingerprint: &str) -> Self {
        Self { directory: directory.to_owned(), keep: keep.max(1), fingerprint: fingerprint.to_owned() }
    }

    /// Writes the state of `step` atomically and synced to disk; then removes old states, and those of later steps from an earlier attempt.
    ///
    /// # Errors
    /// The file cannot be written; earlier states are then unchanged.
    pub fn write(&self, step: u64, state: &State) -> Result<(), TrainError> {
        self.commit(step, |to| write_state(to, step, &self.fingerprint, state))
    }

    fn commit(
        &self,
        step: u64,
        fill: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
    ) -> Result<(), TrainError> {
        let path = self.path(step);
        let failed = |source| TrainError::Checkpoint { path: path.clone(), source };
        write_atomic_with(&path, fill).map_err(failed)?;
        self.remove_others(step).map_err(failed)
    }

    /// The newest state to resume from, with its step; `None` if there is none. A state that is damaged or of another training is skipped
    /// with a warning, and so is one for which `log_difference` returns how the episode log differs from what it was at that checkpoint.
    ///
    /// # Errors
    /// The folder or a file in it cannot be read; the log fits no state ([`TrainError::EpisodeLog`]); an error of `log_difference`.
    pub fn newest(
        &self,
        warn: &dyn Progress,
        log_difference: &dyn Fn(&State) -> Result<Option<String>, TrainError>,
    ) -> Result<Option<(u64, State)>, TrainError> {
        let io = |source| TrainError::Io { path: self.directory.clone(), source };
        let (mut damaged, mut differing_log) = (Vec::new(), None);
        for step in self.steps().map_err(io)?.into_iter().rev() {
            let path = self.path(step);
            match read_state(&path) {
                Ok(found) if found.fingerprint == self.fingerprint && found.step == step => {
                    let Some(difference) = log_difference(&found.state)? else {
                        warn_of(&damaged, &format!("the checkpoint of step {step} is used"), warn);
                        return Ok(Some((step, found.state)));
                    };
                    damaged.push(difference.clone());
                    differing_log.get_or_insert(difference);
                }
                Ok(_) => warn.line(&format!(
                    "warning: {}: belongs to a training on other inputs; not resumed from it",
                    path.display()
                )),
                Err(ReadError::Damaged(what)) => damaged.push(format!("{}: {what}", path.display())),
                Err(ReadError::Io(source)) => return Err(TrainError::Io { path, source }),
            }
        }
        if let Some(difference) = differing_log {
            return Err(TrainError::EpisodeLog(difference));
        }
        warn_of(&damaged, "no complete checkpoint is left, and the stage starts from the beginning", warn);
        Ok(None)
    }

    fn path(&self, step: u64) -> PathBuf {
        self.directory.join(format!("step-{step}.state"))
    }

    /// The steps that have a checkpoint file, ascending.
    fn steps(&self) -> io::Result<Vec<u64>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let number: Option<u64> =
                name.to_str().and_then(|name| name.strip_prefix("step-")?.strip_suffix(".state")?.parse().ok());
            steps.extend(number);
        }
        steps.sort_unstable();
        Ok(steps)
    }

    fn remove_others(&self, newest: u64) -> io::Result<()> {
        let (mut kept, later): (Vec<u64>, Vec<u64>) = self.steps()?.into_iter().partition(|step| *step <= newest);
        let old = kept.drain(..kept.len().saturating_sub(self.keep));
        old.chain(later).try_for_each(|step| std::fs::remove_file(self.path(step)))
    }
}

fn warn_of(damaged: &[String], consequence: &str, warn: &dyn Progress) {
    damaged.iter().for_each(|what| warn.line(&format!("warning: {what}; {consequence}")));
}

/// Magic bytes. The version is incremented when old files can no longer be read.
const MAGIC: &[u8] = b"querl state 1\n";

const DIGEST_BYTES: u64 = 32;

/// Number of values that are converted to bytes at a time.
const CHUNK: usize = 1 << 14;

#[derive(Serialize)]
struct HeaderOut<'a> {
    step: u64,
    fingerprint: &'a str,
    values: &'a BTreeMap<String, Value>,
    arrays: Vec<(&'a str, &'a [usize])>,
}

#[derive(Deserialize)]
struct Header {
    step: u64,
    fingerprint: String,
    values: BTreeMap<String, Value>,
    arrays: Vec<(String, Vec<usize>)>,
}

struct StateFile {
    step: u64,
    fingerprint: String,
    state: State,
}

/// Writes a state as a stream, without a second copy of the tensors in memory.
fn write_state(to: &mut impl Write, step: u64, fingerprint: &str, state: &State) -> io::Result<()> {
    let arrays = state.arrays.iter().map(|(name, array)| (name.as_str(), array.dims.as_slice())).collect();
    let header = serde_json::to_vec(&HeaderOut { step, fingerprint, values: &state.values, arrays })?;
    let mut to = Digesting { inner: to, hasher: Sha256::new() };
    to.write_all(MAGIC)?;
    to.write_all(&(header.len() as u64).to_le_bytes())?;
    to.write_all(&header)?;
    for array in state.arrays.values() {
        array.read(|values| write_values(&mut to, values)).map_err(io::Error::other)??;
    }
    let digest = to.hasher.finalize();
    to.inner.write_all(&digest)
}

pub(crate) fn write_values(to: &mut impl Write, values: &[f32]) -> io::Result<()> {
    let mut bytes = vec![0; 4 * CHUNK.min(values.len())];
    for chunk in values.chunks(CHUNK) {
        let bytes = &mut bytes[..4 * chunk.len()];
        bytes.chunks_exact_mut(4).zip(chunk).for_each(|(bytes, value)| bytes.copy_from_slice(&value.to_le_bytes()));
        to.write_all(bytes)?;
    }
    Ok(())
}

#[derive(Debug)]
enum ReadError {
    /// The file is incomplete or has another format; with a message.
    Damaged(String),
    /// The file could not be read; its content is unknown.
    Io(io::Error),
}

fn read_state(path: &Path) -> Result<StateFile, ReadError> {
    read_checked(path).map_err(|error| match error.kind() {
        _ if error.raw_os_error().is_some() => ReadError::Io(error),
        io::ErrorKind::UnexpectedEof => ReadError::Damaged("ends too early".into()),
        _ => ReadError::Damaged(error.to_string()),
    })
}

fn read_checked(path: &Path) -> io::Result<StateFile> {
    let file = File::open(path)?;
    let n_bytes = file.metadata()?.len();
    let mut from =
        Digesting { inner: BufReader::with_capacity((4 * CHUNK).min(n_bytes as usize), file), hasher: Sha256::new() };
    let mut magic = [0; MAGIC.len()];
    from.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(io::Error::other("is not a checkpoint of this version of querl"));
    }
    let header = read_header(&mut from, n_bytes)?;
    let mut arrays = BTreeMap::new();
    for (name, dims) in header.arrays {
        let values = read_values(&mut from, dims.iter().product())?;
        arrays.insert(name, Array { dims, data: Data::Values(Arc::new(values)) });
    }
    let mut digest = [0; DIGEST_BYTES as usize];
    from.inner.read_exact(&mut digest)?;
    if from.hasher.finalize()[..] != digest {
        return Err(damaged());
    }
    Ok(StateFile { step: header.step, fingerprint: header.fingerprint, state: State { values: header.values, arrays } })
}

/// Reads the header. It is rejected if it describes more data than the file has, so that a damaged length does not lead to a large
/// allocation.
fn read_header(from: &mut impl Read, n_bytes: u64) -> io::Result<Header> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    let rest = n_bytes.saturating_sub(MAGIC.len() as u64 + 8 + DIGEST_BYTES);
    if length > rest {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut header = vec![0; length as usize];
    from.read_exact(&mut header)?;
    let header: Header = serde_json::from_slice(&header).map_err(|_| damaged())?;
    let n_values = |dims: &Vec<usize>| dims.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim as u64));
    let n_values = header.arrays.iter().try_fold(0u64, |sum, (_, dims)| sum.checked_add(n_values(dims)?));
    match n_values.and_then(|n| n.checked_mul(4)) {
        Some(n) if n == rest - length => Ok(header),
        Some(n) if n < rest - length => Err(damaged()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn read_values(from: &mut impl Read, n_values: usize) -> io::Result<Vec<f32>> {
    let mut values = Vec::with_capacity(n_values);
    let mut bytes = vec![0; 4 * CHUNK.min(n_values)];
    while values.len() < n_values {
        let bytes = &mut bytes[..4 * CHUNK.min(n_values - values.len())];
        from.read_exact(bytes)?;
        values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    }
    Ok(values)
}

fn damaged() -> io::Error {
    io::Error::other("is damaged: its digest is not that of its content")
}

/// Forwards bytes and updates a digest of them.
struct Digesting<T> {
    inner: T,
    hasher: Sha256,
}

impl<W: Write> Write for Digesting<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Digesting<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use querl_core::ports::Silent;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl Progress for Lines {
        fn update(&self, _: u64, _: u64, _: &str) {}

        fn line(&self, text: &str) {
            self.0.lock().unwrap().push(text.to_owned());
        }
    }

    fn state(value: u64) -> State {
        let mut state = State::default();
        state.put("value", &value).unwrap();
        state
    }

    fn any_log(_: &State) -> Result<Option<String>, TrainError> {
        Ok(None)
    }

    fn newest(store: &StateStore) -> Option<(u64, u64)> {
        let (step, state) = store.newest(&Silent, &any_log).unwrap()?;
        Some((step, state.get("value").unwrap()))
    }

    fn files(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_few_are_kept_and_later_ones_than_a_new_one_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(&folder.path().join("state"), 2, "a");
        assert_eq!(newest(&store), None);
        for step in [5, 10, 15] {
            store.write(step, &state(step)).unwrap();
        }
        assert_eq!(files(&store.directory), ["step-10.state", "step-15.state"]);
        store.write(12, &state(1)).unwrap();
        assert_eq!((newest(&store), files(&store.directory).len()), (Some((12, 1)), 2));
    }

    #[test]
    fn a_damaged_newest_falls_back_to_the_one_before_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 3, "a");
        store.write(5, &state(5)).unwrap();
        store.write(10, &state(10)).unwrap();
        let path = store.path(10);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
        let lines = Lines::default();
        assert_eq!(store.newest(&lines, &any_log).unwrap().unwrap().0, 5);
        let expected = format!("warning: {}: ends too early; the checkpoint of step 5 is used", path.display());
        assert_eq!(*lines.0.lock().unwrap(), [expected]);
    }

    /// Regression: a log that was cut by one byte made a run with earlier checkpoints impossible to resume.
    #[test]
    fn the_newest_state_that_the_log_fits_is_used_and_without_one_nothing_starts_over() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 3, "a");
        for step in [5, 10, 15] {
            store.write(step, &state(step)).unwrap();
        }
        // A log that has the content of step `n` and no more.
        let newest = |n: u64| {
            let lines = Lines::default();
            let difference = |state: &State| -> Result<Option<String>, TrainError> {
                let wanted = state.get::<u64>("value")?;
                Ok((wanted > n).then(|| format!("e.jsonl: has {n} bytes, and had {wanted}")))
            };
            let step = store.newest(&lines, &difference).map(|found| found.map(|(step, _)| step));
            (step, lines.0.into_inner().unwrap())
        };
        let (step, warnings) = newest(9);
        let expected = [15, 10]
            .map(|wanted| format!("warning: e.jsonl: has 9 bytes, and had {wanted}; the checkpoint of step 5 is used"));
        assert_eq!((step.unwrap(), warnings.as_slice()), (Some(5), &expected[..]));
        let (error, warnings) = newest(4);
        let expected =
            "e.jsonl: has 4 bytes, and had 15; no earlier checkpoint fits it; run the stage again with `--from rl`";
        assert_eq!((error.unwrap_err().to_string().as_str(), warnings.len()), (expected, 0));
    }

    #[test]
    fn where_every_file_is_damaged_the_warnings_say_that_the_stage_starts_over() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 3, "a");
        std::fs::write(store.path(5), "querl").unwrap();
        std::fs::write(store.path(10), "").unwrap();
        let lines = Lines::default();
        assert!(store.newest(&lines, &any_log).unwrap().is_none());
        let expected = [10, 5].map(|step| {
            let path = store.path(step);
            let end = "ends too early; no complete checkpoint is left, and the stage starts from the beginning";
            format!("warning: {}: {end}", path.display())
        });
        assert_eq!(*lines.0.lock().unwrap(), expected);
    }

    /// Regression: a checkpoint that was temporarily unreadable was called damaged, and training started from the beginning.
    #[test]
    fn an_unreadable_file_is_an_error_and_no_damage() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 3, "a");
        store.write(5, &state(5)).unwrap();
        std::fs::create_dir(store.path(10)).unwrap(); // a folder cannot be read as a file, not even by root
        let error = store.newest(&Silent, &any_log).unwrap_err();
        assert!(matches!(&error, TrainError::Io { path, .. } if *path == store.path(10)), "{error}");
    }

    #[test]
    fn a_state_of_other_inputs_is_not_resumed() {
        let folder = tempfile::tempdir().unwrap();
        StateStore::open(folder.path(), 3, "a").write(5, &state(5)).unwrap();
        let lines = Lines::default();
        assert!(StateStore::open(folder.path(), 3, "b").newest(&lines, &any_log).unwrap().is_none());
        assert!(lines.0.lock().unwrap()[0].ends_with("belongs to a training on other inputs; not resumed from it"));
    }

    #[test]
    fn a_full_disk_leaves_what_was_written_before() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 1, "a");
        store.write(5, &state(5)).unwrap();
        let full = store.commit(10, |to| {
            to.write_all(b"querl state 1\n")?;
            to.flush()?;
            Err(io::ErrorKind::StorageFull.into())
        });
        let message = full.unwrap_err().to_string();
        let expected = "step-10.state: cannot be written; earlier checkpoints are complete; run the same command \
                        again to resume: the disk or its quota is full; make room on it: no storage space";
        assert!(message.ends_with(expected), "{message}");
        assert_eq!((newest(&store), files(folder.path())), (Some((5, 5)), vec!["step-5.state".to_owned()]));
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_detected() {
        let mut state = State::default();
        state.put("order", &7u64).unwrap();
        let tensor = Tensor::from_vec(vec![1.5f32, -0.0, 3.0e-40], 3, &Device::Cpu).unwrap();
        state.put_tensors("adapter", &BTreeMap::from([("a".to_owned(), tensor)]));
        let mut bytes = Vec::new();
        write_state(&mut bytes, 12, "print", &state).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            read_state(&path)
        };
        let found = read(&bytes).unwrap();
        assert_eq!(found.step, 12);
        assert_eq!(found.fingerprint.as_str(), "print");
        assert_eq!(found.state.get::<u64>("order").unwrap(), 7);
        let values = found.state.tensors("adapter").unwrap()["a"].to_vec1::<f32>().unwrap();
        let bits: Vec<u32> = values.into_iter().map(f32::to_bits).collect();
        assert_eq!(bits, [1.5f32, -0.0, 3.0e-40].map(f32::to_bits));
        for n in 0..bytes.len() {
            assert!(read(&bytes[..n]).is_err(), "cut after {n} bytes");
        }
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&flipped).is_err(), "bit {bit}");
        }
    }
}
