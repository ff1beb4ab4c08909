//! The knowledge base: passages with a title.

use crate::error::DataError;
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
/// The file cannot be read, a line is not a passage, an id stands twice, or there is no passage at all.
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
    /// Title and text, a line each.
    pub(crate) fn whole(&self) -> String {
        match self.title.as_str() {
            "" => self.text.clone(),
            title => format!("{title}\n{}", self.text),
        }
    }
}
