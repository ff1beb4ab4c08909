//! The terminal table and the HTML page.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use querl_core::records::{EvalRecord, Rejection, Reward, RewardComponent, SampleCounts, SecondHits, Split};
use querl_eval::{
    EvalOptions, Evaluation, FunnelStep, Lookups, Metric, ReportInput, RunFacts, ServiceName, StageTiming, evaluate,
    evaluate_seeds, report_html, seeds_table, table,
};
use serde_json::{Value, json};
use support::{answer, facts, hit, invented_metrics, invented_records, record};

const OPTIONS: EvalOptions = EvalOptions { split: Split::Test, seed: 42, n_resamples: 200, lookups: Lookups::Made };

fn page(records: &[EvalRecord], metrics: &[Value], n_examples: usize) -> String {
    page_of(&facts(), records, metrics, n_examples)
}

fn page_of(facts: &RunFacts, records: &[EvalRecord], metrics: &[Value], n_examples: usize) -> String {
    page_with(facts, &evaluate(records, &OPTIONS).unwrap(), records, metrics, n_examples)
}

fn page_with(
    facts: &RunFacts,
    evaluation: &Evaluation,
    records: &[EvalRecord],
    metrics: &[Value],
    n_examples: usize,
) -> String {
    let parts = vec![("top1_below_threshold".to_owned(), 7)];
    report_html(&ReportInput {
        facts,
        evaluation,
        records,
        metrics,
        funnel: &[FunnelStep { label: "kept by the filters".to_owned(), n: 431, parts }],
        timings: &[StageTiming { stage: "sft".to_owned(), seconds: 88.4 }],
        calls: &[],
        n_examples,
    })
    .unwrap()
}

#[test]
fn table_is_aligned_narrow_and_names_stand_ins() {
    let evaluation = evaluate(&invented_records(40), &OPTIONS).unwrap();
    insta::assert_snapshot!(table(&evaluation, &facts()));
}

#[test]
fn a_metric_that_is_left_out_has_no_column() {
    let has_win_rate = |evaluation: &Evaluation| table(evaluation, &facts()).contains("win rate");
    let evaluation = evaluate(&invented_records(6), &OPTIONS).unwrap();
    assert!(has_win_rate(&evaluation) && !has_win_rate(&evaluation.without(Metric::WinRate)));
}

#[test]
fn table_without_stand_ins_and_judge_names_neither() {
    let real = RunFacts { teacher: ServiceName::from_port_name("gpt-5"), judge: None, ..facts() };
    let text = table(&evaluate(&invented_records(6), &OPTIONS).unwrap(), &real);
    assert!(text.contains("teacher gpt-5 · judge none") && !text.contains("stand-in"), "{text}");
}

#[test]
fn table_and_page_show_notes_about_plugins() {
    let note = "reward plugin `brevity` changed within this run, from 0.1.0 to 0.2.0";
    let noted = RunFacts { plugin_notes: vec![note.to_owned()], ..facts() };
    let (records, evaluation) = (invented_records(6), evaluate(&invented_records(6), &OPTIONS).unwrap());
    assert!(table(&evaluation, &noted).contains(&format!("\n{note}\n")));
    let page = page_with(&noted, &evaluation, &records, &[], 0);
    assert!(page.contains("<dd>reward reward-competition 0.1.0, weight 1</dd>"), "{page}");
    assert!(page.contains(&format!("<p>{note}.</p>")), "{page}");
}

/// Records with a second retriever and samples.
fn compared_records(n: usize) -> Vec<EvalRecord> {
    let mut records = invented_records(n);
    for record in &mut records {
        let gold = record.query.gold_ids.clone();
        if let Ok(answer) = &mut record.outcome {
            answer.second_retrieval = Some(SecondHits { retriever: "lexical".into(), ids: gold });
            answer.new_gold_terms = Some(0.25);
            answer.samples = (record.system == "rl").then_some(SampleCounts { n: 4, n_gold_first: 1 });
        }
    }
    records
}

