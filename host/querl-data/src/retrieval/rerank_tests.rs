#![allow(clippy::unwrap_used)]

use crate::{LocalModels, RetrievalLimits, ServiceContext, open_retrieval_backend};
use querl_core::config::RetrievalConfig;
use querl_core::ports::{LocalModelError, PairScorer, RetrievalRequest};
use querl_core::records::{CallFailure, Context, FailureKind, Hit};
use serde_json::{Value, json};
use std::sync::Arc;
use wiremock::matchers::{body_json, body_partial_json, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

const LIMITS: RetrievalLimits = RetrievalLimits { top_k: 2, score_threshold: 0.5 };

/// Three passages by a service without scores, reranked by one that answers `answer` to exactly `asked`.
async fn ask(rerank: Value, asked: Value, answer: Value) -> Result<Vec<Hit>, CallFailure> {
    let server = MockServer::start().await;
    // All that is wanted to be reranked is asked for, whatever the first scores are.
    let wide = json!({"top_k": 7, "score_threshold": 0.0});
    let passages = ["甲", "乙", "丙"].map(|text| json!({"id": text, "page_content": text, "score": 3.0}));
    let found = ResponseTemplate::new(200).set_body_json(passages);
    Mock::given(path("/search_docs")).and(body_partial_json(wide)).respond_with(found).mount(&server).await;
    let template = ResponseTemplate::new(200).set_body_json(answer);
    Mock::given(path("/rerank")).and(body_json(asked)).respond_with(template).mount(&server).await;
    let mut settings = json!({
        "kind": "http", "service": "chatchat", "url": format!("{}/search_docs", server.uri()), "max_retries": 0,
        "rerank": {"url": format!("{}/rerank", server.uri()), "n_candidates": 7, "max_retries": 0},
    });
    let own = rerank.as_object().unwrap().clone();
    settings["rerank"].as_object_mut().unwrap().extend(own);
    let config: RetrievalConfig = serde_json::from_value(settings).unwrap();
    let context = Context { user_profile: String::new(), history_summary: "问过鱼油".into() };
    let request =
        RetrievalRequest { original_query: "它怎么吃", context: &context, rewritten_query: "鱼油 食用方法" };
    open_retrieval_backend(&config, "shop", &LocalModels::default(), &ServiceContext::default())
        .unwrap()
        .search(&request, LIMITS)
        .await
}

fn seen(hits: &[Hit]) -> Vec<(&str, f64, u32)> {
    hits.iter().map(|hit| (hit.id.as_str(), hit.reranker_score, hit.rank)).collect()
}

const QUERY: &str = "它怎么吃 问过鱼油";

#[tokio::test]
async fn tei_scores_passages_against_the_query_and_never_the_rewrite() {
    let asked = json!({"query": QUERY, "texts": ["甲", "乙", "丙"], "truncate": true, "raw_scores": false});
    let answer = json!([{"index": 2, "score": 0.98}, {"index": 0, "score": 0.6}, {"index": 1, "score": 0.01}]);
    let hits = ask(json!({"kind": "tei"}), asked, answer).await.unwrap();
    assert_eq!(seen(&hits), [("丙", 0.98, 1), ("甲", 0.6, 2)]);
    assert!(hits.iter().all(|hit| hit.retrieval_score.is_none()), "the service sent no score: {hits:?}");
}

/// Regression: scores of 0 that nobody gave, and the service's own that are lost.
#[tokio::test]
async fn the_service_s_own_score_stays_beside_the_reranker_s() {
    let server = MockServer::start().await;
    let recall = json!([{"id": "a", "content": "甲", "reranker_score": "0.75"}, {"id": "b", "content": "乙"}]);
    let found = ResponseTemplate::new(200).set_body_json(json!({"status": 200, "data": {"recall": recall}}));
    Mock::given(path("/rag")).respond_with(found).mount(&server).await;
    let scores = json!([{"index": 0, "score": 0.5}, {"index": 1, "score": 0.625}]);
    let rerank = ResponseTemplate::new(200).set_body_json(scores);
    Mock::given(path("/rerank")).respond_with(rerank).mount(&server).await;
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "http", "url": format!("{}/rag", server.uri()),
        "rerank": {"kind": "tei", "url": format!("{}/rerank", server.uri())},
    }))
    .unwrap();
    let context = Context::default();
    let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query: "问" };
    let hits = open_retrieval_backend(&config, "shop", &LocalModels::default(), &ServiceContext::default())
        .unwrap()
        .search(&request, LIMITS)
        .await
        .unwrap();
    assert_eq!(seen(&hits), [("b", 0.625, 1), ("a", 0.5, 2)]);
    assert_eq!((hits[0].retrieval_score, hits[1].retrieval_score), (None, Some(0.75)));
}

