//! What the suite found.

mod json;
mod junit;
mod text;

pub(crate) use text::grouped;

use querl_plugin::PluginKind;

/// The findings on one plugin, in the order in which they were made.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The plugin's name; the path's last part where the plugin could not be loaded.
    pub plugin: String,
    /// Its version; empty where it could not be loaded.
    pub version: String,
    /// Lower-case hexadecimal SHA-256 of the component; empty where it could not be loaded.
    pub digest: String,
    /// What it is for; empty where it could not be loaded.
    pub kinds: Vec<PluginKind>,
    /// Every check, also those that did not apply.
    pub checks: Vec<Check>,
    /// What it costs, by kind.
    pub cost: Vec<Cost>,
}

/// One rule of the contract, looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The kind that it is about; `None` for the plugin as a whole.
    pub kind: Option<PluginKind>,
    /// Short and stable: `batch_equals_singles`.
    pub name: String,
    /// The rule that it stands for.
    pub rule: String,
    /// How much was tried, for example `1,000 calls`; may be empty.
    pub note: String,
    /// What came out.
    pub outcome: Outcome,
}

/// What came of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The rule held.
    Passed,
    /// The rule was broken.
    Failed(Failure),
    /// There was nothing to look at.
    Skipped {
        /// Why.
        why: String,
    },
}

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What was sent, shortened.
    pub sent: String,
    /// What came back.
    pub returned: String,
    /// What the contract says.
    pub expected: String,
}

/// What calls of one kind cost. Rewards, filters and style scorers: batches of 64 items. Prompts: by call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Of which kind.
    pub kind: PluginKind,
    /// Instructions, the same on every machine.
    pub fuel_per_item: f64,
    /// Wall clock, the median; instance and conversion included.
    pub micros_per_item: f64,
    /// The most linear memory that one call held.
    pub memory_bytes: usize,
    /// Size of the component.
    pub component_bytes: usize,
    /// Wall clock from nothing loaded to the first result, where the compiled code is in the cache.
    pub cold_start_ms: f64,
}

impl Report {
    /// Did every rule hold that was looked at?
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| !matches!(check.outcome, Outcome::Failed(_)))
    }

    /// For a terminal: one line per check, a failure with what was sent, what came back and what the contract says.
    pub fn text(&self) -> String {
        text::render(self)
    }

    /// For programs. `format` is 1:
    ///
    /// ```json
    /// {"format": 1, "plugin": "reward-brevity", "version": "0.1.0", "digest": "…", "kinds": ["reward"], "passed": true,
    ///  "checks": [{"kind": "reward", "name": "repeat", "rule": "…", "note": "1,000 calls", "outcome": "passed"},
    ///             {"kind": null, "name": "…", "rule": "…", "note": "", "outcome": "failed",
    ///              "sent": "…", "returned": "…", "expected": "…"},
    ///             {"kind": "reward", "name": "golden", "rule": "…", "note": "", "outcome": "skipped", "why": "…"}],
    ///  "cost": [{"kind": "reward", "fuel_per_item": 1200.5, "micros_per_item": 1.5, "memory_bytes": 1114112,
    ///            "component_bytes": 45000, "cold_start_ms": 1.2}]}
    /// ```
    ///
    /// Within one format, fields and outcomes may be added; none changes its meaning.
    pub fn json(&self) -> serde_json::Value {
        json::render(self)
    }

    /// For continuous integration: JUnit XML, one suite per kind, one case per check.
    pub fn junit(&self) -> String {
        junit::render(self)
    }

    /// How many checks came out as (passed, failed, skipped).
    fn counts(&self) -> (usize, usize, usize) {
        let count = |wanted: fn(&Outcome) -> bool| self.checks.iter().filter(|check| wanted(&check.outcome)).count();
        (
            count(|outcome| matches!(outcome, Outcome::Passed)),
            count(|outcome| matches!(outcome, Outcome::Failed(_))),
            count(|outcome| matches!(outcome, Outcome::Skipped { .. })),
        )
    }

    /// Name, version and kinds.
    fn title(&self) -> String {
        let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.name()).collect();
        match kinds.is_empty() {
            true => format!("{} (not loaded)", self.plugin),
            false => format!("{} {} ({})", self.plugin, self.version, kinds.join(", ")),
        }
    }
}

impl Check {
    /// Where the check belongs: a kind's name, or `plugin`.
    fn group(&self) -> &'static str {
        self.kind.map_or("plugin", PluginKind::name)
    }
}

#[cfg(test)]
mod tests;
