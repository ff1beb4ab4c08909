//! plugin.toml and golden cases, compared with the component.
#![allow(clippy::unwrap_used)]

mod common;

use common::{FOUR_TOKENS, check, failed, failure, options, report_of_component, repository};
use querl_conformance::{Outcome, Report};
use querl_plugin::{HostOptions, PluginHost};
use std::path::{Path, PathBuf};

const EPISODE: &str = r#""episode": {"query": "胶原咋吃", "baseline": {"rewrite": "胶原"},
    "policy": {"rewrite": "胶原", "retrieval": {"hits": [{"reranker_score": 0.8}]}}}"#;

/// The component of a guest, which follows every rule by default.
fn component(guest: &str) -> Vec<u8> {
    let host = PluginHost::new(HostOptions { cache_dir: options("").cache_dir, ..HostOptions::default() }).unwrap();
    std::fs::read(host.load(&repository().join("tests/guests").join(guest)).unwrap().path()).unwrap()
}

/// A bundle of a guest with a changed manifest and these golden cases.
fn bundle(guest: &str, folder: &Path, replaced: &[(&str, &str)], golden: &str) -> PathBuf {
    let manifest = std::fs::read_to_string(repository().join("tests/guests").join(guest).join("plugin.toml")).unwrap();
    let changed = replaced.iter().fold(manifest, |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    });
    packed(folder, &changed, golden, &component(guest))
}

