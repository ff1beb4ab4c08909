//! Teachers: a recording, or a model behind an OpenAI-compatible endpoint.

use crate::client::chat::ChatClient;
use crate::client::context::ServiceContext;
use crate::client::response_cache::{CacheTable, CachedTeacher, ServiceCache};
use crate::dataset::journal::IndexedLines;
use crate::error::DataError;
use crate::table::query_id;
use crate::text::hash_of;
use async_trait::async_trait;
use querl_core::config::{EndpointConfig, TeacherConfig, TeacherKind};
use querl_core::fsx::{NumberedLine, open_jsonl};
use querl_core::ports::Teacher;
use querl_core::records::{CallFailure, Completion, FailureKind, Message, QueryRow};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The teacher that the configuration names, with its fallback, if any. A local model is none of them: see
/// [`LocalRewriteStage`](crate::LocalRewriteStage).
///
/// # Errors
/// A setting that its kind needs is absent, or the recording cannot be read.
pub fn open_teacher(
    config: &TeacherConfig,
    fallback: &EndpointConfig,
    services: &ServiceContext,
) -> Result<Arc<dyn Teacher>, DataError> {
    let first = open_first(config, services)?;
    Ok(match open_fallback(fallback, services)? {
        Some(second) => Arc::new(WithFallback { first, second }),
        None => first,
    })
}

/// The fallback teacher, if the configuration names one.
///
/// # Errors
/// The endpoint lacks a model or its key.
pub fn open_fallback(
    fallback: &EndpointConfig,
    services: &ServiceContext,
) -> Result<Option<Arc<dyn Teacher>>, DataError> {
    match fallback.base_url {
        Some(_) => open_openai("fallback_teacher", fallback.endpoint(), services).map(Some),
        None => Ok(None),
    }
}

fn open_first(config: &TeacherConfig, services: &ServiceContext) -> Result<Arc<dyn Teacher>, DataError> {
    match config.kind {
        TeacherKind::Recorded => {
            let path = config.path.as_deref().ok_or_else(|| {
                DataError::setting("teacher.path", "is not set; a teacher of kind `recorded` needs a file of rewrites")
            })?;
            Ok(Arc::new(RecordedTeacher::read(path)?))
        }
        TeacherKind::Openai => open_openai("teacher", config.endpoint(), services),
        TeacherKind::Local => Err(DataError::setting(
            "teacher.kind",
            "is `local`: a model in this process, which is handed rows in portions",
        )),
    }
}

fn open_openai(
    section: &str,
    endpoint: EndpointConfig,
    services: &ServiceContext,
) -> Result<Arc<dyn Teacher>, DataError> {
    let client = ChatClient::open(section, endpoint, services)?;
    let service_cache = ServiceCache::open(services, CacheTable::Rewrites, client.provider(), &client.identity());
    Ok(Arc::new(CachedTeacher { inner: Arc::new(OpenAiTeacher(client)), service_cache }))
}

/// A teacher with a fallback for rows that it failed on.
struct WithFallback {
    first: Arc<dyn Teacher>,
    second: Arc<dyn Teacher>,
}

#[async_trait]
impl Teacher for WithFallback {
    async fn rewrite(&self, query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure> {
        self.first.rewrite(query, messages).await
    }

    fn knows(&self, messages: &[Message]) -> bool {
        self.first.knows(messages)
    }

    fn forget(&self, messages: &[Message]) {
        self.first.forget(messages);
    }

    fn keep(&self, messages: &[Message], completion: &Completion) {
        self.first.keep(messages, completion);
    }

    fn fallback(&self) -> Option<&dyn Teacher> {
        Some(self.second.as_ref())
    }

    fn name(&self) -> &str {
        self.first.name()
    }
}

/// Rewrites made earlier, looked up by query, profile and history. They stay in their file: in memory is where each begins.
struct RecordedTeacher {
    path: String,
    places: HashMap<u64, u64>,
    lines: Mutex<IndexedLines>,
}

#[derive(Deserialize)]
struct Recording {
    original_query: String,
    #[serde(default)]
    user_profile: String,
    #[serde(default)]
    history_summary: String,
    rewritten_query: String,
    #[serde(default)]
    cost: Option<f64>,
    #[serde(default)]
    latency_ms: Option<f64>,
}

impl RecordedTeacher {
    fn read(path: &Path) -> Result<Self, DataError> {
        let mut places = HashMap::new();
        for line in open_jsonl::<Recording>(path)? {
            let NumberedLine { offset, value, .. } = line?;
            places.insert(hash_of(&value.id()), offset);
        }
        Ok(Self { path: path.display().to_string(), places, lines: Mutex::new(IndexedLines::open(path)?) })
    }

    fn recording(&self, id: &str) -> Result<Option<Recording>, DataError> {
        let Some(offset) = self.places.get(&hash_of(id)) else { return Ok(None) };
        let recording: Recording = self.lines.lock().unwrap_or_else(PoisonError::into_inner).read(*offset)?;
        // Two ids may have one hash.
        Ok((recording.id() == id).then_some(recording))
    }
}

impl Recording {
    fn id(&self) -> String {
        query_id(self.original_query.trim(), self.user_profile.trim(), self.history_summary.trim())
    }

    fn into_completion(self) -> Completion {
        let (cost, latency_ms) = (self.cost, self.latency_ms);
        Completion {
            text: self.rewritten_query,
            prompt_tokens: None,
            completion_tokens: None,
            cost,
            latency_ms,
            source: None,
        }
    }
}

#[async_trait]
impl Teacher for RecordedTeacher {
    async fn rewrite(&self, query: &QueryRow, _messages: &[Message]) -> Result<Completion, CallFailure> {
        match self.recording(&query.id) {
            Ok(Some(recording)) => Ok(recording.into_completion()),
            Err(error) => Err(CallFailure { kind: FailureKind::InvalidResponse, message: error.to_string() }),
            Ok(None) => Err(CallFailure {
                kind: FailureKind::NotRecorded,
                message: format!("{} has no rewrite of `{}` in this context", self.path, query.original_query),
            }),
        }
    }

    fn name(&self) -> &str {
        "recorded (stand-in)"
    }
}

struct OpenAiTeacher(ChatClient);

#[async_trait]
impl Teacher for OpenAiTeacher {
    async fn rewrite(&self, _query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure> {
        self.0.complete(messages).await
    }

    fn name(&self) -> &str {
        self.0.model()
    }
}

#[cfg(test)]
#[path = "teacher_tests.rs"]
mod tests;
