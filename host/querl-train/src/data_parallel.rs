//! Data-parallel training: which rank computes which examples, and what ranks exchange in addition to gradients.

use crate::batching::{micro_batches, n_common_tokens};
use crate::checkpoint::write_values;
use crate::policy::Example;
use crate::{Metrics, State, StateStore, TrainError, tensor_data};
use candle_core::Var;
use querl_core::ports::Progress;
use querl_model::{Mesh, Ranks, Shard};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The newest checkpoint state with its step ([`StateStore::newest`]), which the first rank reads and broadcasts. `store`: `Some` on the first
/// rank only.
pub(crate) fn newest_checkpoint(
    ranks: &Ranks,
    store: Option<&StateStore>,
    progress: &dyn Progress,
    log_difference: &dyn Fn(&State) -> Result<Option<String>, TrainError>,
) -> Result<Arc<Option<(u64, State)>>, TrainError> {
    let mine = match ranks.is_first() {
        true => Some(store.map(|store| store.newest(progress, log_difference)).transpose()?.flatten()),
        false => None,
    };
    Ok(ranks.broadcast(0, mine)?)
}

/// Warns that the metrics log of a resumed training differs from what it was at the checkpoint.
pub(crate) fn warn_of_metrics(difference: &str, progress: &dyn Progress) {
    progress.line(&format!("warning: {difference}; the training is not affected"));
}

/// Checks the stop flag before a pass, if the results of all passes since `step` can be discarded.
///
/// # Errors
/// The stop flag is set and there is only one rank. Several ranks agree on a stop after a step instead.
pub(crate) fn check_stop(ranks: &Ranks, stop: &AtomicBool, stage: &'static str, step: u64) -> Result<(), TrainError> {
    #[cfg(test)]
    crate::testing::stop_if_due(stop);
    match ranks.world_size() == 1 && stop.load(Ordering::Relaxed) {
        true => Err(TrainError::Interrupted { stage, step }),
        false => Ok(()),
    }
}

/// Checks that all ranks have bit-identical weights. The ranks start with equal weights and take the same steps; if the sums of one rank
/// differed, a checkpoint of the first rank would not resume the same training. Tensor-parallel ranks compare the variables that are not
/// sharded.
pub(crate) fn check_equal_weights(
    mesh: &Mesh,
    stage: &'static str,
    step: u64,
    vars: &BTreeMap<String, Var>,
) -> Result<(), TrainError> {
    let is_equal = weights_are_equal(&mesh.data, vars, |_| true)?
        && weights_are_equal(&mesh.tensor, vars, |name| Shard::adapter_axis(name).is_none())?;
    if is_equal { Ok(()) } else { Err(TrainError::RanksDiffer { stage, step }) }
}

fn weights_are_equal(
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
        tensor_data::read(var.as_tensor(), |values| write_values(&mut digest, values))?
            .map_err(candle_core::Error::wrap)?;
    }
    let digests = ranks.all_gather(<[u8; 32]>::from(digest.finalize()))?;
    Ok(digests.iter().all(|digest| digest == &digests[0]))
}

/// Runs `compute` on this rank's share of the examples and all-gathers the results, in the order of the examples.
pub(crate) fn map_over_ranks<T: Clone + Send + Sync + 'static>(
    ranks: &Ranks,
    examples: &[&Example],
    compute: impl FnOnce(&[&Example]) -> Result<Vec<T>, TrainError>,
) -> Result<Vec<T>, TrainError> {
    if ranks.world_size() == 1 {
        return compute(examples);
    }
    let mine = rank_share(examples, ranks);
    let my_examples: Vec<&Example> = mine.iter().map(|&index| examples[index]).collect();
    let results: Vec<(usize, T)> = mine.into_iter().zip(compute(&my_examples)?).collect();
    let all = ranks.all_gather(results)?;
    let mut all: Vec<(usize, T)> = all.iter().flat_map(|results| results.iter().cloned()).collect();
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

/// All-reduces metrics that are sums over rows: adds `mine` of all ranks, in rank order.
pub(crate) fn all_reduce_metrics(ranks: &Ranks, mine: Metrics) -> Result<Metrics, TrainError> {
    if ranks.world_size() == 1 {
        return Ok(mine);
    }
    let mut sums = Metrics::new();
    for of_rank in ranks.all_gather(mine)? {
        of_rank.iter().for_each(|(name, value)| *sums.entry(name.clone()).or_default() += value);
    }
    Ok(sums)
}

/// Indices of the examples of a batch that this rank computes, ascending. Ranks get about equally many tokens, and examples that share a
/// prefix are on the same rank. Each index belongs to one rank; with few examples a rank may have none.
pub(crate) fn rank_share(examples: &[&Example], ranks: &Ranks) -> Vec<usize> {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    if world_size == 1 {
        return (0..examples.len()).collect();
    }
    let order = micro_batches(examples, usize::MAX).concat();
    let n_shared =
        |i: usize| i.checked_sub(1).map_or(0, |last| n_common_tokens(examples[order[last]], examples[order[i]]));
    // An example costs at least 1, so that equal examples are distributed, too.
    let costs: Vec<usize> = (0..order.len()).map(|i| (examples[order[i]].n_computed() - n_shared(i)).max(1)).collect();
    let total: usize = costs.iter().sum();
    let mut before = 0;
    let mut mine = Vec::new();
    for (index, cost) in order.into_iter().zip(costs) {
        // Assigned to the rank whose interval of the total cost contains the middle of this example.
        if (2 * before + cost) * world_size / (2 * total) == rank {
            mine.push(index);
        }
        before += cost;
    }
    mine.sort_unstable();
    mine
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_model::{RanksError, run_ranks};

    fn example(prompt: &[u32], response: &[u32]) -> Example {
        Example { prompt: prompt.to_vec(), response: response.to_vec() }
    }

    #[test]
    fn every_example_belongs_to_one_rank_and_costs_are_balanced() {
        let examples: Vec<Example> =
            (0..23u32).map(|i| example(&[1, 2, 3, i % 4], &vec![7 + i; 1 + (i as usize * 5) % 9])).collect();
        let examples: Vec<&Example> = examples.iter().collect();
        for world_size in [1, 2, 3, 5] {
            let shares = run_ranks(world_size, |ranks| Ok::<_, RanksError>(rank_share(&examples, &ranks))).unwrap();
            let mut all = shares.concat();
            all.sort_unstable();
            assert_eq!(all, (0..23).collect::<Vec<_>>());
            assert!(shares.iter().all(|share| share.is_sorted()));
            let rows = |share: &Vec<usize>| share.iter().map(|&i| examples[i].n_computed()).sum::<usize>();
            let (least, most) = (shares.iter().map(rows).min().unwrap(), shares.iter().map(rows).max().unwrap());
            assert!(most - least <= 2 * 13, "{world_size}: {least} to {most}");
        }
        let two = [examples[0], examples[1]];
        let shares = run_ranks(3, |ranks| Ok::<_, RanksError>(rank_share(&two, &ranks).len())).unwrap();
        assert_eq!(shares.iter().sum::<usize>(), 2);
    }
}
