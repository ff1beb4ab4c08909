//! `faults/` in the run folder: the input of each plugin call that faulted, so that `querl plugin replay FILE` can repeat the call.
//!
//! A file has one JSON object per line: first the plugin, its settings and the fault, then the items of the call, in order.

use crate::failure::Stop;
use crate::host_functions::{RecordedCalls, RunHostFunctions};
use querl_core::episodes::{self, RecordedEpisode};
use querl_core::fsx::{io_problem, write_jsonl};
use querl_core::ports::{
    EpisodeInputs, Filter, InputUse, ParsedJudgement, PluginFault, PromptInput, PromptTask, Prompts, RewardModel,
    RewardRange,
};
use querl_core::records::{Context, Episode, EpisodeRecord, Message, Rejection, Reward, Sample, Verdict};
use querl_plugin::PluginSettings;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of files in a run folder. Later faults are not written.
const MOST_FILES: usize = 10;
/// Maximum size of a file that is read.
const LARGEST_BYTES: u64 = 256 << 20;

/// A parsed fault file of the folder `faults/`.
#[derive(Debug)]
pub struct FaultFile {
    /// Plugin and fault, from the first line.
    pub header: FaultHeader,
    /// Input of the call that faulted.
    pub call: FaultedCall,
}

/// First line of a fault file: the plugin, its settings and the fault.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FaultHeader {
    /// Id of the plugin.
    pub plugin: String,
    /// Version of the plugin.
    pub version: String,
    /// Path of the plugin, as configured.
    pub path: PathBuf,
    /// Role of the plugin: `prompt`, `filter` or `reward`.
    pub role: String,
    /// Message of the fault.
    pub message: String,
    /// Settings of the plugin.
    pub settings: PluginSettings,
    /// Log lines of the plugin from the call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
}

/// Input of a plugin call that faulted, by role.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum FaultedCall {
    Episodes(Vec<Episode>, RecordedCalls),
    Samples(Vec<Sample>),
    Prompt(PromptCall),
}

/// Function and arguments of a prompt plugin call that faulted.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum PromptCall {
    Messages { task: String, query: String, context: Context, rewrite: Option<String> },
    ParseRewrite(String),
    ParseJudgement(String),
}

impl PromptCall {
    /// Repeats the recorded call on a prompt plugin.
    ///
    /// # Errors
    /// The plugin faulted.
    pub fn repeat(&self, prompts: &dyn Prompts) -> Result<(), PluginFault> {
        match self {
            Self::Messages { task, query, context, rewrite } => {
                let task = PromptTask::from_name(task).unwrap_or(PromptTask::TeacherRewrite);
                prompts.messages(task, &PromptInput { query, context, rewrite: rewrite.as_deref() }).map(drop)
            }
            Self::ParseRewrite(text) => prompts.parse_rewrite(text).map(drop),
            Self::ParseJudgement(text) => prompts.parse_judgement(text).map(drop),
        }
    }
}

impl FaultFile {
    /// Reads a fault file; `None` if the file is of another kind.
    ///
    /// # Errors
    /// A line of the fault file cannot be parsed.
    pub fn read(path: &Path) -> Result<Option<Self>, Stop> {
        #[derive(Deserialize)]
        struct First {
            fault: FaultHeader,
        }
        let refused = |line: usize, reason: &str| Stop::usage(format!("{}:{line}: {reason}", path.display()));
        if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() || metadata.len() > LARGEST_BYTES) {
            return Ok(None);
        }
        let Ok(text) = std::fs::read_to_string(path) else { return Ok(None) };
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        let first = lines.next().and_then(|(_, line)| serde_json::from_str::<First>(line).ok());
        let Some(First { fault: header }) = first else { return Ok(None) };
        let (mut given, mut samples, mut prompt, mut recorded) =
            (Vec::new(), Vec::new(), None, RecordedCalls::default());
        for (number, line) in lines {
            let not_json = |error: serde_json::Error| refused(number, &format!("not a line of a fault: {error}"));
            match header.role.as_str() {
                "filter" => samples.push(serde_json::from_str(line).map_err(not_json)?),
                "prompt" => prompt = Some(serde_json::from_str(line).map_err(not_json)?),
                _ => {
                    let episode =
                        episodes::parse(line.as_bytes(), number).map_err(|reason| refused(number, &reason))?;
                    given.extend(episode.map(|RecordedEpisode { episode, calls, .. }| {
                        recorded.add_episode(&episode, calls);
                        episode
                    }));
                }
            }
        }
        let call = match (header.role.as_str(), prompt) {
            ("filter", _) => FaultedCall::Samples(samples),
            ("prompt", Some(call)) => FaultedCall::Prompt(call),
            ("prompt", None) => return Err(refused(2, "the call is missing; the file was cut")),
            _ => FaultedCall::Episodes(given, recorded),
        };
        Ok(Some(Self { header, call }))
    }
}

/// Writer of the fault files of one plugin of a run.
#[derive(Clone)]
pub(crate) struct FaultLog {
    pub(crate) folder: PathBuf,
    pub(crate) role: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) settings: PluginSettings,
    pub(crate) host_functions: Arc<RunHostFunctions>,
}

impl FaultLog {
    /// Writes `items` and adds the file to the message.
    fn keep(&self, fault: PluginFault, items: impl FnOnce() -> Vec<Value>) -> PluginFault {
        let Some(file) = self.free_name(&fault.plugin) else { return fault };
        let header = FaultHeader {
            plugin: fault.plugin.clone(),
            version: fault.version.clone(),
            path: self.path.clone(),
            role: self.role.to_owned(),
            message: fault.message.clone(),
            settings: self.settings.clone(),
            log: fault.log.clone(),
        };
        let lines = std::iter::once(json!({ "fault": header })).chain(items());
        let written = std::fs::create_dir_all(&self.folder).and_then(|()| write_jsonl(&file, lines));
        let (message, file) = (&fault.message, file.display());
        let message = match written {
            Ok(()) => {
                format!("{message}; what it was given is in {file}, which `querl plugin replay {file}` gives it again")
            }
            Err(error) => format!("{message} (what it was given cannot be written to {file}: {})", io_problem(&error)),
        };
        PluginFault { message, ..fault }
    }

