//! `querl plugin doctor`: the tools that build and run plugins in each language.

use crate::args::Format;
use anyhow::Context;
use clap::Args;
use querl_bundle::Language;
use querl_plugin::{COMPONENTIZE_PY, JAVASCRIPT_PACKAGES, NativeFolder};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The Rust target that plugins in Rust are compiled for.
pub const WASM_TARGET: &str = "wasm32-wasip2";

/// Minimum version of Python: the SDK uses its syntax.
const PYTHON: [u64; 2] = [3, 10];

/// Minimum version of Node.js that runs the SDK's tests.
const NODE: [u64; 2] = [20, 0];

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A plugin's folder: only the tools of its language [default: all languages]
    #[arg(value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Install what is missing for the folder's language, with pip, npm or rustup
    #[arg(long, requires = "folder")]
    install: bool,
    #[command(flatten)]
    format: Format,
}

/// A build tool, found or missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Tool {
    language: &'static str,
    name: String,
    /// `None` if the tool is missing.
    version: Option<String>,
    ok: bool,
    /// What to do if `ok` is false.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    /// Commands that install the tool, run in the plugin's folder; empty if it needs the system's package manager.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    install: Vec<Vec<String>>,
}

/// Runs `querl plugin doctor`: prints which build tools are installed and which are missing. Exit code 1 if one is missing.
pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    if let Some(folder) = &args.folder {
        super::folder::check(folder)?;
    }
    let source = args.folder.as_deref().map(NativeFolder::read).transpose()?;
    let (folder, languages) = match &source {
        Some(source) => (source.folder.clone(), vec![source.language]),
        None => (std::env::current_dir().context("the current folder")?, Language::ALL.to_vec()),
    };
    let mut tools = tools(&languages, &folder);
    if args.install {
        for command in tools.iter().flat_map(|tool| &tool.install) {
            install(command, &folder)?;
        }
        tools = self::tools(&languages, &folder);
    }
    args.format.print(&tools, || tools.iter().map(line).collect())?;
    let missing: Vec<&str> = tools.iter().filter(|tool| !tool.ok).map(|tool| tool.name.as_str()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let named = args.folder.as_deref().unwrap_or(Path::new("FOLDER")).display();
    let remedy = match !args.install && tools.iter().any(|tool| !tool.install.is_empty()) {
        true => format!("; `querl plugin doctor {named} --install` runs the install commands of the folder's language"),
        false => String::new(),
    };
    anyhow::bail!("missing: {}{remedy}", missing.join(", "))
}

fn tools(languages: &[Language], folder: &Path) -> Vec<Tool> {
    let of = |language: &Language| match language {
        Language::Rust => rust(),
        Language::Python => python(folder),
        Language::JavaScript => javascript(folder),
    };
    languages.iter().flat_map(of).collect()
}

fn line(tool: &Tool) -> String {
    let Tool { language, name, version, ok, remedy, .. } = tool;
    let found = match (version, remedy) {
        (Some(version), None) => version.clone(),
        (Some(version), Some(remedy)) => format!("{version}; {remedy}"),
        (None, remedy) => format!("missing; {}", remedy.as_deref().unwrap_or("install it")),
    };
    format!("{}  {language:<10}  {name:<34} {found}\n", if *ok { "ok" } else { "--" })
}

fn install(command: &[String], folder: &Path) -> anyhow::Result<()> {
    let shown = command.join(" ");
    crate::terminal::print(&format!("{}: {shown}", folder.display()));
    let Some((program, arguments)) = command.split_first() else { return Ok(()) };
    let mut command = Command::new(program);
    // Output of the commands is sent to stderr: stdout is for the result.
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).stdout(std::io::stderr());
    let status = command.status().with_context(|| shown.clone())?;
    anyhow::ensure!(status.success(), "`{shown}` ended with {status}");
    Ok(())
}

/// The first line that a program prints; `None` if the program is missing or fails.
pub fn first_line(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned())
}

/// True if rustc has the standard library of [`WASM_TARGET`].
pub fn has_wasm_target() -> bool {
    let library = first_line("rustc", &["--print", "target-libdir", "--target", WASM_TARGET]);
    library.is_some_and(|folder| Path::new(&folder).is_dir())
}

fn rust() -> Vec<Tool> {
    let install = words(&["rustup", "target", "add", WASM_TARGET]);
    vec![
        tool("rust", "cargo", first_line("cargo", &["--version"]), "install Rust with rustup, https://rustup.rs", &[]),
        tool("rust", WASM_TARGET, has_wasm_target().then(|| "installed".to_owned()), "", &[install]),
    ]
}

