//! Parsing and checking the text of a manifest.

use super::settings::{SettingSpec, spec};
use super::{
    BUNDLE_FORMAT, BuildSection, BundleSection, CONTRACT, CONTRACTS, HostInterface, Kind, Language, Manifest,
    PluginSection, RequestedLimits,
};
use crate::document::{Document, Section, nearest, or_list};
use crate::error::BundleError;
use querl_core::text::disturbs;
use semver::Version;
use std::collections::BTreeMap;
use toml::Value;

const LONGEST_NAME: usize = 64;
/// Maximum length of a description, which is one line of a listing.
const LONGEST_LINE: usize = 300;
/// Size of a WebAssembly page, the smallest possible memory.
const WASM_PAGE: i64 = 65_536;

pub(super) fn manifest(text: &str, origin: &str) -> Result<Manifest, BundleError> {
    let document = Document::parse(text, origin)?;
    let root = document.root(&["plugin", "settings", "limits", "build", "bundle"])?;
    let keys = ["id", "version", "contract", "kinds", "description", "license", "range", "host_functions", "golden"];
    let Some(plugin) = root.section("plugin", &keys)? else {
        return Err(root.error("", "the section [plugin] is missing"));
    };
    Ok(Manifest {
        plugin: plugin_section(&plugin)?,
        settings: settings(&root)?,
        limits: asked_limits(&root)?,
        build: build(&root)?,
        bundle: bundle(&root)?,
    })
}

fn plugin_section(section: &Section<'_>) -> Result<PluginSection, BundleError> {
    let kinds = kinds(section)?;
    let (id, version) = (id(section)?, version(section, "version", "0.1.0")?);
    let contract = contract(section)?;
    if contract.minor == CONTRACTS[0].minor && kinds.contains(&Kind::GroupReward) {
        return Err(
            section.error("contract", format!("is {contract}, which has no `group-reward`; build it for {CONTRACT}"))
        );
    }
    Ok(PluginSection {
        id,
        version,
        host_functions: host_functions(section, &kinds, &contract)?,
        contract,
        description: short_line(section, "description", "what the plugin does, in a few words")?,
        license: short_line(section, "license", "a licence, such as Apache-2.0")?,
        range: range(section, &kinds)?,
        golden: golden(section)?,
        kinds,
    })
}

fn id(section: &Section<'_>) -> Result<String, BundleError> {
    const MEANING: &str = "1 to 64 of a to z, 0 to 9 and -";
    let id = section.line("id", MEANING)?;
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    match id.len() <= LONGEST_NAME && id.chars().all(fits) {
        true => Ok(id.to_owned()),
        false => Err(section.wrong("id", &Value::from(id), MEANING)),
    }
}

fn short_line(section: &Section<'_>, key: &str, meaning: &str) -> Result<String, BundleError> {
    let line = section.line(key, meaning)?;
    match line.chars().count() <= LONGEST_LINE {
        true => Ok(line.to_owned()),
        false => Err(section.wrong(key, &Value::from(line), format!("{meaning}, at most {LONGEST_LINE} characters"))),
    }
}

fn version(section: &Section<'_>, key: &str, example: &str) -> Result<Version, BundleError> {
    let meaning = format!("a semantic version, such as {example}");
    let text = section.line(key, &meaning)?;
    let parsed = Version::parse(text).ok().filter(|_| text.len() <= LONGEST_NAME);
    parsed.ok_or_else(|| section.wrong(key, &Value::from(text), meaning))
}

fn contract(section: &Section<'_>) -> Result<Version, BundleError> {
    let contract = version(section, "contract", &CONTRACT.to_string())?;
    let is_ours = |ours: &Version| (contract.major, contract.minor) == (ours.major, ours.minor);
    if contract.pre.is_empty() && CONTRACTS.iter().any(is_ours) {
        return Ok(contract);
    }
    let ours = CONTRACTS.map(|ours| format!("{}.{}.x", ours.major, ours.minor)).join(", ");
    Err(section.error(
        "contract",
        match contract > CONTRACT {
            true => format!(
                "is {contract}, which is newer than the contract of this querl ({ours}); use a newer querl, or build the \
                 plugin for {CONTRACT}"
            ),
            false => format!("is {contract}, which this querl does not speak; build the plugin for {CONTRACT} ({ours})"),
        },
    ))
}

