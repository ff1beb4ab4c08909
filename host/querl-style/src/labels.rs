//! Class labels: the classes of a file, their order, and pairs of Chinese and English names.

use querl_core::ports::Reporter;
use querl_data::{Dialogue, DialogueLocation};
use querl_model::classifier::Labels;
use std::collections::{BTreeMap, BTreeSet};

/// Chinese and English names of the style model's classes, in the order of their ids.
const STYLES: [(&str, &str); 5] = [
    ("售前", "sales_oriented"),
    ("售后", "after_sales"),
    ("诚实", "honesty"),
    ("有帮助", "helpful"),
    ("无伤害", "harmless"),
];

/// English names by label.
pub(crate) type Pairs = BTreeMap<String, String>;

/// Parses the setting `labels`: the classes in the order of their ids, all as `NAME` or all as `NAME=ENGLISH`.
pub(crate) fn parse(list: &[String]) -> Result<Labels, String> {
    let part = |item: &String| {
        let (name, english) =
            item.split_once('=').map_or((item.as_str(), None), |(name, english)| (name, Some(english)));
        (name.trim().to_owned(), english.map(|english| english.trim().to_owned()))
    };
    let (names, english): (Vec<String>, Vec<Option<String>>) = list.iter().map(part).unzip();
    let without = english.iter().position(Option::is_none);
    match without.filter(|_| english.iter().any(Option::is_some)) {
        Some(index) => {
            Err(format!("`{}` has no English name, others have; expected one for each or none", names[index]))
        }
        None => Labels::new(names, english.into_iter().collect()),
    }
}

/// Reads the English names of labels from the fields `label` and `label_english` of dialogues. Contradicting pairs are an error.
pub(crate) fn pairs(dialogues: &[Dialogue]) -> Result<Pairs, String> {
    let mut by_label: BTreeMap<&str, (&str, DialogueLocation)> = BTreeMap::new();
    let mut by_english: BTreeMap<&str, (&str, DialogueLocation)> = BTreeMap::new();
    for dialogue in dialogues {
        let (Some(label), Some(english)) = (&dialogue.label, &dialogue.label_english) else { continue };
        let place = dialogue.location;
        if label == english {
            continue;
        }
        let (first, before) = *by_label.entry(label).or_insert((english, place));
        if first != english {
            return Err(format!(
                "{place}: label `{label}` has the label_english `{english}`, and `{first}` in {before}; expected one"
            ));
        }
        let (first, before) = *by_english.entry(english).or_insert((label, place));
        if first != label {
            return Err(format!(
                "{place}: label_english `{english}` is paired with label `{label}`, and with `{first}` in {before}; expected one"
            ));
        }
    }
    Ok(by_label.into_iter().map(|(label, (english, _))| (label.to_owned(), english.to_owned())).collect())
}

/// Replaces English labels by their Chinese names if the file uses both languages. The names are those of the file or of [`STYLES`].
pub(crate) fn in_one_language(names: &[&str], english: &Pairs) -> Vec<String> {
    let here: BTreeSet<&str> = names.iter().copied().collect();
    let of_styles = STYLES.iter().filter(|(name, _)| here.contains(name)).map(|(name, english)| (*english, *name));
    let mut own: BTreeMap<&str, &str> = of_styles.collect();
    own.extend(english.iter().map(|(name, english)| (english.as_str(), name.as_str())));
    names.iter().map(|name| own.get(name).unwrap_or(name).to_string()).collect()
}

