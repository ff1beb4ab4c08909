//! The model of a tenant: adapter, prompt plugin and decoding settings of a finished run, each checked against the run's digests.

use crate::failure::{Stop, run_in};
use crate::ledger::{Inputs, Ledger, StageName};
use crate::plugins::PluginHosts;
use crate::training::{self, Base};
use anyhow::Context as _;
use querl_core::config::{
    BaseDtype, Config, ModelConfig, PluginConfig, RewriteForm, RlConfig, is_registry_reference, load_resolved,
};
use querl_core::edits::EditParts;
use querl_core::fsx::{digest_file, digest_hex};
use querl_core::ports::{PluginFault, PromptInput, PromptTask, Prompts};
use querl_core::records::{Context, Message};
use querl_core::responses::ResponseForm;
use querl_core::run_dir::RunDir;
use querl_core::serving::{GenerationFailure, Role, SubmitError, Tenant};
use querl_data::ExpansionModel;
use querl_model::{
    AdapterWeights, ComputeDevice, Decoder, Decoding, LoraAdapter, ModelError, SamplingSettings, TextTokenizer, Weights,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A finished run whose last trained model is served.
pub struct ServedRun {
    /// Configuration of the run, as stored in its folder.
    pub config: Config,
    /// Directory of the run.
    pub dir: RunDir,
    stage: StageName,
}

impl ServedRun {
    /// Warns if a later training stage of the run has begun and is not finished. `what`: what is done with the model of the finished stage.
    pub(super) fn warn_unfinished(&self, what: &str) {
        if self.stage == StageName::Sft && self.dir.rl().exists() {
            let folder = self.dir.root().display();
            tracing::warn!(
                "{folder}: the stage `rl` is not finished; the model of `sft` is {what}; `querl run CONFIG` finishes `rl`"
            );
        }
    }

    /// Opens the run in a folder.
    ///
    /// # Errors
    /// There is no run, or it has no finished training stage.
    pub fn in_folder(folder: &Path) -> anyhow::Result<Self> {
        let dir = run_in(folder)?;
        let mut config = load_resolved(&dir.config()).map_err(Stop::usage)?;
        // Paths of a deployment are relative; others are absolute.
        for path in [&mut config.model.path, &mut config.plugins.prompt.path] {
            if path.is_relative() && !is_registry_reference(path) {
                let joined = folder.join(&*path);
                *path = joined.canonicalize().unwrap_or(joined);
            }
        }
        let ledger = Ledger::open(&dir.stages())?;
        let is_finished = |stage: &StageName| ledger.finished(*stage).is_some();
        let stage = [StageName::Rl, StageName::Sft].into_iter().find(is_finished).ok_or_else(|| {
            Stop::usage(match ledger.is_empty() && dir.sft().exists() {
                true => format!(
                    "{}: has no finished training for {}; put the file back, or run `querl run CONFIG` to make the result again",
                    dir.stages().display(),
                    dir.sft().display()
                ),
                false => {
                    format!("{}: no model was trained here yet; run `querl run CONFIG`", folder.display())
                }
            })
        })?;
        Ok(Self { config, dir, stage })
    }

    /// Folders of the base model and of the adapter (`None` after full fine-tuning), after a check of the checkpoint's recorded digests.
    ///
    /// # Errors
    /// A file is missing or has changed.
    pub fn trained_model(&self) -> anyhow::Result<(PathBuf, Option<PathBuf>)> {
        self.checkpoint_inputs()?;
        let Base { model, adapter } = self.base()?;
        Ok((model, adapter))
    }

    /// Base and adapter of the last finished training stage.
    pub(crate) fn base(&self) -> Result<Base, Stop> {
        Base::of(&self.config, &self.dir, self.stage)
    }

    pub(super) fn stage(&self) -> StageName {
        self.stage
    }

    /// Name of the served system (`sft` or `rl`), as in the evaluation's records.
    pub(crate) fn system(&self) -> &'static str {
        self.stage.as_str()
    }

    /// Folder of the served checkpoint.
    pub(crate) fn checkpoint(&self) -> PathBuf {
        training::best(&training::folder(&self.dir, self.stage))
    }

    /// Digest of the served checkpoint, after a comparison with the digest that its stage recorded.
    pub(crate) fn checkpoint_inputs(&self) -> anyhow::Result<Inputs> {
        let ledger = Ledger::open(&self.dir.stages())?;
        let mut inputs = Inputs::default();
        inputs.made_by(&ledger, self.stage, &self.checkpoint())?;
        Ok(inputs)
    }

    /// Digest of the file of the expansion model, after a comparison with the digest that the training recorded; `None` for a model that was
    /// trained without one.
    pub(super) fn expansion_digest(&self) -> anyhow::Result<Option<String>> {
        let (ledger, path) = (Ledger::open(&self.dir.stages())?, self.dir.expansion());
        let trained =
            ledger.entry(self.stage).map(|entry| &entry.inputs).filter(|inputs| !inputs.upstream().is_empty());
        let Some(trained) = trained else {
            // A deployment has the digests of its files, and no inputs.
            let outputs = ledger.finished(StageName::Convert).map(|entry| &entry.outputs);
            outputs.map_or(Ok(()), |outputs| outputs.check(ledger.root(), StageName::Convert, &path))?;
            return Ok(ledger.expansion_digest(&self.dir));
        };
        let Some(recorded) = trained.get(EXPANSION_INPUT) else { return Ok(None) };
        let problem = match digest_file(&path) {
            Ok(digest) if digest == recorded => return Ok(Some(digest)),
            Ok(_) => "is not the model of expansions with which",
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                "is missing, the model of expansions with which"
            }
            Err(error) => return Err(error).with_context(|| format!("{}: cannot be read", path.display())),
        };
        let (path, stage) = (path.display(), self.stage);
        let remedy = "put it back by `querl convert CONFIG --from convert` with the settings of the training, or run `querl run CONFIG` to train again";
        Err(Stop::usage(format!("{path}: {problem} `{stage}` was trained; {remedy}")).into())
    }

    /// The version string of the served model, on a base with weights of type `dtype`.
    fn version(&self, base: &str, dtype: BaseDtype, checkpoint: &str, plugin: &str, expansion: Option<&str>) -> String {
        let (dtype, settings) = (dtype.name(), self.settings(expansion));
        let identity =
            json!({"base": base, "checkpoint": checkpoint, "dtype": dtype, "plugin": plugin, "settings": settings});
        digest_hex(identity.to_string().as_bytes())[..16].to_owned()
    }

    /// `expansion`: digest of the expansion model.
    fn settings(&self, expansion: Option<&str>) -> Value {
        let mut settings = settings(&self.config.plugins.prompt, self.config.eval.n_beams, &self.config.rl);
        if self.config.data.rewrite_form == RewriteForm::Edit {
            settings["rewrite_form"] = "edit".into();
        }
        if let Some(enable_thinking) = self.config.model.enable_thinking {
            settings["enable_thinking"] = enable_thinking.into();
        }
        if let Some(expansion) = expansion {
            settings["expansion"] = expansion.into();
        }
        settings
    }

    /// The decoding settings, as in the evaluation.
    fn decoding(&self) -> (Decoding, SamplingSettings) {
        (Decoding::with_beams(self.config.eval.n_beams), querl_train::rl::sampling(&self.config.rl))
    }
}

