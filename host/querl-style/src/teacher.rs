//! What a teacher says of texts, kept so that each text is asked about once.

use crate::error::usage;
use crate::model::{ClassifierOptions, StyleClassifier};
use anyhow::Context;
use querl_core::fsx::{digest_file, digest_hex, open_jsonl, write_jsonl};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A classifier with what it said before.
pub(crate) struct Teacher {
    pub(crate) model: StyleClassifier,
    /// Stands for the model and how it is asked.
    fingerprint: String,
    file: PathBuf,
    known: BTreeMap<String, Vec<f64>>,
    /// Texts that were asked about now.
    pub(crate) n_asked: usize,
    /// Those of them that were shortened.
    pub(crate) n_shortened: usize,
}

/// Files of a classifier beside its weights on which what it says depends.
const NAMED: [&str; 3] = ["config.json", "adapter_config.json", "tokenizer.json"];

/// A line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    /// SHA-256 of model and text.
    key: String,
    logits: Vec<f64>,
}

impl Teacher {
    /// Opens the model, and what `file` has of it.
    pub(crate) fn open(args: &ClassifierOptions, file: &Path) -> anyhow::Result<Self> {
        let model = StyleClassifier::open(args)?;
        let mut fingerprint = format!("{} ", args.max_length);
        for folder in [Some(&args.model), args.base.as_ref()].into_iter().flatten() {
            fingerprint.push_str(&digest_of(folder)?);
        }
        let mut known = BTreeMap::new();
        if file.is_file() {
            for line in open_jsonl::<Known>(file).map_err(usage)? {
                let Known { key, logits } = line.map_err(usage)?.value;
                known.insert(key, logits);
            }
        }
        Ok(Self { model, fingerprint, file: file.to_owned(), known, n_asked: 0, n_shortened: 0 })
    }

    /// Logits of texts, in their order. What was not known is asked, and kept.
    pub(crate) fn logits(&mut self, texts: &[&str]) -> anyhow::Result<Vec<Vec<f64>>> {
        let keys: Vec<String> = texts.iter().map(|text| self.key(text)).collect();
        let unknown: Vec<usize> = (0..texts.len()).filter(|&index| !self.known.contains_key(&keys[index])).collect();
        if !unknown.is_empty() {
            let asked: Vec<&str> = unknown.iter().map(|&index| texts[index]).collect();
            let said = self.model.ask(&asked)?;
            self.known.extend(unknown.iter().map(|&index| keys[index].clone()).zip(said.logits));
            self.n_shortened += said.n_shortened;
            self.n_asked += unknown.len();
            let lines = self.known.iter().map(|(key, logits)| Known { key: key.clone(), logits: logits.clone() });
            write_jsonl(&self.file, lines)?;
        }
        Ok(keys.iter().map(|key| self.known[key].clone()).collect())
    }

    fn key(&self, text: &str) -> String {
        digest_hex(format!("{}\n{text}", self.fingerprint).as_bytes())
    }
}

/// SHA-256 of those of a model's files on which what it says depends.
pub(crate) fn digest_of(folder: &Path) -> anyhow::Result<String> {
    let entries = std::fs::read_dir(folder).map_err(|error| usage(format!("{}: {error}", folder.display())))?;
    let is_weight =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors" || extension == "bin");
    let is_named = |path: &PathBuf| NAMED.iter().any(|name| path.ends_with(name));
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.is_file() && (is_weight(path) || is_named(path)));
    paths.sort();
    let digests = paths.iter().map(|path| digest_file(path).with_context(|| path.display().to_string()));
    Ok(digests.collect::<anyhow::Result<Vec<_>>>()?.concat())
}
