//! Ports that look into the cache before they ask.

use super::{AnswerCache, CacheTable};
use crate::account::Account;
use async_trait::async_trait;
use querl_core::fsx::digest_hex;
use querl_core::ports::{Judge, JudgeRequest, RetrievalRequest, Retriever, Teacher};
use querl_core::records::{CallFailure, Completion, Hit, Message, QueryRow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;

/// One table of the cache, for the answers of one service with one set of parameters.
pub(crate) struct Shelf {
    cache: Arc<AnswerCache>,
    account: Arc<Account>,
    table: CacheTable,
    /// As the account calls the service.
    provider: String,
    /// Everything beside the question that an answer depends on.
    identity: String,
    max_age: Option<Duration>,
}

impl Shelf {
    pub(crate) fn new(
        cache: Arc<AnswerCache>,
        account: Arc<Account>,
        table: CacheTable,
        provider: &str,
        identity: &impl Serialize,
        max_age: Option<Duration>,
    ) -> Self {
        let identity = serde_json::to_string(identity).unwrap_or_default();
        Self { cache, account, table, provider: provider.to_owned(), identity, max_age }
    }

    fn key(&self, question: &impl Serialize) -> String {
        let question = serde_json::to_string(question).unwrap_or_default();
        digest_hex(format!("{}\n{question}", self.identity).as_bytes())
    }

    fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let answer = self.cache.get(self.table, key, self.max_age)?;
        let answer = serde_json::from_slice(&answer).ok()?;
        self.account.count_cached(&self.provider);
        Some(answer)
    }

    fn put(&self, key: &str, answer: &impl Serialize) {
        if let Ok(bytes) = serde_json::to_vec(answer) {
            self.cache.put(self.table, key, bytes);
        }
    }

    async fn ask<T: Serialize + DeserializeOwned>(
        &self,
        question: &impl Serialize,
        call: impl Future<Output = Result<T, CallFailure>>,
    ) -> Result<T, CallFailure> {
        let key = self.key(question);
        if let Some(known) = self.get(&key) {
            return Ok(known);
        }
        let answer = call.await?;
        self.put(&key, &answer);
        Ok(answer)
    }

    fn forget(&self, question: &impl Serialize) {
        self.cache.forget(self.table, &self.key(question));
    }
}

/// A teacher behind the cache.
pub(crate) struct CachedTeacher {
    pub(crate) inner: Arc<dyn Teacher>,
    pub(crate) shelf: Shelf,
}

#[async_trait]
impl Teacher for CachedTeacher {
    async fn rewrite(&self, query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure> {
        self.shelf.ask(&messages, self.inner.rewrite(query, messages)).await
    }

    fn knows(&self, messages: &[Message]) -> bool {
        let key = self.shelf.key(&messages);
        self.shelf.cache.get(self.shelf.table, &key, self.shelf.max_age).is_some()
    }

    fn forget(&self, messages: &[Message]) {
        self.shelf.forget(&messages);
    }

    fn keep(&self, messages: &[Message], completion: &Completion) {
        self.shelf.put(&self.shelf.key(&messages), completion);
    }

    fn name(&self) -> &str {
        self.inner.name()
    }
}

/// A judge behind the cache.
pub(crate) struct CachedJudge {
    pub(crate) inner: Arc<dyn Judge>,
    pub(crate) shelf: Shelf,
}

#[async_trait]
impl Judge for CachedJudge {
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure> {
        let messages = request.messages;
        self.shelf.ask(&messages, self.inner.judge(request)).await
    }

    fn forget(&self, messages: &[Message]) {
        self.shelf.forget(&messages);
    }

    fn name(&self) -> &str {
        self.inner.name()
    }
}

/// Retrieval behind the cache.
pub(crate) struct CachedRetriever {
    pub(crate) inner: Arc<dyn Retriever>,
    pub(crate) shelf: Shelf,
}

#[async_trait]
impl Retriever for CachedRetriever {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        let question = (request.original_query, request.context, request.rewritten_query);
        self.shelf.ask(&question, self.inner.retrieve(request.clone())).await
    }

    fn name(&self) -> &str {
        self.inner.name()
    }
}
