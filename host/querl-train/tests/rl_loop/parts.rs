//! Generation and scoring overlap, and nothing else changes.

use crate::world::{BATCH, Fault, Model, Outcome, Recorder, World, config, run};
use querl_core::config::RlConfig;
use std::time::Duration;

fn run_anew(model: &Model, config: &RlConfig, world: &World) -> (Outcome, Recorder) {
    let folder = tempfile::tempdir().unwrap();
    let mut recorder = Recorder::default();
    let outcome = run(model, config, world, folder.path(), &mut recorder);
    (outcome, recorder)
}

#[test]
fn the_number_of_parts_changes_time_and_nothing_else() {
    let model = Model::new();
    let of_parts = |pipeline_parts| {
        let world = World::new(Fault::None, Duration::from_millis(4));
        let config = RlConfig { pipeline_parts, n_samples: 2, max_steps: 2, ..config() };
        let (outcome, recorder) = run_anew(&model, &config, &world);
        (outcome.summary.unwrap(), outcome.adapter, recorder.figures(), world.logged())
    };
    let (summary, adapter, figures, episodes) = of_parts(1);
    assert_eq!(episodes.len(), 2 * 2 * BATCH + 2 * 8, "two batches, two evaluations of eight rows");
    for n_parts in [2, 5] {
        let found = of_parts(n_parts);
        assert_eq!(found.0, summary, "{n_parts} parts");
        assert!(found.3 == episodes, "{n_parts} parts: other episodes");
        assert_eq!(found.2, figures, "{n_parts} parts");
        assert!(found.1 == adapter, "{n_parts} parts: another adapter");
    }
}

/// That both overlap is shown by events in the pipeline's own tests: a clock is no witness on a busy machine.
#[test]
fn time_in_the_environment_and_in_its_calls_is_counted_over_all_parts() {
    let model = Model::new();
    let world = World::new(Fault::None, Duration::from_millis(2));
    let config = RlConfig { pipeline_parts: 5, n_samples: 4, max_steps: 2, eval_steps: 100, ..config() };
    let (_, recorder) = run_anew(&model, &config, &world);
    let seconds = |name: &str| recorder.get(2, &format!("timing_s/{name}"));
    let slept_s = 0.002 * 4.0 * BATCH as f64;
    assert!(seconds("retrieve") >= slept_s && seconds("reward") >= seconds("retrieve"), "{recorder:?}");
    assert!(seconds("rollout") >= slept_s && seconds("gen") > 0.0, "{recorder:?}");
}

#[test]
fn an_environment_that_fails_or_panics_between_parts_is_an_error_and_no_hang() {
    let model = Model::new();
    // Five calls score the first evaluation, five each batch.
    let config = RlConfig { pipeline_parts: 5, ..config() };
    for (fault, expected) in [(Fault::PowerCut(8), "the power is gone"), (Fault::Panic(8), "call 8 of the world")] {
        let world = World::new(fault, Duration::from_millis(1));
        let (outcome, _) = run_anew(&model, &config, &world);
        let message = outcome.summary.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn stragglers_are_dropped_and_counted_whatever_the_parts() {
    let model = Model::new();
    for pipeline_parts in [1, 5] {
        let config = RlConfig { pipeline_parts, max_drop_rate: 0.5, max_steps: 2, ..config() };
        let (outcome, recorder) = run_anew(&model, &config, &World::new(Fault::Stragglers, Duration::ZERO));
        let summary = outcome.summary.unwrap();
        let n_dropped = recorder.get(1, "dropped/deadline") + recorder.get(2, "dropped/deadline");
        assert!(n_dropped >= 2.0, "two rows in eight are late");
        assert_eq!(summary.dropped, [("deadline".to_owned(), n_dropped as u64)].into());
        assert_eq!(summary.n_episodes, 2 * BATCH as u64);
        let strict = RlConfig { max_drop_rate: 0.05, ..config };
        let (outcome, _) = run_anew(&model, &strict, &World::new(Fault::Stragglers, Duration::ZERO));
        let message = outcome.summary.unwrap_err().to_string();
        assert!(message.contains("of 10 episodes were dropped") && message.contains("deadline"), "{message}");
    }
}
