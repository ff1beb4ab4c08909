//! Several ranks of the processor against one: the same rows, sums in another order.

use super::*;
use crate::testing::inject_out_of_memory;
use querl_model::{RankFailure, run_ranks};

/// Differences of sums in f32 that are formed in another order, relative to values above 1, over 18 steps. Measured: 8e-7 of losses,
/// 9e-7 of weights; norms, which are large here, 2e-5.
const TOLERANCE: f64 = 5e-6;
const TOLERANCE_OF_NORMS: f64 = 1e-4;

pub(super) type Failures = Vec<RankFailure<TrainError>>;

/// What one rank comes to: summary, metrics, and the bits of what it trained.
pub(super) type OfRank = (SftSummary, Vec<(u64, Metrics)>, Vec<u32>);

impl Setting {
    /// Trains with several ranks, each with a model of its own; `prepare` is called in each rank's thread.
    fn with_ranks(
        &self,
        world_size: usize,
        model: impl Fn() -> Model + Sync,
        sink: &mut Recorder,
        stop: &AtomicBool,
        prepare: impl Fn(usize) + Sync,
    ) -> Result<Vec<OfRank>, Failures> {
        let first_sink = std::sync::Mutex::new(sink);
        run_ranks(world_size, |ranks| {
            prepare(ranks.rank());
            let (model, mut own) = (model(), Recorder::default());
            let mut held = ranks.is_first().then(|| first_sink.lock().unwrap());
            let sink = held.as_mut().map_or(&mut own, |held| &mut **held);
            let vars = model.adapter.as_ref().map_or(model.decoder.vars(), LoraAdapter::vars).clone();
            let summary = self.run_with(&Mesh::of_data(ranks), &model, sink, &Silent, stop)?;
            let values = vars.values().flat_map(|var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            Ok((summary, sink.0.clone(), values.map(f32::to_bits).collect()))
        })
    }
}

fn floats(bits: &[u32]) -> Vec<f64> {
    bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect()
}

pub(super) fn furthest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(1.0)).fold(0.0, f64::max)
}

#[test]
fn several_ranks_learn_what_one_learns_and_all_of_them_the_same() {
    for (model, gradient_checkpointing) in [(adapted as fn() -> Model, false), (adapted, true), (whole, false)] {
        let trained = [1, 2, 3].map(|world_size| {
            let setting =
                Setting { gradient_checkpointing, ..Setting::new(SftConfig { lora_dropout: 0.0, ..config() }) };
            let (mut sink, stop) = (Recorder::default(), AtomicBool::new(false));
            let ranks = setting.with_ranks(world_size, model, &mut sink, &stop, |_| {}).unwrap();
            assert!(ranks.iter().all(|rank| rank.2 == ranks[0].2), "ranks with other weights");
            assert!(ranks.iter().all(|rank| rank.1 == ranks[0].1), "ranks with other figures");
            ranks.into_iter().next().unwrap()
        });
        let [one, others @ ..] = &trained;
        for other in others {
            assert_eq!((other.0.n_steps, other.0.n_tokens), (one.0.n_steps, one.0.n_tokens));
            for (name, tolerance) in [("loss", TOLERANCE), ("grad_norm", TOLERANCE_OF_NORMS), ("eval_loss", TOLERANCE)]
            {
                let column = |run: &OfRank| Recorder(run.1.clone()).column(name);
                let (of_one, of_others) = (column(one), column(other));
                assert!(!of_one.is_empty());
                let difference = furthest(&of_one, &of_others);
                println!("{name}: {difference:.1e}");
                assert!(difference < tolerance, "{name} differs by {difference}");
            }
            let difference = furthest(&floats(&one.2), &floats(&other.2));
            println!("weights: {difference:.1e}");
            assert!(difference > 0.0 && difference < TOLERANCE, "weights differ by {difference}");
        }
    }
}

#[test]
fn ranks_that_were_stopped_go_on_to_the_bytes_of_an_unbroken_training() {
    let [unbroken, stopped] = [(), ()].map(|()| Setting::new(config()));
    let (mut expected, never) = (Recorder::default(), AtomicBool::new(false));
    unbroken.with_ranks(2, adapted, &mut expected, &never, |_| {}).unwrap();
    let mut sink = Recorder::default();
    // The flag is seen by one rank before the other comes to it, or by both: they agree.
    let stop = AtomicBool::new(false);
    let when = |rank: usize| {
        if rank == 1 {
            stop.store(true, Ordering::Relaxed)
        }
    };
    let failures = stopped.with_ranks(2, adapted, &mut sink, &stop, when).map(drop).unwrap_err();
    assert!(failures.iter().all(|failure| failure.to_string().contains("interrupted at sft step 1;")), "{failures:?}");
    stopped.with_ranks(2, adapted, &mut sink, &never, |_| {}).unwrap();
    assert_eq!(sink.0, expected.0);
    assert!(stopped.results() == unbroken.results());
}

