//! `--on NxMxGPU`: memory, seconds of each phase and hours of a run on a cluster of GPUs, by a roofline model. docs/scale.md.

mod gpus;
#[cfg(test)]
mod measurements;
mod memory;
mod roofline;
mod scaling;

pub use gpus::{Cluster, GPUS, GpuModel};
pub use memory::MemoryPrediction;
pub use roofline::{Bound, Efficiency, Phase, StepPrediction, UpdatedWeights, Workload, predict};
pub use scaling::{Scaling, ScalingRow, scaling};

use crate::exchange::indivisible;
use querl_core::config::{Config, RlAlgorithm};
use querl_model::DecoderConfig;
use querl_train::job::memory_plan::adapter_parameters;
use serde::Serialize;

/// Size of a training workload: tokens of prompts and responses, and number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WorkloadSize {
    /// Mean number of tokens of a prompt.
    pub prompt_tokens: f64,
    /// Mean number of tokens of a response.
    pub response_tokens: f64,
    /// Number of rollout batches of the training.
    pub n_steps: usize,
    /// Whether tokens are counted in the dataset; false if they are estimated from the query table, before the data stages are finished.
    pub is_measured: bool,
}

/// Predicted memory and time of a run on a cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScalePlan {
    /// Nodes and GPUs.
    pub cluster: Cluster,
    /// Number of weights of the model.
    pub n_parameters: usize,
    /// Workload of one RL step.
    pub workload: Workload,
    /// Prompt and response lengths, and number of steps.
    pub size: WorkloadSize,
    /// Settings of the configuration that determine the figures, in words.
    pub assumptions: String,
    /// Prediction for one RL step.
    pub step: StepPrediction,
    /// Hours of all steps, without evaluations and calls of external services; `None` if a step does not fit in memory.
    pub hours: Option<f64>,
    /// Predictions for other numbers of GPUs.
    pub scaling: Scaling,
}

/// Workload of one step of verl with the `[rl]` section of a configuration; the adapter is trained, as in an export by `querl export verl`.
pub fn workload(config: &Config, shapes: &DecoderConfig, size: &WorkloadSize) -> Workload {
    let rl = &config.rl;
    Workload {
        n_queries: rl.batch_size,
        n_samples: rl.n_samples.max(1),
        prompt_tokens: size.prompt_tokens,
        response_tokens: size.response_tokens,
        longest_response: rl.max_new_tokens as f64,
        updated: UpdatedWeights::Adapter(adapter_parameters(shapes, &config.sft)),
        has_critic: rl.algorithm == RlAlgorithm::Ppo,
        has_reference: rl.kl_coef > 0.0,
        epochs: rl.ppo_epochs,
        mini_batch_size: rl.mini_batch_size,
        tokens_per_pass: config.model.tokens_per_pass,
        gradient_checkpointing: config.model.gradient_checkpointing,
        tensor_parallel: None,
    }
}

/// Settings with a large effect on time or memory, and the assumed training of verl.
fn assumptions(config: &Config, workload: &Workload) -> String {
    let critic = if workload.has_critic { "with a critic of the same size" } else { "without a critic" };
    let reference = if workload.has_reference { "with a reference" } else { "without a reference" };
    let checkpointing = if workload.gradient_checkpointing { "with" } else { "without" };
    let updated = match workload.updated {
        UpdatedWeights::All => "all weights are trained".to_owned(),
        UpdatedWeights::Adapter(n) => {
            format!("LoRA of rank {} ({:.1} million weights) on a frozen base", config.sft.lora_rank, n as f64 / 1e6)
        }
    };
    format!(
        "rl.algorithm = {}, {critic}, {reference}; {updated}; rl.ppo_epochs = {}; {checkpointing} gradient checkpointing; verl with FSDP",
        serde_json::json!(config.rl.algorithm),
        workload.epochs
    )
}

