//! GPUs of `--on`, and its parser: `H100`, `8xH100`, `2x8xH100`. Sources of the figures: docs/scale.md.

use serde::Serialize;

/// A GPU model, with figures of the vendor's data sheet: dense bf16 with f32 accumulation, without sparsity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GpuModel {
    /// Name of the GPU in `--on`.
    pub name: &'static str,
    /// Memory in GiB.
    pub memory_gib: f64,
    /// Memory bandwidth in GB/s.
    pub memory_gb_s: f64,
    /// Peak of bf16 matrix products in TFLOP/s.
    pub bf16_tflop_s: f64,
    /// Bandwidth to the other GPUs of the node (NVLink, Infinity Fabric or PCIe) in GB/s, one direction.
    pub link_gb_s: f64,
    /// Network bandwidth per GPU in GB/s, one direction.
    pub network_gb_s: f64,
}

const fn gpu(
    name: &'static str,
    memory_gib: f64,
    memory_gb_s: f64,
    bf16_tflop_s: f64,
    link_gb_s: f64,
    network_gb_s: f64,
) -> GpuModel {
    GpuModel { name, memory_gib, memory_gb_s, bf16_tflop_s, link_gb_s, network_gb_s }
}

/// The GPU models that `--on` accepts.
pub const GPUS: [GpuModel; 8] = [
    gpu("A100-40", 40.0, 1555.0, 312.0, 300.0, 25.0),
    gpu("A100-80", 80.0, 2039.0, 312.0, 300.0, 25.0),
    gpu("H100", 80.0, 3350.0, 989.4, 450.0, 50.0),
    gpu("H200", 141.0, 4800.0, 989.4, 450.0, 50.0),
    gpu("L40S", 48.0, 864.0, 362.0, 32.0, 1.6),
    gpu("4090", 24.0, 1008.0, 165.2, 32.0, 1.6),
    gpu("B200", 180.0, 8000.0, 2250.0, 900.0, 50.0),
    gpu("MI300X", 192.0, 5300.0, 1307.4, 448.0, 50.0),
];

/// Largest number of nodes and of GPUs of a node in `--on`.
const MAX_NODES: usize = 1024;
const MAX_PER_NODE: usize = 16;

/// A cluster of nodes with equal GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cluster {
    /// Number of nodes.
    pub n_nodes: usize,
    /// Number of GPUs per node.
    pub n_per_node: usize,
    /// The GPU model.
    pub gpu: GpuModel,
}

impl Cluster {
    /// Parses `GPU`, `MxGPU` or `NxMxGPU`: N nodes with M GPUs each. Case does not matter.
    ///
    /// # Errors
    /// A sentence with the text, the expected form, and the known GPUs.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut numbers, mut rest) = (Vec::new(), text.trim());
        while let Some((number, after)) = leading_count(rest) {
            numbers.push(number);
            rest = after;
        }
        let known = || GPUS.map(|gpu| gpu.name).join(", ");
        let expected = || format!("expected NxMxGPU, such as 2x8xH100: nodes, GPUs of a node, one of {}", known());
        let Some(gpu) = GPUS.into_iter().find(|gpu| gpu.name.eq_ignore_ascii_case(rest)) else {
            return Err(format!("`{text}` names no known GPU; {}", expected()));
        };
        let (n_nodes, n_per_node) = match numbers[..] {
            [] => (1, 1),
            [n_per_node] => (1, n_per_node),
            [n_nodes, n_per_node] => (n_nodes, n_per_node),
            _ => return Err(format!("`{text}` has {} numbers; {}", numbers.len(), expected())),
        };
        if !(1..=MAX_NODES).contains(&n_nodes) || !(1..=MAX_PER_NODE).contains(&n_per_node) {
            return Err(format!(
                "`{text}` is no such cluster; expected 1 to {MAX_NODES} nodes with 1 to {MAX_PER_NODE} GPUs each"
            ));
        }
        Ok(Self { n_nodes, n_per_node, gpu })
    }

    /// A cluster of `n_gpus` of the same GPUs, in as few nodes as they fit in.
    #[must_use]
    pub fn with_gpus(self, n_gpus: usize) -> Self {
        match n_gpus <= self.n_per_node {
            true => Self { n_nodes: 1, n_per_node: n_gpus.max(1), ..self },
            false => Self { n_nodes: n_gpus.div_ceil(self.n_per_node), ..self },
        }
    }

    /// Number of GPUs of all nodes.
    pub fn n_gpus(&self) -> usize {
        self.n_nodes * self.n_per_node
    }

    /// Bandwidth of collective operations over all GPUs, in bytes/s per GPU.
    pub fn collective_bytes_s(&self) -> f64 {
        1e9 * if self.n_nodes > 1 { self.gpu.network_gb_s } else { self.gpu.link_gb_s }
    }
}

impl std::fmt::Display for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}", self.n_nodes, self.n_per_node, self.gpu.name)
    }
}

/// Splits `8xH100` into 8 and `H100`; `None` if the text does not begin with digits and `x`. A number that is too large becomes the
/// maximum.
fn leading_count(text: &str) -> Option<(usize, &str)> {
    let n_digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, rest) = text.split_at(n_digits);
    let rest = rest.strip_prefix(['x', 'X']).filter(|_| !digits.is_empty())?;
    Some((digits.parse().unwrap_or(usize::MAX), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_and_gpus_are_read_also_where_the_name_has_digits_or_an_x() {
        for (text, expected) in [
            ("H100", "1x1xH100"),
            ("8xH100", "1x8xH100"),
            ("2x8xh100", "2x8xH100"),
            ("4x4090", "1x4x4090"),
            ("2X8XMI300X", "2x8xMI300X"),
            ("1x8xA100-80", "1x8xA100-80"),
        ] {
            assert_eq!(Cluster::parse(text).unwrap().to_string(), expected);
        }
        let two = Cluster::parse("2x8xH100").unwrap();
        assert_eq!((two.n_gpus(), two.with_gpus(4).to_string().as_str()), (16, "1x4xH100"));
        assert_eq!(two.with_gpus(64).to_string(), "8x8xH100");
    }

    #[test]
    fn what_is_not_a_cluster_is_refused_with_what_was_expected() {
        for (text, problem) in [
            ("8xV100", "`8xV100` names no known GPU; expected NxMxGPU, such as 2x8xH100"),
            ("", "`` names no known GPU"),
            ("1x2x8xH100", "`1x2x8xH100` has 3 numbers"),
            ("0xH100", "`0xH100` is no such cluster; expected 1 to 1024 nodes with 1 to 16 GPUs each"),
            ("99999999999999999999xH100", "xH100` is no such cluster; expected 1 to 1024 nodes"),
        ] {
            let found = Cluster::parse(text).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
    }

    #[test]
    fn several_nodes_communicate_over_the_network() {
        assert_eq!(Cluster::parse("8xH100").unwrap().collective_bytes_s(), 450e9);
        assert_eq!(Cluster::parse("2x8xH100").unwrap().collective_bytes_s(), 50e9);
    }
}
