//! What stages that look things up or score depend on.

use crate::ledger::Inputs;
use crate::run::Run;
use querl_core::config::{EmbeddingKind, JudgeKind, RerankKind, TeacherKind};
use std::path::Path;

/// Keys that bound calls without changing their answers, and paths, whose content is added instead.
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

/// Keys that change what a call costs and not its answer.
const PRICES: [&str; 2] = ["price_prompt_per_million", "price_completion_per_million"];

/// Keys that change when an answer comes and not what it is.
const BATCH: [&str; 3] = ["batch", "batch_price_factor", "batch_poll_s"];

/// Keys of an endpoint, which a judge that is none does not look at.
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

/// Retrieval and the files it reads.
///
/// # Errors
/// A file cannot be read.
pub fn add_retrieval(inputs: &mut Inputs, run: &Run) -> anyhow::Result<()> {
    let retrieval = &run.config.retrieval;
    inputs.text("tenant", &run.config.tenant);
    let except = [
        &CALLS[..],
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
    if retrieval.embedding.kind != EmbeddingKind::None {
        inputs.section("retrieval.embedding", &retrieval.embedding, &[&CALLS[..], &["path"]].concat())?;
    }
    if retrieval.rerank.kind != RerankKind::None {
        inputs.section("retrieval.rerank", &retrieval.rerank, &[&CALLS[..], &["batch_size", "path"]].concat())?;
    }
    let models = [
        ("embedding model", &retrieval.embedding.path, retrieval.embedding.kind == EmbeddingKind::Local),
        ("cross-encoder", &retrieval.rerank.path, retrieval.rerank.kind == RerankKind::Local),
    ];
    for (name, path, used) in models {
        if let Some(path) = path.as_ref().filter(|_| used) {
            inputs.other_model(name, path)?;
            for file in beside_the_network(path) {
                inputs.file(&format!("{file} of {name}"), &path.join(&file))?;
            }
        }
    }
    let files = [
        ("knowledge base", &retrieval.knowledge_base),
        ("lexicon", &retrieval.lexicon),
        ("user dictionary", &retrieval.user_dictionary),
        ("synonyms", &retrieval.synonyms),
    ];
    for (name, path) in files {
        if let Some(path) = path {
            inputs.file(name, path)?;
        }
    }
    Ok(())
}

/// What sentence-transformers writes beside a network and an encoder keeps to, as far as it is there.
fn beside_the_network(folder: &Path) -> Vec<String> {
    let names = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"].map(str::to_owned);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let poolings = folders.filter(|name| name.ends_with("Pooling")).map(|name| format!("{name}/config.json"));
    let mut files: Vec<String> = names.into_iter().chain(poolings).filter(|file| folder.join(file).is_file()).collect();
    files.sort();
    files
}

/// The teacher and its recording.
///
/// # Errors
/// The recording cannot be read.
pub fn add_teacher(inputs: &mut Inputs, run: &Run) -> anyhow::Result<()> {
    inputs.section(
        "teacher",
        &run.config.teacher,
        &[&CALLS[..], &PRICES, &BATCH, &["path", "model_path", "adapter_path"]].concat(),
    )?;
    if run.config.fallback_teacher.base_url.is_some() {
        inputs.section("fallback_teacher", &run.config.fallback_teacher, &[&CALLS[..], &PRICES].concat())?;
    }
    if let Some(path) = &run.config.teacher.path {
        inputs.file("recording of the teacher", path)?;
    }
    let folders = [
        ("model of the teacher", &run.config.teacher.model_path),
        ("adapter of the teacher", &run.config.teacher.adapter_path),
    ];
    for (name, path) in folders {
        if let Some(path) = path.as_ref().filter(|_| run.config.teacher.kind == TeacherKind::Local) {
            inputs.other_model(name, path)?;
        }
    }
    Ok(())
}

/// Everything that turns a rewrite into a score: retrieval, judge, prompts, reward plugins.
///
/// # Errors
/// A file cannot be read.
pub fn add_scoring(inputs: &mut Inputs, run: &Run) -> anyhow::Result<()> {
    add_retrieval(inputs, run)?;
    let unused: &[&str] = if run.config.judge.kind == JudgeKind::Openai { &[] } else { &ENDPOINT };
    inputs.section("judge", &run.config.judge, &[&CALLS[..], &PRICES, unused].concat())?;
    let style = &run.config.plugins.style_model;
    if let Some(path) = &style.path {
        inputs.section("plugins.style_model", style, &["path", "base", "audit"])?;
        inputs.other_model("style model", path)?;
        if let Some(base) = &style.base {
            inputs.other_model("base of the style model", base)?;
        }
    }
    run.plugins.add_prompts(inputs);
    run.plugins.add_rewards(inputs);
    Ok(())
}

/// The classifier that says the style of evaluated answers besides.
///
/// # Errors
/// A file cannot be read.
pub fn add_audit(inputs: &mut Inputs, run: &Run) -> anyhow::Result<()> {
    match &run.config.plugins.style_model.audit {
        Some(path) => inputs.other_model("auditing style model", path).map(drop),
        None => Ok(()),
    }
}
