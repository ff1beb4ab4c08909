//! Uploads of weights as a safetensors file stores them, converted to bf16 or packed, without a copy of a complete tensor on the host.

use super::elementwise::Element;
use super::gpu::Gpu;
use super::staging::WEIGHT_PIECE;
use super::weight::{DeviceWeight, PackedFormat, PackedRows};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{DType, Result, bail};
use half::{bf16, f16};
use rayon::prelude::*;

/// Number of values that a thread converts at a time.
const CHUNK: usize = 1 << 16;

impl Gpu {
    /// Copies floats of any type, as a safetensors file holds them, to the GPU as bf16.
    pub fn upload_floats(&self, bytes: &[u8], dtype: DType) -> Result<CudaSlice<bf16>> {
        let size = size_of_float(dtype)?;
        let (mut to, n_piece) = (self.alloc(bytes.len() / size)?, WEIGHT_PIECE / size_of::<bf16>());
        let mut ring = self.staging().weights();
        for (index, part) in bytes.chunks(n_piece * size).enumerate() {
            let piece = ring.next(self.stream())?;
            let mut is_finite = true;
            let fill = |values: &mut [bf16]| is_finite = convert(part, dtype, values);
            piece.send(self.stream(), &mut to, index * n_piece, part.len() / size, fill)?;
            check_finite(is_finite, "bf16")?;
        }
        Ok(to)
    }

    /// Like [`Gpu::upload_floats`], but packed: rows are copied to the GPU in pieces as stored (f16 as f32, which represents it exactly),
    /// and packed there with the same codes as on the CPU. The GPU never holds the unpacked weight.
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
        let n_rows = (WEIGHT_PIECE / size_of::<T>() / n_in).max(1);
        let mut values = self.alloc::<T>(n_rows.min(bytes.len() / size / n_in) * n_in)?;
        let mut ring = self.staging().weights();
        for (index, part) in bytes.chunks(n_rows * n_in * size).enumerate() {
            let (piece, n) = (ring.next(self.stream())?, part.len() / size);
            let mut is_finite = true;
            piece.send(self.stream(), &mut values, 0, n, |values| is_finite = convert(part, dtype, values))?;
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

fn size_of_float(dtype: DType) -> Result<usize> {
    match dtype {
        DType::F32 => Ok(4),
        DType::BF16 | DType::F16 => Ok(2),
        _ => bail!("weights of type {dtype:?}; expected f32, bf16 or f16"),
    }
}

trait Float: Element + Send + Sync {
    fn rounded(value: f32) -> Self;

    /// Converts from bf16, including NaN and Inf.
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

/// Converts values. Returns true if all are finite.
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
