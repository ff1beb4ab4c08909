//! Means, intervals, paired differences and failures of hand-made records.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use querl_core::records::{
    CallFailure, EvalRecord, FailureKind, Judgement, Rejection, Reward, RewardComponent, SampleCounts, SecondHits,
    Split, StyleProbability, SystemAnswer,
};
use querl_eval::{
    ComparedSystem, ComparisonOptions, EvalError, EvalOptions, Evaluation, Lookups, Metric, SystemEvaluation, compare,
    evaluate, evaluate_seeds, table,
};
use std::collections::BTreeSet;
use support::{answer, hit, invented_records, record};

const OPTIONS: EvalOptions = EvalOptions { split: Split::Test, seed: 42, n_resamples: 200, lookups: Lookups::Made };

/// An answer for a row. The gold passage of row 2 is `p0002`, and so on.
fn found(row: usize, gold_rank: Option<u32>, score: f64) -> Result<SystemAnswer, Rejection> {
    let gold = format!("p{row:04}");
    let hits = (1..=3).map(|rank| hit(if gold_rank == Some(rank) { &gold } else { "p9999" }, score, rank)).collect();
    Ok(answer("改写", hits))
}

fn rejected() -> Result<SystemAnswer, Rejection> {
    Err(Rejection::new("no_rewrite", "nothing but a think tag"))
}

fn retrieval_down() -> Result<SystemAnswer, Rejection> {
    let mut made = answer("改写", vec![]);
    made.candidate.retrieval =
        Some(Err(CallFailure { kind: FailureKind::Timeout, message: "no answer in 5 s".into() }));
    Ok(made)
}

fn with_reward(mut outcome: Result<SystemAnswer, Rejection>, total: f64) -> Result<SystemAnswer, Rejection> {
    if let Ok(answer) = &mut outcome {
        answer.reward =
            Some(Reward { total, components: vec![RewardComponent { name: "retrieval".into(), value: 2.0 * total }] });
    }
    outcome
}

fn mean(system: &SystemEvaluation, metric: Metric) -> Option<f64> {
    system.metrics[&metric].map(|interval| interval.mean)
}

fn system(records: &[EvalRecord]) -> SystemEvaluation {
    evaluate(records, &OPTIONS).unwrap().systems["rl"].clone()
}

#[test]
fn top1_and_mrr_read_the_rank_of_the_first_gold_passage() {
    let ranks = [Some(1), Some(2), Some(3), None];
    let records: Vec<_> = (2..).zip(ranks).map(|(row, rank)| record("rl", row, found(row, rank, 0.5))).collect();
    let system = system(&records);
    assert_eq!(mean(&system, Metric::Top1), Some(0.25));
    assert_eq!(mean(&system, Metric::Mrr), Some((1.0 + 0.5 + 1.0 / 3.0) / 4.0));
    assert_eq!(mean(&system, Metric::Top1Score), Some(0.5));
}

#[test]
fn failed_records_are_misses_for_accuracy_and_left_out_of_other_means() {
    let records = [
        record("rl", 2, with_reward(found(2, Some(1), 0.8), 0.4)),
        record("rl", 3, rejected()),
        record("rl", 4, retrieval_down()),
        record("rl", 5, with_reward(found(5, Some(1), 0.6), 0.2)),
    ];
    let system = system(&records);
    assert_eq!(mean(&system, Metric::Top1), Some(0.5));
    assert_eq!(mean(&system, Metric::Mrr), Some(0.5));
    assert!((mean(&system, Metric::Top1Score).unwrap() - 0.7).abs() < 1e-12);
    assert!((mean(&system, Metric::Reward).unwrap() - 0.3).abs() < 1e-12);
    assert_eq!((system.n_scored, system.n_failed, system.n_empty), (2, 2, 0));
    assert_eq!(system.failures, [("no_rewrite".to_owned(), 1), ("retrieval timeout".to_owned(), 1)].into());
    assert!((system.components["retrieval"].unwrap().mean - 0.6).abs() < 1e-12);
}

