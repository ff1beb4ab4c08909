//! `plugins.limits.on_limit = "drop"`: the item that hits a limit is dropped and counted, the others are processed.
#![allow(clippy::unwrap_used)]

mod common;

use common::{cpu_time, episode, guest, host_with, load_guest};
use querl_core::config::{OnLimit, PluginLimits};
use querl_core::ports::{FaultKind, Filter, RewardModel};
use querl_core::records::{Dialogue, Episode, Message, Sample, Verdict};
use querl_plugin::{PluginPort, PluginSettings};
use std::time::Duration;

/// A time limit of a minute, so that fuel is the effective limit.
fn limits(max_dropped: u64) -> PluginLimits {
    let (on_limit, timeout_ms) = (OnLimit::Drop, 60_000);
    PluginLimits { fuel_per_call: 0, fuel_per_item: 1_000_000, timeout_ms, on_limit, max_dropped, ..Default::default() }
}

/// The total or the rejection code of each episode.
fn outcomes(plugin: &dyn RewardModel, queries: &[&str]) -> Vec<String> {
    let batch: Vec<Episode> = queries.iter().enumerate().map(|(n, query)| episode(&format!("e{n}"), query)).collect();
    let scored = plugin.score_batch(&batch).unwrap();
    scored.iter().map(|scored| scored.as_ref().map_or_else(|r| r.code.clone(), |s| s.total.to_string())).collect()
}

#[test]
fn episodes_that_hit_a_limit_are_dropped_and_the_others_scored() {
    let plugin = guest(&host_with(limits(10)), "infinite-loop");
    let dropped = "plugin_limit";
    assert_eq!(outcomes(&*plugin, &["好", "loop", "好", "loop"]), ["0.5", dropped, "0.5", dropped]);
    assert_eq!(outcomes(&*plugin, &["loop"]), [dropped]);
    assert_eq!(outcomes(&*plugin, &["好", "好"]), ["0.5", "0.5"]);
    let rejection = plugin.score_batch(&[episode("a", "loop")]).unwrap().remove(0).unwrap_err();
    assert!(rejection.detail.starts_with("used up its fuel"), "{}", rejection.detail);
}

#[test]
fn too_many_dropped_items_are_a_fault_that_counts_all_of_the_plugin() {
    let host = host_with(limits(2));
    let (one, other) = (guest(&host, "infinite-loop"), guest(&host, "infinite-loop"));
    assert_eq!(outcomes(&*one, &["loop", "好"]), ["plugin_limit", "0.5"]);
    assert_eq!(outcomes(&*other, &["loop"]), ["plugin_limit"]);
    let fault = one.score_batch(&[episode("a", "好"), episode("step-9/b/0", "loop")]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TooManyDropped);
    let message = fault.to_string();
    assert!(
        message.starts_with(
            "plugin guest-infinite-loop 0.2.0: dropped 3 items at limits; `plugins.limits.max_dropped` allows 2 (the last: \
             episode `step-9/b/0`: used up its fuel"
        ),
        "{message}"
    );
    assert_eq!(outcomes(&*guest(&host, "ordinary"), &["好"]), ["0.5"], "another plugin has a count of its own");
}

#[test]
fn batch_has_the_fuel_of_all_its_items() {
    // An item of 100,000 turns needs at least as much; one of 1 turn, and a call of `describe`, far less.
    let plugin = guest(&host_with(PluginLimits { fuel_per_item: 40_000, ..limits(10) }), "works");
    let among = |n_light: usize| [vec!["100000"], vec!["1"; n_light]].concat();
    assert_eq!(outcomes(&*plugin, &among(0)), ["plugin_limit"]);
    assert_eq!(outcomes(&*plugin, &among(1)), ["plugin_limit", "0.5"]);
    assert!(outcomes(&*plugin, &among(31)).iter().all(|outcome| outcome == "0.5"), "its neighbours leave it enough");
}

/// Regression: items that together exceeded a limit were each dropped, because each was run without the fuel of the others.
#[test]
fn items_that_are_too_much_together_are_kept_where_each_is_within_the_fuel_of_the_batch() {
    let plugin = guest(&host_with(PluginLimits { fuel_per_item: 40_000, ..limits(10) }), "works");
    assert!(outcomes(&*plugin, &["100000"; 20]).iter().all(|outcome| outcome == "0.5"));
}

