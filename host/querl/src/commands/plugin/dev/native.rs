//! Native runs of a plugin for `querl plugin dev`, in processes of their own: scoring of recorded episodes, and the author's tests.

use anyhow::Context;
use clap::Args;
use querl_core::ports::RewardRange;
use querl_core::records::{Rejection, Reward};
use querl_eval::Outcome;
use querl_pipeline::failure::Stop;
use querl_plugin::{NativeFolder, PluginSettings, RewardRules, child_output, child_output_within};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Maximum wall time per episode; a native run that exceeds it is killed. The runners in Python and JavaScript have lower limits and report
/// the line; this one is for code that they cannot interrupt, and for Rust.
const REPLAY_LIMIT: Duration = Duration::from_secs(60);

/// Maximum wall time of the author's tests, without their build.
const TEST_LIMIT: Duration = Duration::from_secs(120);

/// An error in the author's code, with its source location.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fault {
    pub(super) message: String,
    /// Path of the source file, relative to the plugin's folder; `None` if the stack trace has no line of the plugin.
    pub(super) file: Option<String>,
    pub(super) line: Option<u64>,
}

impl Fault {
    /// True if the plugin refuses a setting: its message is that of `SettingError` in the SDKs.
    pub(super) fn is_of_setting(&self) -> bool {
        self.file.is_none() && self.message.starts_with("setting `")
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct NativeResult {
    pub(super) outcome: Result<Outcome, Fault>,
    pub(super) log: Vec<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct NativeReplay {
    pub(super) range: (f64, f64),
    /// Results by episode, in the order of the episodes.
    pub(super) results: Vec<NativeResult>,
    /// Seconds spent in the plugin, without starting the process and reading the episodes.
    pub(super) seconds: f64,
    /// Text that the process wrote to stdout and stderr.
    pub(super) output: String,
}

/// A line of the file with results, which the runners of the SDKs write.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Line {
    Range((f64, f64)),
    Refused(Fault),
    /// Id of the episode that is scored next, or of the first of its group.
    Begun(String),
    Scored(Reward),
    Rejected(Rejection),
    Fault(Fault),
    Seconds(f64),
}

/// Scores the episodes natively, with a file for the results in `scratch`. The inner `Err` is what the author has to repair: the plugin
/// does not compile, cannot be imported, refuses a setting or does not end.
pub(super) fn replay(
    folder: &NativeFolder,
    episodes: &Path,
    settings: &PluginSettings,
    scratch: &Path,
) -> anyhow::Result<Result<NativeReplay, Fault>> {
    let results = tempfile::NamedTempFile::new_in(scratch).context("a temporary file")?.into_temp_path();
    let settings = serde_json::to_value(settings)?;
    let mut command = match (folder.library_build(), folder.library()) {
        (Some(mut build), Some(library)) => {
            let output = run(&mut build)?;
            if !output.status.success() {
                return Ok(Err(compile_error(&output)));
            }
            let request = json!({ "episodes": episodes, "settings": settings, "results": &*results });
            let mut command = Command::new(std::env::current_exe().context("this program")?);
            command.arg(REPLAY_COMMAND).arg(library).arg(request.to_string());
            command
        }
        _ => match folder.replay(episodes, &settings.to_string(), &results) {
            Some(command) => command,
            None => anyhow::bail!("{}: no native run", folder.folder.display()),
        },
    };
    let written = results.to_path_buf();
    let progress = move || std::fs::metadata(&written).map_or(0, |file| file.len());
    let (done, is_killed) = run_within(&mut command, REPLAY_LIMIT, progress)?;
    let output = text_of(&done);
    let text = std::fs::read_to_string(&results).context("results of the native run")?;
    if !done.status.success() {
        // A runner that ends itself has written the reason.
        let refused = read(&text, String::new()).ok().flatten().and_then(Result::err);
        let message = || match is_killed {
            true => still_runs(&text, REPLAY_LIMIT),
            false => ended(&done, &output, &text),
        };
        return Ok(Err(refused.unwrap_or_else(|| Fault { message: message(), file: None, line: None })));
    }
    Ok(read(&text, output.clone())?
        .unwrap_or_else(|| Err(Fault { message: ended(&done, &output, &text), file: None, line: None })))
}

fn run(command: &mut Command) -> anyhow::Result<Output> {
    child_output(command).map_err(|error| not_started(command, error))
}

/// Like [`child_output_within`], with an error about a program that cannot be started.
fn run_within(
    command: &mut Command,
    limit: Duration,
    progress: impl Fn() -> u64 + Send + 'static,
) -> anyhow::Result<(Output, bool)> {
    child_output_within(command, limit, progress).map_err(|error| not_started(command, error))
}

fn not_started(command: &Command, error: std::io::Error) -> anyhow::Error {
    let program = command.get_program().to_string_lossy().into_owned();
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            Stop::usage(format!("{program} is not installed; `querl plugin doctor` says what is missing")).into()
        }
        _ => anyhow::Error::new(error).context(program),
    }
}

