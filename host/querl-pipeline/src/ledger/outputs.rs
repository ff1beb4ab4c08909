//! Digests of the files that a stage wrote, with which a later stage detects a missing, truncated or changed file before it reads it.

use super::StageName;
use crate::failure::Stop;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Size and lower-case hexadecimal SHA-256 of a file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileDigest {
    bytes: u64,
    sha256: String,
}

impl FileDigest {
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, sha256: querl_core::fsx::digest_hex(bytes) }
    }

    fn of_file(path: &Path) -> std::io::Result<Self> {
        Ok(Self { bytes: path.metadata()?.len(), sha256: querl_core::fsx::digest_file(path)? })
    }

    /// How a file differs from this digest, in words; `None` if it does not. `now`: the current digest, `None` for a missing file.
    pub(crate) fn difference(&self, now: Option<&Self>) -> Option<String> {
        match now {
            None => Some("is missing".into()),
            Some(now) if now.bytes != self.bytes => Some(format!("has {} of {} bytes", now.bytes, self.bytes)),
            Some(now) => (now != self).then(|| "has other content than when it was written".into()),
        }
    }
}

/// Digests of output files, by path relative to the run directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Outputs(BTreeMap<String, FileDigest>);

impl Outputs {
    /// Computes the digests of the files at `paths` and in folders at `paths`; a missing path is skipped.
    pub(crate) fn of(root: &Path, paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut files = Self::default();
        paths.iter().try_for_each(|path| files.add(root, path))?;
        Ok(files)
    }

    fn add(&mut self, root: &Path, path: &Path) -> anyhow::Result<()> {
        let unreadable = || format!("{}: cannot be read", path.display());
        if path.is_dir() {
            for entry in std::fs::read_dir(path).with_context(unreadable)? {
                self.add(root, &entry.with_context(unreadable)?.path())?;
            }
        } else if path.exists() {
            self.0.insert(relative(root, path), FileDigest::of_file(path).with_context(unreadable)?);
        }
        Ok(())
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = (String, FileDigest)> {
        self.0.into_iter()
    }

    /// The digests of `files` only.
    pub(crate) fn only(&self, root: &Path, files: &[PathBuf]) -> Self {
        let names: Vec<String> = files.iter().map(|file| relative(root, file)).collect();
        let kept = self.0.iter().filter(|(name, _)| names.contains(name));
        Self(kept.map(|(name, digest)| (name.clone(), digest.clone())).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that the files at or under `path` are as `stage` wrote them; the error names the first difference. Added files are allowed.
    pub(crate) fn check(&self, root: &Path, stage: StageName, path: &Path) -> anyhow::Result<()> {
        let Some((file, difference)) = self.difference(root, path)? else { return Ok(()) };
        let remedy = format!("put the file back, or run `querl {stage} CONFIG --from {stage}` to make it again");
        Err(Stop::usage(format!("{}: {difference}; {remedy}", root.join(file).display())).into())
    }

    /// The first file at or under `path` that differs from what was written, and how it differs.
    pub(crate) fn difference(&self, root: &Path, path: &Path) -> anyhow::Result<Option<(&str, String)>> {
        for (name, written) in &self.0 {
            let file = root.join(name);
            if !file.starts_with(path) {
                continue;
            }
            let now = match FileDigest::of_file(&file) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                now => Some(now.with_context(|| format!("{}: cannot be read", file.display()))?),
            };
            if let Some(difference) = written.difference(now.as_ref()) {
                return Ok(Some((name, difference)));
            }
        }
        Ok(None)
    }

    /// Path, relative to the run directory, of the recorded file or folder with this name.
    pub(crate) fn path_called(&self, name: &str) -> Option<&Path> {
        let mut paths = self.0.keys().flat_map(|file| Path::new(file).ancestors());
        paths.find(|path| path.file_name().is_some_and(|last| last == name))
    }

    /// Recorded digest of the file `path`, or of the files directly in the folder `path`; `None` if nothing is recorded.
    pub(crate) fn digest(&self, root: &Path, path: &Path) -> Option<String> {
        if let Some(file) = self.0.get(&relative(root, path)) {
            return Some(file.sha256.clone());
        }
        let folder = relative(root, path) + "/";
        let files = self.0.iter().filter_map(|(name, file)| Some((name.strip_prefix(&folder)?, file)));
        let direct = files.filter(|(name, _)| !name.contains('/'));
        let lines: Vec<String> = direct.map(|(name, file)| format!("{name} {}", file.sha256)).collect();
        (!lines.is_empty()).then(|| super::inputs::digest_lines(lines))
    }

    /// SHA-256 of each file at or under `path`, by its path relative to the run directory.
    pub(crate) fn digests(&self, root: &Path, path: &Path) -> BTreeMap<String, String> {
        let files = self.0.iter().filter(|(file, _)| root.join(file).starts_with(path));
        files.map(|(name, file)| (name.clone(), file.sha256.clone())).collect()
    }
}

/// Relative path with `/` on every system.
fn relative(root: &Path, path: &Path) -> String {
    let path = path.strip_prefix(root).unwrap_or(path);
    path.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::fsx::write_atomic;

    #[test]
    fn a_file_that_is_missing_cut_or_changed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (root, best) = (folder.path(), folder.path().join("sft/best"));
        let put = |name: &str, text: &str| write_atomic(&best.join(name), text.as_bytes()).unwrap();
        put("adapter_config.json", "{}");
        put("critic/head", "weights");
        let outputs = Outputs::of(root, &[best.clone(), root.join("none")]).unwrap();
        let found = || outputs.check(root, StageName::Sft, &best).map_err(|error| error.to_string());
        assert_eq!(found(), Ok(()));
        put("README.md", "notes");
        assert_eq!(found(), Ok(()));
        let complaint = |file: &str, what: &str| {
            let remedy = "put the file back, or run `querl sft CONFIG --from sft` to make it again";
            Err(format!("{}: {what}; {remedy}", best.join(file).display()))
        };
        put("critic/head", "weighty");
        assert_eq!(found(), complaint("critic/head", "has other content than when it was written"));
        put("critic/head", "wei");
        assert_eq!(found(), complaint("critic/head", "has 3 of 7 bytes"));
        assert!(outputs.check(root, StageName::Sft, root).is_err());
        std::fs::remove_file(best.join("adapter_config.json")).unwrap();
        assert_eq!(found(), complaint("adapter_config.json", "is missing"));
        assert!(outputs.check(root, StageName::Sft, &root.join("sft/last")).is_ok());
    }
}
