#![allow(clippy::unwrap_used)]

use super::*;
use querl_sdk::{CallFailure, Candidate, FailureKind, JudgeScore};

/// A judge's result; `None` if the rewrite was not judged.
type Judgement = Option<Result<JudgeScore, CallFailure>>;

/// Expected values are computed by hand from the formula of the crate's documentation, with tanh to 15 digits.
const TOLERANCE: f64 = 1e-12;

fn candidate(scores: &[f64], judgement: Judgement) -> Candidate {
    let hits = scores.iter().zip(1..).map(|(score, rank)| Hit { reranker_score: *score, rank, ..Hit::default() });
    Candidate { retrieval: Some(Ok(hits.collect())), judgement, ..Candidate::default() }
}

fn scored(score: f64) -> Judgement {
    Some(Ok(JudgeScore { score, reason: String::new() }))
}

fn failure() -> CallFailure {
    CallFailure { kind: FailureKind::Timeout, message: "no answer within 30 s".into() }
}

fn score(policy: Candidate, baseline: Candidate) -> Result<Score, Rejection> {
    let plugin = Competition::new(&Settings::none()).unwrap();
    plugin.score(&Episode { policy, baseline: Some(baseline), ..Episode::default() })
}

fn assert_close(actual: f64, expected: f64) {
    assert!((actual - expected).abs() < TOLERANCE, "{actual} is not {expected}");
}

#[test]
fn golden_cases_hold() {
    querl_sdk::testing::golden("golden").reward::<Competition>();
}

#[test]
fn policy_above_teacher_on_all_parts() {
    // qualities .6*.9 + .4*.8 = .86 and .6*.7 + .4*.6 = .66; judge 4.5/5 - 4/5 = .1
    let score = score(candidate(&[0.9, 0.8, 0.7], scored(4.5)), candidate(&[0.7, 0.6, 0.5], scored(4.0))).unwrap();
    let names: Vec<_> = score.components.iter().map(|part| part.name.as_str()).collect();
    assert_eq!(names, ["judge", "retrieval", "win"]);
    assert_close(score.components[0].value, 0.291_312_612_451_591); // tanh(.3)
    assert_close(score.components[1].value, 0.537_049_566_998_035); // tanh(.6)
    assert_close(score.components[2].value, 0.5);
    assert_close(score.total, 0.441_779_241_157_271); // .35*.2913 + .4*.5370 + .25*.5
}

#[test]
fn without_a_judgement_the_other_weights_carry_the_whole() {
    let plain = || None;
    let score = score(candidate(&[0.9, 0.8, 0.7], plain()), candidate(&[0.7, 0.6, 0.5], plain())).unwrap();
    assert_eq!(score.components.len(), 2);
    assert_close(score.total, (0.4 * 0.537_049_566_998_035 + 0.25 * 0.5) / 0.65);
}

#[test]
fn a_draw_is_zero_and_the_ends_are_the_documented_ones() {
    let same = || candidate(&[0.6, 0.6], scored(3.0));
    assert_eq!(score(same(), same()).unwrap().total, 0.0);
    let best = score(candidate(&[1.0], scored(5.0)), candidate(&[], scored(0.0))).unwrap();
    assert_close(best.total, 0.75 * 0.995_054_753_686_731 + 0.125); // tanh(3)
    let worst = score(candidate(&[], scored(0.0)), candidate(&[1.0], scored(5.0))).unwrap();
    assert_close(worst.total, -0.75 * 0.995_054_753_686_731 - 0.075);
}

#[test]
fn qualities_within_the_tolerance_draw() {
    let win = |policy: f64, baseline: f64| {
        let plain = |score: f64| candidate(&[score], None);
        score(plain(policy), plain(baseline)).unwrap().components[1].value
    };
    assert_eq!((win(0.5 + 5e-10, 0.5), win(0.5, 0.5 + 5e-10)), (0.0, 0.0));
    assert_eq!((win(0.5 + 2e-9, 0.5), win(0.5, 0.5 + 2e-9)), (0.5, -0.3));
}

#[test]
fn quality_takes_the_mean_of_what_is_there_up_to_three() {
    let plugin = Competition::new(&Settings::none()).unwrap();
    let quality = |scores: &[f64]| plugin.quality(&candidate(scores, scored(0.0)).retrieval.unwrap().unwrap(), None);
    assert_close(quality(&[0.5]), 0.5);
    assert_close(quality(&[0.8, 0.4]), 0.6 * 0.8 + 0.4 * 0.6);
    assert_close(quality(&[0.9, 0.6, 0.3, 0.3, 0.3]), 0.6 * 0.9 + 0.4 * 0.6);
    assert_eq!(quality(&[]), 0.0);
}

#[test]
fn finding_nothing_is_an_answer_and_loses() {
    let score = score(candidate(&[], None), candidate(&[0.2], None)).unwrap();
    assert!(score.total < 0.0, "{score:?}");
}

#[test]
fn failed_retrieval_on_either_side_is_a_rejection() {
    let failed = || Candidate { retrieval: Some(Err(failure())), ..candidate(&[], None) };
    let fine = || candidate(&[0.9], None);
    assert_eq!(score(failed(), fine()).unwrap_err().code, "policy_retrieval_failed");
    let rejection = score(fine(), failed()).unwrap_err();
    assert_eq!(
        (rejection.code.as_str(), rejection.detail.as_str()),
        ("baseline_retrieval_failed", "no answer within 30 s")
    );
}

#[test]
fn failed_or_one_sided_judgement_is_a_rejection() {
    let with = |judgement| candidate(&[0.9], judgement);
    let code = |policy, baseline| score(with(policy), with(baseline)).unwrap_err().code;
    assert_eq!(code(Some(Err(failure())), scored(3.0)), "policy_judgement_failed");
    assert_eq!(code(scored(3.0), Some(Err(failure()))), "baseline_judgement_failed");
    assert_eq!(code(scored(3.0), None), "judgement_one_sided");
}

#[test]
fn settings_change_the_constants() {
    let settings =
        Settings::from_pairs([("weight_judge", "0"), ("weight_retrieval", "0"), ("weight_win", "1"), ("loss", "-2")]);
    let plugin = Competition::new(&settings).unwrap();
    let sides = (candidate(&[0.1], scored(1.0)), candidate(&[0.2], scored(1.0)));
    let episode = Episode { policy: sides.0, baseline: Some(sides.1), ..Episode::default() };
    assert_eq!(plugin.score(&episode).unwrap().total, -1.0, "clipped");
    assert_eq!(plugin.range(), -1.0..=1.0);
}

#[test]
fn weights_without_effect_are_refused() {
    let settings = Settings::from_pairs([("weight_retrieval", "0"), ("weight_win", "0")]);
    assert_eq!(Competition::new(&settings).unwrap_err().key, "weight_retrieval");
}
