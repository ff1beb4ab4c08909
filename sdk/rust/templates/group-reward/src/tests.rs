use super::Diversity;
use querl_sdk::{Settings, testing};

/// Runs the cases of `golden/*.jsonl`, which `querl plugin test` also runs on the component.
#[test]
fn golden_cases_hold() {
    testing::golden("golden").group_reward::<Diversity>();
}

#[test]
fn a_sample_without_a_rewrite_drops_out_alone() {
    let diversity = testing::group_reward::<Diversity>(Settings::none());
    let results = diversity.score([
        testing::episode("胶原咋吃").id("a").policy("胶原蛋白肽"),
        testing::episode("胶原咋吃").id("b"),
    ]);
    assert_eq!(results[0].as_ref().unwrap().total, 1.0);
    assert_eq!(
        results[1].as_ref().unwrap_err().code,
        "policy_rewrite_missing"
    );
}
