//! `querl plugin dev` and `querl plugin doctor` on plugins in all languages, run natively.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::{Project, repository};

/// A reward that faults at the query 咋吃, rejects 退钱, logs at 一天几粒啊, and scores other queries by the length of the rewrite.
const PYTHON: &str = r#"from querl_sdk import Episode, Rejection, Reward, Score, Settings, export, log


class Length(Reward):
    def __init__(self, settings: Settings) -> None:
        self.max_chars = settings.number("max_chars", 40, minimum=1, maximum=1000)

    def range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, episode: Episode) -> Score:
        if episode.query == "退钱":
            raise Rejection("no_refund", "")
        if episode.query == "一天几粒啊":
            log.info("seen")
        if episode.query == "咋吃":
            return Score(1 / 0)
        return Score(len(episode.policy.rewrite or "") / self.max_chars)


export(reward=Length)
"#;

const JAVASCRIPT: &str = r##"import { Rejection, log, plugin } from "#querl-sdk";

export class Length {
  constructor(settings) {
    this.maxChars = settings.number("max_chars", 40, { minimum: 1, maximum: 1000 });
  }

  range() {
    return [0, 1];
  }

  score(episode) {
    if (episode.query === "退钱") throw new Rejection("no_refund", "");
    if (episode.query === "一天几粒啊") log.info("seen");
    if (episode.query === "咋吃") return { total: episode.nothing.here };
    return { total: (episode.policy.rewrite ?? "").length / this.maxChars };
  }
}

export default plugin({ reward: Length });
"##;

/// Five queries, each with a rewrite of ten characters that was scored 0.5.
fn project(language: &str) -> Project {
    let project = Project::new();
    let episode = |query: &str| {
        let line = json!({ "format": 2,
            "episode": { "id": query, "query": query, "policy": { "rewrite": "十个字的改写就是这样" }, "baseline": { "rewrite": "鱼油" } },
            "outcome": { "scored": { "total": 0.5, "components": [] } } });
        format!("{line}\n")
    };
    project.write("episodes.jsonl", &["一天几粒啊", "咋吃", "退钱", "能不能喝", "多久见效"].map(episode).concat());
    project.querl(&["plugin", "new", "length", "--kind", "reward", "--lang", language]).ok();
    project
}

/// True if a program is installed: the tests of a language need its interpreter.
fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

const DEV: [&str; 7] = ["plugin", "dev", "length", "--episodes", "episodes.jsonl", "--once", "--no-component"];

fn dev(project: &Project, more: &[&str]) -> (Option<i32>, Value) {
    let said = project.querl(&[&DEV[..], &["--json"], more].concat());
    (said.code, serde_json::from_str(&said.stdout).unwrap_or_else(|_| panic!("{said:#?}")))
}

/// Checks the output that every language must have for the plugin above. `file` and `line`: position of the fault.
fn check_picture(project: &Project, file: &str, line: u64) {
    let (code, picture) = dev(project, &["--set", "max_chars=20"]);
    let scores = &picture["scores"];
    assert_eq!((code, &scores["summary"]["n_scored"]), (Some(1), &json!(3)), "{picture:#}");
    assert_eq!(scores["summary"]["rejected"], json!({ "no_refund": 1 }));
    assert_eq!(scores["summary"]["totals"]["mean"], json!(0.5));
    assert_eq!(scores["faults"][0]["file"], json!(file), "{picture:#}");
    assert_eq!(scores["faults"][0]["line"], json!(line), "{picture:#}");
    assert_eq!((&scores["n_faults"], &scores["faults"][0]["first_id"]), (&json!(1), &json!("咋吃")));
    assert_eq!(scores["log"], json!([{ "id": "一天几粒啊", "line": "info: seen" }]));
    // The rejected one; the faulted one is not compared.
    assert_eq!(scores["since_recording"]["n_changed"], json!(1));
    assert_eq!(scores["since_recording"]["n_compared"], json!(4));
    let (_, other) = dev(project, &["--set", "max_chars=40"]);
    assert_eq!(other["scores"]["since_recording"]["n_changed"], json!(4), "{other:#}");
    // Symptom: exit code 1, as for what has to be repaired in the plugin.
    for (value, got) in [("0", "0"), ("viel", "\"viel\"")] {
        let set = format!("max_chars={value}");
        let refused = project.refusal(&[&DEV[..], &["--set", &set]].concat(), 2);
        let expected = format!("length: --set: setting `max_chars`: expected a number from 1 to 1000, got {got}");
        assert_eq!(refused, expected);
    }
    // Without settings in plugin.toml, the plugin refuses the value.
    let manifest = project.read("length/plugin.toml");
    let (head, _) = manifest.split_once("[settings.max_chars]").unwrap();
    project.write("length/plugin.toml", head);
    let (code, refused) = dev(project, &["--set", "max_chars=0"]);
    assert_eq!(code, Some(2), "{refused:#}");
    assert!(refused["refused"]["message"].as_str().unwrap().contains("setting `max_chars`"), "{refused:#}");
    project.write("length/plugin.toml", &manifest);
}

