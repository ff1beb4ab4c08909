//! Rollouts that run one step ahead of learning.

use crate::world::{Fault, Model, Recorder, World, config, run};
use querl_core::config::RlConfig;
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

#[test]
fn scoring_hides_behind_learning() {
    let model = Model::new();
    let of = |off_by_one| {
        let config =
            RlConfig { off_by_one, max_steps: 3, eval_steps: 100, ppo_epochs: 8, pipeline_parts: 1, ..config() };
        let recorder = ahead(&model, &config, &World::new(Fault::None, Duration::from_millis(40)));
        let seconds = |name: &str| recorder.get(2, &format!("timing_s/{name}"));
        (seconds("step"), seconds("rollout"))
    };
    let (synchronous_s, rollout_s) = of(false);
    assert!(synchronous_s > rollout_s, "one after the other");
    // The second step's batch was rolled out beside the first update: what the step takes is the longer of both, not the sum.
    let (step_s, rollout_s) = of(true);
    println!(
        "a step takes {synchronous_s:.3} s, with rollouts ahead {step_s:.3} s; its rollouts take {rollout_s:.3} s"
    );
    assert!(rollout_s >= 0.4, "ten responses at 40 ms: {rollout_s}");
    assert!(step_s < synchronous_s, "{step_s} against {synchronous_s}");
}
