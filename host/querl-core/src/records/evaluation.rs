//! Records of the evaluation: the answers of the compared systems.

use super::{Candidate, QueryRow, Rejection, Reward, StyleProbability};
use serde::{Deserialize, Serialize};

/// One system's answer to one held-out query: one line of `eval/records.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Name of the system: one of [`EVAL_SYSTEMS`](crate::config::EVAL_SYSTEMS).
    pub system: String,
    /// The query row.
    pub query: QueryRow,
    /// The answer with its scores, or why there is none; a query without an answer counts as a loss and is reported separately.
    pub outcome: Result<SystemAnswer, Rejection>,
}

/// One system's rewrite of a query with its scores.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SystemAnswer {
    /// Rewrite, hits and judgement.
    pub candidate: Candidate,
    /// Reward with the teacher as baseline; `None` without a teacher's rewrite, or if the plugin rejected the episode.
    pub reward: Option<Reward>,
    /// `1` win, `0.5` tie, `0` loss against the teacher by retrieval quality; `None` if not comparable.
    pub win: Option<f64>,
    /// Generation time in milliseconds; `None` if unknown.
    pub latency_ms: Option<f64>,
    /// Price of the rewrite in the configured currency; `None` if unknown.
    pub cost: Option<f64>,
    /// Style distribution of a second model that no reward uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit_style: Option<Vec<StyleProbability>>,
    /// Passages that a second retriever, which was not used in training, finds with the rewrite; `None` without a second retriever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_retrieval: Option<SecondHits>,
    /// Share of the rewrite's words that are in a gold passage and not in the query, 0 to 1; `None` if the gold passages are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_gold_terms: Option<f64>,
    /// Sampled responses of the system to the query; `None` if none were sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<SampleCounts>,
}

/// Passages that the second retriever of the evaluation finds with a rewrite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecondHits {
    /// Name of the retriever: `lexical`, `semantic` or [`Self::MODEL_OF_TRAINING`].
    pub retriever: String,
    /// Ids of the passages, best first.
    pub ids: Vec<String>,
}

impl SecondHits {
    /// Name of a semantic retriever whose embedding model is that of the first retriever.
    pub const MODEL_OF_TRAINING: &str = "semantic, the model of training";
}

/// Counts of the sampled responses to one query, for pass@k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    /// Number of samples, without those whose retrieval failed.
    pub n: usize,
    /// Number of samples whose first hit is a gold passage.
    pub n_gold_first: usize,
}
