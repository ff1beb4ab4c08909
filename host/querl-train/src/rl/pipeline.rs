//! Generation and scoring at once: a batch is cut into parts, and while one is scored the next is generated.
//!
//! The calls of an environment mostly wait for others, and generation mostly computes. What comes does not depend on the cut:
//! an answer follows from policy, prompt and seed alone, and the environment is told of the answers in their order.

use super::rollout::{Answer, Partial, Query, Timings};
use super::{RlTask, sampling};
use crate::TrainError;
use querl_core::ports::{Environment, PolicyResponse};
use querl_model::{
    Decoding, Engine, Generated, GenerationRequest, LoraAdapter, Mesh, Ranks, SPLIT_MIX_STEP, SamplingSettings,
    split_mix,
};
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// Who answers what, and how.
pub(super) struct Asking<'a> {
    /// Prompts by row, with the environment that scores answers to them.
    pub(super) data: &'a super::RlData<'a>,
    /// Who answers.
    pub(super) policy: &'a LoraAdapter,
    pub(super) decoding: Decoding,
    pub(super) n_samples: usize,
    /// Who else answers: each rank some of the queries. The first alone asks the environment.
    pub(super) mesh: &'a Mesh,
    /// Set to stop before the next part; the task's own flag is looked at too.
    pub(super) cancel: &'a AtomicBool,
}

/// Answers and scores what is missing of `partial`, as far as nobody says stop.
///
/// # Errors
/// The model cannot generate, or the environment cannot score.
pub(super) fn advance(
    task: &RlTask<'_>,
    engine: &mut Engine<'_>,
    asking: &Asking<'_>,
    partial: &mut Partial,
) -> Result<(), TrainError> {
    let started = Instant::now();
    let sampling = sampling(task.config);
    engine.set_policy(Some(asking.policy), partial.version)?;
    let (mesh, mut generate_s) = (asking.mesh, 0.0);
    let n_answered = partial.answers.len() / asking.n_samples;
    let part_size = partial.queries.len().div_ceil(task.config.pipeline_parts.max(1)).max(1);
    let mut parts = partial.queries[n_answered..].chunks(part_size);
    let step = partial.step;
    let mut make = || {
        if mesh.all.any(task.stop.load(Ordering::Relaxed) || asking.cancel.load(Ordering::Relaxed))? {
            return Ok(None);
        }
        let Some(queries) = parts.next() else { return Ok(None) };
        let started = Instant::now();
        let mine = part_of(queries, &mesh.data);
        let requests: Vec<GenerationRequest<'_>> =
            mine.iter().map(|query| request(task, asking, step, query)).collect();
        let answers = engine.generate(&requests, asking.decoding, &sampling, task.tokenizer)?;
        let answers = mesh.data.all_gather(answers.into_iter().flatten().collect::<Vec<Generated>>())?;
        generate_s += started.elapsed().as_secs_f64();
        Ok(Some((queries, answers.iter().flat_map(|of_rank| of_rank.iter().cloned()).collect::<Vec<Generated>>())))
    };
    let score = |(queries, answers): (&[Query], Vec<Generated>)| {
        let responses = responses(task, &sampling, queries, asking.n_samples, &answers)?;
        score(asking.data.environment, step, &responses, answers)
    };
    let scored = match mesh.all.is_first() {
        true => Some(overlap(make, score)?),
        false => {
            while make()?.is_some() {}
            None
        }
    };
    let scored = mesh.all.broadcast(0, scored)?;
    partial.timings.generate_s += generate_s;
    partial.timings.rollout_s += started.elapsed().as_secs_f64();
    for (answers, timings) in scored.iter() {
        partial.answers.extend(answers.iter().cloned());
        partial.timings.add(timings);
    }
    Ok(())
}

/// The queries that a rank answers: the parts stand in the order of the ranks.
fn part_of<'a>(queries: &'a [Query], ranks: &Ranks) -> &'a [Query] {
    let start = |rank: usize| queries.len() * rank / ranks.world_size();
    &queries[start(ranks.rank())..start(ranks.rank() + 1)]
}

fn request<'a>(task: &RlTask<'_>, asking: &Asking<'a>, step: u64, query: &Query) -> GenerationRequest<'a> {
    let seed = seed_of(&[task.seed, step, query.row as u64, query.first_sample as u64]);
    GenerationRequest { prompt: &asking.data.prompts[query.row], seed, n: asking.n_samples }
}

