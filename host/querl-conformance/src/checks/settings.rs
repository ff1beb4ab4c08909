//! What a plugin does with its settings, and whether that is what plugin.toml says of them.

use super::repeat;
use crate::section::{CheckResult, Section, Violation};
use crate::subject::Subject;
use querl_bundle::{SettingSpec, SettingType};
use querl_core::text::plural;
use querl_plugin::{PluginError, PluginSettings};
use std::collections::BTreeMap;
use toml::Value;

/// A key that no plugin declares.
const UNKNOWN: &str = "no_plugin_knows_this";

const NO_MANIFEST: &str = "a bare component: no plugin.toml";
const NO_SETTINGS: &str = "the plugin has no settings";

/// Name and rule of a check.
type Rule = (&'static str, &'static str);

const READ: Rule =
    ("settings_are_read", "check-settings reads every key that the plugin knows, whatever the values of the others");
const REFUSED: Rule = (
    "settings_are_refused",
    "a value of another type, outside of minimum and maximum or not among the choices is refused",
);
const ACCEPTED: Rule = (
    "settings_are_accepted",
    "what plugin.toml allows is accepted, and after an ok no later call may fail because of the settings",
);
const DEFAULTS: Rule = (
    "defaults",
    "a default in plugin.toml is what the plugin takes where the user sets nothing: given by hand it gives the same \
     bytes",
);

type Specs = BTreeMap<String, SettingSpec>;

pub(crate) fn check(subject: &Subject<'_>, section: &mut Section) {
    section.add(
        "unknown_setting",
        "a key that the user set and that check-settings does not read is reported to the user as unknown",
        || refused(subject, UNKNOWN, &Value::Integer(1)).map(|()| String::new()),
    );
    // The host compares plugin.toml with the description; a component of contract 0.2 has a description even without plugin.toml.
    let described = subject.plugin.description().settings.as_ref();
    let why = match described.or(subject.plugin.manifest().map(|manifest| &manifest.settings)) {
        None => NO_MANIFEST,
        Some(settings) if settings.is_empty() => NO_SETTINGS,
        Some(settings) => return of_schema(subject, settings, section),
    };
    for (name, rule) in [READ, REFUSED, ACCEPTED, DEFAULTS] {
        section.skip(name, rule, why);
    }
}

fn of_schema(subject: &Subject<'_>, specs: &Specs, section: &mut Section) {
    let read = all_read(subject, specs);
    let is_read = read.is_ok();
    section.add(READ.0, READ.1, || read);
    section.add(REFUSED.0, REFUSED.1, || wrong_are_refused(subject, specs));
    if is_read {
        section.add(ACCEPTED.0, ACCEPTED.1, || allowed_are_accepted(subject, specs));
        return section.add(DEFAULTS.0, DEFAULTS.1, || defaults_agree(subject, specs));
    }
    for (name, rule) in [ACCEPTED, DEFAULTS] {
        section.skip(name, rule, "not before settings_are_read passes");
    }
}

fn all_read(subject: &Subject<'_>, specs: &Specs) -> CheckResult {
    let mut n_read = 0;
    for (key, spec) in specs {
        let Some(value) = spec.default.clone().or_else(|| allowed(spec).into_iter().next()) else { continue };
        accepted(subject, key, &value)?;
        n_read += 1;
    }
    Ok(plural(n_read, "setting"))
}

fn allowed_are_accepted(subject: &Subject<'_>, specs: &Specs) -> CheckResult {
    let mut n_values = 0;
    for (key, spec) in specs {
        for value in allowed(spec) {
            accepted(subject, key, &value)?;
            n_values += 1;
        }
    }
    Ok(format!("{} at the ends of what is allowed", plural(n_values, "value")))
}

fn wrong_are_refused(subject: &Subject<'_>, specs: &Specs) -> CheckResult {
    let mut n_values = 0;
    for (key, spec) in specs {
        for value in wrong(spec) {
            refused(subject, key, &value)?;
            n_values += 1;
        }
    }
    Ok(plural(n_values, "value"))
}

fn defaults_agree(subject: &Subject<'_>, specs: &Specs) -> CheckResult {
    let answers = |settings: &PluginSettings| {
        repeat::test_results(subject, settings).map_err(|error| Violation::error("check-settings", &error))?
    };
    let unset = answers(subject.settings())?;
    let mut n_defaults = 0;
    for (key, spec) in specs {
        let Some(default) = &spec.default else { continue };
        if subject.settings().contains_key(key) {
            continue;
        }
        for (unset, set) in unset.iter().zip(answers(&with(subject, key, default))?) {
            if *unset != set {
                let sent = format!("an ordinary batch, then the same with {key} = {default}");
                return Err(Violation::new(sent, format!("unset {unset}, then {set}")));
            }
        }
        n_defaults += 1;
    }
    Ok(plural(n_defaults, "setting"))
}

