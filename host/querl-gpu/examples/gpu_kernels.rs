//! Every kernel on a GPU against its floor: the bytes that it must move at the GPU's bandwidth, or the operations that it must do
//! at the GPU's rate in bf16, both measured in the same run.
//!
//! ```sh
//! cargo run --release -p querl-model --features cuda --example gpu_kernels -- [--shape qwen2.5-7b] [--rows 8192] [--sequences 64]
//!     [--repeats 20] [--json FILE]
//! ```
//! Times are the GPU's own, between two events around each launch. Kernels that one call launches several times are summed. Bytes
//! of tensors that fit into the second-level cache may beat the floor. On the simulated GPU (`tests/cuda`) the program only proves
//! that it works: its times mean nothing.
#![allow(clippy::unwrap_used)] // a benchmark program

#[path = "gpu_kernels/cases.rs"]
mod cases;
#[path = "gpu_kernels/decoding.rs"]
mod decoding;
#[path = "gpu_kernels/report.rs"]
mod report;

use candle_core::Result;
use querl_cuda::device::Gpu;
use querl_model::KernelLaunch;
use querl_model::{ComputeDevice, DecoderConfig, copies, matrix_products};
use report::{Line, Rates};
use std::collections::BTreeMap;

/// The minimum work of a kernel in one call.
#[derive(Clone, Copy)]
enum Floor {
    /// Bytes that are read and written, each once.
    Bytes(f64),
    /// Multiplications and additions: two operations per pair.
    Operations(f64),
}

/// One call that launches kernels.
struct Case<'a> {
    name: String,
    run: Box<dyn FnMut() -> Result<()> + 'a>,
    /// Minimum work by kernel; launched kernels that are not listed are shown without it.
    floors: Vec<(&'static str, Floor)>,
}

#[derive(Clone)]
struct Sizes {
    shape: DecoderConfig,
    /// Number of rows of a training pass.
    n_rows: usize,
    n_sequences: usize,
}

fn argument<T: std::str::FromStr>(name: &str, default: T) -> T {
    let value = std::env::args().skip_while(|argument| argument != name).nth(1);
    value.map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}: `{value}` cannot be read")))
}

fn main() {
    let name: String = argument("--shape", "qwen2.5-7b".into());
    let shape = DecoderConfig::of_shape(&name).unwrap_or_else(|| panic!("there is no shape `{name}`"));
    let sizes = Sizes { shape, n_rows: argument("--rows", 8192), n_sequences: argument("--sequences", 64) };
    let repeats = argument("--repeats", 20);
    let gpu = Gpu::new(argument("--gpu", 0)).unwrap();
    let rates = rates(&gpu);
    report::heading(&gpu, &name, &sizes, &rates);
    let mut lines = Vec::new();
    let mut measure = |case: Case<'_>| {
        let of_case = measured(&gpu, case, repeats);
        of_case.iter().for_each(|line| line.print(&rates));
        lines.extend(of_case);
    };
    cases::each(&gpu, &sizes, &mut measure);
    decoding::each(&gpu, &sizes, &mut measure);
    let path: String = argument("--json", String::new());
    if !path.is_empty() {
        std::fs::write(&path, report::json(&gpu, &name, &sizes, &rates, &lines)).unwrap();
    }
}

/// Peak rates of the GPU, measured in this run.
fn rates(gpu: &Gpu) -> Rates {
    let place = ComputeDevice::Accelerator(std::sync::Arc::new(gpu.clone()));
    let (products, copies) = (matrix_products(&place).unwrap(), copies(&place).unwrap());
    let median = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    Rates {
        operations: 2.0 * (products.size as f64).powi(3) / median(products.seconds),
        bytes: 2.0 * copies.size as f64 / median(copies.seconds),
    }
}

/// One line per kernel that the case launches: the median time per call over the repetitions. A failing case gives a line with its error,
/// so that the others are still measured.
fn measured(gpu: &Gpu, mut case: Case<'_>, repeats: usize) -> Vec<Line> {
    let mut times: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for index in 0..repeats + 2 {
        let launched: Result<Vec<KernelLaunch>> =
            gpu.traced(&mut case.run).and_then(|(done, launched)| done.map(|()| launched));
        let launched = match launched {
            Ok(launched) => launched,
            Err(error) => return vec![Line::failed(&case.name, &error)],
        };
        let mut of_call: BTreeMap<&'static str, f64> = BTreeMap::new();
        for KernelLaunch { name, milliseconds } in launched {
            *of_call.entry(name).or_default() += f64::from(milliseconds) / 1e3;
        }
        // The first two calls load code, allocate memory and raise the clock rate.
        if index >= 2 {
            of_call.into_iter().for_each(|(name, seconds)| times.entry(name).or_default().push(seconds));
        }
    }
    let line = |(kernel, mut seconds): (&'static str, Vec<f64>)| {
        seconds.sort_by(f64::total_cmp);
        let floor = case.floors.iter().find(|(name, _)| *name == kernel).map(|(_, floor)| *floor);
        Line::new(&case.name, kernel, seconds[seconds.len() / 2], floor)
    };
    times.into_iter().map(line).collect()
}
