//! `querl track` and `[tracking]`, with a fake tracker library that records its calls.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use support::{CommandOutput, Project, repository};

/// `trackio.py`: appends its calls to `$FAKE_TRACKER`, as JSON lines.
const TRACKIO: &str = r#"
import json, os

def write(record):
    with open(os.environ["FAKE_TRACKER"], "a") as file:
        file.write(json.dumps(record) + "\n")

class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row)) for row in data]

class Run:
    def log(self, values, step):
        values = {name: value.rows if isinstance(value, Table) else value for name, value in values.items()}
        write({"step": step, "values": values})

def init(project, name, **others):
    if "FAKE_FAILS" in os.environ:
        raise RuntimeError("no network")
    print("noise of a library")
    write({"init": [project, name]})
    return Run()

def finish():
    pass
"#;

/// False, with a note, if there is no Python that can run the package.
fn has_python() -> bool {
    let check = "import sys; sys.exit(sys.version_info < (3, 10))";
    let found = Command::new("python3").args(["-c", check]).status().is_ok_and(|status| status.success());
    if !found {
        eprintln!("skipped: no python3 of 3.10 or later");
    }
    found
}

/// The binary, with the Python package of this repository and the modules in `fake`.
fn command(project: &Project, args: &[&str]) -> Command {
    let mut command = project.command(args);
    let packages = [project.path("fake"), repository().join("host/querl-python/python")];
    command.env("PYTHONPATH", std::env::join_paths(packages).unwrap()).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env_remove("PYTHON").env("FAKE_TRACKER", project.path("calls.jsonl"));
    command
}

fn querl(project: &Project, args: &[&str]) -> CommandOutput {
    CommandOutput::of(command(project, args).output().unwrap(), project.folder.path())
}

/// Steps and values of a metric passed to the library, in order.
fn logged(project: &Project, name: &str) -> Vec<(u64, Value)> {
    let calls = project.rows("calls.jsonl");
    let values = calls.iter().filter_map(|call| Some((call["step"].as_u64()?, call["values"].get(name)?.clone())));
    values.collect()
}

/// Steps and values of a metric in `metrics.jsonl`.
fn recorded(project: &Project, stage: &str, name: &str) -> Vec<(u64, Value)> {
    let lines = project.rows("run/metrics.jsonl").into_iter().filter(|line| line["stage"] == stage);
    lines.filter_map(|line| Some((line["step"].as_u64()?, line.get(name)?.clone()))).collect()
}

#[test]
fn a_run_is_mirrored_while_it_is_trained_and_a_tracker_that_fails_is_a_warning() {
    if !has_python() {
        return;
    }
    let project = Project::new();
    std::fs::create_dir(project.path("fake")).unwrap();
    project.write("fake/trackio.py", TRACKIO);
    let tracking = "\n[tracking]\nto = \"trackio\"\nproject = \"p\"\nname = \"n\"\nsamples = 2\n";
    project.write("querl.toml", &(project.read("querl.toml") + tracking));

    let first = querl(&project, &["run", "querl.toml", "--to", "rl"]).ok();
    assert!(!first.stderr.contains("tracking") && !first.stdout.contains("noise"), "{first:#?}");
    for (stage, ours, theirs) in [
        ("sft", "loss", "sft/loss"),
        ("rl", "avg_reward", "avg_reward"),
        ("rl", "val/reward", "val/reward"),
        ("rl", "actor/pg_loss", "policy_loss"),
        ("rl", "critic/vf_loss", "value_loss"),
    ] {
        let expected = recorded(&project, stage, ours);
        assert!(!expected.is_empty() && logged(&project, theirs) == expected, "{ours}: {expected:?}");
    }
    let samples = logged(&project, "samples");
    assert_eq!(
        samples.iter().map(|(step, rows)| (*step, rows.as_array().unwrap().len())).collect::<Vec<_>>(),
        [(0, 2), (2, 2)]
    );
    let query = samples[0].1[0]["query"].as_str().unwrap().to_owned();
    assert!(project.read("queries.jsonl").contains(&query), "{query}");
    let calls = project.rows("calls.jsonl");
    let first_call = &calls[0];
    assert!(first_call["init"][0] == "p" && first_call["init"][1].as_str().unwrap().starts_with("n-"), "{first_call}");

    // `querl track` uses the run's settings as defaults.
    let again = querl(&project, &["track", "run", "--to", "trackio"]).ok();
    assert!(again.stdout.starts_with("trackio: nothing new; run n-") && !again.stdout.contains("noise"), "{again:#?}");
    // No stage depends on the tracker.
    let set = ["--set", "tracking.project=other", "--set", "tracking.samples=0"];
    let other = querl(&project, &[&["run", "querl.toml", "--to", "rl"][..], &set].concat()).ok();
    assert_eq!(other.stderr.matches("finished earlier, skipped").count(), 5, "{other:#?}");
    assert_eq!(logged(&project, "avg_reward").len(), 2 * recorded(&project, "rl", "avg_reward").len());

    let mut failing = command(&project, &["rl", "querl.toml", "--from", "rl", "--set", "tracking.project=third"]);
    let failed = CommandOutput::of(failing.env("FAKE_FAILS", "1").output().unwrap(), project.folder.path()).ok();
    let warning = "warning: tracking to trackio ended: trackio: no network";
    assert_eq!(failed.stderr.matches("warning: tracking").count(), 1, "{failed:#?}");
    assert!(failed.stderr.contains(warning) && failed.stderr.contains("mirrors it later\n"), "{failed:#?}");
}

