//! `querl doctor`: what this machine offers, in sentences.

mod cards;

use crate::args::Format;
use clap::Args;
use querl_core::config::PluginLimits;
use querl_pipeline::plugins::host;
use serde::Serialize;
use std::io::Write;
use std::process::Command;

/// Options of `querl doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    /// False where something that querl can do is not possible here.
    ok: bool,
    sentence: String,
}

pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let findings: Vec<Finding> =
        [version(), cores()].into_iter().chain(cards::findings()).chain([cargo(), wasm_target(), plugins()]).collect();
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        serde_json::to_writer_pretty(&mut stdout, &findings)?;
        writeln!(stdout)?;
        return Ok(());
    }
    for finding in &findings {
        let mark = if finding.ok { "ok" } else { "--" };
        writeln!(stdout, "{mark}  {:<8} {}", finding.name, finding.sentence)?;
    }
    Ok(())
}

fn version() -> Finding {
    let sentence =
        format!("querl {} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
    Finding { name: "querl", ok: true, sentence }
}

fn cores() -> Finding {
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let sentence = format!("{n_cores} core(s); `--threads` or `threads` in the configuration uses fewer");
    Finding { name: "cpu", ok: true, sentence }
}

fn cargo() -> Finding {
    match first_line("cargo", &["--version"]) {
        Some(version) => Finding { name: "cargo", ok: true, sentence: format!("{version} builds plugins from source") },
        None => Finding {
            name: "cargo",
            ok: false,
            sentence: "cargo is not installed: plugins given as source folders cannot be built, .wasm files work"
                .into(),
        },
    }
}

fn wasm_target() -> Finding {
    const TARGET: &str = "wasm32-wasip2";
    let library = first_line("rustc", &["--print", "target-libdir", "--target", TARGET]);
    let ok = library.is_some_and(|folder| std::path::Path::new(&folder).is_dir());
    let sentence = match ok {
        true => format!("the target {TARGET} is installed"),
        false => format!("the target {TARGET} is missing; `rustup target add {TARGET}` installs it"),
    };
    Finding { name: "wasm", ok, sentence }
}

fn plugins() -> Finding {
    let (ok, sentence) = match host::open(&PluginLimits::default(), &[]) {
        Ok(_) => (true, "the plugin host starts; compiled plugins are kept in $QUERL_CACHE_DIR, else $XDG_CACHE_HOME/querl, else ~/.cache/querl".into()),
        Err(error) => (false, error.to_string()),
    };
    Finding { name: "plugins", ok, sentence }
}

fn first_line(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned())
}
