//! Child processes (build tools, the compiler of components) and their temporary folders, which a signal to the host ends and removes.
//!
//! Each child leads a session and process group of its own: a terminal's Ctrl-C reaches the host alone, [`end_children`] ends the child with
//! all processes that it has started (rustc and build scripts of cargo), and a prompt for a password fails, as there is no terminal.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;

static RUNNING: Mutex<Running> = Mutex::new(Running { groups: Vec::new(), folders: Vec::new() });

struct Running {
    groups: Vec<u32>,
    folders: Vec<PathBuf>,
}

fn running() -> MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills every build and every compilation with all of its processes, and removes their temporary folders. For the end of the process:
/// afterwards a thread that starts a child, or has waited for one, blocks.
pub fn end_children() {
    let running = running();
    running.groups.iter().copied().for_each(kill_group);
    for folder in &running.folders {
        let _ = std::fs::remove_dir_all(folder);
    }
    // Never unlocked, so that no further child starts and no thread reports a killed child as a failure.
    std::mem::forget(running);
}

#[cfg(unix)]
fn kill_group(leader: u32) {
    use rustix::process::{Pid, Signal, kill_process_group};
    if let Some(pid) = i32::try_from(leader).ok().and_then(Pid::from_raw) {
        // It may have ended already.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

#[cfg(not(unix))]
fn kill_group(_: u32) {}

/// Registration of a child process: until this value is dropped, [`kill_children`] and [`end_children`] kill the child.
pub(crate) struct Registered {
    group: u32,
}

impl Drop for Registered {
    fn drop(&mut self) {
        running().groups.retain(|group| *group != self.group);
    }
}

/// Starts a child process as the leader of a new session and process group, and registers it.
pub(crate) fn spawn(command: &mut Command) -> io::Result<(Child, Registered)> {
    #[cfg(unix)]
    // SAFETY: `setsid` is async-signal-safe, and nothing else runs between fork and exec.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, || Ok(rustix::process::setsid().map(drop)?));
    }
    let mut running = running();
    let child = command.spawn()?;
    running.groups.push(child.id());
    let group = child.id();
    Ok((child, Registered { group }))
}

/// Kills every build, compilation and other child that runs now, with all of its processes. A thread that waits for one gets its error.
pub fn kill_children() {
    running().groups.iter().copied().for_each(kill_group);
}

/// Like [`Command::output`], for a child process that [`kill_children`] and [`end_children`] can kill.
///
/// # Errors
/// The program cannot be started.
pub fn child_output(command: &mut Command) -> io::Result<Output> {
    let (child, _registered) = spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    child.wait_with_output()
}

/// Longest time between two looks at the progress of a child.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Like [`child_output`], for a child that is killed with all of its processes once the value of `progress` has not changed for
/// `limit` of wall time. The bool is true if it was killed.
///
/// # Errors
/// The program cannot be started.
pub fn child_output_within(
    command: &mut Command,
    limit: Duration,
    progress: impl Fn() -> u64 + Send + 'static,
) -> io::Result<(Output, bool)> {
    let (child, _registered) = spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    let group = child.id();
    let (runs, ended) = channel::<()>();
    let watch = std::thread::spawn(move || {
        let (mut last, mut since) = (progress(), Instant::now());
        while ended.recv_timeout(limit.min(LOOK_INTERVAL)) == Err(RecvTimeoutError::Timeout) {
            let now = progress();
            if now != last {
                (last, since) = (now, Instant::now());
            } else if since.elapsed() >= limit {
                kill_group(group);
                return true;
            }
        }
        false
    });
    let output = child.wait_with_output();
    drop(runs);
    let is_killed = watch.join().unwrap_or(false);
    Ok((output?, is_killed))
}

/// A temporary folder that is removed when this value is dropped, and by [`end_children`].
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// Takes over an existing temporary folder.
    pub fn new(folder: TempDir) -> Self {
        running().folders.push(folder.path().to_owned());
        Self(folder)
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        running().folders.retain(|folder| folder != self.0.path());
    }
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_child_without_progress_is_killed_with_its_processes_and_its_output_is_kept() {
        let started = Instant::now();
        // `sleep` keeps stdout open, so that the test detects if only the shell is killed.
        let mut command = shell("echo begun; sleep 60 & wait");
        let (output, is_killed) = child_output_within(&mut command, Duration::from_millis(200), || 0).unwrap();
        assert!(is_killed && !output.status.success() && output.stdout == b"begun\n", "{output:?}");
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    /// Regression: progress at the start counted for the whole first window, which doubled the limit.
    #[test]
    fn the_limit_begins_at_the_last_progress() {
        let started = Instant::now();
        let progress = move || u64::from(started.elapsed() > Duration::from_millis(100));
        let (_, is_killed) =
            child_output_within(&mut shell("exec sleep 60"), Duration::from_secs(4), progress).unwrap();
        let elapsed = started.elapsed();
        assert!(is_killed && elapsed < Duration::from_secs(7), "{elapsed:?}");
    }

    #[test]
    fn a_child_that_ends_or_has_progress_is_not_killed() {
        let (output, is_killed) = child_output_within(&mut shell("exit 3"), Duration::from_secs(60), || 0).unwrap();
        assert_eq!((output.status.code(), is_killed), (Some(3), false));
        let n_looks = AtomicU64::new(0);
        let progress = move || n_looks.fetch_add(1, Ordering::Relaxed);
        let (output, is_killed) =
            child_output_within(&mut shell("sleep 1"), Duration::from_millis(100), progress).unwrap();
        assert!(output.status.success() && !is_killed, "{output:?}");
    }
}