#[test]
fn python_scores_faults_and_logs_are_shown_with_file_and_line() {
    if !has("python3") {
        return;
    }
    let project = project("python");
    project.write("length/plugin.py", PYTHON);
    check_picture(&project, "plugin.py", 17);
    project.write("length/plugin.py", &PYTHON.replace("        return 0.0, 1.0", "        return 0.0,, 1.0"));
    let (code, broken) = dev(&project, &[]);
    let refused = &broken["refused"];
    assert_eq!((code, &refused["file"], &refused["line"]), (Some(1), &json!("plugin.py"), &json!(9)), "{broken:#}");
}

#[test]
fn javascript_scores_faults_and_logs_are_shown_with_file_and_line() {
    if !has("node") {
        return;
    }
    let project = project("javascript");
    project.write("length/plugin.js", JAVASCRIPT);
    check_picture(&project, "plugin.js", 15);
}

#[test]
fn rust_scores_faults_and_logs_are_shown_with_file_and_line() {
    let project = project("rust");
    let source = project.read("length/src/lib.rs");
    let (head, rest) = source.split_once("        let n_chars").unwrap();
    let (_, tail) = rest.split_once("    }\n").unwrap();
    let (uses, tail) = (head, tail.split("#[cfg(test)]").next().unwrap());
    let body = "        match episode.query.as_str() {\n            \"退钱\" => return Err(Rejection::new(\"no_refund\", \"\")),\n            \
                \"一天几粒啊\" => querl_sdk::log::info(\"seen\"),\n            \"咋吃\" => panic!(\"not known\"),\n            _ => {}\n        }\n        \
                let n_chars = \"十个字的改写就是这样\".chars().count() as f64;\n        Ok(Score::new(n_chars / self.max_chars))\n    }\n";
    let text = format!("{uses}{body}{tail}");
    let line = text.lines().position(|line| line.contains("not known")).unwrap() as u64 + 1;
    project.write("length/src/lib.rs", &text);
    check_picture(&project, "src/lib.rs", line);
    project.write("length/src/lib.rs", &text.replace("chars().count()", "chars().cuont()"));
    let (code, broken) = dev(&project, &[]);
    assert_eq!((code, &broken["refused"]["file"]), (Some(1), &json!("src/lib.rs")), "{broken:#}");
}

