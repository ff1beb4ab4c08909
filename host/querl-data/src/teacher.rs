//! Teachers: a recording, or a model behind an OpenAI-compatible endpoint.

use crate::chat::ChatClient;
use crate::error::DataError;
use crate::table::query_id;
use async_trait::async_trait;
use querl_core::config::{TeacherConfig, TeacherKind};
use querl_core::ports::Teacher;
use querl_core::records::{CallFailure, Completion, FailureKind, Message, QueryRow};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// The teacher that the configuration names.
///
/// # Errors
/// A setting that its kind needs is absent, or the recording cannot be read.
pub fn open_teacher(config: &TeacherConfig) -> Result<Arc<dyn Teacher>, DataError> {
    match config.kind {
        TeacherKind::Recorded => {
            let path = config.path.as_deref().ok_or_else(|| {
                DataError::setting("teacher.path", "is not set; a teacher of kind `recorded` needs a file of rewrites")
            })?;
            Ok(Arc::new(RecordedTeacher::read(path)?))
        }
        TeacherKind::Openai => Ok(Arc::new(OpenAiTeacher(ChatClient::open("teacher", config.endpoint())?))),
    }
}

/// Rewrites made earlier, looked up by query, profile and history.
struct RecordedTeacher {
    path: String,
    completions: HashMap<String, Completion>,
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
        let recordings: Vec<Recording> = querl_core::fsx::read_jsonl(path)?;
        let completions = recordings.into_iter().map(Recording::into_entry).collect();
        Ok(Self { path: path.display().to_string(), completions })
    }
}

impl Recording {
    fn into_entry(self) -> (String, Completion) {
        let id = query_id(self.original_query.trim(), self.user_profile.trim(), self.history_summary.trim());
        let (cost, latency_ms) = (self.cost, self.latency_ms);
        (id, Completion { text: self.rewritten_query, prompt_tokens: None, completion_tokens: None, cost, latency_ms })
    }
}

#[async_trait]
impl Teacher for RecordedTeacher {
    async fn rewrite(&self, query: &QueryRow, _messages: &[Message]) -> Result<Completion, CallFailure> {
        self.completions.get(&query.id).cloned().ok_or_else(|| CallFailure {
            kind: FailureKind::NotRecorded,
            message: format!("{} has no rewrite of `{}` in this context", self.path, query.original_query),
        })
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
