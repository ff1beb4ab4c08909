//! Beam search.
//!
//! Source: transformers' `_beam_search` with `early_stopping=False`. Departures: limits look at the answer alone; of candidates
//! with equal scores, the one of the better beam and then the lower token goes first.

use super::batch::{end_of, no_room};
use super::draw::Taker;
use super::engine::{Parts, prompt_caches};
use super::filters::Rules;
use super::model_runner::{Hidden, Unit};
use super::sampling::Softmax;
use super::sizes::{blocks_of_answer, blocks_of_prompt};
use super::{EndedBy, Generated, GenerationRequest, TokenText};
use crate::ModelError;
use crate::cache::SequenceCache;

/// How wide to search, and how lengths are compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beams {
    pub(super) n_beams: usize,
    pub(super) length_penalty: f64,
}

/// The search for one request.
struct Search {
    running: Vec<Beam>,
    /// Best first, at most `n_beams`.
    finished: Vec<(f64, Generated)>,
}

struct Beam {
    cache: SequenceCache,
    hidden: Hidden,
    text: Written,
    continuations: Continuations,
}

/// What a beam has written.
#[derive(Clone, Default)]
struct Written {
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    /// Sum of the log-probabilities that limits leave.
    score: f64,
}

/// The best next tokens of one beam.
#[derive(Default)]
pub struct Continuations {
    answer: Vec<u32>,
    n_wanted: usize,
    found: Vec<Continuation>,
}

#[derive(Clone, Copy)]
struct Continuation {
    token: u32,
    /// What the beam's score gains.
    gain: f64,
    /// At the sampling temperature, without limits.
    logprob: f32,
}

impl Continuations {
    pub(super) fn take(&mut self, logits: &mut [f32], rules: &Rules<'_>) -> Result<(), ModelError> {
        let whole = Softmax::of(logits, 1.0);
        let reported = Softmax::of(logits, rules.settings.temperature as f32);
        if !whole.total().is_finite() {
            return Err(ModelError::Generation("the logits of a beam are not finite".into()));
        }
        // As in the source, limits work on log-probabilities here.
        let original = logits.to_vec();
        logits.iter_mut().for_each(|logit| *logit = whole.logprob(*logit));
        rules.limit(logits, &self.answer);
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        let best_first = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b));
        if self.n_wanted < tokens.len() {
            tokens.select_nth_unstable_by(self.n_wanted, best_first);
            tokens.truncate(self.n_wanted);
        }
        tokens.sort_unstable_by(best_first);
        let continuation = |token: u32| Continuation {
            token,
            gain: f64::from(logits[token as usize]),
            logprob: reported.logprob(original[token as usize]),
        };
        self.found = tokens.into_iter().map(continuation).collect();
        Ok(())
    }
}

