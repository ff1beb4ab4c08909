//! Import of a stage's result that another program computed: earlier results of the stage are moved aside, and the ledger records the
//! current inputs, so that a later change of an input is detected.

use super::previous::set_aside;
use super::stage::remove;
use super::{check_upstream, logs, recover, stage_of};
use crate::ledger::{Entry, Facts, Ledger, Outputs, StageName};
use crate::metrics_log;
use crate::run::Run;
use anyhow::Context;
use std::path::PathBuf;

/// Imports the stage `name`: `write` writes its files, and the ledger records it as finished with `facts`. Returns the folder of the
/// earlier results, if there were any.
///
/// # Errors
/// An earlier stage is unfinished, or has changed since a later stage read it, or a file cannot be written. The earlier results are then
/// restored.
pub(crate) fn import_stage(
    run: &Run,
    name: StageName,
    facts: Facts,
    write: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Option<PathBuf>> {
    recover(&run.dir, run.reporter.as_ref())?;
    let mut ledger = Ledger::open(&run.dir.stages())?;
    check_upstream(run, &ledger, name)?;
    let stage = stage_of(name);
    let begun = Entry::begun(stage.inputs(run, &ledger)?);
    let earlier = set_aside(run, &ledger, stage)?;
    ledger.put(name, begun.clone())?;
    if let Some(earlier) = &earlier {
        earlier.settle().with_context(|| format!("{name}: previous cannot be written"))?;
    }
    let written = write().and_then(|()| {
        let outputs = Outputs::of(run.dir.root(), &stage.outputs(&run.dir))?;
        let entry = Entry { finished: true, facts, outputs, logs: logs(run, stage)?, ..begun };
        // Done before the ledger has the import, because the next result of the stage would remove the earlier results.
        Ok((entry, keep(run, name)?))
    });
    match written {
        Ok((entry, kept)) => {
            ledger.put(name, entry)?;
            Ok(kept)
        }
        Err(error) => {
            match earlier {
                Some(earlier) => earlier.restore(&run.dir, &mut ledger)?,
                None => {
                    stage.owned(&run.dir).iter().try_for_each(|path| remove(path))?;
                    metrics_log::remove_lines(&run.dir.metrics(), name.as_str())?;
                    ledger.put(name, None::<Entry>)?;
                }
            }
            Err(error)
        }
    }
}

/// Moves the earlier results of a stage, the finished and the stopped one, to a folder that no later run of it restores or removes. `None`
/// where there is none.
fn keep(run: &Run, name: StageName) -> anyhow::Result<Option<PathBuf>> {
    let folder = run.dir.previous().join(name.as_str());
    if !folder.exists() {
        return Ok(None);
    }
    let place = |number: u32| run.dir.previous().join(format!("{name}-before-import-{number}"));
    let kept = (1..).map(place).find(|place| !place.exists()).expect("there are more numbers than folders");
    std::fs::rename(&folder, &kept).with_context(|| format!("{}: cannot be moved", folder.display()))?;
    Ok(Some(kept))
}
