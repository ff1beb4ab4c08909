//! `data.dataset` through the command line: datasets of other frameworks instead of query table and teacher.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::Project;
use support::tenants::project;

/// The rows of a split: query id and rewrite.
fn targets(project: &Project, split: &str) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let target = |row: &Value| {
        (text(&row["metadata"]["id"]), text(&row["messages"].as_array().unwrap().last().unwrap()["content"]))
    };
    project.rows(split).iter().map(target).collect()
}

/// Writes the recorded rewrites of the project as a dataset.
fn write_dataset(project: &Project, file: &str, row: impl Fn(&Value) -> Value) {
    let rows: Vec<String> = project.rows("teacher.jsonl").iter().map(|recorded| row(recorded).to_string()).collect();
    project.write(file, &rows.join("\n"));
}

#[test]
fn prompts_and_completions_are_trained_on_and_evaluated_without_a_teacher() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert", "--out", "recorded"]).ok();
    write_dataset(&project, "trl.jsonl", |recorded| {
        json!({ "prompt": recorded["original_query"], "completion": recorded["rewritten_query"],
                "user_profile": recorded["user_profile"], "history_summary": recorded["history_summary"] })
    });
    project.edit("input = \"queries.jsonl\"\n", "dataset = { train = \"trl.jsonl\" }\n");
    project.edit("[teacher]\nkind = \"recorded\"\npath = \"teacher.jsonl\"\n", "");
    let said = project.querl(&["run", "querl.toml"]).ok().stderr;
    let warning = "row(s) of data.dataset have another prompt than plugins.prompt writes";
    assert!(said.contains("trl.jsonl (dataset)") && said.contains(warning), "{said}");
    // Equal queries, completions and groups give equal splits and equal results of the filters.
    for split in ["train", "val", "test"] {
        let [own, recorded] = ["run", "recorded"].map(|run| targets(&project, &format!("{run}/data/{split}.jsonl")));
        assert_eq!(
            own.iter().map(|row| &row.0).collect::<Vec<_>>(),
            recorded.iter().map(|row| &row.0).collect::<Vec<_>>()
        );
    }
    // A row without an assistant message ends with its prompt, which differs.
    let has_target = |row: &Value| row["messages"].as_array().unwrap().last().unwrap()["role"] == "assistant";
    let kept = |run: &str| {
        let path = format!("{run}/data/train.jsonl");
        let rows = targets(&project, &path).into_iter().zip(project.rows(&path));
        rows.filter(|(_, row)| has_target(row)).map(|(target, _)| target).collect::<Vec<_>>()
    };
    assert!(!kept("run").is_empty() && kept("run") == kept("recorded"));
    let first = project.rows("run/data/train.jsonl").remove(0);
    assert_eq!(first["messages"].as_array().unwrap().len(), 2, "the prompt of the dataset: {first}");
    let records = project.rows("run/eval/records.jsonl");
    let teacher = records.iter().find(|record| record["system"] == "teacher").unwrap();
    assert!(teacher["outcome"].to_string().contains("retrieval"), "{teacher}");
    let again = project.querl(&["run", "querl.toml"]).ok().stderr;
    assert!(again.contains("rewrite: finished earlier") && again.contains("rl: finished earlier"), "{again}");
    let stats = project.querl(&["data", "stats", "querl.toml"]).ok().stdout;
    assert!(stats.starts_with("query table trl.jsonl"), "{stats}");
}

#[test]
fn messages_of_ms_swift_in_files_of_their_own_are_the_splits() {
    let project = Project::new();
    write_dataset(&project, "all.jsonl", |recorded| {
        let message = |role: &str, text: &Value| json!({ "role": role, "content": text });
        json!({ "messages": [message("user", &recorded["original_query"]), message("assistant", &recorded["rewritten_query"])],
                "user_profile": recorded["user_profile"], "history_summary": recorded["history_summary"] })
    });
    let all = project.read("all.jsonl");
    let lines: Vec<&str> = all.lines().collect();
    for (name, lines) in [("train", &lines[..30]), ("val", &lines[30..35]), ("test", &lines[35..])] {
        project.write(&format!("{name}.jsonl"), &lines.join("\n"));
    }
    let set = ["train", "val", "test"].map(|name| format!("data.dataset.{name}={name}.jsonl"));
    let mut args = vec!["run", "querl.toml", "--to", "convert", "--set", "plugins.filters=[]"];
    set.iter().for_each(|set| args.extend(["--set", set.as_str()]));
    project.querl(&args).ok();
    let n_rows = ["train", "val", "test"].map(|name| project.rows(&format!("run/data/{name}.jsonl")).len());
    assert_eq!(n_rows, [30, 5, 5]);
    let numbers: Vec<Value> =
        project.rows("run/data/test.jsonl").iter().map(|row| row["metadata"]["row"].clone()).collect();
    assert_eq!(numbers, [36, 37, 38, 39, 40].map(Value::from), "rows are numbered through the files");
    // Another division into splits is another dataset.
    project.write("val.jsonl", &lines[30..34].join("\n"));
    let said = project.querl(&args).ok().stderr;
    assert!(said.contains("convert: running") && said.contains("dataset val"), "{said}");
}