#[test]
fn an_empty_answer_is_scored_lowest_and_not_called_a_failure() {
    let records = [record("rl", 2, found(2, Some(1), 0.8)), record("rl", 3, Ok(answer("改写", vec![])))];
    let system = system(&records);
    assert_eq!(mean(&system, Metric::Top1Score), Some(0.4));
    assert_eq!(mean(&system, Metric::Top1), Some(0.5));
    assert_eq!((system.n_scored, system.n_failed, system.n_empty), (2, 0, 1));
}

#[test]
fn queries_without_gold_count_for_neither_top1_nor_mrr() {
    let mut without = record("rl", 3, found(3, None, 0.5));
    without.query.gold_ids.clear();
    let evaluation = evaluate(&[record("rl", 2, found(2, Some(1), 0.5)), without], &OPTIONS).unwrap();
    assert_eq!((evaluation.n, evaluation.n_gold), (2, 1));
    assert_eq!(mean(&evaluation.systems["rl"], Metric::Top1), Some(1.0));
}

#[test]
fn a_service_without_passage_ids_has_no_accuracy_not_even_for_failures() {
    let nameless = Ok(answer("改写", vec![hit("", 0.7, 1)]));
    let system = system(&[record("rl", 2, nameless), record("rl", 3, rejected())]);
    assert_eq!(system.metrics[&Metric::Top1], None);
    assert_eq!(system.metrics[&Metric::Mrr], None);
    assert_eq!(mean(&system, Metric::Top1Score), Some(0.7));
}

#[test]
fn judge_score_is_of_judged_answers_only() {
    let judged = |row, judgement| {
        let mut made = found(row, None, 0.5).unwrap();
        made.candidate.judgement = judgement;
        record("rl", row, Ok(made))
    };
    let failure = CallFailure { kind: FailureKind::ServerError, message: "500".into() };
    let system = system(&[
        judged(2, Judgement::Scored { score: 4.0, reason: String::new() }),
        judged(3, Judgement::NotSampled),
        judged(4, Judgement::Failed(failure)),
    ]);
    assert_eq!(mean(&system, Metric::JudgeScore), Some(4.0));
    assert_eq!(system.metrics[&Metric::CostPer1000], None);
}

fn rl_sft(evaluation: &Evaluation, metric: Metric) -> querl_eval::Difference {
    evaluation.pairs["rl-sft"][&metric].unwrap()
}

#[test]
fn paired_difference_is_over_queries_that_both_systems_have() {
    let records = [
        record("rl", 2, with_reward(found(2, Some(1), 0.5), 0.5)),
        record("rl", 3, with_reward(found(3, Some(1), 0.5), 0.1)),
        record("rl", 4, with_reward(found(4, Some(1), 0.5), 9.0)),
        record("sft", 2, with_reward(found(2, None, 0.5), 0.2)),
        record("sft", 3, with_reward(found(3, Some(2), 0.5), 0.0)),
        record("sft", 4, rejected()),
    ];
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    let reward = rl_sft(&evaluation, Metric::Reward);
    assert_eq!(reward.n, 2);
    assert!((reward.mean - 0.2).abs() < 1e-12 && reward.low <= reward.mean && reward.mean <= reward.high);
    let top1 = rl_sft(&evaluation, Metric::Top1);
    assert_eq!((top1.mean, top1.n), (1.0, 3));
    assert!(top1.excludes_zero());
    assert_eq!(evaluation.pairs.keys().collect::<Vec<_>>(), ["rl-sft"]);
}

