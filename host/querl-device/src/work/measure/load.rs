//! Reading a checkpoint.

use super::{Bench, times};
use crate::{JobError, Loaded, Spread};
use querl_model::{DType, Decoder, ExportSettings, ModelError, Weights, write_random_model};

/// Writes one of the measured shape in bf16 and reads it, each time into a model of its own beside the measured one.
pub(super) fn measure(bench: &Bench<'_>) -> Result<Loaded, JobError> {
    let (job, measuring) = (bench.job, bench.measuring);
    let folder = measuring.work_dir.join("checkpoint");
    let settings = ExportSettings { dtype: Some(DType::BF16), max_shard_bytes: ExportSettings::SHARD_BYTES };
    let written = write_random_model(bench.decoder.config(), job.seed, &folder, &settings)?;
    let seconds = times(bench.place, measuring.repeats, || {
        Decoder::load_on(&folder, Weights::Frozen, job.model.dtype, bench.place)?;
        Ok(())
    });
    std::fs::remove_dir_all(&folder).map_err(|source| ModelError::Io { path: folder.clone(), source })?;
    let seconds = Spread::of(&seconds?).ok_or_else(super::nothing)?;
    Ok(Loaded { file_bytes: written.n_bytes, seconds, bytes_per_s: seconds.rate(written.n_bytes as f64) })
}
