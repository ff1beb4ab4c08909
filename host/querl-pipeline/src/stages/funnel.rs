//! Funnel of the data stages: number of rows that each stage read, kept and dropped by code, from the ledger; and warnings about small
//! numbers.

use crate::ledger::{Facts, Ledger, PART, StageName};
use querl_core::config::{Config, TeacherKind};
use querl_core::records::{FailureKind, Split, code_of};
use querl_core::run_dir::RunDir;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Row counts of one data stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Name of the stage.
    pub stage: &'static str,
    /// Number of input rows.
    pub rows_in: u64,
    /// Number of rows passed to the next stage.
    pub kept: u64,
    /// Number of dropped rows by code, such as `repeated`, `teacher_timeout` or `top1_below_threshold`.
    pub dropped: BTreeMap<String, u64>,
}

/// Row counts of the finished data stages, up to the first stage that read other rows than the stage before it has now, on which [`notes`]
/// has a sentence.
///
/// # Errors
/// A file of the run cannot be read.
pub fn steps(ledger: &Ledger, dir: &RunDir) -> anyhow::Result<Vec<Step>> {
    let read = [
        (StageName::Rewrite, None),
        (StageName::Validate, Some((StageName::Rewrite, dir.rewrites()))),
        (StageName::Convert, Some((StageName::Validate, dir.validated()))),
    ];
    let (mut steps, mut calls) = (Vec::new(), BTreeMap::new());
    for (stage, read) in read {
        let Some(entry) = ledger.finished(stage) else { break };
        if let Some((before, path)) = read
            && !entry.inputs.is_of(before, &path)?
        {
            break;
        }
        calls.extend(failed(&entry.facts, "teacher failed", "teacher"));
        calls.extend(failed(&entry.facts, "retrieval failed", "retrieval"));
        steps.push(match stage {
            StageName::Rewrite => rewrite(&entry.facts),
            StageName::Validate => validate(&entry.facts),
            _ => convert(&entry.facts, &calls),
        });
    }
    Ok(steps)
}

/// A sentence for each file of rows that differs from what its stage wrote, or that the next stage has not read, and one if [`steps`] ends
/// early for that reason.
///
/// # Errors
/// As [`steps`].
pub fn notes(ledger: &Ledger, dir: &RunDir) -> anyhow::Result<Vec<String>> {
    let read = [
        (StageName::Rewrite, dir.rewrites(), StageName::Validate),
        (StageName::Validate, dir.validated(), StageName::Convert),
    ];
    let (mut notes, mut ends) = (Vec::new(), false);
    for (stage, path, next) in read {
        let Some(entry) = ledger.finished(stage) else { break };
        let change =
            entry.outputs.difference(dir.root(), &path)?.map(|(file, change)| format!("{file} of {stage} {change}"));
        let is_read = ledger.finished(next).map_or(Ok(true), |next| next.inputs.is_of(stage, &path))?;
        let end = (!is_read && !ends).then(|| format!("the row funnel ends at {stage}"));
        ends |= !is_read;
        match (change, end) {
            (Some(change), Some(end)) => notes.push(format!("{change}: {end}")),
            (Some(change), None) => notes.push(change),
            (None, Some(end)) => notes.push(format!("{next} read other rows than {stage} has left: {end}")),
            (None, None) => {}
        }
    }
    if let Some(entry) = ledger.finished(StageName::Convert) {
        for split in Split::ALL {
            let change = entry.outputs.difference(dir.root(), &dir.split(split))?;
            notes.extend(change.map(|(file, change)| format!("{file} of {} {change}", StageName::Convert)));
        }
    }
    Ok(notes)
}

fn rewrite(facts: &Facts) -> Step {
    let mut dropped = facts.parts("rows read");
    dropped.extend(failed(facts, "teacher failed", "teacher"));
    Step { stage: "rewrite", rows_in: facts.count("rows read"), kept: facts.count("rewritten"), dropped }
}

fn validate(facts: &Facts) -> Step {
    let rows_in = facts.count("looked up") + facts.count("not looked up");
    let n_failed = facts.count("retrieval failed");
    let dropped = failed(facts, "retrieval failed", "retrieval");
    Step { stage: "validate", rows_in, kept: rows_in - n_failed.min(rows_in), dropped }
}

/// Failed calls of earlier stages are among the dropped rows of this stage, but were dropped earlier.
fn convert(facts: &Facts, calls: &BTreeMap<String, u64>) -> Step {
    let mut dropped = facts.parts("dropped");
    dropped.retain(|code, _| !calls.contains_key(code));
    let kept = facts.count("kept");
    Step { stage: "convert", rows_in: kept + dropped.values().sum::<u64>(), kept, dropped }
}

