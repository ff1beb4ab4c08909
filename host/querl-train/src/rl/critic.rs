//! The critic: a value function over response tokens.
//!
//! A head on the reference's hidden states reads two of them: the one that the token is predicted from, and the one that the
//! response's first token is predicted from. The latter encodes the query; later ones encode little but the next token, and a
//! linear head on them alone explains nothing of the returns. Both are normalised with statistics of the first batch.

use super::RlTask;
use crate::checkpoint::base_name;
use crate::policy::{Example, Policy, TrainingPass};
use crate::{AdamW, AdamWSettings, Gradients, State, TrainError};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module};
use querl_core::config::CriticKind;
use querl_model::{Decoder, LoraAdapter, Mesh, Recompute, save_tensors};
use std::collections::BTreeMap;
use std::path::Path;

/// The critic: a value head on the hidden states of either a separate adapter or the reference.
pub(super) struct Critic {
    head: Linear, // (1, H) on an adapter, (1, 2H) on the reference
    base: Base,
    vars: BTreeMap<String, Var>,
    optimizer: AdamW,
}

/// Model that computes the value head's hidden states.
enum Base {
    /// The base model with a separate adapter.
    Adapter(Box<LoraAdapter>),
    /// The reference model; the input normalisers are fitted to the first batch and `None` before it.
    Reference(Option<Normalizers>),
}

struct Normalizers {
    /// Normaliser of the hidden state that the response's first token is predicted from.
    first: InputNormalizer,
    /// Normaliser of the hidden state that the current token is predicted from.
    current: InputNormalizer,
}

const HEAD_WEIGHT: &str = "value_head.weight";
const HEAD_BIAS: &str = "value_head.bias";

impl Critic {
    /// A critic before training. Its head is zero: every value is 0, and the first advantages are the rewards themselves.
    pub(super) fn new(task: &RlTask<'_>) -> Result<Self, TrainError> {
        let width = task.decoder.config().hidden_size;
        // A head on the reference is small and stays on the CPU; a head on an adapter is on the adapter's device.
        let (base, width, device) = match task.config.critic {
            CriticKind::Head => (Base::Reference(None), 2 * width, Device::Cpu),
            CriticKind::Adapter => {
                let seed = task.seed ^ CRITIC_STREAM;
                let adapter = LoraAdapter::new(task.decoder, task.critic_lora.clone(), seed)?;
                (Base::Adapter(Box::new(adapter)), width, task.decoder.compute_device().device())
            }
        };
        let weight = Var::zeros((1, width), DType::F32, &device)?;
        let bias = Var::zeros(1, DType::F32, &device)?;
        let head = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let mut vars = BTreeMap::from([(HEAD_WEIGHT.to_owned(), weight), (HEAD_BIAS.to_owned(), bias)]);
        if let Base::Adapter(adapter) = &base {
            vars.extend(adapter.vars().clone());
        }
        let settings = AdamWSettings { weight_decay: task.config.weight_decay, ..Default::default() };
        Ok(Self { head, base, vars, optimizer: AdamW::new(settings) })
    }

    pub(super) fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// Whether [`Critic::inputs`] needs the reference's hidden states.
    pub(super) fn reads_reference(&self) -> bool {
        matches!(self.base, Base::Reference(_))
    }

    /// The head's inputs for each token of a batch, `(N, 2H)`, from the reference's hidden states `(N, H)`. The first batch
    /// fits the normalisers. `None` for a head on an adapter.
    pub(super) fn inputs(
        &mut self,
        ref_hidden: Option<&Tensor>,
        examples: &[&Example],
    ) -> Result<Option<Tensor>, TrainError> {
        let (Base::Reference(normalizers), Some(hidden)) = (&mut self.base, ref_hidden) else { return Ok(None) };
        let hidden = &hidden.to_device(&Device::Cpu)?;
        let firsts = first_rows(examples);
        let n_rows = firsts.len();
        let first = hidden.index_select(&Tensor::from_vec(firsts, n_rows, &Device::Cpu)?, 0)?; // (N, H)
        let normalizers = match normalizers {
            Some(normalizers) => normalizers,
            None => normalizers
                .insert(Normalizers { first: InputNormalizer::fit(&first)?, current: InputNormalizer::fit(hidden)? }),
        };
        Ok(Some(Tensor::cat(&[normalizers.first.apply(&first)?, normalizers.current.apply(hidden)?], 1)?))
    }

