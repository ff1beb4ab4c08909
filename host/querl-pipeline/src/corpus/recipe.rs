//! `pretrain.toml`: vocabulary and shape of a small model, chosen by the size of its pretraining texts.

use serde::Serialize;

/// The model size for texts of at most `max_bytes` in UTF-8, each text counted once.
struct SizeClass {
    max_bytes: usize,
    /// The reason for this size; a comment in the written file.
    reason: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    n_layers: usize,
    n_heads: usize,
    n_kv_heads: usize,
}

/// Sizes in ascending order. The first one has the shape of examples/tiny-qwen3; each of the others is about a third wider and deeper, and
/// is not measured. All have more weights than the text has bytes, because memorising a fixed knowledge base is allowed.
const SIZES: [SizeClass; 3] = [
    SizeClass {
        max_bytes: 500_000,
        reason: "less than 0.5 MB of text: most further merges of the tokenizer would be of words that occur once or twice",
        vocab_size: 2400,
        hidden_size: 192,
        intermediate_size: 512,
        n_layers: 4,
        n_heads: 6,
        n_kv_heads: 2,
    },
    SizeClass {
        max_bytes: 5_000_000,
        reason: "up to 5 MB of text: a token for each usual word, and two layers more for more facts",
        vocab_size: 8000,
        hidden_size: 256,
        intermediate_size: 704,
        n_layers: 6,
        n_heads: 8,
        n_kv_heads: 2,
    },
    SizeClass {
        max_bytes: usize::MAX,
        reason: "more than 5 MB of text: 19 million weights; compare a published model of 0.5 billion, which knows the language already",
        vocab_size: 16_000,
        hidden_size: 384,
        intermediate_size: 1024,
        n_layers: 8,
        n_heads: 12,
        n_kv_heads: 4,
    },
];

/// Head size of all shipped small models; with 32 these widths have several heads.
const HEAD_DIM: usize = 32;
/// Learning rate of examples/tiny-qwen3 at its width. With Adam the rate decreases with the width.
///
/// Source: Yang et al. 2022, "Tensor Programs V", table 3 (µP).
const LEARNING_RATE: f64 = 3e-3;
const LEARNING_RATE_WIDTH: f64 = 192.0;
/// Granularity of the number of positions, which need no weights.
const POSITIONS: usize = 512;
/// Number of passes over the corpus.
const EPOCHS: usize = 2;
const BATCH_SIZE: usize = 32;

/// Shape and training length of the small model that `querl model pretrain` trains on a corpus.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Recipe {
    /// Vocabulary size of the tokenizer.
    pub vocab_size: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Intermediate size of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub n_layers: usize,
    /// Number of attention heads.
    pub n_heads: usize,
    /// Number of key-value heads (grouped-query attention).
    pub n_kv_heads: usize,
    /// Maximum number of tokens of a sequence; no line of the corpus is longer.
    pub max_positions: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Number of optimizer steps, with which each line is trained on twice.
    pub n_steps: usize,
    /// Why this size was chosen, as a comment for the file.
    pub reason: &'static str,
}

impl Recipe {
    /// Recipe for a corpus of `n_lines` lines whose longest has `longest_line_bytes`, with `text_bytes` of distinct texts. A byte-level
    /// tokenizer has at most one token per byte.
    pub fn of(text_bytes: usize, longest_line_bytes: usize, n_lines: usize) -> Self {
        let [small, medium, large] = &SIZES;
        let size = [small, medium].into_iter().find(|size| text_bytes <= size.max_bytes).unwrap_or(large);
        Self {
            vocab_size: size.vocab_size,
            hidden_size: size.hidden_size,
            intermediate_size: size.intermediate_size,
            n_layers: size.n_layers,
            n_heads: size.n_heads,
            n_kv_heads: size.n_kv_heads,
            max_positions: longest_line_bytes.max(1).next_multiple_of(POSITIONS),
            learning_rate: (LEARNING_RATE * LEARNING_RATE_WIDTH / size.hidden_size as f64 * 1e5).round() / 1e5,
            n_steps: EPOCHS * n_lines.div_ceil(BATCH_SIZE),
            reason: size.reason,
        }
    }

