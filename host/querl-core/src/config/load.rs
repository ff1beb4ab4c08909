//! Loads a [`Config`] from a file and command line overrides.

use super::check::{
    ModelHub, PathBases, check, check_model_path, key_files, look_up_models, model_names, resolve_paths,
};
use super::document::{Document, DocumentError, Origin};
use super::run::Config;
use super::schema::{Violation, conform, json_schema, missing_sections};
use crate::fsx::{io_problem, read_bounded};
use std::io;
use std::path::{Path, PathBuf};

/// Maximum size of a configuration file.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Hidden size below which a model is small. SmolLM-135M has 576.
pub(super) const SMALL_HIDDEN_SIZE: u64 = 512;

/// Defaults with a small model. A narrow model needs larger learning rates (with Adam they grow as the width falls: Yang et al. 2022,
/// "Tensor Programs V", table 3) and copies poorly, so that it edits a query instead of writing it again; groups of samples replace the
/// critic. Measured in docs/benchmarks.md.
pub(super) const SMALL_MODEL_DEFAULTS: &str = r#"
[data]
rewrite_form = "edit"

[sft]
learning_rate = 1e-3
epochs = 6
batch_size = 16
gradient_accumulation_steps = 1
eval_steps = 0

[rl]
algorithm = "rloo"
n_samples = 8
batch_size = 16
ppo_epochs = 2
learning_rate = 7e-4
critic_learning_rate = 1e-3
kl_coef = 0.02
ent_coef = 0.003
max_new_tokens = 32

[eval]
systems = ["raw", "with_history", "expanded", "teacher", "sft", "rl"]
"#;

/// Overrides from the command line.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `KEY=VALUE`: dotted key and TOML value; a bare word is a string.
    pub set: Vec<String>,
    /// Replaces `output_dir`.
    pub out: Option<PathBuf>,
    /// Replaces `threads`.
    pub threads: Option<usize>,
    /// Looks up models by name, after everything else is checked; without it such a name is an error.
    pub model_hub: Option<ModelHub>,
    /// Replaces `model_hub` for the models of `[retrieval]`: for a command that opens only these models.
    pub retrieval_hub: Option<ModelHub>,
    /// Files with API keys of services need not exist: for a command that calls no service.
    pub without_keys: bool,
    /// Whether the folder of `model.path` has to exist.
    pub missing_model: MissingModel,
}

/// What happens if the folder of `model.path` does not exist.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MissingModel {
    /// Loading fails.
    #[default]
    Refused,
    /// Allowed: for a command that opens no model, or checks it after everything else with [`ConfigFile::check_model`].
    Allowed,
    /// Allowed, and the defaults are those of a small model even if the folder exists: for a command that creates a small model.
    Small,
}

/// Location of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigLocation {
    /// The file as a whole.
    File(PathBuf),
    /// A 1-based line of the file.
    Line(PathBuf, usize),
    /// A flag of the command line, without its value.
    Flag(String),
}

impl std::fmt::Display for ConfigLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Line(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Flag(flag) => f.write_str(flag),
        }
    }
}

/// Errors of loading a configuration. `hint` is empty or suggests another file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("{}: no such file{hint}", path.display())]
    Missing { path: PathBuf, hint: String },
    #[error("{}: cannot be read: {}", path.display(), io_problem(source))]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{location}: {message}")]
    Invalid { location: ConfigLocation, message: String },
    /// `flag` sets the key whose value cannot be used: `--set rl.gamma`, `is 2; expected 0.0 to 1.0`.
    #[error("{flag} {problem}")]
    Flag { flag: String, problem: String },
}

/// Reads, overrides, resolves and checks the configuration at `path`.
///
/// Relative paths in the file are relative to the file's folder; those of overrides, and `output_dir`, to the current folder.
///
/// # Errors
/// The first error in file order; errors of flags come first.
pub fn load(path: &Path, overrides: &Overrides) -> Result<Config, ConfigError> {
    Ok(load_with_file(path, overrides)?.0)
}

/// Like [`load()`]; also returns the file, to give later errors their location.
///
/// # Errors
/// Those of [`load()`].
pub fn load_with_file(path: &Path, overrides: &Overrides) -> Result<(Config, ConfigFile), ConfigError> {
    let bytes = read(path)?;
    let document = parse(&bytes, overrides).map_err(|fault| match fault.origin {
        Some(Origin::Line(_)) if is_data(path) => {
            let message = "a file of data, not a configuration; expected a TOML file, such as querl.toml".into();
            ConfigError::Invalid { location: ConfigLocation::File(path.into()), message }
        }
        _ => at(path, fault),
    })?;
    let is_small = overrides.missing_model == MissingModel::Small || has_small_model(&document, path);
    let mut config = build(&document, path, overrides, is_small)?;
    // For a model name on a hub, the folder is known now.
    if !is_small && is_small_model(&config.model.path) {
        config = build(&document, path, overrides, true)?;
    }
    Ok((config, ConfigFile { path: path.to_owned(), document }))
}

/// A configuration file that was read, with the overrides of its values.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    document: Document,
}

impl ConfigFile {
    /// Location of `key`, or of the only key that ends with `.key`; if it is not set, of its section. `None` if neither is set.
    pub fn location_of(&self, key: &str) -> Option<ConfigLocation> {
        let origin = self.document.ending_with(key).or_else(|| self.document.origin(key))?;
        Some(location(&self.path, Some(origin.clone())))
    }

    /// Checks `model.path` of a configuration that was loaded from this file with [`MissingModel::Allowed`].
    ///
    /// # Errors
    /// There is no such folder.
    pub fn check_model(&self, config: &Config) -> Result<(), ConfigError> {
        let violation = check_model_path(config, PathBases::new(&self.document, &self.path));
        first_of(violation.into_iter().collect(), &self.document, &self.path)
    }
}

/// True if a file name is that of a table, a dataset or a knowledge base.
fn is_data(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default();
    ["jsonl", "json", "csv", "tsv", "txt", "xlsx", "parquet"].iter().any(|known| ending.eq_ignore_ascii_case(known))
}

