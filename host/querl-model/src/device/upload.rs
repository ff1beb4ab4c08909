//! Weights from a mapped file to the card: through two pieces of page-locked memory, so that one is filled while the other is on
//! its way, and no tensor is copied as a whole on the host.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaSlice, PinnedHostSlice};
use candle_core::{DType, Error, Result, bail};
use half::{bf16, f16};
use rayon::prelude::*;
use std::sync::PoisonError;

/// Values of a piece: 32 MiB, long enough that the card's copy engine is never waited for between two.
const PIECE: usize = 1 << 24;

/// Values that one thread converts at a time.
const CHUNK: usize = 1 << 16;

/// A piece of page-locked memory, and when the card has read it.
pub(super) struct Piece {
    memory: PinnedHostSlice<bf16>,
    is_read: CudaEvent,
}

impl Gpu {
    /// Copies floats of any type, as a safetensors file holds them, to the card as bf16.
    ///
    /// # Errors
    /// A type that is no float of at most 4 bytes, or no memory left.
    pub fn upload_floats(&self, bytes: &[u8], dtype: DType) -> Result<CudaSlice<bf16>> {
        let size = match dtype {
            DType::F32 => 4,
            DType::BF16 | DType::F16 => 2,
            _ => bail!("weights of type {dtype:?}; expected f32, bf16 or f16"),
        };
        let mut values = self.alloc(bytes.len() / size)?;
        let mut pieces = self.pieces().lock().unwrap_or_else(PoisonError::into_inner);
        while pieces.len() < 2 {
            pieces.push(Piece::new(self)?);
        }
        for (index, part) in bytes.chunks(PIECE * size).enumerate() {
            let Piece { memory, is_read } = &mut pieces[index % 2];
            is_read.synchronize().map_err(Error::wrap)?;
            let (start, n) = (index * PIECE, part.len() / size);
            let memory = &mut memory.as_mut_slice().map_err(Error::wrap)?[..n];
            to_bf16(part, dtype, memory);
            self.stream().memcpy_htod(memory, &mut values.slice_mut(start..start + n)).map_err(Error::wrap)?;
            is_read.record(self.stream()).map_err(Error::wrap)?;
        }
        Ok(values)
    }
}

impl Piece {
    fn new(gpu: &Gpu) -> Result<Self> {
        let context = gpu.stream().context();
        // SAFETY: every bit pattern is a number, and a part is written before it is read.
        let memory = unsafe { context.alloc_pinned_with_flags::<bf16>(PIECE, 0) }.map_err(Error::wrap)?;
        let is_read = context.new_event(None).map_err(Error::wrap)?;
        Ok(Self { memory, is_read })
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // The memory is given back only when the card has read it; an error means that it will never read again.
        let _ = self.is_read.synchronize();
    }
}

fn to_bf16(bytes: &[u8], dtype: DType, out: &mut [bf16]) {
    let (size, value): (usize, fn(&[u8]) -> bf16) = match dtype {
        DType::F32 => (4, |b| bf16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        DType::F16 => (2, |b| bf16::from_f32(f16::from_le_bytes([b[0], b[1]]).to_f32())),
        _ => (2, |b| bf16::from_le_bytes([b[0], b[1]])),
    };
    out.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * size)).for_each(|(out, bytes)| {
        out.iter_mut().zip(bytes.chunks_exact(size)).for_each(|(out, bytes)| *out = value(bytes));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_of_every_type_are_rounded_to_the_nearest() {
        let values = [0.0f32, 1.0, -2.5, 3.140_625, 1.0e-3];
        let (mut of_f32, mut of_f16, mut of_bf16) = ([bf16::ZERO; 5], [bf16::ZERO; 5], [bf16::ZERO; 5]);
        let expected = values.map(bf16::from_f32);
        to_bf16(&values.map(f32::to_le_bytes).concat(), DType::F32, &mut of_f32);
        to_bf16(&expected.map(bf16::to_le_bytes).concat(), DType::BF16, &mut of_bf16);
        to_bf16(&values.map(|x| f16::from_f32(x).to_le_bytes()).concat(), DType::F16, &mut of_f16);
        assert_eq!((of_f32, of_bf16), (expected, expected));
        assert_eq!(of_f16, values.map(|x| bf16::from_f32(f16::from_f32(x).to_f32())));
    }
}
