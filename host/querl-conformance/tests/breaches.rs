//! Guests that each violate one rule: exactly the checks of that rule fail.
#![allow(clippy::unwrap_used)]

mod common;

use common::{broken, check, failed, failure, report, repository};
use querl_conformance::Outcome;

#[test]
fn guests_that_break_nothing_pass() {
    for guest in ["odd-reward", "odd-filter", "odd-prompt", "odd-style-scorer"] {
        let report = broken(guest, "none");
        assert!(report.passed(), "{}", report.text());
        assert!(matches!(&check(&report, "golden").outcome, Outcome::Skipped { why } if why == "no golden cases"));
    }
}

#[test]
fn each_breach_of_a_reward_is_found_by_its_checks() {
    for (breach, checks) in [
        ("looks_at_neighbours", vec!["length_and_order", "batch_equals_singles"]),
        ("divides_by_length", vec!["length_and_order", "batch_equals_singles", "inputs_texts"]),
        ("counts_hits", vec!["length_and_order", "batch_equals_singles", "inputs_hits"]),
        ("no_number_without_a_judge", vec!["length_and_order", "batch_equals_singles", "inputs_judgements"]),
        ("infinite_component", vec!["length_and_order", "batch_equals_singles", "inputs_particulars"]),
        ("bad_code", vec!["inputs_particulars"]),
        ("unwraps_failures", vec!["length_and_order", "batch_equals_singles", "inputs_failures"]),
        ("quadratic", vec!["inputs_long"]),
        ("other_default", vec!["defaults"]),
        ("unread_setting", vec!["settings_are_read"]),
        ("refuses_what_is_allowed", vec!["settings_are_accepted"]),
        ("fails_late", vec!["settings_are_accepted"]),
    ] {
        let report = broken("odd-reward", breach);
        assert_eq!(failed(&report), checks, "{breach}: {}", report.text());
    }
}

/// Symptom: a score with 200 names made a report of 18 MB.
#[test]
fn limits_of_components_and_magnitudes_are_found_and_named() {
    let component = querl_plugin::build(&repository().join("tests/guests/odd-reward")).unwrap().component;
    for (breach, said) in [
        ("many_components", "the score has 65 components; expected at most 64"),
        ("many_names", "is one name more than the 256 that a plugin may use in a run"),
        ("huge_component", "component `tokens` is 1e308; expected at most 1e18 in magnitude"),
        ("huge_range", "declares the range -1e308 to 1e308; expected bounds of at most 1e9 in magnitude"),
    ] {
        let options = common::options(&format!("breach = '{breach}'"));
        let report = querl_conformance::run(&component, &options).unwrap();
        assert!(!report.passed() && report.text().contains(said), "{breach}: {}", report.text());
    }
}

