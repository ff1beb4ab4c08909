//! The whole way on a small project: what is made, what is skipped, what is redone, what a kill leaves.
#![allow(clippy::unwrap_used)]

mod support;

use support::Project;

/// One test, because its parts build on one another and the run is the slow part.
#[test]
fn run_makes_everything_then_skips_what_is_finished_and_redoes_what_changed() {
    let project = Project::new();
    let first = project.querl(&["run", "querl.toml"]).ok();
    for stage in ["rewrite", "validate", "convert", "sft", "rl", "eval"] {
        assert!(first.stderr.contains(&format!("{stage}: running (not run yet)\n")), "{first:#?}");
        assert!(first.stderr.contains(&format!("{stage}: done in ")), "{first:#?}");
    }
    assert!(first.stdout.contains("teacher") && first.stdout.contains("rl - sft"), "{first:#?}");
    let files = [
        "config.resolved.toml",
        "querl.lock",
        "stages.json",
        "data/rewrites.jsonl",
        "data/rewrites.xlsx",
        "data/validated.jsonl",
    ];
    let more = [
        "data/train.jsonl",
        "data/dropped.jsonl",
        "episodes.jsonl",
        "metrics.jsonl",
        "eval/records.jsonl",
        "eval.json",
        "report.html",
    ];
    for file in files.into_iter().chain(more) {
        assert!(project.path("run").join(file).is_file(), "{file}");
    }

    let second = project.querl(&["run", "querl.toml"]).ok();
    assert_eq!(second.stderr.matches("finished earlier, skipped").count(), 6, "{second:#?}");
    assert_eq!(second.stdout, first.stdout);

    let from_resolved = project.querl(&["run", "run/config.resolved.toml"]).ok();
    assert_eq!(from_resolved.stderr.matches("finished earlier, skipped").count(), 6, "{from_resolved:#?}");

    // What comes after depends on whether the new checkpoint differs: that of so short a run may not.
    let changed = project.querl(&["run", "querl.toml", "--set", "rl.kl_coef=0.2"]).ok();
    assert!(
        changed.stderr.contains("sft: finished earlier, skipped\nrl: running (rl.kl_coef changed)\n"),
        "{changed:#?}"
    );

    project.write(
        "teacher.jsonl",
        &project.read("teacher.jsonl").replacen("\"rewritten_query\": \"", "\"rewritten_query\": \"五博士 ", 1),
    );
    let other = project.querl(&["run", "querl.toml", "--to", "validate"]).ok();
    assert!(other.stderr.contains("rewrite: running (recording of the teacher changed)\n"), "{other:#?}");
    assert!(other.stderr.contains("validate: running (rewrites.jsonl of rewrite changed)\n"), "{other:#?}");
    project.querl(&["run", "querl.toml"]).ok();

    std::fs::remove_file(project.path("run/report.html")).unwrap();
    let report = project.querl(&["report", "run", "--json"]).ok();
    let evaluation: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!(evaluation["split"], "test");
    assert!(project.path("run/report.html").is_file());

    let forced = project.querl(&["run", "querl.toml", "--from", "validate", "--to", "convert", "--json"]).ok();
    let result: serde_json::Value = serde_json::from_str(&forced.stdout).unwrap();
    let statuses: Vec<_> =
        result["stages"].as_array().unwrap().iter().map(|stage| stage["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["skipped", "done", "done"]);
}

#[test]
fn stages_alone_ask_for_what_comes_before() {
    let project = Project::new();
    let early = project.querl(&["validate", "querl.toml"]);
    let message = "error: run/data/rewrites.jsonl: not there yet; run `querl rewrite` first, or `querl run`\n";
    assert_eq!((early.code, early.stderr.as_str()), (Some(2), message));
    project.querl(&["rewrite", "querl.toml"]).ok();
    let done = project.querl(&["validate", "querl.toml"]).ok();
    assert!(done.stdout.contains("looked up"), "{done:#?}");
}

#[test]
fn failed_rows_stay_failed_rows_and_are_tried_again() {
    let project = Project::new();
    let rows = project.read("teacher.jsonl");
    project.write("teacher.jsonl", &rows.lines().skip(3).collect::<Vec<_>>().join("\n"));
    let done = project.querl(&["rewrite", "querl.toml"]).ok();
    assert!(done.stdout.contains("- not recorded  3"), "{done:#?}");
    let records = project.read("run/data/rewrites.jsonl");
    assert_eq!(records.lines().filter(|line| line.contains("not_recorded")).count(), 3);
    project.write("teacher.jsonl", &rows);
    let again = project.querl(&["rewrite", "querl.toml"]).ok();
    assert!(again.stderr.contains("rewrite: running (recording of the teacher changed)\n"), "{again:#?}");
    assert!(again.stdout.contains("teacher failed  0"), "{again:#?}");
}

#[test]
fn a_killed_run_is_finished_by_the_next() {
    let project = Project::new();
    let mut child = project
        .command(&["run", "querl.toml", "--set", "sft.max_steps=1000", "--set", "sft.epochs=1000"])
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let log = project.path("run/metrics.jsonl");
    let started = std::time::Instant::now();
    while !log.exists() && started.elapsed().as_secs() < 120 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let refused = project.querl(&["run", "querl.toml"]);
    assert_eq!(refused.code, Some(1), "{refused:#?}");
    assert!(refused.stderr.contains("run is in use by another querl (process "), "{refused:#?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let done = project.querl(&["run", "querl.toml", "--to", "sft"]).ok();
    assert!(done.stderr.contains("sft: running (sft.epochs and sft.max_steps changed)\n"), "{done:#?}");
}

#[cfg(unix)]
#[test]
fn an_interrupt_stops_at_a_safe_point_with_code_130() {
    let project = Project::new();
    let many = ["--set", "sft.max_steps=100000", "--set", "sft.epochs=100000"];
    let mut command = project.command(&["run", "querl.toml", many[0], many[1], many[2], many[3]]);
    let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let log = project.path("run/metrics.jsonl");
    let started = std::time::Instant::now();
    while !log.exists() && started.elapsed().as_secs() < 120 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(project.path("run/sft/last").is_dir());
}
