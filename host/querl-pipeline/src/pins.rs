//! `querl.lock`: the pinned plugins of a run or of a configuration, and the handling of changed plugins.
//!
//! A run folder pins every plugin, since its results depend on them. The file next to the configuration pins only bundles: they are
//! released and must not change unnoticed, while authors change source folders and bare components all the time.

use crate::failure::Stop;
use crate::ledger::Ledger;
use crate::plugins::{FoundPlugin, Used, lock_source};
use anyhow::Context;
use chrono::{SecondsFormat, Utc};
use querl_bundle::Manifest;
use querl_bundle::lock::{self, LockChange, LockEntry, LockFile, LockSource};
use querl_core::config::is_registry_reference;
use querl_core::fsx::write_atomic;
use querl_core::ports::Reporter;
use querl_core::run_dir::RunDir;
use std::path::{Path, PathBuf};

/// Handling of a plugin that differs from its pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnPluginChange {
    /// Stop before anything is built or written.
    Refuse,
    /// Like `Refuse`; also stop if the lock file next to the configuration is missing or would change.
    RefuseUnlocked,
    /// Continue, and record the change in the lock files.
    Accept,
}

/// The lock files of a run folder and of a configuration.
pub struct Pins<'a> {
    /// The run folder.
    pub dir: &'a RunDir,
    /// Path of the configuration.
    pub config: &'a Path,
    /// Handling of a plugin that differs from its pin.
    pub on_change: OnPluginChange,
}

impl Pins<'_> {
    /// Compares plugins that were read with the lock files, before any of them is built or opened.
    ///
    /// # Errors
    /// A plugin differs, or is a folder that must be built before it can be compared; a lock file is missing or unusable.
    pub(crate) fn check(&self, found: &[FoundPlugin<'_>]) -> anyhow::Result<()> {
        if self.on_change == OnPluginChange::Accept {
            return Ok(());
        }
        let must_be_locked = self.on_change == OnPluginChange::RefuseUnlocked;
        let of_run = self.dir.lock();
        if !Ledger::open(&self.dir.stages())?.is_empty() {
            match read(&of_run)? {
                Some(lock) => check_found(&of_run, &lock, found.iter(), Path::to_owned)?,
                None if must_be_locked => {
                    return Err(missing(&of_run, "accept the plugins as they are now by running without `--locked`"));
                }
                None => {}
            }
        }
        let Some(path) = self.project_lock() else { return Ok(()) };
        let folder = path.parent().unwrap_or(Path::new(""));
        let bundles = || found.iter().filter(|found| found.is_bundle());
        match read(&path)? {
            Some(lock) => {
                check_found(&path, &lock, bundles(), |path| relative(path, folder))?;
                let entries =
                    bundles().map(|found| Some(found.entry(&lock)?.at(relative(found.path, folder)))).collect();
                if must_be_locked && Some(lock.entries) != entries {
                    let message = format!(
                        "{}: would change: a path, the order or a signer of a bundle is not as it is pinned; run without `--locked` \
                         to write it, and keep it in version control",
                        path.display()
                    );
                    return Err(Stop::usage(message).into());
                }
                Ok(())
            }
            None if !must_be_locked => Ok(()),
            None if bundles().next().is_none() => Err(missing(
                &path,
                "it pins bundles, and no plugin of the configuration is one: pack them with `querl plugin pack`, or leave out `--locked`",
            )),
            None => Err(missing(&path, "write it by running without `--locked`, and keep it in version control")),
        }
    }

    /// Writes the pins of the plugins in use, in the run folder and next to the configuration.
    pub(crate) fn write(&self, used: &[Used], reporter: &dyn Reporter) -> anyhow::Result<()> {
        let of_run = self.of_run(used, reporter)?;
        let of_project = self.of_project(used, reporter)?;
        let locks = [(lock::LockKind::Run, Some(of_run)), (lock::LockKind::Project, of_project)];
        for (project, (path, lock)) in locks.into_iter().filter_map(|(project, lock)| Some((project, lock?))) {
            write_atomic(&path, lock.to_text(project).as_bytes())
                .with_context(|| format!("{}: cannot be written", path.display()))?;
        }
        Ok(())
    }

    fn of_run(&self, used: &[Used], reporter: &dyn Reporter) -> anyhow::Result<(PathBuf, LockFile)> {
        let found = used.iter().map(|used| used.entry.clone()).collect();
        // No result depends on a plugin before the first stage has run.
        let lock = match Ledger::open(&self.dir.stages())?.is_empty() {
            true => LockFile { entries: found, changes: Vec::new() },
            false => settled(&self.dir.lock(), found, (self.on_change, reporter))?,
        };
        Ok((self.dir.lock(), lock))
    }

    /// The lock file next to the configuration; `None` if nothing is pinned there now or was before.
    fn of_project(&self, used: &[Used], reporter: &dyn Reporter) -> anyhow::Result<Option<(PathBuf, LockFile)>> {
        let Some(path) = self.project_lock() else { return Ok(None) };
        let folder = path.parent().unwrap_or(Path::new(""));
        let bundles = used.iter().filter(|used| used.entry.source == LockSource::Bundle);
        let found: Vec<LockEntry> =
            bundles.map(|used| used.entry.clone().at(relative(&used.entry.path, folder))).collect();
        if found.is_empty() && !path.exists() {
            return Ok(None);
        }
        let lock = settled(&path, found, (self.on_change, reporter))?;
        Ok(Some((path, lock)))
    }

    /// Path of the lock file next to the configuration. The configuration in a run folder has the pins of the run.
    fn project_lock(&self) -> Option<PathBuf> {
        let path = self.config.canonicalize().unwrap_or_else(|_| self.config.to_owned()).with_extension("lock");
        let folder = path.parent().unwrap_or(Path::new(""));
        let is_of_run = self.dir.root().canonicalize().is_ok_and(|root| root == folder);
        (!is_of_run).then_some(path)
    }
}

