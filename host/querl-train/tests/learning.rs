//! Small tasks with a known optimum: each algorithm must come near it in a stated number of steps. And one without anything to
//! learn, on which no algorithm may drift away.
//!
//! The policy starts from a tiny decoder that was trained to answer any letter with random letters `a` to `h` and to stop at
//! random. `QUERL_LEARNING_SEEDS` sets the number of seeds (1 unless set; figures are stated for 5).
#![allow(clippy::unwrap_used)]

#[path = "support/recording.rs"]
mod recording;

use querl_core::config::{CriticKind, RlAlgorithm, RlConfig, SftConfig, TuningMethod};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses, Silent};
use querl_core::records::{EpisodeRecord, Reward};
use querl_model::{Decoder, LoraAdapter, LoraSettings, Mesh, TextTokenizer, Weights, small_model};
use querl_train::rl::{RlData, RlTask, train};
use querl_train::sft::{self, SftTask};
use querl_train::{Example, Policy};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use recording::{Recorder, episode};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

/// What the prompts are made of, and the answers.
const LETTERS: &[u8] = b"abcdefgh";

/// Longest answer in tokens, its end included.
const MAX_NEW_TOKENS: usize = 10;

/// A task: what an answer to a prompt pays, and when it counts as learned.
struct Game {
    name: &'static str,
    /// The score of an answer of so many tokens to a prompt letter; the last argument is a draw from 0 to 1.
    pays: fn(prompt: u8, answer: &str, n_tokens: u32, draw: f64) -> f64,
    /// Mean score that a policy at the optimum gets.
    optimum: f64,
    /// Mean score over the last ten steps that counts as learned.
    reached: f64,
    n_steps: usize,
}

const GAMES: [Game; 4] = [
    Game { name: "copy", pays: copy, optimum: 1.0, reached: 0.8, n_steps: 160 },
    Game { name: "keyword insertion", pays: keyword, optimum: 1.0, reached: 0.9, n_steps: 40 },
    Game { name: "length target", pays: length, optimum: 1.0, reached: 0.9, n_steps: 40 },
    Game { name: "two-armed bandit", pays: bandit, optimum: 0.8, reached: 0.7, n_steps: 40 },
];

/// The share of the answer's letters that are the prompt's.
fn copy(prompt: u8, answer: &str, _: u32, _: f64) -> f64 {
    let n_copied = answer.bytes().filter(|letter| *letter == prompt).count();
    n_copied as f64 / answer.len().max(1) as f64
}

/// The answer holds the letter `g` somewhere.
fn keyword(_: u8, answer: &str, _: u32, _: f64) -> f64 {
    f64::from(answer.contains('g'))
}

/// The answer has six tokens, its end included.
fn length(_: u8, _: &str, n_tokens: u32, _: f64) -> f64 {
    1.0 - (f64::from(n_tokens) - 6.0).abs() / 6.0
}

/// `a` pays with probability 0.8, `b` with 0.4, anything else never.
fn bandit(_: u8, answer: &str, _: u32, draw: f64) -> f64 {
    let probability = match answer.as_bytes().first() {
        Some(b'a') => 0.8,
        Some(b'b') => 0.4,
        _ => 0.0,
    };
    f64::from(draw < probability)
}

/// Pays at random, whatever the answer.
fn noise(_: u8, _: &str, _: u32, draw: f64) -> f64 {
    draw
}

struct Playing {
    pays: fn(u8, &str, u32, f64) -> f64,
    seed: u64,
}

impl Environment for Playing {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        Ok(responses.iter().map(|response| self.record(step, response)).collect::<Vec<_>>().into())
    }
}

impl Playing {
    fn record(&self, step: u64, response: &PolicyResponse) -> EpisodeRecord {
        let (row, sample) = (response.row_index as u64, response.sample_index as u64);
        let draw = ChaCha8Rng::seed_from_u64(self.seed ^ (step << 32) ^ (row << 16) ^ sample).random_range(0.0..1.0);
        let prompt = LETTERS[response.row_index % LETTERS.len()];
        let total = (self.pays)(prompt, response.text.trim(), response.n_tokens, draw);
        let outcome = Ok(Reward { total, components: Vec::new() });
        episode(format!("{step}/{row}/{sample}"), step, response, outcome)
    }
}

