use super::*;
use crate::{RecordFile, open_queries, query_id};
use async_trait::async_trait;
use querl_core::config::DataConfig;
use querl_core::ports::{
    Filter, ParsedJudgement, PluginFault, PromptInput, PromptTask, Prompts, RetrievalRequest, Retriever, Silent,
    Teacher,
};
use querl_core::records::{
    Completion, DatasetRow, Hit, Message, QueryRow, Rejection, RewriteRecord, Sample, Split, ValidatedRecord, Verdict,
};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

fn rows(n: usize) -> Vec<QueryRow> {
    let row = |index: usize| QueryRow {
        id: query_id(&format!("问{index}"), "", ""),
        row: index + 2,
        original_query: format!("问{index}"),
        group: format!("g{index}"),
        ..QueryRow::default()
    };
    (0..n).map(row).collect()
}

fn failure(kind: FailureKind) -> CallFailure {
    let message = if kind == FailureKind::OverBudget { "the budget is spent" } else { "the service message so" };
    CallFailure { kind, message: message.into() }
}

/// A service that fails on the given rows and counts calls. Later rows finish first.
struct Scripted {
    failures: Mutex<Vec<(usize, FailureKind)>>,
    calls: AtomicUsize,
}

impl Scripted {
    fn new(failures: &[(usize, FailureKind)]) -> Self {
        Self { failures: Mutex::new(failures.to_vec()), calls: AtomicUsize::new(0) }
    }

    fn fails(&self, row: usize) -> Option<CallFailure> {
        let failures = self.failures.lock().unwrap();
        failures.iter().find(|(failing, _)| *failing == row).map(|(_, kind)| failure(*kind))
    }
}

#[async_trait]
impl Teacher for Scripted {
    async fn rewrite(&self, query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(std::time::Duration::from_millis(40_u64.saturating_sub(4 * query.row as u64))).await;
        match self.fails(query.row) {
            Some(failure) => Err(failure),
            None => Ok(Completion::of(format!("改写:{}", messages[0].content))),
        }
    }

    fn name(&self) -> &str {
        "scripted"
    }
}

#[async_trait]
impl Retriever for Scripted {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let row = request.original_query.trim_start_matches('问').parse::<usize>().unwrap() + 2;
        let hit = Hit { id: "p".into(), text: "文".into(), reranker_score: 0.75, retrieval_score: None, rank: 1 };
        self.fails(row).map_or(Ok(vec![hit]), Err)
    }

    fn name(&self) -> &str {
        "scripted"
    }
}

struct Plain;

impl Prompts for Plain {
    fn messages(&self, _: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
        Ok(vec![Message { role: "user".into(), content: input.query.into() }])
    }

    fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
        let parsed = text.strip_prefix("改写:").map(str::to_owned);
        Ok(parsed.ok_or_else(|| Rejection::new("no_prefix", text)))
    }

    fn parse_judgement(&self, _: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
        Ok(Err(Rejection::new("unused", "")))
    }
}

