//! A deployment folder: the files of each tenant's run that serving reads, and the base model that the tenants share.
//!
//! ```text
//! base/               the base model, for all tenants
//! base.sha256         digests of its files, as `sha256sum -c` reads them
//! tenants/NAME/       a run folder: adapter, prompt plugin, configuration, ledger, lock, rewrites of the evaluation to check against
//! ```
//!
//! Paths in the folder are relative, so that it can be moved. It is served like runs, with the same checks.

use super::golden;
use super::tenant::ServedRun;
use crate::failure::Stop;
use crate::files::{copy, files, unreadable, unwritable, write_text};
use crate::ledger::{Ledger, StageName, is_of_model};
use crate::plugins::PluginHosts;
use crate::training;
use anyhow::Context;
use querl_bundle::lock::{LockFile, LockKind};
use querl_core::config::{
    Config, DataConfig, EvalConfig, ModelConfig, PluginConfig, PluginsConfig, SftConfig, TuningMethod,
};
use querl_core::fsx::{digest_file, write_jsonl};
use querl_core::run_dir::RunDir;
use querl_data::ExpansionModel;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const BASE: &str = "base";
const BASE_DIGESTS: &str = "base.sha256";
const TENANTS: &str = "tenants";

/// Whether the base model is copied into the folder that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaseFiles {
    /// The base model is copied into the folder.
    Copied,
    /// The base model is not copied: in a deployment, `base` is a folder or link to be added on the server.
    Referenced,
}

/// Summary of a written deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deployment {
    /// Names of the tenants.
    pub tenants: Vec<String>,
    /// Total size in bytes of the files of all models.
    pub model_bytes: u64,
    /// Whether tenants share a base model; false if all runs have their own model after full fine-tuning.
    pub has_base: bool,
}

/// Writes a deployment (`tenants`, `base` and `base.sha256`) to an empty folder.
///
/// # Errors
/// Two runs have the same tenant or different bases, a file of a run has changed since its stage wrote it, a base cannot be served, or a
/// file cannot be written.
pub fn write_deployment(runs: &[ServedRun], base: BaseFiles, out: &Path) -> anyhow::Result<Deployment> {
    let mut deployment = Deployment { tenants: Vec::new(), model_bytes: 0, has_base: false };
    let mut base_model: Option<(PathBuf, String)> = None;
    for run in runs {
        let tenant = folder_name(&run.config.tenant)?;
        if deployment.tenants.contains(&tenant) {
            let message = format!("{}: another run is of tenant `{tenant}` too; name one", run.dir.root().display());
            return Err(Stop::usage(message).into());
        }
        let model = run.base()?.model;
        match &base_model {
            Some((first, of_first)) if *first != model && *of_first != digests(&model)? => {
                let (first, own) = (first.display(), model.display());
                let message = format!(
                    "{own} is the base of `{}`, and {first} that of another run; deploy them apart",
                    run.config.tenant
                );
                return Err(Stop::usage(message).into());
            }
            Some(_) => {}
            None => {
                check_base(&model)?;
                let digests = digests(&model)?;
                base_model = Some((model, digests));
            }
        }
        run.warn_unfinished("deployed");
        deployment.model_bytes += write_tenant(run, &out.join(TENANTS).join(&tenant))?;
        deployment.tenants.push(tenant);
        // After full fine-tuning the base is a checkpoint of the run and is copied with it.
        deployment.has_base |= run.config.sft.method != TuningMethod::Full;
    }
    if let Some((model, digests)) = base_model.filter(|_| deployment.has_base) {
        for name in model_files(&model)? {
            let path = model.join(&name);
            deployment.model_bytes += path.metadata().with_context(|| unreadable(&path))?.len();
            if base == BaseFiles::Copied {
                copy(&path, &out.join(BASE).join(&name))?;
            }
        }
        write_text(&out.join(BASE_DIGESTS), &digests)?;
    }
    Ok(deployment)
}

/// Run folders of a deployment, after a comparison of its base model with the digests; `None` if `folder` is not a deployment.
///
/// # Errors
/// The base model is missing or has other digests, or a folder cannot be read.
pub fn deployed_runs(folder: &Path) -> anyhow::Result<Option<Vec<PathBuf>>> {
    let tenants = folder.join(TENANTS);
    if !tenants.is_dir() || RunDir::new(folder).config().is_file() {
        return Ok(None);
    }
    let written = folder.join(BASE_DIGESTS);
    if written.is_file() {
        let lines = std::fs::read_to_string(&written).with_context(|| unreadable(&written))?;
        lines.lines().try_for_each(|line| check_digest(folder, line))?;
    }
    let entries = std::fs::read_dir(&tenants).with_context(|| unreadable(&tenants))?;
    let mut runs = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    runs.retain(|path| path.is_dir());
    runs.sort();
    match runs.is_empty() {
        true => Err(Stop::usage(format!("{}: has no tenant; deploy a run again", tenants.display())).into()),
        false => Ok(Some(runs)),
    }
}

