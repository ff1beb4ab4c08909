//! Compiling in a child process, which can be stopped.
#![allow(clippy::unwrap_used)]
#![cfg(unix)]

mod common;

use common::{competition, episode, repository};
use querl_core::config::PluginLimits;
use querl_plugin::{Compiler, HostOptions, PluginError, PluginHost};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn child() -> Compiler {
    Compiler::Child(PathBuf::from(env!("CARGO_BIN_EXE_querl-compile-plugin")), Vec::new())
}

fn host(compiler: Compiler, cache: &Path, compile_timeout_ms: u64) -> PluginHost {
    let limits = PluginLimits { compile_timeout_ms, ..PluginLimits::default() };
    PluginHost::new(HostOptions { limits, compiler, cache_dir: Some(cache.to_owned()), ..HostOptions::default() })
        .unwrap()
}

fn kept(cache: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(cache.join("compiled")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// A compiler that is a shell script.
fn script(folder: &Path, lines: &str) -> Compiler {
    Compiler::Child("/bin/sh".into(), vec!["-c".into(), lines.into(), folder.display().to_string()])
}

fn refusal(compiler: Compiler, cache: &Path, timeout_ms: u64) -> String {
    let error = host(compiler, cache, timeout_ms).load(&repository().join("plugins/reward-competition")).unwrap_err();
    assert!(matches!(error, PluginError::Compile { .. }), "{error}");
    error.to_string()
}

#[test]
fn child_compiles_what_the_host_runs_and_keeps() {
    let folder = tempfile::tempdir().unwrap();
    let score = |compiler| {
        let reward = competition(&host(compiler, folder.path(), 60_000));
        reward.score_batch(&[episode("a", "好")]).unwrap()
    };
    let scored = score(child());
    let files = kept(folder.path());
    assert_eq!(files.len(), 1, "one compiled component, and no temporary file: {files:?}");
    // The code that a child wrote is the same that the host would write, so it is not compiled again.
    let written = std::fs::metadata(&files[0]).unwrap().ino();
    assert_eq!(score(Compiler::InProcessWithoutLimits), scored);
    assert_eq!(std::fs::metadata(&files[0]).unwrap().ino(), written);
}

#[test]
fn child_is_used_where_nothing_can_be_kept() {
    let folder = tempfile::tempdir().unwrap();
    let file_in_the_way = folder.path().join("file");
    std::fs::write(&file_in_the_way, "").unwrap();
    let reward = competition(&host(child(), &file_in_the_way, 60_000));
    assert!(reward.score_batch(&[episode("a", "好")]).unwrap()[0].is_ok());
}

#[test]
fn child_that_takes_too_long_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let message = refusal(script(folder.path(), "exec sleep 60"), folder.path(), 300);
    let expected = "compiling it took longer than 300 ms (`plugins.limits.compile_timeout_ms`); raise it where the machine is busy";
    assert!(message.contains(expected), "{message}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(kept(folder.path()).is_empty());
}

/// The host's environment may contain secrets, such as API keys.
#[test]
fn child_sees_little_of_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "a variable that is there and is not kept");
    let message =
        refusal(script(folder.path(), "env | cut -d= -f1 | sort | tr '\\n' ' ' >&2; exit 1"), folder.path(), 60_000);
    let (_, names) =
        message.split_once("reward-competition.wasm: ").or(message.split_once("reward_competition.wasm: ")).unwrap();
    // Includes the variables that a shell sets itself.
    let expected = [
        "PATH",
        "LD_LIBRARY_PATH",
        "TMPDIR",
        "TEMP",
        "TMP",
        "LANG",
        "RAYON_NUM_THREADS",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    ];
    let unexpected: Vec<_> = names.split_whitespace().filter(|name| !expected.contains(name)).collect();
    assert!(unexpected.is_empty() && names.contains("RAYON_NUM_THREADS"), "{unexpected:?} in {names}");
}

#[test]
fn child_says_why_it_does_not_compile() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.wasm");
    let whole = host(child(), folder.path(), 60_000).load(&repository().join("plugins/reward-competition")).unwrap();
    let bytes = std::fs::read(whole.path()).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let (in_child, in_process) =
        (host(child(), folder.path(), 60_000), host(Compiler::InProcessWithoutLimits, folder.path(), 60_000));
    let message = in_child.load(&file).unwrap_err().to_string();
    assert!(message.starts_with(&format!("plugin {}: it does not compile: ", file.display())), "{message}");
    assert_eq!(message, in_process.load(&file).unwrap_err().to_string(), "as the host itself would say it");
}

#[test]
fn other_failures_of_a_child_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let message = refusal(script(folder.path(), "exit 3"), folder.path(), 60_000);
    assert!(message.ends_with("its compiler ended with the exit code 3"), "{message}");
    let message = refusal(script(folder.path(), "kill -SEGV $$"), folder.path(), 60_000);
    let ends = "its compiler was ended by a signal: 11 (SIGSEGV); it may use 4 GiB of memory and write 1 GiB";
    assert!(message.contains(ends), "{message}");
    let message = refusal(script(folder.path(), "exit 0"), folder.path(), 60_000);
    assert!(message.ends_with("wrote no compiled code"), "{message}");
    let message = refusal(script(folder.path(), "echo code > \"$2\""), folder.path(), 60_000);
    assert!(message.ends_with("wrote no compiled code"), "{message}");
    let nowhere = Compiler::Child(folder.path().join("no-such-program"), Vec::new());
    let message = refusal(nowhere, folder.path(), 60_000);
    assert!(message.contains("no-such-program`: No such file"), "{message}");
    assert!(kept(folder.path()).is_empty(), "nothing is left behind");
}
