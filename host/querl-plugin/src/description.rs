//! The description that a plugin returns from `info.describe`, checked: kinds, settings, range of totals, inputs.

use crate::limits::check_range;
use crate::load::PluginKind;
use crate::series::Series;
use crate::text::{is_code, is_name, printable};
use querl_bundle::{Manifest, SettingSpec, SettingType};
use querl_core::ports::{EpisodeInputs, InputUse, RewardRange};
use querl_core::text::disturbs;
use semver::Version;
use std::collections::BTreeMap;
use toml::Value;

/// Maximum number of settings per plugin.
const MAX_SETTINGS: usize = 256;

const MAX_VERSION_BYTES: usize = 64;

/// Maximum size of a choice of a setting; messages show it.
const MAX_CHOICE_BYTES: usize = 1000;

/// A plugin's description of itself, from `info.describe`. In contract 0.1 it has only name and version, and the kinds are those
/// whose interfaces the component exports.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// Id of the plugin: 1 to 64 of `a` to `z`, `0` to `9`, `-`.
    pub name: String,
    /// A semantic version, for example `0.1.0`.
    pub version: String,
    /// Version of the contract with which this host runs the component: `0.1.0` or `0.2.0`.
    pub contract: String,
    /// Kinds of plugin that the component exports; at least one, in the order of [`PluginKind::ALL`].
    pub kinds: Vec<PluginKind>,
    /// Declared settings by key; `None` for contract 0.1.
    pub settings: Option<BTreeMap<String, SettingSpec>>,
    /// Range of total scores under default settings; `None` for plugins that are not rewards, for contract 0.1, and if a setting
    /// has no default.
    pub range: Option<RewardRange>,
    /// Parts of an episode that a reward reads, or of a sample that a filter reads.
    pub inputs: EpisodeInputs,
}

/// The result of `info.describe`, before it is checked.
pub(crate) struct RawDescription {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Kinds, settings, range and inputs; `None` for contract 0.1, which does not declare them.
    pub(crate) declared: Option<RawDeclaration>,
}

/// The declaration of a plugin of contract 0.2, unchecked: kinds, setting types and inputs are names of the contract.
pub(crate) struct RawDeclaration {
    pub(crate) kinds: Vec<String>,
    pub(crate) settings: Vec<RawSetting>,
    pub(crate) range: Option<RewardRange>,
    /// Name of each input, and whether it is required.
    pub(crate) inputs: Vec<(String, bool)>,
}

pub(crate) struct RawSetting {
    pub(crate) key: String,
    pub(crate) value_type: String,
    pub(crate) default: Option<String>,
    pub(crate) minimum: Option<f64>,
    pub(crate) maximum: Option<f64>,
    pub(crate) choices: Option<Vec<String>>,
    pub(crate) doc: Option<String>,
}

impl RawDescription {
    /// Checks the description against the kinds that the component exports.
    ///
    /// # Errors
    /// One sentence with the expected and the actual value.
    pub(crate) fn checked(self, series: Series, exported: Vec<PluginKind>) -> Result<Description, String> {
        let is_plain = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
        let is_version = self.version.len() <= MAX_VERSION_BYTES && Version::parse(&self.version).is_ok();
        if !is_name(&self.name, is_plain) || !is_version {
            let (name, version) = (printable(&self.name, 100), printable(&self.version, 100));
            return Err(format!(
                "it calls itself `{name}`, version `{version}`; expected lower-case letters, digits and `-`, and a semantic \
                 version such as 0.1.0"
            ));
        }
        let is_reward = exported.iter().any(|kind| matches!(kind, PluginKind::Reward | PluginKind::GroupReward));
        let inputs_of_0_1 = if is_reward { EpisodeInputs::CONTRACT_0_1 } else { EpisodeInputs::default() };
        let mut description = Description {
            name: self.name,
            version: self.version,
            contract: series.version(),
            kinds: exported,
            settings: None,
            range: None,
            inputs: inputs_of_0_1,
        };
        let Some(declared) = self.declared else { return Ok(description) };
        check_kinds(&declared.kinds, &description.kinds)?;
        let settings = settings(declared.settings)?;
        let is_usable_without_settings = settings.values().all(|spec| spec.default.is_some());
        match (declared.range, is_reward) {
            (Some(_), false) => return Err("its `describe` has a range, and it is no reward; leave it out".into()),
            (None, true) if is_usable_without_settings => {
                return Err("its `describe` has no range, and every setting has a default; add the range".into());
            }
            (range, _) => description.range = range.map(check_range).transpose()?,
        }
        description.inputs = inputs(&declared.inputs)?;
        description.settings = Some(settings);
        Ok(description)
    }
}

