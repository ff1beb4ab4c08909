//! Generation overlapped with scoring: a batch is cut into parts (`rl.pipeline_parts`), and while one is scored the next is
//! generated.
//!
//! An environment mostly waits for services, and generation mostly computes. Results do not depend on the number of parts: a
//! response follows from policy, prompt and seed alone, and the environment receives responses in order.

use super::generator::Generator;
use super::rollout::{PartialBatch, Query, ScoredResponse, Timings};
use super::{RlData, RlTask, sampling};
use crate::TrainError;
use crate::checkpoint::SaveTimer;
use querl_core::ports::{Environment, PluginActivity, PolicyResponse};
use querl_model::{
    ComputeDevice, Decoding, Generated, GenerationRequest, LoraAdapter, Mesh, Ranks, SPLIT_MIX_STEP, SamplingSettings,
    split_mix,
};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// A request to generate and score the responses of a batch: policy, sampling settings and stop conditions.
pub(super) struct RolloutRequest<'a> {
    pub(super) data: &'a RlData<'a>,
    pub(super) policy: &'a LoraAdapter,
    pub(super) decoding: Decoding,
    pub(super) n_samples: usize,
    /// The ranks: each generates the responses to some of the queries, and only the first calls the environment.
    pub(super) mesh: &'a Mesh,
    /// Stop flag in addition to the task's; either of them stops generation before the next decode step.
    pub(super) cancel: &'a AtomicBool,
    /// Timer that interrupts generation to write a checkpoint; `None` if no checkpoint can be written.
    pub(super) timer: Option<&'a SaveTimer>,
}

/// Generates and scores the missing responses of `partial` until all are complete or generation is stopped. After a stop `partial` also has
/// the unfinished responses, which the next call resumes. On a GPU, where the batch size affects the last bits of results, and with a
/// rollout server, the next call restarts the interrupted part.
pub(super) fn complete(
    task: &RlTask<'_>,
    generator: &mut Generator<'_>,
    rollout: &RolloutRequest<'_>,
    partial: &mut PartialBatch,
) -> Result<(), TrainError> {
    let started = Instant::now();
    let sampling = sampling(task.config);
    let is_stopped = || task.stop.load(Ordering::Relaxed) || rollout.cancel.load(Ordering::Relaxed);
    generator.set_policy(task, rollout.mesh, rollout.policy, partial.version, &is_stopped)?;
    let (mesh, mut generate_s) = (rollout.mesh, 0.0);
    let n_done = partial.responses.len() / rollout.n_samples;
    let part_size = partial.queries.len().div_ceil(task.config.pipeline_parts.max(1)).max(1);
    let mut parts = partial.queries[n_done..].chunks(part_size);
    let step = partial.step;
    let mut generated = std::mem::take(&mut partial.generated);
    let can_resume = matches!(task.decoder.compute_device(), ComputeDevice::Cpu);
    let is_due = || rollout.timer.is_some_and(SaveTimer::has_elapsed);
    let mut generate = || {
        if mesh.all.any(is_stopped() || is_due())? {
            return Ok(None);
        }
        let Some(queries) = parts.next() else { return Ok(None) };
        let begun = Instant::now();
        let mut started: Vec<Vec<Generated>> = generated.drain(..queries.len().min(generated.len())).collect();
        let requests =
            |queries: &[Query]| queries.iter().map(|query| request(task, rollout, step, query)).collect::<Vec<_>>();
        let decoding = rollout.decoding;
        let responses: Vec<Vec<Generated>> = match &mut *generator {
            Generator::Local(engine) => {
                started.resize(queries.len(), Vec::new());
                let (mine, started) = (of_rank(queries, &mesh.data), of_rank(&started, &mesh.data));
                let mut stop = || Ok(mesh.tensor.any(is_stopped() || can_resume && is_due())?);
                let text = task.tokenizer;
                let responses =
                    engine.generate_until(&requests(mine), started, decoding, &sampling, text, &mut stop)?;
                mesh.data.all_gather(responses)?.iter().flat_map(|of_rank| of_rank.iter().cloned()).collect()
            }
            Generator::Server(server) => {
                match server.generate(task, mesh, &requests(queries), (decoding, &sampling), &is_stopped)? {
                    Some(responses) => responses,
                    None => return Ok(None),
                }
            }
        };
        generate_s += begun.elapsed().as_secs_f64();
        if responses.iter().flatten().all(|response| response.finish_reason.is_some()) {
            return Ok(Some((queries, responses.into_iter().flatten().collect::<Vec<Generated>>())));
        }
        if can_resume {
            generated.splice(..0, responses);
        }
        Ok(None)
    };
    let score = |(queries, generated): (&[Query], Vec<Generated>)| {
        let responses = policy_responses(task, &sampling, queries, rollout.n_samples, &generated)?;
        score(rollout.data.environment, step, &responses, generated)
    };
    let scored = match mesh.all.is_first() {
        true => Some(overlap(generate, score)?),
        false => {
            while generate()?.is_some() {}
            None
        }
    };
    let scored = mesh.all.broadcast(0, scored)?;
    partial.generated = generated;
    partial.timings.generate_s += generate_s;
    partial.timings.rollout_s += started.elapsed().as_secs_f64();
    for ScoredPart { responses, timings, plugins } in scored.iter() {
        partial.responses.extend(responses.iter().cloned());
        partial.timings.add(timings);
        for (plugin, activity) in plugins {
            *partial.plugins.entry(plugin.clone()).or_default() += activity.clone();
        }
    }
    Ok(())
}

