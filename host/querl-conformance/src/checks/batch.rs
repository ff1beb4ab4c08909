//! Checks of batches: length, order, and that a result does not depend on other items.

use crate::corpus::{Group, episodes, shuffled};
use crate::report::grouped;
use crate::section::{CheckResult, Violation};
use crate::shown;
use crate::subject::{BatchPort, Subject};
use querl_core::ports::{FaultKind, PluginFault};
use querl_core::records::Episode;
use querl_plugin::{PluginError, RewardForm};

/// Checks that each item of a group, sent alone, gets an answer or a rejection, never a fault.
pub(crate) fn inputs<B: BatchPort>(port: &B, group: &Group<B::Item>) -> CheckResult {
    for item in &group.items {
        port.ask(std::slice::from_ref(item)).map_err(|fault| Violation::fault(shown::item(item), &fault))?;
    }
    Ok(format!("{} items", group.items.len()))
}

/// Checks that batches of 1, 2 and all items have as many answers as items, in the order of the items: a shuffled batch has shuffled
/// answers.
pub(crate) fn length_and_order<B: BatchPort>(port: &B, items: &[B::Item]) -> CheckResult {
    for n_items in [1, 2] {
        ask(port, &items[..n_items])?;
    }
    let in_order = ask(port, items)?;
    let (places, mixed) = shuffled(items);
    for ((place, item), answer) in places.iter().zip(&mixed).zip(ask(port, &mixed)?) {
        if answer != in_order[*place] {
            let sent = format!("in order and shuffled, a batch of {} with {}", items.len(), shown::item(item));
            return Err(Violation::new(sent, format!("shuffled {answer}, in order {}", in_order[*place])));
        }
    }
    Ok(format!("batches of 1, 2, {}, shuffled", items.len()))
}

/// Checks that batches of 1, 2 and all items have as many answers as items.
pub(crate) fn length<B: BatchPort>(port: &B, items: &[B::Item]) -> CheckResult {
    for n_items in [1, 2, items.len()] {
        ask(port, &items[..n_items])?;
    }
    Ok(format!("batches of 1, 2, {}", items.len()))
}

/// Checks that a batch, and each pair of its items, has the same answers as each item sent alone.
pub(crate) fn batch_equals_singles<B: BatchPort>(port: &B, items: &[B::Item]) -> CheckResult {
    let mut alone = Vec::new();
    for item in items {
        alone.extend(ask(port, std::slice::from_ref(item))?);
    }
    for n_items in [items.len(), 2] {
        for (batch, alone) in items.chunks(n_items).zip(alone.chunks(n_items)) {
            for ((item, together), alone) in batch.iter().zip(ask(port, batch)?).zip(alone) {
                if together != *alone {
                    let sent = format!("alone and in a batch of {}: {}", batch.len(), shown::item(item));
                    return Err(Violation::new(sent, format!("alone {alone}, in the batch {together}")));
                }
            }
        }
    }
    Ok(format!("{} items alone, in pairs, together", grouped(items.len() as u64)))
}

/// Checks that the answers to the first items of a batch do not depend on the items after them.
pub(crate) fn prefixes<B: BatchPort>(port: &B, items: &[B::Item]) -> CheckResult {
    let whole = ask(port, items)?;
    for n_items in 1..items.len() {
        for (index, answer) in ask(port, &items[..n_items])?.iter().enumerate() {
            if *answer != whole[index] {
                let (place, n_more, item) = (index + 1, items.len() - n_items, shown::item(&items[index]));
                let sent = format!("as item {place} of {n_items}, then with {n_more} more behind: {item}");
                return Err(Violation::new(sent, format!("first {answer}, then {}", whole[index])));
            }
        }
    }
    Ok(format!("{} beginnings of a batch", items.len()))
}

fn ask<B: BatchPort>(port: &B, items: &[B::Item]) -> Result<Vec<String>, Violation> {
    port.ask(items).map_err(|fault| Violation::fault(sent(items), &fault))
}

/// A batch in a report: its first item and its length.
fn sent<I: serde::Serialize>(items: &[I]) -> String {
    match items {
        [] => "an empty batch".into(),
        [item] => shown::item(item),
        [first, ..] => format!("a batch of {}, the first {}", items.len(), shown::item(first)),
    }
}

/// Checks that a group sent alone has the same results as in a batch in which the episodes of all groups are mixed.
pub(crate) fn groups_alone<B: BatchPort>(port: &B, groups: &[Vec<B::Item>]) -> CheckResult {
    let mut items = Vec::new();
    for group in groups {
        items.extend(group.iter().cloned().zip(ask(port, group)?));
    }
    let (_, mixed) = shuffled(&items);
    let together: Vec<_> = mixed.iter().map(|(item, _)| item.clone()).collect();
    for ((item, alone), together) in mixed.iter().zip(ask(port, &together)?) {
        if together != *alone {
            let sent = format!("its group alone and with {} others: {}", groups.len() - 1, shown::item(item));
            return Err(Violation::new(sent, format!("alone {alone}, together {together}")));
        }
    }
    Ok(format!("{} groups alone, together", groups.len()))
}

/// Checks that `form` gives the same totals, components, codes and details as the form of records, bit for bit, for the batches and for
/// each item of the corpus alone. `None` if no batch has results in both forms.
pub(super) fn form_equals_records(
    subject: &Subject<'_>,
    form: RewardForm,
    batches: &[Vec<Episode>],
) -> Result<Option<String>, Violation> {
    let in_form =
        |form| subject.reward_in(form).map_err(|error: PluginError| Violation::error("check-settings", &error));
    let (other, records) = (in_form(form)?, in_form(RewardForm::Records)?);
    let mut batches = batches.to_vec();
    batches.extend(episodes::groups().into_iter().flat_map(|group| group.items).map(|item| vec![item]));
    let name = if form == RewardForm::Json { "as JSON" } else { "packed" };
    let mut n_compared = 0;
    for batch in &batches {
        let is_same = same(name, batch, &other.ask(batch), &records.ask(batch))?;
        let is_called = !subject.has_contract_0_1() || batch.iter().any(|episode| episode.baseline.is_some());
        n_compared += u64::from(is_same && is_called);
    }
    Ok((n_compared > 0).then(|| format!("{} batches in both forms", grouped(n_compared))))
}

type Answers = Result<Vec<String>, PluginFault>;

/// True if both forms have results, which are the same; false if a call ended in a fault that this check does not report.
fn same(form: &str, batch: &[Episode], packed: &Answers, records: &Answers) -> Result<bool, Violation> {
    let differ = |item: &Episode, packed: &str, records: &str| {
        let sent = format!("{form} and as records, a batch of {} with {}", batch.len(), shown::item(item));
        Err(Violation::new(sent, format!("{form} {packed}, as records {records}")))
    };
    match (packed, records) {
        (Ok(packed), Ok(records)) => {
            let mut answers = batch.iter().zip(packed.iter().zip(records));
            match answers.find(|(_, (packed, records))| packed != records) {
                Some((item, (packed, records))) => differ(item, packed, records),
                None => Ok(true),
            }
        }
        // The forms use different amounts of fuel and memory; other checks report an exceeded limit.
        (Err(fault), _) | (_, Err(fault)) if fault.kind == FaultKind::Limit => Ok(false),
        (Err(packed), Err(records)) if packed.kind == records.kind => Ok(false),
        (packed, records) => {
            let shown = |answers: &Answers| match answers {
                Ok(answers) => answers[0].clone(),
                Err(fault) => fault.to_string(),
            };
            differ(&batch[0], &shown(packed), &shown(records))
        }
    }
}
