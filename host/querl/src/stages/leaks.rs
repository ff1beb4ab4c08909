//! The look at the splits before a training: a test that training has seen says nothing.

use crate::failure::Stop;
use querl_core::config::{DataConfig, OnLeak};
use querl_core::ports::Progress;
use querl_core::records::{DatasetRow, Split};
use querl_core::run_dir::RunDir;
use querl_data::{Leaks, RecordFile, find_leaks};

/// Leaks of the split.
///
/// # Errors
/// A split cannot be read.
pub fn find(dir: &RunDir, config: &DataConfig, split: Split) -> anyhow::Result<Leaks> {
    let rows = |split| RecordFile::<DatasetRow>::new(&dir.split(split));
    Ok(find_leaks(&rows(Split::Train), &rows(split), config.leak_similarity)?)
}

/// Refuses to train where rows of test are in train, and says so of those of val, which choose the checkpoint.
///
/// # Errors
/// Rows of test are in train and `data.on_leak` is `refuse`, or a split cannot be read.
pub fn check(dir: &RunDir, config: &DataConfig, progress: &dyn Progress) -> anyhow::Result<()> {
    const REMEDY: &str = "give such rows one group (data.group_column), take them out of the query table, raise \
                          data.leak_similarity, or set data.on_leak = \"warn\"";
    if let Some(sentence) = find(dir, config, Split::Val)?.sentence(Split::Val) {
        progress.line(&format!("warning: {sentence}"));
    }
    match (find(dir, config, Split::Test)?.sentence(Split::Test), config.on_leak) {
        (None, _) => Ok(()),
        (Some(sentence), OnLeak::Warn) => {
            progress.line(&format!("warning: {sentence}; figures on test flatter what is trained"));
            Ok(())
        }
        (Some(sentence), OnLeak::Refuse) => Err(Stop::usage(format!("{sentence}; {REMEDY}")).into()),
    }
}