#[test]
fn what_is_missing_is_one_sentence_with_the_command() {
    if !has_python() {
        return;
    }
    let project = Project::new();
    std::fs::create_dir(project.path("fake")).unwrap();
    let refused = |command: &mut Command| {
        let output = CommandOutput::of(command.output().unwrap(), project.folder.path());
        assert_eq!(output.code, Some(2), "{output:#?}");
        assert_eq!(output.stderr.lines().count(), 1, "{output:#?}");
        assert_eq!(output.stdout.as_str(), "", "{output:#?}");
        output.stderr
    };
    let args = ["track", "run", "--to", "wandb", "--offline"];
    let no_run = refused(&mut command(&project, &args));
    assert!(no_run.starts_with("error: run: not a run's folder: there is no such folder; expected "), "{no_run}");
    std::fs::create_dir(project.path("bare")).unwrap();
    let bare = refused(&mut command(&project, &["track", "bare", "--to", "wandb", "--offline"]));
    assert!(bare.starts_with("error: bare: not a run's folder: it has no config.resolved.toml; expected "), "{bare}");

    project.querl(&["rewrite", "querl.toml"]).ok();
    let no_python = refused(command(&project, &args).env("PYTHON", "no-such-python"));
    assert!(no_python.starts_with("error: no-such-python: no such program; "), "{no_python}");
    assert!(no_python.contains("PYTHON"), "{no_python}");

    project.write("python", "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'querl'\" >&2\nexit 1\n");
    std::fs::set_permissions(project.path("python"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let no_package = refused(command(&project, &args).env("PYTHON", project.path("python")));
    assert!(no_package.contains("(ModuleNotFoundError: No module named 'querl')"), "{no_package}");
    assert!(no_package.contains("-m pip install ./host/querl-python` in the repository of querl"), "{no_package}");

    project.write("python", "#!/bin/sh\nexec python3 -I -S \"$@\"\n");
    let neither = refused(command(&project, &args).env("PYTHON", project.path("python")));
    assert!(neither.contains(", and does not have the library wandb; `"), "{neither}");
    assert!(neither.contains("-m pip install ./host/querl-python wandb` in the repository of querl"), "{neither}");

    project.write("fake/wandb.py", "raise ModuleNotFoundError('none', name='wandb')\n");
    let no_library = refused(&mut command(&project, &args));
    assert!(no_library.contains("does not have the library wandb; `"), "{no_library}");
    assert!(no_library.contains("-m pip install wandb`"), "{no_library}");

    let unknown = command(&project, &["track", "run", "--to", "tensorboard"]).output().unwrap();
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("possible values: wandb, mlflow, swanlab, trackio"));
    assert_eq!(unknown.status.code(), Some(2));
}
