//! Query tables in several formats, the tables that stages write, and the messages about both.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{CommandOutput, Project, repository};

/// The query table of a project as lines of cells.
fn cells(project: &Project) -> Vec<[String; 3]> {
    let columns = ["original_query", "user_profile", "history_summary"];
    project.rows("queries.jsonl").iter().map(|row| columns.map(|name| row[name].as_str().unwrap().into())).collect()
}

fn csv(rows: &[[String; 3]], delimiter: &str) -> String {
    let header = ["问题", "用户画像", "历史摘要"].map(String::from);
    std::iter::once(&header).chain(rows).map(|row| row.join(delimiter) + "\r\n").collect()
}

/// Removes the column names from the configuration, so that the default names are searched.
fn with_default_columns(project: &Project) {
    for line in [
        "query_column = \"original_query\"\n",
        "profile_column = \"user_profile\"\n",
        "history_column = \"history_summary\"\n",
    ] {
        project.edit(line, "");
    }
}

/// Regression: a path given by a flag was relative to the folder of the configuration.
#[test]
fn a_run_is_the_same_from_every_folder() {
    let project = Project::new();
    std::fs::create_dir(project.path("elsewhere")).unwrap();
    std::fs::rename(project.path("queries.jsonl"), project.path("elsewhere/own.jsonl")).unwrap();
    let validate = ["validate", "querl.toml", "--from", "rewrite", "--set", "data.input=elsewhere/own.jsonl"];
    project.querl(&validate).ok();
    let resolved = project.read("run/config.resolved.toml");
    let args = ["run", "../querl.toml", "--to", "validate", "--set", "data.input=own.jsonl", "--out", "../run"];
    let output = project.command(&args).current_dir(project.path("elsewhere")).output().unwrap();
    let said = CommandOutput::of(output, project.folder.path()).ok();
    assert!(
        ["rewrite", "validate"].iter().all(|stage| said.stderr.contains(&format!("{stage}: finished earlier"))),
        "{said:#?}"
    );
    assert_eq!(project.read("run/config.resolved.toml"), resolved);
    // Equal rows give equal bytes at any time.
    project.querl(&[&validate[..], &["--out", "again"]].concat()).ok();
    for table in ["data/rewrites.xlsx", "data/validated.xlsx"] {
        let bytes = |run: &str| std::fs::read(project.path(run).join(table)).unwrap();
        assert!(bytes("run") == bytes("again"), "{table}");
    }
    let message = project.refusal(&["run", "querl.toml", "--set", "data.input=own.jsonl"], 2);
    assert_eq!(message, "--set data.input is \"own.jsonl\"; no such file; create it or correct the path");
}

#[test]
fn a_table_makes_the_same_dataset_in_every_encoding_and_format() {
    let project = Project::new();
    with_default_columns(&project);
    let text = csv(&cells(&project), "\t");
    std::fs::write(project.path("utf8.tsv"), &text).unwrap();
    std::fs::write(project.path("mark.tsv"), format!("\u{feff}{text}")).unwrap();
    std::fs::write(project.path("gb.tsv"), encoding_rs::GB18030.encode(&text).0).unwrap();
    let train = |input: &str, out: &str| {
        let set = format!("data.input={input}");
        let said = project.querl(&["run", "querl.toml", "--to", "convert", "--set", &set, "--out", out]).ok();
        assert!(said.stderr.contains("  convert   40 in  "), "{said:#?}");
        let mut rows = project.rows(&format!("{out}/data/train.jsonl"));
        rows.iter_mut().for_each(|row| row["metadata"]["row"] = Value::Null);
        rows
    };
    let first = train("queries.jsonl", "a");
    assert!(!first.is_empty());
    for (input, out) in [("utf8.tsv", "b"), ("mark.tsv", "c"), ("gb.tsv", "d")] {
        assert!(train(input, out) == first, "{input}");
    }
    // The output of one run is the query table of another.
    let export = "data.export=[\"xlsx\", \"csv\", \"tsv\", \"parquet\"]";
    project.querl(&["rewrite", "querl.toml", "--out", "a", "--set", export]).ok();
    for (format, out) in [("xlsx", "e"), ("csv", "f"), ("tsv", "g"), ("parquet", "h")] {
        assert!(train(&format!("a/data/rewrites.{format}"), out) == first, "{format}");
    }
}

