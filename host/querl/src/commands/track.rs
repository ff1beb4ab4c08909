//! `querl track`: mirrors a run to an experiment tracker through the Python package `querl` (`python -m querl.track`), and the process
//! that `[tracking]` of a configuration starts next to a run.
//!
//! That process reads the files of the run directory, so it cannot slow or stop the run, and ends by itself once no process holds the
//! directory's lock.

use crate::args::{one_of, usage};
use crate::terminal;
use anyhow::{Context, anyhow};
use clap::Args;
use clap::builder::TypedValueParser;
use querl_core::config::{TrackerKind, TrackingConfig, load_resolved};
use querl_core::run_dir::RunDir;
use querl_pipeline::failure::{self, Stop, run_in};
use querl_pipeline::interrupt;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

#[derive(Debug, Args)]
pub struct TrackArgs {
    /// The run directory
    #[arg(value_name = "RUN_DIR")]
    dir: PathBuf,
    /// The tracker, by the name of its Python library
    #[arg(long, value_name = "TRACKER", value_parser = tracker())]
    to: TrackerKind,
    /// Project there [default: that of `[tracking]` where the run has this tracker, else querl]
    #[arg(long)]
    project: Option<String>,
    /// Name of the run there [default: as above, else that of the run directory]
    #[arg(long)]
    name: Option<String>,
    /// Number of validation queries whose rewrites are recorded at each evaluation [default: as above, else 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1000))]
    samples: Option<u16>,
    /// Continue until no querl process works in the run directory
    #[arg(long)]
    follow: bool,
    /// Keep the records on this machine, as the tracker's offline mode does
    #[arg(long)]
    offline: bool,
}

fn tracker() -> impl TypedValueParser<Value = TrackerKind> {
    one_of(TrackerKind::ALL.into_iter().filter(|kind| *kind != TrackerKind::None).map(|kind| (kind.name(), kind, "")))
}

pub fn run(args: &TrackArgs) -> anyhow::Result<()> {
    let dir = run_in(&args.dir)?;
    let of_run = load_resolved(&dir.config())?.tracking;
    let of_run = if of_run.to == args.to { of_run } else { TrackingConfig::default() };
    let tracking = TrackingConfig {
        to: args.to,
        project: args.project.clone().unwrap_or(of_run.project),
        name: args.name.clone().or(of_run.name),
        offline: args.offline || of_run.offline,
        samples: args.samples.map_or(of_run.samples, usize::from),
    };
    let python = python();
    check_packages(&python, tracking.to)?;
    let command = command(&python, &tracking, dir.root(), args.follow);
    become_process(command).with_context(|| format!("{} cannot be started", python.display()))
}

/// The Python interpreter: `$PYTHON`, else `python3`.
fn python() -> OsString {
    std::env::var_os("PYTHON").filter(|python| !python.is_empty()).unwrap_or_else(|| "python3".into())
}

fn no_such_python(python: &OsStr) -> Stop {
    let remedy = "install Python 3.10 or later, or name it with the environment variable PYTHON";
    usage(format!("{}: no such program; tracking needs Python: {remedy}", python.display()))
}

/// Python code that prints whether the library named by the first argument is installed, and imports `querl.track`. The test of the origin
/// excludes a folder of the library's name, such as the one that wandb makes for its records.
const IMPORT: &str = "\
import importlib.util, sys
library = importlib.util.find_spec(sys.argv[1])
print(bool(library and library.origin))
import querl.track
";

/// Checks that the interpreter exists and has the package `querl`. The error also says if the tracker's library is missing. If only the
/// library is missing, there is no error here, because the package reports it.
fn check_packages(python: &OsStr, to: TrackerKind) -> anyhow::Result<()> {
    let imported = Command::new(python).args(["-c", IMPORT, to.name()]).stdin(Stdio::null()).output();
    let output = match imported {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(no_such_python(python).into()),
        imported => imported.with_context(|| format!("{} cannot be started", python.display()))?,
    };
    if output.status.success() {
        return Ok(());
    }
    let (shown, text) = (python.display(), String::from_utf8_lossy(&output.stderr).into_owned());
    let reason = last_line(&text).unwrap_or("no message");
    let library = to.name();
    let (also, packages, them) = match String::from_utf8_lossy(&output.stdout).trim() == "False" {
        true => {
            (format!(", and does not have the library {library}"), format!("./host/querl-python {library}"), "both")
        }
        false => (String::new(), "./host/querl-python".to_owned(), "it"),
    };
    let remedy = format!("`{shown} -m pip install {packages}` in the repository of querl installs {them}");
    let message = format!(
        "{shown} cannot import querl.track of the Python package querl ({reason}){also}; {remedy}, and the environment variable PYTHON names \
         another Python"
    );
    Err(usage(message).into())
}

