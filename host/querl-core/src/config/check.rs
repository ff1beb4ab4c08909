//! Checks beyond the schema: keys that require or exclude each other, and existing files.

use super::check_rl::check_rl_options;
use super::document::{Document, Origin};
use super::plugins::{StyleModelConfig, is_registry_reference};
use super::rollout::{RolloutConfig, RolloutEngineKind, RolloutServerKind};
use super::run::{Config, DeviceSetting, EVAL_SYSTEMS, SecondRetrieval};
use super::schema::{Violation, or_list, wrong};
use super::services::{EmbeddingKind, MappingConfig, RerankKind, RerankScores, ServiceKind};
use super::sources::{EndpointConfig, JudgeConfig, JudgeForm, JudgeKind, RetrievalConfig, RetrievalKind, TeacherKind};
use super::training::TuningMethod;
use crate::text::misspelt;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use toml::Value;

/// The required type of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PathKind {
    File,
    ModelFolder,
    PluginFileOrFolder,
}

/// Looks up a model by its name on a hub (`ORG/NAME` or `ORG/NAME@REVISION`): its folder, `None` to keep the name, or an error with the
/// reason.
pub type ModelHub = fn(&str) -> Result<Option<PathBuf>, String>;

/// Splits a model's name on a hub, `ORG/NAME[@REVISION]`, into id and revision (default `main`); `None` for another form.
pub fn parse_model_name(name: &str) -> Option<(&str, &str)> {
    let (id, revision) = name.split_once('@').unwrap_or((name, "main"));
    let (organisation, model) = id.split_once('/')?;
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    let is_revision = revision.split('/').all(is_name);
    (is_name(organisation) && is_name(model) && is_revision).then_some((id, revision))
}

/// The base folders of relative paths: the file's folder for paths in the file, the current folder for flags.
#[derive(Clone, Copy)]
pub(super) struct PathBases<'a> {
    document: &'a Document,
    /// Folder of the file.
    folder: &'a Path,
}

impl<'a> PathBases<'a> {
    /// The bases for the document in the file `path`.
    pub(super) fn new(document: &'a Document, path: &'a Path) -> Self {
        Self { document, folder: path.parent().unwrap_or(Path::new("")) }
    }

    pub(super) fn of(self, key: &str) -> &'a Path {
        match self.document.origin(key) {
            Some(Origin::Flag(_)) => Path::new(""),
            _ => self.folder,
        }
    }

    /// Description of this base folder, for messages.
    fn name_of(self, key: &str) -> &'static str {
        match self.document.origin(key) {
            Some(Origin::Flag(_)) => "in the current folder",
            _ => "next to the configuration",
        }
    }
}

/// Keys whose value is a model's name on a hub. A path whose parent folder exists is a path, not a name.
pub(super) fn model_names(config: &mut Config, bases: PathBases<'_>) -> Vec<String> {
    let is_name = |key: &str, path: &Path| {
        let base = bases.of(key);
        let is_path = base.join(path).exists() || path.parent().is_some_and(|parent| base.join(parent).exists());
        !is_path && path.to_str().and_then(parse_model_name).is_some()
    };
    let paths = paths(config).into_iter();
    paths
        .filter(|(key, kind, path)| *kind == PathKind::ModelFolder && is_name(key, path))
        .map(|(key, ..)| key)
        .collect()
}

/// Keys whose value is a file with the key of a service.
pub(super) fn key_files(config: &mut Config) -> impl Iterator<Item = String> {
    paths(config).into_iter().map(|(key, ..)| key).filter(|key| key.ends_with("api_key_file"))
}

/// Replaces the names of models under `names` by their folders.
pub(super) fn look_up_models(
    config: &mut Config,
    bases: PathBases<'_>,
    names: &[String],
    hub_of: impl Fn(&str) -> ModelHub,
) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (key, _, path) in paths(config).into_iter().filter(|(key, ..)| names.contains(key)) {
        match hub_of(&key)(&path.to_string_lossy()) {
            Ok(Some(folder)) => *path = folder,
            Ok(None) => {}
            Err(reason) => {
                let (name, place) = (path.display().to_string(), bases.name_of(&key));
                let mut message =
                    format!("{key} is {name:?}; no such folder {place}; taken as a model's name on a hub: {reason}");
                if key == "model.path" {
                    message += "; every stage reads its size, on which defaults depend: for a model of your own, run \
                                `querl model corpus` and `querl model pretrain` first";
                }
                violations.push(Violation::new(key, message));
            }
        }
    }
    violations
}

