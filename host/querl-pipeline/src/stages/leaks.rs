//! Detects leaks between the splits before the first paid call and before each training.

use crate::failure::Stop;
use crate::ledger::{Facts, StageName};
use crate::run::Run;
use anyhow::Context;
use querl_core::config::{DataConfig, OnLeak};
use querl_core::ports::{Progress, Silent};
use querl_core::records::{DatasetRow, QueryRow, Split};
use querl_core::run_dir::RunDir;
use querl_data::{
    DataError, DatasetQueries, Journal, Leaks, QueryTable, RecordFile, RowSplits, Rows, SplitRows, find_leaks,
    open_queries,
};
use std::io::{BufRead, BufReader};

/// Name of the figure of leaked test rows.
const TEST_LEAKED: &str = "rows of test nearly in train";

/// Leaks of the held-out splits into the training split.
#[derive(Debug)]
pub struct SplitLeaks {
    /// Leaks of val, which is only used to choose the checkpoint.
    pub val: Leaks,
    /// Leaks of test.
    pub test: Leaks,
}

impl SplitLeaks {
    /// Sentences about the leaks and near-leaks of val and test.
    pub fn sentences(&self) -> Vec<String> {
        let of = |split, leaks: &Leaks| [leaks.sentence(split), leaks.same_query_sentence(split)];
        of(Split::Val, &self.val).into_iter().chain(of(Split::Test, &self.test)).flatten().collect()
    }
}

/// Finds the leaks of the dataset in a run folder.
///
/// # Errors
/// A split cannot be read.
pub fn of_dataset(dir: &RunDir, config: &DataConfig, progress: &dyn Progress) -> anyhow::Result<SplitLeaks> {
    let files = Split::ALL.map(|split| RecordFile::<DatasetRow>::new(&dir.split(split)));
    let n_rows = Split::ALL.into_iter().map(|split| n_lines(dir, split)).sum::<anyhow::Result<u64>>()?;
    let [train, val, test] = files.each_ref().map(|file| DatasetQueries(file));
    find([&train, &val, &test], n_rows, config.leak_similarity, progress)
}

/// Finds the leaks that a dataset made from this query table will have, if no filter drops the training rows in question.
///
/// # Errors
/// The groups cannot fill the splits, or the table cannot be read.
pub fn of_table(table: &QueryTable, config: &DataConfig, progress: &dyn Progress) -> anyhow::Result<SplitLeaks> {
    let splits = RowSplits::of(table.read()?.map(|row| Ok(row?.group)), config)?;
    let [train, val, test] = Split::ALL.map(|split| SplitRows { table, splits: &splits, split });
    find([&train, &val, &test], table.findings().n_usable as u64, config.leak_similarity, progress)
}

/// As [`of_table`]; `None` if the groups cannot fill the splits.
///
/// # Errors
/// The table cannot be read.
pub fn of_table_if_split(
    table: &QueryTable,
    config: &DataConfig,
    progress: &dyn Progress,
) -> anyhow::Result<Option<SplitLeaks>> {
    match of_table(table, config, progress) {
        Err(error) if matches!(error.downcast_ref(), Some(DataError::TooFewGroups { .. })) => Ok(None),
        found => found.map(Some),
    }
}

fn find(
    [train, val, test]: [&dyn Rows<QueryRow>; 3],
    n_rows: u64,
    least_similarity: f64,
    progress: &dyn Progress,
) -> anyhow::Result<SplitLeaks> {
    let mut watch = |n_read: u64| {
        progress.update(n_read.min(n_rows), n_rows, "rows compared");
        Ok::<_, anyhow::Error>(())
    };
    let [val, test] = find_leaks(train, [val, test], least_similarity, &mut watch)?;
    Ok(SplitLeaks { val, test })
}

/// Number of rows of a split in a run folder.
///
/// # Errors
/// The split cannot be read.
pub fn n_lines(dir: &RunDir, split: Split) -> anyhow::Result<u64> {
    let path = dir.split(split);
    let count = || -> std::io::Result<u64> {
        let lines = BufReader::new(std::fs::File::open(&path)?).split(b'\n');
        lines.map(|line| line.map(|_| 1)).sum()
    };
    let remedy = "put the file back, or run `querl convert CONFIG --from convert` to make it again";
    count().with_context(|| format!("{}: cannot be read; {remedy}", path.display()))
}

/// Reports leaks of the query table before the first paid call, and refuses to start (`data.on_leak`) if nothing was called yet and the
/// command includes a training. Once calls were made, leaks of the table are only warnings, since filters may remove them from the
/// dataset. Groups that cannot fill the splits are an error if the command makes the splits.
pub(crate) fn before_rewriting(run: &Run, last: StageName, progress: &dyn Progress) -> anyhow::Result<()> {
    let (config, table) = (&run.config.data, open_queries(&run.config.data)?);
    let found = match last {
        StageName::Rewrite | StageName::Validate => of_table_if_split(&table, config, progress)?,
        _ => Some(of_table(&table, config, progress)?),
    };
    let rewrites = run.dir.rewrites();
    let begun = [rewrites.clone(), Journal::path_for(&rewrites), run.dir.batches()];
    let is_begun = begun.iter().any(|path| path.exists());
    let on_leak = if last < StageName::Sft || is_begun { OnLeak::Warn } else { config.on_leak };
    found.map_or(Ok(()), |found| say(&found, found.sentences(), on_leak, progress))
}

/// Refuses to train (`data.on_leak`) if rows of test are in train, and warns about rows of val in train. Returns the number of leaked test
/// rows as a fact of the stage. Near-leaks were reported before `rewrite`.
pub(crate) fn before_training(run: &Run, progress: &dyn Progress) -> anyhow::Result<Facts> {
    let found = of_dataset(&run.dir, &run.config.data, progress)?;
    let leaks = [found.val.sentence(Split::Val), found.test.sentence(Split::Test)];
    say(&found, leaks.into_iter().flatten().collect(), run.config.data.on_leak, progress)?;
    let mut facts = Facts::default();
    facts.add(TEST_LEAKED, found.test.n_leaked as u64);
    Ok(facts)
}

fn say(found: &SplitLeaks, sentences: Vec<String>, on_leak: OnLeak, progress: &dyn Progress) -> anyhow::Result<()> {
    const REMEDY: &str = "give such rows one group (data.group_column), take them out of the query table, raise \
                          data.leak_similarity, or set data.on_leak = \"warn\"";
    let refused = found.test.sentence(Split::Test).filter(|_| on_leak == OnLeak::Refuse);
    for sentence in sentences.into_iter().filter(|sentence| Some(sentence) != refused.as_ref()) {
        progress.line(&format!("warning: {sentence}"));
    }
    match refused {
        Some(sentence) => Err(Stop::usage(format!("{sentence}; {REMEDY}")).into()),
        None => Ok(()),
    }
}

/// The warning about a finished training whose training split had rows of test; `None` without leaks.
pub(crate) fn note(stage: StageName, facts: &Facts) -> Option<String> {
    let n = facts.count(TEST_LEAKED);
    let what = format!("{n} row(s) of test were in train or nearly equal to a row of it when {stage} was trained");
    (n > 0).then(|| format!("{what}: its figures on test flatter it"))
}

/// As [`note`], for a finished training that is reused. Without a recorded figure the splits are checked now; missing splits give `None`.
pub(crate) fn reminder(run: &Run, stage: StageName, facts: &Facts) -> Option<String> {
    match facts.get(TEST_LEAKED) {
        Some(_) => note(stage, facts),
        None => of_dataset(&run.dir, &run.config.data, &Silent).ok()?.test.sentence(Split::Test),
    }
}
