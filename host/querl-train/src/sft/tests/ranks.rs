//! Data-parallel ranks on the CPU compared with one rank: the same rows in another order of sums.

use super::*;
use querl_core::ports::Silent;
use querl_model::{RankFailure, run_ranks};

/// Differences of f32 sums in another order, relative to values above 1, over 18 steps. Measured: 8e-7 for losses, 9e-7 for weights, 2e-5
/// for gradient norms, which are large here.
const TOLERANCE: f64 = 5e-6;
const NORM_TOLERANCE: f64 = 1e-4;

type Failures = Vec<RankFailure<TrainError>>;

/// Result of one rank: summary, metrics, and the bits of the trained weights.
pub(super) type RankResult = (SftSummary, Vec<(u64, Metrics)>, Vec<u32>);

pub(super) fn column(result: &RankResult, name: &str) -> Vec<f64> {
    Recorder(result.1.clone()).column(name)
}

impl Setting {
    /// Trains with several ranks. `model` creates the model of each rank, in the rank's thread.
    pub(super) fn run_ranks(
        &self,
        world_size: usize,
        model: impl Fn(usize) -> Result<Model, TrainError> + Sync,
        sink: &mut Recorder,
        stop: &AtomicBool,
    ) -> Result<Vec<RankResult>, Failures> {
        let first_sink = std::sync::Mutex::new(sink);
        run_ranks(world_size, |ranks| {
            let (model, mut own) = (model(ranks.rank())?, Recorder::default());
            let mut held = ranks.is_first().then(|| first_sink.lock().unwrap());
            let sink = held.as_mut().map_or(&mut own, |held| &mut **held);
            let summary = self.run_rank(&Mesh::of_data(ranks), &model, sink, (&Silent, stop))?;
            let policy = model.policy();
            let values = policy.vars().values().flat_map(|var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            Ok((summary, sink.results(), values.map(f32::to_bits).collect()))
        })
    }

    /// Two ranks that are not stopped. `prepare` is called in the thread of each rank.
    fn run_two_ranks(&self, sink: &mut Recorder, prepare: impl Fn(usize) + Sync) -> Result<(), Failures> {
        let model = |rank| {
            prepare(rank);
            Ok(with_adapter())
        };
        self.run_ranks(2, model, sink, &AtomicBool::new(false)).map(drop)
    }
}

fn first_error(failures: Failures) -> TrainError {
    match failures.into_iter().find(|failure| failure.rank() == 0) {
        Some(RankFailure::Failed { error, .. }) => error,
        other => panic!("the first rank: {other:?}"),
    }
}

#[test]
fn several_ranks_learn_what_one_learns_and_have_equal_weights() {
    for (model, gradient_checkpointing) in
        [(with_adapter as fn() -> Model, false), (with_adapter, true), (all_weights, false)]
    {
        let trained = [1, 2, 3].map(|world_size| {
            let setting =
                Setting { gradient_checkpointing, ..Setting::new(SftConfig { lora_dropout: 0.0, ..config() }) };
            let (mut sink, stop) = (Recorder::default(), AtomicBool::new(false));
            let ranks = setting.run_ranks(world_size, |_| Ok(model()), &mut sink, &stop).unwrap();
            assert!(ranks.iter().all(|rank| rank.2 == ranks[0].2), "ranks with other weights");
            assert!(ranks.iter().all(|rank| rank.1 == ranks[0].1), "ranks with other metrics");
            ranks.into_iter().next().unwrap()
        });
        let [one, others @ ..] = &trained;
        for other in others {
            assert_eq!((other.0.n_steps, other.0.n_tokens), (one.0.n_steps, one.0.n_tokens));
            for (name, tolerance) in [("loss", TOLERANCE), ("grad_norm", NORM_TOLERANCE), ("eval_loss", TOLERANCE)] {
                let (of_one, of_other) = (column(one, name), column(other, name));
                assert!(!of_one.is_empty());
                let difference = largest_difference(&of_other, &of_one);
                println!("{name}: {difference:.1e}");
                assert!(difference < tolerance, "{name} differs by {difference}");
            }
            let floats = |bits: &[u32]| bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect::<Vec<_>>();
            let difference = largest_difference(&floats(&other.2), &floats(&one.2));
            println!("weights: {difference:.1e}");
            assert!(difference > 0.0 && difference < TOLERANCE, "weights differ by {difference}");
        }
    }
}

#[test]
fn stopped_ranks_resume_to_the_files_of_an_uninterrupted_training() {
    let [complete, stopped] = two_settings(&config());
    let (mut expected, mut sink) = (Recorder::default(), Recorder::default());
    complete.run_two_ranks(&mut expected, |_| {}).unwrap();
    // One rank may see the flag before the other one sets it: they have to agree on the stop.
    let stop = AtomicBool::new(false);
    let model = |rank: usize| {
        stop.fetch_or(rank == 1, Ordering::Relaxed);
        Ok(with_adapter())
    };
    let failures = stopped.run_ranks(2, model, &mut sink, &stop).map(drop).unwrap_err();
    assert!(failures.iter().all(|failure| failure.to_string().contains("interrupted at sft step 1;")), "{failures:?}");
    stopped.run_two_ranks(&mut sink, |_| {}).unwrap();
    assert_eq!(sink.results(), expected.results());
    assert!(stopped.files() == complete.files());
}

/// Trains twice on two ranks: uninterrupted, and with an out-of-memory error on one rank, then resumed. Returns the step that was saved.
fn saved_step_after_out_of_memory(
    new: impl Fn() -> Setting,
    (step, phase, failing): (u64, &'static str, usize),
) -> u64 {
    let [complete, broken] = [new(), new()];
    let (mut expected, mut sink) = (Recorder::default(), Recorder::default());
    complete.run_two_ranks(&mut expected, |_| {}).unwrap();
    let inject = |rank| {
        if rank == failing {
            inject_out_of_memory(step, phase);
        }
    };
    let error = first_error(broken.run_two_ranks(&mut sink, inject).unwrap_err());
    let TrainError::OutOfMemory { step: found, saved: Some(saved), .. } = error else { panic!("{error}") };
    assert_eq!(found, step);
    assert!(saved < step || !broken.folder.path().join(LAST).exists());
    broken.run_two_ranks(&mut sink, |_| {}).unwrap();
    assert_eq!(sink.results(), expected.results(), "{phase} of rank {failing}");
    assert!(broken.files() == complete.files(), "{phase} of rank {failing}");
    saved
}

/// Also if the failing rank is not the one that writes.
#[test]
fn out_of_memory_on_one_rank_ends_both_with_the_state_saved() {
    for (phase, rank, saved) in [("pass", 0, 6), ("pass", 1, 6), ("evaluation", 1, 7)] {
        let new = || Setting::new(SftConfig { eval_steps: 7, ..config() });
        assert_eq!(saved_step_after_out_of_memory(new, (7, phase, rank)), saved);
    }
}

/// Regression: another rank ran out of memory in the last step, which the first rank had completed. The resumed run had no steps to run,
/// and `last` was never written.
#[test]
fn out_of_memory_on_another_rank_in_the_last_step_loses_no_adapter() {
    let without_val = || Setting { val: Vec::new(), ..Setting::new(config()) };
    assert_eq!(saved_step_after_out_of_memory(without_val, (18, "clip", 1)), 18);
}

#[test]
fn a_panicking_rank_ends_the_others_with_its_message() {
    let setting = Setting::new(config());
    let model = |rank| {
        assert!(rank != 2, "no model for it");
        Ok(with_adapter())
    };
    let outcome = setting.run_ranks(3, model, &mut Recorder::default(), &AtomicBool::new(false));
    let failures: Vec<String> = outcome.map(drop).unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(failures[0], "rank 2 panicked: no model for it");
    assert!(failures[1..].iter().all(|message| message.ends_with("rank 2 failed: no model for it")), "{failures:?}");
}

#[test]
fn ranks_with_other_weights_are_detected_before_anything_is_saved() {
    let setting = Setting::new(config());
    // The second rank starts from other weights: with the same summed gradients, its weights stay different.
    let model = |rank| {
        let model = with_adapter();
        if rank == 1 {
            let var = model.policy().vars().values().next().unwrap().clone();
            var.set(&(var.as_tensor() * 1.5).unwrap()).unwrap();
        }
        Ok(model)
    };
    let outcome = setting.run_ranks(2, model, &mut Recorder::default(), &AtomicBool::new(false));
    let failures = outcome.map(drop).unwrap_err();
    assert!(failures[0].to_string().contains("the weights of the ranks differ"), "{failures:?}");
    assert!(!setting.folder.path().join(STATE).exists());
}
