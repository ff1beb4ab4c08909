//! The roofline model of one RL step of verl: rollout engine and FSDP training on the same GPUs. Pure functions; docs/scale.md derives the
//! formulas and compares them with published measurements.

use super::gpus::Cluster;
use super::memory::{MemoryPrediction, kv_bytes_per_token, memory};
use querl_model::DecoderConfig;
use querl_train::job::memory_plan::linears;
use serde::Serialize;

/// Efficiency constants of the roofline model: shares of the hardware peaks that a step reaches, and fixed costs.
///
/// Fitted by hand to the measurements of docs/scale.md, whose errors the test `measurements_and_errors_of_the_page_are_those_of_the_model`
/// computes again.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Efficiency {
    /// Share of the bf16 peak reached in forward passes: prefill, log-probabilities, values.
    pub forward: f64,
    /// Share of the bf16 peak reached in updates; recomputation, padding and optimizer are included.
    pub update: f64,
    /// Share of the bf16 peak reached in decode steps.
    pub decode: f64,
    /// Share of the memory bandwidth reached in decode steps.
    pub memory: f64,
    /// Share of the bandwidth between GPUs reached in communication.
    pub link: f64,
    /// Fixed seconds of a decode step: kernel launches, sampling, scheduling.
    pub decode_step_s: f64,
    /// Fixed seconds of a step outside of its phases: weight transfer to the rollout engine, data, advantages.
    pub other_s: f64,
}

impl Default for Efficiency {
    fn default() -> Self {
        Self { forward: 0.30, update: 0.15, decode: 0.40, memory: 0.60, link: 0.70, decode_step_s: 0.015, other_s: 4.0 }
    }
}

/// Largest number of responses that an engine decodes at once: verl's `rollout.max_num_seqs`.
const MAX_SEQUENCES: f64 = 1024.0;
/// Bytes of a weight in bf16.
pub(super) const BF16: f64 = 2.0;
/// Tensor parallel sizes of the rollout engine that are tried, smallest first.
const TENSOR_PARALLEL: [usize; 4] = [1, 2, 4, 8];
/// Share of a GPU's memory that the rollout engine's weights may take.
const MAX_WEIGHT_SHARE: f64 = 0.35;

/// The weights that training updates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UpdatedWeights {
    /// All weights of the model (full fine-tuning).
    All,
    /// LoRA adapters with this number of weights, on a frozen base.
    Adapter(u64),
}

/// Workload of one RL step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Workload {
    /// Number of queries of a rollout batch.
    pub n_queries: usize,
    /// Number of responses per query.
    pub n_samples: usize,
    /// Mean number of tokens of a prompt.
    pub prompt_tokens: f64,
    /// Mean number of tokens of a response.
    pub response_tokens: f64,
    /// Tokens of the longest response, which the decoding of a batch waits for.
    pub longest_response: f64,
    /// The weights that training updates.
    pub updated: UpdatedWeights,
    /// Whether a critic is trained.
    pub has_critic: bool,
    /// Whether log-probabilities of a reference are computed.
    pub has_reference: bool,
    /// Number of update epochs over a batch (`rl.ppo_epochs`).
    pub epochs: usize,
    /// Number of responses of one optimizer step.
    pub mini_batch_size: usize,
    /// Maximum number of tokens of a forward and backward pass on one GPU.
    pub tokens_per_pass: usize,
    /// Whether gradient checkpointing is on: layers save only their inputs and compute activations again.
    pub gradient_checkpointing: bool,
    /// Tensor parallel size of the rollout engine; `None` chooses the smallest whose weights fit.
    pub tensor_parallel: Option<usize>,
}

impl Workload {
    /// Number of responses of a step.
    pub fn n_responses(&self) -> f64 {
        (self.n_queries * self.n_samples) as f64
    }

    /// Number of tokens of all prompts and responses of a step.
    pub fn n_tokens(&self) -> f64 {
        self.n_responses() * (self.prompt_tokens + self.response_tokens)
    }
}

