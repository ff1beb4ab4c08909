//! The releases folder: an append-only history, from which the current releases are computed.

use crate::failure::Stop;
use crate::serving::ModelIdentity;
use anyhow::Context;
use chrono::{SecondsFormat, Utc};
use querl_core::fsx::{self, ReadError, read_jsonl};
use querl_core::serving::CandidateMode;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

const HISTORY: &str = "history.jsonl";
const LOCK: &str = ".lock";

/// A released run of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Folder of the run: absolute, or relative to the parent of the releases folder.
    pub run: PathBuf,
    /// Model identity of the run: digests of everything that its rewrites depend on.
    #[serde(flatten)]
    pub identity: ModelIdentity,
}

querl_core::named_enum! {
    /// Kind of a change in the history of releases.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Action {
        /// A run became the current release; the candidate, if any, ended.
        Promote = "promote",
        /// A run became a canary: a candidate with a share of the traffic.
        Canary = "canary",
        /// A run became a shadow: a candidate that gets copies of requests, and whose responses are not sent.
        Shadow = "shadow",
        /// The previous release became the current one again.
        Rollback = "rollback",
        /// An operator ended the candidate.
        EndCandidate = "end_candidate",
        /// A service ended the candidate because it exceeded a limit.
        AutomaticReturn = "automatic_return",
    }
}

/// One line of the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HistoryEntry {
    /// Time of the change in RFC 3339 format, UTC.
    pub time: String,
    /// Name of the tenant.
    pub tenant: String,
    /// Kind of a change in the history of releases.
    pub action: Action,
    /// The run that was released, or the candidate that ended.
    #[serde(flatten)]
    pub release: Release,
    /// Share of the traffic, 0 to 1, of a canary; `None` for other changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Folder and version of the release that this one replaced; `None` if it replaced none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
    /// Evidence of the passed check; `None` if no check was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<serde_json::Value>,
    /// Why no check was made, or why a candidate ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// User who made the change, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

/// The release that served before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replaced {
    /// Folder of the run.
    pub run: PathBuf,
    /// Version of the model.
    pub version: String,
}

impl HistoryEntry {
    /// An entry with the current time and without optional fields.
    pub(super) fn new(tenant: &str, action: Action, release: Release) -> Self {
        let time = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true);
        let (share, replaced, evidence, reason, who) = (None, None, None, None, None);
        Self { time, tenant: tenant.into(), action, release, share, replaced, evidence, reason, who }
    }
}

/// The releases of one tenant.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TenantReleases {
    /// The release that serves; `None` if there is none.
    pub current: Option<Release>,
    /// Releases that served before, oldest first; a rollback returns to the last.
    pub earlier: Vec<Release>,
    /// The candidate that is tried next to the current release.
    pub candidate: Option<CandidateRelease>,
    /// Version of the last candidate that a service ended, and the reason.
    pub returned: Option<(String, String)>,
}

/// A candidate: a run that is tried next to the current release.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateRelease {
    /// Line number in the history at which the candidate started.
    pub id: usize,
    /// The candidate's run.
    pub release: Release,
    /// Traffic of the candidate: canary with its share, or shadow.
    pub mode: CandidateMode,
}

impl TenantReleases {
    fn apply(&mut self, line: usize, entry: &HistoryEntry) {
        let release = entry.release.clone();
        match entry.action {
            Action::Promote => {
                self.earlier.extend(self.current.replace(release));
                self.candidate = None;
            }
            Action::Canary | Action::Shadow => {
                let canary = || CandidateMode::Canary(entry.share.unwrap_or(0.0));
                let mode = if entry.action == Action::Shadow { CandidateMode::Shadow } else { canary() };
                self.candidate = Some(CandidateRelease { id: line, release, mode });
            }
            Action::Rollback => {
                self.earlier.pop();
                (self.current, self.candidate) = (Some(release), None);
            }
            Action::EndCandidate => self.candidate = None,
            Action::AutomaticReturn => {
                self.returned = Some((release.identity.version, entry.reason.clone().unwrap_or_default()));
                self.candidate = None;
            }
        }
    }
}

/// A releases folder, which need not exist yet.
#[derive(Debug, Clone)]
pub struct ReleasesFolder {
    path: PathBuf,
}

impl ReleasesFolder {
    /// The releases folder at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the entries of the history, oldest first.
    ///
    /// # Errors
    /// The file cannot be read, or a line is not an entry.
    pub fn entries(&self) -> anyhow::Result<Vec<HistoryEntry>> {
        let path = self.path.join(HISTORY);
        if !path.exists() {
            return Ok(Vec::new());
        }
        read_jsonl(&path).map_err(|error| match error {
            ReadError::Line { path, line, problem } => {
                let remedy = "put the file back as querl wrote it";
                Stop::usage(format!("{path}:{line}: not an entry of a history: {problem}; {remedy}")).into()
            }
            ReadError::Io { .. } => error.into(),
        })
    }

    /// Reads the releases of each tenant, by tenant name.
    ///
    /// # Errors
    /// As [`entries`](Self::entries).
    pub fn tenants(&self) -> anyhow::Result<BTreeMap<String, TenantReleases>> {
        Ok(tenants_of(&self.entries()?))
    }

