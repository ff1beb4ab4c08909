//! Figures for people.

use querl_device::{Ceilings, KernelTime, Loaded, Measured, MemoryUse, Optimised, RolledOut, Spread, Tuned};

/// A name and a value for each.
pub(super) fn lines(measured: &Measured) -> Vec<(String, String)> {
    let Measured { shape, device, dtype, parameters, base_bytes, made_s, .. } = measured;
    let line = |name: &str, value: String| (name.to_owned(), value);
    let mut lines = vec![
        line("model", format!("{shape}, {parameters} parameters in {dtype}, {}", gib(*base_bytes))),
        line("device", format!("{device}; made there in {made_s:.2} s")),
    ];
    lines.extend(measured.ceilings.as_ref().map(|ceilings| line("ceilings", of_ceilings(ceilings))));
    lines.extend(measured.load.as_ref().map(|loaded| line("load", of_load(loaded))));
    if let Some(tuned) = &measured.sft {
        lines.extend([line("sft", of_sft(tuned)), line("sft memory", of_memory(&tuned.memory))]);
        lines.extend(of_kernels(&tuned.kernels).map(|text| line("sft kernels", text)));
    }
    lines.extend(
        measured.rollouts.iter().map(|rolled| (format!("rollout of {}", rolled.sequences), of_rollout(rolled))),
    );
    if let Some(optimised) = &measured.ppo {
        lines.extend([line("ppo", of_ppo(optimised)), line("ppo memory", of_memory(&optimised.memory))]);
    }
    lines.extend(measured.left_out.iter().map(|sentence| line("left out", sentence.clone())));
    lines
}

fn of_ceilings(ceilings: &Ceilings) -> String {
    let (matrix, copy) = (ceilings.matrix.median / 1e12, ceilings.copy.median / 1e9);
    format!("products {matrix:.3} TFLOP/s (matrices of {}), copies {copy:.1} GB/s", ceilings.matrix_size)
}

fn of_load(loaded: &Loaded) -> String {
    let (bytes, rate) = (gib(loaded.file_bytes), loaded.bytes_per_s.median / 1e9);
    format!("{bytes} in {}, {rate:.2} GB/s", seconds(loaded.seconds))
}

fn of_sft(tuned: &Tuned) -> String {
    let Tuned { rows, tokens, computed_tokens, passes, .. } = tuned;
    let twice = if tuned.gradient_checkpointing { ", layers computed twice" } else { "" };
    format!(
        "{:.0} tokens/s ({:.0} computed), {:.1}% of the rate of products; a step of {rows} rows, {tokens} tokens, {computed_tokens} \
         computed in {passes} pass(es){twice}: {}",
        tuned.tokens_per_s.median,
        tuned.computed_tokens_per_s.median,
        100.0 * tuned.share_of_matrix_rate,
        seconds(tuned.step_s)
    )
}

fn of_rollout(rolled: &RolledOut) -> String {
    let decoding = match (rolled.decode_tokens_per_s, rolled.share_of_bandwidth) {
        (Some(decode), Some(share)) => {
            format!("decoding alone {:.0}, {:.1}% of the bandwidth", decode.median, 100.0 * share)
        }
        _ => "decoding not to be told from the prompts".into(),
    };
    let (rate, seconds) = (rolled.tokens_per_s.median, seconds(rolled.seconds));
    format!("{rate:.0} tokens/s, {decoding}; {} prompts: {seconds}", rolled.prompts)
}

fn of_ppo(optimised: &Optimised) -> String {
    let part = |(name, spread): (&String, &Spread)| format!("{name} {:.2}", spread.median);
    let parts = optimised.parts_s.iter().filter(|(name, spread)| *name != "step" && spread.median >= 0.005).map(part);
    let parts: Vec<String> = parts.collect();
    let Optimised { answers, updates, scorer, .. } = optimised;
    let iteration = seconds(optimised.iteration_s);
    format!(
        "{iteration} an iteration of {answers} answers and {updates} updates ({}); scored by {scorer}",
        parts.join(", ")
    )
}

/// Where a card's time went.
fn of_kernels(kernels: &[KernelTime]) -> Option<String> {
    let total: f64 = kernels.iter().map(|kernel| kernel.seconds).sum();
    let share = |kernel: &KernelTime| format!("{} {:.1}%", kernel.name, 100.0 * kernel.seconds / total);
    let shares: Vec<String> = kernels.iter().take(8).map(share).collect();
    (total > 0.0).then(|| format!("{total:.3} s on the card: {}", shares.join(", ")))
}

fn of_memory(memory: &MemoryUse) -> String {
    let peak = memory.peak_bytes.map_or_else(|| "not known".into(), gib);
    let beside = memory.beside_bytes.map(|bytes| format!(" and {} beside tensors", gib(bytes))).unwrap_or_default();
    format!("{peak}{beside}; the plan says {}", gib(memory.planned_bytes))
}

fn seconds(spread: Spread) -> String {
    format!("{:.3} s ({:.3} to {:.3}, {} times)", spread.median, spread.least, spread.most, spread.n)
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}
