//! `querl serve` in a separate process.

use super::Project;
use reqwest::Client;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// A server process, killed when dropped.
pub struct Server {
    pub process: Child,
    pub url: String,
    pub client: Client,
}

impl Server {
    /// Starts `command` on a free port, with `TEST_KEY` in its environment and its log in `server.log` of the project.
    pub fn start(project: &Project, command: &[&str], args: &[&str]) -> Self {
        // Tests that were started with `nohup` inherit an ignored SIGHUP, and so would the server, which then never reloads.
        // SAFETY: it sets the default action.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
        let args = [command, &["--addr", "127.0.0.1:0"], args].concat();
        let mut process = project
            .command(&args)
            .env("TEST_KEY", "secret")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(project.path("server.log")).unwrap())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("listening on ")?.to_owned()));
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { process, url: line.expect("the server says where it listens"), client: Client::new() }
    }

    pub async fn ready(&self) {
        let status = async || self.client.get(format!("{}/ready", self.url)).send().await.unwrap().status().as_u16();
        until(async || status().await != 503).await;
        assert_eq!(status().await, 200, "the model was never loaded");
    }

    /// Status and JSON of the response.
    pub async fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.client.post(format!("{}{path}", self.url)).json(body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    pub fn signal(&self, signal: &str) {
        super::process::signal(&self.process, signal);
    }

    /// Sends `signal` and waits for the exit code.
    pub fn end(&mut self, signal: &str) -> Option<i32> {
        self.signal(signal);
        self.process.wait().unwrap().code()
    }
}

/// Waits until `is_done`, at most for two minutes: a machine under load is slow. The caller then asserts what it waited for.
pub async fn until(is_done: impl AsyncFn() -> bool) {
    let started = Instant::now();
    while !is_done().await && started.elapsed() < Duration::from_secs(120) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
