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
    prompt: usize, // index of the sorted prompts
    request: usize,
    sample: usize,
}

/// A prompt in prefill, or prefilled with further responses to come.
struct Prompt {
    cache: SequenceKvCache,
    hidden: HiddenState,
    /// Tokens that its cache does not hold yet.
    n_left: usize,
}

type Prompts = Vec<(usize, Prompt)>;

struct RunningSequence {
    job: usize,
    cache: SequenceKvCache,
    hidden: HiddenState,
    sampler: Sampler,
}

/// Generates all responses: by request, then by sample; `None` where `stop` ended it.
pub(super) fn run(
    core: &mut EngineCore<'_>,
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    processor: &LogitsProcessor<'_>,
    text: &dyn TokenText,
    stop: &mut StopSignal<'_>,
) -> Result<Option<Vec<Vec<Generated>>>, ModelError> {
    let mut order: BTreeMap<&[u32], usize> = requests.iter().map(|request| (request.prompt, 0)).collect();
    order.values_mut().enumerate().for_each(|(index, position)| *position = index);
    let prompts: Vec<&[u32]> = order.keys().copied().collect();
    let jobs_of = |(request, of_request): (usize, &GenerationRequest<'_>)| {
        let prompt = order[of_request.prompt];
        (0..of_request.n).map(move |sample| ResponseJob { prompt, request, sample })
    };
    // Sorted by prompt: neighbours in the batch share blocks, which attention reads once.
    let mut jobs: Vec<ResponseJob> = requests.iter().enumerate().flat_map(jobs_of).collect();
    jobs.sort();
    let mut done: Vec<Vec<Option<Generated>>> = requests.iter().map(|request| vec![None; request.n]).collect();
    let mut running: Vec<RunningSequence> = Vec::new();
    let mut admission = Admission::new(core.n_blocks, processor.settings.max_new_tokens);
    let (mut next, mut held) = (0, None);
    while next < jobs.len() || !running.is_empty() {
        if stop()? {
            return Ok(None);
        }
        let admitted = admit(&mut admission, &jobs, next, core.max_sequences - running.len(), &prompts);
        if admitted.is_empty() && running.is_empty() {
            return Err(out_of_blocks(prompts[jobs[next].prompt].len(), processor.settings.max_new_tokens));
        }
        let started = match admitted.is_empty() {
            true => Prompts::new(),
            false => start_prompts(core, &prompts, &jobs[admitted.clone()], held.take(), processor)?,
        };
        let last = step(core, requests, (&jobs, admitted.clone()), started, &mut running, decoding, processor)?;
        let has_more_jobs = |prompt| jobs.get(admitted.end).is_some_and(|job| job.prompt == prompt);
        held = last.or(held).filter(|(prompt, _)| has_more_jobs(*prompt));
        next = admitted.end;
        let reasons = finish_reasons(&running, processor, text)?;
        let mut unfinished = Vec::with_capacity(running.len());
        for (sequence, reason) in running.into_iter().zip(reasons) {
            match reason {
                None => unfinished.push(sequence),
                Some(reason) => {
                    let ResponseJob { prompt, request, sample } = jobs[sequence.job];
                    admission.finish(prompt);
                    done[request][sample] = Some(sequence.sampler.generated(reason));
                }
            }
        }
        running = unfinished;
    }
    done.into_iter().map(complete).collect::<Result<_, _>>().map(Some)
}

/// Detokenizing for stop strings runs on all threads: a GPU would wait for one.
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

/// The jobs that start now: at most `n`, in order, as long as there are blocks for them.
fn admit(admission: &mut Admission, jobs: &[ResponseJob], next: usize, n: usize, prompts: &[&[u32]]) -> Range<usize> {
    let fits = |job: &&ResponseJob| admission.admit(job.prompt, prompts[job.prompt].len());
    next..next + jobs[next..].iter().take(n).take_while(fits).count()
}

