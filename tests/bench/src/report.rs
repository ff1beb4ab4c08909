//! Results of a benchmark, as JSON and as text.

use clap::ValueEnum;
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Benchmark {
    /// Loading a checkpoint, which the benchmark writes first.
    Load,
    /// Fine-tuning steps.
    Sft,
    /// Responses to prompts with a common prefix.
    Rollout,
    /// PPO iterations.
    Ppo,
}

impl Benchmark {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Sft => "sft",
            Self::Rollout => "rollout",
            Self::Ppo => "ppo",
        }
    }
}

/// Lengths in tokens. Rows are random tokens that depend only on the seed; all prompts share a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Lengths {
    /// Length of the common prefix of all prompts. May be 0.
    pub(crate) shared: usize,
    /// Minimum number of prompt tokens after the prefix: at least 1.
    pub(crate) own_least: usize,
    /// Maximum number; lengths are uniformly distributed.
    pub(crate) own_most: usize,
    /// Response tokens in fine-tuning: at least 1.
    pub(crate) answer: usize,
}

impl Lengths {
    pub(crate) fn longest_prompt(&self) -> usize {
        self.shared + self.own_most
    }
}

/// Statistics of a repeated measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    pub(crate) n: usize,
}

impl Spread {
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (least, most, n) = (*sorted.first()?, *sorted.last()?, sorted.len());
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Some(Self { median, least, most, n })
    }

    /// `amount` divided by every value, which converts seconds to a rate.
    #[must_use]
    pub(crate) fn rate(self, amount: f64) -> Self {
        Self { median: amount / self.median, least: amount / self.most, most: amount / self.least, n: self.n }
    }
}

