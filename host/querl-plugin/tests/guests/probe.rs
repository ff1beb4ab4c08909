//! The probe of `querl-conformance --host`, a guest of contract 0.2 in Rust: each mode that violates a rule is contained, with a message
//! that names plugin and version.

use crate::common::{assert_others_are_served, episode, host, host_with, load_bytes, repository, sample};
use querl_core::config::PluginLimits;
use querl_core::ports::{FaultKind, PluginFault, PromptInput, PromptTask};
use querl_core::records::Context;
use querl_plugin::{HostInterface, Plugin, PluginHost, PluginKind, PluginPort, PluginSettings};

const LIMIT: FaultKind = FaultKind::Limit;
const RESULT: FaultKind = FaultKind::Result;
const TRAP: FaultKind = FaultKind::Trap;

/// One of the three probes, which are the crate `host-probe` built with different features.
fn load_probe(host: &PluginHost, name: &str) -> Plugin {
    let path = repository().join(format!("host/querl-conformance/probes/{name}.wasm"));
    load_bytes(host, &std::fs::read(path).unwrap()).unwrap()
}

fn mode(mode: &str) -> PluginSettings {
    [("mode".to_owned(), mode.into())].into()
}

/// Runs each mode, then a valid plugin.
fn assert_contained<'a>(
    cases: &[(&'a str, &str, FaultKind)],
    run: impl Fn(&PluginHost, &Plugin, &'a str) -> Result<String, PluginFault>,
) {
    // Enough fuel to fill all memory; a time limit of a minute, so that it has no effect.
    let limits = PluginLimits { fuel_per_call: 1_000_000_000, timeout_ms: 60_000, ..PluginLimits::default() };
    let host = host_with(limits);
    let probe = load_probe(&host, "plain");
    let found = cases.iter().map(|(mode, expected, kind)| {
        let fault = run(&host, &probe, mode).expect_err(mode);
        assert_others_are_served(&host);
        (mode, expected, fault.kind == *kind, fault)
    });
    let unexpected: Vec<_> = found
        .filter(|(_, expected, is_kind, fault)| {
            let message = fault.to_string();
            let is_named = message.starts_with("plugin host-probe 1.2.3: ") && message.contains(*expected);
            !is_named || !is_kind || message.contains(['\n', '\u{1b}'])
        })
        .collect();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
}

#[test]
fn probes_are_what_the_suite_takes_them_for() {
    let host = host();
    let kinds = [
        ("plain", vec![PluginKind::Prompt, PluginKind::Filter, PluginKind::Reward], 0),
        ("functions", vec![PluginKind::Reward, PluginKind::StyleScorer], HostInterface::ALL.len()),
        ("group", vec![PluginKind::GroupReward], 0),
    ];
    for (name, kinds, n_functions) in kinds {
        let probe = load_probe(&host, name);
        assert_eq!((probe.id(), probe.kinds(), probe.host_functions().len()), ("host-probe", &kinds[..], n_functions));
    }
}

#[test]
fn odd_rewards_are_contained() {
    let cases = [
        (
            "panic",
            "episode `a`: panicked: thread '<unnamed>' (1) panicked at ./tests/guests/host-probe/src/breach.rs:",
            TRAP,
        ),
        ("loop", "episode `a`: used up its fuel", LIMIT),
        ("recurse", "episode `a`: recursed too deeply", TRAP),
        ("allocate", "bytes of memory; `plugins.limits.memory_bytes` allows", LIMIT),
        ("nan", "episode `a`: total is NaN", RESULT),
        ("infinite", "episode `a`: total is inf", RESULT),
        ("above", "episode `a`: total is 1.5; expected a number within the declared range 0 to 1", RESULT),
        ("below", "episode `a`: total is -0.5", RESULT),
        ("component-nan", "component `a` is NaN; expected a finite number", RESULT),
        ("component-large", "component `a` is 2e18; expected at most 1e18 in magnitude", RESULT),
        ("component-name", "component name is `Bad name`; expected 1 to 64 of a to z, 0 to 9 and _", RESULT),
        ("component-repeated", "component `a` appears twice", RESULT),
        ("component-65", "the score has 65 components; expected at most 64", RESULT),
        ("code", "rejected with the code `Bad code`", RESULT),
        ("code-empty", "rejected with the code ``", RESULT),
        ("code-long", "expected 1 to 64 of a to z", RESULT),
        ("flood", "returned more than 16777216 bytes", LIMIT),
        ("utf8", "returned what cannot be read: invalid utf-8", RESULT),
        ("exit", "called exit: a plugin returns, or panics with a message", TRAP),
        ("socket", "plugins have no files, sockets or other input and output", TRAP),
        ("one-short", "episode `a`: returned 0 scores for 1 episodes", RESULT),
        ("one-more", "episode `a`: returned 2 scores for 1 episodes", RESULT),
    ];
    assert_contained(&cases, |host, probe, name| {
        let reward = host.open(probe, &mode(name), PluginPort::reward()).unwrap();
        reward.score_batch(&[episode("a", "好")]).map(|scores| format!("{scores:?}"))
    });
}

#[test]
fn odd_settings_and_ranges_are_refused() {
    let host = host();
    let probe = load_probe(&host, "plain");
    for (name, expected) in [
        ("settings-panic", "panicked: "),
        ("settings-refused", "setting `mode`: expected another mode"),
        ("range-empty", "declares the range 1 to 1; expected two finite numbers, the first below the second"),
        ("range-nan", "declares the range NaN to 1; expected two finite numbers, the first below the second"),
        ("range-large", "declares the range 0 to 10000000000; expected bounds of at most 1e9 in magnitude"),
    ] {
        let message = host.open(&probe, &mode(name), PluginPort::reward()).err().unwrap().to_string();
        assert!(message.starts_with("plugin host-probe 1.2.3: ") && message.contains(expected), "{name}: {message}");
        assert_others_are_served(&host);
    }
}

#[test]
fn odd_filters_are_contained() {
    let cases = [
        ("one-short", "sample `s`: returned 0 verdicts for 1 samples", RESULT),
        ("bad-code", "`Bad code`; expected 1 to 64 of a to z, 0 to 9 and _", RESULT),
    ];
    assert_contained(&cases, |host, probe, name| {
        let filter = host.open(probe, &mode(name), PluginPort::filter()).unwrap();
        filter.check_batch(&[sample("s", "好")]).map(|verdicts| format!("{verdicts:?}"))
    });
}

#[test]
fn odd_prompts_are_contained() {
    let cases = [
        ("no-messages", "returned no messages", RESULT),
        ("assistant-last", "the last message is from `assistant`; expected `user`", RESULT),
        ("system-later", "a system message is not at the start", RESULT),
    ];
    assert_contained(&cases, |host, probe, name| {
        let input = PromptInput { query: "好", context: &Context::default(), rewrite: None };
        let prompts = host.open(probe, &mode(name), PluginPort::prompts()).unwrap();
        prompts.messages(PromptTask::PolicyRewrite, &input).map(|messages| format!("{messages:?}"))
    });
    assert_contained(&[("blank", "returned a blank rewrite; expected a rejection", RESULT)], |host, probe, name| {
        let prompts = host.open(probe, &mode(name), PluginPort::prompts()).unwrap();
        prompts.parse_rewrite("x").map(|rewrite| format!("{rewrite:?}"))
    });
}