/// Makes paths absolute, except `names`; `output_dir` is relative to the current folder wherever it is set.
pub(super) fn resolve_paths(config: &mut Config, bases: PathBases<'_>, names: &[String]) {
    // An output file: may not exist yet.
    if let Some(path) = &mut config.cache.path {
        *path = clean(bases.of("cache.path").join(&*path));
    }
    for (key, kind, path) in paths(config).into_iter().filter(|(key, ..)| !names.contains(key)) {
        match kind {
            PathKind::PluginFileOrFolder => resolve_plugin(path, bases.of(&key)),
            _ => *path = clean(bases.of(&key).join(&*path)),
        }
    }
    if let Some(path) = &mut config.retrieval.index_dir {
        let full = bases.of("retrieval.index_dir").join(&*path);
        *path = std::path::absolute(full).unwrap_or_else(|_| path.clone());
    }
    config.output_dir = absolute(&config.output_dir);
}

/// Absolute, normalised path of a folder that may not exist yet.
fn absolute(path: &Path) -> PathBuf {
    let full = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if !full.components().any(|component| component == Component::ParentDir) {
        return full;
    }
    let rest_of = |above: &Path| full.strip_prefix(above).map(Path::to_owned).unwrap_or_default();
    let resolved = full.ancestors().find_map(|above| match above.canonicalize() {
        Ok(real) if above == full => Some(real),
        Ok(real) => Some(real.join(rest_of(above))),
        Err(_) => None,
    });
    resolved.unwrap_or(full)
}

/// Resolves the path of a plugin. A registry reference is unchanged; so is the name of a link to a folder with a file-like name, which the
/// plugin host refuses.
fn resolve_plugin(path: &mut PathBuf, base: &Path) {
    if is_registry_reference(path) {
        return;
    }
    // Removes a trailing slash, which would follow a link.
    let full: PathBuf = base.join(&*path).components().collect();
    let is_called_like_a_file = full
        .extension()
        .is_some_and(|extension| ["querl", "wasm"].iter().any(|name| extension.eq_ignore_ascii_case(name)));
    *path = match is_called_like_a_file && full.is_dir() {
        true => std::path::absolute(&full).unwrap_or(full),
        false => clean(full),
    };
}

/// Canonical path of an existing file, else the absolute path.
fn clean(path: PathBuf) -> PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(&path)).unwrap_or(path)
}

/// Every input path with its key. New path keys must be added here.
fn paths(config: &mut Config) -> Vec<(String, PathKind, &mut PathBuf)> {
    let mut paths = vec![
        ("model.path".into(), PathKind::ModelFolder, &mut config.model.path),
        ("plugins.prompt.path".into(), PathKind::PluginFileOrFolder, &mut config.plugins.prompt.path),
    ];
    let optional = [
        ("data.input", &mut config.data.input),
        ("data.dataset.train", &mut config.data.dataset.train),
        ("data.dataset.val", &mut config.data.dataset.val),
        ("data.dataset.test", &mut config.data.dataset.test),
        ("teacher.path", &mut config.teacher.path),
        ("retrieval.knowledge_base", &mut config.retrieval.knowledge_base),
        ("retrieval.lexicon", &mut config.retrieval.lexicon),
        ("retrieval.user_dictionary", &mut config.retrieval.user_dictionary),
        ("retrieval.synonyms", &mut config.retrieval.synonyms),
        ("teacher.api_key_file", &mut config.teacher.api_key_file),
        ("fallback_teacher.api_key_file", &mut config.fallback_teacher.api_key_file),
        ("judge.api_key_file", &mut config.judge.api_key_file),
        ("retrieval.api_key_file", &mut config.retrieval.api_key_file),
        ("rollout.api_key_file", &mut config.rollout.api_key_file),
        ("calls.ca_file", &mut config.calls.ca_file),
        ("retrieval.embedding.api_key_file", &mut config.retrieval.embedding.api_key_file),
        ("retrieval.rerank.api_key_file", &mut config.retrieval.rerank.api_key_file),
    ];
    for (key, path) in optional {
        paths.extend(path.as_mut().map(|path| (key.to_owned(), PathKind::File, path)));
    }
    let models = [
        ("teacher.model_path", &mut config.teacher.model_path),
        ("teacher.adapter_path", &mut config.teacher.adapter_path),
        ("retrieval.embedding.path", &mut config.retrieval.embedding.path),
        ("retrieval.rerank.path", &mut config.retrieval.rerank.path),
        ("plugins.style_model.path", &mut config.plugins.style_model.path),
        ("plugins.style_model.base", &mut config.plugins.style_model.base),
        ("plugins.style_model.audit", &mut config.plugins.style_model.audit),
        ("eval.embedding_path", &mut config.eval.embedding_path),
    ];
    for (key, path) in models {
        paths.extend(path.as_mut().map(|path| (key.to_owned(), PathKind::ModelFolder, path)));
    }
    let filters = config.plugins.filters.iter_mut().map(|plugin| &mut plugin.path).enumerate();
    let filters = filters.map(|(index, path)| (format!("plugins.filters[{index}].path"), path));
    let rewards = config.plugins.rewards.iter_mut().map(|plugin| &mut plugin.path).enumerate();
    let rewards = rewards.map(|(index, path)| (format!("plugins.rewards[{index}].path"), path));
    paths.extend(filters.chain(rewards).map(|(key, path)| (key, PathKind::PluginFileOrFolder, path)));
    paths
}

