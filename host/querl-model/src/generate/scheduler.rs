//! The scheduler: continuous batching. Up to a limit of responses run at once; one that finishes makes room for the next.

use super::capacity::Admission;
use super::logits_processor::LogitsProcessor;
use super::model_runner::{HiddenState, ScheduledSequence};
use super::prefix_cache::EngineCore;
use super::sampler::{LogitsConsumer, Sampler};
use super::{Decoding, FinishReason, Generated, GenerationRequest, StopSignal, TokenText};
use crate::ModelError;
use crate::kv_cache::SequenceKvCache;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ResponseJob {
    prompt: usize, // index in the sorted prompts
    request: usize,
    sample: usize,
}

/// A prompt in prefill, or a prefilled prompt with more responses to start.
struct Prompt {
    cache: SequenceKvCache,
    hidden: HiddenState,
    /// Number of tokens that are not in its KV cache yet.
    n_left: usize,
}

type Prompts = Vec<(usize, Prompt)>;

struct RunningSequence {
    job: usize,
    cache: SequenceKvCache,
    hidden: HiddenState,
    sampler: Sampler,
}

/// Generates all responses, ordered by request and sample. Continues the responses of `started` that have no finish reason. If `stop` is
/// set, it returns the unfinished responses.
pub(super) fn run(
    core: &mut EngineCore<'_>,
    (requests, started): (&[GenerationRequest<'_>], &[Vec<Generated>]),
    decoding: Decoding,
    processor: &LogitsProcessor<'_>,
    text: &dyn TokenText,
    stop: &mut StopSignal<'_>,
) -> Result<Vec<Vec<Generated>>, ModelError> {
    let mut order: BTreeMap<&[u32], usize> = requests.iter().map(|request| (request.prompt, 0)).collect();
    order.values_mut().enumerate().for_each(|(index, position)| *position = index);
    let prompts: Vec<&[u32]> = order.keys().copied().collect();
    let jobs_of = |(request, of_request): (usize, &GenerationRequest<'_>)| {
        let prompt = order[of_request.prompt];
        (0..of_request.n).map(move |sample| ResponseJob { prompt, request, sample })
    };
    // Sorted by prompt: consecutive sequences of the batch share blocks, which attention reads once.
    let mut jobs: Vec<ResponseJob> = requests.iter().enumerate().flat_map(jobs_of).collect();
    jobs.sort();
    let mut responses: Vec<Vec<Generated>> =
        requests.iter().map(|request| vec![Generated::default(); request.n]).collect();
    for (responses, started) in responses.iter_mut().zip(started) {
        responses.iter_mut().zip(started).for_each(|(response, started)| response.clone_from(started));
    }
    jobs.retain(|job| responses[job.request][job.sample].finish_reason.is_none());
    let mut kept = std::mem::take(core.stopped);
    if started.is_empty() {
        kept.clear();
    }
    let mut running: Vec<RunningSequence> = Vec::new();
    let mut admission = Admission::new(core.n_blocks, processor.settings.max_new_tokens);
    let (mut next, mut held) = (0, None);
    while next < jobs.len() || !running.is_empty() {
        if stop()? {
            for RunningSequence { job, cache, sampler, .. } in running {
                let ResponseJob { request, sample, .. } = jobs[job];
                core.stopped.insert((requests[request].seed, sample), cache);
                responses[request][sample] = sampler.generated(None);
            }
            return Ok(responses);
        }
        let admitted = admit(&mut admission, &jobs, next, core.max_sequences - running.len(), &prompts);
        if admitted.is_empty() && running.is_empty() {
            return Err(out_of_blocks(prompts[jobs[next].prompt].len(), processor.settings.max_new_tokens));
        }
        let mut new = Vec::with_capacity(admitted.len());
        for (job, &ResponseJob { request, sample, .. }) in admitted.clone().zip(&jobs[admitted.clone()]) {
            let (seed, response) = (requests[request].seed, std::mem::take(&mut responses[request][sample]));
            let sampler = Sampler::resume(seed, sample, decoding, response);
            match kept.remove(&(seed, sample)) {
                Some(cache) => running.push(RunningSequence { job, cache, hidden: HiddenState::Unknown, sampler }),
                None => new.push((job, sampler)),
            }
        }
        let started = match new.is_empty() {
            true => Prompts::new(),
            false => {
                start_prompts(core, &prompts, new.iter().map(|(job, _)| jobs[*job].prompt), held.take(), processor)?
            }
        };
        let next_prompt = jobs.get(admitted.end).map(|job| job.prompt);
        let last = step(core, (&prompts, &jobs), new, started, next_prompt, &mut running, processor)?;
        held = last.or(held).filter(|(prompt, _)| next_prompt == Some(*prompt));
        next = admitted.end;
        running.iter_mut().find_map(|sequence| sequence.sampler.failure.take()).map_or(Ok(()), Err)?;
        let reasons = finish_reasons(&running, processor, text)?;
        let mut unfinished = Vec::with_capacity(running.len());
        for (sequence, reason) in running.into_iter().zip(reasons) {
            match reason {
                None => unfinished.push(sequence),
                Some(reason) => {
                    let ResponseJob { prompt, request, sample } = jobs[sequence.job];
                    admission.finish(prompt);
                    responses[request][sample] = sequence.sampler.generated(Some(reason));
                }
            }
        }
        running = unfinished;
    }
    responses.iter().try_for_each(|responses| check_complete(responses))?;
    Ok(responses)
}

/// Detokenizing for stop strings is parallel, so that a GPU does not wait for one thread.
fn finish_reasons(
    running: &[RunningSequence],
    processor: &LogitsProcessor<'_>,
    text: &dyn TokenText,
) -> Result<Vec<Option<FinishReason>>, ModelError> {
    let responses: Vec<&[u32]> = running.iter().map(|sequence| sequence.sampler.token_ids.as_slice()).collect();
    match processor.settings.stop_strings.is_empty() {
        true => responses.iter().map(|response| finish_reason(response, processor, text)).collect(),
        false => responses.par_iter().map(|response| finish_reason(response, processor, text)).collect(),
    }
}

/// Admits the next jobs: at most `n`, in order, as long as there are blocks for them.
fn admit(admission: &mut Admission, jobs: &[ResponseJob], next: usize, n: usize, prompts: &[&[u32]]) -> Range<usize> {
    let fits = |job: &&ResponseJob| admission.admit(job.prompt, prompts[job.prompt].len());
    next..next + jobs[next..].iter().take(n).take_while(fits).count()
}

/// The error for a KV cache that is too small for a single response.
pub(super) fn out_of_blocks(n_tokens: usize, max_new_tokens: usize) -> ModelError {
    let request = format!("a prompt of {n_tokens} tokens with max_new_tokens {max_new_tokens}");
    ModelError::Generation(format!("{request} needs more keys and values than this engine has room for"))
}

/// Checks that all responses to a request are finished.
fn check_complete(responses: &[Generated]) -> Result<(), ModelError> {
    match responses.iter().position(|response| response.finish_reason.is_none()) {
        Some(sample) => {
            Err(ModelError::Generation(format!("response {sample} to a request was started and not finished")))
        }
        None => Ok(()),
    }
}

/// The prompts of new responses, each with the KV cache of its longest cached prefix. `indices`: ascending.
fn start_prompts(
    core: &mut EngineCore<'_>,
    prompts: &[&[u32]],
    indices: impl Iterator<Item = usize>,
    held: Option<(usize, Prompt)>,
    processor: &LogitsProcessor<'_>,
) -> Result<Prompts, ModelError> {
    let mut indices: Vec<usize> = indices.collect();
    indices.dedup();
    let mut started: Prompts = held.into_iter().filter(|(index, _)| indices.first() == Some(index)).collect();
    let new = &indices[started.len()..];
    let tokens: Vec<&[u32]> = new.iter().map(|&index| prompts[index]).collect();
    for (&index, cache) in new.iter().zip(core.prompt_caches(&tokens, processor)?) {
        let n_left = prompts[index].len() - cache.len();
        started.push((index, Prompt { cache, hidden: HiddenState::Unknown, n_left }));
    }
    Ok(started)
}

/// A decode step of the running responses together with the prefill of new prompts. The prefill ends with the first token of each new
/// response; a resumed response gets its next token in the next step. Returns the last of the prompts.
fn step(
    core: &mut EngineCore<'_>,
    (prompts, jobs): (&[&[u32]], &[ResponseJob]),
    mut new: Vec<(usize, Sampler)>,
    mut started: Prompts,
    next_prompt: Option<usize>,
    running: &mut Vec<RunningSequence>,
    processor: &LogitsProcessor<'_>,
) -> Result<Option<(usize, Prompt)>, ModelError> {
    let uncached = |RunningSequence { job, cache, sampler, .. }: &RunningSequence| {
        sampler.token_ids[cache.len() - prompts[jobs[*job].prompt].len()..].to_vec()
    };
    let tokens: Vec<Vec<u32>> = running.iter().map(uncached).collect();
    let mut sequences: Vec<ScheduledSequence<'_>> = Vec::with_capacity(running.len() + started.len());
    for (RunningSequence { cache, hidden, sampler, .. }, tokens) in running.iter_mut().zip(&tokens) {
        let consumers = vec![LogitsConsumer::Sampler(sampler)];
        let adapter = core.adapter.clone();
        sequences.push(ScheduledSequence {
            adapter,
            sampling: None,
            cache,
            tokens,
            hidden,
            keeps_hidden: false,
            consumers,
        });
    }
    let mut consumers: BTreeMap<usize, Vec<LogitsConsumer<'_>>> = BTreeMap::new();
    for (job, sampler) in new.iter_mut().filter(|(_, sampler)| sampler.token_ids.is_empty()) {
        consumers.entry(jobs[*job].prompt).or_default().push(LogitsConsumer::Sampler(sampler));
    }
    for (index, Prompt { cache, hidden, n_left }) in &mut started {
        let consumers = consumers.remove(index).unwrap_or_default();
        sequences.push(ScheduledSequence {
            adapter: core.adapter.clone(),
            sampling: None,
            cache,
            tokens: &prompts[*index][prompts[*index].len() - *n_left..],
            hidden,
            keeps_hidden: next_prompt == Some(*index),
            consumers,
        });
        *n_left = 0;
    }
    core.policy.forward(&mut sequences, processor)?;
    drop(sequences);
    for (job, sampler) in new {
        let cache = prompt_cache(&started, jobs[job].prompt)?;
        running.push(RunningSequence { job, cache, hidden: HiddenState::Unknown, sampler });
    }
    Ok(started.pop())
}

/// The KV cache of a prompt, which is started with the first of its jobs.
fn prompt_cache(started: &Prompts, prompt: usize) -> Result<SequenceKvCache, ModelError> {
    let lost = || ModelError::Generation(format!("a response to prompt {prompt} starts before its prompt"));
    let found = started.iter().find(|(index, _)| *index == prompt);
    found.map(|(_, prompt)| prompt.cache.clone()).ok_or_else(lost)
}

/// The finish reason (stop token, stop string, length), or `None` while the response continues.
pub(super) fn finish_reason(
    response: &[u32],
    processor: &LogitsProcessor<'_>,
    text: &dyn TokenText,
) -> Result<Option<FinishReason>, ModelError> {
    if response.last().is_some_and(|id| processor.stop_ids.contains(id)) {
        return Ok(Some(FinishReason::StopToken));
    }
    let settings = processor.settings;
    if !settings.stop_strings.is_empty() && response.len() >= settings.min_new_tokens {
        let text = text.text(response)?;
        if let Some(index) = settings.stop_strings.iter().position(|stop| text.contains(stop.as_str())) {
            return Ok(Some(FinishReason::StopString { index }));
        }
    }
    Ok((response.len() >= settings.max_new_tokens).then_some(FinishReason::Length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_responses_and_prompts_are_errors() {
        let finished = Generated { finish_reason: Some(FinishReason::Length), ..Generated::default() };
        check_complete(&[finished.clone(), finished.clone()]).unwrap();
        let error = check_complete(&[finished, Generated::default()]).unwrap_err();
        assert!(error.to_string().contains("response 1 to a request was started and not finished"), "{error}");
        let error = prompt_cache(&Vec::new(), 3).err().unwrap();
        assert!(error.to_string().contains("a response to prompt 3 starts before"), "{error}");
    }
}
