//! The critic: what a response is worth from each of its tokens on.

use super::RlTask;
use crate::checkpoint::base_name;
use crate::policy::{Example, Policy};
use crate::{AdamW, AdamWSettings, Gradients, TrainError};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module};
use querl_core::config::CriticKind;
use querl_model::{Decoder, LoraAdapter, save_tensors};
use std::collections::BTreeMap;
use std::path::Path;

/// A value head, on an adapter of its own or on the reference's hidden states.
pub(super) struct Critic {
    head: Linear, // (1, H)
    adapter: Option<LoraAdapter>,
    vars: BTreeMap<String, Var>,
    optimizer: AdamW,
}

impl Critic {
    /// A critic that says 0 everywhere: the head starts at zero, so that early advantages are the rewards themselves.
    pub(super) fn new(task: &RlTask<'_>) -> Result<Self, TrainError> {
        let width = task.decoder.config().hidden_size;
        let weight = Var::zeros((1, width), DType::F32, &Device::Cpu)?;
        let bias = Var::zeros(1, DType::F32, &Device::Cpu)?;
        let head = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let adapter = match task.config.critic {
            CriticKind::Head => None,
            CriticKind::Adapter => {
                Some(LoraAdapter::new(task.decoder, task.critic_lora.clone(), task.seed ^ CRITIC_STREAM)?)
            }
        };
        let mut vars = BTreeMap::from([("value_head.weight".to_owned(), weight), ("value_head.bias".to_owned(), bias)]);
        vars.extend(adapter.iter().flat_map(|adapter| adapter.vars().clone()));
        Ok(Self { head, adapter, vars, optimizer: AdamW::new(AdamWSettings::default()) })
    }

    /// Values of all response tokens of a batch: `(N)`. `reference_hidden`: `(N, H)`.
    pub(super) fn values(
        &self,
        decoder: &Decoder,
        examples: &[&Example],
        reference_hidden: &Tensor,
    ) -> Result<Tensor, TrainError> {
        let hidden = match &self.adapter {
            Some(adapter) => Policy { decoder, adapter: Some(adapter) }.response_hidden(examples)?,
            None => reference_hidden.clone(),
        };
        Ok(self.head.forward(&hidden)?.squeeze(1)?)
    }

    /// Adds the gradients that a backward pass found.
    pub(super) fn collect(&self, gradients: &mut Gradients, loss: &Tensor) -> Result<(), TrainError> {
        gradients.add(&loss.backward()?, &self.vars)
    }

    /// One optimizer step. Returns the gradient norm before clipping.
    pub(super) fn step(
        &mut self,
        mut gradients: Gradients,
        learning_rate: f64,
        max_grad_norm: f64,
    ) -> Result<f64, TrainError> {
        let norm = gradients.clip(max_grad_norm)?;
        self.optimizer.step(&self.vars, &gradients, learning_rate)?;
        Ok(norm)
    }

    /// Writes the head, and the adapter where there is one.
    pub(super) fn save(&self, directory: &Path, base: &Path) -> Result<(), TrainError> {
        let head = self.vars.iter().filter(|(name, _)| name.starts_with("value_head."));
        let head = head.map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        save_tensors(&directory.join("value_head.safetensors"), &head)?;
        if let Some(adapter) = &self.adapter {
            adapter.save(directory, &base_name(base))?;
        }
        Ok(())
    }
}

/// Keeps the critic's draws apart from the policy's.
const CRITIC_STREAM: u64 = 0x0043_5249_5449_4321;