struct DropContaining(&'static str);

impl Filter for DropContaining {
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault> {
        let drop = || Verdict::Drop { code: format!("has_{}", self.0), detail: "说明".into() };
        Ok(samples.iter().map(|s| if s.rewritten_query.contains(self.0) { drop() } else { Verdict::Keep }).collect())
    }

    fn name(&self) -> &str {
        "drop-containing"
    }
}

async fn run_rewrite(rows: &[QueryRow], teacher: &Scripted, output: &Path) -> Result<Vec<RewriteRecord>, DataError> {
    let (rows, mut records) = (rows.to_vec(), Vec::new());
    let results = rewrite(&rows, teacher, &Plain, Journal::open(output)?, 4, &Silent).await?;
    results.write(|record| {
        records.push(record.clone());
        Ok(())
    })?;
    let written: Vec<RewriteRecord> = RecordFile::new(output).read()?.collect::<Result<_, _>>()?;
    assert!(written == records && !Journal::path_for(output).exists());
    Ok(records)
}

async fn run_validate(
    rewrites: Vec<RewriteRecord>,
    retriever: &Scripted,
    output: &Path,
) -> Result<Vec<ValidatedRecord>, DataError> {
    let results = validate(&rewrites, retriever, Journal::open(output)?, 4, &Silent).await?;
    results.write(|_| Ok(()))?;
    RecordFile::new(output).read()?.collect()
}

#[tokio::test]
async fn failed_rows_have_a_reason_and_are_tried_again() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    let rows = rows(6);
    let teacher = Scripted::new(&[(3, FailureKind::Timeout), (5, FailureKind::ServerError)]);
    let first = run_rewrite(&rows, &teacher, &output).await.unwrap();
    assert_eq!(first.iter().map(|record| record.query.row).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 7], "input order");
    assert_eq!(first[0].rewrite.as_ref().unwrap().text, "问0");
    assert_eq!(first[1].rewrite, Err(failure(FailureKind::Timeout)));
    let second = Scripted::new(&[]);
    let mended = run_rewrite(&rows, &second, &output).await.unwrap();
    assert_eq!(second.calls.load(Ordering::Relaxed), 2, "only the failed rows are tried again");
    assert!(mended.iter().all(|record| record.rewrite.is_ok()));
}

/// Regression: control characters of a response went into retrieval, training and a csv that could not be read again.
#[test]
fn a_rewrite_has_no_control_characters() {
    let parsed = |text: &str| rewrite::parsed(Completion::of(text), &Plain).unwrap();
    assert_eq!(parsed("改写:鱼\0油\u{1b}[31m\r\n用量\t").unwrap().text, "鱼油[31m\n用量\t");
    let failure = parsed("改写:\0\u{1} ").unwrap_err();
    assert_eq!(failure.kind, FailureKind::InvalidResponse);
}

/// A progress callback that stops the stage after this many rows.
struct StopsAfter(u64, AtomicUsize);

impl Progress for StopsAfter {
    fn update(&self, n_done: u64, _: u64, _: &str) {
        self.1.store(n_done as usize, Ordering::Relaxed);
    }

    fn line(&self, _: &str) {}

    fn is_stopped(&self) -> bool {
        self.1.load(Ordering::Relaxed) as u64 >= self.0
    }
}

/// Regression: an interrupt was reported as a changed table, and rows failed without a call.
#[tokio::test]
async fn an_interrupt_keeps_finished_rows_and_leaves_failed_ones_pending() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    let (rows, stops) = (rows(6), StopsAfter(2, AtomicUsize::new(0)));
    let teacher = Scripted::new(&[(4, FailureKind::Timeout), (5, FailureKind::Timeout)]);
    let error = rewrite(&rows, &teacher, &Plain, Journal::open(&output).unwrap(), 1, &stops).await.err().unwrap();
    assert!(matches!(error, DataError::Interrupted), "{error}");
    let refused = Scripted::new(&[(4, FailureKind::Unauthorized)]);
    let stops = StopsAfter(3, AtomicUsize::new(0));
    let error = rewrite(&rows, &refused, &Plain, Journal::open(&output).unwrap(), 1, &stops).await.err().unwrap();
    assert!(matches!(error, DataError::Service(_)), "the failure is reported: {error}");
    let second = Scripted::new(&[]);
    run_rewrite(&rows, &second, &output).await.unwrap();
    assert_eq!(second.calls.load(Ordering::Relaxed), 4, "the first two are in the journal");
}

/// A table that changes between readings.
struct Changing {
    readings: Mutex<Vec<Vec<QueryRow>>>,
}

impl Rows<QueryRow> for Changing {
    fn read(&self) -> Result<crate::RowIter<'_, QueryRow>, DataError> {
        let mut readings = self.readings.lock().unwrap();
        let rows = if readings.len() > 1 { readings.remove(0) } else { readings[0].clone() };
        Ok(Box::new(rows.into_iter().map(Ok)))
    }

    fn path(&self) -> Option<&Path> {
        Some(Path::new("queries.csv"))
    }
}

