//! Continuous batching: answers in progress up to a limit; one that ends makes room for the next.

use super::admission::Admission;
use super::draw::{Draw, Taker};
use super::engine::{Parts, prompt_caches};
use super::filters::Rules;
use super::model_runner::{Hidden, Unit};
use super::{Decoding, EndedBy, Generated, GenerationRequest, TokenText};
use crate::ModelError;
use crate::cache::SequenceCache;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    prompt: usize, // index of the sorted prompts
    request: usize,
    sample: usize,
}

/// A prompt whose answers are to begin.
struct Prompt {
    cache: SequenceCache,
    hidden: Hidden,
    /// Tokens that its cache does not hold yet.
    n_left: usize,
}

struct Sequence {
    job: usize,
    cache: SequenceCache,
    hidden: Hidden,
    draw: Draw,
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
    let mut admission = Admission::new(parts.n_blocks, rules.settings.max_new_tokens);
    let (mut next, mut held) = (0, None);
    while next < jobs.len() || !running.is_empty() {
        let admitted = admitted(&mut admission, &jobs, next, parts.max_sequences - running.len(), &prompts);
        if admitted.is_empty() && running.is_empty() {
            return Err(no_room(prompts[jobs[next].prompt].len(), rules.settings.max_new_tokens));
        }
        let begun = match admitted.is_empty() {
            true => Begun::new(),
            false => begin(parts, &prompts, &jobs[admitted.clone()], held.take(), rules)?,
        };
        let fresh = step(parts, requests, (&jobs, admitted.clone()), begun, &mut running, decoding, rules)?;
        let goes_on = |prompt| jobs.get(admitted.end).is_some_and(|job| job.prompt == prompt);
        held = fresh.or(held).filter(|(prompt, _)| goes_on(*prompt));
        next = admitted.end;
        let ends = ends_of(&running, rules, text)?;
        let mut going_on = Vec::with_capacity(running.len());
        for (sequence, end) in running.into_iter().zip(ends) {
            match end {
                None => going_on.push(sequence),
                Some(ended_by) => {
                    let Job { prompt, request, sample } = jobs[sequence.job];
                    admission.end(prompt);
                    done[request][sample] = Some(sequence.draw.generated(ended_by));
                }
            }
        }
        running = going_on;
    }
    done.into_iter().map(complete).collect()
}

/// What ends each answer. Text is asked for by all threads: a card would wait for one.
fn ends_of(running: &[Sequence], rules: &Rules<'_>, text: &dyn TokenText) -> Result<Vec<Option<EndedBy>>, ModelError> {
    let answers: Vec<&[u32]> = running.iter().map(|sequence| sequence.draw.token_ids.as_slice()).collect();
    match rules.settings.stop_strings.is_empty() {
        true => answers.iter().map(|answer| end_of(answer, rules, text)).collect(),
        false => answers.par_iter().map(|answer| end_of(answer, rules, text)).collect(),
    }
}

/// The jobs that begin now: at most `n`, those for which there is room, in their order.
fn admitted(admission: &mut Admission, jobs: &[Job], next: usize, n: usize, prompts: &[&[u32]]) -> Range<usize> {
    let fits = |job: &&Job| admission.admit(job.prompt, prompts[job.prompt].len());
    next..next + jobs[next..].iter().take(n).take_while(fits).count()
}

/// There is no room for a single answer.
pub(super) fn no_room(n_tokens: usize, max_new_tokens: usize) -> ModelError {
    let asked = format!("a prompt of {n_tokens} tokens with max_new_tokens {max_new_tokens}");
    ModelError::Generation(format!("{asked} needs more keys and values than this engine has room for"))
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
        begun.push((index, Prompt { cache, hidden: Hidden::Unknown, n_left }));
    }
    Ok(begun)
}

/// One token more for every answer in progress, and a first one for those that begin. Returns the last prompt that began.
fn step(
    parts: &mut Parts<'_>,
    requests: &[GenerationRequest<'_>],
    (jobs, admitted): (&[Job], Range<usize>),
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
        units.push(Unit { cache, tokens, hidden, is_held: false, takers: vec![Taker::Draw(draw)] });
    }
    let mut rest = draws.as_mut_slice();
    let next_prompt = jobs.get(admitted.end).map(|job| job.prompt);
    for (index, Prompt { cache, hidden, n_left }) in &mut begun {
        let of_prompt = jobs[admitted.clone()].iter().filter(|job| job.prompt == *index);
        let job = of_prompt.clone().next().map(|job| requests[job.request].prompt).unwrap_or_default();
        let (own, others) = rest.split_at_mut(of_prompt.count());
        rest = others;
        let (takers, is_held) = (own.iter_mut().map(Taker::Draw).collect(), next_prompt == Some(*index));
        units.push(Unit { cache, tokens: &job[job.len() - *n_left..], hidden, is_held, takers });
        *n_left = 0;
    }
    parts.policy.advance(&mut units, rules)?;
    drop(units);
    for (job, draw) in admitted.zip(draws) {
        let cache = cache_of(&begun, jobs[job].prompt)?;
        running.push(Sequence { job, cache, hidden: Hidden::Unknown, draw });
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
