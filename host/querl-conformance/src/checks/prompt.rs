//! Checks of prompts.

use super::{Broken, Found, Section, reward::repeat_checks};
use crate::corpus::answers;
use crate::corpus::inputs::{TASKS, name, odd};
use crate::shown;
use crate::subject::Subject;
use querl_core::ports::{PluginFault, PromptTask, Prompts};
use querl_plugin::PluginKind;

pub(super) fn check(subject: &Subject<'_>, section: &mut Section) {
    let prompts = match subject.prompts(subject.settings()) {
        Ok(prompts) => prompts,
        Err(error) => return super::not_configured(section, &error),
    };
    for task in TASKS {
        section.add(
            format!("messages_{}", name(task)),
            "at least one message, the last from the user, a system message only at the start; texts are of any length",
            messages(&*prompts, task),
        );
    }
    repeat_checks(subject, section, PluginKind::Prompt);
    section.add(
        "parse_rewrite",
        "a result is never empty or all blanks: an answer without a rewrite is a rejection",
        parsed(&answers::for_rewrite(), |text| prompts.parse_rewrite(text).map(|parsed| parsed.is_ok())),
    );
    section.add(
        "parse_judgement",
        "the score lies in 0 to 5; an answer without a score, or with one outside of this range, is a rejection, never \
         a guess",
        parsed(&answers::for_judgement(), |text| prompts.parse_judgement(text).map(|parsed| parsed.is_ok())),
    );
}

fn messages(prompts: &dyn Prompts, task: PromptTask) -> Found {
    let inputs = odd(task);
    for asked in &inputs {
        prompts.messages(task, &asked.input()).map_err(|fault| Broken::fault(shown::compact(asked), &fault))?;
    }
    Ok(format!("{} inputs", inputs.len()))
}

/// Each answer is parsed or rejected.
fn parsed(answers: &[String], parse: impl Fn(&str) -> Result<bool, PluginFault>) -> Found {
    let mut n_parsed = 0;
    for answer in answers {
        let is_parsed = parse(answer).map_err(|fault| Broken::fault(shown::compact(answer), &fault))?;
        n_parsed += usize::from(is_parsed);
    }
    Ok(format!("{} answers, {} rejected", answers.len(), answers.len() - n_parsed))
}