/// The checked configuration of a document, with absolute paths and the folders of models on a hub.
fn build(document: &Document, path: &Path, overrides: &Overrides, is_small: bool) -> Result<Config, ConfigError> {
    let bases = PathBases::new(document, path);
    let mut config = shaped(document, path, is_small)?;
    if let Some(out) = &overrides.out {
        config.output_dir = out.clone();
    }
    let names = overrides.model_hub.map_or_else(Vec::new, |_| model_names(&mut config, bases));
    resolve_paths(&mut config, bases, &names);
    // All other paths are relative to the file or written in it, and it is UTF-8.
    for path in [std::path::absolute(path).unwrap_or_else(|_| path.into()), config.output_dir.clone()] {
        if path.to_str().is_none() {
            let message = "the path is not UTF-8 text; rename the file or folder".into();
            return Err(ConfigError::Invalid { location: ConfigLocation::File(path), message });
        }
    }
    let mut unchecked = Vec::new();
    if overrides.without_keys {
        unchecked.extend(key_files(&mut config));
    }
    if overrides.missing_model != MissingModel::Refused {
        unchecked.push("model.path".into());
    }
    first_of(check(&mut config, &unchecked, bases), document, path)?;
    if let Some(hub) = overrides.model_hub {
        let of_retrieval = overrides.retrieval_hub.unwrap_or(hub);
        let hub_of = |key: &str| if key.starts_with("retrieval.") { of_retrieval } else { hub };
        first_of(look_up_models(&mut config, bases, &names, hub_of), document, path)?;
    }
    Ok(config)
}

/// Reads a run's resolved configuration: checks the schema, but not that input files exist.
///
/// # Errors
/// The first error in file order.
pub fn load_resolved(path: &Path) -> Result<Config, ConfigError> {
    let document = Document::parse(&read(path)?).map_err(|fault| at(path, fault))?;
    shaped(&document, path, false)
}

/// True if the folder `model.path` of a document has a small model.
fn has_small_model(document: &Document, path: &Path) -> bool {
    let model = document.table.get("model").and_then(|model| model.get("path")?.as_str());
    model.is_some_and(|model| is_small_model(&PathBases::new(document, path).of("model.path").join(model)))
}

fn is_small_model(folder: &Path) -> bool {
    let file = folder.join("config.json");
    let Ok(bytes) = read_bounded(&file, crate::model_config::MAX_BYTES) else { return false };
    let shape: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
    shape.and_then(|shape| shape["hidden_size"].as_u64()).is_some_and(|width| width < SMALL_HIDDEN_SIZE)
}

impl Config {
    /// The configuration as a file that [`load()`] reads back to an equal value.
    pub fn to_toml(&self) -> String {
        let text = toml::to_string_pretty(self).expect("every field of the configuration has a TOML form");
        format!("# Written by querl: every value in force, every path absolute.\n{text}")
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ConfigError> {
    if path.is_dir() {
        let files = ["querl.toml", "config.resolved.toml"].map(|file| path.join(file));
        let hint = files.iter().find(|file| file.is_file());
        let hint = hint.map_or_else(String::new, |file| format!("; did you mean {}?", file.display()));
        let message = format!("is a folder, not a configuration file{hint}");
        return Err(ConfigError::Invalid { location: ConfigLocation::File(path.into()), message });
    }
    read_bounded(path, MAX_CONFIG_BYTES).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound if path.is_symlink() => {
            ConfigError::Missing { path: path.into(), hint: ", only a link to one that is not there".into() }
        }
        io::ErrorKind::NotFound => ConfigError::Missing { path: path.into(), hint: neighbour(path) },
        _ => ConfigError::Unreadable { path: path.into(), source },
    })
}

/// Suggests a file with a similar name in the same folder, or shows what is expected. Nothing for the configuration of a run.
fn neighbour(path: &Path) -> String {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let wanted = path.file_name().unwrap_or_default().to_string_lossy();
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let near = names.filter(|name| name.ends_with(".toml")).map(|name| (strsim::jaro_winkler(&wanted, &name), name));
    match near.filter(|(likeness, _)| *likeness > 0.8).max_by(|one, other| one.0.total_cmp(&other.0)) {
        Some((_, name)) => format!("; did you mean {}?", path.with_file_name(name).display()),
        None if wanted == "config.resolved.toml" => String::new(),
        None => {
            let known = [path.with_file_name("querl.toml"), "examples/fivedoctors/querl.toml".into()];
            let existing = known.iter().find(|path| path.is_file());
            let such = existing.map_or(String::new(), |path| format!(", such as {}", path.display()));
            format!("; expected the path of a configuration file{such}")
        }
    }
}

fn parse(bytes: &[u8], overrides: &Overrides) -> Result<Document, DocumentError> {
    let mut document = Document::parse(bytes)?;
    for assignment in &overrides.set {
        document.set(assignment)?;
    }
    if let Some(threads) = overrides.threads {
        let value = toml::Value::Integer(i64::try_from(threads).unwrap_or(i64::MAX));
        let origin = Origin::Flag("--threads".into());
        document
            .put("threads", value, origin.clone())
            .map_err(|message| DocumentError { origin: Some(origin), message })?;
    }
    Ok(document)
}

/// Deserialises a document that conforms to the schema.
fn shaped(document: &Document, path: &Path, is_small: bool) -> Result<Config, ConfigError> {
    if ["corpus", "vocab_size"].iter().all(|key| document.table.contains_key(*key)) {
        let message = "a file for `querl model pretrain`; expected a configuration of `querl run`, such as \
                       examples/appliances/querl.toml";
        return Err(ConfigError::Invalid { location: ConfigLocation::File(path.into()), message: message.into() });
    }
    let mut violations = conform(&document.table, json_schema());
    violations.extend(missing_sources(&document.table));
    first_of(violations, document, path)?;
    let table = without_default_limit(document.table.clone());
    let table = if is_small { with_small_model_defaults(table) } else { table };
    table.try_into().map_err(|error: toml::de::Error| {
        // The schema is derived from the type: only a number out of its type's range is an error here.
        let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        ConfigError::Invalid { location: ConfigLocation::File(path.into()), message }
    })
}

/// The query table and the teacher, which only `data.dataset` replaces.
fn missing_sources(table: &toml::Table) -> Vec<Violation> {
    let Some(data) = table.get("data").and_then(toml::Value::as_table) else { return Vec::new() };
    let dataset = data.get("dataset").and_then(toml::Value::as_table);
    if dataset.is_some_and(|files| !files.is_empty()) {
        return Vec::new();
    }
    let input = Violation::new("data.input", "the key data.input is missing; expected a string");
    let sources =
        [(data.contains_key("input"), input), (table.contains_key("teacher"), missing_sections(&["teacher"]))];
    sources.into_iter().filter(|(is_given, _)| !is_given).map(|(_, missing)| missing).collect()
}