querl_core::named_enum! {
    /// The resource that limits a phase.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Bound {
        /// FLOPs of the matrix products.
        Compute = "compute",
        /// Memory bandwidth for reading weights and KV cache.
        MemoryBandwidth = "memory bandwidth",
        /// Fixed time per decode step, such as kernel launches.
        DecodeSteps = "decode steps",
        /// Bandwidth between GPUs of gathering weights and reducing gradients.
        Communication = "communication",
        /// A fixed cost.
        Fixed = "fixed",
    }
}

/// Predicted phase of a step, on all GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Phase {
    /// Name of the phase.
    pub name: &'static str,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Number of tokens that the phase computes.
    pub n_tokens: f64,
    /// The resource that limits the phase.
    pub bound: Bound,
}

impl Phase {
    /// Tokens per second of all GPUs together; 0 for a phase without tokens.
    pub fn tokens_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.n_tokens / self.seconds } else { 0.0 }
    }
}

/// Predicted time and memory of one RL step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepPrediction {
    /// Phases of the step, in order.
    pub phases: Vec<Phase>,
    /// Wall-clock seconds of the step.
    pub seconds: f64,
    /// Tokens of prompts and responses per second and GPU: verl's `perf/throughput`.
    pub tokens_per_s_per_gpu: f64,
    /// Tensor parallel size of the rollout engine: GPUs of one engine.
    pub tensor_parallel: usize,
    /// Number of responses per rollout engine in a step.
    pub responses_per_engine: f64,
    /// Number of responses that one rollout engine decodes at once.
    pub concurrent_responses: f64,
    /// Number of concurrent responses from which a decode step is bound by compute instead of by reading the weights.
    pub balanced_responses: f64,
    /// Predicted memory of each GPU.
    pub memory: MemoryPrediction,
}

impl StepPrediction {
    /// Seconds of the phase with this name; 0 if there is no such phase.
    pub fn seconds_of(&self, name: &str) -> f64 {
        self.phases.iter().find(|phase| phase.name == name).map_or(0.0, |phase| phase.seconds)
    }
}

// Names of the phases.
pub(super) const PREFILL: &str = "rollout prefill";
pub(super) const DECODE: &str = "rollout decode";
pub(super) const OLD_LOGPROBS: &str = "old log-probs";
pub(super) const REFERENCE: &str = "reference";
pub(super) const VALUES: &str = "critic values";
pub(super) const CRITIC_UPDATE: &str = "critic update";
pub(super) const POLICY_UPDATE: &str = "policy update";
pub(super) const OTHER: &str = "other";

/// Number of weights in the matrix products of one token: linear layers and head, without the embedding.
pub(super) fn matrix_weights(shapes: &DecoderConfig) -> f64 {
    let of_layer: usize = linears(shapes).into_iter().map(|(_, n_in, n_out)| n_in * n_out).sum();
    (shapes.n_layers * of_layer + shapes.vocab_size * shapes.hidden_size) as f64
}

/// FLOPs of the forward pass of one token that attends to `context` tokens: two per weight, and four per attended key and head dimension.
pub(super) fn forward_flops(shapes: &DecoderConfig, context: f64) -> f64 {
    let attention = 4.0 * (shapes.n_layers * shapes.n_heads * shapes.head_dim) as f64 * context;
    2.0 * matrix_weights(shapes) + attention
}

/// Bytes of the model's weights in bf16.
pub(super) fn weight_bytes(shapes: &DecoderConfig) -> f64 {
    shapes.n_parameters() as f64 * BF16
}

/// The smallest number of GPUs whose memory holds the weights of one rollout engine in [`MAX_WEIGHT_SHARE`] of it, and that divides the heads.
fn tensor_parallel(shapes: &DecoderConfig, cluster: &Cluster, wanted: Option<usize>) -> usize {
    let memory = cluster.gpu.memory_gib * f64::from(1 << 30);
    let fits = |n: usize| weight_bytes(shapes) / n as f64 <= MAX_WEIGHT_SHARE * memory;
    let possible = |n: &usize| *n <= cluster.n_per_node && shapes.n_heads.is_multiple_of(*n);
    let sizes: Vec<usize> = TENSOR_PARALLEL.into_iter().filter(possible).collect();
    let smallest = sizes.iter().copied().find(|&n| fits(n)).or(sizes.last().copied()).unwrap_or(1);
    wanted.filter(|n| *n <= cluster.n_gpus()).unwrap_or(smallest)
}

