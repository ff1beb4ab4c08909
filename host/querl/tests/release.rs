//! `querl release` and a server that follows the release history, with small runs.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::LazyLock;
use support::Project;
use support::results::copy;
use support::server::{Server, until};

/// Finished runs of one tenant: `run` and `second` differ in training, `resplit` in the split, `shallow` in retrieval.
static RUNS: LazyLock<Project> = LazyLock::new(|| {
    let project = Project::new();
    project.querl(&["run", "querl.toml"]).ok();
    let text = project.read("querl.toml");
    let variant = |name: &str, from: &str, to: &str| {
        assert!(text.contains(from));
        let text = text.replacen("output_dir = \"run\"", &format!("output_dir = \"{name}\""), 1).replacen(from, to, 1);
        project.write(&format!("{name}.toml"), &text);
        project.querl(&["run", &format!("{name}.toml")]).ok();
    };
    variant("second", "learning_rate = 1e-3\nmax_steps = 2", "learning_rate = 0.1\nmax_steps = 6");
    variant("resplit", "split = [", "split_seed = 5\nsplit = [");
    variant("shallow", "kind = \"embedded\"", "kind = \"embedded\"\ntop_k = 1");
    project
});

/// Copies of the finished runs, which a test may change.
fn project() -> Project {
    let project = Project::new();
    for folder in ["run", "second", "resplit", "shallow"] {
        copy(&RUNS.path(folder), &project.path(folder));
    }
    project
}

fn release(project: &Project, args: &[&str]) -> support::CommandOutput {
    project.querl(&[&["release"], args].concat())
}

fn ids(project: &Project, run: &str, split: &str) -> BTreeSet<String> {
    let id = |row: &Value| row["metadata"]["id"].as_str().unwrap().to_owned();
    project.rows(&format!("{run}/data/{split}.jsonl")).iter().map(id).collect()
}

/// With random weights no check passes: replaces the verdict in the stored result of the only check of `run` by `metric`.
fn set_verdict(project: &Project, run: &str, metric: &str, verdict: &str) {
    edit_evidence(project, run, metric, |evidence| evidence["verdict"] = json!(verdict));
}

fn edit_evidence(project: &Project, run: &str, metric: &str, edit: impl Fn(&mut Value)) {
    let files = std::fs::read_dir(project.path(run).join("release")).unwrap();
    let paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    let end = format!(".{metric}.json");
    let path = paths.iter().find(|path| path.to_str().unwrap().ends_with(&end)).unwrap();
    let mut evidence: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    edit(&mut evidence);
    std::fs::write(path, evidence.to_string()).unwrap();
}