#[test]
fn tables_are_written_as_configured_without_another_call() {
    let project = Project::new();
    let run = |export: &str| {
        let set = format!("data.export={export}");
        project.querl(&["run", "querl.toml", "--to", "validate", "--set", &set]).ok().stderr
    };
    let there = |name: &str| project.path(&format!("run/data/{name}")).is_file();
    run("[\"xlsx\"]");
    assert!(there("rewrites.xlsx") && there("validated.xlsx") && !there("validated.parquet"));
    let said = run("[\"parquet\", \"csv\"]");
    assert!(said.contains("validate: running (data.export changed)"), "{said}");
    assert!(there("rewrites.parquet") && there("validated.csv") && !there("validated.xlsx") && !there("rewrites.xlsx"));
    let csv = project.read("run/data/validated.csv");
    assert!(csv.starts_with(
        "\u{feff}original_query,rewritten_query,user_profile,history_summary,recall_count,top1_score,success,error,gold_ids,group\n"
    ));
    assert_eq!(csv.lines().count(), 41);
    std::fs::remove_file(project.path("run/data/validated.csv")).unwrap();
    assert!(run("[\"parquet\", \"csv\"]").contains("validate: running (its validated.csv is missing)"));
    project.querl(&["config", "check", "querl.toml", "--set", "data.export=[\"xls\"]"]).refused("xls");
}

#[test]
fn errors_of_a_table_are_reported_with_their_rows() {
    let project = Project::new();
    let mut table = project.read("queries.jsonl");
    let first: Value = serde_json::from_str(table.lines().next().unwrap()).unwrap();
    let with = |query: &str| {
        let mut row = first.clone();
        row["original_query"] = query.into();
        format!("\n{row}")
    };
    let query = first["original_query"].as_str().unwrap();
    table += &with("");
    table += &with(query);
    table += &with(&format!("{query}！"));
    project.write("queries.jsonl", &table);
    let said = project.querl(&["rewrite", "querl.toml"]).ok();
    let passed_over =
        "rewrite: rows skipped: 1 with an empty query (row 41); 1 repeating an earlier row (row 42 (like row 1))";
    assert!(said.stderr.contains(passed_over), "{said:#?}");
    assert!(said.stderr.contains("are kept in its group (row 43 (like row 1))"), "{said:#?}");
    let few = "warning: rewrite: rows read is 43; 500 to 1000 are usual";
    assert!(said.stderr.contains(few), "{said:#?}");

    let stats = project.json(&["data", "stats", "querl.toml"]);
    let table = &stats["table"];
    assert_eq!((&table["n_rows"], &table["n_usable"]), (&43.into(), &41.into()));
    assert_eq!(table["alike"]["rows"][0], serde_json::json!({ "row": 43, "earlier": 1 }));
    let step = &stats["funnel"][0];
    assert_eq!((&step["stage"], &step["rows_in"], &step["kept"]), (&"rewrite".into(), &43.into(), &40.into()));
    let dropped = serde_json::json!({ "empty": 1, "repeated": 1, "teacher_not_recorded": 1 });
    assert_eq!(step["dropped"], dropped);
}

#[test]
fn stats_say_what_became_of_the_rows() {
    let project = Project::new();
    let before = project.querl(&["data", "stats", "querl.toml"]).ok();
    assert!(before.stdout.starts_with("query table queries.jsonl\n  rows            40\n"), "{before:#?}");
    assert!(!before.stdout.contains("splits") && !project.path("run").exists());
    let run = project.json(&["run", "querl.toml", "--to", "convert"]);
    let stats = project.json(&["data", "stats", "querl.toml"]);
    assert_eq!(stats["funnel"], run["funnel"]);
    assert_eq!(stats["funnel"].as_array().unwrap().len(), 3);
    assert_eq!(stats["splits"]["test"], project.rows("run/data/test.jsonl").len());
    assert_eq!(stats["leaks"]["test"]["n_leaked"], 0);
    let text = project.querl(&["data", "stats", "querl.toml"]).ok().stdout;
    assert!(text.contains("\nstages\n  rewrite   40 in  40 kept  none dropped\n"), "{text}");
    assert!(text.contains(" rows, 0 like a row of train\n"), "{text}");
}