/// Predicts one RL step.
pub fn predict(
    shapes: &DecoderConfig,
    workload: &Workload,
    cluster: &Cluster,
    efficiency: &Efficiency,
) -> StepPrediction {
    let model = Roofline { shapes, workload, cluster, efficiency };
    let tensor_parallel = tensor_parallel(shapes, cluster, workload.tensor_parallel);
    let memory = memory(shapes, workload, cluster, tensor_parallel);
    let (decode, prefill, engine) = model.rollout(tensor_parallel, &memory);
    let mut phases = vec![prefill, decode, model.forward(OLD_LOGPROBS)];
    phases.extend(workload.has_reference.then(|| model.forward(REFERENCE)));
    if workload.has_critic {
        phases.extend([model.forward(VALUES), model.update(CRITIC_UPDATE)]);
    }
    phases.push(model.update(POLICY_UPDATE));
    phases.push(Phase { name: OTHER, seconds: efficiency.other_s, n_tokens: 0.0, bound: Bound::Fixed });
    let seconds: f64 = phases.iter().map(|phase| phase.seconds).sum();
    let peak = cluster.gpu.bf16_tflop_s * 1e12 * efficiency.decode;
    let balance = peak / (cluster.gpu.memory_gb_s * 1e9 * efficiency.memory);
    StepPrediction {
        phases,
        seconds,
        tokens_per_s_per_gpu: workload.n_tokens() / seconds / cluster.n_gpus() as f64,
        tensor_parallel,
        responses_per_engine: engine.responses,
        concurrent_responses: engine.concurrent,
        // Two FLOPs and two bytes per weight.
        balanced_responses: balance * weight_bytes(shapes) / (2.0 * matrix_weights(shapes)),
        memory,
    }
}

struct EngineLoad {
    responses: f64,
    concurrent: f64,
}

struct Roofline<'a> {
    shapes: &'a DecoderConfig,
    workload: &'a Workload,
    cluster: &'a Cluster,
    efficiency: &'a Efficiency,
}

