//! Fine-tuning on two cards beside one. Where there is no second card, nothing is run.

use super::ranks::{Failures, OfRank, furthest};
use super::*;
use querl_core::config::BaseDtype;
use querl_model::{ComputeDevice, run_ranks};

fn gpu(index: usize) -> Result<ComputeDevice, TrainError> {
    querl_cuda::install();
    Ok(ComputeDevice::open_gpu(index)?)
}

fn config_on_cards() -> SftConfig {
    SftConfig { lora_dropout: 0.0, learning_rate: 1e-3, max_steps: 6, ..config() }
}

fn adapted_on(place: &ComputeDevice) -> Model {
    let decoder = Decoder::load_on(&base_path(), Weights::Frozen, BaseDtype::Bf16, place).unwrap();
    let adapter = LoraAdapter::load(&golden_folder().join("lora/qwen3-tied"), decoder.config()).unwrap();
    Model { decoder, adapter: Some(adapter.on(place).unwrap()) }
}

fn train_on(
    n_cards: usize,
    setting: &Setting,
    sink: &mut Recorder,
    stop: &AtomicBool,
) -> Result<Vec<OfRank>, Failures> {
    let first_sink = std::sync::Mutex::new(sink);
    run_ranks(n_cards, |ranks| {
        let gpu = gpu(ranks.rank())?;
        let (model, mut own) = (adapted_on(&gpu), Recorder::default());
        let mut held = ranks.is_first().then(|| first_sink.lock().unwrap());
        let sink = held.as_mut().map_or(&mut own, |held| &mut **held);
        let vars = model.adapter.as_ref().unwrap().vars().clone();
        let summary = setting.run_with(&Mesh::of_data(ranks), &model, sink, &Silent, stop)?;
        let values = vars.values().flat_map(|var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        Ok((summary, sink.0.clone(), values.map(f32::to_bits).collect()))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn two_cards_learn_what_one_learns_and_both_the_same() {
    if gpu(1).is_err() {
        return;
    }
    let never = AtomicBool::new(false);
    for gradient_checkpointing in [false, true] {
        let trained = [1, 2].map(|n_cards| {
            let setting = Setting { gradient_checkpointing, ..Setting::new(config_on_cards()) };
            train_on(n_cards, &setting, &mut Recorder::default(), &never).unwrap()
        });
        let [one, two] = &trained;
        assert!(two[0].2 == two[1].2 && two[0].1 == two[1].1, "cards with other weights or figures");
        for (name, tolerance) in [("loss", 0.01), ("eval_loss", 0.01), ("grad_norm", 0.05)] {
            let column = |run: &OfRank| Recorder(run.1.clone()).column(name);
            let difference = furthest(&column(&one[0]), &column(&two[0]));
            println!("{name}: {difference:.1e}");
            assert!(difference < tolerance, "{name} differs by {difference}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_stopped_training_on_two_cards_ends_as_one_that_never_was() {
    if gpu(1).is_err() {
        return;
    }
    let [unbroken, stopped] = [(), ()].map(|()| Setting::new(config_on_cards()));
    let (mut expected, never) = (Recorder::default(), AtomicBool::new(false));
    train_on(2, &unbroken, &mut expected, &never).unwrap();
    let mut sink = Recorder::default();
    let failures = train_on(2, &stopped, &mut sink, &AtomicBool::new(true)).map(drop).unwrap_err();
    assert!(failures[0].to_string().contains("interrupted at sft step 1;"), "{failures:?}");
    train_on(2, &stopped, &mut sink, &never).unwrap();
    assert_eq!(sink.0, expected.0);
    assert!(stopped.results() == unbroken.results());
}
