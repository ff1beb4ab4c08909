//! Scoring of rewrites with retrieval, judge and reward plugins. Shared by training and evaluation.

use super::calls::{self, CallCache, CallError, CallKey};
use super::judging::{JudgePrompter, JudgeResponse, JudgingForm};
use super::rewards::{self, Outcome, RewardScores, WeightedReward};
use crate::host_functions::RunHostFunctions;
use querl_core::config::RetrievalKind;
use querl_core::ports::{
    CallTimings, EnvironmentError, EpisodeInputs, InputUse, Judge, PluginFault, PolicyResponse, Prompts,
    RetrievalRequest, Retriever, StyleModel,
};
use querl_core::records::{
    CallFailure, Candidate, Columns, Context, Episode, FailureKind, FinishReason, Hit, HostCall, HostCallError,
    Judgement, Message, QueryRow, Rejection, Split, ValidatedRecord,
};
use querl_core::responses::ResponseForm;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The teacher's rewrite of a query, or the reason why there is none.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Baseline {
    Rewritten {
        rewrite: String,
        /// Hits of the validate stage; `None` without retrieval, and if retrieval failed, which is then called again.
        hits: Option<Vec<Hit>>,
        /// Cost of the teacher's call; `None` if unknown.
        cost: Option<f64>,
        /// Latency of the teacher's call in milliseconds; `None` if unknown.
        latency_ms: Option<f64>,
    },
    Missing(CallFailure),
}

/// The teacher's rewrites by query id.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Baselines(HashMap<String, Baseline>);

impl Baselines {
    /// Reads the teacher's rewrites from records of the validate stage, including rewrites that filters drop later.
    pub(crate) fn new(records: Vec<ValidatedRecord>, retrieval: RetrievalKind) -> Self {
        let is_looked_up = retrieval != RetrievalKind::None;
        let by_id = records.into_iter().map(|record| {
            let id = record.rewritten.query.id.clone();
            let baseline = match record.rewritten.rewrite {
                Err(failure) => Baseline::Missing(failure),
                Ok(completion) => Baseline::Rewritten {
                    rewrite: completion.text,
                    hits: record.retrieval.and_then(Result::ok).filter(|_| is_looked_up),
                    cost: completion.cost,
                    latency_ms: completion.latency_ms,
                },
            };
            (id, baseline)
        });
        Self(by_id.collect())
    }

    pub(crate) fn of(&self, query_id: &str) -> Baseline {
        self.0.get(query_id).cloned().unwrap_or_else(|| {
            let message = "the teacher was never called for this query".into();
            Baseline::Missing(CallFailure { kind: FailureKind::NotRecorded, message })
        })
    }
}

/// Rejection code of episodes with a call that exceeded the deadline.
pub(crate) const DEADLINE_CODE: &str = "deadline";

/// Whether the teacher's rewrite is looked up, judged and classified, as the policy's is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BaselineScoring {
    /// Only the parts that a reward reads. The rewrite and the hits of the validate stage are known without a call.
    ReadByRewards,
    Always,
}

/// Services and plugins that score episodes. For a service that is `None`, episodes lack the corresponding part.
#[derive(Clone)]
pub(crate) struct Services {
    pub retriever: Option<Arc<dyn Retriever>>,
    pub judge: Option<Arc<dyn Judge>>,
    pub form: JudgingForm,
    pub prompts: Arc<dyn Prompts>,
    pub response_form: ResponseForm,
    pub rewards: Vec<WeightedReward>,
    pub style: Option<Arc<dyn StyleModel>>,
    pub baseline: BaselineScoring,
    pub host_functions: Arc<RunHostFunctions>,
    pub n_retrievals: usize,
    pub n_judgements: usize,
    /// Time limit of a call, without its time in the queue. A call that exceeds it is cancelled, and its episode dropped as `deadline`.
    pub deadline: Option<Duration>,
}

impl Services {
    /// Removes the services whose results no reward reads.
    pub(crate) fn read_by_rewards(self) -> Self {
        let reads = rewards::inputs(&self.rewards);
        let is_read = |used: InputUse| used != InputUse::Unused;
        Self {
            retriever: self.retriever.filter(|_| is_read(reads.retrieval)),
            judge: self.judge.filter(|_| is_read(reads.judgement)),
            style: self.style.filter(|_| is_read(reads.style)),
            baseline: BaselineScoring::ReadByRewards,
            ..self
        }
    }
}

/// The parts that calls add to a side.
const EVERYTHING: EpisodeInputs = EpisodeInputs {
    response: InputUse::Unused,
    prompt: InputUse::Unused,
    columns: InputUse::Unused,
    baseline: InputUse::Unused,
    retrieval: InputUse::Optional,
    judgement: InputUse::Optional,
    style: InputUse::Optional,
};

