//! The model that a training stage left, answering.

use super::{Base, best};
use crate::run::Run;
use querl_core::ports::PolicyResponse;
use querl_core::records::DatasetRow;
use querl_model::{
    Decoder, Decoding, GenerationRequest, LoraAdapter, ModelError, SamplingSettings, TextTokenizer, Weights, generate,
};
use querl_train::rl::sampling;
use std::path::Path;
use std::time::Instant;

/// One answer of a model and the time it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The answer.
    pub response: PolicyResponse,
    /// Wall-clock time to write it, in milliseconds.
    pub latency_ms: f64,
}

/// A model that answers as well as it can: it draws nothing.
pub trait Generator {
    /// One answer per row, in order.
    ///
    /// # Errors
    /// The model cannot compute.
    fn generate(&self, rows: &[DatasetRow]) -> anyhow::Result<Vec<Generation>>;
}

/// The model that a training stage left.
///
/// # Errors
/// It cannot be loaded.
pub fn generator(run: &Run, stage_folder: &Path) -> anyhow::Result<Box<dyn Generator>> {
    let checkpoint = best(stage_folder);
    let base = Base::of(run, &checkpoint);
    let decoder = Decoder::load_as(&base.model, Weights::Frozen, run.config.model.dtype)?;
    let adapter = base.adapter.map(|path| LoraAdapter::load(&path, decoder.config())).transpose()?;
    let tokenizer = TextTokenizer::load(&base.model)?;
    let decoding = match run.config.eval.n_beams {
        1 => Decoding::Greedy,
        n_beams => Decoding::Beam { n_beams, length_penalty: 1.0 },
    };
    Ok(Box::new(Answering { decoder, adapter, tokenizer, decoding, sampling: sampling(&run.config.rl) }))
}

struct Answering {
    decoder: Decoder,
    adapter: Option<LoraAdapter>,
    tokenizer: TextTokenizer,
    decoding: Decoding,
    /// Limits and stop strings, as in training.
    sampling: SamplingSettings,
}

impl Generator for Answering {
    /// One query at a time: the latency is what a single user would wait.
    fn generate(&self, rows: &[DatasetRow]) -> anyhow::Result<Vec<Generation>> {
        rows.iter().enumerate().map(|(index, row)| self.answer(index, row)).collect()
    }
}

impl Answering {
    fn answer(&self, row_index: usize, row: &DatasetRow) -> anyhow::Result<Generation> {
        let started = Instant::now();
        let prompt = self.tokenizer.encode_prompt(row.prompt())?;
        let request = GenerationRequest { prompt: &prompt, seed: 0, n: 1 };
        let sampling = &self.sampling;
        let adapter = self.adapter.as_ref();
        let answers = generate(&self.decoder, adapter, &[request], self.decoding, sampling, &self.tokenizer)?;
        let texts = answers.into_iter().map(|answer| Ok((self.tokenizer.decode(&answer.token_ids)?, answer)));
        let (text, answer) = texts.collect::<Result<Vec<_>, ModelError>>()?.swap_remove(0);
        let text = sampling.before_stop(&text).to_owned();
        let latency_ms = started.elapsed().as_secs_f64() * 1e3;
        let n_tokens = answer.token_ids.len() as u32;
        let response = PolicyResponse { row_index, sample_index: 0, text, n_tokens, truncated: answer.truncated };
        Ok(Generation { response, latency_ms })
    }
}