/// Regression: the time for finding the items to drop was unlimited.
#[test]
fn finding_what_to_drop_ends_after_ten_times_the_time_of_a_call() {
    let (fuel_per_item, timeout_ms) = (u64::MAX / 1_000_000, 50);
    let host = host_with(PluginLimits { fuel_per_item, timeout_ms, ..limits(1000) });
    let filter =
        host.open(&load_guest(&host, "filter-loops").unwrap(), &PluginSettings::new(), PluginPort::filter()).unwrap();
    let samples: Vec<_> = (0..64).map(|id| sample(id, "loop")).collect();
    let start = cpu_time();
    let fault = filter.check_batch(&samples).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Limit);
    let sentence = "finding the samples to drop took longer than 500 ms, 10 times `plugins.limits.timeout_ms`: many hit a \
                    limit; raise that limit, or set `plugins.limits.on_limit` to \"fail\" (a batch from sample `s";
    assert!(fault.message.starts_with(sentence), "{fault}");
    let plugin = guest(&host, "infinite-loop");
    let batch: Vec<_> = (0..64).map(|id| episode(&format!("e{id}"), "loop")).collect();
    let fault = plugin.score_batch(&batch).unwrap_err();
    assert!(fault.message.contains("finding the episodes to drop took longer than 500 ms"), "{fault}");
    let used = cpu_time() - start;
    assert!(used < Duration::from_secs(5), "{used:?}");
}

#[test]
fn what_is_no_limit_is_a_fault_though_limits_drop() {
    let plugin = guest(&host_with(limits(10)), "panics");
    let fault = plugin.score_batch(&[episode("a", "好"), episode("b", "panic")]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Trap);
    assert!(fault.to_string().contains("episode `b`: panicked"), "{fault}");
}

fn sample(id: usize, query: &str) -> Sample {
    common::sample(&format!("s{id}"), query)
}

fn looping_filter(max_dropped: u64) -> Box<dyn Filter> {
    let host = host_with(limits(max_dropped));
    host.open(&load_guest(&host, "filter-loops").unwrap(), &PluginSettings::new(), PluginPort::filter()).unwrap()
}

#[test]
fn filter_drops_the_samples_at_which_it_loops_and_sees_the_others_in_order() {
    let filter = looping_filter(10);
    let queries = ["a", "b", "loop", "a", "c", "loop", "b", "d"];
    let samples: Vec<_> = queries.iter().enumerate().map(|(id, query)| sample(id, query)).collect();
    let code = |verdict: &Verdict| match verdict {
        Verdict::Keep => "keep".to_owned(),
        Verdict::Drop { code, .. } => code.clone(),
    };
    let codes: Vec<_> = filter.check_batch(&samples).unwrap().iter().map(code).collect();
    let (limit, again) = ("plugin_limit", "duplicate");
    assert_eq!(codes, ["keep", "keep", limit, again, "keep", limit, again, "keep"]);
    let codes: Vec<_> = filter.check_batch(&[sample(0, "loop")]).unwrap().iter().map(code).collect();
    assert_eq!(codes, [limit]);
}

/// Regression: in the search for the item, a part of the batch had only the fuel of that part.
#[test]
fn filter_keeps_a_heavy_sample_in_front_of_one_that_loops() {
    let queries = ["200000", "a", "b", "loop", "a", "c"];
    let samples: Vec<_> = queries.iter().enumerate().map(|(id, query)| sample(id, query)).collect();
    assert_ne!(looping_filter(10).check_batch(&samples[..1]).unwrap(), [Verdict::Keep], "more than its share");
    let verdicts = looping_filter(10).check_batch(&samples).unwrap();
    let dropped: Vec<_> = verdicts.iter().map(|verdict| *verdict != Verdict::Keep).collect();
    assert_eq!(dropped, [false, false, false, true, true, false], "{verdicts:?}");
}

#[test]
fn filter_names_the_sample_that_was_one_too_many() {
    let fault = looping_filter(1).check_batch(&[sample(0, "loop"), sample(1, "a"), sample(2, "loop")]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TooManyDropped);
    assert!(fault.to_string().contains("dropped 2 items at limits; `plugins.limits.max_dropped` allows 1"), "{fault}");
    assert!(fault.to_string().contains("the last: sample `s2`: used up its fuel"), "{fault}");
}

#[test]
fn style_scorer_drops_dialogues_alike() {
    let host = host_with(limits(10));
    let plugin = load_guest(&host, "classifies").unwrap();
    let scorer = host.open(&plugin, &PluginSettings::new(), PluginPort::style_scorer(None)).unwrap();
    let turn = || Message { role: "assistant".into(), content: "您好".into() };
    let dialogue = |id: &str| Dialogue { id: id.into(), turns: vec![turn()] };
    let scored = scorer.score_batch(&[dialogue("a"), dialogue("x-loops"), dialogue("b")]).unwrap();
    assert_eq!(scored[0].as_ref().unwrap().total, 0.5);
    assert_eq!(scored[1].as_ref().unwrap_err().code, "plugin_limit");
    assert_eq!(scored[2].as_ref().unwrap().total, 0.5);
}
