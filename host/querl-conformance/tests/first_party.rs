//! The plugins of this repository pass every check.
#![allow(clippy::unwrap_used)]

mod common;

use common::{check, failed, options, repository};
use querl_conformance::{Outcome, Report, SuiteOptions};

/// Runs all checks with the default options of the command.
fn whole(folder: &str) -> Report {
    let options = SuiteOptions { n_repeats: 1000, n_threads: 8, ..options("") };
    let report = querl_conformance::run(&repository().join(folder), &options).unwrap();
    assert!(report.passed() && failed(&report).is_empty(), "{}", report.text());
    let n_golden = report.checks.iter().filter(|check| check.name.starts_with("golden: ")).count();
    assert!(n_golden >= 6, "{folder} has {n_golden} golden cases");
    assert_eq!(check(&report, "repeat").note, "1,000 calls");
    assert_eq!(check(&report, "threads").note, "8 threads, 125 calls each");
    let cost = &report.cost[0];
    assert!(cost.fuel_per_item > 0.0 && cost.micros_per_item > 0.0 && cost.cold_start_ms > 0.0, "{cost:?}");
    assert!(cost.memory_bytes >= 65_536 && cost.component_bytes > 1000, "{cost:?}");
    assert!(check(&report, "asked_limits").note.contains(" of "), "{folder} asks for limits");
    report
}

#[test]
fn competition_keeps_every_rule() {
    let report = whole("plugins/reward-competition");
    assert_eq!(check(&report, "range").note, "-1 to 1");
    assert_eq!(check(&report, "defaults").note, "10 settings");
}

#[test]
fn rewards_keep_every_rule() {
    for folder in ["plugins/reward-diversity", "plugins/reward-gold", "plugins/reward-length"] {
        whole(folder);
    }
}

#[test]
fn quality_keeps_every_rule() {
    let report = whole("plugins/filter-quality");
    assert_eq!(check(&report, "looks_back_only").note, "24 beginnings of a batch");
}

#[test]
fn style_keeps_every_rule() {
    let report = whole("plugins/scorer-style");
    assert_eq!(check(&report, "defaults").note, "5 settings");
}

#[test]
fn answers_keep_every_rule() {
    let report = whole("plugins/prompt-answer");
    assert_eq!(check(&report, "defaults").note, "1 setting");
    let report = whole("plugins/prompt-rewrite");
    assert_eq!(check(&report, "defaults").note, "3 settings");
}

#[test]
fn tenants_keep_every_rule() {
    for folder in ["plugins/tenant-fivedoctors", "plugins/tenant-chengla"] {
        let report = whole(folder);
        assert!(matches!(check(&report, "defaults").outcome, Outcome::Skipped { .. }), "a prompt without settings");
    }
}
