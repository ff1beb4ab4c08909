//! Several ranks of the processor against one: rollouts split by query, passes and updates by row.

use crate::resume::{Left, configs, left};
use crate::tiny::plain_text;
use crate::world::{BATCH, Fault, Model, Pay, Recorder, World, run_with_ranks};
use querl_core::config::{AdvantageForm, KlPlacement, RlAlgorithm, RlConfig};
use querl_core::ports::PolicyResponse;
use querl_core::records::Reward;
use querl_train::TrainError;
use std::time::Duration;

/// Sums in f32 that are formed in another order, over a few steps of an optimizer that divides small gradients by their size: of
/// figures relative to those above 1. Measured of weights: 2.4e-5.
const TOLERANCE: f64 = 1e-3;
const TOLERANCE_OF_WEIGHTS: f64 = 1e-4;

/// As [`plain_text`] pays, which gives many answers to a query the same, and something for each text besides: no two are alike.
fn every_text_otherwise(response: &PolicyResponse) -> Reward {
    let sum = response.text.bytes().fold(7u64, |sum, byte| sum.wrapping_mul(1_099_511_628_211) ^ u64::from(byte));
    let Reward { total, components } = plain_text(response);
    Reward { total: total + (sum % 997) as f64 / 997.0, components }
}

fn unbroken(world_size: usize, model: &Model, config: &RlConfig) -> Left {
    let (folder, world, mut recorder) = (tempfile::tempdir().unwrap(), World::sound(), Recorder::default());
    let (outcome, _) = run_with_ranks(world_size, model, config, &world, folder.path(), &mut recorder);
    left(outcome, folder.path(), &recorder, &world)
}

/// The same without the files, of which an algorithm without a critic has fewer.
fn learned(world_size: usize, model: &Model, config: &RlConfig, pays: Pay) -> Left {
    let (folder, mut recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
    let world = World::sound().paying(pays);
    let (outcome, adapters) = run_with_ranks(world_size, model, config, &world, folder.path(), &mut recorder);
    assert!(adapters.iter().all(|adapter| *adapter == outcome.adapter), "ranks with other weights");
    let (figures, episodes, summary) = (recorder.figures(), world.logged(), outcome.summary.unwrap());
    Left { adapter: outcome.adapter, files: Vec::new(), figures, episodes, summary }
}

fn furthest(a: impl Iterator<Item = f64>, b: impl Iterator<Item = f64>) -> f64 {
    a.zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(1.0)).fold(0.0, f64::max)
}

fn assert_near(found: &Left, expected: &Left, tolerance_of_weights: f64, what: &str) {
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
    assert!(difference < tolerance_of_weights, "{what}: weights differ by {difference}");
}

#[test]
fn several_ranks_learn_what_one_learns_and_all_of_them_the_same() {
    let model = Model::new();
    for (name, config) in configs() {
        let one = learned(1, &model, &config, plain_text);
        for world_size in [2, 3] {
            let found = learned(world_size, &model, &config, plain_text);
            assert_near(&found, &one, TOLERANCE_OF_WEIGHTS, &format!("{name}, {world_size} ranks"));
        }
    }
}

/// Groups of samples without a critic. Of equal scores GRPO alone: the others have advantages there that are rounding, which a whole
/// mini-batch of them would be learned from.
fn grouped() -> Vec<(&'static str, RlConfig, Pay)> {
    let [(_, plain), ..] = configs();
    let in_loss = RlConfig { kl_placement: KlPlacement::Loss, ..plain.clone() };
    let of_responses = RlConfig { advantage_form: AdvantageForm::Sequence, target_kl: 0.05, ..plain.clone() };
    let of = |config: &RlConfig, algorithm, n_samples| RlConfig { algorithm, n_samples, ..config.clone() };
    let different: Pay = every_text_otherwise;
    vec![
        ("pairs", of(&plain, RlAlgorithm::Grpo, 2), different),
        ("pairs of equal scores", of(&plain, RlAlgorithm::Grpo, 2), plain_text),
        ("fives of equal scores", of(&plain, RlAlgorithm::Grpo, 5), plain_text),
        ("divergence in the loss", of(&in_loss, RlAlgorithm::Grpo, 5), different),
        ("divergence in the loss, equal scores", of(&in_loss, RlAlgorithm::Grpo, 2), plain_text),
        ("leave one out", of(&plain, RlAlgorithm::Rloo, 3), different),
        ("sequence form", of(&of_responses, RlAlgorithm::Grpo, 5), different),
        ("sequence form, leave one out", of(&of_responses, RlAlgorithm::Rloo, 3), different),
    ]
}

/// At a hundredth of the other tests' learning rate, which leaves rounding what it is. At the whole rate single weights whose
/// gradients are nearly nothing move by 3e-4 otherwise within a step, since AdamW divides by the gradient's size, until a draw falls
/// on the other side of an edge between two tokens, and everything after it is another course. That has nothing to do with ranks:
/// one rank whose passes are cut otherwise leaves the course at the same episodes. GRPO of fives with the divergence in the loss:
/// two ranks, and one with `tokens_per_pass` 25 for 512, at 208 of 216; three ranks, and one with 10, at 174.
#[test]
fn groups_of_samples_are_learned_from_as_by_one_rank() {
    let model = Model::new();
    for (name, config, pays) in grouped() {
        let slow = RlConfig { learning_rate: config.learning_rate / 100.0, ..config };
        let one = learned(1, &model, &slow, pays);
        for world_size in [2, 3] {
            let found = learned(world_size, &model, &slow, pays);
            // A tenth of what one update moves a weight by. Measured: 7.4e-7.
            assert_near(&found, &one, slow.learning_rate / 10.0, &format!("{name}, {world_size} ranks"));
        }
    }
}

/// Whatever is learned from it: the first evaluation and the first batch are of the policy that all begin with.
#[test]
fn the_first_steps_episodes_are_those_of_one_rank_at_any_learning_rate() {
    let model = Model::new();
    for (name, config, pays) in grouped() {
        let config = RlConfig { max_steps: 1, ..config };
        let n_first = 8 + BATCH * config.n_samples;
        let [one, two] = [1, 2].map(|world_size| learned(world_size, &model, &config, pays).episodes);
        assert!(one.len() > n_first && one[..n_first] == two[..n_first], "{name}: other episodes");
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
