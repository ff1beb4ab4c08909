//! What a plugin says of itself.

use super::{Broken, Found, Section};
use crate::subject::Subject;
use querl_plugin::Plugin;

/// What the host checks when it loads a plugin that has a manifest.
pub(crate) const MANIFEST: &str = "plugin.toml is readable, says the name, version, kinds and range that the component \
                                   has, and asks for no more than the host allows";

pub(crate) fn check(subject: &Subject<'_>, section: &mut Section) {
    match subject.plugin.manifest() {
        Some(_) => section.add("manifest", MANIFEST, Ok(String::new())),
        None => section.skip("manifest", MANIFEST, "a bare component: no plugin.toml"),
    }
    section.add(
        "identity",
        "`describe` gives a name of 1 to 64 of a to z, 0 to 9 and -, and a semantic version",
        identity(subject.plugin),
    );
}

fn identity(plugin: &Plugin) -> Found {
    let is_name = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
    let name_fits = (1..=64).contains(&plugin.id().len()) && plugin.id().chars().all(is_name);
    if name_fits && semver::Version::parse(plugin.version()).is_ok() {
        return Ok(String::new());
    }
    Err(Broken::new("describe()", format!("name `{}`, version `{}`", plugin.id(), plugin.version())))
}
