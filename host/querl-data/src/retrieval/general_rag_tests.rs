#![allow(clippy::unwrap_used)]

use super::*;
use querl_core::records::Context;
use wiremock::matchers::{body_partial_json, method};
use wiremock::{Mock, MockServer, ResponseTemplate};

fn config(url: &str) -> RetrievalConfig {
    serde_json::from_value(json!({"kind": "http", "url": url, "top_k": 2, "max_retries": 0, "timeout_s": 2.0})).unwrap()
}

const LIMITS: RetrievalLimits = RetrievalLimits { top_k: 2, score_threshold: 0.5 };

async fn ask(answer: Value) -> Result<Vec<Hit>, CallFailure> {
    let server = MockServer::start().await;
    let expected = json!({
        "query": "它怎么吃", "rewritten_query": "鱼油 食用方法", "tenant_id": "shop", "kb_name": "default",
        "top_k": 2, "score_threshold": 0.5, "history": "问过鱼油",
    });
    let template = ResponseTemplate::new(200).set_body_json(answer);
    Mock::given(method("POST")).and(body_partial_json(expected)).respond_with(template).mount(&server).await;
    let service = GeneralRag::open(
        &config(&format!("{}/api/chat/general_rag", server.uri())),
        "shop",
        &ServiceContext::default(),
    )
    .unwrap();
    let context = Context { user_profile: String::new(), history_summary: "问过鱼油".into() };
    let request =
        RetrievalRequest { original_query: "它怎么吃", context: &context, rewritten_query: "鱼油 食用方法" };
    service.search(&request, LIMITS).await
}

fn recall(recall: Value) -> Value {
    json!({"status": 200, "data": {"recall": recall}})
}

#[tokio::test]
async fn hits_are_sorted_cut_and_ranked() {
    let hits = ask(recall(json!([
        {"reranker_score": 0.6, "id": 7, "content": "乙"},
        {"reranker_score": "0.9", "doc_id": "a", "page_content": "甲", "score": "12.5"},
        {"reranker_score": 0.7, "id": "c"},
        {"reranker_score": 0.2},
        {"score": 0.99, "text": "not ranked by the service"},
    ])))
    .await
    .unwrap();
    let seen: Vec<(&str, &str, u32)> = hits.iter().map(|hit| (hit.id.as_str(), hit.text.as_str(), hit.rank)).collect();
    assert_eq!(seen, [("a", "甲", 1), ("c", "", 2)]);
    assert_eq!(hits[0].retrieval_score, Some(12.5));
}

#[tokio::test]
async fn markers_mean_that_nothing_was_found() {
    let bare = [json!("lack of knowledge"), json!("Lack_of_Knowledge"), json!(["no knowledge required"])];
    let odd = [json!([{"content": "lack of knowledge"}]), json!("[]"), json!([]), json!(null)];
    for marker in bare.into_iter().chain(odd) {
        assert_eq!(ask(recall(marker)).await.unwrap(), []);
    }
}

#[tokio::test]
async fn missing_or_odd_score_is_a_failure_and_not_zero() {
    for (entry, said) in [
        (json!({"text": "甲"}), "`data.recall[0]` has no `reranker_score`, nor has any other"),
        (json!({"text": "甲", "score": 12.5}), "`score` is `12.5`; expected 0 to 1"),
        (json!({"reranker_score": "high"}), "expected 0 to 1"),
        (json!({"reranker_score": 7.5}), "expected 0 to 1"),
    ] {
        let failure = ask(recall(json!([entry]))).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::InvalidResponse);
        assert!(failure.message.contains(said), "{failure}");
    }
}

#[tokio::test]
async fn another_score_that_all_have_stands_in_for_the_rerankers() {
    let entries = json!([{"similarity": "0.75", "content": "甲"}, {"similarity": 0.8, "content": "乙"}]);
    for recall in [recall(entries.clone()), recall(json!(entries.to_string()))] {
        let hits = ask(recall).await.unwrap();
        let seen: Vec<(&str, f64)> = hits.iter().map(|hit| (hit.text.as_str(), hit.reranker_score)).collect();
        assert_eq!(seen, [("乙", 0.8), ("甲", 0.75)]);
    }
}

#[test]
fn scores_that_a_reranker_replaces_need_not_be_there() {
    let body =
        recall(json!([{"content": "甲"}, {"content": "乙", "reranker_score": 7.5}, {"content": "lack of knowledge"}]));
    let hits = hits(&body, ServiceScores::Replaced).unwrap();
    assert_eq!(hits.iter().map(|hit| hit.text.as_str()).collect::<Vec<_>>(), ["甲", "乙"]);
}

