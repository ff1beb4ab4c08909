//! Errors of the program: one sentence on stderr and an exit code.

use querl_bundle::BundleError;
use querl_bundle::oci::RegistryError;
use querl_core::config::ConfigError;
use querl_core::dir_lock::DirLockError;
use querl_core::fsx::{ReadError, io_problem, is_exhausted, is_input_error};
use querl_core::ports::{EnvironmentError, FaultKind, PluginFault};
use querl_core::records::{CallFailure, FailureKind};
use querl_core::run_dir::RunDir;
use querl_data::DataError;
use querl_model::ModelError;
use querl_plugin::PluginError;
use querl_style::UsageError;
use querl_train::TrainError;
use querl_train::job::{self, Failure, JobError};
use std::path::Path;

/// Exit codes of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Any other failure.
    Failed = 1,
    /// Wrong usage, configuration or input, which the user can correct; nothing is lost.
    Usage = 2,
    /// A limit that the user set was reached.
    Limit = 3,
    /// Interrupted; finished work is saved.
    Interrupted = 130,
}

/// An error message with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Stop {
    ending: Ending,
    message: String,
}

impl Stop {
    /// An error of usage or input, which the user can correct (exit code 2).
    pub fn usage(message: impl std::fmt::Display) -> Self {
        Self { ending: Ending::Usage, message: message.to_string() }
    }

    /// The error for a path that should be a run's folder but is not one, or is one in which no stage has begun.
    pub fn not_a_run(path: &Path) -> Self {
        let remedy = "run `querl run CONFIG` first";
        let why = match path {
            path if !path.exists() => "there is no such folder",
            path if !path.is_dir() => "it is a file",
            path if !RunDir::new(path).config().is_file() => "it has no config.resolved.toml",
            _ => return Self::usage(format!("{}: no stage has begun yet; {remedy}", path.display())),
        };
        let expected = "expected the folder that `querl run` writes, the output_dir of a configuration";
        Self::usage(format!("{}: not a run's folder: {why}; {expected}; {remedy}", path.display()))
    }

    /// The error for a model that cannot be opened: an input error (exit code 2), or a failure (1) if a resource such as memory is
    /// exhausted.
    pub fn of_model(error: ModelError) -> Self {
        let ending = match &error {
            ModelError::Io { source, .. } if is_exhausted(source) => Ending::Failed,
            _ => Ending::Usage,
        };
        Self { ending, message: error.to_string() }
    }

    /// The error of a failed job. Out-of-memory is a failure (exit code 1) whose message names the setting to change.
    pub fn of(failure: Failure) -> Self {
        Self { ending: of_job(failure.kind), message: failure.message }
    }

    /// The error for a limit that was reached, whether set by the user or left at its default (exit code 3).
    pub fn limit(message: impl Into<String>) -> Self {
        Self { ending: Ending::Limit, message: message.into() }
    }

    /// The error for an interrupt by a signal (exit code 130).
    pub fn interrupted(message: impl Into<String>) -> Self {
        Self { ending: Ending::Interrupted, message: message.into() }
    }
}

/// The run directory in `folder`, recognised by its stored configuration, which the first stage writes.
///
/// # Errors
/// [`Stop::not_a_run`] if `folder` is not a run directory.
pub fn run_in(folder: &Path) -> Result<RunDir, Stop> {
    let dir = RunDir::new(folder);
    if dir.config().is_file() { Ok(dir) } else { Err(Stop::not_a_run(folder)) }
}

/// Checks that a path that names a run's folder or a configuration exists. A missing `.toml` passes: reading it gives a more specific
/// error, with the nearest file name.
///
/// # Errors
/// There is no file or folder at the path.
pub fn check_run_or_config(path: &Path) -> Result<(), Stop> {
    if path.exists() || path.extension().is_some_and(|extension| extension == "toml") {
        return Ok(());
    }
    let expected = "expected a run's folder, which `querl run` writes, or its configuration";
    Err(Stop::usage(format!("{}: no such file or folder; {expected}", path.display())))
}

/// Converts a job's error to one with an exit code.
pub fn ending(error: JobError) -> anyhow::Error {
    match error {
        JobError::Environment(error) => error.into(),
        JobError::Failed(failure) => Stop::of(failure).into(),
        JobError::Callback(error) => error.into(),
    }
}

/// The exit code of `error` or of one of its causes.
pub fn ending_of(error: &anyhow::Error) -> Ending {
    error.chain().find_map(known_ending).unwrap_or(Ending::Failed)
}

