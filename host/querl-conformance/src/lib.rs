//! The conformance suite: checks of the contract's rules on a plugin, with a report.
//!
//! In: the path of a plugin (a component, a source folder, a bundle), settings, limits. Out: a [`Report`]: each check with its rule
//! and, where the rule is broken, what was sent, what was returned and what the contract requires; the plugin's golden cases; the
//! cost of calls. It calls plugins through the host's ports only, as training does, and must not depend on how they are built.
//!
//! It cannot check whether a score is sensible; golden cases can.
//!
//! [`HostSuite`] is the other side: checks of a host, in any language, by probes and real plugins (`querl-conformance --host`).

mod checks;
mod corpus;
mod golden;
mod host;
mod meter;
mod report;
mod section;
mod shown;
mod subject;

pub use golden::{GoldenEpisodes, golden_episodes};
pub use host::{HostArgs, HostSuite, serve_host};
pub use report::{Check, Cost, Failure, Outcome, Report};
pub use section::{CheckEvent, CheckProgress};
pub use subject::SuiteOptions;

use meter::Meter;
use querl_bundle::BundleError;
use querl_plugin::{PluginError, PluginHost};
use section::{Section, Violation};
use std::path::Path;
use subject::Subject;

/// Tests the plugin at `path`.
///
/// # Errors
/// There is nothing to test: no such file, a source that does not build, a host that cannot start, or a
/// setting of `options` that the plugin does not take. What the plugin itself does wrong is in the report.
pub fn run(path: &Path, options: &SuiteOptions) -> Result<Report, PluginError> {
    let meter = Meter::default();
    let host = PluginHost::new(options.host_options(&meter))?;
    let plugin = match host.load(path) {
        Ok(plugin) => plugin,
        Err(error) if is_of_the_plugin(&error) => return Ok(not_loaded(path, &error, options)),
        Err(error) => return Err(error),
    };
    let subject = Subject { host: &host, plugin: &plugin, options };
    let mut whole = Section::new(None, &options.progress);
    whole.add("loads", LOADS, || Ok(String::new()));
    checks::check_identity(&subject, &mut whole);
    checks::check_description(&subject, &mut whole);
    let mut cases = golden::of_plugin(path, &plugin);
    golden::check_lines(plugin.kinds(), &mut cases, &mut whole);
    if takes_settings(&subject)? {
        checks::settings::check(&subject, &mut whole);
    }
    let (mut by_kind, mut cost) = (Vec::new(), Vec::new());
    for kind in plugin.kinds() {
        let mut section = checks::of_kind(&subject, *kind);
        checks::columns::check(&subject, *kind, &cases, &mut section);
        golden::check(&subject, *kind, &mut cases, &mut section);
        by_kind.extend(section.into_checks());
        cost.extend(checks::cost::of_kind(&subject, *kind));
    }
    checks::cost::check_requested_limits(&subject, &meter.peak(), &cost, &mut whole);
    let mut checks = whole.into_checks();
    checks.extend(by_kind);
    Ok(Report {
        plugin: plugin.id().into(),
        version: plugin.version().into(),
        digest: plugin.digest().into(),
        kinds: plugin.kinds().to_vec(),
        checks,
        cost,
    })
}

const LOADS: &str = "a plugin is a WebAssembly component that exports `info` and at least one of `prompts`, `filters`, \
                     `rewards`, `group-rewards` and `style-scores`, and imports what the contract and a standard library need";

/// A report on a plugin that the host rejected.
fn not_loaded(path: &Path, error: &PluginError, options: &SuiteOptions) -> Report {
    let mut section = Section::new(None, &options.progress);
    let (check, rule) = match error {
        PluginError::Manifest { .. } | PluginError::Bundle(_) => ("manifest", checks::MANIFEST),
        _ => ("loads", LOADS),
    };
    section.add(check, rule, || Err(Violation::error(path.display().to_string(), error)));
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    Report {
        plugin: shown::line(&name),
        version: String::new(),
        digest: String::new(),
        kinds: Vec::new(),
        checks: section.into_checks(),
        cost: Vec::new(),
    }
}

/// Whether the plugin, rather than the environment, caused a loading error.
fn is_of_the_plugin(error: &PluginError) -> bool {
    match error {
        PluginError::Bundle(error) => !matches!(error, BundleError::Io { .. }),
        PluginError::NotAPlugin { .. }
        | PluginError::Compile { .. }
        | PluginError::Manifest { .. }
        | PluginError::Fault(_) => true,
        _ => false,
    }
}

/// Whether the plugin accepts the settings. Faults are reported by the checks of each kind.
fn takes_settings(subject: &Subject<'_>) -> Result<bool, PluginError> {
    match checks::configured(subject) {
        Ok(()) => Ok(true),
        Err(error @ PluginError::Setting { .. }) => Err(error),
        Err(_) => Ok(false),
    }
}