/// stdout and stderr of a process, as text.
fn text_of(output: &Output) -> String {
    let texts = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned());
    texts.join("\n").trim().to_owned()
}

/// Message about a native run without complete results. `text`: the results that were written.
fn ended(done: &Output, output: &str, text: &str) -> String {
    let last = output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no output");
    let old_sdk = ["No module named querl_sdk.dev", "dev.js'"].iter().any(|sign| output.contains(sign));
    match old_sdk {
        true => "the SDK in `vendor` is older than this querl: it has no `dev`; copy the SDK of a new `querl plugin new` folder".to_owned(),
        false => {
            let begun = begun(text).map(|id| format!(" at episode `{id}`"));
            format!("the native run ended with {}{}: {last}", done.status, begun.unwrap_or_default())
        }
    }
}

/// Id of the last episode whose scoring was started.
fn begun(text: &str) -> Option<String> {
    text.lines().rev().find_map(|line| match serde_json::from_str(line) {
        Ok(Line::Begun(id)) => Some(id),
        _ => None,
    })
}

/// Message about a native run that was killed at its time limit.
fn still_runs(text: &str, limit: Duration) -> String {
    let seconds = limit.as_secs();
    match begun(text) {
        Some(id) => {
            format!(
                "the native run was ended: episode `{id}` still ran after {seconds} s; look for an endless loop in its score"
            )
        }
        None => format!(
            "the native run was ended: it began no episode within {seconds} s; look for an endless loop at the top level of the plugin, in its \
             constructor or in its range"
        ),
    }
}

/// The first error of cargo, in its short form `src/lib.rs:12:5: error[E0308]: mismatched types`.
fn compile_error(output: &Output) -> Fault {
    let text = text_of(output);
    if text.contains("querl-sdk") && text.contains("feature") {
        let message = "the SDK in `vendor` is older than this querl: it has no feature `dev`; copy the SDK of a new `querl plugin new` folder";
        return Fault { message: message.to_owned(), file: None, line: None };
    }
    let place = |line: &str| {
        let (place, message) = line.split_once(": error")?;
        let mut parts = place.rsplitn(3, ':');
        let (_column, number, file) = (parts.next()?, parts.next()?, parts.next()?);
        let (file, line) = (Some(file.to_owned()), number.parse().ok());
        Some(Fault { message: format!("error{message}"), file, line })
    };
    let any = || {
        let line =
            text.lines().find(|line| line.starts_with("error")).or(text.lines().last()).unwrap_or("cargo failed");
        Fault { message: line.to_owned(), file: None, line: None }
    };
    text.lines().find_map(place).unwrap_or_else(any)
}