/// The KV cache is too small for a single response.
pub(super) fn out_of_blocks(n_tokens: usize, max_new_tokens: usize) -> ModelError {
    let request = format!("a prompt of {n_tokens} tokens with max_new_tokens {max_new_tokens}");
    ModelError::Generation(format!("{request} needs more keys and values than this engine has room for"))
}

/// The responses to one request; a missing one is an error.
fn complete(responses: Vec<Option<Generated>>) -> Result<Vec<Generated>, ModelError> {
    let lost = |sample| ModelError::Generation(format!("response {sample} to a request was started and not finished"));
    responses.into_iter().enumerate().map(|(sample, response)| response.ok_or_else(|| lost(sample))).collect()
}

/// The prompts of the admitted jobs, each with the KV cache of its longest cached prefix.
fn start_prompts(
    core: &mut EngineCore<'_>,
    prompts: &[&[u32]],
    jobs: &[ResponseJob],
    held: Option<(usize, Prompt)>,
    processor: &LogitsProcessor<'_>,
) -> Result<Prompts, ModelError> {
    let mut indices: Vec<usize> = jobs.iter().map(|job| job.prompt).collect();
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

/// A decode step of the running responses together with the prefill of new prompts, which ends with the first token of each new
/// response. Returns the last of the prompts.
fn step(
    core: &mut EngineCore<'_>,
    requests: &[GenerationRequest<'_>],
    (jobs, admitted): (&[ResponseJob], Range<usize>),
    mut started: Prompts,
    running: &mut Vec<RunningSequence>,
    decoding: Decoding,
    processor: &LogitsProcessor<'_>,
) -> Result<Option<(usize, Prompt)>, ModelError> {
    let mut samplers: Vec<Sampler> = jobs[admitted.clone()]
        .iter()
        .map(|job| Sampler::new(requests[job.request].seed, job.sample, decoding))
        .collect();
    let last_tokens: Vec<[u32; 1]> =
        running.iter().map(|sequence| [sequence.sampler.token_ids.last().copied().unwrap_or_default()]).collect();
    let mut sequences: Vec<ScheduledSequence<'_>> = Vec::with_capacity(running.len() + started.len());
    for (RunningSequence { cache, hidden, sampler, .. }, tokens) in running.iter_mut().zip(&last_tokens) {
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
    let mut rest = samplers.as_mut_slice();
    let next_prompt = jobs.get(admitted.end).map(|job| job.prompt);
    for (index, Prompt { cache, hidden, n_left }) in &mut started {
        let of_prompt = jobs[admitted.clone()].iter().filter(|job| job.prompt == *index);
        let tokens = of_prompt.clone().next().map(|job| requests[job.request].prompt).unwrap_or_default();
        let (own, others) = rest.split_at_mut(of_prompt.count());
        rest = others;
        let consumers = own.iter_mut().map(LogitsConsumer::Sampler).collect();
        let tokens = &tokens[tokens.len() - *n_left..];
        sequences.push(ScheduledSequence {
            adapter: core.adapter.clone(),
            sampling: None,
            cache,
            tokens,
            hidden,
            keeps_hidden: next_prompt == Some(*index),
            consumers,
        });
        *n_left = 0;
    }
    core.policy.forward(&mut sequences, processor)?;
    drop(sequences);
    for (job, sampler) in admitted.zip(samplers) {
        let cache = prompt_cache(&started, jobs[job].prompt)?;
        running.push(RunningSequence { job, cache, hidden: HiddenState::Unknown, sampler });
    }
    Ok(started.pop())
}

/// The KV cache of a prompt, which starts with the first of its jobs.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lost_responses_and_prompts_are_errors() {
        let response = || Sampler::new(1, 0, Decoding::Greedy).generated(FinishReason::Length);
        assert_eq!(complete(vec![Some(response()), Some(response())]).unwrap().len(), 2);
        let error = complete(vec![Some(response()), None]).unwrap_err();
        assert!(error.to_string().contains("response 1 to a request was started and not finished"), "{error}");
        let error = prompt_cache(&Vec::new(), 3).err().unwrap();
        assert!(error.to_string().contains("a response to prompt 3 starts before"), "{error}");
    }
}