/// Symptoms: an invalid component name, which is a fault in the component, was accepted natively; the error for a process that ended did not
/// name the episode.
#[test]
fn what_the_contract_forbids_is_a_native_fault_and_an_exit_names_its_episode() {
    if !has("python3") {
        return;
    }
    let project = project("python");
    project.write("length/plugin.py", &PYTHON.replace("Score(1 / 0)", "Score(0.1, {\"保留\": 1.0})"));
    let (code, picture) = dev(&project, &[]);
    let fault = &picture["scores"]["faults"][0];
    assert_eq!((code, &fault["first_id"]), (Some(1), &json!("咋吃")), "{picture:#}");
    assert_eq!(fault["message"], "component name is `保留`; expected 1 to 64 of a to z, 0 to 9 and _");
    project.write("length/plugin.py", &PYTHON.replace("return Score(1 / 0)", "__import__(\"os\")._exit(3)"));
    let (code, picture) = dev(&project, &[]);
    let message = picture["refused"]["message"].as_str().unwrap_or_default();
    assert!(code == Some(1) && message.contains("exit status: 3 at episode `咋吃`"), "{picture:#}");
}

/// Scores an episode with the number of samples in its group.
const GROUP: &str = r#"from querl_sdk import Episode, GroupReward, Rejection, Score, Settings, export


class Count(GroupReward):
    def range(self) -> tuple[float, float]:
        return 0.0, 10.0

    def score_group(self, episodes: list[Episode]) -> list[Score | Rejection]:
        return [Score(len(episodes)) for _ in episodes]


export(group_reward=Count)
"#;

#[test]
fn a_group_is_scored_without_the_episodes_that_the_run_left_out() {
    if !has("python3") {
        return;
    }
    let project = project("python");
    project.write("length/plugin.py", GROUP);
    let manifest = project.read("length/plugin.toml");
    project.write("length/plugin.toml", &manifest.replace("\"reward\"", "\"group-reward\""));
    let line = |(index, outcome): (usize, Value)| {
        let episode = json!({ "id": format!("g/{index}"), "query": "q", "policy": { "rewrite": "鱼油" } });
        format!("{}\n", json!({ "format": 3, "episode": episode, "outcome": outcome }))
    };
    let left_out = json!({ "rejected": { "code": "deadline", "by": "host" } });
    let outcomes = [left_out, json!({ "scored": { "total": 2 } }), json!({ "scored": { "total": 2 } })];
    project.write("episodes.jsonl", &outcomes.into_iter().enumerate().map(line).collect::<String>());
    let (_, picture) = dev(&project, &[]);
    let scores = &picture["scores"];
    assert_eq!(scores["summary"]["totals"]["mean"], json!(2.0), "{picture:#}");
    assert_eq!(scores["since_recording"]["n_changed"], json!(0), "{picture:#}");
    assert_eq!(scores["notes"], json!(["1 episode(s) that the run gave to no reward are left out"]), "{picture:#}");
}