    fn free_name(&self, plugin: &str) -> Option<PathBuf> {
        let n_files = std::fs::read_dir(&self.folder).map_or(0, Iterator::count);
        let name = |number: usize| self.folder.join(format!("{number:02}-{plugin}.jsonl"));
        (n_files < MOST_FILES).then(|| (1..).map(name).find(|path| !path.exists())).flatten()
    }
}

/// A plugin wrapped so that its faults are written to fault files.
pub(crate) struct Logged<P> {
    pub(crate) plugin: P,
    pub(crate) log: FaultLog,
}

impl RewardModel for Logged<Arc<dyn RewardModel>> {
    fn score_batch(&self, given: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
        let line = |episode: &Episode| {
            let calls = self.log.host_functions.recorded(episode);
            json!({ "format": EpisodeRecord::FORMAT, "episode": episode, "calls": calls })
        };
        self.plugin.score_batch(given).map_err(|fault| self.log.keep(fault, || given.iter().map(line).collect()))
    }

    fn inputs(&self) -> EpisodeInputs {
        self.plugin.inputs()
    }

    fn range(&self) -> RewardRange {
        self.plugin.range()
    }

    fn name(&self) -> &str {
        self.plugin.name()
    }
}

impl Filter for Logged<Arc<dyn Filter>> {
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault> {
        let lines = || samples.iter().map(|sample| json!(sample)).collect();
        self.plugin.check_batch(samples).map_err(|fault| self.log.keep(fault, lines))
    }

    fn reads_columns(&self) -> InputUse {
        self.plugin.reads_columns()
    }

    fn name(&self) -> &str {
        self.plugin.name()
    }
}

impl Prompts for Logged<Arc<dyn Prompts>> {
    fn messages(&self, task: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
        self.plugin.messages(task, input).map_err(|fault| {
            let (query, context) = (input.query.to_owned(), input.context.clone());
            let rewrite = input.rewrite.map(str::to_owned);
            self.log
                .keep(fault, || vec![json!(PromptCall::Messages { task: task.name().into(), query, context, rewrite })])
        })
    }

    fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
        let call = || vec![json!(PromptCall::ParseRewrite(text.to_owned()))];
        self.plugin.parse_rewrite(text).map_err(|fault| self.log.keep(fault, call))
    }

    fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
        let call = || vec![json!(PromptCall::ParseJudgement(text.to_owned()))];
        self.plugin.parse_judgement(text).map_err(|fault| self.log.keep(fault, call))
    }

    fn title(&self) -> &str {
        self.plugin.title()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::ports::FaultKind;

    struct Broken;

    impl Prompts for Broken {
        fn messages(&self, _: PromptTask, _: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
            Err(fault())
        }

        fn parse_rewrite(&self, _: &str) -> Result<Result<String, Rejection>, PluginFault> {
            Err(fault())
        }

        fn parse_judgement(&self, _: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
            Err(fault())
        }
    }

    fn fault() -> PluginFault {
        let (plugin, version, message) = ("p".to_owned(), "0.1.0".to_owned(), "panicked".to_owned());
        PluginFault { plugin, version, message, kind: FaultKind::Trap, log: vec!["info: here".into()] }
    }

    fn logged(folder: &Path) -> Logged<Arc<dyn Prompts>> {
        let settings = toml::from_str("a = 1\nb = ['x']").unwrap();
        let (folder, host_functions) = (folder.join("faults"), Arc::default());
        let log = FaultLog { folder, role: "prompt", path: "p.wasm".into(), settings, host_functions };
        Logged { plugin: Arc::new(Broken), log }
    }

    #[test]
    fn calls_of_prompts_are_written_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let prompts = logged(folder.path());
        let context = Context { user_profile: "孕妇".into(), ..Context::default() };
        let input = PromptInput { query: "咋吃", context: &context, rewrite: Some("x") };
        let message = prompts.messages(PromptTask::Judge, &input).unwrap_err().message;
        assert!(message.contains("faults/01-p.jsonl, which `querl plugin replay "), "{message}");
        prompts.parse_judgement("得分").unwrap_err();
        let read = |name: &str| FaultFile::read(&folder.path().join("faults").join(name)).unwrap().unwrap();
        let FaultFile { header, call: FaultedCall::Prompt(call) } = read("01-p.jsonl") else { panic!() };
        assert_eq!((header.message.as_str(), header.settings), ("panicked", prompts.log.settings.clone()));
        assert_eq!(header.log, ["info: here"]);
        assert!(matches!(&call, PromptCall::Messages { task, rewrite: Some(_), .. } if task == "judge"), "{call:?}");
        call.repeat(&Broken).unwrap_err();
        assert!(
            matches!(read("02-p.jsonl").call, FaultedCall::Prompt(PromptCall::ParseJudgement(text)) if text == "得分")
        );
    }

    #[test]
    fn number_of_files_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let prompts = logged(folder.path());
        for _ in 0..MOST_FILES + 2 {
            prompts.parse_rewrite("x").unwrap_err();
        }
        assert_eq!(std::fs::read_dir(folder.path().join("faults")).unwrap().count(), MOST_FILES);
        assert_eq!(prompts.parse_rewrite("x").unwrap_err().message, "panicked");
    }
}
