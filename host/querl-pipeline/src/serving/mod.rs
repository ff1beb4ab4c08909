//! Serving trained rewriters: one base model, with a prompt plugin and an adapter for each tenant.
//!
//! In: runs. Out: [`ServedModels`], which an HTTP service calls through [`querl_core::serving::Rewriter`]. Rewrites are the same, token by
//! token, as those of the `eval` stage.

pub(crate) mod deployment;
mod golden;
mod tenant;
mod worker;

pub use deployment::{BaseFiles, Deployment, deployed_runs, write_deployment};
pub(crate) use tenant::{BASE_MODEL, IdentityReader, PROMPT_PLUGIN};
pub use tenant::{ModelIdentity, ServedRun};

use crate::failure::Stop;
use crate::plugins::PluginHosts;
use querl_core::config::BaseDtype;
use querl_core::records::{Context, Message};
use querl_core::serving::{ChatTask, EngineState, EventSink, GenerationTask, Rewriter, Role, SubmitError, Tenant};
use querl_model::{Decoding, ModelError, SamplingSettings, ServingRequest, ServingSettings};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;
use tenant::{BaseModel, TenantModel};
use worker::{EngineHandle, Job, Question, spawn};

/// Options of a server: limits, API keys and dtype.
#[derive(Debug, Clone, Default)]
pub struct ServingOptions {
    /// Limits of the engine.
    pub engine: ServingSettings,
    /// Maximum number of requests that wait for a slot in the running batch; further requests are refused.
    pub max_waiting: usize,
    /// API keys of clients, by tenant.
    pub api_keys: BTreeMap<String, String>,
    /// Dtype of the base's weights; `None`: that of the first run's configuration.
    pub dtype: Option<BaseDtype>,
}

/// Checks that each run is of another tenant, before anything is loaded.
///
/// # Errors
/// Two runs have the same tenant.
pub fn check_tenants(runs: &[ServedRun]) -> Result<(), Stop> {
    for (index, run) in runs.iter().enumerate() {
        if let Some(other) = runs[..index].iter().find(|other| other.config.tenant == run.config.tenant) {
            let (tenant, other, own) = (&run.config.tenant, other.dir.root().display(), run.dir.root().display());
            let message = format!("{other} and {own} are both of tenant `{tenant}`; serve one of them");
            return Err(Stop::usage(message));
        }
    }
    Ok(())
}

/// The models of all tenants, served by one engine.
pub struct ServedModels {
    base: BaseModel,
    options: ServingOptions,
    tenants: RwLock<BTreeMap<(Role, String), Arc<TenantModel>>>,
    hosts: PluginHosts,
    engine: EngineHandle,
    /// Held while a long prompt is tokenized.
    long_prompt: Mutex<()>,
    find: fn(&Path) -> anyhow::Result<ServedRun>,
}

impl ServedModels {
    /// Loads the base of the first run, and all runs as tenants; passes the models to `on_ready`, and runs the engine on this thread until
    /// the models are dropped. `find` opens a run that is loaded later, by its folder or configuration.
    ///
    /// # Errors
    /// A run is unfinished or damaged, fails the golden check, or has another base.
    pub fn serve(
        runs: Vec<ServedRun>,
        find: fn(&Path) -> anyhow::Result<ServedRun>,
        options: ServingOptions,
        on_ready: impl FnOnce(Arc<Self>) + Send + 'static,
    ) -> anyhow::Result<()> {
        let first =
            runs.first().ok_or_else(|| Stop::usage("nothing to serve; name a run's folder or configuration"))?;
        let base = BaseModel::load(first, options.dtype)?;
        let (engine, worker) =
            worker::start(base.decoder.clone(), base.tokenizer.clone(), options.engine, options.max_waiting)?;
        let (tenants, hosts) = (RwLock::default(), PluginHosts::default());
        let models = Arc::new(Self { base, options, tenants, hosts, engine, long_prompt: Mutex::default(), find });
        // Checking a tenant needs requests, which this thread computes, so tenants are loaded by another thread.
        let loading = spawn("loading", move || {
            runs.iter().try_for_each(|run| models.add(run, Role::Current).map(drop))?;
            on_ready(models);
            Ok(())
        })?;
        worker.run();
        loading.join().unwrap_or_else(|_| anyhow::bail!("the thread that loads tenants panicked"))
    }

    /// Loads a run and replaces the tenant's previous model, after its golden requests have passed.
    fn add(&self, run: &ServedRun, role: Role) -> anyhow::Result<Tenant> {
        let api_key = self.options.api_keys.get(&run.config.tenant).cloned();
        let model = Arc::new(TenantModel::load(run, &self.base, &self.hosts, role, api_key)?);
        golden::check(run, |query, context| self.rewrite_now(&model, query, context))?;
        let facts = model.facts.clone();
        let mut tenants = self.tenants.write().unwrap_or_else(PoisonError::into_inner);
        tenants.insert((role, facts.name.clone()), model);
        Ok(facts)
    }

