//! `querl plugin replay` on handwritten episodes.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{CommandOutput, Project, repository};

/// An episode without judgements. `policy`, `teacher`: score of the only hit; `None` if retrieval failed.
fn episode(id: &str, policy: Option<f64>, teacher: f64, outcome: Option<Value>) -> String {
    let retrieval = |score: Option<f64>| match score {
        Some(score) => json!({ "hits": [{ "reranker_score": score }] }),
        None => json!({ "failed": { "kind": "timeout", "message": "late" } }),
    };
    let mut line = json!({ "format": 2, "episode": {
        "id": id,
        "query": "一天几粒啊",
        "policy": { "rewrite": "深海鱼油 食用方法", "retrieval": retrieval(policy) },
        "baseline": { "rewrite": "鱼油 每日食用量", "retrieval": retrieval(Some(teacher)) },
    }});
    if let Some(outcome) = outcome {
        line["outcome"] = outcome;
    }
    format!("{line}\n")
}

fn scored(total: f64) -> Option<Value> {
    Some(json!({ "scored": { "total": total, "components": [{ "name": "win", "value": 0.5 }] } }))
}

/// Five episodes: better than the teacher, worse, equal, failed before the plugins were called, and one without an outcome.
fn project() -> Project {
    let project = Project::new();
    let rejected = Some(json!({ "rejected": { "code": "policy_retrieval_failed" } }));
    let lines = [
        episode("better", Some(0.9), 0.5, scored(0.7)),
        episode("worse", Some(0.5), 0.6, scored(0.1)),
        episode("drawn", Some(0.6), 0.6, scored(0.0)),
        episode("failed", None, 0.6, rejected),
        episode("new", Some(0.9), 0.5, None),
    ];
    std::fs::create_dir(project.path("run")).unwrap();
    project.write("run/episodes.jsonl", &lines.concat());
    project
}

fn replay(project: &Project, episodes: &str, plugin: &str, more: &[&str]) -> CommandOutput {
    let plugin = repository().join(plugin);
    let args = ["plugin", "replay", episodes, "--plugin", plugin.to_str().unwrap()];
    project.querl(&[&args, more].concat())
}

#[test]
fn replay_says_what_a_plugin_would_have_changed_in_text_json_and_html() {
    let project = project();
    let text = replay(&project, "run", "plugins/reward-competition", &["--html", "pages/replay.html"]).ok().stdout;
    assert!(text.starts_with("before  recorded outcomes\nafter   reward-competition "), "{text}");
    assert!(text.contains("\nchanges of sign: 1 (won to lost 1)\n"), "{text}");
    assert!(project.read("pages/replay.html").contains("深海鱼油 食用方法"));

    let json = replay(&project, "run/episodes.jsonl", "plugins/reward-competition", &["--json"]).ok().stdout;
    let found: Value = serde_json::from_str(&json).unwrap();
    let counts = &found["counts"];
    assert_eq!((&counts["n_episodes"], &counts["n_scored_by_both"]), (&json!(5), &json!(3)));
    assert_eq!(counts["rejected_by_both"], json!({ "policy_retrieval_failed": 1 }));
    assert_eq!(counts["n_scored_without_record"], json!(1));
    // (0.4 * tanh(3 * -0.1) + 0.25 * -0.3) / 0.65
    let flip = &found["flips"][0];
    assert_eq!((&flip["id"], &flip["line"]), (&json!("worse"), &json!(2)));
    assert!((flip["after"].as_f64().unwrap() + 0.294_654).abs() < 1e-6, "{flip}");
    assert_eq!(found["signs"]["after"], json!({ "won": 1, "drew": 1, "lost": 1 }));
}

/// Symptom: `watch` and `plugin replay` showed wins by scores that the report leaves out.
#[test]
fn wins_by_scores_that_count_words_are_not_shown_or_have_a_note() {
    let project = Project::new();
    let lexicon = format!("lexicon = \"{}/examples/fivedoctors/lexicon.json\"\n", repository().display());
    project.edit(&lexicon, "").edit("kind = \"rubric\"\nsample_rate = 0.5", "kind = \"none\"");
    project.querl(&["run", "querl.toml", "--to", "rewrite"]).ok();
    project.write("run/episodes.jsonl", &episode("better", Some(0.9), 0.5, scored(0.7)));
    let replayed = replay(&project, "run", "plugins/reward-competition", &["--json"]).ok().stdout;
    let found: Value = serde_json::from_str(&replayed).unwrap();
    assert!(found["notes"].to_string().contains("\"retrieval quality is of scores of hits, which "), "{found}");
    let line = json!({ "stage": "rl", "step": 1, "avg_reward": 0.1, "win_rate": 0.5 });
    project.write("run/metrics.jsonl", &format!("{line}\n"));
    let watched = project.querl(&["watch", "run", "--once"]).ok().stdout;
    assert!(watched.contains("reward 0.1") && !watched.contains("win rate"), "{watched}");
}

/// Regression: an unreadable ledger was an error, although the command needs it for a warning only.
#[test]
fn a_damaged_ledger_is_a_warning() {
    let project = project();
    project.write("run/stages.json", "{");
    let said = replay(&project, "run", "plugins/reward-competition", &[]).ok();
    let warning = "warning: the logs are not compared with those that the stages wrote: ";
    assert!(said.stderr.contains(warning) && said.stderr.contains("stages.json: "), "{said:#?}");
}

