//! How a frozen base is stored changes its logits by rounding alone.
#![allow(clippy::unwrap_used)]

use candle_core::Tensor;
use querl_core::config::BaseDtype;
use querl_model::{Decoder, PackedBatch, Weights};
use std::path::Path;

fn logits(name: &str, dtype: BaseDtype) -> Vec<f32> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders").join(name);
    let decoder = Decoder::load_as(&directory, Weights::Frozen, dtype).unwrap();
    assert!(decoder.vars().is_empty());
    let tokens: Vec<u32> = (0..12).map(|i| (i * 37 + 5) % 64).collect();
    let hidden = decoder.hidden_states(&PackedBatch::new([tokens.as_slice()]), None).unwrap();
    let logits: Tensor = decoder.logits(&hidden, None).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

/// Root of the mean squared difference, relative to the values' own.
fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
    (sum(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / sum(&mut expected.iter().copied())).sqrt()
}

#[test]
fn a_base_in_half_precision_gives_nearly_the_same_logits() {
    for name in ["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "qwen3-bias"] {
        let expected = logits(name, BaseDtype::F32);
        for (dtype, bound) in [(BaseDtype::Bf16, 2e-2), (BaseDtype::F16, 2e-3)] {
            let error = relative_error(&logits(name, dtype), &expected);
            assert!(error > 0.0 && error < bound, "{name} in {}: relative error {error}", dtype.name());
        }
    }
}

/// A layer whose shape is wrong is named before anything is computed.
#[test]
fn a_tensor_of_another_shape_is_named_with_both() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen2-untied");
    let folder = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let wider = config.replace("\"intermediate_size\": 48", "\"intermediate_size\": 56");
    assert_ne!(config, wider);
    std::fs::write(folder.path().join("config.json"), wider).unwrap();
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let error = Decoder::load(folder.path(), Weights::Frozen).err().unwrap().to_string();
    assert!(error.contains("_proj.weight` has shape [") && error.contains("config.json makes it ["), "{error}");
}
