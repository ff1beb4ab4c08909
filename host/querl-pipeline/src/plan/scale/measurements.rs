//! Published measurements of verl, and the errors of the roofline model on them: recomputes the table of docs/scale.md.

use super::gpus::Cluster;
use super::roofline::{Efficiency, UpdatedWeights, Workload, predict};
use querl_model::{DecoderConfig, Family};
use std::path::Path;

/// One measurement: number in the documentation, GPUs, model, algorithm, tokens/s per GPU.
struct Measurement {
    id: &'static str,
    cluster: &'static str,
    model: &'static str,
    algorithm: &'static str,
    measured: f64,
    workload: Workload,
}

/// Queries, samples, mean tokens of prompt and response, longest response, tensor parallel size, responses of an optimizer step.
type Sizes = (usize, usize, f64, f64, f64, usize, usize);

fn measurement(
    id: &'static str,
    (cluster, model, algorithm): (&'static str, &'static str, &'static str),
    (n_queries, n_samples, prompt_tokens, response_tokens, longest_response, parts, mini_batch_size): Sizes,
    measured: f64,
) -> Measurement {
    let workload = Workload {
        n_queries,
        n_samples,
        prompt_tokens,
        response_tokens,
        longest_response,
        updated: UpdatedWeights::All,
        has_critic: algorithm == "PPO",
        // Run B4 has no KL.
        has_reference: id != "B4",
        epochs: 1,
        mini_batch_size,
        tokens_per_pass: 16_384,
        gradient_checkpointing: true,
        tensor_parallel: Some(parts),
    };
    Measurement { id, cluster, model, algorithm, measured, workload }
}

const QWEN: &str = "Qwen2-7B";
const DEEPSEEK: &str = "deepseek-llm-7b";
const SMALL: &str = "Qwen2.5-0.5B";

fn measurements() -> [Measurement; 12] {
    let (h100, mi300) = ("8xH100", "8xMI300X");
    let qwen_grpo = (1024, 5, 93.6, 182.6, 1024.0, 2, 1280);
    let deepseek_grpo = (1024, 5, 82.6, 133.0, 551.0, 2, 1280);
    let qwen_ppo = (1024, 1, 93.6, 182.6, 512.0, 2, 256);
    let deepseek_ppo = (1024, 1, 82.6, 135.6, 454.0, 4, 256);
    [
        measurement("A1", (h100, QWEN, "GRPO"), qwen_grpo, 1544.30),
        measurement("A2", (mi300, QWEN, "GRPO"), qwen_grpo, 1747.94),
        measurement("A3", (h100, DEEPSEEK, "GRPO"), deepseek_grpo, 1624.42),
        measurement("A4", (mi300, DEEPSEEK, "GRPO"), deepseek_grpo, 1899.04),
        measurement("A5", (h100, QWEN, "PPO"), qwen_ppo, 907.24),
        measurement("A6", (mi300, QWEN, "PPO"), qwen_ppo, 921.24),
        measurement("A7", (h100, DEEPSEEK, "PPO"), deepseek_ppo, 623.52),
        measurement("A8", (mi300, DEEPSEEK, "PPO"), deepseek_ppo, 767.47),
        measurement("B1", (h100, QWEN, "PPO"), (1024, 5, 93.6, 182.6, 1024.0, 2, 320), 881.48),
        measurement("B2", (h100, QWEN, "PPO"), (512, 1, 93.6, 164.4, 1003.0, 1, 32), 363.43),
        measurement("B3", (h100, SMALL, "GRPO"), (256, 2, 103.6, 140.2, 192.0, 1, 128), 2390.74),
        measurement("B4", (h100, SMALL, "PPO"), (2048, 1, 103.7, 191.9, 256.0, 1, 512), 1819.58),
    ]
}

/// From the model's `config.json`. Qwen2 has the sizes of Qwen2.5.
fn shapes(model: &str) -> DecoderConfig {
    match model {
        QWEN => DecoderConfig::of_shape("qwen2.5-7b").unwrap(),
        SMALL => DecoderConfig::of_shape("qwen2.5-0.5b").unwrap(),
        _ => DecoderConfig {
            family: Family::Llama,
            vocab_size: 102_400,
            hidden_size: 4096,
            intermediate_size: 11_008,
            n_layers: 30,
            n_heads: 32,
            n_kv_heads: 32,
            head_dim: 128,
            tie_word_embeddings: false,
            qkv_bias: false,
            output_bias: false,
            ..DecoderConfig::of_shape("qwen2.5-7b").unwrap()
        },
    }
}

impl Measurement {
    fn predicted(&self) -> f64 {
        let cluster = Cluster::parse(self.cluster).unwrap();
        predict(&shapes(self.model), &self.workload, &cluster, &Efficiency::default()).tokens_per_s_per_gpu
    }

    fn error(&self) -> f64 {
        self.predicted() / self.measured - 1.0
    }

    /// The row as in the documentation.
    fn row(&self) -> String {
        let Self { id, cluster, model, algorithm, measured, .. } = self;
        let (predicted, error) = (self.predicted(), 100.0 * self.error());
        format!("| {id} | {cluster} | {model} | {algorithm} | {measured:.0} | {predicted:.0} | {error:+.0} % |")
    }
}

#[test]
fn measurements_and_errors_of_the_page_are_those_of_the_model() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for page in ["scale.md", "zh-CN/scale.md"] {
        let text = std::fs::read_to_string(folder.join(page)).unwrap();
        let missing: Vec<String> =
            measurements().iter().map(Measurement::row).filter(|row| !text.contains(row.as_str())).collect();
        assert!(missing.is_empty(), "docs/{page} lacks these rows:\n{}", missing.join("\n"));
    }
}

#[test]
fn errors_are_below_a_quarter_but_for_the_run_that_computes_padding() {
    for measurement in measurements() {
        let (id, error) = (measurement.id, measurement.error());
        assert_eq!(error.abs() < 0.25, id != "B4", "{id}: {error:+.3}");
    }
}

/// Run B4 has `use_remove_padding = False`: passes have 512 + 256 tokens per sequence where 296 are real.
#[test]
fn padding_explains_a_part_of_the_outlier() {
    let found = measurements().into_iter().find(|measurement| measurement.id == "B4").unwrap();
    let padded = Workload { prompt_tokens: 512.0, response_tokens: 256.0, ..found.workload };
    let cluster = Cluster::parse(found.cluster).unwrap();
    let step = predict(&shapes(found.model), &padded, &cluster, &Efficiency::default());
    let useful = found.workload.n_tokens() / step.seconds / 8.0;
    assert!(useful < 0.65 * found.predicted(), "{useful}");
}

/// The published numbers of weights.
#[test]
fn shapes_have_the_weights_of_the_models() {
    let billions = |model| (shapes(model).n_parameters() as f64 / 1e7).round() / 100.0;
    assert_eq!([QWEN, DEEPSEEK, SMALL].map(billions), [7.62, 6.91, 0.49]);
}
