//! Folders with a plugin in Python: componentize-py puts CPython, the SDK and the author's modules into one component.
//!
//! WASI is not stubbed (`--stub-wasi`): the host's WASI has no capabilities anyway, and a traceback on stderr becomes the text of the
//! fault. Builds are not reproducible byte for byte, since componentize-py 0.25 snapshots an interpreter with a random hash seed
//! and has no option to fix it: pack the component that was tested.

use super::folder::Build;
use super::folder::{ScriptFolder, WORLD};
use crate::children::Scratch;
use crate::error::PluginError;
use querl_bundle::{ArchiveLimits, Kind};
use querl_core::fsx::io_problem;
use std::ffi::OsStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version of componentize-py that the SDK is tested with, as a requirement of pip.
pub const TOOL: &str = "componentize-py==0.25.1";

/// The entry module for componentize-py. Its name must differ from the name of the world.
const ENTRY: &str = "querl_component";

#[cfg(windows)]
const PROGRAM: &str = "Scripts/componentize-py.exe";
#[cfg(not(windows))]
const PROGRAM: &str = "bin/componentize-py";

/// A folder with plugin.toml and plugin.py.
pub(super) struct PythonFolder {
    script: ScriptFolder,
}

impl PythonFolder {
    pub(super) fn read(folder: &Path) -> Result<Self, PluginError> {
        let script = ScriptFolder::read(folder, "vendor/querl_sdk", "sdk/python/querl_sdk")?;
        if !script.folder.join("plugin.py").is_file() {
            return Err(script.refused("the folder holds no plugin.py, the module that exports the plugin"));
        }
        Ok(Self { script })
    }

    /// The entry module, which binds the plugin's classes to the interfaces under the names that componentize-py expects.
    fn entry(&self) -> String {
        let plugin = &self.script.manifest.plugin;
        let mut text = String::from("import plugin\nfrom querl_sdk._guest.start import start\n");
        let json = self.script.has_json_rewards().then_some(("rewards", "JsonRewards"));
        for (module, class) in plugin.kinds.iter().map(|kind| interface(*kind)).chain(json) {
            writeln!(text, "from querl_sdk._guest.{module} import {class}").expect("writing to a String succeeds");
        }
        let (id, version, kinds) = (&plugin.id, plugin.version.to_string(), self.script.kinds());
        let more = match self.script.is_of_0_1() {
            true => String::new(),
            false => format!(", {:?}, {}", self.script.host_functions(), self.script.setting_docs()),
        };
        writeln!(text, "Info = start({id:?}, {version:?}, {kinds:?}{more})").expect("as above");
        text
    }

    /// The virtual environment with componentize-py: in the folder or a parent folder, else the active one.
    fn environment(&self) -> Option<PathBuf> {
        let active = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
        let own = self.script.folder.ancestors().map(|folder| folder.join(".venv"));
        own.chain(active).find(|environment| environment.join(PROGRAM).is_file())
    }

    /// The componentize-py of the virtual environment in the folder or a parent folder, else of the active one, else on `PATH`.
    fn tool(&self) -> Command {
        let Some(environment) = self.environment() else {
            return self.script.command("componentize-py");
        };
        let mut command = self.script.command(environment.join(PROGRAM));
        // Packages of the tool's own environment may become part of the component; others may not.
        command.env("VIRTUAL_ENV", environment);
        command
    }

    /// Refuses a component that is too large for bundles and hosts because of the packages in the environment.
    fn check_size(&self, component: &Path) -> Result<(), PluginError> {
        let (n_bytes, limit) = (folder_bytes(component), ArchiveLimits::DEFAULT.component_bytes);
        if n_bytes <= limit {
            return Ok(());
        }
        let packages = match self.environment().map(|environment| environment.join("lib")) {
            Some(library) => largest_packages(&library),
            None => Vec::new(),
        };
        Err(self.script.refused(too_large(n_bytes, limit, &packages)))
    }

    fn missing(&self) -> String {
        let program = if cfg!(windows) { ".venv\\Scripts\\pip" } else { ".venv/bin/pip" };
        format!(
            "building it needs componentize-py; run `python3 -m venv .venv && {program} install {TOOL}` in its folder"
        )
    }
}

impl Build for PythonFolder {
    fn component(&self) -> PathBuf {
        self.script.component()
    }

    fn is_fresh(&self) -> bool {
        self.script.is_fresh()
    }

    fn build(&self) -> Result<(), PluginError> {
        let failed = |error: std::io::Error| {
            self.script.refused(format!("its build cannot be prepared: {}", io_problem(&error)))
        };
        let scratch = tempfile::Builder::new().prefix("querl-build-").tempdir().map(Scratch::new).map_err(failed)?;
        std::fs::write(scratch.path().join(format!("{ENTRY}.py")), self.entry()).map_err(failed)?;
        let wit = scratch.path().join("wit");
        self.script.write_wit(&wit)?;
        let mut command = self.tool();
        command.arg("--quiet").arg("--wit-path").arg(wit).args(["--world", WORLD, "componentize", ENTRY]);
        let sdk = self.script.sdk.parent().unwrap_or(&self.script.sdk);
        let modules = [&self.script.folder, sdk, scratch.path()];
        command.args(modules.into_iter().flat_map(|path| [OsStr::new("--python-path"), path.as_os_str()]));
        self.script.put_component(|file| {
            command.arg("--output").arg(file);
            self.script.run("componentize-py", command, &self.missing(), advice)?;
            self.check_size(file)
        })
    }
}

