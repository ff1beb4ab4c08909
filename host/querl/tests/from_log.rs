//! From requests to a query table through the command line: a server logs, `querl data from-log` makes a table, a run reads it.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::server::Server;
use support::{Project, repository};

const SERVE: [&str; 2] = ["serve", "rewrite"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logged_requests_become_the_query_table_of_another_run() {
    let project = Project::new();
    project.querl(&["run", "querl.toml"]).ok();
    let queries = project.rows("queries.jsonl");
    let passages = std::fs::read_to_string(repository().join("examples/fivedoctors/knowledge_base.jsonl")).unwrap();
    let mut server = Server::start(&project, &SERVE, &["run", "--request_log", "log", "--deadline_ms", "60000"]);
    server.ready().await;
    let rewrite = async |row: &Value| {
        let request = json!({
            "query": row["original_query"], "user_profile": row["user_profile"], "history": row["history_summary"],
            "user": row["original_query"],
        });
        server.ask("/v1/rewrite", &request).await.1
    };
    for (row, passage) in queries[..12].iter().zip(passages.lines()) {
        let passage: Value = serde_json::from_str(passage).unwrap();
        let response = rewrite(row).await;
        assert!(response["id"].is_string(), "{response}");
        let clicked = json!({"id": response["id"], "clicked": [passage["id"]]});
        assert_eq!(server.ask("/v1/feedback", &clicked).await, (200, json!({"id": response["id"], "accepted": true})));
    }
    rewrite(&queries[0]).await;
    assert_eq!(server.end("-TERM"), Some(0), "the queue is written before the end");

    let out = project.querl(&["data", "from-log", "log", "--out", "logged.jsonl"]).ok().stdout;
    for line in [
        "  lines           25",
        "  rewrites        13",
        "  repeated        1",
        "  feedback        12",
        "  rows            12",
    ] {
        assert!(out.lines().any(|found| found == line), "no `{line}` in {out}");
    }
    assert!(out.contains("data.input = \"logged.jsonl\" and data.group_column = \"group\""), "{out}");
    let rows = project.rows("logged.jsonl");
    assert_eq!(rows[0]["original_query"], queries[0]["original_query"]);
    assert_eq!((&rows[0]["requests"], rows[0]["gold_ids"].as_array().unwrap().len()), (&json!(2), 1));

    let again = project.refusal(&["data", "from-log", "log", "--out", "logged.jsonl"], 2);
    let expected = "logged.jsonl: is there already; choose another table with `--out`, or replace it with `--force`";
    assert_eq!(again, expected);
    let report = project.json(&["data", "from-log", "log", "--out", "logged.jsonl", "--force"]);
    assert_eq!((&report["n_rows"], &report["tenant"]), (&json!(12), &json!("fivedoctors")));
    let other = project.refusal(&["data", "from-log", "log", "--out", "t.jsonl", "--tenant", "other"], 2);
    assert!(other.contains("the log has no request of tenant `other`; it has those of `fivedoctors`"), "{other}");
    let days = ["--since", "2026-02-01", "--until", "2026-01-01"];
    let days = project.refusal(&[&["data", "from-log", "log", "--out", "t.jsonl"], &days[..]].concat(), 2);
    assert_eq!(days, "--since 2026-02-01 is after --until 2026-01-01; exchange them");

    project.edit("input = \"queries.jsonl\"", "input = \"logged.jsonl\"\ngroup_column = \"group\"");
    project.edit(
        "query_column = \"original_query\"\nprofile_column = \"user_profile\"\nhistory_column = \"history_summary\"\n",
        "",
    );
    let stats = project.json(&["data", "stats", "querl.toml", "--out", "second"]);
    assert_eq!((&stats["table"]["n_usable"], &stats["table"]["n_with_gold"]), (&json!(12), &json!(12)));
    let args = ["run", "querl.toml", "--to", "rewrite", "--out", "second"];
    project.querl(&args).ok();
    let rewritten = project.rows("second/data/rewrites.jsonl");
    assert!(rewritten.len() == 12 && rewritten.iter().all(|row| row["rewrite"]["Ok"].is_object()), "{rewritten:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_plugin_keeps_texts_out_of_the_log() {
    let project = Project::new();
    project.querl(&["run", "querl.toml"]).ok();
    let plugins = repository().join("plugins");
    let plugin = |name: &str| plugins.join(name).display().to_string();
    let refused = |args: &[&str]| {
        let output = project.querl(&[&SERVE[..], &["run", "--addr", "127.0.0.1:0", "-q"], args].concat());
        assert_eq!(output.code, Some(2), "{output:#?}");
        output.stderr
    };
    let reward = plugin("reward-competition");
    assert!(refused(&["--request_log", "log", "--request_log_filter", &reward]).contains("is no filter"));
    assert!(refused(&["--request_log", "log", "--request_log_filter", "missing.querl"]).contains("missing.querl"));
    assert!(refused(&["--request_log_days", "3"]).contains("--request_log <DIR>"));
    assert!(
        refused(&["--request_log", "querl.toml"]).contains("--request_log: querl.toml is a file; expected a folder")
    );

    // The filter drops requests without hits. Requests of the log have no passages, so that all are dropped.
    let filter = plugin("filter-quality");
    let args = ["run", "--request_log", "log", "--request_log_filter", &filter, "--deadline_ms", "60000"];
    let mut server = Server::start(&project, &SERVE, &args);
    server.ready().await;
    assert_eq!(server.ask("/v1/rewrite", &json!({"query": "胶原蛋白怎么吃"})).await.0, 200);
    assert_eq!(server.end("-TERM"), Some(0));
    let entries = std::fs::read_dir(project.path("log")).unwrap().map(|entry| entry.unwrap().path());
    let day = entries.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "jsonl")).unwrap();
    let line: Value = serde_json::from_str(std::fs::read_to_string(day).unwrap().trim_end()).unwrap();
    assert!(line["redacted"].is_string() && line["query"].is_null() && line["rewrite"].is_null(), "{line}");
    let none = project.refusal(&["data", "from-log", "log", "--out", "t.jsonl"], 2);
    assert!(none.contains("can be used (left out: 1 without texts)"), "{none}");
}