/// Regression: a wrong pointer in a mapping that has a reranker score nothing.
#[tokio::test]
async fn passages_without_a_text_are_not_reranked() {
    let server = MockServer::start().await;
    let found = ResponseTemplate::new(200).set_body_json(json!([{"id": "a", "page_content": "甲"}]));
    Mock::given(path("/search_docs")).respond_with(found).mount(&server).await;
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "http", "service": "chatchat", "url": format!("{}/search_docs", server.uri()),
        "mapping": {"text": ["/content"]}, "rerank": {"kind": "tei", "url": format!("{}/rerank", server.uri())},
    }))
    .unwrap();
    let context = Context::default();
    let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query: "问" };
    let search = open_retrieval_backend(&config, "shop", &LocalModels::default(), &ServiceContext::default()).unwrap();
    let failure = search.search(&request, LIMITS).await.unwrap_err();
    let expected = "chatchat: passages have no text to be scored; check retrieval.mapping.text";
    assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::InvalidResponse, expected));
}

#[tokio::test]
async fn cohere_and_vllm_name_a_model_and_put_results_in_a_list() {
    let asked = json!({"model": "bge-reranker", "query": "它怎么吃", "documents": ["甲", "乙", "丙"], "top_n": 3});
    let answer = json!({"id": "rerank-1", "model": "bge-reranker", "usage": {"total_tokens": 56}, "results": [
        {"index": 1, "document": {"text": "乙"}, "relevance_score": 0.875},
        {"index": 0, "document": {"text": "甲"}, "relevance_score": 0.25},
        {"index": 2, "document": {"text": "丙"}, "relevance_score": 0.125},
    ]});
    let settings = json!({"kind": "cohere", "model": "bge-reranker", "query": "{{query}}"});
    assert_eq!(seen(&ask(settings, asked, answer).await.unwrap()), [("乙", 0.875, 1)]);
}

/// Regression: passages of more tokens than the model takes, which vLLM refuses with status 400.
#[tokio::test]
async fn a_service_may_be_sent_more_than_its_interface_has() {
    let asked = json!({"model": "m", "query": "它怎么吃", "documents": ["甲", "乙", "丙"], "top_n": 3, "truncate_prompt_tokens": -1});
    let score = |index: u32| json!({"index": index, "relevance_score": 0.875});
    let answer = json!({"results": [score(0), score(1), score(2)]});
    let extra = json!({"truncate_prompt_tokens": -1});
    let settings = json!({"kind": "cohere", "model": "m", "query": "{{query}}", "extra": extra});
    assert_eq!(ask(settings, asked, answer).await.unwrap().len(), 2);
}

#[tokio::test]
async fn logits_become_shares() {
    let asked = json!({"query": QUERY, "texts": ["甲", "乙", "丙"], "truncate": true, "raw_scores": true});
    let answer = json!([{"index": 0, "score": 0.0}, {"index": 1, "score": -9.5}, {"index": 2, "score": "2.0"}]);
    let hits = ask(json!({"kind": "tei", "scores": "logit"}), asked, answer).await.unwrap();
    assert_eq!(seen(&hits), [("丙", 1.0 / (1.0 + (-2.0_f64).exp()), 1), ("甲", 0.5, 2)]);
}

#[tokio::test]
async fn scores_that_do_not_fit_the_texts_are_a_failure() {
    let asked = json!({"query": QUERY, "texts": ["甲", "乙", "丙"], "truncate": true, "raw_scores": false});
    for (answer, said) in [
        (json!([{"index": 0, "score": 0.5}]), "scores of 1 of 3 texts"),
        (json!([{"index": 3, "score": 0.5}]), "a score of no text that was sent"),
        (
            json!([{"index": 0, "score": 4.5}]),
            "the score `4.5`; expected 0 to 1, or retrieval.rerank.scores = \"logit\"",
        ),
        (json!({"scores": []}), "no list of scores"),
    ] {
        let failure = ask(json!({"kind": "tei"}), asked.clone(), answer).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::InvalidResponse);
        assert!(failure.message.contains(said), "{failure}");
    }
}

