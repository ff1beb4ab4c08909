//! Common content of exported folders: plugins with their lock, `querl.toml`, the SFT adapter and, if it is copied, the model; and the
//! files of an engine, which are written from templates.
//!
//! ```text
//! plugins/            the plugins of the run, and querl.lock with their digests
//! querl.toml          the configuration that the reward reads, with paths relative to the folder, other than output_dir
//! querl.lock          the pins of the bundles among the plugins
//! data/               knowledge base, lexicon and other files that querl.toml names
//! adapter/            sft/best
//! model/              the base model, where it is copied
//! ```

use super::mapping::Mapping;
use super::rows::PromptRow;
use super::source::ExportedRun;
use crate::failure::Stop;
use crate::files::{copy, files, write_text};
use crate::ledger::is_of_model;
use crate::plugins::PluginHosts;
use crate::serving::BaseFiles;
use anyhow::Context;
use querl_bundle::lock::{LockEntry, LockFile, LockKind, LockSource};
use querl_core::config::{Config, DatasetConfig, EndpointConfig, RewriteForm, TeacherConfig};
use querl_core::edits::ARE_EDITS;
use querl_core::fsx::write_jsonl;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Summary of an exported folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exported {
    /// Number of training prompts.
    pub n_train: usize,
    /// Number of validation prompts.
    pub n_val: usize,
    /// Whether training starts from the SFT adapter; otherwise it starts from a new adapter on the base model.
    pub has_adapter: bool,
    /// Ids and versions of the plugins.
    pub plugins: Vec<String>,
    /// Configuration keys that are not at their default and have no equivalent in the engine, each with the reason.
    pub without_equivalent: Vec<String>,
    /// Other differences from a run that querl trains.
    pub notes: Vec<String>,
    /// Paths outside of the folder that `querl.toml` and the script refer to.
    pub outside: Vec<PathBuf>,
}

/// Placeholder for the exported folder in values of settings, so that the folder can be moved.
pub(super) const HERE: &str = "@HERE@";

/// Summary of the files that the exported folders of all engines have.
pub(super) struct SharedFiles {
    /// The base model: a path, or one that begins with [`HERE`].
    pub(super) model: String,
    pub(super) plugins: Vec<String>,
    pub(super) outside: Vec<PathBuf>,
}

/// The processes that compute rewards concurrently, over which limits and budget are divided. `rows`: file of the training split.
pub(super) struct RewardProcesses<'a> {
    pub(super) n_processes: usize,
    pub(super) rows: &'a str,
}

pub(super) fn write_shared(
    run: &ExportedRun,
    base: BaseFiles,
    reward: &RewardProcesses<'_>,
    out: &Path,
) -> anyhow::Result<SharedFiles> {
    let plugins = copy_plugins(run, out)?;
    let mut config = reward_config(&run.config, reward);
    let places = plugin_paths(&mut config);
    places.into_iter().zip(&plugins).for_each(|(path, entry)| *path = entry.path.clone());
    if let Some(adapter) = &run.adapter {
        for name in files(&adapter.folder, |_| true)? {
            copy(&adapter.folder.join(&name), &out.join("adapter").join(&name))?;
        }
    }
    for (name, path) in data_paths(&mut config) {
        let extension = path.extension().map(|extension| format!(".{}", extension.to_string_lossy()));
        let place = Path::new("data").join(format!("{name}{}", extension.unwrap_or_default()));
        copy(path, &out.join(&place))?;
        *path = place;
    }
    config.model.path = match base {
        BaseFiles::Copied => {
            for name in files(&run.model, is_of_model)? {
                copy(&run.model.join(&name), &out.join("model").join(&name))?;
            }
            "model".into()
        }
        BaseFiles::Referenced => run.model.clone(),
    };
    let text = toml::to_string_pretty(&config).context("the configuration has no TOML form")?;
    write_text(&out.join("querl.toml"), &format!("{CONFIG_HEADER}{text}"))?;
    let model = match base {
        BaseFiles::Copied => format!("{HERE}/model"),
        BaseFiles::Referenced => run.model.display().to_string(),
    };
    let titles = plugins.iter().map(|entry| format!("{} {}", entry.id, entry.version)).collect();
    Ok(SharedFiles { model, plugins: titles, outside: outside(&config) })
}

const CONFIG_HEADER: &str = "\
# Written by querl export: what the reward reads, with paths relative to this folder, other than output_dir, which is relative to the
# current folder as in each configuration. The rows have the queries, their columns and the teacher's rewrites, so that no teacher is called.
";