/// Host functions of contract 0.2, each allowed for one of the kinds.
fn host_functions(
    section: &Section<'_>,
    kinds: &[Kind],
    contract: &Version,
) -> Result<Vec<HostInterface>, BundleError> {
    const KEY: &str = "host_functions";
    let Some(names) = section.texts(KEY)? else { return Ok(Vec::new()) };
    if contract.minor == CONTRACTS[0].minor {
        return Err(
            section.error(KEY, format!("is for contract {CONTRACT}; leave it out, or build the plugin for {CONTRACT}"))
        );
    }
    let mut interfaces = Vec::new();
    for name in names {
        let all = || HostInterface::ALL.iter().map(|interface| interface.name());
        let Some(interface) = HostInterface::from_name(name) else {
            let value = section.value(KEY).expect("the list was just read");
            return Err(section.wrong(KEY, value, format!("a list of {}", or_list(all()))));
        };
        if !kinds.iter().any(|kind| interface.is_for(*kind)) {
            let kinds = or_list(kinds.iter().map(|kind| kind.name()));
            return Err(
                section.error(KEY, format!("has `{name}`, which a {kinds} plugin must not import; take it out"))
            );
        }
        if interfaces.contains(&interface) {
            return Err(section.error(KEY, format!("has `{name}` twice; expected each interface once")));
        }
        interfaces.push(interface);
    }
    interfaces.sort();
    Ok(interfaces)
}

fn kinds(section: &Section<'_>) -> Result<Vec<Kind>, BundleError> {
    let meaning = format!("a list of {}", or_list(Kind::ALL.iter().map(|kind| kind.name())));
    let names = section.texts("kinds")?.ok_or_else(|| section.missing("kinds", &meaning))?;
    let value = section.value("kinds").expect("the list was just read");
    if names.is_empty() {
        return Err(section.wrong("kinds", value, meaning));
    }
    let mut kinds = Vec::new();
    for name in names {
        let Some(kind) = Kind::from_name(name) else {
            let near = nearest(name, Kind::ALL.iter().map(|kind| kind.name()));
            let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            return Err(section.wrong("kinds", value, format!("{meaning}{hint}")));
        };
        if kinds.contains(&kind) {
            return Err(section.error("kinds", format!("has `{kind}` twice; expected each kind once")));
        }
        kinds.push(kind);
    }
    if [Kind::Reward, Kind::GroupReward].iter().all(|kind| kinds.contains(kind)) {
        return Err(section.error("kinds", "has `reward` and `group-reward`; expected one of them"));
    }
    kinds.sort();
    Ok(kinds)
}

fn range(section: &Section<'_>, kinds: &[Kind]) -> Result<Option<(f64, f64)>, BundleError> {
    const MEANING: &str = "two finite numbers, the lower one first, such as [0.0, 1.0]";
    let is_reward = kinds.iter().any(|kind| matches!(kind, Kind::Reward | Kind::GroupReward));
    match (section.value("range"), is_reward) {
        (None, false) => Ok(None),
        (None, true) => Err(section.missing("range", MEANING)),
        (Some(_), false) => Err(section.error("range", "is for rewards alone; leave it out, or add `reward` to kinds")),
        (Some(value), true) => match bounds(value) {
            Some((min, max)) if min.is_finite() && max.is_finite() && min < max => Ok(Some((min, max))),
            _ => Err(section.wrong("range", value, MEANING)),
        },
    }
}

fn bounds(value: &Value) -> Option<(f64, f64)> {
    match value.as_array()?.as_slice() {
        [min, max] => Some((number(min)?, number(max)?)),
        _ => None,
    }
}

