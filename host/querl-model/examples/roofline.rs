//! Each kernel's share of what the machine can do: arithmetic and memory bandwidth, both measured here.
//!
//! ```sh
//! cargo run --release -p querl-model --example roofline -- --threads 2 [--shape S|M] [--kernel NAME] [--rows 1,128]
//! ```
//! A row of the table is one kernel on N rows: its best time of several, the share of the measured peak of multiplications and
//! additions, the share of the measured bandwidth if every operand came from memory once, and, for products, the time of the
//! `gemm` crate on the same operands, both taken in turns. Shares of bandwidth above 1 mean that the operands stay in caches.
#![allow(clippy::unwrap_used)] // a benchmark program

#[path = "roofline/kernels.rs"]
mod kernels;
#[path = "roofline/layers.rs"]
mod layers;
#[path = "roofline/peak.rs"]
mod peak;

use std::time::{Duration, Instant};

struct ModelShape {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    kv_width: usize,
    head_dim: usize,
    vocabulary: usize,
}

/// A small decoder, and that of Qwen2.5-0.5B.
const SHAPES: [ModelShape; 2] = [
    ModelShape { name: "S", hidden: 256, intermediate: 688, kv_width: 128, head_dim: 64, vocabulary: 4096 },
    ModelShape { name: "M", hidden: 896, intermediate: 4864, kv_width: 128, head_dim: 64, vocabulary: 151_936 },
];

struct Work {
    operations: f64,
    /// Size in bytes of all operands and results, counted once.
    bytes: f64,
}

struct Kernel {
    name: String,
    n_rows: usize,
    work: Work,
    run: Box<dyn FnMut()>,
    /// The same product by the `gemm` crate.
    reference: Option<Box<dyn FnMut()>>,
}

fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|argument| argument != name).nth(1)
}

fn main() {
    let n_threads = argument("--threads").and_then(|n| n.parse().ok()).unwrap_or(2);
    querl_model::set_threads(n_threads);
    let rows = argument("--rows").unwrap_or_else(|| "1,8,32,128,512,2048".into());
    let rows: Vec<usize> = rows.split(',').map(|n| n.parse().unwrap()).collect();
    let peaks = peak::measure(n_threads);
    println!("threads {n_threads}");
    println!("f32 fused multiply-add   {:8.1} GFLOP/s", peaks.f32_flops / 1e9);
    println!("bf16 dot products        {:8.1} GFLOP/s (not used: see `FrozenWeight`)", peaks.bf16_flops / 1e9);
    println!("reading memory           {:8.1} GB/s\n", peaks.bytes_per_second / 1e9);
    println!("| shape | kernel | rows | ms | GFLOP/s | of arithmetic | of bandwidth | gemm crate / ours |");
    println!("|---|---|---|---|---|---|---|---|");
    for shape in SHAPES.iter().filter(|shape| argument("--shape").is_none_or(|name| name == shape.name)) {
        let filter = argument("--kernel");
        kernels::each(shape, &rows, filter.as_deref(), |kernel| print_row(shape, kernel, &peaks));
        layers::each(shape, &rows, filter.as_deref(), |kernel| print_row(shape, kernel, &peaks));
    }
}

fn print_row(shape: &ModelShape, mut kernel: Kernel, peaks: &peak::Peaks) {
    let (own, reference) = best_times(&mut kernel);
    let seconds = own.as_secs_f64();
    let flops = kernel.work.operations / seconds;
    let ratio = reference.map_or(String::new(), |time| format!("{:.2}", time.as_secs_f64() / seconds));
    println!(
        "| {} | {} | {} | {:.4} | {:.1} | {:.2} | {:.2} | {ratio} |",
        shape.name,
        kernel.name,
        kernel.n_rows,
        seconds * 1e3,
        flops / 1e9,
        flops / peaks.f32_flops,
        kernel.work.bytes / seconds / peaks.bytes_per_second,
    );
}

/// Best time of a kernel and of its reference, measured alternately for a second, at least 5 times each.
fn best_times(kernel: &mut Kernel) -> (Duration, Option<Duration>) {
    let (mut own, mut reference) = (Duration::MAX, None);
    let start = Instant::now();
    for turn in 0.. {
        let before = Instant::now();
        (kernel.run)();
        own = own.min(before.elapsed());
        if let Some(run) = &mut kernel.reference {
            let before = Instant::now();
            run();
            reference = Some(reference.unwrap_or(Duration::MAX).min(before.elapsed()));
        }
        if turn >= 5 && start.elapsed() > Duration::from_millis(600) {
            break;
        }
    }
    (own, reference)
}
