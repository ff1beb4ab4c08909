//! Repeated calls, on one thread and on several: the same result and the same fuel.

use crate::corpus::{dialogues, episodes, prompts, samples};
use crate::meter::measured;
use crate::report::grouped;
use crate::section::{CheckResult, Violation};
use crate::shown;
use crate::subject::{BatchPort, Subject};
use querl_core::ports::{ParsedJudgement, PluginFault, Prompts};
use querl_core::records::Rejection;
use querl_plugin::{PluginError, PluginKind, PluginSettings};
use serde_json::json;
use std::time::{Duration, Instant};

/// Time for repeated calls: one call of an interpreted language takes milliseconds.
const TIME_BUDGET: Duration = Duration::from_secs(12);
/// Minimum number of calls, even for a slow plugin.
const FEWEST: usize = 10;

#[derive(Debug, Clone, PartialEq, Eq)]
struct CallResult {
    answers: Vec<String>,
    fuel: u64,
}

/// Repeats the call `n_requested` times, or as often as the time budget allows, and checks that result bytes and fuel are the same.
pub(crate) fn repeat(call: &TestCall, n_requested: usize) -> CheckResult {
    let first = call_once(call).map_err(|fault| Violation::fault(&call.sent, &fault))?;
    let n_repeats = affordable(call, n_requested, TIME_BUDGET);
    for index in 1..n_repeats {
        same(call, &first, &call_once(call), &format!("call {}", grouped(index as u64 + 1)))?;
    }
    Ok(number(n_repeats, n_requested))
}

