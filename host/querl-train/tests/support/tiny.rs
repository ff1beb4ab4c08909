//! A tiny random model, a task with a known optimum for it, and a look at single figures.

use crate::recording::Recorder;
use querl_core::ports::PolicyResponse;
use querl_core::records::Reward;
use querl_model::{Decoder, TextTokenizer, Weights, small_model};

/// A small random model in a folder of its own.
pub(crate) struct Model {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) decoder: Decoder,
    pub(crate) tokenizer: TextTokenizer,
}

impl Model {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shape = small_model::Shape {
            hidden_size: 32,
            intermediate_size: 64,
            n_layers: 2,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 16,
            max_positions: 64,
        };
        let mut config = small_model::write_files(folder.path(), &["aaaa bbbb".to_owned()], 280, &shape).unwrap();
        // With the usual 0.02 the logits of so narrow a model hardly differ, whatever an adapter does.
        config.initializer_range = 0.3;
        Decoder::init(config, 3).unwrap().save(folder.path(), small_model::STORED_DTYPE).unwrap();
        let decoder = Decoder::load(folder.path(), Weights::Frozen).unwrap();
        let tokenizer = TextTokenizer::load(folder.path()).unwrap();
        Self { folder, decoder, tokenizer }
    }
}

/// Pays for plain ASCII: the share of such characters in the answer.
pub(crate) fn plain_text(response: &PolicyResponse) -> Reward {
    let n_plain = response.text.chars().filter(char::is_ascii).count();
    let total = n_plain as f64 / response.text.chars().count().max(1) as f64;
    Reward { total, components: Vec::new() }
}

impl Recorder {
    pub(crate) fn get(&self, step: u64, name: &str) -> f64 {
        self.0.iter().find_map(|(at, metrics)| (*at == step).then(|| metrics.get(name).copied())?).unwrap()
    }
}
