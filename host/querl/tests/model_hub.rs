//! Models named by repository: downloads from a hub on loopback, its cache, its errors.
#![allow(clippy::unwrap_used)]

mod support;

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use support::{CommandOutput, Project, model};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret";

/// A hub with one private model, `shop/tiny`, which contains a file that querl does not read.
struct Hub {
    url: String,
    files: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn start() -> Self {
        let entries = std::fs::read_dir(model()).unwrap().map(|entry| entry.unwrap());
        let mut files: BTreeMap<String, Vec<u8>> = entries
            .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
            .collect();
        files.insert("pytorch_model.bin".into(), b"pickle".to_vec());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let hub = Self { url, files: Arc::new(Mutex::new(files)), requests: Arc::default() };
        let (files, requests) = (hub.files.clone(), hub.requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                answer(&stream.unwrap(), &files.lock().unwrap(), &requests);
            }
        });
        hub
    }

    fn command(&self, project: &Project, arguments: &[&str]) -> Command {
        let mut command = project.command(arguments);
        let unset = ["HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"];
        unset.iter().for_each(|name| _ = command.env_remove(name));
        command.env("HF_ENDPOINT", &self.url).env("HF_HOME", project.path("hf")).env("HF_TOKEN", TOKEN);
        command
    }

    fn querl(&self, project: &Project, arguments: &[&str]) -> CommandOutput {
        CommandOutput::of(self.command(project, arguments).output().unwrap(), project.folder.path())
    }

    fn n_requests(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// Serves one request of a connection. Weights have their SHA-256 as ETag, as files in Git LFS have.
fn answer(stream: &TcpStream, files: &BTreeMap<String, Vec<u8>>, requests: &Mutex<Vec<String>>) -> Option<()> {
    let head: Vec<String> =
        BufReader::new(stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let path = head.first()?.split(' ').nth(1)?.to_owned();
    requests.lock().unwrap().push(path.clone());
    let header = |name: &str| head.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
    let send = |status: &str, more: &str, body: &[u8]| {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{more}\r\n");
        let mut stream = stream;
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).ok()
    };
    if header("authorization: ") != Some(format!("bearer {TOKEN}")) {
        return send("401 Unauthorized", "", b"");
    }
    if path == "/api/models/shop/tiny/revision/main" {
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let info = serde_json::json!({ "sha": COMMIT, "siblings": siblings });
        return send("200 OK", "content-type: application/json\r\n", info.to_string().as_bytes());
    }
    let Some(body) = path.strip_prefix(&format!("/shop/tiny/resolve/{COMMIT}/")).and_then(|name| files.get(name))
    else {
        return send("404 Not Found", "", b"");
    };
    let range = header("range: bytes=")?;
    let (first, last) = range.split_once('-')?;
    let first: usize = first.parse().ok()?;
    let last = last.parse().unwrap_or(body.len() - 1);
    let tag = match path.ends_with(".safetensors") {
        true => hex::encode(Sha256::digest(std::fs::read(model().join("model.safetensors")).unwrap())),
        false => format!("{:040x}", path.len()),
    };
    let more =
        format!("x-repo-commit: {COMMIT}\r\netag: \"{tag}\"\r\ncontent-range: bytes {first}-{last}/{}\r\n", body.len());
    send("206 Partial Content", &more, &body[first..=last])
}

#[test]
fn a_named_model_is_downloaded_once_and_then_needs_no_hub() {
    let (hub, project) = (Hub::start(), Project::new());
    let inspect = ["model", "inspect", "shop/tiny", "--json"];
    let local = project.querl(&["model", "inspect", model().to_str().unwrap(), "--json"]).ok();
    assert_eq!(hub.querl(&project, &inspect).ok().stdout, local.stdout);
    assert!(!hub.requests.lock().unwrap().iter().any(|path| path.ends_with(".bin")));
    let n_requests = hub.n_requests();
    let mut offline = hub.command(&project, &inspect);
    let offline = CommandOutput::of(offline.env("HF_HUB_OFFLINE", "1").output().unwrap(), project.folder.path());
    assert_eq!(offline.ok().stdout, local.stdout);
    hub.querl(&project, &inspect).ok();
    assert_eq!(hub.n_requests(), n_requests, "a complete snapshot is used without a request");
}

#[test]
fn a_configuration_names_a_model_of_the_hub() {
    let (hub, project) = (Hub::start(), Project::new());
    let model = "model.path=\"shop/tiny\"";
    hub.querl(&project, &["config", "check", "querl.toml", "--set", model]).ok();
    hub.querl(&project, &["run", "querl.toml", "--to", "sft", "--set", model, "--set", "sft.max_steps=1"]).ok();
    let resolved = project.read("run/config.resolved.toml");
    assert!(resolved.contains(&format!("hf/hub/models--shop--tiny/snapshots/{COMMIT}")), "{resolved}");
    assert!(!resolved.contains(TOKEN));
}

#[test]
fn nothing_is_downloaded_for_a_refused_command_or_one_that_opens_no_model() {
    let (hub, project) = (Hub::start(), Project::new());
    let model = "model.path=\"shop/tiny\"";
    for arguments in [
        &["config", "check", "querl.toml", "--set", model][..],
        &["data", "stats", "querl.toml", "--set", model],
        &["run", "querl.toml", "--dry-run", "--set", model],
        &["plan", "querl.toml", "--no_model", "--set", model],
        &["rag", "check", "querl.toml", "--set", model],
    ] {
        let said = hub.querl(&project, arguments).ok();
        let note =
            "model.path is \"shop/tiny\": no such folder; taken as a model's name on a hub, which is downloaded when";
        assert_eq!(said.stderr.contains(note), ["config", "run"].contains(&arguments[0]), "{said:#?}");
    }
    for arguments in [
        &["run", "querl.toml", "--set", model, "--set", "sft.epochs=0"][..],
        &["model", "inspect", "shop/tiny", "--unknown"],
        &["style", "predict", "--model", "shop/tiny", "--max-length", "0"],
    ] {
        let refused = hub.querl(&project, arguments);
        assert_eq!(refused.code, Some(2), "{refused:#?}");
    }
    assert_eq!(hub.n_requests(), 0);
}

#[test]
fn what_the_hub_refuses_is_a_sentence() {
    let (hub, project) = (Hub::start(), Project::new());
    let embedding = ["--set", "retrieval.embedding.kind=\"local\"", "--set", "retrieval.embedding.path=\"shop/none\""];
    let of_embedding = "error: --set retrieval.embedding.path is \"shop/none\"; no such folder in the current folder; taken as a model's name";
    let cases = [
        (vec!["model", "inspect", "shop/none"], Some(TOKEN), "http status: 404; no such model or revision"),
        (
            vec!["model", "inspect", "shop/tiny"],
            None,
            "http status: 401; no such model, or one that needs a token with access to it: set HF_TOKEN",
        ),
        (
            vec!["run", "querl.toml", "--to", "sft", "--set", "model.path=\"shop/none\""],
            Some(TOKEN),
            "error: --set model.path is \"shop/none\"; no such folder in the current folder; taken as a model's name on a hub: ",
        ),
        (vec!["model", "inspect", "shop"], Some(TOKEN), "config.json"),
        // Symptom: without the base model, the plan treated the name of the embedding model as a path and failed.
        ([&["plan", "querl.toml", "--no_model"][..], &embedding].concat(), Some(TOKEN), of_embedding),
        ([&["rag", "check", "querl.toml"][..], &embedding].concat(), Some(TOKEN), of_embedding),
    ];
    for (arguments, token, expected) in cases {
        let mut command = hub.command(&project, &arguments);
        match token {
            Some(_) => &mut command,
            None => command.env_remove("HF_TOKEN"),
        };
        let said = CommandOutput::of(command.output().unwrap(), project.folder.path()).refused(expected);
        assert!(!said.stderr.contains(TOKEN), "{said:#?}");
    }
}

#[test]
fn damaged_weights_are_removed_and_downloaded_again() {
    let (hub, project) = (Hub::start(), Project::new());
    let whole = hub.files.lock().unwrap().get_mut("model.safetensors").map(std::mem::take).unwrap();
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    hub.files.lock().unwrap().insert("model.safetensors".into(), damaged);
    let refused = hub.querl(&project, &["model", "inspect", "shop/tiny"]);
    refused.refused("model.safetensors: the download does not have the SHA-256");
    hub.files.lock().unwrap().insert("model.safetensors".into(), whole);
    hub.querl(&project, &["model", "inspect", "shop/tiny"]).ok();
}
