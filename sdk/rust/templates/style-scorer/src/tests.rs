use super::OneStyle;
use querl_sdk::{FailureKind, Settings, testing};

/// Runs the cases of `golden/*.jsonl`, which `querl plugin test` also runs on the component.
#[test]
fn golden_cases_hold() {
    testing::golden("golden").style_scorer::<OneStyle>();
}

#[test]
fn a_model_that_fails_or_lacks_the_class_gives_no_score() {
    let scorer = testing::style_scorer::<OneStyle>(Settings::from_pairs([("label", "投诉")]));
    let dialogue = testing::dialogue().user("在吗").assistant("在的");
    let failing = testing::failing_style_model(FailureKind::Timeout, "no response within 30 s");
    let other = testing::style_model([("售前", 1.0)]);
    assert_eq!(
        scorer.score(&dialogue, &failing).unwrap_err().code,
        "no_style"
    );
    assert_eq!(
        scorer.score(&dialogue, &other).unwrap_err().code,
        "unknown_class"
    );
}
