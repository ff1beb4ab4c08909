//! Scores the rewrites of each system for held-out queries.

use crate::environment::{Baseline, Baselines, RowColumns, ScoreRequest, ScoredEpisode, Scorer, WrittenRewrite};
use crate::interrupt;
use crate::training::{Generation, Generator};
use anyhow::Context;
use querl_core::edits::{EditParts, with_history};
use querl_core::ports::{EnvironmentError, PolicyResponse, Progress};
use querl_core::records::{
    Candidate, DatasetRow, EvalRecord, FinishReason, Judgement, QueryRow, Rejection, Reward, Split, SystemAnswer, win,
};
use querl_core::responses::{ResponseForm, THINKING_END};
use std::collections::BTreeMap;

const N_ROWS_AT_ONCE: usize = 16;

pub(crate) enum System<'a> {
    Raw,
    /// The query followed by its history summary.
    WithHistory,
    /// The expansion of the query.
    Expanded,
    Teacher,
    Model {
        name: &'static str,
        generator: &'a dyn Generator,
        reading: ResponseReading,
    },
}

/// How the search text is taken from a model's response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResponseReading {
    /// The prompt plugin parses the rewrite.
    Parsed,
    /// All of the response after the thinking block, if it has one.
    Verbatim,
}

impl System<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::WithHistory => "with_history",
            Self::Expanded => "expanded",
            Self::Teacher => "teacher",
            Self::Model { name, .. } => name,
        }
    }
}

/// The rewrite of one query by a system, with its latency and cost.
struct Answer {
    written: WrittenRewrite,
    latency_ms: Option<f64>,
    cost: Option<f64>,
}

/// Evaluation records of one system, and the number of its rewrites without a reward.
#[derive(Debug, Default)]
pub(crate) struct Evaluated {
    pub records: Vec<EvalRecord>,
    /// Number of rewrites without a reward, by rejection code: a call failed, or a plugin rejected the episode.
    pub unscored: BTreeMap<String, u64>,
}

/// Test rows, teacher rewrites and scorer with which every system is evaluated.
pub(crate) struct Evaluation<'a> {
    pub rows: &'a [DatasetRow],
    pub columns: &'a RowColumns,
    pub baselines: &'a Baselines,
    pub scorer: &'a Scorer,
}

/// Evaluates a system: one record per row, in order, with hits, judgement and comparison with the teacher.
pub(crate) fn evaluate_system(
    system: &System<'_>,
    evaluation: &Evaluation<'_>,
    progress: &dyn Progress,
) -> anyhow::Result<Evaluated> {
    let Evaluation { rows, baselines, scorer, .. } = *evaluation;
    let mut evaluated = Evaluated::default();
    progress.update(0, rows.len() as u64, system.name());
    let mut finish = |some: &[DatasetRow], answers| -> anyhow::Result<()> {
        // Calls in flight are paid for.
        let _at_safe_points = interrupt::at_safe_points();
        score(system, evaluation, some, answers, &mut evaluated)?;
        progress.update(evaluated.records.len() as u64, rows.len() as u64, system.name());
        Ok(interrupt::check()?)
    };
    match system {
        System::Raw | System::WithHistory | System::Expanded | System::Teacher => {
            for some in rows.chunks(N_ROWS_AT_ONCE) {
                finish(some, some.iter().map(|row| known(system, row, baselines)).collect())?;
            }
        }
        System::Model { generator, reading, .. } => {
            let mut rest = rows;
            generator.generate(rows, N_ROWS_AT_ONCE, &mut |generations| {
                let n_rows = rest.len();
                let some = rest.split_off(..generations.len());
                let some = some.with_context(|| format!("{} answers to {n_rows} queries", generations.len()))?;
                let answers = some
                    .iter()
                    .zip(generations)
                    .map(|(row, generation)| Ok(Ok(model(row, generation, *reading, scorer)?)));
                finish(some, answers.collect::<Result<_, EnvironmentError>>()?)
            })?;
            anyhow::ensure!(rest.is_empty(), "{} queries without an answer", rest.len());
        }
    }
    Ok(evaluated)
}

/// Number of rewrites that lack hits or judgement because a call failed; the call may succeed in another run.
pub(crate) fn n_failed(records: &[EvalRecord]) -> u64 {
    let answers = records.iter().filter_map(|record| record.outcome.as_ref().ok()).map(|answer| &answer.candidate);
    answers.filter(|side| side.retrieval_failure().is_some() || matches!(side.judgement, Judgement::Failed(_))).count()
        as u64
}