fn packed(folder: &Path, manifest: &str, golden: &str, component: &[u8]) -> PathBuf {
    std::fs::create_dir_all(folder.join("golden")).unwrap();
    for (name, text) in [
        ("plugin.toml", manifest),
        ("README.md", "奇怪的奖励"),
        ("LICENSE", "Apache-2.0"),
        ("golden/cases.jsonl", golden),
    ] {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let path = folder.join("odd.querl");
    std::fs::write(&path, querl_bundle::pack(folder, component).unwrap()).unwrap();
    path
}

fn tested(replaced: &[(&str, &str)], golden: &str) -> Report {
    let folder = tempfile::tempdir().unwrap();
    querl_conformance::run(&bundle("odd-reward", folder.path(), replaced, golden), &options("")).unwrap()
}

#[test]
fn a_bundle_is_tested_with_its_golden_cases() {
    let case = format!(r#"{{"name": "半分", {EPISODE}, "expect": {{"total": 0.4}}}}"#).replace('\n', " ");
    let report = tested(&[], &case);
    assert!(report.passed(), "{}", report.text());
    assert_eq!(check(&report, "golden: 半分").rule, "golden/cases.jsonl:1 says so");
}

#[test]
fn a_golden_case_that_comes_out_otherwise_is_shown_with_its_place() {
    let lines = [
        format!(r#"{{"name": "总分", {EPISODE}, "expect": {{"total": 0.5}}}}"#),
        format!(r#"{{"name": "部分", {EPISODE}, "expect": {{"total": 0.4, "components": {{"hits": 1}}}}}}"#),
        format!(r#"{{"name": "拒绝", {EPISODE}, "expect": {{"rejected": "nothing_found"}}}}"#),
        format!(r#"{{"name": "容差", {EPISODE}, "expect": {{"total": 0.41, "tolerance": 0.02}}}}"#),
        format!(r#"{{"name": "设置", "settings": {{"scale": 1.5}}, {EPISODE}, "expect": {{"total": 0.4}}}}"#),
        r#"{"name": "别的种类", "parse_rewrite": "胶原", "expect": {"rewrite": "胶原"}}"#.to_owned(),
        r#"{"name": "打错", "parse_rewritten": "胶原"}"#.to_owned(),
    ];
    let report = tested(&[], &lines.map(|line| line.replace('\n', " ")).join("\n"));
    let names = ["golden", "golden", "golden", "golden: 总分", "golden: 部分", "golden: 拒绝"];
    assert_eq!(failed(&report), names, "{}", report.text());
    let [sent, returned, expected] = failure(&report, "golden: 总分");
    assert!(sent.contains("胶原咋吃"), "{sent}");
    assert_eq!(
        (returned, expected),
        (r#"{"components":[],"total":0.4}"#, "total 0.5 within 1e-9 (golden/cases.jsonl:1)")
    );
    let text = report.text();
    assert!(
        text.contains("golden/cases.jsonl:5: `设置`: setting `scale`: expected a number from 0 to 1, got 1.5"),
        "{text}"
    );
    assert!(text.contains("`别的种类` is a case for a prompt; the plugin is of another kind"), "{text}");
    assert!(text.contains("golden/cases.jsonl:7: unknown key `parse_rewritten`, expected one of `episode`"), "{text}");
}

#[test]
fn a_golden_case_of_several_items_names_the_one_that_differs_by_its_index() {
    let folder = tempfile::tempdir().unwrap();
    let case = r#"{"name": "两条", "samples": [{"original_query": "a", "rewritten_query": "b"},
        {"original_query": "c", "rewritten_query": "d"}], "expect": ["keep", {"drop": "duplicate"}]}"#;
    let bundle = bundle("odd-filter", folder.path(), &[], &case.replace('\n', " "));
    let report = querl_conformance::run(&bundle, &options("")).unwrap();
    assert_eq!(failed(&report), ["golden: 两条"], "{}", report.text());
    assert_eq!(failure(&report, "golden: 两条")[1], r#"at index 1: "keep""#);
}

/// Symptom: a plugin that fails if a column is absent or has another type passed the suite, and faulted in a run with another table.
#[test]
fn columns_of_golden_cases_are_tried_absent_and_with_each_type() {
    let case = |breach: &str| {
        let columns = r#""columns": {"price": 99.5}, "query""#;
        let episode = EPISODE.replacen("\"query\"", columns, 1);
        let case = format!(
            r#"{{"name": "价格", "settings": {{"breach": "{breach}"}}, {episode}, "expect": {{"total": 0.4}}}}"#
        );
        case.replace('\n', " ")
    };
    let report = tested(&[], &case("none"));
    assert!(report.passed(), "{}", report.text());
    assert_eq!(check(&report, "columns").note, "price of golden cases, absent and of each type");
    for (breach, what, said) in
        [("needs_a_column", "absent", "no price"), ("column_is_a_number", "a text", "no number: Text(")]
    {
        let report = tested(&[], &case(breach));
        assert_eq!(failed(&report), ["columns"], "{breach}: {}", report.text());
        let [sent, returned, expected] = failure(&report, "columns");
        assert!(sent.starts_with(&format!("golden case `价格` with the column `price` {what}: `")), "{sent}");
        assert!(returned.contains(said) && expected.starts_with("a trap is a fault"), "{returned} {expected}");
    }
    let report = tested(&[], &format!(r#"{{"name": "无", {EPISODE}, "expect": {{"total": 0.4}}}}"#).replace('\n', " "));
    assert!(matches!(check(&report, "columns").outcome, Outcome::Skipped { .. }), "{}", report.text());
}

#[test]
fn golden_cases_have_the_results_of_host_functions() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = "[plugin]\nid = \"counts-tokens\"\nversion = \"0.1.0\"\ncontract = \"0.2.0\"\nkinds = [\"reward\"]\n\
                    description = \"1 divided by the number of tokens of 0.1.0\"\nlicense = \"Apache-2.0\"\nrange = [0.0, 1.0]\n\
                    host_functions = [\"tokens\"]\n";
    let golden = [
        FOUR_TOKENS.to_owned(),
        FOUR_TOKENS.replace("四个", "两个").replace("\"count\": 4", "\"count\": 2"),
        FOUR_TOKENS.replace("四个", "没有记录").replace("0.1.0", "0.2.0"),
        FOUR_TOKENS.replace("四个", "没有答复").replace("{\"Ok\": {\"count\": 4}}", "4"),
    ];
    let golden = golden.map(|case| case.replace('\n', " ")).join("\n");
    let path = packed(folder.path(), manifest, &golden, &common::wat::component("counts-tokens"));
    let report = querl_conformance::run(&path, &options("")).unwrap();
    // Where a call fails, this guest traps.
    let traps = ["length_and_order", "batch_equals_singles", "inputs_texts"];
    let golden = ["golden: 两个", "golden: 没有记录"];
    assert_eq!(failed(&report), [&["golden"], &traps[..], &golden].concat(), "{}", report.text());
    assert_eq!(failure(&report, "golden: 两个")[1], r#"{"components":[],"total":0.5}"#);
    assert!(failure(&report, "golden: 没有记录")[1].ends_with("aborted without a message"), "{}", report.text());
    assert!(failure(&report, "golden")[1].starts_with("golden/cases.jsonl:4: `calls` 1: "), "{}", report.text());
}

#[test]
fn another_range_than_declared_is_found() {
    let report = tested(&[("range = [0.0, 1.0]", "range = [0.0, 2.0]")], "");
    assert_eq!(failed(&report), ["manifest"]);
    let [_, returned, _] = failure(&report, "manifest");
    let expected = "its plugin.toml says `0 to 2` under `plugin.range`; the component says `0 to 1`";
    assert!(returned.ends_with(expected), "{returned}");
}

#[test]
fn limits_that_do_not_cover_the_use_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let limits = "[limits]\nfuel_per_item = 1000000\n\n[settings.breach]";
    let path = bundle("odd-reward", folder.path(), &[("[settings.breach]", limits)], "");
    let report = querl_conformance::run(&path, &options("breach = 'quadratic'")).unwrap();
    assert_eq!(failed(&report), ["asked_limits", "inputs_long"], "{}", report.text());
    let [_, returned, _] = failure(&report, "asked_limits");
    assert!(returned.starts_with("a call used 201,000,000 of 201,000,000 fuel"), "{returned}");
    let report = tested(&[("[settings.breach]", limits)], "");
    assert!(report.passed() && check(&report, "asked_limits").note.contains(" of "), "{}", report.text());
}

#[test]
fn a_manifest_of_another_plugin_is_found() {
    for (replaced, expected) in [
        (("id = \"odd-reward\"", "id = \"odd-award\""), "odd-award"),
        (("version = \"0.2.0\"", "version = \"0.3.0\""), "0.3.0"),
    ] {
        let report = tested(&[replaced], "");
        assert_eq!(failed(&report), ["manifest"]);
        assert!(failure(&report, "manifest")[1].contains(expected), "{}", report.text());
    }
}

#[test]
fn what_is_no_plugin_is_a_report_with_one_failure() {
    let report = report_of_component("这不是插件".as_bytes(), "");
    assert_eq!(failed(&report), ["loads"]);
    assert!(failure(&report, "loads")[1].ends_with("it is not WebAssembly; expected a component"), "{}", report.text());
    assert!(report.junit().contains("failures=\"1\""), "{}", report.junit());
}

#[test]
fn a_path_without_a_file_is_an_error() {
    assert!(querl_conformance::run(Path::new("没有.wasm"), &options("")).is_err());
}

#[test]
fn a_bare_component_is_tested_without_a_manifest() {
    let report = report_of_component(&component("odd-reward"), "");
    assert!(report.passed(), "{}", report.text());
    for name in ["manifest", "asked_limits"] {
        assert!(matches!(check(&report, name).outcome, Outcome::Skipped { .. }), "{name}");
    }
    assert!(matches!(check(&report, "unknown_setting").outcome, Outcome::Passed));
}

#[test]
fn a_range_that_is_none_ends_the_checks_of_the_kind() {
    let report = report_of_component(&component("odd-reward"), "breach = 'empty_range'");
    assert_eq!(failed(&report), ["configures"], "{}", report.text());
    assert!(failure(&report, "configures")[1].contains("declares the range 1 to 1"), "{}", report.text());
}
