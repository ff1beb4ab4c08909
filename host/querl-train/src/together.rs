//! What ranks that train together do besides their sums.

use crate::policy::{Example, share};
use crate::{Metrics, State, StateStore, TrainError, slices};
use candle_core::Var;
use querl_core::ports::Progress;
use querl_model::{Mesh, Ranks, Shard};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The newest checkpoint, which the first rank reads for all. `store`: of the first alone.
pub(crate) fn newest(
    ranks: &Ranks,
    store: Option<&StateStore>,
    progress: &dyn Progress,
) -> Result<Arc<Option<(u64, State)>>, TrainError> {
    let mine = match ranks.is_first() {
        true => Some(store.map(|store| store.newest(progress)).transpose()?.flatten()),
        false => None,
    };
    Ok(ranks.broadcast(0, mine)?)
}

/// Compares what the ranks have trained. They start with the same weights and take the same steps: where one of them summed
/// other bits, a checkpoint of the first would not be of the training that went on. Ranks that hold a model together compare what
/// each of them has whole.
///
/// # Errors
/// Their weights differ, or a rank has failed.
pub(crate) fn check_same(
    mesh: &Mesh,
    stage: &'static str,
    step: u64,
    vars: &BTreeMap<String, Var>,
) -> Result<(), TrainError> {
    let is_same = is_same(&mesh.data, vars, |_| true)?
        && is_same(&mesh.tensor, vars, |name| Shard::adapter_axis(name).is_none())?;
    if is_same { Ok(()) } else { Err(TrainError::RanksDiffer { stage, step }) }
}

fn is_same(
    ranks: &Ranks,
    vars: &BTreeMap<String, Var>,
    is_compared: impl Fn(&str) -> bool,
) -> Result<bool, TrainError> {
    if ranks.world_size() == 1 {
        return Ok(true);
    }
    let mut digest = Sha256::new();
    for (name, var) in vars.iter().filter(|(name, _)| is_compared(name)) {
        digest.update(name);
        slices::read(var.as_tensor(), |values| digest_of(&mut digest, values))?;
    }
    let digests = ranks.all_gather(<[u8; 32]>::from(digest.finalize()))?;
    Ok(digests.iter().all(|digest| digest == &digests[0]))
}

/// Values at a time that a digest is given: of single numbers it would keep most of its time for the calls.
const DIGESTED: usize = 1024;

fn digest_of(digest: &mut Sha256, values: &[f32]) {
    let mut bytes = [0; DIGESTED * size_of::<f32>()];
    for part in values.chunks(DIGESTED) {
        let bytes = &mut bytes[..size_of_val(part)];
        bytes
            .chunks_exact_mut(size_of::<f32>())
            .zip(part)
            .for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
        digest.update(bytes);
    }
}

/// What `of_share` says of the examples of this rank, by index, with what it says on the others of theirs, in the order of the
/// examples.
pub(crate) fn gathered<T: Clone + Send + Sync + 'static>(
    ranks: &Ranks,
    examples: &[&Example],
    of_share: impl FnOnce(&[&Example]) -> Result<Vec<T>, TrainError>,
) -> Result<Vec<T>, TrainError> {
    if ranks.world_size() == 1 {
        return of_share(examples);
    }
    let mine = share(examples, ranks);
    let part: Vec<&Example> = mine.iter().map(|&index| examples[index]).collect();
    let found: Vec<(usize, T)> = mine.into_iter().zip(of_share(&part)?).collect();
    let all = ranks.all_gather(found)?;
    let mut all: Vec<(usize, T)> = all.iter().flat_map(|found| found.iter().cloned()).collect();
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, of_example)| of_example).collect())
}

/// Figures that are sums over rows: the sum over the ranks, in their order.
pub(crate) fn summed(ranks: &Ranks, mine: Metrics) -> Result<Metrics, TrainError> {
    if ranks.world_size() == 1 {
        return Ok(mine);
    }
    let mut sums = Metrics::new();
    for of_rank in ranks.all_gather(mine)? {
        of_rank.iter().for_each(|(name, value)| *sums.entry(name.clone()).or_default() += value);
    }
    Ok(sums)
}