fn missing(lock: &Path, remedy: &str) -> anyhow::Error {
    Stop::usage(format!("{}: there is no such file; {remedy}", lock.display())).into()
}

/// Compares plugins that were read with a lock file. `shown` is how the file writes their paths.
fn check_found<'a>(
    path: &Path,
    lock: &LockFile,
    found: impl Iterator<Item = &'a FoundPlugin<'a>>,
    shown: impl Fn(&Path) -> PathBuf,
) -> anyhow::Result<()> {
    let mut entries = Vec::new();
    for found in found {
        match found.entry(lock) {
            Some(entry) => entries.push(entry.at(shown(found.path))),
            None => return Err(Stop::usage(format!("{}: {}", path.display(), found.unknown())).into()),
        }
    }
    match lock.check(&entries).first() {
        Some(difference) => Err(Stop::usage(format!("{}: {difference}", path.display())).into()),
        None => Ok(()),
    }
}

impl FoundPlugin<'_> {
    /// True for a bundle; a registry has only bundles.
    fn is_bundle(&self) -> bool {
        self.file.as_ref().is_none_or(|file| file.bundle().is_some())
    }

    /// The plugin's entry in a lock file. The component is not loaded for its id and version: without a manifest, these are taken from the
    /// same component in `lock`. `None` if `lock` does not have it, and for a folder that must be built first. A bundle that has not been
    /// fetched is identified by the digest in its reference.
    fn entry(&self, lock: &LockFile) -> Option<LockEntry> {
        let Some(file) = &self.file else {
            return lock.entries.iter().find(|entry| entry.role == self.role && entry.path == self.path).cloned();
        };
        let sha256 = file.digest()?;
        let (id, version) = match file.manifest() {
            Some(manifest) => (manifest.plugin.id.clone(), manifest.plugin.version.clone()),
            None => {
                let same = lock.entries.iter().find(|entry| entry.role == self.role && entry.sha256 == sha256)?;
                (same.id.clone(), same.version.clone())
            }
        };
        let (source, bundle) = (lock_source(file.source()), file.bundle());
        let is_folder_with_manifest = source == LockSource::Folder && file.manifest().is_some();
        Some(LockEntry {
            role: self.role.into(),
            id,
            version,
            path: self.path.to_owned(),
            source,
            sha256,
            bundle: bundle.map(|bundle| bundle.digest.clone()),
            manifest: is_folder_with_manifest.then(|| Manifest::file_digest(self.path).ok()).flatten(),
            signed_by: bundle.and_then(|bundle| bundle.signed_by.as_ref()).map(ToString::to_string),
        })
    }

    /// The reason why there is no entry.
    fn unknown(&self) -> String {
        let (role, path) = (self.role, self.path.display());
        const REMEDY: &str = "bring back the pinned plugin, or accept the change with `--accept-plugin-change`";
        let Some(file) = &self.file else {
            return format!("{role} plugin {path} is not the one that is pinned; {REMEDY}");
        };
        match file.digest() {
            Some(digest) => {
                let digest = &digest[..12];
                format!("{role} plugin {path} (component {digest}) is not the one that is pinned; {REMEDY}")
            }
            None => format!(
                "{role} plugin {path} is a folder whose component is missing or older than its source, so that it cannot be \
                 compared with its pin; build it with `querl plugin build {path}`, {REMEDY}"
            ),
        }
    }
}