/// Parses the results of a native run; `None` if the last line is missing, because the process ended while it scored.
fn read(text: &str, output: String) -> anyhow::Result<Option<Result<NativeReplay, Fault>>> {
    let refused = |message| Ok(Some(Err(Fault { message, file: None, line: None })));
    let mut replay = NativeReplay { range: (0.0, 0.0), results: Vec::new(), seconds: 0.0, output };
    let (mut rules, mut is_whole) = (None, false);
    for line in text.lines() {
        let mut value: serde_json::Value = serde_json::from_str(line).context("a result of the native run")?;
        let log = value.as_object_mut().and_then(|line| line.remove("log"));
        let log = log.map(serde_json::from_value).transpose().context("a log of the native run")?.unwrap_or_default();
        let outcome = match serde_json::from_value::<Line>(value).context("a result of the native run")? {
            Line::Range((min, max)) => {
                replay.range = (min, max);
                match RewardRules::new(RewardRange { min, max }) {
                    Ok(of_range) => rules = Some(of_range),
                    Err(message) => return refused(message),
                }
                continue;
            }
            Line::Seconds(seconds) => {
                (replay.seconds, is_whole) = (seconds, true);
                continue;
            }
            Line::Begun(_) => continue,
            Line::Refused(fault) => return Ok(Some(Err(fault))),
            Line::Scored(reward) => Ok(Ok(reward)),
            Line::Rejected(rejection) => Ok(Err(rejection)),
            Line::Fault(fault) => Err(fault),
        };
        let rules = rules.as_ref().context("the native run wrote no range")?;
        let outcome = outcome.and_then(|outcome: Outcome| match rules.check(&outcome) {
            Ok(()) => Ok(outcome),
            Err(message) => Err(Fault { message, file: None, line: None }),
        });
        replay.results.push(NativeResult { outcome, log });
    }
    Ok(is_whole.then_some(Ok(replay)))
}

/// Result of the author's tests.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Tests {
    pub(super) passed: bool,
    pub(super) seconds: f64,
    /// Output of the tests, if one failed.
    pub(super) output: String,
}

/// Runs the author's tests; `None` if there are none.
pub(super) fn test(folder: &NativeFolder) -> anyhow::Result<Option<Tests>> {
    let started = Instant::now();
    if let Some(mut build) = folder.test_build() {
        let built = run(&mut build)?;
        if !built.status.success() {
            let seconds = started.elapsed().as_secs_f64();
            return Ok(Some(Tests { passed: false, seconds, output: text_of(&built) }));
        }
    }
    let Some(mut command) = folder.tests(TEST_LIMIT) else { return Ok(None) };
    let (passed, output) = tested(&mut command, TEST_LIMIT, &folder.folder)?;
    Ok(Some(Tests { passed, seconds: started.elapsed().as_secs_f64(), output }))
}

/// Runs the tests: true if they passed, and the output of failed tests. `folder`: the plugin's.
fn tested(command: &mut Command, limit: Duration, folder: &Path) -> anyhow::Result<(bool, String)> {
    let (done, is_killed) = run_within(command, limit, || 0)?;
    let passed = done.status.success();
    let output = if passed { String::new() } else { text_of(&done) };
    if is_killed && !passed {
        let seconds = limit.as_secs();
        let said = format!(
            "ended: the tests still ran after {seconds} s; look for an endless loop in tests/ or in what they call"
        );
        // Only the last lines are shown, so lines of Python's `unittest` in stack traces are removed.
        let is_own = |line: &&str| !line.contains("/unittest/") && !line.contains("File \"<string>\"");
        let lines: Vec<&str> = output.lines().filter(is_own).chain([said.as_str()]).collect();
        return Ok((false, lines.join("\n")));
    }
    Ok((passed, tap_failures(&output, folder).unwrap_or(output)))
}