/// Checks a configuration that conforms to the schema and has absolute paths, except names of models on a hub. The paths of the keys
/// `unchecked` need not exist.
pub(super) fn check(config: &mut Config, unchecked: &[String], bases: PathBases<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    if DeviceSetting::from_name(&config.device).is_none() {
        let expected = "auto, cpu, cuda:N or a list of GPUs such as cuda:0,1";
        violations.push(wrong_text("device", &config.device, expected));
    }
    check_tensor_parallel(config, &mut violations);
    check_split(config, &mut violations);
    check_sources(config, &mut violations);
    check_retrieval(&config.retrieval, &mut violations);
    check_rl_options(&config.rl, &mut violations);
    if config.rl.max_steps == 0 && config.rl.epochs.is_none() {
        violations.push(Violation::of("rl.max_steps", "is 0; expected 1 or more, or a number of rl.epochs"));
    }
    check_training(config, &mut violations);
    check_rollout(config, &mut violations);
    check_systems(config, &mut violations);
    check_second_retrieval(config, &mut violations);
    check_style_model(&config.plugins.style_model, &mut violations);
    if config.plugins.rewards.is_empty() {
        violations.push(Violation::of("plugins.rewards", "is empty; expected at least one reward"));
    }
    let paths = paths(config).into_iter().filter(|(key, ..)| !unchecked.contains(key));
    violations.extend(paths.filter_map(|(key, kind, path)| check_path(key, kind, path, bases)));
    violations
}

/// Checks only `model.path`, as [`check`] does.
pub(super) fn check_model_path(config: &Config, bases: PathBases<'_>) -> Option<Violation> {
    check_path("model.path".into(), PathKind::ModelFolder, &config.model.path, bases)
}

fn check_path(key: String, kind: PathKind, path: &Path, bases: PathBases<'_>) -> Option<Violation> {
    if let Some(name) = path.to_str().filter(|name| kind == PathKind::ModelFolder && parse_model_name(name).is_some()) {
        return check_model_name(key, name, bases);
    }
    let complaint = match kind {
        PathKind::PluginFileOrFolder if is_registry_reference(path) => return None,
        PathKind::File if !path.exists() => "no such file; create it or correct the path",
        PathKind::ModelFolder if !path.exists() && key == "model.path" => {
            "no such folder; put the model there, make one with `querl model corpus` and `querl model pretrain`, or name one on a \
             hub (ORG/NAME)"
        }
        PathKind::ModelFolder if !path.exists() => "no such folder; put the model there or correct the path",
        PathKind::PluginFileOrFolder if !path.exists() => {
            "no such file or folder; put the plugin there or correct the path"
        }
        PathKind::File if !path.is_file() => "expected a file",
        PathKind::ModelFolder if !path.is_dir() => "expected a folder",
        _ => return None,
    };
    let message = format!("{key} is {:?}; {complaint}", path.display().to_string());
    Some(Violation::new(key, message))
}

