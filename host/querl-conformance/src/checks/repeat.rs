//! The same call again, and on several threads.

use super::round::Round;
use super::{Broken, Found};
use crate::meter;
use crate::report::grouped;
use querl_core::ports::PluginFault;
use std::time::{Duration, Instant};

/// What repeating may take: a second call of a slow language takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(12);
/// However slow a plugin is.
const FEWEST: usize = 10;

/// One call's answers and instructions.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Once {
    answers: Vec<String>,
    fuel: u64,
}

/// `n_wanted` times in a row the same bytes and the same fuel, or as many times as fit into our patience.
pub(crate) fn repeat(round: &Round, n_wanted: usize) -> Found {
    let first = once(round).map_err(|fault| Broken::fault(&round.sent, &fault))?;
    let n_repeats = affordable(round, n_wanted, PATIENCE);
    for index in 1..n_repeats {
        same(round, &first, &once(round), &format!("call {}", grouped(index as u64 + 1)))?;
    }
    Ok(number(n_repeats, n_wanted))
}

/// On `n_threads` threads at the same time the same bytes and the same fuel as alone.
pub(crate) fn threads(round: &Round, n_wanted: usize, n_threads: usize) -> Found {
    let first = once(round).map_err(|fault| Broken::fault(&round.sent, &fault))?;
    let n_threads = n_threads.max(2);
    let n_repeats = affordable(round, n_wanted.div_ceil(n_threads), PATIENCE / n_threads as u32);
    let on_thread = |thread: usize| -> Result<(), Broken> {
        for index in 0..n_repeats {
            let which = format!("call {} of thread {}", grouped(index as u64 + 1), thread + 1);
            same(round, &first, &once(round), &which)?;
        }
        Ok(())
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let on_thread = &on_thread;
        let running: Vec<_> = (0..n_threads).map(|thread| scope.spawn(move || on_thread(thread))).collect();
        running.into_iter().map(|thread| thread.join().expect("a check does not panic")).collect()
    });
    found.into_iter().collect::<Result<(), _>>()?;
    Ok(format!("{n_threads} threads, {} calls each", grouped(n_repeats as u64)))
}

fn once(round: &Round) -> Result<Once, PluginFault> {
    let (answers, usage) = meter::measured(|| (round.run)());
    Ok(Once { answers: answers?, fuel: usage.fuel })
}

fn same(round: &Round, first: &Once, now: &Result<Once, PluginFault>, which: &str) -> Result<(), Broken> {
    let now = match now {
        Ok(now) if now == first => return Ok(()),
        Ok(now) => now,
        Err(fault) => return Err(Broken::fault(format!("{}, {which}", round.sent), fault)),
    };
    let differing = first.answers.iter().zip(&now.answers).find(|(first, now)| first != now);
    let returned = match differing {
        Some((first, now)) => format!("the first call {first}, {which} {now}"),
        None => format!("the same answers; the first call used {} of fuel, {which} {}", first.fuel, now.fuel),
    };
    Err(Broken::new(&round.sent, returned))
}

/// How many of `n_wanted` calls fit into `patience`, by the time that three take.
fn affordable(round: &Round, n_wanted: usize, patience: Duration) -> usize {
    let start = Instant::now();
    for _ in 0..3 {
        let _ = (round.run)();
    }
    let one = (start.elapsed() / 3).max(Duration::from_nanos(1));
    let n_affordable = (patience.as_nanos() / one.as_nanos()) as usize;
    n_wanted.min(n_affordable.max(FEWEST)).max(1)
}

fn number(n_repeats: usize, n_wanted: usize) -> String {
    match n_repeats == n_wanted {
        true => format!("{} calls", grouped(n_repeats as u64)),
        false => format!(
            "{} calls; {} would take more than {} s",
            grouped(n_repeats as u64),
            grouped(n_wanted as u64),
            PATIENCE.as_secs()
        ),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_core::ports::FaultKind;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn round(answer: impl Fn(usize) -> Result<String, PluginFault> + Send + Sync + 'static) -> Round {
        let n_calls = AtomicUsize::new(0);
        Round {
            sent: "一次调用".into(),
            run: Box::new(move || Ok(vec![answer(n_calls.fetch_add(1, Ordering::Relaxed))?])),
        }
    }

    #[test]
    fn an_answer_that_changes_is_found_on_one_thread_and_on_several() {
        let changing = || round(|n_calls| Ok(if n_calls < 40 { "0.5".into() } else { "0.6".into() }));
        let broken = repeat(&changing(), 100).unwrap_err();
        assert_eq!(broken.returned, "the first call 0.5, call 38 0.6", "1 call, 3 to measure, then 36 more");
        let broken = threads(&changing(), 100, 4).unwrap_err();
        assert!(broken.returned.starts_with("the first call 0.5, call "), "{broken:?}");
    }

    #[test]
    fn a_fault_on_a_later_call_is_found() {
        let fault = |message: &str| PluginFault {
            plugin: "x".into(),
            version: "0.1.0".into(),
            message: message.into(),
            kind: FaultKind::Trap,
        };
        let broken = repeat(&round(move |n_calls| if n_calls < 9 { Ok("1".into()) } else { Err(fault("off")) }), 100);
        assert_eq!(broken.unwrap_err().returned, "plugin x 0.1.0: off");
    }

    #[test]
    fn other_fuel_for_the_same_answer_is_found() {
        let round = round(|_| Ok("1".into()));
        let first = Once { answers: vec!["1".into()], fuel: 7 };
        let now = Ok(Once { fuel: 8, ..first.clone() });
        let broken = same(&round, &first, &now, "call 2").unwrap_err();
        assert_eq!(broken.returned, "the same answers; the first call used 7 of fuel, call 2 8");
    }

    #[test]
    fn a_slow_plugin_is_repeated_less_and_the_number_is_said() {
        let slow = round(|_| {
            std::thread::sleep(Duration::from_millis(20));
            Ok("1".into())
        });
        let n = affordable(&slow, 1000, Duration::from_millis(400));
        assert!((FEWEST..=20).contains(&n), "{n}");
        assert_eq!(number(570, 1000), "570 calls; 1,000 would take more than 12 s");
        assert_eq!(repeat(&round(|_| Ok("1".into())), 1000).unwrap(), "1,000 calls");
    }
}