impl Description {
    /// Checks that plugin.toml agrees with the description; the help texts of settings are only in plugin.toml.
    ///
    /// # Errors
    /// Both values.
    pub(crate) fn check_manifest(&self, manifest: &Manifest) -> Result<(), String> {
        let declared = &manifest.plugin;
        let series =
            |version: &str| version.rsplit_once('.').map(|(series, _)| format!("{series}.x")).unwrap_or_default();
        let mut facts = vec![
            ("plugin.id", declared.id.clone(), self.name.clone()),
            ("plugin.version", declared.version.to_string(), self.version.clone()),
            ("plugin.kinds", kind_names(&declared.kinds), kind_names(&self.kinds)),
            ("plugin.contract", series(&declared.contract.to_string()), series(&self.contract)),
        ];
        if let (Some(range), Some((min, max))) = (self.range, declared.range) {
            facts.push(("plugin.range", format!("{min} to {max}"), format!("{} to {}", range.min, range.max)));
        }
        if let Some((key, declared, actual)) = facts.into_iter().find(|(_, declared, actual)| declared != actual) {
            return Err(format!("its plugin.toml says `{declared}` under `{key}`; the component says `{actual}`"));
        }
        let Some(described) = self.settings.as_ref().filter(|_| !manifest.settings.is_empty()) else { return Ok(()) };
        if let Some(key) = described.keys().find(|key| !manifest.settings.contains_key(*key)) {
            return Err(format!("the component describes the setting `{key}`, which its plugin.toml lacks; add it"));
        }
        for (key, ours) in &manifest.settings {
            let Some(theirs) = described.get(key) else {
                return Err(format!("its plugin.toml has the setting `{key}`, which the component does not describe"));
            };
            if !is_same(ours, theirs) {
                return Err(format!(
                    "its plugin.toml says {} for the setting `{key}`; the component says {}",
                    shown(ours),
                    shown(theirs)
                ));
            }
        }
        Ok(())
    }
}

