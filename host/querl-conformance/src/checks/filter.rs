//! Checks of filters.

use super::{Section, batch, reward::repeat_checks};
use crate::corpus::samples;
use crate::subject::Subject;
use querl_plugin::PluginKind;

pub(super) fn check(subject: &Subject<'_>, section: &mut Section) {
    let port = match subject.filter(subject.settings()) {
        Ok(port) => port,
        Err(error) => return super::not_configured(section, &error),
    };
    section.add(
        "length",
        "one verdict per sample, in the order of the samples",
        batch::length(&port, &samples::batch(64)),
    );
    section.add(
        "looks_back_only",
        "a verdict may depend on the samples before it in the batch, and on nothing else",
        batch::prefixes(&port, &samples::repeated(24)),
    );
    repeat_checks(subject, section, PluginKind::Filter);
    for group in samples::groups() {
        let rule = match group.name {
            "hits" => "hits are empty where nothing was found; a sample is kept or dropped, a fault is no verdict",
            _ => "texts are UTF-8 of any length, an empty text is a text",
        };
        section.add(format!("inputs_{}", group.name), rule, batch::inputs(&port, &group));
    }
}
