//! Generation on a GPU: one step of many sequences as one batch of kernels.
//!
//! A step begins with one copy to the GPU of all that the host has decided (tokens, positions, slots of the KV cache, block tables, random
//! numbers), and ends with one copy back, of tokens and log-probabilities, which is the only synchronisation. Its memory is allocated
//! before, for the largest step. Layers are those of training ([`querl_model::backend::TransformerLayer`]), with the operations of
//! [`backend::DecodeBackend`]. Launches of one layer, for any number of rows:
//!
//! | | launches |
//! |---|---|
//! | norm | 1 |
//! | queries, keys, values: products with the weights, with all A at once | 3 + 1 |
//! | B, bias, per-head norms, RoPE, keys and values into their blocks (`finish_heads`) | 1 |
//! | attention; split-K join if a sequence has more than 256 tokens | 1 or 2 |
//! | output: products with weight, A and B, added to the residual | 1 + 2 |
//! | norm | 1 |
//! | gate and up: products with the weights, with both A at once | 2 + 1 |
//! | B and SwiGLU (`finish_gated`) | 1 |
//! | down: as the output | 1 + 2 |
//!
//! 18 or 19 with an adapter on every layer, 12 or 13 without (a bias on the output, or DoRA, make one product more of three into one
//! of two and `finish_added`). Each step has 4 more: embedding, last norm, logits, sampling; and one for all copy-on-write blocks. In
//! prefill, 2 more pick the last row of each sequence after the last layer's keys and values, and one picks hidden states.
//!
//! Decode steps are filled up to one of a few numbers of sequences, and captured as a CUDA graph at the second step of a size: capture
//! takes about as long as launching the step once. A policy of the same shapes overwrites the previous one, so that graphs stay valid.
//! In prefill each token is a row that attends to the keys before it: attention reads `n (n + 1) / 2` keys and values for n tokens, from
//! the second-level cache except the first time.
//!
//! With tensor parallelism each GPU computes its heads and its part of the feed-forward layers, and the residual is all-reduced after
//! the output and down projections. Sums have the same bits on all GPUs, so that all sample the same tokens; such steps are not captured.

mod backend;
mod buffers;
mod linear;
mod step;
#[cfg(test)]
mod tests;
mod weights;

use crate::device::{CacheShape, Gpu, SamplingRules};
use backend::KvCache;
use buffers::StepBuffers;
use querl_model::backend::{DecodeBufferSizes, DecodePolicy, LogitsProcessor, ScheduledSequence, TensorParallel};
use querl_model::{ComputeDevice, Decoder, DecoderConfig, GpuUse, LoraAdapter, ModelError};
use step::{GraphCache, Step};
use weights::PolicyWeights;

/// A policy on a GPU, with its KV cache and the buffers of its decode steps.
pub(crate) struct GpuPolicy {
    /// GPU handle with a separate stream, because generation may overlap training.
    gpu: Gpu,
    tensor_gpu: Gpu,
    config: DecoderConfig,
    parallel: TensorParallel,
    /// `None` after an error of [`DecodePolicy::set`].
    weights: Option<PolicyWeights>,
    cache: Option<KvCache>,
    buffers: Option<StepBuffers>,
    graphs: GraphCache,
    sampling: Option<SamplingRules>,
}

impl GpuPolicy {
    /// `gpu`: the GPU that holds the decoder's tensors.
    pub(crate) fn new(gpu: &Gpu, decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<Self, ModelError> {
        ComputeDevice::check_gpu_head_dim(decoder.config().head_dim, GpuUse::Generation)
            .map_err(|error| ModelError::Generation(format!("{error}; set `device = \"cpu\"`")))?;
        let (tensor_gpu, gpu) = (gpu.clone(), gpu.with_new_stream()?);
        let weights = Some(PolicyWeights::new(&gpu, &tensor_gpu, decoder, adapter)?);
        let (config, parallel) = (decoder.local_config().clone(), decoder.parallel().clone());
        let graphs = new_graphs(weights.as_ref(), &parallel);
        Ok(Self { gpu, tensor_gpu, config, parallel, weights, cache: None, buffers: None, graphs, sampling: None })
    }

    #[cfg(test)]
    pub(crate) fn n_captured(&self) -> usize {
        self.graphs.n_captured()
    }

    /// Frees the buffers of decode steps, and the CUDA graphs that use them.
    fn free_steps(&mut self) {
        self.graphs = new_graphs(self.weights.as_ref(), &self.parallel);
        self.buffers = None;
    }
}

impl DecodePolicy for GpuPolicy {
    fn set(&mut self, decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<(), ModelError> {
        let (gpu, tensor_gpu) = (self.gpu.clone(), self.tensor_gpu.clone());
        if let Some(mut weights) = self.weights.take()
            && weights.replace(&gpu, &tensor_gpu, decoder, adapter)?
        {
            self.weights = Some(weights);
            return Ok(());
        }
        self.free_steps(); // before the new weights are allocated
        self.weights = Some(PolicyWeights::new(&gpu, &tensor_gpu, decoder, adapter)?);
        self.graphs = new_graphs(self.weights.as_ref(), &self.parallel);
        Ok(())
    }

    fn allocate_blocks(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.graphs = new_graphs(self.weights.as_ref(), &self.parallel);
        self.cache = None; // freed before the new one is allocated
        let DecoderConfig { n_layers, n_kv_heads, head_dim, .. } = self.config;
        self.cache = Some(KvCache::new(&self.gpu, n_layers, CacheShape { n_blocks, n_kv_heads, head_dim })?);
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
        let n_response_tokens = if sampling.read_responses() { settings.max_new_tokens } else { 0 };
        self.sampling = Some(sampling);
        let sizes = DecodeBufferSizes::new(&self.config, n_sequences, longest);
        if self.buffers.as_ref().is_some_and(|buffers| buffers.fits(&sizes, n_response_tokens)) {
            return Ok(());
        }
        self.free_steps();
        let lora_width = self.weights.as_ref().map_or(0, PolicyWeights::lora_width);
        self.buffers = Some(StepBuffers::new(&self.gpu, &self.config, sizes, lora_width, n_response_tokens)?);
        Ok(())
    }

    fn forward(&mut self, units: &mut [ScheduledSequence<'_>], rules: &LogitsProcessor<'_>) -> Result<(), ModelError> {
        let Some(weights) = &self.weights else {
            return Err(ModelError::Generation("a GPU without a policy: setting the last one failed".into()));
        };
        let (Some(buffers), Some(cache), Some(sampling)) = (&mut self.buffers, &mut self.cache, &self.sampling) else {
            return Err(ModelError::Generation("a GPU without a KV cache".into()));
        };
        let (gpu, config, graphs) = (&self.gpu, &self.config, &mut self.graphs);
        Step { gpu, config, weights, buffers, cache, graphs, sampling }.run(units, rules)
    }
}

/// With tensor parallelism decode steps are not captured, because ranks synchronise on the CPU before each all-reduce.
fn new_graphs(weights: Option<&PolicyWeights>, parallel: &TensorParallel) -> GraphCache {
    GraphCache::new(weights.is_some_and(PolicyWeights::can_be_captured) && !parallel.is_sharded())
}
