//! From the host to the card through page-locked memory: the host goes on while the card reads, and no tensor of a file is copied
//! as a whole on the host.

use super::elementwise::Element;
use super::gpu::Gpu;
use super::packed::{PackedFormat, PackedRows};
use super::weight::DeviceWeight;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaSlice, DeviceRepr, PinnedHostSlice};
use candle_core::{DType, Error, Result, bail};
use half::{bf16, f16};
use rayon::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a piece for weights: long enough that the copy engine is hardly waited for between two.
const PIECE: usize = 32 << 20;

/// Bytes of a piece for what a pass brings along: ids, positions, lists of tiles.
const SMALL_PIECE: usize = 1 << 20;

/// How many small pieces may be on their way.
const N_SMALL: usize = 8;

/// Values that one thread converts at a time.
const CHUNK: usize = 1 << 16;

/// Page-locked memory in pieces, which are filled in turn.
#[derive(Default)]
pub(super) struct Staging {
    weights: Mutex<Ring>,
    small: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    pieces: Vec<Piece>,
    next: usize,
}

struct Piece {
    memory: PinnedHostSlice<u8>,
    /// When the card has read it.
    is_read: CudaEvent,
}

impl Ring {
    /// The piece whose turn it is, once the card has read it. Pieces are made when they are first needed.
    fn next(&mut self, gpu: &Gpu, n_pieces: usize, bytes: usize) -> Result<&mut Piece> {
        if self.pieces.len() < n_pieces {
            self.next = self.pieces.len();
            self.pieces.push(Piece::new(gpu, bytes)?);
        } else {
            self.next = (self.next + 1) % n_pieces;
        }
        let piece = &mut self.pieces[self.next];
        piece.is_read.synchronize().map_err(Error::wrap)?;
        Ok(piece)
    }
}

impl Piece {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let context = gpu.stream().context();
        // SAFETY: every bit pattern is a byte, and a part is written before it is read.
        let memory = unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0) }.map_err(Error::wrap)?;
        Ok(Self { memory, is_read: context.new_event(None).map_err(Error::wrap)? })
    }

    /// Copies the first values, which `fill` writes, to `to`.
    fn send<T: DeviceRepr + Copy>(
        &mut self,
        gpu: &Gpu,
        to: &mut CudaSlice<T>,
        start: usize,
        n: usize,
        fill: impl FnOnce(&mut [T]),
    ) -> Result<()> {
        let bytes = self.memory.as_mut_slice().map_err(Error::wrap)?;
        if n * size_of::<T>() > bytes.len() {
            bail!("{n} values for a piece of {} bytes", bytes.len());
        }
        // SAFETY: the memory is page-aligned and long enough, every bit pattern is a value of a type that cards share with the
        // host, and nobody else has a reference to it.
        let values = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), n) };
        fill(values);
        gpu.stream().memcpy_htod(&*values, &mut to.slice_mut(start..start + n)).map_err(Error::wrap)?;
        self.is_read.record(gpu.stream()).map_err(Error::wrap)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // The memory is given back only when the card has read it; after an error it never reads again.
        let _ = self.is_read.synchronize();
    }
}

fn lock(ring: &Mutex<Ring>) -> MutexGuard<'_, Ring> {
    ring.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Copies values to the card; the host does not wait for it where they are few.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn upload<T: DeviceRepr + Copy>(&self, values: &[T]) -> Result<CudaSlice<T>> {
        let mut to = self.alloc(values.len())?;
        match size_of_val(values) {
            0 => {}
            1..=SMALL_PIECE => {
                let mut ring = lock(&self.staging().small);
                let piece = ring.next(self, N_SMALL, SMALL_PIECE)?;
                piece.send(self, &mut to, 0, values.len(), |piece| piece.copy_from_slice(values))?;
            }
            _ => self.stream().memcpy_htod(values, &mut to).map_err(Error::wrap)?,
        }
        Ok(to)
    }

    /// Copies floats of any type, as a safetensors file holds them, to the card as bf16.
    ///
    /// # Errors
    /// A type that is no float of at most 4 bytes, a value that is not finite as bf16, or no memory left.
    pub fn upload_floats(&self, bytes: &[u8], dtype: DType) -> Result<CudaSlice<bf16>> {
        let size = size_of_float(dtype)?;
        let (mut to, n_piece) = (self.alloc(bytes.len() / size)?, PIECE / size_of::<bf16>());
        let mut ring = lock(&self.staging().weights);
        for (index, part) in bytes.chunks(n_piece * size).enumerate() {
            let piece = ring.next(self, 2, PIECE)?;
            let mut is_finite = true;
            let fill = |values: &mut [bf16]| is_finite = convert(part, dtype, values);
            piece.send(self, &mut to, index * n_piece, part.len() / size, fill)?;
            check_finite(is_finite, "bf16")?;
        }
        Ok(to)
    }

    /// The same, packed: some rows at a time go to the card as they stand in the file (f16 as f32, which holds it), so that the
    /// codes are those that the CPU makes of the file, and are packed there. Nothing else of the weight is ever on the card.
    ///
    /// # Errors
    /// As [`Gpu::upload_floats`], or another number of values.
    pub fn upload_packed(
        &self,
        bytes: &[u8],
        dtype: DType,
        dims: (usize, usize),
        format: PackedFormat,
    ) -> Result<DeviceWeight> {
        let mut rows = PackedRows::new(self, dims, format)?;
        if bytes.len() != dims.0 * dims.1 * size_of_float(dtype)? {
            bail!("a weight {dims:?} of {} bytes of {dtype:?}", bytes.len());
        }
        match dtype {
            DType::BF16 => self.put_pieces::<bf16>(bytes, dtype, dims.1, &mut rows)?,
            _ => self.put_pieces::<f32>(bytes, dtype, dims.1, &mut rows)?,
        }
        Ok(DeviceWeight::of_rows(rows, dims))
    }

    fn put_pieces<T: Float>(&self, bytes: &[u8], dtype: DType, n_in: usize, rows: &mut PackedRows) -> Result<()> {
        let size = size_of_float(dtype)?;
        let n_rows = (PIECE / size_of::<T>() / n_in).max(1);
        let mut values = self.alloc::<T>(n_rows.min(bytes.len() / size / n_in) * n_in)?;
        let mut ring = lock(&self.staging().weights);
        for (index, part) in bytes.chunks(n_rows * n_in * size).enumerate() {
            let (piece, n) = (ring.next(self, 2, PIECE)?, part.len() / size);
            let mut is_finite = true;
            piece.send(self, &mut values, 0, n, |values| is_finite = convert(part, dtype, values))?;
            check_finite(is_finite, dtype.as_str())?;
            rows.put(self, index * n_rows, &values.slice(..n))?;
        }
        Ok(())
    }
}