/// An integer or a float as a float.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        _ => None,
    }
}

fn golden(section: &Section<'_>) -> Result<String, BundleError> {
    const MEANING: &str = "a folder below the plugin's own, such as golden";
    let Some(text) = section.text("golden")? else { return Ok("golden".to_owned()) };
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', ':']);
    let fits = text.split('/').all(is_plain) && !text.chars().any(disturbs);
    match fits {
        true => Ok(text.to_owned()),
        false => Err(section.wrong("golden", &Value::from(text), MEANING)),
    }
}

fn settings(root: &Section<'_>) -> Result<BTreeMap<String, SettingSpec>, BundleError> {
    let Some(section) = root.open_section("settings")? else { return Ok(BTreeMap::new()) };
    let mut settings = BTreeMap::new();
    for key in section.keys() {
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if key.is_empty() || key.len() > LONGEST_NAME || !key.chars().all(fits) {
            let message = format!("has the key {key:?}; expected 1 to 64 letters, digits, _ and -");
            return Err(section.error("", message));
        }
        settings.insert(key.to_owned(), spec(&section, key)?);
    }
    Ok(settings)
}

fn asked_limits(root: &Section<'_>) -> Result<RequestedLimits, BundleError> {
    let keys = [
        "fuel_per_call",
        "fuel_per_item",
        "timeout_ms",
        "memory_bytes",
        "output_bytes",
        "log_bytes",
        "host_calls_per_item",
    ];
    let Some(section) = root.section("limits", &keys)? else { return Ok(RequestedLimits::default()) };
    let bytes = |key, minimum| -> Result<Option<usize>, BundleError> {
        let Some(count) = section.count(key, minimum)? else { return Ok(None) };
        let fits = usize::try_from(count);
        fits.map(Some).map_err(|_| section.error(key, "is more than this machine can address"))
    };
    Ok(RequestedLimits {
        fuel_per_call: section.count("fuel_per_call", 0)?,
        fuel_per_item: section.count("fuel_per_item", 1)?,
        timeout_ms: section.count("timeout_ms", 1)?,
        memory_bytes: bytes("memory_bytes", WASM_PAGE)?,
        output_bytes: bytes("output_bytes", 1)?,
        log_bytes: bytes("log_bytes", 0)?,
        host_calls_per_item: section.count("host_calls_per_item", 1)?,
    })
}

fn build(root: &Section<'_>) -> Result<Option<BuildSection>, BundleError> {
    let Some(section) = root.section("build", &["language"])? else { return Ok(None) };
    let meaning = or_list(Language::ALL.iter().map(|language| language.name()));
    let name = section.line("language", &meaning)?;
    let language = Language::from_name(name);
    let language = language.ok_or_else(|| section.wrong("language", &Value::from(name), meaning))?;
    Ok(Some(BuildSection { language }))
}

fn bundle(root: &Section<'_>) -> Result<Option<BundleSection>, BundleError> {
    // The format comes before the other keys, since a later format may have others.
    let Some(open) = root.open_section("bundle")? else { return Ok(None) };
    let format = open.count("format", 1)?.ok_or_else(|| open.missing("format", "a whole number"))?;
    if format != BUNDLE_FORMAT {
        let message = format!("is {format}; this querl reads format {BUNDLE_FORMAT}; use a newer querl");
        return Err(open.error("format", message));
    }
    let keys = ["format", "component", "component_bytes"];
    let section = root.section("bundle", &keys)?.expect("the section was just opened");
    let component = section.digest("component")?;
    let component_bytes = section.count("component_bytes", 1)?;
    Ok(Some(BundleSection {
        format,
        component: component.ok_or_else(|| section.missing("component", "the digest of plugin.wasm"))?,
        component_bytes: component_bytes.ok_or_else(|| section.missing("component_bytes", "a whole number"))?,
    }))
}
