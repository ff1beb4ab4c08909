//! Time of an optimizer step, clipping and AdamW, compared with copying memory of the same size.
//!
//! `cargo run --release -p querl-train --example optimizer -- 494` (millions; the size of Qwen2.5-0.5B). Needs 16 bytes a parameter.

use candle_core::{DType, Device, Tensor, Var};
use querl_train::{AdamW, AdamWSettings, Gradients, TrainError};
use std::collections::BTreeMap;
use std::time::Instant;

/// Shape of a variable, similar to a layer's largest matrix.
const ROWS: usize = 4864;
const COLUMNS: usize = 896;

const REPEATS: usize = 5;

fn main() -> Result<(), TrainError> {
    let millions = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(494);
    querl_model::set_threads(2);
    let n_vars = (millions * 1_000_000usize).div_ceil(ROWS * COLUMNS);
    let mut vars = BTreeMap::new();
    for i in 0..n_vars {
        vars.insert(format!("w{i:03}"), Var::zeros((ROWS, COLUMNS), DType::F32, &Device::Cpu)?);
    }
    let mut optimizer = AdamW::new(AdamWSettings { weight_decay: 0.01, ..Default::default() });
    let gradient = Tensor::full(0.01f32, (ROWS, COLUMNS), &Device::Cpu)?;
    let mut gradients = Gradients::default();
    for (name, var) in &vars {
        let one = BTreeMap::from([(name.clone(), var.clone())]);
        gradients.add(&(var.as_tensor() * &gradient)?.sum_all()?.backward()?, &one)?;
    }
    let [mut clip_s, mut step_s] = [f64::INFINITY; 2];
    for _ in 0..REPEATS {
        let started = Instant::now();
        gradients.clone().clip(1.0)?;
        let clipped = Instant::now();
        optimizer.step(&vars, &gradients, 1e-3)?;
        clip_s = clip_s.min((clipped - started).as_secs_f64());
        step_s = step_s.min(clipped.elapsed().as_secs_f64());
    }
    let n_bytes = (n_vars * ROWS * COLUMNS * 4) as f64;
    println!("{} parameters, 2 threads, the fastest of {REPEATS} steps:", n_vars * ROWS * COLUMNS);
    println!("norm   {clip_s:.3} s, {:.1} GB/s read", n_bytes / clip_s / 1e9);
    // Read: value, gradient, two moments. Written: value, two moments.
    println!("adamw  {step_s:.3} s, {:.1} GB/s read and written", 7.0 * n_bytes / step_s / 1e9);
    println!("copy   {:.1} GB/s read and written", copy_rate());
    Ok(())
}

/// GB/s read and written by two threads that copy memory.
fn copy_rate() -> f64 {
    let n = 256 << 20;
    let (from, mut to) = (vec![1u8; n], vec![0u8; n]);
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for (from, to) in from.chunks(n / 2).zip(to.chunks_mut(n / 2)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
        best = best.min(started.elapsed().as_secs_f64());
    }
    2.0 * n as f64 / best / 1e9
}