fn known_ending(cause: &(dyn std::error::Error + 'static)) -> Option<Ending> {
    if let Some(stop) = cause.downcast_ref::<Stop>() {
        return Some(stop.ending);
    }
    if plugin_fault(cause).is_some_and(|fault| fault.kind == FaultKind::TooManyDropped) {
        return Some(Ending::Limit);
    }
    if outside_failure(cause).is_some_and(|failure| failure.kind == FailureKind::OverBudget) {
        return Some(Ending::Limit);
    }
    match cause.downcast_ref::<DataError>() {
        Some(DataError::Write { .. } | DataError::Plugin(_)) => return Some(Ending::Failed),
        Some(DataError::Lines(ReadError::Io { source, .. })) if is_exhausted(source) => return Some(Ending::Failed),
        Some(DataError::Interrupted) => return Some(Ending::Interrupted),
        Some(_) => return Some(Ending::Usage),
        None => {}
    }
    if let Some(error) = cause.downcast_ref::<ModelError>() {
        return of_model(error);
    }
    if let Some(error) = cause.downcast_ref::<TrainError>() {
        return of_trainer(error);
    }
    if cause.is::<UsageError>() || cause.is::<PluginError>() || cause.is::<BundleError>() || cause.is::<RegistryError>()
    {
        return Some(Ending::Usage);
    }
    // The user has to correct a service that is down or rejects the API key.
    if let Some(EnvironmentError::Service(_)) = cause.downcast_ref() {
        return Some(Ending::Usage);
    }
    // A folder that cannot be created or written because of its name or permissions is a user error. A folder in use by another process is
    // not.
    if let Some(DirLockError::Io { .. }) = cause.downcast_ref() {
        return Some(Ending::Usage);
    }
    if let Some(error) = cause.downcast_ref::<std::io::Error>() {
        return is_input_error(error).then_some(Ending::Usage);
    }
    cause.downcast_ref::<ConfigError>().map(|_| Ending::Usage)
}

/// The cause of a transparent error is the cause of its inner error, so the plugin fault itself is not in the chain.
fn plugin_fault<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a PluginFault> {
    if let Some(EnvironmentError::Plugin(fault)) = cause.downcast_ref() {
        return Some(fault);
    }
    if let Some(DataError::Plugin(fault)) = cause.downcast_ref() {
        return Some(fault);
    }
    cause.downcast_ref()
}

fn outside_failure<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a CallFailure> {
    match (cause.downcast_ref(), cause.downcast_ref()) {
        (Some(DataError::Service(failure)), _) | (_, Some(EnvironmentError::Service(failure))) => Some(failure),
        _ => None,
    }
}

/// Invalid model files are user errors; a failed computation is not.
fn of_model(error: &ModelError) -> Option<Ending> {
    (job::FailureKind::of_model(error) == job::FailureKind::Usage).then_some(Ending::Usage)
}

fn of_job(kind: job::FailureKind) -> Ending {
    use job::FailureKind as Kind;
    match kind {
        Kind::Failed | Kind::OutOfMemory => Ending::Failed,
        Kind::Usage => Ending::Usage,
        Kind::Limit | Kind::MissingBaselines => Ending::Limit,
        Kind::Interrupted => Ending::Interrupted,
    }
}

fn of_trainer(error: &TrainError) -> Option<Ending> {
    Some(of_job(job::FailureKind::of(error))).filter(|ending| *ending != Ending::Failed)
}

/// Whether the error is a write to stdout after the reader has closed the pipe.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = |cause: &(dyn std::error::Error + 'static)| Some(cause.downcast_ref::<std::io::Error>()?.kind());
    error.chain().any(|cause| kind(cause) == Some(std::io::ErrorKind::BrokenPipe))
}

/// Context of an error: the configuration key of a plugin.
#[derive(Debug)]
pub(crate) struct PluginKey(pub(crate) String);

impl std::fmt::Display for PluginKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The configuration key (or the end of it) that an error after reading the configuration is about, such as an environment variable without
/// an API key or a plugin's setting; `None` for other errors.
pub fn key_of(error: &anyhow::Error) -> Option<String> {
    let of_plugin = error.downcast_ref::<PluginKey>().map(|PluginKey(key)| key.clone());
    of_plugin.or_else(|| key_in_causes(error))
}

fn key_in_causes(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| match (cause.downcast_ref(), cause.downcast_ref()) {
        (Some(DataError::Setting { key, .. }), _) if key.ends_with(".api_key_env") => Some(key.clone()),
        // A missing setting has no location; another plugin may have a setting of the same name.
        (_, Some(PluginError::Setting { key, message, .. })) if !message.ends_with("got none") => {
            Some(format!("settings.{key}"))
        }
        _ => None,
    })
}

/// The error with its causes as one line, for a caller that shows its [`details`] above.
pub fn sentence(error: &anyhow::Error) -> String {
    one_line(error, "above")
}

