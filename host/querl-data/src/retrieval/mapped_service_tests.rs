//! Each builtin adapter against an answer in the form that its service documents.
#![allow(clippy::unwrap_used)]

use crate::retrieval::mapping::{Mapping, RequestValues};
use crate::{LocalModels, RetrievalLimits, ServiceContext, open_retrieval_backend};
use querl_core::config::RetrievalConfig;
use querl_core::ports::{Embedder, LocalModelError, RetrievalRequest};
use querl_core::records::{CallFailure, Context, FailureKind, Hit};
use serde_json::{Value, json};
use std::sync::Arc;
use wiremock::matchers::{body_json, header, method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

const LIMITS: RetrievalLimits = RetrievalLimits { top_k: 3, score_threshold: 0.25 };

/// What `service` finds with `settings`, where a server at `route` answers `answer` to exactly `request`.
async fn ask(settings: Value, route: &str, request: Value, answer: Value) -> Result<Vec<Hit>, CallFailure> {
    let server = MockServer::start().await;
    let template = ResponseTemplate::new(200).set_body_json(answer);
    Mock::given(method("POST")).and(path(route)).and(body_json(request)).respond_with(template).mount(&server).await;
    search(settings, &format!("{}{route}", server.uri())).await
}

async fn search(mut settings: Value, url: &str) -> Result<Vec<Hit>, CallFailure> {
    settings["kind"] = json!("http");
    settings["url"] = json!(url);
    settings["max_retries"] = json!(0);
    let config: RetrievalConfig = serde_json::from_value(settings).unwrap();
    let context = Context { user_profile: "孕妇".into(), history_summary: "问过鱼油".into() };
    let request =
        RetrievalRequest { original_query: "它怎么吃", context: &context, rewritten_query: "鱼油 食用方法" };
    open_retrieval_backend(&config, "shop", &LocalModels::default(), &ServiceContext::default())
        .unwrap()
        .search(&request, LIMITS)
        .await
}

/// Id, text, score and rank of each.
fn seen(hits: &[Hit]) -> Vec<(&str, &str, f64, u32)> {
    let round = |score: f64| (score * 1e6).round() / 1e6;
    hits.iter().map(|hit| (hit.id.as_str(), hit.text.as_str(), round(hit.reranker_score), hit.rank)).collect()
}

#[tokio::test]
async fn dify_external_knowledge() {
    let request = json!({
        "knowledge_id": "AAA-BBB", "query": "鱼油 食用方法",
        "retrieval_setting": {"top_k": 3, "score_threshold": 0.25},
    });
    let answer = json!({"records": [
        {"metadata": {"path": "s3://dify/knowledge.txt", "description": "d"}, "score": 0.66, "title": "b.txt", "content": "乙"},
        {"metadata": {"doc_id": "a"}, "score": 0.98, "title": "knowledge.txt", "content": "甲"},
        {"metadata": {}, "score": 0.2, "title": "c", "content": "丙"},
    ]});
    let hits = ask(json!({"service": "dify", "kb_name": "AAA-BBB"}), "/retrieval", request, answer).await.unwrap();
    assert_eq!(seen(&hits), [("a", "knowledge.txt\n甲", 0.98, 1), ("", "b.txt\n乙", 0.66, 2)]);
}

#[tokio::test]
async fn ragflow_chunks_and_failures_in_an_answer_of_status_200() {
    let request = json!({
        "question": "鱼油 食用方法", "dataset_ids": ["b2a6"], "page": 1, "page_size": 30, "similarity_threshold": 0.25,
    });
    let answer = json!({"code": 0, "data": {"chunks": [{
        "content": "ragflow content", "content_ltks": "ragflow content", "document_id": "5c59", "document_keyword": "1.txt",
        "highlight": "<em>ragflow</em> content", "id": "d784", "image_id": "", "important_keywords": [""], "kb_id": "c7ee",
        "positions": [""], "similarity": 0.9669436601210759, "term_similarity": 1.0, "vector_similarity": 0.8898122004035864,
    }], "doc_aggs": [{"count": 1, "doc_id": "5c59", "doc_name": "1.txt"}], "total": 1}});
    let settings = json!({"service": "ragflow", "kb_name": "b2a6"});
    let hits = ask(settings.clone(), "/api/v1/retrieval", request.clone(), answer).await.unwrap();
    assert_eq!(seen(&hits), [("d784", "ragflow content", 0.966944, 1)]);
    let answer = json!({"code": 102, "message": "`datasets` is required."});
    let failure = ask(settings, "/api/v1/retrieval", request, answer).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::ServerError);
    assert!(
        failure.message.contains("answered with `/code` `102`") && failure.message.contains("is required"),
        "{failure}"
    );
}

