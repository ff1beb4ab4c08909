//! Judges: a deterministic rubric, or a model behind an OpenAI-compatible endpoint.

pub(crate) mod lexicon;
pub(crate) mod query_intent;
pub(crate) mod rubric;

use crate::client::chat::ChatClient;
use crate::client::context::ServiceContext;
use crate::client::response_cache::{CacheTable, CachedJudge, ServiceCache};
use crate::error::DataError;
use crate::judge::lexicon::Lexicon;
use crate::judge::rubric::RubricJudge;
use crate::retrieval::Vocabulary;
use async_trait::async_trait;
use querl_core::config::{JudgeConfig, JudgeKind, RetrievalConfig};
use querl_core::ports::{Judge, JudgeRequest};
use querl_core::records::{CallFailure, Completion};
use std::sync::Arc;

/// The judge that the configuration names; `None` without a judge. The rubric reads the lexicon that retrieval names.
///
/// # Errors
/// A setting that its kind needs is absent, or the lexicon cannot be read.
pub fn open_judge(
    config: &JudgeConfig,
    retrieval: &RetrievalConfig,
    services: &ServiceContext,
) -> Result<Option<Arc<dyn Judge>>, DataError> {
    match config.kind {
        JudgeKind::None => Ok(None),
        JudgeKind::Openai => {
            let client = ChatClient::open("judge", config.endpoint(), services)?;
            let service_cache =
                ServiceCache::open(services, CacheTable::Judgements, client.provider(), &client.identity());
            Ok(Some(Arc::new(CachedJudge { inner: Arc::new(OpenAiJudge(client)), service_cache })))
        }
        JudgeKind::Rubric => {
            let path = retrieval.lexicon.as_deref().ok_or_else(|| {
                DataError::setting(
                    "retrieval.lexicon",
                    "is not set; a judge of kind `rubric` needs the tenant's lexicon",
                )
            })?;
            let segmenter = Vocabulary::open(retrieval)?.segmenter;
            Ok(Some(Arc::new(RubricJudge::new(Lexicon::read(path)?.with_segmenter(segmenter)))))
        }
    }
}

struct OpenAiJudge(ChatClient);

#[async_trait]
impl Judge for OpenAiJudge {
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure> {
        self.0.complete(request.messages).await
    }

    fn name(&self) -> &str {
        self.0.model()
    }
}
