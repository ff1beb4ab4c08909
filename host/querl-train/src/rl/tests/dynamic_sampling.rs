//! Dynamic sampling: queries whose samples all have the same score are replaced before the updates. Runs that were stopped or killed give
//! the same bytes as an uninterrupted one.

use super::support::{Fault, FaultyEnvironment, Model, Run, config as common, rejection, reward};
use super::{Fixture, record};
use crate::TrainError;
use crate::batching::DataOrder;
use crate::rl::rollout::{PartialBatch, Query, ScoredResponse, queries};
use crate::rl::{RlData, RlTask};
use querl_core::config::{RlAlgorithm, RlConfig};
use querl_core::ports::PolicyResponse;
use querl_core::records::{EpisodeRecord, Rejection, Reward};
use querl_model::{FinishReason, Generated};
use std::collections::BTreeSet;
use std::time::Duration;

/// A score of 0 or 1: about half of the pairs have equal scores.
fn parity(response: &PolicyResponse) -> f64 {
    (response.text.bytes().map(u32::from).sum::<u32>() % 2).into()
}

fn config() -> RlConfig {
    RlConfig {
        algorithm: RlAlgorithm::Grpo,
        n_samples: 2,
        batch_size: 6,
        mini_batch_size: 4,
        max_steps: 3,
        kl_coef: 0.0,
        dynamic_sampling: true,
        max_resampled_batches: 2,
        ..common()
    }
}

fn environment(fault: Fault) -> FaultyEnvironment {
    FaultyEnvironment::new(fault, Duration::ZERO).with_score(parity)
}

fn complete(world_size: usize, model: &Model, config: &RlConfig) -> Run {
    let mut run = Run::new(environment(Fault::None));
    run.start(world_size, model, config).unwrap();
    run
}

#[test]
fn queries_without_variance_are_replaced_and_counted() {
    let (model, config) = (Model::new(), config());
    let run = complete(1, &model, &config);
    let plain = complete(1, &model, &RlConfig { dynamic_sampling: false, ..config.clone() });
    let share = |run: &Run| run.recorder.column("frac_reward_zero_std").iter().sum::<f64>();
    assert!(share(&plain) > 0.0 && share(&run) < share(&plain), "{} {}", share(&run), share(&plain));
    assert!(plain.recorder.column("train/num_gen_batches").is_empty());
    let mut n_rounds = 0.0;
    for step in 1..=config.max_steps as u64 {
        let episodes: Vec<String> =
            run.episodes().into_iter().filter(|line| line.contains(&format!("\"step-{step}/"))).collect();
        let ids: BTreeSet<String> =
            episodes.iter().map(|line| serde_json::from_str::<EpisodeRecord>(line).unwrap().episode.id).collect();
        assert_eq!(ids.len(), episodes.len(), "a replaced query has further samples");
        let (n_batches, evicted) =
            (run.recorder.get(step, "train/num_gen_batches"), run.recorder.get(step, "filter_groups/evicted_ratio"));
        let n_queries = episodes.len() as f64 / 2.0;
        assert!((n_queries * (1.0 - evicted) - 6.0).abs() < 1e-9, "step {step}: {n_queries} queries, {evicted}");
        assert!((1.0..=3.0).contains(&n_batches) && (n_batches > 1.0) == (evicted > 0.0), "{n_batches} {evicted}");
        // Queries without variance may remain only after the last round.
        assert!(n_batches == 3.0 || run.recorder.get(step, "frac_reward_zero_std") == 0.0, "step {step}");
        n_rounds += n_batches - 1.0;
    }
    assert!(n_rounds > 0.0);
    assert_eq!(run.summary.as_ref().unwrap().n_episodes, run.episodes().len() as u64 - 3 * 8);
}

#[test]
fn the_number_of_parts_and_the_number_of_ranks_change_no_replacement() {
    let model = Model::new();
    let one = complete(1, &model, &RlConfig { pipeline_parts: 1, ..config() });
    complete(1, &model, &RlConfig { pipeline_parts: 3, ..config() }).assert_same(&one, "three parts");
    let ids = |run: &Run| -> Vec<String> {
        let first = run.episodes().into_iter().filter(|line| line.contains("\"step-1/"));
        first.map(|line| serde_json::from_str::<EpisodeRecord>(&line).unwrap().episode.id).collect()
    };
    assert_eq!(ids(&complete(2, &model, &config())), ids(&one));
}