/// The failures in a TAP report, with error, values and source location; `None` if the output is not TAP. Of a file of tests that cannot
/// be loaded, the block says only that it failed; the error is in the comments before it.
fn tap_failures(output: &str, folder: &Path) -> Option<String> {
    /// Keys of a failure without useful information. The lines of Node.js in stack traces are also left out.
    const LEFT_OUT: [&str; 8] =
        ["---", "duration_ms:", "type:", "failureType:", "code:", "name:", "operator:", "stack:"];
    let (mut kept, mut comments, mut is_in_failure): (Vec<String>, Vec<&str>, bool) = (Vec::new(), Vec::new(), false);
    let mut lines = output.lines();
    while let Some(line) = lines.next() {
        let text = line.trim();
        if let Some(comment) = line.strip_prefix("# ") {
            comments.push(comment);
            continue;
        }
        if text.starts_with("not ok ")
            && let Some(error) = load_error(&comments, lines.clone(), folder)
        {
            kept.extend([line.to_owned(), format!("  {error}")]);
            while lines.next().is_some_and(|line| line.trim() != "...") {}
            continue;
        }
        comments.clear();
        is_in_failure = (is_in_failure && text != "...") || text.starts_with("not ok ");
        let says_nothing =
            text.is_empty() || text.contains("node:") || LEFT_OUT.iter().any(|key| text.starts_with(key));
        if is_in_failure && !says_nothing {
            kept.push(line.to_owned());
        }
    }
    (!kept.is_empty()).then(|| kept.join("\n"))
}

/// The error that ended a file of tests, as `plugin.js:23  SyntaxError: Unexpected token`. `comments`: stderr of its process, before the
/// block; `block`: the lines from the block on, which has an exit code.
fn load_error<'a>(comments: &[&str], block: impl Iterator<Item = &'a str>, folder: &Path) -> Option<String> {
    let mut block = block.map(str::trim).take_while(|line| *line != "...");
    if !block.any(|line| line.starts_with("exitCode:")) {
        return None;
    }
    // `SyntaxError: ...` or `Error [ERR_MODULE_NOT_FOUND]: ...`
    let is_error = |line: &&&str| {
        let (name, _) = line.split_once(": ").unwrap_or_default();
        let name = name.split(" [").next().unwrap_or_default();
        name.ends_with("Error") && name.chars().all(char::is_alphanumeric)
    };
    // In comments, Node.js writes a backslash before `#` and before a backslash.
    let message = comments.iter().find(is_error)?.replace("\\#", "#").replace("\\\\", "\\");
    let place = comments.iter().find_map(|line| own_place(line, folder));
    Some(place.map_or_else(|| message.clone(), |place| format!("{place}  {message}")))
}

/// The place `plugin.js:23` in a line with `file:///folder/plugin.js:23`, if the file is of the plugin and not of its packages.
fn own_place(line: &str, folder: &Path) -> Option<String> {
    let (_, url) = line.split_once("file://")?;
    let path = percent_decoded(url.trim_end_matches(')'));
    let place = path.strip_prefix(&format!("{}/", folder.display()))?;
    let (file, rest) = place.split_once(':')?;
    let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let is_own = !file.split('/').any(|part| part == "vendor" || part == "node_modules");
    is_own.then(|| format!("{file}:{number}"))
}

/// The text with `%C3%B6` decoded to `ö`.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let hex = (*first == b'%').then(|| more.get(..2)).flatten();
        let decoded = hex.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(decoded.unwrap_or(*first));
        rest = if decoded.is_some() { &more[2..] } else { more };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Name of the hidden command that scores episodes with a plugin in Rust, built as a dynamic library.
pub const REPLAY_COMMAND: &str = "__replay-native-library";

/// Arguments that `querl plugin dev` passes to the hidden command [`REPLAY_COMMAND`].
#[derive(Debug, Args)]
pub struct LibraryArgs {
    /// The dynamic library of the plugin
    library: PathBuf,
    /// The argument of its function `querl_dev_replay`
    request: String,
}

