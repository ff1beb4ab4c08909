//! Small tasks with a known optimum, which each algorithm must approach in a stated number of steps; and a task without a learnable signal,
//! in which no algorithm may drift.
//!
//! The policy starts from a tiny decoder that was trained to respond to any letter with random letters `a` to `h` and to stop at random.
//! `QUERL_LEARNING_SEEDS` sets the number of seeds (default 1; the stated numbers are for 5).

use super::support::{Model, Scorer, reward};
use crate::rl::{RlTask, train};
use crate::sft::{self, SftTask};
use crate::testing::Recorder;
use crate::{Example, Policy};
use querl_core::config::{CriticKind, RlAlgorithm, RlConfig, SftConfig, TuningMethod};
use querl_core::ports::{PolicyResponse, Silent};
use querl_model::{Decoder, LoraSettings, Mesh, TextTokenizer, small_model};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

const LETTERS: &[u8] = b"abcdefgh";

/// Maximum response length in tokens, end of sequence included.
const MAX_NEW_TOKENS: usize = 10;

/// The score of a response of `n_tokens` to a prompt letter; `draw` is random, 0 to 1.
type Score = fn(prompt: u8, response: &str, n_tokens: u32, draw: f64) -> f64;

struct Game {
    name: &'static str,
    score: Score,
    /// Mean score of an optimal policy.
    optimum: f64,
    /// Required mean score over the last ten steps.
    required: f64,
    n_steps: usize,
}

const GAMES: [Game; 4] = [
    Game { name: "copy", score: copy, optimum: 1.0, required: 0.8, n_steps: 160 },
    Game { name: "keyword insertion", score: keyword, optimum: 1.0, required: 0.9, n_steps: 40 },
    Game { name: "length target", score: length, optimum: 1.0, required: 0.9, n_steps: 40 },
    Game { name: "two-armed bandit", score: bandit, optimum: 0.8, required: 0.7, n_steps: 40 },
];

/// The share of the response's letters that equal the prompt letter.
fn copy(prompt: u8, response: &str, _: u32, _: f64) -> f64 {
    let n_copied = response.bytes().filter(|letter| *letter == prompt).count();
    n_copied as f64 / response.len().max(1) as f64
}

fn keyword(_: u8, response: &str, _: u32, _: f64) -> f64 {
    f64::from(response.contains('g'))
}

/// 1 for a response of six tokens, end of sequence included.
fn length(_: u8, _: &str, n_tokens: u32, _: f64) -> f64 {
    1.0 - (f64::from(n_tokens) - 6.0).abs() / 6.0
}

/// `a` scores 1 with probability 0.8, `b` with 0.4, anything else never.
fn bandit(_: u8, response: &str, _: u32, draw: f64) -> f64 {
    let probability = match response.as_bytes().first() {
        Some(b'a') => 0.8,
        Some(b'b') => 0.4,
        _ => 0.0,
    };
    f64::from(draw < probability)
}

fn noise(_: u8, _: &str, _: u32, draw: f64) -> f64 {
    draw
}

fn tail_mean(recorder: &Recorder, name: &str) -> f64 {
    let values = recorder.column(name);
    let tail = &values[values.len().saturating_sub(10)..];
    tail.iter().rev().sum::<f64>() / tail.len() as f64
}

/// The tiny decoder, trained once for all tests.
fn base() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(pretrained).path()
}

fn prompt(tokenizer: &TextTokenizer, row: usize) -> Vec<u32> {
    let letter = LETTERS[row % LETTERS.len()] as char;
    tokenizer.encode(&format!(":{letter}")).unwrap()
}

fn pretrained() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shape = small_model::Shape {
        hidden_size: 48,
        intermediate_size: 96,
        n_layers: 2,
        n_heads: 3,
        n_kv_heads: 1,
        head_dim: 16,
        max_positions: 32,
    };
    let mut config = small_model::write_files(folder.path(), &["a b".to_owned()], 262, &shape).unwrap();
    // With the usual 0.02 the embeddings of letters would stay almost parallel in this short training, but the tasks have to distinguish
    // letters.
    config.initializer_range = 0.2;
    let decoder = Decoder::init(config, 1).unwrap();
    decoder.save(folder.path(), small_model::STORED_DTYPE).unwrap();
    let tokenizer = TextTokenizer::load(folder.path()).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let example = |row: usize, rng: &mut ChaCha8Rng| {
        let n = rng.random_range(1..MAX_NEW_TOKENS);
        let response: String = (0..n).map(|_| LETTERS[rng.random_range(0..LETTERS.len())] as char).collect();
        Example { prompt: prompt(&tokenizer, row), response: tokenizer.encode_response(&response).unwrap() }
    };
    let train: Vec<Example> = (0..2048).map(|row| example(row, &mut rng)).collect();
    let config = SftConfig {
        method: TuningMethod::Full,
        learning_rate: 5e-3,
        epochs: 4,
        batch_size: 64,
        gradient_accumulation_steps: 1,
        ..SftConfig::default()
    };
    let output = tempfile::tempdir().unwrap();
    let task = SftTask {
        policy: Policy { decoder: &decoder, adapter: None },
        base_path: folder.path(),
        train: &train,
        val: &[],
        config: &config,
        tokens_per_pass: 4096,
        gradient_checkpointing: false,
        seed: 3,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: output.path(),
        progress: &Silent,
        stop: &AtomicBool::new(false),
    };
    let summary = sft::train(&task, &mut Recorder::default()).unwrap();
    assert!(summary.train_loss < 2.5, "the tiny decoder has learned letters: loss {}", summary.train_loss);
    decoder.save(folder.path(), small_model::STORED_DTYPE).unwrap();
    folder
}

