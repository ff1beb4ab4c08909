//! A stage of the pipeline: files in the run directory in, files in the run directory out; and the inputs that several stages depend on.

use crate::environment::RowColumns;
use crate::ledger::{FORMAT_OF_EXPANSIONS, FORMS_OF_EDITS, Facts, INDEX, Inputs, Ledger, StageName};
use crate::run::Run;
use anyhow::Context;
use querl_core::config::{
    Config, DataConfig, EmbeddingKind, JudgeKind, Language, RerankKind, RetrievalKind, RewriteForm, TableFormat,
    TeacherKind,
};
use querl_core::edits;
use querl_core::ports::Progress;
use querl_core::run_dir::RunDir;
use querl_data::{ExpansionModel, INDEX_VERSION, Journal, TableRecord, retrieval_language, write_tables};
use std::path::{Path, PathBuf};

/// Name of the input that has the digest of the query table.
pub(crate) const QUERY_TABLE: &str = "query table";

/// Adds the digest of the query table, or of the files of `data.dataset`, to the inputs.
pub(crate) fn add_queries(inputs: &mut Inputs, data: &DataConfig) -> anyhow::Result<()> {
    for (split, path) in data.dataset.files() {
        inputs.file(&format!("dataset {}", split.name()), path)?;
    }
    match &data.input {
        Some(path) if !data.dataset.is_set() => inputs.file(QUERY_TABLE, path).map(drop),
        _ => Ok(()),
    }
}

#[derive(Debug, Default)]
pub(crate) struct Done {
    pub facts: Facts,
    pub n_failed: u64,
}

/// A stage of the pipeline, which reads and writes files in the run directory.
pub(crate) trait Stage: Sync {
    fn name(&self) -> StageName;

    /// Everything that the result of the stage depends on.
    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs>;

    /// Whether finished rows stay valid when the input of this name changes.
    fn keeps_rows(&self, _name: &str) -> bool {
        false
    }

    /// Opens tables and services, so that errors are reported before any stage runs.
    fn check(&self, _run: &Run) -> anyhow::Result<()> {
        Ok(())
    }

    /// Checks everything that can be checked before outputs of an earlier run are moved aside: rows, prompts, the memory plan; an error
    /// stops the stage. `_last` is the last stage of the command. The result is added to the facts of the stage.
    fn permit(&self, _run: &Run, _last: StageName, _progress: &dyn Progress) -> anyhow::Result<Facts> {
        Ok(Facts::default())
    }

    /// A warning about the result, given after the stage has run and when the finished result is reused.
    fn warning(&self, _run: &Run, _facts: &Facts) -> Option<String> {
        None
    }

    /// A warning, given when a finished result is reused, that `permit` gave before the stage ran.
    fn reminder(&self, _run: &Run, _facts: &Facts) -> Option<String> {
        None
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf>;

    /// Files that the stage writes in some runs alone.
    fn optional_outputs(&self, _dir: &RunDir) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Paths of the exported tables, in the configured formats.
    fn tables(&self, _run: &Run) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Files and folders that the stage writes or resumes from, which are moved aside when it starts over. The stage's lines of
    /// `metrics.jsonl` and its TensorBoard events are moved too, without being listed here.
    fn owned(&self, dir: &RunDir) -> Vec<PathBuf> {
        [self.outputs(dir), self.optional_outputs(dir)].concat()
    }

    /// Whether a stopped run of the stage left files to resume from.
    fn is_resumable(&self, _dir: &RunDir) -> bool {
        false
    }

    /// Paths of the stage's logs, which no later stage reads.
    fn logs(&self, _dir: &RunDir) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Removes files that only an unfinished stage needs.
    fn settle(&self, _dir: &RunDir) -> std::io::Result<()> {
        Ok(())
    }

    /// Runs the stage, from partial outputs of an interrupted run on the same inputs if there are any.
    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done>;
}

/// Removes a file or a folder; does nothing if it does not exist.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes the records of `output` as tables in `formats`, and removes tables in other formats.
pub(super) fn make_tables<R: TableRecord>(output: &Path, formats: &[TableFormat]) -> anyhow::Result<()> {
    write_tables::<R>(output, formats)?;
    remove_tables(output, formats).context("tables of other formats cannot be removed")
}

/// Removes the tables of `output` except those of the formats `but`.
fn remove_tables(output: &Path, but: &[TableFormat]) -> std::io::Result<()> {
    let unwanted = TableFormat::ALL.into_iter().filter(|format| !but.contains(format));
    unwanted.map(|format| querl_data::table_path(output, format)).try_for_each(|path| remove(&path))
}

/// Paths of a records file: `output`, its journal, and its tables in all formats.
pub(super) fn journaled(output: PathBuf) -> Vec<PathBuf> {
    let tables = TableFormat::ALL.map(|format| querl_data::table_path(&output, format));
    [Journal::path_for(&output)].into_iter().chain(tables).chain([output]).collect()
}

/// Whether a file or folder exists and is not empty.
pub(super) fn has_content(path: &Path) -> bool {
    match std::fs::read_dir(path) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => path.metadata().is_ok_and(|meta| meta.len() > 0),
    }
}

