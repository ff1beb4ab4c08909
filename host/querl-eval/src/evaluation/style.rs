//! What style models say of the answers, and how that shifts from system to system.

use super::index::{Index, Judge, QueryKey};
use super::{Difference, Pooled, pair_name};
use crate::bootstrap::Interval;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The styles of a run's answers.
///
/// A policy that is trained on what a model says may learn the style, or what that model alone takes for it: its own word is no evidence of
/// which. Beside it stand what a second model says that no reward has seen, and what shows a phrase that fits every question: the length of
/// answers, and how many of them differ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StyleEvaluation {
    /// By the run's style model.
    pub model: Styles,
    /// By a second one; left out without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<Styles>,
    /// Characters of an answer, by system.
    pub n_chars: BTreeMap<String, Option<Interval>>,
    /// Share of answers that differ from all before them, 0 to 1, by system: of several runs the mean over them.
    pub distinct: BTreeMap<String, f64>,
}

/// What one model says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Styles {
    /// By system, then by class: the mean probability over the answers that have one.
    pub systems: BTreeMap<String, BTreeMap<String, Option<Interval>>>,
    /// By pair (`rl-sft` is RL minus SFT), then by class: the paired difference of probabilities on the same queries.
    pub shifts: BTreeMap<String, StyleShift>,
}

/// By class; `None` where no query has an answer of both.
pub type StyleShift = BTreeMap<String, Option<Difference>>;

impl Styles {
    /// Every class that some system has.
    pub(crate) fn classes(&self) -> BTreeSet<&str> {
        self.systems.values().flat_map(|classes| classes.keys().map(String::as_str)).collect()
    }
}

impl StyleEvaluation {
    /// What each model says, with how tables name it.
    pub(crate) fn judges(&self) -> impl Iterator<Item = (&'static str, &Styles)> {
        [("", &self.model)].into_iter().chain(self.audit.as_ref().map(|audit| (" (audit)", audit)))
    }
}

impl Pooled<'_, '_> {
    /// `None` where no answer has a style.
    pub(super) fn style(&self, systems: &BTreeSet<&str>, pairs: &[(&str, &str)]) -> Option<StyleEvaluation> {
        let model = self.styles(Judge::Model, systems, pairs)?;
        let n_chars = |system: &&str| {
            let interval = self.interval(|index| index.n_chars(system)).map(|(interval, _)| interval);
            ((*system).to_owned(), interval)
        };
        let distinct = |system: &&str| Some(((*system).to_owned(), self.distinct(system)?));
        Some(StyleEvaluation {
            model,
            audit: self.styles(Judge::Audit, systems, pairs),
            n_chars: systems.iter().map(n_chars).collect(),
            distinct: systems.iter().filter_map(distinct).collect(),
        })
    }

    fn styles(&self, judge: Judge, systems: &BTreeSet<&str>, pairs: &[(&str, &str)]) -> Option<Styles> {
        let classes: BTreeSet<&str> = self
            .runs
            .iter()
            .flat_map(|index| systems.iter().flat_map(|system| index.style_names(system, judge)).collect::<Vec<_>>())
            .collect();
        if classes.is_empty() {
            return None;
        }
        let mean = |system: &str, class: &str| {
            self.interval(|index| index.styles(system, judge, class)).map(|(found, _)| found)
        };
        let shift = |first: &str, second: &str, class: &str| {
            self.difference(
                |index: &Index<'_>, system| -> Vec<(QueryKey<'_>, f64)> { index.styles(system, judge, class) },
                first,
                second,
            )
        };
        let by_class = |system: &&str| {
            let classes = classes.iter().map(|class| ((*class).to_owned(), mean(system, class)));
            ((*system).to_owned(), classes.collect())
        };
        let of_pair = |(first, second): &(&str, &str)| {
            let classes = classes.iter().map(|class| ((*class).to_owned(), shift(first, second, class)));
            (pair_name(first, second), classes.collect())
        };
        Some(Styles { systems: systems.iter().map(by_class).collect(), shifts: pairs.iter().map(of_pair).collect() })
    }

    fn distinct(&self, system: &str) -> Option<f64> {
        let shares: Vec<f64> = self.runs.iter().filter_map(|index| index.distinct(system)).collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }
}