/// Regression: a table with a row moved while it was read gave one query another's rewrite.
#[tokio::test]
async fn rows_that_moved_while_they_were_read_get_no_answer_of_others() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    let mut moved = rows(4);
    moved.swap(1, 2);
    let changing = Changing { readings: Mutex::new(vec![rows(4), rows(4), moved]) };
    let results = rewrite(&changing, &Scripted::new(&[]), &Plain, Journal::open(&output).unwrap(), 4, &Silent).await;
    let error = results.unwrap().write(|_| Ok(())).unwrap_err();
    assert_eq!(error.to_string(), "queries.csv: was changed while it was read; run the same command again");
    assert!(!output.exists());
    let second = Scripted::new(&[]);
    run_rewrite(&rows(4), &second, &output).await.unwrap();
    assert_eq!(second.calls.load(Ordering::Relaxed), 0, "the answers are in the journal");
}

#[tokio::test]
async fn a_rewrite_that_appears_during_validation_is_reported() {
    struct Growing(Mutex<usize>, [Vec<RewriteRecord>; 2]);
    impl Rows<RewriteRecord> for Growing {
        fn read(&self) -> Result<crate::RowIter<'_, RewriteRecord>, DataError> {
            let mut n_read = self.0.lock().unwrap();
            *n_read += 1;
            Ok(Box::new(self.1[usize::from(*n_read > 2)].clone().into_iter().map(Ok)))
        }
    }
    let (folder, output) = crate::scratch_file("rewrites.jsonl");
    let first = run_rewrite(&rows(2), &Scripted::new(&[(2, FailureKind::Timeout)]), &output).await.unwrap();
    let second = run_rewrite(&rows(2), &Scripted::new(&[]), &output).await.unwrap();
    let growing = Growing(Mutex::new(0), [first, second]);
    let journal = Journal::open(&folder.path().join("validated.jsonl")).unwrap();
    let results = validate(&growing, &Scripted::new(&[]), journal, 4, &Silent).await.unwrap();
    assert!(results.write(|_| Ok(())).unwrap_err().to_string().contains("was changed while it was read"));
}

/// A plugin fault on one row, while calls of other rows are in flight.
#[tokio::test]
async fn calls_in_flight_are_kept_if_a_plugin_fails_on_one_row() {
    struct Broken;
    impl Prompts for Broken {
        fn messages(&self, task: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
            match input.query {
                "问3" => Err(fault()),
                _ => Plain.messages(task, input),
            }
        }

        fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
            Plain.parse_rewrite(text)
        }

        fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
            Plain.parse_judgement(text)
        }
    }
    let (_folder, output) = crate::scratch_file("a.jsonl");
    let (rows, teacher) = (rows(20), Scripted::new(&[]));
    let results = rewrite(&rows, &teacher, &Broken, Journal::open(&output).unwrap(), 4, &Silent).await;
    assert!(results.err().unwrap().to_string().contains("broke its contract"));
    let n_kept = Journal::<RewriteRecord>::open(&output).unwrap().n_earlier();
    assert_eq!((n_kept, teacher.calls.load(Ordering::Relaxed)), (3, 3), "paid calls are kept");
}

fn fault() -> PluginFault {
    let (plugin, version, message) = ("p".into(), "0.1.0".into(), "broke its contract".into());
    PluginFault { plugin, version, message, kind: querl_core::ports::FaultKind::Result, log: Vec::new() }
}

/// Regression: paid responses were dropped because the first ones could not be parsed.
#[tokio::test]
async fn records_of_all_calls_in_flight_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let failing: Vec<(usize, FailureKind)> = (2..102).map(|row| (row, FailureKind::InvalidResponse)).collect();
    let output = folder.path().join("a.jsonl");
    let teacher = Scripted::new(&failing);
    run_rewrite(&rows(100), &teacher, &output).await.unwrap_err();
    let n_lines = std::fs::read_to_string(Journal::path_for(&output)).unwrap().lines().count();
    assert_eq!(n_lines, teacher.calls.load(Ordering::Relaxed));
}

