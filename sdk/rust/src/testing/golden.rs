//! Runs golden cases, inputs with their expected outputs, on a plugin's native code. `querl plugin test` runs the same files on the
//! component. The format is in [`golden_case`].

use super::form::{EpisodeForm, HostCallForm, SampleForm};
use super::golden_case::{self, Comparison, GoldenBody, GoldenCase, GoldenTask, GoldenTypes};
use super::{HostFunctions, build, run};
use crate::{
    Dialogue, Episode, Filter, GroupReward, Message, Prompt, PromptInput, PromptTask, Rejection, Reward, Role, Sample,
    Score, Settings, StyleScorer, Verdict,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::fmt::Debug;
use std::path::{Path, PathBuf};

/// The golden cases of a plugin; made by [`golden`].
pub struct Golden {
    folder: PathBuf,
    /// Each with its origin, `FILE:LINE`.
    cases: Vec<(String, Case)>,
}

type Case = GoldenCase<SdkTypes>;

/// The types of this crate for the records of golden cases.
struct SdkTypes;

impl GoldenTypes for SdkTypes {
    type Settings = Settings;
    type Episode = Episode;
    type Sample = Sample;
    type Input = PromptInput;
    type Dialogue = Dialogue;
    type Call = HostCallForm;

    fn settings(value: Map<String, Value>) -> Result<Settings, String> {
        Ok(Settings::of_golden_case(value.into_iter().map(|(key, value)| (key, setting(&value), value))))
    }

    fn episode(value: Value) -> Result<Episode, String> {
        read("episode", value).map(|form: EpisodeForm| form.named(""))
    }

    fn samples(value: Value) -> Result<Vec<Sample>, String> {
        let forms: Vec<SampleForm> = read("samples", value)?;
        Ok(forms.into_iter().map(Sample::from).collect())
    }

    fn input(value: Value) -> Result<PromptInput, String> {
        read("input", value)
    }

    fn dialogue(value: Value) -> Result<Dialogue, String> {
        read("dialogue", value)
    }

    fn call(value: Value) -> Result<HostCallForm, String> {
        serde_json::from_value(value).map_err(|error| error.to_string())
    }
}

fn read<T: DeserializeOwned>(key: &str, value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| format!("`{key}`: {error}"))
}

/// The text form of a setting that the host uses: numbers in decimal notation that reads back to the same number, texts unchanged, lists as
/// JSON.
fn setting(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => integer.to_string(),
            None => number.as_f64().map_or_else(|| number.to_string(), |number| number.to_string()),
        },
        other => other.to_string(),
    }
}

/// Reads all `.jsonl` files of a folder; a relative path starts at the plugin's folder.
///
/// Run the cases for each kind of the plugin:
///
/// ```no_run
/// # use querl_sdk::{Episode, Rejection, Reward, Score, SettingError, Settings, testing};
/// # struct Brevity;
/// # impl Reward for Brevity {
/// #     fn new(_: &Settings) -> Result<Self, SettingError> { Ok(Self) }
/// #     fn range(&self) -> std::ops::RangeInclusive<f64> { 0.0..=1.0 }
/// #     fn score(&self, _: &Episode) -> Result<Score, Rejection> { Ok(Score::new(0.0)) }
/// # }
/// testing::golden("golden").reward::<Brevity>();
/// ```
///
/// One case per line, each with a `name`, and optionally `settings`:
///
/// ```text
/// reward        {"name": "赢", "episode": {"query": …, "policy": …, "baseline": …},
///                "expect": {"total": 0.5, "tolerance": 1e-9, "components": {"win": 0.5}}}      or {"rejected": "code"}
/// group reward  {"name": "多样", "episodes": [{"query": …, "policy": …}], "expect": [{"total": 0.5}, {"rejected": "code"}]}
/// filter        {"name": "重复", "samples": [{"original_query": …, "rewritten_query": …}], "expect": ["keep", {"drop": "code"}]}
/// prompt        {"name": "评审", "task": "judge", "input": {"query": …, "context": …, "rewrite": …},
///                "expect": {"contains": ["…"]}}                                                or {"messages": [{"role", "content"}]}
///               {"name": "引号", "parse_rewrite": "“胶原”", "expect": {"rewrite": "胶原"}}      or {"rejected": "code"}
///               {"name": "分数", "parse_judgement": "…", "expect": {"score": 4.5}}              or {"rejected": "code"}
/// style scorer  {"name": "客气", "dialogue": {"turns": […]}, "style_model": [{"label": "售前", "probability": 1.0}],
///                "expect": {"total": 0.9}}                                                      or {"rejected": "code"}
/// ```
///
/// Cases with `episode`, `episodes` or `samples` may have results of host functions in `calls`, in the form of `calls` in recorded
/// episodes. Any other call of a host function fails as not recorded:
///
/// ```text
/// "calls": [{"request": {"ask_judge": [{"role": "user", "content": "…"}]}, "response": {"Ok": {"text": "4"}}},
///           {"request": {"count_tokens": "胶原"}, "response": {"Err": "not_configured"}}]
/// ```
///
/// # Panics
/// The folder cannot be read, or a line is not a case; the message names file and line.
#[track_caller]
pub fn golden(folder: impl AsRef<Path>) -> Golden {
    let folder = folder.as_ref();
    let entries = std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.unwrap_or_else(|error| panic!("{}: cannot be read: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    let mut cases = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: cannot be read: {error}", path.display()));
        for (origin, case) in golden_case::parse(&text, &path.display().to_string()) {
            let case = case.unwrap_or_else(|message| panic!("{origin}: {message}"));
            cases.push((origin, case));
        }
    }
    Golden { folder: folder.to_owned(), cases }
}