#[test]
fn a_run_interrupted_at_any_call_leaves_what_an_uninterrupted_one_leaves() {
    let model = Model::new();
    type At = fn(usize) -> Fault;
    let faults: [(bool, At); 3] = [(false, Fault::Kill), (true, Fault::Kill), (true, Fault::Stop)];
    for (off_by_one, fault) in faults {
        let config = RlConfig { off_by_one, ..config() };
        let expected = complete(1, &model, &config);
        for call in (1..).step_by(2) {
            let mut run = Run::new(environment(fault(call)));
            match run.start(1, &model, &config) {
                Ok(()) => {
                    assert!(call > 8, "{call} calls are a whole run");
                    break;
                }
                Err(TrainError::Interrupted { stage: "rl", .. }) => {}
                Err(error) => assert!(error.to_string().contains("killed"), "{error}"),
            }
            run.remove_fault();
            run.start(1, &model, &config).unwrap();
            run.assert_same(&expected, &format!("off by one {off_by_one}, {:?}", fault(call)));
        }
    }
}

fn response(outcome: Result<Reward, Rejection>) -> ScoredResponse {
    let generated = Generated {
        token_ids: vec![5],
        logprobs: vec![-1.0],
        behaviour_logprobs: vec![-1.0],
        truncated: false,
        finish_reason: Some(FinishReason::StopToken),
    };
    ScoredResponse::new(generated, EpisodeRecord { outcome, ..record() })
}

/// Rows 0 to 3, two samples each: row 1 has equal scores, and so has row 2, of whose samples one is dropped.
#[test]
fn only_queries_with_two_equal_scores_are_replaced() {
    let outcomes = [Some(0.0), Some(1.0), Some(0.5), Some(0.5), Some(0.3), None];
    let outcomes = outcomes.map(|score| score.map(reward).ok_or_else(|| rejection("deadline")));
    let (fixture, config) = (Fixture::new(), config());
    let prompts = vec![vec![7, 8]; 5];
    let task = fixture.task(&config);
    let task = RlTask { train: RlData { prompts: &prompts, ..task.train }, ..task };
    let mut partial = PartialBatch::new(1, 0, queries(&[0, 1, 2], 2, std::iter::empty()));
    partial.responses = outcomes.map(response).into();
    let mut order = DataOrder::new(5, 1);
    assert!(partial.resample(&task, &mut order));
    assert_eq!((partial.resampled.n_rounds, order.position()), (1, 1));
    assert_eq!(partial.resampled.queries, [Query { row: 1, first_sample: 0 }]);
    assert_eq!(partial.queries[..2], [Query { row: 0, first_sample: 0 }, Query { row: 2, first_sample: 0 }]);
    let next = DataOrder::new(5, 1).take(1)[0];
    assert_eq!(partial.queries[2], Query { row: next, first_sample: if next <= 2 { 2 } else { 0 } });
    assert_eq!(partial.responses.len(), 4);
    // The second call replaces nothing: row 2 has one score, and the new query none.
    assert!(!partial.resample(&task, &mut order));
    // One drop among six episodes, two belong to the replaced query.
    partial.check_drops(&task).unwrap();
    let strict = RlConfig { max_drop_rate: 0.16, ..config.clone() };
    let error = partial.check_drops(&RlTask { config: &strict, ..task }).unwrap_err();
    assert!(matches!(error, TrainError::DropRate { n_dropped: 1, n_episodes: 6, .. }), "{error}");
}

/// Two different scores above `rl.reward_clip` are equal in the loss.
#[test]
fn scores_are_compared_as_they_are_learned_from() {
    let (fixture, prompts) = (Fixture::new(), vec![vec![7, 8]; 5]);
    let is_replaced = |reward_clip: f64, normalize_rewards: bool| {
        let config = RlConfig { reward_clip, normalize_rewards, ..config() };
        let task = fixture.task(&config);
        let task = RlTask { train: RlData { prompts: &prompts, ..task.train }, ..task };
        let mut partial = PartialBatch::new(1, 0, queries(&[0], 2, std::iter::empty()));
        partial.responses = [0.6, 0.9].map(|score| response(Ok(reward(score)))).into();
        partial.resample(&task, &mut DataOrder::new(5, 1))
    };
    assert!(is_replaced(0.5, false));
    assert!(!is_replaced(0.7, false) && !is_replaced(0.0, false) && !is_replaced(0.5, true));
}
