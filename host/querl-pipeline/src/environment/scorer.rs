//! From rewrites to scored episodes: retrieval, judge, reward plugins. Shared by training and evaluation.

use super::calls::{self, CallCache, CallError, CallKey};
use super::judging::{JudgePrompter, JudgeResponse, JudgingForm};
use super::rewards::{self, WeightedReward};
use querl_core::ports::{
    CallTimings, EnvironmentError, Judge, PluginFault, Prompts, RetrievalRequest, Retriever, StyleModel,
};
use querl_core::records::{
    CallFailure, Candidate, Context, Episode, FailureKind, Hit, Judgement, QueryRow, Rejection, Reward, ValidatedRecord,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Baseline {
    Rewritten {
        rewrite: String,
        /// Hits of the validate stage; `None` where retrieval failed and is tried again.
        hits: Option<Vec<Hit>>,
        /// Price of the rewrite; `None` where unknown.
        cost: Option<f64>,
        /// Time it took in milliseconds; `None` where unknown.
        latency_ms: Option<f64>,
    },
    Missing(CallFailure),
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Baselines(HashMap<String, Baseline>);

impl Baselines {
    /// From the records of the validate stage. Rewrites that filters dropped later still count.
    pub(crate) fn new(records: Vec<ValidatedRecord>) -> Self {
        let by_id = records.into_iter().map(|record| {
            let id = record.rewritten.query.id.clone();
            let baseline = match record.rewritten.rewrite {
                Err(failure) => Baseline::Missing(failure),
                Ok(completion) => Baseline::Rewritten {
                    rewrite: completion.text,
                    hits: record.retrieval.and_then(Result::ok),
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

/// The code of episodes whose calls exceeded the deadline.
pub(crate) const DEADLINE_CODE: &str = "deadline";

#[derive(Clone)]
pub(crate) struct Services {
    pub retriever: Arc<dyn Retriever>,
    pub judge: Option<Arc<dyn Judge>>,
    pub form: JudgingForm,
    pub prompts: Arc<dyn Prompts>,
    pub rewards: Vec<WeightedReward>,
    pub style: Option<Arc<dyn StyleModel>>,
    pub n_retrievals: usize,
    pub n_judgements: usize,
    /// A call that takes longer is cancelled, and its episode dropped as `deadline`. Time in the queue does not count.
    pub deadline: Option<Duration>,
}

/// Scores rewrites; caches responses for the length of a run.
pub(crate) struct Scorer {
    services: Services,
    runtime: tokio::runtime::Handle,
    hits: CallCache<Vec<Hit>>,
    judgements: CallCache<JudgeResponse>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WrittenRewrite {
    pub rewrite: String,
    /// Tokens generated, end of sequence included; 0 where unknown.
    pub n_tokens: u32,
    pub truncated: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScoreRequest<'a> {
    pub id: String,
    pub query: &'a QueryRow,
    pub policy: WrittenRewrite,
    pub baseline: Baseline,
    pub judged: bool,
}

/// An episode and its score, or why there is none.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScoredEpisode {
    pub episode: Episode,
    pub outcome: Result<Reward, Rejection>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scores {
    pub scored: Vec<ScoredEpisode>,
    pub timings: CallTimings,
}

impl Scorer {
    /// Waits for the services on `runtime`, which must not be the caller's own.
    pub(crate) fn new(services: Services, runtime: tokio::runtime::Handle) -> Self {
        Self { services, runtime, hits: CallCache::default(), judgements: CallCache::default() }
    }

    pub(crate) fn prompts(&self) -> &dyn Prompts {
        self.services.prompts.as_ref()
    }

    /// One result per request, in order. Retrieval and judge run concurrently.
    pub(crate) fn score(&self, requests: &[ScoreRequest<'_>]) -> Result<Scores, EnvironmentError> {
        let mut episodes: Vec<Episode> = requests.iter().map(new_episode).collect();
        let mut timings = CallTimings::default();
        let late = self.ask(requests, &mut episodes, &mut timings)?;
        let started = Instant::now();
        let unclassified = match &self.services.style {
            Some(model) => rewards::add_styles(model.as_ref(), &mut episodes),
            None => vec![None; episodes.len()],
        };
        let scored = self.reward(requests, episodes, &late, unclassified)?;
        timings.plugin_s = started.elapsed().as_secs_f64();
        Ok(Scores { scored, timings })
    }

    /// Adds hits and judgements that are not cached. For each episode the failure of a call that exceeded the deadline.
    fn ask(
        &self,
        requests: &[ScoreRequest<'_>],
        episodes: &mut [Episode],
        timings: &mut CallTimings,
    ) -> Result<Vec<Option<CallFailure>>, EnvironmentError> {
        let (looked_up, judged) = (unknown_hits(requests), self.requested_judgements(requests));
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
            late[index] = late[index].take().or_else(|| hits.as_ref().err()?.deadline_failure());
            side.of(&mut episodes[index]).retrieval = hits.map_err(CallError::into_failure);
        }
        for ((index, side), judgement) in judged.into_iter().zip(judgements) {
            late[index] = late[index].take().or_else(|| judgement.as_ref().err()?.deadline_failure());
            let failed = |missed: CallError| JudgeResponse {
                judgement: Judgement::Failed(missed.into_failure()),
                of_baseline: None,
            };
            let JudgeResponse { judgement, of_baseline } = judgement.unwrap_or_else(failed);
            side.of(&mut episodes[index]).judgement = judgement;
            if let Some(of_baseline) = of_baseline {
                episodes[index].baseline.judgement = of_baseline;
            }
        }
        Ok(late)
    }

    fn compares(&self) -> bool {
        matches!(self.services.form, JudgingForm::Compare(_))
    }

    /// Both sides of sampled episodes; one call per comparison.
    fn requested_judgements(&self, requests: &[ScoreRequest<'_>]) -> Vec<(usize, Side)> {
        select(requests, |request, side| {
            let is_sampled = self.services.judge.is_some() && request.judged;
            let has_baseline = matches!(request.baseline, Baseline::Rewritten { .. });
            is_sampled
                && match side {
                    Side::Policy => has_baseline || !self.compares(),
                    Side::Baseline => has_baseline && !self.compares(),
                }
        })
    }

    async fn ask_retriever(&self, questions: &[CallKey<'_>]) -> (Vec<Result<Vec<Hit>, CallError>>, f64) {
        let services = &self.services;
        let calls = questions.iter().map(|question| {
            let (original_query, context) = (question.query.original_query.as_str(), question.context);
            let request = RetrievalRequest { original_query, context, rewritten_query: question.rewrite };
            calls::within(services.deadline, services.retriever.retrieve(request))
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
    ) -> Result<Vec<ScoredEpisode>, EnvironmentError> {
        let each = requests.iter().zip(&episodes).zip(late).zip(unclassified);
        let rejection = |(((request, episode), late), unclassified): (((_, _), &Option<CallFailure>), _)| {
            rejection_of(request, episode, late.as_ref()).or(unclassified)
        };
        let rejections: Vec<_> = each.map(rejection).collect();
        let complete = episodes.iter().zip(&rejections).filter(|(_, rejection)| rejection.is_none());
        let complete: Vec<Episode> = complete.map(|(episode, _)| episode.clone()).collect();
        let mut scores = rewards::score(&self.services.rewards, &complete)?.into_iter();
        let scored = episodes.into_iter().zip(rejections).map(|(episode, rejection)| {
            let outcome = match rejection {
                Some(rejection) => Err(rejection),
                None => scores.next().expect("one score per complete episode"),
            };
            ScoredEpisode { episode, outcome }
        });
        Ok(scored.collect())
    }
}

type JudgeAnswer = Result<JudgeResponse, CallError>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Policy,
    Baseline,
}

impl Side {
    fn of(self, episode: &mut Episode) -> &mut Candidate {
        match self {
            Self::Policy => &mut episode.policy,
            Self::Baseline => &mut episode.baseline,
        }
    }
}

fn new_episode(request: &ScoreRequest<'_>) -> Episode {
    let query = request.query;
    let (rewrite, retrieval) = match &request.baseline {
        Baseline::Rewritten { rewrite, hits, .. } => (rewrite.clone(), Ok(hits.clone().unwrap_or_default())),
        Baseline::Missing(failure) => (String::new(), Err(failure.clone())),
    };
    let baseline = WrittenRewrite { rewrite, n_tokens: 0, truncated: false };
    Episode {
        id: request.id.clone(),
        query: query.original_query.clone(),
        context: Context { user_profile: query.user_profile.clone(), history_summary: query.history_summary.clone() },
        gold_ids: query.gold_ids.clone(),
        policy: new_candidate(request.policy.clone(), Ok(Vec::new())),
        baseline: new_candidate(baseline, retrieval),
    }
}

fn new_candidate(written: WrittenRewrite, retrieval: Result<Vec<Hit>, CallFailure>) -> Candidate {
    let WrittenRewrite { rewrite, n_tokens, truncated } = written;
    Candidate { rewrite, retrieval, judgement: Judgement::NotSampled, style: None, n_tokens, truncated }
}

/// The sides of all requests for which `wants` is true.
fn select(requests: &[ScoreRequest<'_>], wants: impl Fn(&ScoreRequest<'_>, Side) -> bool) -> Vec<(usize, Side)> {
    let sides = |index| [(index, Side::Policy), (index, Side::Baseline)];
    (0..requests.len()).flat_map(sides).filter(|(index, side)| wants(&requests[*index], *side)).collect()
}

fn unknown_hits(requests: &[ScoreRequest<'_>]) -> Vec<(usize, Side)> {
    select(requests, |request, side| match (side, &request.baseline) {
        (Side::Policy, _) => !request.policy.rewrite.trim().is_empty(),
        (Side::Baseline, Baseline::Rewritten { hits, .. }) => hits.is_none(),
        (Side::Baseline, Baseline::Missing(_)) => false,
    })
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
        let candidate = if *side == Side::Policy { &episode.policy } else { &episode.baseline };
        let against = (against == ComparedWith::Baseline).then_some(episode.baseline.rewrite.as_str());
        CallKey { query: request.query, context: &episode.context, rewrite: &candidate.rewrite, against }
    };
    wanted.iter().map(question).collect()
}

/// With fewer calls no conclusion about a service is drawn.
const MIN_CALLS: usize = 4;

/// Fails where every further call would fail too: a fatal rejection, or a service that is unreachable.
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

/// Why an episode cannot be scored: a call failed, or exceeded the deadline.
fn rejection_of(request: &ScoreRequest<'_>, episode: &Episode, late: Option<&CallFailure>) -> Option<Rejection> {
    let reject = |code: &str, failure: &CallFailure| Some(Rejection { code: code.into(), detail: failure.to_string() });
    if let Baseline::Missing(failure) = &request.baseline {
        return reject("baseline_missing", failure);
    }
    if let Some(failure) = late {
        return reject(DEADLINE_CODE, failure);
    }
    if let Err(failure) = &episode.policy.retrieval {
        return reject("policy_retrieval_failed", failure);
    }
    if let Err(failure) = &episode.baseline.retrieval {
        return reject("baseline_retrieval_failed", failure);
    }
    match (&episode.policy.judgement, &episode.baseline.judgement) {
        (Judgement::Failed(failure), _) => reject("policy_judge_failed", failure),
        (_, Judgement::Failed(failure)) => reject("baseline_judge_failed", failure),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::judging::Comparison;
    use super::super::testing::{Shop, query, request, rewritten};
    use super::*;

    #[test]
    fn both_sides_are_looked_up_judged_and_scored() {
        let (shop, row) = (Shop::default(), query("a"));
        let scored = shop.scorer().score(&[request(&row, "good", rewritten("poor"))]).unwrap().scored;
        let episode = &scored[0].episode;
        assert_eq!(episode.policy.retrieval.as_ref().unwrap()[0].reranker_score, 0.9);
        assert_eq!(episode.baseline.retrieval.as_ref().unwrap()[0].reranker_score, 0.2);
        assert_eq!((episode.policy.judgement.score(), episode.baseline.judgement.score()), (Some(4.0), Some(4.0)));
        assert_eq!(scored[0].outcome.as_ref().unwrap().total, 0.7);
    }

    #[test]
    fn empty_rewrite_finds_nothing_and_is_scored() {
        let (shop, row) = (Shop::default(), query("a"));
        let scored = shop.scorer().score(&[request(&row, " ", rewritten("poor"))]).unwrap().scored;
        assert_eq!(scored[0].episode.policy.retrieval, Ok(Vec::new()));
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
        let Scores { scored, timings } = scorer.score(&requests).unwrap();
        let code = |one: &ScoredEpisode| {
            one.outcome.as_ref().map_or_else(|rejection| rejection.code.clone(), |_| "scored".into())
        };
        assert_eq!(scored.iter().map(code).collect::<Vec<_>>(), ["deadline", "scored", "deadline", "deadline"]);
        let detail = &scored[0].outcome.as_ref().unwrap_err().detail;
        assert_eq!(detail, "timeout: no response within rl.episode_deadline_ms = 50");
        assert_eq!(scored[0].episode.policy.retrieval.as_ref().unwrap_err().kind, FailureKind::Timeout);
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
        // Failures of few calls do not stop the run: the episodes are dropped, and too many drops stop it elsewhere.
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
        let scores =
            |n: usize| (scored[n].episode.policy.judgement.score(), scored[n].episode.baseline.judgement.score());
        assert_eq!(scores(0), (Some(2.5), Some(2.5)));
        for n in [1, 2] {
            // The shop's judge prefers what stands first.
            assert!([(Some(5.0), Some(0.0)), (Some(0.0), Some(5.0))].contains(&scores(n)), "{:?}", scores(n));
        }
        let rejection = scored[3].outcome.as_ref().unwrap_err();
        assert_eq!(rejection.code, "policy_judge_failed");
        assert!(rejection.detail.contains("nor does a second one: no JSON object"), "{rejection}");
        // Judge calls: 0 for equal rewrites, 1, and 2 for each response that could not be parsed.
        assert_eq!(shop.n_judgements(), 5);
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
