//! Golden cases, sent.

use super::expect::Difference;
use super::{GoldenBody, GoldenCase, GoldenError};
use crate::checks::{Broken, Found, Section};
use crate::corpus::inputs;
use crate::shown;
use crate::subject::Subject;
use querl_core::ports::{PluginFault, PromptInput, StyleModel};
use querl_core::records::{CallFailure, Message, StyleProbability};
use querl_plugin::{PluginError, PluginKind};
use serde_json::json;
use std::sync::Arc;

const RULE: &str = "the plugin's author says in golden/*.jsonl what comes of what";

/// Takes the cases of one kind out of `cases` and checks them.
pub(crate) fn check(
    subject: &Subject<'_>,
    kind: PluginKind,
    cases: &mut Vec<Result<GoldenCase, GoldenError>>,
    section: &mut Section,
) {
    let is_of_kind = |case: &mut Result<GoldenCase, GoldenError>| matches!(case, Ok(case) if case.body.kind() == kind);
    let of_kind: Vec<_> = cases.extract_if(.., is_of_kind).flatten().collect();
    if of_kind.is_empty() {
        return section.skip("golden", RULE, "no golden cases");
    }
    for case in of_kind {
        let rule = format!("{} says so", case.origin);
        section.add(format!("golden: {}", shown::line(&case.name)), &rule, found(subject, &case));
    }
}

/// What no kind has taken: lines that cannot be used, and cases for a kind that the plugin is not.
pub(crate) fn check_rest(cases: Vec<Result<GoldenCase, GoldenError>>, section: &mut Section) {
    for case in cases {
        let broken = match case {
            Err(error) => Broken::new(error.origin.as_str(), error.to_string()),
            Ok(case) => {
                let kind = case.body.kind().name();
                Broken::new(case.origin.as_str(), format!("`{}` is a case for a {kind}; the plugin is none", case.name))
            }
        };
        section.add("golden", RULE, Err(broken));
    }
}

/// What went wrong with a case.
enum Wrong {
    Different(Difference),
    Error(PluginError),
}

impl From<Difference> for Wrong {
    fn from(difference: Difference) -> Self {
        Self::Different(difference)
    }
}

impl From<PluginError> for Wrong {
    fn from(error: PluginError) -> Self {
        Self::Error(error)
    }
}

impl From<PluginFault> for Wrong {
    fn from(fault: PluginFault) -> Self {
        Self::Error(fault.into())
    }
}

fn found(subject: &Subject<'_>, case: &GoldenCase) -> Found {
    match sent(subject, case) {
        Ok(()) => Ok(String::new()),
        Err(Wrong::Error(error)) => Err(Broken::error(shown_body(case), &error)),
        Err(Wrong::Different(difference)) => Err(Broken {
            sent: shown_body(case),
            returned: difference.returned,
            expected: Some(format!("{} ({})", difference.expected, case.origin)),
        }),
    }
}

fn sent(subject: &Subject<'_>, case: &GoldenCase) -> Result<(), Wrong> {
    let settings = &case.settings;
    match &case.body {
        GoldenBody::Reward { episode, expect } => {
            let scored = subject.reward(settings)?.score_batch(std::slice::from_ref(episode))?;
            scored.iter().try_for_each(|scored| expect.compare(scored))?;
        }
        GoldenBody::Style { dialogue, style_model, expect } => {
            let model = style_model.clone().map(|classes| Arc::new(Fixed(classes)) as Arc<dyn StyleModel>);
            let scorer = subject.style_scorer_with(settings, model)?;
            let scored = scorer.score_batch(std::slice::from_ref(dialogue))?;
            scored.iter().try_for_each(|scored| expect.compare(scored))?;
        }
        GoldenBody::Filter { samples, expect } => {
            let verdicts = subject.filter(settings)?.check_batch(samples)?;
            expect.iter().zip(&verdicts).try_for_each(|(expect, verdict)| expect.compare(verdict))?;
        }
        GoldenBody::Messages { task, query, context, rewrite, expect } => {
            let input = PromptInput { query, context, rewrite: rewrite.as_deref() };
            expect.compare(&subject.prompts(settings)?.messages(*task, &input)?)?;
        }
        GoldenBody::ParseRewrite { text, expect } => {
            expect.compare(&subject.prompts(settings)?.parse_rewrite(text)?)?;
        }
        GoldenBody::ParseJudgement { text, expect } => {
            expect.compare(&subject.prompts(settings)?.parse_judgement(text)?)?;
        }
    }
    Ok(())
}

fn shown_body(case: &GoldenCase) -> String {
    let body = match &case.body {
        GoldenBody::Reward { episode, .. } => shown::item(episode),
        GoldenBody::Filter { samples, .. } => shown::compact(samples),
        GoldenBody::Messages { task, query, context, rewrite, .. } => shown::compact(
            &json!({"task": inputs::name(*task), "query": query, "context": context, "rewrite": rewrite}),
        ),
        GoldenBody::ParseRewrite { text, .. } => shown::compact(text),
        GoldenBody::ParseJudgement { text, .. } => shown::compact(text),
        GoldenBody::Style { dialogue, style_model, .. } => {
            shown::compact(&json!({"dialogue": dialogue, "style_model": style_model}))
        }
    };
    match case.settings.is_empty() {
        true => body,
        false => format!("{body} under {}", shown::compact(&case.settings)),
    }
}

/// Says what the case says.
struct Fixed(Vec<StyleProbability>);

impl StyleModel for Fixed {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        Ok(self.0.clone())
    }
}