/// Scores rewrites. Responses of services are cached for the length of a run.
pub(crate) struct Scorer {
    services: Services,
    /// The parts of the policy's side that are computed, and those that a reward requires: only a failed call for a required part drops the
    /// episode.
    policy: EpisodeInputs,
    /// The same of the teacher's rewrite.
    baseline: EpisodeInputs,
    runtime: tokio::runtime::Handle,
    hits: CallCache<Vec<Hit>>,
    judgements: CallCache<JudgeResponse>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WrittenRewrite {
    pub rewrite: String,
    /// Response of the policy and its finish reason; `None` if the rewrite was not generated.
    pub response: Option<(String, FinishReason)>,
    /// Number of generated tokens, including the end-of-sequence token; 0 if unknown.
    pub n_tokens: u32,
}

impl WrittenRewrite {
    /// A rewrite that was not generated by a model of this run, such as the raw query.
    pub(crate) fn known(rewrite: String) -> Self {
        Self { rewrite, response: None, n_tokens: 0 }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScoreRequest<'a> {
    pub id: String,
    pub group_id: String,
    pub sample_index: u32,
    /// Training step; `None` outside of training.
    pub step: Option<u64>,
    pub split: Split,
    pub query: &'a QueryRow,
    pub columns: &'a Columns,
    /// Prompt that the policy responded to; `None` if the rewrite was not generated.
    pub prompt: Option<&'a [Message]>,
    pub policy: WrittenRewrite,
    pub baseline: Baseline,
    pub judged: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScoredEpisode {
    pub episode: Episode,
    /// Calls of host functions by the reward plugins.
    pub calls: Vec<HostCall>,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scores {
    pub scored: Vec<ScoredEpisode>,
    /// Results of each reward plugin on the episodes that it scored, one list per plugin.
    pub by_reward: Vec<Vec<Outcome>>,
    pub timings: CallTimings,
}

impl Scorer {
    /// A scorer that calls services on `runtime`, and blocks on it: it must not be called from a task of this runtime.
    pub(crate) fn new(services: Services, runtime: tokio::runtime::Handle) -> Self {
        let policy = rewards::inputs(&services.rewards);
        let baseline = match services.baseline {
            BaselineScoring::ReadByRewards => rewards::inputs_of_baseline(&services.rewards),
            BaselineScoring::Always => rewards::inputs_of_baseline(&services.rewards).union(EVERYTHING),
        };
        let policy = policy.union(EVERYTHING);
        Self { services, policy, baseline, runtime, hits: CallCache::default(), judgements: CallCache::default() }
    }

    /// Parses the rewrite in a response of the policy to `query`. A response that cannot be parsed becomes an empty rewrite, which
    /// retrieves nothing.
    pub(crate) fn parse(&self, query: &QueryRow, response: &PolicyResponse) -> Result<WrittenRewrite, PluginFault> {
        let rewrite = self.read(query, &response.text)?;
        let finish_reason = if response.truncated { FinishReason::Length } else { FinishReason::Stop };
        let written = Some((response.text.clone(), finish_reason));
        Ok(WrittenRewrite { rewrite, response: written, n_tokens: response.n_tokens })
    }

    /// Parses the rewrite in the text of a response; empty if it cannot be parsed.
    pub(crate) fn read(&self, query: &QueryRow, text: &str) -> Result<String, PluginFault> {
        let read = self.response_form().read(self.prompts(), query.into(), text)?;
        Ok(read.unwrap_or_default())
    }

    fn prompts(&self) -> &dyn Prompts {
        self.services.prompts.as_ref()
    }

    pub(crate) fn response_form(&self) -> ResponseForm {
        self.services.response_form
    }

    pub(crate) fn rewards(&self) -> &[WeightedReward] {
        &self.services.rewards
    }

    /// The parts of a side (`policy` or `baseline`) that are computed.
    fn computed(&self, side: &str) -> &EpisodeInputs {
        if side == "policy" { &self.policy } else { &self.baseline }
    }

    /// Scores requests: one scored episode per request, in order. Retrieval and judge run concurrently.
    pub(crate) fn score(&self, requests: &[ScoreRequest<'_>]) -> Result<Scores, EnvironmentError> {
        let mut episodes: Vec<Episode> = requests.iter().map(|request| self.new_episode(request)).collect();
        let mut timings = CallTimings::default();
        let late = self.add_hits_and_judgements(requests, &mut episodes, &mut timings)?;
        let started = Instant::now();
        let unclassified = match &self.services.style {
            Some(model) => rewards::add_styles(model.as_ref(), |side| self.computed(side).style, &mut episodes),
            None => vec![None; episodes.len()],
        };
        let (scored, by_reward) = self.reward(requests, episodes, &late, unclassified)?;
        timings.plugin_s = started.elapsed().as_secs_f64();
        Ok(Scores { scored, by_reward, timings })
    }

    /// Hits of each text as a rewrite of its query; texts must not be blank. Without retrieval there are no hits.
    pub(crate) fn hits_of(
        &self,
        texts: &[(&QueryRow, &str)],
    ) -> Result<Vec<Result<Vec<Hit>, CallFailure>>, EnvironmentError> {
        if self.services.retriever.is_none() {
            return Ok(vec![Ok(Vec::new()); texts.len()]);
        }
        let contexts: Vec<Context> = texts.iter().map(|(query, _)| query.context()).collect();
        let key = |((query, rewrite), context)| CallKey { query, context, rewrite, against: None };
        let keys: Vec<CallKey<'_>> = texts.iter().copied().zip(&contexts).map(key).collect();
        let looked_up = self.hits.look_up(&keys);
        let (answers, _) = self.runtime.block_on(self.ask_retriever(&looked_up.new));
        let hits = self.hits.complete(looked_up, answers);
        check_services(&hits)?;
        Ok(hits.into_iter().map(|hits| hits.map_err(CallError::into_failure)).collect())
    }

    /// Fills in hits and judgements, from the cache or by calls. Returns for each episode the failure of a required call that exceeded the
    /// deadline.
    fn add_hits_and_judgements(
        &self,
        requests: &[ScoreRequest<'_>],
        episodes: &mut [Episode],
        timings: &mut CallTimings,
    ) -> Result<Vec<Option<CallFailure>>, EnvironmentError> {
        let (looked_up, judged) = (self.unknown_hits(requests), self.requested_judgements(requests));
        let (hits, judgements) = {
            let retrievals = self.hits.look_up(&questions(&looked_up, requests, episodes, ComparedWith::Nothing));
            let against = if self.compares() { ComparedWith::Baseline } else { ComparedWith::Nothing };
            let judgements = self.judgements.look_up(&questions(&judged, requests, episodes, against));
            let calls = async { futures::join!(self.ask_retriever(&retrievals.new), self.ask_judge(&judgements.new)) };
            let ((hits, retrieve_s), (answers, judge_s)) = self.runtime.block_on(calls);
            (timings.retrieve_s, timings.judge_s) = (retrieve_s, judge_s);
            let answers = answers.into_iter().collect::<Result<Vec<JudgeAnswer>, PluginFault>>()?;
            (self.hits.complete(retrievals, hits), self.judgements.complete(judgements, answers))
        };
        check_services(&hits)?;
        check_services(&judgements)?;
        let mut late = vec![None; episodes.len()];
        for ((index, side), hits) in looked_up.into_iter().zip(hits) {
            if self.computed(side.name()).retrieval == InputUse::Required {
                late[index] = late[index].take().or_else(|| hits.as_ref().err()?.deadline_failure());
            }
            if let Some(candidate) = side.of(&mut episodes[index]) {
                candidate.retrieval = Some(hits.map_err(CallError::into_failure));
            }
        }
        for ((index, side), judgement) in judged.into_iter().zip(judgements) {
            if self.computed(side.name()).judgement == InputUse::Required {
                late[index] = late[index].take().or_else(|| judgement.as_ref().err()?.deadline_failure());
            }
            let JudgeResponse { judgement, of_baseline } = judgement.unwrap_or_else(|error| JudgeResponse {
                judgement: Judgement::Failed(error.into_failure()),
                of_baseline: None,
            });
            if let Some(candidate) = side.of(&mut episodes[index]) {
                candidate.judgement = judgement;
            }
            if let (Some(of_baseline), Some(baseline)) = (of_baseline, &mut episodes[index].baseline) {
                baseline.judgement = of_baseline;
            }
        }
        Ok(late)
    }

    fn compares(&self) -> bool {
        matches!(self.services.form, JudgingForm::Compare(_))
    }

    /// Judges both sides of sampled episodes, with one call per comparison.
    fn requested_judgements(&self, requests: &[ScoreRequest<'_>]) -> Vec<(usize, Side)> {
        select(requests, |request, side| {
            let is_sampled = self.services.judge.is_some() && request.judged;
            let has_baseline = matches!(request.baseline, Baseline::Rewritten { .. });
            is_sampled
                && match side {
                    Side::Policy => has_baseline || !self.compares(),
                    Side::Baseline => has_baseline && !self.compares() && self.baseline.judgement != InputUse::Unused,
                }
        })
    }

    fn unknown_hits(&self, requests: &[ScoreRequest<'_>]) -> Vec<(usize, Side)> {
        if self.services.retriever.is_none() {
            return Vec::new();
        }
        select(requests, |request, side| match (side, &request.baseline) {
            (Side::Policy, _) => !request.policy.rewrite.trim().is_empty(),
            (Side::Baseline, Baseline::Rewritten { hits, .. }) => {
                hits.is_none() && self.baseline.retrieval != InputUse::Unused
            }
            (Side::Baseline, Baseline::Missing(_)) => false,
        })
    }

    fn new_episode(&self, request: &ScoreRequest<'_>) -> Episode {
        let query = request.query;
        let WrittenRewrite { rewrite, response, n_tokens } = request.policy.clone();
        let (response, finish_reason) = response.unzip();
        // A blank rewrite has no hits; for the others retrieval is called.
        let retrieval = self.services.retriever.is_some().then(|| Ok(Vec::new()));
        let baseline = match &request.baseline {
            Baseline::Rewritten { rewrite, hits, .. } => {
                Some(Candidate { rewrite: rewrite.clone(), retrieval: hits.clone().map(Ok), ..Candidate::default() })
            }
            Baseline::Missing(_) => None,
        };
        Episode {
            id: request.id.clone(),
            group_id: request.group_id.clone(),
            sample_index: request.sample_index,
            step: request.step,
            split: Some(request.split),
            query: query.original_query.clone(),
            context: query.context(),
            gold_ids: query.gold_ids.clone(),
            columns: request.columns.clone(),
            prompt: request.prompt.map(<[Message]>::to_vec),
            response,
            policy: Candidate { rewrite, retrieval, n_tokens, finish_reason, ..Candidate::default() },
            baseline,
        }
    }

    async fn ask_retriever(&self, questions: &[CallKey<'_>]) -> (Vec<Result<Vec<Hit>, CallError>>, f64) {
        let services = &self.services;
        let Some(retriever) = services.retriever.as_deref() else { return (Vec::new(), 0.0) };
        let calls = questions.iter().map(|question| {
            let (original_query, context) = (question.query.original_query.as_str(), question.context);
            let request = RetrievalRequest { original_query, context, rewritten_query: question.rewrite };
            calls::within(services.deadline, retriever.retrieve(request))
        });
        calls::all(calls.collect(), services.n_retrievals).await
    }

    async fn ask_judge(&self, questions: &[CallKey<'_>]) -> (Vec<Result<JudgeAnswer, PluginFault>>, f64) {
        let Some(judge) = self.services.judge.as_deref() else { return (Vec::new(), 0.0) };
        let (prompts, form, deadline) = (self.prompts(), &self.services.form, self.services.deadline);
        let asking = JudgePrompter { judge, prompts, form, deadline };
        let calls = questions.iter().map(|question| asking.ask(question));
        calls::all(calls.collect(), self.services.n_judgements).await
    }

    /// Scores complete episodes; the others are rejected with the reason.
    fn reward(
        &self,
        requests: &[ScoreRequest<'_>],
        episodes: Vec<Episode>,
        late: &[Option<CallFailure>],
        unclassified: Vec<Option<Rejection>>,
    ) -> Result<(Vec<ScoredEpisode>, Vec<Vec<Outcome>>), EnvironmentError> {
        let each = requests.iter().zip(&episodes).zip(late).zip(unclassified);
        let rejections: Vec<Option<Rejection>> = each
            .map(|(((request, episode), late), unclassified)| {
                self.rejection_of(request, episode, late.as_ref()).or(unclassified)
            })
            .collect();
        let complete = episodes.iter().zip(&rejections).filter(|(_, rejection)| rejection.is_none());
        let complete: Vec<Episode> = complete.map(|(episode, _)| episode.clone()).collect();
        let host_functions = &self.services.host_functions;
        host_functions.begin(&complete, self.services.deadline);
        let RewardScores { sums, by_reward } = rewards::score(&self.services.rewards, &complete)?;
        let mut scores = sums.into_iter();
        let scored = episodes.into_iter().zip(rejections).map(|(episode, rejection)| match rejection {
            Some(rejection) => ScoredEpisode { calls: Vec::new(), episode, outcome: Err(rejection) },
            None => {
                let outcome = scores.next().expect("one score per complete episode");
                ScoredEpisode { calls: host_functions.take_episode(&episode), episode, outcome }
            }
        });
        let scored: Vec<ScoredEpisode> = scored.collect();
        match scored.iter().flat_map(|one| &one.calls).find_map(fatal_failure) {
            Some(failure) => Err(failure.clone().into()),
            None => Ok((scored, by_reward)),
        }
    }

    /// Why an episode cannot be scored: a call for a part that a reward requires failed, or exceeded the deadline.
    fn rejection_of(
        &self,
        request: &ScoreRequest<'_>,
        episode: &Episode,
        late: Option<&CallFailure>,
    ) -> Option<Rejection> {
        let reject = |code: &str, failure: &CallFailure| Some(Rejection::by_host(code, failure.to_string()));
        if let (InputUse::Required, Baseline::Missing(failure)) = (self.policy.baseline, &request.baseline) {
            return reject(Rejection::BASELINE_MISSING, failure);
        }
        if let Some(failure) = late {
            return reject(DEADLINE_CODE, failure);
        }
        let requires =
            |side: &str, part: fn(&EpisodeInputs) -> InputUse| part(self.computed(side)) == InputUse::Required;
        let retrieval = |(side, candidate): (&str, &Candidate)| {
            let failure = candidate.retrieval_failure().filter(|_| requires(side, |inputs| inputs.retrieval))?;
            reject(&format!("{side}_retrieval_failed"), failure)
        };
        let judgement = |(side, candidate): (&str, &Candidate)| match &candidate.judgement {
            Judgement::Failed(failure) if requires(side, |inputs| inputs.judgement) => {
                reject(&format!("{side}_judge_failed"), failure)
            }
            Judgement::Failed(_) | Judgement::Scored { .. } | Judgement::NotSampled => None,
        };
        episode.candidates().find_map(retrieval).or_else(|| episode.candidates().find_map(judgement))
    }
}

type JudgeAnswer = Result<JudgeResponse, CallError>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Policy,
    Baseline,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Baseline => "baseline",
        }
    }

    fn of(self, episode: &mut Episode) -> Option<&mut Candidate> {
        match self {
            Self::Policy => Some(&mut episode.policy),
            Self::Baseline => episode.baseline.as_mut(),
        }
    }
}

fn fatal_failure(call: &HostCall) -> Option<&CallFailure> {
    match &call.response {
        Err(HostCallError::Failed(failure)) if failure.kind.is_fatal() => Some(failure),
        _ => None,
    }
}

/// The sides of all requests for which `wants` is true.
fn select(requests: &[ScoreRequest<'_>], wants: impl Fn(&ScoreRequest<'_>, Side) -> bool) -> Vec<(usize, Side)> {
    let sides = |index| [(index, Side::Policy), (index, Side::Baseline)];
    (0..requests.len()).flat_map(sides).filter(|(index, side)| wants(&requests[*index], *side)).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ComparedWith {
    Nothing,
    Baseline,
}

fn questions<'a>(
    wanted: &[(usize, Side)],
    requests: &'a [ScoreRequest<'_>],
    episodes: &'a [Episode],
    against: ComparedWith,
) -> Vec<CallKey<'a>> {
    let question = |(index, side): &(usize, Side)| {
        let (request, episode) = (&requests[*index], &episodes[*index]);
        let baseline = episode.baseline.as_ref().map(|baseline| baseline.rewrite.as_str());
        let rewrite = if *side == Side::Policy { &episode.policy.rewrite } else { baseline.unwrap_or_default() };
        let against = baseline.filter(|_| against == ComparedWith::Baseline);
        CallKey { query: request.query, context: &episode.context, rewrite, against }
    };
    wanted.iter().map(question).collect()
}

/// Minimum number of calls for a conclusion about a service.
const MIN_CALLS: usize = 4;

/// Returns an error if every further call would fail too: a fatal rejection, or a service that is unreachable.
fn check_services<T>(answers: &[Result<T, CallError>]) -> Result<(), CallFailure> {
    let failure = |answer: &'_ Result<T, CallError>| match answer {
        Err(CallError::Failed(failure)) => Some(failure.clone()),
        _ => None,
    };
    let failures: Vec<CallFailure> = answers.iter().filter_map(failure).collect();
    let all_down = answers.len() >= MIN_CALLS
        && failures.len() == answers.len()
        && failures.iter().all(|f| f.kind == FailureKind::Unreachable);
    failures.into_iter().find(|failure| failure.kind.is_fatal() || all_down).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::super::judging::Comparison;
    use super::super::testing::{LengthReward, Shop, query, request, rewritten};
    use super::*;

    #[test]
    fn both_sides_are_looked_up_judged_and_scored() {
        let (shop, row) = (Shop::default(), query("a"));
        let scored = shop.scorer().score(&[request(&row, "good", rewritten("poor"))]).unwrap().scored;
        let episode = &scored[0].episode;
        let baseline = episode.baseline.as_ref().unwrap();
        assert_eq!((episode.policy.hits()[0].reranker_score, baseline.hits()[0].reranker_score), (0.9, 0.2));
        assert_eq!((episode.policy.judgement.score(), baseline.judgement.score()), (Some(4.0), Some(4.0)));
        assert_eq!(scored[0].outcome.as_ref().unwrap().total, 0.7);
    }

    #[test]
    fn empty_rewrite_finds_nothing_and_is_scored() {
        let (shop, row) = (Shop::default(), query("a"));
        let scored = shop.scorer().score(&[request(&row, " ", rewritten("poor"))]).unwrap().scored;
        assert_eq!(scored[0].episode.policy.retrieval, Some(Ok(Vec::new())));
        assert_eq!(scored[0].outcome.as_ref().unwrap().total, -0.2);
        assert_eq!(shop.n_retrievals(), 1);
    }

    #[test]
    fn outside_failures_drop_the_episode_with_a_code() {
        let (shop, row) = (Shop::default(), query("a"));
        let missing = Baseline::Missing(CallFailure { kind: FailureKind::Timeout, message: "late".into() });
        let requests = [
            request(&row, "good", rewritten("poor")),
            request(&row, "good", missing),
            request(&row, "broken", rewritten("poor")),
            request(&row, "good", rewritten("broken")),
            request(&row, "unjudgeable", rewritten("poor")),
        ];
        let scored = shop.scorer().score(&requests).unwrap().scored;
        let codes: Vec<_> =
            scored.iter().map(|one| one.outcome.as_ref().map_or_else(|r| r.code.as_str(), |_| "scored")).collect();
        let expected = [
            "scored",
            "baseline_missing",
            "policy_retrieval_failed",
            "baseline_retrieval_failed",
            "policy_judge_failed",
        ];
        assert_eq!(codes, expected);
        // The plugin that could not read the answer, the format, and the answer.
        let detail = &scored[4].outcome.as_ref().unwrap_err().detail;
        let named = "`parse-judgement` of plugin prompts (judge.form = \"score\") was given `?`";
        assert!(detail.contains(named), "{detail}");
    }

    #[test]
    fn an_episode_whose_calls_exceed_the_deadline_is_dropped_and_the_others_are_not() {
        let (shop, row) = (Shop::default(), query("a"));
        let deadline = Some(Duration::from_millis(50));
        let scorer = shop.scorer_with(Services { deadline, n_retrievals: 1, ..shop.services() });
        let requests = [
            request(&row, "slow", rewritten("poor")),
            request(&row, "good", rewritten("poor")),
            request(&row, "good", rewritten("slow")),
            request(&row, "slowly judged", rewritten("poor")),
        ];
        let Scores { scored, timings, .. } = scorer.score(&requests).unwrap();
        let code = |one: &ScoredEpisode| {
            one.outcome.as_ref().map_or_else(|rejection| rejection.code.clone(), |_| "scored".into())
        };
        assert_eq!(scored.iter().map(code).collect::<Vec<_>>(), ["deadline", "scored", "deadline", "deadline"]);
        let detail = &scored[0].outcome.as_ref().unwrap_err().detail;
        assert_eq!(detail, "timeout: no response within rl.episode_deadline_ms = 50");
        assert_eq!(scored[0].episode.policy.retrieval_failure().unwrap().kind, FailureKind::Timeout);
        assert!(timings.retrieve_s > 0.04 && timings.judge_s > 0.04, "{timings:?}");
        assert!(timings.judge_s < 10.0, "the shop's slow calls take a minute: {timings:?}");
    }

    #[test]
    fn retrieval_and_judge_are_called_concurrently() {
        let (shop, row) = (Shop::pausing(Duration::from_millis(100)), query("a"));
        let started = Instant::now();
        let timings = shop.scorer().score(&[request(&row, "good", rewritten("poor"))]).unwrap().timings;
        let elapsed = started.elapsed().as_secs_f64();
        assert!(timings.retrieve_s > 0.09 && timings.judge_s > 0.09, "{timings:?}");
        assert!(elapsed < timings.retrieve_s + timings.judge_s, "{elapsed} for {timings:?}");
    }

    #[test]
    fn a_service_without_responses_stops_the_run() {
        let (shop, rows) = (Shop::default(), [query("a"), query("b")]);
        let requests = rows.each_ref().map(|row| request(row, "down", rewritten("down")));
        let error = shop.scorer().score(&requests).unwrap_err();
        assert!(matches!(error, EnvironmentError::Service(_)), "{error}");
        // Failures of few calls do not stop the run: the episodes are dropped, and too many drops are detected elsewhere.
        assert!(shop.scorer().score(&requests[..1]).unwrap().scored[0].outcome.is_err());
    }

    #[test]
    fn a_response_is_requested_once_in_a_run() {
        let (shop, row) = (Shop::default(), query("a"));
        let scorer = shop.scorer();
        for _ in 0..3 {
            scorer
                .score(&[request(&row, "good", rewritten("poor")), request(&row, "good", rewritten("poor"))])
                .unwrap();
        }
        assert_eq!((shop.n_retrievals(), shop.n_judgements()), (2, 2));
    }

    #[test]
    fn compared_sides_share_one_question_and_an_answer_of_another_form_is_repaired_once() {
        let (shop, row) = (Shop::default(), query("a"));
        let form = || JudgingForm::Compare(Comparison { dimensions: vec!["意图准确".into()], seed: 1 });
        let scorer = shop.scorer_with(Services { form: form(), ..shop.services() });
        let requests = [
            request(&row, "same", rewritten("same")),
            request(&row, "compared", rewritten("poor")),
            request(&row, "repaired", rewritten("poor")),
            request(&row, "unjudgeable", rewritten("poor")),
        ];
        let scored = scorer.score(&requests).unwrap().scored;
        let scores = |n: usize| {
            let Episode { policy, baseline, .. } = &scored[n].episode;
            (policy.judgement.score(), baseline.as_ref().unwrap().judgement.score())
        };
        assert_eq!(scores(0), (Some(2.5), Some(2.5)));
        for n in [1, 2] {
            // The fake judge prefers the first rewrite.
            assert!([(Some(5.0), Some(0.0)), (Some(0.0), Some(5.0))].contains(&scores(n)), "{:?}", scores(n));
        }
        let rejection = scored[3].outcome.as_ref().unwrap_err();
        assert_eq!(rejection.code, "policy_judge_failed");
        assert!(rejection.detail.contains("nor does a second one: no JSON object"), "{rejection}");
        // Judge calls: 0 for equal rewrites, 1, and 2 for each response that could not be parsed.
        assert_eq!(shop.n_judgements(), 5);
    }

    fn length(inputs: EpisodeInputs) -> WeightedReward {
        WeightedReward { label: "length".into(), model: Arc::new(LengthReward(inputs)), weight: 1.0 }
    }

    fn length_alone() -> Vec<WeightedReward> {
        vec![length(EpisodeInputs::default())]
    }

    /// Regression: the failure of an optional call dropped the episode.
    #[test]
    fn a_failed_call_for_an_optional_input_is_passed_to_the_reward() {
        let (shop, row) = (Shop::default(), query("a"));
        let optional = EpisodeInputs { baseline: InputUse::Optional, ..EVERYTHING };
        let services = || Services { deadline: Some(Duration::from_millis(50)), ..shop.services() };
        let scored = |inputs: EpisodeInputs| {
            let services = Services { rewards: vec![length(inputs)], ..services() }.read_by_rewards();
            let rewrites = [
                ("broken", "poor"),
                ("unjudgeable", "poor"),
                ("slow", "poor"),
                ("slowly judged", "poor"),
                ("good", "broken"),
            ];
            let requests = rewrites.map(|(policy, baseline)| request(&row, policy, rewritten(baseline)));
            shop.scorer_with(services).score(&requests).unwrap().scored
        };
        let of_optional = scored(optional);
        assert!(of_optional.iter().all(|one| one.outcome.is_ok()), "{of_optional:?}");
        let kinds = of_optional.iter().map(|one| one.episode.policy.retrieval_failure().map(|failure| failure.kind));
        let expected = [Some(FailureKind::ServerError), None, Some(FailureKind::Timeout), None, None];
        assert_eq!(kinds.collect::<Vec<_>>(), expected);
        let unjudged = |index: usize| matches!(of_optional[index].episode.policy.judgement, Judgement::Failed(_));
        assert!(unjudged(1) && unjudged(3) && !unjudged(4));
        let baseline = of_optional[4].episode.baseline.as_ref().unwrap();
        assert_eq!(baseline.retrieval_failure().unwrap().kind, FailureKind::ServerError);

        // A part of the teacher's rewrite is required only together with the rewrite.
        let required = EpisodeInputs { retrieval: InputUse::Required, judgement: InputUse::Required, ..optional };
        let codes = |inputs: EpisodeInputs| -> Vec<String> {
            let code = |one: ScoredEpisode| one.outcome.map_or_else(|rejection| rejection.code, |_| "scored".into());
            scored(inputs).into_iter().map(code).collect()
        };
        let dropped = ["policy_retrieval_failed", "policy_judge_failed", "deadline", "deadline"];
        assert_eq!(codes(required), [&dropped[..], &["scored"]].concat());
        let required = EpisodeInputs { baseline: InputUse::Required, ..required };
        assert_eq!(codes(required), [&dropped[..], &["baseline_retrieval_failed"]].concat());
    }

    /// Regression: with two rewards, the teacher's rewrite was looked up and judged where neither reads both.
    #[test]
    fn the_teachers_rewrite_is_looked_up_and_judged_only_for_a_reward_that_reads_both() {
        let (shop, row) = (Shop::default(), query("a"));
        let baseline = EpisodeInputs { baseline: InputUse::Required, ..EpisodeInputs::default() };
        let calls = |rewards: Vec<WeightedReward>| {
            let (n_retrievals, n_judgements) = (shop.n_retrievals(), shop.n_judgements());
            let scorer = shop.scorer_with(Services { rewards, ..shop.services() }.read_by_rewards());
            scorer.score(&[request(&row, "good", rewritten("poor"))]).unwrap();
            (shop.n_retrievals() - n_retrievals, shop.n_judgements() - n_judgements)
        };
        assert_eq!(calls(vec![length(baseline), length(EVERYTHING)]), (1, 1));
        let retrieval = EpisodeInputs { retrieval: InputUse::Optional, ..baseline };
        assert_eq!(calls(vec![length(retrieval), length(EVERYTHING)]), (2, 1));
        assert_eq!(calls(vec![length(baseline.union(EVERYTHING))]), (2, 2));
    }

    #[test]
    fn rollouts_call_no_service_that_no_reward_reads() {
        let (shop, row) = (Shop::default(), query("a"));
        let services = Services { rewards: length_alone(), ..shop.services() }.read_by_rewards();
        let missing = Baseline::Missing(CallFailure { kind: FailureKind::Timeout, message: "late".into() });
        let (id, text) = (String::new(), String::new());
        let hits = Some(vec![Hit { id, text, reranker_score: 0.5, retrieval_score: None, rank: 1 }]);
        let known = Baseline::Rewritten { rewrite: "poor".into(), hits: hits.clone(), cost: None, latency_ms: None };
        let requests = [request(&row, "broken", missing), request(&row, "good", known)];
        let scored = shop.scorer_with(services).score(&requests).unwrap().scored;
        assert_eq!((shop.n_retrievals(), shop.n_judgements()), (0, 0));
        let totals: Vec<f64> = scored.iter().map(|one| one.outcome.as_ref().unwrap().total).collect();
        assert_eq!(totals, [6.0, 4.0]);
        let episode = &scored[0].episode;
        assert_eq!((&episode.policy.retrieval, &episode.baseline), (&None, &None));
        assert_eq!(
            (episode.response.as_deref(), episode.step, episode.split),
            (Some("broken"), Some(0), Some(Split::Train))
        );
        // Parts that are known without a call are recorded.
        let baseline = scored[1].episode.baseline.as_ref().unwrap();
        assert_eq!((baseline.rewrite.as_str(), baseline.found()), ("poor", hits.as_deref()));
    }

    #[test]
    fn evaluation_computes_what_no_reward_reads_and_its_failures_drop_nothing() {
        let (shop, row) = (Shop::default(), query("a"));
        let scorer = shop.scorer_with(Services { rewards: length_alone(), ..shop.services() });
        let requests = [request(&row, "broken", rewritten("poor")), request(&row, "unjudgeable", rewritten("poor"))];
        let scored = scorer.score(&requests).unwrap().scored;
        assert!(scored.iter().all(|one| one.outcome.is_ok()), "{scored:?}");
        assert!(scored[0].episode.policy.retrieval_failure().is_some());
        assert!(matches!(scored[1].episode.policy.judgement, Judgement::Failed(_)));
        assert_eq!(scored[1].episode.baseline.as_ref().unwrap().hits().len(), 1);
    }

    #[test]
    fn unsampled_episodes_are_not_judged() {
        let (shop, row) = (Shop::default(), query("a"));
        let unsampled = ScoreRequest { judged: false, ..request(&row, "good", rewritten("poor")) };
        let scored = shop.scorer().score(&[unsampled]).unwrap().scored;
        assert_eq!(scored[0].episode.policy.judgement, Judgement::NotSampled);
        assert_eq!(shop.n_judgements(), 0);
    }
}
