//! Plugins that score: rewards over episodes, style scorers over dialogues. An item's score does not depend on other items.

use crate::bindings::{packed_rewards, rewards, style_scores, types};
use crate::call::Caller;
use crate::convert::EpisodeLists;
use crate::limits::{CallSize, MAX_COMPONENT, MAX_COMPONENTS, MAX_TOTAL};
use crate::packed::PackedError;
use crate::text::{is_code, printable};
use crate::{convert, error, packed};
use querl_core::ports::{FaultKind, PluginFault, RewardModel, RewardRange, StyleScorer};
use querl_core::records::{Dialogue, Episode, Rejection, Reward, RewardComponent};

/// A checked result for one item.
pub(crate) type ItemScore = Result<Reward, Rejection>;

/// A plugin's result for one item, before it is checked: total and components, or a rejection.
pub(crate) type ItemResult = Result<(f64, Vec<(String, f64)>), types::Rejection>;

/// How the items of one kind of plugin are called and checked.
pub(crate) struct Scoring<'a, T> {
    pub(crate) caller: &'a Caller,
    /// `episode` or `dialogue`.
    pub(crate) what: &'static str,
    pub(crate) id: fn(&T) -> &str,
    /// Totals outside of it are faults.
    pub(crate) range: RewardRange,
    /// The name of the range in messages.
    pub(crate) range_name: &'static str,
}

impl<T> Scoring<'_, T> {
    /// One result for each item, in order; `run` is one call into the plugin.
    ///
    /// With `on_limit = "drop"`, when the call hits a limit each item is run alone with the fuel of the whole batch, and items that
    /// still hit a limit are dropped. Whether an item is dropped depends on the item and the batch size, never on other items.
    pub(crate) fn batch(
        &self,
        items: &[T],
        run: impl Fn(&[T], CallSize) -> Result<Vec<ItemResult>, PluginFault>,
    ) -> Result<Vec<ItemScore>, PluginFault> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let alone = CallSize::part_of(items.len(), 1);
        match (run(items, CallSize::of(items.len())), items) {
            (Ok(result), _) => self.checked(items, result),
            (Err(fault), [item]) if self.caller.drops(&fault) => Ok(vec![Err(self.dropped(&fault, item)?)]),
            (Err(fault), _) if self.caller.drops(&fault) => self.one_by_one(items, |item| run(item, alone)),
            (Err(fault), _) => {
                let try_alone = |index: usize| run(&items[index..=index], alone).map(drop);
                Err(self.caller.locate(fault, self.what, &self.ids(items), try_alone))
            }
        }
    }

    /// Runs each item alone, and drops those that hit a limit.
    fn one_by_one(
        &self,
        items: &[T],
        run: impl Fn(&[T]) -> Result<Vec<ItemResult>, PluginFault>,
    ) -> Result<Vec<ItemScore>, PluginFault> {
        let deadline = self.caller.drop_deadline();
        let mut scored = Vec::with_capacity(items.len());
        for item in items.chunks(1) {
            self.caller.check_drop_deadline(deadline, self.what, &self.ids(items))?;
            match run(item) {
                Ok(result) => scored.extend(self.checked(item, result)?),
                Err(fault) if self.caller.drops(&fault) => scored.push(Err(self.dropped(&fault, &item[0])?)),
                Err(fault) => return Err(self.caller.in_batch(&fault, self.what, &self.ids(item))),
            }
        }
        Ok(scored)
    }

    fn dropped(&self, fault: &PluginFault, item: &T) -> Result<Rejection, PluginFault> {
        self.caller.dropped(fault, self.what, (self.id)(item))
    }

    fn checked(&self, items: &[T], result: Vec<ItemResult>) -> Result<Vec<ItemScore>, PluginFault> {
        if result.len() != items.len() {
            return Err(self.caller.wrong_length(result.len(), "scores", self.what, &self.ids(items)));
        }
        let check = |(item, result): (&T, ItemResult)| {
            let named = |message| self.caller.invalid_result(format!("{} `{}`: {message}", self.what, (self.id)(item)));
            self.score(result).map_err(named)
        };
        items.iter().zip(result).map(check).collect()
    }

    fn score(&self, result: ItemResult) -> Result<ItemScore, String> {
        let (total, parts) = match result {
            Ok(score) => score,
            Err(rejection) => return self.caller.rejection(rejection).map(Err),
        };
        let RewardRange { min, max } = self.range;
        if !(min..=max).contains(&total) {
            let name = self.range_name;
            let total = shown(total);
            return Err(format!("total is {total}; expected a number within {name} {min} to {max}"));
        }
        let components = components(parts)?;
        self.caller.used_names.add_components(components.iter().map(|part| part.name.as_str()))?;
        Ok(Ok(Reward { total, components }))
    }

    fn ids<'b>(&self, items: &'b [T]) -> Vec<&'b str> {
        items.iter().map(self.id).collect()
    }
}