/// All results. Times are in wall-clock seconds and include the synchronisation of the device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct BenchReport {
    pub(crate) shape: String,
    pub(crate) device: String,
    pub(crate) dtype: String,
    pub(crate) parameters: u64,
    /// Size of the base model in bytes, by the memory plan.
    pub(crate) base_bytes: u64,
    /// Seconds for initialising the weights.
    pub(crate) made_s: f64,
    /// Measured peak rates; `None` if no benchmark needed them.
    pub(crate) ceilings: Option<Ceilings>,
    pub(crate) load: Option<LoadResult>,
    pub(crate) sft: Option<SftResult>,
    /// Results of [`Benchmark::Rollout`], one for each number of sequences.
    pub(crate) rollouts: Vec<RolloutResult>,
    pub(crate) ppo: Option<PpoResult>,
    /// Benchmarks that failed or were skipped, with the reason.
    pub(crate) left_out: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Ceilings {
    /// FLOP/s of a square matrix product: on a GPU in bf16 by cuBLAS, on the CPU in f32 by querl's kernels.
    pub(crate) matrix: Spread,
    pub(crate) matrix_size: usize,
    /// Bytes read plus bytes written per second in a copy on the device.
    pub(crate) copy: Spread,
    pub(crate) copied_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LoadResult {
    /// Size of the files, which are in the page cache.
    pub(crate) file_bytes: u64,
    /// Seconds until the model is ready.
    pub(crate) seconds: Spread,
    pub(crate) bytes_per_s: Spread,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct MemoryUse {
    pub(crate) planned_bytes: u64,
    /// Peak memory: of tensors on a GPU, of the process on the CPU.
    pub(crate) peak_bytes: Option<u64>,
    /// On a GPU: used memory that is not tensors, for which the plan has a reserve.
    #[serde(rename = "beside_bytes")]
    pub(crate) non_tensor_bytes: Option<u64>,
}

/// GPU time of all launches of one kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct KernelTime {
    /// Name of the kernel, or `product` for cuBLAS.
    pub(crate) name: String,
    pub(crate) calls: u64,
    pub(crate) seconds: f64,
}

/// Fine-tuning steps: forward, backward, clipping and optimizer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct SftResult {
    pub(crate) rows: usize,
    /// Prompt and response tokens per step.
    pub(crate) tokens: usize,
    /// Tokens computed by the decoder; common prefixes count once.
    pub(crate) computed_tokens: usize,
    /// Largest number of such tokens in one micro-batch.
    pub(crate) tokens_per_pass: usize,
    pub(crate) passes: usize,
    pub(crate) gradient_checkpointing: bool,
    pub(crate) lora_rank: usize,
    pub(crate) step_s: Spread,
    pub(crate) tokens_per_s: Spread,
    /// Tokens computed by the decoder per second.
    pub(crate) computed_tokens_per_s: Spread,
    /// FLOP of a step, without recomputation.
    pub(crate) operations: f64,
    /// FLOP/s divided by the measured rate of matrix products.
    pub(crate) share_of_matrix_rate: f64,
    pub(crate) memory: MemoryUse,
    /// GPU time of one more step by kernel, in descending order.
    pub(crate) kernels: Vec<KernelTime>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RolloutResult {
    pub(crate) sequences: usize,
    pub(crate) prompts: usize,
    pub(crate) max_new_tokens: usize,
    /// Seconds for prefill and decoding.
    pub(crate) seconds: Spread,
    /// Response tokens per second of that time.
    pub(crate) tokens_per_s: Spread,
    /// Response tokens per second without prefill, which is measured separately; `None` if prefill dominates.
    pub(crate) decode_tokens_per_s: Option<Spread>,
    /// Minimum number of bytes that a decode step reads: each weight, key and value once.
    pub(crate) step_bytes: u64,
    /// These bytes per time of a step, divided by the measured bandwidth.
    pub(crate) share_of_bandwidth: Option<f64>,
    pub(crate) cache_bytes: u64,
    /// GPU time of one more rollout by kernel; launches within CUDA graphs are not traced.
    pub(crate) kernels: Vec<KernelTime>,
}

/// PPO iterations: rollouts, log-probabilities, values, epochs of updates.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PpoResult {
    pub(crate) answers: usize,
    pub(crate) epochs: usize,
    /// Optimizer steps of the policy.
    pub(crate) updates: usize,
    pub(crate) max_new_tokens: usize,
    pub(crate) scorer: String,
    pub(crate) iteration_s: Spread,
    /// Seconds by phase, with the names of the `timing_s/` metrics.
    pub(crate) parts_s: BTreeMap<String, Spread>,
    /// Largest number of tokens in one micro-batch.
    pub(crate) tokens_per_pass: usize,
    pub(crate) gradient_checkpointing: bool,
    pub(crate) memory: MemoryUse,
}

/// The report as text: a name and a value per line.
pub(crate) fn lines(measured: &BenchReport) -> Vec<(String, String)> {
    let BenchReport { shape, device, dtype, parameters, base_bytes, made_s, .. } = measured;
    let line = |name: &str, value: String| (name.to_owned(), value);
    let mut lines = vec![
        line("model", format!("{shape}, {parameters} parameters in {dtype}, {}", gib(*base_bytes))),
        line("device", format!("{device}; initialised in {made_s:.2} s")),
    ];
    lines.extend(measured.ceilings.as_ref().map(|ceilings| line("ceilings", show_ceilings(ceilings))));
    lines.extend(measured.load.as_ref().map(|loaded| line("load", show_load(loaded))));
    if let Some(tuned) = &measured.sft {
        lines.extend([line("sft", show_sft(tuned)), line("sft memory", show_memory(&tuned.memory))]);
        lines.extend(show_kernels(&tuned.kernels).map(|text| line("sft kernels", text)));
    }
    lines.extend(
        measured.rollouts.iter().map(|rolled| (format!("rollout of {}", rolled.sequences), show_rollout(rolled))),
    );
    if let Some(optimised) = &measured.ppo {
        lines.extend([line("ppo", show_ppo(optimised)), line("ppo memory", show_memory(&optimised.memory))]);
    }
    lines.extend(measured.left_out.iter().map(|sentence| line("skipped", sentence.clone())));
    lines
}

