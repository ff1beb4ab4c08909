//! What calls cost, and whether the limits of plugin.toml cover it.

use crate::corpus::{dialogues, episodes, prompts, samples};
use crate::meter::{self, Peak, Usage, measured};
use crate::report::{Cost, grouped};
use crate::section::{CheckResult, Section, Violation};
use crate::subject::{BatchPort, Subject};
use querl_bundle::RequestedLimits;
use querl_core::config::PluginLimits;
use querl_core::ports::PluginFault;
use querl_plugin::{PluginError, PluginHost, PluginKind};
use std::time::{Duration, Instant};

/// Items of the measured batch.
const N_ITEMS: usize = 64;
/// Calls whose median is reported, if they fit into the time budget.
const N_CALLS: usize = 31;
const TIME_BUDGET: Duration = Duration::from_secs(2);
/// Cold starts whose median is reported.
const N_STARTS: usize = 3;

/// Cost of the calls of one kind; `None` if a call ends in a fault, which another check has reported.
pub(crate) fn of_kind(subject: &Subject<'_>, kind: PluginKind) -> Option<Cost> {
    let (fuel_per_item, micros_per_item, memory_bytes) = calls(subject, kind)?;
    let cold_start_ms = median((0..N_STARTS).map(|_| cold_start(subject, kind)).collect::<Option<Vec<_>>>()?);
    Some(Cost {
        kind,
        fuel_per_item,
        micros_per_item,
        memory_bytes,
        component_bytes: subject.plugin.n_bytes(),
        cold_start_ms: cold_start_ms.as_secs_f64() * 1e3,
    })
}

/// Checks that the limits requested in plugin.toml are at least what the calls of this suite used.
pub(crate) fn check_requested_limits(subject: &Subject<'_>, peak: &Peak, costs: &[Cost], section: &mut Section) {
    const RULE: &str = "a plugin runs under the limits that it asks for in plugin.toml: they cover what it uses";
    let Some(manifest) = subject.plugin.manifest() else {
        return section.skip("asked_limits", RULE, "a bare component: no plugin.toml");
    };
    if manifest.limits == RequestedLimits::default() {
        return section.skip("asked_limits", RULE, "plugin.toml asks for nothing: the host's limits hold");
    }
    let limits = subject.plugin.limits();
    let (n_items, fuel) = peak.nearest_to(|n_items| allowed_fuel(limits, n_items));
    let call_ms = costs.iter().map(call_ms).max().unwrap_or(0);
    section.add("asked_limits", RULE, || {
        compared(&[
            ("fuel", fuel, allowed_fuel(limits, n_items)),
            ("bytes of memory", peak.memory_bytes as u64, limits.memory_bytes as u64),
            ("ms", call_ms, limits.timeout_ms),
        ])
    });
}

fn call_ms(cost: &Cost) -> u64 {
    let n_items = if cost.kind == PluginKind::Prompt { 1 } else { N_ITEMS };
    (cost.micros_per_item * n_items as f64 / 1e3).ceil() as u64
}

/// Fuel allowed for a call with `n_items`.
fn allowed_fuel(limits: &PluginLimits, n_items: usize) -> u64 {
    limits.fuel_per_call.saturating_add(limits.fuel_per_item.saturating_mul(n_items as u64))
}

/// Compares, for each limit, the most that one call used with what is allowed. A stopped call has used all of it.
fn compared(limits: &[(&str, u64, u64)]) -> CheckResult {
    let shown =
        |(of_what, used, allowed): &(&str, u64, u64)| format!("{} of {} {of_what}", grouped(*used), grouped(*allowed));
    match limits.iter().find(|(_, used, allowed)| used >= allowed) {
        Some(limit) => Err(Violation::new("every item of this suite", format!("a call used {}", shown(limit)))),
        None => Ok(limits.iter().map(shown).collect::<Vec<_>>().join(", ")),
    }
}