#[test]
fn table_and_page_begin_with_the_verdict_and_show_the_comparisons() {
    let records = compared_records(40);
    let text = table(&evaluate(&records, &OPTIONS).unwrap(), &facts());
    let verdict = text.find("By top-1 %, RL is better than the raw queries (+").unwrap();
    assert!(verdict < text.find("\nsystem ").unwrap(), "{text}");
    for line in text.lines().skip(1).take_while(|line| !line.starts_with("the judge")) {
        assert!(line.chars().count() <= 120, "{line}");
    }
    let titles = [
        "\non a second retriever (lexical), not used in training\n",
        "\nlength and words of the rewrites\n",
        "\npaired differences where both rewrites have about the same length\n",
        "\na gold passage first with at least one of k samples\npass@k %  1 ",
    ];
    titles.iter().for_each(|title| assert!(text.contains(title), "{title} in {text}"));
    let html = page(&records, &[], 2);
    assert!(html.find("<p class=\"verdict\">By top-1 %, RL is ").unwrap() < html.find("<dl class=\"facts\">").unwrap());
    for part in ["<h2>On a second retriever</h2>", "<h2>Length and words</h2>", "<h2>pass@k</h2>", "pass@2 %"] {
        assert!(html.contains(part), "{part}");
    }
}

/// Symptom: with long pair names, the column `queries` was in a block without a title.
#[test]
fn a_wide_table_of_equal_lengths_has_its_title_again() {
    let mut records = compared_records(40);
    // The hits of the raw queries for rewrites of the length of RL's: `rl - with_history` has the widest difference, +40.0 [+22.4, +57.5]*.
    let more: Vec<EvalRecord> = records
        .iter()
        .filter(|record| record.system == "raw")
        .map(|raw| {
            let is_rl = |record: &&EvalRecord| record.system == "rl" && record.query.row == raw.query.row;
            let rl = records.iter().find(is_rl).unwrap().outcome.as_ref().unwrap();
            let mut record = EvalRecord { system: "with_history".into(), ..raw.clone() };
            record.outcome.as_mut().unwrap().candidate.rewrite.clone_from(&rl.candidate.rewrite);
            record
        })
        .collect();
    records.extend(more);
    let text = table(&evaluate(&records, &OPTIONS).unwrap(), &facts());
    let title = "\n\npaired differences where both rewrites have about the same length, continued\npair ";
    assert!(text.contains(title), "{text}");
}

#[test]
fn page_without_a_second_retriever_and_samples_has_no_tables_of_them() {
    let html = page(&invented_records(6), &[], 2);
    assert!(!html.contains("<h2>On a second retriever</h2>") && !html.contains("<h2>pass@k</h2>"));
    assert!(html.contains("No second retriever was used"));
}

#[test]
fn seeds_table_shows_each_run_below_the_pooled_differences() {
    let runs = [10, 12, 14].map(invented_records);
    let text = seeds_table(&evaluate_seeds(&runs, &OPTIONS).unwrap(), &facts(), &["they differ".to_owned()]);
    assert!(
        text.starts_with("they differ\n3 runs, each query averaged over them; intervals are for new queries"),
        "{text}"
    );
    assert!(text.contains("\nrl - sft, 1  ") && text.contains("\nrl - sft, 2  "), "{text}");
    assert!(
        text.contains("\n  95% interval over the runs  [")
            && text.contains("that over the runs (Student's t; last table)"),
        "{text}"
    );
}

/// Regression: the page called a difference of one group better, and the table did not.
#[test]
fn the_page_does_not_call_a_difference_of_one_group_better() {
    let of = |system, is_right: bool| {
        let found =
            move |row: usize| hit(if is_right { format!("p{row:04}") } else { "p9999".into() }.as_str(), 0.5, 1);
        (2..42).map(move |row| record(system, row, Ok(answer("改写", vec![found(row)]))))
    };
    let mut records: Vec<EvalRecord> = of("rl", true).chain(of("teacher", false)).collect();
    let said = |records: &[EvalRecord]| {
        page(records, &[], 1).contains("RL against Teacher, top-1 %: +100.0 [+100.0, +100.0], better")
    };
    assert!(said(&records));
    records.iter_mut().filter(|record| record.query.row > 3).for_each(|record| record.query.gold_ids.clear());
    assert!(!said(&records));
}

#[test]
fn page_makes_no_requests_and_runs_no_script() {
    let html = page(&invented_records(40), &invented_metrics(60), 20);
    for forbidden in ["http://", "https://", "<script", "@import", "url(", "src=", "NaN", "inf,"] {
        assert!(!html.contains(forbidden), "page contains {forbidden}");
    }
    assert!(html.contains("default-src &#x27;none&#x27;") || html.contains("default-src 'none'"));
    assert!(html.contains("prefers-color-scheme: dark") && html.contains("Noto Sans CJK SC"));
    assert!(html.contains("the judge (rubric) is a stand-in") && html.contains("the teacher (recorded) is a stand-in"));
}