/// Refuses the name of a model on a hub where a folder with nearly the name of its organisation has a folder of the model's name: the path of a
/// folder with a typing error. A name with a revision is never a path.
fn check_model_name(key: String, name: &str, bases: PathBases<'_>) -> Option<Violation> {
    let (organisation, model) = name.split_once('/').filter(|_| !name.contains('@'))?;
    let entries = std::fs::read_dir(bases.of(&key).join(".")).ok()?.flatten();
    let with_model = entries.filter(|entry| entry.path().join(model).is_dir());
    let folders: Vec<String> = with_model.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let near = misspelt(organisation, folders.iter().map(String::as_str))?;
    let message = format!(
        "{key} is {name:?}; no such folder, but there is a folder {near:?} {}; write \"{near}/{model}\" for a folder, or \"{name}@main\" for \
         a model on a hub",
        bases.name_of(&key)
    );
    Some(Violation::new(key, message))
}

/// Settings that tensor parallelism does not support.
fn check_tensor_parallel(config: &Config, violations: &mut Vec<Violation>) {
    let (key, n) = ("model.tensor_parallel", config.model.tensor_parallel);
    let refused = [
        (config.sft.method == TuningMethod::Full, "sft.method is \"full\""),
        (config.sft.use_dora, "sft.use_dora is true"),
        (config.rl.off_by_one, "rl.off_by_one is true"),
    ];
    let n_devices = DeviceSetting::from_name(&config.device).map_or(1, |device| device.n_ranks());
    if n > 0 && !n_devices.is_multiple_of(n) {
        let device = &config.device;
        let problem = format!("is {n} and device is {device:?}; expected a divisor of its {n_devices}");
        violations.push(Violation::of(key, problem));
    }
    if let Some((_, setting)) = refused.into_iter().find(|(is_set, _)| *is_set && n > 1) {
        let problem = format!("is {n} and {setting}, which is not split over devices; change one of the two");
        violations.push(Violation::of(key, problem));
    }
}

/// Last components of the names of layers that LoRA can adapt.
const LINEAR_LAYERS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

fn check_training(config: &Config, violations: &mut Vec<Violation>) {
    let (sft, rl) = (&config.sft, &config.rl);
    for target in &sft.lora_target_modules {
        if target != "all-linear" && !LINEAR_LAYERS.contains(&target.as_str()) {
            let expected = format!("all-linear, or some of {}", LINEAR_LAYERS.join(", "));
            violations.push(wrong_text("sft.lora_target_modules", target, &expected));
        }
    }
    if sft.lora_target_modules.is_empty() {
        let problem = "is empty; expected [\"all-linear\"] or names of layers";
        violations.push(Violation::of("sft.lora_target_modules", problem));
    }
    if rl.algorithm.needs_groups() && rl.n_samples < 2 {
        let (n_samples, algorithm) = (rl.n_samples, serde_json::json!(rl.algorithm));
        let problem = format!(
            "is {n_samples}; rl.algorithm = {algorithm} compares samples of one query, expected at least 2 (\"ppo\" takes 1)"
        );
        violations.push(Violation::of("rl.n_samples", problem));
    }
    if rl.kl_target > 0.0 && rl.kl_coef == 0.0 {
        let expected = "more than 0.0, since rl.kl_target adapts it by factors";
        violations.push(wrong("rl.kl_coef", &Value::Float(rl.kl_coef), expected));
    }
    if rl.min_new_tokens > rl.max_new_tokens {
        let expected = format!("at most rl.max_new_tokens, {}", rl.max_new_tokens);
        violations.push(wrong("rl.min_new_tokens", &Value::Integer(rl.min_new_tokens as i64), &expected));
    }
    if rl.stop_strings.iter().any(String::is_empty) {
        let message = "holds an empty string, which ends every response at once; remove it";
        violations.push(Violation::of("rl.stop_strings", message));
    }
}

