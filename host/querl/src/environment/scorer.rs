//! From rewrites to scored episodes: retrieval, judge, reward plugins. Shared by training and evaluation.

use super::baseline::Baseline;
use super::memo::{Memo, Question};
use super::rewards::{self, WeightedReward};
use futures::StreamExt;
use querl_core::ports::{
    EnvironmentError, Judge, JudgeRequest, PluginFault, PromptInput, PromptTask, Prompts, RetrievalRequest, Retriever,
};
use querl_core::records::{
    CallFailure, Candidate, Context, Episode, FailureKind, Hit, Judgement, QueryRow, Rejection, Reward,
};
use std::sync::Arc;

/// Whom the scorer asks.
#[derive(Clone)]
pub struct Services {
    /// Finds passages.
    pub retriever: Arc<dyn Retriever>,
    /// Judges; `None` where nobody does.
    pub judge: Option<Arc<dyn Judge>>,
    /// The tenant's prompts and parsers.
    pub prompts: Arc<dyn Prompts>,
    /// Reward plugins.
    pub rewards: Vec<WeightedReward>,
    /// Retrieval calls under way at once.
    pub n_retrievals: usize,
    /// Judge calls under way at once.
    pub n_judgements: usize,
}

/// Scores rewrites; remembers answers for the length of a run.
pub struct Scorer {
    services: Services,
    runtime: tokio::runtime::Handle,
    hits: Memo<Vec<Hit>>,
    judgements: Memo<Judgement>,
}

/// What one side wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// The rewrite as parsed; empty where there was none to parse.
    pub rewrite: String,
    /// Tokens generated, end of sequence included; 0 where unknown.
    pub n_tokens: u32,
    /// True where the token limit cut the answer off.
    pub truncated: bool,
}

/// One episode to score.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreRequest<'a> {
    /// Unique in a run.
    pub id: String,
    /// The query.
    pub query: &'a QueryRow,
    /// What the policy wrote.
    pub policy: Written,
    /// The teacher's side.
    pub baseline: Baseline,
    /// True where both sides are judged.
    pub judged: bool,
}

/// An episode and its score, or why there is none.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// With hits and judgements.
    pub episode: Episode,
    /// The score.
    pub outcome: Result<Reward, Rejection>,
}

impl Scorer {
    /// A scorer that waits for the services on `runtime`, which must not be the caller's own.
    pub fn new(services: Services, runtime: tokio::runtime::Handle) -> Self {
        Self { services, runtime, hits: Memo::default(), judgements: Memo::default() }
    }

    /// The tenant's prompts.
    pub fn prompts(&self) -> &dyn Prompts {
        self.services.prompts.as_ref()
    }