impl Roofline<'_> {
    fn flop_s(&self, share: f64) -> f64 {
        self.cluster.n_gpus() as f64 * self.cluster.gpu.bf16_tflop_s * 1e12 * share
    }

    /// Decode and prefill. Prompts of one query are computed once.
    fn rollout(&self, tensor_parallel: usize, memory: &MemoryPrediction) -> (Phase, Phase, EngineLoad) {
        let Workload { prompt_tokens, response_tokens, longest_response, n_queries, .. } = *self.workload;
        let (efficiency, gpu) = (self.efficiency, &self.cluster.gpu);
        let prompts = n_queries as f64 * prompt_tokens;
        let prefill_flops = prompts * forward_flops(self.shapes, prompt_tokens / 2.0);
        let prefill = prefill_flops / self.flop_s(efficiency.forward);
        let prefill = Phase { name: PREFILL, seconds: prefill, n_tokens: prompts, bound: Bound::Compute };

        let parts = tensor_parallel as f64;
        let n_engines = (self.cluster.n_gpus() as f64 / parts).max(1.0);
        let responses = self.workload.n_responses() / n_engines;
        let in_cache = memory.kv_cache_tokens / (prompt_tokens + response_tokens);
        let concurrent = responses.min(MAX_SEQUENCES).min(in_cache).max(1.0);
        // Finished responses are replaced by others; the last wave takes as long as its longest response.
        let n_steps = response_tokens * responses / concurrent + (longest_response - response_tokens).max(0.0);
        let bytes_s = gpu.memory_gb_s * 1e9 * efficiency.memory;
        let context = prompt_tokens + response_tokens / 2.0;
        let weights_s = n_steps * weight_bytes(self.shapes) / parts / bytes_s;
        let cache_s = responses * response_tokens * context * kv_bytes_per_token(self.shapes) / parts / bytes_s;
        let compute_s = responses * response_tokens * forward_flops(self.shapes, context)
            / (parts * gpu.bf16_tflop_s * 1e12 * efficiency.decode);
        let steps_s = n_steps * efficiency.decode_step_s;
        let (read_s, work_s) = (weights_s + cache_s, (weights_s + cache_s).max(compute_s));
        let bound = match (steps_s > work_s, compute_s > read_s) {
            (true, _) => Bound::DecodeSteps,
            (false, true) => Bound::Compute,
            (false, false) => Bound::MemoryBandwidth,
        };
        let n_tokens = self.workload.n_responses() * response_tokens;
        let decode = Phase { name: DECODE, seconds: work_s + steps_s, n_tokens, bound };
        (decode, prefill, EngineLoad { responses, concurrent })
    }

    /// Seconds to gather the sharded weights `n_times` for each of `n_passes` passes.
    fn gather_s(&self, n_times: f64, n_passes: f64) -> f64 {
        let n_gpus = self.cluster.n_gpus() as f64;
        let bytes = weight_bytes(self.shapes) * (n_gpus - 1.0) / n_gpus;
        n_passes * n_times * bytes / (self.cluster.collective_bytes_s() * self.efficiency.link)
    }

    fn context(&self) -> f64 {
        (self.workload.prompt_tokens + self.workload.response_tokens) / 2.0
    }

    /// A forward pass over prompts and responses.
    fn forward(&self, name: &'static str) -> Phase {
        let n_tokens = self.workload.n_tokens();
        let compute = n_tokens * forward_flops(self.shapes, self.context()) / self.flop_s(self.efficiency.forward);
        let per_gpu = n_tokens / self.cluster.n_gpus() as f64;
        let n_passes = (per_gpu / self.workload.tokens_per_pass as f64).ceil().max(1.0);
        overlapped(name, n_tokens, compute, self.gather_s(1.0, n_passes))
    }

    /// Forward and backward passes. With all weights the backward pass takes as long as two forward passes, and gradients are reduced. With
    /// adapters it takes as long as one, for the gradients of activations, and the gradients are small. Gradient checkpointing adds one
    /// forward pass.
    fn update(&self, name: &'static str) -> Phase {
        let workload = self.workload;
        let (n_forward, n_gathers) = match workload.updated {
            UpdatedWeights::All => (3.0, 3.0),
            UpdatedWeights::Adapter(_) => (2.0, 2.0),
        };
        let n_forward = n_forward + if workload.gradient_checkpointing { 1.0 } else { 0.0 };
        let n_tokens = workload.n_tokens() * workload.epochs as f64;
        let flops = n_tokens * n_forward * forward_flops(self.shapes, self.context());
        let n_gpus = self.cluster.n_gpus() as f64;
        let n_updates = (workload.n_responses() / workload.mini_batch_size.max(1) as f64).ceil().max(1.0);
        let per_gpu = workload.n_tokens() / n_updates / n_gpus;
        let n_passes = (per_gpu / workload.tokens_per_pass as f64).ceil().max(1.0);
        let n_passes = n_passes * n_updates * workload.epochs as f64;
        let adapter_s = match workload.updated {
            UpdatedWeights::All => 0.0,
            // An all-reduce of f32 gradients sends every value twice.
            UpdatedWeights::Adapter(n_weights) => {
                let bytes = 8.0 * n_weights as f64 * (n_gpus - 1.0) / n_gpus;
                let link = self.cluster.collective_bytes_s() * self.efficiency.link;
                n_updates * workload.epochs as f64 * bytes / link
            }
        };
        let communication = self.gather_s(n_gathers, n_passes) + adapter_s;
        overlapped(name, n_tokens, flops / self.flop_s(self.efficiency.update), communication)
    }
}

