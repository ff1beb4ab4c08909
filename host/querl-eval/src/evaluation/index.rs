//! The records of one run, validated and indexed by system and query.

use crate::error::EvalError;
use crate::metric::{Metric, answer, failure_code, hits};
use querl_core::records::{EvalRecord, StyleProbability};
use std::collections::{BTreeMap, BTreeSet};

/// A query of one run. The row is part of the key, because a table may contain a query twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueryKey<'a> {
    pub(super) group: &'a str,
    id: &'a str,
    row: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StyleModel {
    /// The run's style model, which rewards may use.
    Model,
    /// The second style model, which no reward uses.
    Audit,
}

impl StyleModel {
    fn probabilities(self, record: &EvalRecord) -> Option<&[StyleProbability]> {
        let answer = answer(record)?;
        match self {
            Self::Model => answer.candidate.style.as_deref(),
            Self::Audit => answer.audit_style.as_deref(),
        }
    }
}

pub(super) struct Index<'a> {
    by_system: BTreeMap<&'a str, BTreeMap<QueryKey<'a>, &'a EvalRecord>>,
    /// False if there are hits without passage ids: gold passages are then unknown, also for failed records.
    has_passage_ids: bool,
}

impl<'a> Index<'a> {
    pub(super) fn new(records: &'a [EvalRecord]) -> Result<Self, EvalError> {
        if records.is_empty() {
            return Err(EvalError::NoRecords);
        }
        let mut by_system: BTreeMap<&str, BTreeMap<QueryKey<'_>, &EvalRecord>> = BTreeMap::new();
        for record in records {
            check_finite(record)?;
            let query = &record.query;
            let key = QueryKey { group: &query.group, id: &query.id, row: query.row };
            if by_system.entry(&record.system).or_default().insert(key, record).is_some() {
                let (system, query, row) = (record.system.clone(), query.id.clone(), query.row);
                return Err(EvalError::DuplicateRecord { system, query, row });
            }
        }
        check_complete(&by_system)?;
        let mut found = records.iter().filter_map(hits).flatten().peekable();
        let has_passage_ids = found.peek().is_none() || found.any(|hit| !hit.id.is_empty());
        Ok(Self { by_system, has_passage_ids })
    }

