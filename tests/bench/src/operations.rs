//! FLOP of a fine-tuning step, and bytes read by a decode step.

use querl_core::config::{BaseDtype, SftConfig};
use querl_model::{DecoderConfig, PackedBatch};
use querl_train::job::memory_plan::{base_bytes, linears};
use querl_train::{Example, micro_batches};

#[derive(Debug, Default, PartialEq)]
pub(crate) struct StepWork {
    pub(crate) passes: usize,
    /// Tokens computed by the decoder.
    pub(crate) rows: usize,
    pub(crate) pairs: u64,
    /// Tokens whose log-probability is computed.
    pub(crate) answers: usize,
}

impl StepWork {
    /// Counts the tokens of some examples in micro-batches of at most `tokens_per_pass` tokens.
    pub(crate) fn of(examples: &[&Example], tokens_per_pass: usize) -> Self {
        let mut computed = Self::default();
        for pass in micro_batches(examples, tokens_per_pass) {
            let sequences: Vec<Vec<u32>> = pass.iter().map(|&index| examples[index].computed().collect()).collect();
            let batch = PackedBatch::shared(sequences.iter().map(Vec::as_slice));
            computed.passes += 1;
            computed.rows += batch.n_rows();
            computed.pairs += batch.n_pairs();
            computed.answers += pass.iter().map(|&index| examples[index].response.len()).sum::<usize>();
        }
        computed
    }

    /// FLOP of forward and backward pass, in matrix products: frozen weights have two (outputs, gradients of inputs), adapters three, the head
    /// two per response token, attention two in the forward and four in the backward pass.
    pub(crate) fn operations(&self, shapes: &DecoderConfig, lora: &SftConfig) -> f64 {
        let of_layer: usize = linears(shapes).iter().map(|(_, n_in, n_out)| n_in * n_out).sum();
        let of_adapter: usize = linears(shapes).iter().map(|(_, n_in, n_out)| lora.lora_rank * (n_in + n_out)).sum();
        let of_row = (2 * 2 * of_layer + 3 * 2 * of_adapter) * shapes.n_layers;
        let of_answer = 2 * 2 * shapes.vocab_size * shapes.hidden_size;
        let of_pair = 6 * 2 * shapes.head_dim * shapes.n_heads * shapes.n_layers;
        self.rows as f64 * of_row as f64 + self.answers as f64 * of_answer as f64 + self.pairs as f64 * of_pair as f64
    }
}

/// Bytes of weights that a decode step reads: all layers and the head.
pub(crate) fn weight_bytes(shapes: &DecoderConfig, dtype: BaseDtype) -> u64 {
    let untied = DecoderConfig { tie_word_embeddings: true, ..shapes.clone() };
    base_bytes(&untied, dtype)
}

pub(crate) fn token_bytes(shapes: &DecoderConfig, value_bytes: usize) -> u64 {
    (shapes.n_layers * 2 * shapes.n_kv_heads * shapes.head_dim * value_bytes) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_prefixes_count_once_and_flop_follow_the_formula() {
        let example = |last| Example { prompt: vec![5, 6, last], response: vec![7, 2] };
        let (a, b) = (example(8), example(9));
        // 5 and 6 once, then 8 7 and 9 7. No log-probability is computed from the last token of a response.
        let together = StepWork::of(&[&a, &b], 100);
        assert_eq!(together, StepWork { passes: 1, rows: 6, pairs: 1 + 2 + 2 * (3 + 4), answers: 4 });
        let apart = StepWork::of(&[&a, &b], 4);
        assert_eq!(apart, StepWork { passes: 2, rows: 8, pairs: 2 * (1 + 2 + 3 + 4), answers: 4 });
        let (Some(shapes), lora) =
            (DecoderConfig::of_shape("tiny"), SftConfig { lora_rank: 4, ..SftConfig::default() })
        else {
            panic!("no tiny shape")
        };
        // Width 128, feed-forward 256, two query heads of 64 and one KV head, two layers, 2048 tokens.
        let layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256;
        let adapter = 4 * (2 * 256 + 2 * 192 + 3 * 384);
        let expected = 6 * 2 * (4 * layer + 6 * adapter) + 4 * 4 * 2048 * 128 + 17 * 12 * 64 * 2 * 2;
        assert_eq!(together.operations(&shapes, &lora), f64::from(expected));
    }
}
