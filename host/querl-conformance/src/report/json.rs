//! The report for programs.

use super::{Check, Cost, Outcome, Report};
use serde_json::{Value, json};

/// The version of the form that [`render`] writes.
const FORMAT: u32 = 1;

pub(super) fn render(report: &Report) -> Value {
    json!({
        "format": FORMAT,
        "plugin": report.plugin,
        "version": report.version,
        "digest": report.digest,
        "kinds": report.kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
        "passed": report.passed(),
        "checks": report.checks.iter().map(check).collect::<Vec<_>>(),
        "cost": report.cost.iter().map(cost).collect::<Vec<_>>(),
    })
}

fn check(check: &Check) -> Value {
    let mut value = json!({
        "kind": check.kind.map(|kind| kind.name()),
        "name": check.name,
        "rule": check.rule,
        "note": check.note,
    });
    match &check.outcome {
        Outcome::Passed => value["outcome"] = "passed".into(),
        Outcome::Failed(failure) => {
            value["outcome"] = "failed".into();
            value["sent"] = failure.sent.as_str().into();
            value["returned"] = failure.returned.as_str().into();
            value["expected"] = failure.expected.as_str().into();
        }
        Outcome::Skipped { why } => {
            value["outcome"] = "skipped".into();
            value["why"] = why.as_str().into();
        }
    }
    value
}

fn cost(cost: &Cost) -> Value {
    json!({
        "kind": cost.kind.name(),
        "fuel_per_item": cost.fuel_per_item,
        "micros_per_item": cost.micros_per_item,
        "memory_bytes": cost.memory_bytes,
        "component_bytes": cost.component_bytes,
        "cold_start_ms": cost.cold_start_ms,
    })
}