/// Runs [`REPLAY_COMMAND`]: scores episodes with a dynamic library. In a process of its own, because a crash of the plugin ends it.
pub fn replay_library(args: &LibraryArgs) -> anyhow::Result<()> {
    let name = args.library.display();
    // SAFETY: the library is the author's own code, which `querl plugin dev` has built and runs.
    let library = unsafe { libloading::Library::new(&args.library) }.with_context(|| name.to_string())?;
    // SAFETY: `export!` of the SDK defines a function of this name with this type.
    let replay = unsafe { library.get::<unsafe extern "C" fn(*const u8, usize) -> bool>(b"querl_dev_replay") };
    let replay = replay.with_context(|| format!("{name}: it exports no reward"))?;
    // SAFETY: the pointer and the length are those of the request.
    let done = unsafe { replay(args.request.as_ptr(), args.request.len()) };
    anyhow::ensure!(done, "{name}: the episodes could not be scored");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_a_runner_are_read_and_what_the_contract_forbids_is_a_fault() {
        let text = r#"{"range": [0, 1]}
{"scored": {"total": 0.5, "components": []}, "log": ["info: a"]}
{"scored": {"total": 1.5, "components": []}}
{"begun": "c"}
{"rejected": {"code": "no_hits", "detail": ""}}
{"fault": {"message": "ZeroDivisionError: division by zero", "file": "plugin.py", "line": 14}}
{"scored": {"total": 0, "components": [{"name": "保留", "value": 1.0}]}}
{"seconds": 0.25}
"#;
        let replay = read(text, String::new()).unwrap().unwrap().unwrap();
        assert_eq!((replay.range, replay.seconds, replay.results.len()), ((0.0, 1.0), 0.25, 5));
        assert_eq!(replay.results[0].log, ["info: a"]);
        let fault = replay.results[1].outcome.as_ref().unwrap_err();
        assert_eq!(fault.message, "total is 1.5; expected a number within the declared range 0 to 1");
        // Regression: a name that is a fault in the component was accepted natively.
        let fault = replay.results[4].outcome.as_ref().unwrap_err();
        assert_eq!(fault.message, "component name is `保留`; expected 1 to 64 of a to z, 0 to 9 and _");
        assert_eq!(replay.results[2].outcome.as_ref().unwrap().as_ref().unwrap_err().code, "no_hits");
        assert_eq!(replay.results[3].outcome.as_ref().unwrap_err().line, Some(14));
        let setting = r#"{"refused": {"message": "setting `x`: expected a number"}}"#;
        let refused = |text: &str| read(text, String::new()).unwrap().unwrap().unwrap_err().message;
        assert_eq!(refused(setting), "setting `x`: expected a number");
        assert!(refused(r#"{"range": [1, 1]}"#).starts_with("declares the range 1 to 1; expected two finite numbers"));
        assert!(read("{\"range\": [0, 1]}\n{\"begun\": \"a\"}\n", String::new()).unwrap().is_none());
    }

    /// Regression: `querl plugin dev` waited without a message for tests and native runs that do not end.
    #[cfg(unix)]
    #[test]
    fn tests_that_do_not_end_are_killed_with_a_sentence_after_their_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo test_a; echo '  File \"/lib/unittest/case.py\", line 1 in run'; exec sleep 60"]);
        let (passed, output) = tested(&mut command, Duration::from_secs(1), Path::new("/p")).unwrap();
        let said = "ended: the tests still ran after 1 s; look for an endless loop in tests/ or in what they call";
        assert_eq!((passed, output), (false, format!("test_a\n{said}")));
        let begun = still_runs("{\"range\": [0, 1]}\n{\"begun\": \"a\"}\n{\"begun\": \"b\"}\n", REPLAY_LIMIT);
        assert!(begun.contains("episode `b` still ran after 60 s"), "{begun}");
        assert!(still_runs("", REPLAY_LIMIT).contains("top level of the plugin"));
    }

    /// Regression: of the tests of a plugin in JavaScript, only the counts in the last lines were shown.
    #[test]
    fn failures_of_node_are_kept_and_its_counts_are_not() {
        let output = "TAP version 13\n# Subtest: a\nok 1 - a\n  ---\n  duration_ms: 5.0\n  ...\n# Subtest: total\nnot ok 2 - total\n  ---\n  \
                      duration_ms: 1.2\n  location: '/x/a.test.js:4:1'\n  failureType: 'testCodeFailure'\n  error: |-\n    1 !== 2\n    \n  \
                      expected: 2\n  actual: 1\n  stack: |-\n    TestContext.<anonymous> (file:///x/a.test.js:4:30)\n    Test.run \
                      (node:internal/test_runner/test:796:25)\n  ...\n1..2\n# fail 1\n";
        let expected = "not ok 2 - total\n  location: '/x/a.test.js:4:1'\n  error: |-\n    1 !== 2\n  expected: 2\n  actual: 1\n    \
                        TestContext.<anonymous> (file:///x/a.test.js:4:30)";
        let folder = Path::new("/x");
        assert_eq!(tap_failures(output, folder).as_deref(), Some(expected));
        assert_eq!(tap_failures("FAILED (failures=1)", folder), None);
    }

    /// Regression: of a plugin in JavaScript that cannot be loaded, only `error: 'test failed'` was shown.
    #[test]
    fn an_error_that_ends_a_file_of_tests_is_named_with_its_line() {
        let report = |comments: &str| {
            let block = "  ---\n  duration_ms: 3461.2\n  location: '/x ö/tests/a.test.js:1:1'\n  failureType: 'testCodeFailure'\n  \
                         exitCode: 1\n  signal: ~\n  error: 'test failed'\n  code: 'ERR_TEST_FAILURE'\n  ...\n1..1\n# tests 1\n";
            let head = "TAP version 13\n# Subtest: b\nok 1 - b\n  ---\n  duration_ms: 1\n  ...\n";
            let output =
                format!("{head}{comments}# Subtest: /x ö/tests/a.test.js\nnot ok 2 - /x ö/tests/a.test.js\n{block}");
            tap_failures(&output, Path::new("/x ö")).unwrap()
        };
        let syntax = "# file:///x%20%C3%B6/plugin.js:23\n# export default )\n#                ^\n# SyntaxError: Unexpected token ')'\n#     at \
                      compileSourceTextModule (node:internal/modules/esm/utils:346:16)\n# Node.js v20.20.2\n";
        let renamed = "# file:///x%20%C3%B6/vendor/querl-sdk/plugin.js:26\n#       throw new TypeError(`no method`);\n#             ^\n# TypeError: \
                       `Length` has no method `check`\n#     at plugin (file:///x%20%C3%B6/vendor/querl-sdk/plugin.js:26:13)\n#     at \
                       file:///x%20%C3%B6/plugin.js:24:16\n";
        let missing = "# node:internal/modules/esm/resolve:283\n#     throw new ERR_MODULE_NOT_FOUND(\n# Error [ERR_MODULE_NOT_FOUND]: Cannot find \
                       package '\\#no' imported from /x ö/plugin.js\n#     at finalizeResolution (node:internal/modules/esm/resolve:283:11)\n";
        for (comments, expected) in [
            (syntax, "plugin.js:23  SyntaxError: Unexpected token ')'"),
            (renamed, "plugin.js:24  TypeError: `Length` has no method `check`"),
            (missing, "Error [ERR_MODULE_NOT_FOUND]: Cannot find package '#no' imported from /x ö/plugin.js"),
        ] {
            assert_eq!(report(comments), format!("not ok 2 - /x ö/tests/a.test.js\n  {expected}"));
        }
        // What a test prints is no error of the file.
        assert!(report("# Subtest: c\n# printed\n").contains("error: 'test failed'"));
    }
}
