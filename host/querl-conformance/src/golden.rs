//! Golden cases: inputs with the expected outputs, written by a plugin's author.
//!
//! `golden/*.jsonl` next to `plugin.toml`, one case per line, read by [`golden_case`] of the SDK. Every case has a `name`, and
//! optionally `settings`; an unknown key is an error. The `id` of episodes, samples and dialogues may be left out.
//!
//! ```text
//! reward        {"name": "赢", "episode": {"query": …, "policy": …, "baseline": …},
//!                "expect": {"total": 0.5, "tolerance": 1e-9, "components": {"win": 0.5}}}
//! group-reward  {"name": "多样", "episodes": [{"query": …, "policy": …}, …], "expect": [{"total": 0.5}, {"rejected": "code"}]}
//! filter        {"name": "重复", "samples": [{"original_query": …, "rewritten_query": …}, …],
//!                "expect": ["keep", {"drop": "code"}]}
//! prompt        {"name": "评审", "task": "judge", "input": {"query": …, "context": …, "rewrite": …},
//!                "expect": {"contains": ["…"]}}            or "expect": {"messages": [{"role": …, "content": …}]}
//!               {"name": "引号", "parse_rewrite": "“胶原”", "expect": {"rewrite": "胶原"}}
//!               {"name": "分数", "parse_judgement": "…", "expect": {"score": 4.5, "reason": "…"}}
//! style-scorer  {"name": "客气", "dialogue": {"turns": […]},
//!                "style_model": [{"label": "售前", "probability": 1.0}], "expect": {"total": 0.9}}
//! ```
//!
//! Wherever a score, rewrite or judgement is expected, so can be a rejection: `"expect": {"rejected": "code"}`.
//!
//! Host functions are answered by `calls`, in the form of `calls` of recorded episodes (`plugin` may be left out); a call that is not there
//! fails as not recorded. Cases of rewards, group rewards and filters may have them:
//!
//! ```text
//! "calls": [{"request": {"ask_judge": [{"role": "user", "content": "…"}]}, "response": {"Ok": {"text": "4"}}},
//!           {"request": {"count_tokens": "胶原"}, "response": {"Err": "not_configured"}}]
//! ```
//!
//! The default of `tolerance` is 1e-9; it applies to the total and the components; components that a case does not
//! name are not compared. `contains` is searched in the texts of all messages. Without `style_model` the run has
//! none.

