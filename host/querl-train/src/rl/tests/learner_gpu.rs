//! Updates of policy and critic on a card beside the CPU; run by tests/cuda/run.sh without a card.

use super::*;
use querl_core::config::BaseDtype;
use querl_model::ComputeDevice;
use std::sync::OnceLock;

fn gpu(index: usize) -> Result<ComputeDevice, crate::TrainError> {
    querl_cuda::install();
    Ok(ComputeDevice::open_gpu(index)?)
}

fn fixtures() -> [Fixture; 2] {
    static GPU: OnceLock<ComputeDevice> = OnceLock::new();
    let card = GPU.get_or_init(|| gpu(0).unwrap()).clone();
    [ComputeDevice::Cpu, card].map(|place| Fixture::on(&place, BaseDtype::Bf16))
}

fn length(values: impl Iterator<Item = f32>) -> f32 {
    values.map(|x| x * x).sum::<f32>().sqrt()
}

/// Two batches learned from on both devices: the figures of each, and how far the policy has gone and in which direction.
fn compare(config: &RlConfig) {
    let fixtures = fixtures();
    let rollouts = [1, 2].map(|seed| fixtures[0].rollouts(config, seed));
    let before = fixtures[0].policy_values();
    let [on_cpu, on_card] = fixtures.each_ref().map(|fixture| {
        let task = fixture.task(config);
        let mut learner = Learner::new(&task).unwrap();
        rollouts.each_ref().map(|rollouts| learn(&mut learner, &task, rollouts, 1))
    });
    let watched = ["actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "critic/vf_loss"];
    for (step, (on_cpu, on_card)) in on_cpu.iter().zip(&on_card).enumerate() {
        for name in watched.iter().filter(|name| on_cpu.contains_key(**name)) {
            let (expected, found) = (on_cpu[*name], on_card[*name]);
            println!("batch {step}: {name} is {found}, {expected} on the cpu");
            let is_near = (found - expected).abs() <= 0.05 * expected.abs().max(0.5);
            assert!(is_near, "batch {step}: {name} is {found}; {expected} on the cpu");
        }
    }
    let [on_cpu, on_card] = fixtures.each_ref().map(Fixture::policy_values);
    let off = length(on_cpu.iter().zip(&on_card).map(|(a, b)| a - b));
    let way = length(on_cpu.iter().zip(&before).map(|(a, b)| a - b));
    println!("policies are {off} apart after a way of {way}");
    // AdamW divides by the gradient's size: where that is about 0, rounding decides the sign of a whole step.
    assert!(way > 0.0 && off < 0.35 * way, "policies are {off} apart after a way of {way}");
}

#[test]
#[ignore = "needs a GPU"]
fn a_policy_and_a_critic_with_an_adapter_learn_on_a_card_as_on_the_cpu() {
    compare(&RlConfig { critic: CriticKind::Adapter, ..config() });
}

#[test]
#[ignore = "needs a GPU"]
fn a_head_on_the_reference_learns_beside_a_policy_on_a_card() {
    compare(&RlConfig { critic: CriticKind::Head, gradient_accumulation_steps: 3, ..config() });
}

#[test]
#[ignore = "needs a GPU"]
fn a_learner_on_a_card_that_was_kept_takes_the_same_next_step() {
    let [_, fixture] = fixtures();
    let config = RlConfig { critic: CriticKind::Adapter, ..config() };
    let (task, rollouts) = (fixture.task(&config), fixture.rollouts(&config, 1));
    let mut learner = Learner::new(&task).unwrap();
    learn(&mut learner, &task, &rollouts, 1);
    let mut state = State::default();
    learner.save(&mut state).unwrap();
    state.put_vars("policy", task.policy.vars());
    let store = StateStore::open(&fixture.folder.path().join("state"), 1, "card");
    store.write(1, &state).unwrap();
    let expected = learn(&mut learner, &task, &rollouts, 2);
    let after = fixture.policy_values();

    let (_, state) = store.newest(&Silent).unwrap().unwrap();
    state.restore_vars("policy", task.policy.vars()).unwrap();
    let mut kept = Learner::new(&task).unwrap();
    kept.restore(&task, &state).unwrap();
    let found = learn(&mut kept, &task, &rollouts, 2);
    let results = |metrics: Metrics| -> Metrics {
        metrics.into_iter().filter(|(name, _)| !name.starts_with("timing_s/")).collect()
    };
    assert_eq!(results(found), results(expected));
    assert_eq!(fixture.policy_values(), after);
}