/// The plugin accepts the value and scores with it.
fn accepted(subject: &Subject<'_>, key: &str, value: &Value) -> Result<(), Violation> {
    let sent = format!("{key} = {value}");
    match repeat::test_results(subject, &with(subject, key, value)) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(violation)) => Err(Violation { sent: format!("{sent}; {}", violation.sent), ..violation }),
        Err(error) => Err(Violation::error(sent, &error)),
    }
}

/// The host or the plugin rejects the value.
fn refused(subject: &Subject<'_>, key: &str, value: &Value) -> Result<(), Violation> {
    let sent = format!("{key} = {value}");
    match repeat::test_results(subject, &with(subject, key, value)) {
        Err(PluginError::Setting { .. }) => Ok(()),
        Err(error) => Err(Violation::error(sent, &error)),
        Ok(_) => Err(Violation::new(sent, "accepted")),
    }
}

/// The settings of this test with one key replaced.
fn with(subject: &Subject<'_>, key: &str, value: &Value) -> PluginSettings {
    let mut settings = subject.settings().clone();
    settings.insert(key.into(), value.clone());
    settings
}

/// Boundary values that the schema allows.
fn allowed(spec: &SettingSpec) -> Vec<Value> {
    let bounds = [spec.minimum, spec.maximum].into_iter().flatten();
    match spec.kind {
        SettingType::Number => bounds.map(Value::Float).collect(),
        SettingType::Integer => bounds.map(|bound| Value::Integer(bound as i64)).collect(),
        SettingType::Boolean => vec![true.into(), false.into()],
        SettingType::Text => spec.choices.iter().map(|choice| choice.as_str().into()).collect(),
        SettingType::List => vec![Value::Array(Vec::new())],
    }
}

/// Values just outside the schema.
fn wrong(spec: &SettingSpec) -> Vec<Value> {
    let text = || Value::from("不是这个");
    let (below, above) = (spec.minimum.map(|bound| bound - step(bound)), spec.maximum.map(|bound| bound + step(bound)));
    let beyond = [below, above].into_iter().flatten();
    match spec.kind {
        SettingType::Number => [text(), true.into()].into_iter().chain(beyond.map(Value::Float)).collect(),
        SettingType::Integer => {
            let beyond = beyond.map(|bound| Value::Integer(bound as i64));
            [text(), Value::Float(1.5)].into_iter().chain(beyond).collect()
        }
        SettingType::Boolean => vec![text(), 1.into()],
        SettingType::Text if spec.choices.is_empty() => vec![1.into(), true.into()],
        SettingType::Text => vec![1.into(), text()],
        SettingType::List => vec![text(), Value::Array(vec![1.into()])],
    }
}

/// A step that changes `bound` at its magnitude.
fn step(bound: f64) -> f64 {
    (bound.abs() * 1e-3).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_bundle::Manifest;

    #[test]
    fn values_at_the_ends_are_allowed_and_those_beyond_are_not() {
        let manifest = Manifest::parse(
            "[plugin]\nid = 'x'\nversion = '0.1.0'\ncontract = '0.1.0'\nkinds = ['filter']\n
            description = 'x'\nlicense = 'x'\n
            [settings.number]\ntype = 'number'\nminimum = -1e6\nmaximum = 1e6\n[settings.open]\ntype = 'number'\n
            [settings.integer]\ntype = 'integer'\nminimum = 1\nmaximum = 9\n[settings.flag]\ntype = 'boolean'\n
            [settings.choice]\ntype = 'text'\nchoices = ['宽', '严']\n[settings.text]\ntype = 'text'\n
            [settings.list]\ntype = 'list'\n",
            "plugin.toml",
        )
        .unwrap();
        for (key, spec) in &manifest.settings {
            assert!(allowed(spec).iter().all(|value| spec.accepts(value)), "{key}: {:?}", allowed(spec));
            assert!(!wrong(spec).iter().any(|value| spec.accepts(value)), "{key}: {:?}", wrong(spec));
            assert!(wrong(spec).len() >= 2, "{key}");
        }
        assert_eq!(allowed(&manifest.settings["integer"]), [Value::Integer(1), Value::Integer(9)]);
        assert_eq!(wrong(&manifest.settings["integer"])[2..], [Value::Integer(0), Value::Integer(10)]);
    }
}
