//! `querl deploy` through the command line: the deployment folder serves the same rewrites as the runs, without the runs.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::collections::BTreeSet;
use support::Project;
use support::results::{damage, files_below};
use support::server::Server;
use support::tenants::{evaluated, project};

const SERVE: [&str; 2] = ["serve", "rewrite"];
/// The page with the table of all metrics.
const PAGE: &str = include_str!("../../../docs/serving.md");

/// Names of metrics in a Prometheus query.
fn metrics(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("querl_")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_serves_the_rewrites_of_eval_at_another_place_without_its_runs() {
    let (made, elsewhere) = (project(), Project::new());
    made.querl(&["deploy", "run", "other", "--out", "new/deployment"]).ok();
    let here = made.folder.path().canonicalize().unwrap().display().to_string();
    let home = support::repository().display().to_string();
    for path in files_below(&made.path("new/deployment")).iter().filter(|path| !path.ends_with("querl")) {
        let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
        assert!(!text.contains(&here) && !text.contains(&home), "{}: has a path of this machine", path.display());
        assert!(!text.contains('@') || !text.contains("@BASE") && !text.contains("@TENANT"), "{}", path.display());
    }
    std::fs::rename(made.path("new/deployment"), elsewhere.path("moved")).unwrap();
    drop(made);
    let server = Server::start(&elsewhere, &SERVE, &["moved", "--cache", "0"]);
    server.ready().await;
    for (folder, tenant) in [("run", "fivedoctors"), ("other", "other")] {
        let evaluated = evaluated(folder, tenant).into_iter().filter(|(_, _, expected)| !expected.is_empty());
        for (request, _, expected) in evaluated {
            let (status, response) = server.ask("/v1/rewrite", &request).await;
            assert_eq!((status, &response["rewrite"]), (200, &json!(expected)), "{response}");
        }
    }

    // Every panel of the dashboard shows an existing metric.
    let text = server.client.get(format!("{}/metrics", server.url)).send().await.unwrap().text().await.unwrap();
    let known: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split('|').next());
    let documented: BTreeSet<&str> = rows.flat_map(|names| names.split('`').step_by(2)).collect();
    let dashboard: Value = serde_json::from_str(&elsewhere.read("moved/grafana/querl.json")).unwrap();
    let mut n_queries = 0;
    for target in dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap())
    {
        let query = target["expr"].as_str().unwrap();
        let named = metrics(query);
        assert!(!named.is_empty(), "{query}");
        for name in named {
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let is_known = known.contains(name.as_str()) || family.is_some_and(|family| known.contains(family));
            // Some metrics exist after their first event only; the page lists all.
            assert!(is_known || documented.contains(name.trim_start_matches("querl_rewrite_")), "{query}: {name}");
        }
        n_queries += 1;
    }
    assert!(n_queries >= 21);
}

/// The output folder cannot be a link, the current folder or a mount point.
#[cfg(unix)]
#[test]
fn an_empty_folder_that_cannot_be_replaced_gets_the_deployment() {
    let project = project();
    std::fs::create_dir(project.path("empty")).unwrap();
    std::os::unix::fs::symlink("empty", project.path("link")).unwrap();
    project.querl(&["deploy", "run", "--out", "link"]).ok();
    let entries = std::fs::read_dir(project.path("empty")).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    assert!(names.contains(&"tenants".into()) && !names.iter().any(|name| name.starts_with(".querl-")), "{names:?}");
}

#[test]
fn the_program_of_a_deployment_is_this_one() {
    let project = project();
    let made = project.json(&["deploy", "run", "--out", "deployment"]);
    assert_eq!(made["tenants"], json!(["fivedoctors"]));
    let program = std::process::Command::new(project.path("deployment/querl")).arg("--version").output().unwrap();
    assert_eq!(String::from_utf8(program.stdout).unwrap(), project.querl(&["--version"]).ok().stdout);
    assert!(!project.path("deployment/keys.env").exists());
    let unit = project.read("deployment/querl-rewrite.service");
    assert!(unit.contains("DynamicUser=yes") && unit.contains("MemoryMax=2"), "{unit}");
    let readme = project.read("deployment/README.md");
    assert!(readme.contains("\"tenant\": \"fivedoctors\"") && readme.contains("docker compose up"), "{readme}");
}