impl Recorder {
    /// Mean of a figure over the last `n` steps that have it.
    fn tail_mean(&self, name: &str, n: usize) -> f64 {
        let values: Vec<f64> =
            self.0.iter().rev().filter_map(|(_, metrics)| metrics.get(name).copied()).take(n).collect();
        values.iter().sum::<f64>() / values.len() as f64
    }
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
    // With the usual 0.02 the letters' embeddings stay almost parallel in so short a training, and telling them apart is what
    // the games are about.
    config.initializer_range = 0.2;
    let decoder = Decoder::init(config, 1).unwrap();
    decoder.save(folder.path(), small_model::STORED_DTYPE).unwrap();
    let tokenizer = TextTokenizer::load(folder.path()).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let example = |row: usize, rng: &mut ChaCha8Rng| {
        let n = rng.random_range(1..MAX_NEW_TOKENS);
        let answer: String = (0..n).map(|_| LETTERS[rng.random_range(0..LETTERS.len())] as char).collect();
        Example { prompt: prompt(&tokenizer, row), response: tokenizer.encode_response(&answer).unwrap() }
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
    assert!(summary.train_loss < 2.5, "the tiny decoder answers letters: loss {}", summary.train_loss);
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

fn play(pays: fn(u8, &str, u32, f64) -> f64, config: &RlConfig, seed: u64) -> Recorder {
    let decoder = Decoder::load(base(), Weights::Frozen).unwrap();
    let tokenizer = TextTokenizer::load(base()).unwrap();
    let settings = LoraSettings::all_linear(8, 16.0);
    let policy = LoraAdapter::new(&decoder, settings.clone(), seed).unwrap();
    let prompts: Vec<Vec<u32>> = (0..LETTERS.len() * 2).map(|row| prompt(&tokenizer, row)).collect();
    let environment = Playing { pays, seed };
    let output = tempfile::tempdir().unwrap();
    let task = RlTask {
        decoder: &decoder,
        base_path: base(),
        policy: &policy,
        reference: None,
        tokenizer: &tokenizer,
        train: RlData { prompts: &prompts, environment: &environment },
        val: RlData { prompts: &prompts, environment: &environment },
        config,
        tokens_per_pass: 4096,
        gradient_checkpointing: false,
        critic_lora: settings,
        seed,
        mesh: &Mesh::alone(),
        fingerprint: None,
        output_dir: output.path(),
        progress: &Silent,
        stop: &AtomicBool::new(false),
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
            let recorder = play(game.pays, &config(algorithm, game.n_steps), seed);
            let first = recorder.0.iter().find_map(|(_, metrics)| metrics.get("avg_reward")).unwrap();
            let last = recorder.tail_mean("avg_reward", 10);
            println!(
                "{:18} {algorithm:?} seed {seed}: {first:.2} to {last:.2} in {} steps (optimum {}, asked for {})",
                game.name, game.n_steps, game.optimum, game.reached
            );
            assert!(last >= game.reached, "{} with {algorithm:?}, seed {seed}: {last} after {first}", game.name);
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

/// Nats per token from the reference after as many steps as the games take.
const MAX_NOISE_KL: f64 = 0.05;

#[test]
fn a_reward_that_is_noise_does_not_move_the_policy_far() {
    for algorithm in ALGORITHMS {
        for seed in seeds() {
            // With the penalty that keeps a policy near: what remains is a random walk.
            let config = RlConfig { kl_coef: 0.2, learning_rate: 1e-3, ..config(algorithm, 40) };
            let kl = play(noise, &config, seed).tail_mean("actor/ref_kl_k3", 10);
            println!("noise {algorithm:?} seed {seed}: {kl:.4} nats per token from the reference");
            assert!(kl < MAX_NOISE_KL, "{algorithm:?}, seed {seed}: {kl}");
        }
    }
}
