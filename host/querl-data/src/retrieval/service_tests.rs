//! Retrieval services and rerankers against mock servers; each builtin mapping against a response in the form that its service documents.

use crate::retrieval::mapping::{Mapping, RequestValues};
use crate::retrieval::pricing::CallCharge;
use crate::{CacheLimits, DataError, ResponseCache, ServiceContext, SpendTracker, read_spend};
use crate::{LocalModels, RetrievalBackend, RetrievalLimits, open_retrieval_backend, open_retriever};
use futures::future::join_all;
use querl_core::config::RetrievalConfig;
use querl_core::ports::{Embedder, LocalModelError, PairScorer, RetrievalRequest};
use querl_core::records::{CallFailure, Context, FailureKind, Hit};
use querl_faulty::{Answer, FaultyServer, RecordedRequest, Reply};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use wiremock::matchers::{self, body_json, body_partial_json, header, method, path};
use wiremock::{Match, Mock, MockServer, ResponseTemplate};

const LIMITS: RetrievalLimits = RetrievalLimits { top_k: 2, score_threshold: 0.5 };
const MAPPED_LIMITS: RetrievalLimits = RetrievalLimits { top_k: 3, score_threshold: 0.25 };

/// Defaults to an HTTP service without retries.
fn config(settings: Value) -> RetrievalConfig {
    let mut all = json!({"kind": "http", "url": "http://127.0.0.1:1/", "max_retries": 0});
    all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    serde_json::from_value(all).unwrap()
}

fn context() -> Context {
    Context { user_profile: "孕妇".into(), history_summary: "问过鱼油".into() }
}

fn request(context: &Context) -> RetrievalRequest<'_> {
    RetrievalRequest { original_query: "它怎么吃", context, rewritten_query: "鱼油 食用方法" }
}

fn open(settings: Value, models: &LocalModels) -> Result<Arc<dyn RetrievalBackend>, DataError> {
    open_retrieval_backend(&config(settings), "shop", models, &ServiceContext::default())
}

async fn search_with(settings: Value, models: &LocalModels, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
    open(settings, models).unwrap().search(&request(&context()), limits).await
}

async fn search(settings: Value) -> Result<Vec<Hit>, CallFailure> {
    search_with(settings, &LocalModels::default(), LIMITS).await
}

fn rejected(settings: Value) -> String {
    open(settings, &LocalModels::default()).err().unwrap().to_string()
}

fn reply(answer: &Value) -> ResponseTemplate {
    ResponseTemplate::new(200).set_body_json(answer)
}

async fn mount(server: &MockServer, matcher: impl Match + 'static, answer: &Value) {
    Mock::given(matcher).respond_with(reply(answer)).mount(server).await;
}

/// Searches with `settings` a server that responds with `answer` to exactly `request` at `route`.
async fn mapped(mut settings: Value, route: &str, request: Value, answer: Value) -> Result<Vec<Hit>, CallFailure> {
    let server = MockServer::start().await;
    let expected = Mock::given(method("POST")).and(path(route)).and(body_json(request));
    expected.respond_with(reply(&answer)).mount(&server).await;
    settings["url"] = json!(format!("{}{route}", server.uri()));
    search_with(settings, &LocalModels::default(), MAPPED_LIMITS).await
}

/// Searches a `general_rag` service that responds with `answer`.
async fn general_rag(answer: Value) -> Result<Vec<Hit>, CallFailure> {
    let server = MockServer::start().await;
    let expected = json!({
        "query": "它怎么吃", "rewritten_query": "鱼油 食用方法", "tenant_id": "shop", "kb_name": "default",
        "top_k": 2, "score_threshold": 0.5, "history": "问过鱼油", "user_profile": "孕妇",
    });
    Mock::given(method("POST")).and(body_json(expected)).respond_with(reply(&answer)).mount(&server).await;
    search(json!({"url": format!("{}/api/chat/general_rag", server.uri())})).await
}

fn recall(recall: Value) -> Value {
    json!({"status": 200, "data": {"recall": recall}})
}

