//! The host under test: a process that reads one JSON object a line and writes one a line (docs/spec/host-protocol.md).

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// A reply of the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    Ok(Value),
    Fault { kind: String, message: String },
}

impl Reply {
    fn parse(line: &str) -> Option<Self> {
        let mut value: Value = serde_json::from_str(line).ok()?;
        if let Some(result) = value.get_mut("ok") {
            return Some(Self::Ok(result.take()));
        }
        let fault = value.get("fault")?;
        let text = |key: &str| Some(fault.get(key)?.as_str()?.to_owned());
        Some(Self::Fault { kind: text("kind")?, message: text("message")? })
    }
}

impl std::fmt::Display for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ok(value) => write!(f, "ok: {value}"),
            Self::Fault { kind, message } => write!(f, "fault `{kind}`: {message}"),
        }
    }
}

/// A running host.
struct Running {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<std::io::Result<String>>,
}

impl Running {
    fn start(command: &str) -> Result<Self, String> {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().map_err(|error| format!("`{command}` does not start: {error}"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("`{command}` has no stdin or stdout"));
        };
        let (sender, lines) = channel();
        std::thread::spawn(move || BufReader::new(stdout).lines().try_for_each(|line| sender.send(line)));
        Ok(Self { child, stdin, lines })
    }

    fn ask(&mut self, request: &Value, timeout: Duration) -> Result<Reply, String> {
        writeln!(self.stdin, "{request}")
            .and_then(|()| self.stdin.flush())
            .map_err(|_| "the host has ended".to_owned())?;
        let line = match self.lines.recv_timeout(timeout) {
            Ok(line) => line.map_err(|error| format!("its stdout cannot be read: {error}"))?,
            Err(RecvTimeoutError::Timeout) => return Err(format!("no reply within {} s", timeout.as_secs())),
            Err(RecvTimeoutError::Disconnected) => return Err("the host ended without a reply".to_owned()),
        };
        Reply::parse(&line)
            .ok_or_else(|| format!("{line}: expected {{\"ok\": ...}} or {{\"fault\": {{\"kind\", \"message\"}}}}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that the host has already exited.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// Client of the host under test, which starts the host again after it has ended or hung.
pub(crate) struct Client {
    command: String,
    timeout: Duration,
    running: Option<Running>,
}

impl Client {
    pub(crate) fn new(command: &str, timeout: Duration) -> Self {
        Self { command: command.to_owned(), timeout, running: None }
    }

    /// Sends a request to the host, which is started if it does not run, and waits for the reply.
    ///
    /// # Errors
    /// No reply: the host ended, hung or wrote something else.
    pub(crate) fn ask(&mut self, request: &Value) -> Result<Reply, String> {
        let running = match &mut self.running {
            Some(running) => running,
            empty => empty.insert(Running::start(&self.command)?),
        };
        let reply = running.ask(request, self.timeout);
        if reply.is_err() {
            self.running = None;
        }
        reply
    }

    /// Sends the request `end`, which ends the host.
    pub(crate) fn end(mut self) -> Result<Reply, String> {
        self.ask(&json!({"op": "end"}))
    }
}
