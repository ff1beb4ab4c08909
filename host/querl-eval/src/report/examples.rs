//! Example queries of the report with the rewrites of all systems next to each other, and their selection.

use crate::evaluation::Evaluation;
use crate::metric::{Metric, answer, hits, is_left_out, reciprocal_rank};
use crate::table::system_title;
use querl_core::config::EVAL_SYSTEMS;
use querl_core::records::{EvalRecord, Hit};
use serde::Serialize;
use std::collections::BTreeMap;

const PASSAGE_CHARS: usize = 140;

#[derive(Debug, Serialize)]
pub(super) struct Examples {
    shown: Vec<Example>,
    /// Mark of the queries on which RL is better than the teacher.
    tag: &'static str,
    /// How the queries were selected.
    choice: String,
}

#[derive(Debug, Serialize)]
struct Example {
    row: usize,
    query: String,
    profile: String,
    history: String,
    /// True if RL is better than the teacher.
    is_win: bool,
    answers: Vec<Answer>,
}

#[derive(Debug, Serialize)]
struct Answer {
    title: String,
    system: &'static str,
    /// The system's rewrite; `None` for a rejected record.
    rewrite: Option<String>,
    failure: Option<String>,
    passage: Option<String>,
    score: String,
    reward: Option<String>,
    /// `gold`, `other`, or empty if the gold passage is unknown.
    mark: &'static str,
    mark_text: String,
}

type QueryRecords<'a> = BTreeMap<&'a str, &'a EvalRecord>;

/// How RL is compared with the teacher on one query.
#[derive(Debug, Clone, Copy)]
enum Comparison {
    /// By the scores of the hits, as in the win rate.
    WinRate,
    /// By the rank of the first gold passage, where the win rate is left out.
    GoldRank,
}

impl Comparison {
    /// True if RL is better than the teacher. A query without a rewrite of the teacher, or without its retrieval, is no win.
    fn is_win(self, records: &QueryRecords<'_>) -> bool {
        match (self, records.get("rl"), records.get("teacher")) {
            (Self::WinRate, Some(rl), _) => Metric::WinRate.value(rl) == Some(1.0),
            (Self::GoldRank, Some(rl), Some(teacher)) => {
                !is_left_out([rl, teacher]) && reciprocal_rank(rl) > reciprocal_rank(teacher)
            }
            _ => false,
        }
    }

    fn tag(self) -> &'static str {
        match self {
            Self::WinRate => "RL beats teacher",
            Self::GoldRank => "RL ranks gold higher",
        }
    }

    /// `n_wins` of the `n_all_wins` queries on which RL is better are shown, and `n_rest` of the `n_all_rest` others.
    fn choice(self, [n_wins, n_all_wins]: [usize; 2], [n_rest, n_all_rest]: [usize; 2]) -> String {
        let (what, figure) = match self {
            Self::WinRate => ("RL beats the teacher", "is not the win rate"),
            Self::GoldRank => ("RL ranks the gold passage higher than the teacher", "says nothing about all queries"),
        };
        format!(
            "{n_wins} of the {n_all_wins} queries where {what} and {n_rest} of the other {n_all_rest}, each taken at even distances in the \
             order of the table; so the share of wins shown here {figure}"
        )
    }
}

impl Examples {
    pub(super) fn new(records: &[EvalRecord], evaluation: &Evaluation, n_examples: usize) -> Self {
        let comparison = if evaluation.shows(Metric::WinRate) { Comparison::WinRate } else { Comparison::GoldRank };
        let mut queries: BTreeMap<(usize, &str), QueryRecords<'_>> = BTreeMap::new();
        for record in records {
            queries.entry((record.query.row, &record.query.id)).or_default().insert(&record.system, record);
        }
        let (wins, rest): (Vec<_>, Vec<_>) = queries.values().partition(|query| comparison.is_win(query));
        let n_rest = (n_examples - n_examples / 2).min(rest.len());
        let n_wins = (n_examples - n_rest).min(wins.len());
        let n_rest = (n_examples - n_wins).min(rest.len());
        let mut chosen: Vec<_> = evenly(&wins, n_wins).chain(evenly(&rest, n_rest)).collect();
        chosen.sort_by_key(|query| query.values().next().map(|record| (record.query.row, &record.query.id)));
        let shown = chosen.into_iter().filter_map(|query| Example::new(query, comparison)).collect();
        let choice = comparison.choice([n_wins, wins.len()], [n_rest, rest.len()]);
        Self { shown, tag: comparison.tag(), choice }
    }
}

impl Example {
    fn new(records: &QueryRecords<'_>, comparison: Comparison) -> Option<Self> {
        let query = &records.values().next()?.query;
        let known = EVAL_SYSTEMS.iter().filter_map(|system| Some((*system, *records.get(system)?)));
        Some(Self {
            row: query.row,
            query: query.original_query.clone(),
            profile: query.user_profile.clone(),
            history: query.history_summary.clone(),
            is_win: comparison.is_win(records),
            answers: known.map(|(system, record)| Answer::new(system, record)).collect(),
        })
    }
}

impl Answer {
    fn new(system: &'static str, record: &EvalRecord) -> Self {
        let found = answer(record);
        let failure = match &record.outcome {
            Err(rejection) => Some(rejection.to_string()),
            Ok(answer) => answer.candidate.retrieval_failure().map(ToString::to_string),
        };
        let top = hits(record).and_then(<[Hit]>::first);
        let (mark, mark_text) = gold_mark(record);
        Self {
            title: system_title(system).to_owned(),
            system,
            rewrite: found.map(|answer| answer.candidate.rewrite.clone()),
            failure,
            passage: top.map(|hit| cut(&hit.text)),
            score: top.map_or_else(String::new, |hit| Metric::Top1Score.format(hit.reranker_score)),
            reward: Metric::Reward.value(record).map(|reward| Metric::Reward.format_signed(reward)),
            mark,
            mark_text,
        }
    }
}

fn gold_mark(record: &EvalRecord) -> (&'static str, String) {
    match (hits(record), Metric::Mrr.value(record)) {
        (Some([]), Some(_)) => ("other", "nothing found".to_owned()),
        (Some(_), Some(1.0)) => ("gold", "✓ gold first".to_owned()),
        (Some(_), Some(rank)) if rank > 0.0 => ("other", format!("gold at {:.0}", 1.0 / rank)),
        (Some(_), Some(_)) => ("other", "gold not found".to_owned()),
        _ => ("", String::new()),
    }
}

/// `n` evenly spaced `items`: the middle of each of `n` equal parts.
fn evenly<T>(items: &[T], n: usize) -> impl Iterator<Item = &T> {
    (0..n).map(move |index| &items[(2 * index + 1) * items.len() / (2 * n)])
}

fn cut(text: &str) -> String {
    let mut chars = text.chars();
    let start: String = chars.by_ref().take(PASSAGE_CHARS).collect();
    if chars.next().is_some() { start + "…" } else { start }
}
