//! Normalisation of the critic head's inputs (not of advantages: that is `losses::masked_whiten`).

use crate::TrainError;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

/// An affine map of hidden states to mean 0 and a covariance near the identity (Cholesky whitening with shrinkage).
///
/// Hidden states have a large mean and a few directions thousands of times wider than others; a linear head on unnormalised
/// states learns the batch's mean and little else.
pub(super) struct InputNormalizer {
    mean: Tensor,      // (H)
    transform: Tensor, // (H, H): x' = (x - mean) transform
}

/// Added to the covariance's diagonal, as a share of the mean variance, so that directions with little variance are not amplified.
/// Values of 0.03 to 0.3 make no difference to the explained variance of the example's critic.
const SHRINKAGE: f64 = 0.3;

impl InputNormalizer {
    /// Fitted to the rows of `vectors`, `(N, H)` f32.
    pub(super) fn fit(vectors: &Tensor) -> Result<Self, TrainError> {
        let (n, width) = vectors.dims2()?;
        let vectors = vectors.to_dtype(DType::F64)?;
        let mean = vectors.mean_keepdim(0)?; // (1, H)
        let centred = vectors.broadcast_sub(&mean)?;
        let covariance = (centred.t()?.matmul(&centred)? / (n.max(2) - 1) as f64)?;
        let mut matrix: Vec<f64> = covariance.flatten_all()?.to_vec1()?;
        let trace: f64 = (0..width).map(|i| matrix[i * width + i]).sum();
        // A single vector has no variance: it is only shifted.
        let ridge = if trace > 0.0 { SHRINKAGE * trace / width as f64 } else { 1.0 };
        (0..width).for_each(|i| matrix[i * width + i] += ridge);
        let inverse = inverse_of_cholesky(matrix, width);
        if inverse.iter().any(|x| !x.is_finite()) {
            return Err(TrainError::Data("rl: the reference's hidden states are not finite; check its weights".into()));
        }
        let transform = Tensor::from_vec(inverse, (width, width), &Device::Cpu)?.t()?.contiguous()?;
        Ok(Self { mean: mean.squeeze(0)?.to_dtype(DType::F32)?, transform: transform.to_dtype(DType::F32)? })
    }

    pub(super) fn tensors(&self) -> BTreeMap<String, Tensor> {
        BTreeMap::from([("mean".to_owned(), self.mean.clone()), ("transform".to_owned(), self.transform.clone())])
    }

    /// From [`InputNormalizer::tensors`]; `None` if they are missing.
    pub(super) fn from_tensors(tensors: &BTreeMap<String, Tensor>) -> Option<Self> {
        Some(Self { mean: tensors.get("mean")?.clone(), transform: tensors.get("transform")?.clone() })
    }

    /// Weights `(1, H)` that give on unnormalised vectors what `weights` give on normalised ones, and the amount to subtract
    /// from the bias: `(1)`.
    pub(super) fn fold_into(&self, weights: &Tensor) -> Result<(Tensor, Tensor), TrainError> {
        let plain = weights.matmul(&self.transform.t()?)?; // (1, H)
        let shift = plain.matmul(&self.mean.unsqueeze(1)?)?.flatten_all()?;
        Ok((plain, shift))
    }

    /// `(N, H)` to `(N, H)`.
    pub(super) fn apply(&self, vectors: &Tensor) -> Result<Tensor, TrainError> {
        Ok(vectors.broadcast_sub(&self.mean)?.matmul(&self.transform)?)
    }
}

/// The inverse of the lower factor of a symmetric positive matrix, row-major.
fn inverse_of_cholesky(mut matrix: Vec<f64>, width: usize) -> Vec<f64> {
    for i in 0..width {
        for j in 0..=i {
            let (rows_i, rows_j) = (&matrix[i * width..i * width + j], &matrix[j * width..j * width + j]);
            let rest = matrix[i * width + j] - rows_i.iter().zip(rows_j).map(|(a, b)| a * b).sum::<f64>();
            matrix[i * width + j] = if i == j { rest.sqrt() } else { rest / matrix[j * width + j] };
        }
    }
    let mut inverse = vec![0.0; width * width];
    for i in 0..width {
        // Row i of the inverse: (e_i - sum of the earlier rows by their factors) over the diagonal.
        let (done, rest) = inverse.split_at_mut(i * width);
        let row = &mut rest[..width];
        row[i] = 1.0;
        for (k, earlier) in done.chunks_exact(width).enumerate() {
            let factor = matrix[i * width + k];
            row[..=k].iter_mut().zip(earlier).for_each(|(x, y)| *x -= factor * y);
        }
        let diagonal = matrix[i * width + i];
        row[..=i].iter_mut().for_each(|x| *x /= diagonal);
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalised_vectors_have_mean_0_and_no_dominant_direction() {
        let noise = |i: usize| ((i * 7919 + 13) % 101) as f32 / 101.0 - 0.5;
        // Two directions that nearly coincide, one a hundred times narrower, all far from 0.
        let rows: Vec<f32> = (0..200)
            .flat_map(|i| {
                let (a, b, c) = (noise(3 * i), noise(3 * i + 1), noise(3 * i + 2));
                [20.0 * a + 50.0, 20.0 * a + 2.0 * b - 30.0, 0.2 * c]
            })
            .collect();
        let vectors = Tensor::from_vec(rows, (200, 3), &Device::Cpu).unwrap();
        let white = InputNormalizer::fit(&vectors).unwrap().apply(&vectors).unwrap();
        let mean: Vec<f32> = white.mean(0).unwrap().to_vec1().unwrap();
        assert!(mean.iter().all(|x| x.abs() < 1e-4), "{mean:?}");
        let variance: Vec<f32> = white.var(0).unwrap().to_vec1().unwrap();
        assert!(variance.iter().all(|x| *x < 1.0) && variance[0] > 0.7, "{variance:?}");
        let covariance = white.t().unwrap().matmul(&white).unwrap().to_vec2::<f32>().unwrap();
        assert!(covariance[0][1].abs() / 199.0 < 0.25, "{covariance:?}");
    }

    #[test]
    fn folded_weights_give_the_same_values_on_unnormalised_vectors() {
        let vectors = Tensor::new(&[[3.0f32, -1.0], [4.0, 2.0], [-1.0, 0.5]], &Device::Cpu).unwrap();
        let normalizer = InputNormalizer::fit(&vectors).unwrap();
        let weights = Tensor::new(&[[0.3f32, -0.7]], &Device::Cpu).unwrap();
        let expected = normalizer.apply(&vectors).unwrap().matmul(&weights.t().unwrap()).unwrap();
        let (plain, shift) = normalizer.fold_into(&weights).unwrap();
        let found = vectors.matmul(&plain.t().unwrap()).unwrap().broadcast_sub(&shift).unwrap();
        let difference = (found - expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(difference < 1e-5, "{difference}");
        let again = InputNormalizer::from_tensors(&normalizer.tensors()).unwrap();
        let values = |one: &InputNormalizer| one.apply(&vectors).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(values(&again), values(&normalizer));
    }

    #[test]
    fn a_single_vector_is_only_shifted() {
        let vector = Tensor::new(&[[3.0f32, -1.0]], &Device::Cpu).unwrap();
        let white = InputNormalizer::fit(&vector).unwrap().apply(&vector).unwrap();
        assert_eq!(white.to_vec2::<f32>().unwrap(), [[0.0, 0.0]]);
    }
}
