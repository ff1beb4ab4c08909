use super::*;
use crate::{JudgeScore, Message, Rejection, Score, SettingError, StyleModel, Verdict};
use std::ops::RangeInclusive;

/// Scores the policy's best hit; `scale` times.
struct TopHit(f64);

impl Reward for TopHit {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        settings.number("scale", 1.0, 0.0..=10.0).map(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=10.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let failed = |failure: &crate::CallFailure| Rejection::new("policy_failed", &*failure.message);
        let hits = episode.policy.retrieval.as_ref().map_err(failed)?;
        let top = hits.first().map_or(0.0, |hit| hit.reranker_score);
        Ok(Score::new(self.0 * top).with("top1", top))
    }
}

/// Keeps what is not above `max_chars`.
struct Short(u64);

impl Filter for Short {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        settings.integer("max_chars", 10, 1..=100).map(Self)
    }

    fn check(&mut self, sample: &Sample) -> Verdict {
        match sample.rewritten_query.chars().count() as u64 <= self.0 {
            true => Verdict::Keep,
            false => Verdict::drop("over_long", ""),
        }
    }
}

/// Says the query, and reads answers as they are.
struct Plain;

impl Prompt for Plain {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn messages(&self, _: PromptTask, input: &PromptInput) -> Vec<Message> {
        vec![Message::system("改写"), Message::user(&*input.query)]
    }

    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        if text.trim().is_empty() { Err(Rejection::new("blank", "")) } else { Ok(text.trim().to_owned()) }
    }

    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        let score = text.parse().map_err(|_| Rejection::new("no_score", text))?;
        Ok(JudgeScore { score, reason: "plain".into() })
    }
}

/// The probability of 售前.
struct PreSales;

impl StyleScorer for PreSales {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
        let classes = model.classify(&dialogue.turns).map_err(|error| Rejection::new("no_model", error.to_string()))?;
        Ok(Score::new(classes.iter().find(|class| class.label == "售前").map_or(0.0, |class| class.probability)))
    }
}

const EPISODE: &str = r#""episode": {"query": "鱼油", "policy": {"rewrite": "鱼油", "retrieval": {"hits": [{"reranker_score": 0.8}]}},
    "baseline": {"rewrite": "鱼油"}}"#;

fn cases(lines: &[&str]) -> Golden {
    let read = |(line, number): (&&str, usize)| {
        read::case(&line.replace('\n', " "), &format!("golden/x.jsonl:{number}")).unwrap()
    };
    Golden { folder: "golden".into(), cases: lines.iter().zip(1..).map(read).collect() }
}

/// The message with which `job` panics.
fn panic_of(job: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(job).unwrap_err();
    panic.downcast_ref::<String>().cloned().unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

#[test]
fn cases_that_hold_pass() {
    let reward = format!(
        r#"{{"name": "a", {EPISODE}, "settings": {{"scale": 0.5}}, "expect": {{"total": 0.4, "components": {{"top1": 0.8}}}}}}"#
    );
    let failed = r#"{"name": "b", "episode": {"query": "鱼", "policy": {"rewrite": "", "retrieval": {"failed": {"kind": "rate_limited", "message": "late"}},
        "judgement": {"scored": {"score": 4}}, "style": [{"label": "售前", "probability": 1}]},
        "baseline": {"rewrite": "", "judgement": "not_sampled"}}, "expect": {"rejected": "policy_failed"}}"#;
    let style = r#"{"name": "c", "dialogue": {"turns": [{"role": "user", "content": "在？"}, {"role": "assistant", "content": "在"}]},
        "style_model": [{"label": "售前", "probability": 0.75}, {"label": "售后", "probability": 0.25}], "expect": {"total": 0.75}}"#;
    let no_model = r#"{"name": "d", "dialogue": {"turns": [{"role": "assistant", "content": "在"}]}, "expect": {"rejected": "no_model"}}"#;
    let filter = r#"{"name": "e", "settings": {"max_chars": 2}, "expect": ["keep", {"drop": "over_long"}],
        "samples": [{"original_query": "a", "rewritten_query": "鱼油"}, {"original_query": "a", "rewritten_query": "鱼油丸", "hits": [{"reranker_score": 1}]}]}"#;
    let judge = r#"{"name": "f", "task": "judge", "input": {"query": "鱼", "rewrite": "鱼油"}, "expect": {"contains": ["鱼", "改"]}}"#;
    let all = r#"{"name": "g", "task": "policy_rewrite", "input": {"query": "鱼", "context": {"user_profile": "x"}},
        "expect": {"messages": [{"role": "system", "content": "改写"}, {"role": "user", "content": "鱼"}]}}"#;
    let parsed = [
        r#"{"name": "h", "parse_rewrite": " 鱼油 ", "expect": {"rewrite": "鱼油"}}"#,
        r#"{"name": "i", "parse_rewrite": " ", "expect": {"rejected": "blank"}}"#,
        r#"{"name": "j", "parse_judgement": "4.5", "expect": {"score": 4.5, "reason": "plain"}}"#,
        r#"{"name": "k", "parse_judgement": "好", "expect": {"rejected": "no_score"}}"#,
    ];
    let lines = [&[&*reward, failed, style, no_model, filter, judge, all][..], &parsed].concat();
    cases(&lines).reward::<TopHit>().filter::<Short>().prompt::<Plain>().style_scorer::<PreSales>();
}