#[tokio::test]
async fn general_rag_hits_are_sorted_filtered_and_ranked() {
    let hits = general_rag(recall(json!([
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
async fn markers_mean_an_empty_result() {
    let bare = [json!("lack of knowledge"), json!("Lack_of_Knowledge"), json!(["no knowledge required"])];
    let odd = [json!([{"content": "lack of knowledge"}]), json!("[]"), json!([]), json!(null)];
    for marker in bare.into_iter().chain(odd) {
        assert_eq!(general_rag(recall(marker)).await.unwrap(), []);
    }
}

#[tokio::test]
async fn missing_or_odd_score_is_a_failure_and_not_zero() {
    for (entry, message) in [
        (json!({"text": "甲"}), "`data.recall[0]` has no `reranker_score`, nor has any other"),
        (json!({"text": "甲", "score": 12.5}), "`score` is `12.5`; expected 0 to 1"),
        (json!({"reranker_score": "high"}), "expected 0 to 1"),
        (json!({"reranker_score": 7.5}), "expected 0 to 1"),
    ] {
        assert_invalid(&general_rag(recall(json!([entry]))).await.unwrap_err(), message);
    }
}

#[tokio::test]
async fn another_score_replaces_a_missing_reranker_score() {
    let entries = json!([{"similarity": "0.75", "content": "甲"}, {"similarity": 0.8, "content": "乙"}]);
    for recall in [recall(entries.clone()), recall(json!(entries.to_string()))] {
        let hits = general_rag(recall).await.unwrap();
        let seen: Vec<(&str, f64)> = hits.iter().map(|hit| (hit.text.as_str(), hit.reranker_score)).collect();
        assert_eq!(seen, [("乙", 0.8), ("甲", 0.75)]);
    }
}

/// The failure is an invalid response with these words.
fn assert_invalid(failure: &CallFailure, words: &str) {
    assert_eq!(failure.kind, FailureKind::InvalidResponse);
    assert!(failure.message.contains(words), "{failure}");
}

/// A cross-encoder with fixed scores, and its digest.
struct FixedScores(Vec<f64>, &'static str);

impl PairScorer for FixedScores {
    fn scores(&self, _query: &str, _texts: &[&str]) -> Result<Vec<f64>, LocalModelError> {
        Ok(self.0.clone())
    }

    fn digest(&self) -> &str {
        self.1
    }
}

fn with_scorer(scorer: impl PairScorer + 'static) -> LocalModels {
    LocalModels { scorer: Some(Arc::new(scorer)), ..LocalModels::default() }
}

#[tokio::test]
async fn general_rag_scores_that_a_reranker_replaces_are_optional() {
    let server = MockServer::start().await;
    let entries =
        json!([{"content": "甲"}, {"content": "乙", "reranker_score": 7.5}, {"content": "lack of knowledge"}]);
    mount(&server, matchers::any(), &recall(entries)).await;
    let settings = json!({"url": server.uri(), "rerank": {"kind": "local", "path": "unused"}});
    let models = with_scorer(FixedScores(vec![0.75; 2], "fixed"));
    let hits = search_with(settings, &models, LIMITS).await.unwrap();
    assert_eq!(hits.iter().map(|hit| hit.text.as_str()).collect::<Vec<_>>(), ["甲", "乙"]);
}

#[tokio::test]
async fn history_is_sent_as_text_as_messages_or_not_at_all() {
    let expected = [
        ("text", json!("问过鱼油")),
        ("list", json!([{"role": "user", "content": "问过鱼油"}])),
        ("none", json!(null)),
    ];
    for (form, history) in expected {
        let server = MockServer::start().await;
        mount(&server, matchers::any(), &recall(json!([]))).await;
        search(json!({"url": server.uri(), "history": form})).await.unwrap();
        let body: Value = server.received_requests().await.unwrap()[0].body_json().unwrap();
        assert_eq!((&body["history"], &body["user_profile"]), (&history, &json!("孕妇")), "{form}");
    }
}

#[tokio::test]
async fn a_status_other_than_success_is_a_server_error() {
    for status in [json!("error"), json!(500), json!(false), json!("")] {
        for data in [json!(null), json!({"recall": []}), json!({"recall": [{"reranker_score": 0.9}]})] {
            let failure =
                general_rag(json!({"status": status, "msg": "kb not loaded", "data": data})).await.unwrap_err();
            assert_eq!(failure.kind, FailureKind::ServerError, "{failure}");
            assert!(failure.message.contains(&format!("answered with status `{status}`: ")), "{failure}");
            assert!(failure.message.contains("kb not loaded"), "{failure}");
        }
    }
}

#[tokio::test]
async fn a_missing_recall_is_an_empty_result_only_with_a_success_status() {
    for status in [json!(200), json!("0"), json!("OK"), json!("Success"), json!(true)] {
        assert_eq!(general_rag(json!({"status": status, "data": {}})).await.unwrap(), []);
    }
    for words in ["success", "操作成功", "请求成功。", "OK.", "no results found", "未找到相关内容"] {
        assert_eq!(general_rag(json!({"status": 200, "msg": words, "data": null})).await.unwrap(), [], "{words}");
    }
    let with_total = json!({"status": 200, "msg": "查询完毕", "data": {"recall": null, "total": 0, "trace_id": "t"}});
    assert_eq!(general_rag(with_total).await.unwrap(), []);
    for body in [json!({}), json!({"data": {"recall": null}}), json!({"status": null, "data": {"recall": null}})] {
        assert_invalid(&general_rag(body).await.unwrap_err(), "neither `data.recall` nor `status`");
    }
}

/// Regression: a renamed field or an error message was taken for an empty result in every row.
#[tokio::test]
async fn an_unexpected_response_is_a_failure_and_not_empty() {
    for (body, message) in [
        (json!({"status": 200, "data": {"docs": [{"text": "甲"}]}}), "no `data.recall`, but `data` with `docs`"),
        (json!({"status": 200, "data": [{"text": "甲"}]}), "no `data.recall`, but `data` with"),
        (json!({"status": 0, "message": "kb not found", "data": null}), "no `data.recall`, but `kb not found`"),
        (json!({"status": 200, "msg": "查询未成功", "data": null}), "no `data.recall`, but `查询未成功`"),
    ] {
        assert_invalid(&general_rag(body).await.unwrap_err(), message);
    }
}

/// Regression: rows failed because a service reported under status 200 that it was busy.
#[tokio::test]
async fn a_failure_in_a_body_is_retried() {
    let server = MockServer::start().await;
    let busy = reply(&json!({"status": 500, "msg": "busy"}));
    Mock::given(method("POST")).respond_with(busy).up_to_n_times(1).mount(&server).await;
    mount(&server, method("POST"), &recall(json!([{"reranker_score": 0.9}]))).await;
    assert_eq!(search(json!({"url": server.uri(), "max_retries": 1})).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_service_that_is_down_is_unreachable() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}/api/chat/general_rag");
    assert_eq!(search(json!({"url": url})).await.unwrap_err().kind, FailureKind::Unreachable);
}

/// Id, text, score and rank of each hit.
fn summary(hits: &[Hit]) -> Vec<(&str, &str, f64, u32)> {
    let round = |score: f64| (score * 1e6).round() / 1e6;
    hits.iter().map(|hit| (hit.id.as_str(), hit.text.as_str(), round(hit.reranker_score), hit.rank)).collect()
}

fn dify_request(kb_name: &str) -> Value {
    let limits = json!({"top_k": 3, "score_threshold": 0.25});
    json!({"knowledge_id": kb_name, "query": "鱼油 食用方法", "retrieval_setting": limits})
}

#[tokio::test]
async fn dify_external_knowledge() {
    let request = dify_request("AAA-BBB");
    let answer = json!({"records": [
        {"metadata": {"path": "s3://dify/knowledge.txt", "description": "d"}, "score": 0.66, "title": "b.txt", "content": "乙"},
        {"metadata": {"doc_id": "a"}, "score": 0.98, "title": "knowledge.txt", "content": "甲"},
        {"metadata": {}, "score": 0.2, "title": "c", "content": "丙"},
    ]});
    let hits = mapped(json!({"service": "dify", "kb_name": "AAA-BBB"}), "/retrieval", request, answer).await.unwrap();
    assert_eq!(summary(&hits), [("a", "knowledge.txt\n甲", 0.98, 1), ("", "b.txt\n乙", 0.66, 2)]);
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
    let hits = mapped(settings.clone(), "/api/v1/retrieval", request.clone(), answer).await.unwrap();
    assert_eq!(summary(&hits), [("d784", "ragflow content", 0.966944, 1)]);
    let answer = json!({"code": 102, "message": "`datasets` is required."});
    let failure = mapped(settings, "/api/v1/retrieval", request, answer).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::ServerError);
    assert!(failure.message.contains("answered with `/code` `102`"), "{failure}");
    assert!(failure.message.contains("is required"), "{failure}");
}

/// Regression: RAGFlow ranks only as many candidates as a page has, and rejects a page of 100.
#[test]
fn ragflow_page_sizes_are_limited() {
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
async fn chatchat_0_2_has_thresholds_up_to_1_and_distances() {
    let request =
        json!({"query": "鱼油 食用方法", "knowledge_base_name": "samples", "top_k": 3, "score_threshold": 1.0});
    let answer = json!([
        {"page_content": "乙", "metadata": {"source": "b.md", "id": "b"}, "type": "Document", "id": null, "score": 0.8},
        {"page_content": "甲", "metadata": {"source": "a.md"}, "type": "Document", "id": "a", "score": 0.3},
    ]);
    let settings = json!({"service": "chatchat_0.2", "kb_name": "samples"});
    let route = "/knowledge_base/search_docs";
    let hits = mapped(settings.clone(), route, request.clone(), answer.clone()).await.unwrap();
    assert_eq!(summary(&hits), [("a", "甲", 0.85, 1), ("b", "乙", 0.6, 2)]);
    assert_eq!(hits[0].retrieval_score, Some(0.3));
    let wrapped = json!({"code": 200, "msg": "success", "data": answer});
    assert_eq!(mapped(settings.clone(), route, request.clone(), wrapped).await.unwrap(), hits);
    // Chatchat 0.3 sends this score for every passage.
    let unscored = json!([{"page_content": "甲", "metadata": {}, "type": "Document", "id": "a", "score": 3.0}]);
    let failure = mapped(settings, route, request, unscored).await.unwrap_err();
    assert_invalid(&failure, "passage 0 has the score `3.0`; expected 0 to 2; set retrieval.mapping");
}

#[tokio::test]
async fn elasticsearch_scores_are_unbounded() {
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
    let hits = mapped(settings.clone(), "/kb/_search", request.clone(), answer(false, 0)).await.unwrap();
    assert_eq!(summary(&hits), [("1", "鱼油\n甲", 0.75, 1), ("own", "乙", 0.5, 2)]);
    // A partial response is a failure.
    for (half, message) in [(answer(true, 0), "`/timed_out` `true`"), (answer(false, 1), "`/_shards/failed` `1`")] {
        let failure = mapped(settings.clone(), "/kb/_search", request.clone(), half).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::ServerError);
        assert!(failure.message.contains(message), "{failure}");
    }
}

#[tokio::test]
async fn qdrant_gets_the_vector_of_an_embedding_service() {
    let server = MockServer::start().await;
    let embedded = json!({"object": "list", "model": "bge", "data": [
        {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]},
    ], "usage": {"prompt_tokens": 8, "total_tokens": 8}});
    let expected = body_json(json!({"model": "bge", "input": ["查询：鱼油 食用方法"]}));
    Mock::given(path("/v1/embeddings")).and(expected).respond_with(reply(&embedded)).mount(&server).await;
    let request = json!({"query": [0.5, -0.25], "limit": 3, "score_threshold": 0.25, "with_payload": true});
    let answer = json!({"time": 0.001, "status": "ok", "result": {"points": [
        {"id": 42, "version": 3, "score": 0.75, "payload": {"title": "鱼油", "text": "甲"}},
        {"id": "9b8d", "version": 3, "score": 0.5, "payload": {"id": "own", "content": "乙"}},
    ]}});
    let settings = json!({"service": "qdrant", "embedding": {
        "kind": "openai", "url": format!("{}/v1/embeddings", server.uri()), "model": "bge", "query_prefix": "查询：",
    }});
    let hits = mapped(settings, "/collections/kb/points/query", request, answer).await.unwrap();
    assert_eq!(summary(&hits), [("42", "鱼油\n甲", 0.75, 1), ("own", "乙", 0.5, 2)]);
}

/// An embedding model with the same vector for every text, and its digest.
struct FixedVector(&'static str);

impl Embedder for FixedVector {
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
        assert!(texts.len() == 1 && texts[0].ends_with("鱼油 食用方法"), "{texts:?}");
        Ok(vec![vec![if texts[0].starts_with("查询：") { 0.25 } else { 0.0 }, 0.5]])
    }

    fn dimension(&self) -> usize {
        2
    }

    fn digest(&self) -> &str {
        self.0
    }
}

#[tokio::test]
async fn qdrant_gets_the_vector_of_a_local_model() {
    let server = MockServer::start().await;
    let request = json!({"query": [0.25, 0.5], "limit": 3, "score_threshold": 0.25, "with_payload": true});
    let answer = json!({"status": "ok", "result": {"points": [{"id": 1, "score": 0.5, "payload": {"text": "甲"}}]}});
    mount(&server, body_json(request), &answer).await;
    let embedding = json!({"kind": "local", "path": "unused", "query_prefix": "查询："});
    let settings = json!({"service": "qdrant", "url": server.uri(), "embedding": embedding});
    let models = LocalModels { embedder: Some(Arc::new(FixedVector("one"))), ..LocalModels::default() };
    let hits = search_with(settings, &models, MAPPED_LIMITS).await.unwrap();
    assert_eq!(summary(&hits), [("1", "甲", 0.5, 1)]);
}

#[tokio::test]
async fn a_custom_mapping_needs_no_builtin_one() {
    let settings = json!({"service": "custom", "kb_name": "k", "mapping": {
        "request": {"q": "{{query}} -> {{rewritten_query}}", "who": ["{{tenant}}", "{{user_profile}}", "{{history}}"], "n": "{{top_k}}"},
        "list": ["/found"], "text": ["/body"], "score": ["/cosine"], "score_range": [-1.0, 1.0],
    }});
    let request = json!({"q": "它怎么吃 -> 鱼油 食用方法", "who": ["shop", "孕妇", "问过鱼油"], "n": 3});
    let answer = json!({"found": [{"body": "甲", "cosine": "0.5"}, {"body": "乙", "cosine": -0.9}]});
    let hits = mapped(settings, "/search", request, answer).await.unwrap();
    assert_eq!(summary(&hits), [("", "甲", 0.75, 1)]);
}

#[tokio::test]
async fn a_setting_changes_one_key_of_a_builtin_mapping() {
    let settings = json!({"service": "dify", "mapping": {"id": ["/metadata/path"], "title": ["/metadata/section"]}});
    let answer = json!({"records": [{"metadata": {"path": "p"}, "score": 0.5, "title": "t", "content": "甲"}]});
    let hits = mapped(settings, "/retrieval", dify_request("default"), answer).await.unwrap();
    assert_eq!(summary(&hits), [("p", "甲", 0.5, 1)]);
}

#[tokio::test]
async fn an_invalid_response_is_a_failure() {
    for (answer, message) in [
        (json!({"results": []}), "no list of passages at `/records`"),
        (json!({"records": "none"}), "no list of passages at `/records`"),
        (json!({"records": [{"content": "甲"}]}), "passage 0 has no score at `/score`"),
        (json!({"records": [{"content": "甲", "score": null}]}), "passage 0 has no score"),
        (json!({"records": [{"content": "甲", "score": 7.5}]}), "passage 0 has the score `7.5`; expected 0 to 1"),
    ] {
        let request = dify_request("default");
        assert_invalid(&mapped(json!({"service": "dify"}), "/retrieval", request, answer).await.unwrap_err(), message);
    }
}

#[test]
fn an_invalid_mapping_is_rejected_before_any_call() {
    let cases = r#"
{"service": "custom"} | retrieval.mapping.request is not set; retrieval.service = "custom" needs it
{"service": "custom", "mapping": {"request": {"q": "{{query}}"}, "list": ["/a"]}} | retrieval.mapping.text is not set; retrieval.service = "custom" needs it
{"service": "dify", "mapping": {"request": {"q": "{{qeury}}"}}} | retrieval.mapping.request has `{{qeury}}`, which stands for nothing; known are query, rewritten_query
{"service": "dify", "mapping": {"id": ["metadata/id"]}} | retrieval.mapping.id has `metadata/id`, which is no JSON pointer; write it as `/metadata/id`
{"service": "dify", "mapping": {"score_range": [1.0, 0.0]}} | retrieval.mapping.score_range is [1.0, 0.0]; expected two numbers, the lower first
{"service": "ragflow", "mapping": {"top_k_range": [9, 3]}} | retrieval.mapping.top_k_range is [9, 3]; expected two numbers, the lower first
{"service": "chatchat"} | retrieval.mapping.score is not set, and the service sends none that is known; set it, or retrieval.rerank
{"service": "dify", "mapping": {"score_range": [0.0, 1.0], "score_half": 3.0}} | retrieval.mapping.score_half is set together with score_range; leave one out
{"service": "qdrant"} | retrieval.mapping.request has `{{embedding}}`, which retrieval.embedding makes; set its kind
"#;
    for case in cases.trim().lines() {
        let (settings, message) = case.split_once(" | ").unwrap();
        let error = rejected(serde_json::from_str(settings).unwrap());
        assert!(error.starts_with(message), "{error}");
    }
}

#[tokio::test]
async fn the_key_is_sent_in_the_authorization_header() {
    let server = MockServer::start().await;
    mount(&server, header("authorization", "Bearer secret-of-dify"), &json!({"records": []})).await;
    // SAFETY: no other test reads or writes this variable.
    unsafe { std::env::set_var("QUERL_TEST_DIFY_KEY", "secret-of-dify") };
    let hits =
        search(json!({"service": "dify", "url": server.uri(), "api_key_env": "QUERL_TEST_DIFY_KEY"})).await.unwrap();
    assert_eq!(hits, []);
}

/// Regression: 401 from every Elasticsearch in spite of a valid key.
#[tokio::test]
async fn elasticsearch_and_opensearch_have_their_own_authorization_schemes() {
    let (_folder, key) = crate::scratch_file("key");
    std::fs::write(&key, "admin:s3cret\n").unwrap();
    for (settings, expected) in [
        (json!({"service": "elasticsearch"}), "ApiKey admin:s3cret"),
        (json!({"service": "elasticsearch", "auth": "basic"}), "Basic YWRtaW46czNjcmV0"),
        (json!({"service": "elasticsearch", "auth": "bearer"}), "Bearer admin:s3cret"),
        (json!({"service": "dify"}), "Bearer admin:s3cret"),
    ] {
        let server = MockServer::start().await;
        let answer = json!({"timed_out": false, "_shards": {"failed": 0}, "hits": {"hits": []}, "records": []});
        mount(&server, header("authorization", expected), &answer).await;
        let mut settings = settings;
        settings["api_key_file"] = json!(key);
        settings["url"] = json!(server.uri());
        assert_eq!(search(settings).await.unwrap(), [], "{expected}");
    }
}

/// Three passages of a service without scores, reranked by one that responds with `answer` to exactly `request`.
async fn reranked(rerank: Value, request: Value, answer: Value) -> Result<Vec<Hit>, CallFailure> {
    let server = MockServer::start().await;
    // All candidates are requested, without a threshold.
    let wide = json!({"top_k": 7, "score_threshold": 0.0});
    let passages = ["甲", "乙", "丙"].map(|text| json!({"id": text, "page_content": text, "score": 3.0}));
    let found = reply(&json!(passages));
    Mock::given(path("/search_docs")).and(body_partial_json(wide)).respond_with(found).mount(&server).await;
    Mock::given(path("/rerank")).and(body_json(request)).respond_with(reply(&answer)).mount(&server).await;
    let mut settings = json!({
        "service": "chatchat", "url": format!("{}/search_docs", server.uri()),
        "rerank": {"url": format!("{}/rerank", server.uri()), "n_candidates": 7, "max_retries": 0},
    });
    settings["rerank"].as_object_mut().unwrap().extend(rerank.as_object().unwrap().clone());
    search(settings).await
}

/// Id, score and rank of each hit.
fn ranking(hits: &[Hit]) -> Vec<(&str, f64, u32)> {
    hits.iter().map(|hit| (hit.id.as_str(), hit.reranker_score, hit.rank)).collect()
}

const QUERY: &str = "它怎么吃 问过鱼油";

#[tokio::test]
async fn tei_scores_passages_against_the_query_and_not_the_rewrite() {
    let asked = json!({"query": QUERY, "texts": ["甲", "乙", "丙"], "truncate": true, "raw_scores": false});
    let answer = json!([{"index": 2, "score": 0.98}, {"index": 0, "score": 0.6}, {"index": 1, "score": 0.01}]);
    let hits = reranked(json!({"kind": "tei"}), asked, answer).await.unwrap();
    assert_eq!(ranking(&hits), [("丙", 0.98, 1), ("甲", 0.6, 2)]);
    assert!(hits.iter().all(|hit| hit.retrieval_score.is_none()), "the service sent no score: {hits:?}");
}

/// Regression: invented scores of 0, and the service's scores were lost.
#[tokio::test]
async fn the_service_s_score_is_kept_as_retrieval_score() {
    let server = MockServer::start().await;
    let entries = json!([{"id": "a", "content": "甲", "reranker_score": "0.75"}, {"id": "b", "content": "乙"}]);
    mount(&server, path("/rag"), &recall(entries)).await;
    let scores = json!([{"index": 0, "score": 0.5}, {"index": 1, "score": 0.625}]);
    mount(&server, path("/rerank"), &scores).await;
    let rerank = json!({"kind": "tei", "url": format!("{}/rerank", server.uri())});
    let hits = search(json!({"url": format!("{}/rag", server.uri()), "rerank": rerank})).await.unwrap();
    assert_eq!(ranking(&hits), [("b", 0.625, 1), ("a", 0.5, 2)]);
    assert_eq!((hits[0].retrieval_score, hits[1].retrieval_score), (None, Some(0.75)));
}

/// Regression: with a wrong pointer in the mapping, empty texts were reranked.
#[tokio::test]
async fn passages_without_text_are_not_reranked() {
    let server = MockServer::start().await;
    mount(&server, path("/search_docs"), &json!([{"id": "a", "page_content": "甲"}])).await;
    let settings = json!({
        "service": "chatchat", "url": format!("{}/search_docs", server.uri()),
        "mapping": {"text": ["/content"]}, "rerank": {"kind": "tei", "url": format!("{}/rerank", server.uri())},
    });
    let failure = search(settings).await.unwrap_err();
    let expected = "chatchat: passages have no text to be scored; check retrieval.mapping.text";
    assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::InvalidResponse, expected));
}

#[tokio::test]
async fn cohere_requests_have_a_model_and_responses_a_list() {
    let asked = json!({"model": "bge-reranker", "query": "它怎么吃", "documents": ["甲", "乙", "丙"], "top_n": 3});
    let answer = json!({"id": "rerank-1", "model": "bge-reranker", "usage": {"total_tokens": 56}, "results": [
        {"index": 1, "document": {"text": "乙"}, "relevance_score": 0.875},
        {"index": 0, "document": {"text": "甲"}, "relevance_score": 0.25},
        {"index": 2, "document": {"text": "丙"}, "relevance_score": 0.125},
    ]});
    let settings = json!({"kind": "cohere", "model": "bge-reranker", "query": "{{query}}"});
    assert_eq!(ranking(&reranked(settings, asked, answer).await.unwrap()), [("乙", 0.875, 1)]);
}

/// Regression: vLLM rejects passages that are longer than the model allows with status 400.
#[tokio::test]
async fn extra_fields_are_sent() {
    let asked = json!({"model": "m", "query": "它怎么吃", "documents": ["甲", "乙", "丙"], "top_n": 3, "truncate_prompt_tokens": -1});
    let score = |index: u32| json!({"index": index, "relevance_score": 0.875});
    let answer = json!({"results": [score(0), score(1), score(2)]});
    let extra = json!({"truncate_prompt_tokens": -1});
    let settings = json!({"kind": "cohere", "model": "m", "query": "{{query}}", "extra": extra});
    assert_eq!(reranked(settings, asked, answer).await.unwrap().len(), 2);
}

#[tokio::test]
async fn logits_are_mapped_to_0_to_1() {
    let asked = json!({"query": QUERY, "texts": ["甲", "乙", "丙"], "truncate": true, "raw_scores": true});
    let answer = json!([{"index": 0, "score": 0.0}, {"index": 1, "score": -9.5}, {"index": 2, "score": "2.0"}]);
    let hits = reranked(json!({"kind": "tei", "scores": "logit"}), asked, answer).await.unwrap();
    assert_eq!(ranking(&hits), [("丙", 1.0 / (1.0 + (-2.0_f64).exp()), 1), ("甲", 0.5, 2)]);
}

#[tokio::test]
async fn scores_that_do_not_match_the_texts_are_a_failure() {
    let asked = json!({"query": QUERY, "texts": ["甲", "乙", "丙"], "truncate": true, "raw_scores": false});
    for (answer, message) in [
        (json!([{"index": 0, "score": 0.5}]), "scores of 1 of 3 texts"),
        (json!([{"index": 3, "score": 0.5}]), "a score of no text that was sent"),
        (
            json!([{"index": 0, "score": 4.5}]),
            "the score `4.5`; expected 0 to 1, or retrieval.rerank.scores = \"logit\"",
        ),
        (json!({"scores": []}), "no list of scores"),
    ] {
        assert_invalid(&reranked(json!({"kind": "tei"}), asked.clone(), answer).await.unwrap_err(), message);
    }
}

#[tokio::test]
async fn passages_are_scored_in_batches() {
    let server = MockServer::start().await;
    let passages = ["甲", "乙", "丙"].map(|text| json!({"id": text, "page_content": text}));
    mount(&server, path("/search_docs"), &json!(passages)).await;
    for (texts, score) in [(vec!["甲", "乙"], 0.9), (vec!["丙"], 0.6)] {
        let scores: Vec<Value> = (0..texts.len()).map(|index| json!({"index": index, "score": score})).collect();
        let batch = Mock::given(body_partial_json(json!({"texts": texts})));
        batch.respond_with(reply(&json!(scores))).expect(1).mount(&server).await;
    }
    let rerank = json!({"kind": "tei", "url": format!("{}/rerank", server.uri()), "batch_size": 2});
    let url = format!("{}/search_docs", server.uri());
    let settings = json!({"service": "chatchat", "url": url, "rerank": rerank});
    let hits = search_with(settings, &LocalModels::default(), MAPPED_LIMITS).await.unwrap();
    assert_eq!(ranking(&hits), [("甲", 0.9, 1), ("乙", 0.9, 2), ("丙", 0.6, 3)]);
}

/// Scores a text by the number of characters that the query has, too.
struct Overlap;

impl PairScorer for Overlap {
    fn scores(&self, query: &str, texts: &[&str]) -> Result<Vec<f64>, LocalModelError> {
        let share = |text: &&str| text.chars().filter(|character| query.contains(*character)).count() as f64 / 4.0;
        Ok(texts.iter().map(share).collect())
    }

    fn digest(&self) -> &str {
        "overlap"
    }
}

/// Settings of an embedded index of `passages` (id and text), without a lexicon: the cross-encoder needs none.
fn embedded(folder: &tempfile::TempDir, passages: impl IntoIterator<Item = (String, &'static str)>) -> Value {
    let knowledge_base = folder.path().join("kb.jsonl");
    let passages = passages.into_iter().map(|(id, text)| json!({"id": id, "text": text}));
    querl_core::fsx::write_jsonl(&knowledge_base, passages).unwrap();
    json!({
        "kind": "embedded", "knowledge_base": knowledge_base, "index_dir": folder.path().join("indexes"),
        "rerank": {"kind": "local", "path": folder.path(), "query": "{{query}}", "batch_size": 8},
    })
}

/// Regression: a passage with the score NaN is below every threshold, as if it had not been found.
#[tokio::test]
async fn nan_and_missing_scores_of_a_model_are_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let settings = embedded(&folder, [("a".to_owned(), "鱼油怎么吃")]);
    let nan = "cross-encoder: the score NaN; its weights are damaged, or overflow";
    for (scores, expected) in [(vec![f64::NAN], nan), (vec![0.5; 2], "cross-encoder: 2 scores of 1 texts")] {
        let models = with_scorer(FixedScores(scores, "damaged"));
        let failure = search_with(settings.clone(), &models, LIMITS).await.unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::InvalidResponse, expected));
    }
}

