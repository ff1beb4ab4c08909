//! The output of `querl plugin dev` after one save.

use super::component::Comparison;
use super::native::{Fault, NativeReplay, Tests};
use querl_core::text::{grouped, printable};
use querl_eval::{Outcome, OutcomeChange, OutcomeChanges, ScoreSummary};
use serde::Serialize;
use std::collections::BTreeMap;

/// Maximum length of a line, in terminal columns.
const MAX_WIDTH: usize = 100;

/// Maximum length of a message, in bytes.
const MAX_MESSAGE_BYTES: usize = 4000;

/// Maximum number of listed changed episodes, faults, log lines and lines of output.
const N_SHOWN: usize = 5;

/// Level of the log lines that the runner of an SDK writes about what a component cannot do: a few, each once.
const REMARK: &str = "component: ";

/// State of the plugin after a save; its JSON form is the output of `--json`.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Picture {
    /// Id and version of the plugin.
    pub(super) plugin: String,
    pub(super) language: &'static str,
    /// Files that were saved; empty for the first output.
    pub(super) saved: Vec<String>,
    /// Seconds from the save to the scores; in the first output, from the start of the native run.
    pub(super) seconds: f64,
    /// Scores of the recorded episodes; `None` for a plugin without a reward, or without episodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) scores: Option<Scores>,
    /// The error that keeps the plugin from being run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) refused: Option<Fault>,
    /// Result of the author's tests; `None` until they have ended, and for a folder without tests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tests: Option<Tests>,
    /// Comparison of the component with the native run; `None` until the component is built.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) component: Option<Comparison>,
}

/// Native scores of the episodes.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Scores {
    summary: ScoreSummary,
    /// Mean microseconds per episode spent in the plugin, without starting the process and reading the episodes.
    pub(super) micros_per_episode: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    since_last_save: Option<OutcomeChanges>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since_recording: Option<OutcomeChanges>,
    /// Notes on the comparison with recorded outcomes.
    notes: Vec<String>,
    n_faults: usize,
    /// The most frequent faults.
    faults: Vec<FaultGroup>,
    n_log_lines: usize,
    /// The lines of the runner about what a component cannot do, and the first lines of the plugin.
    log: Vec<LogLine>,
    /// The last lines that the plugin wrote to stdout and stderr.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    output: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
struct FaultGroup {
    #[serde(flatten)]
    fault: Fault,
    n: usize,
    first_id: String,
}

#[derive(Debug, Clone, Serialize)]
struct LogLine {
    id: String,
    line: String,
}

/// A recorded episode, and its recorded outcome, if there is one.
pub(super) struct Recorded<'a> {
    pub(super) id: &'a str,
    pub(super) query: &'a str,
    pub(super) outcome: Option<&'a Outcome>,
}

