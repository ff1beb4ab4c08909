use super::process_group::Communicator;
use super::*;
use candle_core::Device;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};

fn within_limits<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    let thread = std::thread::spawn(move || send.send(work()));
    match receive.recv_timeout(Duration::from_secs(60)) {
        Ok(done) => done,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a rank hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().map(drop).unwrap_err()),
    }
}

/// The messages of the failures, in the order in which they occurred.
fn failed<T: Send + std::fmt::Debug>(n: usize, work: impl Fn(Ranks) -> Result<T, RanksError> + Sync) -> Vec<String> {
    run_ranks(n, work).unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn sums_have_the_same_bits_on_every_rank_whichever_comes_first() {
    // Values for which another order of additions gives another rounding.
    let value = |rank: usize, i: usize| [1e8f32, -1e8, 0.3][rank] + i as f32 * 1e-3;
    let expected: Vec<u32> = (0..100_000).map(|i| (value(0, i) + value(1, i) + value(2, i)).to_bits()).collect();
    for late in 0..3 {
        let sums = run_ranks(3, |ranks| {
            if ranks.rank() == late {
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut values: Vec<f32> = (0..100_000).map(|i| value(ranks.rank(), i)).collect();
            ranks.sum(&mut values)?;
            Ok::<_, RanksError>(values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>())
        });
        assert!(sums.unwrap().iter().all(|sum| *sum == expected), "rank {late} came last");
    }
}

#[test]
fn all_reduce_of_a_tensor_keeps_its_shape() {
    let tensor = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0], (2, 2), &Device::Cpu).unwrap();
    let alone = Ranks::alone();
    assert_eq!((alone.rank(), alone.world_size()), (0, 1));
    assert_eq!(alone.sum_tensor(&tensor).unwrap().to_vec2::<f32>().unwrap(), [[1.0, 2.0], [3.0, 4.0]]);
    let sums = run_ranks(2, |ranks| ranks.sum_tensor(&tensor)).unwrap();
    assert_eq!(sums[1].to_vec2::<f32>().unwrap(), [[2.0, 4.0], [6.0, 8.0]]);
}

#[test]
fn all_gather_is_in_the_order_of_ranks() {
    let seen = run_ranks(3, |ranks| {
        (0..200).try_for_each(|round| {
            let all = ranks.all_gather(vec![round, ranks.rank()])?;
            assert_eq!(all.iter().map(|item| item.to_vec()).collect::<Vec<_>>(), [[round, 0], [round, 1], [round, 2]]);
            let received = ranks.broadcast(round % 3, (ranks.rank() == round % 3).then_some(ranks.rank()))?;
            assert_eq!(*received, round % 3);
            ranks.barrier()
        })
    });
    assert_eq!(seen.unwrap().len(), 3);
}

#[test]
fn process_groups_all_reduce_separately() {
    let sums = run_ranks(4, |ranks| {
        let (rows, columns) = (ranks.split(ranks.rank() / 2)?, ranks.split(ranks.rank() % 2)?);
        assert_eq!((rows.world_size(), columns.rank()), (2, ranks.rank() / 2));
        let (mut of_row, mut of_column) = ([ranks.rank() as f32], [ranks.rank() as f32]);
        rows.sum(&mut of_row)?;
        columns.sum(&mut of_column)?;
        Ok::<_, RanksError>((of_row[0], of_column[0]))
    });
    assert_eq!(sums.unwrap(), [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]);
}

#[test]
fn neighbours_are_tensor_parallel() {
    let coordinates = run_ranks(4, |ranks| {
        let mesh = Mesh::new(ranks, 2)?;
        Ok::<_, RanksError>((mesh.all.rank(), mesh.data.rank(), mesh.tensor.rank(), mesh.data.world_size()))
    });
    assert_eq!(coordinates.unwrap(), [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2)]);
    let refused = failed(4, |ranks| Mesh::new(ranks, 3).map(drop));
    assert!(refused[0].contains("4 ranks cannot be divided into copies of 3 ranks each"), "{refused:?}");
}

#[test]
fn all_ranks_receive_the_message_of_the_failed_rank() {
    let failures = failed(3, |ranks| {
        ranks.barrier()?;
        if ranks.rank() == 1 {
            return Err(RanksError::Failed { rank: 1, message: "its GPU is gone".into() });
        }
        ranks.barrier()
    });
    assert_eq!(failures[0], "rank 1: rank 1 failed: its GPU is gone");
    assert_eq!(failures.len(), 3);
    assert!(failures[1..].iter().all(|message| message.ends_with("rank 1 failed: its GPU is gone")));
}

#[test]
fn a_panic_reaches_ranks_of_other_process_groups() {
    for groups in [1, 2] {
        let failures = failed(4, |ranks| {
            let group = ranks.split(ranks.rank() % groups)?;
            assert!(ranks.rank() != 3, "three is no rank");
            group.barrier()?;
            group.barrier()?;
            group.barrier()
        });
        assert!(failures[0].starts_with("rank 3 panicked: three is no rank"), "{failures:?}");
    }
}