#[test]
fn extra_fields_cannot_replace_those_of_a_request() {
    let rerank = json!({"kind": "tei", "url": "http://127.0.0.1:1/rerank", "extra": {"texts": ["甲"]}});
    let message = "retrieval.rerank.extra has `texts`, which the interface's request has already; leave it out";
    assert_eq!(rejected(json!({"rerank": rerank})), message);
}

#[tokio::test]
async fn a_local_model_reranks_the_hits_of_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let more = (0..40).map(|index| (format!("c{index}"), "鱼油"));
    let passages = [("a".to_owned(), "鱼油价格"), ("b".to_owned(), "鱼油怎么吃")].into_iter().chain(more);
    let settings = embedded(&folder, passages);
    let backend = open(settings, &with_scorer(Overlap)).unwrap();
    assert_eq!(backend.name(), "embedded + cross-encoder");
    let context = Context::default();
    let (original_query, rewritten_query) = ("怎么吃", "鱼油怎么吃价格");
    let request = RetrievalRequest { original_query, context: &context, rewritten_query };
    assert_eq!(ranking(&backend.search(&request, LIMITS).await.unwrap()), [("b", 0.75, 1)]);
    // `n_candidates` limits the number of hits, whatever a request's `top_k` is.
    let many = RetrievalLimits { top_k: 1000, score_threshold: 0.0 };
    assert_eq!(backend.search(&request, many).await.unwrap().len(), 20);
}

