//! A rewrite of the policy or the teacher: hits, judgement, style.

use super::{CallFailure, Hit};
use serde::{Deserialize, Serialize};

/// Result of judging one rewrite.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// The judge's score.
    Scored {
        /// Overall score (综合得分), 0 to 5.
        score: f64,
        /// The judge's explanation.
        #[serde(default)]
        reason: String,
    },
    /// Not chosen for judging (see `judge.sample_rate`).
    #[default]
    NotSampled,
    /// The call failed or its answer could not be parsed.
    Failed(CallFailure),
}

impl Judgement {
    fn is_not_sampled(&self) -> bool {
        *self == Self::NotSampled
    }

    /// The score, if judged.
    pub fn score(&self) -> Option<f64> {
        match self {
            Self::Scored { score, .. } => Some(*score),
            _ => None,
        }
    }
}

/// One class of a style distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StyleProbability {
    /// Class name, such as `售前`.
    pub label: String,
    /// Probability of the class, 0 to 1; the probabilities of a distribution sum to 1 within 1e-6.
    pub probability: f64,
}

/// Why generation ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string was generated.
    Stop,
    /// The maximum number of tokens was reached.
    Length,
    /// Any other reason, as the service names it.
    Other(String),
}

impl From<String> for FinishReason {
    fn from(name: String) -> Self {
        match name.as_str() {
            "stop" => Self::Stop,
            "length" => Self::Length,
            _ => Self::Other(name),
        }
    }
}

impl From<FinishReason> for String {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => "stop".into(),
            FinishReason::Length => "length".into(),
            FinishReason::Other(name) => name,
        }
    }
}

/// A rewrite of the policy or the teacher with its hits, judgement and style. In JSON, fields without a value are left out.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "CandidateForm")]
pub struct Candidate {
    /// The parsed rewrite; empty if the response contains none.
    pub rewrite: String,
    /// Hits, best first, or the failure of retrieval; `None` if the rewrite was not looked up.
    pub retrieval: Option<Result<Vec<Hit>, CallFailure>>,
    /// Result of the judge.
    pub judgement: Judgement,
    /// Style distribution; `None` if it was not computed.
    pub style: Option<Vec<StyleProbability>>,
    /// Number of generated tokens, end of sequence included; 0 if unknown.
    pub n_tokens: u32,
    /// Why generation ended; `None` if unknown.
    pub finish_reason: Option<FinishReason>,
}

/// A borrowed [`Candidate`] with only the parts that a plugin reads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct CandidateRef<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    pub rewrite: &'a str,
    #[serde(serialize_with = "retrieval_form::serialize", skip_serializing_if = "Option::is_none")]
    pub retrieval: Option<Result<&'a [Hit], &'a CallFailure>>,
    #[serde(skip_serializing_if = "Judgement::is_not_sampled")]
    pub judgement: &'a Judgement,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub style: Option<&'a [StyleProbability]>,
    #[serde(skip_serializing_if = "is_zero")]
    pub n_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<&'a FinishReason>,
}

impl<'a> From<&'a Candidate> for CandidateRef<'a> {
    fn from(candidate: &'a Candidate) -> Self {
        let Candidate { rewrite, retrieval, judgement, style, n_tokens, finish_reason } = candidate;
        Self {
            rewrite,
            retrieval: retrieval.as_ref().map(|retrieval| retrieval.as_deref()),
            judgement,
            style: style.as_deref(),
            n_tokens: *n_tokens,
            finish_reason: finish_reason.as_ref(),
        }
    }
}

impl Serialize for Candidate {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        CandidateRef::from(self).serialize(serializer)
    }
}

/// The form in which [`Candidate`] is read: files of format 2 have `truncated` instead of `finish_reason`.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CandidateForm {
    rewrite: String,
    #[serde(deserialize_with = "retrieval_form::deserialize")]
    retrieval: Option<Result<Vec<Hit>, CallFailure>>,
    judgement: Judgement,
    style: Option<Vec<StyleProbability>>,
    n_tokens: u32,
    truncated: Option<bool>,
    finish_reason: Option<FinishReason>,
}

impl From<CandidateForm> for Candidate {
    fn from(form: CandidateForm) -> Self {
        let CandidateForm { rewrite, retrieval, judgement, style, n_tokens, truncated, finish_reason } = form;
        let of_format_2 = match truncated {
            Some(true) => Some(FinishReason::Length),
            Some(false) if n_tokens > 0 => Some(FinishReason::Stop),
            _ => None,
        };
        Self { rewrite, retrieval, judgement, style, n_tokens, finish_reason: finish_reason.or(of_format_2) }
    }
}

impl Candidate {
    /// A rewrite whose retrieval returned no hits, without a judgement.
    pub fn found_nothing(rewrite: String) -> Self {
        Self { rewrite, retrieval: Some(Ok(Vec::new())), ..Self::default() }
    }

    /// The hits, best first; empty if there are none, retrieval failed or was not tried.
    pub fn hits(&self) -> &[Hit] {
        self.found().unwrap_or_default()
    }

    /// The hits of a successful retrieval, best first; `None` if retrieval failed or was not tried.
    pub fn found(&self) -> Option<&[Hit]> {
        self.retrieval.as_ref()?.as_deref().ok()
    }

    /// Why retrieval failed; `None` if it succeeded or was not tried.
    pub fn retrieval_failure(&self) -> Option<&CallFailure> {
        self.retrieval.as_ref()?.as_ref().err()
    }

    /// True if the token limit ended the generation.
    pub fn is_truncated(&self) -> bool {
        self.finish_reason == Some(FinishReason::Length)
    }
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// JSON form of a retrieval: `{"hits": [...]}` or `{"failed": {...}}`. Missing ranks are numbered from 1.
mod retrieval_form {
    use super::{CallFailure, Hit};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    type Retrieval = Option<Result<Vec<Hit>, CallFailure>>;

    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Written<'a> {
        Hits(Vec<WrittenHit<'a>>),
        Failed(&'a CallFailure),
    }

    /// [`Hit`] without fields that have no value.
    #[derive(Serialize)]
    struct WrittenHit<'a> {
        #[serde(skip_serializing_if = "str::is_empty")]
        id: &'a str,
        text: &'a str,
        reranker_score: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        retrieval_score: Option<f64>,
        rank: u32,
    }

    impl<'a> From<&'a Hit> for WrittenHit<'a> {
        fn from(hit: &'a Hit) -> Self {
            let Hit { id, text, reranker_score, retrieval_score, rank } = hit;
            Self { id, text, reranker_score: *reranker_score, retrieval_score: *retrieval_score, rank: *rank }
        }
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Read {
        Hits(Vec<Hit>),
        Failed(CallFailure),
    }

    pub(super) fn serialize<S: Serializer>(
        retrieval: &Option<Result<&[Hit], &CallFailure>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let written = retrieval.map(|retrieval| match retrieval {
            Ok(hits) => Written::Hits(hits.iter().map(WrittenHit::from).collect()),
            Err(failure) => Written::Failed(failure),
        });
        written.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Retrieval, D::Error> {
        Ok(Option::<Read>::deserialize(deserializer)?.map(|read| match read {
            Read::Hits(mut hits) => {
                for (index, hit) in hits.iter_mut().enumerate().filter(|(_, hit)| hit.rank == 0) {
                    hit.rank = index as u32 + 1;
                }
                Ok(hits)
            }
            Read::Failed(failure) => Err(failure),
        }))
    }
}