fn config(algorithm: RlAlgorithm, n_steps: usize) -> RlConfig {
    RlConfig {
        algorithm,
        critic: CriticKind::Head,
        max_steps: n_steps,
        batch_size: 32,
        n_samples: 4,
        mini_batch_size: 64,
        gradient_accumulation_steps: 1,
        ppo_epochs: 2,
        learning_rate: 1.5e-3,
        critic_learning_rate: 1e-2,
        kl_coef: 0.0,
        ent_coef: 0.0,
        max_grad_norm: 1.0,
        max_new_tokens: MAX_NEW_TOKENS,
        eval_steps: 1000,
        save_steps: 1000,
        ..RlConfig::default()
    }
}

fn play(score: Score, config: &RlConfig, seed: u64) -> Recorder {
    let model = Model::load(base());
    let policy = model.adapter(LoraSettings::all_linear(8, 16.0), seed);
    let prompts: Vec<Vec<u32>> = (0..LETTERS.len() * 2).map(|row| prompt(&model.tokenizer, row)).collect();
    let environment = Scorer(|step, _, response: &PolicyResponse| {
        let (row, sample) = (response.row_index as u64, response.sample_index as u64);
        let draw = ChaCha8Rng::seed_from_u64(seed ^ (step << 32) ^ (row << 16) ^ sample).random_range(0.0..1.0);
        let prompt = LETTERS[response.row_index % LETTERS.len()];
        Ok(reward(score(prompt, response.text.trim(), response.n_tokens, draw)))
    });
    let output = tempfile::tempdir().unwrap();
    let task = RlTask {
        tokens_per_pass: 4096,
        seed,
        ..model.task(&policy, &prompts, [&environment, &environment], config, output.path())
    };
    let mut recorder = Recorder::default();
    train(&task, &mut recorder).unwrap();
    recorder
}

const ALGORITHMS: [RlAlgorithm; 5] =
    [RlAlgorithm::Ppo, RlAlgorithm::Grpo, RlAlgorithm::DrGrpo, RlAlgorithm::Rloo, RlAlgorithm::ReinforcePlusPlus];

fn seeds() -> std::ops::RangeInclusive<u64> {
    1..=std::env::var("QUERL_LEARNING_SEEDS").map_or(1, |seeds| seeds.parse().unwrap())
}

fn learns(game: &Game) {
    for algorithm in ALGORITHMS {
        for seed in seeds() {
            let recorder = play(game.score, &config(algorithm, game.n_steps), seed);
            let first = recorder.column("avg_reward")[0];
            let last = tail_mean(&recorder, "avg_reward");
            println!(
                "{:18} {algorithm:?} seed {seed}: {first:.2} to {last:.2} in {} steps (optimum {}, required {})",
                game.name, game.n_steps, game.optimum, game.required
            );
            assert!(last >= game.required, "{} with {algorithm:?}, seed {seed}: {last} after {first}", game.name);
        }
    }
}

#[test]
fn each_algorithm_learns_to_copy() {
    learns(&GAMES[0]);
}

#[test]
fn each_algorithm_learns_to_insert_a_keyword() {
    learns(&GAMES[1]);
}

#[test]
fn each_algorithm_learns_a_length() {
    learns(&GAMES[2]);
}

#[test]
fn each_algorithm_finds_the_better_arm_of_a_bandit() {
    learns(&GAMES[3]);
}

/// Limit of the KL to the reference in nats per token, after as many steps as in the tasks.
const MAX_NOISE_KL: f64 = 0.05;

#[test]
fn a_reward_that_is_noise_does_not_move_the_policy_far() {
    for algorithm in ALGORITHMS {
        for seed in seeds() {
            // With a KL penalty, only a bounded random walk remains.
            let config = RlConfig { kl_coef: 0.2, learning_rate: 1e-3, ..config(algorithm, 40) };
            let kl = tail_mean(&play(noise, &config, seed), "actor/ref_kl_k3");
            println!("noise {algorithm:?} seed {seed}: {kl:.4} nats per token from the reference");
            assert!(kl < MAX_NOISE_KL, "{algorithm:?}, seed {seed}: {kl}");
        }
    }
}
