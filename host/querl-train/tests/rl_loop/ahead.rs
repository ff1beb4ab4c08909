//! Rollouts that run one step ahead of learning.

use crate::world::{BATCH, Fault, Model, Recorder, World, config, run};
use querl_core::config::RlConfig;
use querl_train::{MetricSink, Metrics, TrainError};
use std::sync::atomic::Ordering;
use std::time::Duration;

fn ahead(model: &Model, config: &RlConfig, world: &World) -> Recorder {
    let folder = tempfile::tempdir().unwrap();
    let mut recorder = Recorder::default();
    run(model, config, world, folder.path(), &mut recorder).summary.unwrap();
    recorder
}

/// The task of the synchronous loop, in as many steps.
#[test]
fn a_policy_learns_from_rollouts_that_run_ahead() {
    let model = Model::new();
    let config = RlConfig {
        off_by_one: true,
        max_steps: 50,
        batch_size: 32,
        mini_batch_size: 32,
        ppo_epochs: 4,
        learning_rate: 2e-2,
        kl_coef: 0.0,
        ent_coef: 0.0,
        max_grad_norm: 5.0,
        eval_steps: 50,
        save_steps: 50,
        ..config()
    };
    let recorder = ahead(&model, &config, &World::sound());
    let mean = |steps: std::ops::Range<u64>| {
        let n = (steps.end - steps.start) as f64;
        steps.map(|step| recorder.get(step, "avg_reward")).sum::<f64>() / n
    };
    let (first, last) = (mean(1..11), mean(41..51));
    assert!(last > 0.8 && last > first + 0.2, "{first} to {last}");
}

#[test]
fn the_same_seed_gives_the_same_adapter_though_two_threads_compute() {
    let model = Model::new();
    let config = RlConfig { off_by_one: true, ..config() };
    let outcome = || {
        let folder = tempfile::tempdir().unwrap();
        run(&model, &config, &World::sound(), folder.path(), &mut Recorder::default()).adapter
    };
    assert_eq!(outcome(), outcome());
}

/// Notes how many responses were scored when a step was recorded.
struct Watch<'a> {
    world: &'a World,
    n_scored: Vec<usize>,
}

impl MetricSink for Watch<'_> {
    fn record(&mut self, _: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        // Evaluations are recorded too, under the step before.
        if metrics.contains_key("actor/lr") {
            assert_eq!(self.n_scored.len() as u64 + 1, step);
            self.n_scored.push(self.world.n_scored.load(Ordering::SeqCst));
        }
        Ok(())
    }

    fn mark(&mut self) -> std::io::Result<u64> {
        Ok(0)
    }

    fn rewind(&mut self, _: u64) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_next_batch_is_scored_before_a_step_ends() {
    let model = Model::new();
    let n_scored = |off_by_one| {
        let (folder, world) = (tempfile::tempdir().unwrap(), World::sound());
        let config = RlConfig { off_by_one, max_steps: 3, eval_steps: 100, ..config() };
        let mut watch = Watch { world: &world, n_scored: Vec::new() };
        run(&model, &config, &world, folder.path(), &mut watch).summary.unwrap();
        watch.n_scored
    };
    let of_batches = |n| 8 + n * BATCH; // the first evaluation is of eight rows
    assert_eq!(n_scored(false), [1, 2, 3].map(of_batches));
    assert_eq!(n_scored(true), [2, 3, 3].map(of_batches));
}

/// The symptom: a batch with nothing to learn from was compared with the training pass, which panicked.
#[test]
fn a_batch_that_is_wholly_rejected_is_too_many_drops() {
    let model = Model::new();
    for first in [1, 2] {
        let (folder, world) = (tempfile::tempdir().unwrap(), World::new(Fault::Refusal(first), Duration::ZERO));
        let config = RlConfig { off_by_one: true, max_drop_rate: 1.0, ..config() };
        let outcome = run(&model, &config, &world, folder.path(), &mut Recorder::default());
        let error = outcome.summary.unwrap_err();
        assert!(matches!(error, TrainError::DropRate { step, n_dropped: BATCH, .. } if step == first), "{error}");
    }
}