/// Fuel and microseconds per item, and peak memory.
fn calls(subject: &Subject<'_>, kind: PluginKind) -> Option<(f64, f64, usize)> {
    let settings = subject.settings();
    let usages = match kind {
        PluginKind::Reward | PluginKind::GroupReward => {
            of_batch(&subject.reward(settings).ok()?, &episodes::ordinary_batch(N_ITEMS))
        }
        PluginKind::Filter => of_batch(&subject.filter(settings).ok()?, &samples::ordinary_batch(N_ITEMS)),
        PluginKind::StyleScorer => of_batch(&subject.style_scorer(settings).ok()?, &dialogues::ordinary_batch(N_ITEMS)),
        PluginKind::Prompt => {
            let port = subject.prompts(settings).ok()?;
            let cases = prompts::ordinary();
            several(|| cases.iter().try_for_each(|case| port.messages(case.task, &case.input()).map(drop)))
        }
    }?;
    let per_item = |usage: &Usage, whole: f64| whole / usage.n_items.max(1) as f64;
    let micros = usages.iter().map(|usage| per_item(usage, usage.wall.as_secs_f64() * 1e6)).collect();
    let memory_bytes = usages.iter().map(|usage| usage.memory_bytes).max()?;
    Some((per_item(&usages[0], usages[0].fuel as f64), median(micros), memory_bytes))
}

fn of_batch<B: BatchPort>(port: &B, items: &[B::Item]) -> Option<Vec<Usage>> {
    several(|| port.ask(items).map(drop))
}

/// Usage of repeated calls, after one call that fills caches.
fn several(call: impl Fn() -> Result<(), PluginFault>) -> Option<Vec<Usage>> {
    call().ok()?;
    let start = Instant::now();
    let mut usages = Vec::new();
    while usages.is_empty() || (usages.len() < N_CALLS && start.elapsed() < TIME_BUDGET) {
        let (done, usage) = measured(&call);
        done.ok()?;
        usages.push(usage);
    }
    Some(usages)
}

/// Time from an empty host to the first answer; compiled code is cached.
fn cold_start(subject: &Subject<'_>, kind: PluginKind) -> Option<Duration> {
    let options = subject.options.host_options(&meter::Meter::default());
    let host = PluginHost::new(options).ok()?;
    let start = Instant::now();
    first_answer(subject, &host, kind).ok()?;
    Some(start.elapsed())
}

fn first_answer(subject: &Subject<'_>, host: &PluginHost, kind: PluginKind) -> Result<(), PluginError> {
    let plugin = host.load(subject.plugin.path())?;
    let subject = Subject { host, plugin: &plugin, ..*subject };
    let settings = subject.settings();
    match kind {
        PluginKind::Reward | PluginKind::GroupReward => {
            subject.reward(settings)?.ask(&episodes::ordinary_batch(1)).map(drop)?
        }
        PluginKind::Filter => subject.filter(settings)?.ask(&samples::ordinary_batch(1)).map(drop)?,
        PluginKind::StyleScorer => subject.style_scorer(settings)?.ask(&dialogues::ordinary_batch(1)).map(drop)?,
        PluginKind::Prompt => {
            let (port, cases) = (subject.prompts(settings)?, prompts::ordinary());
            port.messages(cases[0].task, &cases[0].input()).map(drop)?;
        }
    }
    Ok(())
}

/// The upper median; the default value for no values.
fn median<T: Copy + Default + PartialOrd>(mut values: Vec<T>) -> T {
    values.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_usage_is_found() {
        let violation = compared(&[("ms", 2, 5), ("fuel", 1000, 1000)]).unwrap_err();
        assert_eq!(violation.returned, "a call used 1,000 of 1,000 fuel");
    }

    #[test]
    fn limits_and_usage_are_shown() {
        let found = compared(&[("fuel", 1001, 20_000), ("ms", 7, 8)]).unwrap();
        assert_eq!(found, "1,001 of 20,000 fuel, 7 of 8 ms");
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4, 1]), median::<f64>(vec![])), (2.0, 4, 0.0));
    }
}
