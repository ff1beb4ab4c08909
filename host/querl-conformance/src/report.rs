//! The report: results of checks and costs, as text, JSON and JUnit XML.

use querl_plugin::PluginKind;
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use unicode_width::UnicodeWidthStr;

pub(crate) use querl_core::text::grouped;

/// Results of the conformance suite for one plugin.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The plugin's name; the path's last part where the plugin could not be loaded.
    pub plugin: String,
    /// The plugin's version; empty if the plugin could not be loaded.
    pub version: String,
    /// Lower-case hexadecimal SHA-256 of the component; empty if the plugin could not be loaded.
    pub digest: String,
    /// The plugin's kinds; empty if the plugin could not be loaded.
    pub kinds: Vec<PluginKind>,
    /// All checks in the order in which they were made, skipped ones included.
    pub checks: Vec<Check>,
    /// Cost of calls, by kind of plugin.
    pub cost: Vec<Cost>,
}

/// One check of a rule of the contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The kind of plugin that the check is about; `None` for the plugin as a whole.
    pub kind: Option<PluginKind>,
    /// Short and stable name: `batch_equals_singles`.
    pub name: String,
    /// The rule of the contract that is checked.
    pub rule: String,
    /// Extent of the check, for example `1,000 calls`; may be empty.
    pub note: String,
    /// The result.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Outcome {
    Passed,
    Failed(Failure),
    /// There was nothing to check.
    Skipped {
        why: String,
    },
}

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// What was sent, shortened.
    pub sent: String,
    /// What was returned.
    pub returned: String,
    /// What the contract requires.
    pub expected: String,
}

/// Cost of the calls of one kind of plugin: batches of 64 items for rewards, filters and style scorers, single calls for prompts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// The kind of plugin.
    pub kind: PluginKind,
    /// Fuel (executed WebAssembly instructions) per item, the same on every machine.
    pub fuel_per_item: f64,
    /// Median wall-clock time per item in microseconds, creation of the instance and conversion of values included.
    pub micros_per_item: f64,
    /// Largest linear memory of one call, in bytes.
    pub memory_bytes: usize,
    /// Size of the component in bytes.
    pub component_bytes: usize,
    /// Wall-clock time in milliseconds from an empty host to the first result, with the compiled code in the cache.
    pub cold_start_ms: f64,
}

impl Report {
    /// True if no check failed.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| !matches!(check.outcome, Outcome::Failed(_)))
    }

    /// The report for a terminal: one line per check; for a failure also what was sent, what came back and what the contract requires.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.title());
        if !self.digest.is_empty() {
            let _ = writeln!(text, "sha256 {}", self.digest);
        }
        // A line without a note needs no column: names of golden cases are long.
        let with_note = self.checks.iter().filter(|check| !note(check).is_empty());
        let width = with_note.map(|check| check.name.width()).max().unwrap_or(0);
        let mut group = "";
        for check in &self.checks {
            if check.group() != group {
                group = check.group();
                let _ = writeln!(text, "\n{group}");
            }
            push_check(&mut text, check, width);
        }
        push_costs(&mut text, &self.cost);
        let (n_passed, n_failed, n_skipped) = self.counts();
        let _ = writeln!(text, "\n{n_passed} passed, {n_failed} failed, {n_skipped} skipped");
        text
    }

    /// The report as JSON; `format` is 1:
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
    pub fn json(&self) -> Value {
        json!({
            "format": JSON_FORMAT,
            "plugin": self.plugin,
            "version": self.version,
            "digest": self.digest,
            "kinds": self.kinds,
            "passed": self.passed(),
            "checks": self.checks,
            "cost": self.cost,
        })
    }

    /// The report as JUnit XML, for continuous integration: one suite per kind, one case per check.
    pub fn junit(&self) -> String {
        let mut document = quick_junit::Report::new(format!("querl plugin test {}", self.title()));
        let mut groups: Vec<&str> = Vec::new();
        for check in &self.checks {
            if !groups.contains(&check.group()) {
                groups.push(check.group());
            }
        }
        for group in groups {
            let mut suite = TestSuite::new(format!("{}.{group}", self.plugin));
            let checks = self.checks.iter().filter(|check| check.group() == group);
            suite.add_test_cases(checks.map(|check| junit_case(self, check)));
            document.add_test_suite(suite);
        }
        document.to_string().expect("a report in memory has nothing to fail on")
    }

    /// Numbers of passed, failed and skipped checks.
    fn counts(&self) -> (usize, usize, usize) {
        let count = |wanted: fn(&Outcome) -> bool| self.checks.iter().filter(|check| wanted(&check.outcome)).count();
        (
            count(|outcome| matches!(outcome, Outcome::Passed)),
            count(|outcome| matches!(outcome, Outcome::Failed(_))),
            count(|outcome| matches!(outcome, Outcome::Skipped { .. })),
        )
    }

    fn title(&self) -> String {
        let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.name()).collect();
        match kinds.is_empty() {
            true => format!("{} (not loaded)", self.plugin),
            false => format!("{} {} ({})", self.plugin, self.version, kinds.join(", ")),
        }
    }
}

