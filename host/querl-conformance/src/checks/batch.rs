//! Checks of whatever takes batches.

use super::{Broken, Found};
use crate::corpus::{Group, shuffled};
use crate::report::grouped;
use crate::shown;
use crate::subject::Batches;

/// Each item of a group, alone: an answer or a rejection, never a fault.
pub(crate) fn inputs<B: Batches>(port: &B, group: &Group<B::Item>) -> Found {
    for item in &group.items {
        port.ask(std::slice::from_ref(item)).map_err(|fault| Broken::fault(shown::item(item), &fault))?;
    }
    Ok(format!("{} items", group.items.len()))
}

/// Batches of 1, 2 and all have as many answers as items, in the order of the items: those of a shuffled batch are
/// shuffled alike.
pub(crate) fn length_and_order<B: Batches>(port: &B, items: &[B::Item]) -> Found {
    for n_items in [1, 2] {
        ask(port, &items[..n_items])?;
    }
    let in_order = ask(port, items)?;
    let (places, mixed) = shuffled(items);
    for ((place, item), answer) in places.iter().zip(&mixed).zip(ask(port, &mixed)?) {
        if answer != in_order[*place] {
            let sent = format!("in order and shuffled, a batch of {} with {}", items.len(), shown::item(item));
            return Err(Broken::new(sent, format!("shuffled {answer}, in order {}", in_order[*place])));
        }
    }
    Ok(format!("batches of 1, 2, {}, shuffled", items.len()))
}

/// Batches of 1, 2 and all have as many answers as items.
pub(crate) fn length<B: Batches>(port: &B, items: &[B::Item]) -> Found {
    for n_items in [1, 2, items.len()] {
        ask(port, &items[..n_items])?;
    }
    Ok(format!("batches of 1, 2, {}", items.len()))
}

/// The answers to a batch, and to its pairs, are those to its items alone.
pub(crate) fn batch_equals_singles<B: Batches>(port: &B, items: &[B::Item]) -> Found {
    let mut alone = Vec::new();
    for item in items {
        alone.extend(ask(port, std::slice::from_ref(item))?);
    }
    for n_items in [items.len(), 2] {
        for (batch, alone) in items.chunks(n_items).zip(alone.chunks(n_items)) {
            for ((item, together), alone) in batch.iter().zip(ask(port, batch)?).zip(alone) {
                if together != *alone {
                    let sent = format!("alone and in a batch of {}: {}", batch.len(), shown::item(item));
                    return Err(Broken::new(sent, format!("alone {alone}, in the batch {together}")));
                }
            }
        }
    }
    Ok(format!("{} items alone, in pairs, together", grouped(items.len() as u64)))
}

/// The answers to the first items of a batch are what they are without the items after them.
pub(crate) fn prefixes<B: Batches>(port: &B, items: &[B::Item]) -> Found {
    let whole = ask(port, items)?;
    for n_items in 1..items.len() {
        for (index, answer) in ask(port, &items[..n_items])?.iter().enumerate() {
            if *answer != whole[index] {
                let (place, n_more, item) = (index + 1, items.len() - n_items, shown::item(&items[index]));
                let sent = format!("as item {place} of {n_items}, then with {n_more} more behind: {item}");
                return Err(Broken::new(sent, format!("first {answer}, then {}", whole[index])));
            }
        }
    }
    Ok(format!("{} beginnings of a batch", items.len()))
}

fn ask<B: Batches>(port: &B, items: &[B::Item]) -> Result<Vec<String>, Broken> {
    port.ask(items).map_err(|fault| Broken::fault(sent(items), &fault))
}

/// A batch, by its first item.
fn sent<I: serde::Serialize>(items: &[I]) -> String {
    match items {
        [] => "an empty batch".into(),
        [item] => shown::item(item),
        [first, ..] => format!("a batch of {}, the first {}", items.len(), shown::item(first)),
    }
}