/// The last progress: rows done, and the note.
#[derive(Default)]
struct LastProgress(Mutex<(u64, String)>);

impl Progress for LastProgress {
    fn update(&self, n_done: u64, _: u64, note: &str) {
        *self.0.lock().unwrap() = (n_done, note.to_owned());
    }

    fn line(&self, _: &str) {}
}

/// The message of a rewrite stage that stops, and its last progress; later rows finish first.
async fn stopped(n_rows: usize, failures: &[(usize, FailureKind)]) -> (String, (u64, String)) {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    let (rows, teacher, progress) = (rows(n_rows), Scripted::new(failures), LastProgress::default());
    let results = rewrite(&rows, &teacher, &Plain, Journal::open(&output).unwrap(), 12, &progress).await;
    (results.err().unwrap().to_string(), progress.0.into_inner().unwrap())
}

/// Regression: the progress counted 12 failed rows, and the message 8.
#[tokio::test]
async fn counts_of_an_error_include_the_calls_in_flight() {
    let failing: Vec<(usize, FailureKind)> = (2..22).map(|row| (row, FailureKind::InvalidResponse)).collect();
    let (error, (n_done, note)) = stopped(20, &failing).await;
    assert!(n_done > 8 && note == format!("{n_done} failed"), "{n_done} {note}");
    assert!(
        error.starts_with(&format!("none of {n_done} row(s) tried succeeded; {n_done} failed like this: ")),
        "{error}"
    );
}

/// Regression: the message was "none of 8 row(s) tried succeeded" where calls in flight had succeeded, and the other rows were left.
#[tokio::test]
async fn a_success_in_flight_lets_a_stage_continue_whose_first_rows_failed_alike() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    let failing: Vec<(usize, FailureKind)> = (6..42).map(|row| (row, FailureKind::InvalidResponse)).collect();
    let (rows, teacher, progress) = (rows(40), Scripted::new(&failing), LastProgress::default());
    let results = rewrite(&rows, &teacher, &Plain, Journal::open(&output).unwrap(), 12, &progress).await;
    results.unwrap().write(|_| Ok(())).unwrap();
    assert_eq!(progress.0.into_inner().unwrap(), (40, "36 failed".to_owned()));
}

/// Regression: the message was about the plugin, whose fault came from a call in flight when the stage had stopped.
#[tokio::test]
async fn the_first_reason_to_stop_is_reported_and_later_successes_count_as_done() {
    struct Broken;
    impl Prompts for Broken {
        fn messages(&self, task: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
            Plain.messages(task, input)
        }

        fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
            if text.ends_with("问1") { Err(fault()) } else { Plain.parse_rewrite(text) }
        }

        fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
            Plain.parse_judgement(text)
        }
    }
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    // The row of 问1 is row 3; later rows finish first.
    let (rows, teacher) = (rows(12), Scripted::new(&[(12, FailureKind::Unauthorized)]));
    let progress = LastProgress::default();
    let results = rewrite(&rows, &teacher, &Broken, Journal::open(&output).unwrap(), 12, &progress).await;
    let message = "stopped, as every further call would fail too: unauthorized: the service message so";
    assert_eq!(results.err().unwrap().to_string(), message);
    assert_eq!(progress.0.into_inner().unwrap(), (11, "1 failed".to_owned()));
    assert_eq!(Journal::<RewriteRecord>::open(&output).unwrap().n_earlier(), 10);
}

/// Regression: rows that were never sent counted as done, and the failures before a spent budget were not named.
#[tokio::test]
async fn a_spent_budget_counts_called_rows_and_names_their_failure() {
    let kind = |row| if row < 8 { FailureKind::InvalidResponse } else { FailureKind::OverBudget };
    let failing: Vec<(usize, FailureKind)> = (2..14).map(|row| (row, kind(row))).collect();
    let (error, last) = stopped(12, &failing).await;
    assert_eq!(last, (6, "6 failed".to_owned()));
    let expected =
        "over budget: the budget is spent; 6 row(s) failed, most often: invalid response: the service message so";
    assert!(error.ends_with(expected), "{error}");
}