/// The rewrite of a system that needs no generation.
fn known(system: &System<'_>, row: &DatasetRow, baselines: &Baselines) -> Result<Answer, Rejection> {
    let QueryRow { original_query, history_summary, .. } = &row.metadata.query;
    match system {
        System::Teacher => teacher(baselines.of(&row.metadata.query.id)),
        System::WithHistory => Ok(free(with_history(original_query, history_summary, ""))),
        System::Expanded => Ok(free(EditParts::from(&row.metadata.query).expanded(""))),
        System::Raw | System::Model { .. } => Ok(free(original_query.clone())),
    }
}

fn free(rewrite: String) -> Answer {
    Answer { written: WrittenRewrite::known(rewrite), latency_ms: None, cost: Some(0.0) }
}

fn teacher(baseline: Baseline) -> Result<Answer, Rejection> {
    match baseline {
        Baseline::Missing(failure) => Err(Rejection::by_host("teacher_failed", failure.to_string())),
        Baseline::Rewritten { rewrite, cost, latency_ms, .. } => {
            Ok(Answer { written: WrittenRewrite::known(rewrite), latency_ms, cost })
        }
    }
}

/// As in training, an answer that cannot be parsed is an empty rewrite, not a missing one.
fn model(
    row: &DatasetRow,
    generation: Generation,
    reading: ResponseReading,
    scorer: &Scorer,
) -> Result<Answer, EnvironmentError> {
    let Generation { response, latency_ms } = generation;
    let written = match reading {
        ResponseReading::Parsed => scorer.parse(&row.metadata.query, &response)?,
        ResponseReading::Verbatim => verbatim(response, scorer.response_form()),
    };
    Ok(Answer { written, latency_ms, cost: None })
}

fn verbatim(response: PolicyResponse, form: ResponseForm) -> WrittenRewrite {
    let answer = form.answer(&response.text).unwrap_or_default();
    let answer = answer.rsplit_once(THINKING_END).map_or(answer, |(_, answer)| answer);
    let finish_reason = if response.truncated { FinishReason::Length } else { FinishReason::Stop };
    let (rewrite, n_tokens) = (answer.trim().to_owned(), response.n_tokens);
    WrittenRewrite { rewrite, response: Some((response.text, finish_reason)), n_tokens }
}

fn score(
    system: &System<'_>,
    evaluation: &Evaluation<'_>,
    rows: &[DatasetRow],
    answers: Vec<Result<Answer, Rejection>>,
    evaluated: &mut Evaluated,
) -> Result<(), EnvironmentError> {
    let answered = rows.iter().zip(&answers).filter_map(|(row, answer)| Some((row, answer.as_ref().ok()?)));
    let requests: Vec<ScoreRequest<'_>> = answered
        .map(|(row, answer)| {
            let (query, id) = (&row.metadata.query, format!("eval/{}/{}", system.name(), row.metadata.query.id));
            ScoreRequest {
                group_id: id.clone(),
                id,
                sample_index: 0,
                step: None,
                split: Split::Test,
                query,
                columns: evaluation.columns.of(query),
                prompt: answer.written.response.is_some().then(|| row.prompt()),
                policy: answer.written.clone(),
                baseline: evaluation.baselines.of(&query.id),
                judged: true,
            }
        })
        .collect();
    let scored = evaluation.scorer.score(&requests)?.scored;
    for rejection in scored.iter().filter_map(|one| one.outcome.as_ref().err()) {
        *evaluated.unscored.entry(rejection.code.clone()).or_default() += 1;
    }
    let mut scored = scored.into_iter();
    let records = rows.iter().zip(answers).map(|(row, answer)| {
        let outcome = answer.map(|answer| finish(system, answer, scored.next().expect("one score per answer")));
        EvalRecord { system: system.name().into(), query: row.metadata.query.clone(), outcome }
    });
    evaluated.records.extend(records);
    Ok(())
}

