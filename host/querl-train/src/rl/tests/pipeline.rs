//! Generation overlaps with scoring, and with `off_by_one` with the updates; results do not change.

use super::support::{BATCH, Fault, FaultyEnvironment, Model, Run, assert_learned, config, learning_config, run_rank};
use crate::testing::{Recorder, Watched};
use crate::{Metrics, TrainError};
use querl_core::config::RlConfig;
use querl_model::Mesh;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn the_number_of_parts_changes_time_and_nothing_else() {
    let model = Model::new();
    let run_parts = |pipeline_parts| {
        let mut run = Run::new(FaultyEnvironment::new(Fault::None, Duration::from_millis(4)));
        run.start(1, &model, &RlConfig { pipeline_parts, n_samples: 2, max_steps: 2, ..config() }).unwrap();
        run
    };
    let one = run_parts(1);
    assert_eq!(one.episodes().len(), 2 * 2 * BATCH + 2 * 8, "two batches, two evaluations of eight rows");
    for n_parts in [2, 5] {
        run_parts(n_parts).assert_same(&one, &format!("{n_parts} parts"));
    }
}

/// The pipeline's unit tests check with events that both overlap, because clocks are unreliable on a busy machine.
#[test]
fn environment_and_call_times_are_summed_over_all_parts() {
    let mut run = Run::new(FaultyEnvironment::new(Fault::None, Duration::from_millis(2)));
    let config = RlConfig { pipeline_parts: 5, n_samples: 4, max_steps: 2, eval_steps: 100, ..config() };
    run.start(1, &Model::new(), &config).unwrap();
    let seconds = |name: &str| run.recorder.get(2, &format!("timing_s/{name}"));
    let slept_s = 0.002 * 4.0 * BATCH as f64;
    assert!(seconds("retrieve") >= slept_s && seconds("reward") >= seconds("retrieve"), "{:?}", run.recorder);
    assert!(seconds("rollout") >= slept_s && seconds("gen") > 0.0, "{:?}", run.recorder);
}

#[test]
fn an_environment_that_fails_or_panics_between_parts_is_an_error_and_no_hang() {
    let model = Model::new();
    // Five calls score the first evaluation, five each batch.
    let config = RlConfig { pipeline_parts: 5, ..config() };
    for (fault, expected) in [(Fault::Kill(8), "killed"), (Fault::Panic(8), "call 8 of the environment")] {
        let mut run = Run::new(FaultyEnvironment::new(fault, Duration::from_millis(1)));
        let message = run.start(1, &model, &config).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn stragglers_are_dropped_and_counted_whatever_the_parts() {
    let model = Model::new();
    for pipeline_parts in [1, 5] {
        let run = |max_drop_rate| {
            let config = RlConfig { pipeline_parts, max_drop_rate, max_steps: 2, ..config() };
            let mut run = Run::new(FaultyEnvironment::new(Fault::Stragglers, Duration::ZERO));
            (run.start(1, &model, &config), run)
        };
        let (outcome, tolerant) = run(0.5);
        outcome.unwrap();
        let n_dropped: f64 = [1, 2].map(|step| tolerant.recorder.get(step, "dropped/deadline")).iter().sum();
        assert!(n_dropped >= 2.0, "two rows in eight are late");
        let summary = tolerant.summary.unwrap();
        assert_eq!(summary.dropped, [("deadline".to_owned(), n_dropped as u64)].into());
        assert_eq!(summary.n_episodes, 2 * BATCH as u64);
        let message = run(0.05).0.unwrap_err().to_string();
        assert!(message.contains("of 10 episodes were dropped") && message.contains("deadline"), "{message}");
    }
}

/// The same task and number of steps as for the synchronous loop.
#[test]
fn a_policy_learns_from_off_by_one_rollouts() {
    assert_learned("off by one", &Run::complete(1, &Model::new(), &learning_config(true)).recorder);
}

#[test]
fn the_same_seed_gives_the_same_adapter_though_two_threads_compute() {
    let (model, config) = (Model::new(), RlConfig { off_by_one: true, ..config() });
    let [one, two] = [(), ()].map(|()| Run::complete(1, &model, &config).adapters);
    assert_eq!(one, two);
}

#[test]
fn the_next_batch_is_scored_before_a_step_ends() {
    let model = Model::new();
    let n_scored = |off_by_one| {
        let (folder, environment) = (tempfile::tempdir().unwrap(), FaultyEnvironment::without_fault());
        let config = RlConfig { off_by_one, max_steps: 3, eval_steps: 100, ..config() };
        let mut n_scored = Vec::new();
        let on_record = |step, metrics: &Metrics| {
            // Evaluations are also recorded, with the previous step's number.
            if metrics.contains_key("actor/lr") {
                assert_eq!(n_scored.len() as u64 + 1, step);
                n_scored.push(environment.n_scored.load(Ordering::SeqCst));
            }
        };
        let mut sink = Watched { recorder: Recorder::default(), on_record };
        run_rank(&Mesh::alone(), &model, &config, &environment, folder.path(), &mut sink).0.unwrap();
        n_scored
    };
    let of_batches = |n| 8 + n * BATCH; // the first evaluation is of eight rows
    assert_eq!(n_scored(false), [1, 2, 3].map(of_batches));
    assert_eq!(n_scored(true), [2, 3, 3].map(of_batches));
}

/// Regression: a batch without scored responses was compared with the training pass, which panicked.
#[test]
fn a_completely_rejected_batch_is_too_many_drops() {
    let model = Model::new();
    for first in [1, 2] {
        let mut run = Run::new(FaultyEnvironment::new(Fault::Rejections(first), Duration::ZERO));
        let config = RlConfig { off_by_one: true, max_drop_rate: 1.0, ..config() };
        let error = run.start(1, &model, &config).unwrap_err();
        assert!(matches!(error, TrainError::DropRate { step, n_dropped: BATCH, .. } if step == first), "{error}");
    }
}
