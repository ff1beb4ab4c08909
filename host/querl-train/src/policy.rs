//! The policy: a decoder with an adapter, and log-probabilities of responses given prompts.

use crate::TrainError;
use candle_core::{Tensor, Var};
use querl_model::{Decoder, Dropout, Keep, LoraAdapter, PackedBatch, Pass, Recompute};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A prompt and its response, as token ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Example {
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// Token ids of the response; the last is the end-of-sequence token, unless the response is truncated.
    pub response: Vec<u32>,
}

impl Example {
    /// Number of tokens of prompt and response together.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.response.len()
    }

    /// The input tokens of the decoder: all tokens except the last, which is only predicted.
    pub fn computed(&self) -> impl Iterator<Item = u32> + '_ {
        self.prompt.iter().chain(&self.response).copied().take(self.n_computed())
    }

    pub(crate) fn n_computed(&self) -> usize {
        self.len() - usize::from(!self.response.is_empty())
    }

    /// Whether prompt and response are both empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A base model with a LoRA adapter, or without one.
#[derive(Clone, Copy)]
pub struct Policy<'a> {
    /// The base model, shared by policy, reference and critic.
    pub decoder: &'a Decoder,
    /// The adapter; `None`: the base alone.
    pub adapter: Option<&'a LoraAdapter>,
}

/// Output of a forward pass for the response tokens of a batch, N in all.
pub(crate) struct ResponseLogprobs {
    /// Hidden state from which each response token was predicted: `(N, H)`.
    pub(crate) hidden: Tensor,
    /// Log-probability of each response token, and entropy of its predicted distribution: `(N, 2)`.
    pub(crate) logprobs: Tensor,
}

impl ResponseLogprobs {
    /// Log-probabilities split into one row per response.
    pub(crate) fn rows(&self, examples: &[&Example]) -> Result<Vec<Vec<f32>>, TrainError> {
        Ok(rows_of(&self.logprobs.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?, examples))
    }
}

impl Policy<'_> {
    /// Trainable variables by name: those of the adapter, or of the base if there is no adapter.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        self.adapter.map_or(self.decoder.vars(), LoraAdapter::vars)
    }

    /// Log-probabilities and entropies of all response tokens of a batch, with logits divided by the temperature. Common prefixes of the
    /// examples are computed once; call [`querl_model::backward`] for the gradients, since layers may be checkpointed.
    pub(crate) fn response_logprobs(
        &self,
        examples: &[&Example],
        temperature: f64,
        training: TrainingPass<'_>,
    ) -> Result<ResponseLogprobs, TrainError> {
        let hidden = self.response_hidden(examples, training)?;
        let targets = examples.iter().flat_map(|example| example.response.iter().copied()).collect();
        let logprobs = self.decoder.token_logprobs(&hidden, targets, temperature, self.adapter)?;
        Ok(ResponseLogprobs { hidden, logprobs })
    }

    /// Hidden states from which the response tokens of the batch are predicted: `(N, H)` for N response tokens in total.
    pub(crate) fn response_hidden(
        &self,
        examples: &[&Example],
        training: TrainingPass<'_>,
    ) -> Result<Tensor, TrainError> {
        let sequences: Vec<Vec<u32>> = examples.iter().map(|example| example.computed().collect()).collect();
        let batch = PackedBatch::shared(sequences.iter().map(Vec::as_slice));
        let rows = examples.iter().enumerate().flat_map(|(index, example)| {
            let first = example.prompt.len() - 1;
            let batch = &batch;
            (first..first + example.response.len()).map(move |position| batch.row_of(index, position) as u32)
        });
        let pass = Pass { adapter: self.adapter, dropout: training.dropout, recompute: training.recompute };
        Ok(self.decoder.hidden_at(&batch, &rows.collect::<Vec<u32>>(), &pass)?)
    }
}

/// Options of a training pass; the default is a pass for inference.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TrainingPass<'a> {
    /// Dropout on the inputs of the adapted linear layers.
    pub(crate) dropout: Option<Dropout>,
    /// Gradient checkpointing: which activations layers save, and where the backward pass collects gradients.
    pub(crate) recompute: Option<&'a Recompute>,
}

pub(crate) fn recompute_mode(gradient_checkpointing: bool) -> Recompute {
    Recompute::new(if gradient_checkpointing { Keep::Inputs } else { Keep::Activations })
}

/// Splits the values of all response tokens of a batch into one row per response.
pub(crate) fn rows_of<T: Copy>(values: &[T], examples: &[&Example]) -> Vec<Vec<T>> {
    let mut rest = values;
    let row = |example: &&Example| {
        let (row, tail) = rest.split_at(example.response.len());
        rest = tail;
        row.to_vec()
    };
    examples.iter().map(row).collect()
}