/// If retrieval or judgement of a rewrite failed, its record contains the failure.
fn finish(system: &System<'_>, answer: Answer, scored: ScoredEpisode) -> SystemAnswer {
    let reward: Option<Reward> = scored.outcome.ok();
    let (policy, baseline) = (scored.episode.policy, scored.episode.baseline);
    let win = match (system, policy.found(), baseline.as_ref().and_then(Candidate::found)) {
        (System::Teacher, _, _) => None,
        (_, Some(own), Some(teachers)) => Some(win(own, teachers)),
        _ => None,
    };
    SystemAnswer {
        candidate: policy,
        reward,
        win,
        latency_ms: answer.latency_ms,
        cost: answer.cost,
        ..SystemAnswer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::{Shop, dataset_row, validated};
    use crate::training::Each;
    use querl_core::config::RetrievalKind;
    use querl_core::ports::Silent;

    struct Fixed(&'static str);

    impl Generator for Fixed {
        fn generate(&self, rows: &[DatasetRow], _: usize, each: &mut Each<'_>) -> anyhow::Result<()> {
            let generation = |row_index| {
                let text = self.0.into();
                let response = PolicyResponse { row_index, sample_index: 0, text, n_tokens: 2, truncated: false };
                Generation { response, latency_ms: Some(12.0) }
            };
            each((0..rows.len()).map(generation).collect())
        }
    }

    fn evaluate(system: &System<'_>) -> Vec<EvalRecord> {
        evaluated(system).records
    }

    fn evaluated(system: &System<'_>) -> Evaluated {
        let baselines =
            Baselines::new(vec![validated("a", Ok("poor")), validated("b", Err("no answer"))], RetrievalKind::Embedded);
        let rows = [dataset_row("a"), dataset_row("b")];
        let (columns, scorer) = (RowColumns::default(), Shop::default().scorer());
        let evaluation = Evaluation { rows: &rows, columns: &columns, baselines: &baselines, scorer: &scorer };
        evaluate_system(system, &evaluation, &Silent).unwrap()
    }

    fn rl(generator: &Fixed) -> System<'_> {
        System::Model { name: "rl", generator, reading: ResponseReading::Parsed }
    }

    #[test]
    fn a_pseudo_answer_is_searched_as_it_is_without_its_thinking() {
        let generator = Fixed("<think>which fish?</think>\n Fish oil, daily. ");
        let system = System::Model { name: "hyde", generator: &generator, reading: ResponseReading::Verbatim };
        let records = evaluate(&system);
        assert_eq!(records[0].outcome.as_ref().unwrap().candidate.rewrite, "Fish oil, daily.");
        let garbage = System::Model { name: "hyde", generator: &Fixed("garbage"), reading: ResponseReading::Verbatim };
        assert_eq!(evaluate(&garbage)[0].outcome.as_ref().unwrap().candidate.rewrite, "garbage");
    }

    #[test]
    fn a_model_is_compared_with_the_teacher_where_there_is_one() {
        let records = evaluate(&rl(&Fixed("good")));
        let (first, second) = (records[0].outcome.as_ref().unwrap(), records[1].outcome.as_ref().unwrap());
        assert_eq!((first.win, first.latency_ms, first.cost), (Some(1.0), Some(12.0), None));
        assert_eq!(first.reward.as_ref().unwrap().total, 0.7);
        assert_eq!((second.win, &second.reward), (None, &None));
        let unscored = evaluated(&rl(&Fixed("good"))).unscored;
        assert_eq!(unscored, [("baseline_missing".to_owned(), 1)].into());
        assert_eq!(second.candidate.hits().len(), 1);
        assert!(matches!(second.candidate.judgement, Judgement::Scored { .. }));
    }

    #[test]
    fn teacher_keeps_cost_and_latency_and_its_failures() {
        let records = evaluate(&System::Teacher);
        let first = records[0].outcome.as_ref().unwrap();
        assert_eq!((first.win, first.latency_ms, first.cost), (None, Some(700.0), Some(0.01)));
        assert_eq!(records[1].outcome.as_ref().unwrap_err().code, "teacher_failed");
    }

    #[test]
    fn answers_whose_retrieval_or_judgement_failed_are_counted() {
        let of = |text| n_failed(&evaluate(&rl(&Fixed(text))));
        assert_eq!((of("good"), of("broken"), of("unjudgeable")), (0, 2, 2));
        assert_eq!(n_failed(&evaluate(&System::Teacher)), 0, "a teacher that failed is asked by another stage");
    }

    #[test]
    fn raw_query_is_its_own_rewrite() {
        let records = evaluate(&System::Raw);
        let first = records[0].outcome.as_ref().unwrap();
        assert_eq!((first.candidate.rewrite.as_str(), first.latency_ms, first.cost), ("query a", None, Some(0.0)));
        let mut row = dataset_row("a");
        row.metadata.query.history_summary = "asked for fish oil".into();
        let answer = known(&System::WithHistory, &row, &Baselines::default()).unwrap();
        assert_eq!((answer.written.rewrite.as_str(), answer.cost), ("query a asked for fish oil", Some(0.0)));
        row.metadata.query.expansion = Some("oil capsules".into());
        let expanded = known(&System::Expanded, &row, &Baselines::default()).unwrap();
        assert_eq!(expanded.written.rewrite, "oil capsules");
        let with_history = known(&System::WithHistory, &row, &Baselines::default()).unwrap();
        assert_eq!(with_history.written.rewrite, answer.written.rewrite);
    }
}