/// Failures by kind, under the codes that `dropped.jsonl` has for them.
fn failed(facts: &Facts, name: &str, who: &str) -> BTreeMap<String, u64> {
    facts.parts(name).into_iter().map(|(kind, n)| (code_of(who, &kind), n)).collect()
}

/// The row counts as text lines for a terminal.
pub fn lines(steps: &[Step]) -> Vec<String> {
    let width = steps.iter().map(|step| step.rows_in).max().unwrap_or(0).to_string().len();
    steps.iter().map(|step| line(step, width)).collect()
}

fn line(step: &Step, width: usize) -> String {
    let Step { stage, rows_in, kept, dropped } = step;
    let mut codes: Vec<(&String, &u64)> = dropped.iter().collect();
    codes.sort_by_key(|(code, n)| (std::cmp::Reverse(**n), *code));
    let codes: Vec<String> = codes.iter().map(|(code, n)| format!("{code} {n}")).collect();
    let dropped = if codes.is_empty() { "none dropped".to_owned() } else { format!("dropped: {}", codes.join(", ")) };
    format!("  {stage:<8}  {rows_in:>width$} in  {kept:>width$} kept  {dropped}")
}

/// Expected numbers of rows (docs/data.md): stage, figure, minimum, maximum.
const EXPECTED: [(StageName, &str, u64, u64); 5] = [
    (StageName::Rewrite, "rows read", 500, 1000),
    (StageName::Rewrite, "rewritten", 480, 980),
    (StageName::Validate, "found passages", 400, 900),
    (StageName::Convert, "kept", 300, 700),
    (StageName::Convert, "- train", 240, 560),
];

/// A warning about the first figure of `stage` that is below the expected minimum; `None` if all suffice, or if the query table itself is
/// small, about which `rewrite` warns.
pub fn size_warning(stage: StageName, facts: &Facts, ledger: &Ledger) -> Option<String> {
    let (_, name, least, _) = EXPECTED[0];
    let of_rewrite = ledger.entry(StageName::Rewrite).map(|entry| &entry.facts);
    let is_small = of_rewrite.is_some_and(|facts| facts.get(name).is_some() && facts.count(name) < least);
    if stage != StageName::Rewrite && is_small {
        return None;
    }
    let is_made = |name: &str| name != "found passages" || facts.get("not looked up").is_none();
    let of_stage = EXPECTED.iter().filter(|(of, ..)| *of == stage);
    let mut small = of_stage.filter(|(_, name, least, _)| is_made(name) && facts.count(name) < *least);
    let (_, name, least, most) = small.next()?;
    Some(format!("{stage}: {}", too_few(name, facts.count(name), *least, *most)))
}

/// As [`size_warning`], for a query table of `n_rows` rows that no stage has read yet.
pub fn table_size_warning(n_rows: u64) -> Option<String> {
    let (_, name, least, most) = EXPECTED[0];
    (n_rows < least).then(|| too_few(name, n_rows, least, most))
}

fn too_few(name: &str, n: u64, least: u64, most: u64) -> String {
    let name = name.trim_start_matches(PART);
    format!("{name} is {n}; {least} to {most} are usual, and results of fewer are less conclusive")
}

/// Name of a figure of the stage `rewrite`: unread keys of a recorded teacher, which may be the reason for missing queries.
pub(super) const HINT: &str = "unread keys";