/// Regression: a page of 3, for which RAGFlow ranks 3 candidates only, and one of 100, which it rejects.
#[test]
fn ragflow_s_pages_are_long_enough_to_rank_and_short_enough_to_be_answered() {
    let config: RetrievalConfig = serde_json::from_value(json!({"kind": "http", "service": "ragflow"})).unwrap();
    let mapping = Mapping::resolve(&config).unwrap();
    let values = RequestValues { tenant: "", kb_name: "k", embedding: None };
    let context = Context::default();
    let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query: "问" };
    for (top_k, page_size) in [(1, 30), (30, 30), (50, 50), (64, 64), (65, 64)] {
        let body = mapping.body(&values, &request, RetrievalLimits { top_k, score_threshold: 0.0 });
        assert_eq!(body["page_size"], json!(page_size));
    }
}

/// The route of 0.2 declares its threshold with `ge=0, le=1` (server/knowledge_base/kb_doc_api.py).
#[tokio::test]
async fn chatchat_0_2_takes_thresholds_up_to_1_and_sends_distances() {
    let request =
        json!({"query": "鱼油 食用方法", "knowledge_base_name": "samples", "top_k": 3, "score_threshold": 1.0});
    let answer = json!([
        {"page_content": "乙", "metadata": {"source": "b.md", "id": "b"}, "type": "Document", "id": null, "score": 0.8},
        {"page_content": "甲", "metadata": {"source": "a.md"}, "type": "Document", "id": "a", "score": 0.3},
    ]);
    let settings = json!({"service": "chatchat_0.2", "kb_name": "samples"});
    let route = "/knowledge_base/search_docs";
    let hits = ask(settings.clone(), route, request.clone(), answer.clone()).await.unwrap();
    assert_eq!(seen(&hits), [("a", "甲", 0.85, 1), ("b", "乙", 0.6, 2)]);
    assert_eq!(hits[0].retrieval_score, Some(0.3));
    let wrapped = json!({"code": 200, "msg": "success", "data": answer});
    assert_eq!(ask(settings.clone(), route, request.clone(), wrapped).await.unwrap(), hits);
    // What 0.3 sends for every passage.
    let unscored = json!([{"page_content": "甲", "metadata": {}, "type": "Document", "id": "a", "score": 3.0}]);
    let failure = ask(settings, route, request, unscored).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::InvalidResponse);
    assert!(
        failure.message.contains("passage 0 has the score `3.0`; expected 0 to 2; set retrieval.mapping"),
        "{failure}"
    );
}

#[tokio::test]
async fn elasticsearch_scores_without_an_upper_end() {
    let request = json!({
        "size": 3, "min_score": 10.0 / 3.0,
        "query": {"multi_match": {"query": "鱼油 食用方法", "fields": ["title^2", "text", "content"]}},
    });
    let answer = |timed_out: bool, n_failed: u32| {
        json!({
            "took": 5, "timed_out": timed_out, "_shards": {"total": 2, "successful": 2, "skipped": 0, "failed": n_failed},
            "hits": {"total": {"value": 2, "relation": "eq"}, "max_score": 30.0, "hits": [
                {"_index": "kb", "_id": "1", "_score": 30.0, "_source": {"title": "鱼油", "text": "甲"}},
                {"_index": "kb", "_id": "2", "_score": 10.0, "_source": {"id": "own", "content": "乙"}},
            ]},
        })
    };
    let settings = json!({"service": "elasticsearch"});
    let hits = ask(settings.clone(), "/kb/_search", request.clone(), answer(false, 0)).await.unwrap();
    assert_eq!(seen(&hits), [("1", "鱼油\n甲", 0.75, 1), ("own", "乙", 0.5, 2)]);
    // Half of an answer is none.
    for (half, said) in [(answer(true, 0), "`/timed_out` `true`"), (answer(false, 1), "`/_shards/failed` `1`")] {
        let failure = ask(settings.clone(), "/kb/_search", request.clone(), half).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::ServerError);
        assert!(failure.message.contains(said), "{failure}");
    }
}