    /// Generates a rewrite and waits for it.
    fn rewrite_now(&self, model: &Arc<TenantModel>, query: &str, context: &Context) -> anyhow::Result<String> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let task = GenerationTask::Rewrite { query: query.to_owned(), context: context.clone() };
        let submitted = self.submit_to(model, task, Instant::now(), Box::new(golden::Waiting(sender)));
        submitted.map_err(|error| match error {
            SubmitError::QueueFull(problem) | SubmitError::Input(problem) | SubmitError::Plugin(problem) => {
                anyhow::anyhow!(problem)
            }
            SubmitError::UnknownTenant | SubmitError::Ended => anyhow::anyhow!("the model has ended"),
        })?;
        golden::wait(&receiver)
    }

    fn model(&self, role: Role, tenant: &str) -> Option<Arc<TenantModel>> {
        let tenants = self.tenants.read().unwrap_or_else(PoisonError::into_inner);
        tenants.get(&(role, tenant.to_owned())).cloned()
    }

    fn submit_to(
        &self,
        model: &Arc<TenantModel>,
        task: GenerationTask,
        arrived_at: Instant,
        events: Box<dyn EventSink>,
    ) -> Result<(), SubmitError> {
        let (messages, question, (decoding, sampling), seed) = match task {
            GenerationTask::Rewrite { query, context } => {
                let messages = model.prompt(&query, &context)?;
                let question = Question { query, history: context.history_summary };
                (messages, Some(question), (model.decoding, model.sampling.clone()), 0)
            }
            GenerationTask::Chat(task) => {
                let sampling = chat_sampling(&task, &model.sampling);
                (task.messages, None, sampling, task.seed)
            }
        };
        let prompt = self.encode(model, &messages)?;
        // A plugin may have returned many.
        drop(messages);
        let (adapter, id) = (model.adapter.clone(), self.engine.next_id());
        let request = ServingRequest { id, adapter, prompt, seed, decoding, sampling };
        self.engine.limits().check(&request).map_err(input_error)?;
        self.engine.submit(Job { request, model: model.clone(), question, events, arrived_at })
    }

    fn encode(&self, model: &TenantModel, messages: &[Message]) -> Result<Vec<u32>, SubmitError> {
        let n_bytes: usize = messages.iter().map(|message| size_of::<Message>() + message.content.len()).sum();
        let lock = || self.long_prompt.lock().unwrap_or_else(PoisonError::into_inner);
        let _one_at_a_time = (n_bytes > LONG_PROMPT_BYTES).then(lock);
        model.tokenizer.encode_prompt_within(messages, self.engine.limits().n_positions()).map_err(input_error)
    }
}

/// Size of messages above which one prompt at a time is tokenized. Tokenizing takes about a hundred bytes of memory per byte.
const LONG_PROMPT_BYTES: usize = 64 << 10;

#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn input_error(error: ModelError) -> SubmitError {
    SubmitError::Input(error.to_string())
}

/// Temperatures below are greedy decoding, as in vLLM (`_SAMPLING_EPS`). Logits divided by the smallest positive numbers are not finite.
const MIN_TEMPERATURE: f64 = 1e-5;

/// Sampling settings of a chat request: without the tenant's penalties, which are for rewrites.
fn chat_sampling(task: &ChatTask, of_tenant: &SamplingSettings) -> (Decoding, SamplingSettings) {
    let is_greedy = task.temperature < MIN_TEMPERATURE;
    let decoding = if is_greedy { Decoding::Greedy } else { Decoding::Sample };
    let sampling = SamplingSettings {
        temperature: if is_greedy { 1.0 } else { task.temperature },
        top_p: task.top_p,
        max_new_tokens: task.max_new_tokens.unwrap_or(of_tenant.max_new_tokens),
        stop_strings: task.stop.clone(),
        ..SamplingSettings::default()
    };
    (decoding, sampling)
}

impl Rewriter for ServedModels {
    fn n_tenants(&self) -> usize {
        let tenants = self.tenants.read().unwrap_or_else(PoisonError::into_inner);
        tenants.keys().filter(|(role, _)| *role == Role::Current).count()
    }

    fn models(&self, role: Role) -> Vec<Tenant> {
        let tenants = self.tenants.read().unwrap_or_else(PoisonError::into_inner);
        tenants.values().filter(|model| model.facts.role == role).map(|model| model.facts.clone()).collect()
    }

    fn tenant(&self, name: &str) -> Option<Tenant> {
        Some(self.model(Role::Current, name)?.facts.clone())
    }

    fn submit(
        &self,
        tenant: &Tenant,
        task: GenerationTask,
        arrived_at: Instant,
        events: Box<dyn EventSink>,
    ) -> Result<(), SubmitError> {
        let model = self.model(tenant.role, &tenant.name).ok_or(SubmitError::UnknownTenant)?;
        self.submit_to(&model, task, arrived_at, events)
    }

    fn load(&self, path: &Path, role: Role) -> Result<Tenant, String> {
        let loaded = (self.find)(path).and_then(|run| self.add(&run, role));
        loaded.map_err(|error| format!("{error:#}"))
    }

    fn remove(&self, tenant: &str, role: Role) -> bool {
        self.tenants.write().unwrap_or_else(PoisonError::into_inner).remove(&(role, tenant.to_owned())).is_some()
    }

    fn state(&self) -> EngineState {
        self.engine.state()
    }

    fn is_full(&self) -> bool {
        self.engine.is_full()
    }

    fn is_alive(&self) -> bool {
        self.engine.is_alive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: with a temperature of at most 1e-39 logits were not finite, which counted as a failure of the model and ended candidates.
    #[test]
    fn temperatures_near_zero_are_greedy_decoding() {
        let of_tenant = SamplingSettings::default();
        for (temperature, expected) in [
            (0.0, (Decoding::Greedy, 1.0)),
            (f64::from_bits(1), (Decoding::Greedy, 1.0)),
            (1e-39, (Decoding::Greedy, 1.0)),
            (9e-6, (Decoding::Greedy, 1.0)),
            (1e-5, (Decoding::Sample, 1e-5)),
            (2.0, (Decoding::Sample, 2.0)),
        ] {
            let task = ChatTask {
                messages: Vec::new(),
                temperature,
                top_p: 1.0,
                max_new_tokens: None,
                stop: Vec::new(),
                seed: 0,
            };
            let (decoding, sampling) = chat_sampling(&task, &of_tenant);
            assert_eq!((decoding, sampling.temperature), expected, "{temperature:e}");
        }
    }
}