/// Regression: scores of another model were taken from the cache because its folder had the same name.
#[tokio::test]
async fn the_cache_identifies_models_by_content_and_not_by_path() {
    let (server, folder) = (MockServer::start().await, tempfile::tempdir().unwrap());
    let answer = json!({"status": "ok", "result": {"points": [{"id": 1, "score": 0.5, "payload": {"text": "甲"}}]}});
    mount(&server, matchers::any(), &answer).await;
    let cache = Arc::new(ResponseCache::open(&folder.path().join("answers.redb"), CacheLimits::default()).unwrap());
    let services = ServiceContext::default().with_cache(cache, Duration::from_secs(3600));
    let n_requests = async |path: &str, embedding: &'static str, scorer: &'static str| {
        let config = config(json!({
            "service": "qdrant", "url": server.uri(),
            "embedding": {"kind": "local", "path": path}, "rerank": {"kind": "local", "path": path},
        }));
        let embedder = Some(Arc::new(FixedVector(embedding)) as Arc<dyn Embedder>);
        let models = LocalModels { embedder, ..with_scorer(FixedScores(vec![0.5], scorer)) };
        let retriever = open_retriever(&config, "shop", &models, &services).unwrap();
        assert_eq!(retriever.retrieve(request(&context())).await.unwrap().len(), 1);
        server.received_requests().await.unwrap().len()
    };
    assert_eq!(n_requests("models/a", "one", "one").await, 1);
    assert_eq!(n_requests("models/moved", "one", "one").await, 1);
    assert_eq!(n_requests("models/a", "one", "two").await, 2);
    assert_eq!(n_requests("models/a", "two", "two").await, 3);
}