#[tokio::test]
async fn qdrant_is_sent_the_vector_that_an_embedding_service_makes() {
    let server = MockServer::start().await;
    let embedded = json!({"object": "list", "model": "bge", "data": [
        {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]},
    ], "usage": {"prompt_tokens": 8, "total_tokens": 8}});
    Mock::given(method("POST"))
        .and(path("/v1/embeddings"))
        .and(body_json(json!({"model": "bge", "input": ["查询：鱼油 食用方法"]})))
        .respond_with(ResponseTemplate::new(200).set_body_json(embedded))
        .mount(&server)
        .await;
    let request = json!({"query": [0.5, -0.25], "limit": 3, "score_threshold": 0.25, "with_payload": true});
    let answer = json!({"time": 0.001, "status": "ok", "result": {"points": [
        {"id": 42, "version": 3, "score": 0.75, "payload": {"title": "鱼油", "text": "甲"}},
        {"id": "9b8d", "version": 3, "score": 0.5, "payload": {"id": "own", "content": "乙"}},
    ]}});
    let settings = json!({"service": "qdrant", "embedding": {
        "kind": "openai", "url": format!("{}/v1/embeddings", server.uri()), "model": "bge", "query_prefix": "查询：",
    }});
    let hits = ask(settings, "/collections/kb/points/query", request, answer).await.unwrap();
    assert_eq!(seen(&hits), [("42", "鱼油\n甲", 0.75, 1), ("own", "乙", 0.5, 2)]);
}

/// Makes the same vector of everything.
struct Constant;

impl Embedder for Constant {
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
        assert_eq!(texts, ["查询：鱼油"]);
        Ok(vec![vec![0.25, 0.5]])
    }

    fn dimension(&self) -> usize {
        2
    }

    fn digest(&self) -> &str {
        "constant"
    }
}

#[tokio::test]
async fn a_model_in_this_process_makes_the_vector_too() {
    let server = MockServer::start().await;
    let request = json!({"query": [0.25, 0.5], "limit": 3, "score_threshold": 0.25, "with_payload": true});
    let answer = json!({"status": "ok", "result": {"points": [{"id": 1, "score": 0.5, "payload": {"text": "甲"}}]}});
    let template = ResponseTemplate::new(200).set_body_json(answer);
    Mock::given(body_json(request)).respond_with(template).mount(&server).await;
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "http", "service": "qdrant", "url": server.uri(), "max_retries": 0,
        "embedding": {"kind": "local", "path": "unused", "query_prefix": "查询："},
    }))
    .unwrap();
    let models = LocalModels { embedder: Some(Arc::new(Constant)), ..LocalModels::default() };
    let context = Context::default();
    let request = RetrievalRequest { original_query: "鱼油", context: &context, rewritten_query: "鱼油" };
    let hits = open_retrieval_backend(&config, "shop", &models, &ServiceContext::default())
        .unwrap()
        .search(&request, LIMITS)
        .await
        .unwrap();
    assert_eq!(seen(&hits), [("1", "甲", 0.5, 1)]);
}

#[tokio::test]
async fn a_mapping_of_ones_own_needs_no_adapter() {
    let settings = json!({"service": "custom", "kb_name": "k", "mapping": {
        "request": {"q": "{{query}} -> {{rewritten_query}}", "who": ["{{tenant}}", "{{user_profile}}", "{{history}}"], "n": "{{top_k}}"},
        "list": ["/found"], "text": ["/body"], "score": ["/cosine"], "score_range": [-1.0, 1.0],
    }});
    let request = json!({"q": "它怎么吃 -> 鱼油 食用方法", "who": ["shop", "孕妇", "问过鱼油"], "n": 3});
    let answer = json!({"found": [{"body": "甲", "cosine": "0.5"}, {"body": "乙", "cosine": -0.9}]});
    let hits = ask(settings, "/search", request, answer).await.unwrap();
    assert_eq!(seen(&hits), [("", "甲", 0.75, 1)]);
}

#[tokio::test]
async fn a_setting_changes_an_adapter_and_leaves_the_rest() {
    let settings = json!({"service": "dify", "mapping": {"id": ["/metadata/path"], "title": ["/metadata/section"]}});
    let request = json!({
        "knowledge_id": "default", "query": "鱼油 食用方法",
        "retrieval_setting": {"top_k": 3, "score_threshold": 0.25},
    });
    let answer = json!({"records": [{"metadata": {"path": "p"}, "score": 0.5, "title": "t", "content": "甲"}]});
    let hits = ask(settings, "/retrieval", request, answer).await.unwrap();
    assert_eq!(seen(&hits), [("p", "甲", 0.5, 1)]);
}

