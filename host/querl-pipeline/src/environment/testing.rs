//! A fake environment for tests, with fixed retrieval, judge and reward.

use super::judging::JudgingForm;
use super::rewards::WeightedReward;
use super::scorer::{Baseline, BaselineScoring, ScoreRequest, Scorer, Services, WrittenRewrite};
use async_trait::async_trait;
use querl_core::ports::{
    EpisodeInputs, InputUse, Judge, JudgeRequest, ParsedJudgement, PluginFault, PromptInput, PromptTask, Prompts,
    RetrievalRequest, Retriever, RewardModel, RewardRange,
};
use querl_core::records::{
    CallFailure, Candidate, Columns, Completion, DatasetRow, Episode, FailureKind, FinishReason, Hit, Message,
    QueryRow, Rejection, Reward, RewardComponent, RewriteRecord, RowMetadata, Split, ValidatedRecord,
};
use querl_core::responses::ResponseForm;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Fake services whose behaviour depends on the rewrite: `good` has a high top-1 score, `poor` a low one, retrieval of `broken` fails, the
/// service is unreachable for `down`, the judgement of `unjudgeable` cannot be parsed, retrieval of `slow` and judging of `slowly judged`
/// take a minute, the response `garbage` cannot be parsed. The reward is the difference of the top-1 scores.
#[derive(Default)]
pub(crate) struct Shop {
    pause: Duration,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    retrievals: AtomicUsize,
    judgements: AtomicUsize,
}

impl Shop {
    pub(crate) fn pausing(pause: Duration) -> Self {
        Self { pause, ..Self::default() }
    }

    pub(crate) fn n_retrievals(&self) -> usize {
        self.counts.retrievals.load(Ordering::SeqCst)
    }

    pub(crate) fn n_judgements(&self) -> usize {
        self.counts.judgements.load(Ordering::SeqCst)
    }

    pub(crate) fn scorer(&self) -> Scorer {
        self.scorer_with(self.services())
    }

    pub(crate) fn scorer_with(&self, services: Services) -> Scorer {
        // Leaked so that the handle outlives the test. Its thread drives the timers.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime: &'static _ = Box::leak(Box::new(runtime.expect("a runtime can be built")));
        Scorer::new(services, runtime.handle().clone())
    }

    pub(crate) fn services(&self) -> Services {
        Services {
            retriever: Some(Arc::new(ShopRetriever(self.pause, self.counts.clone()))),
            judge: Some(Arc::new(ShopJudge(self.pause, self.counts.clone()))),
            form: JudgingForm::Score,
            prompts: Arc::new(ShopPrompts),
            response_form: ResponseForm::default(),
            rewards: vec![WeightedReward {
                label: "difference".into(),
                model: Arc::new(ShopReward("difference")),
                weight: 1.0,
            }],
            style: None,
            baseline: BaselineScoring::Always,
            host_functions: Arc::default(),
            n_retrievals: 4,
            n_judgements: 4,
            deadline: None,
        }
    }
}

const A_MINUTE: Duration = Duration::from_secs(60);

struct ShopRetriever(Duration, Arc<Counts>);

#[async_trait]
impl Retriever for ShopRetriever {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        self.1.retrievals.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(if request.rewritten_query == "slow" { A_MINUTE } else { self.0 }).await;
        let failure = |kind| Err(CallFailure { kind, message: "as asked".into() });
        let score = match request.rewritten_query {
            "broken" => return failure(FailureKind::ServerError),
            "down" => return failure(FailureKind::Unreachable),
            "poor" => 0.2,
            _ => 0.9,
        };
        Ok(vec![Hit { id: "p1".into(), text: "passage".into(), reranker_score: score, retrieval_score: None, rank: 1 }])
    }

    fn name(&self) -> &str {
        "shop"
    }
}

struct ShopJudge(Duration, Arc<Counts>);

#[async_trait]
impl Judge for ShopJudge {
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure> {
        self.1.judgements.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(if request.rewrite == "slowly judged" { A_MINUTE } else { self.0 }).await;
        let is_repair = request.messages.iter().any(|message| message.role == "assistant");
        let compares = request.messages[0].role == "system";
        let text = match request.rewrite {
            "unjudgeable" => "?",
            "repaired" if !is_repair => "?",
            _ if compares => "{\"意图准确\": \"甲\"}",
            _ => "4",
        };
        Ok(completion(text))
    }

