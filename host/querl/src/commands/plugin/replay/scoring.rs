//! Scores many episodes with one plugin, in parallel on all cores.

use crate::terminal::StageProgress;
use querl_core::ports::{PluginFault, Progress, RewardModel};
use querl_core::records::Episode;
use querl_eval::Outcome;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Episodes per call, as in training. Larger batches save little time with a fast plugin, and a slow one may exceed its time limit.
const BATCH: usize = 64;

const SILENT_FOR: Duration = Duration::from_secs(2);

/// Scores episodes with a plugin: one outcome per episode, in order, independent of the number of cores. `label`: name of the progress,
/// which is shown after [`SILENT_FOR`].
pub(in crate::commands::plugin) fn score(
    model: &dyn RewardModel,
    episodes: &[Episode],
    label: &'static str,
) -> anyhow::Result<Vec<Outcome>> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    score_on(n_threads, model, episodes, label)
}

fn score_on(
    n_threads: usize,
    model: &dyn RewardModel,
    episodes: &[Episode],
    label: &'static str,
) -> anyhow::Result<Vec<Outcome>> {
    let work = Work {
        model,
        batches: batches(episodes),
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        progress: LateProgress { label, since: Instant::now(), n_total: episodes.len() as u64, shown: OnceLock::new() },
        n_done: AtomicUsize::new(0),
    };
    let mut done: Vec<ScoredBatch> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(|| work.run())).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<ScoredBatch>>| match thread.join() {
            Ok(scored) => scored,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().flat_map(join).collect()
    });
    done.sort_by_key(|(index, _)| *index);
    let mut outcomes = Vec::with_capacity(episodes.len());
    for (_, scored) in done {
        outcomes.extend(scored?);
    }
    Ok(outcomes)
}

/// Splits the episodes into batches of [`BATCH`], or more, so that no group is divided.
fn batches(mut episodes: &[Episode]) -> Vec<&[Episode]> {
    let mut batches = Vec::new();
    while !episodes.is_empty() {
        let mut n = BATCH.min(episodes.len());
        while n < episodes.len() && episodes[n].group_id == episodes[n - 1].group_id {
            n += 1;
        }
        let (batch, rest) = episodes.split_at(n);
        batches.push(batch);
        episodes = rest;
    }
    batches
}

/// Index and outcomes of one batch.
type ScoredBatch = (usize, Result<Vec<Outcome>, PluginFault>);

struct Work<'a> {
    model: &'a dyn RewardModel,
    batches: Vec<&'a [Episode]>,
    next: AtomicUsize,
    stop: AtomicBool,
    progress: LateProgress,
    n_done: AtomicUsize,
}

impl Work<'_> {
    /// Scores batches in order until none is left or a fault occurs. All batches before a fault were started by then, so the first fault in
    /// the order of the episodes is always found.
    fn run(&self) -> Vec<ScoredBatch> {
        let mut scored = Vec::new();
        while !self.stop.load(Ordering::SeqCst) {
            let index = self.next.fetch_add(1, Ordering::SeqCst);
            let Some(batch) = self.batches.get(index) else { break };
            let result = self.model.score_batch(batch);
            self.stop.fetch_or(result.is_err(), Ordering::SeqCst);
            scored.push((index, result));
            self.progress.update(self.n_done.fetch_add(batch.len(), Ordering::SeqCst) + batch.len());
        }
        scored
    }
}

/// Progress that is shown only after [`SILENT_FOR`].
struct LateProgress {
    label: &'static str,
    since: Instant,
    n_total: u64,
    shown: OnceLock<StageProgress>,
}

impl LateProgress {
    fn update(&self, n_done: usize) {
        if self.since.elapsed() > SILENT_FOR {
            self.shown.get_or_init(|| StageProgress::start(self.label)).update(n_done as u64, self.n_total, "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::episodes::parse;
    use querl_core::ports::{FaultKind, RewardRange};
    use querl_core::records::Reward;

    /// Scores an episode with its id as a number. Episodes in `broken` fault, earlier ones more slowly.
    struct Numbers {
        broken: &'static [usize],
    }

    impl RewardModel for Numbers {
        fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Outcome>, PluginFault> {
            let score = |episode: &Episode| {
                let number: usize = episode.id.parse().unwrap();
                if self.broken.contains(&number) {
                    std::thread::sleep(Duration::from_millis(if number < 100 { 60 } else { 0 }));
                    let message = format!("episode `{number}`: broken");
                    let (plugin, version, log) = ("numbers".into(), "1".into(), Vec::new());
                    return Err(PluginFault { plugin, version, message, kind: FaultKind::Trap, log });
                }
                Ok(Ok(Reward { total: number as f64, components: Vec::new() }))
            };
            episodes.iter().map(score).collect()
        }

        fn range(&self) -> RewardRange {
            RewardRange { min: 0.0, max: 1e6 }
        }

        fn name(&self) -> &str {
            "numbers"
        }
    }

    fn episodes(n: usize) -> Vec<Episode> {
        let line = |id: usize| {
            format!(
                r#"{{"format":2,"episode":{{"id":"{id}","query":"q","policy":{{"rewrite":"a"}},"baseline":{{"rewrite":"b"}}}}}}"#
            )
        };
        (0..n).map(|id| parse(line(id).as_bytes(), 1).unwrap().unwrap().episode).collect()
    }

    #[test]
    fn outcomes_are_in_order_on_any_number_of_threads() {
        let episodes = episodes(1000);
        for n_threads in [1, 7] {
            let outcomes = score_on(n_threads, &Numbers { broken: &[] }, &episodes, "test").unwrap();
            let totals: Vec<f64> = outcomes.iter().map(|outcome| outcome.as_ref().unwrap().total).collect();
            assert_eq!(totals, (0..1000).map(|id| id as f64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn no_group_is_divided() {
        let mut episodes = episodes(200);
        episodes[60..70].iter_mut().for_each(|episode| episode.group_id = "g".into());
        assert_eq!(batches(&episodes).iter().map(|batch| batch.len()).collect::<Vec<_>>(), [70, 64, 64, 2]);
    }

    #[test]
    fn the_first_fault_of_the_file_is_named_though_a_later_one_is_quicker() {
        let error = score_on(4, &Numbers { broken: &[70, 200] }, &episodes(300), "test").unwrap_err();
        assert_eq!(error.to_string(), "plugin numbers 1: episode `70`: broken");
    }
}
