//! A decoder with an adapter, seen as a policy: log-probabilities of responses given prompts.

use crate::TrainError;
use candle_core::{Tensor, Var};
use querl_model::{Decoder, LoraAdapter, PackedBatch};
use std::collections::BTreeMap;

/// A prompt and the response to it, as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// At least one token.
    pub prompt: Vec<u32>,
    /// Ends with the end of sequence, unless it was cut off.
    pub response: Vec<u32>,
}

impl Example {
    /// Tokens of both.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.response.len()
    }

    /// True without any token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A base and what is trained on it.
#[derive(Clone, Copy)]
pub struct Policy<'a> {
    /// The base; shared by policy, reference and critic.
    pub decoder: &'a Decoder,
    /// `None` is the bare base.
    pub adapter: Option<&'a LoraAdapter>,
}

/// What a forward pass says of the response tokens of a batch.
pub(crate) struct ResponsePass {
    /// `(N, H)`: the hidden state that each response token was predicted from.
    pub(crate) hidden: Tensor,
    /// `(N, 2)`: log-probability and entropy.
    pub(crate) logprobs: Tensor,
}

impl Policy<'_> {
    /// Variables of the adapter, or of the base where there is none.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        self.adapter.map_or(self.decoder.vars(), LoraAdapter::vars)
    }

    /// Hidden states from which each response token of the batch is predicted: `(N, H)` for N response tokens in all.
    pub(crate) fn response_hidden(&self, examples: &[&Example]) -> Result<Tensor, TrainError> {
        let sequences: Vec<Vec<u32>> =
            examples.iter().map(|example| [example.prompt.as_slice(), &example.response].concat()).collect();
        let batch = PackedBatch::new(sequences.iter().map(Vec::as_slice));
        let hidden = self.decoder.hidden_states(&batch, self.adapter)?;
        let rows = examples.iter().zip(batch.segments()).flat_map(|(example, segment)| {
            let first = segment.start + example.prompt.len() - 1;
            (first..first + example.response.len()).map(|row| row as u32)
        });
        let rows: Vec<u32> = rows.collect();
        let n_rows = rows.len();
        Ok(hidden.index_select(&Tensor::from_vec(rows, n_rows, hidden.device())?, 0)?)
    }

    /// Log-probabilities and entropies of all response tokens of a batch, logits divided by the temperature.
    pub(crate) fn response_pass(&self, examples: &[&Example], temperature: f64) -> Result<ResponsePass, TrainError> {
        let hidden = self.response_hidden(examples)?;
        let targets = examples.iter().flat_map(|example| example.response.iter().copied()).collect();
        let logprobs = self.decoder.token_logprobs(&hidden, targets, temperature, self.adapter)?;
        Ok(ResponsePass { hidden, logprobs })
    }
}

/// Cuts the values of all response tokens of a batch into one row per response.
pub(crate) fn rows_of<T: Copy>(values: &[T], examples: &[&Example]) -> Vec<Vec<T>> {
    let mut rest = values;
    let row = |example: &&Example| {
        let (row, tail) = rest.split_at(example.response.len());
        rest = tail;
        row.to_vec()
    };
    examples.iter().map(row).collect()
}
