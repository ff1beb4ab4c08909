//! The checks, by what they look at.

mod batch;
pub(crate) mod cost;
mod filter;
mod forms;
pub(crate) mod identity;
mod prompt;
mod repeat;
mod reward;
mod round;
pub(crate) mod settings;
mod style;

use crate::report::{Check, Failure, Outcome};
use crate::shown;
use crate::subject::Subject;
use querl_core::ports::{FaultKind, PluginFault};
use querl_plugin::{PluginError, PluginKind};

/// What a check tried, where its rule held; else how it was broken.
pub(crate) type Found = Result<String, Broken>;

/// How a rule was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Broken {
    pub(crate) sent: String,
    pub(crate) returned: String,
    /// What the contract says, where it is more than the check's rule.
    pub(crate) expected: Option<String>,
}

impl Broken {
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
    pub(crate) fn add(&mut self, name: impl Into<String>, rule: &str, found: Found) {
        let (note, outcome) = match found {
            Ok(note) => (note, Outcome::Passed),
            Err(broken) => {
                let [sent, returned, expected] =
                    [&broken.sent, &broken.returned, broken.expected.as_deref().unwrap_or(rule)].map(shown::line);
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
        PluginKind::Reward => reward::check(subject, &mut section),
        PluginKind::Filter => filter::check(subject, &mut section),
        PluginKind::Prompt => prompt::check(subject, &mut section),
        PluginKind::StyleScorer => style::check(subject, &mut section),
    }
    section
}

/// A plugin that cannot be configured has nothing more to look at.
fn not_configured(section: &mut Section, error: &PluginError) {
    section.add(
        "configures",
        "a plugin whose settings were accepted can be called",
        Err(Broken::error("check-settings with the settings of this test", error)),
    );
}

/// Configures every kind under the settings of this test.
pub(crate) fn configured(subject: &Subject<'_>) -> Result<(), PluginError> {
    subject.plugin.kinds().iter().try_for_each(|kind| round::of(subject, *kind, subject.settings()).map(drop))
}