/// The rank that lacks memory is not the one that writes: the first keeps what both have done.
#[test]
fn memory_that_one_rank_lacks_ends_both_with_what_was_done_saved() {
    for (part, rank, saved) in [("pass", 0, 6), ("pass", 1, 6), ("evaluation", 1, 7)] {
        let [unbroken, broken] = [(), ()].map(|()| Setting::new(SftConfig { eval_steps: 7, ..config() }));
        let (mut expected, never) = (Recorder::default(), AtomicBool::new(false));
        unbroken.with_ranks(2, adapted, &mut expected, &never, |_| {}).unwrap();
        let mut sink = Recorder::default();
        let arm = |of: usize| {
            if of == rank {
                inject_out_of_memory(7, part)
            }
        };
        let failures = broken.with_ranks(2, adapted, &mut sink, &never, arm).map(drop).unwrap_err();
        let first = failures.iter().find(|failure| failure.rank() == 0).unwrap();
        let RankFailure::Failed { error, .. } = first else { panic!("{first}") };
        assert!(
            matches!(error, TrainError::OutOfMemory { step: 7, saved: Some(found), .. } if *found == saved),
            "{error}"
        );
        broken.with_ranks(2, adapted, &mut sink, &never, |_| {}).unwrap();
        assert_eq!(sink.0, expected.0, "{part} of rank {rank}");
        assert!(broken.results() == unbroken.results(), "{part} of rank {rank}");
    }
}

/// The symptom: the first rank had taken the last step when another lacked memory in it. The next try found nothing left to do, and
/// the newest adapter was never written.
#[test]
fn memory_that_another_rank_lacks_in_the_last_step_costs_no_adapter() {
    let without_val = || Setting { val: Vec::new(), ..Setting::new(config()) };
    let [unbroken, broken] = [(), ()].map(|()| without_val());
    let (mut expected, never) = (Recorder::default(), AtomicBool::new(false));
    unbroken.with_ranks(2, adapted, &mut expected, &never, |_| {}).unwrap();
    let mut sink = Recorder::default();
    let arm = |rank: usize| {
        if rank == 1 {
            inject_out_of_memory(18, "clip")
        }
    };
    let failures = broken.with_ranks(2, adapted, &mut sink, &never, arm).map(drop).unwrap_err();
    let first = failures.iter().find(|failure| failure.rank() == 0).unwrap();
    let RankFailure::Failed { error, .. } = first else { panic!("{first}") };
    assert!(matches!(error, TrainError::OutOfMemory { saved: Some(18), .. }), "{error}");
    assert!(!broken.folder.path().join(LAST).exists());
    broken.with_ranks(2, adapted, &mut sink, &never, |_| {}).unwrap();
    assert_eq!(sink.0, expected.0);
    assert!(broken.results() == unbroken.results());
}

#[test]
fn a_rank_that_panics_ends_the_others_with_its_words() {
    let setting = Setting::new(config());
    let (mut sink, never) = (Recorder::default(), AtomicBool::new(false));
    let failures = setting.with_ranks(3, adapted, &mut sink, &never, |rank| assert!(rank != 2, "no model for it"));
    let failures: Vec<String> = failures.map(drop).unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(failures[0], "rank 2 panicked: no model for it");
    assert!(failures[1..].iter().all(|words| words.ends_with("rank 2 failed: no model for it")), "{failures:?}");
}

#[test]
fn ranks_with_other_weights_are_found_before_anything_is_kept() {
    let setting = Setting::new(config());
    let (mut sink, never) = (Recorder::default(), AtomicBool::new(false));
    let models = std::sync::atomic::AtomicUsize::new(0);
    // The second model is another one: its rank sums the same gradients and steps to other weights.
    let model = || {
        let model = adapted();
        if models.fetch_add(1, Ordering::Relaxed) == 1 {
            let var = model.adapter.as_ref().unwrap().vars().values().next().unwrap();
            var.set(&(var.as_tensor() * 1.5).unwrap()).unwrap();
        }
        model
    };
    let failures = setting.with_ranks(2, model, &mut sink, &never, |_| {}).map(drop).unwrap_err();
    assert!(failures[0].to_string().contains("the weights of the ranks differ"), "{failures:?}");
    assert!(!setting.folder.path().join(STATE).exists());
}