#[test]
fn external_texts_are_escaped() {
    let evil = "<img src=x onerror=alert(1)>\"'&\u{1b}[31m\u{202e}";
    let mut made = answer(evil, vec![hit("p0002", 0.5, 1)]);
    made.candidate.retrieval.as_mut().unwrap().as_mut().unwrap()[0].text = evil.to_owned();
    let mut first = record("rl", 2, Ok(made));
    let mut second = record("teacher", 2, Err(Rejection::new(evil, evil)));
    for record in [&mut first, &mut second] {
        record.query.original_query = evil.into();
        record.query.user_profile = evil.into();
        record.query.history_summary = evil.into();
    }
    let metrics = [json!({"stage": evil, "step": 1, evil: 2.0})];
    let html = page(&[first, second], &metrics, 20);
    assert!(!html.contains("<img") && !html.contains('\u{1b}') && !html.contains('\u{202e}'));
    assert!(html.contains("&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;"));
}

#[test]
fn a_plugin_cannot_write_to_the_terminal_through_its_codes() {
    let rejection = Rejection::new("x\nrl 99.9\u{1b}[2J", "");
    let text = table(&evaluate(&[record("sft", 2, Err(rejection))], &OPTIONS).unwrap(), &facts());
    assert!(text.contains("failed: sft on 1 of 1 (x rl 99.9\u{fffd}[2J 1)"), "{text}");
}

#[test]
fn half_of_the_examples_are_wins_and_the_page_explains_the_selection() {
    let html = page(&invented_records(96), &[], 20);
    assert_eq!(html.matches("<article").count(), 20);
    assert_eq!(html.matches("<span class=\"tag win\">").count(), 10);
    assert!(html.contains("Shown are 10 of the 58 queries where RL beats the teacher and 10 of the other 38"));
    assert_eq!(html, page(&invented_records(96), &[], 20));
}

/// Symptom: the page called queries wins by scores that its tables leave out, and drew their win rate.
#[test]
fn without_the_win_rate_examples_are_chosen_by_gold_rank_and_its_curve_is_not_drawn() {
    let of = |system: &str, row: usize, is_gold_first: bool, win: Option<f64>| {
        let gold = format!("p{row:04}");
        let ids = if is_gold_first { [gold.as_str(), "p9999"] } else { ["p9999", gold.as_str()] };
        let mut made = answer("改写", (1..).zip(ids).map(|(rank, id)| hit(id, 0.5, rank)).collect());
        made.win = win;
        record(system, row, Ok(made))
    };
    let missing = Rejection::by_host("teacher_failed", "not recorded".to_owned());
    let records = [
        of("rl", 2, true, Some(0.0)),
        of("teacher", 2, false, None),
        of("rl", 3, false, Some(1.0)),
        of("teacher", 3, true, None),
        of("rl", 4, true, None),
        record("teacher", 4, Err(missing)),
    ];
    let metrics = [json!({"stage": "rl", "step": 1, "avg_reward": 0.1, "win_rate": 0.5, "val/win_rate": 0.5})];
    let evaluation = evaluate(&records, &OPTIONS).unwrap().without(Metric::WinRate);
    let html = page_with(&facts(), &evaluation, &records, &metrics, 20);
    assert_eq!(html.matches("<span class=\"tag win\">RL ranks gold higher</span>").count(), 1);
    let choice =
        "Shown are 1 of the 1 queries where RL ranks the gold passage higher than the teacher and 2 of the other 2, ";
    assert!(html.contains(choice), "{html}");
    for left_out in ["RL beats", "Win rate against the teacher", "win_rate"] {
        assert!(!html.contains(left_out), "{left_out}");
    }
    let note = "failed: teacher on 1 of 3 (teacher_failed 1); misses for top-1 and MRR, left out of the other means; its pairs leave out \
                the 1 without a rewrite";
    assert!(html.contains(note) && table(&evaluation, &facts()).contains(note));
}