#[test]
fn a_failure_says_what_was_sent_what_came_back_and_what_the_contract_says() {
    let report = broken("odd-reward", "looks_at_neighbours");
    let [sent, returned, expected] = failure(&report, "batch_equals_singles");
    assert!(sent.starts_with("alone and in a batch of 64: `batch/1` {"), "{sent}");
    assert!(returned.starts_with(r#"alone {"components":[],"total":"#), "{returned}");
    assert!(expected.starts_with("a result depends on its own episode and the settings, and on nothing else"));
    let report = broken("odd-reward", "no_number_without_a_judge");
    let [sent, returned, _] = failure(&report, "inputs_judgements");
    assert!(sent.starts_with("`not-judged` {") && !sent.contains(r#""judgement""#), "{sent}");
    assert!(
        returned.ends_with("episode `not-judged`: total is NaN; expected a number within the declared range 0 to 1")
    );
    let [_, returned, expected] = failure(&broken("odd-reward", "quadratic"), "inputs_long").map(str::to_owned);
    assert!(returned.contains("episode `long-query`: used up its fuel"), "{returned}");
    assert!(expected.starts_with("each call has limits"), "{expected}");
}

#[test]
fn forms_of_one_reward_that_differ_are_found() {
    let report = common::report_of_component(&common::wat::component("packed-differs"), "");
    assert_eq!(failed(&report), ["packed_equals_records"], "{}", report.text());
    let [sent, returned, expected] = failure(&report, "packed_equals_records");
    assert!(sent.starts_with("packed and as records, a batch of 64 with `batch/0` "), "{sent}");
    assert_eq!(returned, r#"packed {"components":[],"total":0.5}, as records {"components":[],"total":0.25}"#);
    assert_eq!(expected, "`packed-rewards` gives the results of the list form, to the bit");
    let report = common::report("tests/guests/guest-wrong-length", "");
    let outcome = &check(&report, "packed_equals_records").outcome;
    assert!(
        matches!(outcome, Outcome::Skipped { why } if why == "the component exports no `packed-rewards`"),
        "{outcome:?}"
    );
}

/// Symptom: the check passed although every call trapped.
#[test]
fn forms_that_only_fault_are_not_compared() {
    let report = common::report_of_component(&common::wat::component("packed-panics"), "");
    assert!(failed(&report).contains(&"length_and_order"), "{}", report.text());
    let outcome = &check(&report, "packed_equals_records").outcome;
    let expected = "every call ended in a fault, so that no results can be compared";
    assert!(matches!(outcome, Outcome::Skipped { why } if why == expected), "{outcome:?}");
}

#[test]
fn each_breach_of_a_filter_is_found_by_its_checks() {
    for (breach, checks) in [
        ("looks_ahead", vec!["looks_back_only"]),
        ("needs_hits", vec!["length", "inputs_hits"]),
        ("no_code", vec!["length", "inputs_texts"]),
        ("forgets_the_last", vec!["length", "looks_back_only"]),
    ] {
        let report = broken("odd-filter", breach);
        assert_eq!(failed(&report), checks, "{breach}: {}", report.text());
    }
    let report = broken("odd-filter", "looks_ahead");
    let [sent, returned, _] = failure(&report, "looks_back_only");
    assert!(sent.contains(" more behind"), "{sent} {returned}");
    assert!(returned.starts_with(r#"first "keep", then {"drop""#), "{sent} {returned}");
}

#[test]
fn each_breach_of_a_prompt_is_found_by_its_check() {
    for (breach, check, returned) in [
        ("assistant_last", "messages_judge", "the last message is from `assistant`; expected `user`"),
        ("system_later", "messages_policy_rewrite", "a system message is not at the start"),
        ("no_messages", "messages_teacher_rewrite", "returned no messages"),
        ("blank_rewrite", "parse_rewrite", "returned a blank rewrite; expected a rejection"),
        ("any_score", "parse_judgement", "expected 0 to 5, or a rejection"),
    ] {
        let report = broken("odd-prompt", breach);
        assert_eq!(failed(&report), [check], "{}", report.text());
        assert!(failure(&report, check)[1].ends_with(returned), "{}", report.text());
    }
}

#[test]
fn each_breach_of_a_style_scorer_is_found_by_its_checks() {
    for (breach, checks) in [
        ("looks_at_neighbours", vec!["length_and_order", "batch_equals_singles"]),
        ("needs_a_model", vec!["no_style_model"]),
        ("needs_an_answer", vec!["failing_style_model"]),
        ("long_is_better", vec!["inputs_long"]),
        ("expects_a_question", vec!["length_and_order", "batch_equals_singles", "inputs_turns"]),
    ] {
        let report = broken("odd-style-scorer", breach);
        assert_eq!(failed(&report), checks, "{breach}: {}", report.text());
    }
}

#[test]
fn state_within_a_batch_and_missing_results_are_found() {
    let report = report("tests/guests/guest-keeps-state", "");
    assert_eq!(failed(&report), ["length_and_order", "batch_equals_singles"], "{}", report.text());
    let report = common::report("tests/guests/guest-wrong-length", "");
    let [_, returned, _] = failure(&report, "length_and_order");
    assert!(returned.ends_with("returned 0 scores for 1 episodes"), "{returned}");
}

#[test]
fn random_numbers_repeat_from_call_to_call_and_not_from_item_to_item() {
    let report = report("tests/guests/guest-reads-world", "");
    assert_eq!(failed(&report), ["length_and_order", "batch_equals_singles"], "{}", report.text());
    assert!(
        matches!(&check(&report, "manifest").outcome, Outcome::Skipped { why } if why.starts_with("a bare component"))
    );
}

#[test]
fn a_setting_of_the_caller_that_is_refused_is_an_error_and_no_report() {
    let options = common::options("scale = 2.0");
    let error = querl_conformance::run(&repository().join("tests/guests/odd-reward"), &options).unwrap_err();
    assert!(error.to_string().contains("setting `scale`"), "{error}");
}
