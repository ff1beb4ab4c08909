//! Finished runs of two tenants with the same base model.

use super::Project;
use super::results::copy;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// The runs `run` and `other`; the first was evaluated with beam search.
pub static RUNS: LazyLock<Project> = LazyLock::new(|| {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--set", "eval.n_beams=3"]).ok();
    project
        .edit("tenant = \"fivedoctors\"\noutput_dir = \"run\"", "tenant = \"other\"\noutput_dir = \"other\"\nseed = 7");
    project.edit("learning_rate = 1e-3\nmax_steps = 2", "learning_rate = 0.1\nmax_steps = 6");
    project.querl(&["run", "querl.toml"]).ok();
    project
});

/// Copies of the runs, which a test may change.
pub fn project() -> Project {
    let project = Project::new();
    for folder in ["run", "other"] {
        copy(&RUNS.path(folder), &project.path(folder));
    }
    project
}

/// Requests with the queries of an evaluation, and the expected rewrites; empty if a response had none.
pub fn evaluated(folder: &str, tenant: &str) -> Vec<(Value, String, String)> {
    let records = RUNS.rows(&format!("{folder}/eval/records.jsonl"));
    let of_rl = records.into_iter().filter(|record| record["system"] == "rl");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let found = of_rl.map(|record| {
        let query = &record["query"];
        let request = json!({
            "tenant": tenant, "query": query["original_query"], "user_profile": query["user_profile"],
            "history": query["history_summary"], "deadline_ms": 60_000,
        });
        (request, text(&query["original_query"]), text(&record["outcome"]["Ok"]["candidate"]["rewrite"]))
    });
    found.collect()
}