    fn name(&self) -> &str {
        "shop"
    }
}

struct ShopPrompts;

impl Prompts for ShopPrompts {
    fn messages(&self, _: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
        Ok(vec![Message { role: "user".into(), content: input.query.into() }])
    }

    fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
        Ok(match text {
            "garbage" => Err(Rejection::new("no_rewrite", "")),
            text => Ok(text.into()),
        })
    }

    fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
        let rejection = Rejection::new("no_score", text);
        Ok(text.parse().map(|score| ParsedJudgement { score, reason: "said so".into() }).map_err(|_| rejection))
    }
}

/// Reward with the difference of the top-1 scores as component `top1`. Requires judgements too.
pub(crate) struct ShopReward(pub &'static str);

impl RewardModel for ShopReward {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
        let best = |candidate: &Candidate| candidate.hits().first().map_or(0.0, |hit| hit.reranker_score);
        let score = |episode: &Episode| {
            let total = best(&episode.policy) - episode.baseline.as_ref().map_or(0.0, best);
            Ok(Reward { total, components: vec![RewardComponent { name: "top1".into(), value: total }] })
        };
        Ok(episodes.iter().map(score).collect())
    }

    fn inputs(&self) -> EpisodeInputs {
        EpisodeInputs { judgement: InputUse::Required, ..EpisodeInputs::CONTRACT_0_1 }
    }

    fn range(&self) -> RewardRange {
        RewardRange { min: -1.0, max: 1.0 }
    }

    fn name(&self) -> &str {
        self.0
    }
}

pub(crate) fn query(id: &str) -> QueryRow {
    let (original_query, group) = (format!("query {id}"), id.into());
    QueryRow { id: id.into(), row: 2, original_query, group, ..QueryRow::default() }
}

pub(crate) fn dataset_row(id: &str) -> DatasetRow {
    let (query, source) = (query(id), "shop".into());
    let metadata = RowMetadata { query, top1_score: None, source, rewrite_form: None, dropped: None };
    DatasetRow { messages: vec![Message { role: "user".into(), content: id.into() }], metadata }
}

pub(crate) fn completion(text: &str) -> Completion {
    Completion {
        text: text.into(),
        prompt_tokens: None,
        completion_tokens: None,
        cost: Some(0.01),
        latency_ms: Some(700.0),
        source: None,
    }
}

pub(crate) fn validated(id: &str, rewrite: Result<&str, &str>) -> ValidatedRecord {
    let rewrite = rewrite.map(completion);
    let rewrite = rewrite.map_err(|message| CallFailure { kind: FailureKind::Timeout, message: message.into() });
    ValidatedRecord { rewritten: RewriteRecord { query: query(id), rewrite }, retrieval: None }
}

pub(crate) fn rewritten(rewrite: &str) -> Baseline {
    Baseline::Rewritten { rewrite: rewrite.into(), hits: None, cost: None, latency_ms: None }
}

/// Reward that is the length of the rewrite, and declares the given inputs.
pub(crate) struct LengthReward(pub EpisodeInputs);

impl RewardModel for LengthReward {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
        let score = |episode: &Episode| {
            Ok(Reward { total: episode.policy.rewrite.chars().count() as f64, components: Vec::new() })
        };
        Ok(episodes.iter().map(score).collect())
    }

    fn inputs(&self) -> EpisodeInputs {
        self.0
    }

    fn range(&self) -> RewardRange {
        RewardRange { min: 0.0, max: 100.0 }
    }

    fn name(&self) -> &str {
        "length"
    }
}

static NO_COLUMNS: Columns = Columns(Vec::new());

pub(crate) fn request<'a>(query: &'a QueryRow, rewrite: &str, baseline: Baseline) -> ScoreRequest<'a> {
    let response = Some((rewrite.into(), FinishReason::Stop));
    ScoreRequest {
        id: format!("step-000000/{}/0", query.id),
        group_id: format!("step-000000/{}", query.id),
        sample_index: 0,
        step: Some(0),
        split: Split::Train,
        query,
        columns: &NO_COLUMNS,
        prompt: None,
        policy: WrittenRewrite { rewrite: rewrite.into(), response, n_tokens: 3 },
        baseline,
        judged: true,
    }
}