/// Symptom: missing recordings counted as defeats of the teacher, so that RL seemed better than it.
#[test]
fn pairs_with_the_teacher_leave_out_the_queries_that_it_has_no_rewrite_of() {
    let missing = || Err(Rejection::by_host("teacher_failed", "not recorded".to_owned()));
    let records = [
        record("rl", 2, found(2, Some(1), 0.5)),
        record("rl", 3, found(3, Some(1), 0.5)),
        record("rl", 4, found(4, Some(2), 0.5)),
        record("rl", 5, rejected()),
        record("teacher", 2, missing()),
        record("teacher", 3, missing()),
        record("teacher", 4, found(4, Some(1), 0.5)),
        record("teacher", 5, found(5, Some(1), 0.5)),
        record("raw", 2, found(2, None, 0.5)),
        record("raw", 3, found(3, None, 0.5)),
        record("raw", 4, found(4, None, 0.5)),
        record("raw", 5, found(5, None, 0.5)),
    ];
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    let top1 = |pair: &str| evaluation.pairs[pair][&Metric::Top1].map(|found| (found.mean, found.n));
    assert_eq!(top1("rl-teacher"), Some((-1.0, 2)), "a failure of RL is a miss, one of the teacher is left out");
    assert_eq!((top1("teacher-raw"), top1("rl-raw")), (Some((1.0, 2)), Some((0.5, 4))));
    assert_eq!(mean(&evaluation.systems["teacher"], Metric::Top1), Some(0.5));

    let records =
        [on_second("rl", 2, 1), on_second("rl", 3, 1), record("teacher", 2, missing()), on_second("teacher", 3, 1)];
    let second = evaluate(&records, &OPTIONS).unwrap().second_retrieval.unwrap();
    let found = second.pairs["rl-teacher"][&Metric::Top1].unwrap();
    assert_eq!((found.mean, found.n), (0.0, 1));
}

/// Symptom: a failed retrieval of the teacher's rewrite was a gain of RL here, and left out by `querl release check`.
#[test]
fn queries_are_paired_as_by_a_release_check() {
    let records = [
        record("rl", 2, found(2, Some(1), 0.5)),
        record("rl", 3, found(3, Some(2), 0.5)),
        record("rl", 4, retrieval_down()),
        record("teacher", 2, retrieval_down()),
        record("teacher", 3, found(3, Some(1), 0.5)),
        record("teacher", 4, found(4, Some(1), 0.5)),
    ];
    let found = evaluate(&records, &OPTIONS).unwrap().pairs["rl-teacher"][&Metric::Top1].unwrap();
    assert_eq!((found.mean, found.n), (-1.0, 2));
    let seen = BTreeSet::new();
    let side = |system| ComparedSystem { name: system, system, records: &records, seen: &seen };
    let options = ComparisonOptions { metric: Metric::Top1, margin: 0.0, seed: 42, n_resamples: 200 };
    let checked = compare([side("rl"), side("teacher")], &options).unwrap();
    assert_eq!((checked.difference.mean, checked.n), (found.mean, found.n));

    // A failure of the first retriever leaves nothing out on the second one.
    let mut down = on_second("teacher", 2, 2);
    down.outcome.as_mut().unwrap().candidate.retrieval = retrieval_down().unwrap().candidate.retrieval;
    let evaluation = evaluate(&[on_second("rl", 2, 1), down], &OPTIONS).unwrap();
    assert_eq!(evaluation.pairs["rl-teacher"][&Metric::Top1], None);
    let found = evaluation.second_retrieval.unwrap().pairs["rl-teacher"][&Metric::Top1].unwrap();
    assert_eq!((found.mean, found.n), (1.0, 1));
}

#[test]
fn constant_improvement_has_an_interval_without_width_though_the_systems_spread() {
    let rows = 2..42;
    let quality = |row: usize| (row % 10) as f64 / 10.0;
    let mut records: Vec<_> =
        rows.clone().map(|row| record("sft", row, with_reward(found(row, None, 0.5), quality(row)))).collect();
    records.extend(rows.map(|row| record("rl", row, with_reward(found(row, None, 0.5), quality(row) + 0.25))));
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    let (difference, alone) =
        (rl_sft(&evaluation, Metric::Reward), evaluation.systems["rl"].metrics[&Metric::Reward].unwrap());
    assert!((difference.low - 0.25).abs() < 1e-9 && (difference.high - 0.25).abs() < 1e-9);
    assert!(alone.high - alone.low > 0.1);
}

#[test]
fn order_of_records_does_not_matter_and_the_seed_does() {
    let mut records = invented_records(40);
    let first = evaluate(&records, &OPTIONS).unwrap();
    records.reverse();
    assert_eq!(evaluate(&records, &OPTIONS).unwrap(), first);
    assert_ne!(evaluate(&records, &EvalOptions { seed: 43, ..OPTIONS }).unwrap().pairs, first.pairs);
}