/// Checks a file against a line in the format of `sha256sum`.
fn check_digest(folder: &Path, line: &str) -> anyhow::Result<()> {
    let Some((digest, name)) = line.split_once("  ") else { return Ok(()) };
    let path = folder.join(name);
    let problem = match digest_file(&path) {
        Ok(found) if found == digest => return Ok(()),
        Ok(_) => "is not the file of the base that the tenants were trained on",
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => "is missing",
        Err(error) => return Err(error).with_context(|| unreadable(&path)),
    };
    let base = folder.join(BASE);
    let message = format!("{}: {problem}; put that base model at {}, or link it there", path.display(), base.display());
    Err(Stop::usage(message).into())
}

/// Checks configuration, tokenizer, chat template, and the headers of the weights.
fn check_base(model: &Path) -> anyhow::Result<()> {
    querl_model::check_directory(model)?;
    querl_model::TextTokenizer::load(model)?;
    Ok(())
}

/// Writes the files of a tenant. Returns the size of the adapter or model in bytes.
fn write_tenant(run: &ServedRun, folder: &Path) -> anyhow::Result<u64> {
    let (from, to) = (&run.dir, RunDir::new(folder));
    run.trained_model()?; // checks that its files are unchanged
    let mut stages = BTreeSet::from([run.stage()]);
    if run.config.sft.method == TuningMethod::Full {
        stages.insert(StageName::Sft);
    }
    let (mut copied, mut n_bytes) = (Vec::new(), 0);
    for stage in &stages {
        let best = training::best(&training::folder(from, *stage));
        for name in files(&best, |_| true)? {
            let file = best.join(&name);
            n_bytes += copy(&file, &training::best(&training::folder(&to, *stage)).join(&name))?;
            copied.push(file);
        }
    }
    if run.expansion_digest()?.is_some() {
        ExpansionModel::read(&from.expansion())?; // refuses the format of another version
        n_bytes += copy(&from.expansion(), &to.expansion())?;
        copied.push(from.expansion());
        stages.insert(StageName::Convert);
    }
    Ledger::open(&from.stages())?.write_part(&stages, &copied, &to.stages())?;
    let (plugin, entry) = PluginHosts::default().pinned_prompts(&run.config, from)?;
    let extension = plugin.extension().unwrap_or_default().to_string_lossy().into_owned();
    let name = format!("prompt.{extension}");
    copy(&plugin, &folder.join(&name))?;
    let lock = LockFile { entries: vec![entry.at(name.clone().into())], changes: Vec::new() };
    write_text(&to.lock(), &lock.to_text(LockKind::Run))?;
    let golden = golden::records(run)?;
    if !golden.is_empty() {
        write_jsonl(&to.eval_records(), golden).with_context(|| unwritable(&to.eval_records()))?;
    }
    let config =
        toml::to_string_pretty(&served_config(&run.config, &name)?).context("the configuration has no TOML form")?;
    write_text(
        &to.config(),
        &format!("# Written by querl deploy: what serving reads, with paths relative to this folder.\n{config}"),
    )?;
    Ok(n_bytes)
}

/// The configuration keys that have no default, as TOML.
pub(crate) const MINIMAL_CONFIG: &str = r#"
    tenant = "shop"
    data = { input = "none" }
    teacher = { kind = "recorded" }
    retrieval = { kind = "none" }
    model = { path = "none" }
    plugins = { prompt = { path = "none" }, rewards = [] }
"#;

/// The part of the configuration that serving reads. All other keys are at their defaults, so that it contains no settings of the training
/// machine.
fn served_config(config: &Config, prompt: &str) -> anyhow::Result<Config> {
    let others: Config = toml::from_str(MINIMAL_CONFIG).context("internal error, please report it")?;
    let Config { tenant, seed, .. } = config;
    Ok(Config {
        tenant: tenant.clone(),
        seed: *seed,
        output_dir: PathBuf::new(),
        model: ModelConfig { path: Path::new("../..").join(BASE), ..config.model.clone() },
        sft: SftConfig { method: config.sft.method, ..others.sft },
        data: DataConfig { rewrite_form: config.data.rewrite_form, ..others.data },
        rl: config.rl.clone(),
        eval: EvalConfig { n_beams: config.eval.n_beams, ..others.eval },
        plugins: PluginsConfig {
            prompt: PluginConfig { path: prompt.into(), settings: config.plugins.prompt.settings.clone() },
            limits: config.plugins.limits.clone(),
            trusted_keys: config.plugins.trusted_keys.clone(),
            ..others.plugins
        },
        ..others
    })
}

/// Converts a tenant's name to a folder name.
fn folder_name(tenant: &str) -> Result<String, Stop> {
    let is_plain = |c: char| c.is_alphanumeric() || "-_.".contains(c);
    match !tenant.is_empty() && !tenant.starts_with('.') && tenant.chars().all(is_plain) {
        true => Ok(tenant.to_owned()),
        false => Err(Stop::usage(format!(
            "tenant is `{tenant}`; a folder is named after it, expected letters, digits, `-`, `_` and `.`"
        ))),
    }
}

/// Files of a base model, sorted.
fn model_files(model: &Path) -> anyhow::Result<Vec<String>> {
    files(model, is_of_model)
}

fn digests(model: &Path) -> anyhow::Result<String> {
    let mut lines = String::new();
    for name in model_files(model)? {
        let path = model.join(&name);
        let digest = digest_file(&path).with_context(|| unreadable(&path))?;
        let _ = writeln!(lines, "{digest}  {BASE}/{name}");
    }
    Ok(lines)
}