/// Settings of the prompt plugin and of greedy decoding or beam search. Their digests are stored, so the keys and their alphabetical order
/// must not change.
fn settings(prompt: &PluginConfig, n_beams: usize, rl: &RlConfig) -> Value {
    json!({
        "max_new_tokens": rl.max_new_tokens,
        "min_new_tokens": rl.min_new_tokens,
        "n_beams": n_beams,
        "no_repeat_ngram_size": rl.no_repeat_ngram_size,
        "prompt_plugin": prompt.settings,
        "repetition_penalty": rl.repetition_penalty,
        "stop_strings": rl.stop_strings,
    })
}

/// Name, in a model identity, of the digest of the base model, which tenants of one server share.
pub(crate) const BASE_MODEL: &str = "base model";
/// Name, in a model identity, of the digest of the prompt plugin.
pub(crate) const PROMPT_PLUGIN: &str = "prompt plugin";
/// Name of the digest of the expansion model.
const EXPANSION_MODEL: &str = "expansion model";
/// Name of the expansion model among the inputs of a training.
const EXPANSION_INPUT: &str = "expansion.json of convert";

/// Model identity: digests of everything that the rewrites of a run depend on. Models with the same identity give the same rewrites.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// Version of the model, as in responses of a server that uses the run's dtype.
    pub version: String,
    /// Digests by name: of base model, prompt plugin, expansion model and decoding settings, and of the checkpoint's files by path in the run's folder.
    pub digests: BTreeMap<String, String>,
}