/// Symptom: a table that was read in a wrong encoding was trained on.
#[test]
fn stats_warn_about_queries_in_another_script_than_the_passages() {
    let project = Project::new();
    let stats = || project.querl(&["data", "stats", "querl.toml"]).ok().stdout;
    assert!(!stats().contains("scripts"));
    project.write("kb.jsonl", "{\"id\": \"a\", \"text\": \"Shipping takes two days.\"}\n");
    let knowledge_base = format!("{}/examples/fivedoctors/knowledge_base.jsonl", repository().display());
    project.edit(&knowledge_base, &project.path("kb.jsonl").display().to_string());
    let warning =
        "\nwarning: queries (Chinese) and passages (Latin script) are in different scripts: save the table as UTF-8";
    assert!(stats().contains(warning), "{}", stats());
}

/// Regression: queries without a recorded rewrite were only reported by the stage, and `data stats` accepted a file that is not a recording.
#[test]
fn what_a_recorded_teacher_lacks_is_said_before_the_stage() {
    let project = Project::new();
    let rows = project.read("teacher.jsonl");
    project.write("teacher.jsonl", &rows.lines().skip(3).collect::<Vec<_>>().join("\n"));
    let warning =
        "warning: the recorded teacher (teacher.jsonl) has no rewrite of 3 of 40 queries; add them there, or set ";
    for command in
        [&["data", "stats", "querl.toml"][..], &["run", "querl.toml", "--dry-run"], &["config", "check", "querl.toml"]]
    {
        let said = project.querl(command).ok();
        assert!(said.stdout.contains(warning) || said.stderr.contains(warning), "{said:#?}");
    }
    project.write("teacher.jsonl", "original_query,rewritten_query\na,b\n");
    let refused = project.refusal(&["data", "stats", "querl.toml"], 2);
    assert!(refused.starts_with("teacher.jsonl:1: not JSON"), "{refused}");
    // Symptom: the same for a finished stage, whose counts are in the ledger.
    project.write("teacher.jsonl", &rows);
    project.querl(&["rewrite", "querl.toml"]).ok();
    project.write("teacher.jsonl", "original_query,rewritten_query\na,b\n");
    project.querl(&["data", "stats", "querl.toml"]).ok();
}

/// Symptom: the page had a funnel that no run of the example has.
#[test]
fn the_documented_funnel_is_that_of_the_example() {
    let project = Project::new();
    let example = repository().join("examples/fivedoctors/querl.toml").display().to_string();
    let run = project.querl(&["run", &example, "--to", "convert", "--out", "example"]).ok();
    let lines: Vec<&str> = run.stderr.lines().collect();
    let first = lines.iter().position(|line| *line == "rows of each stage:").unwrap_or_else(|| panic!("{run:#?}"));
    let funnel = lines[first..].iter().take(4).map(|line| format!("{line}\n")).collect::<String>();
    for page in ["docs/data.md", "docs/zh-CN/data.md"] {
        let text = std::fs::read_to_string(repository().join(page)).unwrap();
        assert!(text.contains(&format!("```\n{funnel}```\n")), "{page} does not have\n{funnel}");
    }
}

/// Adds each query a second time with a final particle and in its own group. Some pairs are then in different splits: the test split leaks.
fn add_near_duplicates(project: &Project) {
    for file in ["queries.jsonl", "teacher.jsonl"] {
        let again = project.rows(file).into_iter().map(|mut row| {
            row["original_query"] = format!("{}啊", row["original_query"].as_str().unwrap()).into();
            format!("\n{row}")
        });
        let text = project.read(file) + &again.collect::<String>();
        project.write(file, &text);
    }
}

