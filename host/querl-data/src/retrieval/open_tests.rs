#![allow(clippy::unwrap_used)]

use super::*;
use crate::client::response_cache::{CacheLimits, ResponseCache};
use querl_core::ports::LocalModelError;
use querl_core::ports::{Embedder, PairScorer, RetrievalRequest};
use querl_core::records::Context;
use serde_json::json;
use std::time::Duration;
use wiremock::{Mock, MockServer, ResponseTemplate, matchers};

/// A cross-encoder of some content.
struct RerankScorer(&'static str);

impl PairScorer for RerankScorer {
    fn scores(&self, _query: &str, texts: &[&str]) -> Result<Vec<f64>, LocalModelError> {
        Ok(vec![0.5; texts.len()])
    }

    fn digest(&self) -> &str {
        self.0
    }
}

/// An embedding model of some content.
struct Embedding(&'static str);

impl Embedder for Embedding {
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
        Ok(vec![vec![1.0]; texts.len()])
    }

    fn dimension(&self) -> usize {
        1
    }

    fn digest(&self) -> &str {
        self.0
    }
}

/// Regression: scores of a model that is no longer there, taken from the cache since its folder has the same name.
#[tokio::test]
async fn a_model_is_known_to_the_cache_by_its_content_and_not_its_place() {
    let (server, folder) = (MockServer::start().await, tempfile::tempdir().unwrap());
    let answer = json!({"status": "ok", "result": {"points": [{"id": 1, "score": 0.5, "payload": {"text": "甲"}}]}});
    Mock::given(matchers::any()).respond_with(ResponseTemplate::new(200).set_body_json(answer)).mount(&server).await;
    let cache = Arc::new(ResponseCache::open(&folder.path().join("answers.redb"), CacheLimits::default()).unwrap());
    let services = ServiceContext::default().with_cache(cache, Duration::from_secs(3600));
    let asked = async |place: &str, embedding: &'static str, scorer: &'static str| {
        let config: RetrievalConfig = serde_json::from_value(json!({
            "kind": "http", "service": "qdrant", "url": server.uri(), "max_retries": 0,
            "embedding": {"kind": "local", "path": place}, "rerank": {"kind": "local", "path": place},
        }))
        .unwrap();
        let models = LocalModels {
            embedder: Some(Arc::new(Embedding(embedding))),
            scorer: Some(Arc::new(RerankScorer(scorer))),
        };
        let retriever = open_retriever(&config, "shop", &models, &services).unwrap();
        let context = Context::default();
        let request = RetrievalRequest { original_query: "鱼油", context: &context, rewritten_query: "鱼油" };
        assert_eq!(retriever.retrieve(request).await.unwrap().len(), 1);
        server.received_requests().await.unwrap().len()
    };
    assert_eq!(asked("models/a", "one", "one").await, 1);
    assert_eq!(asked("models/moved", "one", "one").await, 1);
    assert_eq!(asked("models/a", "one", "two").await, 2);
    assert_eq!(asked("models/a", "two", "two").await, 3);
}