/// Like [`sentence`], for a caller that shows the [`details`] below.
pub fn sentence_above_details(error: &anyhow::Error) -> String {
    one_line(error, "below")
}

fn one_line(error: &anyhow::Error, place: &str) -> String {
    let mut sentence = String::new();
    let shown = shown_apart(error).map(|(details, note)| (details, format!("{note} is {place}")));
    for cause in error.chain() {
        let cause = cause.downcast_ref::<std::io::Error>().map_or_else(|| cause.to_string(), io_problem);
        let cause = shown.as_ref().map_or_else(|| cause.clone(), |(details, note)| cause.replace(details, note));
        // Some libraries include the cause in their message.
        if !sentence.ends_with(&cause) {
            sentence = if sentence.is_empty() { cause } else { format!("{sentence}: {cause}") };
        }
    }
    sentence.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Output of a compiler, or the traceback of a plugin, which is too long for the sentence.
pub fn details(error: &anyhow::Error) -> Option<&str> {
    shown_apart(error).map(|(details, _)| details.trim_matches('\n'))
}

/// The text that is shown above or below the message, and the start of what replaces it in the message.
fn shown_apart(error: &anyhow::Error) -> Option<(&str, &'static str)> {
    let of_plugin = error.chain().find_map(|cause| cause.downcast_ref::<PluginError>());
    if let Some(PluginError::Build { output, .. }) = of_plugin {
        return Some((output, "its output"));
    }
    let fault = match of_plugin {
        Some(PluginError::Fault(fault)) => Some(fault),
        _ => error.chain().find_map(plugin_fault),
    };
    let message = &fault?.message;
    let lines = message.find('\n')?..=message.rfind('\n')?;
    Some((&message[lines], "; its traceback"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_folder_that_is_no_run_is_named_with_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let (file, missing) = (folder.path().join("file"), folder.path().join("none"));
        std::fs::write(&file, "").unwrap();
        let found = |path: &Path| run_in(path).unwrap_err().to_string();
        for (path, why) in [
            (missing.as_path(), "there is no such folder"),
            (file.as_path(), "it is a file"),
            (folder.path(), "it has no config.resolved.toml"),
        ] {
            let expected = format!(
                "{}: not a run's folder: {why}; expected the folder that `querl run` writes, the output_dir of a configuration; run `querl run CONFIG` first",
                path.display()
            );
            assert_eq!(found(path), expected);
        }
        std::fs::write(folder.path().join("config.resolved.toml"), "").unwrap();
        assert_eq!(run_in(folder.path()).unwrap().root(), folder.path());
        let begun = format!("{}: no stage has begun yet; run `querl run CONFIG` first", folder.path().display());
        assert_eq!(Stop::not_a_run(folder.path()).to_string(), begun);
    }

    #[test]
    fn a_path_that_is_neither_a_run_nor_a_configuration_is_named_with_both() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_run_or_config(folder.path()).is_ok());
        assert!(check_run_or_config(&folder.path().join("none.toml")).is_ok());
        let path = folder.path().join("none");
        let expected =
            "no such file or folder; expected a run's folder, which `querl run` writes, or its configuration";
        assert_eq!(check_run_or_config(&path).unwrap_err().to_string(), format!("{}: {expected}", path.display()));
    }

    #[test]
    fn keys_of_services_and_plugins_are_known() {
        let of = |error: anyhow::Error| key_of(&error.context("stage"));
        let setting = |key: &str| DataError::Setting { key: key.into(), problem: "is not set".into() }.into();
        assert_eq!(of(setting("judge.api_key_env")).as_deref(), Some("judge.api_key_env"));
        assert_eq!(of(setting("data.input")), None);
        let plugin = PluginError::Setting { plugin: "p 1.0.0".into(), key: "clip".into(), message: "unknown".into() };
        assert_eq!(of(plugin.into()).as_deref(), Some("settings.clip"));
    }

    #[test]
    fn context_keeps_the_ending() {
        let limit = Failure { kind: job::FailureKind::Limit, message: "budget reached".into() };
        let error = anyhow::Error::from(Stop::of(limit)).context("stage rl");
        assert_eq!((ending_of(&error), sentence(&error).as_str()), (Ending::Limit, "stage rl: budget reached"));
        assert_eq!(ending_of(&anyhow::anyhow!("disk full")), Ending::Failed);
    }

    #[test]
    fn a_path_that_cannot_be_used_is_for_the_user_to_correct() {
        let of = |kind: std::io::ErrorKind| ending_of(&anyhow::Error::from(std::io::Error::from(kind)).context("out"));
        assert_eq!(of(std::io::ErrorKind::NotADirectory), Ending::Usage);
        assert_eq!(of(std::io::ErrorKind::ReadOnlyFilesystem), Ending::Usage);
        assert_eq!(of(std::io::ErrorKind::StorageFull), Ending::Failed);
    }

    #[test]
    fn a_damaged_model_is_for_the_user_to_mend() {
        let damaged = || ModelError::BadFile { path: "model".into(), message: "cut short".into() };
        assert_eq!(ending_of(&anyhow::Error::from(damaged()).context("sft")), Ending::Usage);
        assert_eq!(ending_of(&TrainError::from(damaged()).into()), Ending::Usage);
        assert_eq!(ending_of(&ModelError::Template("no".into()).into()), Ending::Usage);
        assert_eq!(ending_of(&Stop::of_model(damaged()).into()), Ending::Usage);
        let source = std::io::ErrorKind::OutOfMemory.into();
        let unread = Stop::of_model(ModelError::Io { path: "model".into(), source });
        assert_eq!(ending_of(&anyhow::Error::from(unread).context("sft")), Ending::Failed);
        assert_eq!(ending_of(&ModelError::Generation("no".into()).into()), Ending::Failed);
    }

    #[test]
    fn too_many_items_dropped_at_a_limit_is_a_limit_wherever_it_shows() {
        let fault = |kind| {
            let (plugin, version, message) = ("p".into(), "0.1.0".into(), "m".into());
            PluginFault { plugin, version, message, kind, log: Vec::new() }
        };
        let ending = |kind| {
            let (scored, filtered) = (EnvironmentError::from(fault(kind)), DataError::from(fault(kind)));
            [ending_of(&anyhow::Error::from(scored).context("rl")), ending_of(&filtered.into())]
        };
        assert_eq!(ending(FaultKind::TooManyDropped), [Ending::Limit; 2]);
        assert_eq!(ending(FaultKind::Limit), [Ending::Failed; 2]);
    }

    #[test]
    fn a_spent_budget_is_a_limit_and_a_service_that_is_down_is_not() {
        let ending = |kind| {
            let failure = || CallFailure { kind, message: "m".into() };
            let (of_stage, of_rl) = (DataError::Service(failure()), EnvironmentError::Service(failure()));
            [ending_of(&anyhow::Error::from(of_stage)), ending_of(&anyhow::Error::from(of_rl).context("rl"))]
        };
        assert_eq!(ending(FailureKind::OverBudget), [Ending::Limit; 2]);
        assert_eq!(ending(FailureKind::Down), [Ending::Usage; 2]);
    }

    #[test]
    fn a_traceback_keeps_its_lines_above_the_sentence() {
        let message = "episode `a`: raised: E: x\nTraceback:\n  File\nE: x\n (a batch)".to_owned();
        let fault =
            PluginFault { plugin: "p".into(), version: "1".into(), message, kind: FaultKind::Trap, log: Vec::new() };
        for error in [anyhow::Error::from(EnvironmentError::from(fault.clone())), PluginError::Fault(fault).into()] {
            let error = error.context("stage rl");
            assert_eq!(details(&error), Some("Traceback:\n  File\nE: x"));
            let expected = "stage rl: plugin p 1: episode `a`: raised: E: x; its traceback is above (a batch)";
            assert_eq!(sentence(&error), expected);
            assert_eq!(sentence_above_details(&error), expected.replace("above", "below"));
        }
    }

    #[test]
    fn rows_left_by_an_interrupt_are_no_fault_of_the_table() {
        assert_eq!(ending_of(&anyhow::Error::from(DataError::Interrupted).context("rewrite")), Ending::Interrupted);
    }

    #[test]
    fn a_sentence_is_one_line_without_repeats() {
        let inner = std::io::Error::other("disk\n  full");
        let error = Err::<(), _>(inner).context("a.txt: disk\n  full").unwrap_err();
        assert_eq!(sentence(&error), "a.txt: disk full");
    }

    /// Regression: a full disk had a remedy in RL alone, and the error of a job, which is text, had none.
    #[test]
    fn a_full_disk_has_its_remedy_once_in_every_command() {
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let end = io_problem(&full());
        let path = || "a/b".to_owned();
        let errors: [anyhow::Error; 5] = [
            DataError::Write { path: path(), source: full() }.into(),
            BundleError::Io { path: path().into(), source: full() }.into(),
            anyhow::Error::from(full()).context("a/b: cannot be written"),
            ending(JobError::from(TrainError::Io { path: path().into(), source: full() })),
            ending(JobError::from(TrainError::Checkpoint { path: path().into(), source: full() })),
        ];
        for error in errors {
            let sentence = sentence(&error.context("rewrite"));
            assert!(sentence.ends_with(&format!(": {end}")), "{sentence}");
            assert_eq!(sentence.matches("make room").count(), 1, "{sentence}");
        }
    }
}