use crate::section::{CheckResult, Section, Violation};
use crate::shown;
use crate::subject::{self, RecordedCalls, Subject};
use querl_bundle::{Bundle, Manifest, SettingSpec, check_settings};
use querl_core::episodes::{self, RecordedEpisode};
use querl_core::ports::{HostFunctions, PluginFault, PromptInput, PromptTask, StyleModel};
use querl_core::records::{
    CallFailure, Columns, Context, Dialogue, Episode, Hit, HostCall, Message, Rejection, Reward, Sample,
    StyleProbability, Verdict,
};
use querl_plugin::{Plugin, PluginError, PluginKind, PluginSettings};
use querl_sdk::testing::golden_case::{
    Comparison, ExpectedClass, ExpectedScore, GoldenBody, GoldenCase, GoldenTask, GoldenTypes, parse,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const RULE: &str = "the plugin's author says in golden/*.jsonl what comes of what";

/// Golden cases with the host's record types.
pub(crate) struct HostTypes;

type Body = GoldenBody<HostTypes>;

/// File and line, and the case or the reason why the line is invalid.
pub(crate) type Case = (String, Result<GoldenCase<HostTypes>, String>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Input {
    query: String,
    #[serde(default)]
    context: Context,
    rewrite: Option<String>,
}

impl GoldenTypes for HostTypes {
    type Settings = PluginSettings;
    type Episode = Episode;
    type Sample = Sample;
    type Input = Input;
    type Dialogue = Dialogue;
    type Call = HostCall;

    fn settings(value: Map<String, Value>) -> Result<PluginSettings, String> {
        read("settings", &Value::Object(value))
    }

    fn episode(value: Value) -> Result<Episode, String> {
        let mut episode: Episode = read("episode", &value).map_err(|problem| format!("{problem}; correct the line"))?;
        // The checks of recorded episodes apply to golden cases too.
        episodes::complete_and_check(&mut episode, 0)?;
        known_keys(&value, &json!(episode), "episode")?;
        Ok(episode)
    }

    fn samples(value: Value) -> Result<Vec<Sample>, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Form {
            id: String,
            original_query: String,
            rewritten_query: String,
            #[serde(default)]
            context: Context,
            #[serde(default)]
            hits: Vec<Hit>,
            #[serde(default)]
            columns: Columns,
        }
        let forms: Vec<Form> = read("samples", &value)?;
        let sample = |form: Form| Sample {
            id: form.id,
            original_query: form.original_query,
            rewritten_query: form.rewritten_query,
            context: form.context,
            hits: ranked(form.hits),
            columns: form.columns,
        };
        let samples: Vec<Sample> = forms.into_iter().map(sample).collect();
        known_keys(&value, &json!(samples), "samples")?;
        Ok(samples)
    }

    fn input(value: Value) -> Result<Input, String> {
        read("input", &value)
    }

    fn dialogue(value: Value) -> Result<Dialogue, String> {
        let dialogue: Dialogue = read("dialogue", &value)?;
        known_keys(&value, &json!(dialogue), "dialogue")?;
        let is_role = |turn: &&Message| ["system", "user", "assistant"].contains(&turn.role.as_str());
        if let Some(turn) = dialogue.turns.iter().find(|turn| !is_role(turn)) {
            return Err(format!("a `role` is `{}`; expected `system`, `user` or `assistant`", turn.role));
        }
        if dialogue.turns.last().is_none_or(|turn| turn.role != "assistant") {
            return Err("the last turn of `dialogue` is not the assistant's".into());
        }
        Ok(dialogue)
    }

    fn call(value: Value) -> Result<HostCall, String> {
        host_call(value)
    }
}

/// A recorded call; the plugin's name may be left out.
pub(crate) fn host_call(mut value: Value) -> Result<HostCall, String> {
    if let Value::Object(fields) = &mut value {
        fields.entry("plugin").or_insert_with(|| "".into());
    }
    let call = HostCall::deserialize(&value).map_err(|error| error.to_string())?;
    known_keys(&value, &json!(call), "call")?;
    Ok(call)
}

fn read<T: DeserializeOwned>(key: &str, value: &Value) -> Result<T, String> {
    T::deserialize(value).map_err(|error| format!("`{key}`: {error}"))
}

/// Missing ranks are counted from 1.
pub(crate) fn ranked(mut hits: Vec<Hit>) -> Vec<Hit> {
    for (hit, rank) in hits.iter_mut().zip(1..).filter(|(hit, _)| hit.rank == 0) {
        hit.rank = rank;
    }
    hits
}

/// Rejects keys of `value` that `read`, the same value after deserialization, lacks: some record types ignore unknown keys.
fn known_keys(value: &Value, read: &Value, path: &str) -> Result<(), String> {
    match (value, read) {
        (Value::Object(value), Value::Object(read)) => {
            // These types reject unknown keys themselves, and are serialized without empty fields.
            let is_strict = matches!(path, "episode" | "episode.policy" | "episode.baseline" | "episode.context")
                || path.starts_with("samples ") && !path.contains('.');
            let mut known: BTreeSet<&str> = read.keys().map(String::as_str).collect();
            if path.starts_with("episode.") && path.contains(".hits ") {
                // Hits of episodes are serialized without these if they are empty.
                known.extend(["id", "retrieval_score"]);
            }
            for (key, value) in value {
                match read.get(key) {
                    Some(read) => known_keys(value, read, &format!("{path}.{key}"))?,
                    None if is_strict || known.contains(key.as_str()) => {}
                    None => {
                        let known = Vec::from_iter(known).join("`, `");
                        return Err(format!("unknown key `{key}` in `{path}`, expected one of `{known}`"));
                    }
                }
            }
            Ok(())
        }
        (Value::Array(value), Value::Array(read)) => value
            .iter()
            .zip(read)
            .zip(1..)
            .try_for_each(|((value, read), number)| known_keys(value, read, &format!("{path} {number}"))),
        _ => Ok(()),
    }
}

pub(crate) fn kind(body: &Body) -> PluginKind {
    match body {
        GoldenBody::Reward(..) => PluginKind::Reward,
        GoldenBody::Group(..) => PluginKind::GroupReward,
        GoldenBody::Filter(..) => PluginKind::Filter,
        GoldenBody::Messages(..) | GoldenBody::ParseRewrite(..) | GoldenBody::ParseJudgement(..) => PluginKind::Prompt,
        GoldenBody::Style(..) => PluginKind::StyleScorer,
    }
}

/// The golden cases of a plugin in the order of files and lines.
pub(crate) fn of_plugin(path: &Path, plugin: &Plugin) -> Vec<Case> {
    let files = match (path.is_dir(), plugin.bundle()) {
        (true, _) => of_folder(path, plugin.manifest().map_or("golden", |manifest| &manifest.plugin.golden)),
        (false, Some(_)) => of_bundle(path),
        (false, None) => Ok(Vec::new()),
    };
    match files {
        Ok(files) => {
            let mut cases: Vec<Case> = files.iter().flat_map(|(name, text)| parse(text, name)).collect();
            let of_manifest =
                plugin.manifest().map(|manifest| &manifest.settings).filter(|declared| !declared.is_empty());
            if let Some(declared) = of_manifest.or(plugin.description().settings.as_ref()) {
                cases.iter_mut().for_each(|(_, case)| check_declared(declared, case));
            }
            if plugin.description().settings.is_none() {
                cases.iter_mut().for_each(|(_, case)| as_of_contract_0_1(case));
            }
            cases
        }
        Err((origin, message)) => vec![(origin, Err(message))],
    }
}

/// Refuses a case with a setting that the plugin does not declare, or with a value that it does not take.
fn check_declared(declared: &BTreeMap<String, SettingSpec>, case: &mut Result<GoldenCase<HostTypes>, String>) {
    if let Ok(found) = case
        && let Err(problem) = check_settings(declared, &found.settings)
    {
        *case = Err(format!("`{}`: {problem}", found.name));
    }
}

/// In cases of contract 0.1, a missing retrieval means an empty list of hits.
fn as_of_contract_0_1(case: &mut Result<GoldenCase<HostTypes>, String>) {
    if let Ok(GoldenCase { body: GoldenBody::Reward(episode, _), .. }) = case {
        let candidates = std::iter::once(&mut episode.policy).chain(&mut episode.baseline);
        candidates.for_each(|candidate| _ = candidate.retrieval.get_or_insert_with(|| Ok(Vec::new())));
    }
}

/// Episodes of golden cases.
pub struct GoldenEpisodes {
    /// Episodes whose id is the case's name, or `NAME/INDEX` for the episodes of a group case.
    pub episodes: Vec<RecordedEpisode>,
    /// Number of cases that were left out: those with their own settings, or with the name of an earlier case.
    pub n_left_out: usize,
}

/// The episodes of a reward's golden cases in a source folder, with their calls of host functions. Settings are compared with those of
/// plugin.toml, if it has any.
///
/// # Errors
/// File and line of an invalid case, or a file that cannot be read.
pub fn golden_episodes(folder: &Path, manifest: &Manifest) -> Result<GoldenEpisodes, String> {
    let files =
        of_folder(folder, &manifest.plugin.golden).map_err(|(origin, problem)| format!("{origin}: {problem}"))?;
    let (mut found, mut ids) = (GoldenEpisodes { episodes: Vec::new(), n_left_out: 0 }, BTreeSet::new());
    for (origin, mut case) in files.iter().flat_map(|(name, text)| parse::<HostTypes>(text, name)) {
        if !manifest.settings.is_empty() {
            check_declared(&manifest.settings, &mut case);
        }
        let GoldenCase { settings, calls, body, .. } =
            case.map_err(|problem| format!("{}: {problem}", folder.join(origin).display()))?;
        let episodes = match body {
            GoldenBody::Reward(episode, _) => vec![*episode],
            GoldenBody::Group(episodes, _) => episodes,
            _ => continue,
        };
        if !settings.is_empty() || episodes.iter().any(|episode| ids.contains(&episode.id)) {
            found.n_left_out += 1;
            continue;
        }
        ids.extend(episodes.iter().map(|episode| episode.id.clone()));
        let recorded = |episode| RecordedEpisode { line: 0, step: 0, episode, calls: calls.clone(), outcome: None };
        found.episodes.extend(episodes.into_iter().map(recorded));
    }
    Ok(found)
}

/// Name and text of each file; or the path and error of an unreadable one.
type Files = Result<Vec<(String, String)>, (String, String)>;

fn of_folder(folder: &Path, golden: &str) -> Files {
    let golden = folder.join(golden);
    if !golden.exists() {
        return Ok(Vec::new());
    }
    let unreadable =
        |path: &Path, error: &dyn std::fmt::Display| (path.display().to_string(), format!("cannot be read: {error}"));
    let entries = std::fs::read_dir(&golden).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|error| unreadable(&golden, &error))?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    let read = |path: PathBuf| match std::fs::read_to_string(&path) {
        Ok(text) => Ok((path.strip_prefix(folder).unwrap_or(&path).display().to_string(), text)),
        Err(error) => Err(unreadable(&path, &error)),
    };
    paths.into_iter().map(read).collect()
}