#[test]
fn no_call_or_training_where_rows_of_test_are_nearly_in_train() {
    let project = Project::new();
    add_near_duplicates(&project);
    let refused = project.querl(&["run", "querl.toml", "--to", "sft"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    let last = refused.stderr.lines().last().unwrap();
    assert!(last.starts_with("error: "), "{last}");
    assert!(last.contains(" rows of test are in train or nearly equal to a row of it: row "), "{last}");
    assert!(last.ends_with("or set data.on_leak = \"warn\""), "{last}");
    assert!(!project.path("run/data/rewrites.jsonl").exists() && !project.path("run/sft").exists());
    let n_leaked = || project.json(&["data", "stats", "querl.toml"])["leaks"]["test"]["n_leaked"].as_u64().unwrap();
    let of_table = n_leaked();
    assert!(of_table > 0);
    let warned = ["run", "querl.toml", "--to", "sft", "--set", "data.on_leak=warn", "--json"];
    let said = project.querl(&warned).ok();
    assert!(said.stderr.contains("sft: warning: "));
    assert!(said.stderr.contains(" rows of test are in train or nearly equal to a row of it"));
    let said: Value = serde_json::from_str(&said.stdout).unwrap();
    let n_seen = said["stages"][3]["facts"]["rows of test nearly in train"].as_u64().unwrap();
    assert!(n_seen > 0 && n_seen <= of_table && n_seen == n_leaked(), "filters may drop rows of train: {n_seen}");
    // The reminder is repeated each time the result is used.
    let again = project.querl(&warned).ok().stderr;
    let reminder =
        format!("warning: {n_seen} row(s) of test were in train or nearly equal to a row of it when sft was trained");
    assert!(again.contains(&reminder), "{again}");
}

/// Regression: after a query was added to the table, a finished training was removed before the new one was refused.
#[test]
fn a_finished_training_stays_where_the_next_is_refused() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "sft"]).ok();
    add_near_duplicates(&project);
    let warned = project.querl(&["run", "querl.toml", "--to", "convert"]).ok().stderr;
    assert!(warned.contains("rewrite: warning: "), "{warned}");
    assert!(warned.contains(" rows of test are in train or nearly equal to a row of it"), "{warned}");
    let refused = project.querl(&["sft", "querl.toml"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    assert!(project.path("run/sft/best/adapter_model.safetensors").is_file());
}

/// Regression: a run whose query table is in its own folder removed the table.
#[test]
fn a_table_that_a_run_writes_itself_is_not_its_query_table() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "validate", "--set", "data.export=[\"csv\", \"xlsx\"]"]).ok();
    for file in ["run/data/rewrites.xlsx", "run/data/validated.csv", "run/data/rewrites.jsonl"] {
        let input = format!("data.input={file}");
        let said = project.querl(&["rewrite", "querl.toml", "--set", &input, "--set", "data.export=[\"tsv\"]"]);
        let expected = format!("data.input is {file}, which this run writes itself; give it a copy, or another --out");
        said.refused(&expected);
        assert!(project.path(file).is_file());
    }
    project.querl(&["rewrite", "querl.toml", "--set", "data.input=run/data/rewrites.xlsx", "--out", "other"]).ok();
}

/// A limit on file size of half the workbook's size: to a writer this is a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_is_reported_and_the_rewrites_stay() {
    let project = Project::new();
    project.querl(&["rewrite", "querl.toml", "--out", "warm"]).ok();
    // Each of these characters takes five bytes in XML.
    let row = |n: usize| {
        let query = format!("鱼油{n}{}", "&".repeat(3000));
        let rewrite = format!("鱼油{}", "&".repeat(3000));
        serde_json::json!({"original_query": query, "user_profile": "", "history_summary": "", "rewritten_query": rewrite})
            .to_string()
    };
    let table: Vec<String> = (0..50).map(row).collect();
    for file in ["queries.jsonl", "teacher.jsonl"] {
        project.write(file, &table.join("\n"));
    }
    let run = |limit| project.querl_after(&format!("trap '' XFSZ; ulimit -f {limit}"), &["rewrite", "querl.toml"]);
    let full = run("700");
    let said = full.stderr;
    assert_eq!(full.code, Some(1), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.contains("rewrites.xlsx: cannot be written: "), "{said}");
    assert!(last.contains("take xlsx out of data.export"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(project.rows("run/data/rewrites.jsonl").len(), 50);
    run("unlimited").ok();
    assert!(project.path("run/data/rewrites.xlsx").is_file());
}