#[test]
fn cases_that_do_not_hold_are_all_named() {
    let total = format!(r#"{{"name": "总分", {EPISODE}, "expect": {{"total": 0.5}}}}"#);
    let part = format!(r#"{{"name": "分项", {EPISODE}, "expect": {{"total": 0.8, "components": {{"win": 1}}}}}}"#);
    let code = format!(r#"{{"name": "拒绝", {EPISODE}, "expect": {{"rejected": "late"}}}}"#);
    let message = panic_of(|| _ = cases(&[&total, &part, &code]).reward::<TopHit>());
    let expected = "3 of 3 golden cases do not hold:\n\
        golden/x.jsonl:1 `总分`: expected 0.5, got 0.8\n\
        golden/x.jsonl:2 `分项`: component `win`: expected 1.0, got None\n\
        golden/x.jsonl:3 `拒绝`: expected Some(\"late\"), got Ok(Score { total: 0.8, ";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn a_folder_without_cases_of_the_kind_is_not_a_pass() {
    let line = r#"{"name": "i", "parse_rewrite": " ", "expect": {"rejected": "blank"}}"#;
    assert_eq!(panic_of(|| _ = cases(&[line]).reward::<TopHit>()), "golden: no case for a reward");
}

#[test]
fn bad_lines_say_what_was_expected() {
    for (line, expected) in [
        ("{", "not a JSON object: "),
        (r#"{"name": "a"}"#, "expected one of `episode`, `samples`, `task`"),
        (&format!(r#"{{"name": "a", {EPISODE}, "expect": {{"total": 1}}, "note": 1}}"#), "unknown key `note`"),
        (&format!(r#"{{"name": "a", {EPISODE}, "expect": {{"totl": 1}}}}"#), "`expect`: unknown field `totl`"),
        (&format!(r#"{{"name": "a", {EPISODE}, "expect": {{"tolerance": 1}}}}"#), "expected either `total`"),
        (r#"{"name": "a", "samples": [], "expect": ["keep"]}"#, "`expect` has 1 verdicts for 0 samples"),
        (r#"{"name": "a", "task": "write", "input": {"query": "a"}, "expect": {}}"#, "`task`: unknown variant `write`"),
        (r#"{"name": "a", "parse_judgement": "1", "expect": {}}"#, "expected either `score`"),
    ] {
        let error = read::case(&line.replace('\n', " "), "golden/x.jsonl:1").err().unwrap();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn settings_are_rendered_as_the_host_renders_them() {
    let line = format!(
        r#"{{"name": "a", {EPISODE}, "settings": {{"a": 0.1, "b": 3, "c": true, "d": "胶", "e": ["x", "胶"], "f": 1e-7, "g": 2.0}},
        "expect": {{"total": 0}}}}"#
    );
    let settings = read::case(&line.replace('\n', " "), "x").unwrap().settings;
    let texts: Vec<_> = ["a", "b", "c", "d", "e", "f", "g"].iter().map(|key| settings.get(key).unwrap()).collect();
    assert_eq!(texts, ["0.1", "3", "true", "胶", r#"["x","胶"]"#, "0.0000001", "2"]);
}
