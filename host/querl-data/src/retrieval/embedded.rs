//! Embedded retrieval in this process: an index finds candidates by the words of the rewrite and, with an embedding model, by its vector;
//! a reranker scores them against the query.

use crate::error::DataError;
use crate::judge::lexicon::QueryIntent;
use crate::retrieval::embedding::{LocalModelCalls, query_prefix};
use crate::retrieval::index::{PassageIndex, SourcesDigest, open_lexicon};
use crate::retrieval::language::retrieval_language;
use crate::retrieval::lexicon_reranker::{CorpusCounts, LexiconReranker};
use crate::retrieval::vocabulary::Vocabulary;
use crate::retrieval::{LocalModels, Passage, RetrievalBackend, RetrievalLimits, ServiceScores};
use async_trait::async_trait;
use querl_core::config::RetrievalConfig;
use querl_core::ports::{Embedder, LocalModelError, RetrievalRequest};
use querl_core::records::{CallFailure, Context, FailureKind, Hit};
use std::path::Path;
use std::sync::Arc;

/// Reciprocal rank fusion: a passage gets `1 / (RANK_CONSTANT + rank)` from each list it is in.
///
/// Source: Cormack, Clarke and Buettcher 2009, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods".
const RANK_CONSTANT: f64 = 60.0;

/// Embedded retrieval: a full-text index (with vectors if configured) and a reranker.
pub struct EmbeddedRetriever {
    searcher: Arc<Searcher>,
    calls: LocalModelCalls,
}

struct Searcher {
    index: PassageIndex,
    reranker: LexiconReranker,
    scores: ServiceScores,
    vectors: Option<Vectors>,
}

/// An embedding model over the index.
struct Vectors {
    embedder: Arc<dyn Embedder>,
    query_prefix: String,
}

/// Position of a passage with its first-stage score.
type Candidate = (usize, f64);

impl EmbeddedRetriever {
    /// Opens the index of the configured knowledge base; builds it if necessary.
    ///
    /// # Errors
    /// `retrieval.knowledge_base` is not set, or a file cannot be read or written.
    pub fn open(config: &RetrievalConfig, models: &LocalModels) -> Result<Self, DataError> {
        let knowledge_base = required(config.knowledge_base.as_deref(), "knowledge_base")?;
        let embedder = models.embedder.clone();
        let language = retrieval_language(config);
        let digest = SourcesDigest::of(knowledge_base, config, language, embedder.as_deref())?;
        let vocabulary = Vocabulary::open_in(config, language)?;
        let reranker = LexiconReranker::new(open_lexicon(config, &vocabulary.segmenter)?);
        let index = PassageIndex::open(knowledge_base, config, &digest, vocabulary, &reranker, embedder.as_deref())?;
        let query_prefix = query_prefix(&config.embedding, embedder.as_deref());
        let vectors = embedder.map(|embedder| Vectors { embedder, query_prefix });
        let max_concurrent = match &vectors {
            Some(_) => config.max_concurrent.min(config.embedding.max_concurrent),
            None => config.max_concurrent,
        };
        Ok(Self {
            searcher: Arc::new(Searcher { index, reranker, scores: ServiceScores::of(config), vectors }),
            calls: LocalModelCalls::new("embedded index", max_concurrent, config.timeout_s),
        })
    }

    /// Product and intents of a query in its context; `None` without a lexicon.
    pub fn query_intent(&self, query: &str, context: &Context) -> Option<QueryIntent> {
        let reranker = &self.searcher.reranker;
        (!reranker.has_no_products()).then(|| reranker.query_intent(query, context))
    }

    /// All passages with their reranker scores, best first; passages with equal scores keep the order of the knowledge base.
    ///
    /// # Errors
    /// The index cannot be read.
    pub fn rank_all(&self, query_intent: &QueryIntent) -> Result<Vec<(Passage, f64)>, CallFailure> {
        let Searcher { index, reranker, .. } = self.searcher.as_ref();
        let weighed = reranker.weigh(query_intent.clone(), index);
        let score = |position| {
            let stored = index.stored(position).map_err(|error| broken(&error.to_string()))?;
            let score = reranker.score(&weighed, &stored.traits);
            Ok((stored.passage, score))
        };
        let mut ranked = (0..index.n_passages()).map(score).collect::<Result<Vec<_>, CallFailure>>()?;
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(ranked)
    }