impl ScalePlan {
    /// Predicts the training of a configuration on a cluster.
    pub fn new(config: &Config, shapes: &DecoderConfig, size: WorkloadSize, cluster: Cluster) -> Self {
        let (workload, efficiency) = (workload(config, shapes, &size), Efficiency::default());
        let step = predict(shapes, &workload, &cluster, &efficiency);
        let scaling = scaling(shapes, &workload, &cluster, &efficiency);
        let hours = step.memory.fits.then(|| step.seconds * size.n_steps as f64 / 3600.0);
        let assumptions = assumptions(config, &workload);
        Self { cluster, n_parameters: shapes.n_parameters(), workload, size, assumptions, step, hours, scaling }
    }

    /// The prediction as text lines for a terminal.
    pub fn lines(&self) -> Vec<String> {
        let (step, memory, workload) = (&self.step, &self.step.memory, &self.workload);
        let n_parameters = self.n_parameters as f64;
        let weights = match n_parameters < 1e8 {
            true => format!("{:.1} million weights", n_parameters / 1e6),
            false => format!("{:.2} billion weights", n_parameters / 1e9),
        };
        let source = if self.size.is_measured {
            "counted in the dataset"
        } else {
            "estimated: the data stages are not finished"
        };
        let mut lines = vec![
            format!("on {}: {weights}, {} GPU(s)", self.cluster, self.cluster.n_gpus()),
            format!(
                "  a step: {} queries, {} response(s) each; on average {:.0} tokens of prompt and {:.0} of response, at most {:.0} ({source})",
                workload.n_queries,
                workload.n_samples,
                workload.prompt_tokens,
                workload.response_tokens,
                workload.longest_response
            ),
            format!("  assumes {}", self.assumptions),
            format!(
                "  memory per GPU: {:.1} of {:.0} GiB (training state {:.1}, forward and backward pass {:.1}; rollout weights {:.1}, KV cache {:.1})",
                memory.peak_gib(),
                memory.gpu_gib,
                memory.training_gib,
                memory.pass_gib,
                memory.rollout_gib,
                memory.kv_cache_gib
            ),
        ];
        lines.extend(self.no_export());
        let Some(hours) = self.hours else {
            lines.push(format!("  {}", self.no_fit()));
            return lines;
        };
        let phase = |phase: &Phase| {
            let rate = phase.tokens_per_s();
            let rate = if rate > 0.0 { format!("{rate:>9.0} tokens/s") } else { " ".repeat(18) };
            format!("  {:<16} {:>8.1} s {rate}  {}", phase.name, phase.seconds, phase.bound.name())
        };
        lines.extend(step.phases.iter().map(phase));
        lines.push(format!(
            "  {:<16} {:>8.1} s, {:.0} tokens/s per GPU; {} steps take {:.1} hours, without evaluations, retrieval and judge",
            "step", step.seconds, step.tokens_per_s_per_gpu, self.size.n_steps, hours
        ));
        lines.push(self.scaling_line());
        lines
    }

    /// The reason if `querl export verl` would refuse the batch sizes.
    fn no_export(&self) -> Option<String> {
        let Workload { n_queries, n_samples, mini_batch_size, .. } = self.workload;
        let (n_gpus, n_samples) = (self.cluster.n_gpus(), n_samples.max(1));
        let n_mini_batch = (mini_batch_size / n_samples).clamp(1, n_queries.max(1)) * n_samples;
        let (what, n) = indivisible(n_queries * n_samples, n_mini_batch, n_gpus)?;
        Some(format!(
            "  `querl export verl` refuses {n_gpus} GPUs: they cannot divide the {n} responses of {what} evenly"
        ))
    }

    /// The message that a step does not fit, with the remedy.
    fn no_fit(&self) -> String {
        let rows = &self.scaling.rows;
        match rows.iter().find(|row| row.fits) {
            Some(row) => format!(
                "does not fit: take {} of these GPUs, or larger ones, or lower model.tokens_per_pass",
                row.n_gpus
            ),
            None => format!(
                "does not fit on up to {} of these GPUs either; take larger ones, or more in one node, or lower model.tokens_per_pass",
                rows.last().map_or(self.cluster.n_gpus(), |row| row.n_gpus)
            ),
        }
    }

