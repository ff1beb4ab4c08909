//! Golden cases: what a plugin's author says comes of what. `querl plugin test` runs the same files on the component.

mod expected;
mod read;

use super::build::StandInModel;
use super::run;
use crate::{Dialogue, Episode, Filter, Prompt, PromptInput, PromptTask, Reward, Sample, Settings, StyleScorer};
use expected::{
    Compared, JudgementExpected, MessagesExpected, RewriteExpected, ScoreExpected, VerdictExpected, verdicts,
};
use std::path::{Path, PathBuf};

/// The golden cases of a plugin; made by [`golden`].
pub struct Golden {
    folder: PathBuf,
    cases: Vec<Case>,
}

struct Case {
    /// File and line.
    origin: String,
    name: String,
    settings: Settings,
    body: Body,
}

enum Body {
    Reward(Box<Episode>, ScoreExpected),
    Filter(Vec<Sample>, Vec<VerdictExpected>),
    Messages(PromptTask, PromptInput, MessagesExpected),
    ParseRewrite(String, RewriteExpected),
    ParseJudgement(String, JudgementExpected),
    Style(Dialogue, StandInModel, ScoreExpected),
}

/// Reads all `.jsonl` files of a folder; a relative path starts at the plugin's folder.
///
/// Each kind of the plugin then runs its cases:
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
/// One case a line, each with a `name`, and with `settings` where it needs any:
///
/// ```text
/// reward        {"name": "赢", "episode": {"query": …, "policy": …, "baseline": …},
///                "expect": {"total": 0.5, "tolerance": 1e-9, "components": {"win": 0.5}}}      or {"rejected": "code"}
/// filter        {"name": "重复", "samples": [{"original_query": …, "rewritten_query": …}], "expect": ["keep", {"drop": "code"}]}
/// prompt        {"name": "评审", "task": "judge", "input": {"query": …, "context": …, "rewrite": …},
///                "expect": {"contains": ["…"]}}                                                or {"messages": [{"role", "content"}]}
///               {"name": "引号", "parse_rewrite": "“胶原”", "expect": {"rewrite": "胶原"}}      or {"rejected": "code"}
///               {"name": "分数", "parse_judgement": "…", "expect": {"score": 4.5}}              or {"rejected": "code"}
/// style scorer  {"name": "客气", "dialogue": {"turns": […]}, "style_model": [{"label": "售前", "probability": 1.0}],
///                "expect": {"total": 0.9}}                                                      or {"rejected": "code"}
/// ```
///
/// # Panics
/// The folder cannot be read, or a line is no case; the message names file and line.
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
        for (line, number) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            let origin = format!("{}:{number}", path.display());
            cases.push(read::case(line, &origin).unwrap_or_else(|message| panic!("{origin}: {message}")));
        }
    }
    Golden { folder: folder.to_owned(), cases }
}

impl Golden {
    /// Runs the cases for a reward.
    ///
    /// # Panics
    /// A case does not hold, or there is none.
    #[track_caller]
    pub fn reward<T: Reward>(&self) -> &Self {
        self.all("reward", |case| {
            let Body::Reward(episode, expected) = &case.body else { return None };
            let said = run::reward::<T>(case.settings.clone()).score(episode);
            Some(expected.compare(&said))
        })
    }

    /// Runs the cases for a filter.
    ///
    /// # Panics
    /// A case does not hold, or there is none.
    #[track_caller]
    pub fn filter<T: Filter>(&self) -> &Self {
        self.all("filter", |case| {
            let Body::Filter(samples, expected) = &case.body else { return None };
            let said = run::filter::<T>(case.settings.clone()).check(samples.iter().cloned());
            Some(verdicts(expected, &said))
        })
    }

    /// Runs the cases for prompts and the parsing of answers.
    ///
    /// # Panics
    /// A case does not hold, or there is none.
    #[track_caller]
    pub fn prompt<T: Prompt>(&self) -> &Self {
        self.all("prompt", |case| {
            let plugin = || run::prompt::<T>(case.settings.clone());
            match &case.body {
                Body::Messages(task, input, expected) => Some(expected.compare(&plugin().messages(*task, input))),
                Body::ParseRewrite(text, expected) => Some(expected.compare(&plugin().parse_rewrite(text))),
                Body::ParseJudgement(text, expected) => Some(expected.compare(&plugin().parse_judgement(text))),
                _ => None,
            }
        })
    }

    /// Runs the cases for a style scorer.
    ///
    /// # Panics
    /// A case does not hold, or there is none.
    #[track_caller]
    pub fn style_scorer<T: StyleScorer>(&self) -> &Self {
        self.all("style scorer", |case| {
            let Body::Style(dialogue, model, expected) = &case.body else { return None };
            let said = run::style_scorer::<T>(case.settings.clone()).score(dialogue, model);
            Some(expected.compare(&said))
        })
    }

    /// `run` gives `None` for a case of another kind.
    #[track_caller]
    fn all(&self, kind: &str, run: impl Fn(&Case) -> Option<Compared>) -> &Self {
        let compared = self.cases.iter().filter_map(|case| Some((case, run(case)?)));
        let compared: Vec<_> = compared.collect();
        assert!(!compared.is_empty(), "{}: no case for a {kind}", self.folder.display());
        let differs = |(case, compared): &(&Case, Compared)| {
            let message = compared.as_ref().err()?;
            Some(format!("{} `{}`: {message}", case.origin, case.name))
        };
        let different: Vec<_> = compared.iter().filter_map(differs).collect();
        let (n_different, n_cases) = (different.len(), compared.len());
        assert!(different.is_empty(), "{n_different} of {n_cases} golden cases do not hold:\n{}", different.join("\n"));
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
