//! Ranks with a GPU each, one of which fails: no other rank hangs, and all report why. Skipped on a machine with one GPU; those that
//! inject a failure of NCCL need the simulator's.

use super::super::all_reduce::operation_name;
use crate::device::Gpu;
use candle_core::{Error, Result};
use libloading::Library;
use querl_model::{Ranks, run_ranks};
use std::ffi::c_int;
use std::sync::mpsc;
use std::time::Duration;

/// The result of `work`, which must not hang.
fn within_limits<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    let thread = std::thread::spawn(move || send.send(work()));
    match receive.recv_timeout(Duration::from_secs(60)) {
        Ok(done) => done,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a rank hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().map(drop).unwrap_err()),
    }
}

/// What goes wrong next in the calling thread: `Fault` of the simulated NCCL.
#[derive(Clone, Copy)]
enum Fault {
    Join = 1,
    SumInProgress = 2,
    SumOnTheDevice = 3,
}

fn has_two_cards() -> bool {
    Gpu::new(1).is_ok()
}

/// A function of the simulated NCCL; `None` of NVIDIA's.
fn simulated<T: Copy>(name: &str) -> Option<T> {
    // SAFETY: it is open already, so that none of its initialisers runs; it is never closed.
    let nccl = Box::leak(Box::new(unsafe { Library::new("libnccl.so.2") }.unwrap()));
    // SAFETY: the callers name the types of `simulator/nccl.cpp`.
    unsafe { nccl.get::<T>(name.as_bytes()) }.ok().map(|function| *function)
}

/// Whether faults can be asked for.
fn is_simulated() -> bool {
    has_two_cards() && simulated::<unsafe extern "C" fn(c_int)>("querl_simulator_nccl_refuse").is_some()
}

fn arm(fault: Fault) {
    let refuse: unsafe extern "C" fn(c_int) = simulated("querl_simulator_nccl_refuse").unwrap();
    // SAFETY: it takes any number.
    unsafe { refuse(fault as c_int) }
}

/// How often a communicator was used after its end, or by two threads at a time, since the process began.
fn n_misuses() -> usize {
    let count: Option<unsafe extern "C" fn() -> usize> = simulated("querl_simulator_nccl_misuses");
    // SAFETY: it takes nothing and gives a number.
    count.map_or(0, |count| unsafe { count() })
}

/// candle's errors bring a backtrace where the environment asks for it.
fn first_line(words: &str) -> String {
    words.lines().next().unwrap_or_default().to_owned()
}

/// What two ranks, each with a card, say of their failures.
fn failures(work: impl Fn(Ranks, Gpu) -> Result<()> + Send + Sync + 'static) -> Vec<String> {
    let failures = within_limits(move || {
        let ended = run_ranks(2, |ranks| {
            let gpu = Gpu::new(ranks.rank())?;
            work(ranks, gpu)
        });
        ended.unwrap_err().iter().map(|failure| first_line(&failure.to_string())).collect::<Vec<_>>()
    });
    assert_eq!(n_misuses(), 0, "a communicator was used after its end or by two threads at a time");
    failures
}

fn gone() -> Error {
    Error::Msg("its GPU is gone".into())
}

#[test]
fn a_rank_that_fails_while_it_loads_after_the_cards_were_joined_ends_the_others() {
    if !has_two_cards() {
        return;
    }
    let failures = failures(|ranks, gpu| {
        gpu.connect(&ranks)?;
        if ranks.rank() == 1 { Err(gone()) } else { ranks.barrier().map_err(Error::wrap) }
    });
    assert_eq!(failures, ["rank 1: its GPU is gone", "rank 0: rank 1 failed: its GPU is gone"]);
}

