//! Checks of style scorers. The style model is a stand-in: what it says means nothing, and is the same every time.

use super::{Broken, Found, Section, batch, reward::repeat_checks};
use crate::corpus::dialogues;
use crate::style_model::Failing;
use crate::subject::{Batches, Subject};
use querl_core::ports::StyleModel;
use querl_plugin::PluginKind;
use std::sync::Arc;

pub(super) fn check(subject: &Subject<'_>, section: &mut Section) {
    let port = match subject.style_scorer(subject.settings()) {
        Ok(port) => port,
        Err(error) => return super::not_configured(section, &error),
    };
    let mixed = dialogues::batch(64);
    section.add(
        "length_and_order",
        "one result per dialogue, in the order of the dialogues",
        batch::length_and_order(&port, &mixed),
    );
    section.add(
        "batch_equals_singles",
        "a result depends on its own dialogue, the settings and what `style-model.classify` says of it, and on nothing \
         else",
        batch::batch_equals_singles(&port, &mixed),
    );
    repeat_checks(subject, section, PluginKind::StyleScorer);
    for group in dialogues::groups() {
        section.add(
            format!("inputs_{}", group.name),
            "a total is 0 (worst) to 1 (best), or the dialogue is rejected; texts are of any length, an empty text is \
             a text",
            batch::inputs(&port, &group).map(|note| format!("{note}; the style model is a stand-in")),
        );
    }
    section.add(
        "no_style_model",
        "`classify` says not-configured where the run has no style model: an answer or a rejection follows, never a \
         fault",
        with_model(subject, None),
    );
    section.add(
        "failing_style_model",
        "`classify` says failed where the model gave no answer: an answer or a rejection follows, never a fault",
        with_model(subject, Some(Arc::new(Failing))),
    );
}

fn with_model(subject: &Subject<'_>, model: Option<Arc<dyn StyleModel>>) -> Found {
    let port = subject.style_scorer_with(subject.settings(), model);
    let port = port.map_err(|error| Broken::error("check-settings", &error))?;
    let items = dialogues::ordinary_batch(8);
    let answers = port.ask(&items).map_err(|fault| Broken::fault("a batch of 8 dialogues", &fault))?;
    let n_rejected = answers.iter().filter(|answer| answer.starts_with("{\"rejected\"")).count();
    Ok(format!("{} dialogues, {n_rejected} rejected", items.len()))
}