/// The command `python -m querl.track`; with `follow` it runs until the run directory is no longer locked.
fn command(python: &OsStr, tracking: &TrackingConfig, dir: &Path, follow: bool) -> Command {
    let TrackingConfig { to, project, name, offline, samples } = tracking;
    let mut command = Command::new(python);
    command.args(["-m", "querl.track"]).arg(format!("--to={}", to.name())).arg(format!("--project={project}"));
    command.arg(format!("--samples={samples}")).args(name.as_ref().map(|name| format!("--name={name}")));
    command.args(offline.then_some("--offline")).args(follow.then_some("--follow"));
    // `--`, because a folder's name may begin with `-`.
    command.arg("--").arg(dir);
    command
}

/// Replaces this process by the command (`exec`), so that signals, output and exit code are the command's.
#[cfg(unix)]
fn become_process(mut command: Command) -> io::Result<()> {
    Err(std::os::unix::process::CommandExt::exec(&mut command))
}

#[cfg(not(unix))]
fn become_process(mut command: Command) -> io::Result<()> {
    let status = command.status()?;
    std::process::exit(status.code().unwrap_or(1))
}

/// Maximum time to wait for the last records at the end of a run; after it, the tracker's process continues in the background.
const FINISH_TIMEOUT: Duration = Duration::from_secs(10);

/// The process that mirrors this run to a tracker, and a thread that waits for it. If it fails, one warning is printed.
pub struct TrackerProcess {
    to: TrackerKind,
    log: PathBuf,
    ended: Receiver<()>,
}

impl TrackerProcess {
    /// Starts the process; `None` if no tracker is configured. The run directory must be locked by this process.
    pub fn start(tracking: &TrackingConfig, dir: &RunDir) -> Option<Self> {
        let to = tracking.to;
        if to == TrackerKind::None {
            return None;
        }
        let log = dir.tracking().join(format!("{}.log", to.name()));
        let (sender, ended) = mpsc::channel();
        let (tracking, root, its_log) = (tracking.clone(), dir.root().to_owned(), log.clone());
        let work = move || {
            if let Err(error) = mirror(&tracking, &root, &its_log) {
                warn(to, &root, &failure::sentence(&error));
            }
            // Fails after the timeout, when the receiver is dropped.
            let _ = sender.send(());
        };
        match std::thread::Builder::new().name("tracker".into()).spawn(work) {
            Ok(_) => Some(Self { to, log, ended }),
            Err(error) => {
                warn(to, dir.root(), &format!("no thread can be started: {error}"));
                None
            }
        }
    }

    /// Waits up to [`FINISH_TIMEOUT`] until the last records are sent, except after an interrupt. The run directory must be unlocked.
    pub fn finish(self) {
        if interrupt::check().is_err() {
            return;
        }
        if let Err(RecvTimeoutError::Timeout) = self.ended.recv_timeout(FINISH_TIMEOUT) {
            let (to, log) = (self.to.name(), self.log.display());
            terminal::print(&format!("tracking: the last records go to {to} in the background; its log is {log}"));
        }
    }
}

/// Runs the tracker's process and waits for its end.
fn mirror(tracking: &TrackingConfig, root: &Path, log: &Path) -> anyhow::Result<()> {
    let python = python();
    check_packages(&python, tracking.to)?;
    let opened = std::fs::create_dir_all(log.parent().unwrap_or(root)).and_then(|()| append_to(log));
    let output = opened.with_context(|| format!("{}: cannot be written", log.display()))?;
    let stdout = output.try_clone().with_context(|| format!("{}: cannot be written", log.display()))?;
    let mut command = command(&python, tracking, root, true);
    command.stdin(Stdio::null()).stdout(stdout).stderr(output);
    // A process group of its own: Ctrl-C and hangup of the terminal reach only querl.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let status = command.status().with_context(|| format!("{} cannot be started", python.display()))?;
    if status.success() {
        return Ok(());
    }
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let reason = last_line(&text).map_or_else(|| status.to_string(), str::to_owned);
    Err(anyhow!("{}", reason.strip_prefix("error: ").unwrap_or(&reason)))
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn last_line(text: &str) -> Option<&str> {
    text.lines().map(str::trim).rfind(|line| !line.is_empty())
}

fn warn(to: TrackerKind, root: &Path, reason: &str) {
    let (to, root) = (to.name(), root.display());
    terminal::print(&format!(
        "warning: tracking to {to} ended: {reason}; the run is not affected, and `querl track {root} --to {to}` mirrors it later"
    ));
}