fn of_bundle(path: &Path) -> Files {
    let bundle = Bundle::open(path).map_err(|error| (path.display().to_string(), error.to_string()))?;
    let read = |(name, bytes): (&str, &[u8])| match std::str::from_utf8(bytes) {
        Ok(text) => Ok((name.to_owned(), text.to_owned())),
        Err(_) => Err((name.to_owned(), "is not UTF-8 text".into())),
    };
    bundle.golden().map(read).collect()
}

/// Removes the cases of one kind from `cases` and checks them.
pub(crate) fn check(subject: &Subject<'_>, of_kind: PluginKind, cases: &mut Vec<Case>, section: &mut Section) {
    let is_of_kind = |(_, case): &mut Case| matches!(case, Ok(case) if kind(&case.body) == of_kind);
    let taken: Vec<_> =
        cases.extract_if(.., is_of_kind).filter_map(|(origin, case)| Some((origin, case.ok()?))).collect();
    if taken.is_empty() {
        return section.skip("golden", RULE, "no golden cases");
    }
    for (origin, case) in taken {
        let rule = format!("{origin} says so");
        section.add(format!("golden: {}", shown::line(&case.name)), &rule, || outcome(subject, &origin, &case));
    }
}

/// Removes invalid lines, and cases for a kind that the plugin does not export, from `cases` and reports them. Runs before the checks
/// that take seconds.
pub(crate) fn check_lines(kinds: &[PluginKind], cases: &mut Vec<Case>, section: &mut Section) {
    let is_unusable = |(_, case): &mut Case| !matches!(case, Ok(case) if kinds.contains(&kind(&case.body)));
    for (origin, case) in cases.extract_if(.., is_unusable) {
        let violation = match case {
            Err(message) => Violation::new(origin.as_str(), format!("{origin}: {message}")),
            Ok(case) => {
                let kind = kind(&case.body).name();
                Violation::new(origin, format!("`{}` is a case for a {kind}; the plugin is of another kind", case.name))
            }
        };
        section.add("golden", RULE, || Err(violation));
    }
}

