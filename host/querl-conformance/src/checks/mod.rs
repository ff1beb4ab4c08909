//! The checks: a rule of the contract each.

use crate::meter::Meter;
use crate::section::{CheckResult, Section, Violation};
use crate::subject::Subject;
use querl_plugin::{Plugin, PluginError, PluginHost, PluginKind};

mod batch;
pub(crate) mod columns;
pub(crate) mod cost;
mod kinds;
mod repeat;
pub(crate) mod settings;

/// Runs all checks of one kind of plugin except golden cases and cost.
pub(crate) fn of_kind(subject: &Subject<'_>, kind: PluginKind) -> Section {
    let mut section = Section::new(Some(kind), &subject.options.progress);
    match kind {
        PluginKind::Reward => kinds::check_reward(subject, &mut section),
        PluginKind::GroupReward => kinds::check_group_reward(subject, &mut section),
        PluginKind::Filter => kinds::check_filter(subject, &mut section),
        PluginKind::Prompt => kinds::check_prompt(subject, &mut section),
        PluginKind::StyleScorer => kinds::check_style(subject, &mut section),
    }
    section
}

/// Configures every kind with the settings of this test.
pub(crate) fn configured(subject: &Subject<'_>) -> Result<(), PluginError> {
    subject.plugin.kinds().iter().try_for_each(|kind| repeat::test_call(subject, *kind, subject.settings()).map(drop))
}

/// The rules that the host enforces when it loads a plugin with a manifest.
pub(crate) const MANIFEST: &str = "plugin.toml is readable, says the name, version, kinds and range that the component \
                                   has, and asks for no more than the host allows";

pub(crate) fn check_identity(subject: &Subject<'_>, section: &mut Section) {
    match subject.plugin.manifest() {
        Some(_) => section.add("manifest", MANIFEST, || Ok(String::new())),
        None => section.skip("manifest", MANIFEST, "a bare component: no plugin.toml"),
    }
    section.add(
        "identity",
        "`describe` gives a name of 1 to 64 of a to z, 0 to 9 and -, and a semantic version",
        || identity(subject.plugin),
    );
}

/// Checks that `describe` returns the same in another host.
pub(crate) fn check_description(subject: &Subject<'_>, section: &mut Section) {
    section.add("description", "the result of `describe` is always the same", || {
        let violation = |error: &PluginError| Violation::error("describe()", error);
        let host =
            PluginHost::new(subject.options.host_options(&Meter::default())).map_err(|error| violation(&error))?;
        let again = host.load(subject.plugin.path()).map_err(|error| violation(&error))?;
        let (first, again) = (subject.plugin.description(), again.description());
        match first == again {
            true => Ok(format!("contract {}", first.contract)),
            false => Err(Violation::new("describe() in two hosts", format!("first {first:?}, then {again:?}"))),
        }
    });
}

fn identity(plugin: &Plugin) -> CheckResult {
    let is_name = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
    let name_fits = (1..=64).contains(&plugin.id().len()) && plugin.id().chars().all(is_name);
    if name_fits && semver::Version::parse(plugin.version()).is_ok() {
        return Ok(String::new());
    }
    Err(Violation::new("describe()", format!("name `{}`, version `{}`", plugin.id(), plugin.version())))
}