#[test]
fn a_check_counts_queries_that_both_runs_hold_out_and_is_the_evidence_of_a_promotion() {
    let project = project();
    release(&project, &["promote", "run"]).refused("run: it was not checked against raw");
    assert!(!project.path("releases").exists());

    // The rewrites of random weights are useless: by top-1 score they are worse with certainty.
    let lost = release(&project, &["check", "run", "--against", "raw", "--metric", "top1_score"]);
    assert_eq!(lost.code, Some(1), "{lost:#?}");
    assert!(lost.stderr.contains("error: rl loses to raw") || lost.stderr.contains("queries cannot tell"), "{lost:#?}");
    release(&project, &["promote", "run"]).refused("its check against raw");
    let margin = project.refusal(&["release", "check", "run", "--against", "raw", "--margin", "0.2"], 2);
    assert_eq!(margin, "--margin is 0.2; expected 0 to 0.1 for top1");

    // A failed check by one metric is not outweighed by a passed check by another.
    release(&project, &["check", "run", "--against", "raw", "--metric", "win_rate"]);
    set_verdict(&project, "run", "win_rate", "passed");
    set_verdict(&project, "run", "top1_score", "lost");
    release(&project, &["promote", "run"]).refused("its check against raw found a loss of top1_score");
    set_verdict(&project, "run", "top1_score", "passed");
    let lost = json!({ "metric": "top1", "verdict": "lost", "n": 4, "difference": {} });
    edit_evidence(&project, "run", "top1_score", |evidence| evidence["by_gold"] = lost.clone());
    release(&project, &["promote", "run"]).refused("its check against raw found a loss of top1;");
    edit_evidence(&project, "run", "top1_score", |evidence| evidence["by_gold"] = Value::Null);
    release(&project, &["promote", "run"]).ok();
    let again = release(&project, &["promote", "run"]).ok();
    assert!(again.stdout.contains("is that already"), "{again:#?}");

    // Symptom: a check of a run against itself passed.
    let itself = project.refusal(&["release", "check", "run", "--against", "./run"], 2);
    assert!(itself.contains("are the same model"), "{itself}");
    // Symptom: after a further training in the folder that serves, the message named this check as the remedy.
    let history = project.read("releases/history.jsonl");
    let mut earlier: Value = serde_json::from_str(history.trim_end()).unwrap();
    earlier["version"] = json!("earlier");
    project.write("releases/history.jsonl", &format!("{earlier}\n"));
    release(&project, &["promote", "run"]).ok();
    let checks = project.path("run/release");
    std::fs::rename(&checks, project.path("checks")).unwrap();
    project.write("releases/history.jsonl", &format!("{earlier}\n"));
    release(&project, &["promote", "run"]).refused("run `querl release check run --against raw`");
    std::fs::rename(project.path("checks"), &checks).unwrap();
    project.write("releases/history.jsonl", &history);

    // The second run must be checked against the first. Runs with equal settings and splits are comparable, others are not.
    release(&project, &["promote", "second"]).refused("second: it was not checked against run");
    let different = project.refusal(&["release", "check", "shallow", "--against", "run"], 2);
    assert!(different.starts_with("shallow and run were evaluated with different retrieval.top_k"), "{different}");
    // Not comparable after any further evaluation: runs of another query table and of another tenant.
    let ledger = project.read("second/stages.json");
    let with_other = |input: &str| {
        let mut changed: Value = serde_json::from_str(&ledger).unwrap();
        let input = &mut changed["stages"]["eval"]["inputs"][input];
        assert!(input.is_string());
        *input = json!("other");
        project.write("second/stages.json", &changed.to_string());
    };
    with_other("validated.jsonl of validate");
    let reward = project.refusal(&["release", "check", "second", "--against", "run", "--metric", "reward"], 2);
    let remedy =
        "run `querl release check 'second' --against 'run' --metric top1_score`, or name top1, mrr or judge_score";
    assert!(reward.contains("different rewrites of the teacher") && reward.ends_with(remedy), "{reward}");
    with_other("tenant");
    let tenants = project.refusal(&["release", "check", "second", "--against", "run"], 2);
    assert!(tenants.starts_with("second and run are of different tenants; compare runs of one tenant"), "{tenants}");
    project.write("second/stages.json", &ledger);
    let (own, other): (Vec<_>, Vec<_>) = ["test", "train", "val"]
        .iter()
        .map(|split| (ids(&project, "resplit", split), ids(&project, "run", split)))
        .unzip();
    let n_both = own[0].intersection(&other[0]).count();
    let resplit = release(&project, &["check", "resplit", "--against", "run", "--metric", "top1_score", "--json"]);
    if n_both == 0 {
        assert!(resplit.stderr.contains("no query is held out in both"), "{resplit:#?}");
    } else {
        let found: Value = serde_json::from_str(&resplit.stdout).unwrap();
        let n_seen = own[0].iter().filter(|id| other[1].contains(*id) || other[2].contains(*id)).count();
        assert_eq!((&found["n"], &found["n_seen_by_other"][0]), (&json!(n_both), &json!(n_seen)));
        assert!(n_seen > 0);
    }

    // A check applies to exact digests, and an evaluation to one checkpoint.
    release(&project, &["check", "second", "--against", "run", "--metric", "top1_score"]);
    set_verdict(&project, "second", "top1_score", "passed");
    assert_eq!(std::fs::read_dir(project.path("second/release")).unwrap().count(), 1);
    let settings = project.read("second/config.resolved.toml");
    project.write("second/config.resolved.toml", &settings.replace("max_new_tokens = 8", "max_new_tokens = 9"));
    release(&project, &["promote", "second"]).refused("with other digests");
    let outdated = project.refusal(&["release", "check", "second", "--against", "run"], 2);
    assert!(outdated.starts_with("second: rl.max_new_tokens changed after the evaluation"), "{outdated}");
    project.write("second/config.resolved.toml", &settings);
    release(&project, &["promote", "second"]).ok();
    let history = project.json(&["release", "history"]);
    let entry = &history[1];
    assert_eq!(entry["action"], json!("promote"));
    assert_eq!(entry["run"], json!("second"));
    assert_eq!(entry["replaced"]["run"], json!("run"));
    assert_eq!(entry["evidence"]["metric"], "top1_score");
    assert!(entry["digests"]["rl/best/adapter_model.safetensors"].is_string(), "{entry}");

    // A rollback returns to the first release. If its files changed, it is refused.
    let adapter = project.path("run/rl/best/adapter_model.safetensors");
    let intact = std::fs::read(&adapter).unwrap();
    std::fs::write(&adapter, &intact[..intact.len() - 1]).unwrap();
    let before = project.read("releases/history.jsonl");
    release(&project, &["rollback"]).refused("run/rl/best/adapter_model.safetensors");
    std::fs::write(&adapter, &intact).unwrap();
    std::fs::rename(project.path("run"), project.path("moved")).unwrap();
    assert!(release(&project, &["rollback"]).stderr.contains("run: the folder of the released run is gone"));
    std::fs::rename(project.path("moved"), project.path("run")).unwrap();
    assert_eq!(project.read("releases/history.jsonl"), before);
    let back = release(&project, &["rollback"]).ok();
    assert!(back.stdout.starts_with("tenant fivedoctors: back to run (version "), "{back:#?}");
    assert!(release(&project, &["rollback"]).stderr.contains("nothing served tenant `fivedoctors` before"));
    assert!(project.read("releases/history.jsonl").starts_with(&before), "lines are only added");
}