fn kind_names(kinds: &[PluginKind]) -> String {
    kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

/// Type, bounds, choices and default, in words.
fn shown(spec: &SettingSpec) -> String {
    match &spec.default {
        Some(default) => printable(&format!("{}, by default {default}", spec.expected()), 300),
        None => format!("{} without default", printable(&spec.expected(), 300)),
    }
}

fn is_same(one: &SettingSpec, other: &SettingSpec) -> bool {
    let number = |value: &Value| value.as_float().or(value.as_integer().map(|number| number as f64));
    let is_same_default = match (&one.default, &other.default) {
        (Some(one), Some(other)) => one == other || number(one).is_some_and(|one| number(other) == Some(one)),
        (one, other) => one.is_none() && other.is_none(),
    };
    let facts = |spec: &SettingSpec| (spec.kind, spec.minimum, spec.maximum, spec.choices.clone());
    is_same_default && facts(one) == facts(other)
}

/// The known kinds are those that the component exports. Kinds of later versions are ignored.
fn check_kinds(names: &[String], exported: &[PluginKind]) -> Result<(), String> {
    let mut kinds: Vec<_> = names.iter().filter_map(|name| PluginKind::from_name(name)).collect();
    kinds.sort();
    if kinds == exported {
        return Ok(());
    }
    let said = printable(&names.join(", "), 200);
    Err(format!("its `describe` says that its kinds are `{said}`; it exports those of `{}`", kind_names(exported)))
}

fn inputs(names: &[(String, bool)]) -> Result<EpisodeInputs, String> {
    let mut inputs = EpisodeInputs::default();
    for (name, is_required) in names {
        let input = match name.as_str() {
            "response" => &mut inputs.response,
            "prompt" => &mut inputs.prompt,
            "columns" => &mut inputs.columns,
            "baseline" => &mut inputs.baseline,
            "retrieval" => &mut inputs.retrieval,
            "judgement" => &mut inputs.judgement,
            "style" => &mut inputs.style,
            _ if !is_required => continue,
            other => {
                let name = printable(other, 100);
                return Err(format!(
                    "it requires the input `{name}`, which this host does not know; use a newer querl"
                ));
            }
        };
        let used = if *is_required { InputUse::Required } else { InputUse::Optional };
        if *input != InputUse::Unused {
            return Err(format!("its `describe` has the input `{name}` twice; expected each input once"));
        }
        *input = used;
    }
    Ok(inputs)
}

fn settings(described: Vec<RawSetting>) -> Result<BTreeMap<String, SettingSpec>, String> {
    if described.len() > MAX_SETTINGS {
        return Err(format!("its `describe` has {} settings; expected at most {MAX_SETTINGS}", described.len()));
    }
    let mut settings = BTreeMap::new();
    for setting in described {
        let key = setting.key.clone();
        if !is_code(&key) {
            let shown = printable(&key, 100);
            return Err(format!("its `describe` has the setting `{shown}`; expected 1 to 64 of a to z, 0 to 9 and _"));
        }
        let spec = spec(setting).map_err(|reason| format!("its `describe`, setting `{key}`: {reason}"))?;
        if settings.insert(key.clone(), spec).is_some() {
            return Err(format!("its `describe` has the setting `{key}` twice; expected each key once"));
        }
    }
    Ok(settings)
}

fn spec(setting: RawSetting) -> Result<SettingSpec, String> {
    let kind = match setting.value_type.as_str() {
        "text" => SettingType::Text,
        "number" => SettingType::Number,
        "integer" => SettingType::Integer,
        "flag" => SettingType::Boolean,
        "texts" => SettingType::List,
        other => {
            let shown = printable(other, 100);
            return Err(format!("its type is `{shown}`, which this host does not know; use a newer querl"));
        }
    };
    let is_number = matches!(kind, SettingType::Number | SettingType::Integer);
    let bounds = [setting.minimum, setting.maximum];
    if !is_number && bounds != [None, None] {
        return Err("has bounds, which are for numbers and integers".into());
    }
    if bounds.into_iter().flatten().any(|bound| !bound.is_finite()) {
        return Err("has a bound that is not finite".into());
    }
    if let [Some(min), Some(max)] = bounds
        && min > max
    {
        return Err(format!("its maximum is {max}; expected {min} (the minimum) or more"));
    }
    let choices = setting.choices.unwrap_or_default();
    if kind != SettingType::Text && !choices.is_empty() {
        return Err("has choices, which are for texts".into());
    }
    let is_shown = |text: &String| text.len() <= MAX_CHOICE_BYTES && !text.chars().any(disturbs);
    if !choices.iter().all(is_shown) {
        return Err(format!("has a choice with control characters or of more than {MAX_CHOICE_BYTES} bytes"));
    }
    let doc = printable(&setting.doc.unwrap_or_default(), 1000);
    let mut spec =
        SettingSpec { kind, default: None, minimum: setting.minimum, maximum: setting.maximum, choices, doc };
    if let Some(text) = setting.default {
        let default = value(kind, &text).filter(|default| spec.accepts(default));
        let refused =
            || format!("its default is `{}`; expected {}", printable(&text, 100), printable(&spec.expected(), 300));
        spec.default = Some(default.ok_or_else(refused)?);
    }
    Ok(spec)
}

/// A value in the text form of `settings.get`.
fn value(kind: SettingType, text: &str) -> Option<Value> {
    match kind {
        SettingType::Text => Some(Value::String(text.to_owned())),
        SettingType::Number => text.parse().ok().map(Value::Float),
        SettingType::Integer => text.parse().ok().map(Value::Integer),
        SettingType::Boolean => text.parse().ok().map(Value::Boolean),
        SettingType::List => {
            let texts: Vec<String> = serde_json::from_str(text).ok()?;
            Some(texts.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(key: &str, value_type: &str, default: Option<&str>) -> RawSetting {
        let (minimum, maximum, choices, doc) = (None, None, None, None);
        RawSetting {
            key: key.into(),
            value_type: value_type.into(),
            default: default.map(str::to_owned),
            minimum,
            maximum,
            choices,
            doc,
        }
    }

    fn described(change: impl FnOnce(&mut RawDeclaration)) -> Result<Description, String> {
        let range = Some(RewardRange { min: 0.0, max: 1.0 });
        let mut declared =
            RawDeclaration { kinds: vec!["reward".into()], settings: Vec::new(), range, inputs: Vec::new() };
        change(&mut declared);
        let raw = RawDescription { name: "x".into(), version: "0.1.0".into(), declared: Some(declared) };
        raw.checked(Series::V0_2, vec![PluginKind::Reward])
    }

    #[test]
    fn settings_become_those_of_a_manifest() {
        let all = [
            ("a", "text", Some("胶")),
            ("b", "number", Some("0.5")),
            ("c", "integer", Some("3")),
            ("d", "flag", Some("true")),
            ("e", "texts", Some(r#"["x"]"#)),
            ("f", "text", None),
        ];
        let described = described(|declared| {
            declared.settings = all.iter().map(|(key, kind, default)| setting(key, kind, *default)).collect();
            declared.range = None;
        });
        let settings = described.unwrap().settings.unwrap();
        let defaults: Vec<_> = settings.values().map(|spec| spec.default.clone()).collect();
        let expected = [
            Some("胶".into()),
            Some(0.5.into()),
            Some(3.into()),
            Some(true.into()),
            Some(Value::Array(vec!["x".into()])),
            None,
        ];
        assert_eq!(defaults, expected);
    }

    #[test]
    fn wrong_descriptions_are_refused_in_one_sentence() {
        type Change = Box<dyn FnOnce(&mut RawDeclaration)>;
        let with = |one: RawSetting| -> Change { Box::new(move |declared| declared.settings.push(one)) };
        let cases: Vec<(Change, &str)> = vec![
            (with(setting("A b", "text", None)), "setting `A b`; expected 1 to 64 of a to z"),
            (with(setting("a", "colour", None)), "its type is `colour`, which this host does not know"),
            (with(setting("a", "integer", Some("0.5"))), "its default is `0.5`; expected a whole number"),
            (with(setting("a", "number", Some("NaN"))), "its default is `NaN`; expected a number"),
            (
                with(RawSetting { minimum: Some(f64::NAN), ..setting("a", "number", None) }),
                "has a bound that is not finite",
            ),
            (
                with(RawSetting { minimum: Some(0.0), ..setting("a", "text", None) }),
                "has bounds, which are for numbers",
            ),
            (
                Box::new(|declared| declared.settings = vec![setting("a", "text", None), setting("a", "flag", None)]),
                "setting `a` twice",
            ),
            (
                Box::new(|declared| {
                    declared.settings = (0..257).map(|n| setting(&format!("k{n}"), "flag", None)).collect()
                }),
                "has 257 settings; expected at most 256",
            ),
            (Box::new(|declared| declared.kinds.push("filter".into())), "its kinds are `reward, filter`; it exports"),
            (Box::new(|declared| declared.kinds.clear()), "its kinds are ``; it exports those of `reward`"),
            (Box::new(|declared| declared.range = None), "has no range, and every setting has a default"),
            (
                Box::new(|declared| declared.range = Some(RewardRange { min: 1.0, max: 1.0 })),
                "declares the range 1 to 1; expected two finite numbers",
            ),
            (Box::new(|declared| declared.inputs = vec![("weather".into(), true)]), "requires the input `weather`"),
            (
                Box::new(|declared| declared.inputs = vec![("style".into(), true), ("style".into(), false)]),
                "the input `style` twice",
            ),
        ];
        for (change, expected) in cases {
            let message = described(change).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
        let inputs = described(|declared| declared.inputs = vec![("weather".into(), false), ("style".into(), true)]);
        assert_eq!(inputs.unwrap().inputs, EpisodeInputs { style: InputUse::Required, ..EpisodeInputs::default() });
    }
}
