//! Fine-tuning on a card beside the CPU; run by tests/cuda/run.sh without a card.

use super::*;
use querl_core::config::BaseDtype;
use querl_model::ComputeDevice;
use std::sync::OnceLock;

fn gpu(index: usize) -> Result<ComputeDevice, TrainError> {
    querl_cuda::install();
    Ok(ComputeDevice::open_gpu(index)?)
}

fn card() -> ComputeDevice {
    static GPU: OnceLock<ComputeDevice> = OnceLock::new();
    GPU.get_or_init(|| gpu(0).unwrap()).clone()
}

fn adapted_on(place: &ComputeDevice) -> Model {
    let decoder = Decoder::load_on(&base_path(), Weights::Frozen, BaseDtype::Bf16, place).unwrap();
    let adapter = LoraAdapter::load(&golden_folder().join("lora/qwen3-tied"), decoder.config()).unwrap();
    Model { decoder, adapter: Some(adapter.on(place).unwrap()) }
}

fn on_card() -> Model {
    adapted_on(&card())
}

fn whole_on(place: &ComputeDevice) -> Model {
    Model { decoder: Decoder::load_on(&base_path(), Weights::Trained, BaseDtype::F32, place).unwrap(), adapter: None }
}

fn whole_on_card() -> Model {
    whole_on(&card())
}

fn with_magnitudes_on(place: &ComputeDevice) -> Model {
    let decoder = Decoder::load_on(&base_path(), Weights::Frozen, BaseDtype::Bf16, place).unwrap();
    let path = golden_folder().join("lora/qwen3-tied-dora-rslora");
    let adapter = LoraAdapter::load(&path, decoder.config()).unwrap();
    Model { decoder, adapter: Some(adapter.on(place).unwrap()) }
}

fn without_dropout() -> SftConfig {
    SftConfig { lora_dropout: 0.0, learning_rate: 1e-3, ..config() }
}

fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let error = |(found, expected): (&f64, &f64)| (found - expected).abs() / expected.abs().max(1.0);
    let worst = found.iter().zip(expected).map(error).fold(0.0, f64::max);
    println!("{what}: worst error {worst:.1e}");
    assert!(worst <= tolerance, "{what}: {found:?}, expected {expected:?}");
}

/// 18 steps with decay, clipping, several passes a step and evaluations in between. Activations are bf16 on the card. At ten times
/// the rate AdamW takes the two apart: the norm of a gradient by half.
#[test]
#[ignore = "needs a GPU"]
fn fine_tuning_on_a_card_follows_that_on_the_cpu() {
    let (_, expected) = Setting::new(without_dropout()).through(&adapted_on(&ComputeDevice::Cpu));
    for gradient_checkpointing in [false, true] {
        let setting = Setting { gradient_checkpointing, ..Setting::new(without_dropout()) };
        let (_, found) = setting.through(&on_card());
        for (name, tolerance) in [("loss", 0.02), ("eval_loss", 0.02), ("grad_norm", 0.05), ("learning_rate", 1e-9)] {
            assert_near(name, &found.column(name), &expected.column(name), tolerance);
        }
    }
}

/// Weights that are trained whole are rounded to bf16 for each product on a card, which the CPU's are not. The limits of norms are
/// what transformers and PEFT come to under autocast in bf16 beside f32, over these steps with the rows in 40 orders
/// (`tests/reference/bf16.py`): 0.022 of all weights and 0.084 with magnitudes at worst, in the order of this test 0.010 and 0.056.
/// Found: 0.011 and 0.070.
#[test]
#[ignore = "needs a GPU"]
fn all_weights_and_magnitudes_are_trained_on_a_card_as_on_the_cpu() {
    let models: [fn(&ComputeDevice) -> Model; 2] = [whole_on, with_magnitudes_on];
    for (model, of_norms) in models.into_iter().zip([0.025, 0.085]) {
        let config = || SftConfig { max_steps: 9, ..without_dropout() };
        let [(_, expected), (_, found)] =
            [ComputeDevice::Cpu, card()].map(|place| Setting::new(config()).through(&model(&place)));
        for (name, tolerance) in [("loss", 0.02), ("eval_loss", 0.02), ("grad_norm", of_norms)] {
            assert_near(name, &found.column(name), &expected.column(name), tolerance);
        }
    }
    let [unbroken, stopped] = [(), ()].map(|()| Setting::new(SftConfig { max_steps: 6, ..without_dropout() }));
    let (expected_summary, expected) = unbroken.through(&whole_on_card());
    let (summary, found) = in_parts(&stopped, &[2, 4], whole_on_card);
    assert_eq!((summary, found.0), (expected_summary, expected.0));
    assert!(stopped.results() == unbroken.results(), "files differ");
}

#[test]
#[ignore = "needs a GPU"]
fn a_stopped_training_on_a_card_ends_as_one_that_never_was() {
    let [unbroken, stopped] = [(), ()].map(|()| Setting::new(without_dropout()));
    let (expected_summary, expected) = unbroken.through(&on_card());
    let (summary, found) = in_parts(&stopped, &[2, 7], on_card);
    assert_eq!((summary, found.0), (expected_summary, expected.0));
    assert!(stopped.results() == unbroken.results(), "files differ");
}

#[test]
#[ignore = "needs a GPU"]
fn a_training_goes_on_on_another_device() {
    let (_, expected) = Setting::new(without_dropout()).through(&adapted_on(&ComputeDevice::Cpu));
    for places in [[card(), ComputeDevice::Cpu], [ComputeDevice::Cpu, card()]] {
        let (setting, mut sink, stop) = (Setting::new(without_dropout()), Recorder::default(), AtomicBool::new(false));
        let [first, second] = places.map(|place| adapted_on(&place));
        setting.run(&first, &mut sink, &StopAfter(7, &stop), &stop).unwrap_err();
        setting.run(&second, &mut sink, &Silent, &AtomicBool::new(false)).unwrap();
        assert_near("loss", &sink.column("loss"), &expected.column("loss"), 0.02);
    }
}
