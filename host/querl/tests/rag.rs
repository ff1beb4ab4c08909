//! The retrieval service, through the command line.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::{Duration, Instant};
use support::process::kill;
use support::server::Server;
use support::{Project, with_sets};

/// Serves the project's knowledge base.
const SERVE: [&str; 3] = ["rag", "serve", "querl.toml"];

#[test]
fn a_run_over_http_finds_what_a_run_with_the_embedded_index_finds() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let server = Server::start(&project, &SERVE, &[]);
    let url = format!("retrieval.url={}", server.url);
    let over_http = ["--set", "retrieval.kind=http", "--set", &url];
    project.querl(&[&["run", "querl.toml", "--to", "convert", "--out", "http"], &over_http[..]].concat()).ok();
    for file in ["data/validated.jsonl", "data/train.jsonl", "data/test.jsonl"] {
        assert_eq!(project.read(&format!("http/{file}")), project.read(&format!("run/{file}")), "{file}");
    }
}

#[test]
fn a_server_of_another_tenant_refuses_and_nothing_becomes_data() {
    let project = Project::new();
    let server = Server::start(&project, &SERVE, &["--set", "tenant=chengla"]);
    let url = format!("retrieval.url={}", server.url);
    let over_http = ["--set", "retrieval.kind=http", "--set", &url];
    let said = project.querl(&[&["run", "querl.toml", "--to", "validate"], &over_http[..]].concat());
    said.refused("tenant_id `fivedoctors` with kb_name `default` is not served here");
    let said = project.querl(&[&["rag", "check", "querl.toml"], &over_http[..]].concat());
    assert_eq!(said.code, Some(2), "{said:#?}");
    assert!(said.stdout.contains("--  answers  0 of 3 queries were answered\n"), "{said:#?}");
}

#[test]
fn check_says_what_it_understood() {
    let project = Project::new();
    let said = project.querl(&["rag", "check", "querl.toml"]).ok();
    assert!(said.stdout.starts_with("retrieval embedded, tenant fivedoctors\n\n1. "), "{said:#?}");
    assert!(said.stdout.contains("ok  answers  3 of 3 queries were answered\n"), "{said:#?}");
    let report = project.json(&["rag", "check", "querl.toml", "--query", "胶原蛋白肽饮怎么吃"]);
    assert_eq!(report["queries"].as_array().unwrap().len(), 1);
    assert!(report["queries"][0]["answer"]["Ok"][0]["id"].as_str().unwrap().starts_with("p01"), "{report}");
    let said =
        project.querl(&["rag", "check", "querl.toml", "--query", "胶原", "--set", "retrieval.score_threshold=1.0"]);
    assert!(said.stdout.contains("--  passages nothing was found for any query"), "{said:#?}");
}

#[test]
fn an_interrupt_ends_a_server_well() {
    let project = Project::new();
    // The retrieval service needs no base model.
    let mut server = Server::start(&project, &SERVE, &["--set", "model.path=none/model"]);
    assert_eq!(server.end("-INT"), Some(0));
}

/// Regression: half-sent requests delayed `/health` by 25 s, and the end of the server by its full time limit.
#[test]
fn half_sent_requests_delay_neither_health_nor_the_end() {
    let project = Project::new();
    let mut server = Server::start(&project, &SERVE, &["--max_connections", "128"]);
    let address = server.url.strip_prefix("http://").unwrap().split('/').next().unwrap().to_owned();
    // More connections than the server allows.
    let mut half_sent: Vec<_> = (0..400).map_while(|_| TcpStream::connect(&address).ok()).collect();
    for stream in &mut half_sent {
        // The oldest may be closed by now.
        let _ = stream.write_all(b"POST /api/chat/general_rag HTTP/1.1\r\nhost: x\r\n");
    }
    let started = Instant::now();
    let mut health = TcpStream::connect(&address).unwrap();
    health.write_all(b"GET /health HTTP/1.0\r\n\r\n").unwrap();
    let mut response = String::new();
    health.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.0 200 "), "{response}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    let started = Instant::now();
    assert_eq!(server.end("-TERM"), Some(0));
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}

#[test]
fn an_address_for_other_machines_without_a_key_is_reported() {
    let project = Project::new();
    // An address reserved for documentation (RFC 5737), on which no process can listen.
    let warning = "192.0.2.1: other machines may reach this address, and no key is required";
    for form in [["serve", "rag"], ["rag", "serve"]] {
        let serve = [&form[..], &["querl.toml", "--addr", "192.0.2.1:8000"]].concat();
        project.querl(&serve).refused(warning);
        let command = &mut project.command(&[&serve[..], &["--api_key_env", "RAG_KEY"]].concat());
        let said = command.env("RAG_KEY", "secret").output().unwrap();
        assert_eq!(said.status.code(), Some(2));
        assert!(!String::from_utf8_lossy(&said.stderr).contains(warning));
    }
}