/// Searches for the `n` best answers to each request.
pub(super) fn run(
    parts: &mut Parts<'_>,
    requests: &[GenerationRequest<'_>],
    beams: Beams,
    rules: &Rules<'_>,
    text: &dyn TokenText,
) -> Result<Vec<Vec<Generated>>, ModelError> {
    let Beams { n_beams, length_penalty } = beams;
    if n_beams == 0 || !length_penalty.is_finite() {
        let wrong = format!("beam search with {n_beams} beams and length penalty {length_penalty}");
        return Err(ModelError::Generation(format!("{wrong}; expected at least 1 beam and a finite penalty")));
    }
    if let Some(request) = requests.iter().find(|request| request.n > n_beams) {
        return Err(ModelError::Generation(format!("{} answers asked of {n_beams} beams", request.n)));
    }
    let mut answers = Vec::with_capacity(requests.len());
    let n_at_once = requests_at_once(parts, requests, n_beams, rules.settings.max_new_tokens)?;
    for requests in requests.chunks(n_at_once) {
        answers.extend(search(parts, requests, beams, rules, text)?);
    }
    Ok(answers)
}

/// Requests whose beams there is room for, at least one.
fn requests_at_once(
    parts: &Parts<'_>,
    requests: &[GenerationRequest<'_>],
    n_beams: usize,
    max_new_tokens: usize,
) -> Result<usize, ModelError> {
    let n = (parts.max_sequences / n_beams).max(1);
    let Some(n_blocks) = parts.n_blocks else { return Ok(n) };
    let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
    let of_request = blocks_of_prompt(longest) + n_beams * blocks_of_answer(max_new_tokens);
    match n_blocks / of_request {
        0 => Err(no_room(longest, max_new_tokens)),
        n_with_room => Ok(n.min(n_with_room)),
    }
}

fn search(
    parts: &mut Parts<'_>,
    requests: &[GenerationRequest<'_>],
    beams: Beams,
    rules: &Rules<'_>,
    text: &dyn TokenText,
) -> Result<Vec<Vec<Generated>>, ModelError> {
    let mut prompts: Vec<&[u32]> = requests.iter().map(|request| request.prompt).collect();
    prompts.sort();
    prompts.dedup();
    let caches = prompt_caches(parts, &prompts, rules)?;
    let cache_of = |prompt: &[u32]| prompts.binary_search(&prompt).ok().map(|index| caches[index].clone());
    let begun = |request: &GenerationRequest<'_>| -> Option<Search> {
        let (text, continuations) = (Written::default(), Continuations::default());
        let beam = Beam { cache: cache_of(request.prompt)?, hidden: Hidden::Unknown, text, continuations };
        Some(Search { running: vec![beam], finished: Vec::new() })
    };
    let mut searches: Vec<Search> = requests.iter().filter_map(begun).collect();
    // As in the source: enough candidates that n_beams of them go on although every stop token is among the best.
    let n_candidates = (1 + rules.stop_ids.len()).max(2) * beams.n_beams;
    while searches.iter().any(|search| !search.running.is_empty()) {
        step(parts, requests, &mut searches, n_candidates, rules)?;
        for search in searches.iter_mut().filter(|search| !search.running.is_empty()) {
            search.select(beams, n_candidates, rules, text)?;
        }
    }
    let best = |(search, request): (Search, &GenerationRequest<'_>)| {
        search.finished.into_iter().take(request.n).map(|(_, generated)| generated).collect()
    };
    Ok(searches.into_iter().zip(requests).map(best).collect())
}

/// Feeds each beam its last token (at first, what is left of the prompt) and finds its best continuations.
fn step(
    parts: &mut Parts<'_>,
    requests: &[GenerationRequest<'_>],
    searches: &mut [Search],
    n_candidates: usize,
    rules: &Rules<'_>,
) -> Result<(), ModelError> {
    let new_tokens = |search: &Search, request: &GenerationRequest<'_>| -> Vec<Vec<u32>> {
        let of_beam = |beam: &Beam| match beam.text.token_ids.last() {
            Some(&last) => vec![last],
            None => request.prompt[beam.cache.len()..].to_vec(),
        };
        search.running.iter().map(of_beam).collect()
    };
    let tokens: Vec<Vec<u32>> =
        searches.iter().zip(requests).flat_map(|(search, request)| new_tokens(search, request)).collect();
    let running = searches.iter_mut().flat_map(|search| &mut search.running);
    let mut units: Vec<Unit<'_>> = running
        .zip(&tokens)
        .map(|(Beam { cache, hidden, text, continuations }, tokens)| {
            continuations.answer.clone_from(&text.token_ids);
            continuations.n_wanted = n_candidates;
            Unit { cache, tokens, hidden, is_held: false, takers: vec![Taker::Beam(continuations)] }
        })
        .collect();
    parts.policy.advance(&mut units, rules)
}

impl Search {
    /// Chooses among all continuations: the best that end are finished, the best that do not go on.
    fn select(
        &mut self,
        beams: Beams,
        n_candidates: usize,
        rules: &Rules<'_>,
        text: &dyn TokenText,
    ) -> Result<(), ModelError> {
        let of_beam = |(index, beam): (usize, &Beam)| {
            let score = beam.text.score;
            beam.continuations.found.iter().map(move |&next| (score + next.gain, index, next)).collect::<Vec<_>>()
        };
        let mut candidates: Vec<(f64, usize, Continuation)> =
            self.running.iter().enumerate().flat_map(of_beam).collect();
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable: better beams and lower tokens stay first
        candidates.truncate(n_candidates);
        let length = self.running[0].text.token_ids.len() + 1;
        let penalty = (length as f64).powf(beams.length_penalty);
        let mut going_on = Vec::with_capacity(beams.n_beams);
        for (rank, (score, index, next)) in candidates.into_iter().enumerate() {
            let beam = &self.running[index];
            let mut written = beam.text.clone();
            written.token_ids.push(next.token);
            written.logprobs.push(next.logprob);
            written.score = score;
            match end_of(&written.token_ids, rules, text)? {
                Some(ended_by) if rank < beams.n_beams && score.is_finite() => {
                    self.finished.push((score / penalty, written.generated(ended_by)));
                }
                None if going_on.len() < beams.n_beams && score.is_finite() => {
                    let (cache, hidden) = (beam.cache.clone(), Hidden::Unknown);
                    going_on.push(Beam { cache, hidden, text: written, continuations: Continuations::default() });
                }
                _ => {}
            }
        }
        self.finished.sort_by(|a, b| b.0.total_cmp(&a.0));
        self.finished.truncate(beams.n_beams);
        let worst = self.finished.get(beams.n_beams - 1).map_or(f64::NEG_INFINITY, |(score, _)| *score);
        let can_improve = going_on.first().is_some_and(|best| best.text.score / penalty > worst);
        self.running = if can_improve { going_on } else { Vec::new() };
        Ok(())
    }
}

impl Written {
    fn generated(self, ended_by: EndedBy) -> Generated {
        Generated {
            behaviour_logprobs: vec![0.0; self.token_ids.len()],
            token_ids: self.token_ids,
            logprobs: self.logprobs,
            truncated: ended_by == EndedBy::Length,
            ended_by,
        }
    }
}
