//! Import of an adapter that another engine trained, as the `rl` stage of a run.
//!
//! The ledger records the stage's inputs at the time of the import: after a later change of the data, of a plugin or of `[rl]`, `querl run`
//! trains again. The facts of the stage have the source of the import and the digest of the weights. Metrics keep their names.

use crate::failure::Stop;
use crate::ledger::{Facts, Ledger, StageName};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use crate::stages::imported_stage::import_stage;
use crate::training::{self, Base};
use anyhow::Context;
use querl_core::fsx::{digest_file, read_text_bounded};
use querl_model::{DecoderConfig, LoraAdapter};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Format in which another engine saved the adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointFormat {
    /// PEFT's files, as TRL, ms-swift and OpenRLHF save them.
    Peft,
    /// A checkpoint of verl, whose model merger has written `lora_adapter`.
    Verl,
}

/// Summary of an import.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Imported {
    /// Folder of the imported adapter, with PEFT's files.
    pub adapter: PathBuf,
    /// Metrics log of the training; `None` if none was found.
    pub metrics: Option<PathBuf>,
    /// Number of steps with metrics; for a checkpoint of verl, up to the step of the checkpoint.
    pub n_steps_with_metrics: usize,
    /// Folder to which earlier results of the stage were moved; `None` if there were none.
    pub previous: Option<PathBuf>,
}

/// Makes the adapter in `folder` the finished stage `rl` of the run.
///
/// # Errors
/// There is no adapter, it does not fit the run's model, is one of a merged model, has NaN or Inf or a scale that is not above 0, or `sft` is not
/// finished.
pub fn import_adapter(run: &Run, format: CheckpointFormat, folder: &Path) -> anyhow::Result<Imported> {
    let adapter = find_adapter(format, folder)?;
    let settings = check_settings(format, &adapter)?;
    let ledger = Ledger::open(&run.dir.stages())?;
    let base = match ledger.finished(StageName::Sft) {
        Some(_) => Base::of(&run.config, &run.dir, StageName::Sft)?.model,
        None => {
            let dir = run.dir.root().display();
            let message =
                format!("{dir}: sft is not finished; run `querl sft` first, since the evaluation compares both");
            return Err(Stop::usage(message).into());
        }
    };
    let shapes = DecoderConfig::load(&base.join("config.json")).map_err(Stop::usage)?;
    let loaded = LoraAdapter::load(&adapter, &shapes).map_err(Stop::usage)?;
    let own_base = settings["base_model_name_or_path"].as_str().filter(|name| !name.is_empty());
    if let Some(warning) = own_base.map(|name| check_base(&adapter, name, &base)).transpose()?.flatten() {
        run.reporter.message(&warning);
    }
    let log = find_log(format, folder, &adapter);
    let last_step = checkpoint_step(format, folder).unwrap_or(u64::MAX);
    let metrics = log.as_deref().map(|log| read_log(log, last_step)).transpose()?.unwrap_or_default();
    let mut facts = facts(format, folder, &adapter, &metrics)?;
    facts.add("its base model", own_base.map(str::to_owned));
    let best = training::best(&run.dir.rl());
    let previous = import_stage(run, StageName::Rl, facts, || {
        let name = base.file_name().unwrap_or(base.as_os_str()).to_string_lossy().into_owned();
        std::fs::create_dir_all(&best).with_context(|| format!("{}: cannot be made", best.display()))?;
        loaded.save(&best, &name)?;
        let mut log = MetricsLog::open(&run.dir.metrics(), StageName::Rl.as_str())?;
        metrics.iter().try_for_each(|(step, row)| log.append(*step, row)).context("metrics.jsonl cannot be written")
    })?;
    Ok(Imported { adapter, metrics: log, n_steps_with_metrics: metrics.len(), previous })
}

