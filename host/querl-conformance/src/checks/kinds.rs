//! The checks of each kind of plugin. The style model of style scorers is a stand-in: its output has no meaning, and is always the same.

use super::{batch, repeat};
use crate::corpus::prompts as prompts_corpus;
use crate::corpus::prompts::odd;
use crate::corpus::{dialogues, episodes, samples};
use crate::section::{CheckResult, Section, Violation, report_not_configured};
use crate::shown;
use crate::subject::{BatchPort, FailingModel, Subject};
use querl_core::ports::{PluginFault, PromptTask, Prompts, RewardModel, RewardRange, StyleModel};
use querl_core::records::Episode;
use querl_plugin::{PluginKind, RewardForm};
use std::sync::Arc;

/// The reward under the settings of the suite, with the check of its range.
fn configured(subject: &Subject<'_>, section: &mut Section) -> Option<Box<dyn RewardModel>> {
    let port = match subject.reward(subject.settings()) {
        Ok(port) => port,
        Err(error) => {
            report_not_configured(section, &error);
            return None;
        }
    };
    let RewardRange { min, max } = port.range();
    section.add(
        "range",
        "`range` is two finite numbers, the first below the second; under default settings those of plugin.toml",
        || Ok(format!("{min} to {max}")),
    );
    Some(port)
}

pub(super) fn check_reward(subject: &Subject<'_>, section: &mut Section) {
    let Some(port) = configured(subject, section) else { return };
    let mixed = episodes::batch(64);
    section.add("length_and_order", "one result per episode, in the order of the episodes", || {
        batch::length_and_order(&port, &mixed)
    });
    section.add(
        "batch_equals_singles",
        "a result depends on its own episode and the settings, and on nothing else: not on the other episodes of the \
         batch",
        || batch::batch_equals_singles(&port, &mixed),
    );
    check_forms(subject, section, &[mixed]);
    repeat_checks(subject, section, PluginKind::Reward);
    check_inputs(&port, section);
}

/// Each item of the corpus alone.
fn check_inputs(port: &impl BatchPort<Item = Episode>, section: &mut Section) {
    for group in episodes::groups() {
        let rule = match group.name {
            "failures" => {
                "a call that failed on either side is a reason to reject; a rejection is an answer, a fault is not"
            }
            "judgements" => {
                "not judged, judged and failed are three different things; a rejection is an answer, a fault is not"
            }
            "hits" => "an empty list of hits is an answer: nothing was found; a total is finite and within `range`",
            "absent" => "what is unknown is `none`; a rejection is a result, a fault is not",
            "texts" | "long" | "columns" => "texts are UTF-8 of any length, an empty text is a text",
            _ => "a total is finite and within `range`, a component finite, or the episode is rejected",
        };
        section.add(format!("inputs_{}", group.name), rule, || batch::inputs(port, &group));
    }
}

/// Results in the forms that a reward has in addition to records.
fn check_forms(subject: &Subject<'_>, section: &mut Section, batches: &[Vec<Episode>]) {
    const ONLY_FAULTS: &str = "every call ended in a fault, so that no results can be compared";
    let plugin = subject.plugin;
    let packed = (
        "packed_equals_records",
        "`packed-rewards` gives the results of the list form, to the bit",
        RewardForm::Packed,
    );
    let json =
        ("json_equals_records", "`json-rewards` gives the results of the list form, to the bit", RewardForm::Json);
    match plugin.has_packed_rewards() {
        true => section
            .add_or_skip(packed.0, packed.1, ONLY_FAULTS, || batch::form_equals_records(subject, packed.2, batches)),
        false => section.skip(packed.0, packed.1, "the component exports no `packed-rewards`"),
    }
    if plugin.has_json_rewards() {
        section.add_or_skip(json.0, json.1, ONLY_FAULTS, || batch::form_equals_records(subject, json.2, batches));
    }
}

pub(super) fn check_group_reward(subject: &Subject<'_>, section: &mut Section) {
    let Some(port) = configured(subject, section) else { return };
    let group = episodes::sample_group("batch", 8);
    section.add(
        "order",
        "one result per episode, in the order of the episodes, which the results do not depend on",
        || batch::length_and_order(&port, &group),
    );
    let groups = [group.clone(), episodes::sample_group("other", 5)];
    section.add(
        "groups",
        "a result depends on the episodes of its group and the settings, and on nothing else",
        || batch::groups_alone(&port, &groups),
    );
    check_forms(subject, section, &groups);
    repeat_checks(subject, section, PluginKind::GroupReward);
    check_inputs(&port, section);
}

/// The checks `repeat` and `threads`, for any kind.
pub(super) fn repeat_checks(subject: &Subject<'_>, section: &mut Section, kind: PluginKind) {
    let options = subject.options;
    let call = match repeat::test_call(subject, kind, subject.settings()) {
        Ok(call) => call,
        Err(error) => return report_not_configured(section, &error),
    };
    section.add(
        "repeat",
        "the same arguments and settings give the same bytes back and use the same fuel; no state passes from \
         one call to the next",
        || repeat::repeat(&call, options.n_repeats),
    );
    section.add(
        "threads",
        "the same arguments and settings give the same bytes back and use the same fuel, on every thread",
        || repeat::threads(&call, options.n_repeats, options.n_threads),
    );
}