    /// Values of all N response tokens of `examples`: `(N)`. `inputs`: the rows of [`Critic::inputs`] for these tokens; `None` for a head
    /// on an adapter.
    pub(super) fn values(
        &self,
        decoder: &Decoder,
        examples: &[&Example],
        inputs: Option<&Tensor>,
        recompute: Option<&Recompute>,
    ) -> Result<Tensor, TrainError> {
        let training = TrainingPass { dropout: None, recompute };
        let hidden = match (&self.base, inputs) {
            (Base::Adapter(adapter), _) => {
                Policy { decoder, adapter: Some(adapter) }.response_hidden(examples, training)?
            }
            (Base::Reference(_), Some(inputs)) => inputs.clone(),
            (Base::Reference(_), None) => return Err(TrainError::Data("rl: the critic has no inputs".into())),
        };
        Ok(self.head.forward(&hidden)?.squeeze(1)?)
    }

    /// [`Critic::values`] without gradient.
    pub(super) fn values_without_gradient(
        &self,
        decoder: &Decoder,
        examples: &[&Example],
        inputs: Option<&Tensor>,
    ) -> Result<Vec<f32>, TrainError> {
        let values = match &self.base {
            Base::Adapter(adapter) => {
                let frozen = adapter.without_gradient();
                let policy = Policy { decoder, adapter: Some(&frozen) };
                self.head.forward(&policy.response_hidden(examples, TrainingPass::default())?)?.squeeze(1)?
            }
            Base::Reference(_) => self.values(decoder, examples, inputs, None)?,
        };
        Ok(values.detach().to_vec1()?)
    }

    /// One optimizer step with the gradients of all ranks. Returns the gradient norm before clipping.
    pub(super) fn step(
        &mut self,
        mut gradients: Gradients,
        mesh: &Mesh,
        learning_rate: f64,
        max_grad_norm: f64,
    ) -> Result<f64, TrainError> {
        gradients.sum_over(mesh, &self.vars)?;
        let norm = gradients.clip(max_grad_norm)?;
        if norm.is_finite() {
            self.optimizer.step(&self.vars, &gradients, learning_rate)?;
        }
        Ok(norm)
    }

    /// Saves weights, optimizer moments and normalisers.
    pub(super) fn save_state(&self, state: &mut State) -> Result<(), TrainError> {
        state.put_vars("critic", &self.vars);
        self.optimizer.save("critic_optimizer", state)?;
        if let Base::Reference(Some(Normalizers { first, current })) = &self.base {
            state.put_tensors("critic_inputs.first", &first.tensors());
            state.put_tensors("critic_inputs.current", &current.tensors());
        }
        Ok(())
    }

    /// Restores what [`Critic::save_state`] saved.
    pub(super) fn restore_state(&mut self, state: &State) -> Result<(), TrainError> {
        state.restore_vars("critic", &self.vars)?;
        self.optimizer.restore("critic_optimizer", state, &self.vars)?;
        if let Base::Reference(normalizers) = &mut self.base {
            let first = InputNormalizer::from_tensors(&state.tensors("critic_inputs.first")?);
            let current = InputNormalizer::from_tensors(&state.tensors("critic_inputs.current")?);
            *normalizers = first.zip(current).map(|(first, current)| Normalizers { first, current });
        }
        Ok(())
    }

    /// Writes the head, and the adapter where there is one. A head on the reference is written for unnormalised hidden states,
    /// `(1, 2H)`: first the state of the response's first token, then that of the token. All ranks of a model copy call this
    /// together, and the first writes.
    pub(super) fn save(&self, mesh: &Mesh, directory: &Path, base: &Path) -> Result<(), TrainError> {
        let adapter = match &self.base {
            Base::Adapter(adapter) => Some(adapter.whole()?),
            Base::Reference(_) => None,
        };
        if !mesh.all.is_first() {
            return Ok(());
        }
        save_tensors(&directory.join("value_head.safetensors"), &self.head_with_normalizers()?)?;
        Ok(adapter.map_or(Ok(()), |adapter| adapter.save(directory, &base_name(base)))?)
    }

    /// The head with the normalisers folded into its weights.
    fn head_with_normalizers(&self) -> Result<BTreeMap<String, Tensor>, TrainError> {
        let (mut weight, mut bias) =
            (self.vars[HEAD_WEIGHT].as_tensor().clone(), self.vars[HEAD_BIAS].as_tensor().clone());
        if let Base::Reference(Some(Normalizers { first, current })) = &self.base {
            let halves: Vec<Tensor> = [first, current]
                .into_iter()
                .zip(weight.chunk(2, 1)?)
                .map(|(normalizer, half)| {
                    let (half, shift) = normalizer.fold_into(&half)?;
                    bias = (&bias - shift)?;
                    Ok(half)
                })
                .collect::<Result<_, TrainError>>()?;
            weight = Tensor::cat(&halves, 1)?;
        }
        Ok(BTreeMap::from([(HEAD_WEIGHT.to_owned(), weight), (HEAD_BIAS.to_owned(), bias)]))
    }
}

