//! `querl.lock`: the plugins of a run, and accepted changes.

use crate::document::{self, Document, Section, or_list, write_keys};
use crate::error::BundleError;
use semver::Version;
use serde::Serialize;
use std::path::{Path, PathBuf};
use toml::Value;

const FORMAT: u64 = 1;
const LARGEST_BYTES: u64 = 1 << 20;

/// A lock file (`querl.lock`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LockFile {
    /// The plugins, in the order of the configuration.
    pub entries: Vec<LockEntry>,
    /// Accepted changes, the oldest first.
    pub changes: Vec<LockChange>,
}

/// Kind of a lock file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// A lock file in a run folder.
    Run,
    /// A lock file next to a configuration.
    Project,
}

/// A plugin as a lock file records it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LockEntry {
    /// What the configuration uses it for, such as `prompt`, `filter` or `reward`.
    pub role: String,
    /// The plugin's id.
    pub id: String,
    /// The plugin's version.
    pub version: Version,
    /// Path in the configuration, with `/` between folders. A changed path is not a difference; a changed digest is.
    pub path: PathBuf,
    /// Kind of the plugin's file.
    pub source: LockSource,
    /// Lower-case hexadecimal SHA-256 of the component.
    pub sha256: String,
    /// Digest of the bundle; `None` if the plugin is not a bundle.
    pub bundle: Option<String>,
    /// [`Manifest::file_digest`](crate::Manifest::file_digest) of a source folder, whose manifest has limits that decide which items are
    /// dropped. `None` for a bundle, whose digest covers the manifest, without a manifest, and in lock files of earlier versions.
    pub manifest: Option<String>,
    /// The trusted public key that has signed the plugin; `None` if none has.
    pub signed_by: Option<String>,
}

querl_core::named_enum! {
    /// Kind of file at a plugin's path.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum LockSource {
        /// A `.querl` bundle.
        Bundle = "bundle",
        /// A `.wasm` component.
        Component = "component",
        /// A folder with its source.
        Folder = "folder",
    }
}

/// An accepted change of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockChange {
    /// Time of the acceptance, as RFC 3339.
    pub at: String,
    /// What the configuration uses the plugin for, as in [`LockEntry::role`].
    pub role: String,
    /// The plugin's id.
    pub id: String,
    /// [`LockEntry::title`] of the plugin before the change; [`LockChange::NOTHING`] for an added plugin.
    pub from: String,
    /// [`LockEntry::title`] of the plugin after the change; [`LockChange::NOTHING`] for a removed plugin.
    pub to: String,
}

impl LockChange {
    /// What an added plugin replaces, and what replaces a removed one.
    pub const NOTHING: &str = "nothing";
}

/// A difference between a lock file and the configured plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// The plugin is in both, with another version, component digest, bundle digest, manifest digest or signer.
    Changed {
        /// The entry in the lock file.
        locked: Box<LockEntry>,
        /// The entry of the configured plugin.
        found: Box<LockEntry>,
    },
    /// The plugin is configured, but not in the lock file.
    Added {
        /// The entry of the configured plugin.
        found: LockEntry,
    },
    /// The plugin is in the lock file, but no longer configured.
    Removed {
        /// The entry in the lock file.
        locked: LockEntry,
    },
}

impl LockFile {
    /// File name in a run folder.
    pub const FILE_NAME: &str = "querl.lock";

    /// Reads a lock file.
    ///
    /// # Errors
    /// The file cannot be read, is not a regular file of at most 1 MiB, or as [`LockFile::parse`].
    pub fn read(path: &Path) -> Result<Self, BundleError> {
        Self::parse(&document::read_text_file(path, LARGEST_BYTES)?, &path.display().to_string())
    }

    /// Parses the text of a lock file; `origin` names it in messages.
    ///
    /// # Errors
    /// Not TOML, another format, or a key that is unknown, missing or
    /// invalid. Each message names the line.
    pub fn parse(text: &str, origin: &str) -> Result<Self, BundleError> {
        let document = Document::parse(text, origin)?;
        let root = document.root(&["format", "plugin", "change"])?;
        match root.count("format", 1)? {
            Some(FORMAT) => {}
            Some(other) => {
                let message =
                    format!("is {other}; this querl reads format {FORMAT}; use a newer querl, or delete the file");
                return Err(root.error("format", message));
            }
            None => return Err(root.missing("format", "a whole number")),
        }
        let keys = ["role", "id", "version", "path", "source", "sha256", "bundle", "manifest", "signed_by"];
        let entries = root.sections("plugin", &keys)?.iter().map(entry).collect::<Result<_, _>>()?;
        let changes = root.sections("change", &["at", "role", "id", "from", "to"])?;
        let changes = changes.iter().map(change).collect::<Result<_, _>>()?;
        Ok(Self { entries, changes })
    }

