//! Comparisons of two systems on the queries that are held out in the runs of both.
#![allow(clippy::unwrap_used)]

use querl_core::records::{Candidate, EvalRecord, Hit, QueryRow, Rejection, SystemAnswer};
use querl_eval::{ComparedSystem, Comparison, ComparisonOptions, ComparisonVerdict, Metric, compare};
use std::collections::{BTreeMap, BTreeSet};

/// A record of query `id` in group `group` whose first hit is gold, another passage, or which failed.
fn record(id: &str, group: &str, outcome: &str) -> EvalRecord {
    let hit =
        |id: &str| Hit { id: id.into(), text: String::new(), reranker_score: 0.5, retrieval_score: None, rank: 1 };
    let hits = vec![hit(if outcome == "gold" { "g" } else { "other" })];
    let candidate = Candidate { rewrite: "r".into(), retrieval: Some(Ok(hits)), ..Candidate::default() };
    let answer = SystemAnswer { candidate, reward: None, win: None, latency_ms: None, cost: None, audit_style: None };
    let query = QueryRow {
        id: id.into(),
        row: id.trim_start_matches('q').parse().unwrap(),
        original_query: format!("query {id}"),
        user_profile: String::new(),
        history_summary: String::new(),
        gold_ids: vec!["g".into()],
        group: group.into(),
    };
    let failed = || Rejection::by_host("no_rewrite", "unreadable".to_owned());
    EvalRecord { system: "rl".into(), query, outcome: if outcome == "failed" { Err(failed()) } else { Ok(answer) } }
}

fn records(outcomes: impl Fn(usize) -> &'static str, n: usize) -> Vec<EvalRecord> {
    (0..n).map(|index| record(&format!("q{index}"), &format!("g{:02}", index / 2), outcomes(index))).collect()
}

fn options(margin: f64) -> ComparisonOptions {
    ComparisonOptions { metric: Metric::Top1, margin, seed: 1, n_resamples: 1000 }
}

fn compared(first: &[EvalRecord], second: &[EvalRecord], margin: f64) -> Comparison {
    compare([side("a", first, &NONE), side("b", second, &NONE)], &options(margin)).unwrap()
}

fn side<'a>(name: &'a str, records: &'a [EvalRecord], seen: &'a BTreeSet<String>) -> ComparedSystem<'a> {
    ComparedSystem { name, system: "rl", records, seen }
}

static NONE: BTreeSet<String> = BTreeSet::new();

#[test]
fn a_clear_gain_passes_and_a_clear_loss_does_not() {
    let (good, poor) = (records(|index| if index % 4 == 0 { "other" } else { "gold" }, 80), records(|_| "other", 80));
    let gain = compared(&good, &poor, 0.0);
    assert_eq!((gain.verdict, gain.n, gain.n_groups, gain.means), (ComparisonVerdict::Passed, 80, 40, [0.75, 0.0]));
    assert_eq!(compared(&poor, &good, 0.0).verdict, ComparisonVerdict::Lost);
    assert_eq!(compared(&good, &good, 0.0).verdict, ComparisonVerdict::Passed, "equal rewrites lose nothing");
}

#[test]
fn a_failure_is_a_loss_of_its_side_and_not_left_out() {
    let good = records(|_| "gold", 60);
    let failing = records(|index| if index % 2 == 0 { "failed" } else { "gold" }, 60);
    let found = compared(&failing, &good, 0.0);
    assert_eq!((found.verdict, found.n, found.means[0]), (ComparisonVerdict::Lost, 60, 0.5));
    assert_eq!(found.failures, [BTreeMap::from([("no_rewrite".to_owned(), 30)]), BTreeMap::new()]);
    let by_score = ComparisonOptions { metric: Metric::Top1Score, ..options(0.0) };
    let found = compare([side("a", &failing, &NONE), side("b", &good, &NONE)], &by_score).unwrap();
    assert_eq!((found.n, found.means), (60, [0.25, 0.5]), "in metrics whose means leave failures out, too");
}

#[test]
fn queries_that_the_other_run_has_seen_are_left_out_and_counted() {
    let (first, second) = (records(|_| "gold", 60), records(|_| "other", 40));
    let seen: BTreeSet<String> = (0..10).map(|index| format!("q{index}")).collect();
    let found = compare([side("a", &first, &NONE), side("b", &second, &seen)], &options(0.0)).unwrap();
    assert_eq!((found.n, found.n_seen_by_other, found.n_unpaired), (30, [10, 10], [20, 0]));
    let text = found.to_text(["a", "b"]);
    assert!(text.contains("left out: 10 queries of a that are in train or val of b\n"), "{text}");
    let all: BTreeSet<String> = (0..60).map(|index| format!("q{index}")).collect();
    let error = compare([side("a", &first, &NONE), side("b", &second, &all)], &options(0.0)).unwrap_err();
    assert!(error.to_string().starts_with("no query is held out in both a and b"), "{error}");
}

#[test]
fn other_gold_passages_are_refused() {
    let (first, mut second) = (records(|_| "gold", 4), records(|_| "gold", 4));
    second[2].query.gold_ids = vec!["h".into()];
    let error = compare([side("a", &first, &NONE), side("b", &second, &NONE)], &options(0.0)).unwrap_err();
    assert!(error.to_string().starts_with("query `query q2` has the gold passages [g] in a and [h] in b"), "{error}");
}

/// Differences of +1 for 6 and -1 for 4 of 50 groups of 2: mean 0.04, standard error of clusters by hand.
#[test]
fn where_it_cannot_tell_it_says_how_many_queries_would() {
    let outcome =
        |gold: std::ops::Range<usize>| move |index: usize| if gold.contains(&(index / 2)) { "gold" } else { "other" };
    let (first, second) = (records(outcome(0..6), 100), records(outcome(6..10), 100));
    let found = compared(&first, &second, 0.0);
    let standard_error =
        ((6.0 * 0.96_f64.powi(2) + 4.0 * 1.04_f64.powi(2) + 40.0 * 0.04_f64.powi(2)) / 49.0 / 50.0).sqrt();
    let expected = (100.0 * (1.96 * standard_error / 0.04).powi(2)).ceil() as usize;
    assert_eq!((found.verdict, found.n_needed), (ComparisonVerdict::Unclear, Some(expected)));
    assert!(found.conclusion(["a", "b"]).ends_with(&format!("100 queries cannot tell, about {expected} would")));
    assert_eq!(compared(&first, &second, 0.2).verdict, ComparisonVerdict::Passed, "a margin accepts a small loss");
    let at_the_limit = compared(&records(outcome(0..4), 100), &records(outcome(4..8), 100), 0.0);
    assert_eq!((at_the_limit.verdict, at_the_limit.n_needed), (ComparisonVerdict::Unclear, None));
}

#[test]
fn few_groups_do_not_pass_by_a_narrow_interval() {
    let (good, poor) = (records(|_| "gold", 2), records(|_| "other", 2));
    let one_group = compared(&good, &poor, 0.0);
    assert_eq!((one_group.n_groups, one_group.verdict, one_group.n_needed), (1, ComparisonVerdict::Unclear, Some(40)));
    let three = compared(&records(|index| if index < 2 { "other" } else { "gold" }, 6), &records(|_| "other", 6), 0.0);
    assert_eq!(three.verdict, ComparisonVerdict::Unclear, "{three:?}");
    assert!(three.difference.low < 0.0 && three.difference.high <= 1.0, "{three:?}");
}