/// The queries of a part that a rank generates: consecutive, in the order of the ranks.
fn of_rank<'a, T>(part: &'a [T], ranks: &Ranks) -> &'a [T] {
    let start = |rank: usize| part.len() * rank / ranks.world_size();
    &part[start(ranks.rank())..start(ranks.rank() + 1)]
}

fn request<'a>(task: &RlTask<'_>, rollout: &RolloutRequest<'a>, step: u64, query: &Query) -> GenerationRequest<'a> {
    let seed = seed_of(&[task.seed, step, query.row as u64, query.first_sample as u64]);
    GenerationRequest { prompt: &rollout.data.prompts[query.row], seed, n: rollout.n_samples }
}

/// Converts responses for the environment.
fn policy_responses(
    task: &RlTask<'_>,
    sampling: &SamplingSettings,
    queries: &[Query],
    n_samples: usize,
    generated: &[Generated],
) -> Result<Vec<PolicyResponse>, TrainError> {
    let targets = queries.iter().flat_map(|query| (0..n_samples).map(|n| (query.row, query.first_sample + n)));
    let response = |((row_index, sample_index), generated): ((usize, usize), &Generated)| {
        let text = task.tokenizer.decode(&generated.token_ids)?;
        Ok(PolicyResponse {
            row_index,
            sample_index,
            text: sampling.before_stop(&text).to_owned(),
            n_tokens: generated.token_ids.len() as u32,
            truncated: generated.truncated,
        })
    };
    targets.zip(generated).map(response).collect()
}

#[derive(Serialize, Deserialize)]
struct ScoredPart {
    responses: Vec<ScoredResponse>,
    timings: Timings,
    plugins: BTreeMap<String, PluginActivity>,
}

fn score(
    environment: &dyn Environment,
    step: u64,
    responses: &[PolicyResponse],
    generated: Vec<Generated>,
) -> Result<ScoredPart, TrainError> {
    let started = Instant::now();
    let scored = environment.score(step, responses)?;
    if scored.records.len() != generated.len() {
        let message = format!("rl step {step}: the environment returned {} records", scored.records.len());
        return Err(TrainError::Data(format!("{message}; expected one for each of {} responses", generated.len())));
    }
    let score_s = started.elapsed().as_secs_f64();
    let timings = Timings { score_s, calls: scored.timings, ..Timings::default() };
    let pairs = generated.into_iter().zip(scored.records);
    let responses = pairs.map(|(generated, record)| ScoredResponse::new(generated, record)).collect();
    Ok(ScoredPart { responses, timings, plugins: scored.plugins })
}