/// The plugins with their paths in the folder, in the order of the configuration.
fn copy_plugins(run: &ExportedRun, out: &Path) -> anyhow::Result<Vec<LockEntry>> {
    let mut entries = Vec::new();
    for (index, (file, entry)) in PluginHosts::default().pinned_plugins(&run.config, &run.dir)?.into_iter().enumerate()
    {
        let extension = file.extension().unwrap_or_default().to_string_lossy().into_owned();
        let name = format!("{}-{}-{}.{extension}", index + 1, entry.role, file_name(&entry.id));
        copy(&file, &out.join("plugins").join(&name))?;
        entries.push(entry.at(Path::new("plugins").join(name)));
    }
    let next_to = |entry: &LockEntry| entry.clone().at(entry.path.file_name().unwrap_or_default().into());
    let lock = LockFile { entries: entries.iter().map(next_to).collect(), changes: Vec::new() };
    write_text(&out.join("plugins").join(LockFile::FILE_NAME), &lock.to_text(LockKind::Run))?;
    let is_bundle = |entry: &&LockEntry| entry.source == LockSource::Bundle;
    let bundles = LockFile { entries: entries.iter().filter(is_bundle).cloned().collect(), changes: Vec::new() };
    if !bundles.entries.is_empty() {
        write_text(&out.join(LockFile::FILE_NAME), &bundles.to_text(LockKind::Project))?;
    }
    Ok(entries)
}

/// A plugin's id, for use in a file name.
fn file_name(id: &str) -> String {
    id.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect()
}

/// The paths of the plugins in the configuration, in the order of the lock file.
fn plugin_paths(config: &mut Config) -> Vec<&mut PathBuf> {
    let plugins = &mut config.plugins;
    let filters = plugins.filters.iter_mut().map(|plugin| &mut plugin.path);
    let rewards = plugins.rewards.iter_mut().map(|plugin| &mut plugin.path);
    std::iter::once(&mut plugins.prompt.path).chain(filters).chain(rewards).collect()
}

/// The part of the configuration that the reward reads: without teacher, evaluation, and settings of the run's machine.
fn reward_config(config: &Config, reward: &RewardProcesses<'_>) -> Config {
    let n = reward.n_processes.max(1);
    let mut config = config.clone();
    config.output_dir = "querl-run".into();
    config.device = "auto".into();
    config.threads = 0;
    config.teacher = TeacherConfig::default();
    config.fallback_teacher = EndpointConfig::default();
    config.data.input = None;
    config.data.dataset = DatasetConfig { train: Some(reward.rows.into()), ..DatasetConfig::default() };
    // The rows have this column only if a reward reads columns.
    config.data.group_column = None;
    config.plugins.style_model.audit = None;
    config.cache.path = None;
    config.retrieval.index_dir = None;
    config.budget = config.budget.map(|budget| budget / n as f64);
    let (concurrency, rates) = whole_limits(&mut config);
    concurrency.into_iter().for_each(|limit| *limit = (*limit / n).max(1));
    rates.into_iter().for_each(|limit| *limit = (*limit / n as u32).max(1));
    config
}

/// Concurrency and rates of the services that a reward calls: limits that are divided into whole numbers.
fn whole_limits(config: &mut Config) -> ([&mut usize; 4], Vec<&mut u32>) {
    let Config { retrieval, judge, .. } = config;
    let concurrency = [
        &mut retrieval.max_concurrent,
        &mut retrieval.embedding.max_concurrent,
        &mut retrieval.rerank.max_concurrent,
        &mut judge.max_concurrent,
    ];
    let rates = [
        &mut retrieval.requests_per_minute,
        &mut retrieval.embedding.requests_per_minute,
        &mut retrieval.rerank.requests_per_minute,
        &mut judge.requests_per_minute,
        &mut judge.tokens_per_minute,
    ];
    (concurrency, rates.into_iter().flatten().collect())
}

/// Number of processes that compute rewards: `at_most`, but no more than the smallest configured limit, since each process gets at least 1
/// of every limit.
pub(super) fn n_reward_processes(config: &Config, at_most: usize) -> usize {
    let mut config = config.clone();
    let (concurrency, rates) = whole_limits(&mut config);
    let rates = rates.into_iter().map(|limit| *limit as usize);
    concurrency.into_iter().map(|limit| *limit).chain(rates).fold(at_most, usize::min).max(1)
}