fn show_ceilings(ceilings: &Ceilings) -> String {
    let (matrix, copy) = (ceilings.matrix.median / 1e12, ceilings.copy.median / 1e9);
    format!("matrix products {matrix:.3} TFLOP/s (matrices of {}), copies {copy:.1} GB/s", ceilings.matrix_size)
}

fn show_load(loaded: &LoadResult) -> String {
    let (bytes, rate) = (gib(loaded.file_bytes), loaded.bytes_per_s.median / 1e9);
    format!("{bytes} in {}, {rate:.2} GB/s", seconds(loaded.seconds))
}

fn show_sft(tuned: &SftResult) -> String {
    let SftResult { rows, tokens, computed_tokens, passes, .. } = tuned;
    let twice = if tuned.gradient_checkpointing { ", gradient checkpointing" } else { "" };
    format!(
        "{:.0} tokens/s ({:.0} computed), {:.1}% of the matrix product rate; a step of {rows} rows, {tokens} tokens, {computed_tokens} \
         computed in {passes} micro-batch(es){twice}: {}",
        tuned.tokens_per_s.median,
        tuned.computed_tokens_per_s.median,
        100.0 * tuned.share_of_matrix_rate,
        seconds(tuned.step_s)
    )
}

fn show_rollout(rolled: &RolloutResult) -> String {
    let decoding = match (rolled.decode_tokens_per_s, rolled.share_of_bandwidth) {
        (Some(decode), Some(share)) => {
            format!("decode only {:.0}, {:.1}% of the bandwidth", decode.median, 100.0 * share)
        }
        _ => "decode time within the noise of prefill".into(),
    };
    let (rate, seconds) = (rolled.tokens_per_s.median, seconds(rolled.seconds));
    format!("{rate:.0} tokens/s, {decoding}; {} prompts: {seconds}", rolled.prompts)
}

fn show_ppo(optimised: &PpoResult) -> String {
    let part = |(name, spread): (&String, &Spread)| format!("{name} {:.2}", spread.median);
    let parts = optimised.parts_s.iter().filter(|(name, spread)| *name != "step" && spread.median >= 0.005).map(part);
    let parts: Vec<String> = parts.collect();
    let PpoResult { answers, updates, scorer, .. } = optimised;
    let iteration = seconds(optimised.iteration_s);
    format!(
        "{iteration} an iteration of {answers} responses and {updates} updates ({}); scored by {scorer}",
        parts.join(", ")
    )
}

fn show_kernels(kernels: &[KernelTime]) -> Option<String> {
    let total: f64 = kernels.iter().map(|kernel| kernel.seconds).sum();
    let share = |kernel: &KernelTime| format!("{} {:.1}%", kernel.name, 100.0 * kernel.seconds / total);
    let shares: Vec<String> = kernels.iter().take(8).map(share).collect();
    (total > 0.0).then(|| format!("{total:.3} s on the GPU: {}", shares.join(", ")))
}

fn show_memory(memory: &MemoryUse) -> String {
    let peak = memory.peak_bytes.map_or_else(|| "not known".into(), gib);
    let other =
        memory.non_tensor_bytes.map(|bytes| format!(" and {} other than tensors", gib(bytes))).unwrap_or_default();
    format!("{peak}{other}; planned {}", gib(memory.planned_bytes))
}

fn seconds(spread: Spread) -> String {
    format!("{:.3} s ({:.3} to {:.3}, {} times)", spread.median, spread.least, spread.most, spread.n)
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_two_and_a_rate_swaps_the_ends() {
        let seconds = Spread::of(&[4.0, 1.0, 2.0, 2.5]).unwrap();
        assert_eq!(seconds, Spread { median: 2.25, least: 1.0, most: 4.0, n: 4 });
        assert_eq!(Spread::of(&[3.0]).unwrap().median, 3.0);
        assert_eq!(Spread::of(&[]), None);
        let rate = seconds.rate(9.0);
        assert_eq!((rate.least, rate.median, rate.most), (2.25, 4.0, 9.0));
    }
}
