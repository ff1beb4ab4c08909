//! Folders with a plugin in Rust: a crate that cargo builds for wasm32-wasip2.

use super::folder::{Build, modified, unreadable};
use crate::children;
use crate::error::PluginError;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

const TARGET: &str = "wasm32-wasip2";

/// Environment variables that cargo inherits: search paths, caches, temporary folders, and how packages are fetched. Variables of an outer
/// `cargo run` or `cargo test` apply to the outer build only; others must not be visible to a plugin's build scripts.
const KEPT_VARIABLES: [&str; 20] = [
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "TEMP",
    "TMP",
    "LANG",
    "SYSTEMROOT",
    "USERPROFILE",
    "APPDATA",
    "LOCALAPPDATA",
    "PROGRAMDATA",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "RUSTUP_TOOLCHAIN",
    "LD_LIBRARY_PATH",
    "DEVELOPER_DIR",
    "SDKROOT",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];

/// Prefixes of further names.
const KEPT_PREFIXES: [&str; 5] = ["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTRIES_", "CARGO_REGISTRY_", "CARGO_SOURCE_"];

/// Proxy variables, in upper and lower case.
const PROXY_VARIABLES: [&str; 4] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"];

/// A folder with a Cargo.toml.
#[derive(Debug)]
pub(super) struct CrateFolder {
    folder: PathBuf,
    /// Where the workspace's Cargo.toml and Cargo.lock are.
    workspace: PathBuf,
    /// Name of the cargo package.
    package: String,
    stem: String,
}

impl CrateFolder {
    pub(super) fn read(folder: &Path) -> Result<Self, PluginError> {
        if !folder.join("Cargo.toml").is_file() {
            return Err(unreadable(folder, "the folder holds no Cargo.toml"));
        }
        let absolute = folder.canonicalize().map_err(|error| unreadable(folder, error.to_string()))?;
        let manifest = manifest(&absolute).ok_or_else(|| unreadable(folder, "its Cargo.toml is not valid TOML"))?;
        let name = |section: &str| Some(manifest.get(section)?.get("name")?.as_str()?.to_owned());
        let package = name("package").ok_or_else(|| unreadable(folder, "its Cargo.toml names no package"))?;
        let stem = name("lib").unwrap_or_else(|| package.clone()).replace('-', "_");
        Ok(Self { workspace: workspace_of(&absolute, &manifest), folder: absolute, package, stem })
    }

    fn output(&self, extension: &str) -> PathBuf {
        let file = format!("target/{TARGET}/release/{}.{extension}", self.stem);
        self.workspace.join(file)
    }

    fn cargo(&self, command: &str, arguments: &[&str]) -> Command {
        let mut cargo = Command::new("cargo");
        cargo.arg(command).args(arguments).arg("--target-dir").arg(self.workspace.join("target"));
        cargo.current_dir(&self.folder);
        let kept = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_kept));
        cargo.env_clear().envs(kept).stdin(Stdio::null());
        cargo
    }

    /// A native build for `querl plugin dev`: compiles the plugin without optimisation and its dependencies with it. Without debug
    /// information, which takes longer to link; the location of a panic does not need it. An override of `"*"` would optimise procedural
    /// macros too.
    pub(super) fn native(&self, command: &str, arguments: &[&str]) -> Command {
        let mut cargo = self.cargo(command, arguments);
        cargo.args(["--features", "querl-sdk/dev", "--config", "profile.dev.debug=0"]);
        cargo.args(["--config", "profile.dev.opt-level=3"]);
        cargo.arg("--config").arg(format!("profile.dev.package.{}.opt-level=0", self.package));
        cargo
    }

    pub(super) fn native_library(&self) -> PathBuf {
        let file = format!("{}{}{}", std::env::consts::DLL_PREFIX, self.stem, std::env::consts::DLL_SUFFIX);
        self.workspace.join("target/debug").join(file)
    }

    /// Sets the component's modification time to the start of the build. Cargo does not write it again when nothing relevant has
    /// changed (a touched manifest), and it would stay stale.
    fn date_from(&self, started: SystemTime) -> std::io::Result<()> {
        if modified(&self.component()).is_some_and(|time| time < started) {
            std::fs::File::options().append(true).open(self.component())?.set_modified(started)?;
        }
        Ok(())
    }
}

