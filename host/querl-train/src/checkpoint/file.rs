//! The file format of a state: magic bytes, a JSON header, the tensors' values, and a SHA-256 of all of it at the end.

use super::{Array, Data, State};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;

/// First bytes of the file; the number changes when old files can no longer be read.
const MAGIC: &[u8] = b"querl state 1\n";

const DIGEST_BYTES: u64 = 32;

/// Values converted to bytes at a time.
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

pub(super) struct StateFile {
    pub(super) step: u64,
    pub(super) fingerprint: String,
    pub(super) state: State,
}

/// Writes a state, streaming: no second copy of the tensors is made.
pub(super) fn write(to: &mut impl Write, step: u64, fingerprint: &str, state: &State) -> io::Result<()> {
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

fn write_values(to: &mut impl Write, values: &[f32]) -> io::Result<()> {
    let mut bytes = vec![0; 4 * CHUNK.min(values.len())];
    for chunk in values.chunks(CHUNK) {
        let bytes = &mut bytes[..4 * chunk.len()];
        bytes.chunks_exact_mut(4).zip(chunk).for_each(|(bytes, value)| bytes.copy_from_slice(&value.to_le_bytes()));
        to.write_all(bytes)?;
    }
    Ok(())
}

/// Why a state could not be read.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The file is incomplete or not of this format; a message.
    Damaged(String),
    /// The file could not be read; its content is unknown.
    Io(io::Error),
}

pub(super) fn read(path: &Path) -> Result<StateFile, ReadError> {
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

/// The header; rejected where it describes more than the file holds, so that nothing is allocated for a damaged length.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};

    #[test]
    fn every_truncation_and_every_flipped_bit_is_detected() {
        let mut state = State::default();
        state.put("order", &7u64).unwrap();
        let tensor = Tensor::from_vec(vec![1.5f32, -0.0, 3.0e-40], 3, &Device::Cpu).unwrap();
        state.put_tensors("adapter", &BTreeMap::from([("a".to_owned(), tensor)]));
        let mut bytes = Vec::new();
        write(&mut bytes, 12, "print", &state).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            super::read(&path)
        };
        let found = read(&bytes).unwrap();
        assert_eq!(
            (found.step, found.fingerprint.as_str(), found.state.get::<u64>("order").unwrap()),
            (12, "print", 7)
        );
        let values = found.state.tensors("adapter").unwrap()["a"].to_vec1::<f32>().unwrap();
        assert_eq!(values.map_bits(), [1.5f32, -0.0, 3.0e-40].map(f32::to_bits));
        for n in 0..bytes.len() {
            assert!(read(&bytes[..n]).is_err(), "cut after {n} bytes");
        }
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&flipped).is_err(), "bit {bit}");
        }
    }

    trait MapBits {
        fn map_bits(self) -> Vec<u32>;
    }

    impl MapBits for Vec<f32> {
        fn map_bits(self) -> Vec<u32> {
            self.into_iter().map(f32::to_bits).collect()
        }
    }
}