fn facts(format: CheckpointFormat, folder: &Path, adapter: &Path, metrics: &RowsByStep) -> anyhow::Result<Facts> {
    let weights = adapter.join(WEIGHTS);
    let digest = digest_file(&weights).with_context(|| format!("{}: cannot be read", weights.display()))?;
    let name = if format == CheckpointFormat::Verl { "verl" } else { "peft" };
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let mut facts = Facts::default();
    facts.add("imported", name).add("from", folder.display().to_string()).add("sha256 of its weights", digest);
    facts.add("last step", metrics.last_key_value().map(|(step, _)| *step));
    Ok(facts)
}

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Paths of `lora_adapter` relative to a checkpoint: in the merger's folder, or in `global_step_N` with or without the folder of
/// `merge.sh`.
const PLACES_OF_VERL: [&str; 6] = [
    "lora_adapter",
    "merged/lora_adapter",
    "actor/lora_adapter",
    "actor/merged/lora_adapter",
    "actor/huggingface/lora_adapter",
    "huggingface/lora_adapter",
];

fn find_adapter(format: CheckpointFormat, folder: &Path) -> Result<PathBuf, Stop> {
    let is_adapter = |path: &PathBuf| path.join(CONFIG).is_file();
    let places =
        PLACES_OF_VERL.map(|place| folder.join(place)).into_iter().filter(|_| format == CheckpointFormat::Verl);
    if let Some(found) = std::iter::once(folder.to_owned()).chain(places).find(is_adapter) {
        return Ok(found);
    }
    let shown = folder.display();
    Err(Stop::usage(match format {
        _ if !folder.is_dir() => format!("{shown}: no such folder; name the folder of an adapter or a checkpoint"),
        CheckpointFormat::Peft => {
            format!("{shown}: has no {CONFIG}; expected the folder of an adapter that PEFT saved")
        }
        CheckpointFormat::Verl => format!(
            "{shown}: has no `lora_adapter`; make one with `python -m verl.model_merger merge --backend fsdp --local_dir {shown}/actor \
             --target_dir {shown}/merged`"
        ),
    }))
}

/// The keys of `adapter_config.json`. Refuses a scale of 0 (the adapter would have no effect) or below, and other task types.
fn check_settings(format: CheckpointFormat, adapter: &Path) -> anyhow::Result<Value> {
    let path = adapter.join(CONFIG);
    let text = read_text_bounded(&path, MAX_BYTES).with_context(|| format!("{}: cannot be read", path.display()))?;
    // Invalid JSON is refused later, when the adapter is read.
    let settings: Value = serde_json::from_str(&text).unwrap_or_default();
    let refuse =
        |what: String| -> anyhow::Result<Value> { Err(Stop::usage(format!("{}: {what}", path.display())).into()) };
    let patterns = settings["alpha_pattern"].as_object().into_iter().flatten();
    let of_layers = patterns.map(|(layer, alpha)| (format!("alpha_pattern of `{layer}`"), alpha));
    let alphas = std::iter::once(("lora_alpha".to_owned(), &settings["lora_alpha"])).chain(of_layers);
    let too_low = alphas.filter_map(|(key, alpha)| Some((key, alpha.as_f64()?))).find(|(_, alpha)| *alpha <= 0.0);
    if let Some((key, alpha)) = too_low {
        let reason = match format {
            _ if alpha < 0.0 => "expected a number above 0",
            CheckpointFormat::Verl => {
                "verl's merger writes this where the checkpoint has no lora_train_meta.json: put that file next to its weights, with `r`, \
                 `lora_alpha` and `task_type` of the training, and merge again"
            }
            CheckpointFormat::Peft => "with it the adapter changes nothing; set the value of the training",
        };
        return refuse(format!("{key} is {alpha}; {reason}"));
    }
    match settings["task_type"].as_str() {
        None | Some("CAUSAL_LM") => Ok(settings),
        Some(task) => {
            refuse(format!("task_type is `{task}`; expected `CAUSAL_LM`, an adapter of a model that generates text"))
        }
    }
}

