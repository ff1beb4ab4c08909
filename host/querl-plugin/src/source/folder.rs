//! Source folders: what all languages share, and what Python and JavaScript share.

use crate::children::{self, Scratch};
use crate::error::PluginError;
use querl_bundle::{HostInterface, Kind, Manifest, PluginSection};
use querl_core::fsx::io_problem;
use std::ffi::OsStr;
use std::fmt::Write;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// A source folder of one language.
pub(super) trait Build {
    fn component(&self) -> PathBuf;
    fn is_fresh(&self) -> bool;
    fn build(&self) -> Result<(), PluginError>;
}

pub(super) fn unreadable(path: &Path, reason: impl Into<String>) -> PluginError {
    PluginError::Unreadable { path: path.to_owned(), reason: reason.into() }
}

/// Name of the WIT world that plugins in Python and JavaScript are built for.
pub(super) const WORLD: &str = "querl-plugin";

/// Names of folders that contain no sources of the component.
const NOT_SOURCE: [&str; 7] = ["dist", "golden", "node_modules", "target", "tests", "venv", "__pycache__"];

/// Environment variables that a build inherits: search paths and temporary folders, which cannot change the component.
const KEPT_VARIABLES: [&str; 7] = ["PATH", "HOME", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LANG"];

/// A folder with a plugin in Python or JavaScript, whose interpreter becomes part of the component.
pub(super) struct ScriptFolder {
    pub(super) folder: PathBuf,
    pub(super) manifest: Manifest,
    /// Path of the SDK that the source imports.
    pub(super) sdk: PathBuf,
    pub(super) wit: PathBuf,
}

impl ScriptFolder {
    /// Reads a plugin's folder. `vendored_sdk` is the path of the SDK in this folder; `shared_sdk` its path in a folder above, as
    /// in the repository of querl.
    pub(super) fn read(folder: &Path, vendored_sdk: &str, shared_sdk: &str) -> Result<Self, PluginError> {
        if !folder.join("plugin.toml").is_file() {
            return Err(unreadable(
                folder,
                "the folder holds no plugin.toml; `querl plugin new NAME --kind reward --lang python` makes one",
            ));
        }
        let absolute = folder.canonicalize().map_err(|error| unreadable(folder, error.to_string()))?;
        let find = |vendored: &str, shared: &str| {
            let own = Some(absolute.join(vendored)).filter(|path| path.is_dir());
            let above = || absolute.ancestors().skip(1).map(|above| above.join(shared)).find(|path| path.is_dir());
            own.or_else(above).ok_or_else(|| {
                unreadable(
                    folder,
                    format!("it has no `{vendored}`, which `querl plugin new` puts into every plugin's folder"),
                )
            })
        };
        let manifest = Manifest::read(folder)?;
        Ok(Self {
            sdk: find(vendored_sdk, shared_sdk)?,
            wit: find("vendor/wit", &format!("wit/{}", manifest.plugin.contract))?,
            manifest,
            folder: absolute,
        })
    }

    pub(super) fn component(&self) -> PathBuf {
        self.dist().join(format!("{}.wasm", self.manifest.plugin.id))
    }

    /// True for a folder of contract 0.1, with an SDK of that version.
    pub(super) fn is_of_0_1(&self) -> bool {
        let contract = &self.manifest.plugin.contract;
        (contract.major, contract.minor) == (0, 1)
    }

    /// True if the SDK implements `json-rewards`, which takes a batch as JSON.
    pub(super) fn has_json_rewards(&self) -> bool {
        let is_reward = |kind: &Kind| matches!(kind, Kind::Reward | Kind::GroupReward);
        !self.is_of_0_1() && self.manifest.plugin.kinds.iter().any(is_reward)
    }

    /// Names of the plugin's kinds, as in `plugin.toml`.
    pub(super) fn kinds(&self) -> Vec<&'static str> {
        self.manifest.plugin.kinds.iter().map(|kind| kind.name()).collect()
    }

    /// The interfaces of host functions that the component imports; a style scorer always imports the style model.
    pub(super) fn host_functions(&self) -> Vec<&'static str> {
        let plugin = &self.manifest.plugin;
        let is_imported = |interface: &HostInterface| {
            let of_kind = *interface == HostInterface::StyleModel && plugin.kinds.contains(&Kind::StyleScorer);
            of_kind || plugin.host_functions.contains(interface)
        };
        HostInterface::ALL.into_iter().filter(is_imported).map(HostInterface::name).collect()
    }

    /// Help texts of settings by key, for `info.describe`.
    pub(super) fn setting_docs(&self) -> serde_json::Value {
        let documented = self.manifest.settings.iter().filter(|(_, spec)| !spec.doc.is_empty());
        documented.map(|(key, spec)| (key.clone(), spec.doc.clone().into())).collect::<serde_json::Map<_, _>>().into()
    }

    /// Writes the WIT files of the contract and the world [`WORLD`], with all kinds and host functions of the plugin: the tools
    /// take a single world (componentize-py 0.25 panics with two).
    pub(super) fn write_wit(&self, folder: &Path) -> Result<(), PluginError> {
        let written = (|| {
            std::fs::create_dir_all(folder)?;
            for entry in std::fs::read_dir(&self.wit)? {
                let entry = entry?;
                std::fs::copy(entry.path(), folder.join(entry.file_name()))?;
            }
            std::fs::write(folder.join("querl-plugin.wit"), self.world())
        })();
        written.map_err(|error: std::io::Error| {
            self.refused(format!("its build cannot be prepared: {}", io_problem(&error)))
        })
    }

    fn world(&self) -> String {
        let PluginSection { contract, kinds, host_functions, .. } = &self.manifest.plugin;
        let mut world = format!("package querl:plugin@{contract};\nworld {WORLD} {{");
        let mut line = |word: &str, name: &str| write!(world, " {word} {name};").expect("writing to a String succeeds");
        kinds.iter().for_each(|kind| line("include", kind.name()));
        let is_in_world =
            |interface: &HostInterface| *interface == HostInterface::StyleModel && kinds.contains(&Kind::StyleScorer);
        let imported = host_functions.iter().filter(|interface| !is_in_world(interface));
        imported.for_each(|interface| line("import", interface.name()));
        if self.has_json_rewards() {
            line("export", "json-rewards");
        }
        world + " }\n"
    }

    pub(super) fn is_fresh(&self) -> bool {
        let Some(built) = modified(&self.component()) else { return false };
        [&self.folder, &self.sdk, &self.wit].into_iter().all(|folder| !has_newer(folder, built))
    }

    pub(super) fn refused(&self, reason: impl Into<String>) -> PluginError {
        unreadable(&self.folder, reason)
    }

    fn dist(&self) -> PathBuf {
        self.folder.join("dist")
    }

    /// Runs `make`, which writes a component to the given path, and moves it into place atomically. Its modification time is the
    /// start of the build, when the sources were read.
    pub(super) fn put_component(&self, make: impl FnOnce(&Path) -> Result<(), PluginError>) -> Result<(), PluginError> {
        let started = SystemTime::now();
        let failed =
            |error: std::io::Error| self.refused(format!("its component cannot be written: {}", io_problem(&error)));
        std::fs::create_dir_all(self.dist()).map_err(failed)?;
        let scratch = tempfile::Builder::new().prefix(".building-").tempdir_in(self.dist()).map_err(failed)?;
        let scratch = Scratch::new(scratch);
        let made = scratch.path().join("component.wasm");
        make(&made)?;
        std::fs::File::options()
            .append(true)
            .open(&made)
            .and_then(|file| file.set_modified(started))
            .map_err(failed)?;
        std::fs::rename(&made, self.component()).map_err(failed)
    }

    /// A command that runs in the plugin's folder with only the environment variables that a build may see.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let kept = std::env::vars_os().filter(|(name, _)| KEPT_VARIABLES.iter().any(|kept| OsStr::new(kept) == name));
        let mut command = Command::new(program);
        command.current_dir(&self.folder).env_clear().envs(kept).stdin(Stdio::null());
        command
    }

    /// Runs a build tool. If it fails, `advice` makes the rest of the error message from its output.
    pub(super) fn run(
        &self,
        tool: &'static str,
        mut command: Command,
        missing: &str,
        advice: impl FnOnce(&str) -> String,
    ) -> Result<(), PluginError> {
        let run = children::child_output_within(&mut command, BUILD_LIMIT, || 0);
        let (output, is_killed) = run.map_err(|error| match error.kind() {
            ErrorKind::NotFound => self.refused(missing),
            _ => self.refused(format!("{tool} cannot be run: {error}")),
        })?;
        if is_killed {
            let limit = BUILD_LIMIT.as_secs();
            return Err(self.refused(format!(
                "{tool} still ran after {limit} s; look for a loop in what the plugin runs while it is loaded: `querl plugin dev` names its line"
            )));
        }
        if output.status.success() {
            return Ok(());
        }
        let result =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()).join("\n");
        let output = result.trim().to_owned();
        Err(PluginError::Build { path: self.folder.clone(), tool, advice: advice(&output), output })
    }
}

