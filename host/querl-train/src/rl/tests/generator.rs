//! Rollouts of a server; querl-model's engine implements the port.

use super::support::{Model, Scorer, assert_learned, bits, config, learning_config, plain_text, reward};
use crate::rl::{RlTask, ServerRollouts, train};
use crate::testing::Recorder;
use crate::{ROLLOUT, TrainError};
use querl_core::config::RlConfig;
use querl_core::ports::{PolicyResponse, RolloutEngine, RolloutPrompt, RolloutResponse, RolloutSampling};
use querl_core::records::{CallFailure, FailureKind, Rejection, Reward};
use querl_model::{
    Decoding, Engine, EngineSettings, GenerationRequest, LoraAdapter, LoraSettings, Mesh, SamplingSettings, run_ranks,
};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

struct ModelServer<'a> {
    model: &'a Model,
    engine: Mutex<Engine<'a>>,
    /// Versions of the loaded policies, in order.
    versions: Mutex<Vec<u64>>,
    change: fn(&mut RolloutResponse),
    n_calls: AtomicUsize,
    /// The call, counted from 1, that sets the flag and fails.
    stop: Option<(usize, &'a AtomicBool)>,
}

impl<'a> ModelServer<'a> {
    fn new(model: &'a Model) -> Self {
        let engine = Mutex::new(Engine::new(&model.decoder, EngineSettings::default()).unwrap());
        let (versions, n_calls) = (Mutex::default(), AtomicUsize::new(0));
        Self { model, engine, versions, change: |_| {}, n_calls, stop: None }
    }
}

impl RolloutEngine for ModelServer<'_> {
    fn set_policy(&self, version: u64, adapter: &Path) -> Result<(), CallFailure> {
        let decoder = &self.model.decoder;
        let adapter = LoraAdapter::load(adapter, decoder.config()).unwrap().for_decoder(decoder).unwrap();
        self.engine.lock().unwrap().set_policy(Some(&adapter), version).unwrap();
        self.versions.lock().unwrap().push(version);
        Ok(())
    }

    fn generate(
        &self,
        prompts: &[RolloutPrompt],
        sampling: &RolloutSampling,
    ) -> Result<Vec<Vec<RolloutResponse>>, CallFailure> {
        let call = self.n_calls.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some((_, flag)) = self.stop.filter(|(at, _)| *at == call) {
            flag.store(true, Ordering::SeqCst);
            return Err(CallFailure { kind: FailureKind::Timeout, message: "not sent: interrupted".into() });
        }
        assert_eq!(sampling.stop_token_ids, self.model.tokenizer.stop_ids().iter().copied().collect::<Vec<_>>());
        let is_greedy = sampling.temperature == 0.0;
        let settings = SamplingSettings {
            temperature: if is_greedy { 1.0 } else { sampling.temperature },
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            max_new_tokens: sampling.max_new_tokens,
            ..SamplingSettings::default()
        };
        let requests: Vec<GenerationRequest<'_>> = prompts
            .iter()
            .map(|prompt| GenerationRequest { prompt: &prompt.token_ids, seed: prompt.seed, n: prompt.n })
            .collect();
        let decoding = if is_greedy { Decoding::Greedy } else { Decoding::Sample };
        let mut engine = self.engine.lock().unwrap();
        let generated = engine.generate(&requests, decoding, &settings, &self.model.tokenizer).unwrap();
        let response = |generated: &querl_model::Generated| {
            let logprobs = if is_greedy { Vec::new() } else { generated.behaviour_logprobs.clone() };
            let mut response =
                RolloutResponse { token_ids: generated.token_ids.clone(), logprobs, truncated: generated.truncated };
            (self.change)(&mut response);
            response
        };
        Ok(generated.iter().map(|responses| responses.iter().map(response).collect()).collect())
    }
}

fn score(_: u64, _: usize, response: &PolicyResponse) -> Result<Reward, Rejection> {
    Ok(reward(plain_text(response)))
}

/// Metrics and adapter of a run. `folder` and `recorder` outlive a process.
struct Outcome {
    folder: tempfile::TempDir,
    recorder: Recorder,
    adapter: Vec<u32>,
}

impl Outcome {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), recorder: Recorder::default(), adapter: Vec::new() }
    }

    fn start(
        &mut self,
        model: &Model,
        config: &RlConfig,
        server: Option<&dyn RolloutEngine>,
        stop: &AtomicBool,
    ) -> Result<(), TrainError> {
        let (policy, prompts) = (model.adapter(LoraSettings::all_linear(4, 8.0), 5), model.prompts());
        let environment = Scorer(score);
        let task = RlTask {
            rollouts: server.map(|engine| ServerRollouts { engine, max_mismatch_kl: 0.05 }),
            fingerprint: Some("same"),
            stop,
            ..model.task(&policy, &prompts, [&environment, &environment], config, self.folder.path())
        };
        train(&task, &mut self.recorder)?;
        self.adapter = bits(&policy);
        Ok(())
    }

    fn complete(model: &Model, config: &RlConfig, server: Option<&dyn RolloutEngine>) -> Self {
        let mut outcome = Self::new();
        outcome.start(model, config, server, &AtomicBool::new(false)).unwrap();
        outcome
    }
}