    pub(super) fn systems(&self) -> impl Iterator<Item = &'a str> {
        self.by_system.keys().copied()
    }

    /// Each query once, with the record of one of the systems.
    pub(super) fn queries(&self) -> impl Iterator<Item = (QueryKey<'a>, &'a EvalRecord)> {
        self.by_system.values().flatten().map(|(key, record)| (*key, *record))
    }

    pub(super) fn records(&self, system: &str) -> impl Iterator<Item = &'a EvalRecord> {
        self.by_query(system).map(|(_, record)| record)
    }

    /// The values of `metric` of one system, one per query to which the metric applies.
    pub(super) fn values(&self, system: &str, metric: Metric) -> Vec<(QueryKey<'a>, f64)> {
        if matches!(metric, Metric::Top1 | Metric::Mrr) && !self.has_passage_ids {
            return Vec::new();
        }
        self.by_query(system).filter_map(|(key, record)| Some((key, metric.value(record)?))).collect()
    }

    pub(super) fn components(&self, system: &str, name: &str) -> Vec<(QueryKey<'a>, f64)> {
        let value = |record: &EvalRecord| {
            let reward = answer(record)?.reward.as_ref()?;
            reward.components.iter().find(|component| component.name == name).map(|component| component.value)
        };
        self.by_query(system).filter_map(|(key, record)| Some((key, value(record)?))).collect()
    }

    /// The names of the reward components in the answers of one system; a name is repeated for each answer that has it.
    pub(super) fn component_names(&self, system: &str) -> impl Iterator<Item = &'a str> {
        let rewards = self.records(system).filter_map(|record| answer(record)?.reward.as_ref());
        rewards.flat_map(|reward| &reward.components).map(|component| component.name.as_str())
    }

    /// The probabilities that a style model gave the class `label`, one per query with an answer.
    pub(super) fn styles(&self, system: &str, model: StyleModel, label: &str) -> Vec<(QueryKey<'a>, f64)> {
        let value = |record: &EvalRecord| {
            let style = model.probabilities(record)?;
            style.iter().find(|class| class.label == label).map(|class| class.probability)
        };
        self.by_query(system).filter_map(|(key, record)| Some((key, value(record)?))).collect()
    }

    pub(super) fn style_names(&self, system: &str, model: StyleModel) -> BTreeSet<&'a str> {
        let styles = self.records(system).filter_map(|record| model.probabilities(record));
        styles.flatten().map(|class| class.label.as_str()).collect()
    }

    pub(super) fn n_chars(&self, system: &str) -> Vec<(QueryKey<'a>, f64)> {
        let n_chars = |text: &str| text.trim().chars().count() as f64;
        self.by_query(system)
            .filter_map(|(key, record)| Some((key, n_chars(&answer(record)?.candidate.rewrite))))
            .collect()
    }

    /// The values of a function of records, for one system.
    pub(super) fn of_records(
        &self,
        system: &str,
        value: impl Fn(&EvalRecord) -> Option<f64>,
    ) -> Vec<(QueryKey<'a>, f64)> {
        self.by_query(system).filter_map(|(key, record)| Some((key, value(record)?))).collect()
    }

    /// The records of the first and second system of `pair` for a query; `None` if one of them has none.
    pub(super) fn of_pair(&self, pair: [&str; 2], key: &QueryKey<'a>) -> Option<[&'a EvalRecord; 2]> {
        let [first, second] = pair.map(|system| Some(*self.by_system.get(system)?.get(key)?));
        Some([first?, second?])
    }

    pub(super) fn all_records(&self) -> impl Iterator<Item = &'a EvalRecord> {
        self.by_system.values().flat_map(|records| records.values().copied())
    }

    /// Share of distinct texts among the answers of a system, 0 to 1; `None` without an answer.
    pub(super) fn distinct(&self, system: &str) -> Option<f64> {
        let texts: Vec<&str> =
            self.records(system).filter_map(|record| Some(answer(record)?.candidate.rewrite.trim())).collect();
        let distinct: BTreeSet<&&str> = texts.iter().collect();
        (!texts.is_empty()).then(|| distinct.len() as f64 / texts.len() as f64)
    }

    fn by_query(&self, system: &str) -> impl Iterator<Item = (QueryKey<'a>, &'a EvalRecord)> {
        self.by_system.get(system).into_iter().flatten().map(|(key, record)| (*key, *record))
    }
}

#[derive(Debug, Default)]
pub(super) struct Outcomes {
    pub(super) n_scored: usize,
    pub(super) n_empty: usize,
    pub(super) n_without_reward: usize,
    pub(super) failures: BTreeMap<String, usize>,
}

pub(super) fn count_outcomes<'a>(records: impl Iterator<Item = &'a EvalRecord>) -> Outcomes {
    let mut outcomes = Outcomes::default();
    for record in records {
        match failure_code(record) {
            Some(code) => *outcomes.failures.entry(code).or_default() += 1,
            None => {
                outcomes.n_scored += 1;
                outcomes.n_without_reward += usize::from(Metric::Reward.value(record).is_none());
                outcomes.n_empty += usize::from(hits(record).is_some_and(<[_]>::is_empty));
            }
        }
    }
    outcomes
}

fn check_complete(by_system: &BTreeMap<&str, BTreeMap<QueryKey<'_>, &EvalRecord>>) -> Result<(), EvalError> {
    let all: BTreeSet<_> = by_system.values().flat_map(BTreeMap::keys).collect();
    for (system, records) in by_system {
        if let Some(key) = all.iter().find(|key| !records.contains_key(**key)) {
            let (system, query) = ((*system).to_owned(), key.id.to_owned());
            return Err(EvalError::MissingRecord { system, query, row: key.row });
        }
    }
    Ok(())
}

fn check_finite(record: &EvalRecord) -> Result<(), EvalError> {
    for metric in Metric::ALL {
        if let Some(value) = metric.value(record).filter(|value| !value.is_finite()) {
            return Err(EvalError::not_finite(record, metric.name(), value));
        }
    }
    let reward = answer(record).and_then(|answer| answer.reward.as_ref());
    match reward.and_then(|reward| reward.components.iter().find(|component| !component.value.is_finite())) {
        Some(component) => Err(EvalError::not_finite(record, &component.name, component.value)),
        None => Ok(()),
    }
}
