//! The limit of the difference between a rollout server's log-probabilities and those of the training pass.

use super::super::rollout::Rollout;
use super::super::rollout_check::check_mismatch;
use super::record;
use crate::policy::Example;
use crate::{Metrics, TrainError};

/// The outcome for a response with these log-probabilities of the training pass, where the server's are all -1, and a limit of 0.05.
fn checked(logprobs: Vec<f32>) -> Result<Metrics, TrainError> {
    let behaviour_logprobs = vec![-1.0; logprobs.len()];
    let rollout = Rollout {
        example: Example { prompt: vec![1], response: vec![2; logprobs.len()] },
        logprobs: behaviour_logprobs.clone(),
        behaviour_logprobs,
        truncated: false,
        group: 0,
        score: 0.0,
        record: record(),
    };
    check_mismatch(&vec![logprobs], &[rollout], 0.05, 1)
}

#[test]
fn one_token_far_off_does_not_refuse_a_batch_and_many_do() {
    let with = |n_off: usize| {
        let logprobs = (0..1000).map(|token| if token < n_off { -41.0 } else { -1.0 }).collect();
        checked(logprobs)
    };
    // 39 nats for one token of a thousand, capped at 10: a mean of 0.01 per token.
    let metrics = with(1).unwrap();
    assert!((metrics["rollout_corr/k3_kl"] - 0.039).abs() < 1e-6, "{metrics:?}");
    let TrainError::Mismatch { kl, .. } = with(10).unwrap_err() else { panic!("another error") };
    assert!((kl - 0.1).abs() < 1e-9, "{kl}");
}

#[test]
fn a_difference_that_is_no_number_is_refused() {
    assert!(matches!(checked(vec![-1.0, f32::NAN]), Err(TrainError::Mismatch { kl, .. }) if kl.is_nan()));
}
