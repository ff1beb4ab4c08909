//! Compilation in a child process with limits on time, memory and file size: compiling a hostile component can take unbounded time
//! or memory, and the limits of a call do not apply to the host's own work.

use crate::children::{self, Scratch};
use crate::engine::MemoryReservation;
use crate::text::printable;
use crate::{cache, engine};
use querl_core::fsx::io_problem;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use wasmtime::Engine;

/// Limit on the address space of a child process. The largest component of this repository (JavaScript, 12 MB) took 570 MB with two
/// threads.
const COMPILER_MEMORY_BYTES: u64 = 4 << 30;

/// Limit on threads, because each reserves address space.
const MAX_COMPILER_THREADS: usize = 8;

/// Limit on the file size of a child process. The compiled code of the 18 MB Python component has 43 MB.
const COMPILER_FILE_BYTES: u64 = 1 << 30;

/// Environment variables that a child inherits: search paths and temporary folders. No secrets.
const KEPT_VARIABLES: [&str; 8] =
    ["PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LANG"];

const MAX_MESSAGE_BYTES: usize = 2000;

/// Which process compiles components.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Compiler {
    /// Compiles in the host's process, without a limit of time or memory: for trusted components and for tests.
    #[default]
    InProcessWithoutLimits,
    /// A child process: a program and its first arguments, to which the component, the output file and
    /// `plugins.limits.compile_timeout_ms` are added. The program calls [`compile_child`] with these three, writes errors to
    /// stderr, and is killed after the timeout.
    Child(PathBuf, Vec<String>),
}

/// Why a component was not compiled, as the end of a sentence for the user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CompileError(pub(crate) String);

/// The work of the child process of [`Compiler::Child`]: limits its own memory and time, compiles the component `input`, and
/// writes the code to `output`.
///
/// # Errors
/// Not a component; or a file cannot be read or written; or the limits cannot be set.
pub fn compile_child(input: &Path, output: &Path, timeout_ms: u64) -> Result<(), CompileError> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| CompileError(format!("{path}: {}", io_problem(&error)))
    };
    limit_resources(timeout_ms).map_err(|error| CompileError(format!("its compiler cannot be limited: {error}")))?;
    let bytes = std::fs::read(input).map_err(failed(input))?;
    let engine = engine::for_compiling().map_err(|error| CompileError(format!("{error:#}")))?;
    cache::write(output, &in_process(&engine, &bytes)?).map_err(failed(output))
}

pub(crate) fn in_process(engine: &Engine, bytes: &[u8]) -> Result<Vec<u8>, CompileError> {
    engine.precompile_component(bytes).map_err(|error| {
        let message = printable(&format!("{error:#}"), MAX_MESSAGE_BYTES);
        CompileError(format!("it does not compile: {message}"))
    })
}

/// A temporary folder that only this user can read and write, in `parent` or else in the system's folder for temporary files;
/// removed when it is dropped.
pub(crate) fn private_temporary(parent: Option<&Path>) -> Result<Scratch, CompileError> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("compiling-");
    let folder = match parent {
        Some(parent) => builder.tempdir_in(parent),
        None => builder.tempdir(),
    };
    folder
        .map(Scratch::new)
        .map_err(|error| CompileError(format!("compiling it needs a folder for temporary files: {error}")))
}

/// Compiles a component in a child process, which writes to a separate temporary folder.
pub(crate) fn in_child(
    program: &Path,
    args: &[String],
    bytes: &[u8],
    output: &Path,
    (timeout_ms, reservation): (u64, MemoryReservation),
) -> Result<(), CompileError> {
    let failed =
        |error: io::Error| CompileError(format!("compiling it with `{}`: {}", program.display(), io_problem(&error)));
    let (input, stderr_path) = (output.with_file_name("component.wasm"), output.with_file_name("stderr"));
    std::fs::write(&input, bytes).map_err(failed)?;
    // A file, not a pipe, which would have to be read while the child runs.
    let stderr = std::fs::File::create(&stderr_path).map_err(failed)?;
    let mut command = Command::new(program);
    command.args(args).arg(&input).arg(output).arg(timeout_ms.to_string());
    let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_COMPILER_THREADS));
    let kept = std::env::vars_os().filter(|(name, _)| KEPT_VARIABLES.iter().any(|kept| OsStr::new(kept) == name));
    command.env_clear().envs(kept).envs(reservation.environment()).env("RAYON_NUM_THREADS", n_threads.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    let (child, registered) = children::spawn(&mut command).map_err(failed)?;
    let ended = wait(child, Duration::from_millis(timeout_ms));
    drop(registered);
    match ended.map_err(failed)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(CompileError(why_it_failed(status, &std::fs::read(&stderr_path).unwrap_or_default()))),
        None => Err(CompileError(format!(
            "compiling it took longer than {timeout_ms} ms (`plugins.limits.compile_timeout_ms`); raise it where the machine is busy with other work"
        ))),
    }
}

/// The child's exit status; `None` if it was killed after `timeout`.
fn wait(mut child: Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= timeout {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(pause.min(timeout.saturating_sub(start.elapsed())));
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn why_it_failed(status: ExitStatus, stderr: &[u8]) -> String {
    let message = printable(String::from_utf8_lossy(stderr).trim(), MAX_MESSAGE_BYTES);
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    match status.code() {
        Some(_) if !message.is_empty() => message.to_owned(),
        Some(code) => format!("its compiler ended with the exit code {code}"),
        None => {
            let (memory, file) = (COMPILER_MEMORY_BYTES >> 30, COMPILER_FILE_BYTES >> 30);
            let message = if message.is_empty() { String::new() } else { format!(": {message}") };
            format!(
                "its compiler was ended by a {status}; it may use {memory} GiB of memory and write {file} GiB{message}"
            )
        }
    }
}

/// Limits also hold for a child whose parent was killed: CPU time of all threads, memory, file size, no core dump.
#[cfg(unix)]
fn limit_resources(timeout_ms: u64) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let seconds = timeout_ms.div_ceil(1000).saturating_mul(MAX_COMPILER_THREADS as u64).saturating_add(1);
    let limits = [
        (Resource::Cpu, seconds),
        (Resource::Core, 0),
        (Resource::Fsize, COMPILER_FILE_BYTES),
        (Resource::As, COMPILER_MEMORY_BYTES),
    ];
    for (resource, limit) in limits {
        // A lower limit of the host (`ulimit`) takes precedence.
        let limit = Some(getrlimit(resource).maximum.map_or(limit, |of_host| of_host.min(limit)));
        setrlimit(resource, Rlimit { current: limit, maximum: limit })?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn limit_resources(_: u64) -> io::Result<()> {
    Ok(())
}