/// A sentence about a recorded teacher that lacks many of the queries, from the figures of the stage `rewrite`; `None` otherwise.
pub fn not_recorded(config: &Config, facts: &Facts) -> Option<String> {
    if config.called_teacher() != Some(TeacherKind::Recorded) {
        return None;
    }
    let n_missing = *facts.parts("teacher failed").get(&FailureKind::NotRecorded.to_string())?;
    let n_queries = facts.count("rewritten") + facts.count("teacher failed");
    let hint = facts.get(HINT).and_then(Value::as_str);
    querl_data::not_recorded(config.teacher.path.as_ref()?, n_missing, n_queries, hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Entry, Inputs};

    fn facts(figures: &[(&str, u64)]) -> Facts {
        let mut facts = Facts::default();
        figures.iter().for_each(|(name, n)| {
            facts.add(*name, *n);
        });
        facts
    }

    #[test]
    fn every_row_is_kept_or_dropped_once_under_its_code() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(&folder.path().join("stages.json")).unwrap();
        let mut put = |stage, finished, figures: &[(&str, u64)]| {
            let entry = Entry { finished, facts: facts(figures), ..Entry::begun(Inputs::default()) };
            ledger.put(stage, entry).unwrap();
        };
        put(
            StageName::Rewrite,
            true,
            &[
                ("rows read", 12),
                ("- empty", 1),
                ("- repeated", 2),
                ("rewritten", 8),
                ("teacher failed", 1),
                ("- rate limited", 1),
            ],
        );
        put(
            StageName::Validate,
            true,
            &[("looked up", 8), ("found passages", 6), ("found nothing", 1), ("retrieval failed", 1), ("- timeout", 1)],
        );
        let codes =
            [("- top1_below_threshold", 2), ("- teacher_rate_limited", 1), ("- retrieval_timeout", 1), ("- empty", 1)];
        put(
            StageName::Convert,
            true,
            &[&[("kept", 4), ("dropped", 5)][..], &codes, &[("rows for training and evaluation", 6), ("- train", 2)]]
                .concat(),
        );
        let dir = RunDir::new(folder.path());
        let steps = steps(&ledger, &dir).unwrap();
        for step in &steps {
            assert_eq!(step.rows_in, step.kept + step.dropped.values().sum::<u64>(), "{step:?}");
        }
        let expected = [
            "  rewrite   12 in   8 kept  dropped: repeated 2, empty 1, teacher_rate_limited 1",
            "  validate   8 in   7 kept  dropped: retrieval_timeout 1",
            "  convert    7 in   4 kept  dropped: top1_below_threshold 2, empty 1",
        ];
        assert_eq!(lines(&steps), expected);
        ledger.put(StageName::Convert, Entry::begun(Inputs::default())).unwrap();
        assert_eq!(super::steps(&ledger, &dir).unwrap().len(), 2, "a stage that is not finished has no share");
    }

    /// Regression: rows that a later rewrite repaired were shown as dropped by an earlier convert.
    #[test]
    fn a_stage_that_read_other_rows_has_no_share() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::new(folder.path());
        let mut ledger = Ledger::open(&dir.stages()).unwrap();
        let put = |ledger: &mut Ledger, stage: StageName, inputs: Inputs| {
            ledger.put(stage, Entry { finished: true, ..Entry::begun(inputs) }).unwrap();
        };
        std::fs::create_dir_all(dir.rewrites().parent().unwrap()).unwrap();
        std::fs::write(dir.rewrites(), "first").unwrap();
        put(&mut ledger, StageName::Rewrite, Inputs::default());
        let mut inputs = Inputs::default();
        inputs.made_by(&ledger, StageName::Rewrite, &dir.rewrites()).unwrap();
        put(&mut ledger, StageName::Validate, inputs);
        put(&mut ledger, StageName::Convert, Inputs::default());
        assert_eq!(steps(&ledger, &dir).unwrap().len(), 3);
        std::fs::write(dir.rewrites(), "second").unwrap();
        assert_eq!(steps(&ledger, &dir).unwrap().len(), 1);
    }

    #[test]
    fn few_rows_are_reported_and_many_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(&folder.path().join("stages.json")).unwrap();
        let of = |ledger: &Ledger, stage, figures: &[(&str, u64)]| size_warning(stage, &facts(figures), ledger);
        let few = [("kept", 299), ("rows for training and evaluation", 400), ("- train", 200)];
        let expected = "convert: kept is 299; 300 to 700 are usual, and results of fewer are less conclusive";
        assert_eq!(of(&ledger, StageName::Convert, &few).as_deref(), Some(expected));
        let many = [("rows read", 100_000), ("rewritten", 99_000)];
        assert_eq!((of(&ledger, StageName::Rewrite, &many), of(&ledger, StageName::Sft, &[])), (None, None));
        // Regression: five warnings in one run of a small table.
        let small = [("rows read", 158), ("rewritten", 158)];
        ledger.put(StageName::Rewrite, Entry { facts: facts(&small), ..Entry::begun(Inputs::default()) }).unwrap();
        assert!(of(&ledger, StageName::Rewrite, &small).unwrap().starts_with("rewrite: rows read is 158; "));
        assert_eq!(of(&ledger, StageName::Convert, &few), None);
        let of_table = "rows read is 499; 500 to 1000 are usual, and results of fewer are less conclusive";
        assert_eq!((table_size_warning(499).as_deref(), table_size_warning(500)), (Some(of_table), None));
    }
}