fn check_finite(is_finite: bool, as_type: &str) -> Result<()> {
    match is_finite {
        true => Ok(()),
        false => bail!("a weight holds a value that is not finite as {as_type}"),
    }
}

/// Bytes of a value in a file.
fn size_of_float(dtype: DType) -> Result<usize> {
    match dtype {
        DType::F32 => Ok(4),
        DType::BF16 | DType::F16 => Ok(2),
        _ => bail!("weights of type {dtype:?}; expected f32, bf16 or f16"),
    }
}

/// What weights become on their way.
trait Float: Element + Send + Sync {
    fn rounded(value: f32) -> Self;

    /// Of bf16, whatever its bits.
    fn widened(value: bf16) -> Self;

    fn is_number(self) -> bool;
}

impl Float for bf16 {
    fn rounded(value: f32) -> Self {
        Self::from_f32(value)
    }

    fn widened(value: bf16) -> Self {
        value
    }

    fn is_number(self) -> bool {
        self.is_finite()
    }
}

impl Float for f32 {
    fn rounded(value: f32) -> Self {
        value
    }

    fn widened(value: bf16) -> Self {
        value.to_f32()
    }

    fn is_number(self) -> bool {
        self.is_finite()
    }
}

/// Whether all of them are finite.
fn convert<T: Float>(bytes: &[u8], dtype: DType, out: &mut [T]) -> bool {
    let (size, value): (usize, fn(&[u8]) -> T) = match dtype {
        DType::F32 => (4, |b| T::rounded(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        DType::F16 => (2, |b| T::rounded(f16::from_le_bytes([b[0], b[1]]).to_f32())),
        _ => (2, |b| T::widened(bf16::from_le_bytes([b[0], b[1]]))),
    };
    let chunks = out.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * size)).map(|(out, bytes)| {
        out.iter_mut().zip(bytes.chunks_exact(size)).for_each(|(out, bytes)| *out = value(bytes));
        out.iter().fold(true, |all, value| all & value.is_number())
    });
    chunks.reduce(|| true, |all, one| all & one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_of_every_type_are_rounded_to_the_nearest() {
        let values = [0.0f32, 1.0, -2.5, 3.140_625, 1.0e-3];
        let (mut of_f32, mut of_f16, mut of_bf16) = ([bf16::ZERO; 5], [bf16::ZERO; 5], [bf16::ZERO; 5]);
        let expected = values.map(bf16::from_f32);
        let all = [
            convert(values.map(f32::to_le_bytes).as_flattened(), DType::F32, &mut of_f32),
            convert(expected.map(bf16::to_le_bytes).as_flattened(), DType::BF16, &mut of_bf16),
            convert(values.map(|x| f16::from_f32(x).to_le_bytes()).as_flattened(), DType::F16, &mut of_f16),
        ];
        assert_eq!(all, [true; 3]);
        assert!(!convert(&f32::MAX.to_le_bytes(), DType::F32, &mut [bf16::ZERO]));
        assert!(convert(&f32::MAX.to_le_bytes(), DType::F32, &mut [0f32]));
        assert_eq!((of_f32, of_bf16), (expected, expected));
        assert_eq!(of_f16, values.map(|x| bf16::from_f32(f16::from_f32(x).to_f32())));
    }
}
