//! Which device a configuration asks for, and whether this build has it.

use crate::failure::Stop;

/// Where models run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The processor's cores.
    Cpu,
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cpu")
    }
}

/// The device for a configuration's `device`. `auto` takes the best that this build has: the CPU.
///
/// # Errors
/// It names a GPU: those need a library that is not part of this build.
pub fn resolve(device: &str) -> Result<Device, Stop> {
    match device {
        "auto" | "cpu" => Ok(Device::Cpu),
        other => Err(Stop::usage(format!(
            "device is {other:?}, which needs the CUDA library libquerl_cuda; it is not part of this build, so use \"cpu\" or \"auto\""
        ))),
    }
}
