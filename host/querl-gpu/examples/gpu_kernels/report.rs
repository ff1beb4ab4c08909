//! The table, for people and as JSON.

use crate::{Floor, Sizes};
use candle_core::Error;
use querl_cuda::device::{Gpu, cuda_version};
use serde_json::{Value, json};

/// Peak rates of the GPU, measured in this run, per second.
pub(crate) struct Rates {
    /// Operations per second of a bf16 matrix product.
    pub(crate) operations: f64,
    /// Bytes per second that a copy reads and writes.
    pub(crate) bytes: f64,
}

impl Rates {
    fn seconds(&self, floor: Floor) -> f64 {
        match floor {
            Floor::Bytes(bytes) => bytes / self.bytes,
            Floor::Operations(operations) => operations / self.operations,
        }
    }
}

/// Measurement of one kernel in one call.
pub(crate) struct Line {
    case: String,
    kernel: &'static str,
    seconds: f64,
    floor: Option<Floor>,
    error: Option<String>,
}

impl Line {
    pub(crate) fn new(case: &str, kernel: &'static str, seconds: f64, floor: Option<Floor>) -> Self {
        Self { case: case.to_owned(), kernel, seconds, floor, error: None }
    }

    pub(crate) fn failed(case: &str, error: &Error) -> Self {
        // The first line of candle's errors is the message.
        let sentence = error.to_string().lines().next().unwrap_or_default().to_owned();
        Self { case: case.to_owned(), kernel: "", seconds: 0.0, floor: None, error: Some(sentence) }
    }

    pub(crate) fn print(&self, rates: &Rates) {
        let Self { case, kernel, seconds, .. } = self;
        if let Some(error) = &self.error {
            println!("| {case} | FAILED: {error} | | | |");
            return;
        }
        let (floor, ratio) = match self.floor.map(|floor| rates.seconds(floor)) {
            Some(floor) => (format!("{:.2}", floor * 1e6), format!("{:.2}", seconds / floor)),
            None => (String::new(), String::new()),
        };
        println!("| {case} | {kernel} | {:.2} | {floor} | {ratio} |", seconds * 1e6);
    }

    fn json(&self, rates: &Rates) -> Value {
        let floor = self.floor.map(|floor| rates.seconds(floor));
        let kind = self.floor.map(|floor| if matches!(floor, Floor::Bytes(_)) { "bytes" } else { "operations" });
        json!({
            "case": self.case, "kernel": self.kernel, "seconds": self.seconds, "floor_s": floor, "of": kind,
            "ratio": floor.map(|floor| self.seconds / floor), "error": self.error,
        })
    }
}

fn device_name(gpu: &Gpu) -> String {
    gpu.stream().context().name().unwrap_or_default()
}

pub(crate) fn heading(gpu: &Gpu, shape: &str, sizes: &Sizes, rates: &Rates) {
    let name = device_name(gpu);
    let Sizes { n_rows, n_sequences, .. } = sizes;
    println!("{name}, CUDA {}, shape {shape}, {n_rows} rows, {n_sequences} sequences", cuda_version());
    if name.starts_with("Simulated") {
        println!("a simulated GPU: times and ratios mean nothing");
    }
    println!("products in bf16 {:.1} TFLOP/s, copies {:.1} GB/s\n", rates.operations / 1e12, rates.bytes / 1e9);
    println!("| call | kernel | us | floor us | time / floor |");
    println!("|---|---|---|---|---|");
}

pub(crate) fn json(gpu: &Gpu, shape: &str, sizes: &Sizes, rates: &Rates, lines: &[Line]) -> String {
    let lines: Vec<Value> = lines.iter().map(|line| line.json(rates)).collect();
    let result = json!({
        "device": device_name(gpu), "cuda": cuda_version(), "shape": shape, "rows": sizes.n_rows, "sequences": sizes.n_sequences,
        "operations_per_s": rates.operations, "bytes_per_s": rates.bytes, "kernels": lines,
    });
    format!("{result:#}\n")
}
