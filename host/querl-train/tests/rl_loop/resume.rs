//! Stopped or killed, and gone on from: what is left is what an unbroken run leaves, byte for byte.

use crate::world::{BATCH, Fault, Model, Outcome, Recorder, World, config, files, run};
use querl_core::config::{CriticKind, RlConfig};
use querl_train::TrainError;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What must not depend on how often a run was broken.
#[derive(Debug, PartialEq)]
pub(crate) struct Left {
    pub(crate) adapter: Vec<u32>,
    pub(crate) files: Vec<(String, Vec<u8>)>,
    pub(crate) figures: Vec<(u64, querl_train::Metrics)>,
    pub(crate) episodes: Vec<String>,
    pub(crate) summary: querl_train::rl::RlSummary,
}

impl Left {
    /// Piece by piece, so that a difference does not fill the screen.
    pub(crate) fn assert_is(&self, expected: &Self, what: &str) {
        assert_eq!(self.summary, expected.summary, "{what}: summary");
        let difference = self.figures.iter().zip(&expected.figures).find(|(found, expected)| found != expected);
        assert!(difference.is_none(), "{what}: figures: {difference:#?}");
        let difference = self.episodes.iter().zip(&expected.episodes).find(|(found, expected)| found != expected);
        assert!(difference.is_none(), "{what}: episodes: {difference:#?}");
        assert!(self.adapter == expected.adapter, "{what}: the adapter in memory differs");
        for ((name, found), (_, expected)) in self.files.iter().zip(&expected.files) {
            assert!(found == expected, "{what}: {name} differs");
        }
        assert!(self == expected, "{what}: more or fewer lines in a log");
    }
}

pub(crate) fn left(outcome: Outcome, folder: &Path, recorder: &Recorder, world: &World) -> Left {
    Left {
        adapter: outcome.adapter,
        files: files(folder),
        figures: recorder.figures(),
        episodes: world.logged(),
        summary: outcome.summary.unwrap(),
    }
}

fn unbroken(model: &Model, config: &RlConfig) -> Left {
    let (folder, world, mut recorder) = (tempfile::tempdir().unwrap(), World::sound(), Recorder::default());
    let outcome = run(model, config, &world, folder.path(), &mut recorder);
    left(outcome, folder.path(), &recorder, &world)
}

/// Every setting whose state must outlive a stop.
pub(crate) fn configs() -> [(&'static str, RlConfig); 3] {
    let plain = RlConfig { pipeline_parts: 2, kl_target: 0.1, normalize_rewards: true, weight_decay: 0.01, ..config() };
    let ahead = RlConfig { off_by_one: true, ..plain.clone() };
    let adapter = RlConfig { critic: CriticKind::Adapter, save_steps: 3, n_samples: 2, max_steps: 3, ..plain.clone() };
    [("plain", plain), ("off by one", ahead), ("critic with an adapter", adapter)]
}

/// The power goes at one call of the environment after the other: nothing of the process is left but what is on disk, and
/// what came into the logs after the newest checkpoint.
#[test]
fn a_run_that_is_killed_at_any_call_leaves_what_an_unbroken_one_leaves() {
    let model = Model::new();
    for (name, config) in configs() {
        let expected = unbroken(&model, &config);
        for call in (1..).step_by(3) {
            let (folder, mut recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
            let world = World::new(Fault::PowerCut(call), Duration::ZERO);
            let first = run(&model, &config, &world, folder.path(), &mut recorder);
            if first.summary.is_ok() {
                assert!(call > 8, "{name}: {call} calls are a whole run");
                break;
            }
            let world = world.mended();
            let second = run(&model, &config, &world, folder.path(), &mut recorder);
            left(second, folder.path(), &recorder, &world)
                .assert_is(&expected, &format!("{name}, killed at call {call}"));
        }
    }
}

#[test]
fn a_run_that_was_told_to_stop_goes_on_in_the_middle_of_a_batch() {
    let model = Model::new();
    for (name, config) in configs() {
        let expected = unbroken(&model, &config);
        for call in (1..).step_by(2) {
            let (folder, mut recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
            let world = World::new(Fault::Stop(call), Duration::ZERO);
            let first = run(&model, &config, &world, folder.path(), &mut recorder);
            match first.summary {
                Err(TrainError::Interrupted { stage: "rl", .. }) => {}
                // The last evaluation's last part: there is nothing left to stop.
                Ok(_) => break,
                Err(error) => panic!("{name}, stopped at call {call}: {error}"),
            }
            let world = world.mended();
            let second = run(&model, &config, &world, folder.path(), &mut recorder);
            left(second, folder.path(), &recorder, &world)
                .assert_is(&expected, &format!("{name}, stopped at call {call}"));
            let n_scored = world.n_scored.load(Ordering::SeqCst);
            assert_eq!(n_scored, expected.episodes.len(), "{name}, stopped at call {call}: nothing is scored twice");
        }
    }
}

#[test]
fn a_finished_run_that_is_run_again_takes_no_further_step() {
    let (model, config) = (Model::new(), config());
    let (folder, world, mut recorder) = (tempfile::tempdir().unwrap(), World::sound(), Recorder::default());
    run(&model, &config, &world, folder.path(), &mut recorder).summary.unwrap();
    let n_scored = world.n_scored.load(Ordering::SeqCst);
    assert_eq!(n_scored, config.max_steps * BATCH + 3 * 8);
    // Nothing but the checkpoints is left: the weights are written again.
    std::fs::remove_dir_all(folder.path().join("last")).unwrap();
    let before = unbroken(&model, &config);
    let outcome = run(&model, &config, &world, folder.path(), &mut recorder);
    left(outcome, folder.path(), &recorder, &world).assert_is(&before, "run again");
    assert_eq!(world.n_scored.load(Ordering::SeqCst), n_scored);
}

#[test]
fn a_damaged_newest_checkpoint_costs_a_few_steps_and_no_byte() {
    let (model, config) = (Model::new(), config());
    let expected = unbroken(&model, &config);
    let (folder, mut recorder) = (tempfile::tempdir().unwrap(), Recorder::default());
    // Two calls score the first evaluation, each batch and the second evaluation: the third step's batch fails.
    let world = World::new(Fault::PowerCut(9), Duration::ZERO);
    run(&model, &config, &world, folder.path(), &mut recorder).summary.unwrap_err();
    let newest = folder.path().join("state/step-2.state");
    let bytes = std::fs::read(&newest).unwrap();
    std::fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    let world = world.mended();
    let outcome = run(&model, &config, &world, folder.path(), &mut recorder);
    left(outcome, folder.path(), &recorder, &world).assert_is(&expected, "from the checkpoint before");
}