/// For each response token of a batch, the row of its response's first token.
fn first_rows(examples: &[&Example]) -> Vec<u32> {
    let mut start = 0;
    let rows = |example: &&Example| {
        let first = start;
        start += example.response.len() as u32;
        std::iter::repeat_n(first, example.response.len())
    };
    examples.iter().flat_map(rows).collect()
}

/// Separates the critic's random initialisation from the policy's.
const CRITIC_STREAM: u64 = 0x0043_5249_5449_4321;

/// Whitening of the head's inputs (not of advantages): an affine map of hidden states to mean 0 and a covariance close to the identity
/// (Cholesky whitening with shrinkage).
///
/// Hidden states have a large mean and a few directions with a standard deviation thousands of times larger than in others. A linear head
/// on raw hidden states learns little more than the batch's mean.
struct InputNormalizer {
    mean: Tensor,      // (H)
    transform: Tensor, // (H, H): x' = (x - mean) transform
}

/// Added to the covariance's diagonal, relative to the mean variance, so that directions with little variance are not amplified. Values of
/// 0.03 to 0.3 make no difference to the explained variance of the example's critic.
const SHRINKAGE: f64 = 0.3;

impl InputNormalizer {
    /// Fits the normaliser to the rows of `vectors`, `(N, H)` f32.
    fn fit(vectors: &Tensor) -> Result<Self, TrainError> {
        let (n, width) = vectors.dims2()?;
        let vectors = vectors.to_dtype(DType::F64)?;
        let mean = vectors.mean_keepdim(0)?; // (1, H)
        let centred = vectors.broadcast_sub(&mean)?;
        let covariance = (centred.t()?.matmul(&centred)? / (n.max(2) - 1) as f64)?;
        let mut matrix: Vec<f64> = covariance.flatten_all()?.to_vec1()?;
        let trace: f64 = (0..width).map(|i| matrix[i * width + i]).sum();
        // A single vector has no variance: only its mean is subtracted.
        let ridge = if trace > 0.0 { SHRINKAGE * trace / width as f64 } else { 1.0 };
        (0..width).for_each(|i| matrix[i * width + i] += ridge);
        let inverse = inverse_of_cholesky(matrix, width);
        if inverse.iter().any(|x| !x.is_finite()) {
            return Err(TrainError::Data("rl: the reference's hidden states are not finite; check its weights".into()));
        }
        let transform = Tensor::from_vec(inverse, (width, width), &Device::Cpu)?.t()?.contiguous()?;
        Ok(Self { mean: mean.squeeze(0)?.to_dtype(DType::F32)?, transform: transform.to_dtype(DType::F32)? })
    }

    fn tensors(&self) -> BTreeMap<String, Tensor> {
        BTreeMap::from([("mean".to_owned(), self.mean.clone()), ("transform".to_owned(), self.transform.clone())])
    }

    /// From [`InputNormalizer::tensors`]; `None` if they are missing.
    fn from_tensors(tensors: &BTreeMap<String, Tensor>) -> Option<Self> {
        Some(Self { mean: tensors.get("mean")?.clone(), transform: tensors.get("transform")?.clone() })
    }

    /// Folds the normalisation into the head: returns weights `(1, H)` for unnormalised vectors that are equivalent to `weights` on
    /// normalised ones, and the amount to subtract from the bias, `(1)`.
    fn fold_into(&self, weights: &Tensor) -> Result<(Tensor, Tensor), TrainError> {
        let plain = weights.matmul(&self.transform.t()?)?; // (1, H)
        let shift = plain.matmul(&self.mean.unsqueeze(1)?)?.flatten_all()?;
        Ok((plain, shift))
    }

    /// Normalises `vectors` `(N, H)`.
    fn apply(&self, vectors: &Tensor) -> Result<Tensor, TrainError> {
        Ok(vectors.broadcast_sub(&self.mean)?.matmul(&self.transform)?)
    }
}

/// The inverse of the lower Cholesky factor of a symmetric positive definite matrix, row-major.
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
        // Two nearly parallel directions, one a hundred times smaller, all with a large mean.
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
