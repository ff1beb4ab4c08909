//! The suite for hosts, `querl-conformance --host COMMAND`: what a host must guarantee, whatever it is written in.
//!
//! In: a command that speaks the protocol of docs/spec/host-protocol.md, and plugins with golden cases. Out: checks with their rule and,
//! where it is broken, what was sent, returned and expected. The probes in `probes/` are built from `tests/guests/host-probe`.

mod args;
mod cases;
mod client;
mod golden;
mod serve;

pub use args::HostArgs;
pub use serve::serve_host;

use crate::report::Check;
use crate::section::{CheckProgress, CheckResult, Section, Violation};
use cases::{Case, Expected, Probe};
use client::{Client, Reply};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Conformance suite for a plugin host.
#[derive(Debug, Clone)]
pub struct HostSuite {
    /// Command line that starts the host, run by `sh`.
    pub command: String,
    /// Plugins with golden cases: bundles, folders or components (see [`HostSuite::run`]).
    pub plugins: Vec<PathBuf>,
    /// Maximum time for one reply of the host. Compiling a component of Python takes about ten seconds.
    pub timeout: Duration,
}

impl HostSuite {
    /// Runs all checks; `on_check` gets each as it ends.
    ///
    /// A plugin is a `.querl` bundle, a folder with a `.wasm` file or a source that is built, or `NAME.wasm` with
    /// `golden/NAME.jsonl` or `golden/NAME/*.jsonl` next to it.
    ///
    /// # Errors
    /// The probes cannot be written to a temporary folder, or a plugin cannot be read: one sentence.
    pub fn run(&self, on_check: &mut dyn FnMut(&Check)) -> Result<Vec<Check>, String> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let plugins = golden::read(&self.plugins, folder.path())?;
        let client = Client::new(&self.command, self.timeout);
        let mut session =
            Session { client, folder: folder.path(), section: Section::new(None, &CheckProgress::default()), on_check };
        for case in cases::all() {
            let found = session.case(&case);
            session.add(case.name, case.rule, found);
        }
        session.loading();
        for plugin in &plugins {
            session.golden(plugin);
        }
        let Session { client, section, .. } = session;
        let mut checks = section.into_checks();
        let mut end = Section::new(None, &CheckProgress::default());
        let ended = client.end().map_err(|error| Violation::new("end", error)).map(|_| String::new());
        end.add("end", "the host replies to `end` and exits", || ended);
        checks.extend(end.into_checks());
        Ok(checks)
    }
}

/// The run of a suite.
struct Session<'a> {
    client: Client,
    folder: &'a Path,
    section: Section,
    on_check: &'a mut dyn FnMut(&Check),
}

