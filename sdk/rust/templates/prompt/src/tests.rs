use super::TenantPrompt;
use querl_sdk::{PromptTask, Settings, testing};

/// Runs the cases of `golden/*.jsonl`, which `querl plugin test` also runs on the component.
#[test]
fn golden_cases_hold() {
    testing::golden("golden").prompt::<TenantPrompt>();
}

#[test]
fn braces_of_a_user_stay_as_they_are() {
    let prompt = testing::prompt::<TenantPrompt>(Settings::none());
    let asked = testing::prompt_input("{domain} 是什么").history("问过{鱼油}");
    let messages = prompt
        .messages(PromptTask::PolicyRewrite, &asked)
        .unwrap();
    assert_eq!(
        messages[1].content,
        "历史：问过{鱼油}\n问题：{domain} 是什么"
    );
}

#[test]
fn an_answer_without_a_score_is_no_guess() {
    let prompt = testing::prompt::<TenantPrompt>(Settings::none());
    assert_eq!(
        prompt.parse_judgement("改写得不错").unwrap_err().code,
        "no_score"
    );
    assert_eq!(prompt.parse_judgement("得分: 4.").unwrap().score, 4.0);
}