/// Files that are copied, each with the name of its copy.
fn data_paths(config: &mut Config) -> Vec<(&'static str, &mut PathBuf)> {
    let retrieval = &mut config.retrieval;
    let optional = [
        ("knowledge_base", &mut retrieval.knowledge_base),
        ("lexicon", &mut retrieval.lexicon),
        ("user_dictionary", &mut retrieval.user_dictionary),
        ("synonyms", &mut retrieval.synonyms),
        ("ca", &mut config.calls.ca_file),
    ];
    optional.into_iter().filter_map(|(name, path)| Some((name, path.as_mut()?))).collect()
}

/// Paths that are still absolute.
fn outside(config: &Config) -> Vec<PathBuf> {
    let (retrieval, style) = (&config.retrieval, &config.plugins.style_model);
    let optional = [
        &retrieval.embedding.path,
        &retrieval.rerank.path,
        &style.path,
        &style.base,
        &config.judge.api_key_file,
        &retrieval.api_key_file,
        &retrieval.embedding.api_key_file,
        &retrieval.rerank.api_key_file,
    ];
    let paths = std::iter::once(&config.model.path).chain(optional.into_iter().flatten());
    paths.filter(|path| path.is_absolute()).cloned().collect()
}

/// The files that the exported folder of one engine has in addition to [`SharedFiles`].
pub(super) struct EngineFiles<'a> {
    /// Name of the engine, as in the heading of the table of keys.
    pub(super) engine: &'a str,
    pub(super) mapping: &'a Mapping,
    /// Notes on differences that concern several keys or none.
    pub(super) notes: Vec<String>,
    /// File names with their templates.
    pub(super) templates: &'a [(&'a str, &'a str)],
    /// Values of the placeholders `@NAME@` in the templates, other than tenant, keys and notes.
    pub(super) values: &'a [(&'a str, &'a str)],
}

impl EngineFiles<'_> {
    pub(super) fn write(self, run: &ExportedRun, shared: SharedFiles, out: &Path) -> anyhow::Result<Exported> {
        let SharedFiles { model, plugins, outside } = shared;
        let base = model.strip_prefix(HERE).map_or(model.as_str(), |rest| rest.trim_start_matches('/'));
        let of_prompts = note_on_form(&run.config, self.engine).into_iter().chain(run.tokenizer.date_note());
        let notes: Vec<String> = of_prompts.chain(self.notes).collect();
        let keys = self.mapping.to_markdown(self.engine);
        let noted: String = notes.iter().map(|note| format!("- {note}\n")).collect();
        let common = [
            ("@TENANT@", run.config.tenant.as_str()),
            ("@BASE@", base),
            ("@KEYS@", keys.as_str()),
            ("@NOTES@", noted.as_str()),
        ];
        let values = [&common[..], self.values].concat();
        for (name, template) in self.templates {
            write_template(&out.join(name), template, &values)?;
        }
        Ok(Exported {
            n_train: run.train.len(),
            n_val: run.val.len(),
            has_adapter: run.adapter.is_some(),
            plugins,
            without_equivalent: self.mapping.without_equivalent(),
            notes,
            outside,
        })
    }
}

/// A note on the rewrite form: the reward parses responses as in training, because `querl.toml` has the key.
fn note_on_form(config: &Config, engine: &str) -> Option<String> {
    (config.data.rewrite_form == RewriteForm::Edit).then(|| {
        format!(
            "responses {ARE_EDITS}. The reward of this folder applies them before it scores; another reward, and whatever serves the \
             model that {engine} trains, must apply them too"
        )
    })
}

/// Settings as command-line arguments in a script, one per line; a setting without a value is a flag.
pub(super) fn argument_lines(settings: &[(String, String)]) -> String {
    let line = |(name, value): &(String, String)| match value.as_str() {
        "" => format!("    --{name} \\\n"),
        value => format!("    --{name} {value} \\\n"),
    };
    settings.iter().map(line).collect()
}

/// Quotes a text as one word of a bash script.
pub(crate) fn shell_word(text: &str) -> String {
    let escaped: String = text
        .chars()
        .map(|c| match c {
            '\n' => "\\n".to_owned(),
            '\t' => "\\t".to_owned(),
            '\r' => "\\r".to_owned(),
            '\'' | '\\' => format!("\\{c}"),
            c => c.to_string(),
        })
        .collect();
    if escaped == text { format!("'{text}'") } else { format!("$'{escaped}'") }
}

