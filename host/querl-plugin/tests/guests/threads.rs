//! Many threads on few slots: every call is correct, none waits forever, and faults release their slots.

use crate::common::{episode, guest, host, host_with, with_plenty_of_fuel};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const N_THREADS: usize = 64;

/// A host's default.
const N_SLOTS: u32 = 8;

#[test]
fn many_threads_get_their_own_results_among_faults() {
    let host = host();
    let (ordinary, panics) = (guest(&host, "ordinary"), guest(&host, "panics"));
    let (nan, traps) = (guest(&host, "nan"), guest(&host, "divides-by-zero"));
    let barrier = Barrier::new(N_THREADS);
    std::thread::scope(|scope| {
        for thread in 0..N_THREADS {
            let (ordinary, panics, nan, traps, barrier) = (&ordinary, &panics, &nan, &traps, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for turn in 0..20 {
                    let id = format!("{thread}/{turn}");
                    let scored = ordinary.score_batch(&[episode(&id, "好"), episode("b", "好")]).unwrap();
                    assert_eq!(scored.iter().map(|score| score.as_ref().unwrap().total).sum::<f64>(), 1.0);
                    let (plugin, query) = match turn % 3 {
                        0 => (panics, "panic"),
                        1 => (nan, "nan"),
                        _ => (traps, "x"),
                    };
                    let fault = plugin.score_batch(&[episode(&id, query)]).unwrap_err().to_string();
                    assert!(fault.contains(&format!("episode `{id}`: ")), "its own fault: {fault}");
                }
            });
        }
    });
}

/// A lost slot would make one call wait for the end of another, so that a round would take twice as long if each call had a CPU. If every
/// fault lost a slot, the calls would block forever.
#[test]
fn faults_give_their_slots_back() {
    assert_eq!(querl_plugin::HostOptions::default().n_slots, N_SLOTS);
    let host = host_with(with_plenty_of_fuel(300));
    let (loops, panics) = (guest(&host, "infinite-loop"), guest(&host, "panics"));
    let round = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..N_SLOTS {
                scope.spawn(|| loops.score_batch(&[episode("a", "loop")]).unwrap_err());
            }
        });
        start.elapsed()
    };
    let shortest = || (0..3).map(|_| round()).min().unwrap();
    let before = shortest();
    for _ in 0..100 {
        panics.score_batch(&[episode("a", "panic")]).unwrap_err();
    }
    let after = shortest();
    assert!(before >= Duration::from_millis(300) && after < before * 9 / 5, "{before:?} {after:?}");
}