#[tokio::test]
async fn many_passages_go_in_several_calls() {
    let server = MockServer::start().await;
    for (texts, score) in [(json!(["甲", "乙"]), 0.9), (json!(["丙"]), 0.6)] {
        let scores: Vec<Value> =
            (0..texts.as_array().unwrap().len()).map(|index| json!({"index": index, "score": score})).collect();
        Mock::given(body_partial_json(json!({"texts": texts})))
            .respond_with(ResponseTemplate::new(200).set_body_json(scores))
            .expect(1)
            .mount(&server)
            .await;
    }
    let config = serde_json::from_value(json!({"kind": "tei", "url": server.uri(), "batch_size": 2})).unwrap();
    let service = super::RerankService::open(&config, &ServiceContext::default()).unwrap();
    assert_eq!(service.scores("问", &["甲", "乙", "丙"]).await.unwrap(), [0.9, 0.9, 0.6]);
}

/// ServiceScores a text by how many characters of the query it has.
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

/// A model whose weights are damaged, or one that loses a text.
struct Damaged(Vec<f64>);

impl PairScorer for Damaged {
    fn scores(&self, _query: &str, _texts: &[&str]) -> Result<Vec<f64>, LocalModelError> {
        Ok(self.0.clone())
    }

    fn digest(&self) -> &str {
        "damaged"
    }
}

/// Regression: a passage whose score is no number is below every threshold, and so as if it had not been found.
#[tokio::test]
async fn a_model_without_a_number_for_each_passage_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let knowledge_base = folder.path().join("kb.jsonl");
    querl_core::fsx::write_jsonl(&knowledge_base, [json!({"id": "a", "text": "鱼油怎么吃"})].into_iter()).unwrap();
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "embedded", "knowledge_base": knowledge_base, "index_dir": folder.path().join("indexes"),
        "rerank": {"kind": "local", "path": folder.path(), "query": "{{query}}"},
    }))
    .unwrap();
    let context = Context::default();
    let request =
        RetrievalRequest { original_query: "怎么吃", context: &context, rewritten_query: "鱼油怎么吃" };
    let nan = "cross-encoder: the score NaN; its weights are damaged, or overflow";
    for (scores, expected) in [(vec![f64::NAN], nan), (vec![0.5; 2], "cross-encoder: 2 scores of 1 texts")] {
        let models = LocalModels { scorer: Some(Arc::new(Damaged(scores))), ..LocalModels::default() };
        let search = open_retrieval_backend(&config, "shop", &models, &ServiceContext::default()).unwrap();
        let failure = search.search(&request, LIMITS).await.unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::InvalidResponse, expected));
    }
}

#[test]
fn what_a_request_has_of_its_own_cannot_be_set_beside_it() {
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "http", "url": "http://127.0.0.1:1/rag",
        "rerank": {"kind": "tei", "url": "http://127.0.0.1:1/rerank", "extra": {"texts": ["甲"]}},
    }))
    .unwrap();
    let opened = open_retrieval_backend(&config, "shop", &LocalModels::default(), &ServiceContext::default());
    assert_eq!(
        opened.err().unwrap().to_string(),
        "retrieval.rerank.extra has `texts`, which the interface's request has already; leave it out"
    );
}

#[tokio::test]
async fn a_model_in_this_process_ranks_what_the_index_finds() {
    let folder = tempfile::tempdir().unwrap();
    let knowledge_base = folder.path().join("kb.jsonl");
    let more = (0..40).map(|index| (format!("c{index}"), "鱼油"));
    let passages = [("a".to_owned(), "鱼油价格"), ("b".to_owned(), "鱼油怎么吃")].into_iter().chain(more);
    let passages = passages.map(|(id, text)| json!({"id": id, "text": text}));
    querl_core::fsx::write_jsonl(&knowledge_base, passages).unwrap();
    // Without a lexicon: the cross-encoder needs none.
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "embedded", "knowledge_base": knowledge_base, "index_dir": folder.path().join("indexes"),
        "rerank": {"kind": "local", "path": folder.path(), "query": "{{query}}", "batch_size": 8},
    }))
    .unwrap();
    let models = LocalModels { scorer: Some(Arc::new(Overlap)), ..LocalModels::default() };
    let search = open_retrieval_backend(&config, "shop", &models, &ServiceContext::default()).unwrap();
    assert_eq!(search.name(), "embedded + cross-encoder");
    let context = Context::default();
    let request =
        RetrievalRequest { original_query: "怎么吃", context: &context, rewritten_query: "鱼油怎么吃价格" };
    let hits = search.search(&request, LIMITS).await.unwrap();
    assert_eq!(seen(&hits), [("b", 0.75, 1)]);
    // Of the 20 candidates that a configuration has by default, and no more, whatever a request asks for.
    let many = RetrievalLimits { top_k: 1000, score_threshold: 0.0 };
    assert_eq!(search.search(&request, many).await.unwrap().len(), 20);
}
