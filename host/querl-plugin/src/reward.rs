//! Reward plugins behind the port.

use crate::bindings::{packed_rewards, rewards};
use crate::call::{Caller, Load};
use crate::convert::{self, EpisodeLists};
use crate::fault;
use crate::packed::{self, Unreadable};
use crate::scoring::{Said, Scored, Scoring};
use querl_core::ports::{FaultKind, PluginFault, RewardModel, RewardRange};
use querl_core::records::Episode;

/// What reports call it, in whichever form the batch goes in.
const SCORE_BATCH: &str = "rewards.score-batch";

/// How a batch of episodes goes into a reward plugin. The results are the same; the fuel is not, and is comparable within one form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RewardForm {
    /// One block of bytes, `packed-rewards.score-packed`: what the host uses where a plugin offers it.
    Packed,
    /// Records, `rewards.score-batch`: every reward plugin has it.
    Records,
}

/// A configured reward plugin.
pub(crate) struct RewardPlugin {
    caller: Caller,
    /// Where batches are packed.
    packed: Option<packed_rewards::GuestIndices>,
    indices: rewards::GuestIndices,
    range: RewardRange,
}

impl RewardPlugin {
    /// Asks the plugin for its range. A form that it does not offer is that of records.
    pub(crate) fn new(caller: Caller, indices: rewards::GuestIndices, form: RewardForm) -> Result<Self, PluginFault> {
        let bounds = caller.call("rewards.range", Load::of(1), |store, instance| {
            indices.load(&mut *store, instance)?.call_range(store)
        })?;
        let rewards::Bounds { min, max } = bounds;
        if min.is_finite() && max.is_finite() && min < max {
            let packed = caller.exports.packed_rewards.clone().filter(|_| form == RewardForm::Packed);
            return Ok(Self { caller, packed, indices, range: RewardRange { min, max } });
        }
        Err(caller.wrong(format!(
            "declares the range {min} to {max}; expected two finite numbers, the first below the second"
        )))
    }

    fn run(&self, episodes: &[Episode], load: Load) -> Result<Vec<Said>, PluginFault> {
        match &self.packed {
            Some(packed) => self.run_packed(packed, episodes, load),
            None => self.run_typed(episodes, load),
        }
    }

    /// One block of bytes each way: a third of what the same batch costs as records.
    fn run_packed(
        &self,
        packed: &packed_rewards::GuestIndices,
        episodes: &[Episode],
        load: Load,
    ) -> Result<Vec<Said>, PluginFault> {
        let batch = packed::batch(episodes);
        let said = self.caller.call(SCORE_BATCH, load, |store, instance| {
            packed.load(&mut *store, instance)?.call_score_packed(store, &batch)
        })?;
        let limits = &self.caller.limits;
        packed::results(&said, episodes.len(), limits.values.output_bytes).map_err(|error| match error {
            Unreadable::TooLarge => self.caller.fault(FaultKind::Limit, fault::too_much(limits)),
            other => self.caller.wrong(other.to_string()),
        })
    }

    fn run_typed(&self, episodes: &[Episode], load: Load) -> Result<Vec<Said>, PluginFault> {
        let lists: Vec<_> = episodes.iter().map(EpisodeLists::new).collect();
        let arguments: Vec<_> =
            episodes.iter().zip(&lists).map(|(episode, lists)| convert::episode(episode, lists)).collect();
        let said = self.caller.call(SCORE_BATCH, load, |store, instance| {
            self.indices.load(&mut *store, instance)?.call_score_batch(store, &arguments)
        })?;
        let parts = |parts: Vec<rewards::Component>| parts.into_iter().map(|part| (part.name, part.value)).collect();
        Ok(said.into_iter().map(|said| said.map(|score| (score.total, parts(score.components)))).collect())
    }
}

impl RewardModel for RewardPlugin {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Scored>, PluginFault> {
        let scoring = Scoring {
            caller: &self.caller,
            what: "episode",
            id: |episode: &Episode| &episode.id,
            range: self.range,
            range_name: "the declared range",
        };
        scoring.batch(episodes, |episodes, load| self.run(episodes, load))
    }

    fn range(&self) -> RewardRange {
        self.range
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}
