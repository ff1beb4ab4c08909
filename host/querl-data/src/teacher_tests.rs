#![allow(clippy::unwrap_used)]

use super::*;
use serde_json::{Value, json};
use wiremock::matchers::{body_partial_json, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

fn row(query: &str, history: &str) -> QueryRow {
    QueryRow {
        id: query_id(query, "", history),
        row: 2,
        original_query: query.into(),
        user_profile: String::new(),
        history_summary: history.into(),
        gold_ids: Vec::new(),
        group: query.into(),
    }
}

fn openai(settings: Value) -> TeacherConfig {
    let mut config = json!({"kind": "openai", "model": "gpt-5", "api_key_env": "", "max_retries": 0, "timeout_s": 2.0});
    config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    serde_json::from_value(config).unwrap()
}

async fn ask(settings: Value, expected: Value, answer: Value) -> Result<Completion, CallFailure> {
    let server = MockServer::start().await;
    let template = ResponseTemplate::new(200).set_body_json(answer);
    let mock = Mock::given(path("/v1/chat/completions")).and(body_partial_json(expected)).respond_with(template);
    mock.mount(&server).await;
    let mut config = openai(settings);
    config.base_url = Some(format!("{}/v1/", server.uri()));
    let messages = [Message { role: "user".into(), content: "改写".into() }];
    let answer = open_teacher(&config, &EndpointConfig::default(), &ServiceContext::default())
        .unwrap()
        .rewrite(&row("怎么吃", ""), &messages)
        .await;
    let sent: Value = server.received_requests().await.unwrap()[0].body_json().unwrap();
    assert_eq!(sent.get("temperature").is_some(), config.temperature.is_some());
    answer
}

#[tokio::test]
async fn recording_is_found_by_query_and_context() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rewrites.jsonl");
    std::fs::write(
        &path,
        "{\"original_query\": \"怎么吃\", \"history_summary\": \"问过鱼油\", \"rewritten_query\": \"鱼油 食用方法\"}\n",
    )
    .unwrap();
    let config = TeacherConfig { kind: TeacherKind::Recorded, path: Some(path), ..TeacherConfig::default() };
    let teacher = open_teacher(&config, &EndpointConfig::default(), &ServiceContext::default()).unwrap();
    assert_eq!(teacher.name(), "recorded (stand-in)");
    assert_eq!(teacher.rewrite(&row("怎么吃", "问过鱼油"), &[]).await.unwrap().text, "鱼油 食用方法");
    let failure = teacher.rewrite(&row("怎么吃", ""), &[]).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::NotRecorded);
}

#[tokio::test]
async fn completion_carries_text_tokens_and_cost() {
    let prices = json!({"price_prompt_per_million": 2.0, "price_completion_per_million": 10.0});
    let expected =
        json!({"model": "gpt-5", "max_completion_tokens": 200, "messages": [{"role": "user", "content": "改写"}]});
    let usage = json!({"prompt_tokens": 1000, "completion_tokens": 100});
    let answer = json!({"choices": [{"message": {"content": "鱼油 食用方法"}}], "usage": usage});
    let completion = ask(prices, expected, answer).await.unwrap();
    assert_eq!(completion.text, "鱼油 食用方法");
    assert_eq!((completion.prompt_tokens, completion.completion_tokens), (Some(1000), Some(100)));
    assert!((completion.cost.unwrap() - 0.003).abs() < 1e-12);
    assert!(completion.latency_ms.is_some());
}

#[tokio::test]
async fn older_endpoints_get_the_parameters_they_know() {
    let settings = json!({"legacy_max_tokens": true, "max_tokens": 64, "temperature": 0.3});
    let expected = json!({"max_tokens": 64, "temperature": 0.3});
    let answer = json!({"choices": [{"message": {"content": [{"type": "text", "text": "鱼油"}]}}]});
    let completion = ask(settings, expected, answer).await.unwrap();
    assert_eq!((completion.text.as_str(), completion.cost), ("鱼油", None));
}