#[test]
fn an_outdated_evaluation_is_said_first_in_table_and_page_and_is_in_the_json() {
    let (records, outdated) = (invented_records(6), "best of rl changed after the evaluation; run `querl eval` again");
    let mut seeds = evaluate_seeds(std::slice::from_ref(&records), &OPTIONS).unwrap();
    seeds.pooled.outdated.push(outdated.to_owned());
    assert!(table(&seeds.pooled, &facts()).starts_with(&format!("{outdated}\nfivedoctors ")));
    assert!(
        seeds_table(&seeds, &facts(), &[]).starts_with(&format!("{outdated}\n1 runs, each query averaged over them"))
    );
    let html = page_with(&facts(), &seeds.pooled, &records, &[], 0);
    let at = |text: &str| html.find(text).unwrap();
    assert!(at("best of rl changed after the evaluation; run ") < at("<p class=\"verdict\">"));
    assert_eq!(serde_json::to_value(&seeds.pooled).unwrap()["outdated"], json!([outdated]));
}

#[test]
fn few_queries_are_all_shown() {
    assert_eq!(page(&invented_records(7), &[], 20).matches("<article").count(), 7);
    assert_eq!(page(&invented_records(7), &[], 0).matches("<article").count(), 0);
}

#[test]
fn curves_show_their_last_value_and_missing_ones_are_named() {
    let metrics = [
        json!({"stage": "rl", "step": 1, "avg_reward": 0.1, "actor/pg_loss": null}),
        json!({"stage": "rl", "step": 2, "avg_reward": 0.9}),
        json!({"stage": "rl", "step": 2, "avg_reward": 0.25, "note": "resumed here"}),
        json!({"stage": "rl", "step": 2, "timing_s/step": 3.5}),
        json!("not a row"),
    ];
    let html = page(&invented_records(6), &metrics, 2);
    assert!(html.contains("rollouts <b>0.250</b>"));
    assert!(
        html.contains(
            "Not recorded in this run: Win rate against the teacher, Top-1 score, KL divergence, Policy loss"
        )
    );
    assert!(html.contains("timing_s&#x2f;step"));
}

/// Regression: a win rate of 0.5 was plotted for a run without retrieval.
#[test]
fn a_run_without_retrieval_has_no_retrieval_curves() {
    let metrics = [json!({"stage": "rl", "step": 1, "avg_reward": 0.1, "win_rate": 0.5, "val/avg_top1": 0.0})];
    let drawn = "rollouts <b>0.500</b>";
    let html = page(&invented_records(6), &metrics, 0);
    assert!(html.contains(drawn), "{html}");
    let none = RunFacts { retrieval: ServiceName::from_port_name("none"), ..facts() };
    let html = page_of(&none, &invented_records(6), &metrics, 0);
    assert!(!html.contains(drawn) && html.contains("Not recorded in this run: Win rate against the teacher, Top-1"));
}

/// Symptom: a score with 200 components made a report of 18 MB.
#[test]
fn of_many_names_the_most_used_are_shown_and_the_others_counted() {
    let of = |row: usize, names: std::ops::Range<usize>| {
        let mut answered = answer("改写", Vec::new());
        let component = |index: usize| RewardComponent { name: format!("part_{index:03}"), value: 0.5 };
        answered.reward = Some(Reward { total: 0.5, components: names.map(component).collect() });
        record("rl", row, Ok(answered))
    };
    // Two answers have the last 64 names.
    let records = [of(2, 0..256), of(3, 192..256)];
    let metrics: Vec<Value> = (0..450)
        .flat_map(|index| {
            let n_steps = if index < 50 { 1 } else { 2 };
            (0..n_steps).map(move |step| json!({"stage": "rl", "step": step, (format!("reward/part_{index:03}")): 0.5}))
        })
        .collect();
    let html = page(&records, &metrics, 0);
    assert!(html.contains("The most used parts; 192 more are not shown."));
    let row = |index: usize| html.contains(&format!("<th scope=\"row\">part_{index:03}<"));
    assert!(row(192) && row(255) && !row(0) && !row(191));
    assert!(html.contains("Other training metrics (400, the most recorded; 50 more are in metrics.jsonl)"));
    assert!(html.contains("reward&#x2f;part_050") && !html.contains("reward&#x2f;part_049"));
    assert!(html.len() < 1_000_000, "{} bytes", html.len());
}

#[test]
fn failed_answers_show_their_reason_in_place_of_hits() {
    let rejection = Rejection::new("no_rewrite", "the answer was empty");
    let html = page(&[record("sft", 2, Err(rejection))], &[], 20);
    assert!(html.contains("failed: no_rewrite: the answer was empty"));
    assert!(html.contains("failed: sft on 1 of 1 (no_rewrite 1)"));
    assert!(html.contains("only 1 group of queries"));
}