#[test]
fn a_rank_that_finishes_early_or_makes_another_call_is_no_deadlock() {
    let failures = failed(2, |ranks| if ranks.rank() == 1 { Ok(()) } else { ranks.barrier() });
    assert!(failures[0].contains("rank 1 failed: it finished while another rank waited for it"), "{failures:?}");
    let failures = failed(2, |ranks| if ranks.rank() == 1 { ranks.sum(&mut [1.0]) } else { ranks.barrier() });
    assert!(failures[0].contains("`all-reduce of 1 values`") && failures[0].contains("`a barrier`"), "{failures:?}");
}

#[test]
fn ranks_share_one_thread_pool() {
    let n_done = AtomicUsize::new(0);
    let done = run_ranks(3, |ranks| {
        (0..50).try_for_each(|_| {
            (0..64usize).into_par_iter().for_each(|_| {
                n_done.fetch_add(1, Ordering::Relaxed);
            });
            ranks.barrier()
        })
    });
    assert!(done.is_ok());
    assert_eq!(n_done.into_inner(), 3 * 50 * 64);
}

/// A communicator whose end waits for those of all ranks.
struct Joint {
    all_end: Arc<Barrier>,
    n_aborted: Arc<AtomicUsize>,
    n_closed: Arc<AtomicUsize>,
}

impl Communicator for Joint {
    fn abort(&self) {
        self.all_end.wait();
        self.n_aborted.fetch_add(1, Ordering::SeqCst);
    }

    fn close(&self) {
        self.all_end.wait();
        self.n_closed.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn communicators_that_wait_for_each_other_are_closed_or_aborted() {
    for fails in [false, true] {
        let ended = within_limits(move || {
            let all_end = [(), ()].map(|()| Arc::new(Barrier::new(3)));
            let (n_aborted, n_closed) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
            let ended = run_ranks(3, |ranks| {
                // Two groups of communicators, which the ranks create in different orders.
                for group in 0..2 {
                    let all_end = all_end[(group + ranks.rank()) % 2].clone();
                    ranks.register(Arc::new(Joint {
                        all_end,
                        n_aborted: n_aborted.clone(),
                        n_closed: n_closed.clone(),
                    }));
                }
                ranks.barrier()?;
                if fails && ranks.rank() == 2 {
                    return Err(RanksError::Failed { rank: 2, message: "its GPU is gone".into() });
                }
                ranks.barrier()
            });
            (ended.is_err(), n_aborted.load(Ordering::SeqCst), n_closed.load(Ordering::SeqCst))
        });
        assert_eq!(ended, if fails { (true, 6, 0) } else { (false, 0, 6) });
    }
}

struct Stuck(Arc<AtomicBool>);

impl Communicator for Stuck {
    fn abort(&self) {
        self.0.store(true, Ordering::SeqCst);
        std::thread::park();
    }

    fn close(&self) {}
}

#[test]
fn a_failure_is_reported_although_an_abort_hangs() {
    let started = Instant::now();
    let was_aborted = Arc::<AtomicBool>::default();
    let failures = failed(2, |ranks| {
        ranks.barrier()?;
        if ranks.rank() == 0 {
            return Err(RanksError::Failed { rank: 0, message: "its GPU is gone".into() });
        }
        let received = ranks.barrier();
        // Registered after the failure, and aborted at once.
        ranks.register(Arc::new(Stuck(was_aborted.clone())));
        received
    });
    assert_eq!(failures[0], "rank 0: rank 0 failed: its GPU is gone");
    assert!(failures.len() == 2 && failures[1].ends_with(": its GPU is gone"), "{failures:?}");
    assert!(was_aborted.load(Ordering::SeqCst) && started.elapsed() < Duration::from_secs(30));
}

#[test]
fn the_first_failure_is_named_first_although_its_rank_ends_last() {
    let failures = failed(2, |ranks| {
        if ranks.rank() == 1 {
            ranks.fail(Error::Msg("its GPU is gone".into()));
            std::thread::sleep(Duration::from_millis(50));
            return Err(RanksError::Failed { rank: 1, message: "its GPU is gone".into() });
        }
        ranks.barrier()
    });
    assert_eq!(failures, ["rank 1: rank 1 failed: its GPU is gone", "rank 0: rank 1 failed: its GPU is gone"]);
}

#[test]
fn values_of_two_types_name_both_ranks() {
    let failures = failed(2, |ranks| {
        let operation = "all-gather".to_owned();
        if ranks.rank() == 0 {
            ranks.exchange(operation, 1u8).map(drop)
        } else {
            ranks.exchange(operation, 1f32).map(drop)
        }
    });
    let names = |a: usize, b: usize| failures[0].contains(&format!("rank {a} is at `all-gather` and rank {b} at"));
    assert!(names(0, 1) || names(1, 0), "{failures:?}");
    assert!(failures[0].contains("with values of another type"), "{failures:?}");
}