/// The classes of a file: first those of [`STYLES`], in their order, then the others by name. `counts`: number of examples by label.
pub(crate) fn classes<'a>(
    counts: impl Iterator<Item = (&'a str, usize)>,
    english: &Pairs,
    reporter: &dyn Reporter,
) -> Result<Labels, String> {
    let counts: Vec<(&str, usize)> = counts.collect();
    if let [(only, _)] = counts.as_slice() {
        return Err(format!("every dialogue is labelled `{only}`; expected two classes at least"));
    }
    let style = |name: &str| STYLES.iter().position(|(known, english)| *known == name || *english == name);
    let mut ordered: Vec<&str> = counts.iter().map(|(name, _)| *name).collect();
    ordered.sort_by_key(|name| style(name).unwrap_or(STYLES.len()));
    let others = counts.iter().filter(|(name, _)| style(name).is_none());
    let others: Vec<String> = others.map(|(name, n)| format!("`{name}` ({n})")).collect();
    if !others.is_empty() && others.len() < counts.len() {
        let others = others.join(", ");
        reporter.message(&format!(
            "classes other than the style model's: {others}; name the classes with `labels` to reject others"
        ));
    }
    let english = |name: &&str| {
        let known = || style(name).map(|index| STYLES[index].1.to_owned());
        english.get(*name).cloned().or_else(known)
    };
    let english = ordered.iter().map(english).collect::<Option<Vec<_>>>();
    Labels::new(ordered.into_iter().map(str::to_owned).collect(), english)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dialogue(line: usize, label: &str, english: &str) -> Dialogue {
        let name = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        Dialogue {
            input: format!("text {line}"),
            label: name(label),
            label_english: name(english),
            group: String::new(),
            boundary: None,
            location: DialogueLocation::Line(line),
        }
    }

    fn found(rows: &[(&str, &str)]) -> Result<Labels, String> {
        let rows: Vec<Dialogue> = rows.iter().enumerate().map(|(at, (a, b))| dialogue(at + 1, a, b)).collect();
        let english = pairs(&rows)?;
        let names: Vec<&str> = rows.iter().filter_map(|row| row.label.as_deref()).collect();
        let names = in_one_language(&names, &english);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        names.iter().for_each(|name| *counts.entry(name).or_default() += 1);
        classes(counts.into_iter(), &english, &querl_core::ports::Silent)
    }

    #[test]
    fn one_class_in_two_languages_is_one_class() {
        let labels = found(&[
            ("harmless", ""),
            ("售后", "after_sales"),
            ("after_sales", ""),
            ("售前", ""),
            ("sales_oriented", ""),
        ])
        .unwrap();
        assert_eq!(labels.names(), ["售前", "售后", "harmless"]);
        assert_eq!(labels.english().unwrap(), ["sales_oriented", "after_sales", "harmless"]);
        let labels = found(&[("好", "good"), ("坏", "bad"), ("good", "good")]).unwrap();
        assert_eq!(
            (labels.names(), labels.english().unwrap()),
            (&["坏".to_owned(), "好".to_owned()][..], &["bad".to_owned(), "good".to_owned()][..])
        );
        let english = found(&[("harmless", ""), ("sales_oriented", ""), ("helpful", "")]).unwrap();
        assert_eq!(english.names(), ["sales_oriented", "helpful", "harmless"]);
    }

    #[test]
    fn contradicting_english_names_are_rejected() {
        let problem = |rows: &[(&str, &str)]| found(rows).unwrap_err();
        let expected =
            "line 3: label `售前` has the label_english `after_sales`, and `sales_oriented` in line 1; expected one";
        assert_eq!(problem(&[("售前", "sales_oriented"), ("售后", ""), ("售前", "after_sales")]), expected);
        let expected =
            "line 2: label_english `sales` is paired with label `售后`, and with `售前` in line 1; expected one";
        assert_eq!(problem(&[("售前", "sales"), ("售后", "sales")]), expected);
    }

    #[test]
    fn labels_of_the_settings_are_in_their_order_with_english_names_for_all_or_none() {
        let list = |items: &[&str]| parse(&items.iter().map(|item| item.to_string()).collect::<Vec<_>>());
        let labels = list(&["坏 = bad", "好=good"]).unwrap();
        assert_eq!((labels.id("坏"), labels.id("good")), (Some(0), Some(1)));
        assert_eq!(list(&["坏", "好"]).unwrap().english(), None);
        let expected = "`好` has no English name, others have; expected one for each or none";
        assert_eq!(list(&["坏=bad", "好"]).unwrap_err(), expected);
        assert!(list(&["坏", "坏"]).unwrap_err().contains("twice"));
    }
}