/// Regression: the scores of a paid reranker behind the embedded index were requested again by a run that resumed after a kill.
#[tokio::test]
async fn scores_of_passages_of_the_embedded_index_are_paid_once() {
    let server = MockServer::start().await;
    mount(&server, path("/rerank"), &json!([{"index": 0, "score": 0.9}])).await;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = embedded(&folder, [("a".to_owned(), "鱼油怎么吃")]);
    settings["rerank"] = json!({"kind": "tei", "url": format!("{}/rerank", server.uri())});
    for _ in 0..2 {
        let cache = ResponseCache::open(&folder.path().join("answers.redb"), CacheLimits::default()).unwrap();
        let services = ServiceContext::default().with_cache(Arc::new(cache), Duration::from_secs(3600));
        let models = LocalModels::default();
        let retriever = open_retriever(&config(settings.clone()), "shop", &models, &services).unwrap();
        let hits = retriever.retrieve(request(&context())).await.unwrap();
        assert_eq!(ranking(&hits), [("a", 0.9, 1)]);
    }
    assert_eq!(server.received_requests().await.unwrap().len(), 1);
}

/// Unusable replies of status 200 that replace `good`.
fn unusable(good: &Value) -> Vec<Reply> {
    let text = |body: &str| Reply::from(Answer::text(200, "application/json", body));
    let broken = Answer { body: b"{\"data\": \"\xb8\"}".to_vec(), ..Answer::json(200, good) };
    let nan = good.to_string().replace("0.9", "NaN");
    vec![
        text("{}"),
        text("null"),
        text("<html>busy</html>"),
        text(&nan),
        broken.into(),
        Reply::Cut(Answer::json(200, good)),
    ]
}

