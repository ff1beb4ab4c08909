//! Memory that a part of a measurement takes.

use super::Bench;
use crate::memory::Stage;
use crate::{JobError, MemoryUse};
use querl_model::Place;

/// Begins anew.
///
/// # Errors
/// A card's driver refuses.
pub(super) fn begin(place: &Place) -> Result<(), JobError> {
    match place {
        // The peak of a process is forgotten by writing 5 there (proc_pid_clear_refs(5)). Where that is not allowed it stays.
        Place::Cpu => drop(std::fs::write("/proc/self/clear_refs", "5")),
        #[cfg(feature = "cuda")]
        Place::Card(gpu) => gpu.forget_peak().map_err(querl_model::ModelError::from)?,
    }
    Ok(())
}

/// What was taken since, beside what the plan for `stage` says.
///
/// # Errors
/// A card's driver does not tell.
pub(super) fn end(bench: &Bench<'_>, stage: Stage) -> Result<MemoryUse, JobError> {
    let planned_bytes = bench.planned(stage);
    match bench.place {
        Place::Cpu => Ok(MemoryUse { planned_bytes, peak_bytes: resident_peak(), beside_bytes: None }),
        #[cfg(feature = "cuda")]
        Place::Card(gpu) => {
            let memory = gpu.memory().map_err(querl_model::ModelError::from)?;
            Ok(MemoryUse { planned_bytes, peak_bytes: Some(memory.peak), beside_bytes: Some(memory.beside()) })
        }
    }
}

/// Linux alone tells.
fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
}