impl Scores {
    /// Summarises a native run. `previous`: the run of the previous save, for the changes since then.
    pub(super) fn of(
        recorded: &[Recorded<'_>],
        replay: &NativeReplay,
        previous: Option<&NativeReplay>,
        notes: &[String],
    ) -> Self {
        let outcomes = || replay.results.iter().map(|result| result.outcome.as_ref().ok());
        let since_last_save = previous.map(|previous| {
            let befores = previous.results.iter().map(|result| result.outcome.as_ref().ok());
            changes(recorded, befores, outcomes())
        });
        let has_recording = recorded.iter().any(|episode| episode.outcome.is_some());
        let since_recording =
            has_recording.then(|| changes(recorded, recorded.iter().map(|episode| episode.outcome), outcomes()));
        let lines = || {
            replay
                .results
                .iter()
                .zip(recorded)
                .flat_map(|(result, episode)| result.log.iter().map(move |line| (episode, line)))
        };
        let line =
            |(episode, line): (&Recorded<'_>, &String)| LogLine { id: episode.id.to_owned(), line: line.clone() };
        let (remarks, logged): (Vec<_>, Vec<_>) = lines().partition(|(_, line)| line.starts_with(REMARK));
        let output: Vec<String> = replay.output.lines().map(str::to_owned).collect();
        let faults = faults(recorded, replay);
        Self {
            summary: ScoreSummary::of(outcomes(), replay.range),
            micros_per_episode: replay.seconds * 1e6 / replay.results.len().max(1) as f64,
            since_last_save,
            since_recording,
            notes: notes.to_vec(),
            n_faults: faults.iter().map(|group| group.n).sum(),
            faults: faults.into_iter().take(N_SHOWN).collect(),
            n_log_lines: remarks.len() + logged.len(),
            log: remarks.into_iter().chain(logged.into_iter().take(N_SHOWN)).map(line).collect(),
            output: output[output.len().saturating_sub(N_SHOWN)..].to_vec(),
        }
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = self.summary.lines();
        lines.push(format!("cost       {:.1} us an episode, native", self.micros_per_episode));
        for (changes, title) in
            [(&self.since_last_save, "since the last save"), (&self.since_recording, "since the recording")]
        {
            if let Some(changes) = changes {
                lines.push(String::new());
                // Long queries are cut: their beginning identifies them.
                lines.extend(changes.lines(title).iter().map(|line| querl_eval::cut(line, MAX_WIDTH)));
            }
        }
        lines.extend(self.notes.iter().map(|note| format!("  {note}")));
        if self.n_faults > 0 {
            lines.extend([String::new(), format!("faults: {} episode(s)", grouped(self.n_faults as u64))]);
            lines.extend(
                self.faults
                    .iter()
                    .map(|group| format!("  {} x {}, first {}", group.n, place(&group.fault), group.first_id)),
            );
        }
        if self.n_log_lines > 0 {
            lines.extend([String::new(), format!("log: {} line(s)", grouped(self.n_log_lines as u64))]);
            lines.extend(self.log.iter().map(|line| format!("  {}  {}", line.id, line.line)));
        }
        if !self.output.is_empty() {
            lines.extend([String::new(), "output, the last lines".to_owned()]);
            lines.extend(self.output.iter().map(|line| format!("  {line}")));
        }
        lines
    }
}

/// Changes of outcomes, for episodes that have an outcome in both runs.
fn changes<'a>(
    recorded: &[Recorded<'_>],
    befores: impl Iterator<Item = Option<&'a Outcome>>,
    afters: impl Iterator<Item = Option<&'a Outcome>>,
) -> OutcomeChanges {
    let pairs = recorded.iter().zip(befores.zip(afters));
    let compared = pairs
        .filter_map(|(episode, (before, after))| Some(OutcomeChange::of(episode.id, episode.query, before?, after?)));
    OutcomeChanges::of(compared, N_SHOWN)
}

/// Groups equal faults, the most frequent first.
fn faults(recorded: &[Recorded<'_>], replay: &NativeReplay) -> Vec<FaultGroup> {
    let mut groups: BTreeMap<&Fault, (usize, &str)> = BTreeMap::new();
    for (result, episode) in replay.results.iter().zip(recorded) {
        if let Err(fault) = &result.outcome {
            groups.entry(fault).or_insert((0, episode.id)).0 += 1;
        }
    }
    let group =
        |(fault, (n, id)): (&Fault, (usize, &str))| FaultGroup { fault: fault.clone(), n, first_id: id.to_owned() };
    let mut groups: Vec<FaultGroup> = groups.into_iter().map(group).collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.n));
    groups
}

/// A fault as a line: `plugin.py:14  ZeroDivisionError: division by zero`.
fn place(fault: &Fault) -> String {
    match (&fault.file, fault.line) {
        (Some(file), Some(line)) => format!("{file}:{line}  {}", fault.message),
        _ => fault.message.clone(),
    }
}

impl Picture {
    /// What the author has to repair; empty if nothing.
    pub(super) fn failures(&self) -> Vec<String> {
        let n_faults = self.scores.as_ref().map_or(0, |scores| scores.n_faults);
        let has_failed_tests = self.tests.as_ref().is_some_and(|tests| !tests.passed);
        let found = [
            self.refused.is_some().then(|| "the native run was refused".to_owned()),
            (n_faults > 0).then(|| format!("{n_faults} episode(s) with a fault")),
            has_failed_tests.then(|| "the plugin's tests failed".to_owned()),
            self.component.as_ref().and_then(Comparison::failure).map(str::to_owned),
        ];
        found.into_iter().flatten().collect()
    }

    /// The part of the output with the scores, as lines for a terminal.
    pub(super) fn lines(&self) -> Vec<String> {
        let saved = if self.saved.is_empty() { String::new() } else { format!("   saved {}", self.saved.join(", ")) };
        let mut lines =
            vec![format!("{}   {}   {:.2} s{saved}", self.plugin, self.language, self.seconds), String::new()];
        match (&self.refused, &self.scores) {
            (Some(fault), _) => lines.push(format!("cannot be run: {}", place(fault))),
            (None, Some(scores)) => lines.extend(scores.lines()),
            (None, None) => {}
        }
        folded(lines)
    }

