#![allow(clippy::unwrap_used)]

use super::*;
use crate::client::response_cache::CacheLimits;
use futures::future::join_all;
use querl_core::records::Context;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Answers after a while with the number of the call.
#[derive(Default)]
struct Slow(AtomicUsize);

#[async_trait]
impl Retriever for Slow {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        let n = self.0.fetch_add(1, Ordering::SeqCst) + 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
        if request.rewritten_query == "down" {
            return Err(CallFailure { kind: FailureKind::Unreachable, message: format!("call {n}") });
        }
        Ok(vec![Hit { id: n.to_string(), text: String::new(), reranker_score: 0.1, retrieval_score: None, rank: 1 }])
    }

    fn name(&self) -> &str {
        "slow"
    }
}

struct StageResults {
    services: ServiceContext,
    inner: Arc<Slow>,
    retriever: CachedRetriever,
}

fn asked(services: ServiceContext) -> StageResults {
    let inner = Arc::new(Slow::default());
    let service_cache = ServiceCache::open(&services, CacheTable::Retrievals, "retrieval", &"slow");
    StageResults { services, retriever: CachedRetriever { inner: inner.clone(), service_cache }, inner }
}

impl StageResults {
    /// The number of the call that answered, or the failure's message.
    async fn ask(&self, rewritten_query: &str) -> String {
        let context = Context::default();
        let request = RetrievalRequest { original_query: "", context: &context, rewritten_query };
        self.retriever.retrieve(request).await.map_or_else(|failure| failure.message, |hits| hits[0].id.clone())
    }

    fn n_calls(&self) -> usize {
        self.inner.0.load(Ordering::SeqCst)
    }

    /// Answered by the cache, and by calls of others.
    fn counted(&self) -> (u64, u64) {
        let spent = self.services.account().of_stage("");
        (spent.cached, spent.joined)
    }
}

/// Regression: one question paid for twice, since it was asked again before its answer came.
#[tokio::test]
async fn what_is_asked_at_the_same_time_is_paid_once() {
    let all = asked(ServiceContext::default());
    let answers = join_all(["a", "b", "a", "a"].map(|question| all.ask(question))).await;
    assert_eq!(answers, ["1", "2", "1", "1"]);
    assert_eq!((all.n_calls(), all.counted()), (2, (0, 2)));
    assert_eq!(all.ask("a").await, "3", "without a cache nothing is remembered");
}

/// Regression: an episode that is dropped as late, since its question had been asked, slowly, by another before it.
#[tokio::test]
async fn limit_of_who_waits_for_anothers_answer_begins_with_ones_own_call() {
    let all = asked(ServiceContext::default());
    let second = async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        deadline::within_deadline(Duration::from_millis(10), all.ask("a")).await
    };
    assert_eq!(tokio::join!(all.ask("a"), second), ("1".to_owned(), Some("1".to_owned())));
    let cut_off = deadline::within_deadline(Duration::from_millis(10), all.ask("a"));
    let next = deadline::within_deadline(Duration::from_secs(10), all.ask("a"));
    assert_eq!(tokio::join!(cut_off, next), (None, Some("3".to_owned())));
}

#[tokio::test]
async fn a_failure_is_shared_and_the_next_time_is_asked_anew() {
    let all = asked(ServiceContext::default());
    assert_eq!(join_all(["down", "down"].map(|question| all.ask(question))).await, ["call 1", "call 1"]);
    assert_eq!(all.ask("down").await, "call 2");
    assert_eq!(all.counted(), (0, 0));
}

/// Regression: a response that was not found in the moment before it was on disk.
#[tokio::test]
async fn an_answer_is_known_from_the_moment_it_came() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Arc::new(ResponseCache::open(&folder.path().join("answers.redb"), CacheLimits::default()).unwrap());
    let all = asked(ServiceContext::default().with_cache(cache, Duration::from_secs(60)));
    for n in 1..=5 {
        let question = format!("question {n}");
        assert_eq!(all.ask(&question).await, n.to_string());
        assert_eq!(all.ask(&question).await, n.to_string());
    }
    assert_eq!((all.n_calls(), all.counted()), (5, (5, 0)));
}

/// Regression: `--from validate` after a change of the knowledge base, which brings the old hits.
#[tokio::test]
async fn done_anew_means_that_what_was_found_before_is_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Arc::new(ResponseCache::open(&folder.path().join("answers.redb"), CacheLimits::default()).unwrap());
    let services = ServiceContext::default().with_cache(cache, Duration::from_secs(60));
    let before = asked(services.clone());
    assert_eq!(before.ask("a").await, "1");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let fresh = asked(services.with_fresh_retrievals());
    assert_eq!((fresh.ask("a").await, fresh.n_calls()), ("1".into(), 1));
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!((fresh.ask("a").await, fresh.n_calls()), ("1".into(), 1));
}

#[tokio::test]
async fn whoever_still_waits_is_answered_where_the_first_has_given_up() {
    let all = asked(ServiceContext::default());
    let (first, second) = (tokio::time::timeout(Duration::from_millis(10), all.ask("a")), all.ask("a"));
    let (first, second) = tokio::join!(first, second);
    assert!(first.is_err());
    assert_eq!((second.as_str(), all.n_calls()), ("2", 2));
}