    /// The passages for one rewrite, best reranker score first.
    ///
    /// # Errors
    /// The index cannot be read, or the embedding model failed.
    pub fn search_now(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        self.searcher.search(request, limits).map_err(|problem| broken(&problem))
    }
}

impl Searcher {
    fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, String> {
        let in_index = |error: tantivy::TantivyError| error.to_string();
        let by_words = self.index.candidates(request.rewritten_query, limits.top_k).map_err(in_index)?;
        let candidates = match &self.vectors {
            Some(vectors) => {
                let vector =
                    vectors.of(request.rewritten_query).map_err(|error| format!("embedding model: {error}"))?;
                let nearest = vector.map(|vector| self.index.nearest(&vector, limits.top_k));
                fused(&by_words, &nearest.unwrap_or_default(), limits.top_k)
            }
            None => by_words,
        };
        // Without products the order is that of the first stage, so scores that another reranker replaces have no effect.
        let is_unscored = self.scores == ServiceScores::Replaced && self.reranker.has_no_products();
        let weighed = (!is_unscored).then(|| {
            let query_intent = self.reranker.query_intent(request.original_query, request.context);
            self.reranker.weigh(query_intent, &self.index)
        });
        let hit = |(position, first_score): Candidate| {
            let stored = self.index.stored(position).map_err(in_index)?;
            let score = weighed.as_ref().map_or(0.0, |weighed| self.reranker.score(weighed, &stored.traits));
            let (id, text) = (stored.passage.id.clone(), stored.passage.full_text());
            Ok(Hit { id, text, reranker_score: score, retrieval_score: Some(first_score), rank: 0 })
        };
        let hits = candidates.into_iter().map(hit).collect::<Result<Vec<Hit>, String>>()?;
        // Ties of reranker scores keep the order of the first stage. Without products, the scores are less informative than that order.
        Ok(if self.reranker.has_no_products() { limits.apply_in_order(hits) } else { limits.apply(hits) })
    }
}

#[async_trait]
impl RetrievalBackend for EmbeddedRetriever {
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        let searcher = self.searcher.clone();
        let (query, context) = (request.original_query.to_owned(), request.context.clone());
        let rewrite = request.rewritten_query.to_owned();
        let search = move || {
            let request = RetrievalRequest { original_query: &query, context: &context, rewritten_query: &rewrite };
            searcher.search(&request, limits)
        };
        self.calls.run(search).await
    }

    fn name(&self) -> &str {
        if self.searcher.vectors.is_some() { "embedded, hybrid" } else { "embedded" }
    }
}

impl Vectors {
    /// The vector of a query; `None` for an empty text.
    fn of(&self, text: &str) -> Result<Option<Vec<f32>>, LocalModelError> {
        if text.trim().is_empty() {
            return Ok(None);
        }
        let text = format!("{}{text}", self.query_prefix);
        Ok(self.embedder.embed(&[&text])?.pop())
    }
}

/// Reciprocal rank fusion of two lists; of equal scores the passage nearer by vectors first.
fn fused(by_words: &[Candidate], nearest: &[usize], n_passages: usize) -> Vec<Candidate> {
    let lists = [nearest.to_vec(), by_words.iter().map(|(position, _)| *position).collect()];
    let mut fused: Vec<Candidate> = Vec::new();
    for (position, rank) in lists.iter().flat_map(|list| list.iter().zip(1..)) {
        let score = 1.0 / (RANK_CONSTANT + f64::from(rank));
        match fused.iter_mut().find(|(known, _)| known == position) {
            Some((_, sum)) => *sum += score,
            None => fused.push((*position, score)),
        }
    }
    fused.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: passages of `nearest` come first
    fused.truncate(n_passages);
    fused
}

fn broken(problem: &str) -> CallFailure {
    CallFailure { kind: FailureKind::ServerError, message: format!("embedded index: {problem}") }
}

fn required<'a>(path: Option<&'a Path>, key: &str) -> Result<&'a Path, DataError> {
    path.ok_or_else(|| {
        let problem = "is not set; retrieval of kind `embedded` needs the path of a file";
        DataError::setting(format!("retrieval.{key}"), problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passage_of_both_lists_ranks_first() {
        let by_words = [(7, 12.0), (3, 9.0), (5, 1.0)];
        let both = fused(&by_words, &[9, 3], 3);
        assert_eq!(both.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [3, 9, 7]);
        assert!((both[0].1 - 2.0 / 62.0).abs() < 1e-12);
    }
}