#[derive(Default)]
pub(super) struct Mean {
    sum: f64,
    n: u64,
}

impl Mean {
    pub(super) fn add(&mut self, value: f64) {
        self.sum += value;
        self.n += 1;
    }

    pub(super) fn value(&self) -> Option<f64> {
        (self.n > 0).then(|| self.sum / self.n as f64)
    }
}

/// Keys that limit calls without changing their responses, and paths, whose content is an input instead.
const CALLS: [&str; 8] = [
    "auth",
    "api_key_env",
    "api_key_file",
    "max_concurrent",
    "requests_per_minute",
    "tokens_per_minute",
    "timeout_s",
    "max_retries",
];

/// Keys that change the cost of a call, not its response.
const PRICES: [&str; 3] = ["price_prompt_per_million", "price_completion_per_million", "price_per_thousand_calls"];

/// Keys that change the time of a response, not its content.
const BATCH: [&str; 3] = ["batch", "batch_price_factor", "batch_poll_s"];

/// Keys of an endpoint, which only an endpoint judge reads.
const ENDPOINT: [&str; 10] = [
    "form",
    "dimensions",
    "base_url",
    "model",
    "provider",
    "temperature",
    "max_tokens",
    "legacy_max_tokens",
    "reasoning_effort",
    "response_format",
];

/// Adds `model.enable_thinking` to the inputs if it is set, so that runs from before the key existed stay unchanged.
pub(crate) fn add_thinking(inputs: &mut Inputs, config: &Config) {
    if let Some(enable_thinking) = config.model.enable_thinking {
        inputs.text("model.enable_thinking", enable_thinking);
    }
}

/// The knowledge base that expansions of a run that writes edits are learned from; `None` if it is to have none.
pub(crate) fn knowledge_base_of_expansions(config: &Config) -> Option<&Path> {
    config.retrieval.knowledge_base.as_deref().filter(|_| config.data.expansion_terms > 0)
}

/// Adds the versions of the edit forms of targets and of expansions to the inputs, if rewrites are edits; targets of another version are computed again.
pub(crate) fn add_target_forms(inputs: &mut Inputs, config: &Config) {
    if config.data.rewrite_form == RewriteForm::Edit {
        inputs.text(&format!("{FORMS_OF_EDITS} in targets"), edits::VERSION);
        if knowledge_base_of_expansions(config).is_some() {
            inputs.text(FORMAT_OF_EXPANSIONS, ExpansionModel::FORMAT);
        }
        // With retrieval by a service there is no version of the index, which is that of the words.
        if retrieval_language(&config.retrieval) != Language::Zh {
            inputs.text(&format!("{FORMS_OF_EDITS} in words between spaces"), 2);
        }
    }
}

/// Adds the model of expansions to the inputs of a training, in a run that has one.
pub(crate) fn add_expansion(inputs: &mut Inputs, run: &Run, ledger: &Ledger) -> anyhow::Result<()> {
    match ledger.expansion_digest(&run.dir) {
        Some(_) => inputs.made_by(ledger, StageName::Convert, &run.dir.expansion()).map(drop),
        None => Ok(()),
    }
}

