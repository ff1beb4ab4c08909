#![allow(clippy::unwrap_used)]

use super::*;
use querl_core::ports::Silent;
use serde_json::Value;
use wiremock::matchers::{method, path};
use wiremock::{Mock, MockServer, Request, ResponseTemplate};

fn prompt(text: &str) -> Vec<Message> {
    vec![Message { role: "user".into(), content: text.into() }]
}

/// A service that is done at once: each question's answer is its text.
async fn service() -> MockServer {
    let server = MockServer::start().await;
    let batch = json!({"id": "b", "status": "completed", "output_file_id": "out"});
    let answer = |text: &str| {
        let usage = json!({"prompt_tokens": 100, "completion_tokens": 10});
        let body = json!({"choices": [{"message": {"content": text}}], "usage": usage});
        let response = json!({"status_code": 200, "body": body});
        json!({"custom_id": question_id(&prompt(text)), "response": response}).to_string()
    };
    let answers = [answer("a"), answer("b")].join("\n");
    let json = |body: Value| ResponseTemplate::new(200).set_body_json(body);
    Mock::given(path("/files")).respond_with(json(json!({"id": "in"}))).mount(&server).await;
    Mock::given(method("POST")).and(path("/batches")).respond_with(json(batch.clone())).mount(&server).await;
    Mock::given(path("/batches/b")).respond_with(json(batch)).mount(&server).await;
    let file = ResponseTemplate::new(200).set_body_string(answers);
    Mock::given(path("/files/out/content")).respond_with(file).mount(&server).await;
    server
}

fn n_questions(request: &Request) -> usize {
    String::from_utf8_lossy(&request.body).lines().filter(|line| line.starts_with('{')).count()
}

/// Keeps away: one prompt paid for as often as there are rows that have it.
#[tokio::test]
async fn rows_with_the_same_prompt_are_one_question_that_is_charged_once() {
    let (server, folder) = (service().await, tempfile::tempdir().unwrap());
    let config = serde_json::from_value(json!({
        "kind": "openai", "model": "m", "base_url": server.uri(), "api_key_env": "", "batch": true,
        "price_prompt_per_million": 2.0, "price_completion_per_million": 10.0,
    }))
    .unwrap();
    let outside = Outside::default();
    let teacher = BatchTeacher::open(&config, &outside).unwrap();
    let prompts = ["a", "b", "a"].map(prompt);
    let asked = prompts.clone().into_iter().map(Ok);
    let answers = teacher.ask(asked, &folder.path().join("batches.json"), &Silent).await.unwrap();
    let mut texts = Vec::new();
    for prompt in &prompts {
        texts.push(answers.of(prompt).await.unwrap().unwrap().unwrap().text);
    }
    assert_eq!(texts, ["a", "b", "a"]);
    assert_eq!(n_questions(&server.received_requests().await.unwrap()[0]), 2);
    assert!(answers.of(&prompt("c")).await.unwrap().is_none());
    let by_provider = outside.account().by_stage().remove("").unwrap();
    let spent = &by_provider["teacher m (batch)"];
    assert_eq!((spent.calls, spent.joined), (2, 1));
    assert!((spent.cost - 2.0 * 0.00015).abs() < 1e-12, "{spent:?}");
    assert_eq!(by_provider["teacher m (batch) files"].calls, 4);
}
