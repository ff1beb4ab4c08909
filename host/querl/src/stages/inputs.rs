//! What a stage depends on, as named digests: when one differs from last time, the stage is run again and says which.

use crate::failure::Stop;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// Above this size a file of a model folder counts by size and time of change instead of content: reading gigabytes of
/// weights before every run would take longer than most runs of a small model.
const LARGEST_READ_BYTES: u64 = 256 << 20;

/// Names and what stands for their values. Paths are never part of it: a moved input is the same input.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs(BTreeMap<String, String>);

impl Inputs {
    /// A value that is short enough to stand for itself.
    pub fn text(&mut self, name: &str, value: impl ToString) -> &mut Self {
        self.0.insert(name.into(), value.to_string());
        self
    }

    /// The keys of a configuration section, except those named: ones that cannot change a result, and paths.
    ///
    /// # Errors
    /// The section has no TOML form.
    pub fn section(&mut self, name: &str, section: &impl Serialize, except: &[&str]) -> anyhow::Result<&mut Self> {
        let table = toml::Table::try_from(section).with_context(|| format!("[{name}] has no TOML form"))?;
        for (key, value) in table.iter().filter(|(key, _)| !except.contains(&key.as_str())) {
            self.0.insert(format!("{name}.{key}"), value.to_string());
        }
        Ok(self)
    }

    /// The content of a file that the user gave.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn file(&mut self, name: &str, path: &Path) -> anyhow::Result<&mut Self> {
        self.0.insert(name.into(), digest_file(path)?);
        Ok(self)
    }

    /// The content of a file that an earlier stage left.
    ///
    /// # Errors
    /// It is not there, or cannot be read.
    pub fn made_by(&mut self, stage: &str, path: &Path) -> anyhow::Result<&mut Self> {
        if !path.exists() {
            let message = format!("{}: not there yet; run `querl {stage}` first, or `querl run`", path.display());
            return Err(Stop::usage(message).into());
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let digest = if path.is_dir() { digest_folder(path)? } else { digest_file(path)? };
        self.0.insert(format!("{name} of {stage}"), digest);
        Ok(self)
    }

    /// The files of a folder, its own folders left out.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn folder(&mut self, name: &str, path: &Path) -> anyhow::Result<&mut Self> {
        self.0.insert(name.into(), digest_folder(path)?);
        Ok(self)
    }

    /// Names that are new, gone or different, in order.
    pub fn changed_since(&self, earlier: &Self) -> Vec<String> {
        let mut changed: Vec<String> =
            self.0.iter().filter(|(k, v)| earlier.0.get(*k) != Some(v)).map(|(k, _)| k.clone()).collect();
        changed.extend(earlier.0.keys().filter(|key| !self.0.contains_key(*key)).cloned());
        changed.sort();
        changed
    }
}

fn digest_file(path: &Path) -> anyhow::Result<String> {
    let unreadable = || format!("{}: cannot be read", path.display());
    let mut file = std::fs::File::open(path).with_context(unreadable)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n_read = file.read(&mut buffer).with_context(unreadable)?;
        if n_read == 0 {
            return Ok(hex::encode(hasher.finalize()));
        }
        hasher.update(&buffer[..n_read]);
    }
}

fn digest_folder(path: &Path) -> anyhow::Result<String> {
    let unreadable = || format!("{}: cannot be read", path.display());
    let mut lines = Vec::new();
    for entry in std::fs::read_dir(path).with_context(unreadable)? {
        let entry = entry.with_context(unreadable)?;
        let meta = std::fs::metadata(entry.path()).with_context(unreadable)?;
        if meta.is_file() {
            let digest = match meta.len() {
                n_bytes if n_bytes > LARGEST_READ_BYTES => format!("{n_bytes} {:?}", meta.modified().ok()),
                _ => digest_file(&entry.path())?,
            };
            lines.push(format!("{} {digest}", entry.file_name().to_string_lossy()));
        }
    }
    lines.sort();
    Ok(querl_core::fsx::digest_hex(lines.join("\n").as_bytes()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn section_keys_are_told_apart_and_exceptions_left_out() {
        let mut before = Inputs::default();
        before.section("sft", &querl_core::config::SftConfig::default(), &["eval_steps"]).unwrap();
        let changed = querl_core::config::SftConfig { epochs: 9, eval_steps: 1, ..Default::default() };
        let mut after = Inputs::default();
        after.section("sft", &changed, &["eval_steps"]).unwrap();
        assert_eq!(after.changed_since(&before), ["sft.epochs"]);
    }

    #[test]
    fn content_counts_and_place_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        std::fs::write(&one, "same").unwrap();
        std::fs::write(&other, "same").unwrap();
        let of = |path: &Path| Inputs::default().file("data.input", path).unwrap().clone();
        assert_eq!(of(&one), of(&other));
        std::fs::write(&other, "changed").unwrap();
        assert_eq!(of(&other).changed_since(&of(&one)), ["data.input"]);
    }

    #[test]
    fn a_missing_upstream_file_names_the_stage_that_makes_it() {
        let error = Inputs::default().made_by("convert", Path::new("/nowhere/train.jsonl")).unwrap_err();
        assert_eq!(error.to_string(), "/nowhere/train.jsonl: not there yet; run `querl convert` first, or `querl run`");
    }
}