/// Writes the rows of both splits as JSON lines.
pub(super) fn write_rows<T: Serialize>(
    run: &ExportedRun,
    out: &Path,
    row: impl Fn(&PromptRow) -> T,
) -> anyhow::Result<()> {
    for (name, rows) in [(TRAIN, &run.train), (VAL, &run.val)] {
        let path = out.join(name);
        write_jsonl(&path, rows.iter().map(&row)).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}

/// File name of the training rows, for engines that read JSON lines.
pub(super) const TRAIN: &str = "train.jsonl";
pub(super) const VAL: &str = "val.jsonl";

/// Writes a file of the folder from a template, whose `@NAMES@` are replaced.
fn write_template(path: &Path, template: &str, values: &[(&str, &str)]) -> anyhow::Result<()> {
    let text = values.iter().fold(template.to_owned(), |text, (name, value)| text.replace(name, value));
    write_text(path, &text)?;
    let is_script = path.extension().is_some_and(|extension| extension == "sh");
    if is_script { make_executable(path) } else { Ok(()) }
}

fn make_executable(path: &Path) -> anyhow::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
            .with_context(|| format!("{}: cannot be made executable", path.display()))?;
    }
    Ok(())
}

/// Refuses a path that would need quoting in a shell script, in a parameter expansion or in a Python literal.
pub(super) fn plain(path: &str) -> Result<&str, Stop> {
    let is_plain = |c: char| !c.is_control() && !"'\"\\$`{}".contains(c);
    match path.chars().all(is_plain) {
        true => Ok(path),
        false => Err(Stop::usage(format!(
            "{path}: quotes, `$`, braces, a backslash or a line break in the path of the model; copy the model with `--base copy`, or \
             rename the folder"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_plain() {
        assert_eq!(file_name("reward-competition"), "reward-competition");
        assert_eq!(file_name("shop:reward/1"), "shop-reward-1");
        assert!(plain("/models/qwen 3").is_ok());
        assert!(plain("/models/{a}").is_err() && plain("/models/a}").is_err());
        assert!(plain("/models/$HOME").is_err_and(|error| error.to_string().contains("--base copy")));
    }

    #[test]
    fn edits_are_noted_and_the_reward_reads_their_key() {
        let of = |sections: &str| crate::exchange::source::testing::run(sections).config;
        assert_eq!(note_on_form(&of(""), "TRL"), None);
        let mut config = of("");
        config.data.rewrite_form = RewriteForm::Edit;
        assert!(note_on_form(&config, "TRL").is_some_and(|note| note.contains("data.rewrite_form = \"edit\"")));
        let exported = reward_config(&config, &RewardProcesses { n_processes: 1, rows: TRAIN });
        assert_eq!(exported.data.rewrite_form, RewriteForm::Edit);
    }

    /// Symptom: the rows were named as a recorded teacher, which they are not.
    #[test]
    fn the_rows_of_an_exported_folder_are_its_dataset() {
        let mut config = crate::exchange::source::testing::run("").config;
        config.data.group_column = Some("product".into());
        let exported = reward_config(&config, &RewardProcesses { n_processes: 1, rows: TRAIN });
        assert_eq!((exported.called_teacher(), exported.data.query_files()), (None, vec![Path::new(TRAIN)]));
        assert_eq!((exported.data.input, exported.data.group_column), (None, None));
    }

    #[test]
    fn texts_are_one_word_of_a_script_each() {
        assert_eq!([shell_word("a b"), shell_word("</s>")], ["'a b'", "'</s>'"]);
        assert_eq!(shell_word("it's\n\\"), "$'it\\'s\\n\\\\'");
        let settings = [("a.b".to_owned(), "1 2".to_owned()), ("c".to_owned(), String::new())];
        assert_eq!(argument_lines(&settings), "    --a.b 1 2 \\\n    --c \\\n");
    }

    /// Symptom: 8 processes that keep at least 1 of a limit of 3 exceeded it.
    #[test]
    fn limits_are_divided_over_no_more_processes_than_the_smallest_of_them() {
        let of = |sections: &str| crate::exchange::source::testing::run(sections).config;
        assert_eq!(n_reward_processes(&of(""), 8), 8);
        assert_eq!(n_reward_processes(&of("[judge]\nmax_concurrent = 20\ntokens_per_minute = 5\n"), 8), 5);
        let config = of("[judge]\nmax_concurrent = 20\nrequests_per_minute = 3\n");
        let n_processes = n_reward_processes(&config, 8);
        assert_eq!(n_processes, 3);
        let divided = reward_config(&config, &RewardProcesses { n_processes, rows: TRAIN });
        assert_eq!((divided.judge.max_concurrent, divided.judge.requests_per_minute), (6, Some(1)));
        let mut config = of("");
        (config.budget, config.retrieval.embedding.max_concurrent) = (Some(4.0), 16);
        let divided = reward_config(&config, &RewardProcesses { n_processes: 8, rows: TRAIN });
        assert_eq!((divided.budget, divided.retrieval.embedding.max_concurrent), (Some(0.5), 2));
    }
}
