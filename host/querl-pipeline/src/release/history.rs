//! The releases folder: an append-only history, from which everything else follows.

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

/// A run that serves or served a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Its folder: absolute, or relative to the folder that the releases folder is in.
    pub run: PathBuf,
    /// What its rewrites depend on.
    #[serde(flatten)]
    pub identity: ModelIdentity,
}

querl_core::named_enum! {
    /// What happened.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Action {
        /// A run became the current one; a candidate ended.
        Promote = "promote",
        /// A run became a candidate with a share of the traffic.
        Canary = "canary",
        /// A run became a candidate without traffic.
        Shadow = "shadow",
        /// The run that served before became the current one again.
        Rollback = "rollback",
        /// A candidate was ended by an operator.
        EndCandidate = "end_candidate",
        /// A candidate was ended by a service, since it exceeded a limit.
        AutomaticReturn = "automatic_return",
    }
}

/// One line of the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HistoryEntry {
    /// RFC 3339.
    pub time: String,
    /// The tenant.
    pub tenant: String,
    /// What happened.
    pub action: Action,
    /// The run that it happened to.
    #[serde(flatten)]
    pub release: Release,
    /// Share of the traffic of a canary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Folder and version of what it replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
    /// The passed check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<serde_json::Value>,
    /// Why there is no check, or why a candidate ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The user, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

/// What served before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replaced {
    /// Its folder.
    pub run: PathBuf,
    /// Its version.
    pub version: String,
}

impl HistoryEntry {
    /// An entry of now, without its optional fields.
    pub(super) fn new(tenant: &str, action: Action, release: Release) -> Self {
        let time = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true);
        let (share, replaced, evidence, reason, who) = (None, None, None, None, None);
        Self { time, tenant: tenant.into(), action, release, share, replaced, evidence, reason, who }
    }
}

/// The releases of one tenant.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TenantReleases {
    /// What serves.
    pub current: Option<Release>,
    /// What served before, the latest last: a rollback returns to it.
    pub earlier: Vec<Release>,
    /// What is tried next to the current one.
    pub candidate: Option<CandidateRelease>,
    /// The last candidate that a service has ended, and why.
    pub returned: Option<(String, String)>,
}

/// A run that is tried.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateRelease {
    /// Number of the line that started it.
    pub id: usize,
    /// The run.
    pub release: Release,
    /// Its traffic.
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

/// The folder, which need not exist yet.
#[derive(Debug, Clone)]
pub struct ReleasesFolder {
    path: PathBuf,
}

impl ReleasesFolder {
    /// The folder at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The lines of the history.
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

    /// The releases of each tenant.
    ///
    /// # Errors
    /// As [`entries`](Self::entries).
    pub fn tenants(&self) -> anyhow::Result<BTreeMap<String, TenantReleases>> {
        Ok(tenants_of(&self.entries()?))
    }

    /// Appends the entry that `make` returns for the present releases; other processes wait meanwhile. `None` changes nothing. For a folder
    /// that is missing `make` is called twice, so that a refusal makes none.
    ///
    /// # Errors
    /// That of `make`, or the folder cannot be read or written; the history is then as before.
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

    /// The form of a run's folder in the history.
    pub(super) fn relative(&self, run: &Path) -> anyhow::Result<PathBuf> {
        let run = std::fs::canonicalize(run).with_context(|| format!("{}: cannot be read", run.display()))?;
        let shared = self.shared_folder();
        Ok(run.strip_prefix(&shared).map(Path::to_owned).unwrap_or(run))
    }

    /// The folder of a run of the history.
    pub fn run_folder(&self, release: &Release) -> PathBuf {
        let shared = self.shared_folder();
        // As the user would write it.
        let here = std::env::current_dir().and_then(std::fs::canonicalize).unwrap_or_default();
        let folder = shared.join(&release.run);
        folder.strip_prefix(&here).map(Path::to_owned).unwrap_or(folder)
    }

    /// Where the releases folder is: runs next to it may be moved with it.
    fn shared_folder(&self) -> PathBuf {
        let parent = |folder: PathBuf| folder.parent().map(Path::to_owned);
        let missing = || std::fs::canonicalize(parent(std::path::absolute(&self.path).ok()?)?).ok();
        std::fs::canonicalize(&self.path).ok().and_then(parent).or_else(missing).unwrap_or_default()
    }
}

/// The releases of each tenant, from the lines of a history.
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
