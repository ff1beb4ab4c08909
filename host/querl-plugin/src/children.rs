//! Child processes (build tools, the compiler of components) and their temporary folders, which a signal to the host ends and removes.
//!
//! Each child leads a session and process group of its own: a terminal's Ctrl-C reaches the host alone, [`end_children`] ends the child with
//! all processes that it has started (rustc and build scripts of cargo), and a prompt for a password fails, as there is no terminal.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
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
    // Never unlocked: no child starts any more, and no thread reports a killed child as a failure.
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

/// Makes a signal end a child, until this is dropped.
pub(crate) struct Registered {
    group: u32,
}

impl Drop for Registered {
    fn drop(&mut self) {
        running().groups.retain(|group| *group != self.group);
    }
}

/// Starts a child as the leader of a session.
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

/// As [`Command::output`], for a child that [`kill_children`] and [`end_children`] kill.
///
/// # Errors
/// The program cannot be started.
pub fn child_output(command: &mut Command) -> io::Result<Output> {
    let (child, _registered) = spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    child.wait_with_output()
}

/// A temporary folder, removed when it is dropped, and by [`end_children`].
pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new(folder: TempDir) -> Self {
        running().folders.push(folder.path().to_owned());
        Self(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        running().folders.retain(|folder| folder != self.0.path());
    }
}
