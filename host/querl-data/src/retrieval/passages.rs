//! The knowledge base: passages with a title.

use crate::error::DataError;
use querl_core::config::RetrievalConfig;
use querl_core::fsx::{digest_file, digest_hex};
use querl_core::ports::Embedder;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// One passage of the knowledge base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passage {
    /// Unique.
    pub id: String,
    /// May be empty.
    #[serde(default)]
    pub title: String,
    /// The passage.
    pub text: String,
}

/// Reads a knowledge base: one JSON object a line with `id`, `title`, `text`.
///
/// # Errors
/// The file cannot be read, a line is not a passage, an id occurs twice, or there is no passage.
pub fn read_passages(path: &Path) -> Result<Vec<Passage>, DataError> {
    let passages: Vec<Passage> = querl_core::fsx::read_jsonl(path)?;
    let mut ids = HashSet::new();
    for passage in &passages {
        if !ids.insert(passage.id.as_str()) {
            return Err(DataError::file(
                path,
                format!("the id `{}` stands twice; give each passage its own", passage.id),
            ));
        }
    }
    if passages.is_empty() {
        return Err(DataError::file(path, "holds no passage"));
    }
    Ok(passages)
}

impl Passage {
    pub(crate) fn whole(&self) -> String {
        match self.title.as_str() {
            "" => self.text.clone(),
            title => format!("{title}\n{}", self.text),
        }
    }
}

/// The form of the index with what reads and cuts its texts. A change in how it is built or read is another number; another release of one
/// of these is another index.
pub(crate) const FORM: &str = "querl index 2; tantivy 0.27.0, tantivy-jieba 0.21.0, jieba-rs 0.11.0";
/// What makes vectors, where there are some.
pub(crate) const ENCODER: &str = "candle-transformers 0.11.1, tokenizers 0.23.2";

fn sources_digest(
    knowledge_base: &Path,
    config: &RetrievalConfig,
    embedder: Option<&dyn Embedder>,
) -> Result<String, DataError> {
    let mut parts = vec![FORM.to_owned()];
    let optional = [&config.lexicon, &config.user_dictionary, &config.synonyms].map(Option::as_deref);
    for path in std::iter::once(Some(knowledge_base)).chain(optional) {
        let digest = path
            .map(|path| digest_file(path).map_err(|error| DataError::file(path, format!("cannot be read: {error}"))));
        // A file that is absent is not one that is empty.
        parts.push(digest.transpose()?.unwrap_or_default());
    }
    parts.extend(embedder.map(|embedder| format!("{ENCODER}: {}", embedder.digest())));
    Ok(digest_hex(parts.join("\n").as_bytes()))
}

/// Digest of everything that an index is built from.
pub(crate) struct SourcesDigest(pub(super) String);

impl SourcesDigest {
    /// Taken before the files are read, so that a change meanwhile shows.
    pub(crate) fn of(
        knowledge_base: &Path,
        config: &RetrievalConfig,
        embedder: Option<&dyn Embedder>,
    ) -> Result<Self, DataError> {
        sources_digest(knowledge_base, config, embedder).map(Self)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Regression: an index built with another release's dictionary or form, taken for this one's.
    #[test]
    fn the_releases_that_are_named_are_those_that_are_built_with() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
        let lock = std::fs::read_to_string(path).unwrap();
        let named = FORM.split_once("; ").unwrap().1.split(", ").chain(ENCODER.split(", "));
        for release in named {
            let (name, version) = release.split_once(' ').unwrap();
            let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
            assert!(lock.contains(&entry), "{release}: put the version of Cargo.lock here");
        }
    }
}
