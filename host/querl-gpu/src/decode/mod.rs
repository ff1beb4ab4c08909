//! A policy on a card: one step of many sequences as one batch of kernels.
//!
//! A step begins with one copy to the card, of everything that the host has decided (tokens, positions, places of keys and values,
//! tables of blocks, random numbers), and ends with one copy back and the only wait: tokens and log-probabilities. Its memory is
//! allocated before, for the largest step. Launches of one layer, for any number of rows:
//!
//! | | launches |
//! |---|---|
//! | norm | 1 |
//! | queries, keys, values: products with the weights, with all A at once | 3 + 1 |
//! | B, bias, norms of heads, rotation, keys and values into their blocks (`finish_heads`) | 1 |
//! | attention; joined, where a sequence has more than 256 tokens | 1 or 2 |
//! | output: products with weight, A and B, added to the residual | 1 + 2 |
//! | norm | 1 |
//! | gate and up: products with the weights, with both A at once | 2 + 1 |
//! | B and the gated product (`finish_gated`) | 1 |
//! | down: as the output | 1 + 2 |
//!
//! 18 or 19 with an adapter on every layer, 12 or 13 without (a bias on the output, or DoRA's factors, make one product more of
//! three into one of two and `finish_added`). Besides, a step takes 4: embedding, last norm, logits, the choice; and where blocks are
//! copied, one for all of them. Where some sequence has several new tokens, 3 more pick the last rows, behind the last layer's
//! keys and values.
//!
//! Steps of one token for each sequence are filled up to one of a few numbers of sequences, and from the second of a kind on they
//! are recorded as a graph and launched in one call, whatever the model: recording takes about as long as launching the step once.
//! A policy of the same shapes is written in the place of the one before, so that the graphs stay right. The
//! prompts' tokens run through the same kernels, each as a row of its own that sees as many keys as stand before it: what attention
//! reads for that, `n (n + 1) / 2` keys and values for n tokens, comes from the second-level cache but for the first time.
//!
//! Of a model that several cards hold together, each runs these steps with its heads and its part of the feed-forward layers, and the
//! residual is summed over them behind output and down. The sums have the same bits on all cards, and so has what follows, so that
//! all choose the same tokens; such steps are launched one by one.

mod choice;
mod fields;
mod graphs;
mod pass;
mod places;
mod step;
#[cfg(test)]
mod tests;
mod weights;

use crate::device::{CacheShape, Gpu, SamplingRules};
use graphs::Graphs;
use places::{Cache, Places};
use querl_model::backend::DecodeBufferSizes;
use querl_model::backend::DecodePolicy;
use querl_model::backend::LogitsProcessor;
use querl_model::backend::ScheduledSequence;
use querl_model::backend::TensorParallel;
use querl_model::{ComputeDevice, Decoder, DecoderConfig, GpuUse, LoraAdapter, ModelError};
use step::Step;
use weights::CardWeights;

/// A policy on a card, with the memory of its steps.
pub(crate) struct GpuPolicy {
    /// With a stream of its own: training goes on beside.
    gpu: Gpu,
    of_tensors: Gpu,
    config: DecoderConfig,
    parallel: TensorParallel,
    /// `None` after a policy that could not be taken.
    weights: Option<CardWeights>,
    cache: Option<Cache>,
    places: Option<Places>,
    graphs: Graphs,
    sampling: Option<SamplingRules>,
}