/// A number without hundreds of digits.
fn shown(number: f64) -> String {
    if number.abs() < 1e15 { number.to_string() } else { format!("{number:e}") }
}

fn components(parts: Vec<(String, f64)>) -> Result<Vec<RewardComponent>, String> {
    if parts.len() > MAX_COMPONENTS {
        return Err(format!("the score has {} components; expected at most {MAX_COMPONENTS}", parts.len()));
    }
    for (name, value) in &parts {
        if !is_code(name) {
            let shown = printable(name, 100);
            return Err(format!("component name is `{shown}`; expected 1 to 64 of a to z, 0 to 9 and _"));
        }
        if !value.is_finite() {
            return Err(format!("component `{name}` is {value}; expected a finite number"));
        }
        if value.abs() > MAX_COMPONENT {
            return Err(format!(
                "component `{name}` is {}; expected at most {MAX_COMPONENT:e} in magnitude",
                shown(*value)
            ));
        }
    }
    let mut names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("component `{}` appears twice", twice[0]));
    }
    Ok(parts.into_iter().map(|(name, value)| RewardComponent { name, value }).collect())
}

/// The function's name in reports, for both forms.
const SCORE_BATCH: &str = "rewards.score-batch";

/// How a batch of episodes is passed to a reward plugin. Results are equal; fuel differs between the forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RewardForm {
    /// One block of bytes, `packed-rewards.score-packed`: the host's choice where a plugin exports it.
    Packed,
    /// Records, `rewards.score-batch`: every reward plugin has it.
    Records,
}

pub(crate) struct RewardPlugin {
    caller: Caller,
    packed: Option<packed_rewards::GuestIndices>,
    indices: rewards::GuestIndices,
    range: RewardRange,
}

impl RewardPlugin {
    /// Calls `rewards.range`. Without `packed-rewards`, the form is that of records.
    pub(crate) fn new(caller: Caller, indices: rewards::GuestIndices, form: RewardForm) -> Result<Self, PluginFault> {
        let bounds = caller.call("rewards.range", CallSize::of(1), |store, instance| {
            indices.load(&mut *store, instance)?.call_range(store)
        })?;
        let rewards::Bounds { min, max } = bounds;
        let is_ordered = min.is_finite() && max.is_finite() && min < max;
        if is_ordered && min.abs().max(max.abs()) <= MAX_TOTAL {
            let packed = caller.exports.packed_rewards.clone().filter(|_| form == RewardForm::Packed);
            return Ok(Self { caller, packed, indices, range: RewardRange { min, max } });
        }
        let expected = match is_ordered {
            true => format!("bounds of at most {MAX_TOTAL:e} in magnitude"),
            false => "two finite numbers, the first below the second".to_owned(),
        };
        let range = format!("{} to {}", shown(min), shown(max));
        Err(caller.invalid_result(format!("declares the range {range}; expected {expected}")))
    }

    fn run(&self, episodes: &[Episode], size: CallSize) -> Result<Vec<ItemResult>, PluginFault> {
        match &self.packed {
            Some(packed) => self.run_packed(packed, episodes, size),
            None => self.run_typed(episodes, size),
        }
    }