    fn scaling_line(&self) -> String {
        let Scaling { n_gpus, reason, rows } = &self.scaling;
        match reason {
            Some(reason) => format!("  more than {n_gpus} GPU(s) hardly help: {reason}"),
            None => format!("  up to {} GPUs help", rows.last().map_or(*n_gpus, |row| row.n_gpus)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::deployment::MINIMAL_CONFIG;

    fn plan(sections: &str, cluster: &str) -> ScalePlan {
        let config: Config = toml::from_str(&format!("{MINIMAL_CONFIG}\n{sections}")).unwrap();
        let shapes = DecoderConfig::of_shape("qwen3-0.6b").unwrap();
        let size = WorkloadSize { prompt_tokens: 180.0, response_tokens: 30.0, n_steps: 100, is_measured: true };
        ScalePlan::new(&config, &shapes, size, Cluster::parse(cluster).unwrap())
    }

    #[test]
    fn a_configuration_is_a_workload_of_its_rl_section() {
        let ppo = plan("", "8xH100").workload;
        assert!(ppo.has_critic && ppo.has_reference && ppo.epochs == 4, "{ppo:?}");
        let grpo = plan("[rl]\nalgorithm = \"grpo\"\nn_samples = 4\nkl_coef = 0.0", "8xH100").workload;
        assert!(!grpo.has_critic && !grpo.has_reference, "{grpo:?}");
        assert_eq!((grpo.n_responses(), grpo.longest_response), (256.0, 150.0));
        // 28 layers of rank 16: 16 * (1024 + 2048 + 2 * (1024 + 1024) + 2048 + 1024 + 3 * (1024 + 3072)).
        assert_eq!(grpo.updated, UpdatedWeights::Adapter(28 * 16 * 22_528));
    }

    #[test]
    fn hours_are_steps_times_seconds_and_the_text_has_every_phase() {
        let plan = plan("", "2x8xH100");
        assert!((plan.hours.unwrap() - plan.step.seconds / 36.0).abs() < 1e-12);
        let text = plan.lines().join("\n");
        assert!(!text.contains("querl export verl"), "{text}");
        let odd = super::tests::plan("", "3x5xL40S").lines().join("\n");
        assert!(
            odd.contains(
                "`querl export verl` refuses 15 GPUs: they cannot divide the 64 responses of a rollout batch ("
            ),
            "{odd}"
        );
        for phase in &plan.step.phases {
            assert!(text.contains(phase.name), "{text}");
        }
        assert!(text.contains("on 2x8xH100: ") && text.contains("100 steps take"), "{text}");
        assert!(text.contains("; rl.ppo_epochs = 4; "), "{text}");
        assert!(
            text.contains(
                "assumes rl.algorithm = \"ppo\", with a critic of the same size, with a reference; LoRA of rank 16 ("
            ),
            "{text}"
        );
    }

    #[test]
    fn no_time_is_predicted_where_a_step_does_not_fit() {
        let of = |cluster: &str, shape: &str, tokens_per_pass: usize| {
            let model = format!("model = {{ path = \"none\", tokens_per_pass = {tokens_per_pass} }}");
            let config = MINIMAL_CONFIG.replace("model = { path = \"none\" }", &model);
            let config: Config = toml::from_str(&config).unwrap();
            let shapes = DecoderConfig::of_shape(shape).unwrap();
            let size = WorkloadSize { prompt_tokens: 180.0, response_tokens: 30.0, n_steps: 100, is_measured: true };
            ScalePlan::new(&config, &shapes, size, Cluster::parse(cluster).unwrap())
        };
        // 61 GiB of weights for each rollout engine of one GPU, however many there are.
        let never = of("4090", "qwen3-32b", 512);
        let text = never.lines().join("\n");
        assert!(never.hours.is_none() && !text.contains("hours") && !text.contains("GPUs help"), "{text}");
        assert!(text.contains("does not fit on up to 1024 of these GPUs either; take larger ones"), "{text}");
        // Two frozen bases, of policy and critic, are 15 GiB for each of 8 GPUs and half of that for each of 16.
        let later = of("8x4090", "qwen3-32b", 512);
        let text = later.lines().join("\n");
        assert!(
            later.hours.is_none()
                && text
                    .ends_with("does not fit: take 16 of these GPUs, or larger ones, or lower model.tokens_per_pass"),
            "{text}"
        );
        assert!(of("2x8x4090", "qwen3-32b", 512).hours.is_some());
    }
}