#[test]
fn a_server_without_a_knowledge_base_or_address_ends_with_a_sentence() {
    let project = Project::new();
    let server = Server::start(&project, &SERVE, &[]);
    let taken = server.url.strip_prefix("http://").unwrap().split('/').next().unwrap();
    project.querl(&["rag", "serve", "querl.toml", "--addr", taken]).refused("cannot be listened on");
    let said = project.querl(&["rag", "serve", "querl.toml", "querl.toml"]);
    said.refused("tenant `fivedoctors` has two knowledge bases named `default`");
}

#[test]
fn a_mapping_reads_a_service_as_its_own_client_does() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "validate"]).ok();
    let server = Server::start(&project, &SERVE, &[]);
    project.edit("kind = \"embedded\"", &format!("kind = \"http\"\nservice = \"custom\"\nurl = \"{}\"", server.url));
    project.edit(
        "[model]",
        r#"[retrieval.mapping]
list = ["/data/recall"]
id = ["/id"]
text = ["/content"]
score = ["/reranker_score"]
status = ["/status"]
success = ["200"]
[retrieval.mapping.request]
query = "{{query}}"
rewritten_query = "{{rewritten_query}}"
tenant_id = "{{tenant}}"
kb_name = "{{kb_name}}"
history = "{{history}}"
user_profile = "{{user_profile}}"
top_k = "{{top_k}}"
score_threshold = "{{service_threshold}}"
[model]"#,
    );
    project.querl(&["run", "querl.toml", "--to", "validate", "--out", "mapped"]).ok();
    let hits = |folder: &str| -> Vec<(String, f64)> {
        let rows = project.rows(&format!("{folder}/data/validated.jsonl"));
        rows.iter()
            .flat_map(|row| row["retrieval"]["Ok"].as_array().unwrap())
            .map(|hit| (hit["id"].as_str().unwrap().to_owned(), hit["reranker_score"].as_f64().unwrap()))
            .collect()
    };
    assert!(hits("run").len() > 40);
    assert_eq!(hits("mapped"), hits("run"));
}

#[test]
fn models_in_this_process_take_part() {
    let project = Project::new();
    let golden = support::repository().join("tests/reference/golden/encoders");
    let path = |key: &str, name: &str| format!("retrieval.{key}.path={}", golden.join(name).display());
    let (embedding, reranker) = (path("embedding", "bert-cls"), path("rerank", "xlm-roberta-reranker"));
    let check = |reranker: &str| {
        let settings = ["retrieval.embedding.kind=local", &embedding, "retrieval.rerank.kind=local", reranker];
        project.querl(&with_sets(&["rag", "check", "querl.toml"], &settings))
    };
    let said = check(&reranker).ok();
    assert!(said.stdout.starts_with("retrieval embedded, hybrid + cross-encoder, tenant fivedoctors\n"), "{said:#?}");
    assert!(said.stdout.contains("ok  answers  3 of 3 queries were answered\n"), "{said:#?}");
    check(&path("rerank", "bert-cls")).refused("bert-cls/config.json: has 2 labels; a reranker has 1");
}

/// Ids of the finished indexes in a folder.
fn finished(folder: &std::path::Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.len() == 64 && !name.contains('.')).collect()
}

#[test]
fn a_build_that_is_killed_leaves_no_index_and_processes_that_build_at_once_leave_one() {
    let project = Project::new();
    let passages: Vec<String> = (0..8_000)
        .map(|index| {
            format!(
                "{{\"id\": \"{index}\", \"text\": \"胶原蛋白肽饮 食用方法 编号{index}，餐后温水送服，每日一次。\"}}\n"
            )
        })
        .collect();
    project.write("large.jsonl", &passages.concat());
    let (knowledge_base, indexes) = (project.path("large.jsonl"), project.path("indexes"));
    let knowledge_base = format!("retrieval.knowledge_base={}", knowledge_base.display());
    let index_dir = format!("retrieval.index_dir={}", indexes.display());
    let args = with_sets(&["rag", "check", "querl.toml"], &[&knowledge_base, &index_dir]);
    let start = || project.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut killed = start();
    let is_building = || {
        let names = std::fs::read_dir(&indexes).into_iter().flatten().flatten();
        names.filter_map(|entry| entry.file_name().into_string().ok()).any(|name| name.starts_with(".building-"))
    };
    while !is_building() {
        assert!(killed.try_wait().unwrap().is_none(), "it builds before it ends");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    kill(killed);
    assert!(finished(&indexes).is_empty());
    let both = [start(), start()];
    for mut process in both {
        assert!(process.wait().unwrap().success());
    }
    assert_eq!(finished(&indexes).len(), 1);
    let said = project.querl(&args).ok();
    assert!(said.stdout.contains("ok  answers  3 of 3 queries were answered\n"), "{said:#?}");
}

#[test]
fn a_file_whose_vectors_a_service_makes_is_not_served_without_them() {
    let project = Project::new();
    project.edit(
        "kind = \"embedded\"",
        "kind = \"http\"\nservice = \"qdrant\"\nurl = \"http://127.0.0.1:1/q\"\nembedding = { kind = \"openai\", url = \"http://127.0.0.1:1/e\", model = \"m\" }",
    );
    let said = project.querl(&["rag", "serve", "querl.toml", "--addr", "127.0.0.1:0"]);
    said.refused("retrieval.embedding.kind is \"openai\"");
}
