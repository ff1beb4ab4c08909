//! Folders with a plugin in Python: componentize-py puts CPython, the SDK and the author's modules into one component.
//!
//! WASI is not stubbed (`--stub-wasi`): the host's WASI has no capabilities anyway, and a traceback on stderr becomes the text of the
//! fault. Builds are not reproducible byte for byte, since componentize-py 0.25 snapshots an interpreter with a random hash seed
//! and has no option to fix it: pack the component that was tested.

use super::folder::Build;
use super::folder::{ScriptFolder, WORLD};
use crate::error::PluginError;
use querl_bundle::Kind;
use std::ffi::OsStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that the SDK is tested with.
const TOOL: &str = "componentize-py==0.25.1";

/// The module that componentize-py starts from. Its name must not be that of a world.
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

    /// Binds the author's classes to the interfaces, by the names that componentize-py looks for.
    fn entry(&self) -> String {
        let plugin = &self.script.manifest.plugin;
        let mut text = String::from("import plugin\nfrom querl_sdk._guest.start import start\n");
        for kind in &plugin.kinds {
            let (module, class) = interface(*kind);
            writeln!(text, "from querl_sdk._guest.{module} import {class}").expect("writing to a String succeeds");
        }
        let kinds: Vec<_> = plugin.kinds.iter().map(|kind| format!("{:?}", kind.name())).collect();
        let (id, version) = (&plugin.id, plugin.version.to_string());
        writeln!(text, "Info = start({id:?}, {version:?}, [{}])", kinds.join(", ")).expect("as above");
        text
    }

    /// componentize-py of the virtual environment of the folder or of one above it, else of the active one, else on `PATH`.
    fn tool(&self) -> Command {
        let active = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
        let own = self.script.folder.ancestors().map(|folder| folder.join(".venv"));
        let Some(environment) = own.chain(active).find(|environment| environment.join(PROGRAM).is_file()) else {
            return self.script.command("componentize-py");
        };
        let mut command = self.script.command(environment.join(PROGRAM));
        // Packages of the tool's own environment may become part of the component; others may not.
        command.env("VIRTUAL_ENV", environment);
        command
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
        let failed = |error: std::io::Error| self.script.refused(format!("its build cannot be prepared: {error}"));
        let scratch = tempfile::Builder::new().prefix("querl-build-").tempdir().map_err(failed)?;
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
            self.script.run("componentize-py", command, &self.missing())
        })
    }
}

/// The SDK's module for a kind, and the class in it.
fn interface(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Prompt => ("prompts", "Prompts"),
        Kind::Filter => ("filters", "Filters"),
        Kind::Reward => ("rewards", "Rewards"),
        Kind::StyleScorer => ("style_scores", "StyleScores"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
    fn folder_without_plugin_py_is_explained() {
        let folder = folder_with("vendor/querl_sdk", &[]);
        let error = PythonFolder::read(folder.path()).map(drop).unwrap_err().to_string();
        assert!(error.ends_with("the folder holds no plugin.py, the module that exports the plugin"), "{error}");
    }

    #[test]
    fn missing_tool_is_one_sentence_with_the_command() {
        let folder = folder_with("vendor/querl_sdk", &["plugin.py"]);
        let missing = PythonFolder::read(folder.path()).unwrap().missing();
        assert!(
            missing.contains("`python3 -m venv .venv && .venv/bin/pip install componentize-py==0.25.1`"),
            "{missing}"
        );
    }
}