/// The SDK's module for a kind, and the class in it.
fn interface(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Prompt => ("prompts", "Prompts"),
        Kind::Filter => ("filters", "Filters"),
        Kind::Reward => ("rewards", "Rewards"),
        Kind::GroupReward => ("rewards", "GroupRewards"),
        Kind::StyleScorer => ("style_scores", "StyleScores"),
    }
}

/// A remedy for a failed build, if a package cannot be imported in a component.
fn advice(output: &str) -> String {
    // The modules of the plugin, the SDK and the entry are in /0, /1 and /2; packages follow.
    let module = |line: &str| {
        let (number, path) = line.trim_start().strip_prefix("File \"/")?.split_once('/')?;
        number.parse::<u32>().ok().filter(|number| *number > 2)?;
        let name = path.split(['/', '"']).next()?;
        Some(name.strip_suffix(".py").unwrap_or(name).to_owned())
    };
    let packages: Vec<String> = output.lines().filter_map(module).collect();
    let Some(package) = packages.first() else { return String::new() };
    if packages.iter().any(|package| package == "pkg_resources") {
        return " since the package `pkg_resources`, a part of setuptools, does not run in a component; \
                `pip uninstall setuptools` in its virtual environment removes it"
            .to_owned();
    }
    let is_compiled = [".so", "C-extension", "C extension"].iter().any(|sign| output.contains(sign));
    let problem = match is_compiled {
        true => "has code that is compiled for this machine, which a component cannot load",
        false => "needs files, a folder for temporary files or another package, which a component does not have",
    };
    let remedy = match package.as_str() {
        JIEBA => WORDS,
        _ => "use pure Python without it (its data as a module next to plugin.py), or write the plugin in Rust",
    };
    format!(" since the package `{package}` {problem}; {remedy}")
}

/// The package that a host function replaces.
const JIEBA: &str = "jieba";
const WORDS: &str = "use the host function `words`, which is jieba and adds no size: `host_functions = [\"words\"]` in plugin.toml, \
                     `querl_sdk.host.words(text)` in plugin.py";

/// The reason why a component is refused and the remedy, as the rest of a sentence; the largest packages come first.
fn too_large(n_bytes: u64, limit: u64, packages: &[(String, u64)]) -> String {
    let megabytes = |n_bytes: u64| format!("{:.0} MB", n_bytes as f64 / 1e6);
    let mut text = format!(
        "its component has {}; at most {} can be loaded: every package of its virtual environment becomes part of it",
        megabytes(n_bytes),
        megabytes(limit)
    );
    if !packages.is_empty() {
        let listed: Vec<_> = packages.iter().map(|(name, n)| format!("`{name}` ({})", megabytes(*n))).collect();
        write!(text, ", the largest are {}", listed.join(", ")).expect("writing to a String succeeds");
    }
    text += "; uninstall what it does not use, or copy the few modules and the data that it needs next to plugin.py";
    if packages.iter().any(|(name, _)| name == JIEBA) {
        write!(text, "; in place of jieba, {WORDS}").expect("as above");
    }
    text
}

/// Bytes of a file, or of all files below a folder.
fn folder_bytes(path: &Path) -> u64 {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| folder_bytes(&entry.path())).sum()
        }
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    }
}

