use super::Brevity;
use querl_sdk::{Settings, testing};

/// Runs the cases of `golden/*.jsonl`, which `querl plugin test` also runs on the component.
#[test]
fn golden_cases_hold() {
    testing::golden("golden").reward::<Brevity>();
}

#[test]
fn the_shorter_rewrite_scores_higher() {
    let brevity = testing::reward::<Brevity>(Settings::none());
    let short = testing::episode("胶原咋吃").policy("胶原蛋白肽");
    let long = testing::episode("胶原咋吃").policy("胶原蛋白肽的正确服用方法");
    assert!(brevity.score(&short).unwrap().total > brevity.score(&long).unwrap().total);
}
