//! Page-locked host memory for uploads: the host continues while the GPU reads.

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DeviceRepr, PinnedHostSlice};
use candle_core::{Error, Result, bail};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Buffer size in bytes for weights: large enough that the copy engine is rarely idle between two buffers.
pub(super) const WEIGHT_PIECE: usize = 32 << 20;

/// Buffer size in bytes for token ids, positions and lists of tiles.
pub(super) const SMALL_PIECE: usize = 1 << 20;

/// Page-locked host memory in several buffers, which are filled in turn.
pub(super) struct Staging {
    weights: Mutex<Ring>,
    small: Mutex<Ring>,
}

impl Default for Staging {
    fn default() -> Self {
        let ring = |n_pieces, bytes| Mutex::new(Ring { pieces: Vec::new(), next: 0, n_pieces, bytes });
        Self { weights: ring(2, WEIGHT_PIECE), small: ring(8, SMALL_PIECE) }
    }
}

impl Staging {
    pub(super) fn weights(&self) -> MutexGuard<'_, Ring> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn small(&self) -> MutexGuard<'_, Ring> {
        self.small.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Ring {
    pieces: Vec<Piece>,
    next: usize,
    n_pieces: usize,
    bytes: usize,
}

impl Ring {
    /// The next buffer, after waiting until the GPU has read it. A buffer is allocated at its first use.
    pub(super) fn next(&mut self, stream: &Arc<CudaStream>) -> Result<&mut Piece> {
        if self.pieces.len() < self.n_pieces {
            self.next = self.pieces.len();
            self.pieces.push(Piece::new(stream, self.bytes)?);
        } else {
            self.next = (self.next + 1) % self.n_pieces;
        }
        let piece = &mut self.pieces[self.next];
        piece.is_read.synchronize().map_err(Error::wrap)?;
        Ok(piece)
    }
}

pub(super) struct Piece {
    memory: PinnedHostSlice<u8>,
    /// An event that is recorded after the copy from this buffer.
    is_read: CudaEvent,
}

impl Piece {
    fn new(stream: &Arc<CudaStream>, bytes: usize) -> Result<Self> {
        let context = stream.context();
        // SAFETY: every bit pattern is a byte, and memory is written before it is read.
        let memory = unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0) }.map_err(Error::wrap)?;
        Ok(Self { memory, is_read: context.new_event(None).map_err(Error::wrap)? })
    }

    /// Copies `n` values, which `fill` writes, to `to[start..]`.
    pub(super) fn send<T: DeviceRepr + Copy>(
        &mut self,
        stream: &Arc<CudaStream>,
        to: &mut CudaSlice<T>,
        start: usize,
        n: usize,
        fill: impl FnOnce(&mut [T]),
    ) -> Result<()> {
        let bytes = self.memory.as_mut_slice().map_err(Error::wrap)?;
        if n * size_of::<T>() > bytes.len() {
            bail!("{n} values do not fit in a pinned staging buffer of {} bytes", bytes.len());
        }
        // SAFETY: the memory is page-aligned and long enough, every bit pattern is a value of a type that GPU and host share, and
        // there is no other reference to it.
        let values = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), n) };
        fill(values);
        stream.memcpy_htod(&*values, &mut to.slice_mut(start..start + n)).map_err(Error::wrap)?;
        self.is_read.record(stream).map_err(Error::wrap)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // Memory is freed only after the GPU has read it; after an error the GPU reads nothing more.
        let _ = self.is_read.synchronize();
    }
}
