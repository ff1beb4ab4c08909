//! Labelled dialogues of a file: reads and checks the labels, determines the classes, and warns about classes with too few examples.

use crate::{labels, usage};
use querl_core::ports::Reporter;
use querl_data::{Dialogue, DialogueLocation, read_dialogues};
use querl_eval::classification::split_off;
use querl_model::classifier::Labels;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Minimum number of examples per class: fewer cannot be in both parts of a split.
const MIN_EXAMPLES: usize = 2;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Classes<'a> {
    /// The classes that occur in the file.
    OfFile,
    /// The classes in the setting `labels`; some may have no example in the file.
    Named(&'a Labels),
    /// The classes of a trained model, in the order of its label ids.
    OfModel(&'a Labels),
}

/// Labelled dialogues and their classes.
pub(crate) struct Corpus {
    pub(crate) dialogues: Vec<Dialogue>,
    /// Class of each dialogue, as an index into `classes`.
    pub(crate) labels: Vec<usize>,
    pub(crate) classes: Labels,
}

impl Corpus {
    /// Reads a file of labelled dialogues.
    pub(crate) fn read(path: &Path, classes: Classes<'_>, reporter: &dyn Reporter) -> anyhow::Result<Self> {
        let refuse = |message: String| usage(format!("{}: {message}", path.display()));
        let mut dialogues = read_dialogues(path).map_err(usage)?;
        let names = dialogues.iter().map(label).collect::<Result<Vec<_>, _>>().map_err(refuse)?;
        let known = match classes {
            Classes::OfFile => None,
            Classes::Named(known) | Classes::OfModel(known) => {
                let of_known = |(name, dialogue): (&&str, &Dialogue)| known_name(name, dialogue, known);
                Some(names.iter().zip(&dialogues).map(of_known).collect::<Result<Vec<_>, _>>().map_err(refuse)?)
            }
        };
        // After the check of the names, so that an unknown label is reported as unknown.
        let english = labels::pairs(&dialogues).map_err(refuse)?;
        let names = known.unwrap_or_else(|| labels::in_one_language(&names, &english));
        dialogues.iter_mut().zip(names).for_each(|(dialogue, name)| dialogue.label = Some(name));
        let n_read = dialogues.len();
        let dialogues = unique(dialogues).map_err(refuse)?;
        if dialogues.len() < n_read {
            reporter.message(&format!(
                "{}: {} repeated dialogue(s) left out",
                path.display(),
                n_read - dialogues.len()
            ));
        }
        let counts = counts(&dialogues);
        let classes = match classes {
            Classes::OfFile => labels::classes(counts.iter().map(|(name, count)| (*name, count.n)), &english, reporter)
                .map_err(refuse)?,
            Classes::Named(known) | Classes::OfModel(known) => known.clone(),
        };
        let labels = dialogues.iter().filter_map(|dialogue| classes.id(dialogue.label.as_deref()?)).collect();
        Ok(Self { labels, classes, dialogues })
    }

    /// Reads a file of training dialogues. A class with too few examples is an error; one whose examples are all of one group, a warning.
    pub(crate) fn read_training(path: &Path, named: Option<&Labels>, reporter: &dyn Reporter) -> anyhow::Result<Self> {
        let corpus = Self::read(path, named.map_or(Classes::OfFile, Classes::Named), reporter)?;
        let counts = counts(&corpus.dialogues);
        let refuse = |message: String| Err(usage(format!("{}: {message}", path.display())));
        if counts.len() < 2 {
            let only = counts.keys().next().copied().unwrap_or_default();
            return refuse(format!("every dialogue is labelled `{only}`; expected two classes at least"));
        }
        if let Some((name, count)) = counts.iter().find(|(_, count)| count.n < MIN_EXAMPLES) {
            let (n, place) = (count.n, count.first);
            return refuse(format!(
                "class `{name}` has {n} example(s), {place}; expected {MIN_EXAMPLES} at least, one to learn from and one to measure on"
            ));
        }
        for (name, count) in counts.iter().filter(|(_, count)| count.groups.len() < MIN_EXAMPLES) {
            let n = count.n;
            reporter.message(&format!(
                "class `{name}`: its {n} examples are of one group, and cannot be on both sides of a split"
            ));
        }
        for name in corpus.classes.names().iter().filter(|name| !counts.contains_key(name.as_str())) {
            reporter.message(&format!("class `{name}` has no example: it is never learned"));
        }
        Ok(corpus)
    }

    pub(crate) fn len(&self) -> usize {
        self.dialogues.len()
    }

    pub(crate) fn n_groups(&self) -> usize {
        self.dialogues.iter().map(|dialogue| &dialogue.group).collect::<BTreeSet<_>>().len()
    }

    /// Number of examples of each class, as text: `NAME COUNT, NAME COUNT`.
    pub(crate) fn counts(&self) -> String {
        let count = |class: usize| self.labels.iter().filter(|label| **label == class).count();
        let counts = self.classes.names().iter().enumerate().map(|(class, name)| format!("{name} {}", count(class)));
        counts.collect::<Vec<_>>().join(", ")
    }

    /// Names of the corpus's classes that none of the dialogues at `indices` has.
    pub(crate) fn missing(&self, indices: &[usize]) -> Vec<&str> {
        let here: BTreeSet<usize> = indices.iter().map(|&index| self.labels[index]).collect();
        let all: BTreeSet<usize> = self.labels.iter().copied().collect();
        all.difference(&here).map(|&class| self.classes.names()[class].as_str()).collect()
    }

    /// Splits off a `share` of the dialogues at `indices`, stratified by class, with all dialogues of a group in the same part. Returns the
    /// indices of the remaining dialogues and of those split off.
    pub(crate) fn split_off(&self, indices: &[usize], share: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
        if share == 0.0 {
            return (indices.to_vec(), Vec::new());
        }
        let (labels, groups) = self.labels_and_groups(indices);
        let (rest, off) = split_off(&labels, &groups, share, seed);
        let of = |positions: Vec<usize>| positions.into_iter().map(|position| indices[position]).collect();
        (of(rest), of(off))
    }

    pub(crate) fn texts(&self, indices: &[usize]) -> Vec<&str> {
        indices.iter().map(|&index| self.dialogues[index].input.as_str()).collect()
    }

    pub(crate) fn labels_and_groups(&self, indices: &[usize]) -> (Vec<usize>, Vec<&str>) {
        let label_of = |&index: &usize| self.labels[index];
        let group_of = |&index: &usize| self.dialogues[index].group.as_str();
        (indices.iter().map(label_of).collect(), indices.iter().map(group_of).collect())
    }

    /// The most frequent class of the dialogues at `indices`; of equally frequent classes the first.
    pub(crate) fn majority(&self, indices: &[usize]) -> usize {
        let count = |class: &usize| indices.iter().filter(|&&index| self.labels[index] == *class).count();
        (0..self.classes.n_classes()).rev().max_by_key(count).unwrap_or_default()
    }
}

fn label(dialogue: &Dialogue) -> Result<&str, String> {
    let missing = || format!("{}: no `label` there; expected the style of the answer", dialogue.location);
    dialogue.label.as_deref().ok_or_else(missing)
}

/// Name of a class as in the model or the settings, for a label in either language.
fn known_name(name: &str, dialogue: &Dialogue, known: &Labels) -> Result<String, String> {
    let place = dialogue.location;
    let id = known.id(name).ok_or_else(|| {
        let all = known.names().join("`, `");
        format!("{place}: label `{name}` is none of `{all}`; correct it, or name it among `labels` in training")
    })?;
    let other = dialogue.label_english.as_deref().filter(|english| known.id(english).is_some_and(|other| other != id));
    match other {
        None => Ok(known.names()[id].clone()),
        Some(english) => Err(format!("{place}: label `{name}` and label_english `{english}` are different classes")),
    }
}

/// Statistics of the examples of a class.
struct Count {
    n: usize,
    first: DialogueLocation,
    groups: BTreeSet<String>,
}

fn counts(dialogues: &[Dialogue]) -> BTreeMap<&str, Count> {
    let mut counts: BTreeMap<&str, Count> = BTreeMap::new();
    for dialogue in dialogues {
        let name = dialogue.label.as_deref().unwrap_or_default();
        let empty = || Count { n: 0, first: dialogue.location, groups: BTreeSet::new() };
        let count = counts.entry(name).or_insert_with(empty);
        count.n += 1;
        count.groups.insert(dialogue.group.clone());
    }
    counts
}

/// Removes repeated texts. The same text with different labels is an error.
fn unique(dialogues: Vec<Dialogue>) -> Result<Vec<Dialogue>, String> {
    let mut first: BTreeMap<String, (DialogueLocation, Option<String>)> = BTreeMap::new();
    let mut kept = Vec::new();
    for dialogue in dialogues {
        match first.get(&dialogue.input) {
            None => {
                first.insert(dialogue.input.clone(), (dialogue.location, dialogue.label.clone()));
                kept.push(dialogue);
            }
            Some((_, label)) if *label == dialogue.label => {}
            Some((place, label)) => {
                let labels = [label, &dialogue.label].map(|label| label.as_deref().unwrap_or("none"));
                return Err(format!(
                    "{place} and {} are the same text with labels `{}` and `{}`; keep the right one",
                    dialogue.location, labels[0], labels[1]
                ));
            }
        }
    }
    Ok(kept)
}