/// Why a case fails: the result and the expectation, or an error.
enum CaseFailure {
    Different(String, String),
    Error(PluginError),
}

impl From<PluginError> for CaseFailure {
    fn from(error: PluginError) -> Self {
        Self::Error(error)
    }
}

impl From<PluginFault> for CaseFailure {
    fn from(fault: PluginFault) -> Self {
        Self::Error(fault.into())
    }
}

fn outcome(subject: &Subject<'_>, origin: &str, case: &GoldenCase<HostTypes>) -> CheckResult {
    match run(subject, case) {
        Ok(()) => Ok(String::new()),
        Err(CaseFailure::Error(error)) => Err(Violation::error(shown_case(case), &error)),
        Err(CaseFailure::Different(returned, expected)) => {
            Err(Violation { sent: shown_case(case), returned, expected: Some(format!("{expected} ({origin})")) })
        }
    }
}

fn run(subject: &Subject<'_>, case: &GoldenCase<HostTypes>) -> Result<(), CaseFailure> {
    let settings = &case.settings;
    let functions = || Some(Arc::new(RecordedCalls(case.calls.clone())) as Arc<dyn HostFunctions>);
    let differs = |comparison: Comparison, returned: &dyn Fn() -> String| {
        comparison.map_err(|expected| CaseFailure::Different(returned(), expected))
    };
    match &case.body {
        GoldenBody::Reward(episode, expected) => {
            let reward = subject.reward_with(settings, functions())?;
            let scores = reward.score_batch(std::slice::from_ref(&**episode))?;
            scores.iter().try_for_each(|score| differs(compare_score(expected, score), &|| subject::scored(score)))
        }
        GoldenBody::Group(episodes, expected) => {
            let scores = subject.reward_with(settings, functions())?.score_batch(episodes)?;
            expected.iter().zip(&scores).enumerate().try_for_each(|(index, (expected, score))| {
                differs(compare_score(expected, score), &|| format!("at index {index}: {}", subject::scored(score)))
            })
        }
        GoldenBody::Style(dialogue, classes, expected) => {
            let model =
                classes.as_deref().map(|classes| Arc::new(FixedStyleModel::new(classes)) as Arc<dyn StyleModel>);
            let scores = subject.style_scorer_with(settings, model)?.score_batch(std::slice::from_ref(dialogue))?;
            scores.iter().try_for_each(|score| differs(compare_score(expected, score), &|| subject::scored(score)))
        }
        GoldenBody::Filter(samples, expected) => {
            let verdicts = subject.filter_with(settings, functions())?.check_batch(samples)?;
            expected.iter().zip(&verdicts).enumerate().try_for_each(|(index, (expected, verdict))| {
                let code = match verdict {
                    Verdict::Keep => None,
                    Verdict::Drop { code, .. } => Some(code.as_str()),
                };
                differs(expected.compare(code), &|| format!("at index {index}: {}", json!(verdict)))
            })
        }
        GoldenBody::Messages(task, Input { query, context, rewrite }, expected) => {
            let input = PromptInput { query, context, rewrite: rewrite.as_deref() };
            let messages = subject.prompts(settings)?.messages(prompt_task(*task), &input)?;
            let pairs: Vec<_> = messages.iter().map(|message| (&*message.role, &*message.content)).collect();
            differs(expected.compare(&pairs), &|| json!(messages).to_string())
        }
        GoldenBody::ParseRewrite(text, expected) => {
            let parsed = subject.prompts(settings)?.parse_rewrite(text)?;
            let actual = parsed.as_deref().map_err(|rejection| &*rejection.code);
            differs(expected.compare(actual), &|| match &parsed {
                Err(rejection) => json!({"rejected": rejection}).to_string(),
                rewrite => shown::compact(rewrite),
            })
        }
        GoldenBody::ParseJudgement(text, expected) => {
            let parsed = subject.prompts(settings)?.parse_judgement(text)?;
            let actual = parsed.as_ref().map(|judged| (judged.score, &*judged.reason));
            differs(expected.compare(actual.map_err(|rejection| &*rejection.code)), &|| match &parsed {
                Ok(judged) => json!({"score": judged.score, "reason": judged.reason}).to_string(),
                Err(rejection) => json!({"rejected": rejection}).to_string(),
            })
        }
    }
}