/// Only rounding differs: with a server, log-probabilities are recomputed with the training pass.
#[test]
fn a_server_with_the_same_seeds_gives_the_run_of_the_local_engine() {
    let model = Model::new();
    let (config, server) = (RlConfig { n_samples: 2, ..config() }, ModelServer::new(&model));
    let local = Outcome::complete(&model, &config, None);
    let served = Outcome::complete(&model, &config, Some(&server));
    let names =
        ["avg_reward", "critic/score/max", "response_length/mean", "actor/ref_kl", "actor/pg_loss", "actor/entropy"];
    for name in names {
        let (found, expected) = (served.recorder.get(1, name), local.recorder.get(1, name));
        assert!((found - expected).abs() < 1e-3, "{name}: {found}, locally {expected}");
    }
    for name in ["avg_reward", "val/reward"] {
        let (found, expected) = (served.recorder.column(name), local.recorder.column(name));
        let is_close = found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 0.05);
        assert!(is_close && found.len() == expected.len(), "{name}: {found:?}, locally {expected:?}");
    }
    let kl = served.recorder.column("rollout_corr/k3_kl");
    assert!(kl.len() == 4 && kl.iter().all(|kl| kl.abs() < 1e-6), "{kl:?}");
    let weights = served.recorder.column("rollout_corr/rollout_is_mean");
    assert!(weights.len() == 4 && weights.iter().all(|weight| (weight - 1.0).abs() < 1e-3), "{weights:?}");
    assert_eq!(served.recorder.column("rollout_probs_diff"), Vec::<f64>::new());
    // Evaluations before the first step and after steps 2 and 4.
    assert_eq!(*server.versions.lock().unwrap(), [0, 1, 2, 3, 4]);
    let folders = std::fs::read_dir(served.folder.path().join(ROLLOUT)).unwrap();
    let names: Vec<_> = folders.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["v4"]);
}

#[test]
fn a_policy_learns_from_a_server_one_step_ahead_too() {
    for off_by_one in [false, true] {
        let (model, config) = (Model::new(), learning_config(off_by_one));
        let Outcome { recorder, .. } = Outcome::complete(&model, &config, Some(&ModelServer::new(&model)));
        assert_learned(&format!("off_by_one {off_by_one}"), &recorder);
        let kl = recorder.column("rollout_corr/k3_kl");
        assert!(kl.len() == 50 && kl.iter().all(|kl| kl.abs() < 1e-6), "off_by_one {off_by_one}: {kl:?}");
    }
}

/// The error of a run whose server changes each response.
fn failure(change: fn(&mut RolloutResponse)) -> TrainError {
    let model = Model::new();
    let server = ModelServer { change, ..ModelServer::new(&model) };
    Outcome::new().start(&model, &config(), Some(&server), &AtomicBool::new(false)).unwrap_err()
}

#[test]
fn responses_of_another_model_are_refused() {
    let lower = |response: &mut RolloutResponse| response.logprobs.iter_mut().for_each(|logprob| *logprob -= 1.0);
    let error = failure(lower);
    assert!(matches!(error, TrainError::Mismatch { step: 1, .. }), "{error}");
    // e - 1 - 1
    let sentence = "rl step 1: the KL of the rollout server's log-probabilities to those of the training pass is 0.718 a token, above rollout.max_mismatch_kl 0.05; ";
    assert!(error.to_string().starts_with(sentence), "{error}");
    let error = failure(|response| response.token_ids[0] = 100_000).to_string();
    assert!(error.starts_with("the rollout server returned token 100000, and "), "{error}");
    assert!(error.contains("has tokens 0 to "), "{error}");
    let unfinished = |response: &mut RolloutResponse| {
        response.truncated = false;
        *response.token_ids.last_mut().unwrap() = 7;
    };
    let error = failure(unfinished).to_string();
    assert!(error.starts_with("the rollout server ended a response with token 7, and "), "{error}");
    let error = failure(|response| response.logprobs.truncate(1)).to_string();
    assert!(error.contains(" log-probabilities for "), "{error}");
    assert!(error.ends_with("internal error, please report it"), "{error}");
}

/// The part of the batch whose requests were not sent is requested again.
#[test]
fn a_stop_while_the_server_generates_is_saved_and_resumed() {
    let (model, config, stop) = (Model::new(), config(), AtomicBool::new(false));
    let complete = Outcome::complete(&model, &config, Some(&ModelServer::new(&model)));
    let mut stopped = Outcome::new();
    // The first evaluation and each batch have two parts: call 6 is the second part of the second batch.
    let server = ModelServer { stop: Some((6, &stop)), ..ModelServer::new(&model) };
    let error = stopped.start(&model, &config, Some(&server), &stop).unwrap_err();
    assert!(matches!(error, TrainError::Interrupted { stage: "rl", step: 1 }), "{error}");
    let server = ModelServer::new(&model);
    stopped.start(&model, &config, Some(&server), &AtomicBool::new(false)).unwrap();
    assert_eq!(server.versions.lock().unwrap()[0], 1);
    assert!(stopped.adapter == complete.adapter, "the adapter differs from that of a run that was not stopped");
    assert_eq!(stopped.recorder.column("avg_reward"), complete.recorder.column("avg_reward"));
}

#[test]
fn the_first_of_several_ranks_calls_the_server() {
    let (model, config, folder) = (Model::new(), RlConfig { max_steps: 2, ..config() }, tempfile::tempdir().unwrap());
    let server = ModelServer::new(&model);
    let summaries = run_ranks(2, |ranks| {
        let mesh = Mesh::of_data(ranks);
        let (policy, prompts) = (model.adapter(LoraSettings::all_linear(4, 8.0), 5), model.prompts());
        let environment = Scorer(score);
        let task = RlTask {
            mesh: &mesh,
            rollouts: Some(ServerRollouts { engine: &server, max_mismatch_kl: 0.05 }),
            ..model.task(&policy, &prompts, [&environment, &environment], &config, folder.path())
        };
        train(&task, &mut Recorder::default())
    });
    assert_eq!(summaries.unwrap()[0].n_steps, 2);
    assert_eq!(*server.versions.lock().unwrap(), [0, 1, 2]);
}