pub(crate) fn add_retrieval(inputs: &mut Inputs, config: &Config) -> anyhow::Result<()> {
    let retrieval = &config.retrieval;
    inputs.text("tenant", &config.tenant);
    let except = [
        &CALLS[..],
        &PRICES,
        &[
            "knowledge_base",
            "lexicon",
            "user_dictionary",
            "synonyms",
            "index_dir",
            "indexes_kept",
            "embedding",
            "rerank",
        ],
    ]
    .concat();
    inputs.section("retrieval", retrieval, &except)?;
    if retrieval.kind == RetrievalKind::Embedded {
        inputs.text(INDEX, INDEX_VERSION);
    }
    if retrieval.embedding.kind != EmbeddingKind::None {
        inputs.text("retrieval.embedding.order of equal fused scores", "by vectors");
        inputs.section("retrieval.embedding", &retrieval.embedding, &[&CALLS[..], &PRICES, &["path"]].concat())?;
    }
    if retrieval.rerank.kind != RerankKind::None {
        inputs.section(
            "retrieval.rerank",
            &retrieval.rerank,
            &[&CALLS[..], &PRICES, &["batch_size", "path"]].concat(),
        )?;
    }
    let models = [
        ("embedding model", &retrieval.embedding.path, retrieval.embedding.kind == EmbeddingKind::Local),
        ("cross-encoder", &retrieval.rerank.path, retrieval.rerank.kind == RerankKind::Local),
    ];
    for (name, path, used) in models {
        if let Some(path) = path.as_ref().filter(|_| used) {
            inputs.model(name, path)?;
            for file in sentence_transformers_files(path) {
                inputs.file(&format!("{file} of {name}"), &path.join(&file))?;
            }
        }
    }
    for (name, path) in [("knowledge base", &retrieval.knowledge_base), ("lexicon", &retrieval.lexicon)] {
        if let Some(path) = path {
            inputs.file(name, path)?;
        }
    }
    add_vocabulary(inputs, config)
}

/// Adds everything that word segmentation depends on to the inputs.
pub(crate) fn add_vocabulary(inputs: &mut Inputs, config: &Config) -> anyhow::Result<()> {
    let retrieval = &config.retrieval;
    for (name, path) in [("user dictionary", &retrieval.user_dictionary), ("synonyms", &retrieval.synonyms)] {
        if let Some(path) = path {
            inputs.file(name, path)?;
        }
    }
    // Runs from before there were languages lack this input.
    let language = retrieval_language(retrieval);
    if language != Language::Zh {
        inputs.text("language of the passages", format!("{language:?}").to_lowercase());
    }
    Ok(())
}

/// Settings files of sentence-transformers that change the results of an encoder.
fn sentence_transformers_files(folder: &Path) -> Vec<String> {
    let names = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"].map(str::to_owned);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let poolings = folders.filter(|name| name.ends_with("Pooling")).map(|name| format!("{name}/config.json"));
    let mut files: Vec<String> = names.into_iter().chain(poolings).filter(|file| folder.join(file).is_file()).collect();
    files.sort();
    files
}

pub(crate) fn add_teacher(inputs: &mut Inputs, config: &Config) -> anyhow::Result<()> {
    inputs.section(
        "teacher",
        &config.teacher,
        &[&CALLS[..], &PRICES, &BATCH, &["path", "model_path", "adapter_path"]].concat(),
    )?;
    if config.fallback_teacher.base_url.is_some() {
        inputs.section("fallback_teacher", &config.fallback_teacher, &[&CALLS[..], &PRICES].concat())?;
    }
    if let Some(path) = &config.teacher.path {
        inputs.file("recording of the teacher", path)?;
    }
    let folders = [
        ("model of the teacher", &config.teacher.model_path),
        ("adapter of the teacher", &config.teacher.adapter_path),
    ];
    for (name, path) in folders {
        if let Some(path) = path.as_ref().filter(|_| config.teacher.kind == TeacherKind::Local) {
            inputs.model(name, path)?;
        }
    }
    Ok(())
}