/// Reads a lock file; `None` if it does not exist.
///
/// # Errors
/// The lock file exists and cannot be used.
pub fn read(path: &Path) -> anyhow::Result<Option<LockFile>> {
    if !path.exists() {
        return Ok(None);
    }
    let unusable = |error| Stop::usage(format!("{error}; remove the file to pin the plugins as they are now"));
    Ok(Some(LockFile::read(path).map_err(unusable)?))
}

/// The pins in `path`, updated with `found` if that is not a change or the user accepts it.
fn settled(
    path: &Path,
    found: Vec<LockEntry>,
    (on_change, reporter): (OnPluginChange, &dyn Reporter),
) -> anyhow::Result<LockFile> {
    let Some(mut lock) = read(path)? else { return Ok(LockFile { entries: found, changes: Vec::new() }) };
    if on_change != OnPluginChange::Accept
        && let [difference, ..] = lock.check(&found).as_slice()
    {
        return Err(Stop::usage(format!("{}: {difference}", path.display())).into());
    }
    for difference in lock.accept(found, &now()) {
        reporter.message(&accepted(&difference.change("")));
    }
    Ok(lock)
}

/// A sentence about an accepted change.
fn accepted(LockChange { role, id, from, to, .. }: &LockChange) -> String {
    let what = match (from.as_str(), to.as_str()) {
        (LockChange::NOTHING, to) => format!("{to} accepted; no plugin was pinned in its place"),
        (from, LockChange::NOTHING) => format!("{from} is no longer pinned, since the configuration no longer has it"),
        (from, to) => format!("{to} accepted in place of {from}"),
    };
    format!("{role} plugin {id}: {what}")
}