#[test]
fn eval_json_has_the_documented_shape_and_reads_back() {
    let evaluation = evaluate(&[record("raw", 2, found(2, Some(1), 0.5))], &OPTIONS).unwrap();
    let one = serde_json::json!({"mean": 1.0, "low": 1.0, "high": 1.0});
    let half = serde_json::json!({"mean": 0.5, "low": 0.5, "high": 0.5});
    let expected = serde_json::json!({
        "split": "test", "n": 1, "n_groups": 1, "n_gold": 1, "seed": 42, "n_resamples": 200,
        "systems": {"raw": {
            "top1": one, "mrr": one, "top1_score": half, "win_rate": null, "judge_score": null, "reward": null,
            "latency_ms": null, "cost_per_1000": null, "components": {}, "n_scored": 1, "n_failed": 0, "n_empty": 0,
            "n_without_reward": 1, "failures": {},
        }},
        "pairs": {},
        "controls": {
            "systems": {"raw": {
                "n_chars": {"mean": 2.0, "low": 2.0, "high": 2.0}, "kept_terms": {"mean": 0.0, "low": 0.0, "high": 0.0},
                "new_gold_terms": null, "n_answers": 1, "n_unchanged": 0,
            }},
            "length_matched": {},
        },
    });
    assert_eq!(serde_json::to_value(&evaluation).unwrap(), expected);
}

#[test]
fn eval_json_pairs_have_mean_interval_and_count_and_read_back() {
    let records = [record("rl", 2, found(2, Some(1), 0.75)), record("sft", 2, found(2, None, 0.25))];
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    let one = serde_json::json!({"mean": 1.0, "low": 1.0, "high": 1.0, "n": 1, "n_groups": 1});
    let half = serde_json::json!({"mean": 0.5, "low": 0.5, "high": 0.5, "n": 1, "n_groups": 1});
    let expected = serde_json::json!({"rl-sft": {
        "top1": one, "mrr": one, "top1_score": half, "judge_score": null, "reward": null, "win_rate": null,
    }});
    let text = serde_json::to_string(&evaluation).unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap()["pairs"], expected);
    assert_eq!(serde_json::from_str::<Evaluation>(&text).unwrap(), evaluation);
}

/// A record whose second retriever finds the gold passage at `rank`.
fn on_second(system: &str, row: usize, rank: usize) -> EvalRecord {
    let mut made = found(row, None, 0.5).unwrap();
    let mut ids = vec!["p9999".to_owned(); rank - 1];
    ids.push(format!("p{row:04}"));
    made.second_retrieval = Some(SecondHits { retriever: "lexical".into(), ids });
    record(system, row, Ok(made))
}

#[test]
fn the_second_retriever_has_metrics_and_pairs_of_its_own_where_a_failure_is_a_miss() {
    let records = [
        on_second("rl", 2, 1),
        on_second("rl", 3, 2),
        record("rl", 4, rejected()),
        on_second("sft", 2, 2),
        on_second("sft", 3, 2),
        on_second("sft", 4, 1),
    ];
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    let second = evaluation.second_retrieval.clone().unwrap();
    assert_eq!(second.retriever, "lexical");
    let mean = |system: &str, metric| second.systems[system][&metric].unwrap().mean;
    assert!((mean("rl", Metric::Top1) - 1.0 / 3.0).abs() < 1e-12 && (mean("rl", Metric::Mrr) - 0.5).abs() < 1e-12);
    assert!((mean("sft", Metric::Mrr) - 2.0 / 3.0).abs() < 1e-12);
    let difference = second.pairs["rl-sft"][&Metric::Mrr].unwrap();
    assert!((difference.mean + 1.0 / 6.0).abs() < 1e-12 && difference.n == 3);
    let text = serde_json::to_string(&evaluation).unwrap();
    assert_eq!(serde_json::from_str::<Evaluation>(&text).unwrap(), evaluation);
}

#[test]
fn pairs_of_equal_length_are_compared_without_the_longer_rewrites() {
    let written = |system: &str, row, rank, rewrite: &str| {
        let mut made = found(row, rank, 0.5).unwrap();
        made.candidate.rewrite = rewrite.into();
        record(system, row, Ok(made))
    };
    let records = [
        written("rl", 2, Some(1), "鱼油的食用方法和注意事项以及禁忌"),
        written("sft", 2, None, "鱼油"),
        written("rl", 3, Some(1), "鱼油用量"),
        written("sft", 3, Some(1), "鱼油用法"),
    ];
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    assert_eq!(rl_sft(&evaluation, Metric::Top1).mean, 0.5);
    let matched = evaluation.controls.unwrap().length_matched["rl-sft"][&Metric::Top1].unwrap();
    assert_eq!((matched.mean, matched.n), (0.0, 1));
}

