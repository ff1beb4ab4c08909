//! The training split of the fivedoctors example: all that these programs may look at.

use querl_core::config::{Config, Overrides, RetrievalConfig, load};
use querl_core::records::{Context, QueryRow, Split};
use querl_data::{Rows, Splits, open_queries};
use std::error::Error;
use std::path::PathBuf;

/// The folder with `querl.toml`, `lexicon.json` and `teacher_rewrites.jsonl`: the first argument, or the example.
pub(crate) fn folder() -> PathBuf {
    std::env::args_os().nth(1).map_or_else(|| PathBuf::from("examples/fivedoctors"), PathBuf::from)
}

fn config() -> Result<Config, Box<dyn Error>> {
    Ok(load(&folder().join("querl.toml"), &Overrides::default())?)
}

/// The example's retrieval without a score threshold.
pub(crate) fn retrieval() -> Result<RetrievalConfig, Box<dyn Error>> {
    Ok(RetrievalConfig { score_threshold: 0.0, ..config()?.retrieval })
}

/// The rows of the training split.
pub(crate) fn training_rows() -> Result<Vec<QueryRow>, Box<dyn Error>> {
    let config = config()?.data;
    let rows: Vec<QueryRow> = open_queries(&config)?.read()?.collect::<Result<_, _>>()?;
    let splits = Splits::assign(rows.iter().map(|row| Ok(row.group.clone())), &config)?;
    println!("rows in train, val, test: {:?}", Split::ALL.map(|split| splits.n_rows(split)));
    Ok(rows.into_iter().filter(|row| splits.of(&row.group) == Some(Split::Train)).collect())
}

/// User profile and conversation history of a row.
pub(crate) fn context(row: &QueryRow) -> Context {
    Context { user_profile: row.user_profile.clone(), history_summary: row.history_summary.clone() }
}