/// The three largest packages of an environment's `lib`, without tools that are not part of a component.
fn largest_packages(library: &Path) -> Vec<(String, u64)> {
    let folders = |path: &Path| {
        std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let packages = folders(library).into_iter().flat_map(|python| folders(&python.join("site-packages")));
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut sizes: Vec<(String, u64)> = packages.map(|path| (name(&path), folder_bytes(&path))).collect();
    sizes.retain(|(name, _)| !name.starts_with("componentize_py"));
    sizes.sort_by_key(|(_, n_bytes)| std::cmp::Reverse(*n_bytes));
    sizes.truncate(3);
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::folder::tests::folder_with;

    #[test]
    fn entry_binds_the_kinds_of_the_manifest_under_its_name_and_version() {
        let folder = folder_with("vendor/querl_sdk", &["plugin.py"]);
        let entry = PythonFolder::read(folder.path()).unwrap().entry();
        let expected = "import plugin\nfrom querl_sdk._guest.start import start\nfrom querl_sdk._guest.filters import Filters\n\
                        Info = start(\"short\", \"0.1.0\", [\"filter\"])\n";
        assert_eq!(entry, expected);
    }

    #[test]
    fn entry_of_0_2_has_json_host_functions_and_documentation() {
        let folder = folder_with("vendor/querl_sdk", &["plugin.py"]);
        let manifest = "[plugin]\nid = 'short'\nversion = '0.1.0'\ncontract = '0.2.0'\nkinds = ['reward']\ndescription = 'x'\n\
                        license = 'MIT'\nrange = [0, 1]\nhost_functions = ['words']\n[settings.n]\ntype = 'number'\ndoc = 'How \"long\".'\n";
        std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
        let entry = PythonFolder::read(folder.path()).unwrap().entry();
        let expected = "import plugin\nfrom querl_sdk._guest.start import start\nfrom querl_sdk._guest.rewards import Rewards\n\
                        from querl_sdk._guest.rewards import JsonRewards\n\
                        Info = start(\"short\", \"0.1.0\", [\"reward\"], [\"words\"], {\"n\":\"How \\\"long\\\".\"})\n";
        assert_eq!(entry, expected);
    }

    #[test]
    fn folder_without_plugin_py_is_explained() {
        let folder = folder_with("vendor/querl_sdk", &[]);
        let error = PythonFolder::read(folder.path()).map(drop).unwrap_err().to_string();
        assert!(error.ends_with("the folder holds no plugin.py, the module that exports the plugin"), "{error}");
    }

    #[test]
    fn package_that_cannot_be_imported_is_named_with_what_to_do() {
        let traceback = "Traceback (most recent call last):\n  File \"/2/querl_component.py\", line 1, in <module>\n    import plugin\n  \
                         File \"/0/plugin.py\", line 3, in <module>\n    import jieba\n  File \"/3/jieba/__init__.py\", line 14, in <module>\n\
                         FileNotFoundError: [Errno 44] No usable temporary directory found";
        let said = advice(traceback);
        assert!(said.starts_with(" since the package `jieba` needs files"), "{said}");
        let said = advice(&traceback.replace("jieba", "numpy").replace("No usable", "_multiarray_umath.so"));
        assert!(said.starts_with(" since the package `numpy` has code that is compiled for this machine"), "{said}");
        assert!(said.ends_with(
            "; use pure Python without it (its data as a module next to plugin.py), or write the plugin in Rust"
        ));
        let own = "  File \"/0/plugin.py\", line 3, in <module>\nNameError: name 'x' is not defined";
        assert_eq!(advice(own), "");
    }

    /// Symptom: a plugin that imports jieba did not build in an environment with setuptools, and the message blamed jieba.
    #[test]
    fn a_build_with_jieba_names_the_host_function_and_setuptools() {
        let of_jieba = "  File \"/0/plugin.py\", line 5, in <module>\n    import jieba\n  File \"/3/jieba/__init__.py\", line 14, in <module>\n";
        assert!(advice(of_jieba).contains("; use the host function `words`, which is jieba"), "{}", advice(of_jieba));
        let of_setuptools =
            format!("{of_jieba}  File \"/3/pkg_resources/__init__.py\", line 2191, in <module>\nAttributeError: x");
        let said = advice(&of_setuptools);
        assert!(said.starts_with(" since the package `pkg_resources`, a part of setuptools, does not run"), "{said}");
        assert!(said.contains("`pip uninstall setuptools`"), "{said}");
        let packages = [("jieba", 42_000_000), ("pip", 17_000_000)].map(|(name, n)| (name.to_owned(), n));
        let said = too_large(78_480_205, 67_108_864, &packages);
        let expected = "its component has 78 MB; at most 67 MB can be loaded: every package of its virtual environment becomes part of it, \
                        the largest are `jieba` (42 MB), `pip` (17 MB); uninstall what it does not use, or copy the few modules and the \
                        data that it needs next to plugin.py; in place of jieba, use the host function `words`, ";
        assert!(said.starts_with(expected), "{said}");
        assert!(!too_large(78_480_205, 67_108_864, &[]).contains("the largest"));
    }

    #[test]
    fn packages_that_make_a_component_too_large_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let packages = folder.path().join("python3.12/site-packages");
        for (name, n_bytes) in
            [("small", 10), ("large", 3000), ("componentize_py-1.dist-info", 9000), ("middle", 200), ("larger", 4000)]
        {
            std::fs::create_dir_all(packages.join(name)).unwrap();
            std::fs::write(packages.join(name).join("x.py"), vec![b' '; n_bytes]).unwrap();
        }
        let expected = [("larger", 4000), ("large", 3000), ("middle", 200)].map(|(name, n)| (name.to_owned(), n));
        assert_eq!(largest_packages(folder.path()), expected);
    }

    #[test]
    fn missing_tool_is_one_sentence_with_the_command() {
        let folder = folder_with("vendor/querl_sdk", &["plugin.py"]);
        let missing = PythonFolder::read(folder.path()).unwrap().missing();
        let expected = "`python3 -m venv .venv && .venv/bin/pip install componentize-py==0.25.1`";
        assert!(missing.contains(expected), "{missing}");
    }
}