/// Symptom: a reason with escapes and a line break was stored, and printed as it was.
#[test]
fn a_reason_cannot_write_to_the_terminal() {
    let project = Project::new();
    let reason = "x\u{1b}[31m\nINFO fake";
    let refused = project.refusal(&["release", "promote", "run", "--without_check", reason], 2);
    assert_eq!(refused, "--without_check: expected a reason on one line, without control characters");

    let entry = json!({"time": "2026-11-01T08:00:00Z", "tenant": "shop", "action": "promote", "run": "run", "version": "abc",
        "digests": {}, "reason": reason, "who": "some\u{1b}[1mbody"});
    std::fs::create_dir(project.path("releases")).unwrap();
    project.write("releases/history.jsonl", &format!("{entry}\n"));
    let history = release(&project, &["history"]).ok();
    let expected = "2026-11-01T08:00:00Z by some[1mbody: tenant shop: run (version abc) serves, without check: x[31m INFO fake\n\
                    tenant shop: run serves\n";
    assert_eq!(history.stdout, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_follows_promotions_and_rollbacks_without_a_failed_response() {
    let project = project();
    release(&project, &["promote", "run", "--without_check", "first release of a test"]).ok();
    let args = ["--releases", "releases", "--admin_key_env", "TEST_KEY", "--deadline_ms", "60000", "--cache", "100"];
    let mut server = Server::start(&project, &["serve", "rewrite"], &args);
    server.ready().await;
    let versions = async || {
        let mut versions = BTreeSet::new();
        for user in 0..24 {
            let request = json!({"query": "胶原蛋白怎么吃", "user": format!("user {user}")});
            let (status, response) = server.ask("/v1/rewrite", &request).await;
            assert_eq!(status, 200, "{response}");
            versions.insert(response["version"].as_str().unwrap().to_owned());
        }
        versions
    };
    let first = versions().await;
    assert_eq!(first.len(), 1);
    let notify = |args: &[&str]| {
        let args = [&["release"], args, &["--server", &server.url, "--admin_key_env", "TEST_KEY"]].concat();
        let output = project.command(&args).env("TEST_KEY", "secret").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let reason = ["--without_check", "a test"];
    notify(&[&["promote", "second", "--canary", "0.5"][..], &reason].concat());
    let both = versions().await;
    assert!(both.len() == 2 && both.is_superset(&first), "{both:?}");
    assert_eq!(versions().await, both);
    notify(&["rollback"]);
    assert_eq!(versions().await, first, "the candidate has ended");

    notify(&[&["promote", "second", "--shadow"][..], &reason].concat());
    assert_eq!(versions().await, first);
    notify(&[&["promote", "second"][..], &reason].concat());
    let second: BTreeSet<String> = both.difference(&first).cloned().collect();
    assert_eq!(versions().await, second);
    let history = project.json(&["release", "history"]);
    assert_eq!(history[4]["version"], json!(second.first()), "the history has the version of responses");

    let log = project.read("server.log");
    let second_version = second.first().unwrap();
    for line in [
        format!("tenant fivedoctors: candidate {second_version} of "),
        format!("tenant fivedoctors: candidate {second_version} ended"),
    ] {
        assert!(log.contains(&line), "{line} in {log}");
    }
    // The message at the start has the same words, but another end.
    let version = format!("tenant fivedoctors: version {second_version} of ");
    assert!(log.lines().any(|line| line.contains(&version) && line.ends_with(" is served")), "{log}");

    // Regression: a wrong key was reported after the history was written, and a second attempt went back one release further.
    let history = project.read("releases/history.jsonl");
    let refused = |args: &[&str], key: &str| {
        let output = project.command(&[&["release"], args].concat()).env("TEST_KEY", key).output().unwrap();
        assert!(!output.status.success());
        assert_eq!(project.read("releases/history.jsonl"), history);
        String::from_utf8(output.stderr).unwrap()
    };
    let server_args = ["--server", &server.url, "--admin_key_env", "TEST_KEY"];
    let wrong = refused(&[&["rollback"], &server_args[..]].concat(), "wrong");
    assert!(wrong.contains("nothing is changed") && wrong.contains("the key is missing or wrong"), "{wrong}");
    let unreachable = ["rollback", "--server", "http://127.0.0.1:9", "--admin_key_env", "TEST_KEY"];
    assert!(refused(&unreachable, "secret").contains("nothing is changed"));
    let unnamed = refused(&["rollback", "--server", &server.url], "secret");
    assert!(unnamed.contains("--server requires --admin_key_env NAME"), "{unnamed}");

    // Without a notification, the server reads the folder again on SIGHUP.
    release(&project, &["rollback"]).ok();
    server.signal("-HUP");
    until(async || versions().await == first).await;
    assert_eq!(versions().await, first);

    // A run that changed after its release is not served.
    let adapter = project.path("second/rl/best/adapter_model.safetensors");
    release(&project, &[&["promote", "second"][..], &reason].concat()).ok();
    std::fs::write(&adapter, b"damaged").unwrap();
    let reload = server.client.post(format!("{}/admin/releases", server.url)).bearer_auth("secret");
    let body: Value = reload.send().await.unwrap().json().await.unwrap();
    assert!(body["problems"][0].as_str().unwrap().contains("adapter_model.safetensors"), "{body}");
    assert_eq!(versions().await, first, "what was served is still served");
    assert_eq!(server.end("-TERM"), Some(0));
    let refused = project.refusal(&["serve", "rewrite", "--releases", "releases", "--addr", "127.0.0.1:0"], 2);
    assert!(refused.contains("adapter_model.safetensors"), "{refused}");
    let empty = project.refusal(&["serve", "rewrite", "--releases", "nowhere"], 2);
    assert!(empty.starts_with("nowhere: no releases here") && !project.path("nowhere").exists(), "{empty}");
}

#[test]
fn a_canary_of_all_requests_and_limits_of_a_candidate_without_releases_are_refused() {
    let project = Project::new();
    release(&project, &["promote", "run", "--canary", "1"]).refused("above 0 and below 1");
    project.querl(&["serve", "rewrite", "run", "--candidate_max_errors", "0.1"]).refused("--candidate_max_errors");
}
