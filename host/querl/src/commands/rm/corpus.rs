//! Labelled dialogues, checked: which classes there are, and what of the file cannot be learned from.

use crate::failure::Stop;
use crate::terminal;
use querl_data::{Dialogue, read_dialogues};
use querl_model::classifier::Labels;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The classes that the style model is about, in the order of their ids.
const STYLES: [(&str, &str); 5] = [
    ("售前", "sales_oriented"),
    ("售后", "after_sales"),
    ("诚实", "honesty"),
    ("有帮助", "helpful"),
    ("无伤害", "harmless"),
];

/// A class with fewer examples cannot stand on both sides of a split.
const FEWEST: usize = 2;

/// Dialogues and the class of each.
pub(super) struct Corpus {
    pub(super) dialogues: Vec<Dialogue>,
    /// Positions in `classes`.
    pub(super) labels: Vec<usize>,
    pub(super) classes: Labels,
}

impl Corpus {
    /// Reads a file with labels. `classes`: those of a model that is there already; `None`: those of the file.
    ///
    /// # Errors
    /// The file cannot be read; a dialogue has no label or an unknown one; one text has two labels; with classes of the file: there
    /// is only one, or one with a single example.
    pub(super) fn read(path: &Path, classes: Option<&Labels>) -> anyhow::Result<Self> {
        let dialogues = unique(path, read_dialogues(path).map_err(usage)?)?;
        let names: Vec<&str> = dialogues.iter().map(|dialogue| label(path, dialogue)).collect::<Result<_, _>>()?;
        let classes = match classes {
            Some(classes) => classes.clone(),
            None => found(path, &dialogues, &names)?,
        };
        let id = |(name, dialogue): (&&str, &Dialogue)| {
            classes.id(name).ok_or_else(|| {
                let known = classes.names().join("`, `");
                let number = dialogue.number;
                usage(format!("{}: dialogue {number}: label `{name}` is none of `{known}`", path.display()))
            })
        };
        let labels = names.iter().zip(&dialogues).map(id).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { labels, classes, dialogues })
    }

    pub(super) fn len(&self) -> usize {
        self.dialogues.len()
    }

    /// Examples of each class, as a sentence.
    pub(super) fn counts(&self) -> String {
        let count = |class: usize| self.labels.iter().filter(|label| **label == class).count();
        let counts = self.classes.names().iter().enumerate().map(|(class, name)| format!("{name} {}", count(class)));
        counts.collect::<Vec<_>>().join(", ")
    }

    /// Positions of some dialogues' classes and groups.
    pub(super) fn of(&self, indices: &[usize]) -> (Vec<usize>, Vec<&str>) {
        let label_of = |&index: &usize| self.labels[index];
        let group_of = |&index: &usize| self.dialogues[index].group.as_str();
        (indices.iter().map(label_of).collect(), indices.iter().map(group_of).collect())
    }

    /// The class that is commonest among some dialogues; of several the first.
    pub(super) fn majority(&self, indices: &[usize]) -> usize {
        let count = |class: &usize| indices.iter().filter(|&&index| self.labels[index] == *class).count();
        (0..self.classes.n_classes()).rev().max_by_key(count).unwrap_or_default()
    }
}

pub(super) fn usage(error: impl std::fmt::Display) -> anyhow::Error {
    Stop::usage(error.to_string()).into()
}

fn label<'a>(path: &Path, dialogue: &'a Dialogue) -> anyhow::Result<&'a str> {
    dialogue.label.as_deref().filter(|label| !label.is_empty()).ok_or_else(|| {
        usage(format!(
            "{}: dialogue {}: no `label` there; expected the style of the answer",
            path.display(),
            dialogue.number
        ))
    })
}

/// Leaves out texts that come again with the same label.
fn unique(path: &Path, dialogues: Vec<Dialogue>) -> anyhow::Result<Vec<Dialogue>> {
    let mut first: BTreeMap<String, (usize, Option<String>)> = BTreeMap::new();
    let (n, mut kept) = (dialogues.len(), Vec::new());
    for dialogue in dialogues {
        match first.get(&dialogue.input) {
            None => {
                first.insert(dialogue.input.clone(), (dialogue.number, dialogue.label.clone()));
                kept.push(dialogue);
            }
            Some((_, label)) if *label == dialogue.label => {}
            Some((number, label)) => {
                let labels = [label, &dialogue.label].map(|label| label.clone().unwrap_or_else(|| "none".into()));
                return Err(usage(format!(
                    "{}: dialogues {number} and {} are the same text with labels `{}` and `{}`; keep the right one",
                    path.display(),
                    dialogue.number,
                    labels[0],
                    labels[1]
                )));
            }
        }
    }
    if kept.len() < n {
        terminal::say(&format!("{}: {} repeated dialogue(s) left out", path.display(), n - kept.len()));
    }
    Ok(kept)
}

/// The classes of a file: those of the style model in their order, then others by name.
fn found(path: &Path, dialogues: &[Dialogue], names: &[&str]) -> anyhow::Result<Labels> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    names.iter().for_each(|name| *counts.entry(name).or_default() += 1);
    if counts.len() < 2 {
        let only = counts.keys().next().copied().unwrap_or_default();
        return Err(usage(format!(
            "{}: every dialogue is labelled `{only}`; expected two classes at least",
            path.display()
        )));
    }
    if let Some((name, n)) = counts.iter().find(|(_, n)| **n < FEWEST) {
        return Err(usage(format!(
            "{}: class `{name}` has {n} example(s); expected {FEWEST} at least, one to learn from and one to measure on",
            path.display()
        )));
    }
    let known = STYLES.iter().map(|(name, _)| *name).filter(|name| counts.contains_key(name));
    let other = counts.keys().copied().filter(|name| STYLES.iter().all(|(known, _)| known != name));
    let ordered: Vec<&str> = known.chain(other).collect();
    let english = ordered.iter().map(|name| english(name, dialogues)).collect::<Option<Vec<_>>>();
    let english = english.filter(|names| names.iter().collect::<BTreeSet<_>>().len() == names.len());
    Labels::new(ordered.into_iter().map(str::to_owned).collect(), english)
        .map_err(|message| usage(format!("{}: {message}", path.display())))
}

fn english(name: &str, dialogues: &[Dialogue]) -> Option<String> {
    let in_file = dialogues.iter().find(|dialogue| dialogue.label.as_deref() == Some(name));
    let known = || STYLES.iter().find(|(known, _)| *known == name).map(|(_, english)| (*english).to_owned());
    in_file.and_then(|dialogue| dialogue.label_english.clone()).or_else(known)
}
