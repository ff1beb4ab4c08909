//! Refuses NaN and Inf in stored tensors, with the file, the tensor and the place in it.

use crate::ModelError;
use candle_core::{DType, Tensor};
use querl_core::floats::{FloatFormat, NotFinite, coordinates};
use rayon::prelude::*;
use safetensors::View;
use std::path::Path;

/// Bytes that one thread scans at a time: a multiple of every float's size.
const PART: usize = 1 << 20;

/// A tensor of a file, or a slice of it that begins at `start` on each axis.
pub(crate) struct StoredTensor<'a> {
    pub(crate) path: &'a Path,
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    pub(crate) start: &'a [usize],
}

impl StoredTensor<'_> {
    /// Checks that every value in `bytes` is finite.
    pub(crate) fn check(&self, dtype: DType, bytes: &[u8]) -> Result<(), ModelError> {
        match FloatFormat::from_name(dtype.as_str()).and_then(|format| first_not_finite(format, bytes)) {
            None => Ok(()),
            Some(found) => Err(self.error(found)),
        }
    }

    fn error(&self, found: NotFinite) -> ModelError {
        let mut place = coordinates(found.index, self.shape);
        place.iter_mut().zip(self.start).for_each(|(place, start)| *place += start);
        let (name, value) = (self.name, found.value);
        let remedy = "the file is damaged: download it or save the model again";
        ModelError::bad_file(self.path, format!("tensor `{name}` holds {value} at {place:?}; {remedy}"))
    }
}

fn first_not_finite(format: FloatFormat, bytes: &[u8]) -> Option<NotFinite> {
    bytes.par_chunks(PART).enumerate().find_map_first(|(part, bytes)| {
        let found = format.first_not_finite(bytes)?;
        Some(NotFinite { index: part * (PART / format.size()) + found.index, ..found })
    })
}

/// Checks that all tensors of a file, already in memory, are finite.
pub(crate) fn check_tensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>,
) -> Result<(), ModelError> {
    for (name, tensor) in tensors {
        if FloatFormat::from_name(tensor.dtype().as_str()).is_some() {
            let stored = StoredTensor { path, name, shape: tensor.dims(), start: &[] };
            stored.check(tensor.dtype(), &tensor.data())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_many_parts_is_named_in_the_whole_tensor() {
        let n_values = 3 * PART / 4;
        let mut values = vec![1f32; n_values];
        values[n_values - 1] = f32::INFINITY;
        values[PART / 4 + 5] = f32::NAN;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (path, shape) = (Path::new("m/model.safetensors"), [n_values / 16, 16]);
        let whole = StoredTensor { path, name: "a.weight", shape: &shape, start: &[] };
        let error = whole.check(DType::F32, &bytes).unwrap_err().to_string();
        let row = (PART / 4 + 5) / 16;
        let expected = format!("m/model.safetensors: tensor `a.weight` holds NaN at [{row}, 5]; the file is damaged: ");
        assert!(error.starts_with(&expected), "{error}");
        let slice = StoredTensor { start: &[100, 0], ..whole };
        let error = slice.check(DType::F32, &bytes).unwrap_err().to_string();
        assert!(error.contains(&format!("at [{}, 5]", row + 100)), "{error}");
        slice.check(DType::U32, &bytes).unwrap();
    }
}