/// Reader of model identities. A base that runs share is hashed once, and their plugins share one host.
#[derive(Default)]
pub(crate) struct IdentityReader {
    bases: BTreeMap<PathBuf, String>,
    hosts: PluginHosts,
}

impl IdentityReader {
    /// Computes the identity of the model that is served of a run, without loading it.
    ///
    /// # Errors
    /// A file or plugin is missing, or differs from what the run recorded.
    pub(crate) fn read(&mut self, run: &ServedRun) -> anyhow::Result<ModelIdentity> {
        let (base, checkpoint) = (self.base(run.base()?.model)?, run.checkpoint_inputs()?);
        let plugin = self.hosts.open_pinned_prompts(&run.config, &run.dir)?.1;
        let dtype = run.config.model.dtype;
        let ledger = Ledger::open(&run.dir.stages())?;
        let outputs = ledger.entry(run.stage).map(|entry| &entry.outputs);
        let mut digests = outputs.map(|outputs| outputs.digests(ledger.root(), &run.checkpoint())).unwrap_or_default();
        let expansion = run.expansion_digest()?;
        let version = run.version(&base, dtype, &checkpoint.digest(), &plugin, expansion.as_deref());
        digests.insert(BASE_MODEL.into(), base);
        digests.insert(PROMPT_PLUGIN.into(), plugin);
        let settings = json!({"dtype": dtype.name(), "settings": run.settings(None)});
        digests.insert("decoding settings".into(), digest_hex(settings.to_string().as_bytes()));
        digests.extend(expansion.map(|digest| (EXPANSION_MODEL.to_owned(), digest)));
        Ok(ModelIdentity { version, digests })
    }

    fn base(&mut self, path: PathBuf) -> anyhow::Result<String> {
        if let Some(digest) = self.bases.get(&path) {
            return Ok(digest.clone());
        }
        let digest = base_digest(&path)?;
        self.bases.insert(path, digest.clone());
        Ok(digest)
    }
}

impl ModelIdentity {
    /// Names of the digests that differ from those of `earlier`.
    pub(crate) fn changed_since(&self, earlier: &Self) -> Vec<String> {
        let names: BTreeSet<&String> = self.digests.keys().chain(earlier.digests.keys()).collect();
        names.into_iter().filter(|name| self.digests.get(*name) != earlier.digests.get(*name)).cloned().collect()
    }
}

/// The base model of all tenants, whose weights are loaded once.
pub(super) struct BaseModel {
    path: PathBuf,
    /// Digest of the folder.
    digest: String,
    dtype: BaseDtype,
    enable_thinking: Option<bool>,
    pub(super) decoder: Arc<Decoder>,
    pub(super) tokenizer: Arc<TextTokenizer>,
}

impl BaseModel {
    pub(super) fn load(run: &ServedRun, dtype: Option<BaseDtype>) -> anyhow::Result<Self> {
        let path = run.base()?.model;
        let model = ModelConfig { path: path.clone(), ..run.config.model.clone() };
        training::check_model(&Config { model: model.clone(), ..run.config.clone() })?;
        let (digest, dtype) = (base_digest(&path)?, dtype.unwrap_or(run.config.model.dtype));
        let decoder = Decoder::load_on(&path, Weights::Frozen, dtype, &ComputeDevice::Cpu)?;
        let tokenizer = Arc::new(TextTokenizer::for_policy(&model)?);
        let enable_thinking = model.enable_thinking;
        Ok(Self { path, digest, dtype, enable_thinking, decoder: Arc::new(decoder), tokenizer })
    }

