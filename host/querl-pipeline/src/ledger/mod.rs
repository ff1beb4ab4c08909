//! `stages.json`, the ledger: finished stages with their inputs and figures.

mod inputs;
mod outputs;

use crate::failure::Stop;
use crate::files::write_json;
pub(crate) use inputs::{FORMAT_OF_EXPANSIONS, FORMS_OF_EDITS, INDEX, Inputs, is_of_model};
pub(crate) use outputs::{FileDigest, Outputs};
use querl_core::fsx::{self, ReadError, read_jsonl};
use querl_core::run_dir::RunDir;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The stages in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StageName {
    /// The teacher rewrites each query.
    Rewrite,
    /// Retrieval looks up each rewrite.
    Validate,
    /// Filters keep or drop; the dataset is split.
    Convert,
    /// Supervised fine-tuning.
    Sft,
    /// Reinforcement learning.
    Rl,
    /// The table and the report.
    Eval,
}

impl StageName {
    /// All stages, in order.
    pub const ALL: [Self; 6] = [Self::Rewrite, Self::Validate, Self::Convert, Self::Sft, Self::Rl, Self::Eval];

    /// What the stage does, as a sentence.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Rewrite => "The teacher rewrites each query",
            Self::Validate => "Retrieval looks up each rewrite",
            Self::Convert => "Filters keep or drop; the dataset is split",
            Self::Sft => "Supervised fine-tuning",
            Self::Rl => "Reinforcement learning",
            Self::Eval => "The table and the report",
        }
    }

    /// Name on the command line and in the ledger.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rewrite => "rewrite",
            Self::Validate => "validate",
            Self::Convert => "convert",
            Self::Sft => "sft",
            Self::Rl => "rl",
            Self::Eval => "eval",
        }
    }
}

impl std::fmt::Display for StageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Incremented when an old ledger can no longer be read; such a run starts over.
const FORMAT: u32 = 1;

const REMEDY: &str = "put the file back, or remove it to run all stages again";

/// Maximum size of the file, which has a few kilobytes for each stage.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The ledger's record of one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub(crate) inputs: Inputs,
    /// Whether the stage is finished; false after an interruption.
    pub finished: bool,
    /// Number of rows whose call failed; the next run tries them again.
    #[serde(default)]
    pub n_failed: u64,
    /// Figures of the stage's summary.
    #[serde(default)]
    pub facts: Facts,
    /// Wall-clock seconds of the run that finished the stage.
    #[serde(default)]
    pub seconds: f64,
    /// Digests of the files that the stage wrote for later stages.
    #[serde(default, skip_serializing_if = "Outputs::is_empty")]
    pub(crate) outputs: Outputs,
    /// Digests of the stage's logs: `episodes.jsonl`, and the stage's lines of `metrics.jsonl`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) logs: BTreeMap<String, FileDigest>,
}

