//! Learned expansions through the command line: from the rows of train to eval, exports, a server and a deployment.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::Project;
use support::results::damage;
use support::server::Server;

const N_ROWS: usize = 160;
const WISHES: [&str; 4] = ["give my money back", "want my cash again", "when does it go", "which hour does it leave"];
const PRODUCTS: [(&str, &str); 3] =
    [("commuter pass", "Saltpass"), ("night cabin", "Samphire"), ("bike place", "Cleat")];

/// Queries without a word of the titles of their passages, which say "refund" or "timetable" and the name of a product.
fn project() -> Project {
    let project = Project::new();
    let row = |number: usize| {
        let (wish, (thing, product)) = (WISHES[number % 4], PRODUCTS[number / 4 % 3]);
        let topic = if number % 4 < 2 { "refund" } else { "timetable" };
        json!({"original_query": format!("{wish} {number}"), "user_profile": "", "history_summary": format!("bought a {thing}"),
            "gold_ids": format!("{product}-{topic}"), "rewritten_query": format!("{product} {topic}"), "group": format!("g{number}")})
    };
    write_queries(&project, (0..N_ROWS).map(row));
    let passage = |product: &str, topic: &str| json!({"id": format!("{product}-{topic}"), "title": format!("{product} {topic}"), "text": "Ask at the pier."});
    let passages =
        PRODUCTS.iter().flat_map(|(_, product)| ["refund", "timetable"].map(|topic| passage(product, topic)));
    project.write("kb.jsonl", &passages.map(|passage| passage.to_string()).collect::<Vec<_>>().join("\n"));
    let text = project.read("querl.toml");
    let lines = text.lines().filter(|line| !line.starts_with("lexicon")).map(|line| match line {
        "rewrite_form = \"full\"" => "rewrite_form = \"edit\"\ngroup_column = \"group\"",
        line if line.starts_with("knowledge_base") => "knowledge_base = \"kb.jsonl\"",
        "kind = \"rubric\"" => "kind = \"none\"",
        line => line,
    });
    project.write("querl.toml", &lines.collect::<Vec<_>>().join("\n"));
    project
}

/// The query table, which is also the teacher's recording.
fn write_queries(project: &Project, rows: impl Iterator<Item = Value>) {
    let text = rows.map(|row| row.to_string()).collect::<Vec<_>>().join("\n");
    project.write("queries.jsonl", &text);
    project.write("teacher.jsonl", &text);
}

fn convert(project: &Project, others: &[&str]) -> String {
    project.querl(&[&["run", "querl.toml", "--to", "convert"], others].concat()).ok().stderr
}

fn expansions(project: &Project, split: &str) -> Vec<(Value, String)> {
    let rows = project.rows(&format!("run/data/{split}.jsonl"));
    let of = |row: Value| (row["metadata"].clone(), row["metadata"]["expansion"].as_str().unwrap().to_owned());
    rows.into_iter().map(of).collect()
}

#[test]
fn words_of_the_titles_are_predicted_where_they_retrieve_more() {
    let project = project();
    let said = convert(&project, &[]);
    assert!(said.contains("convert: expansions: MRR of 96 rows of train "), "{said}");
    assert!(said.contains(": `&` is query, history and terms\n"), "{said}");
    for split in ["train", "val", "test"] {
        for (row, expansion) in expansions(&project, split) {
            let gold = row["gold_ids"][0].as_str().unwrap().to_lowercase();
            let found: Vec<&str> = expansion.split(' ').collect();
            assert!(gold.split('-').all(|word| found.contains(&word)), "{split}: {expansion}: {row}");
        }
    }
    assert!(convert(&project, &[]).contains("convert: finished earlier, skipped\n"));
    // SFT learns them.
    let is_expanded = |row: &Value| row["messages"].as_array().unwrap().last().unwrap()["content"] == "&";
    assert!(project.rows("run/data/train.jsonl").iter().all(is_expanded));

    // Without them the file of the earlier result is gone.
    let said = convert(&project, &["--set", "data.expansion_terms=0"]);
    assert!(
        said.contains("convert: running (data.expansion_terms changed)") && !said.contains("expansions:"),
        "{said}"
    );
    assert!(!project.path("run/data/expansion.json").exists());
    assert!(project.rows("run/data/train.jsonl").iter().all(|row| row["metadata"].get("expansion").is_none()));
}

#[test]
fn without_a_gain_or_titles_there_are_no_terms() {
    let project = project();
    let untitled = project
        .rows("kb.jsonl")
        .into_iter()
        .map(|passage| json!({"id": passage["id"], "text": passage["title"]}).to_string());
    let titled = project.read("kb.jsonl");
    project.write("kb.jsonl", &untitled.collect::<Vec<_>>().join("\n"));
    assert!(
        convert(&project, &[])
            .contains("convert: no expansion terms: the gold passages have no titles; add a `title` to")
    );
    project.write("kb.jsonl", &titled);
    // Queries that already have the words.
    let named = project.rows("queries.jsonl").into_iter().map(|mut row| {
        row["original_query"] =
            format!("{} {}", row["original_query"].as_str().unwrap(), row["rewritten_query"].as_str().unwrap()).into();
        row
    });
    write_queries(&project, named);
    let said = convert(&project, &[]);
    assert!(said.contains("standard error 0.000): not used, since a gain is not shown\n"), "{said}");
    assert!(!project.path("run/data/expansion.json").exists());
    // Symptom: a run without terms had no file of them, and convert ran again each time.
    assert!(convert(&project, &[]).contains("convert: finished earlier, skipped\n"));
}