const VECTOR_SEARCH: &str = r#"{"service": "qdrant", "url": "URL/search", "max_retries": 1,
    "price_per_thousand_calls": 2.0,
    "embedding": {"kind": "openai", "url": "URL/embed", "model": "e", "max_retries": 1, "price_prompt_per_million": 10.0},
    "rerank": {"kind": "cohere", "url": "URL/rerank", "model": "r", "max_retries": 1, "price_per_thousand_calls": 2.0}}"#;

/// The answers of the three services in [`VECTOR_SEARCH`].
fn vector_search_answer(asked: &RecordedRequest) -> Value {
    match asked.path.as_str() {
        "/embed" => json!({"data": [{"embedding": [0.9, 0.5]}], "usage": {"prompt_tokens": 8, "total_tokens": 8}}),
        "/rerank" => {
            json!({"results": [{"index": 0, "relevance_score": 0.9}], "meta": {"billed_units": {"search_units": 1}}})
        }
        _ => json!({"status": "ok", "result": {"points": [{"id": 1, "score": 0.9, "payload": {"text": "甲"}}]}}),
    }
}

/// Searches a server whose first answer at `path` is `fault`. Returns the hits and the number of requests at `path`.
async fn search_after(
    settings: &str,
    path: &'static str,
    fault: Reply,
    good: impl Fn(&RecordedRequest) -> Value + Send + Sync + 'static,
) -> (Result<Vec<Hit>, CallFailure>, usize) {
    let n_asked = Mutex::new(0);
    let server = FaultyServer::start(move |asked| {
        let mut n_asked = n_asked.lock().unwrap();
        *n_asked += usize::from(asked.path == path);
        if asked.path == path && *n_asked == 1 { fault.clone() } else { Answer::json(200, &good(asked)).into() }
    });
    let hits = search(serde_json::from_str(&settings.replace("URL", &server.url())).unwrap()).await;
    (hits, server.requests().iter().filter(|asked| asked.path == path).count())
}

