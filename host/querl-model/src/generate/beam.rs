//! Beam search.
//!
//! Source: transformers' `_beam_search` with `early_stopping=False`. Departures: penalties depend on the response alone; of
//! candidates with equal scores, the one of the better beam and then the lower token is first.

use super::capacity::{blocks_of_prompt, blocks_of_response};
use super::logits_processor::LogitsProcessor;
use super::model_runner::{HiddenState, ScheduledSequence};
use super::prefix_cache::EngineCore;
use super::sampler::{BeamCandidate, BeamCandidates, LogitsConsumer};
use super::scheduler::{finish_reason, out_of_blocks};
use super::{FinishReason, Generated, GenerationRequest, StopSignal, TokenText};
use crate::ModelError;
use crate::kv_cache::SequenceKvCache;
use std::collections::BTreeSet;

#[derive(Debug, Clone, Copy)]
pub(super) struct Beams {
    pub(super) n_beams: usize,
    pub(super) length_penalty: f64,
}

impl Beams {
    pub(super) fn check(self) -> Result<(), ModelError> {
        let Self { n_beams, length_penalty } = self;
        if n_beams == 0 || !length_penalty.is_finite() {
            let wrong = format!("beam search with {n_beams} beams and length penalty {length_penalty}");
            return Err(ModelError::Generation(format!("{wrong}; expected at least 1 beam and a finite penalty")));
        }
        Ok(())
    }
}

/// The beams of one response.
pub(super) struct Search {
    beams: Beams,
    running: Vec<Beam>,
    /// Finished responses with their scores, best first; at most `n_beams`.
    finished: Vec<(f64, Generated)>,
}

struct Beam {
    cache: SequenceKvCache,
    hidden: HiddenState,
    hypothesis: Hypothesis,
    candidates: BeamCandidates,
}

#[derive(Clone, Default)]
struct Hypothesis {
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    /// Sum of the log-probabilities after penalties.
    score: f64,
}

