//! A run that was stopped or killed and then resumed has the files, metrics and episodes of an uninterrupted one, byte for byte.

use super::support::{BATCH, Fault, FaultyEnvironment, Model, Run, config};
use crate::TrainError;
use crate::job::FailureKind;
use crate::testing::stop_at_call;
use querl_core::config::{CriticKind, RlConfig, RlRecord};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Every setting whose state must survive a stop.
pub(crate) fn configs() -> [(&'static str, RlConfig); 3] {
    let record = RlRecord::Full;
    let plain =
        RlConfig { pipeline_parts: 2, kl_target: 0.1, normalize_rewards: true, weight_decay: 0.01, record, ..config() };
    let ahead = RlConfig { off_by_one: true, ..plain.clone() };
    let adapter = RlConfig { critic: CriticKind::Adapter, save_steps: 3, n_samples: 2, max_steps: 3, ..plain.clone() };
    [("plain", plain), ("off by one", ahead), ("critic with an adapter", adapter)]
}

/// Interrupts runs at each call of the environment in turn, resumes them, and compares them with an uninterrupted run.
fn interrupt_at_calls(
    world_size: usize,
    calls: impl Iterator<Item = usize> + Clone,
    fault: fn(usize) -> Fault,
    is_expected: fn(&TrainError) -> bool,
    check: impl Fn(&Run, &Run),
) {
    let model = Model::new();
    for (name, config) in configs() {
        let expected = Run::complete(world_size, &model, &config);
        for call in calls.clone() {
            let mut run = Run::new(FaultyEnvironment::new(fault(call), Duration::ZERO));
            match run.start(world_size, &model, &config) {
                // The run ended before this call.
                Ok(()) => {
                    assert!(call > 8, "{name}: {call} calls are a whole run");
                    break;
                }
                Err(error) => assert!(is_expected(&error), "{name}, {:?}: {error}", fault(call)),
            }
            run.remove_fault();
            run.start(world_size, &model, &config).unwrap();
            run.assert_same(&expected, &format!("{name}, {:?}", fault(call)));
            check(&run, &expected);
        }
    }
}

fn is_kill(error: &TrainError) -> bool {
    error.to_string().contains("killed")
}

fn is_stop(error: &TrainError) -> bool {
    matches!(error, TrainError::Interrupted { stage: "rl", .. })
}

/// Only files on disk survive, including log entries after the newest checkpoint.
#[test]
fn a_run_killed_at_any_call_leaves_what_an_uninterrupted_one_leaves() {
    interrupt_at_calls(1, (1..).step_by(3), Fault::Kill, is_kill, |_, _| {});
    interrupt_at_calls(2, (1..).step_by(4), Fault::Kill, is_kill, |_, _| {});
}

#[test]
fn a_stopped_run_resumes_in_the_middle_of_a_batch() {
    interrupt_at_calls(1, (1..).step_by(2), Fault::Stop, is_stop, |run, expected| {
        let n_scored = run.environment.n_scored.load(Ordering::SeqCst);
        assert_eq!(n_scored, expected.episodes().len(), "a response is scored twice");
    });
    interrupt_at_calls(2, (1..).step_by(3), Fault::Stop, is_stop, |_, _| {});
}

/// Symptom: a stop after the rollouts of a batch waited for all of its updates.
#[test]
fn a_stop_while_a_batch_is_learned_from_discards_the_step_and_the_resumed_run_takes_it_again() {
    let model = Model::new();
    for (name, config) in configs().into_iter().filter(|(_, config)| !config.off_by_one) {
        let expected = Run::complete(1, &model, &config);
        // The passes of the first step before its updates, then some passes of every step.
        for call in (1..=3).chain((8..).step_by(7)) {
            let what = format!("{name}, stopped at pass {call}");
            let mut run = Run::new(FaultyEnvironment::without_fault());
            let stopping = |_| {
                stop_at_call(call);
                Ok(&model)
            };
            let Err(error) = run.start_ranks(1, &config, stopping) else {
                assert!(call > 20, "{name}: {call} passes are a whole run");
                stop_at_call(0);
                break;
            };
            assert!(is_stop(&error), "{what}: {error}");
            if call <= 3 {
                assert!(matches!(error, TrainError::Interrupted { step: 0, .. }), "{what}: {error}");
            }
            run.remove_fault();
            run.start(1, &model, &config).unwrap();
            run.assert_same(&expected, &what);
            let n_scored = run.environment.n_scored.load(Ordering::SeqCst);
            assert_eq!(n_scored, expected.episodes().len(), "{what}: a response is scored twice");
        }
    }
}

/// Steps 0, 2 and 4 are evaluated. A run that stops after each of them gives the policy, logs and best checkpoint of an uninterrupted run.
#[test]
fn a_run_that_stops_after_steps_is_an_uninterrupted_one_in_parts() {
    let model = Model::new();
    for (name, config) in configs() {
        let expected = Run::complete(1, &model, &config);
        let mut run = Run::new(FaultyEnvironment::without_fault());
        for last in [0, 2] {
            run.environment.stop_after = Some(last);
            let error = run.start(1, &model, &config).unwrap_err();
            assert!(matches!(error, TrainError::Interrupted { step, .. } if step == last), "{name}: {error}");
            let evaluated = run.recorder.0.iter().filter(|(_, metrics)| metrics.contains_key("val/reward"));
            assert_eq!(evaluated.map(|(step, _)| *step).max(), Some(last), "{name}");
        }
        // A run that already reached the step stops again; an earlier `stop_after` does not go back.
        run.environment.stop_after = Some(1);
        run.start(1, &model, &config).unwrap_err();
        run.environment.stop_after = None;
        run.start(1, &model, &config).unwrap();
        run.assert_same(&expected, name);
        let n_scored = run.environment.n_scored.load(Ordering::SeqCst);
        assert_eq!(n_scored, expected.episodes().len(), "{name}: a response is scored twice");
    }
}

#[test]
fn a_finished_run_takes_no_further_step() {
    let (model, config) = (Model::new(), config());
    let (expected, mut run) = (Run::complete(1, &model, &config), Run::complete(1, &model, &config));
    let n_scored = config.max_steps * BATCH + 3 * 8;
    assert_eq!(run.environment.n_scored.load(Ordering::SeqCst), n_scored);
    // If only the checkpoints exist, the weights are written again.
    std::fs::remove_dir_all(run.folder.path().join("last")).unwrap();
    run.start(1, &model, &config).unwrap();
    run.assert_same(&expected, "run again");
    assert_eq!(run.environment.n_scored.load(Ordering::SeqCst), n_scored);
}

#[test]
fn a_damaged_newest_checkpoint_costs_a_few_steps_and_no_byte() {
    let (model, config) = (Model::new(), config());
    // The first evaluation, each batch and the second evaluation take two calls each: the third step's batch fails.
    let mut run = Run::new(FaultyEnvironment::new(Fault::Kill(9), Duration::ZERO));
    run.start(1, &model, &config).unwrap_err();
    let newest = run.folder.path().join("state/step-2.state");
    let bytes = std::fs::read(&newest).unwrap();
    std::fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    run.remove_fault();
    run.start(1, &model, &config).unwrap();
    run.assert_same(&Run::complete(1, &model, &config), "from the checkpoint before");
}

/// Regression: a log that had lost its last episode made the run impossible to resume, although an earlier checkpoint fitted.
#[test]
fn a_cut_episode_log_costs_a_few_steps_and_no_byte_and_without_a_checkpoint_that_fits_the_run_stops() {
    let (model, config) = (Model::new(), config());
    let mut run = Run::new(FaultyEnvironment::new(Fault::Kill(9), Duration::ZERO));
    run.start(1, &model, &config).unwrap_err();
    run.remove_fault();
    run.environment.log.lock().unwrap().pop();
    run.start(1, &model, &config).unwrap();
    run.assert_same(&Run::complete(1, &model, &config), "from a checkpoint before");

    let mut empty = Run::new(FaultyEnvironment::new(Fault::Kill(9), Duration::ZERO));
    empty.start(1, &model, &config).unwrap_err();
    empty.remove_fault();
    empty.environment.log.lock().unwrap().clear();
    let error = empty.start(1, &model, &config).unwrap_err();
    assert_eq!(FailureKind::of(&error), FailureKind::Usage);
    let message = error.to_string();
    let expected = "episodes; no earlier checkpoint fits it; run the stage again with `--from rl`";
    assert!(message.starts_with("the log has 0 of ") && message.ends_with(expected), "{message}");
}

/// Symptom: a run that was killed repeatedly within `save_steps` steps restarted from the beginning each time.
#[test]
fn a_checkpoint_is_written_by_time_whatever_save_steps_says() {
    let model = Model::new();
    let timed = |save_interval_s| RlConfig { save_steps: 1000, eval_steps: 1000, save_interval_s, ..config() };
    let newest = |run: &Run| {
        let step = |name: String| name.strip_prefix("step-")?.strip_suffix(".state")?.parse::<u64>().ok();
        let entries = std::fs::read_dir(run.folder.path().join("state")).unwrap();
        entries.filter_map(|entry| step(entry.unwrap().file_name().into_string().unwrap())).max()
    };
    // Scoring a batch takes 0.8 s: at least one of three steps is saved after a second.
    for (save_interval_s, pause_ms, is_saved) in [(0, 0, false), (1, 80, true)] {
        let mut run = Run::new(FaultyEnvironment::new(Fault::KillAtStep(4), Duration::from_millis(pause_ms)));
        run.start(1, &model, &timed(save_interval_s)).unwrap_err();
        assert_eq!(newest(&run) >= Some(1), is_saved, "save_interval_s = {save_interval_s}: {:?}", newest(&run));
        run.remove_fault();
        run.start(1, &model, &timed(save_interval_s)).unwrap();
        run.assert_same(&Run::complete(1, &model, &timed(0)), "killed at the fourth step");
    }
}