/// Checks the requirements of a rollout server, and settings that it lacks or that have another meaning there.
fn check_rollout(config: &Config, violations: &mut Vec<Violation>) {
    let RolloutConfig { engine, server, base_url, model, api_key_env, adapter, .. } = &config.rollout;
    check_url("rollout.base_url", base_url.as_deref(), violations);
    check_key_variable("rollout", api_key_env, violations);
    let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if adapter.is_empty() || !adapter.chars().all(is_name) {
        violations.push(wrong_text("rollout.adapter", adapter, "letters, digits, `.`, `_` and `-`"));
    }
    if *engine == RolloutEngineKind::Local {
        return;
    }
    for (key, value) in [("rollout.base_url", base_url), ("rollout.model", model)] {
        if value.is_none() {
            let message = format!("the key {key} is missing; rollout.engine = \"openai\" needs it");
            violations.push(Violation::new(key, message));
        }
    }
    let (rl, sglang) = (&config.rl, *server == RolloutServerKind::Sglang);
    let mut refuse = |key: &str, problem: String| violations.push(Violation::of(key, problem));
    if rl.repetition_penalty != 1.0 {
        let problem = "with rollout.engine = \"openai\" it would count the tokens of the prompt too, expected 1.0";
        refuse("rl.repetition_penalty", format!("is {:?}; {problem}", rl.repetition_penalty));
    }
    if rl.no_repeat_ngram_size > 0 {
        let problem = "rollout.engine = \"openai\" has no such setting, expected 0";
        refuse("rl.no_repeat_ngram_size", format!("is {}; {problem}", rl.no_repeat_ngram_size));
    }
    let unfiltered = "SGLang reports log-probabilities before filters, expected";
    if sglang && rl.top_p < 1.0 {
        refuse("rl.top_p", format!("is {:?}; {unfiltered} 1.0", rl.top_p));
    }
    if sglang && rl.top_k > 0 {
        refuse("rl.top_k", format!("is {}; {unfiltered} 0", rl.top_k));
    }
    if config.sft.use_dora {
        let problem =
            "is true; servers of rollout.engine = \"openai\" load no adapters with magnitudes, expected false";
        refuse("sft.use_dora", problem.into());
    }
}

fn wrong_text(key: &str, value: &str, expected: &str) -> Violation {
    wrong(key, &Value::String(value.into()), expected)
}

fn check_split(config: &Config, violations: &mut Vec<Violation>) {
    let sum: f64 = config.data.split.iter().sum();
    if (sum - 1.0).abs() > 1e-6 {
        let shares = config.data.split.map(|share| format!("{share:?}")).join(", ");
        violations.push(Violation::of("data.split", format!("is [{shares}]; expected shares that sum to 1.0")));
    }
}