#[test]
fn pass_at_k_is_averaged_over_the_queries_with_samples() {
    let sampled = |row, n_gold_first| {
        let mut made = found(row, None, 0.5).unwrap();
        made.samples = Some(SampleCounts { n: 4, n_gold_first });
        record("rl", row, Ok(made))
    };
    let evaluation = evaluate(&[sampled(2, 1), sampled(3, 0), record("rl", 4, found(4, None, 0.5))], &OPTIONS).unwrap();
    let of_rl = &evaluation.pass_at_k["rl"];
    let means: Vec<(usize, f64)> = of_rl.k.iter().map(|(k, found)| (*k, found.mean)).collect();
    assert_eq!((of_rl.n_samples, means), (4, vec![(1, 0.125), (2, 0.25), (4, 0.5)]));
    let json = serde_json::to_value(&evaluation).unwrap();
    assert_eq!(json["pass_at_k"]["rl"]["k"]["2"]["mean"], 0.25);
}

/// Records that were written by versions without these fields.
#[test]
fn records_of_earlier_versions_are_read_and_have_no_second_retriever() {
    let line = r#"{"system": "rl", "query": {"id": "a", "row": 2, "original_query": "q", "group": "a"}, "outcome": {"Ok":
        {"candidate": {"rewrite": "r"}, "reward": null, "win": null, "latency_ms": null, "cost": null}}}"#;
    let evaluation = evaluate(&[serde_json::from_str(line).unwrap()], &OPTIONS).unwrap();
    assert!(evaluation.second_retrieval.is_none() && evaluation.pass_at_k.is_empty());
}

#[test]
fn seeds_average_each_query_before_the_bootstrap() {
    let run = |rewards: [f64; 2]| -> Vec<EvalRecord> {
        let rl = (2..4).zip(rewards).map(|(row, reward)| record("rl", row, with_reward(found(row, None, 0.5), reward)));
        rl.chain((2..4).map(|row| record("sft", row, with_reward(found(row, None, 0.5), 0.0)))).collect()
    };
    let evaluation = evaluate_seeds(&[run([0.1, 0.3]), run([0.3, 0.5])], &OPTIONS).unwrap();
    let pooled = rl_sft(&evaluation.pooled, Metric::Reward);
    assert!((pooled.mean - 0.3).abs() < 1e-12);
    assert_eq!((pooled.n, evaluation.pooled.n, evaluation.pooled.systems["rl"].n_scored), (2, 2, 4));
    let means: Vec<f64> = evaluation.runs.iter().map(|run| rl_sft(run, Metric::Reward).mean).collect();
    assert!((means[0] - 0.2).abs() < 1e-12 && (means[1] - 0.4).abs() < 1e-12);
    assert_eq!(rl_sft(&evaluation.runs[0], Metric::Reward).over_runs, None);
}

/// Regression: a gain that held over the queries, but not over the seeds, was starred.
#[test]
fn a_difference_of_several_runs_needs_an_interval_over_the_runs_too() {
    let run = |reward: f64| -> Vec<EvalRecord> {
        let of =
            |system, reward| (2..42).map(move |row| record(system, row, with_reward(found(row, None, 0.5), reward)));
        of("rl", reward).chain(of("sft", 0.0)).collect()
    };
    let pooled =
        |rewards: [f64; 3]| rl_sft(&evaluate_seeds(&rewards.map(run), &OPTIONS).unwrap().pooled, Metric::Reward);
    let (unsure, sure) = (pooled([0.1, 0.2, 0.9]), pooled([0.4, 0.4, 0.5]));
    // scipy.stats.t.interval(0.95, 2, loc=0.4, scale=scipy.stats.sem([0.1, 0.2, 0.9]))
    let [low, high] = unsure.over_runs.unwrap();
    assert!(unsure.low > 0.0 && (low + 0.6828).abs() < 1e-3 && (high - 1.4828).abs() < 1e-3, "{unsure:?}");
    assert!(!unsure.excludes_zero() && sure.excludes_zero(), "{sure:?}");
    let without_sft: Vec<EvalRecord> = run(0.4).into_iter().filter(|record| record.system == "rl").collect();
    let pooled = evaluate_seeds(&[run(0.4), without_sft], &OPTIONS).unwrap().pooled;
    assert_eq!(pooled.pairs["rl-sft"][&Metric::Reward], None, "one run has the pair");
}

