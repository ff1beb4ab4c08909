//! Contract 0.1.

mod bindings;
mod convert;
mod packed;

pub(crate) use bindings::CallError;

use crate::contract::{Contract, ItemResult, SettingError, calls, check_interface, exported, scores};
use crate::description::RawDescription;
use crate::guest::Guest;
use bindings::{filters, info, packed_rewards, prompts, rewards, style_scores};
use querl_core::ports::{InputUse, ParsedJudgement, PromptInput, PromptTask, RewardRange};
use querl_core::records::{Dialogue, EpisodeRef, Message, Rejection, Reward, RewardComponent, Sample, Verdict};
use wasmtime::component::{Instance, InstancePre};
use wasmtime::{Result, Store};

/// The exports of a component, looked up once.
pub(crate) struct Exports {
    info: info::GuestIndices,
    prompts: Option<prompts::GuestIndices>,
    filters: Option<filters::GuestIndices>,
    rewards: Option<rewards::GuestIndices>,
    packed_rewards: Option<packed_rewards::GuestIndices>,
    style_scores: Option<style_scores::GuestIndices>,
}

impl Exports {
    /// Looks up the interfaces for which `has` is true, and `info`.
    pub(crate) fn new(pre: &InstancePre<Guest>, has: impl Fn(&str) -> bool) -> Result<Self> {
        let indices = |interface| has(interface).then_some(pre);
        Ok(Self {
            info: info::GuestIndices::new(pre)?,
            prompts: indices("prompts").map(prompts::GuestIndices::new).transpose()?,
            filters: indices("filters").map(filters::GuestIndices::new).transpose()?,
            rewards: indices("rewards").map(rewards::GuestIndices::new).transpose()?,
            packed_rewards: indices("packed-rewards").map(packed_rewards::GuestIndices::new).transpose()?,
            style_scores: indices("style-scores").map(style_scores::GuestIndices::new).transpose()?,
        })
    }
}

impl Contract for Exports {
    calls!();

    fn check_types(&self, store: &mut Store<Guest>, instance: &Instance) -> Result<()> {
        let store = &mut *store;
        check_interface("info", Some(self.info.load(&mut *store, instance)))?;
        check_interface("prompts", self.prompts.as_ref().map(|prompts| prompts.load(&mut *store, instance)))?;
        check_interface("filters", self.filters.as_ref().map(|filters| filters.load(&mut *store, instance)))?;
        check_interface("rewards", self.rewards.as_ref().map(|rewards| rewards.load(&mut *store, instance)))?;
        let packed = self.packed_rewards.as_ref().map(|packed| packed.load(&mut *store, instance));
        check_interface("packed-rewards", packed)?;
        check_interface("style-scores", self.style_scores.as_ref().map(|scores| scores.load(&mut *store, instance)))
    }

    fn describe(&self, store: &mut Store<Guest>, instance: &Instance) -> Result<RawDescription> {
        let described = self.info.load(&mut *store, instance)?.call_describe(store)?;
        Ok(RawDescription { name: described.name, version: described.version, declared: None })
    }

    fn messages(
        &self,
        store: &mut Store<Guest>,
        instance: &Instance,
        task: PromptTask,
        input: &PromptInput<'_>,
    ) -> Result<std::result::Result<Vec<Message>, Rejection>> {
        let prompts = exported(self.prompts.as_ref())?.load(&mut *store, instance)?;
        let messages = prompts.call_messages(store, convert::task(task), convert::prompt_input(input))?;
        Ok(Ok(messages.into_iter().map(convert::message).collect()))
    }

    fn check_batch(
        &self,
        store: &mut Store<Guest>,
        instance: &Instance,
        samples: &[&Sample],
        _: InputUse,
    ) -> Result<Vec<Verdict>> {
        let hits: Vec<_> = samples.iter().map(|sample| convert::hits(&sample.hits)).collect();
        let arguments: Vec<_> = samples.iter().zip(&hits).map(|(sample, hits)| convert::sample(sample, hits)).collect();
        let filters = exported(self.filters.as_ref())?.load(&mut *store, instance)?;
        Ok(filters.call_check_batch(store, &arguments)?.into_iter().map(convert::verdict).collect())
    }

    fn range(&self, store: &mut Store<Guest>, instance: &Instance) -> Result<RewardRange> {
        let bounds = exported(self.rewards.as_ref())?.load(&mut *store, instance)?.call_range(store)?;
        Ok(RewardRange { min: bounds.min, max: bounds.max })
    }

    fn score_records(
        &self,
        store: &mut Store<Guest>,
        instance: &Instance,
        episodes: &[EpisodeRef<'_>],
    ) -> Result<Vec<ItemResult>> {
        let lists: Vec<_> = episodes.iter().map(convert::EpisodeLists::new).collect();
        let sent = episodes.iter().zip(&lists);
        let arguments: Vec<_> = sent
            .filter_map(|(episode, lists)| Some(convert::episode(episode, episode.baseline.as_ref()?, lists)))
            .collect();
        let reward = exported(self.rewards.as_ref())?.load(&mut *store, instance)?;
        Ok(scores!(reward.call_score_batch(store, &arguments)?))
    }

    fn score_json(&self, _: &mut Store<Guest>, _: &Instance, _: &str) -> Result<String> {
        Err(wasmtime::Error::msg("contract 0.1 has no `json-rewards`"))
    }

    fn pack(&self, episodes: &[EpisodeRef<'_>]) -> Vec<u8> {
        packed::batch(episodes)
    }

    fn inexpressible(&self, episode: &EpisodeRef<'_>) -> Option<Rejection> {
        let detail = "the episode has no baseline, which every reward of contract 0.1 gets; build the plugin for 0.2";
        episode.baseline.is_none().then(|| Rejection { code: "baseline_missing".into(), detail: detail.into() })
    }

    fn has_json_rewards(&self) -> bool {
        false
    }
}