#[test]
fn a_plugin_against_itself_changes_nothing_and_another_setting_does() {
    let project = project();
    let against = repository().join("plugins/reward-competition");
    let against = ["--json", "--against", against.to_str().unwrap()];
    let compare = |more: &[&str]| -> Value {
        let said = replay(&project, "run", "plugins/reward-competition", &[&against, more].concat()).ok();
        serde_json::from_str(&said.stdout).unwrap()
    };
    let same = compare(&[]);
    assert_eq!((&same["change"]["n_changed"], &same["counts"]["n_scored_by_both"]), (&json!(0), &json!(4)));
    let harder = compare(&["--settings", "loss=-1"]);
    assert_eq!((&harder["change"]["n_changed"], &harder["after"]["settings"]), (&json!(1), &json!({ "loss": -1 })));
    let both = compare(&["--settings", "loss=-1", "--against-settings", "loss=-1.0"]);
    assert_eq!(both["change"]["n_changed"], json!(0));
}

/// A group of four samples. The run dropped the first, whose retrieval failed; the plugin rejected the last, and used it in the comparison of
/// the others.
fn group() -> Project {
    let project = Project::new();
    let (left_out, rejected) = (
        json!({ "rejected": { "code": "policy_retrieval_failed", "detail": "late", "by": "host" } }),
        json!({ "rejected": { "code": "no_style", "by": "plugin" } }),
    );
    let score = |total: f64| json!({ "scored": { "total": total } });
    let samples = [
        ("深海鱼油 用量", left_out),
        ("深海鱼油 用量", score(0.0)),
        ("钙片 孕妇", score(-1.0)),
        ("钙片 孕妇", rejected),
    ];
    let line = |(index, (rewrite, outcome)): (usize, (&str, Value))| {
        let episode = json!({ "id": format!("g/{index}"), "query": "一天几粒啊", "policy": { "rewrite": rewrite } });
        format!("{}\n", json!({ "format": 3, "episode": episode, "outcome": outcome }))
    };
    project.write("group.jsonl", &samples.into_iter().enumerate().map(line).collect::<String>());
    project
}

/// Regression: episodes that the run had dropped changed the scores of their group.
#[test]
fn a_group_is_scored_without_the_episodes_that_the_run_left_out() {
    let project = group();
    let diversity = "plugins/reward-diversity";
    let compare = |more: &[&str]| -> Value {
        let said = replay(&project, "group.jsonl", diversity, &[&["--json"], more].concat()).ok();
        serde_json::from_str(&said.stdout).unwrap()
    };
    let recorded = compare(&[]);
    assert_eq!((&recorded["counts"]["n_scored_by_both"], &recorded["change"]["n_changed"]), (&json!(2), &json!(0)));
    assert_eq!(recorded["counts"]["rejected_by_both"], json!({ "policy_retrieval_failed": 1 }));
    assert_eq!(recorded["counts"]["rejected_only_before"], json!({ "no_style": 1 }));
    let against = compare(&["--against", repository().join(diversity).to_str().unwrap()]);
    assert_eq!(against["counts"]["rejected_by_both"], json!({ "policy_retrieval_failed": 1 }));
    let said = replay(&project, "group.jsonl", diversity, &["--trace", "--json"]).ok();
    let traced: Value = serde_json::from_str(&said.stdout).unwrap();
    let expected = json!(["left out, policy_retrieval_failed", "0.000", "-1.000", "-1.000"]);
    assert_eq!(traced[0]["outcomes"], expected);
}

#[test]
fn what_cannot_be_replayed_is_one_sentence_with_a_remedy() {
    let project = project();
    project.write("empty.jsonl", "\n");
    project.write("old.jsonl", &episode("a", Some(0.5), 0.5, None).replace("\"format\":2", "\"format\":1"));
    for folder in ["bare", "begun"] {
        std::fs::create_dir(project.path(folder)).unwrap();
    }
    project.write("begun/config.resolved.toml", "");
    let competition = "plugins/reward-competition";
    for (episodes, plugin, more, expected) in [
        (
            "nowhere",
            competition,
            &[][..],
            "; run `querl run CONFIG` first, or name a file of episodes, one JSON object a line",
        ),
        ("bare", competition, &[], "bare: not a run's folder: it has no config.resolved.toml; "),
        ("begun", competition, &[], "begun/episodes.jsonl: there is no such file; the stage `rl` writes it"),
        ("empty.jsonl", competition, &[], "empty.jsonl: holds no episode; expected at least one line"),
        (
            "old.jsonl",
            competition,
            &[],
            "old.jsonl:1: `format` is 1; this querl reads 2 and 3: run the stage `rl` again",
        ),
        ("run", "plugins/filter-quality", &[], "it is a filter plugin; expected a reward plugin"),
        ("run", competition, &["--settings", "los=1"], "`los`"),
        ("run", competition, &["--settings", "loss"], "--settings `loss`: expected KEY=VALUE"),
    ] {
        let said = replay(&project, episodes, plugin, more);
        assert_eq!((said.code, said.stdout.as_str()), (Some(2), ""), "{said:#?}");
        let last = said.stderr.lines().last().unwrap();
        assert!(last.starts_with("error: ") && last.contains(expected), "{last}");
    }
}

#[test]
fn a_fault_of_the_plugin_names_the_episode() {
    let project = project();
    let lines: String = (0..100).map(|index| episode(&format!("e{index}"), Some(0.5), 0.5, None)).collect();
    project.write("episodes.jsonl", &(lines + &episode("broken", Some(0.5), 0.5, None).replace("一天几粒啊", "nan")));
    let said = replay(&project, "episodes.jsonl", "tests/guests/guest-nan", &["--html", "page.html"]);
    let last = said.stderr.lines().last().unwrap();
    assert_eq!(said.code, Some(1), "{said:#?}");
    assert!(last.contains("guest-nan") && last.contains("episode `broken`"), "{last}");
    assert!(!project.path("page.html").exists());
}