    /// The tokenizer of a run's prompts, which runs share unless they differ in `model.enable_thinking`.
    fn tokenizer_of(&self, run: &ServedRun) -> Result<Arc<TextTokenizer>, ModelError> {
        if run.config.model.enable_thinking == self.enable_thinking {
            return Ok(self.tokenizer.clone());
        }
        let model = ModelConfig { path: self.path.clone(), ..run.config.model.clone() };
        Ok(Arc::new(TextTokenizer::for_policy(&model)?))
    }
}

pub(super) struct TenantModel {
    pub(super) facts: Tenant,
    pub(super) prompts: Arc<dyn Prompts>,
    pub(super) response_form: ResponseForm,
    /// `None` for a model without learned expansions.
    pub(super) expansion: Option<ExpansionModel>,
    pub(super) tokenizer: Arc<TextTokenizer>,
    pub(super) adapter: Option<Arc<AdapterWeights>>,
    pub(super) decoding: Decoding,
    pub(super) sampling: SamplingSettings,
}

impl TenantModel {
    /// Loads a run's adapter, prompt plugin and settings for the served base.
    ///
    /// # Errors
    /// The run was trained on another base, or a file or plugin differs from what the run recorded.
    pub(super) fn load(
        run: &ServedRun,
        base: &BaseModel,
        hosts: &PluginHosts,
        role: Role,
        api_key: Option<String>,
    ) -> anyhow::Result<Self> {
        let Base { model, adapter } = run.base()?;
        if model != base.path && base_digest(&model)? != base.digest {
            let (own, served) = (model.display(), base.path.display());
            let message = format!(
                "{}: trained on {own}, and the model served here is {served}; serve runs of different base models by one process each",
                run.dir.root().display()
            );
            return Err(Stop::usage(message).into());
        }
        let checkpoint = run.checkpoint_inputs()?.digest();
        let adapter = match adapter {
            Some(path) => {
                let adapter = LoraAdapter::load(&path, base.decoder.config())?.for_decoder(&base.decoder)?;
                Some(Arc::new(AdapterWeights::new(&base.decoder, &adapter)?))
            }
            None => None,
        };
        let (prompts, plugin_digest) = hosts.open_pinned_prompts(&run.config, &run.dir)?;
        let (decoding, sampling) = run.decoding();
        let expansion_digest = run.expansion_digest()?;
        let expansion = expansion_digest.as_ref().map(|_| ExpansionModel::read(&run.dir.expansion())).transpose()?;
        let version = run.version(&base.digest, base.dtype, &checkpoint, &plugin_digest, expansion_digest.as_deref());
        let loaded_at = since_epoch(SystemTime::now());
        let folder = run.checkpoint();
        let created = folder.metadata().and_then(|metadata| metadata.modified());
        let created_at = since_epoch(created.with_context(|| format!("{}: cannot be read", folder.display()))?);
        let source = run.dir.root().display().to_string();
        run.warn_unfinished("served");
        let name = run.config.tenant.clone();
        let facts = Tenant { name, role, version, source, created_at, loaded_at, api_key };
        let (response_form, tokenizer) = (ResponseForm::of(&run.config), base.tokenizer_of(run)?);
        Ok(Self { facts, prompts, response_form, expansion, tokenizer, adapter, decoding, sampling })
    }

    pub(super) fn prompt(&self, query: &str, context: &Context) -> Result<Vec<Message>, SubmitError> {
        let input = PromptInput { query, context, rewrite: None };
        let messages = self.prompts.messages(PromptTask::PolicyRewrite, &input);
        messages.map_err(|fault| SubmitError::Plugin(without_texts(&fault)))
    }

