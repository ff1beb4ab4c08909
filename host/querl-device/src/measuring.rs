//! A measurement as a job: what is asked for, and the figures that come of it.

use crate::{Ending, Failure};
use querl_core::config::{RlConfig, SftConfig};
use querl_model::DecoderConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Figures of a model of random weights, which is made where it is measured: of the job's `model`, `path` is not read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measuring {
    /// A name that [`Measuring::shapes_of`] knows.
    pub shape: String,
    /// What is measured, in this order; without any, the model is made and no more.
    pub parts: Vec<Part>,
    /// Measured repetitions of each part. One more comes before them and is not counted.
    pub repeats: usize,
    /// What is learned from and answered.
    pub lengths: Lengths,
    /// The fine-tuning; its steps follow from `repeats`.
    pub sft: SftConfig,
    /// The optimisation, likewise; its limits are those of the rollouts too.
    pub rl: RlConfig,
    /// Answers in progress at once, of each rollout that is measured.
    pub sequences: Vec<usize>,
    /// For checkpoints and files that are measured and thrown away; must be there.
    pub work_dir: PathBuf,
}

impl Measuring {
    /// The shapes that a name stands for.
    ///
    /// # Errors
    /// It stands for none.
    pub fn shapes_of(name: &str) -> Result<DecoderConfig, Failure> {
        DecoderConfig::of_shape(name).ok_or_else(|| {
            let known: Vec<&str> = DecoderConfig::shape_names().collect();
            let message = format!("there is no shape {name:?}; expected one of {}, or tiny", known.join(", "));
            Failure { ending: Ending::Usage, message }
        })
    }
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Reading a checkpoint, which is written before.
    Load,
    /// Steps of a fine-tuning.
    Sft,
    /// Answers to prompts that begin alike.
    Rollout,
    /// Iterations of reinforcement learning.
    Ppo,
}

impl Part {
    /// As the command line calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Sft => "sft",
            Self::Rollout => "rollout",
            Self::Ppo => "ppo",
        }
    }
}

/// Lengths in tokens. Rows are made of random tokens, the same for the same seed; every prompt begins alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// What every prompt begins with: instructions. May be 0.
    pub shared: usize,
    /// Fewest that follow of a prompt's own: at least 1.
    pub own_least: usize,
    /// Most; lengths between are equally likely.
    pub own_most: usize,
    /// Of an answer that is learned: at least 1.
    pub answer: usize,
}

impl Lengths {
    /// Of the longest prompt.
    pub fn longest_prompt(&self) -> usize {
        self.shared + self.own_most
    }
}

/// One quantity, measured several times.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// The middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// How many there are.
    pub n: usize,
}

impl Spread {
    /// Of some values; `None` where there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (least, most, n) = (*sorted.first()?, *sorted.last()?, sorted.len());
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Some(Self { median, least, most, n })
    }

    /// Of every value `amount` over it: seconds become a rate.
    #[must_use]
    pub fn rate(self, amount: f64) -> Self {
        Self { median: amount / self.median, least: amount / self.most, most: amount / self.least, n: self.n }
    }
}

/// What came of it. Times are seconds of the wall, from when the host asks until the device is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// As asked for.
    pub shape: String,
    /// The device as its maker calls it.
    pub device: String,
    /// How the base is stored.
    pub dtype: String,
    /// Weights of the base.
    pub parameters: u64,
    /// Bytes that the base takes by the memory plan.
    pub base_bytes: u64,
    /// Making it.
    pub made_s: f64,
    /// What the device can do, measured in this run; `None` where nothing was compared with it.
    pub ceilings: Option<Ceilings>,
    /// Of [`Part::Load`].
    pub load: Option<Loaded>,
    /// Of [`Part::Sft`].
    pub sft: Option<Tuned>,
    /// Of [`Part::Rollout`], one for each number of answers.
    pub rollouts: Vec<RolledOut>,
    /// Of [`Part::Ppo`].
    pub ppo: Option<Optimised>,
    /// What was asked for and not measured, with the reason, a sentence each.
    pub left_out: Vec<String>,
}

/// What a device can do at best.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceilings {
    /// Operations a second (a multiplication and an addition are two) of a product of square matrices: on a card of bf16 by
    /// cuBLAS, on the processor of f32 by our own kernels.
    pub matrix: Spread,
    /// Rows and columns of those matrices.
    pub matrix_size: usize,
    /// Bytes a second, read and written, of a copy on the device.
    pub copy: Spread,
    /// Bytes that were copied.
    pub copied_bytes: u64,
}

