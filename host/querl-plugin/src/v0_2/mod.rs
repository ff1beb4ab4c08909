//! Contract 0.2.

mod bindings;
mod convert;
mod packed;

pub(crate) use bindings::CallError;

use crate::contract::{Contract, ItemResult, SettingError, calls, check_interface, exported, scores};
use crate::description::RawDescription;
use crate::guest::Guest;
use crate::text::is_role;
use bindings::{filters, group_rewards, info, json_rewards, packed_rewards, prompts, rewards, style_scores};
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
    group_rewards: Option<group_rewards::GuestIndices>,
    packed_rewards: Option<packed_rewards::GuestIndices>,
    json_rewards: Option<json_rewards::GuestIndices>,
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
            group_rewards: indices("group-rewards").map(group_rewards::GuestIndices::new).transpose()?,
            packed_rewards: indices("packed-rewards").map(packed_rewards::GuestIndices::new).transpose()?,
            json_rewards: indices("json-rewards").map(json_rewards::GuestIndices::new).transpose()?,
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
        let group = self.group_rewards.as_ref().map(|group| group.load(&mut *store, instance));
        check_interface("group-rewards", group)?;
        check_interface("json-rewards", self.json_rewards.as_ref().map(|json| json.load(&mut *store, instance)))?;
        let packed = self.packed_rewards.as_ref().map(|packed| packed.load(&mut *store, instance));
        check_interface("packed-rewards", packed)?;
        check_interface("style-scores", self.style_scores.as_ref().map(|scores| scores.load(&mut *store, instance)))
    }

    fn describe(&self, store: &mut Store<Guest>, instance: &Instance) -> Result<RawDescription> {
        let described = self.info.load(&mut *store, instance)?.call_describe(store)?;
        Ok(convert::description(described))
    }

    fn messages(
        &self,
        store: &mut Store<Guest>,
        instance: &Instance,
        task: PromptTask,
        input: &PromptInput<'_>,
    ) -> Result<std::result::Result<Vec<Message>, Rejection>> {
        let prompts = exported(self.prompts.as_ref())?.load(&mut *store, instance)?;
        let made = prompts.call_messages(store, convert::task(task), convert::prompt_input(input))?;
        let messages = made.map(|messages| messages.into_iter().map(convert::message).collect());
        Ok(messages.map_err(convert::rejection))
    }

    fn check_batch(
        &self,
        store: &mut Store<Guest>,
        instance: &Instance,
        samples: &[&Sample],
        columns: InputUse,
    ) -> Result<Vec<Verdict>> {
        let lists: Vec<_> = samples.iter().map(|sample| convert::SampleLists::new(sample, columns)).collect();
        let columns: Vec<_> = samples.iter().zip(&lists).map(|(sample, lists)| lists.columns(sample)).collect();
        let sent = samples.iter().zip(lists.iter().zip(&columns));
        let arguments: Vec<_> =
            sent.map(|(sample, (lists, columns))| convert::sample(sample, lists, columns)).collect();
        let filters = exported(self.filters.as_ref())?.load(&mut *store, instance)?;
        Ok(filters.call_check_batch(store, &arguments)?.into_iter().map(convert::verdict).collect())
    }

    fn range(&self, store: &mut Store<Guest>, instance: &Instance) -> Result<RewardRange> {
        let bounds = match &self.group_rewards {
            Some(group) => group.load(&mut *store, instance)?.call_range(store)?,
            None => exported(self.rewards.as_ref())?.load(&mut *store, instance)?.call_range(store)?,
        };
        Ok(RewardRange { min: bounds.min, max: bounds.max })
    }

    fn score_records(
        &self,
        store: &mut Store<Guest>,
        instance: &Instance,
        episodes: &[EpisodeRef<'_>],
    ) -> Result<Vec<ItemResult>> {
        let lists: Vec<_> = episodes.iter().map(convert::EpisodeLists::new).collect();
        let columns: Vec<_> = episodes.iter().zip(&lists).map(|(episode, lists)| lists.columns(episode)).collect();
        let sent = episodes.iter().zip(lists.iter().zip(&columns));
        let arguments: Vec<_> =
            sent.map(|(episode, (lists, columns))| convert::episode(episode, lists, columns)).collect();
        Ok(match &self.group_rewards {
            Some(group) => scores!(group.load(&mut *store, instance)?.call_score_group(store, &arguments)?),
            None => {
                let reward = exported(self.rewards.as_ref())?.load(&mut *store, instance)?;
                scores!(reward.call_score_batch(store, &arguments)?)
            }
        })
    }

    fn score_json(&self, store: &mut Store<Guest>, instance: &Instance, batch: &str) -> Result<String> {
        exported(self.json_rewards.as_ref())?.load(&mut *store, instance)?.call_score_json(store, batch)
    }

    fn pack(&self, episodes: &[EpisodeRef<'_>]) -> Vec<u8> {
        packed::batch(episodes)
    }

    fn inexpressible(&self, episode: &EpisodeRef<'_>) -> Option<Rejection> {
        let odd = episode.prompt?.iter().find(|message| !is_role(&message.role))?;
        let detail = format!("a message of the prompt is from `{}`; expected system, user or assistant", odd.role);
        Some(Rejection { code: "invalid_prompt".into(), detail })
    }

    fn has_json_rewards(&self) -> bool {
        self.json_rewards.is_some()
    }
}
