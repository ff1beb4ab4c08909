use super::Length;
use querl_sdk::{Settings, Verdict, testing};

/// Runs the cases of `golden/*.jsonl`, which `querl plugin test` also runs on the component.
#[test]
fn golden_cases_hold() {
    testing::golden("golden").filter::<Length>();
}

#[test]
fn reason_says_how_long_and_how_long_it_may_be() {
    let filter = testing::filter::<Length>(Settings::from_pairs([("max_chars", "3")]));
    let verdicts = filter.check([
        testing::sample("鱼油", "深海鱼油"),
        testing::sample("鱼油", "鱼油丸"),
    ]);
    assert_eq!(
        verdicts,
        [
            Verdict::drop("too_long", "4 characters; at most 3 allowed"),
            Verdict::Keep
        ]
    );
}