    /// The lock file as text; the first line says which kind of lock file it is. Parsing it gives an equal value.
    pub fn to_text(&self, place: LockKind) -> String {
        let what = match place {
            LockKind::Run => "the plugins of this run",
            LockKind::Project => "the bundles of this project; keep this file in version control",
        };
        let mut text = format!("# Written by querl: {what}. A plugin that changed is refused.\n");
        write_keys(&mut text, &[("format", Value::Integer(FORMAT as i64))]);
        for entry in &self.entries {
            text.push_str("\n[[plugin]]\n");
            write_keys(&mut text, &entry.keys());
        }
        for change in &self.changes {
            text.push_str("\n[[change]]\n");
            let LockChange { at, role, id, from, to } = change;
            let keys = [("at", at), ("role", role), ("id", id), ("from", from), ("to", to)];
            write_keys(&mut text, &keys.map(|(key, value)| (key, Value::from(value.as_str()))));
        }
        text
    }

    /// Differences between the lock file and the configured plugins `found`; none if each plugin has the same digests and signer. A
    /// manifest's digest or a signer that only `found` has is not a difference, nor is another path. Plugins are matched by role and id; if
    /// a role's id changed, one plugin was removed and another added.
    pub fn check(&self, found: &[LockEntry]) -> Vec<Difference> {
        let mut locked: Vec<_> = self.entries.iter().collect();
        let mut news: Vec<_> = found.iter().collect();
        // The same plugin may be used twice, so equal entries are paired first.
        news.retain(|entry| take(&mut locked, |other| other.is_kept_by(entry)).is_none());
        let mut differences = Vec::new();
        for entry in news {
            let old = take(&mut locked, |other| (&other.role, &other.id) == (&entry.role, &entry.id));
            differences.push(match old {
                Some(old) => Difference::Changed { locked: Box::new(old.clone()), found: Box::new(entry.clone()) },
                None => Difference::Added { found: entry.clone() },
            });
        }
        differences.extend(locked.into_iter().map(|entry| Difference::Removed { locked: entry.clone() }));
        differences
    }

    /// Replaces the entries by `found` and records each difference as accepted at the time `at`. Returns the differences.
    pub fn accept(&mut self, found: Vec<LockEntry>, at: &str) -> Vec<Difference> {
        let differences = self.check(&found);
        self.changes.extend(differences.iter().map(|difference| difference.change(at)));
        self.entries = found;
        differences
    }
}

/// The first characters of a digest.
fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

/// Removes and returns the first match.
fn take<'e>(entries: &mut Vec<&'e LockEntry>, fits: impl Fn(&LockEntry) -> bool) -> Option<&'e LockEntry> {
    let index = entries.iter().position(|entry| fits(entry))?;
    Some(entries.remove(index))
}

impl LockEntry {
    /// The same entry with another path.
    pub fn at(self, path: PathBuf) -> Self {
        Self { path, ..self }
    }

    /// Version and shortened digest, for messages: `0.1.0 (component 0123456789ab)`; of a bundle also its digest.
    pub fn title(&self) -> String {
        format!("{} ({})", self.version, self.contents())
    }

    /// The title with further differences from `other`, so that two different entries have different titles.
    fn title_next_to(&self, other: &Self) -> String {
        let mut parts = vec![self.contents()];
        if self.manifest != other.manifest {
            parts.push(
                self.manifest.as_deref().map_or("no manifest".to_owned(), |it| format!("manifest {}", short(it))),
            );
        }
        if self.signed_by != other.signed_by {
            parts.push(self.signed_by.as_ref().map_or("not signed".to_owned(), |key| format!("signed by {key}")));
        }
        format!("{} ({})", self.version, parts.join(", "))
    }

    fn contents(&self) -> String {
        let bundle = self.bundle.as_deref().map(|digest| format!(", bundle {}", short(digest))).unwrap_or_default();
        format!("component {}{bundle}", short(&self.sha256))
    }

    /// Whether a run with `found` equals one with the locked plugin, and no signature was lost.
    fn is_kept_by(&self, found: &Self) -> bool {
        let still = |locked: &Option<String>, found: &Option<String>| locked.is_none() || locked == found;
        self.has_contents_of(found)
            && still(&self.manifest, &found.manifest)
            && still(&self.signed_by, &found.signed_by)
    }

    fn has_contents_of(&self, other: &Self) -> bool {
        let identity = |entry: &Self| {
            (entry.role.clone(), entry.id.clone(), entry.version.clone(), entry.sha256.clone(), entry.bundle.clone())
        };
        identity(self) == identity(other)
    }