#[tokio::test]
async fn a_kill_between_output_and_removal_of_the_journal_changes_nothing() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    run_rewrite(&rows(4), &Scripted::new(&[(3, FailureKind::Timeout)]), &output).await.unwrap();
    let written = std::fs::read(&output).unwrap();
    std::fs::copy(&output, Journal::path_for(&output)).unwrap();
    let second = Scripted::new(&[(3, FailureKind::Timeout)]);
    run_rewrite(&rows(4), &second, &output).await.unwrap();
    assert_eq!(second.calls.load(Ordering::Relaxed), 1, "the failed row alone");
    assert_eq!(std::fs::read(&output).unwrap(), written);
}

#[tokio::test]
async fn invalid_credentials_stop_the_stage_and_finished_rows_are_kept() {
    let (_folder, output) = crate::scratch_file("rewrites.jsonl");
    let rows = rows(20);
    let error = run_rewrite(&rows, &Scripted::new(&[(15, FailureKind::Unauthorized)]), &output).await.unwrap_err();
    let message = "stopped, as every further call would fail too: unauthorized: the service message so";
    assert_eq!(error.to_string(), message);
    assert!(!output.exists());
    let n_kept = Journal::<RewriteRecord>::open(&output).unwrap().n_earlier();
    assert!(n_kept >= 10, "{n_kept}");
    let second = Scripted::new(&[]);
    assert_eq!(run_rewrite(&rows, &second, &output).await.unwrap().len(), 20);
    assert_eq!(second.calls.load(Ordering::Relaxed), 20 - n_kept);
}

#[tokio::test]
async fn service_that_none_of_the_first_rows_reach_stops_the_stage() {
    let folder = tempfile::tempdir().unwrap();
    let down: Vec<(usize, FailureKind)> = (2..102).map(|row| (row, FailureKind::Unreachable)).collect();
    let teacher = Scripted::new(&down);
    let error = run_rewrite(&rows(100), &teacher, &folder.path().join("a.jsonl")).await.unwrap_err();
    assert!(error.to_string().contains("unreachable"), "{error}");
    assert!(teacher.calls.load(Ordering::Relaxed) < 20);
    let teacher = Scripted::new(&down[1..]);
    let records = run_rewrite(&rows(100), &teacher, &folder.path().join("b.jsonl")).await.unwrap();
    assert_eq!(
        records.iter().filter(|record| record.rewrite.is_err()).count(),
        99,
        "one success shows that it is reachable"
    );
}

#[tokio::test]
async fn first_rows_that_all_fail_alike_stop_the_stage() {
    for kind in [FailureKind::Timeout, FailureKind::ServerError, FailureKind::Rejected, FailureKind::NotRecorded] {
        let folder = tempfile::tempdir().unwrap();
        let failing: Vec<(usize, FailureKind)> = (2..102).map(|row| (row, kind)).collect();
        let teacher = Scripted::new(&failing);
        let error = run_rewrite(&rows(100), &teacher, &folder.path().join("a.jsonl")).await.unwrap_err();
        let n = teacher.calls.load(Ordering::Relaxed);
        let message =
            format!("none of {n} row(s) tried succeeded; {n} failed like this: {kind}: the service message so");
        assert_eq!(error.to_string(), message);
        assert!(n < 20);
    }
}

#[tokio::test]
async fn stage_without_a_success_names_the_commonest_failure() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = [FailureKind::Timeout, FailureKind::ServerError, FailureKind::ServerError];
    let failing: Vec<(usize, FailureKind)> = (2..14).zip(kinds.into_iter().cycle()).collect();
    let error = run_rewrite(&rows(12), &Scripted::new(&failing), &folder.path().join("a.jsonl")).await.unwrap_err();
    let message = "none of 12 row(s) tried succeeded; 8 failed like this: server error: the service message so";
    assert_eq!(error.to_string(), message);
}