impl Check {
    /// The kind that the check belongs to, or `plugin`.
    fn group(&self) -> &'static str {
        self.kind.map_or("plugin", PluginKind::name)
    }
}

/// Format version of [`Report::json`].
const JSON_FORMAT: u32 = 1;

fn junit_case(report: &Report, check: &Check) -> TestCase {
    let mut status = match &check.outcome {
        Outcome::Passed => TestCaseStatus::success(),
        Outcome::Failed(_) => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Outcome::Skipped { .. } => TestCaseStatus::skipped(),
    };
    match &check.outcome {
        Outcome::Passed => {}
        Outcome::Failed(failure) => {
            let whole =
                format!("sent: {}\nreturned: {}\ncontract: {}", failure.sent, failure.returned, failure.expected);
            status.set_message(failure.returned.as_str()).set_type(check.name.as_str()).set_description(whole);
        }
        Outcome::Skipped { why } => {
            status.set_message(why.as_str());
        }
    }
    let mut case = TestCase::new(check.name.as_str(), status);
    case.set_classname(format!("{}.{}", report.plugin, check.group()));
    case
}

fn push_check(text: &mut String, check: &Check, width: usize) {
    let word = match &check.outcome {
        Outcome::Passed => "ok  ",
        Outcome::Failed(_) => "FAIL",
        Outcome::Skipped { .. } => "skip",
    };
    let padding = " ".repeat(width.saturating_sub(check.name.width()));
    let line = format!("  {word}  {}{padding}  {}", check.name, note(check));
    let _ = writeln!(text, "{}", line.trim_end());
    if let Outcome::Failed(failure) = &check.outcome {
        for (name, value) in [("sent", &failure.sent), ("returned", &failure.returned), ("contract", &failure.expected)]
        {
            let _ = writeln!(text, "        {name:<8}  {value}");
        }
    }
}

fn note(check: &Check) -> &str {
    match &check.outcome {
        Outcome::Skipped { why } => why,
        _ => &check.note,
    }
}

fn push_costs(text: &mut String, costs: &[Cost]) {
    if costs.is_empty() {
        return;
    }
    let row = |cells: [String; 6]| {
        let [kind, cells @ ..] = cells;
        let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:>10}")).collect();
        format!("  {kind:<12}{}", cells.join("  "))
    };
    let header = ["", "fuel/item", "us/item", "memory", "size", "cold start"].map(str::to_owned);
    let _ = writeln!(text, "\ncost\n{}", row(header));
    for cost in costs {
        let cells = [
            cost.kind.name().to_owned(),
            grouped(cost.fuel_per_item.round() as u64),
            format!("{:.1}", cost.micros_per_item),
            bytes(cost.memory_bytes),
            bytes(cost.component_bytes),
            format!("{:.1} ms", cost.cold_start_ms),
        ];
        let _ = writeln!(text, "{}", row(cells));
    }
}