/// The best response to each request. If `stop` ends the search, responses are empty and have no finish reason.
pub(super) fn run(
    core: &mut EngineCore<'_>,
    requests: &[GenerationRequest<'_>],
    beams: Beams,
    processor: &LogitsProcessor<'_>,
    text: &dyn TokenText,
    stop: &mut StopSignal<'_>,
) -> Result<Vec<Vec<Generated>>, ModelError> {
    beams.check()?;
    let n_beams = beams.n_beams;
    if let Some(request) = requests.iter().find(|request| request.n > n_beams) {
        return Err(ModelError::Generation(format!("{} responses requested of {n_beams} beams", request.n)));
    }
    let mut responses = Vec::with_capacity(requests.len());
    let n_at_once = requests_at_once(core, requests, n_beams, processor.settings.max_new_tokens)?;
    for some in requests.chunks(n_at_once) {
        match search(core, some, beams, processor, text, stop)? {
            Some(found) => responses.extend(found),
            None => return Ok(requests.iter().map(|request| vec![Generated::default(); request.n]).collect()),
        }
    }
    Ok(responses)
}

/// Number of requests whose beams fit into the blocks, at least one.
fn requests_at_once(
    core: &EngineCore<'_>,
    requests: &[GenerationRequest<'_>],
    n_beams: usize,
    max_new_tokens: usize,
) -> Result<usize, ModelError> {
    let n = (core.max_sequences / n_beams).max(1);
    let Some(n_blocks) = core.n_blocks else { return Ok(n) };
    let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
    let of_request = blocks_of_prompt(longest) + n_beams * blocks_of_response(max_new_tokens);
    match n_blocks / of_request {
        0 => Err(out_of_blocks(longest, max_new_tokens)),
        n_fitting => Ok(n.min(n_fitting)),
    }
}

fn search(
    core: &mut EngineCore<'_>,
    requests: &[GenerationRequest<'_>],
    beams: Beams,
    processor: &LogitsProcessor<'_>,
    text: &dyn TokenText,
    stop: &mut StopSignal<'_>,
) -> Result<Option<Vec<Vec<Generated>>>, ModelError> {
    let mut prompts: Vec<&[u32]> = requests.iter().map(|request| request.prompt).collect();
    prompts.sort();
    prompts.dedup();
    let caches = core.prompt_caches(&prompts, processor)?;
    let cache_of = |prompt: &[u32]| prompts.binary_search(&prompt).ok().map(|index| caches[index].clone());
    let start = |request: &GenerationRequest<'_>| Some(Search::new(beams, cache_of(request.prompt)?));
    let mut searches: Vec<Search> = requests.iter().filter_map(start).collect();
    while searches.iter().any(|search| !search.is_finished()) {
        if stop()? {
            return Ok(None);
        }
        let scheduled = searches.iter_mut().zip(requests);
        let scheduled = scheduled.flat_map(|(search, request)| search.schedule(request.prompt, processor.stop_ids));
        let adapter = core.adapter;
        let mut sequences: Vec<ScheduledSequence<'_>> =
            scheduled.map(|sequence| ScheduledSequence { adapter: adapter.clone(), ..sequence }).collect();
        core.policy.forward(&mut sequences, processor)?;
        drop(sequences);
        for search in searches.iter_mut().filter(|search| !search.is_finished()) {
            search.select(processor, text)?;
        }
    }
    let best = |(search, request): (Search, &GenerationRequest<'_>)| search.best().take(request.n).collect();
    Ok(Some(searches.into_iter().zip(requests).map(best).collect()))
}

impl Search {
    /// `cache`: KV cache of the prompt, lacking at least its last token.
    pub(super) fn new(beams: Beams, cache: SequenceKvCache) -> Self {
        let (hypothesis, candidates) = (Hypothesis::default(), BeamCandidates::default());
        let beam = Beam { cache, hidden: HiddenState::Unknown, hypothesis, candidates };
        Self { beams, running: vec![beam], finished: Vec::new() }
    }

    pub(super) fn is_finished(&self) -> bool {
        self.running.is_empty()
    }

    /// The responses, best first.
    pub(super) fn best(self) -> impl Iterator<Item = Generated> {
        self.finished.into_iter().map(|(_, generated)| generated)
    }

    /// As in the source: enough candidates for `n_beams` unfinished beams, even if all stop tokens are among the best.
    fn n_candidates(&self, stop_ids: &BTreeSet<u32>) -> usize {
        (1 + stop_ids.len()).max(2) * self.beams.n_beams
    }

    /// Schedules the prefill (first pass) or a decode step of all beams, which finds the best next tokens of each.
    pub(super) fn schedule<'s>(
        &'s mut self,
        prompt: &'s [u32],
        stop_ids: &BTreeSet<u32>,
    ) -> impl Iterator<Item = ScheduledSequence<'s>> {
        let n_requested = self.n_candidates(stop_ids);
        self.running.iter_mut().map(move |Beam { cache, hidden, hypothesis, candidates }| {
            candidates.response.clone_from(&hypothesis.token_ids);
            candidates.n_requested = n_requested;
            let tokens = match hypothesis.token_ids.last() {
                Some(last) => std::slice::from_ref(last),
                None => &prompt[cache.len()..],
            };
            let consumers = vec![LogitsConsumer::BeamCandidates(candidates)];
            ScheduledSequence { adapter: None, sampling: None, tokens, cache, hidden, keeps_hidden: false, consumers }
        })
    }

    /// Selects among the candidates of all beams: candidates that end a response are added to the finished ones, the best others become the
    /// next beams.
    pub(super) fn select(&mut self, processor: &LogitsProcessor<'_>, text: &dyn TokenText) -> Result<(), ModelError> {
        self.running.iter_mut().find_map(|beam| beam.candidates.failure.take()).map_or(Ok(()), Err)?;
        let (beams, n_candidates) = (self.beams, self.n_candidates(processor.stop_ids));
        let of_beam = |(index, beam): (usize, &Beam)| {
            let score = beam.hypothesis.score;
            beam.candidates.best.iter().map(move |&next| (score + next.gain, index, next)).collect::<Vec<_>>()
        };
        let mut candidates: Vec<(f64, usize, BeamCandidate)> =
            self.running.iter().enumerate().flat_map(of_beam).collect();
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable: better beams and lower tokens stay first
        candidates.truncate(n_candidates);
        let length = self.running[0].hypothesis.token_ids.len() + 1;
        let penalty = (length as f64).powf(beams.length_penalty);
        let mut unfinished = Vec::with_capacity(beams.n_beams);
        for (rank, (score, index, next)) in candidates.into_iter().enumerate() {
            let beam = &self.running[index];
            let mut hypothesis = beam.hypothesis.clone();
            hypothesis.token_ids.push(next.token);
            hypothesis.logprobs.push(next.logprob);
            hypothesis.score = score;
            match finish_reason(&hypothesis.token_ids, processor, text)? {
                Some(reason) if rank < beams.n_beams && score.is_finite() => {
                    self.finished.push((score / penalty, hypothesis.generated(reason)));
                }
                None if unfinished.len() < beams.n_beams && score.is_finite() => {
                    let (cache, candidates) = (beam.cache.clone(), BeamCandidates::default());
                    unfinished.push(Beam { cache, hidden: HiddenState::Unknown, hypothesis, candidates });
                }
                _ => {}
            }
        }
        self.finished.sort_by(|a, b| b.0.total_cmp(&a.0));
        self.finished.truncate(beams.n_beams);
        let worst = self.finished.get(beams.n_beams - 1).map_or(f64::NEG_INFINITY, |(score, _)| *score);
        let can_improve = unfinished.first().is_some_and(|best| best.hypothesis.score / penalty > worst);
        self.running = if can_improve { unfinished } else { Vec::new() };
        Ok(())
    }
}

impl Hypothesis {
    fn generated(self, finish_reason: FinishReason) -> Generated {
        Generated {
            behaviour_logprobs: vec![0.0; self.token_ids.len()],
            token_ids: self.token_ids,
            logprobs: self.logprobs,
            truncated: finish_reason == FinishReason::Length,
            finish_reason: Some(finish_reason),
        }
    }
}
