//! `querl plugin`: commands for plugin authors and platform teams.

pub mod bench;
pub mod bundle;
pub mod dev;
pub mod doctor;
mod folder;
pub mod inspect;
pub mod new;
pub mod replay;

use crate::args::{ConfigArgs, Format, parse_settings};
use crate::terminal;
use anyhow::Context;
use clap::{Args, Subcommand};
use querl_conformance::{CheckEvent, CheckProgress, HostArgs, Outcome, SuiteOptions, serve_host};
use querl_core::fsx::{io_problem, write_atomic};
use querl_pipeline::failure::Stop;
use querl_pipeline::plugins::{PluginUse, Plugins, Used, compiler};
use querl_plugin::{BuildOutput, PluginKind};
use serde_json::{Value, json};
use std::io::{stdin, stdout};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    /// Create a plugin's folder from a template, in Rust, Python or JavaScript
    New(new::NewArgs),
    /// Show, after each save, what a plugin scores on recorded episodes; test it and build its component
    Dev(dev::DevArgs),
    /// Build the component of a plugin's folder
    Build(BuildArgs),
    /// Test whether a plugin keeps the contract and passes its golden cases
    Test(TestArgs),
    /// Measure fuel, time and memory of a plugin, and suggest limits
    Bench(bench::BenchArgs),
    /// Print what a bundle, a component or a folder contains: settings, limits, digest, signers
    Inspect(inspect::InspectArgs),
    /// Pack a plugin's folder into a bundle, ID-VERSION.querl
    Pack(bundle::PackArgs),
    /// List the plugins of a configuration: role, version, source, digest, weight; builds none
    List(ListArgs),
    /// Sign a bundle, or create a signing key
    Sign(bundle::SignArgs),
    /// Check every byte of a bundle, and who has signed it
    Verify(bundle::VerifyArgs),
    /// Push a bundle to an OCI registry
    Push(bundle::PushArgs),
    /// Pull a bundle from an OCI registry
    Pull(bundle::PullArgs),
    /// Score recorded episodes with another plugin, version or setting, and print what changes
    Replay(replay::ReplayArgs),
    /// Test a host of plugins, querl's or that of another framework
    Conformance(HostArgs),
    /// Answer the requests of `conformance --host` with querl's own host
    Host,
    /// Print which build tools are missing, and install them
    Doctor(doctor::DoctorArgs),
}

pub fn run(command: &PluginCommand) -> anyhow::Result<()> {
    match command {
        PluginCommand::New(args) => new::run(args),
        PluginCommand::Dev(args) => dev::run(args),
        PluginCommand::Build(args) => build(args),
        PluginCommand::Test(args) => test(args),
        PluginCommand::Bench(args) => bench::run(args),
        PluginCommand::Inspect(args) => inspect::run(args),
        PluginCommand::Pack(args) => bundle::pack(args),
        PluginCommand::List(args) => list(args),
        PluginCommand::Sign(args) => bundle::sign(args),
        PluginCommand::Verify(args) => bundle::verify(args),
        PluginCommand::Push(args) => bundle::push(args),
        PluginCommand::Pull(args) => bundle::pull(args),
        PluginCommand::Replay(args) => replay::run(args),
        PluginCommand::Conformance(args) => conformance(args),
        PluginCommand::Host => Ok(serve_host(stdin().lock(), stdout().lock(), &compiler()?)?),
        PluginCommand::Doctor(args) => doctor::run(args),
    }
}

#[derive(Debug, Args)]
pub struct BuildArgs {
    /// Folders of plugins
    #[arg(value_name = "FOLDER", default_value = ".")]
    folders: Vec<PathBuf>,
    #[command(flatten)]
    format: Format,
}

fn build(args: &BuildArgs) -> anyhow::Result<()> {
    args.folders.iter().try_for_each(|folder| folder::check(folder))?;
    args.folders.iter().try_for_each(|folder| build_folder(folder, args.format))
}

/// Builds the component if a source file is newer, and prints the component's path.
fn build_folder(folder: &Path, format: Format) -> anyhow::Result<()> {
    let start = Instant::now();
    let BuildOutput { component, language, was_stale } = querl_plugin::build(folder)?;
    let n_bytes = std::fs::metadata(&component).with_context(|| component.display().to_string())?.len();
    let result = json!({"component": component, "language": language.name(), "component_bytes": n_bytes, "was_stale": was_stale});
    format.print(&result, || {
        let how = match was_stale {
            true => format!("built in {:.1} s", start.elapsed().as_secs_f64()),
            false => "up to date".to_owned(),
        };
        format!("{}  {:.1} MB, {how}\n", component.display(), n_bytes as f64 / 1e6)
    })
}

