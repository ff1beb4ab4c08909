//! Ranks with a GPU each; if one fails, no other rank hangs, and all report why. Skipped on a machine with one GPU; those that
//! inject a failure of NCCL need the simulator's.
//! All-reduce over two GPUs by NCCL. Skipped on a machine with one GPU.

use super::super::nccl::operation_name;
use super::*;
use candle_core::{Device, Error, Result, Tensor};
use libloading::Library;
use querl_model::{Ranks, RanksError, run_ranks};
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

/// The next injected fault of the calling thread: `Fault` of the simulated NCCL.
#[derive(Clone, Copy)]
enum Fault {
    Join = 1,
    SumInProgress = 2,
    SumOnTheDevice = 3,
}

fn has_two_gpus() -> bool {
    Gpu::new(1).is_ok()
}

/// A function of the simulated NCCL; `None` with NVIDIA's NCCL.
fn simulated<T: Copy>(name: &str) -> Option<T> {
    // SAFETY: it is open already, so that none of its initialisers runs; it is never closed.
    let nccl = Box::leak(Box::new(unsafe { Library::new("libnccl.so.2") }.unwrap()));
    // SAFETY: the callers name the types of `simulator/nccl.cpp`.
    unsafe { nccl.get::<T>(name.as_bytes()) }.ok().map(|function| *function)
}

/// True if faults can be injected.
fn is_simulated() -> bool {
    has_two_gpus() && simulated::<unsafe extern "C" fn(c_int)>("querl_simulator_nccl_refuse").is_some()
}

fn arm(fault: Fault) {
    let refuse: unsafe extern "C" fn(c_int) = simulated("querl_simulator_nccl_refuse").unwrap();
    // SAFETY: it takes any number.
    unsafe { refuse(fault as c_int) }
}

/// Number of times that a communicator was used after its end, or by two threads at once, since the process started.
fn n_misuses() -> usize {
    let count: Option<unsafe extern "C" fn() -> usize> = simulated("querl_simulator_nccl_misuses");
    // SAFETY: it takes nothing and gives a number.
    count.map_or(0, |count| unsafe { count() })
}

/// The first line of an error: candle's errors contain a backtrace if the environment enables it.
fn first_line(words: &str) -> String {
    words.lines().next().unwrap_or_default().to_owned()
}

/// The failures that two ranks with a GPU each report.
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
fn a_rank_that_fails_after_nccl_has_joined_ends_the_others() {
    if !has_two_gpus() {
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
    if !has_two_gpus() {
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
    if !has_two_gpus() {
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
            // The other rank is in NCCL by now, or will be notified when it calls NCCL.
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!panics, "its GPU is gone");
            Err(gone())
        });
        assert!(failures[0].starts_with("rank 1") && failures[0].ends_with(": its GPU is gone"), "{failures:?}");
        assert_eq!(failures[1..], ["rank 0: rank 1 failed: its GPU is gone"]);
    }
}

#[test]
fn a_rank_that_fails_before_its_gpu_joins_ends_those_that_wait_for_it() {
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
    let expected = ": ncclCommInitRankConfig of NCCL 2.28.9 fails: unhandled cuda error";
    assert!(failures[0].contains(expected), "{failures:?}");
    assert_eq!(failures[1..], [failures[0].replacen("rank 1: ", "rank 0: rank 1 failed: ", 1)]);
}

#[test]
fn all_ranks_report_that_a_gpu_has_no_memory_for_an_all_reduce() {
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
fn gpus_in_several_groups_end_together_after_success_and_failure() {
    if !has_two_gpus() {
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

fn on_two_gpus<T: Send>(work: impl Fn(Ranks, Gpu) -> Result<T> + Sync) -> Vec<T> {
    run_ranks(2, |ranks| {
        let gpu = Gpu::new(ranks.rank())?;
        work(ranks, gpu)
    })
    .unwrap()
}

#[test]
fn two_gpus_sum_what_they_hold() {
    if !has_two_gpus() {
        return;
    }
    let of_rank = |rank: usize| random(&mut rng(7 + rank as u64), 100_003);
    let expected: Vec<f32> = of_rank(0).iter().zip(of_rank(1)).map(|(a, b)| a + b).collect();
    let sums = on_two_gpus(|ranks, gpu| {
        let mut values = gpu.upload(&of_rank(ranks.rank()))?;
        gpu.all_reduce(&ranks, &mut values)?;
        gpu.download(&values)
    });
    assert!(sums[0] == sums[1], "ranks with other sums");
    assert_eq!(sums[0], expected);
}

/// Long enough that NCCL writes directly into another GPU's memory.
#[test]
fn two_gpus_sum_64_mib() {
    if !has_two_gpus() {
        return;
    }
    let n_values = 16 << 20;
    let sums = on_two_gpus(|ranks, gpu| {
        let mut values = gpu.upload(&vec![(ranks.rank() + 1) as f32; n_values])?;
        gpu.all_reduce(&ranks, &mut values)?;
        gpu.download(&values)
    });
    assert!(sums.iter().flatten().all(|sum| *sum == 3.0) && sums[1].len() == n_values);
}

#[test]
fn tensors_of_gpus_are_summed_where_they_are_and_stay_as_they_were() {
    if !has_two_gpus() {
        return;
    }
    let sums = on_two_gpus(|ranks, gpu| {
        let tensor = (Tensor::ones((3, 5), candle_core::DType::F32, &gpu.device())? * (ranks.rank() + 1) as f64)?;
        // A part of a tensor, in another order than its storage.
        let part = tensor.narrow(1, 1, 2)?.t()?;
        let sum = ranks.sum_tensor(&part)?;
        ranks.settle(&sum)?;
        assert!(!sum.device().is_cpu() && sum.dims() == [2, 3]);
        let kept = tensor.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
        assert_eq!(kept, vec![vec![(ranks.rank() + 1) as f32; 5]; 3]);
        sum.to_device(&Device::Cpu)?.to_vec2::<f32>()
    });
    assert_eq!(sums, vec![vec![vec![3.0; 3]; 2]; 2]);
}

#[test]
fn two_ranks_on_one_gpu_are_rejected_by_nccl() {
    if !has_two_gpus() {
        return;
    }
    let failures = run_ranks(2, |ranks| {
        let mut values = gpu().upload(&[1f32; 8])?;
        gpu().all_reduce(&ranks, &mut values)
    });
    let failures: Vec<String> = failures.unwrap_err().iter().map(ToString::to_string).collect();
    assert!(failures[0].contains("ncclCommInitRankConfig of NCCL "), "{failures:?}");
}

#[test]
fn groups_of_one_gpu_sum_without_nccl() {
    let mut values = gpu().upload(&[1f32, 2.0]).unwrap();
    gpu().all_reduce(&Ranks::alone(), &mut values).unwrap();
    assert_eq!(gpu().download(&values).unwrap(), [1.0, 2.0]);
    let alone = run_ranks(2, |ranks| Ok::<_, RanksError>(ranks.split(ranks.rank())?.world_size())).unwrap();
    assert_eq!(alone, [1, 1]);
}