    /// Text of `pretrain.toml`. `corpus` and `output_dir` are paths relative to the folder of the file, or absolute.
    pub fn to_toml(&self, corpus: &str, output_dir: &str, seed: u64) -> String {
        let quoted = |text: &str| toml::Value::String(text.to_owned());
        let Self { vocab_size, hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, .. } = self;
        let Self { max_positions, learning_rate, n_steps, reason, .. } = self;
        format!(
            "# Written by `querl model corpus`; docs/small-models.md explains the choices.\n\
             corpus = {}\noutput_dir = {}\nseed = {seed}\n\
             # Held out: the best weights on these lines are written.\nval_share = 0.02\n\
             # Size: {reason}.\nvocab_size = {vocab_size}\n\n\
             [model]\nhidden_size = {hidden_size}\nintermediate_size = {intermediate_size}\nn_layers = {n_layers}\n\
             n_heads = {n_heads}\nn_kv_heads = {n_kv_heads}\nhead_dim = {HEAD_DIM}\n\
             # No line of the corpus has more bytes, and so none has more tokens.\nmax_positions = {max_positions}\n\n\
             [train]\nmethod = \"full\"\n# 3e-3 at width 192, less at more.\nlearning_rate = {learning_rate}\n\
             # Each line twice, about {n_steps} steps, over which the learning rate falls. More where the best step is the last one.\nepochs = {EPOCHS}\nbatch_size = {BATCH_SIZE}\n\
             gradient_accumulation_steps = 1\nwarmup_ratio = 0.03\nweight_decay = 0.05\nmax_grad_norm = 1.0\n\
             max_length = {max_positions}\n# Once an epoch.\neval_steps = 0\nearly_stopping_patience = 3\n",
            quoted(corpus),
            quoted(output_dir),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_grows_with_the_texts_and_the_learning_rate_falls() {
        let of = |text_bytes| Recipe::of(text_bytes, 300, 9000);
        let shape = |recipe: &Recipe| (recipe.vocab_size, recipe.hidden_size, recipe.n_layers);
        assert_eq!(shape(&of(80_000)), (2400, 192, 4));
        assert_eq!((shape(&of(500_000)), shape(&of(500_001))), ((2400, 192, 4), (8000, 256, 6)));
        assert_eq!(shape(&of(5_000_001)), (16_000, 384, 8));
        let rates = [80_000, 1_000_000, 9_000_000].map(|bytes| of(bytes).learning_rate);
        assert!(rates.iter().zip([3e-3, 2.25e-3, 1.5e-3]).all(|(found, expected)| (found - expected).abs() < 1e-12));
        // 9000 / 32 = 281.25 steps per epoch
        assert_eq!(of(80_000).n_steps, 564);
    }

    #[test]
    fn heads_share_their_keys_and_values_evenly() {
        for size in &SIZES {
            assert_eq!((size.n_heads * HEAD_DIM, size.n_heads % size.n_kv_heads), (size.hidden_size, 0));
        }
    }

    #[test]
    fn positions_hold_the_longest_line() {
        for (bytes, positions) in [(0, 512), (512, 512), (513, 1024), (1400, 1536)] {
            assert_eq!(Recipe::of(1, bytes, 100).max_positions, positions);
        }
    }

    #[test]
    fn the_file_is_toml_whatever_the_paths_are() {
        let text = Recipe::of(80_000, 700, 9000).to_toml("a \"b\"\\c.jsonl", "模型", 7);
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["corpus"].as_str(), Some("a \"b\"\\c.jsonl"));
        assert_eq!((table["output_dir"].as_str(), table["seed"].as_integer()), (Some("模型"), Some(7)));
        assert_eq!(table["train"]["learning_rate"].as_float(), Some(0.003));
        assert_eq!(table["train"]["max_length"], table["model"]["max_positions"]);
    }
}
