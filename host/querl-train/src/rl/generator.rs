//! Generation of rollout responses: by the engine of querl-model, or by a server behind the trait [`RolloutEngine`].

use super::RlTask;
use crate::TrainError;
use crate::checkpoint::{ROLLOUT, save_policy};
use crate::policy::Policy;
use querl_core::ports::{EnvironmentError, RolloutEngine, RolloutPrompt, RolloutResponse, RolloutSampling};
use querl_model::{
    Decoding, Engine, EngineSettings, FinishReason, Generated, GenerationRequest, LoraAdapter, Mesh, SamplingSettings,
};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Generator of the responses of rollouts, whose policy is updated between batches.
pub(super) enum Generator<'a> {
    Local(Box<Engine<'a>>),
    Server(ServerGenerator<'a>),
}

impl<'a> Generator<'a> {
    pub(super) fn new(task: &'a RlTask<'a>, settings: EngineSettings) -> Result<Self, TrainError> {
        Ok(match task.rollouts {
            None => Self::Local(Box::new(Engine::new(task.decoder, settings)?)),
            Some(rollouts) => Self::Server(ServerGenerator { engine: rollouts.engine, version: None }),
        })
    }

    /// Sets the generating policy to the adapter's current weights, unless it already has this version.
    pub(super) fn set_policy(
        &mut self,
        task: &RlTask<'_>,
        mesh: &Mesh,
        policy: &LoraAdapter,
        version: u64,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(), TrainError> {
        match self {
            Self::Local(engine) => Ok(engine.set_policy(Some(policy), version)?),
            Self::Server(server) => server.set_policy(task, mesh, policy, version, is_stopped),
        }
    }
}

/// Client of a rollout server: loads each policy into the server and generates responses with it. Only the first rank calls it.
pub(super) struct ServerGenerator<'a> {
    engine: &'a dyn RolloutEngine,
    /// Version of the policy that the server has loaded; `None` before the first.
    version: Option<u64>,
}

impl ServerGenerator<'_> {
    /// Writes the adapter in PEFT's format and makes the server load it; then removes the previous one. A stop during the call of the
    /// server is not an error: nothing is generated then.
    fn set_policy(
        &mut self,
        task: &RlTask<'_>,
        mesh: &Mesh,
        policy: &LoraAdapter,
        version: u64,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(), TrainError> {
        if self.version == Some(version) {
            return Ok(());
        }
        self.version = None;
        let (parent, name) = (task.output_dir.join(ROLLOUT), format!("v{version}"));
        let folder = parent.join(&name);
        if mesh.data.is_first() {
            let policy = Policy { decoder: task.decoder, adapter: Some(policy) };
            save_policy(mesh, policy, &folder, task.base_path)?;
        }
        if mesh.all.is_first() {
            match self.engine.set_policy(version, &folder) {
                Ok(()) => {}
                Err(_) if is_stopped() => return Ok(()),
                Err(failure) => return Err(EnvironmentError::from(failure).into()),
            }
            remove_others(&parent, &name).map_err(|source| TrainError::Io { path: parent, source })?;
        }
        self.version = Some(version);
        Ok(())
    }

    /// Responses to all requests, in order; `None` after a stop, which discards the responses received so far.
    pub(super) fn generate(
        &self,
        task: &RlTask<'_>,
        mesh: &Mesh,
        requests: &[GenerationRequest<'_>],
        (decoding, sampling): (Decoding, &SamplingSettings),
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<Generated>>>, TrainError> {
        let mine = match mesh.all.is_first() {
            true => Some(self.request(task, requests, (decoding, sampling), is_stopped)?),
            false => None,
        };
        Ok(Arc::unwrap_or_clone(mesh.all.broadcast(0, mine)?))
    }

    fn request(
        &self,
        task: &RlTask<'_>,
        requests: &[GenerationRequest<'_>],
        (decoding, sampling): (Decoding, &SamplingSettings),
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<Generated>>>, TrainError> {
        let prompt = |request: &GenerationRequest<'_>| {
            let GenerationRequest { prompt, seed, n } = *request;
            RolloutPrompt { token_ids: prompt.to_vec(), seed, n }
        };
        let prompts: Vec<RolloutPrompt> = requests.iter().map(prompt).collect();
        let responses = match self.engine.generate(&prompts, &rollout_sampling(task, decoding, sampling)) {
            Ok(responses) => responses,
            Err(_) if is_stopped() => return Ok(None),
            Err(failure) => return Err(EnvironmentError::from(failure).into()),
        };
        let counts = |responses: &[Vec<RolloutResponse>]| responses.iter().map(Vec::len).collect::<Vec<_>>();
        if counts(&responses) != prompts.iter().map(|prompt| prompt.n).collect::<Vec<_>>() {
            let message = "the rollout engine returned another number of responses; internal error, please report it";
            return Err(TrainError::Data(message.into()));
        }
        let of_prompt = |responses: Vec<RolloutResponse>| -> Result<Vec<Generated>, TrainError> {
            responses.into_iter().map(|response| generated(task, response, decoding, sampling)).collect()
        };
        responses.into_iter().map(of_prompt).collect::<Result<Vec<_>, TrainError>>().map(Some)
    }
}

fn rollout_sampling(task: &RlTask<'_>, decoding: Decoding, sampling: &SamplingSettings) -> RolloutSampling {
    let (temperature, top_p, top_k) = match decoding {
        Decoding::Sample => (sampling.temperature, sampling.top_p, sampling.top_k),
        Decoding::Greedy | Decoding::Beam { .. } => (0.0, 1.0, 0),
    };
    RolloutSampling {
        temperature,
        top_p,
        top_k,
        min_new_tokens: sampling.min_new_tokens,
        max_new_tokens: sampling.max_new_tokens,
        stop_strings: sampling.stop_strings.clone(),
        stop_token_ids: task.tokenizer.stop_ids().iter().copied().collect(),
    }
}

/// Converts a server's response to the type of querl-model's engine. Both log-probabilities are the server's; the policy's are recomputed
/// before the update.
fn generated(
    task: &RlTask<'_>,
    response: RolloutResponse,
    decoding: Decoding,
    sampling: &SamplingSettings,
) -> Result<Generated, TrainError> {
    let RolloutResponse { token_ids, logprobs, truncated } = response;
    let vocab_size = task.decoder.config().vocab_size;
    if let Some(token) = token_ids.iter().find(|token| **token as usize >= vocab_size) {
        let (model, most) = (task.base_path.display(), vocab_size - 1);
        return Err(TrainError::Data(format!(
            "the rollout server returned token {token}, and {model} has tokens 0 to {most}; serve this model as rollout.model"
        )));
    }
    let finish_reason = match truncated {
        true => FinishReason::Length,
        false => ending(task, &token_ids, sampling)?,
    };
    let logprobs = if decoding == Decoding::Sample { logprobs } else { vec![0.0; token_ids.len()] };
    if logprobs.len() != token_ids.len() {
        let (n, expected) = (logprobs.len(), token_ids.len());
        let message = format!("the rollout engine returned {n} log-probabilities for {expected} tokens");
        return Err(TrainError::Data(format!("{message}; internal error, please report it")));
    }
    let behaviour_logprobs = logprobs.clone();
    Ok(Generated { token_ids, logprobs, behaviour_logprobs, truncated, finish_reason: Some(finish_reason) })
}

/// The finish reason of a complete response.
fn ending(task: &RlTask<'_>, token_ids: &[u32], sampling: &SamplingSettings) -> Result<FinishReason, TrainError> {
    let last = token_ids.last().copied().unwrap_or_default();
    if task.tokenizer.stop_ids().contains(&last) {
        return Ok(FinishReason::StopToken);
    }
    let text = task.tokenizer.decode(token_ids)?;
    match sampling.stop_strings.iter().position(|stop| text.contains(stop.as_str())) {
        Some(index) => Ok(FinishReason::StopString { index }),
        None => {
            let (model, ids) = (task.base_path.display(), task.tokenizer.stop_ids());
            Err(TrainError::Data(format!(
                "the rollout server ended a response with token {last}, and {model} ends one with {ids:?} or a stop string; serve this model as rollout.model, with end-of-sequence tokens in `token_ids`"
            )))
        }
    }
}

/// Removes the folders of earlier policies.
fn remove_others(parent: &Path, name: &str) -> io::Result<()> {
    for entry in std::fs::read_dir(parent)? {
        let entry = entry?;
        if entry.file_name() != name {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