/// What the environment is told of the answers.
fn responses(
    task: &RlTask<'_>,
    sampling: &SamplingSettings,
    queries: &[Query],
    n_samples: usize,
    answers: &[Generated],
) -> Result<Vec<PolicyResponse>, TrainError> {
    let targets = queries.iter().flat_map(|query| (0..n_samples).map(|n| (query.row, query.first_sample + n)));
    let response = |((row_index, sample_index), answer): ((usize, usize), &Generated)| {
        let text = task.tokenizer.decode(&answer.token_ids)?;
        Ok(PolicyResponse {
            row_index,
            sample_index,
            text: sampling.before_stop(&text).to_owned(),
            n_tokens: answer.token_ids.len() as u32,
            truncated: answer.truncated,
        })
    };
    targets.zip(answers).map(response).collect()
}

fn score(
    environment: &dyn Environment,
    step: u64,
    responses: &[PolicyResponse],
    answers: Vec<Generated>,
) -> Result<(Vec<Answer>, Timings), TrainError> {
    let started = Instant::now();
    let scored = environment.score(step, responses)?;
    if scored.records.len() != answers.len() {
        let message = format!("rl step {step}: the environment gave {} records", scored.records.len());
        return Err(TrainError::Data(format!("{message}; expected one for each of {} responses", answers.len())));
    }
    let score_s = started.elapsed().as_secs_f64();
    let timings = Timings { score_s, calls: scored.timings, ..Timings::default() };
    let answers = answers.into_iter().zip(scored.records).map(|(answer, record)| Answer::new(answer, record));
    Ok((answers.collect(), timings))
}

/// One seed out of several numbers: SplitMix, to which each is added in turn.
fn seed_of(parts: &[u64]) -> u64 {
    parts.iter().fold(SPLIT_MIX_STEP, |state, part| split_mix((state ^ part).wrapping_add(SPLIT_MIX_STEP)))
}

/// Makes parts on this thread until there is none, and finishes each on another thread, in order, while the next is made.
///
/// # Errors
/// The first thing that went wrong. Where finishing fails or panics, no further part is made.
fn overlap<P: Send, D: Send>(
    mut make: impl FnMut() -> Result<Option<P>, TrainError>,
    finish: impl FnMut(P) -> Result<D, TrainError> + Send,
) -> Result<Vec<D>, TrainError> {
    thread::scope(|scope| {
        let (parts, made) = mpsc::channel();
        // At the first error the receiving end is dropped, which the maker notices with its next part.
        let finisher = scope.spawn(move || made.into_iter().map(finish).collect::<Result<Vec<D>, TrainError>>());
        let mut make_all = || {
            while let Some(part) = make()? {
                if parts.send(part).is_err() {
                    break;
                }
            }
            Ok(())
        };
        let made = make_all();
        drop(parts);
        let finished = join(finisher, "scoring")?;
        made.and(Ok(finished))
    })
}

/// What a thread came to; its panic is an error.
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
#[allow(clippy::unwrap_used)]
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
    fn parts_come_back_in_order() {
        assert_eq!(overlap(counting(5), |part| Ok(part * 10)).unwrap(), [0, 10, 20, 30, 40]);
        assert_eq!(overlap(counting(0), Ok).unwrap(), [0usize; 0]);
    }

    #[test]
    fn a_part_is_finished_while_the_next_is_made() {
        let (asked, answered) = mpsc::channel();
        let (answer, waited) = mpsc::channel();
        let mut next = 0..2;
        let make = move || {
            let part = next.next();
            // The second part is only made once the first is being finished: one after the other this would never end.
            if part == Some(1) {
                answered
                    .recv_timeout(Duration::from_secs(60))
                    .map_err(|_| failure("nobody finishes the first part"))?;
                answer.send(()).unwrap();
            }
            Ok(part)
        };
        let finish = move |part| {
            if part == 0 {
                asked.send(()).unwrap();
                waited.recv_timeout(Duration::from_secs(60)).map_err(|_| failure("nobody makes the second part"))?;
            }
            Ok(part)
        };
        assert_eq!(overlap(make, finish).unwrap(), [0, 1]);
    }

    #[test]
    fn a_failure_of_the_finisher_ends_the_making_and_is_the_error() {
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
    fn a_panic_of_the_finisher_is_an_error_and_no_hang() {
        let make = || {
            thread::sleep(Duration::from_millis(5));
            Ok(Some(()))
        };
        let error = overlap::<(), ()>(make, |()| panic!("index 7")).unwrap_err().to_string();
        assert!(error.contains("scoring") && error.contains("index 7"), "{error}");
    }

    #[test]
    fn a_failure_of_the_maker_is_the_error() {
        let mut next = 0;
        let make = || {
            next += 1;
            if next < 3 { Ok(Some(next)) } else { Err(failure("no logits")) }
        };
        assert_eq!(overlap(make, Ok).unwrap_err().to_string(), "no logits");
    }
}
