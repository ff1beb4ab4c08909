#![allow(clippy::unwrap_used)]

use super::*;

fn one(line: &str) -> Result<GoldenCase, String> {
    parse(&line.replace('\n', " "), "golden/x.jsonl").remove(0).map_err(|error| error.to_string())
}

#[test]
fn a_reward_case_by_hand_needs_little() {
    let case = one(r#"{"name": "赢", "settings": {"win": 1, "loss": -0.5, "terms": ["胶原"]},
        "episode": {"query": "胶原咋吃", "policy": {"rewrite": "胶原蛋白肽 用法",
            "retrieval": {"hits": [{"reranker_score": 0.9}]}},
                    "baseline": {"rewrite": "胶原"}},
        "expect": {"total": 0.5}}"#)
    .unwrap();
    assert_eq!((case.name.as_str(), case.origin.as_str()), ("赢", "golden/x.jsonl:1"));
    assert_eq!(case.settings["win"], toml::Value::Integer(1));
    let GoldenBody::Reward { episode, expect } = case.body else { panic!("{case:?}") };
    assert_eq!((episode.id.as_str(), episode.policy.retrieval.as_ref().unwrap()[0].rank), ("赢", 1));
    assert_eq!(expect, ScoreExpected::Score { total: 0.5, tolerance: 1e-9, components: BTreeMap::new() });
}

#[test]
fn a_filter_case_counts_ids_and_ranks() {
    let case = one(r#"{"name": "重复", "samples": [{"original_query": "a", "rewritten_query": "b",
            "hits": [{"reranker_score": 1}]},
        {"original_query": "a", "rewritten_query": "b"}], "expect": ["keep", {"drop": "duplicate"}]}"#)
    .unwrap();
    let GoldenBody::Filter { samples, expect } = case.body else { panic!("{case:?}") };
    assert_eq!((samples[1].id.as_str(), samples[0].hits[0].rank), ("2", 1));
    assert_eq!(expect, [VerdictExpected::Keep, VerdictExpected::Drop("duplicate".into())]);
}

#[test]
fn prompt_and_style_cases_are_read() {
    let kinds = [
        r#"{"name": "a", "task": "judge", "input": {"query": "a", "rewrite": "b"}, "expect": {"contains": ["b"]}}"#,
        r#"{"name": "a", "task": "policy_rewrite", "input": {"query": "a"}, "expect": {"messages": [{"role": "user",
            "content": "a"}]}}"#,
        r#"{"name": "a", "parse_rewrite": "“胶原”", "expect": {"rewrite": "胶原"}}"#,
        r#"{"name": "a", "parse_judgement": "好", "expect": {"rejected": "no_score"}}"#,
        r#"{"name": "a", "dialogue": {"turns": [{"role": "assistant", "content": "在"}]}, "style_model": null,
            "expect": {"rejected": "x"}}"#,
        r#"{"name": "a", "dialogue": {"turns": [{"role": "assistant", "content": "在"}]},
            "style_model": [{"label": "售前", "probability": 1}],
            "expect": {"total": 1, "tolerance": 0.1}}"#,
    ];
    let kinds: Vec<_> = kinds.iter().map(|line| one(line).unwrap().body.kind().name()).collect();
    assert_eq!(kinds, ["prompt", "prompt", "prompt", "prompt", "style-scorer", "style-scorer"]);
}

#[test]
fn bad_lines_name_file_line_and_what_was_expected() {
    let episode = r#""episode": {"query": "a", "policy": {"rewrite": "b"}, "baseline": {"rewrite": "c"}}"#;
    for (line, expected) in [
        ("{", "not a JSON object: "),
        (r#"{"episode": {}}"#, "`name` is missing"),
        (r#"{"name": " ", "task": "judge"}"#, "`name` is blank"),
        (r#"{"name": "a"}"#, "expected one of `episode`, `samples`, `task`"),
        (&format!(r#"{{"name": "a", {episode}, "expect": {{"total": 1}}, "note": "x"}}"#), "unknown key `note`"),
        (&format!(r#"{{"name": "a", {episode}, "expect": {{"totl": 1}}}}"#), "unknown field `totl`"),
        (
            &format!(r#"{{"name": "a", {episode}, "expect": {{"total": 1, "rejected": "x"}}}}"#),
            "expected either `total`",
        ),
        (
            &format!(r#"{{"name": "a", {episode}, "expect": {{"total": 1, "tolerance": -1}}}}"#),
            "`tolerance` is -1; expected 0",
        ),
        (
            r#"{"name": "a", "episode": {"query": "a", "policy": {"rewrite": "b",
            "retrieval": {"hits": [{"reranker_score": 2}]}},
                "baseline": {"rewrite": "c"}}, "expect": {"total": 1}}"#,
            "`reranker_score` of policy hit 1 is 2; expected 0 to 1",
        ),
        (
            r#"{"name": "a", "episode": {"query": "a", "policy": {"rewrite": "b",
            "retrieval": {"hits": [{"reranker_score": 1, "txt": "x"}]}},
                "baseline": {"rewrite": "c"}}, "expect": {"total": 1}}"#,
            "unknown key `txt` in `episode.policy.retrieval.hits 1`",
        ),
        (r#"{"name": "a", "samples": [], "expect": ["keep"]}"#, "`expect` has 1 verdicts for 0 samples"),
        (
            r#"{"name": "a", "task": "rewrite", "input": {"query": "a"}, "expect": {}}"#,
            "`task`: unknown variant `rewrite`",
        ),
        (
            r#"{"name": "a", "task": "judge", "input": {"query": "a"}, "expect": {}}"#,
            "`input.rewrite` is there for the task `judge`",
        ),
        (r#"{"name": "a", "parse_rewrite": "a", "expect": {}}"#, "expected either `rewrite` or `rejected`"),
        (
            r#"{"name": "a", "dialogue": {"turns": [{"role": "user", "content": "在"}]}, "expect": {"total": 1}}"#,
            "the last turn of `dialogue` is not the assistant's",
        ),
    ] {
        let error = one(line).unwrap_err();
        assert!(error.starts_with("golden/x.jsonl:1: ") && error.contains(expected), "{error}");
    }
}

#[test]
fn a_bad_line_does_not_hide_the_others() {
    let good = r#"{"name": "a", "parse_rewrite": "a", "expect": {"rewrite": "a"}}"#;
    let cases = parse(&format!("{good}\n\n{{\n{good}\n"), "x.jsonl");
    let origins: Vec<_> = cases
        .iter()
        .map(|case| case.as_ref().map_or_else(|error| &error.origin, |case| &case.origin).as_str())
        .collect();
    assert_eq!(origins, ["x.jsonl:1", "x.jsonl:3", "x.jsonl:4"]);
    assert!(cases[1].is_err());
}
