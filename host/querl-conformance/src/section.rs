//! What checks report: passed, failed with the violation, or skipped.

use crate::report::{Check, Failure, Outcome};
use crate::shown;
use querl_core::ports::{FaultKind, PluginFault};
use querl_plugin::{PluginError, PluginKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Result of a check: the extent of what was checked (may be empty), or the violation.
pub(crate) type CheckResult = Result<String, Violation>;

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) sent: String,
    pub(crate) returned: String,
    /// What the contract requires, if it is more specific than the check's rule.
    pub(crate) expected: Option<String>,
}

impl Violation {
    pub(crate) fn new(sent: impl Into<String>, returned: impl Into<String>) -> Self {
        Self { sent: sent.into(), returned: returned.into(), expected: None }
    }

    /// A violation by a call that ended in a fault.
    pub(crate) fn fault(sent: impl Into<String>, fault: &PluginFault) -> Self {
        Self { expected: Some(rule_of(fault.kind).into()), ..Self::new(sent, fault.to_string()) }
    }

    /// A violation by an error of loading or configuring.
    pub(crate) fn error(sent: impl Into<String>, error: &PluginError) -> Self {
        match error {
            PluginError::Fault(fault) => Self::fault(sent, fault),
            other => Self::new(sent, other.to_string()),
        }
    }
}

/// The contract's sentence that a fault violates.
fn rule_of(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::Trap => "a trap is a fault, never a value; what cannot be scored, parsed or kept is a rejection",
        FaultKind::Limit | FaultKind::TooManyDropped => {
            "each call has limits: instructions (per item), time, memory, size of what it returns"
        }
        FaultKind::Host => "no rule of the plugin's: this machine could not run it",
        FaultKind::Result => {
            "numbers are finite and within their range, names and codes are 1 to 64 of a to z, 0 to 9 and _, a score has at \
             most 64 components, a plugin at most 256 names of them and 256 codes, lists of results are as long as the arguments"
        }
    }
}

/// The start or the end of a check.
#[derive(Debug, Clone, Copy)]
pub enum CheckEvent<'a> {
    /// The check starts.
    Started {
        /// The kind of plugin that the check is about; `None` for the plugin as a whole.
        kind: Option<PluginKind>,
        /// Short and stable name of the check: `batch_equals_singles`.
        name: &'a str,
    },
    /// The check has ended. A check that is skipped without a call has no events.
    Ended {
        /// The check with its result.
        check: &'a Check,
        /// Wall-clock time of the check.
        elapsed: Duration,
    },
}

type Report = dyn Fn(CheckEvent<'_>) + Send + Sync;

/// Callback at the start and at the end of each check.
#[derive(Clone, Default)]
pub struct CheckProgress(Option<Arc<Report>>);

impl CheckProgress {
    /// Makes a callback from the function `report`.
    pub fn new(report: impl Fn(CheckEvent<'_>) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(report)))
    }

    fn report(&self, event: CheckEvent<'_>) {
        if let Some(report) = &self.0 {
            report(event);
        }
    }
}

impl std::fmt::Debug for CheckProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "CheckProgress" } else { "no progress" })
    }
}

/// The checks of one kind, or of the plugin as a whole.
pub(crate) struct Section {
    kind: Option<PluginKind>,
    checks: Vec<Check>,
    progress: CheckProgress,
}

impl Section {
    pub(crate) fn new(kind: Option<PluginKind>, progress: &CheckProgress) -> Self {
        Self { kind, checks: Vec::new(), progress: progress.clone() }
    }

    /// Runs a check and records its result.
    pub(crate) fn add(&mut self, name: impl Into<String>, rule: &str, check: impl FnOnce() -> CheckResult) {
        self.add_or_skip(name, rule, "", || check().map(Some));
    }

    /// As [`add`](Self::add), but a check that returns `None` is recorded as skipped, with the reason `why`.
    pub(crate) fn add_or_skip(
        &mut self,
        name: impl Into<String>,
        rule: &str,
        why: &str,
        check: impl FnOnce() -> Result<Option<String>, Violation>,
    ) {
        let (name, started) = (name.into(), Instant::now());
        self.progress.report(CheckEvent::Started { kind: self.kind, name: &name });
        let (note, outcome) = match check() {
            Ok(Some(note)) => (note, Outcome::Passed),
            Ok(None) => (String::new(), Outcome::Skipped { why: why.into() }),
            Err(violation) => {
                let [sent, returned, expected] =
                    [&violation.sent, &violation.returned, violation.expected.as_deref().unwrap_or(rule)]
                        .map(shown::line);
                (String::new(), Outcome::Failed(Failure { sent, returned, expected }))
            }
        };
        let check = Check { kind: self.kind, name, rule: rule.into(), note, outcome };
        self.progress.report(CheckEvent::Ended { check: &check, elapsed: started.elapsed() });
        self.checks.push(check);
    }

    /// Records a check as skipped, with the reason `why`.
    pub(crate) fn skip(&mut self, name: impl Into<String>, rule: &str, why: impl Into<String>) {
        let outcome = Outcome::Skipped { why: why.into() };
        self.checks.push(Check { kind: self.kind, name: name.into(), rule: rule.into(), note: String::new(), outcome });
    }

    /// The check that was recorded last.
    pub(crate) fn last(&self) -> Option<&Check> {
        self.checks.last()
    }

    pub(crate) fn into_checks(self) -> Vec<Check> {
        self.checks
    }
}

/// Reports a plugin that cannot be configured, which ends the checks of its kind.
pub(crate) fn report_not_configured(section: &mut Section, error: &PluginError) {
    section.add("configures", "a plugin whose settings were accepted can be called", || {
        Err(Violation::error("check-settings with the settings of this test", error))
    });
}