pub(super) fn check_filter(subject: &Subject<'_>, section: &mut Section) {
    let port = match subject.filter(subject.settings()) {
        Ok(port) => port,
        Err(error) => return report_not_configured(section, &error),
    };
    section.add("length", "one verdict per sample, in the order of the samples", || {
        batch::length(&port, &samples::batch(64))
    });
    section.add(
        "looks_back_only",
        "a verdict may depend on the samples before it in the batch, and on nothing else",
        || batch::prefixes(&port, &samples::repeated(24)),
    );
    repeat_checks(subject, section, PluginKind::Filter);
    for group in samples::groups() {
        let rule = match group.name {
            "hits" => "hits are empty where nothing was found; a sample is kept or dropped, a fault is no verdict",
            _ => "texts are UTF-8 of any length, an empty text is a text",
        };
        section.add(format!("inputs_{}", group.name), rule, || batch::inputs(&port, &group));
    }
}

pub(super) fn check_prompt(subject: &Subject<'_>, section: &mut Section) {
    let prompts = match subject.prompts(subject.settings()) {
        Ok(prompts) => prompts,
        Err(error) => return report_not_configured(section, &error),
    };
    for task in PromptTask::ALL {
        section.add(
            format!("messages_{}", task.name()),
            "at least one message, the last from the user, a system message only at the start; texts are of any length",
            || messages(&*prompts, task),
        );
    }
    repeat_checks(subject, section, PluginKind::Prompt);
    section.add(
        "parse_rewrite",
        "a result is never empty or all blanks: an answer without a rewrite is a rejection",
        || parsed(&prompts_corpus::for_rewrite(), |text| prompts.parse_rewrite(text).map(|parsed| parsed.is_ok())),
    );
    section.add(
        "parse_judgement",
        "the score lies in 0 to 5; an answer without a score, or with one outside of this range, is a rejection, never \
         a guess",
        || parsed(&prompts_corpus::for_judgement(), |text| prompts.parse_judgement(text).map(|parsed| parsed.is_ok())),
    );
}

fn messages(prompts: &dyn Prompts, task: PromptTask) -> CheckResult {
    let inputs = odd(task);
    for case in &inputs {
        prompts.messages(task, &case.input()).map_err(|fault| Violation::fault(shown::compact(case), &fault))?;
    }
    Ok(format!("{} inputs", inputs.len()))
}

fn parsed(answers: &[String], parse: impl Fn(&str) -> Result<bool, PluginFault>) -> CheckResult {
    let mut n_parsed = 0;
    for answer in answers {
        let is_parsed = parse(answer).map_err(|fault| Violation::fault(shown::compact(answer), &fault))?;
        n_parsed += usize::from(is_parsed);
    }
    Ok(format!("{} answers, {} rejected", answers.len(), answers.len() - n_parsed))
}

pub(super) fn check_style(subject: &Subject<'_>, section: &mut Section) {
    let port = match subject.style_scorer(subject.settings()) {
        Ok(port) => port,
        Err(error) => return report_not_configured(section, &error),
    };
    let mixed = dialogues::batch(64);
    section.add("length_and_order", "one result per dialogue, in the order of the dialogues", || {
        batch::length_and_order(&port, &mixed)
    });
    section.add(
        "batch_equals_singles",
        "a result depends on its own dialogue, the settings and what `style-model.classify` says of it, and on nothing \
         else",
        || batch::batch_equals_singles(&port, &mixed),
    );
    repeat_checks(subject, section, PluginKind::StyleScorer);
    for group in dialogues::groups() {
        section.add(
            format!("inputs_{}", group.name),
            "a total is 0 (worst) to 1 (best), or the dialogue is rejected; texts are of any length, an empty text is \
             a text",
            || batch::inputs(&port, &group).map(|note| format!("{note}; the style model is a stand-in")),
        );
    }
    section.add(
        "no_style_model",
        "`classify` says not-configured where the run has no style model: an answer or a rejection follows, never a \
         fault",
        || with_model(subject, None),
    );
    section.add(
        "failing_style_model",
        "`classify` says failed where the model gave no answer: an answer or a rejection follows, never a fault",
        || with_model(subject, Some(Arc::new(FailingModel))),
    );
}

fn with_model(subject: &Subject<'_>, model: Option<Arc<dyn StyleModel>>) -> CheckResult {
    let port = subject.style_scorer_with(subject.settings(), model);
    let port = port.map_err(|error| Violation::error("check-settings", &error))?;
    let items = dialogues::ordinary_batch(8);
    let answers = port.ask(&items).map_err(|fault| Violation::fault("a batch of 8 dialogues", &fault))?;
    let n_rejected = answers.iter().filter(|answer| answer.starts_with("{\"rejected\"")).count();
    Ok(format!("{} dialogues, {n_rejected} rejected", items.len()))
}