/// Combines several numbers to one seed, by SplitMix64.
fn seed_of(parts: &[u64]) -> u64 {
    parts.iter().fold(SPLIT_MIX_STEP, |state, part| split_mix((state ^ part).wrapping_add(SPLIT_MIX_STEP)))
}

/// Calls `produce` on this thread until it returns `None`; another thread calls `consume` on each item, in order, while the next
/// is produced.
fn overlap<P: Send, D: Send>(
    mut produce: impl FnMut() -> Result<Option<P>, TrainError>,
    consume: impl FnMut(P) -> Result<D, TrainError> + Send,
) -> Result<Vec<D>, TrainError> {
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        // At the first error of `consume` the receiver is dropped, and the next `send` fails.
        let consumer = scope.spawn(move || receiver.into_iter().map(consume).collect::<Result<Vec<D>, TrainError>>());
        let mut produce_all = || {
            while let Some(item) = produce()? {
                if sender.send(item).is_err() {
                    break;
                }
            }
            Ok(())
        };
        let produced = produce_all();
        drop(sender);
        let consumed = join(consumer, "scoring")?;
        produced.and(Ok(consumed))
    })
}

/// Joins a thread; its panic becomes an error.
pub(super) fn join<T>(
    thread: thread::ScopedJoinHandle<'_, Result<T, TrainError>>,
    what: &str,
) -> Result<T, TrainError> {
    thread
        .join()
        .unwrap_or_else(|panic| Err(TrainError::Thread { what: what.to_owned(), message: panic_text(&*panic) }))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn counting(n_parts: usize) -> impl FnMut() -> Result<Option<usize>, TrainError> {
        let mut next = 0..n_parts;
        move || Ok(next.next())
    }

    fn failure(text: &str) -> TrainError {
        TrainError::Data(text.into())
    }

    #[test]
    fn items_come_back_in_order() {
        assert_eq!(overlap(counting(5), |part| Ok(part * 10)).unwrap(), [0, 10, 20, 30, 40]);
        assert_eq!(overlap(counting(0), Ok).unwrap(), [0usize; 0]);
    }

    #[test]
    fn an_item_is_consumed_while_the_next_is_produced() {
        let (started, wait_started) = mpsc::channel();
        let (produced, wait_produced) = mpsc::channel();
        let mut next = 0..2;
        let make = move || {
            let part = next.next();
            // The second item is produced only after the first one is being consumed: sequential execution would time out.
            if part == Some(1) {
                wait_started
                    .recv_timeout(Duration::from_secs(60))
                    .map_err(|_| failure("the first item was not consumed"))?;
                produced.send(()).unwrap();
            }
            Ok(part)
        };
        let finish = move |part| {
            if part == 0 {
                started.send(()).unwrap();
                wait_produced
                    .recv_timeout(Duration::from_secs(60))
                    .map_err(|_| failure("the second item was not produced"))?;
            }
            Ok(part)
        };
        assert_eq!(overlap(make, finish).unwrap(), [0, 1]);
    }

    #[test]
    fn an_error_of_the_consumer_ends_production_and_is_returned() {
        let mut n_made = 0;
        let make = || {
            n_made += 1;
            thread::sleep(Duration::from_millis(5));
            Ok(Some(n_made))
        };
        let error = overlap(make, |part| if part < 3 { Ok(part) } else { Err(failure("down")) }).unwrap_err();
        assert_eq!(error.to_string(), "down");
    }

    #[test]
    fn a_panic_of_the_consumer_is_an_error_and_no_hang() {
        let make = || {
            thread::sleep(Duration::from_millis(5));
            Ok(Some(()))
        };
        let error = overlap::<(), ()>(make, |()| panic!("index 7")).unwrap_err().to_string();
        assert!(error.contains("scoring") && error.contains("index 7"), "{error}");
    }

    #[test]
    fn an_error_of_the_producer_is_returned() {
        let mut next = 0;
        let make = || {
            next += 1;
            if next < 3 { Ok(Some(next)) } else { Err(failure("no logits")) }
        };
        assert_eq!(overlap(make, Ok).unwrap_err().to_string(), "no logits");
    }
}