/// The default of `rl.max_steps` is for a configuration without `rl.epochs`.
fn without_default_limit(mut table: toml::Table) -> toml::Table {
    if let Some(toml::Value::Table(rl)) = table.get_mut("rl")
        && rl.contains_key("epochs")
    {
        rl.entry("max_steps").or_insert(toml::Value::Integer(0));
    }
    table
}

/// Adds the keys of [`SMALL_MODEL_DEFAULTS`] that a section does not have. Edits apply to queries, so not without retrieval, where the
/// policy writes answers. `with_history`, the effect of adding the history without training, is evaluated if the policy can add it.
fn with_small_model_defaults(mut table: toml::Table) -> toml::Table {
    let defaults: toml::Table = SMALL_MODEL_DEFAULTS.parse().expect("the defaults are TOML");
    let is = |section: &str, key: &str, value: &str| {
        table.get(section).is_some_and(|own| own.get(key).is_some_and(|own| own.as_str() == Some(value)))
    };
    let skipped: &[&str] = match is("retrieval", "kind", "none") {
        true => &["data", "eval"],
        false if is("data", "rewrite_form", "full") => &["eval"],
        false => &[],
    };
    for (section, keys) in defaults.into_iter().filter(|(section, _)| !skipped.contains(&section.as_str())) {
        let own = table.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        if let (toml::Value::Table(own), toml::Value::Table(keys)) = (own, keys) {
            keys.into_iter().for_each(|(key, value)| {
                own.entry(key).or_insert(value);
            });
        }
    }
    table
}

/// Fails with the first violation in file order.
fn first_of(violations: Vec<Violation>, document: &Document, path: &Path) -> Result<(), ConfigError> {
    let located = violations.into_iter().map(|violation| (document.origin(&violation.key).cloned(), violation));
    let order = |origin: &Option<Origin>| match origin {
        Some(Origin::Flag(_)) => 0,
        Some(Origin::Line(line)) => *line,
        None => usize::MAX,
    };
    match located.min_by_key(|(origin, _)| order(origin)) {
        Some((Some(Origin::Flag(flag)), Violation { key, message })) if document.is_written(&key) => {
            Err(match message.strip_prefix(&format!("{key} ")) {
                Some(problem) => ConfigError::Flag { flag, problem: problem.into() },
                None => ConfigError::Invalid { location: ConfigLocation::Flag(flag), message },
            })
        }
        Some((origin, Violation { message, .. })) => Err(at(path, DocumentError { origin, message })),
        None => Ok(()),
    }
}

fn at(path: &Path, fault: DocumentError) -> ConfigError {
    ConfigError::Invalid { location: location(path, fault.origin), message: fault.message }
}

