//! Learning-rate schedules as factors of the peak rate.

/// Rises linearly over `n_warmup` steps, then falls to zero along half a cosine. `step` counts from 0.
///
/// Source: transformers `get_cosine_schedule_with_warmup`.
pub fn cosine_with_warmup(step: u64, n_warmup: u64, n_steps: u64) -> f64 {
    if step < n_warmup {
        return step as f64 / n_warmup.max(1) as f64;
    }
    let progress = (step - n_warmup) as f64 / (n_steps.saturating_sub(n_warmup)).max(1) as f64;
    (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
}

/// Rises linearly over `n_warmup` steps, then stays.
///
/// Source: transformers `get_constant_schedule_with_warmup`.
pub fn constant_with_warmup(step: u64, n_warmup: u64) -> f64 {
    if step < n_warmup { step as f64 / n_warmup as f64 } else { 1.0 }
}