#[tokio::test]
async fn answer_that_is_cut_off_or_without_text_is_invalid() {
    let cases = [
        (json!(null), "length", "the answer was cut off (finish_reason `length`); raise max_tokens"),
        (json!("鱼油 食用"), "length", "the answer was cut off (finish_reason `length`); raise max_tokens"),
        (
            json!("鱼油"),
            "content_filter",
            "(finish_reason `content_filter`); the endpoint's filter holds this text back",
        ),
        (json!(" "), "stop", "the answer holds no text (finish_reason `stop`)"),
        (json!("鱼油 食"), "weariness", "ended with finish_reason `weariness`, which does not say that it is whole"),
    ];
    for (content, finish_reason, said) in cases {
        let answer = json!({"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]});
        let failure = ask(json!({}), json!({}), answer).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::InvalidResponse);
        assert!(failure.message.ends_with(said), "{failure}");
    }
}

#[tokio::test]
async fn every_word_for_a_whole_answer_is_known() {
    for finish_reason in [json!(null), json!("stop"), json!("STOP"), json!("eos_token"), json!("end_turn")] {
        let answer = json!({"choices": [{"message": {"content": "鱼油"}, "finish_reason": finish_reason}]});
        assert_eq!(ask(json!({}), json!({}), answer).await.unwrap().text, "鱼油", "{finish_reason}");
    }
}

/// Regression: half a rewrite of a service that ran out of room, and a gateway's error taken for an answer without text.
#[tokio::test]
async fn failures_that_come_as_successes_are_tried_again_and_quoted() {
    let half =
        json!({"choices": [{"message": {"content": "鱼油 食"}, "finish_reason": "insufficient_system_resource"}]});
    let limited = json!({"error": {"message": "upstream rate limited", "code": 429}});
    let empty = json!({"error": {"message": "Insufficient credits", "code": "402"}});
    for (answer, kind, n_asked, said) in [
        (half, FailureKind::ServerError, 2, "the answer was broken off (finish_reason `insufficient_system_resource`)"),
        (limited, FailureKind::RateLimited, 2, "answered with an error: upstream rate limited"),
        (empty, FailureKind::Unauthorized, 1, "answered with an error: Insufficient credits"),
    ] {
        let server = MockServer::start().await;
        let template = ResponseTemplate::new(200).set_body_json(answer);
        Mock::given(path("/v1/chat/completions")).respond_with(template).mount(&server).await;
        let config = openai(json!({"base_url": format!("{}/v1", server.uri()), "max_retries": 1}));
        let services = ServiceContext::default();
        let teacher = open_teacher(&config, &EndpointConfig::default(), &services).unwrap();
        let messages = [Message { role: "user".into(), content: "改写".into() }];
        let failure = teacher.rewrite(&row("怎么吃", ""), &messages).await.unwrap_err();
        assert!(failure.kind == kind && failure.message.ends_with(said), "{failure}");
        assert_eq!(server.received_requests().await.unwrap().len(), n_asked);
        let spent = services.account().of_stage("");
        assert_eq!((spent.prompt_tokens, spent.lost > 0), (0, said.contains("broken off")), "{spent:?}");
    }
}

/// Regression: a count of tokens that no answer has, as a price.
#[tokio::test]
async fn absurd_counts_of_tokens_are_none() {
    let usage = json!({"prompt_tokens": u64::MAX, "completion_tokens": 1});
    let answer = json!({"choices": [{"message": {"content": "鱼油"}}], "usage": usage});
    assert_eq!(ask(json!({}), json!({}), answer).await.unwrap().prompt_tokens, None);
}

#[test]
fn missing_settings_are_named() {
    let said = |config: &TeacherConfig| {
        open_teacher(config, &EndpointConfig::default(), &ServiceContext::default()).err().unwrap().to_string()
    };
    assert_eq!(said(&openai(json!({}))), "teacher.base_url is not set; kind `openai` needs it");
    let keyed = openai(json!({"base_url": "http://127.0.0.1/v1", "api_key_env": "QUERL_NO_SUCH_KEY"}));
    assert!(
        said(&keyed)
            .starts_with("teacher.api_key_env names the environment variable `QUERL_NO_SUCH_KEY`, which is not set")
    );
    let recorded = TeacherConfig { kind: TeacherKind::Recorded, ..TeacherConfig::default() };
    assert!(said(&recorded).starts_with("teacher.path is not set"));
}
