//! Golden cases: what a plugin's author says comes of what.
//!
//! `golden/*.jsonl` beside `plugin.toml`, one case a line. Every case has a `name`, and `settings` where it needs any;
//! a key that no case has is refused. Of episodes, samples and dialogues the `id` may be left out.
//!
//! ```text
//! reward        {"name": "赢", "episode": {"query": …, "policy": …, "baseline": …},
//!                "expect": {"total": 0.5, "tolerance": 1e-9, "components": {"win": 0.5}}}
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
//! `tolerance` is 1e-9 where it is left out and holds for the total and the components; components that a case does not
//! name are not compared. `contains` is looked for in the texts of all messages. Without `style_model` the run has
//! none.

mod expect;
mod parse;
mod run;

pub use expect::{JudgementExpected, MessagesExpected, RewriteExpected, ScoreExpected, VerdictExpected};
pub use parse::parse;
pub(crate) use run::{check, check_rest};

use querl_bundle::Bundle;
use querl_core::ports::PromptTask;
use querl_core::records::{Context, Dialogue, Episode, Sample, StyleProbability};
use querl_plugin::{Plugin, PluginKind, PluginSettings};
use std::path::{Path, PathBuf};

/// One golden case.
#[derive(Debug, Clone, PartialEq)]
pub struct GoldenCase {
    /// File and line.
    pub origin: String,
    /// What it shows.
    pub name: String,
    /// The settings that it is made under; none of the suite's own.
    pub settings: PluginSettings,
    /// What is sent and what must come back.
    pub body: GoldenBody,
}

/// What is sent and what must come back.
#[derive(Debug, Clone, PartialEq)]
pub enum GoldenBody {
    /// To a reward.
    Reward {
        /// The episode to score.
        episode: Box<Episode>,
        /// Its score.
        expect: ScoreExpected,
    },
    /// To a filter.
    Filter {
        /// One batch.
        samples: Vec<Sample>,
        /// One for each sample.
        expect: Vec<VerdictExpected>,
    },
    /// To a prompt.
    Messages {
        /// What the prompt is made for.
        task: PromptTask,
        /// What the user typed.
        query: String,
        /// Who asks, and what was said before.
        context: Context,
        /// The rewrite to judge.
        rewrite: Option<String>,
        /// The conversation.
        expect: MessagesExpected,
    },
    /// To a prompt.
    ParseRewrite {
        /// A model's answer.
        text: String,
        /// The rewrite in it.
        expect: RewriteExpected,
    },
    /// To a prompt.
    ParseJudgement {
        /// A judge's answer.
        text: String,
        /// The judgement in it.
        expect: JudgementExpected,
    },
    /// To a style scorer.
    Style {
        /// The dialogue to score.
        dialogue: Dialogue,
        /// What the style model says; `None` where the run has none.
        style_model: Option<Vec<StyleProbability>>,
        /// Its score.
        expect: ScoreExpected,
    },
}

/// Why a file of golden cases, or a line of it, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {message}")]
pub struct GoldenError {
    /// File, and line where it is a line.
    pub origin: String,
    /// Expected and got.
    pub message: String,
}

impl GoldenBody {
    /// The kind of plugin that it is for.
    pub fn kind(&self) -> PluginKind {
        match self {
            Self::Reward { .. } => PluginKind::Reward,
            Self::Filter { .. } => PluginKind::Filter,
            Self::Messages { .. } | Self::ParseRewrite { .. } | Self::ParseJudgement { .. } => PluginKind::Prompt,
            Self::Style { .. } => PluginKind::StyleScorer,
        }
    }
}

/// The cases beside a plugin, in the order of files and lines.
pub(crate) fn of_plugin(path: &Path, plugin: &Plugin) -> Vec<Result<GoldenCase, GoldenError>> {
    let files = match (path.is_dir(), plugin.bundle()) {
        (true, _) => of_folder(path, plugin.manifest().map_or("golden", |manifest| &manifest.plugin.golden)),
        (false, Some(_)) => of_bundle(path),
        (false, None) => Ok(Vec::new()),
    };
    match files {
        Ok(files) => files.iter().flat_map(|(name, text)| parse(text, name)).collect(),
        Err(error) => vec![Err(error)],
    }
}

/// Name and text of each file.
type Files = Vec<(String, String)>;

fn of_folder(folder: &Path, golden: &str) -> Result<Files, GoldenError> {
    let golden = folder.join(golden);
    if !golden.exists() {
        return Ok(Vec::new());
    }
    let unreadable = |path: &Path, error: &dyn std::fmt::Display| GoldenError {
        origin: path.display().to_string(),
        message: format!("cannot be read: {error}"),
    };
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

fn of_bundle(path: &Path) -> Result<Files, GoldenError> {
    let refused = |origin: String, message: String| GoldenError { origin, message };
    let bundle = Bundle::open(path).map_err(|error| refused(path.display().to_string(), error.to_string()))?;
    let read = |(name, bytes): (&str, &[u8])| match std::str::from_utf8(bytes) {
        Ok(text) => Ok((name.to_owned(), text.to_owned())),
        Err(_) => Err(refused(name.to_owned(), "is not UTF-8 text".into())),
    };
    bundle.golden().map(read).collect()
}