    /// One result per request, in order.
    ///
    /// # Errors
    /// A plugin broke its contract, or a service refuses us or answers nobody.
    pub fn score(&self, requests: &[ScoreRequest<'_>]) -> Result<Vec<Scored>, EnvironmentError> {
        let mut episodes: Vec<Episode> = requests.iter().map(new_episode).collect();
        self.retrieve(requests, &mut episodes)?;
        self.judge(requests, &mut episodes)?;
        self.reward(requests, episodes)
    }

    /// Fills in the hits that are not known yet.
    fn retrieve(&self, requests: &[ScoreRequest<'_>], episodes: &mut [Episode]) -> Result<(), EnvironmentError> {
        let wanted = select(requests, |request, side| match (side, &request.baseline) {
            (Side::Policy, _) => !request.policy.rewrite.trim().is_empty(),
            (Side::Baseline, Baseline::Rewritten { hits, .. }) => hits.is_none(),
            (Side::Baseline, Baseline::Missing(_)) => false,
        });
        let questions = questions(&wanted, requests, episodes);
        let answers = self.hits.answer(&questions, |new| Ok::<_, EnvironmentError>(self.ask_retriever(new)))?;
        stop_if_hopeless(&answers)?;
        for ((index, side), hits) in wanted.into_iter().zip(answers) {
            side.of(&mut episodes[index]).retrieval = hits;
        }
        Ok(())
    }

    fn ask_retriever(&self, questions: &[Question<'_>]) -> Vec<Result<Vec<Hit>, CallFailure>> {
        let calls = questions.iter().map(|question| {
            self.services.retriever.retrieve(RetrievalRequest {
                original_query: &question.query.original_query,
                context: question.context,
                rewritten_query: question.rewrite,
            })
        });
        let calls: Vec<_> = calls.collect();
        self.runtime.block_on(futures::stream::iter(calls).buffered(self.services.n_retrievals.max(1)).collect())
    }

    /// Fills in the judgements of both sides of sampled episodes.
    fn judge(&self, requests: &[ScoreRequest<'_>], episodes: &mut [Episode]) -> Result<(), EnvironmentError> {
        let Some(judge) = &self.services.judge else { return Ok(()) };
        let wanted = select(requests, |request, side| {
            request.judged && (side == Side::Policy || matches!(request.baseline, Baseline::Rewritten { .. }))
        });
        let questions = questions(&wanted, requests, episodes);
        let answers = self.judgements.answer(&questions, |new| self.ask_judge(judge.as_ref(), new))?;
        stop_if_hopeless(&answers)?;
        for ((index, side), judgement) in wanted.into_iter().zip(answers) {
            side.of(&mut episodes[index]).judgement = judgement.unwrap_or_else(Judgement::Failed);
        }
        Ok(())
    }

    fn ask_judge(&self, judge: &dyn Judge, questions: &[Question<'_>]) -> Result<Vec<JudgeAnswer>, PluginFault> {
        let calls: Vec<_> = questions.iter().map(|question| self.ask_judge_once(judge, question)).collect();
        let calls = futures::stream::iter(calls).buffered(self.services.n_judgements.max(1));
        let answers: Vec<Result<JudgeAnswer, PluginFault>> = self.runtime.block_on(calls.collect());
        answers.into_iter().collect()
    }

    async fn ask_judge_once(&self, judge: &dyn Judge, question: &Question<'_>) -> Result<JudgeAnswer, PluginFault> {
        let (query, context, rewrite) = (question.query.original_query.as_str(), question.context, question.rewrite);
        let prompts = self.prompts();
        let messages = prompts.messages(PromptTask::Judge, &PromptInput { query, context, rewrite: Some(rewrite) })?;
        let completion = match judge.judge(JudgeRequest { query, context, rewrite, messages: &messages }).await {
            Ok(completion) => completion,
            Err(failure) => return Ok(Err(failure)),
        };
        Ok(match prompts.parse_judgement(&completion.text)? {
            Ok(parsed) => Ok(Judgement::Scored { score: parsed.score, reason: parsed.reason }),
            Err(rejection) => Err(CallFailure {
                kind: FailureKind::InvalidResponse,
                message: format!("the answer of judge {} holds no judgement: {rejection}", judge.name()),
            }),
        })
    }

    /// Scores the episodes that have all they need; the others carry the reason.
    fn reward(&self, requests: &[ScoreRequest<'_>], episodes: Vec<Episode>) -> Result<Vec<Scored>, EnvironmentError> {
        let rejections: Vec<_> =
            requests.iter().zip(&episodes).map(|(request, episode)| rejection_of(request, episode)).collect();
        let complete = episodes.iter().zip(&rejections).filter(|(_, rejection)| rejection.is_none());
        let complete: Vec<Episode> = complete.map(|(episode, _)| episode.clone()).collect();
        let mut scores = rewards::score(&self.services.rewards, &complete)?.into_iter();
        let scored = episodes.into_iter().zip(rejections).map(|(episode, rejection)| {
            let outcome = match rejection {
                Some(rejection) => Err(rejection),
                None => scores.next().expect("one score per complete episode"),
            };
            Scored { episode, outcome }
        });
        Ok(scored.collect())
    }
}

type JudgeAnswer = Result<Judgement, CallFailure>;

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
    let baseline = Written { rewrite, n_tokens: 0, truncated: false };
    Episode {
        id: request.id.clone(),
        query: query.original_query.clone(),
        context: Context { user_profile: query.user_profile.clone(), history_summary: query.history_summary.clone() },
        gold_ids: query.gold_ids.clone(),
        policy: new_candidate(request.policy.clone(), Ok(Vec::new())),
        baseline: new_candidate(baseline, retrieval),
    }
}

fn new_candidate(written: Written, retrieval: Result<Vec<Hit>, CallFailure>) -> Candidate {
    let Written { rewrite, n_tokens, truncated } = written;
    Candidate { rewrite, retrieval, judgement: Judgement::NotSampled, style: None, n_tokens, truncated }
}

/// The sides of all requests that `wants` picks.
fn select(requests: &[ScoreRequest<'_>], wants: impl Fn(&ScoreRequest<'_>, Side) -> bool) -> Vec<(usize, Side)> {
    let sides = |index| [(index, Side::Policy), (index, Side::Baseline)];
    (0..requests.len()).flat_map(sides).filter(|(index, side)| wants(&requests[*index], *side)).collect()
}

fn questions<'a>(
    wanted: &[(usize, Side)],
    requests: &'a [ScoreRequest<'_>],
    episodes: &'a [Episode],
) -> Vec<Question<'a>> {
    let question = |(index, side): &(usize, Side)| {
        let (request, episode) = (&requests[*index], &episodes[*index]);
        let candidate = if *side == Side::Policy { &episode.policy } else { &episode.baseline };
        Question { query: request.query, context: &episode.context, rewrite: &candidate.rewrite }
    };
    wanted.iter().map(question).collect()
}

/// A refusal that every further call would meet, or nobody reached at all.
fn stop_if_hopeless<T>(answers: &[Result<T, CallFailure>]) -> Result<(), CallFailure> {
    let failures: Vec<&CallFailure> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
    let all_down = failures.len() == answers.len() && failures.iter().all(|f| f.kind == FailureKind::Unreachable);
    match failures.iter().find(|failure| failure.kind.is_fatal() || all_down) {
        Some(failure) => Err((*failure).clone()),
        None => Ok(()),
    }
}

/// Why an episode cannot be scored: something outside the policy failed.
fn rejection_of(request: &ScoreRequest<'_>, episode: &Episode) -> Option<Rejection> {
    let reject = |code: &str, failure: &CallFailure| Some(Rejection { code: code.into(), detail: failure.to_string() });
    if let Baseline::Missing(failure) = &request.baseline {
        return reject("baseline_missing", failure);
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
    use super::super::testing::{Shop, query, request, rewritten};
    use super::*;

    #[test]
    fn both_sides_are_looked_up_judged_and_scored() {
        let (shop, row) = (Shop::default(), query("a"));
        let scored = shop.scorer().score(&[request(&row, "good", rewritten("poor"))]).unwrap();
        let episode = &scored[0].episode;
        assert_eq!(episode.policy.retrieval.as_ref().unwrap()[0].reranker_score, 0.9);
        assert_eq!(episode.baseline.retrieval.as_ref().unwrap()[0].reranker_score, 0.2);
        assert_eq!((episode.policy.judgement.score(), episode.baseline.judgement.score()), (Some(4.0), Some(4.0)));
        assert_eq!(scored[0].outcome.as_ref().unwrap().total, 0.7);
    }

    #[test]
    fn empty_rewrite_finds_nothing_and_is_scored() {
        let (shop, row) = (Shop::default(), query("a"));
        let scored = shop.scorer().score(&[request(&row, " ", rewritten("poor"))]).unwrap();
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
        let scored = shop.scorer().score(&requests).unwrap();
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
    fn a_service_that_answers_nobody_stops_the_run() {
        let (shop, row) = (Shop::default(), query("a"));
        let error = shop.scorer().score(&[request(&row, "down", rewritten("down"))]).unwrap_err();
        assert!(matches!(error, EnvironmentError::Service(_)), "{error}");
    }

    #[test]
    fn answers_are_asked_for_once_in_a_run() {
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
    fn unsampled_episodes_are_not_judged() {
        let (shop, row) = (Shop::default(), query("a"));
        let unsampled = ScoreRequest { judged: false, ..request(&row, "good", rewritten("poor")) };
        let scored = shop.scorer().score(&[unsampled]).unwrap();
        assert_eq!(scored[0].episode.policy.judgement, Judgement::NotSampled);
        assert_eq!(shop.n_judgements(), 0);
    }
}