#[tokio::test]
async fn history_goes_as_text_as_messages_or_not_at_all() {
    let context = Context { user_profile: "孕妇".into(), history_summary: "问过鱼油".into() };
    let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query: "问" };
    let expected = [
        ("text", json!("问过鱼油")),
        ("list", json!([{"role": "user", "content": "问过鱼油"}])),
        ("none", json!(null)),
    ];
    for (form, history) in expected {
        let mut config = config("http://127.0.0.1:1/");
        config.history = serde_json::from_value(json!(form)).unwrap();
        let body = GeneralRag::open(&config, "shop", &ServiceContext::default()).unwrap().body(&request, LIMITS);
        assert_eq!(body["history"], history, "{form}");
        assert_eq!(body["user_profile"], "孕妇");
    }
}

#[tokio::test]
async fn status_other_than_success_is_the_services_failure() {
    for status in [json!("error"), json!(500), json!(false), json!("")] {
        for data in [json!(null), json!({"recall": []}), json!({"recall": [{"reranker_score": 0.9}]})] {
            let failure = ask(json!({"status": status, "msg": "kb not loaded", "data": data})).await.unwrap_err();
            assert_eq!(failure.kind, FailureKind::ServerError, "{failure}");
            assert!(failure.message.contains(&format!("answered with status `{status}`: ")), "{failure}");
            assert!(failure.message.contains("kb not loaded"), "{failure}");
        }
    }
}

#[tokio::test]
async fn missing_recall_means_nothing_found_only_where_the_status_says_success() {
    for status in [json!(200), json!("0"), json!("OK"), json!("Success"), json!(true)] {
        assert_eq!(ask(json!({"status": status, "data": {}})).await.unwrap(), []);
    }
    for words in ["success", "操作成功", "请求成功。", "OK.", "no results found", "未找到相关内容"] {
        assert_eq!(ask(json!({"status": 200, "msg": words, "data": null})).await.unwrap(), [], "{words}");
    }
    let with_total = json!({"status": 200, "msg": "查询完毕", "data": {"recall": null, "total": 0, "trace_id": "t"}});
    assert_eq!(ask(with_total).await.unwrap(), []);
    for body in [json!({}), json!({"data": {"recall": null}}), json!({"status": null, "data": {"recall": null}})] {
        let failure = ask(body).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::InvalidResponse);
        assert!(failure.message.contains("neither `data.recall` nor `status`"), "{failure}");
    }
}

/// Regression: a renamed field, or an error in words, that is taken for "nothing found" in every row.
#[tokio::test]
async fn answer_of_another_form_is_a_failure_and_not_empty() {
    for (body, said) in [
        (json!({"status": 200, "data": {"docs": [{"text": "甲"}]}}), "no `data.recall`, but `data` with `docs`"),
        (json!({"status": 200, "data": [{"text": "甲"}]}), "no `data.recall`, but `data` with"),
        (json!({"status": 0, "message": "kb not found", "data": null}), "no `data.recall`, but `kb not found`"),
        (json!({"status": 200, "msg": "查询未成功", "data": null}), "no `data.recall`, but `查询未成功`"),
    ] {
        let failure = ask(body).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::InvalidResponse);
        assert!(failure.message.contains(said), "{failure}");
    }
}

/// Regression: a service that is busy for a moment and says so under status 200, and rows that are lost by it.
#[tokio::test]
async fn failure_in_a_body_is_tried_again() {
    let server = MockServer::start().await;
    let answering =
        |body: Value| Mock::given(method("POST")).respond_with(ResponseTemplate::new(200).set_body_json(body));
    answering(json!({"status": 500, "msg": "busy"})).up_to_n_times(1).mount(&server).await;
    answering(recall(json!([{"reranker_score": 0.9}]))).mount(&server).await;
    let config = RetrievalConfig { max_retries: 1, ..config(&server.uri()) };
    let service = GeneralRag::open(&config, "shop", &ServiceContext::default()).unwrap();
    let context = Context::default();
    let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query: "问" };
    assert_eq!(service.search(&request, LIMITS).await.unwrap().len(), 1);
}

#[tokio::test]
async fn service_that_is_down_is_unreachable() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let service = GeneralRag::open(
        &config(&format!("http://127.0.0.1:{port}/api/chat/general_rag")),
        "shop",
        &ServiceContext::default(),
    )
    .unwrap();
    let context = Context::default();
    let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query: "问" };
    assert_eq!(service.search(&request, LIMITS).await.unwrap_err().kind, FailureKind::Unreachable);
}