/// Regression: a row failed although its service had answered once with status 200 and a body without content.
#[tokio::test]
async fn a_response_of_status_200_that_cannot_be_used_is_requested_again() {
    let services = [
        ("general_rag", recall(json!([{"reranker_score": 0.9, "content": "甲"}]))),
        ("dify", json!({"records": [{"content": "甲", "score": 0.9}]})),
        ("ragflow", json!({"code": 0, "data": {"chunks": [{"content": "甲", "similarity": 0.9}]}})),
        (
            "elasticsearch",
            json!({"timed_out": false, "_shards": {"failed": 0}, "hits": {"hits": [
            {"_id": "1", "_score": 30.9, "_source": {"text": "甲"}}]}}),
        ),
    ];
    let mut searches = Vec::new();
    for (service, good) in services {
        for fault in unusable(&good) {
            let (good, settings) =
                (good.clone(), format!(r#"{{"service": "{service}", "url": "URL/s", "max_retries": 1}}"#));
            let shown = format!("{service}: {fault:?}");
            searches.push((shown, settings, "/s", fault, Some(good)));
        }
    }
    let embedded = json!({"data": [{"embedding": [0.9]}]});
    let odd_vectors = [
        json!({"data": []}),
        json!({"data": [{"embedding": []}]}),
        json!({"data": [{"embedding": [0.9, null]}]}),
        json!({"data": [{"embedding": [1e300]}]}),
        json!({"data": [{"embedding": [0.9]}, {"embedding": [0.9]}]}),
    ];
    let scored = json!({"results": [{"index": 0, "relevance_score": 0.9}]});
    let odd_scores = [
        json!({"results": []}),
        json!({"results": [{"index": 0, "relevance_score": null}]}),
        json!({"results": [{"index": 0, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.9}]}),
        json!({"results": [{"index": 1, "relevance_score": 0.9}]}),
    ];
    let answer = |odd: Value| Reply::from(Answer::json(200, &odd));
    let faults = unusable(&embedded).into_iter().chain(odd_vectors.map(answer)).map(|fault| ("/embed", fault));
    let faults =
        faults.chain(unusable(&scored).into_iter().chain(odd_scores.map(answer)).map(|fault| ("/rerank", fault)));
    for (path, fault) in faults {
        searches.push((format!("{path}: {fault:?}"), VECTOR_SEARCH.to_owned(), path, fault, None));
    }
    let searches = searches.into_iter().map(|(shown, settings, path, fault, good)| async move {
        let good = move |asked: &RecordedRequest| good.clone().unwrap_or_else(|| vector_search_answer(asked));
        let (hits, n_requests) = search_after(&settings, path, fault, good).await;
        let hits = hits.unwrap_or_else(|failure| panic!("{shown}: {failure}"));
        assert_eq!((hits.len(), n_requests), (1, 2), "{shown}");
    });
    join_all(searches).await;
}

/// Regression: embeddings and reranking were free, whatever the service charged.
#[tokio::test]
async fn services_of_retrieval_are_paid_from_the_budget_and_recorded_before_they_are_called() {
    let (_folder, path) = crate::scratch_file("calls.json");
    let lost_before = |asked: &RecordedRequest, path: &std::path::Path| {
        let provider = match asked.path.as_str() {
            "/embed" => "retrieval.embedding",
            "/rerank" => "retrieval.rerank",
            _ => "retrieval",
        };
        read_spend(path).unwrap()["validate"].get(provider).map_or(0.0, |spend| spend.lost_cost)
    };
    let of_file = path.clone();
    let server = FaultyServer::start(move |asked| match lost_before(asked, &of_file) {
        lost if lost > 0.0 => Answer::json(200, &vector_search_answer(asked)).into(),
        _ => Answer::json(400, &json!({"error": "calls.json has no cost of this call"})).into(),
    });
    let settings: Value = serde_json::from_str(&VECTOR_SEARCH.replace("URL", &server.url())).unwrap();
    let search = |budget: f64| {
        let tracker = Arc::new(SpendTracker::open(&path, Some(budget)).unwrap());
        tracker.begin("validate");
        let services = ServiceContext::default().with_spend_tracker(tracker.clone());
        let backend = open_retrieval_backend(&config(settings.clone()), "shop", &LocalModels::default(), &services);
        async move {
            let hits = backend.unwrap().search(&request(&context()), LIMITS).await;
            tracker.save().unwrap();
            (hits, tracker)
        }
    };
    let (hits, tracker) = search(1.0).await;
    assert_eq!(hits.unwrap().len(), 1);
    let spent = tracker.by_stage().remove("validate").unwrap();
    let costs: Vec<(&str, u64, u64, String)> = spent
        .iter()
        .map(|(name, spend)| (name.as_str(), spend.calls, spend.prompt_tokens, format!("{:.6}", spend.cost)))
        .collect();
    let expected = [
        ("retrieval", 1, 0, "0.002000".to_owned()),
        ("retrieval.embedding", 1, 8, "0.000080".to_owned()),
        ("retrieval.rerank", 1, 10, "0.002000".to_owned()),
    ];
    assert_eq!(costs, expected);
    assert!(spent.values().all(|spend| spend.lost == 0 && spend.unpriced == 0));
    // 0.00408 were spent; the next embedding costs up to 0.00275 and then 0.00008, the search and the reranker 0.002 each.
    let failure = search(0.0075).await.0.unwrap_err();
    assert_eq!(failure.kind, FailureKind::OverBudget, "{failure}");
    let n_rerank = server.requests().iter().filter(|asked| asked.path == "/rerank").count();
    assert_eq!((server.n_requests(), n_rerank), (5, 1));
}

/// Regression: a service could charge more than was reserved, and a stated 0 made a call free.
#[test]
fn a_stated_charge_is_not_zero_and_not_more_than_reserved() {
    let estimate = CallCharge { n_calls: 1, n_tokens: 10, is_estimated: true };
    let bound = CallCharge { n_calls: 2, n_tokens: 300, is_estimated: true };
    let units = |n: u64| json!({"usage": {"prompt_tokens": 0}, "meta": {"billed_units": {"search_units": n}}});
    for (response, n_calls, n_tokens, is_estimated) in [
        (json!({"usage": {"prompt_tokens": 300}}), 1, 300, false),
        (json!({"usage": {"prompt_tokens": 301}}), 1, 10, true),
        (json!({"usage": {"prompt_tokens": 0, "total_tokens": 12}}), 1, 12, false),
        (units(0), 1, 10, true),
        (units(2), 2, 10, true),
        (units(3), 1, 10, true),
    ] {
        let expected = CallCharge { n_calls, n_tokens, is_estimated };
        assert_eq!(CallCharge::stated(&response, estimate, bound), expected, "{response}");
    }
}

/// Regression: a response that does not fit the settings was requested, and paid, again.
#[tokio::test]
async fn a_response_that_does_not_fit_the_settings_is_final() {
    let dify = r#"{"service": "dify", "url": "URL/s", "max_retries": 1}"#;
    let general_rag = r#"{"url": "URL/s", "max_retries": 1}"#;
    for (settings, path, fault, message) in [
        (dify, "/s", json!({"records": [{"content": "甲"}]}), "has no score at `/score`; set retrieval.mapping"),
        (dify, "/s", json!({"records": [{"content": "甲", "score": 7.5}]}), "has the score `7.5`; expected 0 to 1"),
        (general_rag, "/s", recall(json!([{"reranker_score": 7.5}])), "is `7.5`; expected 0 to 1"),
        (VECTOR_SEARCH, "/rerank", json!({"results": [{"index": 0, "relevance_score": 4.5}]}), "the score `4.5`; "),
    ] {
        let fault = Reply::from(Answer::json(200, &fault));
        let (hits, n_requests) = search_after(settings, path, fault, vector_search_answer).await;
        let failure = hits.unwrap_err();
        assert!(failure.message.contains(message), "{failure}");
        assert_eq!(n_requests, 1, "{failure}");
    }
}

#[test]
fn cohere_charges_a_search_for_each_hundred_chunks() {
    let rerank = |kind: &str| config(json!({"rerank": {"kind": kind}})).rerank;
    assert_eq!([0, 1, 100, 101, 250].map(|n_chunks| rerank("cohere").n_charged_calls(n_chunks)), [1, 1, 1, 2, 3]);
    assert_eq!(rerank("tei").n_charged_calls(250), 1);
    assert_eq!((rerank("cohere").price(), rerank("tei").price().map(|price| price.per_call)), (None, Some(0.0)));
}
