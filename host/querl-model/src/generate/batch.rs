//! Continuous batching: answers in progress up to a limit; one that ends makes room for the next.

use super::engine::{Parts, prompt_caches};
use super::filters::Rules;
use super::sampling::choose;
use super::units::{Taker, Unit, advance};
use super::{Decoding, EndedBy, Generated, GenerationRequest, TokenText};
use crate::ModelError;
use crate::cache::SequenceCache;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// One answer to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    prompt: usize, // index of the sorted prompts
    request: usize,
    sample: usize,
}

/// A prompt whose answers are to begin.
struct Prompt {
    cache: SequenceCache,
    hidden: Vec<f32>,
    /// Tokens that its cache does not hold yet.
    n_left: usize,
}

/// An answer in progress.
struct Sequence {
    job: usize,
    cache: SequenceCache,
    hidden: Vec<f32>,
    draw: Draw,
}

/// Draws the tokens of one answer.
struct Draw {
    rng: ChaCha8Rng,
    decoding: Decoding,
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    behaviour_logprobs: Vec<f32>,
}

impl Draw {
    fn new(seed: u64, sample: usize, decoding: Decoding) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(sample as u64);
        Self { rng, decoding, token_ids: Vec::new(), logprobs: Vec::new(), behaviour_logprobs: Vec::new() }
    }

    fn generated(self, ended_by: EndedBy) -> Generated {
        Generated {
            token_ids: self.token_ids,
            logprobs: self.logprobs,
            behaviour_logprobs: self.behaviour_logprobs,
            truncated: ended_by == EndedBy::Length,
            ended_by,
        }
    }
}

impl Taker for Draw {
    fn take(&mut self, logits: &mut [f32], rules: &Rules<'_>) -> Result<(), ModelError> {
        let choice = choose(logits, &self.token_ids, rules, self.decoding, &mut self.rng)?;
        self.token_ids.push(choice.token);
        self.logprobs.push(choice.logprob);
        self.behaviour_logprobs.push(choice.behaviour_logprob);
        Ok(())
    }
}

/// Writes all answers: by request, then by sample.
pub(super) fn run(
    parts: &mut Parts<'_>,
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    rules: &Rules<'_>,
    text: &dyn TokenText,
) -> Result<Vec<Vec<Generated>>, ModelError> {
    let mut order: BTreeMap<&[u32], usize> = requests.iter().map(|request| (request.prompt, 0)).collect();
    order.values_mut().enumerate().for_each(|(index, position)| *position = index);
    let prompts: Vec<&[u32]> = order.keys().copied().collect();
    let job = |(request, asked): (usize, &GenerationRequest<'_>)| {
        let prompt = order[asked.prompt];
        (0..asked.n).map(move |sample| Job { prompt, request, sample })
    };
    // Answers to like prompts stand together, so that what they share is read together.
    let mut jobs: Vec<Job> = requests.iter().enumerate().flat_map(job).collect();
    jobs.sort();
    let mut done: Vec<Vec<Option<Generated>>> = requests.iter().map(|request| vec![None; request.n]).collect();
    let mut running: Vec<Sequence> = Vec::new();
    let (mut next, mut held) = (0, None);
    while next < jobs.len() || !running.is_empty() {
        let admitted = next..jobs.len().min(next + parts.max_sequences - running.len());
        let begun = begin(parts, &prompts, &jobs[admitted.clone()], held.take(), rules)?;
        let fresh = step(parts, requests, (&jobs, admitted.clone()), begun, &mut running, decoding, rules)?;
        held = fresh.filter(|(prompt, _)| jobs.get(admitted.end).is_some_and(|job| job.prompt == *prompt));
        next = admitted.end;
        let mut going_on = Vec::with_capacity(running.len());
        for sequence in running {
            match end_of(&sequence.draw.token_ids, rules, text)? {
                None => going_on.push(sequence),
                Some(ended_by) => {
                    let Job { request, sample, .. } = jobs[sequence.job];
                    done[request][sample] = Some(sequence.draw.generated(ended_by));
                }
            }
        }
        running = going_on;
    }
    done.into_iter().map(complete).collect()
}

/// The answers to one request, each of which must have been written: none is lost silently.
fn complete(answers: Vec<Option<Generated>>) -> Result<Vec<Generated>, ModelError> {
    let lost = |sample| ModelError::Generation(format!("answer {sample} to a request was begun and not finished"));
    answers.into_iter().enumerate().map(|(sample, answer)| answer.ok_or_else(|| lost(sample))).collect()
}

type Begun = Vec<(usize, Prompt)>;

