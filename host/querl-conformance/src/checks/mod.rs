//! The checks: a rule of the contract each.

use crate::report::{Check, Failure, Outcome};
use crate::shown;
use crate::subject::Subject;
use querl_core::ports::{FaultKind, PluginFault};
use querl_plugin::{Plugin, PluginError, PluginKind};

mod batch;
pub(crate) mod cost;
mod kinds;
mod repeat;
pub(crate) mod settings;

/// What a check tried, where its rule held; else how it was violation.
pub(crate) type CheckResult = Result<String, Violation>;

/// How a rule was violation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) sent: String,
    pub(crate) returned: String,
    /// What the contract says, where it is more than the check's rule.
    pub(crate) expected: Option<String>,
}

impl Violation {
    pub(crate) fn new(sent: impl Into<String>, returned: impl Into<String>) -> Self {
        Self { sent: sent.into(), returned: returned.into(), expected: None }
    }

    /// A call ended in a fault.
    pub(crate) fn fault(sent: impl Into<String>, fault: &PluginFault) -> Self {
        Self { expected: Some(rule_of(fault.kind).into()), ..Self::new(sent, fault.to_string()) }
    }

    /// Loading or configuring went wrong.
    pub(crate) fn error(sent: impl Into<String>, error: &PluginError) -> Self {
        match error {
            PluginError::Fault(fault) => Self::fault(sent, fault),
            other => Self::new(sent, other.to_string()),
        }
    }
}

/// The sentence of the contract that a fault breaks.
fn rule_of(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::Trap => "a trap is a fault, never a value; what cannot be scored, parsed or kept is a rejection",
        FaultKind::Limit | FaultKind::TooManyDropped => {
            "each call has limits: instructions (per item), wall-clock time, memory, size of what it returns"
        }
        FaultKind::Host => "no rule of the plugin's: this machine could not run it",
        FaultKind::Result => {
            "numbers are finite and within their range, names and codes are 1 to 64 of a to z, 0 to 9 and _, lists \
             of results are as long as the arguments"
        }
    }
}

/// The checks of one kind, or of the plugin as a whole.
#[derive(Debug)]
pub(crate) struct Section {
    kind: Option<PluginKind>,
    checks: Vec<Check>,
}

impl Section {
    pub(crate) fn new(kind: Option<PluginKind>) -> Self {
        Self { kind, checks: Vec::new() }
    }

    /// Writes down what one check found.
    pub(crate) fn add(&mut self, name: impl Into<String>, rule: &str, found: CheckResult) {
        let (note, outcome) = match found {
            Ok(note) => (note, Outcome::Passed),
            Err(violation) => {
                let [sent, returned, expected] =
                    [&violation.sent, &violation.returned, violation.expected.as_deref().unwrap_or(rule)]
                        .map(shown::line);
                (String::new(), Outcome::Failed(Failure { sent, returned, expected }))
            }
        };
        self.checks.push(Check { kind: self.kind, name: name.into(), rule: rule.into(), note, outcome });
    }

    /// Writes down that there was nothing to look at.
    pub(crate) fn skip(&mut self, name: impl Into<String>, rule: &str, why: impl Into<String>) {
        let outcome = Outcome::Skipped { why: why.into() };
        self.checks.push(Check { kind: self.kind, name: name.into(), rule: rule.into(), note: String::new(), outcome });
    }

    pub(crate) fn into_checks(self) -> Vec<Check> {
        self.checks
    }
}

/// Every check of one kind but its golden cases and cost.
pub(crate) fn of_kind(subject: &Subject<'_>, kind: PluginKind) -> Section {
    let mut section = Section::new(Some(kind));
    match kind {
        PluginKind::Reward => kinds::check_reward(subject, &mut section),
        PluginKind::Filter => kinds::check_filter(subject, &mut section),
        PluginKind::Prompt => kinds::check_prompt(subject, &mut section),
        PluginKind::StyleScorer => kinds::check_style(subject, &mut section),
    }
    section
}

/// A plugin that cannot be configured has nothing more to look at.
fn report_not_configured(section: &mut Section, error: &PluginError) {
    section.add(
        "configures",
        "a plugin whose settings were accepted can be called",
        Err(Violation::error("check-settings with the settings of this test", error)),
    );
}

/// Configures every kind under the settings of this test.
pub(crate) fn configured(subject: &Subject<'_>) -> Result<(), PluginError> {
    subject.plugin.kinds().iter().try_for_each(|kind| repeat::test_call(subject, *kind, subject.settings()).map(drop))
}

/// What the host checks when it loads a plugin that has a manifest.
pub(crate) const MANIFEST: &str = "plugin.toml is readable, says the name, version, kinds and range that the component \
                                   has, and asks for no more than the host allows";

pub(crate) fn check_identity(subject: &Subject<'_>, section: &mut Section) {
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

fn identity(plugin: &Plugin) -> CheckResult {
    let is_name = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
    let name_fits = (1..=64).contains(&plugin.id().len()) && plugin.id().chars().all(is_name);
    if name_fits && semver::Version::parse(plugin.version()).is_ok() {
        return Ok(String::new());
    }
    Err(Violation::new("describe()", format!("name `{}`, version `{}`", plugin.id(), plugin.version())))
}