/// Makes the call on `n_threads` threads at the same time, and checks that result bytes and fuel are those of a single thread.
pub(crate) fn threads(call: &TestCall, n_requested: usize, n_threads: usize) -> CheckResult {
    let first = call_once(call).map_err(|fault| Violation::fault(&call.sent, &fault))?;
    let n_threads = n_threads.max(2);
    let n_repeats = affordable(call, n_requested.div_ceil(n_threads), TIME_BUDGET / n_threads as u32);
    let on_thread = |thread: usize| -> Result<(), Violation> {
        for index in 0..n_repeats {
            let which = format!("call {} of thread {}", grouped(index as u64 + 1), thread + 1);
            same(call, &first, &call_once(call), &which)?;
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

fn call_once(call: &TestCall) -> Result<CallResult, PluginFault> {
    let (answers, usage) = measured(|| (call.run)());
    Ok(CallResult { answers: answers?, fuel: usage.fuel })
}

fn same(
    call: &TestCall,
    first: &CallResult,
    now: &Result<CallResult, PluginFault>,
    which: &str,
) -> Result<(), Violation> {
    let now = match now {
        Ok(now) if now == first => return Ok(()),
        Ok(now) => now,
        Err(fault) => return Err(Violation::fault(format!("{}, {which}", call.sent), fault)),
    };
    let differing = first.answers.iter().zip(&now.answers).find(|(first, now)| first != now);
    let returned = match differing {
        Some((first, now)) => format!("the first call {first}, {which} {now}"),
        None => format!("the same answers; the first call used {} of fuel, {which} {}", first.fuel, now.fuel),
    };
    Err(Violation::new(&call.sent, returned))
}

/// How many of `n_requested` calls fit into `time_budget`, estimated from three calls.
fn affordable(call: &TestCall, n_requested: usize, time_budget: Duration) -> usize {
    let start = Instant::now();
    for _ in 0..3 {
        let _ = (call.run)();
    }
    let one = (start.elapsed() / 3).max(Duration::from_nanos(1));
    let n_affordable = (time_budget.as_nanos() / one.as_nanos()) as usize;
    n_requested.min(n_affordable.max(FEWEST)).max(1)
}

fn number(n_repeats: usize, n_requested: usize) -> String {
    match n_repeats == n_requested {
        true => format!("{} calls", grouped(n_repeats as u64)),
        false => format!(
            "{} calls; {} would take more than {} s",
            grouped(n_repeats as u64),
            grouped(n_requested as u64),
            TIME_BUDGET.as_secs()
        ),
    }
}

/// Items per batch.
const N_ITEMS: usize = 4;

/// A call of the plugin that can be repeated.
pub(crate) struct TestCall {
    /// The input, for reports.
    pub(crate) sent: String,
    pub(crate) run: Box<dyn Fn() -> Result<Vec<String>, PluginFault> + Send + Sync>,
}

/// A call of one kind of plugin with the settings of this test.
pub(crate) fn test_call(
    subject: &Subject<'_>,
    kind: PluginKind,
    settings: &PluginSettings,
) -> Result<TestCall, PluginError> {
    Ok(match kind {
        PluginKind::Reward | PluginKind::GroupReward => {
            batch_call(subject.reward(settings)?, episodes::ordinary_batch(N_ITEMS))
        }
        PluginKind::Filter => batch_call(subject.filter(settings)?, samples::repeated(N_ITEMS)),
        PluginKind::StyleScorer => batch_call(subject.style_scorer(settings)?, dialogues::ordinary_batch(N_ITEMS)),
        PluginKind::Prompt => prompt_calls(subject.prompts(settings)?),
    })
}

/// Configures every kind of the plugin and makes its [`test_call`]; returns the answers or the error.
pub(crate) fn test_results(
    subject: &Subject<'_>,
    settings: &PluginSettings,
) -> Result<Result<Vec<String>, Violation>, PluginError> {
    let mut answers = Vec::new();
    for kind in subject.plugin.kinds() {
        let call = test_call(subject, *kind, settings)?;
        match (call.run)() {
            Ok(more) => answers.extend(more),
            Err(fault) => return Ok(Err(Violation::fault(call.sent, &fault))),
        }
    }
    Ok(Ok(answers))
}

fn batch_call<B: BatchPort + 'static>(port: B, items: Vec<B::Item>) -> TestCall
where
    B::Item: 'static,
{
    let sent = format!("a batch of {}, the first {}", items.len(), shown::item(&items[0]));
    TestCall { sent, run: Box::new(move || port.ask(&items)) }
}

/// Renders the prompt of each task and parses two responses.
fn prompt_calls(port: Box<dyn Prompts>) -> TestCall {
    const REWRITE: &str = "改写后的查询：“孕妇是否适合服用虾青素软胶囊”";
    const JUDGEMENT: &str = "{\"综合得分\": 4.5, \"评分理由\": \"意图完整\"}";
    let cases = prompts::ordinary();
    let sent = format!(
        "a prompt for each task, the first for {}; the answers `{REWRITE}` and `{JUDGEMENT}`",
        shown::compact(&cases[0])
    );
    let run = move || {
        let mut answers = Vec::new();
        for case in &cases {
            answers.push(json!(port.messages(case.task, &case.input())?).to_string());
        }
        answers.push(rewrite(&port.parse_rewrite(REWRITE)?));
        answers.push(judgement(&port.parse_judgement(JUDGEMENT)?));
        Ok(answers)
    };
    TestCall { sent, run: Box::new(run) }
}

fn rewrite(parsed: &Result<String, Rejection>) -> String {
    match parsed {
        Ok(rewrite) => json!({"rewrite": rewrite}).to_string(),
        Err(rejection) => json!({"rejected": rejection}).to_string(),
    }
}

fn judgement(parsed: &Result<ParsedJudgement, Rejection>) -> String {
    match parsed {
        Ok(judged) => json!({"score": judged.score, "reason": judged.reason}).to_string(),
        Err(rejection) => json!({"rejected": rejection}).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::ports::FaultKind;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn round(answer: impl Fn(usize) -> Result<String, PluginFault> + Send + Sync + 'static) -> TestCall {
        let n_calls = AtomicUsize::new(0);
        TestCall {
            sent: "一次调用".into(),
            run: Box::new(move || Ok(vec![answer(n_calls.fetch_add(1, Ordering::Relaxed))?])),
        }
    }

    #[test]
    fn an_answer_that_changes_is_found_on_one_thread_and_on_several() {
        let changing = || round(|n_calls| Ok(if n_calls < 40 { "0.5".into() } else { "0.6".into() }));
        let violation = repeat(&changing(), 100).unwrap_err();
        assert_eq!(violation.returned, "the first call 0.5, call 38 0.6", "1 call, 3 to measure, then 36 more");
        let violation = threads(&changing(), 100, 4).unwrap_err();
        assert!(violation.returned.starts_with("the first call 0.5, call "), "{violation:?}");
    }

    #[test]
    fn a_fault_on_a_later_call_is_found() {
        let fault = |message: &str| {
            let (plugin, version, message) = ("x".into(), "0.1.0".into(), message.into());
            PluginFault { plugin, version, message, kind: FaultKind::Trap, log: Vec::new() }
        };
        let violation =
            repeat(&round(move |n_calls| if n_calls < 9 { Ok("1".into()) } else { Err(fault("off")) }), 100);
        assert_eq!(violation.unwrap_err().returned, "plugin x 0.1.0: off");
    }

    #[test]
    fn other_fuel_for_the_same_answer_is_found() {
        let call = round(|_| Ok("1".into()));
        let first = CallResult { answers: vec!["1".into()], fuel: 7 };
        let now = Ok(CallResult { fuel: 8, ..first.clone() });
        let violation = same(&call, &first, &now, "call 2").unwrap_err();
        assert_eq!(violation.returned, "the same answers; the first call used 7 of fuel, call 2 8");
    }

    #[test]
    fn a_slow_plugin_is_repeated_less_and_the_number_is_reported() {
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
