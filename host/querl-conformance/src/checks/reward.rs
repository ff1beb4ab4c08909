//! Checks of rewards.

use super::{Section, batch, forms, repeat, round};
use crate::corpus::episodes;
use crate::subject::Subject;
use querl_core::ports::RewardRange;
use querl_plugin::PluginKind;

pub(super) fn check(subject: &Subject<'_>, section: &mut Section) {
    let port = match subject.reward(subject.settings()) {
        Ok(port) => port,
        Err(error) => return super::not_configured(section, &error),
    };
    let RewardRange { min, max } = port.range();
    section.add(
        "range",
        "`range` is two finite numbers, the first below the second; under default settings those of plugin.toml",
        Ok(format!("{min} to {max}")),
    );
    let mixed = episodes::batch(64);
    section.add(
        "length_and_order",
        "one result per episode, in the order of the episodes",
        batch::length_and_order(&port, &mixed),
    );
    section.add(
        "batch_equals_singles",
        "a result depends on its own episode and the settings, and on nothing else: not on the other episodes of the \
         batch",
        batch::batch_equals_singles(&port, &mixed),
    );
    let (name, rule) = ("packed_equals_records", "`packed-rewards` gives the results of `rewards`, to the bit");
    match subject.plugin.has_packed_rewards() {
        true => section.add(name, rule, forms::packed_equals_records(subject)),
        false => section.skip(name, rule, "the component exports no `packed-rewards`"),
    }
    repeat_checks(subject, section, PluginKind::Reward);
    for group in episodes::groups() {
        let rule = match group.name {
            "failures" => {
                "a call that failed on either side is a reason to reject; a rejection is an answer, a fault is not"
            }
            "judgements" => {
                "not judged, judged and failed are three different things; a rejection is an answer, a fault is not"
            }
            "hits" => "an empty list of hits is an answer: nothing was found; a total is finite and within `range`",
            "texts" | "long" => "texts are UTF-8 of any length, an empty text is a text",
            _ => "a total is finite and within `range`, a component finite, or the episode is rejected",
        };
        section.add(format!("inputs_{}", group.name), rule, batch::inputs(&port, &group));
    }
}

/// `repeat` and `threads`, of any kind.
pub(super) fn repeat_checks(subject: &Subject<'_>, section: &mut Section, kind: PluginKind) {
    let options = subject.options;
    let round = match round::of(subject, kind, subject.settings()) {
        Ok(round) => round,
        Err(error) => return super::not_configured(section, &error),
    };
    section.add(
        "repeat",
        "the same arguments and settings give the same bytes back and use the same fuel; no state passes from \
         one call to the next",
        repeat::repeat(&round, options.n_repeats),
    );
    section.add(
        "threads",
        "the same arguments and settings give the same bytes back and use the same fuel, on every thread",
        repeat::threads(&round, options.n_repeats, options.n_threads),
    );
}
