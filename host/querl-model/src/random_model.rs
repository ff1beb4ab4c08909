//! Shapes of published models, and checkpoints of random weights of any shape: for measurements that need no download.

use crate::checkpoint::{RandomTensors, Tensors};
use crate::export::{OutTensor, move_files, new_folder, write_json, write_weights};
use crate::{DecoderConfig, ExportSettings, Exported, Family, ModelError, dtype_name};
use candle_core::DType;
use std::path::Path;

/// Name, hidden size, intermediate size, layers, query heads, key-value heads, vocabulary size, tied embeddings. From the models'
/// `config.json`.
type Row = (&'static str, usize, usize, usize, usize, usize, usize, bool);

const QWEN2_5: [Row; 7] = [
    ("qwen2.5-0.5b", 896, 4864, 24, 14, 2, 151_936, true),
    ("qwen2.5-1.5b", 1536, 8960, 28, 12, 2, 151_936, true),
    ("qwen2.5-3b", 2048, 11_008, 36, 16, 2, 151_936, true),
    ("qwen2.5-7b", 3584, 18_944, 28, 28, 4, 152_064, false),
    ("qwen2.5-14b", 5120, 13_824, 48, 40, 8, 152_064, false),
    ("qwen2.5-32b", 5120, 27_648, 64, 40, 8, 152_064, false),
    ("qwen2.5-72b", 8192, 29_568, 80, 64, 8, 152_064, false),
];

const QWEN3: [Row; 6] = [
    ("qwen3-0.6b", 1024, 3072, 28, 16, 8, 151_936, true),
    ("qwen3-1.7b", 2048, 6144, 28, 16, 8, 151_936, true),
    ("qwen3-4b", 2560, 9728, 36, 32, 8, 151_936, true),
    ("qwen3-8b", 4096, 12_288, 36, 32, 8, 151_936, false),
    ("qwen3-14b", 5120, 17_408, 40, 40, 8, 151_936, false),
    ("qwen3-32b", 5120, 25_600, 64, 64, 8, 151_936, false),
];

/// Not a published model: a decoder with heads of a usual size, small enough that a benchmark takes seconds on any device.
const TINY: Row = ("tiny", 128, 256, 2, 2, 1, 2048, true);

impl DecoderConfig {
    /// The shape of a published model, or of `tiny`, by name (upper and lower case are the same). `None` for a name that is neither `tiny`
    /// nor one of [`DecoderConfig::shape_names`].
    pub fn of_shape(name: &str) -> Option<Self> {
        let of = |rows: &[Row], family| {
            rows.iter().find(|row| row.0.eq_ignore_ascii_case(name)).map(|&row| Self::from_row(row, family))
        };
        of(&QWEN2_5, Family::Qwen2).or_else(|| of(&QWEN3, Family::Qwen3)).or_else(|| of(&[TINY], Family::Qwen2))
    }

    /// Names of the published models for which [`DecoderConfig::of_shape`] has a shape.
    pub fn shape_names() -> impl Iterator<Item = &'static str> {
        QWEN2_5.iter().chain(&QWEN3).map(|row| row.0)
    }

    /// `config.json` without RoPE scaling and sliding windows.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let architecture = format!("{}ForCausalLM", self.family.name());
        serde_json::json!({
            "architectures": [architecture], "model_type": self.family.model_type(), "hidden_act": "silu", "attention_dropout": 0.0,
            "attention_bias": self.output_bias, "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.n_layers, "num_attention_heads": self.n_heads, "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim, "max_position_embeddings": self.max_positions, "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps, "tie_word_embeddings": self.tie_word_embeddings, "rope_scaling": null,
            "use_sliding_window": false, "sliding_window": null, "max_window_layers": self.n_layers, "use_cache": true,
            "initializer_range": self.initializer_range, "vocab_size": self.vocab_size,
        })
    }

    fn from_row(
        (_, hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, vocab_size, is_tied): Row,
        family: Family,
    ) -> Self {
        let is_qwen2 = family == Family::Qwen2;
        Self {
            family,
            vocab_size,
            hidden_size,
            intermediate_size,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim: if is_qwen2 { hidden_size / n_heads } else { 128 },
            max_positions: if is_qwen2 { 32_768 } else { 40_960 },
            rope_theta: 1_000_000.0,
            rope_scaling: None,
            sliding_windows: Vec::new(),
            rms_norm_eps: 1e-6,
            tie_word_embeddings: is_tied,
            qkv_bias: is_qwen2,
            output_bias: false,
            initializer_range: 0.02,
        }
    }
}

