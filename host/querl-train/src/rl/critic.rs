//! The critic: a value function over response tokens.
//!
//! A head on the reference's hidden states reads two of them: the one that the token is predicted from, and the one that the
//! response's first token is predicted from. The latter encodes the query; later ones encode little but the next token, and a
//! linear head on them alone explains nothing of the returns. Both are normalised with statistics of the first batch.

use super::critic_inputs::InputNormalizer;
use super::task::RlTask;
use crate::checkpoint::base_name;
use crate::policy::{Example, Policy, TrainingPass};
use crate::{AdamW, AdamWSettings, Gradients, State, TrainError};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module};
use querl_core::config::CriticKind;
use querl_model::{Decoder, LoraAdapter, Mesh, Recompute, backward, save_tensors};
use std::collections::BTreeMap;
use std::path::Path;

/// A value head, on an adapter of its own or on the reference's hidden states.
pub(super) struct Critic {
    head: Linear, // (1, H) on an adapter, (1, 2H) on the reference
    base: Base,
    vars: BTreeMap<String, Var>,
    optimizer: AdamW,
}

/// Where the head's hidden states come from.
enum Base {
    /// An adapter of the critic's own.
    Adapter(Box<LoraAdapter>),
    /// The reference; the normalisers are fitted to the first batch.
    Reference(Option<Normalizers>),
}

struct Normalizers {
    /// Of the state before the response's first token.
    first: InputNormalizer,
    /// Of the state before the current token.
    current: InputNormalizer,
}

const HEAD_WEIGHT: &str = "value_head.weight";
const HEAD_BIAS: &str = "value_head.bias";

impl Critic {
    /// The head starts at zero: every value is 0, and the first advantages are the rewards themselves.
    pub(super) fn new(task: &RlTask<'_>) -> Result<Self, TrainError> {
        let width = task.decoder.config().hidden_size;
        // A head on the reference is little work and stays on the CPU; one on an adapter is on that adapter's device.
        let (base, width, device) = match task.config.critic {
            CriticKind::Head => (Base::Reference(None), 2 * width, Device::Cpu),
            CriticKind::Adapter => {
                let seed = task.seed ^ CRITIC_STREAM;
                let adapter = LoraAdapter::new(task.decoder, task.critic_lora.clone(), seed)?;
                (Base::Adapter(Box::new(adapter)), width, task.decoder.place().device())
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

    /// Values of all response tokens of some examples: `(N)`. `inputs`: their rows of [`Critic::inputs`], for a head on the
    /// reference.
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
                Policy { decoder, adapter: Some(adapter) }.training_hidden(examples, training)?
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
        let hidden = match &self.base {
            Base::Adapter(adapter) => {
                let frozen = adapter.without_gradient();
                Policy { decoder, adapter: Some(&frozen) }.response_hidden(examples)?
            }
            Base::Reference(_) => return Ok(self.values(decoder, examples, inputs, None)?.detach().to_vec1()?),
        };
        Ok(self.head.forward(&hidden)?.squeeze(1)?.detach().to_vec1()?)
    }

    /// Runs the backward pass of `loss` and adds its gradients.
    pub(super) fn add_gradients(
        &self,
        gradients: &mut Gradients,
        loss: &Tensor,
        recompute: Option<&Recompute>,
    ) -> Result<(), TrainError> {
        gradients.add(&backward(loss, recompute)?, &self.vars)
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
            let normalizer = |name| Ok(InputNormalizer::from_tensors(&state.tensors(name)?));
            let (first, current): (Result<_, TrainError>, Result<_, TrainError>) =
                (normalizer("critic_inputs.first"), normalizer("critic_inputs.current"));
            *normalizers = first?.zip(current?).map(|(first, current)| Normalizers { first, current });
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