impl Build for CrateFolder {
    fn component(&self) -> PathBuf {
        self.output("wasm")
    }

    /// True if no source, manifest or lock file is newer than the component. Cargo lists the sources in a `.d` file next to it, including
    /// path dependencies and the contract's WIT files.
    fn is_fresh(&self) -> bool {
        let (Some(built), Ok(listed)) = (modified(&self.component()), std::fs::read_to_string(self.output("d"))) else {
            return false;
        };
        let sources = listed_sources(&listed);
        // The `.d` file of a folder that was copied with its `target` lists the sources of the original.
        if !sources.iter().any(|source| source.starts_with(&self.folder)) {
            return false;
        }
        let mut inputs: BTreeSet<PathBuf> = sources.iter().filter_map(|source| manifest_above(source)).collect();
        inputs.extend(sources);
        inputs.extend([self.folder.join("Cargo.toml"), self.workspace.join("Cargo.toml")]);
        let lock = modified(&self.workspace.join("Cargo.lock"));
        let newer = |input: &PathBuf| modified(input).is_none_or(|time| time > built);
        lock.is_none_or(|time| time <= built) && !inputs.iter().any(newer)
    }

    fn build(&self) -> Result<(), PluginError> {
        let started = SystemTime::now();
        let refused = |reason: String| unreadable(&self.folder, reason);
        let mut cargo = self.cargo("build", &["--release", "--target", TARGET]);
        let output = children::child_output(&mut cargo).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                refused("building it needs cargo; install Rust, or name a built `.wasm` component".into())
            }
            _ => refused(format!("cargo cannot be run: {error}")),
        })?;
        if !output.status.success() {
            return Err(explained(self.folder.clone(), &String::from_utf8_lossy(&output.stderr)));
        }
        if self.component().is_file() {
            return self.date_from(started).map_err(|error| refused(format!("its component: {error}")));
        }
        Err(refused("cargo built no component; expected `crate-type = [\"cdylib\", \"rlib\"]` under [lib]".into()))
    }
}

/// The error of a failed build.
fn explained(path: PathBuf, output: &str) -> PluginError {
    let target_missing = output.contains("target may not be installed")
        || (output.contains("can't find crate for `core`") || output.contains("can't find crate for `std`"));
    if target_missing {
        PluginError::TargetMissing { path }
    } else {
        PluginError::Build { path, tool: "cargo", output: output.to_owned(), advice: String::new() }
    }
}

