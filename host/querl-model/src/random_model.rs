//! A checkpoint of random weights of any shape, for measurements that need a file.

use crate::export::{OutTensor, Values, move_files, new_folder, write_json, write_weights};
use crate::weights::{RandomTensors, Tensors};
use crate::{DecoderConfig, ExportSettings, Exported, ModelError, dtype_name};
use candle_core::{DType, Tensor};
use std::path::Path;

impl Values for RandomTensors {
    fn value(&self, tensor: &OutTensor) -> Result<Tensor, ModelError> {
        Ok(self.tensor(&tensor.name, None)?.to_dtype(tensor.dtype)?)
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
    write_weights(staging.path(), &RandomTensors::new(config, seed), &tensors, settings.max_shard_bytes)?;
    let mut written = config.to_json();
    // Both names of the key: readers know the one or the other.
    for key in ["dtype", "torch_dtype"] {
        written[key] = dtype_name(dtype).into();
    }
    write_json(&staging.path().join("config.json"), &written)?;
    let n_bytes = tensors.iter().map(OutTensor::n_bytes).sum();
    let files = move_files(staging.path(), out)?;
    Ok(Exported { n_parameters: config.n_parameters() as u64, n_bytes, dtype: dtype_name(dtype).into(), files })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{ComputeDevice, Decoder, PackedBatch, Weights};
    use querl_core::config::BaseDtype;

    #[test]
    fn a_written_random_model_is_the_one_that_is_made_in_place() {
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
}
