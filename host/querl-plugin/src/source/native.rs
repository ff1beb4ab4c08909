//! Native runs of a source folder, without WebAssembly and without its limits: an author's own code, for the author's loop.

use super::folder::{ScriptFolder, unreadable};
use super::rust::CrateFolder;
use super::{check_folder_name, language};
use crate::error::PluginError;
use querl_bundle::Language;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A plugin source folder run natively (cargo, python3, node) instead of as WebAssembly, for `querl plugin dev`.
#[derive(Debug)]
pub struct NativeFolder {
    /// The language of the source.
    pub language: Language,
    /// Absolute path of the folder.
    pub folder: PathBuf,
    code: Code,
}

#[derive(Debug)]
enum Code {
    Crate(CrateFolder),
    /// Python or JavaScript: the SDK that the source imports, and the interfaces of host functions that plugin.toml declares.
    Script {
        sdk: PathBuf,
        host_functions: String,
    },
}

impl NativeFolder {
    /// Reads a plugin's source folder.
    ///
    /// # Errors
    /// The folder is no source folder of a plugin.
    pub fn read(folder: &Path) -> Result<Self, PluginError> {
        check_folder_name(folder)?;
        let language = language(folder)?;
        let script = |vendored, shared| -> Result<Code, PluginError> {
            let script = ScriptFolder::read(folder, vendored, shared)?;
            let host_functions = script.host_functions().join(" ");
            Ok(Code::Script { sdk: script.sdk, host_functions })
        };
        let code = match language {
            Language::Rust => Code::Crate(CrateFolder::read(folder)?),
            Language::Python => script("vendor/querl_sdk", "sdk/python/querl_sdk")?,
            Language::JavaScript => script("vendor/querl-sdk", "sdk/javascript")?,
        };
        let folder = folder.canonicalize().map_err(|error| unreadable(folder, error.to_string()))?;
        Ok(Self { language, folder, code })
    }

    /// The command that compiles the author's tests; `None` for a language that needs no build.
    pub fn test_build(&self) -> Option<Command> {
        let Code::Crate(source) = &self.code else { return None };
        Some(source.native("test", &["--quiet", "--no-run"]))
    }

    /// The command that runs the author's tests; `None` if there are none. Python tests that still run shortly before `limit`
    /// write a traceback of the lines that run; after `limit` the caller kills them.
    pub fn tests(&self, limit: Duration) -> Option<Command> {
        match (&self.code, self.language) {
            (Code::Crate(source), _) => Some(source.native("test", &["--quiet"])),
            (Code::Script { .. }, Language::Python) => self.folder.join("tests").is_dir().then(|| {
                let mut command = self.command(self.python());
                let seconds = 0.9 * limit.as_secs_f64();
                // Equivalent to `python3 -m unittest --quiet`.
                command.arg("-c").arg(format!(
                    "import faulthandler, unittest; faulthandler.dump_traceback_later({seconds}); \
                     unittest.main(module=None, argv=['unittest', '--quiet'])"
                ));
                command
            }),
            (Code::Script { .. }, _) => {
                let files = std::fs::read_dir(self.folder.join("tests")).into_iter().flatten().flatten();
                let mut files: Vec<PathBuf> = files.map(|entry| entry.path()).collect();
                files.retain(|file| file.to_string_lossy().ends_with(".test.js"));
                files.sort();
                let mut command = self.command("node");
                command.args(["--test", "--test-reporter=tap"]).args(&files);
                (!files.is_empty()).then_some(command)
            }
        }
    }

    /// The command that builds the dynamic library at [`Self::library`]; `None` for a language that needs no build.
    pub fn library_build(&self) -> Option<Command> {
        let Code::Crate(source) = &self.code else { return None };
        Some(source.native("build", &["--lib", "--message-format", "short"]))
    }

    /// Path of the dynamic library of a crate, whose function `querl_dev_replay` scores recorded episodes (`dev.rs` of the SDK);
    /// `None` for other languages.
    pub fn library(&self) -> Option<PathBuf> {
        let Code::Crate(source) = &self.code else { return None };
        Some(source.native_library())
    }

    /// The command that scores the recorded `episodes` with the runner of the SDK and writes to `results`; `None` for a crate.
    pub fn replay(&self, episodes: &Path, settings: &str, results: &Path) -> Option<Command> {
        let Code::Script { sdk, host_functions } = &self.code else { return None };
        let mut command = match self.language {
            Language::Python => {
                let mut command = self.command(self.python());
                command.env("PYTHONPATH", sdk.parent().unwrap_or(sdk)).args(["-m", "querl_sdk.dev"]);
                command
            }
            _ => {
                let mut command = self.command("node");
                command.arg(sdk.join("dev.js"));
                command
            }
        };
        command.env("QUERL_HOST_FUNCTIONS", host_functions);
        command.arg(&self.folder).arg(episodes).arg(settings).arg(results);
        Some(command)
    }

    /// Path of the Python interpreter: of the virtual environment in the folder or a folder above it, else the one on `PATH`.
    pub fn python(&self) -> PathBuf {
        let program = if cfg!(windows) { ".venv/Scripts/python.exe" } else { ".venv/bin/python3" };
        let found = self.folder.ancestors().map(|folder| folder.join(program)).find(|path| path.is_file());
        found.unwrap_or_else(|| "python3".into())
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.folder).stdin(Stdio::null());
        command
    }
}