fn bytes(n_bytes: usize) -> String {
    match n_bytes as f64 {
        n if n >= 1e6 => format!("{:.1} MB", n / 1e6),
        n => format!("{:.0} kB", n / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let check = |kind, name: &str, note: &str, outcome| Check {
            kind,
            name: name.into(),
            rule: format!("the rule of {name}"),
            note: note.into(),
            outcome,
        };
        let failure = Failure {
            sent: "`equal`: {\"query\":\"胶原<咋>吃\"}".into(),
            returned: "alone {\"total\":0.5}, in the batch {\"total\":0.6}".into(),
            expected: "a result depends on its own episode and the settings, and on nothing else".into(),
        };
        let reward = Some(PluginKind::Reward);
        Report {
            plugin: "reward-brevity".into(),
            version: "0.1.0".into(),
            digest: "ab12".into(),
            kinds: vec![PluginKind::Reward],
            checks: vec![
                check(None, "identity", "", Outcome::Passed),
                check(reward, "repeat", "1,000 calls", Outcome::Passed),
                check(reward, "batch_equals_singles", "", Outcome::Failed(failure)),
                check(reward, "golden", "", Outcome::Skipped { why: "no golden cases".into() }),
            ],
            cost: vec![Cost {
                kind: PluginKind::Reward,
                fuel_per_item: 12_345.4,
                micros_per_item: 1.26,
                memory_bytes: 1_114_112,
                component_bytes: 45_000,
                cold_start_ms: 1.24,
            }],
        }
    }

    #[test]
    fn text_is_aligned_and_a_failure_has_three_lines() {
        let expected = "\
reward-brevity 0.1.0 (reward)
sha256 ab12

plugin
  ok    identity

reward
  ok    repeat  1,000 calls
  FAIL  batch_equals_singles
        sent      `equal`: {\"query\":\"胶原<咋>吃\"}
        returned  alone {\"total\":0.5}, in the batch {\"total\":0.6}
        contract  a result depends on its own episode and the settings, and on nothing else
  skip  golden  no golden cases

cost
               fuel/item     us/item      memory        size  cold start
  reward          12,345         1.3      1.1 MB       45 kB      1.2 ms

2 passed, 1 failed, 1 skipped
";
        assert_eq!(report().text(), expected);
    }

    #[test]
    fn json_says_its_format_and_every_outcome() {
        let json = report().json();
        assert_eq!((&json["format"], &json["passed"], &json["kinds"][0]), (&1.into(), &false.into(), &"reward".into()));
        let outcomes: Vec<_> = json["checks"].as_array().unwrap().iter().map(|check| &check["outcome"]).collect();
        assert_eq!(outcomes, ["passed", "passed", "failed", "skipped"]);
        assert!(json["checks"][2]["returned"].as_str().unwrap().starts_with("alone"));
        assert_eq!(json["cost"][0]["component_bytes"], 45_000);
    }

    #[test]
    fn junit_has_a_suite_per_kind_and_escapes_what_came_back() {
        let xml = report().junit();
        assert!(xml.contains(r#"<testsuite name="reward-brevity.plugin" tests="1""#), "{xml}");
        assert!(
            xml.contains(r#"<testsuite name="reward-brevity.reward" tests="3" disabled="1" errors="0" failures="1">"#)
        );
        assert!(xml.contains(r#"<failure message="alone {&quot;total&quot;:0.5}"#) && xml.contains("胶原&lt;咋&gt;吃"));
        assert!(xml.contains(r#"<skipped message="no golden cases"/>"#), "{xml}");
    }

    #[test]
    fn a_plugin_that_did_not_load_is_named_by_its_path() {
        let report = Report { version: String::new(), digest: String::new(), kinds: vec![], ..report() };
        assert!(report.text().starts_with("reward-brevity (not loaded)\n\nplugin\n"));
        assert!(!report.passed());
    }

    #[test]
    fn numbers_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