#[test]
fn answers_without_a_reward_are_counted() {
    let records = [
        record("rl", 2, with_reward(found(2, Some(1), 0.5), 0.5)),
        record("rl", 3, found(3, Some(1), 0.5)),
        record("sft", 2, rejected()),
        record("sft", 3, found(3, None, 0.5)),
    ];
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    assert_eq!(evaluation.systems["rl"].n_without_reward, 1);
    let text = table(&evaluation, &support::facts());
    assert!(text.contains("rewrites without a reward (one cause: the teacher has none to compare with): rl 1 of 2; left out of the means"), "{text}");
    let without = records.map(|mut record| {
        record.outcome.as_mut().into_iter().for_each(|answer| answer.reward = None);
        record
    });
    let text = table(&evaluate(&without, &OPTIONS).unwrap(), &support::facts());
    assert!(!text.contains("without a reward"), "a run without rewards: {text}");
}

/// Regression: the verdict rested on the one group with gold passages.
#[test]
fn a_difference_of_one_group_shows_nothing() {
    let of = |system, rank| (2..42).map(move |row| record(system, row, found(row, rank, 0.5)));
    let mut records: Vec<EvalRecord> = of("rl", Some(1)).chain(of("sft", None)).collect();
    records.iter_mut().filter(|record| record.query.row > 3).for_each(|record| record.query.gold_ids.clear());
    let evaluation = evaluate(&records, &OPTIONS).unwrap();
    let top1 = rl_sft(&evaluation, Metric::Top1);
    assert_eq!((top1.mean, top1.n, top1.n_groups, evaluation.n_groups), (1.0, 2, 1, 20));
    assert!(!top1.excludes_zero());
    let text = table(&evaluation, &support::facts());
    let expected = "Only 1 of 20 groups have test queries with gold passages, so that what follows may be chance. By top-1 % of 2 of 40 queries, RL was";
    assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(expected), "{text}");
}

#[test]
fn one_seed_pooled_equals_the_run_itself() {
    let records = invented_records(30);
    let evaluation = evaluate_seeds(std::slice::from_ref(&records), &OPTIONS).unwrap();
    assert_eq!(evaluation.pooled, evaluate(&records, &OPTIONS).unwrap());
}

#[test]
fn impossible_input_is_an_error_that_names_system_and_query() {
    let message = |records: &[EvalRecord]| evaluate(records, &OPTIONS).unwrap_err().to_string();
    assert!(matches!(evaluate(&[], &OPTIONS), Err(EvalError::NoRecords)));
    assert!(matches!(evaluate_seeds(&[], &OPTIONS), Err(EvalError::NoRecords)));
    let one = record("rl", 2, found(2, None, 0.5));
    let none = EvalOptions { n_resamples: 0, ..OPTIONS };
    assert!(matches!(evaluate(std::slice::from_ref(&one), &none), Err(EvalError::NoResamples)));
    let expected = "system `rl` has two records of query `q0002` (row 2); expected one";
    assert_eq!(message(&[one.clone(), one.clone()]), expected);
    let expected = "system `rl` has no record of query `q0003` (row 3), which other systems have; evaluate it again";
    assert_eq!(message(&[one, record("sft", 3, rejected())]), expected);
    let expected = "system `rl`, query `q0002`: `reward` is NaN; expected a finite number";
    assert_eq!(message(&[record("rl", 2, with_reward(found(2, None, 0.5), f64::NAN))]), expected);
}

#[test]
fn the_same_query_in_two_rows_is_two_queries() {
    let mut again = record("rl", 3, found(2, Some(1), 0.5));
    again.query.id = "q0002".into();
    let evaluation = evaluate(&[record("rl", 2, found(2, Some(1), 0.5)), again], &OPTIONS).unwrap();
    assert_eq!(evaluation.n, 2);
}