#[test]
fn a_save_shows_what_changed_and_an_interrupt_ends_it() {
    if !has("python3") {
        return;
    }
    let project = project("python");
    let source = PYTHON.replace("1 / 0", "0.25");
    project.write("length/plugin.py", &source);
    let mut command = project.command(&["plugin", "dev", "length", "--episodes", "episodes.jsonl", "--no-component"]);
    let temporary = project.path("temporary");
    std::fs::create_dir(&temporary).unwrap();
    let mut child = command.env("TMPDIR", &temporary).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut next =
        |start: &str| lines.find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no line {start}"));
    next("tests");
    project.write("length/plugin.py", &source.replace("0.25", "0.75"));
    assert!(next("length 0.1.0").ends_with("saved plugin.py"));
    assert_eq!(next("since the last save"), "since the last save: 1 of 5 changed");
    assert!(next("  0.2500 -> 0.7500").contains("咋吃"));
    // SAFETY: sends a signal to the child.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // Symptom: files of each session stayed in the temporary folder.
    let left: Vec<_> = std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_module_that_does_not_end_to_load_is_refused_with_its_line() {
    if !has("node") {
        return;
    }
    let project = project("javascript");
    project.write("length/plugin.js", &format!("{JAVASCRIPT}\nfor (;;) {{}}\n"));
    let line = JAVASCRIPT.lines().count() as u64 + 2;
    let (code, picture) = dev(&project, &[]);
    let refused = &picture["refused"];
    assert_eq!((code, &refused["file"], &refused["line"]), (Some(1), &json!("plugin.js"), &json!(line)), "{picture:#}");
    assert!(refused["message"].as_str().unwrap().contains("still loads after 5 s"), "{picture:#}");
}

#[test]
fn episodes_of_golden_cases_are_scored_by_default_and_the_last_line_names_the_failure() {
    if !has("python3") {
        return;
    }
    let project = project("python");
    let args = ["plugin", "dev", "length", "--once", "--no-component"];
    let misspelt = project.refusal(&[&args[..], &["--set", "max_char=5"]].concat(), 2);
    let expected = "length: --set: setting `max_char`: the plugin knows no such setting; did you mean `max_chars`?";
    assert!(misspelt.contains(expected), "{misspelt}");
    let picture = project.json(&args);
    let scores = &picture["scores"];
    assert_eq!(scores["summary"]["n_episodes"], json!(2), "{picture:#}");
    assert!(scores["notes"][1].as_str().unwrap().starts_with("1 golden case(s) with settings"), "{picture:#}");
    // Symptom: a case with a misspelt setting was left out as one with settings.
    let golden = project.read("length/golden/cases.jsonl");
    project.write("length/golden/cases.jsonl", &golden.replace("\"max_chars\"", "\"max_char\""));
    let refused = project.refusal(&args, 2);
    let expected = "setting `max_char`: the plugin knows no such setting; did you mean `max_chars`?";
    assert!(refused.contains("length/golden/cases.jsonl:") && refused.contains(expected), "{refused}");
    project.write("length/golden/cases.jsonl", &golden);
    // Symptom: it listed faults, failed tests and the component.
    let faulty = project.read("length/golden/cases.jsonl").replace("\"鱼油\"", "\"咋吃\"");
    project.write("length/golden/cases.jsonl", &faulty);
    project.write("length/plugin.py", PYTHON);
    std::fs::remove_dir_all(project.path("length/tests")).unwrap();
    let failed = project.querl(&args);
    assert!(failed.code == Some(1) && failed.stderr.ends_with(": 1 episode(s) with a fault\n"), "{failed:#?}");
    project.write("length/golden/cases.jsonl", "{}\n");
    let refused = project.refusal(&args, 2);
    assert!(refused.contains("length/golden/cases.jsonl:1: `name` is missing"), "{refused}");
}

#[test]
fn plugin_without_episodes_or_of_another_kind_is_explained() {
    let project = project("python");
    std::fs::remove_dir_all(project.path("length/golden")).unwrap();
    let missing = project.refusal(&["plugin", "dev", "length", "--once"], 2);
    assert!(missing.contains("name recorded episodes with --episodes"), "{missing}");
    project.querl(&["plugin", "new", "keep", "--kind", "filter", "--lang", "python"]).ok();
    let other = project.refusal(&["plugin", "dev", "keep", "--episodes", "episodes.jsonl", "--once"], 2);
    assert!(other.contains("keep is no reward: episodes are for rewards"), "{other}");
}

/// Symptom: "`format` is missing" for a file of `faults/`.
#[test]
fn a_file_of_a_fault_is_refused_with_the_command_that_reads_it() {
    let project = project("python");
    let fault =
        json!({ "plugin": "p", "version": "0.1.0", "path": "p", "role": "reward", "message": "m", "settings": {} });
    project.write("fault.jsonl", &format!("{}\n{}", json!({ "fault": fault }), project.read("episodes.jsonl")));
    let refused = project.refusal(&["plugin", "dev", "length", "--episodes", "fault.jsonl", "--once"], 2);
    let expected = "fault.jsonl: is the call of a fault in a run; `querl plugin replay fault.jsonl` repeats it";
    assert_eq!(refused, expected);
}

/// Symptom: of a filter in JavaScript that cannot be loaded, `dev` named no error, only the file of tests that failed.
#[test]
fn an_error_of_a_filter_in_javascript_is_named_with_its_line() {
    if !has("node") {
        return;
    }
    let project = Project::new();
    project.querl(&["plugin", "new", "keep", "--kind", "filter", "--lang", "javascript"]).ok();
    let source = project.read("keep/plugin.js");
    let args = ["plugin", "dev", "keep", "--once", "--no-component", "--json"];
    let output = |text: &str| {
        project.write("keep/plugin.js", text);
        let said = project.querl(&args);
        let picture: Value = serde_json::from_str(&said.stdout).unwrap_or_else(|_| panic!("{said:#?}"));
        picture["tests"]["output"].as_str().unwrap_or_default().to_owned()
    };
    let line = source.lines().position(|line| line.starts_with("export default")).unwrap() + 1;
    let broken = output(&source.replace("export default", "export default )"));
    assert!(broken.ends_with(&format!("\n  plugin.js:{line}  SyntaxError: Unexpected token ')'")), "{broken}");
    let renamed = output(&source.replace("  check(", "  chekc("));
    assert!(renamed.contains(&format!("\n  plugin.js:{line}  TypeError: `Length` has no method `check`")), "{renamed}");
}

#[test]
fn a_path_that_is_no_plugin_folder_is_refused_with_the_command_that_makes_one() {
    let project = Project::new();
    project.write("file.txt", "");
    std::fs::create_dir(project.path("empty")).unwrap();
    let remedy = "`querl plugin new NAME --kind reward --lang python` makes one";
    for command in ["dev", "build", "pack", "doctor"] {
        let refused = |path: &str| project.refusal(&["plugin", command, path], 2);
        assert_eq!(refused("nowhere"), format!("nowhere: there is no such folder; {remedy}"));
        let expected = format!("file.txt: is a file; expected a plugin's source folder; {remedy}");
        assert_eq!(refused("file.txt"), expected);
    }
    let empty = project.refusal(&["plugin", "dev", "empty"], 2);
    assert_eq!(empty, format!("empty: the folder holds no plugin.toml; {remedy}"));
    let inside = project.refusal(&["plugin", "doctor", "file.txt/inside"], 2);
    assert!(inside.starts_with("file.txt/inside: cannot be read: "), "{inside}");
}

#[test]
fn doctor_names_each_tool_with_its_version_or_the_command_that_installs_it() {
    let project = project("python");
    let said = project.querl(&["plugin", "doctor", "length", "--json"]);
    let tools: Vec<Value> = serde_json::from_str(&said.stdout).unwrap();
    let names: Vec<&str> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["python3", "venv", "componentize-py"], "{said:#?}");
    let all_ok = tools.iter().all(|tool| tool["ok"] == json!(true));
    assert_eq!(said.code, Some(i32::from(!all_ok)));
    let can_install = tools.iter().any(|tool| tool["install"].is_array());
    assert_eq!(said.stderr.contains("; `querl plugin doctor length --install` "), can_install, "{said:#?}");
    for tool in tools {
        assert_eq!(tool["ok"] == json!(true), tool["remedy"].is_null(), "{tool}");
        assert!(tool["version"].is_string() || tool["remedy"].is_string(), "{tool}");
    }
    let all = project.querl(&["plugin", "doctor"]);
    assert!(all.stdout.contains("wasm32-wasip2") && all.stdout.contains("node"), "{all:#?}");
    let refused = project.querl(&["plugin", "doctor", "--install"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
}

#[test]
fn first_party_plugin_in_rust_is_run_natively_too() {
    let project = project("python");
    let folder = repository().join("plugins/reward-competition").display().to_string();
    let args = DEV.map(|arg| if arg == "length" { folder.as_str() } else { arg });
    let said = project.querl(&[&args[..], &["--json"]].concat());
    let picture: Value = serde_json::from_str(&said.stdout).unwrap_or_else(|_| panic!("{said:#?}"));
    assert_eq!(picture["scores"]["summary"]["n_episodes"], json!(5), "{picture:#}");
}