    /// Appends the entry that `make` returns for the current releases, while other processes are locked out; `None` appends nothing. For a
    /// missing folder, `make` is called twice, so that the folder is not created if `make` fails.
    ///
    /// # Errors
    /// The error of `make`, or the folder cannot be read or written; the history is then unchanged.
    pub(super) fn append(
        &self,
        make: impl Fn(&BTreeMap<String, TenantReleases>) -> anyhow::Result<Option<HistoryEntry>>,
    ) -> anyhow::Result<Option<HistoryEntry>> {
        if !self.path.exists() && make(&BTreeMap::new())?.is_none() {
            return Ok(None);
        }
        let _lock = self.lock()?;
        let mut entries = self.entries()?;
        let Some(entry) = make(&tenants_of(&entries))? else { return Ok(None) };
        entries.push(entry.clone());
        let path = self.path.join(HISTORY);
        fsx::write_jsonl(&path, &entries).with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Some(entry))
    }

    fn lock(&self) -> anyhow::Result<File> {
        let unusable = || format!("{}: cannot be used as a releases folder", self.path.display());
        std::fs::create_dir_all(&self.path).with_context(unusable)?;
        let mut options = OpenOptions::new();
        let file =
            options.create(true).truncate(false).write(true).open(self.path.join(LOCK)).with_context(unusable)?;
        file.lock().with_context(unusable)?;
        Ok(file)
    }

    /// A run's folder as the history stores it, relative to the parent of the releases folder if possible.
    pub(super) fn relative(&self, run: &Path) -> anyhow::Result<PathBuf> {
        let run = std::fs::canonicalize(run).with_context(|| format!("{}: cannot be read", run.display()))?;
        let shared = self.shared_folder();
        Ok(run.strip_prefix(&shared).map(Path::to_owned).unwrap_or(run))
    }

    /// Path of the run folder of a release.
    pub fn run_folder(&self, release: &Release) -> PathBuf {
        let shared = self.shared_folder();
        // The path as the user would write it.
        let here = std::env::current_dir().and_then(std::fs::canonicalize).unwrap_or_default();
        let folder = shared.join(&release.run);
        folder.strip_prefix(&here).map(Path::to_owned).unwrap_or(folder)
    }

    /// Parent of the releases folder: runs in it may be moved together with it.
    fn shared_folder(&self) -> PathBuf {
        let parent = |folder: PathBuf| folder.parent().map(Path::to_owned);
        let missing = || std::fs::canonicalize(parent(std::path::absolute(&self.path).ok()?)?).ok();
        std::fs::canonicalize(&self.path).ok().and_then(parent).or_else(missing).unwrap_or_default()
    }
}

/// Computes the releases of each tenant from the entries of a history.
pub fn tenants_of(entries: &[HistoryEntry]) -> BTreeMap<String, TenantReleases> {
    let mut tenants: BTreeMap<String, TenantReleases> = BTreeMap::new();
    for (line, entry) in (1..).zip(entries) {
        tenants.entry(entry.tenant.clone()).or_default().apply(line, entry);
    }
    tenants
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(version: &str) -> Release {
        let digests = BTreeMap::from([("base model".to_owned(), "b".to_owned())]);
        Release { run: version.into(), identity: ModelIdentity { version: version.into(), digests } }
    }

    fn entry(action: Action, version: &str) -> HistoryEntry {
        HistoryEntry { share: Some(0.1), ..HistoryEntry::new("shop", action, release(version)) }
    }

    #[test]
    fn rollbacks_return_through_all_that_served() {
        let entries = [
            entry(Action::Promote, "a"),
            entry(Action::Promote, "b"),
            entry(Action::Canary, "c"),
            entry(Action::AutomaticReturn, "c"),
            entry(Action::Promote, "d"),
            entry(Action::Rollback, "b"),
        ];
        let state = |n: usize| tenants_of(&entries[..n]).remove("shop").unwrap();
        assert_eq!(state(3).candidate.unwrap().id, 3);
        assert_eq!((state(4).candidate, state(4).current), (None, Some(release("b"))));
        assert_eq!(state(5).earlier, [release("a"), release("b")]);
        assert_eq!((state(6).current, state(6).earlier), (Some(release("b")), vec![release("a")]));
    }

    #[test]
    fn concurrent_changes_are_all_in_the_history() {
        let folder = tempfile::tempdir().unwrap();
        let releases = ReleasesFolder::new(folder.path().join("releases"));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let releases = releases.clone();
                scope.spawn(move || {
                    for index in 0..5 {
                        let made = entry(Action::Promote, &format!("{thread}-{index}"));
                        releases.append(|_| Ok(Some(made.clone()))).unwrap();
                    }
                });
            }
        });
        assert_eq!(releases.entries().unwrap().len(), 40);
        assert_eq!(releases.tenants().unwrap()["shop"].earlier.len(), 39);
        let before = std::fs::read(releases.path().join(HISTORY)).unwrap();
        assert!(releases.append(|_| anyhow::bail!("refused")).is_err());
        assert_eq!(releases.append(|_| Ok(None)).unwrap(), None);
        assert_eq!(std::fs::read(releases.path().join(HISTORY)).unwrap(), before);
    }

    #[test]
    fn a_line_that_is_no_entry_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let releases = ReleasesFolder::new(folder.path());
        releases.append(|_| Ok(Some(entry(Action::Promote, "a")))).unwrap();
        let path = folder.path().join(HISTORY);
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "{}\n").unwrap();
        let problem = releases.tenants().unwrap_err().to_string();
        assert!(problem.contains("history.jsonl:2: not an entry of a history"), "{problem}");
    }
}