fn is_kept(name: &str) -> bool {
    let is_proxy = PROXY_VARIABLES.iter().any(|proxy| proxy.eq_ignore_ascii_case(name));
    is_proxy || KEPT_VARIABLES.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn manifest(folder: &Path) -> Option<toml::Table> {
    std::fs::read_to_string(folder.join("Cargo.toml")).ok()?.parse().ok()
}

/// The folder where cargo finds the workspace of a package: the one named in its manifest, itself, or the nearest parent folder that does
/// not exclude it.
fn workspace_of(folder: &Path, manifest_here: &toml::Table) -> PathBuf {
    let named = manifest_here.get("package").and_then(|package| package.get("workspace")?.as_str());
    if let Some(named) = named {
        let path = folder.join(named);
        return path.canonicalize().unwrap_or(path);
    }
    if manifest_here.contains_key("workspace") {
        return folder.to_owned();
    }
    let holds = |above: &&Path| manifest(above).is_some_and(|manifest| is_workspace_of(&manifest, above, folder));
    folder.ancestors().skip(1).find(holds).unwrap_or(folder).to_owned()
}

fn is_workspace_of(manifest: &toml::Table, above: &Path, folder: &Path) -> bool {
    let Some(workspace) = manifest.get("workspace") else { return false };
    let excluded = workspace.get("exclude").and_then(toml::Value::as_array);
    let excludes = |entry: &toml::Value| entry.as_str().is_some_and(|entry| folder.starts_with(above.join(entry)));
    !excluded.is_some_and(|excluded| excluded.iter().any(excludes))
}

/// The files after the colon of a makefile line, in which a space in a name is written `\ `.
fn listed_sources(dep_info: &str) -> BTreeSet<PathBuf> {
    let files = dep_info.lines().filter_map(|line| Some(line.split_once(": ")?.1));
    let files = files.map(|line| line.replace("\\ ", "\0"));
    files
        .flat_map(|line| line.split(' ').map(|file| PathBuf::from(file.replace('\0', " "))).collect::<Vec<_>>())
        .collect()
}

fn manifest_above(source: &Path) -> Option<PathBuf> {
    source.ancestors().skip(1).map(|folder| folder.join("Cargo.toml")).find(|manifest| manifest.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_target_is_one_sentence_with_the_command() {
        let output =
            "error[E0463]: can't find crate for `std`\n  = note: the `wasm32-wasip2` target may not be installed";
        let error = explained("plugins/x".into(), output).to_string();
        assert!(error.ends_with("run `rustup target add wasm32-wasip2`"), "{error}");
    }

    #[test]
    fn environment_of_an_outer_build_and_keys_do_not_reach_the_plugin() {
        let others = [
            "CARGO",
            "CARGO_MANIFEST_DIR",
            "CARGO_PKG_NAME",
            "CARGO_TARGET_DIR",
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTFLAGS",
            "RUSTC_WRAPPER",
            "JUDGE_API_KEY",
            "LD_PRELOAD",
        ];
        assert!(!others.into_iter().any(is_kept));
        let kept = ["PATH", "CARGO_HOME", "CARGO_NET_OFFLINE", "RUSTUP_TOOLCHAIN", "https_proxy", "NO_PROXY"];
        assert!(kept.into_iter().all(is_kept));
    }

    #[test]
    fn dep_info_with_spaces_in_names_is_read() {
        let sources = listed_sources("/t/x.wasm: /a/b\\ c.rs /d.rs\n");
        assert_eq!(sources, [PathBuf::from("/a/b c.rs"), PathBuf::from("/d.rs")].into());
    }

    #[test]
    fn component_that_cargo_left_alone_is_fresh_after_the_build() {
        let folder = tempfile::tempdir().unwrap();
        let (path, output) = (folder.path().canonicalize().unwrap(), format!("target/{TARGET}/release"));
        std::fs::create_dir_all(path.join(&output)).unwrap();
        let manifest = path.join("Cargo.toml");
        std::fs::write(&manifest, "[package]\nname = 'x'\n[workspace]").unwrap();
        let put = |extension: &str, text: String| std::fs::write(path.join(&output).join(extension), text).unwrap();
        put("x.wasm", String::new());
        put("x.d", format!("x.wasm: {}\n", manifest.display()));
        let plugin = CrateFolder::read(&path).unwrap();
        let old = SystemTime::now() - std::time::Duration::from_secs(60);
        std::fs::File::options().append(true).open(plugin.component()).unwrap().set_modified(old).unwrap();
        assert!(!plugin.is_fresh());
        plugin.date_from(SystemTime::now()).unwrap();
        assert!(plugin.is_fresh());
    }

    #[test]
    fn component_of_a_copied_folder_is_not_fresh() {
        let folder = tempfile::tempdir().unwrap();
        let (original, copy) = (folder.path().join("original"), folder.path().join("copy"));
        for path in [&original, &copy] {
            let output = path.join(format!("target/{TARGET}/release"));
            std::fs::create_dir_all(&output).unwrap();
            let original = original.canonicalize().unwrap();
            std::fs::write(path.join("Cargo.toml"), "[package]\nname = 'x'\n[workspace]").unwrap();
            std::fs::write(output.join("x.d"), format!("x.wasm: {}\n", original.join("Cargo.toml").display())).unwrap();
            std::fs::write(output.join("x.wasm"), "").unwrap();
        }
        assert!(CrateFolder::read(&original).unwrap().is_fresh());
        assert!(!CrateFolder::read(&copy).unwrap().is_fresh());
    }

    #[test]
    fn excluded_package_is_its_own_workspace() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("examples/x");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(folder.path().join("Cargo.toml"), "[workspace]\nexclude = ['examples']").unwrap();
        let package = "[package]\nname = 'x'".parse().unwrap();
        assert_eq!(workspace_of(&inner, &package), inner);
        std::fs::write(folder.path().join("Cargo.toml"), "[workspace]\nmembers = ['examples/*']").unwrap();
        assert_eq!(workspace_of(&inner, &package), folder.path());
    }
}