#[test]
fn a_referenced_base_must_be_the_one_of_the_digests() {
    let project = project();
    let output = project.querl(&["deploy", "run", "--out", "deployment", "--base", "reference"]).ok();
    assert!(output.stderr.contains("put the base model at deployment/base"), "{output:#?}");
    assert!(!project.path("deployment/base").exists());
    assert!(project.read("deployment/compose.yaml").contains("${BASE_MODEL:?"));
    let serve = |args: &[&str]| project.refusal(&[&SERVE, args, &["--addr", "127.0.0.1:0"]].concat(), 2);
    let missing = serve(&["deployment"]);
    let expected = "deployment/base/config.json: is missing; put that base model at deployment/base";
    assert!(missing.contains(expected), "{missing}");
    // Another base model: one byte of its weights differs.
    project.copy_model("deployment/base");
    damage(&project.path("deployment/base/model.safetensors"));
    let other = serve(&["deployment"]);
    assert!(other.contains("model.safetensors: is not the file of the base"), "{other}");
}

#[test]
fn what_cannot_be_deployed_is_refused_and_leaves_nothing() {
    let project = project();
    let refused = |args: &[&str]| {
        let message = project.refusal(&[&["deploy"], args].concat(), 2);
        let left = std::fs::read_dir(project.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with(".querl-")), "{message}");
        message
    };
    assert_eq!(refused(&["run", "--out", "other"]), "other: is not empty; name a new folder");
    assert_eq!(refused(&["run", "--out", "querl.toml"]), "querl.toml: is a file; name a new folder");
    assert!(refused(&["model", "--out", "new"]).contains("not a run's folder"));
    // After full fine-tuning a run has its own base model.
    let whole = ["--to", "sft", "--out", "whole", "--set", "tenant=whole", "--set", "sft.method=full"];
    project.querl(&[&["run", "querl.toml"], &whole[..]].concat()).ok();
    let bases = refused(&["run", "whole", "--out", "new"]);
    assert!(bases.contains("is the base of `whole`, and"), "{bases}");
    std::fs::create_dir(project.path("whole/rl")).unwrap();
    let warned = project.querl(&["deploy", "whole", "--out", "of-sft"]).ok().stderr;
    assert!(warned.contains("whole: the stage `rl` is not finished; the model of `sft` is deployed; "), "{warned}");
    project.querl(&["run", "querl.toml", "--to", "convert", "--out", "untrained"]).ok();
    let untrained = refused(&["untrained", "--out", "new"]);
    assert_eq!(untrained, "untrained: no model was trained here yet; run `querl run CONFIG`");
    let twice = refused(&["run", "run", "--out", "new"]);
    assert!(twice.contains("run: another run is of tenant `fivedoctors` too"), "{twice}");
    damage(&project.path("run/rl/best/adapter_model.safetensors"));
    let damaged = refused(&["run", "--out", "new"]);
    assert!(damaged.contains("adapter_model.safetensors: has other content"), "{damaged}");
}

#[test]
fn the_trained_model_of_a_run_is_exported_as_a_gguf_file() {
    let project = project();
    let written = project.json(&["export", "gguf", "run", "--out", "new/run.gguf", "--dtype", "q8_0"]);
    assert_eq!((&written["architecture"], &written["pre_tokenizer"]), (&json!("qwen3"), &json!("falcon")), "{written}");
    assert!(std::fs::read(project.path("new/run.gguf")).unwrap().starts_with(b"GGUF\x03\0\0\0"));
    let refused = |args: &[&str]| project.refusal(&[&["export", "gguf"], args].concat(), 2);
    assert_eq!(refused(&["run", "--out", "new/run.gguf"]), "new/run.gguf: exists; name a new file");
    let resolved = project.read("run/config.resolved.toml");
    project.write("run/config.resolved.toml", &resolved.replace("rewrite_form = \"full\"", "rewrite_form = \"edit\""));
    let edits = project.querl(&["export", "gguf", "run", "--out", "new/edits.gguf"]).ok().stdout;
    let json = project.json(&["export", "gguf", "run", "--out", "new/again.gguf"]);
    let note = json["note"].as_str().unwrap();
    assert!(note.starts_with("responses are edits of the query ") && note.contains("docs/data.md"), "{json}");
    assert!(edits.ends_with(&format!("\nnote: {note}\n")) && written["note"].is_null(), "{edits}");
    let adapter = refused(&["run", "--adapter", "run/rl/best", "--out", "a.gguf"]);
    assert!(adapter.starts_with("--adapter: run is a run, which has its own"), "{adapter}");
    project.copy_model("model");
    let config = project.read("model/config.json").replace("Qwen3ForCausalLM", "Qwen3ForSequenceClassification");
    project.write("model/config.json", &config);
    let classifier = refused(&["model", "--out", "a.gguf"]);
    assert!(classifier.contains("architecture `Qwen3ForSequenceClassification` is not supported"), "{classifier}");
    // The adapter is compared with the digest that the run recorded.
    damage(&project.path("run/rl/best/adapter_model.safetensors"));
    assert!(refused(&["run", "--out", "a.gguf"]).contains("has other content than when it was written"));
    assert!(!project.path("a.gguf").exists());
}