    pub(super) fn test_lines(&self) -> Vec<String> {
        let Some(Tests { passed, seconds, output }) = &self.tests else { return Vec::new() };
        let said = if *passed { "passed" } else { "failed" };
        let output: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
        // All lines of a TAP report, because it was reduced to its failures; otherwise the last lines, where failures are usually printed.
        let is_tap = output.first().is_some_and(|line| line.trim_start().starts_with("not ok "));
        let n_left_out = if is_tap { 0 } else { output.len().saturating_sub(3 * N_SHOWN) };
        let shown = output.iter().skip(n_left_out).take(3 * N_SHOWN);
        let lines = std::iter::once(format!("tests      {said} in {seconds:.2} s"));
        folded(lines.chain(shown.map(|line| format!("  {line}"))).collect())
    }

    pub(super) fn component_lines(&self) -> Vec<String> {
        let Some(component) = &self.component else { return Vec::new() };
        folded(format!("component  {}", component.text()).lines().take(3 * N_SHOWN).map(str::to_owned).collect())
    }
}

fn folded(lines: Vec<String>) -> Vec<String> {
    lines.iter().flat_map(|line| querl_eval::folded(&printable(line, MAX_MESSAGE_BYTES), MAX_WIDTH)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::native::NativeResult;
    use super::*;
    use querl_core::records::Reward;

    fn scored(total: f64) -> NativeResult {
        NativeResult { outcome: Ok(Ok(Reward { total, components: Vec::new() })), log: Vec::new() }
    }

    fn faulted() -> NativeResult {
        let fault = Fault { message: "ZeroDivisionError".into(), file: Some("plugin.py".into()), line: Some(14) };
        NativeResult { outcome: Err(fault), log: vec!["info: here".into()] }
    }

    fn replay(results: Vec<NativeResult>) -> NativeReplay {
        NativeReplay { range: (0.0, 1.0), results, seconds: 2e-6, output: String::new() }
    }

    /// Regression: a long message was cut before its remedy.
    #[test]
    fn a_long_message_is_folded_and_whole() {
        let message = "TypeError: `DeadlineKept.requires` is ('column',); expected a tuple of 'response', 'prompt', 'columns', 'baseline', 'retrieval'";
        let lines = folded(vec![format!("cannot be run: {message}")]);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines.iter().all(|line| line.len() <= MAX_WIDTH) && lines[1].starts_with("  '"), "{lines:?}");
        assert!(lines[1].ends_with("'retrieval'"), "{lines:?}");
        assert_eq!(folded(vec!["字".repeat(60)]), ["字".repeat(50), format!("  {}", "字".repeat(10))]);
    }

    /// Regression: log lines of the plugin hid the one about the network.
    #[test]
    fn remarks_about_the_component_come_before_other_log_lines() {
        let with_log = |log: Vec<&str>| NativeResult { log: log.into_iter().map(Into::into).collect(), ..scored(0.5) };
        let episode = |id| Recorded { id, query: "", outcome: None };
        let remark = "component: calls the network: a component has none";
        let results = vec![with_log(vec!["info: a"; 9]), with_log(vec![remark])];
        let scores = Scores::of(&[episode("a"), episode("b")], &replay(results), None, &[]);
        assert_eq!((scores.n_log_lines, scores.log.len()), (10, 1 + N_SHOWN));
        assert_eq!((scores.log[0].id.as_str(), scores.log[0].line.as_str()), ("b", remark));
    }

    #[test]
    fn picture_has_changes_faults_with_their_place_and_the_log() {
        let recorded = Ok(Reward { total: 0.5, components: Vec::new() });
        let episode = |id| Recorded { id, query: "一天几粒啊", outcome: Some(&recorded) };
        let episodes = [episode("a"), episode("b"), episode("c")];
        let before = replay(vec![scored(0.5), scored(0.25), scored(0.5)]);
        let after = replay(vec![scored(0.5), scored(0.75), faulted()]);
        let scores = Scores::of(&episodes, &after, Some(&before), &[]);
        let text = scores.lines().join("\n");
        assert!(text.contains("since the last save: 1 of 2 changed\n  0.2500 -> 0.7500"), "{text}");
        assert!(text.contains("since the recording: 1 of 2 changed\n  0.5000 -> 0.7500"), "{text}");
        assert!(text.contains("1 x plugin.py:14  ZeroDivisionError, first c"), "{text}");
        assert!(text.contains("log: 1 line(s)\n  c  info: here"), "{text}");
    }
}