/// Writes `config.json` and the weights that [`Decoder::random`](crate::Decoder::random) has for the same seed, to a folder that is
/// new or empty; bf16 where `settings` names no type. There is no tokenizer: none belongs to such weights. Tensors are made one
/// after another.
///
/// # Errors
/// The folder is not empty, or a file cannot be written.
pub fn write_random_model(
    config: &DecoderConfig,
    seed: u64,
    out: &Path,
    settings: &ExportSettings,
) -> Result<Exported, ModelError> {
    let dtype = settings.dtype.unwrap_or(DType::BF16);
    let tensor = |(name, shape)| OutTensor { name, shape, dtype };
    let tensors: Vec<OutTensor> = config.tensor_shapes().into_iter().map(tensor).collect();
    let staging = new_folder(out)?;
    let values = RandomTensors::new(config, seed);
    let value_of = |tensor: &OutTensor| Ok(values.tensor(&tensor.name, None)?.to_dtype(tensor.dtype)?);
    write_weights(staging.path(), &value_of, &tensors, settings.max_shard_bytes)?;
    let mut written = config.to_json();
    // Some readers know only one of the two keys.
    for key in ["dtype", "torch_dtype"] {
        written[key] = dtype_name(dtype).into();
    }
    write_json(&staging.path().join("config.json"), &written)?;
    let n_bytes = tensors.iter().map(OutTensor::n_bytes).sum();
    let files = move_files(staging.path(), out)?;
    Ok(Exported { n_parameters: config.n_parameters() as u64, n_bytes, dtype: dtype_name(dtype).into(), files })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ComputeDevice, Decoder, PackedBatch, Weights};
    use querl_core::config::BaseDtype;

    #[test]
    fn a_written_random_model_equals_the_one_in_memory() {
        let (folder, config) = (tempfile::tempdir().unwrap(), DecoderConfig::of_shape("tiny").unwrap());
        let settings = ExportSettings { dtype: None, max_shard_bytes: 200_000 };
        let written = write_random_model(&config, 5, folder.path(), &settings).unwrap();
        assert_eq!(written.n_bytes, written.n_parameters * 2);
        assert!(written.files.len() > 3, "{:?}", written.files);
        let loaded = Decoder::load_as(folder.path(), Weights::Frozen, BaseDtype::Bf16).unwrap();
        let made = Decoder::random(config, 5, BaseDtype::Bf16, &ComputeDevice::Cpu).unwrap();
        let batch = PackedBatch::new([&[3u32, 4, 5][..]]);
        let [a, b] = [&loaded, &made].map(|decoder| decoder.hidden_states(&batch, None).unwrap());
        assert_eq!(a.to_vec2::<f32>().unwrap(), b.to_vec2::<f32>().unwrap());
        let again = write_random_model(loaded.config(), 5, folder.path(), &settings).unwrap_err().to_string();
        assert!(again.contains("is not empty"), "{again}");
    }

    /// The expected billions of parameters are from the models' pages on Hugging Face.
    #[test]
    fn shapes_have_as_many_parameters_as_their_models() {
        let published = [
            ("qwen2.5-0.5b", 0.49),
            ("qwen2.5-1.5b", 1.54),
            ("qwen2.5-3b", 3.09),
            ("qwen2.5-7b", 7.61),
            ("qwen2.5-14b", 14.7),
            ("qwen2.5-32b", 32.5),
            ("qwen2.5-72b", 72.7),
            ("qwen3-0.6b", 0.6),
            ("qwen3-1.7b", 1.7),
            ("qwen3-4b", 4.0),
            ("qwen3-8b", 8.2),
            ("qwen3-14b", 14.8),
            ("qwen3-32b", 32.8),
        ];
        assert!(DecoderConfig::shape_names().eq(published.iter().map(|row| row.0)));
        for (name, expected) in published {
            let found = DecoderConfig::of_shape(name).unwrap().n_parameters() as f64 / 1e9;
            assert!((found / expected - 1.0).abs() < 0.02, "{name}: {found} for {expected}");
        }
        assert!(DecoderConfig::of_shape("qwen2.5-33b").is_none());
        assert!(DecoderConfig::of_shape("tiny").unwrap().n_parameters() < 1_000_000);
    }

    #[test]
    fn a_shape_written_as_config_json_is_read_as_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        for name in DecoderConfig::shape_names().chain(["tiny"]) {
            let shape = DecoderConfig::of_shape(name).unwrap();
            std::fs::write(&path, shape.to_json().to_string()).unwrap();
            assert_eq!(DecoderConfig::load(&path).unwrap(), shape, "{name}");
        }
    }
}