    /// One block of bytes each way: a third of what the same batch costs as records.
    fn run_packed(
        &self,
        packed: &packed_rewards::GuestIndices,
        episodes: &[Episode],
        size: CallSize,
    ) -> Result<Vec<ItemResult>, PluginFault> {
        let batch = packed::batch(episodes);
        let result = self.caller.call(SCORE_BATCH, size, |store, instance| {
            packed.load(&mut *store, instance)?.call_score_packed(store, &batch)
        })?;
        let limits = &self.caller.limits;
        packed::results(&result, episodes.len(), limits.values.output_bytes).map_err(|error| match error {
            PackedError::TooLarge => self.caller.fault(FaultKind::Limit, error::too_large(limits)),
            other => self.caller.invalid_result(other.to_string()),
        })
    }

    fn run_typed(&self, episodes: &[Episode], size: CallSize) -> Result<Vec<ItemResult>, PluginFault> {
        let lists: Vec<_> = episodes.iter().map(EpisodeLists::new).collect();
        let arguments: Vec<_> =
            episodes.iter().zip(&lists).map(|(episode, lists)| convert::episode(episode, lists)).collect();
        let result = self.caller.call(SCORE_BATCH, size, |store, instance| {
            self.indices.load(&mut *store, instance)?.call_score_batch(store, &arguments)
        })?;
        let parts = |parts: Vec<rewards::Component>| parts.into_iter().map(|part| (part.name, part.value)).collect();
        Ok(result.into_iter().map(|result| result.map(|score| (score.total, parts(score.components)))).collect())
    }
}

impl RewardModel for RewardPlugin {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<ItemScore>, PluginFault> {
        let scoring = Scoring {
            caller: &self.caller,
            what: "episode",
            id: |episode: &Episode| &episode.id,
            range: self.range,
            range_name: "the declared range",
        };
        scoring.batch(episodes, |episodes, size| self.run(episodes, size))
    }

    fn range(&self) -> RewardRange {
        self.range
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}

/// The range of every style scorer, from the contract.
const RANGE: RewardRange = RewardRange { min: 0.0, max: 1.0 };

/// A configured style scorer plugin.
pub(crate) struct StylePlugin {
    caller: Caller,
    indices: style_scores::GuestIndices,
}

/// A dialogue as an argument of the contract.
struct DialogueArgument<'a> {
    id: &'a str,
    turns: Vec<types::MessageParam<'a>>,
}

impl StylePlugin {
    pub(crate) fn new(caller: Caller, indices: style_scores::GuestIndices) -> Self {
        Self { caller, indices }
    }

    fn run(&self, dialogues: &[DialogueArgument<'_>], size: CallSize) -> Result<Vec<ItemResult>, PluginFault> {
        let arguments: Vec<_> =
            dialogues.iter().map(|sent| style_scores::Dialogue { id: sent.id, turns: &sent.turns }).collect();
        let result = self.caller.call("style-scores.score-batch", size, |store, instance| {
            self.indices.load(&mut *store, instance)?.call_score_batch(store, &arguments)
        })?;
        let parts =
            |parts: Vec<style_scores::Component>| parts.into_iter().map(|part| (part.name, part.value)).collect();
        Ok(result.into_iter().map(|result| result.map(|score| (score.total, parts(score.components)))).collect())
    }
}

impl StyleScorer for StylePlugin {
    fn score_batch(&self, dialogues: &[Dialogue]) -> Result<Vec<ItemScore>, PluginFault> {
        let (mut arguments, mut rejections) = (Vec::new(), Vec::new());
        for dialogue in dialogues {
            let turns = convert::turns(dialogue);
            rejections.push(turns.map(|turns| arguments.push(DialogueArgument { id: &dialogue.id, turns })));
        }
        let scoring = Scoring {
            caller: &self.caller,
            what: "dialogue",
            id: |dialogue: &DialogueArgument<'_>| dialogue.id,
            range: RANGE,
            range_name: "the contract's range",
        };
        let mut scored = scoring.batch(&arguments, |dialogues, size| self.run(dialogues, size))?.into_iter();
        let mut next = || scored.next().expect("one result for each dialogue that was sent");
        Ok(rejections.into_iter().map(|sent| sent.and_then(|()| next())).collect())
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}