impl Entry {
    pub(crate) fn begun(inputs: Inputs) -> Self {
        let (outputs, logs) = (Outputs::default(), BTreeMap::new());
        Self { inputs, finished: false, n_failed: 0, facts: Facts::default(), seconds: 0.0, outputs, logs }
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Contents {
    format: u32,
    stages: BTreeMap<String, Entry>,
}

/// The ledger: the records of all begun stages, with the path of their file.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    contents: Contents,
}

impl Ledger {
    /// Reads the ledger at `path`; a missing file is an empty ledger.
    ///
    /// # Errors
    /// The file exists and cannot be read or parsed.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let empty = || Contents { format: FORMAT, ..Contents::default() };
        let contents = match fsx::read_bounded(path, MAX_FILE_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => empty(),
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
                let file = path.ancestors().skip(1).find(|path| path.exists()).unwrap_or(path).display();
                let remedy = "choose another folder, or change `output_dir`";
                return Err(Stop::usage(format!("{file}: a file, not a folder; {remedy}")).into());
            }
            Err(error) if fsx::is_exhausted(&error) => {
                anyhow::bail!("{}: cannot be read: {}", path.display(), fsx::io_problem(&error));
            }
            Err(error) => {
                return Err(Stop::usage(format!("{}: cannot be read: {error}; {REMEDY}", path.display())).into());
            }
            Ok(bytes) => {
                let contents: Contents = serde_json::from_slice(&bytes).map_err(|error| {
                    let problem = fsx::json_problem(&error);
                    Stop::usage(format!("{}: not a ledger of stages ({problem}); {REMEDY}", path.display()))
                })?;
                match contents.format {
                    FORMAT => contents,
                    format if format > FORMAT => {
                        let problem = format!("format is {format}, and this querl reads {FORMAT}");
                        let remedy = "run the querl that wrote it, or remove the file to run all stages again";
                        return Err(Stop::usage(format!("{}: {problem}; {remedy}", path.display())).into());
                    }
                    _ => empty(),
                }
            }
        };
        Ok(Self { path: path.into(), contents })
    }

    /// Path of the ledger file `stages.json`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the run directory.
    pub(crate) fn root(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Whether no stage has begun.
    pub fn is_empty(&self) -> bool {
        self.contents.stages.is_empty()
    }

    /// The record of `stage`; `None` if the stage has not begun.
    pub fn entry(&self, stage: StageName) -> Option<&Entry> {
        self.contents.stages.get(stage.as_str())
    }

    /// The record of `stage`; `None` if the stage is not finished.
    pub fn finished(&self, stage: StageName) -> Option<&Entry> {
        self.entry(stage).filter(|entry| entry.finished)
    }

    /// Digest of the model of expansions that the finished `convert` wrote; `None` in a run without one.
    pub(crate) fn expansion_digest(&self, dir: &RunDir) -> Option<String> {
        self.finished(StageName::Convert)?.outputs.digest(self.root(), &dir.expansion())
    }

    /// Names of the results of other stages that the finished `stage` read and that have changed since, by their digests in this ledger: no
    /// file is read.
    pub(crate) fn changed_after(&self, stage: StageName) -> Vec<String> {
        let Some(entry) = self.finished(stage) else { return Vec::new() };
        let is_changed = |input: &str, by: StageName| {
            let Some(writer) = self.entry(by) else { return true };
            let name = input.strip_suffix(&format!(" of {by}")).unwrap_or(input);
            // Ledgers of earlier versions have no digests of outputs.
            let digest = writer.outputs.path_called(name).and_then(|path| writer.outputs.digest(Path::new(""), path));
            digest.is_some_and(|digest| entry.inputs.get(input) != Some(digest.as_str()))
        };
        let upstream = entry.inputs.upstream().into_iter();
        upstream.filter(|&(input, by)| is_changed(input, by)).map(|(input, _)| input.to_owned()).collect()
    }

    /// The first stage whose results the finished `stage` read and that has begun again since and is not finished.
    pub(crate) fn unfinished_before(&self, stage: StageName) -> Option<StageName> {
        let entry = self.finished(stage)?;
        let is_unfinished = |by: &StageName| self.entry(*by).is_some_and(|writer| !writer.finished);
        entry.inputs.upstream().into_iter().map(|(_, by)| by).find(is_unfinished)
    }

    /// Writes to `path` a ledger that has only `stages`, with the digests of `files`.
    pub(crate) fn write_part(
        &self,
        stages: &BTreeSet<StageName>,
        files: &[PathBuf],
        path: &Path,
    ) -> anyhow::Result<()> {
        let mut part = Self { path: path.into(), contents: Contents { format: FORMAT, ..Contents::default() } };
        for &stage in stages {
            if let Some(entry) = self.entry(stage) {
                let outputs = entry.outputs.only(self.root(), files);
                let finished = entry.finished;
                part.put(stage, Entry { finished, outputs, ..Entry::begun(Inputs::default()) })?;
            }
        }
        Ok(())
    }

    /// Replaces the entry of `stage`, or removes it, and writes the file.
    pub(crate) fn put(&mut self, stage: StageName, entry: impl Into<Option<Entry>>) -> anyhow::Result<()> {
        match entry.into() {
            Some(entry) => self.contents.stages.insert(stage.to_string(), entry),
            None => self.contents.stages.remove(stage.as_str()),
        };
        write_json(&self.path, &self.contents)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    Skip(Entry),
    /// Run the stage on its partial outputs, for the given reason.
    Continue(String),
    /// Remove the outputs and run the stage, for the given reason.
    StartOver(String),
}

/// Decides whether to skip, continue or restart a stage whose current inputs are `inputs`. `keeps_rows`: whether finished rows stay valid
/// when the input of a name changes.
pub(crate) fn decide(
    entry: Option<&Entry>,
    inputs: &Inputs,
    outputs: &[PathBuf],
    keeps_rows: impl Fn(&str) -> bool,
) -> Decision {
    let Some(entry) = entry else { return Decision::StartOver("no earlier result".into()) };
    let changed = inputs.changed_since(&entry.inputs);
    if !changed.is_empty() {
        let reason = format!("{} changed", listing(&changed));
        let all_kept = changed.iter().all(|name| keeps_rows(name));
        return if all_kept { Decision::Continue(reason) } else { Decision::StartOver(reason) };
    }
    if !entry.finished {
        return Decision::Continue("stopped on the way last time".into());
    }
    if let Some(missing) = outputs.iter().find(|path| !path.exists()) {
        let name = missing.file_name().unwrap_or_default().to_string_lossy();
        return Decision::Continue(format!("its {name} is missing"));
    }
    match entry.n_failed {
        0 => Decision::Skip(entry.clone()),
        1 => Decision::Continue("1 row failed last time".into()),
        n_failed => Decision::Continue(format!("{n_failed} rows failed last time")),
    }
}

/// Lists names as text: `a`, `a and b`, `a, b and 3 more`.
pub(crate) fn listing(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [only] => only.clone(),
        [one, other] => format!("{one} and {other}"),
        [one, other, rest @ ..] => format!("{one}, {other} and {} more", rest.len()),
    }
}

