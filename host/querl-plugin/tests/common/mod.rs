//! Helpers of the tests in this folder.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses a part of this")]

use querl_core::config::PluginLimits;
use querl_core::ports::{FaultKind, PluginFault, RewardModel};
use querl_core::records::{Candidate, Episode, Hit, Judgement, Sample};
use querl_plugin::{HostOptions, Plugin, PluginError, PluginHost, PluginPort, PluginSettings};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

pub mod wat;

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The cache of compiled plugins is kept between test runs. `None`, the user's cache, for an example program.
pub fn cache_dir() -> Option<PathBuf> {
    option_env!("CARGO_TARGET_TMPDIR").map(|folder| Path::new(folder).join("plugin-cache"))
}

/// CPU time of this thread, which calls the guest; wall time would depend on other tests.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

pub fn host() -> PluginHost {
    host_with(PluginLimits::default())
}

pub fn host_with(limits: PluginLimits) -> PluginHost {
    PluginHost::new(HostOptions { limits, cache_dir: cache_dir(), ..HostOptions::default() }).unwrap()
}

/// Loads the plugin in a folder of the repository, and opens it with `settings` (TOML).
pub fn open<P: ?Sized>(
    host: &PluginHost,
    folder: &str,
    settings: &str,
    port: PluginPort<P>,
) -> Result<Box<P>, PluginError> {
    host.open(&host.load(&repository().join(folder))?, &toml::from_str(settings).unwrap(), port)
}

/// The reward of the first-party plugin `reward-competition`.
pub fn competition(host: &PluginHost) -> Box<dyn RewardModel> {
    open(host, "plugins/reward-competition", "", PluginPort::reward()).unwrap()
}

/// A guest of `tests/guests`: a crate `guest-NAME`, or `wat/NAME.wat`.
pub fn guest(host: &PluginHost, name: &str) -> Box<dyn RewardModel> {
    host.open(&load_guest(host, name).unwrap(), &PluginSettings::default(), PluginPort::reward()).unwrap()
}

/// Name and version of a guest, as in messages.
pub fn title(name: &str) -> String {
    match repository().join(format!("tests/guests/guest-{name}")).is_dir() {
        true => format!("guest-{name} 0.2.0"),
        false => format!("{name} 0.1.0"),
    }
}

/// As [`guest`], but only loads it.
pub fn load_guest(host: &PluginHost, name: &str) -> Result<Plugin, PluginError> {
    let folder = repository().join(format!("tests/guests/guest-{name}"));
    if folder.is_dir() {
        build_guests();
        return host.load(&folder);
    }
    load_bytes(host, &wat::component(name))
}

/// Loads a component.
pub fn load_bytes(host: &PluginHost, component: &[u8]) -> Result<Plugin, PluginError> {
    let file = tempfile::Builder::new().suffix(".wasm").tempfile().unwrap();
    file.as_file().write_all(component).unwrap();
    host.load(file.path())
}

/// The error for a guest that cannot be loaded.
pub fn refusal(name: &str) -> String {
    load_guest(&host(), name).unwrap_err().to_string()
}

/// Builds all guests that are crates in one call of cargo.
fn build_guests() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let mut cargo = Command::new("cargo");
        cargo.args(["build", "--release", "--target", "wasm32-wasip2", "--target-dir", "target", "-p", "guest-*"]);
        cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
        let output = cargo.current_dir(repository().join("plugins")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
}

/// Asserts that the host still runs a valid plugin after the fault of another.
pub fn assert_others_are_served(host: &PluginHost) {
    let other = guest(host, "ordinary").score_batch(&[episode("other", "好")]).unwrap();
    assert_eq!(other[0].as_ref().unwrap().total, 0.5);
}

/// The fault of a batch in which the second episode's query is `query`. Asserts that the host then scores a normal batch of the same
/// plugin and one of another plugin.
pub fn fault_of(host: &PluginHost, plugin: &dyn RewardModel, query: &str) -> PluginFault {
    let batch = [episode("step-1/a/0", "好"), episode("step-1/b/0", query), episode("step-1/c/0", "好")];
    let fault = plugin.score_batch(&batch).unwrap_err();
    let next = plugin.score_batch(&[episode("step-2/a/0", "好")]).unwrap();
    assert_eq!(next[0].as_ref().unwrap().total, 0.5, "the next call is served");
    assert_others_are_served(host);
    fault
}

/// As [`fault_of`], for a guest that violates the contract at any ASCII query, with `limits`: message and kind of fault.
pub fn fault_message(name: &str, query: &str, limits: PluginLimits) -> (String, FaultKind) {
    let host = host_with(limits);
    let fault = fault_of(&host, &*guest(&host, name), query);
    (fault.to_string(), fault.kind)
}

/// A writer that collects the log in a test.
#[derive(Clone, Default)]
pub struct Lines(pub Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// Runs `job`; returns its log without colours, and its result.
    pub fn of<R>(job: impl FnOnce() -> R) -> (String, R) {
        let written = Self::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(written.clone()).finish();
        let done = tracing::subscriber::with_default(subscriber, job);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        (text, done)
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub fn episode(id: &str, query: &str) -> Episode {
    Episode {
        id: id.into(),
        group_id: Episode::group_of(id).0.into(),
        sample_index: Episode::group_of(id).1,
        query: query.into(),
        policy: candidate(&[0.9, 0.8, 0.7], None),
        baseline: Some(candidate(&[0.7, 0.6, 0.5], None)),
        ..Episode::default()
    }
}

pub fn candidate(scores: &[f64], judge_score: Option<f64>) -> Candidate {
    let hit = |(score, rank): (&f64, u32)| Hit {
        id: format!("kb-{rank}"),
        text: "胶原蛋白肽每日一次，每次一袋，温水冲服。".into(),
        reranker_score: *score,
        retrieval_score: Some(10.0),
        rank,
    };
    Candidate {
        rewrite: "胶原蛋白肽的服用方法".into(),
        retrieval: Some(Ok(scores.iter().zip(1..).map(hit).collect())),
        judgement: judge_score
            .map_or(Judgement::NotSampled, |score| Judgement::Scored { score, reason: "清楚".into() }),
        style: None,
        n_tokens: 12,
        finish_reason: None,
    }
}

/// A sample without hits, whose rewrite is its query.
pub fn sample(id: &str, query: &str) -> Sample {
    Sample { id: id.into(), original_query: query.into(), rewritten_query: query.into(), ..Sample::default() }
}

/// A host whose cache of compiled code is in `base`.
pub fn host_in(base: &Path) -> PluginHost {
    PluginHost::new(HostOptions { cache_dir: Some(base.to_owned()), ..HostOptions::default() }).unwrap()
}

/// Limits with which a guest that does not end reaches the time limit first.
pub fn with_plenty_of_fuel(timeout_ms: u64) -> PluginLimits {
    PluginLimits { fuel_per_item: u64::MAX / 1000, timeout_ms, ..PluginLimits::default() }
}