    /// Parses the rewrite in a response; a response that cannot be parsed is a failure, so that the client uses the raw query.
    pub(super) fn parse(&self, query: &str, history: &str, text: &str) -> Result<String, GenerationFailure> {
        let failure = |code, message| GenerationFailure { code, message };
        let expansion = self.expansion.as_ref().map(|model| model.expansion(query, history));
        let parts = EditParts { query, history, expansion: expansion.as_deref() };
        match self.response_form.read(self.prompts.as_ref(), parts, text) {
            Ok(Ok(rewrite)) => Ok(rewrite),
            // Its detail may quote the response.
            Ok(Err(rejection)) => Err(failure("no_rewrite", format!("the response is rejected: {}", rejection.code))),
            Err(fault) => Err(failure("plugin_fault", without_texts(&fault))),
        }
    }
}

/// The fault for responses and the log. Its message, which may quote users' texts, is logged at the level debug.
fn without_texts(fault: &PluginFault) -> String {
    tracing::debug!("{fault}");
    fault.without_texts()
}

/// Seconds since 1970; 0 for earlier times.
fn since_epoch(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn base_digest(path: &Path) -> anyhow::Result<String> {
    let mut inputs = Inputs::default();
    inputs.model("base", path)?;
    Ok(inputs.digest())
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::ports::{FaultKind, ParsedJudgement};
    use querl_core::records::Rejection;

    /// Prompts whose faults and rejections quote their input.
    struct Quoting;

    fn quoting(text: &str) -> PluginFault {
        let (plugin, version, message) = ("prompt-x".into(), "0.1.0".into(), format!("query `{text}`: panicked"));
        PluginFault { plugin, version, message, kind: FaultKind::Trap, log: Vec::new() }
    }

    impl Prompts for Quoting {
        fn messages(&self, _: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
            Err(quoting(input.query))
        }

        fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
            if text.starts_with("fault") {
                return Err(quoting(text));
            }
            Ok(Err(Rejection::new("unreadable", text)))
        }

        fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
            Err(quoting(text))
        }
    }

    /// Regression: queries of users were in the log of a server, in the faults of plugins.
    #[test]
    fn failures_for_the_log_have_no_texts_of_users() {
        let base = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tiny-qwen3"));
        let facts = Tenant {
            name: "shop".into(),
            role: Role::Current,
            version: "v1".into(),
            source: "runs/shop".into(),
            created_at: 0,
            loaded_at: 0,
            api_key: None,
        };
        let model = TenantModel {
            facts,
            prompts: Arc::new(Quoting),
            response_form: ResponseForm::default(),
            expansion: None,
            tokenizer: Arc::new(TextTokenizer::load(base).unwrap()),
            adapter: None,
            decoding: Decoding::Greedy,
            sampling: SamplingSettings::default(),
        };
        let faulted = "plugin prompt-x 0.1.0: it panicked or trapped";
        let prompt = model.prompt("fish oil", &Context::default());
        assert_eq!(prompt.unwrap_err(), SubmitError::Plugin(faulted.into()));
        let failure = |text: &str| {
            let GenerationFailure { code, message } = model.parse("fish oil", "", text).unwrap_err();
            (code, message)
        };
        assert_eq!(failure("fault at fish oil"), ("plugin_fault", faulted.into()));
        assert_eq!(failure("fish oil"), ("no_rewrite", "the response is rejected: unreadable".into()));
    }

    /// Release histories contain digests of this text.
    #[test]
    fn settings_of_an_identity_are_named_and_those_of_sampling_are_not_among_them() {
        let prompt: PluginConfig = toml::from_str("path = \"p\"\nsettings = { b = [1, 0.5], a = \"x\" }").unwrap();
        let rl = RlConfig {
            max_new_tokens: 9,
            min_new_tokens: 1,
            repetition_penalty: 1.1,
            no_repeat_ngram_size: 3,
            stop_strings: vec!["\n".into()],
            ..RlConfig::default()
        };
        let expected = r#"{"max_new_tokens":9,"min_new_tokens":1,"n_beams":2,"no_repeat_ngram_size":3,"prompt_plugin":{"a":"x","b":[1,0.5]},"repetition_penalty":1.1,"stop_strings":["\n"]}"#;
        assert_eq!(settings(&prompt, 2, &rl).to_string(), expected);
        let sampled = RlConfig { temperature: 0.3, top_p: 0.5, top_k: 7, ..rl };
        assert_eq!(settings(&prompt, 2, &sampled).to_string(), expected);
    }
}
