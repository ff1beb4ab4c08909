//! Passage vectors of an index: rows of little-endian f32, in the order of the knowledge base.

use crate::error::DataError;
use crate::retrieval::passages::Passage;
use memmap2::Mmap;
use querl_core::ports::Embedder;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

const FILE: &str = "vectors.f32";
/// Passages per call of the model: bounds memory and the interval of progress messages.
const PASSAGES_PER_CALL: usize = 1024;

/// The file, mapped into memory.
pub(super) struct VectorFile {
    map: Mmap,
    dimension: usize,
}

/// Makes the vectors of all passages.
pub(super) fn write(folder: &Path, passages: &[Passage], embedder: &dyn Embedder) -> Result<(), DataError> {
    let path = folder.join(FILE);
    let failed = |error| DataError::write(&path, error);
    let of_model = |problem: String| DataError::setting("retrieval.embedding.path", problem);
    let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
    let mut n_done = 0;
    for passages in passages.chunks(PASSAGES_PER_CALL) {
        let text = |passage: &Passage| format!("{}{}", embedder.passage_prefix(), passage.whole());
        let texts: Vec<String> = passages.iter().map(text).collect();
        let vectors = embedder.embed(&texts.iter().map(String::as_str).collect::<Vec<_>>());
        let vectors = vectors.map_err(|error| of_model(format!("failed: {error}")))?;
        if vectors.len() != texts.len() || vectors.iter().any(|vector| vector.len() != embedder.dimension()) {
            return Err(of_model(format!(
                "made {} vectors of {} texts, or some too short",
                vectors.len(),
                texts.len()
            )));
        }
        for number in vectors.iter().flatten() {
            file.write_all(&number.to_le_bytes()).map_err(failed)?;
        }
        n_done += passages.len();
        tracing::info!("vectors of {n_done} passages are made");
    }
    file.into_inner().map_err(|error| failed(error.into_error()))?.sync_all().map_err(failed)
}

impl VectorFile {
    pub(super) fn open(folder: &Path, dimension: usize) -> Result<Self, DataError> {
        let path = folder.join(FILE);
        let failed = |error| DataError::file(&path, format!("cannot be read: {error}"));
        let file = File::open(&path).map_err(failed)?;
        // SAFETY: the file is in a folder of finished indexes, which this program never changes; one that is removed stays mapped.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self { map, dimension })
    }

    /// Positions of the `n_vectors` vectors with the largest products with `vector`, largest first; of equal ones the earlier
    pub(super) fn nearest(&self, vector: &[f32], n_vectors: usize) -> Vec<usize> {
        let rows = self.map.chunks_exact(4 * self.dimension);
        let mut scored: Vec<(f32, usize)> =
            rows.enumerate().map(|(position, row)| (product(row, vector), position)).collect();
        let best = |a: &(f32, usize), b: &(f32, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if n_vectors < scored.len() {
            scored.select_nth_unstable_by(n_vectors, best);
            scored.truncate(n_vectors);
        }
        scored.sort_unstable_by(best);
        scored.into_iter().map(|(_, position)| position).collect()
    }
}

/// Eight sums side by side, which the processor adds at once, in a fixed order.
fn product(row: &[u8], vector: &[f32]) -> f32 {
    const LANES: usize = 8;
    let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut sums = [0.0; LANES];
    let (rows, vectors) = (row.chunks_exact(4 * LANES), vector.chunks_exact(LANES));
    let rest = rows.remainder().chunks_exact(4).zip(vectors.remainder());
    let rest: f32 = rest.map(|(bytes, factor)| number(bytes) * factor).sum();
    for (row, vector) in rows.zip(vectors) {
        for lane in 0..LANES {
            sums[lane] += number(&row[4 * lane..4 * lane + 4]) * vector[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}