impl Session<'_> {
    fn add(&mut self, name: impl Into<String>, rule: &str, found: CheckResult) {
        self.section.add(name, rule, || found);
        if let Some(check) = self.section.last() {
            (self.on_check)(check);
        }
    }

    fn ask(&mut self, request: &Value) -> Result<Reply, Violation> {
        self.client.ask(request).map_err(|error| Violation::new(request.to_string(), error))
    }

    /// Writes a component to a file and loads it in the host.
    fn load(&mut self, name: &str, component: &[u8], settings: &Value, limits: &Value) -> Result<Reply, Violation> {
        let path = self.folder.join(format!("{name}.wasm"));
        std::fs::write(&path, component)
            .map_err(|error| Violation::new(path.display().to_string(), error.to_string()))?;
        self.ask(&json!({"op": "load", "component": path, "settings": settings, "limits": limits}))
    }

    /// Like [`Self::load`], but a failure is a violation.
    fn loaded(&mut self, name: &str, component: &[u8], settings: &Value, limits: &Value) -> Result<Value, Violation> {
        match self.load(name, component, settings, limits)? {
            Reply::Ok(value) => Ok(value),
            fault => Err(Violation::new(format!("load {name}.wasm with {settings}"), fault.to_string())),
        }
    }

    fn case(&mut self, case: &Case) -> CheckResult {
        let Case { probe, settings, limits, request, expected, .. } = case;
        match request {
            None => {
                let reply = self.load(probe.name(), probe.component(), settings, limits)?;
                agrees(&json!({"op": "load", "settings": settings}), &reply, expected)?;
            }
            Some(request) => {
                self.loaded(probe.name(), probe.component(), settings, limits)?;
                let sent = json!({"settings": settings, "request": request});
                let reply = self.ask(request)?;
                agrees(&sent, &reply, expected)?;
                if matches!(expected, Expected::Ok(_)) {
                    let again = self.ask(request)?;
                    if again != reply {
                        let both = format!("first {reply}, then {again}");
                        let rule = "the same arguments give the same bytes back".to_owned();
                        return Err(Violation { expected: Some(rule), ..Violation::new(sent.to_string(), both) });
                    }
                }
            }
        }
        match expected {
            Expected::Ok(_) | Expected::Has(_) => Ok(String::new()),
            Expected::Fault(..) | Expected::FaultOr(..) => self.works().map(|()| String::new()),
        }
    }

    /// Checks that the host still scores with the plain probe after a fault.
    fn works(&mut self) -> Result<(), Violation> {
        self.loaded("plain", Probe::Plain.component(), &json!({}), &json!({}))?;
        let request = json!({"op": "score", "episodes": [cases::bare_episode("after", "0.25")]});
        let expected = Expected::Ok(json!([{"scored": {"total": 0.25, "components": []}}]));
        let reply = self.ask(&request)?;
        agrees(&json!({"after": "a fault", "request": request}), &reply, &expected)
    }

    /// Checks of components that a host must accept or reject independently of their settings.
    fn loading(&mut self) {
        let plain = Probe::Plain.component();
        let of_version = |version: &str| replaced(plain, "@0.2.0", version);
        let refused: [(&str, &str, Vec<u8>, &str); 8] = [
            ("version 0.3.0", VERSIONS, of_version("@0.3.0"), "0.3.0"),
            ("version 1.2.0", VERSIONS, of_version("@1.2.0"), "1.2.0"),
            (
                "unknown interface",
                IMPORTS,
                replaced(plain, "querl:plugin/settings@", "querl:plugin/settingz@"),
                "settingz",
            ),
            (
                "import of another package",
                IMPORTS,
                replaced(plain, "querl:plugin/log@", "other:plugin/log@"),
                "other:plugin/log",
            ),
            ("version that is not semantic", DESCRIPTION, replaced(plain, "1.2.3", "1.2x3"), "1.2x3"),
            ("text instead of a component", COMPONENT, b"plugin = 1\n".to_vec(), ""),
            ("core module", COMPONENT, b"\0asm\x01\0\0\0".to_vec(), ""),
            ("cut component", COMPONENT, plain[..plain.len() / 2].to_vec(), ""),
        ];
        for (name, rule, component, text) in refused {
            let reply = self.load("loading", &component, &json!({}), &json!({}));
            let found = reply.and_then(|reply| agrees(&json!(name), &reply, &Expected::Fault(&["load"], text)));
            let found = found.and_then(|()| self.works()).map(|()| String::new());
            self.add(format!("refused: {name}"), rule, found);
        }
        let found = self.later_patch(&of_version("@0.2.9"));
        self.add("version 0.2.9", VERSIONS, found);
        let found = self.repeats_random();
        self.add("random numbers", "random numbers are a fixed sequence", found);
    }

    fn later_patch(&mut self, component: &[u8]) -> CheckResult {
        self.loaded("loading", component, &json!({}), &json!({}))?;
        let reply = self.ask(&json!({"op": "score", "episodes": [cases::bare_episode("a", "0.25")]}))?;
        let expected = Expected::Ok(json!([{"scored": {"total": 0.25, "components": []}}]));
        agrees(&json!("an episode"), &reply, &expected).map(|()| String::new())
    }

    fn repeats_random(&mut self) -> CheckResult {
        let mut replies = Vec::new();
        for _ in 0..2 {
            self.loaded("plain", Probe::Plain.component(), &json!({"mode": "random"}), &json!({}))?;
            replies.push(self.ask(&json!({"op": "score", "episodes": [cases::bare_episode("a", "x")]}))?);
        }
        let is_report = |reply: &Reply| matches!(reply, Reply::Ok(value) if value[0]["rejected"]["code"] == "report");
        match replies[0] == replies[1] && is_report(&replies[0]) {
            true => Ok(String::new()),
            false => Err(Violation::new(
                "the hash of a text with a random seed",
                format!("{}, then {}", replies[0], replies[1]),
            )),
        }
    }
}