/// Communication overlaps with computation: the longer of both counts.
fn overlapped(name: &'static str, n_tokens: f64, compute: f64, communication: f64) -> Phase {
    let bound = if communication > compute { Bound::Communication } else { Bound::Compute };
    Phase { name, seconds: compute.max(communication), n_tokens, bound }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes() -> DecoderConfig {
        DecoderConfig::of_shape("qwen2.5-7b").unwrap()
    }

    fn workload() -> Workload {
        Workload {
            n_queries: 1024,
            n_samples: 4,
            prompt_tokens: 200.0,
            response_tokens: 200.0,
            longest_response: 512.0,
            updated: UpdatedWeights::All,
            has_critic: false,
            has_reference: true,
            epochs: 1,
            mini_batch_size: 1024,
            tokens_per_pass: 16_384,
            gradient_checkpointing: true,
            tensor_parallel: None,
        }
    }

    fn step(cluster: &str, workload: &Workload) -> StepPrediction {
        predict(&shapes(), workload, &Cluster::parse(cluster).unwrap(), &Efficiency::default())
    }

    /// 28 layers of 233,046,016 weights (3584 * (3584 + 2 * 512 + 3584) + 3 * 3584 * 18944) and a head of 152064 * 3584.
    #[test]
    fn weights_and_flops_are_those_of_the_shape() {
        let weights = 28.0 * 233_046_016.0 + 152_064.0 * 3584.0;
        assert_eq!(matrix_weights(&shapes()), weights);
        assert_eq!(forward_flops(&shapes(), 0.0), 2.0 * weights);
        assert_eq!(forward_flops(&shapes(), 100.0), 2.0 * weights + 4.0 * 28.0 * 3584.0 * 100.0);
    }

    /// 1,638,400 tokens, 8 GPUs at 0.30 of 989.4 TFLOP/s; 2 * matrix weights + attention to 200 tokens.
    #[test]
    fn a_forward_phase_takes_its_flops_over_the_reached_peak() {
        let found = step("8xH100", &workload()).seconds_of(REFERENCE);
        let flops = 1_638_400.0 * forward_flops(&shapes(), 200.0);
        assert!((found - flops / (8.0 * 989.4e12 * 0.30)).abs() < 1e-9, "{found}");
    }

    #[test]
    fn decode_time_falls_with_gpus_only_as_long_as_their_batch_is_large() {
        let decode = |cluster| step(cluster, &workload()).seconds_of(DECODE);
        let (one, two, many) = (decode("8xH100"), decode("2x8xH100"), decode("64x8xH100"));
        assert!(two < one && many > 0.5 * two, "{one} {two} {many}");
        // No number of GPUs decodes the longest response in fewer steps than it has tokens.
        assert!(many > 512.0 * 0.015, "{many}");
    }

    #[test]
    fn adapters_cost_less_than_all_weights_and_a_critic_costs_an_update_more() {
        let adapter = Workload { updated: UpdatedWeights::Adapter(40_000_000), ..workload() };
        let critic = Workload { has_critic: true, ..workload() };
        let [all, adapter, critic] = [workload(), adapter, critic].map(|workload| step("8xH100", &workload));
        let ratio = adapter.seconds_of(POLICY_UPDATE) / all.seconds_of(POLICY_UPDATE);
        assert!((ratio - 0.75).abs() < 1e-9, "{ratio}");
        assert_eq!(critic.seconds_of(CRITIC_UPDATE), all.seconds_of(POLICY_UPDATE));
        assert!(all.phases.iter().all(|phase| phase.name != VALUES));
    }

    #[test]
    fn a_slow_network_makes_the_update_wait_for_weights() {
        let bound = |cluster| {
            let step = step(cluster, &Workload { tokens_per_pass: 2048, ..workload() });
            step.phases.iter().find(|phase| phase.name == POLICY_UPDATE).unwrap().bound
        };
        assert_eq!((bound("8xH100"), bound("4x8x4090")), (Bound::Compute, Bound::Communication));
    }

    #[test]
    fn engines_are_split_until_their_weights_fit() {
        let size = |gpu: &str, shape: &str| {
            let shapes = DecoderConfig::of_shape(shape).unwrap();
            let cluster = Cluster::parse(&format!("8x{gpu}")).unwrap();
            predict(&shapes, &workload(), &cluster, &Efficiency::default()).tensor_parallel
        };
        assert_eq!([size("H100", "qwen3-0.6b"), size("H100", "qwen3-32b"), size("H200", "qwen3-32b")], [1, 4, 2]);
        assert_eq!(size("4090", "qwen2.5-7b"), 2);
    }
}
