//! Outputs of runs, compared byte for byte except for times; and projects with finished data stages.

use super::Project;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

pub fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// Inverts a bit in the last byte of a file.
pub fn damage(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file, bytes).unwrap();
}

/// A project with finished data stages.
pub fn prepared() -> &'static Project {
    static PREPARED: std::sync::LazyLock<Project> = std::sync::LazyLock::new(|| {
        let project = Project::new();
        project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
        project
    });
    &PREPARED
}

pub fn project() -> Project {
    let project = Project::new();
    copy(&prepared().path("run"), &project.path("run"));
    project
}

/// Every file that training writes, without times.
pub fn results(project: &Project) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for folder in ["sft", "rl"] {
        collect(&project.path("run"), folder, &mut found);
    }
    let lines = |file: &str| project.read(&format!("run/{file}")).lines().map(timeless).collect::<String>();
    for file in ["metrics.jsonl", "episodes.jsonl"] {
        found.insert(file.into(), lines(file).into_bytes());
    }
    found
}

/// The files of fine-tuning alone.
pub fn sft_results(project: &Project) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    collect(&project.path("run"), "sft", &mut found);
    found
}

fn collect(root: &Path, name: &str, found: &mut BTreeMap<String, Vec<u8>>) {
    for path in files_below(&root.join(name)) {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        // Event files for watching a run; their records contain times.
        if !name.contains("tensorboard") {
            found.insert(name, std::fs::read(path).unwrap());
        }
    }
}

pub fn timeless(line: &str) -> String {
    let mut value: Value = serde_json::from_str(line).unwrap();
    without_times(&mut value);
    format!("{value}\n")
}

pub fn without_times(value: &mut Value) {
    match value {
        Value::Object(map) => {
            let is_time = |name: &str| {
                name.starts_with("timing_s/")
                    || name.starts_with("perf/")
                    || name == "latency_ms"
                    || name.ends_with("/time_s")
                    // `CallCache` of a process answers repeated judgements without a call of the prompt plugin; a resumed process starts
                    // with an empty cache.
                    || (name.starts_with("plugin/") && name.ends_with("/fuel"))
            };
            map.retain(|name, _| !is_time(name));
            map.values_mut().for_each(without_times);
        }
        Value::Array(values) => values.iter_mut().for_each(without_times),
        _ => {}
    }
}

pub fn assert_same(found: &Project, expected: &BTreeMap<String, Vec<u8>>) {
    let found = results(found);
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (file, bytes) in expected {
        let (found, expected) = (&found[file], bytes);
        let lines = |bytes: &[u8]| String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect::<Vec<_>>();
        let differing = || lines(found).into_iter().zip(lines(expected)).find(|(found, expected)| found != expected);
        assert!(found == expected, "{file} differs from that of a run that was never stopped: {:#?}", differing());
    }
}

/// Starts `command` and returns the process once `metrics.jsonl` has `n_lines` of `stage`.
pub fn run_until(mut command: Command, project: &Project, stage: &str, n_lines: usize) -> Child {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let stage = format!("\"stage\":\"{stage}\"");
    let log = project.path("run/metrics.jsonl");
    let started = Instant::now();
    while std::fs::read_to_string(&log).unwrap_or_default().matches(&stage).count() < n_lines {
        assert!(child.try_wait().unwrap().is_none(), "ended before {n_lines} lines of {stage}");
        assert!(started.elapsed().as_secs() < 240, "{stage} wrote no metrics");
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}
