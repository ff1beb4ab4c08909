//! Which device a configuration asks for, and whether this build has it.

use crate::failure::Stop;

/// Accepts `cpu` and `auto`, which takes the best that this build has: the CPU.
///
/// # Errors
/// `device` names a GPU: those need a library that is not part of this build.
pub fn check(device: &str) -> Result<(), Stop> {
    match device {
        "auto" | "cpu" => Ok(()),
        other => Err(Stop::usage(format!(
            "device is {other:?}, which needs the CUDA library libquerl_cuda; it is not part of this build, so use \"cpu\" or \"auto\""
        ))),
    }
}