fn check_sources(config: &Config, violations: &mut Vec<Violation>) {
    let mut need = |key: &str, given: bool, by: &str| {
        if !given {
            violations.push(Violation::new(key, format!("the key {key} is missing; {by} needs it")));
        }
    };
    let (teacher, judge, retrieval) = (&config.teacher, &config.judge, &config.retrieval);
    let (called_teacher, embedding, rerank) = (config.called_teacher(), &retrieval.embedding, &retrieval.rerank);
    if config.fallback_teacher.base_url.is_some() {
        need("fallback_teacher.model", config.fallback_teacher.model.is_some(), "fallback_teacher.base_url");
    }
    if judge.kind == JudgeKind::Rubric {
        need("retrieval.lexicon", retrieval.lexicon.is_some(), "judge.kind = \"rubric\"");
    }
    let is_embedded = retrieval.kind == RetrievalKind::Embedded;
    let teacher_is = |kind| called_teacher == Some(kind);
    let embedding_is = |kind: EmbeddingKind| embedding.kind == kind;
    let rerank_is = |kind: RerankKind| rerank.kind == kind;
    // The section, and the key that the kind requires.
    let needed = [
        (teacher_is(TeacherKind::Recorded), "teacher", "recorded", "path", teacher.path.is_some()),
        (teacher_is(TeacherKind::Openai), "teacher", "openai", "base_url", teacher.base_url.is_some()),
        (teacher_is(TeacherKind::Openai), "teacher", "openai", "model", teacher.model.is_some()),
        (teacher_is(TeacherKind::Local), "teacher", "local", "model_path", teacher.model_path.is_some()),
        (judge.kind == JudgeKind::Openai, "judge", "openai", "base_url", judge.base_url.is_some()),
        (judge.kind == JudgeKind::Openai, "judge", "openai", "model", judge.model.is_some()),
        (is_embedded, "retrieval", "embedded", "knowledge_base", retrieval.knowledge_base.is_some()),
        (retrieval.kind == RetrievalKind::Http, "retrieval", "http", "url", retrieval.url.is_some()),
        (embedding_is(EmbeddingKind::Openai), "retrieval.embedding", "openai", "url", embedding.url.is_some()),
        (embedding_is(EmbeddingKind::Openai), "retrieval.embedding", "openai", "model", embedding.model.is_some()),
        (embedding_is(EmbeddingKind::Local), "retrieval.embedding", "local", "path", embedding.path.is_some()),
        (rerank_is(RerankKind::Local), "retrieval.rerank", "local", "path", rerank.path.is_some()),
        (rerank_is(RerankKind::Tei), "retrieval.rerank", "tei", "url", rerank.url.is_some()),
        (rerank_is(RerankKind::Cohere), "retrieval.rerank", "cohere", "url", rerank.url.is_some()),
        (rerank_is(RerankKind::Cohere), "retrieval.rerank", "cohere", "model", rerank.model.is_some()),
    ];
    for (_, section, kind, key, is_given) in needed.into_iter().filter(|(is_kind, ..)| *is_kind) {
        need(&format!("{section}.{key}"), is_given, &format!("{section}.kind = \"{kind}\""));
    }
    if config.budget.is_some() {
        let asked = [
            ("teacher", called_teacher == Some(TeacherKind::Openai), teacher.endpoint()),
            ("fallback_teacher", config.fallback_teacher.base_url.is_some(), config.fallback_teacher.endpoint()),
            ("judge", judge.kind == JudgeKind::Openai, judge.endpoint()),
        ];
        for (section, _, endpoint) in asked.into_iter().filter(|(_, is_asked, _)| *is_asked) {
            let prices = [
                ("price_prompt_per_million", endpoint.price_prompt_per_million),
                ("price_completion_per_million", endpoint.price_completion_per_million),
            ];
            for (key, price) in prices {
                need(&format!("{section}.{key}"), price.is_some(), "budget");
            }
        }
        let is_priced = embedding.kind != EmbeddingKind::Openai || embedding.price().is_some();
        need("retrieval.embedding.price_prompt_per_million", is_priced, "budget");
        if retrieval.calls_rerank_service() && rerank.price().is_none() {
            let key = "retrieval.rerank.price_per_thousand_calls";
            let message = format!(
                "the key retrieval.rerank.price_prompt_per_million or the key {key} is missing; budget needs it"
            );
            violations.push(Violation::new(key, message));
        }
    }
    if is_embedded && embedding.kind == EmbeddingKind::Openai {
        let expected = "local or none, as the embedded index makes its vectors in this process";
        violations.push(wrong_text("retrieval.embedding.kind", "openai", expected));
    }
    check_endpoint("teacher", &teacher.endpoint(), violations);
    check_comparison(judge, violations);
    check_endpoint("fallback_teacher", &config.fallback_teacher.endpoint(), violations);
    check_endpoint("judge", &judge.endpoint(), violations);
    let services = [
        ("retrieval", &retrieval.url, &retrieval.api_key_env),
        ("retrieval.embedding", &embedding.url, &embedding.api_key_env),
        ("retrieval.rerank", &rerank.url, &rerank.api_key_env),
    ];
    for (section, url, api_key_env) in services {
        check_url(&format!("{section}.url"), url.as_deref(), violations);
        check_key_variable(section, api_key_env, violations);
    }
    check_url("calls.proxy", config.calls.proxy.as_deref(), violations);
}

fn check_comparison(judge: &JudgeConfig, violations: &mut Vec<Violation>) {
    if judge.form == JudgeForm::Compare && judge.kind == JudgeKind::Rubric {
        let problem = "is \"compare\"; judge.kind = \"rubric\" gives scores alone, expected \"score\"";
        violations.push(Violation::of("judge.form", problem));
    }
    if judge.dimensions.is_empty() {
        violations.push(Violation::of("judge.dimensions", "is empty; expected at least one"));
    }
}