#[test]
fn a_run_that_was_exported_is_read_back_as_it_was() {
    let project = project();
    project.querl(&["export", "verl", "run", "--out", "verl", "--gpus", "2"]).ok();
    project.querl(&["export", "trl", "run", "--out", "trl"]).ok();
    project.querl(&["export", "swift", "run", "--out", "swift"]).ok();
    let content = |run: &str, split: &str| -> Vec<Value> {
        let strip = |mut row: Value| {
            for name in ["row", "group", "source"] {
                row["metadata"][name].take();
            }
            row
        };
        project.rows(&format!("{run}/data/{split}.jsonl")).into_iter().map(strip).collect()
    };
    for (folder, extension) in [("verl", "parquet"), ("trl", "jsonl"), ("swift", "jsonl")] {
        let set = ["train", "val"].map(|name| format!("data.dataset.{name}={folder}/{name}.{extension}"));
        let out = format!("again-{folder}");
        let args = ["run", "querl.toml", "--to", "convert", "--out", &out, "--set", &set[0], "--set", &set[1]];
        let said = project.querl(&args).ok().stderr;
        assert!(!said.contains("another prompt"), "{said}");
        assert_eq!(content(&out, "train"), content("run", "train"), "{folder}");
        assert_eq!(content(&out, "val"), content("run", "val"), "{folder}");
        assert_eq!(project.read(&format!("{out}/data/test.jsonl")), "");
    }
}

/// Symptom: with `data.rewrite_form = "edit"` the teacher's rewrites were `=` and `& TEXT`, and were searched literally.
#[test]
fn the_edits_of_a_run_are_read_back_as_search_texts() {
    let project = Project::new();
    let convert = |others: &[&str]| {
        let args = ["run", "querl.toml", "--to", "convert", "--set", "data.rewrite_form=edit"];
        project.querl(&[&args[..], others].concat()).ok();
    };
    convert(&["--out", "edits"]);
    convert(&["--out", "again", "--set", "data.dataset.train=edits/data/train.jsonl"]);
    let rewrites = project.rows("again/data/rewrites.jsonl");
    let mut n_edits = 0;
    for row in project.rows("edits/data/train.jsonl") {
        assert_eq!(row["metadata"]["rewrite_form"], "edit", "{row}");
        let last = row["messages"].as_array().unwrap().last().unwrap();
        let target = last["content"].as_str().unwrap();
        if last["role"] == "assistant" && target.starts_with(['=', '+', '&']) {
            n_edits += 1;
            let read = rewrites.iter().find(|rewrite| rewrite["id"] == row["metadata"]["id"]).unwrap();
            let (text, query) = (&read["rewrite"]["Ok"]["text"], &row["metadata"]["original_query"]);
            let starts = text.as_str().unwrap().starts_with(query.as_str().unwrap());
            assert!(starts && (target == "=") == (text == query), "{target}: {read}");
        }
    }
    assert!(n_edits > 0);
}

#[test]
fn a_dataset_that_cannot_be_read_is_refused_with_its_row() {
    let project = Project::new();
    let refused = |content: &str| {
        project.write("bad.jsonl", content);
        project.refusal(&["run", "querl.toml", "--to", "convert", "--set", "data.dataset.train=bad.jsonl"], 2)
    };
    let unknown = refused("{\"text\": \"x\"}");
    let expected = "bad.jsonl:1: has no `messages`, `prompt` or `query`; found `text`; expected";
    assert!(unknown.starts_with(expected), "{unknown}");
    let empty = refused("{\"prompt\": \"q\", \"completion\": \"r\"}\n{\"prompt\": \"q\", \"completion\": \"\"}");
    assert_eq!(empty, "bad.jsonl:2: the response of the assistant is empty; write one, or leave the row out");
    let order = refused(
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}"#,
    );
    assert!(order.starts_with("bad.jsonl:1: `messages[1].role` is `user`; expected `assistant`"), "{order}");
    let blank = refused("{\"prompt\": \"q\", \"completion\": \"r\"}\n{\"prompt\": \" \", \"completion\": \"r\"}");
    assert_eq!(blank, "bad.jsonl:2: the last message of the user is empty; write one, or leave the row out");
    let missing = project.refusal(&["run", "querl.toml", "--set", "data.dataset.train=none.jsonl"], 2);
    assert_eq!(missing, "--set data.dataset.train is \"none.jsonl\"; no such file; create it or correct the path");
    assert!(!project.path("run/data").exists());
}