impl Golden {
    /// Runs the cases for a reward.
    ///
    /// # Panics
    /// A case fails, or there is none.
    #[track_caller]
    pub fn reward<T: Reward>(&self) -> &Self {
        self.all("reward", |case| {
            let GoldenBody::Reward(episode, expected) = &case.body else { return None };
            let result = run::reward::<T>(case.settings.clone()).score(episode);
            Some(with_result(compare_score(expected, &result), &result))
        })
    }

    /// Runs the cases for a group reward.
    ///
    /// # Panics
    /// A case fails, or there is none.
    #[track_caller]
    pub fn group_reward<T: GroupReward>(&self) -> &Self {
        self.all("group reward", |case| {
            let GoldenBody::Group(episodes, expected) = &case.body else { return None };
            let results = run::group_reward::<T>(case.settings.clone()).score(episodes.iter().cloned());
            let compare =
                |((expected, result), number): ((&golden_case::ExpectedScore, &Result<Score, Rejection>), usize)| {
                    with_result(compare_score(expected, result), result)
                        .map_err(|message| format!("episode {number}: {message}"))
                };
            Some(expected.iter().zip(&results).zip(1..).try_for_each(compare))
        })
    }

    /// Runs the cases for a filter.
    ///
    /// # Panics
    /// A case fails, or there is none.
    #[track_caller]
    pub fn filter<T: Filter>(&self) -> &Self {
        self.all("filter", |case| {
            let GoldenBody::Filter(samples, expected) = &case.body else { return None };
            let verdicts = run::filter::<T>(case.settings.clone()).check(samples.iter().cloned());
            let compare = |((expected, verdict), number): ((&golden_case::ExpectedVerdict, &Verdict), usize)| {
                let code = match verdict {
                    Verdict::Keep => None,
                    Verdict::Drop(reason) => Some(reason.code.as_str()),
                };
                with_result(expected.compare(code), verdict).map_err(|message| format!("sample {number}: {message}"))
            };
            Some(expected.iter().zip(&verdicts).zip(1..).try_for_each(compare))
        })
    }

    /// Runs the cases for prompts and for parsing responses.
    ///
    /// # Panics
    /// A case fails, or there is none.
    #[track_caller]
    pub fn prompt<T: Prompt>(&self) -> &Self {
        self.all("prompt", |case| {
            let plugin = || run::prompt::<T>(case.settings.clone());
            Some(match &case.body {
                GoldenBody::Messages(task, input, expected) => {
                    let messages = match plugin().messages(prompt_task(*task), input) {
                        Ok(messages) => messages,
                        Err(rejection) => return Some(Err(format!("expected messages, got {rejection:?}"))),
                    };
                    let pairs: Vec<_> = messages.iter().map(|message| (role(message), &*message.content)).collect();
                    with_result(expected.compare(&pairs), &messages)
                }
                GoldenBody::ParseRewrite(text, expected) => {
                    let parsed = plugin().parse_rewrite(text);
                    with_result(expected.compare(parsed.as_deref().map_err(|error| &*error.code)), &parsed)
                }
                GoldenBody::ParseJudgement(text, expected) => {
                    let parsed = plugin().parse_judgement(text);
                    let judged = parsed.as_ref().map(|judged| (judged.score, &*judged.reason));
                    with_result(expected.compare(judged.map_err(|error| &*error.code)), &parsed)
                }
                _ => return None,
            })
        })
    }