    fn keys(&self) -> Vec<(&'static str, Value)> {
        let path = self.path.to_string_lossy().replace(std::path::MAIN_SEPARATOR, "/");
        let mut keys = vec![
            ("role", self.role.as_str().into()),
            ("id", self.id.as_str().into()),
            ("version", self.version.to_string().into()),
            ("path", path.into()),
            ("source", self.source.name().into()),
            ("sha256", self.sha256.as_str().into()),
        ];
        keys.extend(self.bundle.as_deref().map(|digest| ("bundle", digest.into())));
        keys.extend(self.manifest.as_deref().map(|digest| ("manifest", digest.into())));
        keys.extend(self.signed_by.as_deref().map(|key| ("signed_by", key.into())));
        keys
    }
}

impl Difference {
    /// The record of this difference, accepted at the time `at`.
    pub fn change(&self, at: &str) -> LockChange {
        let nothing = || LockChange::NOTHING.to_owned();
        let (entry, from, to) = match self {
            Self::Changed { locked, found } => (&**found, locked.title_next_to(found), found.title_next_to(locked)),
            Self::Added { found } => (found, nothing(), found.title()),
            Self::Removed { locked } => (locked, locked.title(), nothing()),
        };
        LockChange { at: at.to_owned(), role: entry.role.clone(), id: entry.id.clone(), from, to }
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const REMEDY: &str = "or accept the change with `--accept-plugin-change`";
        match self {
            Self::Changed { locked, found } => write!(
                f,
                "{} plugin `{}` changed from {} to {}; {}, {REMEDY}",
                found.role,
                found.id,
                locked.title_next_to(found),
                found.title_next_to(locked),
                bring_back(locked, found)
            ),
            Self::Added { found } => write!(
                f,
                "{} plugin `{}` {} is not in {}; take it out of the configuration, {REMEDY}",
                found.role,
                found.id,
                found.title(),
                LockFile::FILE_NAME
            ),
            Self::Removed { locked } => write!(
                f,
                "{} plugin `{}` {} is in {} and no longer in the configuration; put it back, {REMEDY}",
                locked.role,
                locked.id,
                locked.title(),
                LockFile::FILE_NAME
            ),
        }
    }
}

/// How to restore the locked plugin.
fn bring_back(locked: &LockEntry, found: &LockEntry) -> String {
    let path = found.path.display();
    if !locked.has_contents_of(found) {
        return format!("bring back {} to {path}", locked.version);
    }
    match locked.manifest.is_some() && locked.manifest != found.manifest {
        true => format!("bring back its plugin.toml to {path}"),
        false => format!("bring back the bundle with that signature to {path} and its key to `plugins.trusted_keys`"),
    }
}

fn entry(section: &Section<'_>) -> Result<LockEntry, BundleError> {
    let version = section.line("version", "a semantic version, such as 0.1.0")?;
    let parsed = Version::parse(version).ok();
    let meaning = or_list(LockSource::ALL.iter().map(|source| source.name()));
    let source = section.line("source", &meaning)?;
    let known = LockSource::from_name(source);
    let signed_by = section.text("signed_by")?.map(|key| signer(section, key)).transpose()?;
    Ok(LockEntry {
        role: section.line("role", "what the plugin is used for, such as reward")?.to_owned(),
        id: section.line("id", "the plugin's id")?.to_owned(),
        version: parsed
            .ok_or_else(|| section.wrong("version", &version.into(), "a semantic version, such as 0.1.0"))?,
        path: section.line("path", "the plugin's path")?.into(),
        source: known.ok_or_else(|| section.wrong("source", &source.into(), meaning))?,
        sha256: section.digest("sha256")?.ok_or_else(|| section.missing("sha256", "the component's digest"))?,
        bundle: section.digest("bundle")?,
        manifest: section.digest("manifest")?,
        signed_by,
    })
}

fn signer(section: &Section<'_>, key: &str) -> Result<String, BundleError> {
    let parsed = crate::PublicKey::parse(key, "signed_by");
    let refused = |_| section.wrong("signed_by", &key.into(), "`ed25519:` and 64 of 0 to 9 and a to f");
    parsed.map(|key| key.to_string()).map_err(refused)
}

fn change(section: &Section<'_>) -> Result<LockChange, BundleError> {
    let line = |key, meaning| section.line(key, meaning).map(str::to_owned);
    Ok(LockChange {
        at: line("at", "a time, as RFC 3339")?,
        role: line("role", "what the plugin is used for, such as reward")?,
        id: line("id", "the plugin's id")?,
        from: line("from", "what was there before")?,
        to: line("to", "what came instead")?,
    })
}