/// Time limit of one build tool: many times its usual duration.
const BUILD_LIMIT: Duration = Duration::from_secs(600);

/// True if a file of the folder is newer; ignores hidden folders and those of `NOT_SOURCE`.
fn has_newer(folder: &Path, than: SystemTime) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    entries.flatten().any(|entry| {
        let (name, path) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        if path.is_dir() {
            return !name.starts_with('.') && !NOT_SOURCE.contains(&&*name) && has_newer(&path, than);
        }
        !name.ends_with(".md") && modified(&path).is_some_and(|time| time > than)
    })
}

pub(super) fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).ok()?.modified().ok()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MANIFEST: &str = "[plugin]\nid = 'short'\nversion = '0.1.0'\ncontract = '0.1.0'\nkinds = ['filter']\n\
                            description = 'x'\nlicense = 'MIT'\n";

    /// A temporary plugin folder with an SDK of one file, for tests.
    pub(crate) fn folder_with(sdk: &str, files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("plugin.toml", MANIFEST);
        put("vendor/wit/worlds.wit", "");
        put(&format!("{sdk}/source"), "");
        files.iter().for_each(|file| put(file, ""));
        folder
    }

    fn put(file: &Path, text: &str) -> Result<(), PluginError> {
        std::fs::write(file, text).unwrap();
        Ok(())
    }

    fn touch(path: &Path, seconds: u64) {
        let time = SystemTime::now() + Duration::from_secs(seconds);
        std::fs::File::options().append(true).open(path).unwrap().set_modified(time).unwrap();
    }

    #[test]
    fn component_is_stale_when_source_sdk_or_manifest_is_newer_and_not_for_tests_or_readme() {
        let files = ["plugin.py", "tests/test_plugin.py", "README.md", ".venv/lib/x.py", "lib/rules.py"];
        let folder = folder_with("vendor/querl_sdk", &files);
        let plugin = ScriptFolder::read(folder.path(), "vendor/querl_sdk", "sdk/python/querl_sdk").unwrap();
        assert!(!plugin.is_fresh(), "nothing is built");
        plugin.put_component(|file| put(file, "x")).unwrap();
        touch(&plugin.component(), 10);
        for (file, seconds) in ["tests/test_plugin.py", "README.md", ".venv/lib/x.py"].into_iter().zip(20..) {
            touch(&folder.path().join(file), seconds);
            assert!(plugin.is_fresh(), "{file}");
        }
        for (file, seconds) in ["lib/rules.py", "plugin.toml", "vendor/querl_sdk/source"].into_iter().zip(30..) {
            touch(&folder.path().join(file), seconds * 10);
            assert!(!plugin.is_fresh(), "{file}");
            touch(&plugin.component(), seconds * 10 + 1);
        }
    }

    #[test]
    fn world_of_0_2_has_the_declared_host_functions_and_json() {
        let folder = folder_with("vendor/querl_sdk", &[]);
        let world = |kinds: &str| {
            let manifest = MANIFEST.replace("0.1.0'\nkinds", "0.2.0'\nkinds").replace("['filter']", kinds);
            std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
            ScriptFolder::read(folder.path(), "vendor/querl_sdk", "none").unwrap().world()
        };
        let expected = "package querl:plugin@0.2.0;\nworld querl-plugin { include group-reward; import tokens; import words; export json-rewards; }\n";
        assert_eq!(world("['group-reward']\nrange = [0, 1]\nhost_functions = ['words', 'tokens']"), expected);
        assert!(world("['style-scorer']\nhost_functions = ['style-model']").ends_with("{ include style-scorer; }\n"));
    }

    #[test]
    fn world_includes_every_kind() {
        let folder = folder_with("vendor/querl_sdk", &[]);
        let manifest =
            MANIFEST.replace("['filter']", "['reward', 'filter']").replace("license", "range = [0, 1]\nlicense");
        std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
        let plugin = ScriptFolder::read(folder.path(), "vendor/querl_sdk", "none").unwrap();
        let wit = folder.path().join("dist/wit");
        plugin.write_wit(&wit).unwrap();
        let world = std::fs::read_to_string(wit.join("querl-plugin.wit")).unwrap();
        assert!(world.contains("world querl-plugin { include filter; include reward; }"), "{world}");
        assert!(wit.join("worlds.wit").is_file());
    }

    #[test]
    fn failed_build_leaves_the_component_that_was_there() {
        let folder = folder_with("vendor/querl_sdk", &[]);
        let plugin = ScriptFolder::read(folder.path(), "vendor/querl_sdk", "none").unwrap();
        plugin.put_component(|file| put(file, "old")).unwrap();
        plugin.put_component(|_| Err(plugin.refused("no"))).unwrap_err();
        assert_eq!(std::fs::read_to_string(plugin.component()).unwrap(), "old");
        assert_eq!(std::fs::read_dir(folder.path().join("dist")).unwrap().count(), 1);
    }

    #[test]
    fn folder_without_manifest_or_sdk_is_explained() {
        let folder = tempfile::tempdir().unwrap();
        let read =
            || ScriptFolder::read(folder.path(), "vendor/querl_sdk", "no-such").map(drop).unwrap_err().to_string();
        assert!(read().contains("the folder holds no plugin.toml; `querl plugin new NAME "));
        std::fs::write(folder.path().join("plugin.toml"), MANIFEST).unwrap();
        assert!(read().contains("it has no `vendor/querl_sdk`"), "{}", read());
    }
}