    /// Runs the cases for a style scorer.
    ///
    /// # Panics
    /// A case fails, or there is none.
    #[track_caller]
    pub fn style_scorer<T: StyleScorer>(&self) -> &Self {
        self.all("style scorer", |case| {
            let GoldenBody::Style(dialogue, classes, expected) = &case.body else { return None };
            let model = match classes {
                None => build::no_style_model(),
                Some(classes) => build::style_model(classes.iter().map(|class| (&*class.label, class.probability))),
            };
            let result = run::style_scorer::<T>(case.settings.clone()).score(dialogue, &model);
            Some(with_result(compare_score(expected, &result), &result))
        })
    }

    /// Runs all cases. `run` returns `None` for a case of another kind.
    #[track_caller]
    fn all(&self, kind: &str, run: impl Fn(&Case) -> Option<Comparison>) -> &Self {
        let run_case = |(origin, case): &(String, Case)| {
            let _installed = HostFunctions::recorded(case.calls.clone()).install();
            Some(run(case)?.map_err(|message| format!("{origin} `{}`: {message}", case.name)))
        };
        let compared: Vec<Comparison> = self.cases.iter().filter_map(run_case).collect();
        assert!(!compared.is_empty(), "{}: no case for a {kind}", self.folder.display());
        let n_cases = compared.len();
        let failed: Vec<String> = compared.into_iter().filter_map(Result::err).collect();
        assert!(failed.is_empty(), "{} of {n_cases} golden cases failed:\n{}", failed.len(), failed.join("\n"));
        self
    }
}

fn with_result(comparison: Comparison, result: &impl Debug) -> Comparison {
    comparison.map_err(|expected| format!("expected {expected}, got {result:?}"))
}

fn compare_score(expected: &golden_case::ExpectedScore, result: &Result<Score, Rejection>) -> Comparison {
    match result {
        Ok(score) => expected.compare(Ok((score.total, &|name| score.component(name)))),
        Err(rejection) => expected.compare(Err(&rejection.code)),
    }
}

fn prompt_task(task: GoldenTask) -> PromptTask {
    match task {
        GoldenTask::TeacherRewrite => PromptTask::TeacherRewrite,
        GoldenTask::PolicyRewrite => PromptTask::PolicyRewrite,
        GoldenTask::Judge => PromptTask::Judge,
    }
}

