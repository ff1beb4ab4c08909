//! The host's implementation of contract 0.1.

mod bindings;
mod convert;
mod packed;

pub(crate) use bindings::CallError;

use crate::contract::{
    Answer, Contract, GuestInstance, ItemResult, SettingError, calls, check_interface, exported, exports, scores,
};
use crate::description::RawDescription;
use crate::guest::Guest;
use bindings::{filters, info, packed_rewards, prompts, rewards, style_scores};
use querl_core::ports::{InputUse, ParsedJudgement, PromptInput, PromptTask, RewardRange};
use querl_core::records::{Dialogue, EpisodeRef, Message, Rejection, Reward, RewardComponent, Sample, Verdict};
use wasmtime::Result;
use wasmtime::component::InstancePre;

exports! {
    prompts = "prompts",
    filters = "filters",
    rewards = "rewards",
    packed_rewards = "packed-rewards",
    style_scores = "style-scores",
}

impl Contract for Exports {
    calls!();

    fn describe(&self, guest: GuestInstance<'_>) -> Result<RawDescription> {
        let described = self.info.load(&mut *guest.store, guest.instance)?.call_describe(guest.store)?;
        Ok(RawDescription { name: described.name, version: described.version, declared: None })
    }

    fn messages(&self, guest: GuestInstance<'_>, task: PromptTask, input: &PromptInput<'_>) -> Answer<Vec<Message>> {
        let prompts = exported(self.prompts.as_ref())?.load(&mut *guest.store, guest.instance)?;
        let messages = prompts.call_messages(guest.store, convert::task(task), convert::prompt_input(input))?;
        Ok(Ok(messages.into_iter().map(convert::message).collect()))
    }

    fn check_batch(&self, guest: GuestInstance<'_>, samples: &[&Sample], _: InputUse) -> Result<Vec<Verdict>> {
        let hits: Vec<_> = samples.iter().map(|sample| convert::hits(&sample.hits)).collect();
        let arguments: Vec<_> = samples.iter().zip(&hits).map(|(sample, hits)| convert::sample(sample, hits)).collect();
        let filters = exported(self.filters.as_ref())?.load(&mut *guest.store, guest.instance)?;
        Ok(filters.call_check_batch(guest.store, &arguments)?.into_iter().map(convert::verdict).collect())
    }

    fn range(&self, guest: GuestInstance<'_>) -> Result<RewardRange> {
        let bounds =
            exported(self.rewards.as_ref())?.load(&mut *guest.store, guest.instance)?.call_range(guest.store)?;
        Ok(RewardRange { min: bounds.min, max: bounds.max })
    }

    fn score_records(&self, guest: GuestInstance<'_>, episodes: &[EpisodeRef<'_>]) -> Result<Vec<ItemResult>> {
        let lists: Vec<_> = episodes.iter().map(convert::EpisodeLists::new).collect();
        let sent = episodes.iter().zip(&lists);
        let arguments: Vec<_> = sent
            .filter_map(|(episode, lists)| Some(convert::episode(episode, episode.baseline.as_ref()?, lists)))
            .collect();
        let reward = exported(self.rewards.as_ref())?.load(&mut *guest.store, guest.instance)?;
        Ok(scores!(reward.call_score_batch(guest.store, &arguments)?))
    }

    fn score_json(&self, _: GuestInstance<'_>, _: &str) -> Result<String> {
        Err(wasmtime::Error::msg("contract 0.1 has no `json-rewards`"))
    }

    fn pack(&self, episodes: &[EpisodeRef<'_>]) -> Vec<u8> {
        packed::batch(episodes)
    }

    fn inexpressible(&self, episode: &EpisodeRef<'_>) -> Option<Rejection> {
        let detail = "the episode has no baseline, which every reward of contract 0.1 gets; build the plugin for 0.2";
        episode.baseline.is_none().then(|| Rejection::new(Rejection::BASELINE_MISSING, detail))
    }

    fn has_json_rewards(&self) -> bool {
        false
    }
}