/// Settings of a style model without a path.
fn check_style_model(style: &StyleModelConfig, violations: &mut Vec<Violation>) {
    let default = StyleModelConfig::default();
    let set = [
        ("base", style.base.is_some()),
        ("max_length", style.max_length != default.max_length),
        ("calibrated", style.calibrated),
        ("audit", style.audit.is_some()),
    ];
    if style.path.is_none() {
        for (name, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
            let key = format!("plugins.style_model.{name}");
            let problem = "is set and plugins.style_model.path is not; name a classifier there, or leave it out";
            violations.push(Violation::of(key, problem));
        }
    }
}

/// Settings that would be ignored, and requests that a service does not support.
fn check_retrieval(retrieval: &RetrievalConfig, violations: &mut Vec<Violation>) {
    let mut refuse = |key: &str, problem: &str| violations.push(Violation::of(key, problem));
    let RetrievalConfig { kind, service, mapping, rerank, .. } = retrieval;
    let is_mapped = *kind == RetrievalKind::Http && *service != ServiceKind::GeneralRag;
    // A file may have both a URL (for a client) and a knowledge base (for `querl serve rag`), each with its settings.
    let is_unused = if *kind == RetrievalKind::Http { !is_mapped } else { retrieval.url.is_none() };
    if is_unused && *mapping != MappingConfig::default() {
        let other = match kind {
            RetrievalKind::Http => "retrieval.service = \"general_rag\"",
            RetrievalKind::Embedded => "retrieval.kind = \"embedded\"",
            RetrievalKind::None => "retrieval.kind = \"none\"",
        };
        refuse("retrieval.mapping", &format!("is set; {other} has no use for it, leave it out"));
    }
    if *kind == RetrievalKind::None {
        let set = [
            ("knowledge_base", retrieval.knowledge_base.is_some()),
            ("url", retrieval.url.is_some()),
            ("rerank", rerank.kind != RerankKind::None),
        ];
        for (name, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
            let problem = "is set; retrieval.kind = \"none\" has no use for it, leave it out";
            refuse(&format!("retrieval.{name}"), problem);
        }
    }
    if rerank.kind == RerankKind::Local && rerank.scores == RerankScores::Logit {
        let problem = "is \"logit\"; a local cross-encoder's scores are made 0 to 1 in any case, leave it out";
        refuse("retrieval.rerank.scores", problem);
    }
    if rerank.extra.is_some() && matches!(rerank.kind, RerankKind::None | RerankKind::Local) {
        refuse("retrieval.rerank.extra", "is set; only a service (tei, cohere) gets it, leave it out");
    }
    if is_mapped {
        check_mapping(retrieval, violations);
    }
}

fn check_mapping(retrieval: &RetrievalConfig, violations: &mut Vec<Violation>) {
    let mut refuse = |key: &str, problem: String| violations.push(Violation::of(key, problem));
    let RetrievalConfig { service, mapping, rerank, .. } = retrieval;
    let has_scores = mapping.score.as_ref().map_or(service.has_scores(), |pointers| !pointers.is_empty());
    if !has_scores && rerank.kind == RerankKind::None {
        let without = match (&mapping.score, service) {
            (Some(_), _) => "retrieval.mapping.score names no scores",
            (None, ServiceKind::Chatchat) => "retrieval.service = \"chatchat\" sends no scores",
            (None, _) => "retrieval.service = \"custom\" sends no scores",
        };
        refuse("retrieval.rerank.kind", format!("is \"none\"; {without}, so a reranker is required"));
    }
    let wanted =
        if rerank.kind == RerankKind::None { retrieval.top_k } else { rerank.n_candidates.max(retrieval.top_k) };
    let most = mapping.top_k_range.map(|[_, most]| most).or(service.most_passages());
    if let Some(most) = most.filter(|most| wanted > *most) {
        let key = if rerank.kind == RerankKind::None { "retrieval.top_k" } else { "retrieval.rerank.n_candidates" };
        refuse(key, format!("asks for {wanted} passages; the service returns at most {most}"));
    }
    let (has_status, has_success) = (mapping.status.is_some(), mapping.success.is_some());
    if has_status && !has_success && !service.has_status() {
        refuse("retrieval.mapping.success", "is missing; retrieval.mapping.status needs it".into());
    }
    if has_success && !has_status && !service.has_status() {
        refuse("retrieval.mapping.status", "is missing; retrieval.mapping.success says nothing without it".into());
    }
    for (key, range) in [("score_range", mapping.score_range), ("threshold_range", mapping.threshold_range)] {
        if let Some([low, high]) = range.filter(|[low, high]| !(low.is_finite() && high.is_finite() && low < high)) {
            let problem = format!("is [{low:?}, {high:?}]; expected two numbers, the lower first");
            refuse(&format!("retrieval.mapping.{key}"), problem);
        }
    }
    if let Some([low, high]) = mapping.top_k_range.filter(|[low, high]| low > high || *high == 0) {
        refuse("retrieval.mapping.top_k_range", format!("is [{low}, {high}]; expected two numbers, the lower first"));
    }
}

