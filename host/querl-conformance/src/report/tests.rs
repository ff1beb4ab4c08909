#![allow(clippy::unwrap_used)]

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
    assert!(xml.contains(r#"<testsuite name="reward-brevity.reward" tests="3" disabled="1" errors="0" failures="1">"#));
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
    assert_eq!([0, 999, 1000, 1_234_567].map(text::grouped), ["0", "999", "1,000", "1,234,567"]);
}
