//! Columns of golden cases, absent and with a value of each type. A plugin declares that it reads columns and not which, so its golden cases
//! name them.

use crate::golden::{self, Case, HostTypes};
use crate::section::{CheckResult, Section, Violation};
use crate::shown;
use crate::subject::{BatchPort, RecordedCalls, Subject};
use querl_core::ports::{HostFunctions, InputUse};
use querl_core::records::{ColumnValue, Columns, Scalar};
use querl_plugin::PluginKind;
use querl_sdk::testing::golden_case::{GoldenBody, GoldenCase};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const RULE: &str = "a cell without a value is left out, and a column has the type of its table, text where that is CSV: a result or a \
                    rejection follows, never a fault, and always the same";

/// Maximum number of golden cases tried per column: there may be many recorded episodes with many columns.
const MAX_CASES: usize = 8;

pub(crate) fn check(subject: &Subject<'_>, kind: PluginKind, cases: &[Case], section: &mut Section) {
    let has_columns = matches!(kind, PluginKind::Reward | PluginKind::GroupReward | PluginKind::Filter);
    if !has_columns || subject.plugin.description().inputs.columns == InputUse::Unused {
        return;
    }
    let of_kind =
        cases.iter().filter_map(|(_, case)| case.as_ref().ok()).filter(|case| golden::kind(&case.body) == kind);
    let with_columns: Vec<_> =
        of_kind.filter(|case| columns_of(&case.body).any(|columns| !columns.is_empty())).collect();
    if with_columns.is_empty() {
        return section.skip(
            "columns",
            RULE,
            "no golden case has `columns`, which would name those that the plugin reads",
        );
    }
    section.add("columns", RULE, || of_cases(subject, &with_columns));
}

fn columns_of(body: &GoldenBody<HostTypes>) -> Box<dyn Iterator<Item = &Columns> + '_> {
    match body {
        GoldenBody::Reward(episode, _) => Box::new(std::iter::once(&episode.columns)),
        GoldenBody::Group(episodes, _) => Box::new(episodes.iter().map(|episode| &episode.columns)),
        GoldenBody::Filter(samples, _) => Box::new(samples.iter().map(|sample| &sample.columns)),
        _ => Box::new(std::iter::empty()),
    }
}

fn of_cases(subject: &Subject<'_>, cases: &[&GoldenCase<HostTypes>]) -> CheckResult {
    let mut n_tried = BTreeMap::<&str, usize>::new();
    for case in cases {
        let mut names: BTreeSet<&str> =
            columns_of(&case.body).flat_map(|columns| columns.0.iter().map(|(name, _)| name.as_str())).collect();
        names.retain(|name| {
            let n_tried = n_tried.entry(*name).or_default();
            *n_tried += 1;
            *n_tried <= MAX_CASES
        });
        let functions = Some(Arc::new(RecordedCalls(case.calls.clone())) as Arc<dyn HostFunctions>);
        // If the plugin rejects the settings, the golden case itself fails.
        match &case.body {
            GoldenBody::Filter(samples, _) => {
                let Ok(port) = subject.filter_with(&case.settings, functions) else { continue };
                try_values(&port, &case.name, &names, samples, |sample| &mut sample.columns)?;
            }
            GoldenBody::Group(episodes, _) => {
                let Ok(port) = subject.reward_with(&case.settings, functions) else { continue };
                try_values(&port, &case.name, &names, episodes, |episode| &mut episode.columns)?;
            }
            GoldenBody::Reward(episode, _) => {
                let Ok(port) = subject.reward_with(&case.settings, functions) else { continue };
                try_values(&port, &case.name, &names, std::slice::from_ref(&**episode), |episode| {
                    &mut episode.columns
                })?;
            }
            _ => {}
        }
    }
    Ok(format!("{} of golden cases, absent and of each type", n_tried.into_keys().collect::<Vec<_>>().join(", ")))
}

/// Possible values of a cell, with their names in reports; `None` for an absent column.
fn values() -> [(&'static str, Option<ColumnValue>); 7] {
    let items = vec![Scalar::Text("鱼油".into()), Scalar::Number(2.5), Scalar::Flag(false)];
    [
        ("absent", None),
        ("a text", Some(ColumnValue::Text("鱼油".into()))),
        ("an empty text", Some(ColumnValue::Text(String::new()))),
        ("a number", Some(ColumnValue::Number(-2.5))),
        ("a flag", Some(ColumnValue::Flag(true))),
        ("a list", Some(ColumnValue::Items(items))),
        ("an empty list", Some(ColumnValue::Items(Vec::new()))),
    ]
}

/// Calls the port twice for each column and value: with the items of the case, in which those that have the column have that value.
fn try_values<B: BatchPort>(
    port: &B,
    case: &str,
    names: &BTreeSet<&str>,
    items: &[B::Item],
    columns: impl Fn(&mut B::Item) -> &mut Columns,
) -> Result<(), Violation> {
    for name in names {
        for (what, value) in values() {
            let mut changed = items.to_vec();
            changed.iter_mut().for_each(|item| set(columns(item), name, value.as_ref()));
            let sent = || {
                let shown = changed.first().map_or_else(String::new, shown::item);
                format!("golden case `{case}` with the column `{name}` {what}: {shown}")
            };
            let ask = || port.ask(&changed).map_err(|fault| Violation::fault(sent(), &fault));
            let (first, again) = (ask()?, ask()?);
            if first != again {
                return Err(Violation::new(sent(), format!("first {}, then {}", first.join(", "), again.join(", "))));
            }
        }
    }
    Ok(())
}

fn set(columns: &mut Columns, name: &str, value: Option<&ColumnValue>) {
    let place = columns.0.iter().position(|(key, _)| key == name);
    match (place, value) {
        (Some(place), Some(value)) => columns.0[place].1 = value.clone(),
        (Some(place), None) => drop(columns.0.remove(place)),
        (None, _) => {}
    }
}
