//! Optimisations of a model that two cards hold together. Where there is no second card, nothing is run.

use super::*;

pub(crate) fn card(index: usize) -> Result<ComputeDevice, ModelError> {
    querl_cuda::install();
    ComputeDevice::open_gpu(index)
}

fn largest(kept: &Recorder, name: &str) -> f64 {
    column(kept, name).into_iter().fold(0.0, f64::max)
}

/// Both cards draw the same answers, which are those that their training pass would draw: it says how far off they are.
#[test]
#[ignore = "needs a GPU"]
fn two_cards_learn_from_answers_that_they_write_together_as_one_card_does() {
    if card(1).is_err() {
        return;
    }
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    let play = |name: &str, ranks| {
        play_on(On::Cards, model.path(), &folder.path().join(name), ranks, CriticKind::Adapter, NEVER).unwrap()
    };
    let (alone, together) = (play("alone", (1, 1)), play("together", (2, 2)));
    for (name, kept) in [("one card", &alone), ("two cards", &together)] {
        let (mean, max) = (largest(kept, "rollout_probs_diff"), largest(kept, "rollout_probs_diff_max"));
        println!("{name}: rollouts differ by {mean} on average, by {max} at worst");
        assert_eq!(column(kept, "avg_reward").len(), 4);
        assert!(mean > 0.0 && mean < 0.03 && max < 0.2, "{name}: by {mean} on average, by {max} at worst");
    }
    // The first step's answers are of one policy, and most of them the same: rounding decides few draws.
    for (name, tolerance) in [("actor/entropy", 0.05), ("avg_reward", 0.1)] {
        let [found, expected] = [&together, &alone].map(|kept| column(kept, name)[0]);
        println!("{name}: {found} on two cards, {expected} on one");
        assert!((found - expected).abs() <= tolerance * expected.abs(), "{name}: {found} and {expected}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn an_optimisation_that_two_cards_were_stopped_in_goes_on_to_the_same_bytes() {
    if card(1).is_err() {
        return;
    }
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    let output = |name: &str| folder.path().join(name);
    let play = |name: &str, stop_at| {
        play_on(On::Cards, model.path(), &output(name), (2, 2), CriticKind::Adapter, stop_at).unwrap()
    };
    play("through", NEVER);
    assert_eq!(column(&play("stopped", 2), "avg_reward").len(), 2);
    play("stopped", NEVER);
    for file in ["last/adapter_model.safetensors", "last/critic/adapter_model.safetensors"] {
        let bytes = |name: &str| std::fs::read(output(name).join(file)).unwrap();
        assert!(bytes("stopped") == bytes("through"), "{file}");
    }
}
