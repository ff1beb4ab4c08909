//! Learning-rate schedules as factors of the peak rate.

use querl_core::config::LrScheduler;

/// The factor of optimizer step `step`, which counts from 0, of `n_steps`: linear warm-up over `n_warmup` steps, then `kind`.
///
/// Source: transformers `get_{cosine,linear,constant}_schedule_with_warmup`.
pub fn lr_factor(kind: LrScheduler, step: u64, n_warmup: u64, n_steps: u64) -> f64 {
    match kind {
        LrScheduler::Cosine => cosine_with_warmup(step, n_warmup, n_steps),
        LrScheduler::Linear => linear_with_warmup(step, n_warmup, n_steps),
        LrScheduler::Constant => constant_with_warmup(step, n_warmup),
    }
}

/// Rises linearly over `n_warmup` steps, then falls to zero along half a cosine. `step` counts from 0.
///
/// Source: transformers `get_cosine_schedule_with_warmup`.
pub fn cosine_with_warmup(step: u64, n_warmup: u64, n_steps: u64) -> f64 {
    if step < n_warmup {
        return step as f64 / n_warmup as f64;
    }
    let progress = (step - n_warmup) as f64 / (n_steps.saturating_sub(n_warmup)).max(1) as f64;
    (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
}

/// Rises linearly over `n_warmup` steps, then falls linearly to zero. `step` counts from 0.
///
/// Source: transformers `get_linear_schedule_with_warmup`.
pub fn linear_with_warmup(step: u64, n_warmup: u64, n_steps: u64) -> f64 {
    if step < n_warmup {
        return step as f64 / n_warmup as f64;
    }
    n_steps.saturating_sub(step) as f64 / (n_steps.saturating_sub(n_warmup)).max(1) as f64
}

/// Rises linearly over `n_warmup` steps, then is 1.
///
/// Source: transformers `get_constant_schedule_with_warmup`.
pub fn constant_with_warmup(step: u64, n_warmup: u64) -> f64 {
    if step < n_warmup { step as f64 / n_warmup as f64 } else { 1.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Golden values: `tests/reference/sft.py`.
    #[test]
    fn schedules_are_those_of_transformers() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/sft.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let cases = golden["schedules"].as_object().unwrap();
        assert_eq!(cases.len(), 9);
        for (name, case) in cases {
            let kind: LrScheduler = serde_json::from_value(case["kind"].clone()).unwrap();
            let (n_warmup, n_steps) = (case["n_warmup"].as_u64().unwrap(), case["n_steps"].as_u64().unwrap());
            for (step, expected) in case["factors"].as_array().unwrap().iter().enumerate() {
                let found = lr_factor(kind, step as u64, n_warmup, n_steps);
                assert!((found - expected.as_f64().unwrap()).abs() < 1e-8, "{name}, step {step}: {found}");
            }
        }
    }
}
