//! `querl audit` on handwritten episodes.
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::dir_lock::DirLock;
use serde_json::{Value, json};
use support::Project;

const N_STEPS: usize = 40;
const BATCH: usize = 16;

fn query(step: usize, index: usize) -> usize {
    (step * BATCH + index) % 20
}

/// An episode. `is_found`: the first hit is the gold passage.
fn episode(step: usize, index: usize, rewrite: &str, is_found: bool, total: f64) -> String {
    let query = query(step, index);
    let hit = if is_found { format!("gold-{query}") } else { "other".to_owned() };
    let line = json!({
        "format": 3,
        "step": step,
        "episode": {
            "id": format!("step-{step:06}/q{query}/{index}"),
            "query": format!("问题{query}"),
            "gold_ids": [format!("gold-{query}")],
            "policy": { "rewrite": rewrite, "retrieval": { "hits": [{ "id": hit, "text": "", "reranker_score": 0.8 }] } },
        },
        "outcome": { "scored": { "total": total, "components": [] } },
    });
    format!("{line}\n")
}

/// A run whose policy returns the same text for an increasing share of queries, and is rewarded for it.
fn write_hacked(project: &Project, folder: &str) {
    let mut text = String::new();
    for step in 0..N_STEPS {
        for index in 0..BATCH {
            let is_constant = index < step * BATCH / N_STEPS;
            let plain = format!("产品{} 用法{}", query(step, index), step % 7);
            let rewrite = if is_constant { "深海鱼油 价格" } else { &plain };
            text += &episode(step, index, rewrite, !is_constant, if is_constant { 1.0 } else { 0.0 });
        }
    }
    std::fs::create_dir(project.path(folder)).unwrap();
    project.write(&format!("{folder}/episodes.jsonl"), &text);
}

/// A run whose reward is the score of the hits.
fn write_honest(project: &Project, folder: &str) {
    let mut text = String::new();
    for step in 0..N_STEPS {
        for index in 0..BATCH {
            let is_found = (index * 7 + step * 3) % BATCH < 6 + step * 8 / N_STEPS;
            let rewrite = format!("产品{} 用法{}", query(step, index), if is_found { 1 } else { 2 });
            text += &episode(step, index, &rewrite, is_found, if is_found { 1.0 } else { 0.0 });
        }
    }
    std::fs::create_dir(project.path(folder)).unwrap();
    project.write(&format!("{folder}/episodes.jsonl"), &text);
}

#[test]
fn a_constant_rewrite_is_named_in_text_json_page_and_exit_code() {
    let project = Project::new();
    write_hacked(&project, "run");
    let output = project.querl(&["audit", "run", "--page", "pages/audit.html"]).ok();
    assert!(output.stdout.contains("`深海鱼油 价格` was the rewrite of"), "{}", output.stdout);
    assert!(output.stdout.contains("\n  8. same_rewrite: "), "{}", output.stdout);
    assert!(output.stdout.ends_with(" signs of reward hacking\n"), "{}", output.stdout);
    assert!(output.stdout.contains("no second retriever: run/config.resolved.toml: no such file"), "{}", output.stdout);
    let legend = "), with their lines of episodes.jsonl\nhigh reward with low quality, ";
    assert!(output.stdout.contains(legend), "{}", output.stdout);
    let page = project.read("pages/audit.html");
    assert!(page.contains("深海鱼油 价格") && page.contains("<li>same_rewrite: "));

    let found = project.json(&["audit", "run", "--show", "3"]);
    let kinds: Vec<&Value> = found["signs"].as_array().unwrap().iter().map(|sign| &sign["kind"]).collect();
    assert!(kinds.contains(&&json!("reward_rises_quality_falls")), "{kinds:?}");
    assert!(kinds.contains(&&json!("same_rewrite")), "{kinds:?}");
    let worst = &found["suspicious"][0];
    assert_eq!((&worst["rewrite"], &worst["reward"]), (&json!("深海鱼油 价格"), &json!(1.0)), "{worst}");

    let said = project.querl(&["audit", "run", "--check"]);
    assert_eq!(said.code, Some(3), "{said:#?}");
    let last = said.stderr.lines().last().unwrap();
    assert!(last.contains("9 signs of reward hacking: reward_rises_quality_falls, "), "{last}");
    assert_eq!(last.matches("reward_follows_term").count(), 1, "two signs of one kind: {last}");
}

#[test]
fn an_honest_run_passes_the_check() {
    let project = Project::new();
    write_honest(&project, "run");
    let output = project.querl(&["audit", "run", "--check"]).ok();
    assert!(output.stdout.ends_with("no sign of reward hacking\n"), "{}", output.stdout);
}

#[test]
fn a_run_that_has_not_ended_is_named_as_one() {
    let project = Project::new();
    write_honest(&project, "run");
    let first_note = || project.json(&["audit", "run"])["notes"][0].as_str().unwrap().to_owned();
    project.write("run/stages.json", r#"{"format": 1, "stages": {"rl": {"inputs": {}, "finished": false}}}"#);
    assert!(first_note().starts_with("the stage `rl` was stopped before its end: "), "{}", first_note());
    let lock = DirLock::take(&project.path("run")).unwrap();
    let going = format!("the run is still going (process {}): the episodes up to now are audited", std::process::id());
    assert!(first_note().starts_with(&going), "{}", first_note());
    // The lock belongs to a later stage: the episodes are complete.
    project.write("run/stages.json", r#"{"format": 1, "stages": {"rl": {"inputs": {}, "finished": true}}}"#);
    assert!(first_note().starts_with("no second retriever: "), "{}", first_note());
    drop(lock);
}

/// Regression: an unreadable ledger was an error, although the command needs it for a note only.
#[test]
fn a_damaged_ledger_is_a_note() {
    let project = Project::new();
    write_honest(&project, "run");
    for ledger in ["{", r#"{"format": 99, "stages": {}}"#] {
        project.write("run/stages.json", ledger);
        let notes = project.json(&["audit", "run"])["notes"].to_string();
        assert!(notes.contains("the logs are not compared with those that the stages wrote: "), "{notes}");
        assert!(notes.contains("stages.json: "), "{notes}");
    }
}

#[test]
fn a_check_of_too_few_steps_fails() {
    let project = Project::new();
    let text: String = (0..BATCH).map(|index| episode(0, index, "产品", true, 1.0)).collect();
    std::fs::create_dir(project.path("run")).unwrap();
    project.write("run/episodes.jsonl", &text);
    project.querl(&["audit", "run"]).ok();
    let said = project.querl(&["audit", "run", "--check"]);
    assert_eq!(said.code, Some(3), "{said:#?}");
    assert!(said.stderr.contains("run: not enough steps to audit: scored rollouts of 1 steps"), "{said:#?}");
}

#[test]
fn what_cannot_be_audited_is_one_sentence_with_a_remedy() {
    let project = Project::new();
    for folder in ["begun", "empty"] {
        std::fs::create_dir(project.path(folder)).unwrap();
    }
    project.write("begun/config.resolved.toml", "");
    project.write("empty/episodes.jsonl", "\n");
    for (run, expected) in [
        ("begun", "begun/episodes.jsonl: there is no such file; the stage `rl` writes it"),
        ("empty", "empty/episodes.jsonl: holds no episode; run the stage `rl` again"),
    ] {
        assert_eq!(project.refusal(&["audit", run], 2), expected);
    }
    let missing = project.refusal(&["audit", "nowhere"], 2);
    assert!(missing.starts_with("nowhere: not a run's folder: there is no such folder; expected "), "{missing}");
}