/// The prompts of the admitted jobs, each with what is known of it.
fn begin(
    parts: &mut Parts<'_>,
    prompts: &[&[u32]],
    jobs: &[Job],
    held: Option<(usize, Prompt)>,
    rules: &Rules<'_>,
) -> Result<Begun, ModelError> {
    let mut indices: Vec<usize> = jobs.iter().map(|job| job.prompt).collect();
    indices.dedup();
    let mut begun: Begun = held.into_iter().filter(|(index, _)| indices.first() == Some(index)).collect();
    let fresh = &indices[begun.len()..];
    let tokens: Vec<&[u32]> = fresh.iter().map(|&index| prompts[index]).collect();
    for (&index, cache) in fresh.iter().zip(prompt_caches(parts, &tokens, rules)?) {
        let n_left = prompts[index].len() - cache.len();
        begun.push((index, Prompt { cache, hidden: Vec::new(), n_left }));
    }
    Ok(begun)
}

/// One token more for every answer in progress, and a first one for those that begin. Returns the last prompt that began.
fn step(
    parts: &mut Parts<'_>,
    requests: &[GenerationRequest<'_>],
    (jobs, admitted): (&[Job], std::ops::Range<usize>),
    mut begun: Begun,
    running: &mut Vec<Sequence>,
    decoding: Decoding,
    rules: &Rules<'_>,
) -> Result<Option<(usize, Prompt)>, ModelError> {
    let mut draws: Vec<Draw> =
        jobs[admitted.clone()].iter().map(|job| Draw::new(requests[job.request].seed, job.sample, decoding)).collect();
    let last_tokens: Vec<[u32; 1]> =
        running.iter().map(|sequence| [sequence.draw.token_ids.last().copied().unwrap_or_default()]).collect();
    let mut units: Vec<Unit<'_>> = Vec::with_capacity(running.len() + begun.len());
    for (Sequence { cache, hidden, draw, .. }, tokens) in running.iter_mut().zip(&last_tokens) {
        units.push(Unit { cache, tokens, hidden, takers: vec![draw] });
    }
    let mut rest = draws.as_mut_slice();
    for (index, Prompt { cache, hidden, n_left }) in &mut begun {
        let of_prompt = jobs[admitted.clone()].iter().filter(|job| job.prompt == *index);
        let job = of_prompt.clone().next().map(|job| requests[job.request].prompt).unwrap_or_default();
        let (own, others) = rest.split_at_mut(of_prompt.count());
        rest = others;
        let takers = own.iter_mut().map(|draw| draw as &mut dyn Taker).collect();
        units.push(Unit { cache, tokens: &job[job.len() - *n_left..], hidden, takers });
        *n_left = 0;
    }
    advance(parts.weights, &mut units, rules)?;
    drop(units);
    for (job, draw) in admitted.zip(draws) {
        let cache = cache_of(&begun, jobs[job].prompt)?;
        running.push(Sequence { job, cache, hidden: Vec::new(), draw });
    }
    Ok(begun.pop())
}

/// The keys and values of a prompt, which has begun with the first of its jobs.
fn cache_of(begun: &Begun, prompt: usize) -> Result<SequenceCache, ModelError> {
    let prompt_begun = begun.iter().find(|(index, _)| *index == prompt);
    let lost = || ModelError::Generation(format!("an answer to prompt {prompt} is to begin, but its prompt has not"));
    prompt_begun.map(|(_, prompt)| prompt.cache.clone()).ok_or_else(lost)
}

/// What ends an answer with its last token, if anything does.
pub(super) fn end_of(answer: &[u32], rules: &Rules<'_>, text: &dyn TokenText) -> Result<Option<EndedBy>, ModelError> {
    if answer.last().is_some_and(|id| rules.stop_ids.contains(id)) {
        return Ok(Some(EndedBy::StopToken));
    }
    let settings = rules.settings;
    if !settings.stop_strings.is_empty() && answer.len() >= settings.min_new_tokens {
        let text = text.text(answer)?;
        if let Some(index) = settings.stop_strings.iter().position(|stop| text.contains(stop.as_str())) {
            return Ok(Some(EndedBy::StopString { index }));
        }
    }
    Ok((answer.len() >= settings.max_new_tokens).then_some(EndedBy::Length))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_was_not_written_is_an_error() {
        let answer = || Draw::new(1, 0, Decoding::Greedy).generated(EndedBy::Length);
        assert_eq!(complete(vec![Some(answer()), Some(answer())]).unwrap().len(), 2);
        let error = complete(vec![Some(answer()), None]).unwrap_err();
        assert!(error.to_string().contains("answer 1 to a request was begun and not finished"), "{error}");
    }

    #[test]
    fn an_answer_whose_prompt_has_not_begun_is_an_error() {
        let error = cache_of(&Vec::new(), 3).err().unwrap();
        assert!(error.to_string().contains("an answer to prompt 3 is to begin"), "{error}");
    }
}
