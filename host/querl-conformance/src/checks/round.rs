//! A small ordinary call for each kind: what is repeated, and what tells two configurations apart.

use super::Broken;
use crate::corpus::{dialogues, episodes, inputs, samples};
use crate::shown;
use crate::subject::{Batches, Subject};
use querl_core::ports::{ParsedJudgement, PluginFault, Prompts};
use querl_core::records::Rejection;
use querl_plugin::{PluginError, PluginKind, PluginSettings};
use serde_json::json;

/// Items of a round's batch.
const N_ITEMS: usize = 4;

/// A call that can be made again and again.
pub(crate) struct Round {
    /// What is sent, for people.
    pub(crate) sent: String,
    pub(crate) run: Box<dyn Fn() -> Result<Vec<String>, PluginFault> + Send + Sync>,
}

/// The round of one kind under these settings.
pub(crate) fn of(subject: &Subject<'_>, kind: PluginKind, settings: &PluginSettings) -> Result<Round, PluginError> {
    Ok(match kind {
        PluginKind::Reward => of_batch(subject.reward(settings)?, episodes::ordinary_batch(N_ITEMS)),
        PluginKind::Filter => of_batch(subject.filter(settings)?, samples::repeated(N_ITEMS)),
        PluginKind::StyleScorer => of_batch(subject.style_scorer(settings)?, dialogues::ordinary_batch(N_ITEMS)),
        PluginKind::Prompt => of_prompts(subject.prompts(settings)?),
    })
}

/// Configures every kind and makes its round: the answers, or how it went wrong.
pub(crate) fn answers(
    subject: &Subject<'_>,
    settings: &PluginSettings,
) -> Result<Result<Vec<String>, Broken>, PluginError> {
    let mut answers = Vec::new();
    for kind in subject.plugin.kinds() {
        let round = of(subject, *kind, settings)?;
        match (round.run)() {
            Ok(more) => answers.extend(more),
            Err(fault) => return Ok(Err(Broken::fault(round.sent, &fault))),
        }
    }
    Ok(Ok(answers))
}

fn of_batch<B: Batches + 'static>(port: B, items: Vec<B::Item>) -> Round
where
    B::Item: 'static,
{
    let sent = format!("a batch of {}, the first {}", items.len(), shown::item(&items[0]));
    Round { sent, run: Box::new(move || port.ask(&items)) }
}

/// Each task's prompt, and the parsing of two answers.
fn of_prompts(prompts: Box<dyn Prompts>) -> Round {
    const REWRITE: &str = "改写后的查询：“孕妇是否适合服用虾青素软胶囊”";
    const JUDGEMENT: &str = "{\"综合得分\": 4.5, \"评分理由\": \"意图完整\"}";
    let asked = inputs::ordinary();
    let sent = format!(
        "a prompt for each task, the first for {}; the answers `{REWRITE}` and `{JUDGEMENT}`",
        shown::compact(&asked[0])
    );
    let run = move || {
        let mut answers = Vec::new();
        for asked in &asked {
            answers.push(json!(prompts.messages(asked.task, &asked.input())?).to_string());
        }
        answers.push(rewrite(&prompts.parse_rewrite(REWRITE)?));
        answers.push(judgement(&prompts.parse_judgement(JUDGEMENT)?));
        Ok(answers)
    };
    Round { sent, run: Box::new(run) }
}

fn rewrite(parsed: &Result<String, Rejection>) -> String {
    match parsed {
        Ok(rewrite) => json!({"rewrite": rewrite}).to_string(),
        Err(rejection) => json!({"rejected": rejection}).to_string(),
    }
}

fn judgement(parsed: &Result<ParsedJudgement, Rejection>) -> String {
    match parsed {
        Ok(judged) => json!({"score": judged.score, "reason": judged.reason}).to_string(),
        Err(rejection) => json!({"rejected": rejection}).to_string(),
    }
}