fn location(path: &Path, origin: Option<Origin>) -> ConfigLocation {
    match origin {
        Some(Origin::Line(line)) => ConfigLocation::Line(path.into(), line),
        Some(Origin::Flag(flag)) => ConfigLocation::Flag(flag),
        None => ConfigLocation::File(path.into()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::config::RewriteForm;

    const GOOD: &str = r#"tenant = "fivedoctors"
[data]
input = "queries.xlsx"
[teacher]
kind = "recorded"
path = "teacher.jsonl"
[judge]
kind = "rubric"
[retrieval]
kind = "embedded"
knowledge_base = "kb.jsonl"
lexicon = "lexicon.toml"
[model]
path = "tiny"
[rl]
gae_lambda = 0.95
[plugins.prompt]
path = "prompt.wasm"
[[plugins.filters]]
path = "filter.wasm"
settings = { top1 = 0.4, "词" = ["a"] }
[[plugins.rewards]]
path = "reward.wasm"
"#;

    fn folder(text: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let inputs =
            ["queries.xlsx", "teacher.jsonl", "kb.jsonl", "lexicon.toml", "prompt.wasm", "filter.wasm", "reward.wasm"];
        for name in inputs {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("tiny")).unwrap();
        std::fs::write(folder.path().join("querl.toml"), text).unwrap();
        folder
    }

    /// A configuration with values in every section.
    pub(in crate::config) fn example() -> Config {
        let folder = folder(GOOD);
        load(&folder.path().join("querl.toml"), &Overrides::default()).unwrap()
    }

    #[test]
    fn a_small_model_has_its_own_defaults_for_keys_that_are_not_set() {
        let folder = folder(GOOD);
        let with = |width: u64, set: &[&str]| {
            std::fs::write(folder.path().join("tiny/config.json"), format!("{{\"hidden_size\": {width}}}")).unwrap();
            let set = set.iter().map(|flag| (*flag).to_owned()).collect();
            load(&folder.path().join("querl.toml"), &Overrides { set, ..Overrides::default() }).unwrap()
        };
        let (wide, usual) = (with(SMALL_HIDDEN_SIZE, &[]), example());
        let (of_wide, of_usual) = ((&wide.sft, &wide.rl), (&usual.sft, &usual.rl));
        assert_eq!((of_wide, wide.data.rewrite_form), (of_usual, RewriteForm::Full));
        let small = with(192, &["rl.kl_coef=0.5"]);
        assert_eq!((small.data.rewrite_form, small.sft.learning_rate), (RewriteForm::Edit, 1e-3));
        assert_eq!((small.rl.n_samples, small.rl.kl_coef, small.rl.gae_lambda), (8, 0.5, 0.95));
        assert_eq!(small.eval.systems[1], "with_history");
        assert_eq!(with(192, &["data.rewrite_form=full"]).eval.systems, usual.eval.systems);
        for config in [&wide, &small] {
            // On by default, after as many evaluations as docs/training.md says.
            assert_eq!((config.sft.early_stopping_patience, config.rl.early_stopping_patience), (3, 5));
            // A kill costs at most a minute of training.
            assert_eq!((config.sft.save_interval_s, config.rl.save_interval_s), (60, 60));
        }
        std::fs::write(folder.path().join("tiny/config.json"), "{\"hidden_size\": 896}").unwrap();
        let before = Overrides { missing_model: MissingModel::Small, ..Overrides::default() };
        let before = load(&folder.path().join("querl.toml"), &before).unwrap();
        assert_eq!(before.data.rewrite_form, RewriteForm::Edit);
        let set = vec!["model.path=none".into()];
        let optional = Overrides { missing_model: MissingModel::Allowed, set, ..Overrides::default() };
        let (optional, file) = load_with_file(&folder.path().join("querl.toml"), &optional).unwrap();
        assert_eq!(optional.data.rewrite_form, RewriteForm::Full);
        let missing = file.check_model(&optional).unwrap_err().to_string();
        assert!(missing.starts_with("--set model.path is \""), "{missing}");
        assert!(missing.contains("none\"; no such folder"), "{missing}");
        let answers = with_small_model_defaults("retrieval.kind = 'none'".parse().unwrap());
        assert_eq!((answers.get("data"), answers["rl"]["n_samples"].as_integer()), (None, Some(8)));
        // The configuration that a run writes has every key.
        let resolved = folder.path().join("resolved.toml");
        std::fs::write(&resolved, with(192, &["rl.n_samples=4", "data.rewrite_form=full"]).to_toml()).unwrap();
        let read = load(&resolved, &Overrides::default()).unwrap();
        assert_eq!((read.rl.n_samples, read.data.rewrite_form), (4, RewriteForm::Full));
    }

    /// Symptom: a small model by its name on a hub had the defaults of a large one.
    #[test]
    fn a_small_model_on_a_hub_has_the_same_defaults_once_it_is_downloaded() {
        let folder = folder(&GOOD.replace("\"tiny\"", "\"shop/tiny\""));
        let of = |hub: ModelHub| {
            let overrides = Overrides { model_hub: Some(hub), ..Overrides::default() };
            load(&folder.path().join("querl.toml"), &overrides).unwrap()
        };
        let found = of(|_| Ok(Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-qwen3"))));
        assert!(found.model.path.ends_with("examples/tiny-qwen3"));
        assert_eq!((found.data.rewrite_form, found.rl.n_samples, found.rl.gae_lambda), (RewriteForm::Edit, 8, 0.95));
        let unknown = of(|_| Ok(None));
        assert_eq!((unknown.data.rewrite_form, unknown.model.path), (RewriteForm::Full, "shop/tiny".into()));
    }

    /// Symptom: for a folder that did not exist yet, the message mentioned only the hub.
    #[test]
    fn a_missing_folder_whose_path_is_also_a_name_on_a_hub_is_named_as_both() {
        let folder = folder(&GOOD.replace("\"tiny\"", "\"shop/tiny\""));
        let hub: ModelHub = |_| Err("no such model".into());
        let refusal = |set: &[&str]| {
            let set = set.iter().map(|flag| (*flag).to_owned()).collect();
            let overrides = Overrides { set, model_hub: Some(hub), ..Overrides::default() };
            load(&folder.path().join("querl.toml"), &overrides).unwrap_err().to_string()
        };
        let expected = "querl.toml:14: model.path is \"shop/tiny\"; no such folder next to the configuration; taken as a model's name on a \
                        hub: no such model";
        assert!(refusal(&[]).contains(expected), "{}", refusal(&[]));
        let flag = refusal(&["model.path=shop/small"]);
        assert!(flag.contains("no such folder in the current folder; taken as a model's name on a hub"), "{flag}");
        // Symptom: for a retrieval model, `querl plan` reported the key without the line.
        let path = folder.path().join("querl.toml");
        let retrieval = "[retrieval.embedding]\nkind = \"local\"\npath = \"shop/embed\"\n[model]";
        std::fs::write(&path, GOOD.replace("[model]", retrieval)).unwrap();
        let cached: ModelHub = |_| Ok(None);
        let overrides = |retrieval_hub| Overrides { model_hub: Some(cached), retrieval_hub, ..Overrides::default() };
        let refusal = load(&path, &overrides(Some(hub))).unwrap_err().to_string();
        let expected = "querl.toml:15: retrieval.embedding.path is \"shop/embed\"; no such folder next to the configuration; taken as a";
        assert!(refusal.contains(expected), "{refusal}");
        load(&path, &overrides(None)).unwrap();
    }

    /// Symptom: `smal/model` for `small/model` was taken as a model's name on a hub.
    #[test]
    fn a_path_with_a_typing_error_is_not_taken_as_a_name_on_a_hub() {
        let of = |model: &str, missing_model| {
            let folder = folder(&GOOD.replace("\"tiny\"", &format!("{model:?}")));
            std::fs::create_dir_all(folder.path().join("small/model")).unwrap();
            std::fs::create_dir(folder.path().join("qwen")).unwrap();
            std::fs::write(folder.path().join("large"), "no folder").unwrap();
            let hub: ModelHub = |_| Ok(None);
            let overrides = Overrides { missing_model, model_hub: Some(hub), ..Overrides::default() };
            let (config, file) = load_with_file(&folder.path().join("querl.toml"), &overrides)?;
            file.check_model(&config)
        };
        let expected = "querl.toml:14: model.path is \"smal/model\"; no such folder, but there is a folder \"small\" next to the \
                        configuration; write \"small/model\" for a folder, or \"smal/model@main\" for a model on a hub";
        for missing_model in [MissingModel::Refused, MissingModel::Allowed] {
            let refused = of("smal/model", missing_model).unwrap_err().to_string();
            assert!(refused.ends_with(expected), "{refused}");
        }
        for name in ["smal/model@main", "shop/model", "smith/model", "larg/model", "Qwen/model", "smal/other"] {
            of(name, MissingModel::Refused).unwrap();
        }
    }

    #[test]
    fn the_defaults_of_a_small_model_are_documented() {
        for page in ["small-models.md", "zh-CN/small-models.md"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
            assert!(std::fs::read_to_string(path).unwrap().contains(SMALL_MODEL_DEFAULTS), "{page}");
        }
    }

    fn fault(text: &str, set: &[&str]) -> String {
        let folder = folder(text);
        let overrides = Overrides { set: set.iter().map(|flag| (*flag).to_owned()).collect(), ..Overrides::default() };
        let error = load(&folder.path().join("querl.toml"), &overrides).unwrap_err().to_string();
        let root = format!("{}/", folder.path().canonicalize().unwrap().display());
        error.replace(&root, "").replace(&format!("{}/", folder.path().display()), "")
    }

    #[test]
    fn paths_are_against_the_file_and_output_against_the_current_folder() {
        let folder = folder(GOOD);
        let config = load(&folder.path().join("querl.toml"), &Overrides::default()).unwrap();
        assert_eq!(config.data.input, Some(folder.path().canonicalize().unwrap().join("queries.xlsx")));
        assert_eq!(config.output_dir, std::env::current_dir().unwrap().join("runs/default"));
        assert_eq!(config.rl.gamma, 0.99);
    }

    #[test]
    fn paths_of_flags_are_against_the_current_folder() {
        let (folder, here) = (folder(GOOD), std::env::current_dir().unwrap());
        // Tests run in the folder of the crate.
        let set = [
            "data.input=Cargo.toml",
            "teacher.api_key_file=Cargo.toml",
            "model.path=src",
            "cache.path=new.redb",
            "retrieval.index_dir=new",
            "plugins.rewards.0.path=src",
            "plugins.filters=[{path = 'Cargo.toml'}]",
        ];
        let overrides = Overrides { set: set.map(str::to_owned).to_vec(), ..Overrides::default() };
        let config = load(&folder.path().join("querl.toml"), &overrides).unwrap();
        let plugins = &config.plugins;
        let [input, key] = [&config.data.input, &config.teacher.api_key_file].map(|path| path.as_ref().unwrap());
        let files = [input, key, &plugins.filters[0].path];
        assert_eq!(files, [&here.join("Cargo.toml"); 3]);
        assert_eq!([&config.model.path, &plugins.rewards[0].path], [&here.join("src"); 2]);
        assert_eq!(config.cache.path, Some(here.join("new.redb")));
        assert_eq!(config.retrieval.index_dir, Some(here.join("new")));
        assert_eq!(plugins.prompt.path, folder.path().canonicalize().unwrap().join("prompt.wasm"));
    }

    #[test]
    fn a_command_that_opens_no_model_is_run_before_there_is_one() {
        let folder = folder(&GOOD.replace("\"tiny\"", "\"to-be-made\""));
        let path = folder.path().join("querl.toml");
        assert!(load(&path, &Overrides::default()).unwrap_err().to_string().contains("model.path"));
        let overrides = Overrides { missing_model: MissingModel::Small, ..Overrides::default() };
        let config = load(&path, &overrides).unwrap();
        assert!(config.model.path.ends_with("to-be-made"));
    }

    #[test]
    fn flags_override_the_file() {
        let folder = folder(GOOD);
        let overrides = Overrides {
            set: vec!["rl.gae_lambda=0.5".into(), "plugins.rewards.0.weight=2".into()],
            out: Some("elsewhere".into()),
            threads: Some(3),
            ..Overrides::default()
        };
        let config = load(&folder.path().join("querl.toml"), &overrides).unwrap();
        assert_eq!((config.rl.gae_lambda, config.plugins.rewards[0].weight, config.threads), (0.5, 2.0, 3));
        assert!(config.output_dir.ends_with("elsewhere"));
        let same = Overrides { out: Some("src/../none/elsewhere".into()), ..Overrides::default() };
        let config = load(&folder.path().join("querl.toml"), &same).unwrap();
        assert_eq!(config.output_dir, std::env::current_dir().unwrap().join("none/elsewhere"));
    }

    #[test]
    fn epochs_replace_the_default_number_of_steps_and_not_one_that_is_set() {
        let steps = |text: &str, set: &[&str]| {
            let folder = folder(&GOOD.replace("gae_lambda = 0.95", text));
            let set = set.iter().map(|flag| (*flag).to_owned()).collect();
            let config = load(&folder.path().join("querl.toml"), &Overrides { set, ..Overrides::default() }).unwrap();
            let copy = folder.path().join("config.resolved.toml");
            std::fs::write(&copy, config.to_toml()).unwrap();
            assert_eq!(load(&copy, &Overrides::default()).unwrap(), config);
            config.rl.n_steps(64_000)
        };
        assert_eq!(steps("", &[]), 100);
        assert_eq!(steps("epochs = 2", &[]), 2000);
        assert_eq!(steps("epochs = 2", &["rl.max_steps=5"]), 5);
        assert_eq!(steps("max_steps = 70", &["rl.epochs=2"]), 70);
        let no_length = fault(&GOOD.replace("gae_lambda = 0.95", "max_steps = 0"), &[]);
        assert!(no_length.ends_with("rl.max_steps is 0; expected 1 or more, or a number of rl.epochs"), "{no_length}");
    }

    #[test]
    fn resolved_copy_loads_to_an_equal_configuration() {
        let folder = folder(GOOD);
        let config = load(&folder.path().join("querl.toml"), &Overrides::default()).unwrap();
        let copy = folder.path().join("config.resolved.toml");
        std::fs::write(&copy, config.to_toml()).unwrap();
        assert_eq!(load(&copy, &Overrides::default()).unwrap(), config);
        std::fs::remove_file(config.data.input.as_ref().unwrap()).unwrap();
        assert_eq!(load_resolved(&copy).unwrap(), config);
    }

    /// [`GOOD`] without query table and teacher, with `text` as its section `[data]`.
    fn without_table_and_teacher(text: &str) -> String {
        let teacher = "[teacher]\nkind = \"recorded\"\npath = \"teacher.jsonl\"\n";
        assert!(GOOD.contains(teacher));
        GOOD.replace(teacher, "").replace("input = \"queries.xlsx\"", text)
    }

    #[test]
    fn a_dataset_replaces_query_table_and_teacher() {
        let folder = folder(&without_table_and_teacher("dataset = { train = \"kb.jsonl\", test = \"teacher.jsonl\" }"));
        let config = load(&folder.path().join("querl.toml"), &Overrides::default()).unwrap();
        let root = folder.path().canonicalize().unwrap();
        assert_eq!(config.data.query_files(), [root.join("kb.jsonl"), root.join("teacher.jsonl")]);
        assert_eq!((config.data.dataset.has_splits(), config.called_teacher()), (true, None));
        let copy = folder.path().join("config.resolved.toml");
        std::fs::write(&copy, config.to_toml()).unwrap();
        assert_eq!(load(&copy, &Overrides::default()).unwrap(), config);
    }

    #[test]
    fn without_a_dataset_query_table_and_teacher_are_required() {
        let missing = "querl.toml:2: the key data.input is missing; expected a string";
        assert_eq!(fault(&GOOD.replace("input = \"queries.xlsx\"", ""), &[]), missing);
        assert_eq!(fault(&GOOD.replace("input = \"queries.xlsx\"", "dataset = {}"), &[]), missing);
        let table = without_table_and_teacher("input = \"queries.xlsx\"");
        let expected = "querl.toml: the section [teacher] is missing; examples/appliances/querl.toml is an example, and \
                        `querl config schema` lists the keys";
        assert_eq!(fault(&table, &[]), expected);
        let expected = "querl.toml: the sections [data], [model], [plugins], [retrieval] are missing; \
                        examples/appliances/querl.toml is an example, and `querl config schema` lists the keys";
        assert_eq!(fault("tenant = 't'", &[]), expected);
        let dataset = without_table_and_teacher("dataset = { train = \"none.jsonl\" }");
        let expected =
            "querl.toml:3: data.dataset.train is \"none.jsonl\"; no such file; create it or correct the path";
        assert_eq!(fault(&dataset, &[]), expected);
    }

    #[test]
    fn a_rollout_server_gets_only_settings_that_mean_the_same_there() {
        const SERVER: [&str; 3] =
            ["rollout.engine=openai", "rollout.base_url='http://127.0.0.1:8000/v1'", "rollout.model=m"];
        let refusal = |more: &[&str]| fault(GOOD, &[&SERVER[..], more].concat());
        let folder = folder(GOOD);
        let overrides = Overrides { set: SERVER.map(str::to_owned).to_vec(), ..Overrides::default() };
        assert!(load(&folder.path().join("querl.toml"), &overrides).is_ok());
        let cases = r#"
rl.repetition_penalty=1.1 | --set rl.repetition_penalty is 1.1; with rollout.engine = "openai" it would count the tokens of the prompt too, expected 1.0
rl.no_repeat_ngram_size=3 | --set rl.no_repeat_ngram_size is 3; rollout.engine = "openai" has no such setting, expected 0
rl.top_p=0.9 rollout.server=sglang | --set rl.top_p is 0.9; SGLang reports log-probabilities before filters, expected 1.0
sft.use_dora=true | --set sft.use_dora is true; servers of rollout.engine = "openai" load no adapters with magnitudes, expected false
rollout.adapter='a/b' | --set rollout.adapter is "a/b"; expected letters, digits, `.`, `_` and `-`
rollout.max_mismatch_kl=0.0 | --set rollout.max_mismatch_kl is 0.0; expected more than 0.0
rollout.base_url='tcp://127.0.0.1' | --set rollout.base_url is "tcp://127.0.0.1"; expected an address that begins with http:// or https://
"#;
        for case in cases.trim().lines() {
            let (more, message) = case.split_once(" | ").unwrap();
            assert_eq!(refusal(&more.split(' ').collect::<Vec<_>>()), message);
        }
        let missing = fault(GOOD, &["rollout.engine=openai"]);
        let expected = "the key rollout.base_url is missing; rollout.engine = \"openai\" needs it";
        assert!(missing.ends_with(expected), "{missing}");
    }

    #[test]
    fn what_is_not_split_over_devices_is_named_with_its_setting() {
        let fault = |setting| fault(GOOD, &["device=cpu:4", "model.tensor_parallel=2", setting]);
        let of = |setting: &str| {
            format!(
                "--set model.tensor_parallel is 2 and {setting}, which is not split over devices; change one of the two"
            )
        };
        assert_eq!(fault("sft.use_dora=true"), of("sft.use_dora is true"));
        assert_eq!(fault("sft.method=full"), of("sft.method is \"full\""));
        assert_eq!(fault("rl.off_by_one=true"), of("rl.off_by_one is true"));
    }

    /// A text in [`GOOD`], its replacement, and the error. `\n` is a line break.
    const FAULTS: &str = r#"
gae_lambda = 0.95 | gae_lambda = 1.4 | querl.toml:16: rl.gae_lambda is 1.4; expected 0.0 to 1.0
gae_lambda = 0.95 | learning_rate = 0 | querl.toml:16: rl.learning_rate is 0; expected more than 0.0, at most 1.0
gae_lambda = 0.95 | gamma = nan | querl.toml:16: rl.gamma is nan; expected 0.0 to 1.0
gae_lambda = 0.95 | max_steps = 2.5 | querl.toml:16: rl.max_steps is 2.5; expected an integer
gae_lambda = 0.95 | batch_size = -1 | querl.toml:16: rl.batch_size is -1; expected 1 to 65536
gae_lambda = 0.95 | gamma = "high" | querl.toml:16: rl.gamma is "high"; expected a number
gae_lambda = 0.95 | algorithm = "trpo" | querl.toml:16: rl.algorithm is "trpo"; expected ppo, grpo, dr_grpo, rloo, reinforce_plus_plus or raft
gae_lambda = 0.95 | algorithm = 3 | querl.toml:16: rl.algorithm is 3; expected ppo, grpo, dr_grpo, rloo, reinforce_plus_plus or raft
gae_lambda = 0.95 | algorithm = "grpo"\nn_samples = 1 | querl.toml:17: rl.n_samples is 1; rl.algorithm = "grpo" compares samples of one query, expected at least 2 ("ppo" takes 1)
gae_lambda = 0.95 | dual_clip = 1 | querl.toml:16: rl.dual_clip is 1.0; expected 0.0, or more than 1.0
gae_lambda = 0.95 | advantage_form = "sequence"\ndual_clip = 3.0 | querl.toml:17: rl.dual_clip is 3.0; rl.advantage_form = "sequence" has no such bound, expected 0.0
gae_lambda = 0.95 | kl_target = 6.0\nkl_coef = 0.0 | querl.toml:17: rl.kl_coef is 0.0; expected more than 0.0, since rl.kl_target adapts it by factors
gae_lambda = 0.95 | clip_range_high = 0.0 | querl.toml:16: rl.clip_range_high is 0.0; expected more than 0.0
gae_lambda = 0.95 | loss_agg = "mean" | querl.toml:16: rl.loss_agg is "mean"; expected algorithm, token-mean, seq-mean-token-mean, seq-mean-token-sum or seq-mean-token-sum-norm
gae_lambda = 0.95 | policy_loss = "gspo"\ndual_clip = 3.0 | querl.toml:17: rl.dual_clip is 3.0; rl.policy_loss = "gspo" has no such bound, expected 0.0
gae_lambda = 0.95 | advantage_form = "sequence"\npolicy_loss = "cispo" | querl.toml:17: rl.policy_loss is "cispo"; rl.advantage_form = "sequence" has one ratio per response, expected "ppo"
gae_lambda = 0.95 | advantage_form = "sequence"\nloss_agg = "token-mean" | querl.toml:17: rl.loss_agg is "token-mean"; rl.advantage_form = "sequence" averages over responses, expected "algorithm"
gae_lambda = 0.95 | algorithm = "raft"\nn_samples = 4\npolicy_loss = "gspo" | querl.toml:18: rl.policy_loss is "gspo"; rl.algorithm = "raft" has cross-entropy in its place, expected "ppo"
gae_lambda = 0.95 | algorithm = "raft"\nn_samples = 4\nclip_range_high = 0.28 | querl.toml:18: rl.clip_range_high is set; rl.algorithm = "raft" has cross-entropy without a clip, leave it out
gae_lambda = 0.95 | dynamic_sampling = true | querl.toml:16: rl.dynamic_sampling is true; rl.algorithm does not compare samples of one query, expected false
gae_lambda = 0.95 | anchor_baseline = 0 | querl.toml:16: rl.anchor_baseline is set; rl.algorithm does not compare samples of one query, leave it out
gae_lambda = 0.95 | overlong_buffer_len = 151 | querl.toml:16: rl.overlong_buffer_len is 151; expected at most rl.max_new_tokens, 150
gae_lambda | clip_rnage | querl.toml:16: unknown key rl.clip_rnage; did you mean rl.clip_range?
tenant = "fivedoctors" |  | querl.toml: the key tenant is missing; expected a string
[model]\npath = "tiny" |  | querl.toml: the section [model] is missing; examples/appliances/querl.toml is an example, and `querl config schema` lists the keys
gae_lambda | lr | querl.toml:16: unknown key rl.lr; did you mean rl.learning_rate?
gae_lambda | num_generations | querl.toml:16: unknown key rl.num_generations; did you mean rl.n_samples?
"rubric" | rubric | querl.toml:8: not valid TOML: the value is no number, true or false; a text needs quotes: "rubric"
0.95 | True | querl.toml:16: not valid TOML: the value is no number, true or false; a text needs quotes: "True"
path = "tiny" |  | querl.toml:13: the key model.path is missing; expected a string
path = "tiny" | path = "huge" | querl.toml:14: model.path is "huge"; no such folder; put the model there, make one with `querl model corpus` and `querl model pretrain`, or name one on a hub (ORG/NAME)
path = "tiny" | path = "kb.jsonl" | querl.toml:14: model.path is "kb.jsonl"; expected a folder
path = "teacher.jsonl" |  | querl.toml:4: the key teacher.path is missing; teacher.kind = "recorded" needs it
"recorded" | "openai" | querl.toml:4: the key teacher.base_url is missing; teacher.kind = "openai" needs it
"recorded" | "recordd" | querl.toml:5: teacher.kind is "recordd"; expected recorded, openai or local
"embedded" | "http" | querl.toml:9: the key retrieval.url is missing; retrieval.kind = "http" needs it
[data] | [data]\nsplit = [0.8, 0.1] | querl.toml:3: data.split is [0.8, 0.1]; expected a list of 3 numbers
[data] | [data]\nsplit = [0.8, 0.1, 0.3] | querl.toml:3: data.split is [0.8, 0.1, 0.3]; expected shares that sum to 1.0
[data] | [data]\nsplit = [1.8, 0.1, 0.3] | querl.toml:3: data.split[0] is 1.8; expected 0.0 to 1.0
[data] | device = "gpu"\n[data] | querl.toml:2: device is "gpu"; expected auto, cpu, cuda:N or a list of GPUs such as cuda:0,1
[data] | device = "cuda:+1"\n[data] | querl.toml:2: device is "cuda:+1"; expected auto, cpu, cuda:N or a list of GPUs such as cuda:0,1
path = "tiny" | path = "tiny"\ntensor_parallel = 2 | querl.toml:15: model.tensor_parallel is 2 and device is "auto"; expected a divisor of its 1
[data] | rl = 3\n[data] | querl.toml:16: not valid TOML: duplicate key
[judge] | [judge]\napi_key_env = "sk-1234" | querl.toml:8: judge.api_key_env is not the name of an environment variable; put the key into the environment and name the variable here
[judge] | [judge]\nbase_url = "https://me:secret@x/v1" | querl.toml:8: judge.base_url holds a user name or password; put the key into the environment instead
[judge] | [judge]\nbase_url = "https://x/v1?key=secret" | querl.toml:8: judge.base_url holds a query (`?`), which may be a key; give the address without it
[judge] | [judge]\nbase_url = "me:secret@x/v1" | querl.toml:8: judge.base_url is not an address that begins with http:// or https://
[retrieval] | [retrieval]\nurl = "x/v1?key=secret" | querl.toml:10: retrieval.url is not an address that begins with http:// or https://
[retrieval] | [retrieval]\nurl = "x/v1" | querl.toml:10: retrieval.url is "x/v1"; expected an address that begins with http:// or https://
[model] | [eval]\nsystems = ["raw", "gold"]\n[model] | querl.toml:14: eval.systems[1] is "gold"; expected raw, with_history, expanded, prompted, hyde, teacher, sft, best_of_n or rl
[model] | [eval]\nsystems = ["best_of_n"]\nbest_of_n = 0\n[model] | querl.toml:15: eval.best_of_n is 0; the system best_of_n chooses among samples, expected at least 2
[model] | [eval]\nsecond_retrieval = "lexical"\nembedding_path = "tiny"\n[model] | querl.toml:15: eval.embedding_path is set; only eval.second_retrieval = "semantic" has a use for it, leave it out
"#;

    #[test]
    fn bad_files_are_named_with_line_value_and_expectation() {
        for case in FAULTS.trim().lines() {
            let [from, to, expected] = case.split(" | ").collect::<Vec<_>>()[..] else { panic!("{case}") };
            let (from, to) = (from.replace("\\n", "\n"), to.replace("\\n", "\n"));
            assert!(GOOD.contains(&from), "{from}");
            assert_eq!(fault(&GOOD.replacen(&from, &to, 1), &[]), expected);
        }
    }

    #[test]
    fn bad_flags_are_named_as_flags() {
        assert_eq!(fault(GOOD, &["rl.gae_lambda=1.4"]), "--set rl.gae_lambda is 1.4; expected 0.0 to 1.0");
        let text_for_section = fault(GOOD, &["plugins.rewards=['p']"]);
        let expected = "plugins.rewards[0] is \"p\"; expected a section, such as { path = \"...\" }";
        assert!(text_for_section.ends_with(expected), "{text_for_section}");
        let expected = "--set rl.gea_lambda: unknown key rl.gea_lambda; did you mean rl.gae_lambda?";
        assert_eq!(fault(GOOD, &["rl.gea_lambda=1"]), expected);
        // Symptom: the file was named, without a line.
        let expected = "--set retreival.top_k: unknown key retreival; did you mean retrieval?";
        assert_eq!(fault(GOOD, &["retreival.top_k=5"]), expected);
        let expected = "--set data.inputs.path: unknown key data.inputs; did you mean data.input?";
        assert_eq!(fault(GOOD, &["data.inputs.path=a.xlsx"]), expected);
        let missing = |value: &str| {
            fault(GOOD, &[value]).replace(&std::env::current_dir().unwrap().display().to_string(), "here")
        };
        let expected = "--set data.input is \"here/none.xlsx\"; no such file; create it or correct the path";
        assert_eq!(missing("data.input=none.xlsx"), expected);
        let expected = "--set plugins.rewards.0.path is \"here/none.wasm\"; no such file or folder; put the plugin there or correct the path";
        assert_eq!(missing("plugins.rewards.0.path=none.wasm"), expected);
        assert_eq!(
            missing("plugins.filters=[{path = 'none.wasm'}]"),
            "--set plugins.filters: plugins.filters[0].path is \"here/none.wasm\"; no such file or folder; put the plugin there or \
             correct the path"
        );
    }

    #[test]
    fn a_budget_needs_the_price_of_each_service_that_is_called() {
        let service = |section: &str, kind: &str| {
            [("kind", kind), ("url", "http://x/"), ("model", "m")]
                .map(|(key, value)| format!("{section}.{key}={value}"))
        };
        let vectors = ["retrieval.kind=http", "retrieval.service=qdrant", "retrieval.url=http://x/", "budget=1"];
        let mut set: Vec<String> = vectors.map(str::to_owned).to_vec();
        set.extend(service("retrieval.embedding", "openai"));
        let fault = |set: &[String]| fault(GOOD, &set.iter().map(String::as_str).collect::<Vec<_>>());
        let expected = "the key retrieval.embedding.price_prompt_per_million is missing; budget needs it";
        assert!(fault(&set).ends_with(expected), "{}", fault(&set));
        set.push("retrieval.embedding.price_prompt_per_million=0".into());
        set.extend(service("retrieval.rerank", "cohere"));
        let expected = "the key retrieval.rerank.price_per_thousand_calls is missing; budget needs it";
        assert!(fault(&set).ends_with(expected), "{}", fault(&set));
    }

    #[test]
    fn a_key_of_a_later_error_has_its_place() {
        let (folder, set) = (folder(GOOD), vec!["plugins.rewards.0.settings.clip=1".to_owned()]);
        let path = folder.path().join("querl.toml");
        let overrides = Overrides { set, ..Overrides::default() };
        let (_, file) = load_with_file(&path, &overrides).unwrap();
        let of = |key| file.location_of(key);
        assert_eq!(of("settings.top1"), Some(ConfigLocation::Line(path.clone(), 21)));
        assert_eq!(of("settings.clip"), Some(ConfigLocation::Flag("--set plugins.rewards.0.settings.clip".into())));
        assert_eq!(of("teacher.api_key_env"), Some(ConfigLocation::Line(path.clone(), 4)));
        // Two keys have this suffix.
        assert_eq!((of("kind"), of("settings.unknown")), (None, None));
    }

    #[test]
    fn huge_files_and_deep_keys_are_refused() {
        let huge = format!("# {}\n", "x".repeat(MAX_CONFIG_BYTES as usize));
        assert_eq!(fault(&huge, &[]), "querl.toml: cannot be read: the file has more than 16777216 bytes");
        let deep = format!("{}=1", vec!["a"; 40_000].join("."));
        assert!(fault(GOOD, &[&deep]).ends_with("is not a key; expected dotted names such as rl.max_steps"));
    }

    #[test]
    fn the_first_fault_of_the_file_is_reported() {
        let text = GOOD.replace("\"rubric\"", "\"rubik\"").replace("0.95", "2");
        assert_eq!(fault(&text, &[]), "querl.toml:8: judge.kind is \"rubik\"; expected rubric, openai or none");
    }

    #[test]
    fn missing_files_and_folders_get_a_hint() {
        let folder = folder(GOOD);
        let error = |name: &str| load(&folder.path().join(name), &Overrides::default()).unwrap_err().to_string();
        let there = folder.path().join("querl.toml");
        let expected =
            format!("{}: no such file; did you mean {}?", folder.path().join("qurl.toml").display(), there.display());
        assert_eq!(error("qurl.toml"), expected);
        let expected = format!(
            "{}: no such file; expected the path of a configuration file, such as {}",
            folder.path().join("nope.toml").display(),
            there.display()
        );
        assert_eq!(error("nope.toml"), expected);
        assert!(error("none/nope.toml").ends_with("no such file; expected the path of a configuration file"));
        assert!(error("run/config.resolved.toml").ends_with("config.resolved.toml: no such file"));
        assert!(error("").contains("is a folder, not a configuration file; did you mean"));
        // Symptom: "linked.toml: no such file; did you mean linked.toml?"
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", folder.path().join("linked.toml")).unwrap();
            assert!(error("linked.toml").ends_with("linked.toml: no such file, only a link to one that is not there"));
        }
    }

    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Loads `bytes`. A valid configuration must be equal after writing and reading its resolved copy; an error must be one sentence that
    /// begins with the file.
    fn check_loading(bytes: &[u8]) -> Result<(), TestCaseError> {
        let folder = folder("");
        let path = folder.path().join("querl.toml");
        std::fs::write(&path, bytes).unwrap();
        match load(&path, &Overrides::default()) {
            Ok(config) => {
                let copy = folder.path().join("config.resolved.toml");
                std::fs::write(&copy, config.to_toml()).unwrap();
                prop_assert_eq!(load_resolved(&copy).unwrap(), config);
            }
            Err(error) => {
                let error = error.to_string();
                prop_assert!(error.starts_with(&path.display().to_string()) && !error.contains('\n'), "{error}");
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(crate::properties(64))]

        #[test]
        fn a_damaged_configuration_is_read_or_rejected_in_one_sentence(
            damages in vec((any::<prop::sample::Index>(), "[\\[\\]{}=.,\"'\\\\\n0-9a-z\\x00\u{e9}-]{0,3}", 0..4_usize), 1..4),
        ) {
            let mut bytes = GOOD.as_bytes().to_vec();
            for (at, text, n_removed) in damages {
                let at = at.index(bytes.len());
                let end = (at + n_removed).min(bytes.len());
                bytes.splice(at..end, text.bytes());
            }
            check_loading(&bytes)?;
        }

        #[test]
        fn any_bytes_are_a_configuration_or_an_error(bytes in vec(any::<u8>(), 0..200), key in "[a-z.]{0,12}", value in ".{0,12}") {
            check_loading(&bytes)?;
            let fault = fault(GOOD, &[&format!("no_{key}={value}")]);
            prop_assert!(fault.contains("no_") && !fault.contains('\n'), "{fault}");
        }
    }
}