#[derive(Debug, Args)]
pub struct TestArgs {
    /// A bundle, a component or a source folder
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// A setting of the plugin, such as max_chars=40, not a key of a configuration: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Number of repetitions of a call in the test of determinism
    #[arg(long, value_name = "N", default_value_t = SuiteOptions::default().n_repeats as u64,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    repeats: u64,
    /// Write the report as JUnit XML too
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// Runs every check and the golden cases, and prints the report.
fn test(args: &TestArgs) -> anyhow::Result<()> {
    let options = SuiteOptions {
        n_repeats: args.repeats as usize,
        settings: parse_settings(&args.settings, "--settings")?,
        compiler: compiler()?,
        progress: CheckProgress::new(print_check),
        ..SuiteOptions::default()
    };
    let report = querl_conformance::run(&args.path, &options)?;
    if let Some(path) = &args.junit {
        write_atomic(path, report.junit().as_bytes())
            .map_err(|error| Stop::usage(format!("{}: cannot be written: {}", path.display(), io_problem(&error))))?;
    }
    args.format.print(&report.json(), || report.text())?;
    bundle::conforms(&report)
}

fn conformance(args: &HostArgs) -> anyhow::Result<()> {
    match args.run() {
        Ok(true) => Ok(()),
        Ok(false) => anyhow::bail!("the host does not keep the contract"),
        Err(error) => Err(Stop::usage(error).into()),
    }
}

/// Prints each check on stderr: its name when it starts, on a terminal only, and its result and duration when it has ended.
fn print_check(event: CheckEvent<'_>) {
    let group = |kind: Option<PluginKind>| kind.map_or("plugin", PluginKind::name);
    match event {
        CheckEvent::Started { kind, name } => terminal::show_running(&format!("{:<12}  {name}", group(kind))),
        CheckEvent::Ended { check, elapsed } => {
            let said = match check.outcome {
                Outcome::Passed => "passed",
                Outcome::Failed(_) => "failed",
                Outcome::Skipped { .. } => "skipped",
            };
            let (group, seconds) = (group(check.kind), elapsed.as_secs_f64());
            terminal::print(&format!("{group:<12}  {:<48} {said}  {seconds:.2} s", check.name));
        }
    }
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    format: Format,
}

/// Loads the plugins of a configuration and lists them, in the order of their calls.
fn list(args: &ListArgs) -> anyhow::Result<()> {
    let plugins = Plugins::open(&args.config.load_without_model()?, PluginUse::Look)?;
    let result: Vec<Value> = plugins.used().iter().map(as_json).collect();
    args.format.print(&result, || {
        let rows: Vec<[String; 5]> = plugins.used().iter().map(cells).collect();
        let [role, name, what, weight] =
            [0, 1, 2, 3].map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
        let line = |[a, b, c, d, e]: &[String; 5]| format!("{a:<role$}  {b:<name$}  {c:<what$}  {d:<weight$}  {e}\n");
        rows.iter().map(line).collect()
    })
}

fn cells(used: &Used) -> [String; 5] {
    let entry = &used.entry;
    let weight = used.weight.map(|weight| format!("weight {weight}")).unwrap_or_default();
    let signer = match &entry.signed_by {
        Some(key) => format!("signed by {key}"),
        None => "not signed".to_owned(),
    };
    let name = used.label.as_ref().unwrap_or(&entry.id).clone();
    let source = format!("{}, {signer}: {}", entry.source.name(), entry.path.display());
    [entry.role.clone(), name, entry.title(), weight, source]
}

fn as_json(used: &Used) -> Value {
    let mut value = json!(used.entry);
    (value["label"], value["weight"]) = (json!(used.label), json!(used.weight));
    value
}

/// Arguments that the plugin host passes to the process that compiles a component.
#[derive(Debug, Args)]
pub struct CompileArgs {
    /// The component
    input: PathBuf,
    /// File for the compiled code
    output: PathBuf,
    /// Time limit in milliseconds
    timeout_ms: u64,
}

/// Compiles a component, under limits on the time and memory of this process.
pub fn compile(args: &CompileArgs) -> anyhow::Result<()> {
    Ok(querl_plugin::compile_child(&args.input, &args.output, args.timeout_ms)?)
}