fn compare_score(expected: &ExpectedScore, score: &Result<Reward, Rejection>) -> Comparison {
    let component =
        |reward: &Reward, name: &str| reward.components.iter().find(|part| part.name == name).map(|part| part.value);
    match score {
        Ok(reward) => expected.compare(Ok((reward.total, &|name| component(reward, name)))),
        Err(rejection) => expected.compare(Err(&rejection.code)),
    }
}

pub(crate) fn prompt_task(task: GoldenTask) -> PromptTask {
    match task {
        GoldenTask::TeacherRewrite => PromptTask::TeacherRewrite,
        GoldenTask::PolicyRewrite => PromptTask::PolicyRewrite,
        GoldenTask::Judge => PromptTask::Judge,
    }
}

fn shown_case(case: &GoldenCase<HostTypes>) -> String {
    let body = match &case.body {
        GoldenBody::Reward(episode, _) => shown::item(&**episode),
        GoldenBody::Group(episodes, _) => shown::compact(episodes),
        GoldenBody::Filter(samples, _) => shown::compact(samples),
        GoldenBody::Messages(task, Input { query, context, rewrite }, _) => {
            let task = prompt_task(*task).name();
            shown::compact(&json!({"task": task, "query": query, "context": context, "rewrite": rewrite}))
        }
        GoldenBody::ParseRewrite(text, _) | GoldenBody::ParseJudgement(text, _) => shown::compact(text),
        GoldenBody::Style(dialogue, classes, _) => {
            let model = classes.as_deref().map(|classes| FixedStyleModel::new(classes).0);
            shown::compact(&json!({"dialogue": dialogue, "style_model": model}))
        }
    };
    match case.settings.is_empty() {
        true => body,
        false => format!("{body} under {}", shown::compact(&case.settings)),
    }
}

/// A style model that returns the classes of the case for every dialogue.
struct FixedStyleModel(Vec<StyleProbability>);