/// An answer with a style. `honest`: probability by the run's style model; `audited`: by the second model.
fn in_style(text: &str, honest: f64, audited: Option<f64>) -> Result<SystemAnswer, Rejection> {
    let classes = |honest: f64| {
        let class = |label: &str, probability| StyleProbability { label: label.into(), probability };
        Some(vec![class("诚实", honest), class("售前", 1.0 - honest)])
    };
    let mut made = answer(text, vec![]);
    made.candidate.style = classes(honest);
    made.audit_style = audited.and_then(classes);
    Ok(made)
}

/// Regression: two means with overlapping intervals were reported instead of the paired difference.
#[test]
fn style_shifts_are_paired_differences_of_each_style_model() {
    let rows = [(2, 0.1, 0.4), (3, 0.5, 0.8), (4, 0.6, 0.9), (5, 0.2, 0.5), (6, 0.3, 0.6)];
    let before = rows.map(|(row, honest, _)| record("sft", row, in_style(&format!("答{row}"), honest, Some(honest))));
    // The second model gives a smaller shift than the first one, which was used as reward.
    let after = rows.map(|(row, before, after)| record("rl", row, in_style("不确定。", after, Some(before + 0.1))));
    let raw = rows.map(|(row, ..)| record("raw", row, Ok(answer("问", vec![]))));
    let evaluation = evaluate(&[before, after, raw].concat(), &OPTIONS).unwrap();
    let style = evaluation.style.unwrap();
    let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
    let shift = style.model.shifts["rl-sft"]["诚实"].unwrap();
    for found in [shift.mean, shift.low, shift.high] {
        near(found, 0.3);
    }
    assert_eq!(shift.n, 5);
    near(style.model.shifts["rl-sft"]["售前"].unwrap().mean, -0.3);
    near(style.audit.as_ref().unwrap().shifts["rl-sft"]["诚实"].unwrap().mean, 0.1);
    near(style.model.systems["sft"]["诚实"].unwrap().mean, 0.34);
    assert_eq!(style.model.systems["raw"]["诚实"], None);
    assert_eq!(style.model.shifts["sft-raw"]["诚实"], None);
    assert_eq!((style.distinct["sft"], style.distinct["rl"]), (1.0, 0.2));
    assert_eq!((style.n_chars["sft"].unwrap().mean, style.n_chars["rl"].unwrap().mean), (2.0, 4.0));
}

#[test]
fn answers_without_a_style_have_no_style_evaluation() {
    let evaluation = evaluate(&[record("rl", 2, found(2, Some(1), 0.5))], &OPTIONS).unwrap();
    assert_eq!(evaluation.style, None);
    let json = serde_json::to_value(&evaluation).unwrap();
    assert!(json.get("style").is_none() && json.get("lookups").is_none(), "{json}");
}

/// Regression: a run without retrieval reported retrieval metrics, as zeros and ties.
#[test]
fn without_retrieval_its_metrics_do_not_apply() {
    let row = |system, row| {
        let mut made = with_reward(Ok(answer("答", vec![])), 0.5);
        made.as_mut().unwrap().win = Some(0.5);
        record(system, row, made)
    };
    let records = [row("sft", 2), row("sft", 3), row("rl", 2), row("rl", 3)];
    let evaluation = evaluate(&records, &EvalOptions { lookups: Lookups::None, ..OPTIONS }).unwrap();
    let rl = &evaluation.systems["rl"];
    for metric in [Metric::Top1, Metric::Mrr, Metric::Top1Score, Metric::WinRate] {
        assert_eq!(mean(rl, metric), None, "{metric:?}");
    }
    let pair = &evaluation.pairs["rl-sft"];
    assert_eq!((pair[&Metric::Top1Score], pair[&Metric::WinRate]), (None, None));
    assert_eq!((mean(rl, Metric::Reward), pair[&Metric::Reward].unwrap().mean), (Some(0.5), 0.0));
    assert_eq!((rl.n_scored, rl.n_failed, rl.n_empty), (2, 0, 0));
    let read: Evaluation = serde_json::from_value(serde_json::to_value(&evaluation).unwrap()).unwrap();
    assert_eq!(read, evaluation);
}
