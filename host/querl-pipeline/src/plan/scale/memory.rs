//! Memory per GPU of one step: the sharded training state, and the additional memory of updates and of rollouts.

use super::gpus::Cluster;
use super::roofline::{BF16, UpdatedWeights, Workload, weight_bytes};
use querl_model::DecoderConfig;
use serde::Serialize;

/// Bytes of a trained weight: f32 value and gradient, and two moments of AdamW.
const TRAINED: f64 = 16.0;
/// Bytes of a logit and its gradient: bf16 and f32.
const LOGIT: f64 = 6.0;
/// Share of the memory that is planned for; the rest is for the driver, the communicator and fragmentation.
const USABLE: f64 = 0.9;
/// Share of the memory that the rollout engine takes at most. verl's default of `rollout.gpu_memory_utilization` is 0.5; its examples set 0.6.
const ROLLOUT: f64 = 0.6;
const GIB: f64 = (1_u64 << 30) as f64;

/// Predicted memory of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MemoryPrediction {
    /// This GPU's share of the training state in GiB: weights, gradients and optimizer state of policy and critic, and the reference.
    pub training_gib: f64,
    /// Activations, logits and gathered weights of one forward and backward pass, in GiB.
    pub pass_gib: f64,
    /// Weights of the rollout engine, in GiB.
    pub rollout_gib: f64,
    /// KV cache of the rollout engine, in GiB.
    pub kv_cache_gib: f64,
    /// Number of tokens that the KV cache of one rollout engine holds.
    pub kv_cache_tokens: f64,
    /// Memory of the GPU, in GiB.
    pub gpu_gib: f64,
    /// Whether updates and rollouts fit; rollouts fit if the KV cache has space for at least one response of maximum length.
    pub fits: bool,
}

impl MemoryPrediction {
    /// Peak memory in GiB.
    pub fn peak_gib(&self) -> f64 {
        self.training_gib + self.pass_gib.max(self.rollout_gib + self.kv_cache_gib)
    }
}

/// Bytes of the keys and values of one token in bf16, over all layers.
pub(super) fn kv_bytes_per_token(shapes: &DecoderConfig) -> f64 {
    (2 * shapes.n_layers * shapes.n_kv_heads * shapes.head_dim) as f64 * BF16
}

pub(super) fn memory(
    shapes: &DecoderConfig,
    workload: &Workload,
    cluster: &Cluster,
    tensor_parallel: usize,
) -> MemoryPrediction {
    let (n_gpus, parts) = (cluster.n_gpus() as f64, tensor_parallel as f64);
    let training = training_bytes(shapes, workload) / n_gpus;
    let pass = pass_bytes(shapes, workload, n_gpus);
    let gpu = cluster.gpu.memory_gib * GIB;
    let rollout = weight_bytes(shapes) / parts;
    let kv_cache = ((ROLLOUT * gpu).min(USABLE * gpu - training) - rollout).max(0.0);
    let kv_cache_tokens = kv_cache * parts / kv_bytes_per_token(shapes);
    let longest = workload.prompt_tokens + workload.longest_response;
    MemoryPrediction {
        training_gib: training / GIB,
        pass_gib: pass / GIB,
        rollout_gib: rollout / GIB,
        kv_cache_gib: kv_cache / GIB,
        kv_cache_tokens,
        gpu_gib: cluster.gpu.memory_gib,
        fits: training + pass <= USABLE * gpu && kv_cache_tokens >= longest,
    }
}

/// Bytes of the training state on all GPUs together. A separate reference is needed only if all weights are trained; otherwise the
/// reference is the base without the adapter.
fn training_bytes(shapes: &DecoderConfig, workload: &Workload) -> f64 {
    let (n_weights, frozen) = (shapes.n_parameters() as f64, weight_bytes(shapes));
    let (trained, reference) = match workload.updated {
        UpdatedWeights::All => (TRAINED * n_weights, frozen),
        UpdatedWeights::Adapter(n_adapter) => (frozen + TRAINED * n_adapter as f64, 0.0),
    };
    let critic = if workload.has_critic { trained } else { 0.0 };
    trained + critic + if workload.has_reference { reference } else { 0.0 }
}

/// Bytes of a pass on one GPU: saved activations in bf16 (the inputs of all layers, and the activations of one layer or of all), logits,
/// and two gathered layers.
fn pass_bytes(shapes: &DecoderConfig, workload: &Workload, n_gpus: f64) -> f64 {
    let DecoderConfig { n_layers, hidden_size, intermediate_size, vocab_size, .. } = *shapes;
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    let of_layer = (2 * q + 2 * kv + 3 * intermediate_size + 4 * hidden_size) as f64 * BF16;
    let inputs = (n_layers * hidden_size) as f64 * BF16;
    let n_saved = if workload.gradient_checkpointing { 1 } else { n_layers };
    let of_token = inputs + n_saved as f64 * of_layer + vocab_size as f64 * LOGIT;
    let longest = workload.prompt_tokens + workload.longest_response;
    // A pass has no more tokens than a mini-batch has on one GPU.
    let of_mini_batch = workload.mini_batch_size as f64 * (workload.prompt_tokens + workload.response_tokens) / n_gpus;
    let n_tokens = (workload.tokens_per_pass as f64).min(of_mini_batch).max(longest);
    let gathered = 2.0 * weight_bytes(shapes) / n_layers as f64;
    n_tokens * of_token + gathered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(updated: UpdatedWeights) -> Workload {
        Workload {
            n_queries: 64,
            n_samples: 1,
            prompt_tokens: 300.0,
            response_tokens: 50.0,
            longest_response: 150.0,
            updated,
            has_critic: false,
            has_reference: true,
            epochs: 1,
            mini_batch_size: 64,
            tokens_per_pass: 4096,
            gradient_checkpointing: true,
            tensor_parallel: None,
        }
    }

    fn of(cluster: &str, shape: &str, updated: UpdatedWeights) -> MemoryPrediction {
        let shapes = DecoderConfig::of_shape(shape).unwrap();
        memory(&shapes, &workload(updated), &Cluster::parse(cluster).unwrap(), 1)
    }

    /// 7,615,616,512 weights: 18 bytes each with the reference over 8 GPUs are 15.96 GiB.
    #[test]
    fn training_state_is_divided_over_the_gpus() {
        let memory = of("8xH100", "qwen2.5-7b", UpdatedWeights::All);
        assert!((memory.training_gib - 7_615_616_512.0 * 18.0 / 8.0 / GIB).abs() < 1e-9, "{memory:?}");
        assert!(memory.fits, "{memory:?}");
        let half = of("4xH100", "qwen2.5-7b", UpdatedWeights::All);
        assert!((half.training_gib / memory.training_gib - 2.0).abs() < 1e-9);
    }

    #[test]
    fn an_adapter_fits_where_all_weights_do_not() {
        assert!(!of("2x4090", "qwen2.5-7b", UpdatedWeights::All).fits);
        assert!(of("2x4090", "qwen2.5-3b", UpdatedWeights::Adapter(30_000_000)).fits);
    }

    /// 2 * 28 layers * 4 heads of 128 * 2 bytes.
    #[test]
    fn keys_and_values_of_a_token_are_counted() {
        assert_eq!(kv_bytes_per_token(&DecoderConfig::of_shape("qwen2.5-7b").unwrap()), 57_344.0);
    }
}