/// Reads the rows that an earlier stage wrote.
pub(crate) fn rows_of<T: serde::de::DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    read_jsonl(path).map_err(|error| match error {
        ReadError::Line { path, line, problem } => {
            let remedy = "remove the file, and `querl run` makes it again";
            Stop::usage(format!("{path}:{line}: not a valid record: {problem}; {remedy}")).into()
        }
        ReadError::Io { .. } => error.into(),
    })
}

pub(crate) fn teacher_name(dir: &RunDir) -> anyhow::Result<String> {
    let ledger = Ledger::open(&dir.stages())?;
    let name = ledger.entry(StageName::Rewrite).and_then(|entry| entry.facts.get("teacher")?.as_str());
    let message = || Stop::usage(format!("{}: no rewrites yet; run `querl rewrite` first", dir.root().display()));
    Ok(name.ok_or_else(message)?.to_owned())
}

/// Name prefix of a count that is a part of the figure before it.
pub(crate) const PART: &str = "- ";

/// Named figures of a stage, in the order of display.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts(Vec<(String, Value)>);

impl Facts {
    pub(crate) fn add(&mut self, name: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        self.0.push((name.into(), value.into()));
        self
    }

    /// Adds counts that are parts of the figure added last, most frequent first.
    pub(crate) fn add_parts(&mut self, counts: &BTreeMap<String, u64>) -> &mut Self {
        let mut sorted: Vec<_> = counts.iter().collect();
        sorted.sort_by_key(|(code, count)| (std::cmp::Reverse(**count), (*code).clone()));
        for (code, count) in sorted {
            self.add_part(code, *count);
        }
        self
    }

    pub(crate) fn add_part(&mut self, name: &str, count: u64) -> &mut Self {
        self.add(format!("{PART}{name}"), count)
    }