const VERSIONS: &str = "a host loads components of 0.1.x and 0.2.x; for another version the message names it";
const IMPORTS: &str =
    "a component that imports what the contract does not have is refused; the message names the import";
const DESCRIPTION: &str = "a component whose version is not a semantic version is refused; the message names it";
const COMPONENT: &str = "what is not a component is refused with a sentence";

/// `component` with another text of the same length, which changes no length inside it.
fn replaced(component: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len(), "of the same length");
    let mut bytes = component.to_vec();
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(from.len()).position(|window| window == from.as_bytes()) {
        at += found;
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    bytes
}

fn agrees(sent: &Value, reply: &Reply, expected: &Expected) -> Result<(), Violation> {
    let is_fault = |kinds: &[&str], text: &str| match reply {
        Reply::Fault { kind, message } => kinds.contains(&kind.as_str()) && message.contains(text),
        Reply::Ok(_) => false,
    };
    let is_value = |value: &Value, is_exact| matches!(reply, Reply::Ok(actual) if matches(actual, value, is_exact));
    let (holds, wanted) = match expected {
        Expected::Ok(value) => (is_value(value, true), value.to_string()),
        Expected::Has(value) => (is_value(value, false), format!("at least {value}")),
        Expected::Fault(kinds, text) => {
            (is_fault(kinds, text), format!("a fault `{}` whose message has `{text}`", kinds.join("` or `")))
        }
        Expected::FaultOr(kinds, value) => {
            (is_fault(kinds, "") || is_value(value, true), format!("a fault `{}` or {value}", kinds.join("` or `")))
        }
    };
    match holds {
        true => Ok(()),
        false => Err(Violation { expected: Some(wanted), ..Violation::new(sent.to_string(), reply.to_string()) }),
    }
}

/// Whether `actual` is `expected`: numbers are compared by value, and a text that is JSON equals the value that it encodes, because probes
/// report texts. Without `is_exact`, objects may have more fields.
fn matches(actual: &Value, expected: &Value, is_exact: bool) -> bool {
    match (actual, expected) {
        (Value::Number(a), Value::Number(b)) => match (a.as_u64(), b.as_u64()) {
            (Some(a), Some(b)) => a == b,
            _ => a.as_f64() == b.as_f64(),
        },
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| matches(a, b, is_exact))
        }
        (Value::Object(a), Value::Object(b)) => {
            (a.len() == b.len() || !is_exact)
                && b.iter().all(|(key, b)| a.get(key).is_some_and(|a| matches(a, b, is_exact)))
        }
        (Value::String(a), b) if Some(a.as_str()) != b.as_str() => serde_json::from_str::<Value>(a).is_ok_and(|a| {
            !matches!((&a, b), (Value::String(a), Value::String(b)) if a != b) && matches(&a, b, is_exact)
        }),
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_compared_by_what_they_mean() {
        let same = |a: Value, b: Value| matches(&a, &b, true);
        assert!(
            same(json!(1), json!(1.0)) && same(json!("0.0000001"), json!(1e-7)) && same(json!("\"x\""), json!("x"))
        );
        assert!(same(json!({"detail": "{\"a\":[1]}"}), json!({"detail": {"a": [1.0]}})));
        assert!(!same(json!({"a": 1, "b": 2}), json!({"a": 1})));
        assert!(matches(&json!({"a": 1, "b": 2}), &json!({"a": 1}), false));
        assert!(!same(json!("x"), json!("y")));
        assert!(!same(json!(9_007_199_254_740_993_u64), json!(9_007_199_254_740_992_u64)));
    }

    #[test]
    fn a_component_with_another_version_has_the_same_length() {
        let component = replaced(Probe::Plain.component(), "@0.2.0", "@0.9.0");
        assert_eq!(component.len(), Probe::Plain.component().len());
        assert!(!component.windows(6).any(|window| window == b"@0.2.0"));
    }
}