fn now() -> String {
    Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// `path` relative to `base`; both are absolute. A registry reference is unchanged.
fn relative(path: &Path, base: &Path) -> PathBuf {
    if is_registry_reference(path) {
        return path.to_owned();
    }
    let n_shared = path.components().zip(base.components()).take_while(|(one, other)| one == other).count();
    let up = base.components().skip(n_shared).map(|_| Path::new(".."));
    up.chain(path.components().skip(n_shared).map(|part| Path::new(part.as_os_str()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::ports::Silent;

    fn entry(id: &str, digit: char, source: LockSource) -> Used {
        let sha256 = digit.to_string().repeat(64);
        let bundle = (source == LockSource::Bundle).then(|| sha256.clone());
        let (role, path) = ("reward".to_owned(), PathBuf::from("/plugins/p.querl"));
        let version = "0.1.0".parse().unwrap();
        let entry =
            LockEntry { role, id: id.into(), version, path, source, sha256, bundle, manifest: None, signed_by: None };
        Used::pinned(entry)
    }

    struct PinnedProject {
        folder: tempfile::TempDir,
    }

    impl PinnedProject {
        fn new() -> Self {
            let project = Self { folder: tempfile::tempdir().unwrap() };
            std::fs::create_dir(project.folder.path().join("run")).unwrap();
            std::fs::write(project.config(), "").unwrap();
            project
        }

        fn config(&self) -> PathBuf {
            self.folder.path().join("querl.toml")
        }

        fn dir(&self) -> RunDir {
            RunDir::new(self.folder.path().join("run"))
        }

        fn begin(&self) {
            let entry = crate::ledger::Entry::begun(Default::default());
            Ledger::open(&self.dir().stages()).unwrap().put(crate::ledger::StageName::Rewrite, entry).unwrap();
        }

        fn pin(&self, used: &[Used], on_change: OnPluginChange) -> Result<(), String> {
            let (dir, config) = (self.dir(), self.config());
            Pins { dir: &dir, config: &config, on_change }.write(used, &Silent).map_err(|error| error.to_string())
        }

        fn lock(&self, file: &str) -> Option<LockFile> {
            read(&self.folder.path().join(file)).unwrap()
        }
    }

    #[test]
    fn a_changed_plugin_is_refused_once_a_stage_has_begun_and_recorded_once_accepted() {
        let project = PinnedProject::new();
        project.pin(&[entry("p", 'a', LockSource::Folder)], OnPluginChange::Refuse).unwrap();
        project.pin(&[entry("p", 'b', LockSource::Folder)], OnPluginChange::Refuse).unwrap();
        project.begin();
        let (old, new) = (entry("p", 'b', LockSource::Folder), entry("p", 'c', LockSource::Folder));
        project.pin(&[old], OnPluginChange::Refuse).unwrap();
        let before = project.lock("run/querl.lock");
        let refusal = project.pin(std::slice::from_ref(&new), OnPluginChange::Refuse).unwrap_err();
        let needle = "querl.lock: reward plugin `p` changed from 0.1.0 (component bbbbbbbbbbbb) to 0.1.0 (component cccccccccccc)";
        assert!(refusal.contains(needle) && refusal.contains("--accept-plugin-change"), "{refusal}");
        assert_eq!(project.lock("run/querl.lock"), before);
        project.pin(std::slice::from_ref(&new), OnPluginChange::Accept).unwrap();
        project.pin(&[new], OnPluginChange::Accept).unwrap();
        let changes = project.lock("run/querl.lock").unwrap().changes;
        assert_eq!(changes.len(), 1);
        assert!(chrono::DateTime::parse_from_rfc3339(&changes[0].at).is_ok(), "{}", changes[0].at);
        assert_eq!(project.lock("querl.lock"), None, "a source folder is not pinned next to the configuration");
    }

    #[test]
    fn a_bundle_that_a_dry_run_does_not_fetch_is_known_by_its_reference() {
        let project = PinnedProject::new();
        let check = |reference: &str| {
            let (dir, config, on_change) = (project.dir(), project.config(), OnPluginChange::RefuseUnlocked);
            let found = [FoundPlugin { role: "reward", path: Path::new(reference), file: None }];
            let checked = Pins { dir: &dir, config: &config, on_change }.check(&found);
            checked.map_err(|error| error.to_string())
        };
        let (pinned, other) = ("oci://registry.example/p@sha256:aa", "oci://registry.example/p@sha256:bb");
        assert!(check(pinned).unwrap_err().contains("there is no such file; write it by running without `--locked`"));
        let mut used = entry("p", 'a', LockSource::Bundle);
        used.entry.path = pinned.into();
        project.pin(&[used], OnPluginChange::Refuse).unwrap();
        check(pinned).unwrap();
        let refusal = check(other).unwrap_err();
        assert!(refusal.contains(&format!("reward plugin {other} is not the one that is pinned")), "{refusal}");
    }

    #[test]
    fn a_bundle_is_pinned_next_to_the_configuration_for_every_run() {
        let project = PinnedProject::new();
        let mixed = [entry("p", 'a', LockSource::Bundle), entry("q", 'a', LockSource::Folder)];
        project.pin(&mixed, OnPluginChange::Refuse).unwrap();
        let lock = project.lock("querl.lock").unwrap();
        assert_eq!(lock.entries.iter().map(|entry| entry.id.as_str()).collect::<Vec<_>>(), ["p"]);
        let first_line = |file: &str| {
            let text = std::fs::read_to_string(project.folder.path().join(file)).unwrap();
            text.lines().next().unwrap().to_owned()
        };
        assert!(first_line("run/querl.lock").contains("the plugins of this run"));
        assert!(first_line("querl.lock").contains("the bundles of this project"));
        assert!(lock.entries[0].path.ends_with("plugins/p.querl") && lock.entries[0].path.is_relative());
        let other = [entry("p", 'b', LockSource::Bundle), entry("q", 'b', LockSource::Folder)];
        let refusal = project.pin(&other, OnPluginChange::Refuse).unwrap_err();
        assert!(refusal.contains("querl.lock: reward plugin `p` changed from"), "{refusal}");
        project.pin(&other, OnPluginChange::Accept).unwrap();
        let lock = project.lock("querl.lock").unwrap();
        assert_eq!((lock.changes.len(), lock.entries[0].bundle.as_deref()), (1, Some("b".repeat(64).as_str())));
    }

    /// Symptom: an added plugin was "accepted in place of nothing", and nothing in place of a removed one.
    #[test]
    fn accepted_changes_say_whether_a_plugin_was_changed_added_or_removed() {
        for (from, to, expected) in [
            ("0.0.9 (b)", "0.1.0 (a)", "reward plugin p: 0.1.0 (a) accepted in place of 0.0.9 (b)"),
            (
                LockChange::NOTHING,
                "0.1.0 (a)",
                "reward plugin p: 0.1.0 (a) accepted; no plugin was pinned in its place",
            ),
            (
                "0.0.9 (b)",
                LockChange::NOTHING,
                "reward plugin p: 0.0.9 (b) is no longer pinned, since the configuration no longer has it",
            ),
        ] {
            let [at, role, id, from, to] = ["", "reward", "p", from, to].map(str::to_owned);
            assert_eq!(accepted(&LockChange { at, role, id, from, to }), expected);
        }
    }

    /// Limits of a plugin decide which items are dropped, so a change of limits is a change of the plugin.
    #[test]
    fn a_changed_manifest_of_a_folder_is_refused_once_a_stage_has_begun() {
        let project = PinnedProject::new();
        let with = |digit: char| {
            let mut used = entry("p", 'a', LockSource::Folder);
            used.entry.manifest = Some(digit.to_string().repeat(64));
            [used]
        };
        project.begin();
        // The lock file of an earlier version has no digest, which is added.
        project.pin(&[entry("p", 'a', LockSource::Folder)], OnPluginChange::Refuse).unwrap();
        project.pin(&with('e'), OnPluginChange::Refuse).unwrap();
        let refusal = project.pin(&with('f'), OnPluginChange::Refuse).unwrap_err();
        let expected = "manifest eeeeeeeeeeee) to 0.1.0 (component aaaaaaaaaaaa, manifest ffff";
        assert!(refusal.contains(expected), "{refusal}");
        project.pin(&with('f'), OnPluginChange::Accept).unwrap();
        assert_eq!(project.lock("run/querl.lock").unwrap().changes.len(), 1);
    }

    #[test]
    fn a_lock_file_that_cannot_be_read_says_what_to_do() {
        let project = PinnedProject::new();
        project.begin();
        std::fs::write(project.dir().lock(), "[[plugin]]\n").unwrap();
        let refusal = project.pin(&[entry("p", 'a', LockSource::Folder)], OnPluginChange::Refuse).unwrap_err();
        assert!(refusal.ends_with("; remove the file to pin the plugins as they are now"), "{refusal}");
    }

    #[test]
    fn paths_are_seen_from_the_configuration() {
        assert_eq!(relative(Path::new("/a/b/p.querl"), Path::new("/a/b")), Path::new("p.querl"));
        assert_eq!(relative(Path::new("/a/c/p.querl"), Path::new("/a/b")), Path::new("../c/p.querl"));
    }
}