fn check_endpoint(section: &str, endpoint: &EndpointConfig, violations: &mut Vec<Violation>) {
    check_url(&format!("{section}.base_url"), endpoint.base_url.as_deref(), violations);
    check_key_variable(section, &endpoint.api_key_env, violations);
}

fn check_key_variable(section: &str, name: &str, violations: &mut Vec<Violation>) {
    let is_name =
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !name.starts_with(|c: char| c.is_ascii_digit());
    if !is_name {
        // The value is not shown: it may be the key itself, put here by mistake.
        let problem =
            "is not the name of an environment variable; put the key into the environment and name the variable here";
        violations.push(Violation::of(format!("{section}.api_key_env"), problem));
    }
}

fn check_url(key: &str, url: Option<&str>, violations: &mut Vec<Violation>) {
    let Some(url) = url else { return };
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let host = rest.map(|rest| rest.split(['/', '?', '#']).next().unwrap_or_default());
    // A value with `@` or `?` is not shown: it may hold a key.
    let hidden = |problem: &str| Violation::of(key, problem);
    let violation = match host {
        Some(host) if host.contains('@') => {
            hidden("holds a user name or password; put the key into the environment instead")
        }
        Some(_) if url.contains('?') => hidden("holds a query (`?`), which may be a key; give the address without it"),
        None if url.contains(['@', '?']) => hidden("is not an address that begins with http:// or https://"),
        None => wrong_text(key, url, "an address that begins with http:// or https://"),
        Some("") => wrong_text(key, url, "an address with a host"),
        Some(_) => return,
    };
    violations.push(violation);
}

fn check_systems(config: &Config, violations: &mut Vec<Violation>) {
    let mut seen = BTreeSet::new();
    for (index, system) in config.eval.systems.iter().enumerate() {
        let key = format!("eval.systems[{index}]");
        if !EVAL_SYSTEMS.contains(&system.as_str()) {
            violations.push(wrong_text(&key, system, &or_list(&EVAL_SYSTEMS)));
        } else if !seen.insert(system) {
            violations.push(Violation::new(&key, format!("eval.systems names {system} twice")));
        }
    }
    if config.eval.systems.is_empty() {
        violations.push(Violation::of("eval.systems", format!("is empty; expected {}", or_list(&EVAL_SYSTEMS))));
    }
    let n_samples = config.eval.best_of_n;
    if n_samples == 1 || (n_samples == 0 && seen.iter().any(|system| *system == "best_of_n")) {
        let problem = format!("is {n_samples}; the system best_of_n chooses among samples, expected at least 2");
        violations.push(Violation::of("eval.best_of_n", problem));
    }
}

fn check_second_retrieval(config: &Config, violations: &mut Vec<Violation>) {
    let (key, kind) = ("eval.second_retrieval", config.eval.second_retrieval);
    let is_asked = matches!(kind, SecondRetrieval::Lexical | SecondRetrieval::Semantic);
    if is_asked && config.retrieval.knowledge_base.is_none() {
        let problem =
            "searches the passages of retrieval.knowledge_base, which is not set; name the file there, or use \"none\"";
        violations.push(Violation::of(key, problem));
    }
    if kind == SecondRetrieval::Semantic && config.second_embedding_path().is_none() {
        let problem = "the key eval.embedding_path is missing; eval.second_retrieval = \"semantic\" needs it";
        violations.push(Violation::new("eval.embedding_path", problem));
    }
    if kind != SecondRetrieval::Semantic && config.eval.embedding_path.is_some() {
        let problem = "is set; only eval.second_retrieval = \"semantic\" has a use for it, leave it out";
        violations.push(Violation::of("eval.embedding_path", problem));
    }
}
