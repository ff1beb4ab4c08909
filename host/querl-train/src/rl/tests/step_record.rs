//! The record of a step (`rl.record = "full"`): all inputs of its update.

use super::super::advantages::{all_true, gae, masked_whiten};
use super::support::{FaultyEnvironment, Model, Run, config};
use candle_core::{Device, Tensor};
use querl_core::config::{RlAlgorithm, RlConfig, RlRecord};
use std::collections::HashMap;

type Tensors = HashMap<String, Tensor>;

fn read(run: &Run, step: u64) -> Tensors {
    let path = run.folder.path().join(format!("steps/step-{step:06}.safetensors"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn floats(tensors: &Tensors, name: &str) -> Vec<f32> {
    tensors[name].to_vec1().unwrap()
}

/// Splits a tensor over tokens into one row per response.
fn rows(tensors: &Tensors, name: &str) -> Vec<Vec<f32>> {
    let (values, lengths) = (floats(tensors, name), tensors["response_lengths"].to_vec1::<u32>().unwrap());
    let mut rest = values.as_slice();
    let row = |length: u32| {
        let (row, tail) = rest.split_at(length as usize);
        rest = tail;
        row.to_vec()
    };
    lengths.into_iter().map(row).collect()
}

#[test]
fn a_full_record_changes_no_result_and_without_it_there_is_none() {
    let model = Model::new();
    let episodes = Run::complete(1, &model, &config());
    assert!(episodes.step_records().is_empty());
    let full = Run::complete(1, &model, &RlConfig { record: RlRecord::Full, ..config() });
    assert_eq!(full.step_records().len(), config().max_steps);
    std::fs::remove_dir_all(full.folder.path().join("steps")).unwrap();
    full.assert_same(&episodes, "with and without records");
}

/// Two ranks compute parts of a batch; the record has the complete batch.
#[test]
fn records_of_two_ranks_have_the_tokens_and_scores_of_one() {
    let (model, config) = (Model::new(), RlConfig { record: RlRecord::Full, max_steps: 1, ..config() });
    let (one, two) = (Run::complete(1, &model, &config), Run::complete(2, &model, &config));
    let (one, two) = (read(&one, 1), read(&two, 1));
    for name in ["token_ids", "rows", "response_lengths"] {
        assert_eq!(one[name].to_vec1::<u32>().unwrap(), two[name].to_vec1::<u32>().unwrap(), "{name}");
    }
    assert_eq!(floats(&one, "scores"), floats(&two, "scores"));
}

#[test]
fn rewards_advantages_and_the_first_losses_of_ppo_follow_from_its_record() {
    let config = RlConfig { record: RlRecord::Full, ..config() };
    let run = Run::complete(1, &Model::new(), &config);
    for step in 1..=config.max_steps as u64 {
        let tensors = read(&run, step);
        let (rewards, values) = (rows(&tensors, "rewards"), rows(&tensors, "values"));
        let (logprobs, references) = (rows(&tensors, "logprobs"), rows(&tensors, "ref_logprobs"));
        let kl_coef = tensors["kl_coef"].to_vec1::<f64>().unwrap()[0];
        assert_eq!(kl_coef, run.recorder.get(step, "actor/reward_kl_penalty_coeff"));
        for (i, score) in floats(&tensors, "scores").into_iter().enumerate() {
            let kl: f32 = logprobs[i].iter().zip(&references[i]).map(|(p, q)| p - q).sum();
            let total: f32 = rewards[i].iter().sum();
            assert!((total - (score - kl_coef as f32 * kl)).abs() < 1e-5, "step {step}, response {i}");
        }
        let mask = all_true(&rewards);
        let estimate = gae(&rewards, &values, &mask, config.gamma as f32, config.gae_lambda as f32);
        assert_eq!(rows(&tensors, "returns"), estimate.returns);
        let advantages = rows(&tensors, "advantages");
        assert_eq!(advantages, masked_whiten(&estimate.advantages, &mask));
        // Before the first update all ratios are 1.
        let first = tensors["first_mini_batch"].to_vec1::<u32>().unwrap();
        assert_eq!(first.len(), config.mini_batch_size);
        let mean = |value: &dyn Fn(usize, usize) -> f32| -> f64 {
            let tokens =
                first.iter().flat_map(|row| (0..rewards[*row as usize].len()).map(move |t| (*row as usize, t)));
            let values: Vec<f64> = tokens.map(|(row, t)| f64::from(value(row, t))).collect();
            values.iter().sum::<f64>() / values.len() as f64
        };
        let recorded = |name: &str| tensors[name].to_vec1::<f64>().unwrap()[0];
        let policy = mean(&|row, t| -advantages[row][t]);
        assert!((recorded("first/actor/pg_loss") - policy).abs() < 1e-4, "step {step}: {policy}");
        let value = mean(&|row, t| 0.5 * (values[row][t] - estimate.returns[row][t]).powi(2));
        assert!((recorded("first/critic/vf_loss") - value).abs() < 1e-4, "step {step}: {value}");
    }
}

#[test]
fn records_without_a_critic_name_the_group_and_the_episode_of_each_response() {
    let (algorithm, n_samples) = (RlAlgorithm::Grpo, 2);
    let config = RlConfig { record: RlRecord::Full, algorithm, n_samples, max_steps: 1, ..config() };
    let mut run = Run::new(FaultyEnvironment::without_fault());
    run.start(1, &Model::new(), &config).unwrap();
    let tensors = read(&run, 1);
    assert!(!tensors.contains_key("values") && !tensors.contains_key("first/critic/vf_loss"));
    let (queries, n) = (tensors["rows"].to_vec1::<u32>().unwrap(), config.batch_size * n_samples);
    assert!(queries.len() == n && queries.chunks(2).all(|pair| pair[0] == pair[1]), "{queries:?}");
    let ids = String::from_utf8(tensors["episode_ids"].to_vec1::<u8>().unwrap()).unwrap();
    let logged = run.episodes().into_iter().filter(|line| line.contains("\"step-1/")).collect::<Vec<_>>();
    assert_eq!((ids.lines().count(), logged.len()), (n, n));
    assert!(ids.lines().all(|id| logged.iter().any(|line| line.contains(&format!("\"{id}\"")))), "{ids}");
}