/// Refuses an adapter of a merged model, `merged` of a folder of `querl export openrlhf`, and returns a warning if the name of the base
/// differs, because shapes do not distinguish two models of the same architecture.
fn check_base(adapter: &Path, name: &str, base: &Path) -> Result<Option<String>, Stop> {
    let own = Path::new(name);
    let names = |path: &Path| [file_name(path).to_lowercase(), model_name(path).to_lowercase()];
    let expected = names(base);
    // An exported folder has the copy of the base model as `model`.
    if names(own).iter().any(|name| expected.contains(name) || name == "model") {
        return Ok(None);
    }
    let (config, base) = (adapter.join(CONFIG), base.display());
    let (config, found) = (config.display(), format!("base_model_name_or_path is {name}"));
    if file_name(own) == "merged" {
        return Err(Stop::usage(format!(
            "{config}: {found}, a model that an adapter was merged into; without it on {base} the fine-tuning before is missing. Serve or evaluate \
             that model with the adapter as it is, or train on the base model itself; where it is the base of this run, correct \
             base_model_name_or_path"
        )));
    }
    Ok(Some(format!(
        "warning: {config}: {found}, and the base of this run is {base}; where these are different models, the results of rl are meaningless"
    )))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The last part of a path, or of the hub's name of the model for a snapshot in its cache: `models--Qwen--Qwen3-0.6B/snapshots/REVISION`.
fn model_name(path: &Path) -> String {
    let is_snapshot = |parent: &&Path| parent.file_name().is_some_and(|name| name == "snapshots");
    let Some(repository) = path.parent().filter(is_snapshot).and_then(Path::parent) else { return file_name(path) };
    file_name(repository).rsplit("--").next().unwrap_or_default().to_owned()
}

const MAX_BYTES: u64 = 1 << 30;

/// Metrics of one step by name.
type Row = BTreeMap<String, f64>;

/// The rows by their steps.
type RowsByStep = BTreeMap<u64, Row>;

const LINES: &str = "metrics.jsonl";
const STATE: &str = "trainer_state.json";

/// The training's log in the named folder or next to the adapter: `metrics.jsonl` of verl's file logger, or `trainer_state.json` of transformers.
/// `train.sh` of an export writes the former next to `checkpoints`, in which the checkpoint is.
fn find_log(format: CheckpointFormat, folder: &Path, adapter: &Path) -> Option<PathBuf> {
    let mut places = vec![folder.join(LINES), folder.join(STATE), adapter.join(LINES), adapter.join(STATE)];
    if format == CheckpointFormat::Verl {
        let exports = checkpoints(folder).into_iter().filter_map(|path| Some(path.ancestors().nth(2)?.join(LINES)));
        places.extend(exports);
    }
    places.into_iter().find(|place| place.is_file())
}

/// The folder `global_step_N` that is `folder` or contains it; `folder` itself if there is none. Two paths, because parents may be links.
fn checkpoints(folder: &Path) -> Vec<PathBuf> {
    let paths = [std::path::absolute(folder), folder.canonicalize()].into_iter().flatten();
    let checkpoint = |path: PathBuf| {
        let found = path.ancestors().find(|above| step_in_name(above).is_some()).map(Path::to_owned);
        found.unwrap_or(path)
    };
    paths.map(checkpoint).collect()
}

/// N of a checkpoint `global_step_N` of verl.
fn checkpoint_step(format: CheckpointFormat, folder: &Path) -> Option<u64> {
    if format != CheckpointFormat::Verl {
        return None;
    }
    checkpoints(folder).iter().find_map(|path| step_in_name(path))
}

fn step_in_name(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("global_step_")?.parse().ok()
}

/// Reads the steps up to `last_step`. Rows of one step are merged: later metrics replace earlier ones of the same name.
fn read_log(path: &Path, last_step: u64) -> anyhow::Result<RowsByStep> {
    let rows = if path.file_name().is_some_and(|name| name == STATE) { read_state(path)? } else { read_lines(path)? };
    let mut steps = RowsByStep::new();
    for (step, row) in rows.into_iter().filter(|(step, _)| *step <= last_step) {
        steps.entry(step).or_default().extend(row);
    }
    Ok(steps)
}

/// Reads lines `{"step": 3, "data": {...}}` of verl, or lines with metrics next to `step`. A last line that the training did not complete
/// is skipped.
fn read_lines(path: &Path) -> anyhow::Result<Vec<(u64, Row)>> {
    let text = null_non_finite(&read_text(path)?);
    let mut rows = Vec::new();
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).peekable();
    while let Some((index, line)) = lines.next() {
        let is_torn = lines.peek().is_none() && !text.ends_with('\n');
        let value: Map<String, Value> = match serde_json::from_str(line) {
            Ok(value) => value,
            Err(_) if is_torn => break,
            Err(error) => {
                let (path, number) = (path.display(), index + 1);
                let remedy = "remove the line, or move the file away";
                return Err(Stop::usage(format!("{path}:{number}: not a JSON object ({error}); {remedy}")).into());
            }
        };
        let figures = value.get("data").and_then(Value::as_object).unwrap_or(&value);
        rows.extend(step_of(&value).map(|step| (step, numbers(figures))));
    }
    Ok(rows)
}

