//! `querl.lock`: the plugins that a run, or a project's bundles, were pinned to, and what happens when they change.
//!
//! A run folder pins every plugin, since its results depend on them. The file next to the configuration pins only bundles: they are
//! released and must not change unnoticed, while authors change source folders and bare components all the time.

use crate::failure::Stop;
use crate::ledger::Ledger;
use crate::plugins::Used;
use anyhow::Context;
use chrono::{SecondsFormat, Utc};
use querl_bundle::lock::{self, LockEntry, LockFile, LockSource};
use querl_core::fsx::write_atomic;
use querl_core::ports::Reporter;
use querl_core::run_dir::RunDir;
use std::path::{Path, PathBuf};

/// What to do if a plugin differs from its pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnPluginChange {
    /// Stop before anything is written.
    Refuse,
    /// Continue, and record the change.
    Accept,
}

/// Pins the plugins in use, in the run folder and next to the configuration.
pub(crate) fn pin(
    dir: &RunDir,
    config: &Path,
    used: &[Used],
    on_change: OnPluginChange,
    reporter: &dyn Reporter,
) -> anyhow::Result<()> {
    let of_run = pins_of_run(dir, used, (on_change, reporter))?;
    let of_project = pins_of_project(dir, config, used, (on_change, reporter))?;
    let locks = [(lock::LockKind::Run, Some(of_run)), (lock::LockKind::Project, of_project)];
    for (project, (path, lock)) in locks.into_iter().filter_map(|(project, lock)| Some((project, lock?))) {
        write_atomic(&path, lock.to_text(project).as_bytes())
            .with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}

/// A lock file; `None` where there is none.
///
/// # Errors
/// It is there and cannot be used.
pub fn read(path: &Path) -> anyhow::Result<Option<LockFile>> {
    if !path.exists() {
        return Ok(None);
    }
    let unusable = |error| Stop::usage(format!("{error}; remove the file to pin the plugins as they are now"));
    Ok(Some(LockFile::read(path).map_err(unusable)?))
}

fn pins_of_run(
    dir: &RunDir,
    used: &[Used],
    on_change: (OnPluginChange, &dyn Reporter),
) -> anyhow::Result<(PathBuf, LockFile)> {
    let found = used.iter().map(|used| used.entry.clone()).collect();
    // No result depends on a plugin before the first stage has run.
    let lock = match Ledger::open(&dir.stages())?.is_empty() {
        true => LockFile { entries: found, changes: Vec::new() },
        false => settled(&dir.lock(), found, on_change)?,
    };
    Ok((dir.lock(), lock))
}

/// Path of the lock file next to the configuration; `None` if nothing is pinned there now or was before.
fn pins_of_project(
    dir: &RunDir,
    config: &Path,
    used: &[Used],
    on_change: (OnPluginChange, &dyn Reporter),
) -> anyhow::Result<Option<(PathBuf, LockFile)>> {
    let path = config.canonicalize().unwrap_or_else(|_| config.to_owned()).with_extension("lock");
    let folder = path.parent().unwrap_or(Path::new(""));
    let bundles = used.iter().filter(|used| used.entry.source == LockSource::Bundle);
    let found: Vec<LockEntry> =
        bundles.map(|used| LockEntry { path: relative(&used.entry.path, folder), ..used.entry.clone() }).collect();
    // The configuration in a run folder has the pins of the run.
    let is_of_run = dir.root().canonicalize().is_ok_and(|root| root == folder);
    if is_of_run || (found.is_empty() && !path.exists()) {
        return Ok(None);
    }
    let lock = settled(&path, found, on_change)?;
    Ok(Some((path, lock)))
}

/// The pins in `path`, updated with `found` where that is no change or the user accepts it.
fn settled(
    path: &Path,
    found: Vec<LockEntry>,
    (on_change, reporter): (OnPluginChange, &dyn Reporter),
) -> anyhow::Result<LockFile> {
    let Some(mut lock) = read(path)? else { return Ok(LockFile { entries: found, changes: Vec::new() }) };
    if let (OnPluginChange::Refuse, [difference, ..]) = (on_change, lock.check(&found).as_slice()) {
        return Err(Stop::usage(format!("{}: {difference}", path.display())).into());
    }
    for difference in lock.accept(found, &now()) {
        let change = difference.change("");
        reporter.message(&format!(
            "{} plugin {}: {} accepted in place of {}",
            change.role, change.id, change.to, change.from
        ));
    }
    Ok(lock)
}

fn now() -> String {
    Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// `path` as seen from `base`; both absolute.
fn relative(path: &Path, base: &Path) -> PathBuf {
    let n_shared = path.components().zip(base.components()).take_while(|(one, other)| one == other).count();
    let up = base.components().skip(n_shared).map(|_| Path::new(".."));
    up.chain(path.components().skip(n_shared).map(|part| Path::new(part.as_os_str()))).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
            Ledger::open(&self.dir().stages()).unwrap().put("rewrite", entry).unwrap();
        }

        fn pin(&self, used: &[Used], on_change: OnPluginChange) -> Result<(), String> {
            pin(&self.dir(), &self.config(), used, on_change, &Silent).map_err(|error| error.to_string())
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
        // The lock of an earlier version has no digest and gains it.
        project.pin(&[entry("p", 'a', LockSource::Folder)], OnPluginChange::Refuse).unwrap();
        project.pin(&with('e'), OnPluginChange::Refuse).unwrap();
        let refusal = project.pin(&with('f'), OnPluginChange::Refuse).unwrap_err();
        assert!(
            refusal.contains("manifest eeeeeeeeeeee) to 0.1.0 (component aaaaaaaaaaaa, manifest ffff"),
            "{refusal}"
        );
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
