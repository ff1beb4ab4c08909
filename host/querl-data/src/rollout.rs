//! Client of vLLM and SGLang for rollouts: prompts and responses as token ids with log-probabilities, and loading of LoRA adapters.
//!
//! | | vLLM | SGLang |
//! |---|---|---|
//! | adapters | `/v1/load_lora_adapter`, `/v1/unload_lora_adapter` | the same without `/v1` |
//! | choice of the adapter | `model` of the request | `lora_path` |
//! | `n` responses | one request, seeds `seed + index` | `n` requests, since one seed gives equal responses there |
//! | log-probabilities | with `--logprobs-mode processed_logprobs`, after temperature and filters | after temperature, before filters |
//!
//! Sources: vLLM `entrypoints/openai/completion/{protocol,serving}.py`, `entrypoints/openai/models/serving.py`,
//! `v1/engine/parallel_sampling.py`, `v1/core/kv_cache_utils.py`; SGLang `srt/entrypoints/http_server.py`,
//! `srt/entrypoints/openai/{protocol,serving_completions}.py`, `srt/layers/sampler.py`.

#[cfg(test)]
mod tests;

use crate::client::http::{Call, CallLimits, Caller, CostBound, Refusal, Secret};
use crate::client::{ServiceContext, StopFlag};
use crate::error::DataError;
use futures::{StreamExt, TryStreamExt, stream};
use querl_core::config::{RolloutConfig, RolloutServerKind};
use querl_core::ports::{RolloutEngine, RolloutPrompt, RolloutResponse, RolloutSampling};
use querl_core::records::{CallFailure, FailureKind};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;

/// A vLLM or SGLang server that generates rollouts.
#[derive(Debug)]
pub struct RolloutServer {
    kind: RolloutServerKind,
    /// Name of the base model at the server.
    model: String,
    /// `rollout.adapter` and a hyphen: the prefix of all adapter names of this configuration.
    adapter: String,
    /// Prefix of this client's adapter names. vLLM identifies cached prefixes by adapter name, so a name must never be reused for other
    /// weights.
    name_prefix: String,
    adapter_dir: Option<String>,
    max_concurrent: usize,
    completions: Caller,
    adapters: Caller,
    /// A caller that also sends requests after a stop.
    unloading: Caller,
    runtime: Handle,
    state: Mutex<HandoverState>,
}

#[derive(Debug, Default)]
struct HandoverState {
    /// True once the base model was found and adapters of earlier processes were unloaded.
    is_prepared: bool,
    /// Name of the adapter that is loaded, or that may be loaded because the response of a handover was lost.
    loaded: Option<String>,
    /// True if the last handover succeeded.
    is_loaded: bool,
}

/// Clients that this process has opened.
static N_OPENED: AtomicU64 = AtomicU64::new(0);

/// Timeout in seconds of the request that unloads the last adapter, so that the end of a stage does not wait for an unreachable server.
const UNLOAD_TIMEOUT_S: f64 = 10.0;

/// `GET /v1/models`.
#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    /// Base model of an adapter; `None` for an entry that is not an adapter.
    parent: Option<String>,
}

