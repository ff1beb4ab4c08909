//! Fine-tuning on one and two GPUs, compared with the CPU and with one GPU. `tests/cuda/run.sh` runs these tests on a simulated GPU.

use super::ranks::column;
use super::*;
use crate::testing::gpu;
use querl_core::config::BaseDtype;
use querl_model::ComputeDevice;
use std::sync::OnceLock;

fn first_gpu() -> ComputeDevice {
    static GPU: OnceLock<ComputeDevice> = OnceLock::new();
    GPU.get_or_init(|| gpu(0).unwrap()).clone()
}

fn lora_on(device: &ComputeDevice, name: &str) -> Model {
    let decoder = Decoder::load_on(&base_path(), Weights::Frozen, BaseDtype::Bf16, device).unwrap();
    let adapter = LoraAdapter::load(&golden_folder().join(name), decoder.config()).unwrap();
    Model { decoder, adapter: Some(adapter.on(device).unwrap()) }
}

fn with_adapter_on(device: &ComputeDevice) -> Model {
    lora_on(device, "lora/qwen3-tied")
}

fn all_weights_on(device: &ComputeDevice) -> Model {
    Model { decoder: Decoder::load_on(&base_path(), Weights::Trained, BaseDtype::F32, device).unwrap(), adapter: None }
}

fn without_dropout() -> SftConfig {
    SftConfig { lora_dropout: 0.0, learning_rate: 1e-3, ..config() }
}

/// 18 steps with weight decay, clipping, several micro-batches per step and evaluations. Activations are bf16 on the GPU. At ten times
/// the learning rate AdamW amplifies the difference: gradient norms differ by half.
#[test]
#[ignore = "needs a GPU"]
fn fine_tuning_on_a_gpu_follows_that_on_the_cpu() {
    let (_, expected) = Setting::new(without_dropout()).complete(&with_adapter_on(&ComputeDevice::Cpu));
    for gradient_checkpointing in [false, true] {
        let setting = Setting { gradient_checkpointing, ..Setting::new(without_dropout()) };
        let (_, found) = setting.complete(&with_adapter_on(&first_gpu()));
        for (name, tolerance) in [("loss", 0.02), ("eval_loss", 0.02), ("grad_norm", 0.05), ("learning_rate", 1e-9)] {
            assert_near(name, &found.column(name), &expected.column(name), tolerance);
        }
    }
}

/// Full fine-tuning rounds weights to bf16 for each product on a GPU, and not on the CPU. The limits of norms are the differences between
/// autocast in bf16 and f32 in transformers and PEFT, over these steps with the rows in 40 orders (`tests/reference/bf16.py`): at most
/// 0.022 with all weights and 0.084 with DoRA, and 0.010 and 0.056 in the order of this test. Measured here: 0.011 and 0.070.
#[test]
#[ignore = "needs a GPU"]
fn full_fine_tuning_and_dora_on_a_gpu_follow_the_cpu() {
    let models: [fn(&ComputeDevice) -> Model; 2] =
        [all_weights_on, |device| lora_on(device, "lora/qwen3-tied-dora-rslora")];
    for (model, of_norms) in models.into_iter().zip([0.025, 0.085]) {
        let config = || SftConfig { max_steps: 9, ..without_dropout() };
        let [(_, expected), (_, found)] =
            [ComputeDevice::Cpu, first_gpu()].map(|device| Setting::new(config()).complete(&model(&device)));
        for (name, tolerance) in [("loss", 0.02), ("eval_loss", 0.02), ("grad_norm", of_norms)] {
            assert_near(name, &found.column(name), &expected.column(name), tolerance);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_stopped_training_on_a_gpu_has_the_files_of_an_uninterrupted_one() {
    let six_steps = SftConfig { max_steps: 6, ..without_dropout() };
    let models: [fn(&ComputeDevice) -> Model; 2] = [all_weights_on, with_adapter_on];
    for (model, config, stops) in [(models[0], six_steps, [2, 4]), (models[1], without_dropout(), [2, 7])] {
        let [complete, stopped] = two_settings(&config);
        let (expected_summary, expected) = complete.complete(&model(&first_gpu()));
        let (summary, found) = stopped.complete_in_parts(&stops, || model(&first_gpu()));
        assert_eq!((summary, found.results()), (expected_summary, expected.results()));
        assert!(stopped.files() == complete.files(), "files differ");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_training_resumes_on_another_device() {
    let (_, expected) = Setting::new(without_dropout()).complete(&with_adapter_on(&ComputeDevice::Cpu));
    for devices in [[first_gpu(), ComputeDevice::Cpu], [ComputeDevice::Cpu, first_gpu()]] {
        let (setting, mut sink) = (Setting::new(without_dropout()), Recorder::default());
        let [first, second] = devices.map(|device| with_adapter_on(&device));
        setting.run(&first, &mut sink, 7).unwrap_err();
        setting.run(&second, &mut sink, NEVER).unwrap();
        assert_near("loss", &sink.column("loss"), &expected.column("loss"), 0.02);
    }
}

fn two_gpu_config() -> SftConfig {
    SftConfig { max_steps: 6, ..without_dropout() }
}

#[test]
#[ignore = "needs a GPU"]
fn two_gpus_learn_what_one_learns_and_have_equal_weights() {
    if gpu(1).is_err() {
        return;
    }
    for gradient_checkpointing in [false, true] {
        let trained = [1, 2].map(|n_gpus| {
            let setting = Setting { gradient_checkpointing, ..Setting::new(two_gpu_config()) };
            let model = |rank| Ok(with_adapter_on(&gpu(rank)?));
            setting.run_ranks(n_gpus, model, &mut Recorder::default(), &AtomicBool::new(false)).unwrap()
        });
        let [one, two] = &trained;
        assert!(two[0].2 == two[1].2 && two[0].1 == two[1].1, "GPUs with other weights or metrics");
        for (name, tolerance) in [("loss", 0.01), ("eval_loss", 0.01), ("grad_norm", 0.05)] {
            let difference = largest_difference(&column(&two[0], name), &column(&one[0], name));
            println!("{name}: {difference:.1e}");
            assert!(difference < tolerance, "{name} differs by {difference}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_stopped_training_on_two_gpus_has_the_files_of_an_uninterrupted_one() {
    if gpu(1).is_err() {
        return;
    }
    let [complete, stopped] = two_settings(&two_gpu_config());
    let run = |setting: &Setting, sink: &mut Recorder, stop| {
        setting.run_ranks(2, |rank| Ok(with_adapter_on(&gpu(rank)?)), sink, &AtomicBool::new(stop)).map(drop)
    };
    let (mut expected, mut sink) = (Recorder::default(), Recorder::default());
    run(&complete, &mut expected, false).unwrap();
    let failures = run(&stopped, &mut sink, true).unwrap_err();
    assert!(failures[0].to_string().contains("interrupted at sft step 1;"), "{failures:?}");
    run(&stopped, &mut sink, false).unwrap();
    assert_eq!(sink.results(), expected.results());
    assert!(stopped.files() == complete.files());
}
