//! Several ranks of the processor against one: rollouts split by query, passes and updates by row.

use crate::resume::{Left, configs, left};
use crate::world::{Fault, Model, Recorder, World, run_with_ranks};
use querl_core::config::RlConfig;
use querl_train::TrainError;
use std::time::Duration;

/// Sums in f32 that are formed in another order, over a few steps of an optimizer that divides small gradients by their size: of
/// figures relative to those above 1. Measured of weights: 2.4e-5.
const TOLERANCE: f64 = 1e-3;
const TOLERANCE_OF_WEIGHTS: f64 = 1e-4;

fn unbroken(world_size: usize, model: &Model, config: &RlConfig) -> Left {
    let (folder, world, mut recorder) = (tempfile::tempdir().unwrap(), World::sound(), Recorder::default());
    let (outcome, _) = run_with_ranks(world_size, model, config, &world, folder.path(), &mut recorder);
    left(outcome, folder.path(), &recorder, &world)
}

/// The same without the files, of which an algorithm without a critic has fewer.
fn learned(world_size: usize, model: &Model, config: &RlConfig) -> Left {
    let (folder, world, mut recorder) = (tempfile::tempdir().unwrap(), World::sound(), Recorder::default());
    let (outcome, adapters) = run_with_ranks(world_size, model, config, &world, folder.path(), &mut recorder);
    assert!(adapters.iter().all(|adapter| *adapter == outcome.adapter), "ranks with other weights");
    let (figures, episodes, summary) = (recorder.figures(), world.logged(), outcome.summary.unwrap());
    Left { adapter: outcome.adapter, files: Vec::new(), figures, episodes, summary }
}

fn furthest(a: impl Iterator<Item = f64>, b: impl Iterator<Item = f64>) -> f64 {
    a.zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(1.0)).fold(0.0, f64::max)
}

fn assert_near(found: &Left, expected: &Left, what: &str) {
    // Answers are the same token by token, and so is what the environment says of them.
    let other = found.episodes.iter().zip(&expected.episodes).find(|(found, expected)| found != expected);
    assert!(other.is_none() && found.episodes.len() == expected.episodes.len(), "{what}: other episodes: {other:?}");
    assert_eq!(found.figures.len(), expected.figures.len(), "{what}");
    for ((step, found), (_, expected)) in found.figures.iter().zip(&expected.figures) {
        assert!(found.keys().eq(expected.keys()), "{what}, step {step}: other figures");
        // Rounding itself, and counts of it, are no figures to compare.
        let is_compared = |name: &&String| !name.starts_with("rollout_probs_diff");
        for name in found.keys().filter(is_compared) {
            let difference = furthest([found[name]].into_iter(), [expected[name]].into_iter());
            assert!(difference < TOLERANCE, "{what}, step {step}: {name} is {} and {}", found[name], expected[name]);
        }
    }
    let values = |left: &Left| left.adapter.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect::<Vec<_>>();
    let difference = furthest(values(found).into_iter(), values(expected).into_iter());
    println!("{what}: weights differ by {difference:.1e}");
    assert!(difference < TOLERANCE_OF_WEIGHTS, "{what}: weights differ by {difference}");
}

#[test]
fn several_ranks_learn_what_one_learns_and_all_of_them_the_same() {
    let model = Model::new();
    for (name, config) in configs() {
        let one = learned(1, &model, &config);
        for world_size in [2, 3] {
            assert_near(&learned(world_size, &model, &config), &one, &format!("{name}, {world_size} ranks"));
        }
    }
}

#[test]
fn two_ranks_that_are_killed_at_any_call_leave_what_two_unbroken_ones_leave() {
    let model = Model::new();
    for (name, config) in configs() {
        let expected = unbroken(2, &model, &config);
        for call in (1..).step_by(4) {
            let (folder, mut recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
            let world = World::new(Fault::PowerCut(call), Duration::ZERO);
            let (first, _) = run_with_ranks(2, &model, &config, &world, folder.path(), &mut recorder);
            match first.summary {
                Ok(_) => break,
                Err(error) => assert!(error.to_string().contains("the power is gone"), "{error}"),
            }
            let world = world.mended();
            let (second, _) = run_with_ranks(2, &model, &config, &world, folder.path(), &mut recorder);
            left(second, folder.path(), &recorder, &world)
                .assert_is(&expected, &format!("{name}, killed at call {call}"));
        }
    }
}

#[test]
fn two_ranks_that_were_told_to_stop_go_on_in_the_middle_of_a_batch() {
    let model = Model::new();
    for (name, config) in configs() {
        let expected = unbroken(2, &model, &config);
        for call in (1..).step_by(3) {
            let (folder, mut recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
            let world = World::new(Fault::Stop(call), Duration::ZERO);
            let (first, _) = run_with_ranks(2, &model, &config, &world, folder.path(), &mut recorder);
            match first.summary {
                Err(TrainError::Interrupted { stage: "rl", .. }) => {}
                Ok(_) => break,
                Err(error) => panic!("{name}, stopped at call {call}: {error}"),
            }
            let world = world.mended();
            let (second, _) = run_with_ranks(2, &model, &config, &world, folder.path(), &mut recorder);
            left(second, folder.path(), &recorder, &world)
                .assert_is(&expected, &format!("{name}, stopped at call {call}"));
        }
    }
}

#[test]
fn an_environment_that_panics_under_several_ranks_is_an_error_and_no_hang() {
    let model = Model::new();
    for (name, config) in configs() {
        let world = World::new(Fault::Panic(4), Duration::ZERO);
        let (folder, mut recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
        let (outcome, _) = run_with_ranks(3, &model, &config, &world, folder.path(), &mut recorder);
        let error = outcome.summary.unwrap_err().to_string();
        assert!(error.contains("call 4 of the world"), "{name}: {error}");
    }
}