#[test]
fn words_that_lead_to_the_gold_passage_count_more() {
    let project = project();
    let passage = |id: String, text: String| json!({"id": id, "text": text}).to_string();
    let of_product = |product: &str, topic: &str| passage(format!("{product}-{topic}"), format!("{product} {topic}"));
    let of_products =
        PRODUCTS.iter().flat_map(|(_, product)| ["refund", "timetable"].map(|topic| of_product(product, topic)));
    let others =
        (0..4).map(|n| passage(format!("other-{n}"), format!("Please tell me how I can get it, question {n}")));
    project.write("kb.jsonl", &of_products.chain(others).collect::<Vec<_>>().join("\n"));
    let rows = project.rows("queries.jsonl").into_iter().enumerate().map(|(n, mut row)| {
        row["original_query"] =
            format!("please tell me how can i get {} {n}", row["rewritten_query"].as_str().unwrap()).into();
        row["history_summary"] = "".into();
        row
    });
    write_queries(&project, rows);
    let said = convert(&project, &[]);
    assert!(said.contains("convert: no expansion terms: the gold passages have no titles; add a `title` to"), "{said}");
    assert!(said.contains(": `&` is weighted query and history\n"), "{said}");
    for split in ["train", "val", "test"] {
        for (row, expansion) in expansions(&project, split) {
            let words: Vec<String> = expansion.split(' ').map(str::to_lowercase).collect();
            let count = |word: &str| words.iter().filter(|found| *found == word).count();
            let gold = row["gold_ids"][0].as_str().unwrap().to_lowercase();
            let (product, topic) = gold.split_once('-').unwrap();
            let is_weighted = count(product) == 2 && count(topic) > 0 && count("please") < 2;
            assert!(is_weighted, "{split}: {expansion}: {row}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_deployments_and_exports_have_the_terms_of_eval() {
    let project = project();
    let sets = [
        "sft.max_steps=60",
        "sft.learning_rate=0.02",
        "eval.systems=[\"raw\", \"expanded\", \"rl\"]",
        "rl.learning_rate=1e-6",
        "data.on_leak=warn",
    ];
    project.querl(&support::with_sets(&["run", "querl.toml"], &sets)).ok();
    let records = project.rows("run/eval/records.jsonl");
    let of = |system: &str| records.iter().filter(|record| record["system"] == system).cloned().collect::<Vec<_>>();
    let rewrite = |record: &Value| record["outcome"]["Ok"]["candidate"]["rewrite"].as_str().unwrap().to_owned();
    let (expanded, trained) = (of("expanded"), of("rl"));
    let n_equal = expanded.iter().zip(&trained).filter(|(one, other)| rewrite(one) == rewrite(other)).count();
    assert!(n_equal > 0 && n_equal == trained.len(), "`&` was not learned: {n_equal} of {}", trained.len());
    for record in &expanded {
        assert_eq!(rewrite(record), record["query"]["expansion"].as_str().unwrap());
    }
    let report = project.querl(&["report", "run"]).ok().stdout;
    assert!(report.contains("expanded") && !report.contains("with_history"), "{report}");

    project.querl(&["deploy", "run", "--out", "deployment"]).ok();
    for served in ["run", "deployment"] {
        let server = Server::start(&project, &["serve", "rewrite"], &[served, "--cache", "0"]);
        server.ready().await;
        for record in &trained {
            let query = &record["query"];
            let request =
                json!({"tenant": "fivedoctors", "query": query["original_query"], "history": query["history_summary"]});
            let (status, response) = server.ask("/v1/rewrite", &request).await;
            assert_eq!(
                (status, response["rewrite"].as_str()),
                (200, Some(rewrite(record).as_str())),
                "{served}: {response}"
            );
        }
    }
    project.querl(&["export", "trl", "run", "--out", "trl"]).ok();
    let train = project.rows("run/data/train.jsonl");
    for (exported, row) in project.rows("trl/train.jsonl").iter().zip(&train) {
        let label: Value = serde_json::from_str(exported["querl"].as_str().unwrap()).unwrap();
        assert_eq!(label["expansion"], row["metadata"]["expansion"], "{exported}");
    }
    // Terms of an earlier version.
    let (model, ledger) = (project.path("run/data/expansion.json"), project.path("run/stages.json"));
    let (text, entries) = (project.read("run/data/expansion.json"), project.read("run/stages.json"));
    let digest = || querl_core::fsx::digest_file(&model).unwrap();
    let current = digest();
    std::fs::write(&model, text.replacen(r#""format": 4"#, r#""format": 3"#, 1)).unwrap();
    std::fs::write(&ledger, entries.replace(&current, &digest())).unwrap();
    for args in [&["deploy", "run", "--out", "other"][..], &["serve", "rewrite", "run", "--addr", "127.0.0.1:0"]] {
        let refused = project.querl(args);
        assert!(refused.code == Some(2) && refused.stderr.contains("expansion.json: has format 3"), "{refused:#?}");
    }
    std::fs::write(&model, text).unwrap();
    std::fs::write(&ledger, entries).unwrap();
    // A convert with other settings after the training.
    project.querl(&support::with_sets(&["convert", "querl.toml"], &["data.expansion_terms=0"])).ok();
    let refused = project.querl(&["serve", "rewrite", "run", "--addr", "127.0.0.1:0"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    let problem = "run/data/expansion.json: is missing, the model of expansions with which `rl` was trained; put it back by `querl convert CONFIG --from convert`";
    assert!(refused.stderr.contains(problem), "{refused:#?}");
    damage(&project.path("deployment/tenants/fivedoctors/data/expansion.json"));
    let refused = project.querl(&["serve", "rewrite", "deployment", "--addr", "127.0.0.1:0"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    assert!(refused.stderr.contains("expansion.json: has other content than when it was written"), "{refused:#?}");
}
