//! Which device does a job.

use serde::{Deserialize, Serialize};

/// A device, as a configuration names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The processor.
    Cpu,
    /// A card, in the driver's order from 0.
    Cuda(usize),
}

impl Device {
    /// Of `cpu` or `cuda:N`. `None` for everything else.
    pub fn from_name(name: &str) -> Option<Self> {
        match name.strip_prefix("cuda:") {
            // A sign or a space would be another spelling of the same card.
            Some(index) if index.bytes().all(|byte| byte.is_ascii_digit()) => index.parse().ok().map(Self::Cuda),
            Some(_) => None,
            None => (name == "cpu").then_some(Self::Cpu),
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for device in [Device::Cpu, Device::Cuda(0), Device::Cuda(12)] {
            assert_eq!(Device::from_name(&device.to_string()), Some(device));
        }
        for name in ["cuda", "cuda:", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:x", "gpu", "CPU", ""] {
            assert_eq!(Device::from_name(name), None, "{name}");
        }
    }
}