/// Reads `log_history` of transformers' Trainer.
fn read_state(path: &Path) -> anyhow::Result<Vec<(u64, Row)>> {
    let state: Value = serde_json::from_str(&null_non_finite(&read_text(path)?)).map_err(|error| {
        Stop::usage(format!("{}: not JSON ({error}); move the file away to import without metrics", path.display()))
    })?;
    let history = state["log_history"].as_array().ok_or_else(|| {
        let remedy = "expected the state of a transformers Trainer; move the file away to import without metrics";
        Stop::usage(format!("{}: has no list `log_history`; {remedy}", path.display()))
    })?;
    let rows = history.iter().filter_map(Value::as_object);
    Ok(rows.filter_map(|row| Some((step_of(row)?, numbers(row)))).collect())
}

/// Python's `json` writes NaN, Infinity and -Infinity, which JSON does not have: outside of strings they become `null`.
fn null_non_finite(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    let (mut is_in_string, mut is_escaped) = (false, false);
    while let Some(c) = rest.chars().next() {
        let token =
            ["NaN", "Infinity", "-Infinity"].into_iter().find(|token| !is_in_string && rest.starts_with(*token));
        if let Some(token) = token {
            out.push_str("null");
            rest = &rest[token.len()..];
            continue;
        }
        // A string ends at the end of the line, so that an incomplete line does not affect the next one.
        is_in_string = c != '\n' && is_in_string != (c == '"' && !is_escaped);
        is_escaped = is_in_string && c == '\\' && !is_escaped;
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    out
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    read_text_bounded(path, MAX_BYTES).with_context(|| format!("{}: cannot be read", path.display()))
}

fn step_of(row: &Map<String, Value>) -> Option<u64> {
    row.get("step")?.as_u64()
}

/// The numbers of a row by name, other than the step.
fn numbers(row: &Map<String, Value>) -> Row {
    let own = row.iter().filter(|(name, _)| name.as_str() != "step");
    own.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        querl_core::fsx::write_atomic(&path, text.as_bytes()).unwrap();
        path
    }

    fn refusal<T: std::fmt::Debug>(result: anyhow::Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn the_adapter_of_a_checkpoint_of_verl_is_found_in_the_usual_places() {
        let folder = tempfile::tempdir().unwrap();
        let find = || find_adapter(CheckpointFormat::Verl, folder.path()).map_err(|error| error.to_string());
        assert!(find().unwrap_err().contains("verl.model_merger merge --backend fsdp"));
        put(folder.path(), "merged/lora_adapter/adapter_config.json", "{}");
        assert_eq!(find(), Ok(folder.path().join("merged/lora_adapter")));
        let peft = find_adapter(CheckpointFormat::Peft, folder.path()).unwrap_err().to_string();
        assert!(peft.contains("has no adapter_config.json"), "{peft}");
        let missing = find_adapter(CheckpointFormat::Peft, &folder.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("no such folder"), "{missing}");
    }

    #[test]
    fn a_scale_of_zero_or_below_and_another_task_are_refused_with_their_reason() {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), CONFIG, "{\"r\": 16, \"lora_alpha\": 0}");
        let verl = refusal(check_settings(CheckpointFormat::Verl, folder.path()));
        assert!(verl.contains("lora_alpha is 0; verl's merger") && verl.contains("lora_train_meta.json"), "{verl}");
        assert!(refusal(check_settings(CheckpointFormat::Peft, folder.path())).contains("changes nothing"));
        // Regression: these adapters were imported.
        let cases = [
            (r#"{"lora_alpha": -3}"#, "lora_alpha is -3; expected a number above 0"),
            (
                r#"{"lora_alpha": 8, "alpha_pattern": {"k_proj": 4, "q_proj": 0}}"#,
                "alpha_pattern of `q_proj` is 0; with it",
            ),
            (r#"{"lora_alpha": 8, "task_type": "SEQ_CLS"}"#, "task_type is `SEQ_CLS`; expected `CAUSAL_LM`"),
        ];
        for (settings, expected) in cases {
            put(folder.path(), CONFIG, settings);
            let found = refusal(check_settings(CheckpointFormat::Peft, folder.path()));
            assert!(found.contains(expected), "{found}");
        }
        put(folder.path(), CONFIG, "{\"r\": 16, \"lora_alpha\": 32}");
        check_settings(CheckpointFormat::Verl, folder.path()).unwrap();
    }

    /// Regression: an adapter of any model of the same shapes was imported without a warning.
    #[test]
    fn an_adapter_of_a_merged_model_is_refused_and_one_of_another_base_is_a_warning() {
        let check = |name: &str, base: &str| {
            check_base(Path::new("a"), name, Path::new(base)).map_err(|error| error.to_string())
        };
        let cached = "/cache/models--Qwen--Qwen3-0.6B/snapshots/c1899de";
        for (name, base) in [
            ("/elsewhere/tiny-qwen3/", "models/tiny-qwen3"),
            ("Qwen/Qwen3-0.6B", cached),
            ("c1899de", cached),
            (cached, "models/Qwen3-0.6B"),
            ("/moved/model", "models/tiny-qwen3"),
            ("/own/merged", "models/merged"),
        ] {
            assert_eq!(check(name, base), Ok(None), "{name} on {base}");
        }
        let merged = check("/srv/served/merged", "models/tiny-qwen3").unwrap_err();
        assert!(
            merged.contains("base_model_name_or_path is /srv/served/merged, a model that an adapter was merged into")
                && merged.ends_with("where it is the base of this run, correct base_model_name_or_path"),
            "{merged}"
        );
        let other = check("Qwen/Qwen3-0.6B-Base", cached).unwrap().unwrap();
        assert!(other.starts_with("warning: "), "{other}");
        assert!(other.contains("base_model_name_or_path is Qwen/Qwen3-0.6B-Base, and"), "{other}");
    }

    fn metrics(format: CheckpointFormat, folder: &Path, adapter: &Path) -> anyhow::Result<RowsByStep> {
        let last_step = checkpoint_step(format, folder).unwrap_or(u64::MAX);
        find_log(format, folder, adapter).map_or_else(|| Ok(RowsByStep::new()), |log| read_log(&log, last_step))
    }

    fn row(pairs: &[(&str, f64)]) -> Row {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn metrics_of_verl_and_of_transformers_keep_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let (root, adapter) = (folder.path(), folder.path().join("lora_adapter"));
        let find = || metrics(CheckpointFormat::Peft, root, &adapter);
        assert!(find().unwrap().is_empty());
        let history =
            r#"{"log_history": [{"step": 1, "loss": 0.5, "epoch": 0.1}, {"step": 2, "reward": -1, "note": "x"}]}"#;
        put(&adapter, "trainer_state.json", history);
        let expected = [(1, row(&[("epoch", 0.1), ("loss", 0.5)])), (2, row(&[("reward", -1.0)]))];
        assert_eq!(find().unwrap(), RowsByStep::from(expected));
        put(root, "metrics.jsonl", "{\"step\": 3, \"data\": {\"actor/pg_loss\": 0.25, \"text\": \"x\"}}\n\n");
        assert_eq!(find().unwrap(), RowsByStep::from([(3, row(&[("actor/pg_loss", 0.25)]))]));
        let damaged = put(root, "metrics.jsonl", "{\"step\": 3}\n[1]\n");
        let message = refusal(find());
        assert!(message.starts_with(&format!("{}:2: not a JSON object", damaged.display())), "{message}");
    }

    /// Regression: the file that train.sh of the export writes was not found.
    #[test]
    fn metrics_of_an_exported_folder_are_read_up_to_the_step_of_the_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("checkpoints/global_step_2");
        put(&checkpoint, "merged/lora_adapter/adapter_config.json", "{}");
        let lines = (1..4).map(|step| format!("{{\"step\": {step}, \"data\": {{\"reward\": 0.5}}}}\n"));
        put(folder.path(), "metrics.jsonl", &lines.collect::<String>());
        let expected = RowsByStep::from([1, 2].map(|step| (step, row(&[("reward", 0.5)]))));
        for named in [checkpoint.clone(), checkpoint.join("merged"), checkpoint.join("merged/lora_adapter")] {
            let adapter = find_adapter(CheckpointFormat::Verl, &named).unwrap();
            assert_eq!(metrics(CheckpointFormat::Verl, &named, &adapter).unwrap(), expected, "{}", named.display());
        }
    }

    #[test]
    fn rows_of_one_step_are_merged_and_a_torn_last_line_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let text = "{\"step\": 1, \"a\": 1}\n{\"step\": 1, \"b\": 2}\n{\"step\": 2, \"a";
        let path = put(folder.path(), "metrics.jsonl", text);
        assert_eq!(read_log(&path, 9).unwrap(), RowsByStep::from([(1, row(&[("a", 1.0), ("b", 2.0)]))]));
        // The same line with a line break means a damaged file.
        put(folder.path(), "metrics.jsonl", &format!("{text}\n"));
        assert!(refusal(read_log(&path, 9)).contains(":3: not a JSON object"));
    }

    /// Regression: such a file gave an import with metrics of 0 steps.
    #[test]
    fn a_state_without_a_log_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["[]", "{}", "{\"log_history\": 5}"] {
            let path = put(folder.path(), "trainer_state.json", text);
            assert!(refusal(read_log(&path, 9)).contains("has no list `log_history`"), "{text}");
        }
    }

    /// Regression: the state of a training with one NaN could not be read.
    #[test]
    fn figures_that_are_not_finite_are_absent() {
        let folder = tempfile::tempdir().unwrap();
        let history =
            r#"{"log_history": [{"step": 1, "loss": NaN, "kl": -Infinity, "reward": 0.5, "note": "a \"NaN\""}]}"#;
        let path = put(folder.path(), "trainer_state.json", history);
        assert_eq!(read_log(&path, 9).unwrap(), RowsByStep::from([(1, row(&[("reward", 0.5)]))]));
        let text = r#"{"NaN \\": [Infinity, -1, "\" -Infinity 无"]}"#;
        assert_eq!(null_non_finite(text), r#"{"NaN \\": [null, -1, "\" -Infinity 无"]}"#);
    }
}