#[test]
fn a_rank_that_fails_between_sums_wakes_the_one_that_comes_to_the_next() {
    if !has_two_cards() {
        return;
    }
    let failures = failures(|ranks, gpu| {
        let mut values = gpu.upload(&[1f32; 8])?;
        gpu.all_reduce(&ranks, &mut values)?;
        if ranks.rank() == 1 { Err(gone()) } else { gpu.all_reduce(&ranks, &mut values) }
    });
    assert_eq!(failures, ["rank 1: its GPU is gone", "rank 0: rank 1 failed: its GPU is gone"]);
}

#[test]
fn a_rank_that_fails_after_all_met_for_a_sum_wakes_the_one_that_is_in_it() {
    if !has_two_cards() {
        return;
    }
    for panics in [false, true] {
        let failures = failures(move |ranks, gpu| {
            let mut values = gpu.upload(&[1f32; 8])?;
            gpu.connect(&ranks)?;
            if ranks.rank() == 0 {
                gpu.all_reduce(&ranks, &mut values)?;
                return gpu.synchronize().and_then(|()| ranks.barrier().map_err(Error::wrap));
            }
            ranks.barrier_before(operation_name(8)).map_err(Error::wrap)?;
            // The other is in NCCL by now, or comes to it later and hears of it there.
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!panics, "its GPU is gone");
            Err(gone())
        });
        assert!(failures[0].starts_with("rank 1") && failures[0].ends_with(": its GPU is gone"), "{failures:?}");
        assert_eq!(failures[1..], ["rank 0: rank 1 failed: its GPU is gone"]);
    }
}

#[test]
fn a_rank_that_fails_before_its_card_joins_ends_those_that_wait_for_it() {
    if !is_simulated() {
        return;
    }
    let failures = failures(|ranks, gpu| {
        if ranks.rank() == 1 {
            arm(Fault::Join);
        }
        gpu.connect(&ranks)
    });
    assert!(failures[0].starts_with("rank 1: CUDA_ERROR_OUT_OF_MEMORY, "), "{failures:?}");
    assert!(
        failures[0].contains(": ncclCommInitRankConfig of NCCL 2.28.9 fails: unhandled cuda error"),
        "{failures:?}"
    );
    assert_eq!(failures[1..], [failures[0].replacen("rank 1: ", "rank 0: rank 1 failed: ", 1)]);
}

#[test]
fn memory_that_a_card_lacks_for_a_sum_is_what_all_ranks_hear_of() {
    if !is_simulated() {
        return;
    }
    for fault in [Fault::SumInProgress, Fault::SumOnTheDevice] {
        let failures = failures(move |ranks, gpu| {
            let mut values = gpu.upload(&[1f32; 8])?;
            gpu.connect(&ranks)?;
            if ranks.rank() == 1 {
                arm(fault);
            }
            gpu.all_reduce(&ranks, &mut values)?;
            gpu.settle(&ranks)
        });
        assert!(failures[0].starts_with("rank 1: CUDA_ERROR_OUT_OF_MEMORY, "), "{failures:?}");
        assert!(failures[0].contains("Cuda failure 2 'out of memory'"), "{failures:?}");
        assert_eq!(failures[1..], [failures[0].replacen("rank 1: ", "rank 0: rank 1 failed: ", 1)]);
    }
}

#[test]
fn cards_that_were_joined_in_several_groups_end_together_well_or_not() {
    if !has_two_cards() {
        return;
    }
    for fails in [false, true] {
        let ended = within_limits(move || {
            let ended = run_ranks(2, |ranks| {
                let gpu = Gpu::new(ranks.rank())?;
                let again = ranks.split(0).map_err(Error::wrap)?;
                gpu.connect(&ranks)?;
                gpu.connect(&again)?;
                if fails && ranks.rank() == 1 { Err(gone()) } else { Ok(()) }
            });
            ended.map(drop).map_err(|failures| first_line(&failures[0].to_string()))
        });
        assert_eq!(ended, if fails { Err("rank 1: its GPU is gone".into()) } else { Ok(()) });
    }
    assert_eq!(n_misuses(), 0);
}