#[tokio::test]
async fn an_answer_that_is_none_is_a_failure() {
    let request = json!({
        "knowledge_id": "default", "query": "鱼油 食用方法",
        "retrieval_setting": {"top_k": 3, "score_threshold": 0.25},
    });
    for (answer, said) in [
        (json!({"results": []}), "no list of passages at `/records`"),
        (json!({"records": "none"}), "no list of passages at `/records`"),
        (json!({"records": [{"content": "甲"}]}), "passage 0 has no score at `/score`"),
        (json!({"records": [{"content": "甲", "score": null}]}), "passage 0 has no score"),
        (json!({"records": [{"content": "甲", "score": 7.5}]}), "passage 0 has the score `7.5`; expected 0 to 1"),
    ] {
        let failure = ask(json!({"service": "dify"}), "/retrieval", request.clone(), answer).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::InvalidResponse);
        assert!(failure.message.contains(said), "{failure}");
    }
}

#[test]
fn a_mapping_that_cannot_be_used_is_refused_before_any_call() {
    let refused = |settings: Value| {
        let mut settings = settings;
        settings["kind"] = json!("http");
        settings["url"] = json!("http://127.0.0.1:1/");
        let config: RetrievalConfig = serde_json::from_value(settings).unwrap();
        open_retrieval_backend(&config, "shop", &LocalModels::default(), &ServiceContext::default())
            .err()
            .unwrap()
            .to_string()
    };
    for (settings, said) in [
        (json!({"service": "custom"}), "retrieval.mapping.request is not set; retrieval.service = \"custom\" needs it"),
        (
            json!({"service": "custom", "mapping": {"request": {"q": "{{query}}"}, "list": ["/a"]}}),
            "retrieval.mapping.text is not set; retrieval.service = \"custom\" needs it",
        ),
        (
            json!({"service": "dify", "mapping": {"request": {"q": "{{qeury}}"}}}),
            "retrieval.mapping.request has `{{qeury}}`, which stands for nothing; known are query, rewritten_query",
        ),
        (
            json!({"service": "dify", "mapping": {"id": ["metadata/id"]}}),
            "retrieval.mapping.id has `metadata/id`, which is no JSON pointer; write it as `/metadata/id`",
        ),
        (
            json!({"service": "dify", "mapping": {"score_range": [1.0, 0.0]}}),
            "retrieval.mapping.score_range is [1.0, 0.0]; expected two numbers, the lower first",
        ),
        (
            json!({"service": "ragflow", "mapping": {"top_k_range": [9, 3]}}),
            "retrieval.mapping.top_k_range is [9, 3]; expected two numbers, the lower first",
        ),
        (
            json!({"service": "chatchat"}),
            "retrieval.mapping.score is not set, and the service sends none that is known; set it, or retrieval.rerank",
        ),
        (
            json!({"service": "dify", "mapping": {"score_range": [0.0, 1.0], "score_half": 3.0}}),
            "retrieval.mapping.score_half is set together with score_range; leave one out",
        ),
        (
            json!({"service": "qdrant"}),
            "retrieval.mapping.request has `{{embedding}}`, which retrieval.embedding makes; set its kind",
        ),
    ] {
        let error = refused(settings);
        assert!(error.starts_with(said), "{error}");
    }
}

#[tokio::test]
async fn the_key_goes_where_the_service_looks_for_it() {
    let server = MockServer::start().await;
    Mock::given(header("authorization", "Bearer secret-of-dify"))
        .respond_with(ResponseTemplate::new(200).set_body_json(json!({"records": []})))
        .mount(&server)
        .await;
    // SAFETY: no other test reads or writes this variable.
    unsafe { std::env::set_var("QUERL_TEST_DIFY_KEY", "secret-of-dify") };
    let hits = search(json!({"service": "dify", "api_key_env": "QUERL_TEST_DIFY_KEY"}), &server.uri()).await.unwrap();
    assert_eq!(hits, []);
}

/// Regression: 401 from every Elasticsearch whose key is right.
#[tokio::test]
async fn elasticsearch_and_opensearch_get_keys_in_their_own_forms() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "admin:s3cret\n").unwrap();
    for (settings, expected) in [
        (json!({"service": "elasticsearch"}), "ApiKey admin:s3cret"),
        (json!({"service": "elasticsearch", "auth": "basic"}), "Basic YWRtaW46czNjcmV0"),
        (json!({"service": "elasticsearch", "auth": "bearer"}), "Bearer admin:s3cret"),
        (json!({"service": "dify"}), "Bearer admin:s3cret"),
    ] {
        let server = MockServer::start().await;
        let answer = json!({"timed_out": false, "_shards": {"failed": 0}, "hits": {"hits": []}, "records": []});
        let template = ResponseTemplate::new(200).set_body_json(answer);
        Mock::given(header("authorization", expected)).respond_with(template).mount(&server).await;
        let mut settings = settings;
        settings["api_key_file"] = json!(key);
        assert_eq!(search(settings, &server.uri()).await.unwrap(), [], "{expected}");
    }
}