fn role(message: &Message) -> &'static str {
    match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Input, Inputs, JudgeScore, SettingError, StyleModel, host};
    use std::ops::RangeInclusive;

    /// Reward: the reranker score of the policy's best hit, times the setting `scale`.
    struct TopHit(f64);

    impl Reward for TopHit {
        const INPUTS: Inputs = Inputs::NONE.requires(Input::Retrieval);

        fn new(settings: &Settings) -> Result<Self, SettingError> {
            settings.number("scale", 1.0, 0.0..=10.0).map(Self)
        }

        fn range(&self) -> RangeInclusive<f64> {
            0.0..=10.0
        }

        fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
            let top = episode.policy.hits("policy")?.first().map_or(0.0, |hit| hit.reranker_score);
            Ok(Score::new(self.0 * top).with("top1", top))
        }
    }

    /// Filter: keeps rewrites of at most `max_chars` characters.
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

    /// Prompt: the user message is the query; parsers return the response itself.
    struct Plain;

    impl Prompt for Plain {
        fn new(_: &Settings) -> Result<Self, SettingError> {
            Ok(Self)
        }

        fn messages(&self, _: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
            Ok(vec![Message::system("改写"), Message::user(&*input.query)])
        }

        fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
            if text.trim().is_empty() { Err(Rejection::new("blank", "")) } else { Ok(text.trim().to_owned()) }
        }

        fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
            let score = text.parse().map_err(|_| Rejection::new("no_score", text))?;
            Ok(JudgeScore { score, reason: "plain".into() })
        }
    }

    /// Style scorer: the probability of 售前.
    struct PreSales;

    impl StyleScorer for PreSales {
        fn new(_: &Settings) -> Result<Self, SettingError> {
            Ok(Self)
        }

        fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
            let classes =
                model.classify(&dialogue.turns).map_err(|error| Rejection::new("no_model", error.to_string()))?;
            Ok(Score::new(classes.iter().find(|class| class.label == "售前").map_or(0.0, |class| class.probability)))
        }
    }

    /// Reward: the judge's score of the rewrite, divided by its number of tokens.
    struct Judged;

    impl Reward for Judged {
        fn new(_: &Settings) -> Result<Self, SettingError> {
            Ok(Self)
        }

        fn range(&self) -> RangeInclusive<f64> {
            0.0..=5.0
        }

        fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
            let rewrite = episode.policy.rewrite("policy")?;
            let n_tokens = host::count_tokens(rewrite).map_err(|error| error.rejection("tokens"))?;
            let text = host::ask_judge(&[Message::user(rewrite)]).map_err(|error| error.rejection("judge"))?;
            Ok(Score::new(text.parse::<f64>().map_err(|_| Rejection::new("no_score", text))? / f64::from(n_tokens)))
        }
    }

    const EPISODE: &str = r#""episode": {"query": "鱼油", "policy": {"rewrite": "鱼油", "retrieval": {"hits": [{"reranker_score": 0.8}]}},
        "baseline": {"rewrite": "鱼油"}}"#;

    fn cases(lines: &[&str]) -> Golden {
        let lines: Vec<_> = lines.iter().map(|line| line.replace('\n', " ")).collect();
        let cases = golden_case::parse(&lines.join("\n"), "golden/x.jsonl");
        let read = |(origin, case): (String, Result<Case, String>)| (origin, case.unwrap());
        Golden { folder: "golden".into(), cases: cases.into_iter().map(read).collect() }
    }

    fn one(line: &str) -> Result<Case, String> {
        golden_case::parse(&line.replace('\n', " "), "x").remove(0).1
    }

    /// The panic message of `job`.
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
            "baseline": {"rewrite": "", "judgement": "not_sampled"}}, "expect": {"rejected": "policy_retrieval_failed"}}"#;
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
    fn host_functions_have_the_results_of_the_case() {
        let case = |calls: &str, expected: &str| format!(r#"{{"name": "a", {EPISODE}, {calls} "expect": {expected}}}"#);
        let count = r#"{"plugin": "x", "request": {"count_tokens": "鱼油"}, "response": {"Ok": {"count": 2}}}"#;
        let asked = r#"{"request": {"ask_judge": [{"role": "user", "content": "鱼油"}]}, "response": "#;
        let (judged, none) = (r#"{"Ok": {"text": "4"}}}"#, r#"{"Err": "not_configured"}}"#);
        let late = r#"{"Err": {"failed": {"kind": "timeout", "message": "late"}}}}"#;
        cases(&[
            &case(&format!(r#""calls": [{count}, {asked}{judged}],"#), r#"{"total": 2}"#),
            &case(&format!(r#""calls": [{count}, {asked}{none}],"#), r#"{"rejected": "judge_not_configured"}"#),
            &case(&format!(r#""calls": [{count}, {asked}{late}],"#), r#"{"rejected": "judge_failed"}"#),
            &case(&format!(r#""calls": [{count}],"#), r#"{"rejected": "judge_failed"}"#),
            &case("", r#"{"rejected": "tokens_failed"}"#),
        ])
        .reward::<Judged>();
        for (calls, expected) in [
            (
                r#""calls": [{"request": {"count": "鱼油"}, "response": {"Ok": {"count": 2}}}],"#,
                "`calls` 1: unknown variant",
            ),
            (r#""calls": [{"request": {"count_tokens": "鱼油"}}],"#, "`calls` 1: missing field `response`"),
        ] {
            let error = one(&case(calls, r#"{"total": 2}"#)).err().unwrap();
            assert!(error.starts_with(expected), "{error}");
        }
        let style = r#"{"name": "a", "dialogue": {"turns": [{"role": "assistant", "content": "在"}]}, "calls": [], "expect": {"total": 1}}"#;
        assert_eq!(
            one(style).err().unwrap(),
            "unknown key `calls`, expected one of `name`, `settings`, `dialogue`, `style_model`, `expect`"
        );
    }

    #[test]
    fn all_cases_that_fail_are_named() {
        let total = format!(r#"{{"name": "总分", {EPISODE}, "expect": {{"total": 0.5}}}}"#);
        let part = format!(r#"{{"name": "分项", {EPISODE}, "expect": {{"total": 0.8, "components": {{"win": 1}}}}}}"#);
        let code = format!(r#"{{"name": "拒绝", {EPISODE}, "expect": {{"rejected": "late"}}}}"#);
        let message = panic_of(|| _ = cases(&[&total, &part, &code]).reward::<TopHit>());
        let lines: Vec<_> = message.lines().collect();
        for (line, expected) in lines.into_iter().zip([
            "3 of 3 golden cases failed:",
            "golden/x.jsonl:1 `总分`: expected total 0.5 within 1e-9, got Ok(Score { total: 0.8, ",
            "golden/x.jsonl:2 `分项`: expected total 0.8 and components {\"win\":1.0} within 1e-9, got Ok(Score { total: 0.8, ",
            "golden/x.jsonl:3 `拒绝`: expected rejected with `late`, got Ok(Score { total: 0.8, ",
        ]) {
            assert!(line.starts_with(expected), "{line}");
        }
        assert_eq!(message.lines().count(), 4);
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
            (r#"{"name": "a"}"#, "expected one of `episode`, `episodes`, `samples`, `task`"),
            (r#"{"name": "a", "expect": {}, "sample": []}"#, "unknown key `sample`, expected one of `episode`"),
            (&format!(r#"{{"name": "a", {EPISODE}, "expect": {{"total": 1}}, "note": 1}}"#), "unknown key `note`"),
            (&format!(r#"{{"name": "a", {EPISODE}, "expect": {{"totl": 1}}}}"#), "`expect`: unknown field `totl`"),
            (&format!(r#"{{"name": "a", {EPISODE}, "expect": {{"tolerance": 1}}}}"#), "expected either `total`"),
            (r#"{"name": "a", "samples": [], "expect": ["keep"]}"#, "`expect` has 1 verdicts for 0 samples"),
            (
                r#"{"name": "a", "task": "write", "input": {"query": "a"}, "expect": {}}"#,
                "`task`: unknown variant `write`",
            ),
            (r#"{"name": "a", "parse_judgement": "1", "expect": {}}"#, "expected either `score`"),
        ] {
            let error = one(line).err().unwrap();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// `querl plugin test` and the other kits read the same table.
    #[test]
    fn results_and_failures_have_the_forms_of_all_kits() {
        for line in include_str!("../../../testdata/golden.jsonl").lines() {
            let vector: Value = serde_json::from_str(line).unwrap();
            let error = one(&vector["case"].to_string()).err();
            match (vector["error"].as_str(), &error) {
                (None, None) => {}
                (Some(expected), Some(error)) if error.contains(expected) => {}
                _ => panic!("{line}: {error:?}"),
            }
        }
    }

    /// Regression: `querl plugin test` refused a case that passed here.
    #[test]
    fn a_text_is_no_number() {
        let line = format!(r#"{{"name": "a", {EPISODE}, "settings": {{"scale": "0.5"}}, "expect": {{"total": 0.4}}}}"#);
        let expected =
            "the plugin refuses its settings: setting `scale`: expected a number from 0 to 10, got `\"0.5\"`";
        assert_eq!(panic_of(|| _ = cases(&[&line]).reward::<TopHit>()), expected);
    }

    /// Regression: as above.
    #[test]
    fn a_number_is_no_text() {
        struct Worded;

        impl Filter for Worded {
            fn new(settings: &Settings) -> Result<Self, SettingError> {
                settings.text("word", "鱼油");
                Ok(Self)
            }

            fn check(&mut self, _: &Sample) -> Verdict {
                Verdict::Keep
            }
        }
        let filter = |word: &str| {
            let sample = r#"{"original_query": "a", "rewritten_query": "b"}"#;
            let line = format!(
                r#"{{"name": "a", "samples": [{sample}], "settings": {{"word": {word}}}, "expect": ["keep"]}}"#
            );
            _ = cases(&[&line]).filter::<Worded>();
        };
        filter("\"40\"");
        let expected = "the plugin refuses its settings: setting `word`: expected a text, got 40";
        assert_eq!(panic_of(|| filter("40")), expected);
    }

    #[test]
    fn settings_are_rendered_as_the_host_renders_them() {
        let line = format!(
            r#"{{"name": "a", {EPISODE}, "settings": {{"a": 0.1, "b": 3, "c": true, "d": "胶", "e": ["x", "胶"], "f": 1e-7, "g": 2.0}},
            "expect": {{"total": 0}}}}"#
        );
        let settings = one(&line).unwrap().settings;
        let texts: Vec<_> =
            ["a", "b", "c", "d", "e", "f", "g"].iter().map(|key| settings.text(key, "not set")).collect();
        assert_eq!(texts, ["0.1", "3", "true", "胶", r#"["x","胶"]"#, "0.0000001", "2"]);
    }
}
