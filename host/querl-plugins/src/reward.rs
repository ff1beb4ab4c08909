//! Reward plugins behind the port.

use crate::bindings::{rewards, types};
use crate::call::Caller;
use crate::convert::{self, EpisodeLists};
use crate::text::{is_code, printable};
use querl_core::ports::{PluginFault, RewardModel, RewardRange};
use querl_core::records::{Episode, Rejection, Reward, RewardComponent};
use std::collections::BTreeSet;

type Scored = Result<rewards::Score, types::Rejection>;

/// A configured reward plugin.
pub(crate) struct RewardPlugin {
    caller: Caller,
    indices: rewards::GuestIndices,
    range: RewardRange,
}

impl RewardPlugin {
    /// Asks the plugin for its range.
    pub(crate) fn new(caller: Caller, indices: rewards::GuestIndices) -> Result<Self, PluginFault> {
        let bounds = caller.call(1, |store, instance| indices.load(&mut *store, instance)?.call_range(store))?;
        let rewards::Bounds { min, max } = bounds;
        if min.is_finite() && max.is_finite() && min < max {
            return Ok(Self { caller, indices, range: RewardRange { min, max } });
        }
        Err(caller.fault(format!(
            "declares the range {min} to {max}; expected two finite numbers, the first below the second"
        )))
    }

    fn run(&self, episodes: &[Episode]) -> Result<Vec<Scored>, PluginFault> {
        let lists: Vec<_> = episodes.iter().map(EpisodeLists::new).collect();
        let arguments: Vec<_> =
            episodes.iter().zip(&lists).map(|(episode, lists)| convert::episode(episode, lists)).collect();
        self.caller.call(episodes.len(), |store, instance| {
            self.indices.load(&mut *store, instance)?.call_score_batch(store, &arguments)
        })
    }

    fn checked(&self, scored: Scored) -> Result<Result<Reward, Rejection>, String> {
        let score = match scored {
            Ok(score) => score,
            Err(rejection) => return convert::rejection(rejection).map(Err),
        };
        let RewardRange { min, max } = self.range;
        if !(min..=max).contains(&score.total) {
            return Err(format!(
                "total is {}; expected a number within the declared range {min} to {max}",
                score.total
            ));
        }
        Ok(Ok(Reward { total: score.total, components: components(score.components)? }))
    }
}

fn components(parts: Vec<rewards::Component>) -> Result<Vec<RewardComponent>, String> {
    let mut names = BTreeSet::new();
    for part in &parts {
        let name = printable(&part.name, 100);
        if !is_code(&part.name) {
            return Err(format!("component name is `{name}`; expected 1 to 64 of a to z, 0 to 9 and _"));
        }
        if !names.insert(&part.name) {
            return Err(format!("component `{name}` appears twice"));
        }
        if !part.value.is_finite() {
            return Err(format!("component `{name}` is {}; expected a finite number", part.value));
        }
    }
    Ok(parts.into_iter().map(|part| RewardComponent { name: part.name, value: part.value }).collect())
}

fn ids(episodes: &[Episode]) -> Vec<&str> {
    episodes.iter().map(|episode| episode.id.as_str()).collect()
}

impl RewardModel for RewardPlugin {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
        if episodes.is_empty() {
            return Ok(Vec::new());
        }
        let scored = self.run(episodes).map_err(|fault| {
            let alone = |index: usize| self.run(&episodes[index..=index]).map(drop);
            self.caller.located(fault, "episode", &ids(episodes), alone)
        })?;
        if scored.len() != episodes.len() {
            return Err(self.caller.wrong_length(scored.len(), "scores", "episode", &ids(episodes)));
        }
        let check = |(episode, scored): (&Episode, Scored)| {
            self.checked(scored).map_err(|message| self.caller.fault(format!("episode `{}`: {message}", episode.id)))
        };
        episodes.iter().zip(scored).map(check).collect()
    }

    fn range(&self) -> RewardRange {
        self.range
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}