/// Reading a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loaded {
    /// Bytes of its files, which the system keeps in memory since they were written.
    pub file_bytes: u64,
    /// Until the model can compute.
    pub seconds: Spread,
    /// Bytes of files a second.
    pub bytes_per_s: Spread,
}

/// Memory that a part took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryUse {
    /// By the plan.
    pub planned_bytes: u64,
    /// Most at once: on a card of tensors, on the processor of the whole process.
    pub peak_bytes: Option<u64>,
    /// On a card: what is used beside tensors, which the plan has a reserve for.
    pub beside_bytes: Option<u64>,
}

/// Time on a card of all launches of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelTime {
    /// Its name, or `product` for cuBLAS.
    pub name: String,
    /// Launches.
    pub calls: u64,
    /// Of all of them.
    pub seconds: f64,
}

/// Steps of a fine-tuning: forward, backward, clipping and optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// Rows of data of a step.
    pub rows: usize,
    /// Their tokens, prompts and answers.
    pub tokens: usize,
    /// Tokens that go through the decoder: what rows of a pass begin with in common once.
    pub computed_tokens: usize,
    /// Most of them in one pass.
    pub tokens_per_pass: usize,
    /// Passes of a step.
    pub passes: usize,
    /// Whether layers were computed twice.
    pub gradient_checkpointing: bool,
    /// Of the adapter.
    pub lora_rank: usize,
    /// A step.
    pub step_s: Spread,
    /// Of all tokens.
    pub tokens_per_s: Spread,
    /// Of those that go through the decoder.
    pub computed_tokens_per_s: Spread,
    /// Operations of a step that its result needs: what checkpointing computes again is not among them.
    pub operations: f64,
    /// Those operations a second over the measured rate of products.
    pub share_of_matrix_rate: f64,
    /// What it took.
    pub memory: MemoryUse,
    /// Of one more step, on a card: where its time goes, most first.
    pub kernels: Vec<KernelTime>,
}

/// Answers to prompts that begin alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolledOut {
    /// In progress at once.
    pub sequences: usize,
    /// Different prompts among them.
    pub prompts: usize,
    /// Longest answer.
    pub max_new_tokens: usize,
    /// From the prompts to the last token.
    pub seconds: Spread,
    /// Of all answers' tokens over that time.
    pub tokens_per_s: Spread,
    /// Of the same without the prompts and first tokens, whose time was measured apart; `None` where that took most of the time.
    pub decode_tokens_per_s: Option<Spread>,
    /// Bytes that a decoding step has to read at least: weights once, and each different key and value once.
    pub step_bytes: u64,
    /// Those bytes over the time of a step and the measured bandwidth.
    pub share_of_bandwidth: Option<f64>,
    /// Most that keys and values took.
    pub cache_bytes: u64,
    /// Of one more rollout, on a card; what is launched as part of a graph is not told.
    pub kernels: Vec<KernelTime>,
}

/// Iterations of PPO: answers, log-probabilities of policy and reference, values, epochs of updates of policy and critic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Optimised {
    /// Answers of an iteration.
    pub answers: usize,
    /// Epochs of updates.
    pub epochs: usize,
    /// Optimizer steps of the policy.
    pub updates: usize,
    /// Longest answer.
    pub max_new_tokens: usize,
    /// Who scores.
    pub scorer: String,
    /// An iteration.
    pub iteration_s: Spread,
    /// Its parts by the names under which `rl` records them.
    pub parts_s: BTreeMap<String, Spread>,
    /// Most tokens in one pass.
    pub tokens_per_pass: usize,
    /// Whether layers were computed twice.
    pub gradient_checkpointing: bool,
    /// What it took.
    pub memory: MemoryUse,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_an_even_number_is_between_two_and_a_rate_turns_the_ends() {
        let seconds = Spread::of(&[4.0, 1.0, 2.0, 2.5]).unwrap();
        assert_eq!(seconds, Spread { median: 2.25, least: 1.0, most: 4.0, n: 4 });
        assert_eq!(Spread::of(&[3.0]).unwrap().median, 3.0);
        assert_eq!(Spread::of(&[]), None);
        let rate = seconds.rate(9.0);
        assert_eq!((rate.least, rate.median, rate.most), (2.25, 4.0, 9.0));
    }
}