impl GpuPolicy {
    /// `gpu`: of the decoder's tensors.
    pub(crate) fn new(gpu: &Gpu, decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<Self, ModelError> {
        ComputeDevice::check_gpu_head_dim(decoder.config().head_dim, GpuUse::Generation)
            .map_err(|error| ModelError::Generation(format!("{error}; set `device = \"cpu\"`")))?;
        let (of_tensors, gpu) = (gpu.clone(), gpu.beside()?);
        let weights = Some(CardWeights::new(&gpu, &of_tensors, decoder, adapter)?);
        let (config, parallel) = (decoder.local_config().clone(), decoder.parallel().clone());
        let graphs = new_graphs(weights.as_ref(), &parallel);
        Ok(Self { gpu, of_tensors, config, parallel, weights, cache: None, places: None, graphs, sampling: None })
    }

    #[cfg(test)]
    pub(crate) fn n_recorded(&self) -> usize {
        self.graphs.n_recorded()
    }

    /// Frees the memory of steps, and the graphs that use it.
    fn forget_steps(&mut self) {
        self.graphs = new_graphs(self.weights.as_ref(), &self.parallel);
        self.places = None;
    }
}

impl DecodePolicy for GpuPolicy {
    fn set(&mut self, decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<(), ModelError> {
        let (gpu, of_tensors) = (self.gpu.clone(), self.of_tensors.clone());
        if let Some(mut weights) = self.weights.take()
            && weights.replace(&gpu, &of_tensors, decoder, adapter)?
        {
            self.weights = Some(weights);
            return Ok(());
        }
        self.forget_steps(); // and with the old weights, which are gone here, there is room for the new
        self.weights = Some(CardWeights::new(&gpu, &of_tensors, decoder, adapter)?);
        self.graphs = new_graphs(self.weights.as_ref(), &self.parallel);
        Ok(())
    }

    fn allocate_blocks(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.graphs = new_graphs(self.weights.as_ref(), &self.parallel);
        self.cache = None; // the old go before the new are made
        let DecoderConfig { n_layers, n_kv_heads, head_dim, .. } = self.config;
        self.cache = Some(Cache::new(&self.gpu, n_layers, CacheShape { n_blocks, n_kv_heads, head_dim })?);
        Ok(())
    }

    fn reserve(&mut self, n_sequences: usize, longest: usize, rules: &LogitsProcessor<'_>) -> Result<(), ModelError> {
        let stop_ids: Vec<u32> = rules.stop_ids.iter().copied().collect();
        let settings = rules.settings;
        let sampling = SamplingRules {
            temperature: settings.temperature as f32,
            top_p: settings.top_p,
            top_k: settings.top_k,
            repetition_penalty: settings.repetition_penalty as f32,
            no_repeat_ngram_size: settings.no_repeat_ngram_size,
            min_new_tokens: settings.min_new_tokens,
            stop_ids: self.gpu.upload(&stop_ids)?,
        };
        let n_answer_tokens = if sampling.look_at_answers() { settings.max_new_tokens } else { 0 };
        self.sampling = Some(sampling);
        let sizes = DecodeBufferSizes::new(&self.config, n_sequences, longest);
        if self.places.as_ref().is_some_and(|places| places.hold(&sizes, n_answer_tokens)) {
            return Ok(());
        }
        self.forget_steps();
        let low_width = self.weights.as_ref().map_or(0, CardWeights::low_width);
        self.places = Some(Places::new(&self.gpu, &self.config, sizes, low_width, n_answer_tokens)?);
        Ok(())
    }

    fn forward(&mut self, units: &mut [ScheduledSequence<'_>], rules: &LogitsProcessor<'_>) -> Result<(), ModelError> {
        let Some(weights) = &self.weights else {
            return Err(ModelError::Generation("a card without a policy: the last one could not be taken".into()));
        };
        let (Some(places), Some(cache), Some(sampling)) = (&mut self.places, &mut self.cache, &self.sampling) else {
            return Err(ModelError::Generation("a card without room for keys and values".into()));
        };
        let (gpu, config, graphs) = (&self.gpu, &self.config, &mut self.graphs);
        Step { gpu, config, parallel: &self.parallel, weights, places, cache, graphs, sampling }.run(units, rules)
    }
}

/// No step is recorded where ranks meet within it: before each sum they see to it, on the host, that none has failed.
fn new_graphs(weights: Option<&CardWeights>, parallel: &TensorParallel) -> Graphs {
    Graphs::new(weights.is_some_and(CardWeights::can_be_recorded) && !parallel.is_sharded())
}