impl FixedStyleModel {
    fn new(classes: &[ExpectedClass]) -> Self {
        let class =
            |class: &ExpectedClass| StyleProbability { label: class.label.clone(), probability: class.probability };
        Self(classes.iter().map(class).collect())
    }
}

impl StyleModel for FixedStyleModel {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        Ok(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::records::{FailureKind, HostCallError, HostRequest, HostResponse};
    use querl_sdk::testing::golden_case::ExpectedVerdict;

    fn one(line: &str) -> Result<GoldenCase<HostTypes>, String> {
        parse(&line.replace('\n', " "), "golden/x.jsonl").remove(0).1
    }

    #[test]
    fn a_reward_case_by_hand_needs_little() {
        let case = one(r#"{"name": "赢", "settings": {"win": 1, "loss": -0.5, "terms": ["胶原"]},
            "episode": {"query": "胶原咋吃", "policy": {"rewrite": "胶原蛋白肽 用法",
                "retrieval": {"hits": [{"reranker_score": 0.9}]}},
                        "baseline": {"rewrite": "胶原"}},
            "expect": {"total": 0.5}}"#)
        .unwrap();
        assert_eq!(case.name, "赢");
        assert_eq!(case.settings["win"], toml::Value::Integer(1));
        let GoldenBody::Reward(episode, expect) = case.body else { panic!("not a case for a reward") };
        assert_eq!((episode.id.as_str(), episode.policy.hits()[0].rank), ("赢", 1));
        assert_eq!(expect, ExpectedScore::Score { total: 0.5, tolerance: 1e-9, components: BTreeMap::new() });
    }

    #[test]
    fn a_filter_case_counts_ids_and_ranks() {
        let case = one(r#"{"name": "重复", "samples": [{"original_query": "a", "rewritten_query": "b",
                "hits": [{"reranker_score": 1}]},
            {"original_query": "a", "rewritten_query": "b"}], "expect": ["keep", {"drop": "duplicate"}]}"#)
        .unwrap();
        let GoldenBody::Filter(samples, expect) = case.body else { panic!("not a case for a filter") };
        assert_eq!((samples[1].id.as_str(), samples[0].hits[0].rank), ("2", 1));
        assert_eq!(expect, [ExpectedVerdict::Keep, ExpectedVerdict::Drop("duplicate".into())]);
    }

    #[test]
    fn calls_of_a_recorded_episode_are_those_of_a_case() {
        let case = one(r#"{"name": "分", "episode": {"query": "胶原咋吃", "policy": {}}, "expect": {"total": 0.5}, "calls": [
            {"plugin": "judge", "request": {"ask_judge": [{"role": "user", "content": "胶原"}]}, "response": {"Ok": {"text": "4"}}},
            {"request": {"embed": ["胶原"]}, "response": {"Err": "not_configured"}}]}"#)
        .unwrap();
        let calls = RecordedCalls(case.calls);
        let asked = HostRequest::AskJudge(vec![Message { role: "user".into(), content: "胶原".into() }]);
        assert_eq!(calls.call("other", "x", &asked), Ok(HostResponse::Text("4".into())));
        let embed = |text: &str| calls.call("other", "x", &HostRequest::Embed(vec![text.into()]));
        assert_eq!(embed("胶原"), Err(HostCallError::NotConfigured));
        assert!(matches!(
            embed("虾青素"),
            Err(HostCallError::Failed(CallFailure { kind: FailureKind::NotRecorded, .. }))
        ));
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
        let kinds: Vec<_> = kinds.iter().map(|line| kind(&one(line).unwrap().body).name()).collect();
        assert_eq!(kinds, ["prompt", "prompt", "prompt", "prompt", "style-scorer", "style-scorer"]);
    }

    #[test]
    fn bad_lines_name_file_line_and_what_was_expected() {
        let episode = r#""episode": {"query": "a", "policy": {"rewrite": "b"}, "baseline": {"rewrite": "c"}}"#;
        let cases = r#"
{ | not a JSON object: EOF while parsing an object
{"episode": {}} | `name` is missing
{"name": " ", "task": "judge"} | `name` is blank
{"name": "a"} | expected one of `episode`, `episodes`, `samples`, `task`
{"name": "a", "episod": {}, "expect": {"total": 1}} | unknown key `episod`, expected one of `episode`, `episodes`
{"name": "a", "episode": {"query": "a", "policy": {"rewrit": "b"}}, "expect": {"total": 1}} | `episode`: unknown field `rewrit`, expected one of
{"name": "a", "episode": {"query": "a", "policy": "b"}, "expect": {"total": 1}} | ; correct the line
{"name": "a", EPISODE, "expect": {"total": 1}, "note": "x"} | unknown key `note`, expected one of `name`, `settings`, `episode`, `expect`, `calls`
{"name": "a", EPISODE, "expect": {"totl": 1}} | unknown field `totl`
{"name": "a", EPISODE, "expect": {"total": 1, "rejected": "x"}} | expected either `total`
{"name": "a", EPISODE, "expect": {"total": 1, "tolerance": -1}} | `tolerance` is -1; expected 0
{"name": "a", "episode": {"query": "a", "policy": {"rewrite": "b", "retrieval": {"hits": [{"reranker_score": 2}]}}, "baseline": {"rewrite": "c"}}, "expect": {"total": 1}} | `reranker_score` of policy hit 1 is 2; expected 0 to 1
{"name": "a", "episode": {"query": "a", "policy": {"rewrite": "b", "retrieval": {"hits": [{"reranker_score": 1, "txt": "x"}]}}, "baseline": {"rewrite": "c"}}, "expect": {"total": 1}} | unknown key `txt` in `episode.policy.retrieval.hits 1`, expected one of `id`, `rank`, `reranker_score`, `retrieval_score`, `text`
{"name": "a", "episode": {"query": "a", "policy": {"rewrite": "b", "retrieval": {"hits": [{"reranker_score": 1, "txt": ""}]}}}, "expect": {"total": 1}} | unknown key `txt` in
{"name": "a", "episode": {"query": "a", "policy": {"judgement": {"scored": {"score": 1, "why": "x"}}}}, "expect": {"total": 1}} | unknown key `why` in `episode.policy.judgement.scored`, expected one of `reason`, `score`
{"name": "a", EPISODE, "expect": {"total": 1}, "calls": [{"request": {"ask_judge": [{"role": "user", "content": "a", "name": "b"}]}, "response": {"Ok": {"text": "4"}}}]} | `calls` 1: unknown key `name` in `call.request.ask_judge 1`, expected one of `content`, `role`
{"name": "a", "samples": [], "expect": ["keep"]} | `expect` has 1 verdicts for 0 samples
{"name": "a", "task": "rewrite", "input": {"query": "a"}, "expect": {}} | `task`: unknown variant `rewrite`
{"name": "a", "task": "judge", "input": {"query": "a"}, "expect": {}} | `input.rewrite` is there for the task `judge`
{"name": "a", "parse_rewrite": "a", "expect": {}} | expected either `rewrite` or `rejected`
{"name": "a", "dialogue": {"turns": [{"role": "user", "content": "在"}]}, "expect": {"total": 1}} | the last turn of `dialogue` is not the assistant's
"#;
        for case in cases.trim().lines() {
            let (line, expected) = case.split_once(" | ").unwrap();
            let (origin, case): Case = parse(&line.replace("EPISODE", episode), "golden/x.jsonl").remove(0);
            let error = case.err().unwrap();
            assert!(origin == "golden/x.jsonl:1" && error.contains(expected), "{origin}: {error}");
        }
    }

    /// The kits of all languages read the same table.
    #[test]
    fn results_and_failures_have_the_forms_of_all_kits() {
        for line in include_str!("../../../sdk/testdata/golden.jsonl").lines() {
            let vector: Value = serde_json::from_str(line).unwrap();
            let error = one(&vector["case"].to_string()).err();
            match (vector["error"].as_str(), &error) {
                (None, None) => {}
                (Some(expected), Some(error)) if error.contains(expected) => {}
                _ => panic!("{line}: {error:?}"),
            }
        }
    }

    #[test]
    fn a_bad_line_does_not_hide_the_others() {
        let good = r#"{"name": "a", "parse_rewrite": "a", "expect": {"rewrite": "a"}}"#;
        let cases: Vec<Case> = parse(&format!("{good}\n\n{{\n{good}\n"), "x.jsonl");
        let origins: Vec<_> = cases.iter().map(|(origin, _)| origin.as_str()).collect();
        assert_eq!(origins, ["x.jsonl:1", "x.jsonl:3", "x.jsonl:4"]);
        assert!(cases[1].1.is_err());
    }
}