/// Adds everything that affects scores to the inputs: retrieval, judge, prompts, reward plugins.
pub(crate) fn add_scoring(inputs: &mut Inputs, run: &Run) -> anyhow::Result<()> {
    add_retrieval(inputs, &run.config)?;
    if run.config.data.rewrite_form == RewriteForm::Edit {
        // A ledger without this version is valid as long as its targets are, because the outputs of convert are inputs, too.
        inputs.text("data.rewrite_form", "edit").text(FORMS_OF_EDITS, edits::VERSION);
    }
    let unused: &[&str] = if run.config.judge.kind == JudgeKind::Openai { &[] } else { &ENDPOINT };
    inputs.section("judge", &run.config.judge, &[&CALLS[..], &PRICES, unused].concat())?;
    let style = &run.config.plugins.style_model;
    if let Some(path) = &style.path {
        inputs.section("plugins.style_model", style, &["path", "base", "audit"])?;
        inputs.model("style model", path)?;
        if let Some(base) = &style.base {
            inputs.model("base of the style model", base)?;
        }
    }
    ["prompt", "reward"].iter().for_each(|role| run.plugins.add_inputs(inputs, role));
    if RowColumns::are_read(&run.plugins.rewards) {
        add_queries(inputs, &run.config.data)?;
    }
    Ok(())
}

/// Adds the second style model, which classifies responses in the evaluation, to the inputs.
pub(crate) fn add_audit(inputs: &mut Inputs, run: &Run) -> anyhow::Result<()> {
    match &run.config.plugins.style_model.audit {
        Some(path) => inputs.model("auditing style model", path).map(drop),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::deployment::MINIMAL_CONFIG;

    /// Otherwise a run whose rewrites become edits would report each of them as a separate change.
    #[test]
    fn all_inputs_of_retrieval_come_and_go_with_the_form_of_rewrites() {
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "modules.json", "kb.jsonl", "lexicon.txt", "words.txt", "synonyms.txt"] {
            std::fs::write(folder.path().join(file), "{}").unwrap();
        }
        let path = |name: &str| Some(folder.path().join(name));
        let mut config: Config = toml::from_str(MINIMAL_CONFIG).unwrap();
        let retrieval = &mut config.retrieval;
        (retrieval.kind, retrieval.language) = (RetrievalKind::Embedded, Language::En);
        (retrieval.knowledge_base, retrieval.lexicon) = (path("kb.jsonl"), path("lexicon.txt"));
        (retrieval.user_dictionary, retrieval.synonyms) = (path("words.txt"), path("synonyms.txt"));
        (retrieval.embedding.kind, retrieval.embedding.path) = (EmbeddingKind::Local, path(""));
        (retrieval.rerank.kind, retrieval.rerank.path) = (RerankKind::Local, path(""));
        let (mut full, mut edit) = (Inputs::default(), Inputs::default());
        full.text("data.rewrite_form", "\"full\"");
        edit.text("data.rewrite_form", "\"edit\"");
        add_target_forms(&mut full, &config);
        config.data.rewrite_form = RewriteForm::Edit;
        add_target_forms(&mut edit, &config);
        edit.text(FORMS_OF_EDITS, edits::VERSION);
        for name in ["forms of edits in targets", FORMAT_OF_EXPANSIONS, "forms of edits in words between spaces"] {
            assert!(edit.has(name) && !full.has(name), "{name}");
        }
        add_retrieval(&mut edit, &config).unwrap();
        assert!(edit.has(INDEX) && !full.has(INDEX));
        for name in ["synonyms", "language of the passages", "cross-encoder", "modules.json of embedding model"] {
            assert!(edit.has(name), "{name}");
        }
        let mut without_terms = Inputs::default();
        config.data.expansion_terms = 0;
        add_target_forms(&mut without_terms, &config);
        assert!(!without_terms.has(FORMAT_OF_EXPANSIONS));
        assert_eq!(edit.changed_since(&full), ["data.rewrite_form"]);
        assert_eq!(full.changed_since(&edit), ["data.rewrite_form"]);
    }
}