/// Regression: a few rows that a service always rejects made it impossible to run a finished stage again.
#[tokio::test]
async fn rows_that_fail_again_do_not_stop_a_stage_with_earlier_successes() {
    let (_folder, output) = crate::scratch_file("a.jsonl");
    let failing: Vec<(usize, FailureKind)> = (3..15).map(|row| (row, FailureKind::Rejected)).collect();
    run_rewrite(&rows(1), &Scripted::new(&[]), &output).await.unwrap();
    let records = run_rewrite(&rows(13), &Scripted::new(&failing), &output).await.unwrap();
    assert_eq!(records.iter().filter(|record| record.rewrite.is_err()).count(), 12);
    let down: Vec<(usize, FailureKind)> = (2..15).map(|row| (row, FailureKind::Unreachable)).collect();
    let error = run_rewrite(&rows(13), &Scripted::new(&down), &output).await.unwrap_err();
    assert!(error.to_string().contains("unreachable"), "{error}");
}

#[tokio::test]
async fn answer_that_does_not_parse_is_a_failure_and_not_a_copy() {
    struct Chatty;
    #[async_trait]
    impl Teacher for Chatty {
        async fn rewrite(&self, row: &QueryRow, _: &[Message]) -> Result<Completion, CallFailure> {
            Ok(Completion::of(if row.row == 2 { "我不能改写" } else { "改写:鱼油" }))
        }

        fn name(&self) -> &str {
            "chatty"
        }
    }
    let (_folder, output) = crate::scratch_file("a.jsonl");
    let rows = rows(2);
    let results = rewrite(&rows, &Chatty, &Plain, Journal::open(&output).unwrap(), 1, &Silent).await.unwrap();
    results.write(|_| Ok(())).unwrap();
    let first = RecordFile::<RewriteRecord>::new(&output).read().unwrap().next().unwrap().unwrap();
    let failure = first.rewrite.unwrap_err();
    assert_eq!(failure.kind, FailureKind::InvalidResponse);
    assert!(failure.message.contains("no_prefix"), "{failure}");
}

async fn validated(n: usize, teacher: &Scripted, retriever: &Scripted) -> Vec<ValidatedRecord> {
    let folder = tempfile::tempdir().unwrap();
    let rewrites = run_rewrite(&rows(n), teacher, &folder.path().join("rewrites.jsonl")).await.unwrap();
    run_validate(rewrites, retriever, &folder.path().join("validated.jsonl")).await.unwrap()
}

#[tokio::test]
async fn retrievals_are_reused_for_the_same_rewrite() {
    let folder = tempfile::tempdir().unwrap();
    let rewriting = Scripted::new(&[(2, FailureKind::Timeout)]);
    let retrieving = Scripted::new(&[(4, FailureKind::ServerError)]);
    let first = validated(4, &rewriting, &retrieving).await;
    assert_eq!(first[0].retrieval, None, "no rewrite");
    assert_eq!(first[1].top1_score(), Some(0.75));
    assert_eq!(first[2].retrieval, Some(Err(failure(FailureKind::ServerError))));
    assert_eq!(retrieving.calls.load(Ordering::Relaxed), 3);
    let mut rewrites: Vec<RewriteRecord> = first.iter().map(|record| record.rewritten.clone()).collect();
    rewrites[3].rewrite = Ok(Completion::of("另一个改写"));
    let again = Scripted::new(&[]);
    let output = folder.path().join("v.jsonl");
    querl_core::fsx::write_jsonl(&output, &first).unwrap();
    let second = run_validate(rewrites, &again, &output).await.unwrap();
    assert_eq!(again.calls.load(Ordering::Relaxed), 2, "the failed one and the changed one");
    assert!(second[1..].iter().all(|record| record.top1_score() == Some(0.75)));
}