    pub(crate) fn append(&mut self, mut other: Self) -> &mut Self {
        self.0.append(&mut other.0);
        self
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// The count named `name`; 0 if there is none.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.get(name).and_then(Value::as_u64).unwrap_or(0)
    }

    /// The counts that are parts of the figure `name`, by their names.
    pub(crate) fn parts(&self, name: &str) -> BTreeMap<String, u64> {
        let after = self.0.iter().skip_while(|(known, _)| known != name).skip(1);
        let parts = after.map_while(|(part, value)| Some((part.strip_prefix(PART)?.to_owned(), value.as_u64()?)));
        parts.collect()
    }

    /// The figures as a JSON object.
    pub fn to_json(&self) -> Value {
        Value::Object(self.0.iter().cloned().collect())
    }

    /// The figures as text lines, one per figure, with aligned values.
    pub(crate) fn to_lines(&self) -> Vec<String> {
        let width = self.0.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        self.0.iter().map(|(name, value)| format!("  {name:<width$}  {}", readable(value))).collect()
    }
}

fn readable(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => format!("{:.4}", number.as_f64().unwrap_or(f64::NAN)),
        Value::Null => "-".into(),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(pairs: &[(&str, &str)]) -> Inputs {
        let mut inputs = Inputs::default();
        for (name, value) in pairs {
            inputs.text(name, value);
        }
        inputs
    }

    fn entry(pairs: &[(&str, &str)]) -> Entry {
        Entry { finished: true, seconds: 1.0, ..Entry::begun(inputs(pairs)) }
    }

    fn redo(entry: Option<&Entry>, inputs: &Inputs, outputs: &[PathBuf]) -> Decision {
        decide(entry, inputs, outputs, |_| false)
    }

    #[test]
    fn answers_are_kept_where_only_the_rows_changed() {
        let known = entry(&[("query table", "a"), ("teacher.model", "m")]);
        let now = |table, model| inputs(&[("query table", table), ("teacher.model", model)]);
        let decided = |now| decide(Some(&known), &now, &[], |name| name == "query table");
        assert_eq!(decided(now("b", "m")), Decision::Continue("query table changed".into()));
        let both = "query table and teacher.model changed";
        assert_eq!(decided(now("b", "n")), Decision::StartOver(both.into()));
    }

    #[test]
    fn finished_stage_is_skipped_until_an_input_changes() {
        let known = entry(&[("sft.epochs", "3"), ("train.jsonl", "aa")]);
        assert_eq!(redo(Some(&known), &known.inputs, &[]), Decision::Skip(known.clone()));
        let now = inputs(&[("sft.epochs", "4"), ("train.jsonl", "aa")]);
        assert_eq!(redo(Some(&known), &now, &[]), Decision::StartOver("sft.epochs changed".into()));
        let now = inputs(&[("sft.epochs", "4"), ("train.jsonl", "bb"), ("new", "1")]);
        assert_eq!(redo(Some(&known), &now, &[]), Decision::StartOver("new, sft.epochs and 1 more changed".into()));
        assert_eq!(redo(None, &now, &[]), Decision::StartOver("no earlier result".into()));
    }

    #[test]
    fn killed_stage_is_continued() {
        let known = Entry { finished: false, ..entry(&[]) };
        assert_eq!(redo(Some(&known), &known.inputs, &[]), Decision::Continue("stopped on the way last time".into()));
    }

    #[test]
    fn failed_rows_and_lost_outputs_reopen_a_stage() {
        let known = Entry { n_failed: 2, ..entry(&[]) };
        assert_eq!(redo(Some(&known), &known.inputs, &[]), Decision::Continue("2 rows failed last time".into()));
        let lost = redo(Some(&entry(&[])), &inputs(&[]), &["/nowhere/train.jsonl".into()]);
        assert_eq!(lost, Decision::Continue("its train.jsonl is missing".into()));
    }

    #[test]
    fn ledger_survives_being_written_and_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stages.json");
        let mut ledger = Ledger::open(&path).unwrap();
        ledger.put(StageName::Sft, entry(&[("a", "b")])).unwrap();
        assert_eq!(Ledger::open(&path).unwrap().entry(StageName::Sft), Some(&entry(&[("a", "b")])));
        std::fs::write(&path, "{").unwrap();
        assert!(Ledger::open(&path).unwrap_err().to_string().contains("not a ledger of stages"));
        std::fs::write(&path, "9").unwrap();
        let error = Ledger::open(&path).unwrap_err().to_string();
        assert!(error.contains("(invalid type: integer `9`, expected an object at line 1 column 1)"), "{error}");
        std::fs::write(&path, "{\"format\": 2, \"stages\": {}}").unwrap();
        let error = Ledger::open(&path).unwrap_err().to_string();
        assert!(error.contains("stages.json: format is 2, and this querl reads 1; run the querl"), "{error}");
    }

    #[test]
    fn figures_are_in_a_column() {
        let mut facts = Facts::default();
        facts.add("rows", 480).add("mean top1", 0.61234);
        facts.add("dropped", 8).add_parts(&BTreeMap::from([("empty".into(), 1), ("unchanged".into(), 7)]));
        let expected =
            ["  rows         480", "  mean top1    0.6123", "  dropped      8", "  - unchanged  7", "  - empty      1"];
        assert_eq!(facts.to_lines(), expected);
        assert_eq!(facts.to_json()["- unchanged"], 7);
        assert_eq!(facts.parts("dropped"), BTreeMap::from([("empty".into(), 1), ("unchanged".into(), 7)]));
        assert_eq!((facts.parts("rows"), facts.count("rows"), facts.count("mean top1")), (BTreeMap::new(), 480, 0));
    }

    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    fn sentence(error: &anyhow::Error) -> bool {
        let is_usage = error.chain().any(|cause| cause.to_string().contains("stages.json: "));
        is_usage && !error.to_string().contains('\n')
    }

    proptest! {
        #![proptest_config(crate::properties(64))]

        #[test]
        fn a_ledger_is_read_back_and_one_that_is_cut_or_damaged_is_an_error_or_complete(
            texts in btree_map(".{0,6}", ".{0,6}", 0..4),
            seconds in 0.0..1e9_f64,
            cut in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("stages.json");
            let mut facts = Facts::default();
            for (name, value) in &texts {
                facts.add(name.clone(), value.clone());
            }
            let pairs: Vec<(&str, &str)> = texts.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let written = Entry { facts, seconds, ..entry(&pairs) };
            let mut ledger = Ledger::open(&path).unwrap();
            ledger.put(StageName::Sft, written.clone()).unwrap();
            ledger.put(StageName::Rl, written.clone()).unwrap();
            let read = Ledger::open(&path).unwrap();
            prop_assert_eq!(read.entry(StageName::Sft), Some(&written));
            let mut bytes = std::fs::read(&path).unwrap();
            let at = cut.index(bytes.len());
            std::fs::write(&path, &bytes[..at]).unwrap();
            match Ledger::open(&path) {
                // The last byte is a line break.
                Ok(read) => {
                    let entries = [StageName::Sft, StageName::Rl].map(|stage| read.entry(stage));
                    prop_assert_eq!(entries, [Some(&written); 2]);
                }
                Err(error) => prop_assert!(sentence(&error), "{error:#}"),
            }
            bytes[at] = byte;
            std::fs::write(&path, &bytes).unwrap();
            if let Err(error) = Ledger::open(&path) {
                prop_assert!(sentence(&error), "{error:#}");
            }
        }

        #[test]
        fn any_bytes_are_a_ledger_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("stages.json");
            std::fs::write(&path, bytes).unwrap();
            if let Err(error) = Ledger::open(&path) {
                prop_assert!(sentence(&error), "{error:#}");
            }
        }
    }
}
