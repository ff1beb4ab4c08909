//! The host's implementation of contract 0.2.

mod bindings;
mod convert;
mod packed;

pub(crate) use bindings::CallError;

use crate::contract::{
    Answer, Contract, GuestInstance, ItemResult, SettingError, calls, check_interface, exported, exports, scores,
};
use crate::description::RawDescription;
use crate::guest::Guest;
use crate::text::is_role;
use bindings::{filters, group_rewards, info, json_rewards, packed_rewards, prompts, rewards, style_scores};
use querl_core::ports::{InputUse, ParsedJudgement, PromptInput, PromptTask, RewardRange};
use querl_core::records::{Dialogue, EpisodeRef, Message, Rejection, Reward, RewardComponent, Sample, Verdict};
use wasmtime::Result;
use wasmtime::component::InstancePre;

exports! {
    prompts = "prompts",
    filters = "filters",
    rewards = "rewards",
    group_rewards = "group-rewards",
    json_rewards = "json-rewards",
    packed_rewards = "packed-rewards",
    style_scores = "style-scores",
}

impl Contract for Exports {
    calls!();

    fn describe(&self, guest: GuestInstance<'_>) -> Result<RawDescription> {
        let described = self.info.load(&mut *guest.store, guest.instance)?.call_describe(guest.store)?;
        Ok(convert::description(described))
    }

    fn messages(&self, guest: GuestInstance<'_>, task: PromptTask, input: &PromptInput<'_>) -> Answer<Vec<Message>> {
        let prompts = exported(self.prompts.as_ref())?.load(&mut *guest.store, guest.instance)?;
        let made = prompts.call_messages(guest.store, convert::task(task), convert::prompt_input(input))?;
        let messages = made.map(|messages| messages.into_iter().map(convert::message).collect());
        Ok(messages.map_err(convert::rejection))
    }

    fn check_batch(&self, guest: GuestInstance<'_>, samples: &[&Sample], columns: InputUse) -> Result<Vec<Verdict>> {
        let lists: Vec<_> = samples.iter().map(|sample| convert::SampleLists::new(sample, columns)).collect();
        let columns: Vec<_> = samples.iter().zip(&lists).map(|(sample, lists)| lists.columns(sample)).collect();
        let sent = samples.iter().zip(lists.iter().zip(&columns));
        let arguments: Vec<_> =
            sent.map(|(sample, (lists, columns))| convert::sample(sample, lists, columns)).collect();
        let filters = exported(self.filters.as_ref())?.load(&mut *guest.store, guest.instance)?;
        Ok(filters.call_check_batch(guest.store, &arguments)?.into_iter().map(convert::verdict).collect())
    }

    fn range(&self, guest: GuestInstance<'_>) -> Result<RewardRange> {
        let bounds = match &self.group_rewards {
            Some(group) => group.load(&mut *guest.store, guest.instance)?.call_range(guest.store)?,
            None => {
                exported(self.rewards.as_ref())?.load(&mut *guest.store, guest.instance)?.call_range(guest.store)?
            }
        };
        Ok(RewardRange { min: bounds.min, max: bounds.max })
    }

    fn score_records(&self, guest: GuestInstance<'_>, episodes: &[EpisodeRef<'_>]) -> Result<Vec<ItemResult>> {
        let lists: Vec<_> = episodes.iter().map(convert::EpisodeLists::new).collect();
        let columns: Vec<_> = episodes.iter().zip(&lists).map(|(episode, lists)| lists.columns(episode)).collect();
        let sent = episodes.iter().zip(lists.iter().zip(&columns));
        let arguments: Vec<_> =
            sent.map(|(episode, (lists, columns))| convert::episode(episode, lists, columns)).collect();
        Ok(match &self.group_rewards {
            Some(group) => {
                scores!(group.load(&mut *guest.store, guest.instance)?.call_score_group(guest.store, &arguments)?)
            }
            None => {
                let reward = exported(self.rewards.as_ref())?.load(&mut *guest.store, guest.instance)?;
                scores!(reward.call_score_batch(guest.store, &arguments)?)
            }
        })
    }

    fn score_json(&self, guest: GuestInstance<'_>, batch: &str) -> Result<String> {
        exported(self.json_rewards.as_ref())?
            .load(&mut *guest.store, guest.instance)?
            .call_score_json(guest.store, batch)
    }

    fn pack(&self, episodes: &[EpisodeRef<'_>]) -> Vec<u8> {
        packed::batch(episodes)
    }

    fn inexpressible(&self, episode: &EpisodeRef<'_>) -> Option<Rejection> {
        let odd = episode.prompt?.iter().find(|message| !is_role(&message.role))?;
        let detail = format!("a message of the prompt is from `{}`; expected system, user or assistant", odd.role);
        Some(Rejection::new("invalid_prompt", detail))
    }

    fn has_json_rewards(&self) -> bool {
        self.json_rewards.is_some()
    }
}