#[derive(Deserialize)]
struct Completions {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: usize,
    finish_reason: Option<String>,
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Logprobs {
    token_logprobs: Vec<Option<f64>>,
}

impl RolloutServer {
    /// Opens the configured server without a request. Calls run on `runtime` and block the calling thread.
    ///
    /// # Errors
    /// The address, the model or the API key is missing or unusable.
    pub fn open(config: &RolloutConfig, services: &ServiceContext, runtime: Handle) -> Result<Self, DataError> {
        let missing = |key: &str| {
            DataError::setting(format!("rollout.{key}"), "is not set; rollout.engine = \"openai\" needs it")
        };
        let base_url = config.base_url.as_deref().ok_or_else(|| missing("base_url"))?.trim_end_matches('/');
        let model = config.model.clone().ok_or_else(|| missing("model"))?;
        let adapters_url = match config.server {
            RolloutServerKind::Vllm => base_url,
            RolloutServerKind::Sglang => base_url.strip_suffix("/v1").unwrap_or(base_url),
        };
        let key = Secret::open(services, "rollout", config.api_key_file.as_deref(), &config.api_key_env)?;
        let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries);
        let provider = format!("rollout {model}");
        let caller = |url: &str, limits: CallLimits, services: &ServiceContext| -> Result<Caller, DataError> {
            Ok(Caller::new("rollout.base_url", url, key.clone(), limits, services)?.named(&provider))
        };
        let always = ServiceContext { stop: StopFlag::default(), ..services.clone() };
        let of_unloading = CallLimits::new(1, config.timeout_s.min(UNLOAD_TIMEOUT_S), 0);
        let opened = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let number = N_OPENED.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            kind: config.server,
            model,
            adapter: format!("{}-", config.adapter),
            name_prefix: format!("{}-{opened}-{number}-", config.adapter),
            adapter_dir: config.adapter_dir.clone(),
            max_concurrent: config.max_concurrent.max(1),
            completions: caller(base_url, limits, services)?,
            adapters: caller(adapters_url, limits, services)?,
            unloading: caller(adapters_url, of_unloading, &always)?,
            runtime,
            state: Mutex::default(),
        })
    }

    /// Unloads the adapter last handed over to the rollout server, even if the stop flag is set.
    ///
    /// # Errors
    /// The server cannot be reached or rejects the request.
    pub fn unload(&self) -> Result<(), CallFailure> {
        let mut state = self.state();
        if let Some(name) = state.loaded.clone() {
            self.runtime.block_on(unload_adapter(&self.unloading, &name))?;
            (state.loaded, state.is_loaded) = (None, false);
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, HandoverState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that the server has the base model, and unloads the adapters that earlier processes left.
    async fn prepare(&self) -> Result<(), CallFailure> {
        let answer = self.completions.send(&Call::get("/models")).await?;
        let Models { data } = Models::deserialize(&answer.body)
            .map_err(|error| self.failure(FailureKind::InvalidResponse, format!("its list of models: {error}")))?;
        if !data.iter().any(|model| model.id == self.model) {
            let bases = data.iter().filter(|model| model.parent.is_none());
            let names: Vec<String> = bases.map(|model| format!("`{}`", model.id)).collect();
            let what = format!("rollout.model is `{}`, and the server has {}", self.model, names.join(", "));
            return Err(self.failure(FailureKind::Rejected, what));
        }
        let is_ours = |model: &&Model| model.parent.is_some() && is_adapter_of(&self.adapter, &model.id);
        for earlier in data.iter().filter(is_ours) {
            unload_adapter(&self.adapters, &earlier.id).await?;
        }
        Ok(())
    }

    async fn load_adapter(&self, name: &str, path: &str) -> Result<(), CallFailure> {
        let body = json!({"lora_name": name, "lora_path": path});
        let loaded = post_adapter(&self.adapters, "/load_lora_adapter", &body).await;
        match loaded {
            // An earlier attempt succeeded, but its response was lost: the name belongs to this process and identifies these weights.
            Err(failure) if failure.kind == FailureKind::Rejected && failure.message.contains("already") => Ok(()),
            Err(CallFailure { kind: kind @ (FailureKind::Rejected | FailureKind::ServerError), message }) => {
                let remedy = match self.kind {
                    RolloutServerKind::Vllm => {
                        "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank of at least sft.lora_rank, where it can read this path (rollout.adapter_dir)"
                    }
                    RolloutServerKind::Sglang => {
                        "start SGLang with --enable-lora, --lora-target-modules all and --max-lora-rank of at least sft.lora_rank, where it can read this path (rollout.adapter_dir)"
                    }
                };
                Err(CallFailure { kind, message: format!("{message}; the adapter is at {path}; {remedy}") })
            }
            other => other,
        }
    }

    async fn complete(
        &self,
        adapter: &str,
        prompt: &RolloutPrompt,
        sampling: &RolloutSampling,
    ) -> Result<Vec<RolloutResponse>, CallFailure> {
        let body = self.request(adapter, prompt, sampling);
        let check = |answer: &Value| responses(answer, prompt, sampling).err();
        let answer = self.completions.call(&Call::post("/completions", &body), CostBound::FREE, &check).await?;
        responses(&answer.body, prompt, sampling)
            .map_err(|refusal| self.failure(FailureKind::InvalidResponse, refusal.what))
    }

    /// Sends all settings, because a server's defaults come from the model's generation configuration.
    fn request(&self, adapter: &str, prompt: &RolloutPrompt, sampling: &RolloutSampling) -> Value {
        let top_k = if sampling.top_k == 0 { -1 } else { i64::try_from(sampling.top_k).unwrap_or(i64::MAX) };
        let mut body = json!({
            "prompt": prompt.token_ids,
            "n": prompt.n,
            // The servers expect signed 64-bit numbers.
            "seed": prompt.seed.cast_signed(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": sampling.min_new_tokens,
            "max_tokens": sampling.max_new_tokens,
            "stop": sampling.stop_strings,
            "stop_token_ids": sampling.stop_token_ids,
            "return_token_ids": true,
        });
        if sampling.temperature > 0.0 {
            // Log-probability of the sampled token only.
            body["logprobs"] = json!(0);
        }
        match self.kind {
            RolloutServerKind::Vllm => body["model"] = json!(adapter),
            RolloutServerKind::Sglang => {
                body["model"] = json!(self.model);
                body["lora_path"] = json!(adapter);
            }
        }
        body
    }

    fn failure(&self, kind: FailureKind, what: String) -> CallFailure {
        self.completions.failure(kind, &what)
    }

    /// Path of the adapter's folder on the server.
    fn path_at_server(&self, folder: &Path) -> String {
        match (&self.adapter_dir, folder.file_name()) {
            (Some(parent), Some(name)) => format!("{}/{}", parent.trim_end_matches('/'), name.to_string_lossy()),
            _ => folder.display().to_string(),
        }
    }
}

/// True for a name of the form `prefix` + `NUMBER-NUMBER-vNUMBER`.
fn is_adapter_of(prefix: &str, name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Option<Vec<&str>> = name.strip_prefix(prefix).map(|rest| rest.split('-').collect());
    match parts.as_deref() {
        Some(&[opened, number, version]) => {
            is_number(opened) && is_number(number) && version.strip_prefix('v').is_some_and(is_number)
        }
        _ => false,
    }
}

/// Unloads an adapter. An unknown adapter (the server was restarted) counts as unloaded.
async fn unload_adapter(caller: &Caller, name: &str) -> Result<(), CallFailure> {
    match post_adapter(caller, "/unload_lora_adapter", &json!({"lora_name": name})).await {
        Err(failure) if failure.kind == FailureKind::Rejected && says_not_there(&failure.message) => {
            tracing::debug!("{name} is not unloaded: {failure}");
            Ok(())
        }
        other => other,
    }
}

/// True if an error message says that the adapter does not exist. vLLM: 404, "cannot be found"; SGLang: 400, "does not exist".
fn says_not_there(message: &str) -> bool {
    let message = message.to_lowercase();
    ["not found", "cannot be found", "does not exist", "not loaded"].iter().any(|words| message.contains(words))
}

async fn post_adapter(caller: &Caller, path: &str, body: &Value) -> Result<(), CallFailure> {
    caller.send(&Call::post(path, body).or_text()).await.map(drop)
}

impl RolloutEngine for RolloutServer {
    fn set_policy(&self, version: u64, adapter: &Path) -> Result<(), CallFailure> {
        let name = format!("{}v{version}", self.name_prefix);
        let mut state = self.state();
        if state.is_loaded && state.loaded.as_deref() == Some(name.as_str()) {
            return Ok(());
        }
        if !state.is_prepared {
            self.runtime.block_on(self.prepare())?;
            state.is_prepared = true;
        }
        if let Some(earlier) = state.loaded.clone() {
            state.is_loaded = false;
            self.runtime.block_on(unload_adapter(&self.adapters, &earlier))?;
        }
        state.loaded = Some(name.clone());
        self.runtime.block_on(self.load_adapter(&name, &self.path_at_server(adapter)))?;
        state.is_loaded = true;
        Ok(())
    }

    fn generate(
        &self,
        prompts: &[RolloutPrompt],
        sampling: &RolloutSampling,
    ) -> Result<Vec<Vec<RolloutResponse>>, CallFailure> {
        let loaded = {
            let state = self.state();
            state.loaded.clone().filter(|_| state.is_loaded)
        };
        let Some(adapter) = loaded else {
            let what = "no adapter was handed over; internal error, please report it";
            return Err(self.failure(FailureKind::Rejected, what.into()));
        };
        let requests: Vec<RolloutPrompt> = match self.kind {
            RolloutServerKind::Vllm => prompts.to_vec(),
            RolloutServerKind::Sglang => prompts.iter().flat_map(single_responses).collect(),
        };
        let calls: Vec<_> = requests.iter().map(|prompt| self.complete(&adapter, prompt, sampling)).collect();
        let answers = stream::iter(calls).buffered(self.max_concurrent).try_collect::<Vec<Vec<RolloutResponse>>>();
        let mut responses = self.runtime.block_on(answers)?.into_iter().flatten();
        Ok(prompts.iter().map(|prompt| responses.by_ref().take(prompt.n).collect()).collect())
    }
}

/// One request per response, with the same seeds that vLLM derives.
fn single_responses(prompt: &RolloutPrompt) -> impl Iterator<Item = RolloutPrompt> + '_ {
    let request = move |index: u64| RolloutPrompt { seed: prompt.seed.wrapping_add(index), n: 1, ..prompt.clone() };
    (0..prompt.n as u64).map(request)
}

/// Parses the responses of a completion, each with all of its tokens.
fn responses(
    answer: &Value,
    prompt: &RolloutPrompt,
    sampling: &RolloutSampling,
) -> Result<Vec<RolloutResponse>, Refusal> {
    let Completions { mut choices } =
        Completions::deserialize(answer).map_err(|error| Refusal::unusable(format!("not completions: {error}")))?;
    if choices.len() != prompt.n {
        let (found, n) = (choices.len(), prompt.n);
        return Err(Refusal::misconfigured(format!("{found} responses; expected {n}")));
    }
    choices.sort_by_key(|choice| choice.index);
    choices.into_iter().map(|choice| response(choice, prompt, sampling)).collect()
}

fn response(choice: Choice, prompt: &RolloutPrompt, sampling: &RolloutSampling) -> Result<RolloutResponse, Refusal> {
    let misconfigured = |what: String| Err(Refusal::misconfigured(what));
    let Choice { finish_reason, token_ids, prompt_token_ids, logprobs, .. } = choice;
    let truncated = match finish_reason.as_deref() {
        Some("length") => true,
        Some("stop") => false,
        other => {
            let reason = other.unwrap_or("none");
            return Err(Refusal::aborted(format!("a response was broken off (finish_reason `{reason}`)")));
        }
    };
    let Some(token_ids) = token_ids.filter(|ids| !ids.is_empty()) else {
        return misconfigured("a response without `token_ids`; the server must support `return_token_ids`".into());
    };
    if token_ids.len() > sampling.max_new_tokens {
        let (found, most) = (token_ids.len(), sampling.max_new_tokens);
        return misconfigured(format!("a response of {found} tokens; expected at most `max_tokens`, {most}"));
    }
    if let Some(found) = prompt_token_ids.filter(|found| *found != prompt.token_ids) {
        let (n_found, n) = (found.len(), prompt.token_ids.len());
        return misconfigured(format!(
            "a response to another prompt, of {n_found} tokens, than the one of {n} tokens that was sent"
        ));
    }
    if sampling.temperature == 0.0 {
        return Ok(RolloutResponse { token_ids, logprobs: Vec::new(), truncated });
    }
    let Some(Logprobs { token_logprobs }) = logprobs else {
        return misconfigured("a response without `logprobs.token_logprobs`; let the server return them".into());
    };
    if token_logprobs.len() != token_ids.len() {
        let (n_logprobs, n_tokens) = (token_logprobs.len(), token_ids.len());
        return misconfigured(format!("{n_logprobs} log-probabilities for the {n_tokens} tokens of a response"));
    }
    let logprob = |(index, logprob): (usize, Option<f64>)| match logprob {
        Some(logprob) if logprob.is_finite() => Ok(logprob as f32),
        _ => Err(Refusal::misconfigured(format!("no log-probability for token {index} of a response"))),
    };
    let logprobs = token_logprobs.into_iter().enumerate().map(logprob).collect::<Result<Vec<f32>, Refusal>>()?;
    Ok(RolloutResponse { token_ids, logprobs, truncated })
}