#[tokio::test]
async fn dataset_keeps_every_query_and_only_good_targets() {
    let teacher = Scripted::new(&[(4, FailureKind::Timeout), (11, FailureKind::Timeout)]);
    let retriever = Scripted::new(&[(6, FailureKind::Unreachable)]);
    let records = validated(40, &teacher, &retriever).await;
    let config: DataConfig =
        serde_json::from_value(serde_json::json!({"input": "x", "split": [0.5, 0.25, 0.25]})).unwrap();
    let filters: [Arc<dyn Filter>; 2] = [Arc::new(DropContaining("1")), Arc::new(DropContaining("3"))];
    let (splits, dropped) = converted(records, &filters, &config);
    let [train, val, test] = &splits;
    let failed = ["teacher_timeout", "retrieval_unreachable"];
    let n_failed = |row: &&DroppedRow| row.split == Split::Train && failed.contains(&row.code.as_str());
    let n_failed = dropped.iter().filter(n_failed).count();
    assert_eq!((train.len() + n_failed, val.len(), test.len()), (20, 10, 10));
    let targets = || train.iter().filter_map(|row| Some((row.target()?, row.metadata.query.original_query.as_str())));
    assert!(targets().count() > 0 && targets().all(|(target, query)| target == query));
    for row in train.iter().chain(val).chain(test) {
        assert_eq!(row.target().is_none(), row.metadata.dropped.is_some());
        assert_eq!(row.prompt().len(), 1);
    }
    // Libraries that load all splits as one dataset take the columns of the first row.
    let keys = |row: &DatasetRow| {
        let metadata = serde_json::to_value(&row.metadata).unwrap();
        let kinds = metadata.as_object().unwrap().iter().map(|(key, value)| match value {
            serde_json::Value::String(_) => (key.clone(), "text"),
            serde_json::Value::Number(_) | serde_json::Value::Null => (key.clone(), "number"),
            serde_json::Value::Array(_) => (key.clone(), "list"),
            other => panic!("{key}: {other}"),
        });
        kinds.collect::<Vec<_>>()
    };
    let all: Vec<_> = splits.iter().flatten().map(keys).collect();
    assert!(all.iter().all(|row| *row == all[0]), "one schema in all splits");
    let first = train.iter().find(|row| row.target().is_some()).unwrap();
    let kept = serde_json::to_string(first).unwrap();
    assert!(kept.contains(r#","dropped":""}"#), "{kept}");
    for form in
        [kept.clone(), kept.replace(r#","dropped":"""#, ""), kept.replace(r#""dropped":"""#, r#""dropped":null"#)]
    {
        assert_eq!(serde_json::from_str::<DatasetRow>(&form).unwrap(), *first, "an earlier form");
    }
    let n = |code: &str| dropped.iter().filter(|row| row.code == code).count();
    assert_eq!((n("teacher_timeout"), n("retrieval_unreachable")), (2, 1));
    assert_eq!(n("has_1") + n("has_3") + 3, dropped.len(), "each row is dropped once, for its first reason");
    assert!(dropped.is_sorted_by_key(|row| row.query.row), "in the table's order");
}

#[tokio::test]
async fn rows_of_a_dataset_keep_their_prompts_and_one_without_a_completion_is_trained_on() {
    let (folder, path) = crate::scratch_file("train.jsonl");
    let line = |query: &str, completion: Option<&str>| {
        let messages = [("system", "s"), ("user", query)];
        let messages = messages.map(|(role, text)| serde_json::json!({ "role": role, "content": text }));
        serde_json::json!({ "prompt": messages, "completion": completion }).to_string()
    };
    let lines = [line("问0", Some("改写:好")), line("问1", None), line("问2", Some("没有"))];
    std::fs::write(&path, lines.join("\n")).unwrap();
    let config = serde_json::json!({ "dataset": { "train": path }, "split": [1.0, 0.0, 0.0] });
    let config: DataConfig = serde_json::from_value(config).unwrap();
    let (table, output) = (open_queries(&config).unwrap(), folder.path().join("rewrites.jsonl"));
    let mut outcomes = Vec::new();
    let mut each = |record: &RewriteRecord| {
        outcomes.push(record.rewrite.clone().map(|done| done.text).map_err(|failure| failure.kind));
        Ok(())
    };
    dataset_rewrites(&table, &config, &Plain, &output, &mut each).unwrap();
    assert_eq!(outcomes, [Ok("好".into()), Err(FailureKind::NotRecorded), Err(FailureKind::InvalidResponse)]);
    let rewrites: Vec<RewriteRecord> = RecordFile::new(&output).read().unwrap().collect::<Result<_, _>>().unwrap();
    let validated = folder.path().join("validated.jsonl");
    let records = run_validate(rewrites, &Scripted::new(&[]), &validated).await.unwrap();
    let ([train, ..], dropped) = converted(records, &[], &config);
    assert_eq!(train.iter().map(|row| row.metadata.query.row).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((train[0].target(), train[1].target()), (Some("好"), None));
    assert!(train.iter().all(|row| row.prompt()[0].content == "s" && row.metadata.dropped.is_none()));
    assert_eq!((dropped.len(), dropped[0].code.as_str()), (1, "teacher_invalid_response"));
}

fn converted(
    records: Vec<ValidatedRecord>,
    filters: &[Arc<dyn Filter>],
    config: &DataConfig,
) -> ([Vec<DatasetRow>; 3], Vec<DroppedRow>) {
    let (mut splits, mut dropped) = (<[Vec<DatasetRow>; 3]>::default(), Vec::new());
    let targets = HashMap::new();
    let conversion =
        Conversion { prompts: &Plain, filters, config, teacher_name: "scripted", targets: &targets, expansions: None };
    let mut put = |made| {
        match made {
            ConvertedRow::Row(split, row) => splits[split as usize].push(row),
            ConvertedRow::Dropped(row) => dropped.push(row),
        }
        Ok(())
    };
    convert(&records, &conversion, &mut put).unwrap();
    (splits, dropped)
}

struct Counting(Mutex<Vec<usize>>);

impl Filter for Counting {
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault> {
        self.0.lock().unwrap().push(samples.len());
        Ok(vec![Verdict::Keep; samples.len()])
    }

    fn name(&self) -> &str {
        "counting"
    }
}

/// Sizes of the batches that a filter gets of `n_rows` training rows with `hits`, and the dataset.
fn batch_sizes(n_rows: usize, hits: &[Hit]) -> (Vec<usize>, Vec<DatasetRow>) {
    let record = |query: QueryRow| ValidatedRecord {
        rewritten: RewriteRecord { query, rewrite: Ok(Completion::of("改写")) },
        retrieval: Some(Ok(hits.to_vec())),
    };
    let records: Vec<ValidatedRecord> = rows(n_rows).into_iter().map(record).collect();
    let config = serde_json::json!({ "input": "x", "split": [1.0, 0.0, 0.0] });
    let filter = Arc::new(Counting(Mutex::new(Vec::new())));
    let filters: [Arc<dyn Filter>; 1] = [filter.clone()];
    let ([train, ..], dropped) = converted(records, &filters, &serde_json::from_value(config).unwrap());
    assert!(dropped.is_empty());
    (filter.0.lock().unwrap().clone(), train)
}

#[test]
fn filters_get_a_large_split_in_batches_and_rows_keep_their_order() {
    let n_rows = 2 * convert::BATCH_ROWS + 5;
    let (sizes, train) = batch_sizes(n_rows, &[]);
    assert_eq!(sizes, [convert::BATCH_ROWS, convert::BATCH_ROWS, 5]);
    assert!(train.len() == n_rows && train.is_sorted_by_key(|row| row.metadata.query.row));
}

/// Regression: the long passages of a whole batch did not fit into the memory of a guest.
#[test]
fn the_size_of_a_filter_batch_is_limited() {
    let text = "鱼".repeat(convert::BATCH_BYTES / 3 / 4);
    let hit = Hit { id: "p".into(), text, reranker_score: 0.75, retrieval_score: None, rank: 1 };
    assert_eq!(batch_sizes(6, &[hit]).0, [4, 2]);
}
