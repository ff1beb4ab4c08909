//! Scaling of the step time with the number of GPUs, and the number from which more GPUs no longer help.

use super::gpus::Cluster;
use super::roofline::{
    Bound, CRITIC_UPDATE, DECODE, Efficiency, OTHER, POLICY_UPDATE, StepPrediction, Workload, predict,
};
use querl_model::DecoderConfig;
use serde::Serialize;

/// Maximum number of GPUs that are tried.
const MAX_GPUS: usize = 1024;
/// Minimum speedup of a step with twice the GPUs.
const WORTHWHILE: f64 = 1.5;

/// Prediction of a step on one number of GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScalingRow {
    /// Number of GPUs.
    pub n_gpus: usize,
    /// Wall-clock seconds of a step.
    pub seconds: f64,
    /// Whether the step fits in the memory of these GPUs.
    pub fits: bool,
}

/// Predictions for 1, 2, 4, ... GPUs of one model, and the largest number that is worthwhile.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scaling {
    /// Predictions for 1, 2, 4, ... GPUs, up to one doubling beyond `n_gpus`.
    pub rows: Vec<ScalingRow>,
    /// The largest number of GPUs that is worthwhile.
    pub n_gpus: usize,
    /// Why twice as many GPUs are not worthwhile; `None` if all tried numbers are worthwhile.
    pub reason: Option<String>,
}

/// Doubles the number of GPUs until a doubling no longer makes a step 1.5 times as fast. Numbers whose memory is too small do not end the
/// search.
pub fn scaling(shapes: &DecoderConfig, workload: &Workload, cluster: &Cluster, efficiency: &Efficiency) -> Scaling {
    let step = |n_gpus: usize| predict(shapes, workload, &cluster.with_gpus(n_gpus), efficiency);
    let row =
        |n_gpus: usize, step: &StepPrediction| ScalingRow { n_gpus, seconds: step.seconds, fits: step.memory.fits };
    let (mut n_gpus, mut now) = (1, step(1));
    let mut rows = vec![row(1, &now)];
    while n_gpus < MAX_GPUS {
        let next = step(2 * n_gpus);
        rows.push(row(2 * n_gpus, &next));
        if now.memory.fits && now.seconds / next.seconds < WORTHWHILE {
            return Scaling { rows, n_gpus, reason: Some(reason(workload, &now, &next, n_gpus)) };
        }
        (n_gpus, now) = (2 * n_gpus, next);
    }
    Scaling { rows, n_gpus, reason: None }
}

/// The phase with the largest loss of possible speedup with twice the GPUs.
fn reason(workload: &Workload, now: &StepPrediction, next: &StepPrediction, n_gpus: usize) -> String {
    let lost = |name: &str| next.seconds_of(name) - now.seconds_of(name) / 2.0;
    let names = next.phases.iter().map(|phase| phase.name);
    let worst = names.max_by(|one, other| lost(one).total_cmp(&lost(other))).unwrap_or(OTHER);
    let seconds = next.seconds_of(worst);
    let bound = next.phases.iter().find(|phase| phase.name == worst).map_or(Bound::Fixed, |phase| phase.bound);
    match (worst, bound) {
        (DECODE, _) => format!(
            "the decode batch is too small: {:.0} responses per engine, where {:.0} would balance reading the weights with computing; the \
             {:.0} tokens of the longest response take {seconds:.1} s with any number of GPUs",
            next.responses_per_engine, next.balanced_responses, workload.longest_response
        ),
        (POLICY_UPDATE | CRITIC_UPDATE, Bound::Communication) => format!(
            "the {worst} waits {seconds:.1} s for gathered weights and the gradient all-reduce between {} GPUs",
            2 * n_gpus
        ),
        (name, Bound::Communication) => format!("{name} waits {seconds:.1} s for gathered weights"),
        (OTHER, _) => format!("{seconds:.1} s of a step are in no phase: weights to the rollout engine, scheduling"),
        (name, bound) => format!("{name} takes {seconds:.1} s, bound by {}", bound.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::roofline::UpdatedWeights;
    use super::*;

    fn workload(n_queries: usize) -> Workload {
        Workload {
            n_queries,
            n_samples: 4,
            prompt_tokens: 300.0,
            response_tokens: 60.0,
            longest_response: 150.0,
            updated: UpdatedWeights::Adapter(20_000_000),
            has_critic: false,
            has_reference: true,
            epochs: 1,
            mini_batch_size: n_queries * 4,
            tokens_per_pass: 8192,
            gradient_checkpointing: true,
            tensor_parallel: None,
        }
    }

    fn of(shape: &str, cluster: &str, n_queries: usize) -> Scaling {
        let shapes = DecoderConfig::of_shape(shape).unwrap();
        scaling(&shapes, &workload(n_queries), &Cluster::parse(cluster).unwrap(), &Efficiency::default())
    }

    #[test]
    fn larger_batches_scale_further() {
        let (small, large) = (of("qwen2.5-7b", "8xH100", 64), of("qwen2.5-7b", "8xH100", 4096));
        assert!(small.n_gpus < large.n_gpus, "{small:?} {large:?}");
        assert_eq!(small.rows.last().unwrap().n_gpus, 2 * small.n_gpus);
        let seconds: Vec<f64> = large.rows.iter().map(|row| row.seconds).collect();
        assert!(seconds.is_sorted_by(|one, other| one >= other), "{seconds:?}");
    }

    #[test]
    fn a_small_model_with_a_small_batch_is_bound_by_decoding_or_fixed_costs() {
        let reason = of("qwen3-0.6b", "8xH100", 64).reason.unwrap();
        assert!(reason.starts_with("the decode batch is too small") || reason.contains("in no phase"), "{reason}");
    }

    #[test]
    fn gpus_without_a_fast_network_are_bound_by_communication() {
        let workload = Workload { updated: UpdatedWeights::All, tokens_per_pass: 1024, ..workload(4096) };
        let shapes = DecoderConfig::of_shape("qwen2.5-1.5b").unwrap();
        let cluster = Cluster::parse("4x8x4090").unwrap();
        let reason = scaling(&shapes, &workload, &cluster, &Efficiency::default()).reason.unwrap();
        assert!(reason.contains("gathered weights"), "{reason}");
    }
}
