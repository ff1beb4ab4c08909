//! Comparisons of two systems on queries that are held out in both runs.
#![allow(clippy::unwrap_used)]

use querl_core::records::{
    CallFailure, Candidate, EvalRecord, FailureKind, Hit, Judgement, QueryRow, Rejection, Reward, Split, SystemAnswer,
};
use querl_eval::{
    ComparedSystem, Comparison, ComparisonOptions, ComparisonVerdict, EvalOptions, Lookups, Metric, compare, evaluate,
};
use std::collections::{BTreeMap, BTreeSet};

/// A record of query `id` in group `group` whose first hit is the gold passage or another one, whose response could not be parsed, or whose
/// retrieval failed.
fn record(id: &str, group: &str, outcome: &str) -> EvalRecord {
    let hit =
        |id: &str| Hit { id: id.into(), text: String::new(), reranker_score: 0.5, retrieval_score: None, rank: 1 };
    let timeout = || CallFailure { kind: FailureKind::Timeout, message: String::new() };
    let (rewrite, retrieval) = match outcome {
        // The form in which `querl eval` writes a response that cannot be parsed.
        "unreadable" => (String::new(), Ok(Vec::new())),
        "outage" => (format!("{outcome} {id}"), Err(timeout())),
        "gold" => (format!("{outcome} {id}"), Ok(vec![hit("g")])),
        _ => (format!("{outcome} {id}"), Ok(vec![hit("other")])),
    };
    let candidate = Candidate { rewrite, retrieval: Some(retrieval), ..Candidate::default() };
    let answer = SystemAnswer { candidate, ..SystemAnswer::default() };
    let query = QueryRow {
        id: id.into(),
        row: id.trim_start_matches('q').parse().unwrap(),
        original_query: format!("query {id}"),
        user_profile: String::new(),
        history_summary: String::new(),
        gold_ids: vec!["g".into()],
        expansion: None,
        group: group.into(),
    };
    let outcome = match outcome {
        "teacher_failed" | "rejected" => Err(Rejection::by_host(outcome, "timeout".to_owned())),
        _ => Ok(answer),
    };
    EvalRecord { system: "rl".into(), query, outcome }
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
fn a_failure_is_a_loss_of_the_first_side_and_not_left_out() {
    let good = records(|_| "gold", 60);
    for (outcome, code) in [("rejected", "rejected"), ("outage", "retrieval timeout")] {
        let failing = records(|index| if index % 2 == 0 { outcome } else { "gold" }, 60);
        let found = compared(&failing, &good, 0.0);
        assert_eq!((found.verdict, found.n, found.means[0]), (ComparisonVerdict::Lost, 60, 0.5));
        assert_eq!(found.failures, [BTreeMap::from([(code.to_owned(), 30)]), BTreeMap::new()]);
        assert!(found.to_text(["a", "b"]).contains(&format!("failed: a on 30 of 60 ({code} 30)")));
        let by_score = ComparisonOptions { metric: Metric::Top1Score, ..options(0.0) };
        let found = compare([side("a", &failing, &NONE), side("b", &good, &NONE)], &by_score).unwrap();
        assert_eq!((found.n, found.means), (60, [0.25, 0.5]), "in metrics whose means leave failures out, too");
    }
}

/// Symptom: a response without a rewrite was a failure here, and a result without hits in `eval.json`.
#[test]
fn a_response_without_a_rewrite_is_a_miss_and_counted_as_in_the_evaluation() {
    let failing = records(|index| if index % 2 == 0 { "unreadable" } else { "gold" }, 60);
    let found = compared(&failing, &records(|_| "gold", 60), 0.0);
    assert_eq!((found.verdict, found.n, found.means[0]), (ComparisonVerdict::Lost, 60, 0.5));
    assert_eq!((&found.failures, found.n_empty), (&[BTreeMap::new(), BTreeMap::new()], [30, 0]));
    assert!(found.to_text(["a", "b"]).contains("\nno hits: a on 30 of 60; "), "{}", found.to_text(["a", "b"]));
    let options = EvalOptions { split: Split::Test, seed: 1, n_resamples: 10, lookups: Lookups::Made };
    let evaluation = evaluate(&failing, &options).unwrap();
    let rl = &evaluation.systems["rl"];
    assert_eq!((rl.n_failed, rl.n_empty), (0, 30));
}

#[test]
fn a_loss_by_gold_passages_is_a_warning_next_to_another_metric() {
    let (good, poor) = (records(|index| if index % 4 == 0 { "other" } else { "gold" }, 80), records(|_| "other", 80));
    let said = |first: &[EvalRecord], second: &[EvalRecord]| compared(first, second, 0.0).by_gold(["a", "b"]);
    let (gain, loss) = (said(&good, &poor), said(&poor, &good));
    assert!(gain.starts_with("top-1 % of a against b, by the gold passages of 80 queries: +75.0 ["), "{gain}");
    assert!(loss.starts_with("warning: top-1 % of a against b, ") && loss.contains(": -75.0 ["), "{loss}");
}

#[test]
fn an_outage_of_the_second_side_is_left_out_and_no_gain() {
    let poor = records(|_| "other", 60);
    for outcome in ["outage", "teacher_failed"] {
        let failing = records(|index| if index < 40 { outcome } else { "gold" }, 60);
        let found = compared(&poor, &failing, 0.0);
        assert_eq!((found.verdict, found.n, found.n_reference_failed), (ComparisonVerdict::Lost, 20, 40));
        let text = found.to_text(["a", "b"]);
        assert!(text.contains("left out: 40 queries without a value of b"), "{text}");
    }
    let down = records(|_| "outage", 60);
    let error = compare([side("a", &poor, &NONE), side("b", &down, &NONE)], &options(0.0)).unwrap_err();
    assert!(error.to_string().starts_with("b has a failed call for each of 60 queries"), "{error}");
    let unreadable = records(|index| if index < 40 { "unreadable" } else { "gold" }, 60);
    assert_eq!(compared(&poor, &unreadable, 0.0).n, 60, "the second model's own failure counts");

    let judged = |failed: usize| {
        let mut judged = records(|_| "gold", 60);
        for (index, record) in judged.iter_mut().enumerate() {
            let failure = CallFailure { kind: FailureKind::ServerError, message: String::new() };
            let scored = Judgement::Scored { score: 4.0, reason: String::new() };
            record.outcome.as_mut().unwrap().candidate.judgement =
                if index < failed { Judgement::Failed(failure) } else { scored };
        }
        judged
    };
    let by_judge = ComparisonOptions { metric: Metric::JudgeScore, ..options(0.0) };
    let (all, some) = (judged(0), judged(30));
    let found = compare([side("a", &all, &NONE), side("b", &some, &NONE)], &by_judge).unwrap();
    assert_eq!((found.n, found.n_reference_failed, found.difference.mean), (30, 30, 0.0));
    let found = compare([side("a", &some, &NONE), side("b", &all, &NONE)], &by_judge).unwrap();
    assert_eq!((found.n, found.difference.mean), (60, -2.0));
    assert_eq!(found.failures[0], BTreeMap::from([("judge server error".to_owned(), 30)]));
}

#[test]
fn the_worst_reward_is_the_lowest_of_both_sides() {
    let rewarded = |total: f64| {
        let mut rewarded = records(|_| "gold", 60);
        for record in &mut rewarded {
            record.outcome.as_mut().unwrap().reward = Some(Reward { total, components: Vec::new() });
        }
        rewarded
    };
    let (mut first, second) = (rewarded(3.0), rewarded(2.0));
    first[0].outcome.as_mut().unwrap().reward = None;
    let by_reward = ComparisonOptions { metric: Metric::Reward, ..options(0.0) };
    let found = compare([side("a", &first, &NONE), side("b", &second, &NONE)], &by_reward).unwrap();
    assert!((found.means[0] - (59.0 * 3.0 + 2.0) / 60.0).abs() < 1e-12, "{found:?}");
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

/// Regression: one logged query without clicks made two runs incomparable.
#[test]
fn queries_with_gold_passages_in_one_run_alone_are_left_out_and_counted() {
    let (mut first, mut second) = (records(|_| "gold", 40), records(|_| "other", 40));
    (0..10).for_each(|index| first[index].query.gold_ids.clear());
    second[39].query.gold_ids.clear();
    let found = compared(&first, &second, 0.0);
    assert_eq!((found.n, found.n_gold_of_one_side, found.means), (29, 11, [1.0, 0.0]));
    let text = found.to_text(["a", "b"]);
    assert!(text.contains("left out: 11 queries with gold passages in one of a and b alone\n"), "{text}");
    assert!(text.contains("\n29 queries in"), "{text}");
    // A metric that does not need gold passages includes these queries.
    for record in first.iter_mut().chain(&mut second) {
        record.outcome.as_mut().unwrap().win = Some(0.5);
    }
    for metric in [Metric::Top1Score, Metric::WinRate] {
        let options = ComparisonOptions { metric, ..options(0.0) };
        let found = compare([side("a", &first, &NONE), side("b", &second, &NONE)], &options).unwrap();
        assert_eq!((found.n, found.n_gold_of_one_side), (40, 0), "{}", metric.name());
    }
    first.iter_mut().for_each(|record| record.query.gold_ids.clear());
    let error = compare([side("a", &first, &NONE), side("b", &second[..39], &NONE)], &options(0.0)).unwrap_err();
    assert!(error.to_string().starts_with("each of 39 queries has gold passages in a or b alone"), "{error}");
}

/// Differences of +1 for 6 and -1 for 4 of 50 groups of 2: mean 0.04, cluster standard error computed by hand.
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
    assert_eq!(compared(&first, &second, 0.1).verdict, ComparisonVerdict::Passed, "a margin accepts a small loss");
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
    // Equal differences have a standard error of 0.
    let two = compared(&records(|_| "gold", 4), &records(|_| "other", 4), 0.0);
    assert_eq!((two.verdict, two.difference.low), (ComparisonVerdict::Unclear, -1.0));
    let twenty = compared(&records(|_| "gold", 40), &records(|_| "other", 40), 0.0);
    assert_eq!(twenty.verdict, ComparisonVerdict::Passed, "{twenty:?}");
}

#[test]
fn groups_without_a_loss_do_not_prove_that_there_is_none() {
    // Different rewrites that both find no gold passage in 20 groups: a loss of 15 points would remain unobserved in 1 of 20 samples.
    let (first, second) = (records(|_| "other", 40), records(|_| "another", 40));
    let none = compared(&first, &second, 0.0);
    assert_eq!((none.verdict, none.n_needed, none.n_equal_rewrites), (ComparisonVerdict::Unclear, None, 0));
    assert!((none.difference.low + 0.15).abs() < 1e-12 && (none.difference.high - 0.15).abs() < 1e-12, "{none:?}");
    assert!(
        none.conclusion(["a", "b"]).ends_with("without a larger --margin; these 40 exclude a loss of more than 0.1500")
    );
    let text = none.to_text(["a", "b"]);
    assert!(text.contains("up to 15.0% of unseen groups may (3 of 20, rule of three)"), "{text}");
    let with_margin = compared(&first, &second, 0.1);
    assert_eq!((with_margin.verdict, with_margin.n_needed), (ComparisonVerdict::Unclear, Some(60)), "30 groups");
    let (first, second) = (records(|_| "other", 62), records(|_| "another", 62));
    assert_eq!(compared(&first, &second, 0.1).verdict, ComparisonVerdict::Passed);
    // One gain and no loss.
    let one_gain =
        compared(&records(|index| if index == 0 { "gold" } else { "other" }, 60), &records(|_| "another", 60), 0.0);
    assert_eq!(one_gain.verdict, ComparisonVerdict::Unclear, "{one_gain:?}");
}

#[test]
fn equal_rewrites_lose_nothing() {
    let few = records(|_| "other", 2);
    let same = compared(&few, &few, 0.0);
    assert_eq!((same.verdict, same.n_groups, same.n_equal_rewrites), (ComparisonVerdict::Passed, 1, 2));
    let text = same.to_text(["a", "b"]);
    assert!(text.contains("all rewrites are equal: the difference is 0"), "{text}");
    // Regression: one equal rewrite passed where those of queries without gold passages differed.
    let but_one = |outcome: &'static str| {
        let mut records = records(|index| if index == 0 { "other" } else { outcome }, 8);
        records[1..].iter_mut().for_each(|record| record.query.gold_ids.clear());
        records
    };
    let one = compared(&but_one("gold"), &but_one("other"), 0.0);
    assert_eq!((one.verdict, one.n, one.n_equal_rewrites), (ComparisonVerdict::Unclear, 1, 1));
    let text = one.to_text(["a", "b"]);
    assert!(text.contains("only 1 group of queries") && !text.contains("all rewrites are equal"), "{text}");
    let without_gold = but_one("other").split_off(1);
    let sides = [side("a", &without_gold, &NONE), side("b", &without_gold, &NONE)];
    let none = compare(sides, &options(0.0)).unwrap_err().to_string();
    assert!(none.ends_with("top1 applies to none of 7 queries; choose one of top1_score"), "{none}");
}

#[test]
fn a_margin_above_a_tenth_of_the_scale_is_refused() {
    let good = records(|_| "gold", 4);
    let refused = |metric, margin| {
        let options = ComparisonOptions { metric, ..options(margin) };
        compare([side("a", &good, &NONE), side("b", &good, &NONE)], &options).unwrap_err().to_string()
    };
    assert_eq!(refused(Metric::Top1, 0.2), "--margin is 0.2; expected 0 to 0.1 for top1");
    assert_eq!(refused(Metric::JudgeScore, 1.0), "--margin is 1; expected 0 to 0.5 for judge_score");
}