fn python(folder: &Path) -> Vec<Tool> {
    let version = first_line("python3", &["--version"]);
    let venv = first_line("python3", &["-c", "import ensurepip, venv; print('installed')"]);
    let package = COMPONENTIZE_PY.to_owned();
    let wanted = package.rsplit("==").next().unwrap_or_default().to_owned();
    let in_environment = if cfg!(windows) { ".venv/Scripts/" } else { ".venv/bin/" };
    let active = std::env::var_os("VIRTUAL_ENV").map(|path| PathBuf::from(path).join("bin/componentize-py"));
    let own = folder.ancestors().map(|folder| folder.join(in_environment).join("componentize-py"));
    let program = own.chain(active).find(|path| path.is_file()).unwrap_or_else(|| "componentize-py".into());
    let found = first_line(&program.to_string_lossy(), &["--version"]);
    let pip = format!("{in_environment}pip");
    let install = vec![words(&["python3", "-m", "venv", ".venv"]), words(&[&pip, "install", &package])];
    let mut componentize = tool("python", "componentize-py", found, "", &install);
    if componentize.version.as_ref().is_some_and(|found| !found.ends_with(&wanted)) {
        componentize = Tool {
            ok: false,
            remedy: Some(format!("expected {wanted}: {}", shown(&install))),
            install,
            ..componentize
        };
    }
    vec![
        at_least("python", "python3", version, PYTHON),
        tool("python", "venv", venv, "install the package python3-venv of the system", &[]),
        componentize,
    ]
}

fn javascript(folder: &Path) -> Vec<Tool> {
    let install = words(&["npm", "install", "--ignore-scripts"]);
    let package = |name: &&str| {
        let manifests = folder.ancestors().map(|folder| folder.join("node_modules").join(name).join("package.json"));
        let version = manifests.filter_map(|path| std::fs::read_to_string(path).ok()).find_map(|text| {
            Some(serde_json::from_str::<serde_json::Value>(&text).ok()?.get("version")?.as_str()?.to_owned())
        });
        tool("javascript", name, version, "", std::slice::from_ref(&install))
    };
    let npm =
        tool("javascript", "npm", first_line("npm", &["--version"]), "install npm, which comes with Node.js", &[]);
    let node = at_least("javascript", "node", first_line("node", &["--version"]), NODE);
    let mut tools = vec![node, npm];
    tools.extend(JAVASCRIPT_PACKAGES.iter().map(package));
    // One command installs all packages.
    let mut is_first = true;
    for tool in tools.iter_mut().filter(|tool| !tool.install.is_empty()) {
        if !std::mem::take(&mut is_first) {
            tool.install.clear();
        }
    }
    tools
}

/// A tool that is ok if it has a version. `remedy`: what to do if it is missing; by default, to run `install`.
fn tool(language: &'static str, name: &str, version: Option<String>, remedy: &str, install: &[Vec<String>]) -> Tool {
    let ok = version.is_some();
    let remedy = if install.is_empty() { remedy.to_owned() } else { shown(install) };
    let install = if ok { Vec::new() } else { install.to_vec() };
    Tool { language, name: name.to_owned(), version, ok, remedy: (!ok).then_some(remedy), install }
}

/// A tool whose version must be at least `least`.
fn at_least(language: &'static str, name: &str, version: Option<String>, least: [u64; 2]) -> Tool {
    let [major, minor] = least;
    let remedy = format!("install {name} {major}.{minor} or later with the package manager of the system");
    let is_old = version.as_deref().and_then(number_of).is_some_and(|found| found < least);
    let found = tool(language, name, version, &remedy, &[]);
    if is_old { Tool { ok: false, remedy: Some(remedy), ..found } } else { found }
}

/// Major and minor version in `Python 3.11.7` or `v20.20.2`.
fn number_of(version: &str) -> Option<[u64; 2]> {
    let number = version.rsplit(' ').next()?.trim_start_matches('v');
    let mut parts = number.split('.');
    Some([parts.next()?.parse().ok()?, parts.next()?.parse().ok()?])
}

fn words(command: &[&str]) -> Vec<String> {
    command.iter().map(|word| (*word).to_owned()).collect()
}

/// The commands as a remedy, in shell syntax.
fn shown(commands: &[Vec<String>]) -> String {
    format!("run `{}`", commands.iter().map(|command| command.join(" ")).collect::<Vec<_>>().join(" && "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let check = |version: &str| at_least("python", "python3", Some(version.to_owned()), PYTHON);
        assert!(check("Python 3.10.0").ok && check("Python 3.11.7").ok && check("Python 4.0").ok);
        let old = check("Python 3.9.18");
        assert!(!old.ok && line(&old).starts_with("--  python ") && line(&old).contains("3.10 or later"), "{old:?}");
        assert_eq!(number_of("v20.20.2"), Some([20, 20]));
    }

    #[test]
    fn missing_tool_names_its_command() {
        let missing = tool("rust", WASM_TARGET, None, "", &[words(&["rustup", "target", "add", WASM_TARGET])]);
        assert!(line(&missing).ends_with("missing; run `rustup target add wasm32-wasip2`\n"), "{}", line(&missing));
    }
}
