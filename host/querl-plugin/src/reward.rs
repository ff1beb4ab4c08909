//! Plugins that score: rewards over episodes, style scorers over dialogues. An item's score does not depend on other items.

use crate::call::Caller;
use crate::contract::ItemResult;
use crate::limits::{CallSize, MAX_COMPONENT, MAX_COMPONENTS, UsedNames, check_range, shown};
use crate::load::PluginKind;
use crate::text::{is_code, is_role, printable};
use crate::{json, packed};
use querl_core::ports::{EpisodeInputs, FaultKind, PluginFault, RewardModel, RewardRange, StyleScorer};
use querl_core::records::{Dialogue, Episode, EpisodeRef, Rejection, Reward, RewardComponent};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A checked result for one item.
pub(crate) type ItemScore = Result<Reward, Rejection>;

/// Calls a plugin that scores items (episodes or dialogues) and checks its results.
pub(crate) struct Scoring<'a, T> {
    pub(crate) caller: &'a Caller,
    /// Name of an item in messages: `episode` or `dialogue`.
    pub(crate) what: &'static str,
    pub(crate) id: for<'i> fn(&'i T) -> &'i str,
    /// Range of valid totals; a total outside of it is a fault of the plugin.
    pub(crate) range: RewardRange,
    /// Name of this range in messages.
    pub(crate) range_name: &'static str,
}

impl<T: Sync> Scoring<'_, T> {
    /// Scores all items by [`batch`](Self::batch), in one batch or, if calls of host functions are recorded with their item, each
    /// item alone.
    pub(crate) fn batches(
        &self,
        items: &[T],
        run: impl Fn(&[T], CallSize) -> Result<Vec<ItemResult>, PluginFault> + Sync,
    ) -> Result<Vec<ItemScore>, PluginFault> {
        match self.caller.calls_host() {
            true => Ok(in_order(items, |item| self.batch(std::slice::from_ref(item), &run))?.concat()),
            false => self.batch(items, run),
        }
    }

    /// Scores a batch: one result for each item, in order. `run` makes one call into the plugin.
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

    pub(crate) fn dropped(&self, fault: &PluginFault, item: &T) -> Result<Rejection, PluginFault> {
        self.caller.dropped(fault, self.what, (self.id)(item))
    }

    pub(crate) fn checked(&self, items: &[T], result: Vec<ItemResult>) -> Result<Vec<ItemScore>, PluginFault> {
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
        check_outcome(&result, self.range, self.range_name, &self.caller.used_names)?;
        Ok(result)
    }

    fn ids<'b>(&self, items: &'b [T]) -> Vec<&'b str> {
        items.iter().map(self.id).collect()
    }
}

/// Checks the contract's rules for one result.
fn check_outcome(
    outcome: &ItemScore,
    range: RewardRange,
    range_name: &str,
    used_names: &UsedNames,
) -> Result<(), String> {
    let score = match outcome {
        Ok(score) => score,
        Err(rejection) => return used_names.add_checked_code(&rejection.code),
    };
    let RewardRange { min, max } = range;
    if !(min..=max).contains(&score.total) {
        let total = shown(score.total);
        return Err(format!("total is {total}; expected a number within {range_name} {min} to {max}"));
    }
    check_components(&score.components)?;
    used_names.add_components(score.components.iter().map(|part| part.name.as_str()))
}

/// The contract's rules for the results of a reward, for native runs without a component: the host's checks, with the same
/// messages.
pub struct RewardRules {
    range: RewardRange,
    used_names: UsedNames,
}

impl RewardRules {
    /// Rules for totals within `range`.
    ///
    /// # Errors
    /// No range of totals: expected and got.
    pub fn new(range: RewardRange) -> Result<Self, String> {
        Ok(Self { range: check_range(range)?, used_names: UsedNames::default() })
    }

    /// Checks one result: total within the range, finite components, valid names and codes.
    ///
    /// # Errors
    /// The contract forbids the result: expected and got.
    pub fn check(&self, outcome: &Result<Reward, Rejection>) -> Result<(), String> {
        check_outcome(outcome, self.range, DECLARED_RANGE, &self.used_names)
    }
}

/// The name of a reward's range in messages.
const DECLARED_RANGE: &str = "the declared range";

fn check_components(parts: &[RewardComponent]) -> Result<(), String> {
    if parts.len() > MAX_COMPONENTS {
        return Err(format!("the score has {} components; expected at most {MAX_COMPONENTS}", parts.len()));
    }
    for RewardComponent { name, value } in parts {
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
    let mut names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("component `{}` appears twice", twice[0]));
    }
    Ok(())
}

/// How a batch of episodes is passed to a reward plugin. Results are equal; fuel differs between the forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RewardForm {
    /// One byte buffer, `packed-rewards.score-packed`: used by the host if a plugin exports it.
    Packed,
    /// A JSON text, `json-rewards.score-json`: used by the host if a plugin exports it.
    Json,
    /// Records, `rewards.score-batch` or `group-rewards.score-group`: exported by every reward plugin.
    Records,
}

pub(crate) struct RewardPlugin {
    pub(crate) caller: Caller,
    /// `Reward` or `GroupReward`.
    kind: PluginKind,
    form: RewardForm,
    range: RewardRange,
}

impl RewardPlugin {
    /// Opens a reward plugin, for which it calls `range`. `form` is the form of batches, or records if the plugin does not
    /// support it; without a `form` the cheapest that the plugin supports.
    pub(crate) fn new(caller: Caller, kind: PluginKind, form: Option<RewardForm>) -> Result<Self, PluginFault> {
        let contract = &*caller.exports.contract;
        let function = if kind == PluginKind::Reward { "rewards.range" } else { "group-rewards.range" };
        let range = caller.call(function, CallSize::of(1), |guest| contract.range(guest))?;
        let range = check_range(range).map_err(|message| caller.invalid_result(message))?;
        let is_wanted = |wanted: RewardForm| form.is_none_or(|form| form == wanted);
        let form = match () {
            () if contract.has_packed_rewards() && is_wanted(RewardForm::Packed) => RewardForm::Packed,
            () if contract.has_json_rewards() && is_wanted(RewardForm::Json) => RewardForm::Json,
            () => RewardForm::Records,
        };
        Ok(Self { caller, kind, form, range })
    }

    /// A form other than that of [`form`](Self::form), to compare results with; `None` if the plugin supports only one.
    pub(crate) fn other_form(&self) -> Option<RewardForm> {
        let contract = &*self.caller.exports.contract;
        match self.form {
            RewardForm::Packed | RewardForm::Json => Some(RewardForm::Records),
            RewardForm::Records if contract.has_packed_rewards() => Some(RewardForm::Packed),
            RewardForm::Records => contract.has_json_rewards().then_some(RewardForm::Json),
        }
    }

    pub(crate) fn form(&self) -> RewardForm {
        self.form
    }

    pub(crate) fn is_of_groups(&self) -> bool {
        self.kind == PluginKind::GroupReward
    }

    /// Scores episodes with one call into the plugin, in the given form.
    pub(crate) fn run(
        &self,
        form: RewardForm,
        episodes: &[EpisodeRef<'_>],
        size: CallSize,
    ) -> Result<Vec<ItemResult>, PluginFault> {
        let contract = &*self.caller.exports.contract;
        let (function, item_id) = match episodes {
            [first, ..] if self.is_of_groups() => ("group-rewards.score-group", first.group_id),
            [only] => ("rewards.score-batch", only.id),
            _ => ("rewards.score-batch", ""),
        };
        match form {
            RewardForm::Records => {
                self.caller.score(item_id, function, size, |guest| contract.score_records(guest, episodes))
            }
            // One byte buffer in each direction takes a third of the cost of records.
            RewardForm::Packed => {
                let (batch, max_bytes) = (contract.pack(episodes), self.caller.limits.values.output_bytes);
                self.caller.score(item_id, function, size, |guest| {
                    let results = contract.score_packed(guest, &batch)?;
                    Ok(packed::results(&results, episodes.len(), max_bytes)?)
                })
            }
            RewardForm::Json => {
                let batch =
                    json::batch(episodes).map_err(|error| self.caller.fault(FaultKind::Host, error.to_string()))?;
                self.caller
                    .score(item_id, function, size, |guest| Ok(json::results(&contract.score_json(guest, &batch)?)?))
            }
        }
    }

    pub(crate) fn scoring(&self) -> Scoring<'_, EpisodeRef<'_>> {
        Scoring {
            caller: &self.caller,
            what: "episode",
            id: |episode| episode.id,
            range: self.range,
            range_name: DECLARED_RANGE,
        }
    }

    fn score_episodes(&self, episodes: &[EpisodeRef<'_>]) -> Result<Vec<ItemScore>, PluginFault> {
        let scoring = self.scoring();
        let run = |episodes: &[EpisodeRef<'_>], size| self.run(self.form, episodes, size);
        let scores = scoring.batches(episodes, run)?;
        if !self.caller.calls_host() {
            self.recheck(episodes, &scores)?;
        }
        Ok(scores)
    }

    /// Scores each group in one call; results are in the order of the episodes.
    fn score_groups(&self, episodes: &[EpisodeRef<'_>]) -> Result<Vec<ItemScore>, PluginFault> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut known: BTreeMap<&str, usize> = BTreeMap::new();
        for (index, episode) in episodes.iter().enumerate() {
            let group = *known.entry(episode.group_id).or_insert(groups.len());
            if group == groups.len() {
                groups.push(Vec::new());
            }
            groups[group].push(index);
        }
        let score = |indices: &Vec<usize>| {
            let group: Vec<_> = indices.iter().map(|index| episodes[*index]).collect();
            self.score_group(&group)
        };
        let scores = match self.caller.calls_host() {
            true => in_order(&groups, score)?,
            false => groups.iter().map(score).collect::<Result<Vec<_>, _>>()?,
        };
        let mut scored: Vec<_> = groups.into_iter().flatten().zip(scores.into_iter().flatten()).collect();
        scored.sort_by_key(|(index, _)| *index);
        Ok(scored.into_iter().map(|(_, score)| score).collect())
    }

    /// With `on_limit = "drop"`, a group that hits a limit is dropped completely, because the score of an episode depends on the others.
    fn score_group(&self, group: &[EpisodeRef<'_>]) -> Result<Vec<ItemScore>, PluginFault> {
        let scoring = self.scoring();
        let in_group = |fault: PluginFault| self.caller.in_batch(&fault, "group", &[group[0].group_id]);
        match self.run(self.form, group, CallSize::of(group.len())) {
            Ok(results) if results.len() != group.len() => {
                let message = format!("returned {} scores for {} episodes", results.len(), group.len());
                Err(in_group(self.caller.invalid_result(message)))
            }
            Ok(results) => {
                let scores = scoring.checked(group, results)?;
                if !self.caller.calls_host() {
                    self.recheck(group, &scores)?;
                }
                Ok(scores)
            }
            Err(fault) if self.caller.drops(&fault) => {
                group.iter().map(|episode| Ok(Err(scoring.dropped(&fault, episode)?))).collect()
            }
            Err(fault) => Err(in_group(fault)),
        }
    }
}

/// Maximum number of threads that wait for host functions in one batch.
const MAX_WAITING: usize = 8;

/// Runs the items on several threads, because host functions wait for services. Returns the results, or the first fault, in the order of
/// the items.
fn in_order<T: Sync>(
    items: &[T],
    run: impl Fn(&T) -> Result<Vec<ItemScore>, PluginFault> + Sync,
) -> Result<Vec<Vec<ItemScore>>, PluginFault> {
    let (next, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        let mut done = Vec::new();
        while !is_stopped.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { break };
            let result = run(item);
            is_stopped.fetch_or(result.is_err(), Ordering::Relaxed);
            done.push((index, result));
        }
        done
    };
    let mut results: Vec<_> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..items.len().min(MAX_WAITING)).map(|_| scope.spawn(work)).collect();
        let mine = work();
        mine.into_iter()
            .chain(others.into_iter().flat_map(|other| other.join().expect("work does not panic")))
            .collect()
    });
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Scores the items that the contract can express; `rejections` has a rejection for each other one.
fn with_rejections(
    rejections: Vec<Option<Rejection>>,
    score: impl FnOnce() -> Result<Vec<ItemScore>, PluginFault>,
) -> Result<Vec<ItemScore>, PluginFault> {
    let mut scored = score()?.into_iter();
    let mut next = || scored.next().expect("one result for each item that was sent");
    Ok(rejections.into_iter().map(|rejection| rejection.map_or_else(&mut next, Err)).collect())
}

impl RewardModel for RewardPlugin {
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<ItemScore>, PluginFault> {
        let (contract, inputs) = (&*self.caller.exports.contract, self.caller.inputs);
        let parts: Vec<_> = episodes.iter().map(|episode| inputs.of(episode)).collect();
        let rejections: Vec<_> = parts.iter().map(|episode| contract.inexpressible(episode)).collect();
        let sent = parts.into_iter().zip(&rejections).filter(|(_, rejection)| rejection.is_none());
        let sent: Vec<_> = sent.map(|(episode, _)| episode).collect();
        with_rejections(rejections, || match self.is_of_groups() {
            true => self.score_groups(&sent),
            false => self.score_episodes(&sent),
        })
    }

    fn inputs(&self) -> EpisodeInputs {
        self.caller.inputs
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
    pub(crate) caller: Caller,
    /// True if calls of host functions are recorded with their dialogue.
    pub(crate) is_recorded: bool,
}

impl StyleScorer for StylePlugin {
    fn score_batch(&self, dialogues: &[Dialogue]) -> Result<Vec<ItemScore>, PluginFault> {
        let rejections: Vec<_> = dialogues.iter().map(odd_turns).collect();
        let sent = dialogues.iter().zip(&rejections).filter(|(_, rejection)| rejection.is_none());
        let sent: Vec<_> = sent.map(|(dialogue, _)| dialogue).collect();
        let scoring = Scoring {
            caller: &self.caller,
            what: "dialogue",
            id: |dialogue: &&Dialogue| &dialogue.id,
            range: RANGE,
            range_name: "the contract's range",
        };
        let run = |dialogues: &[&Dialogue], size| {
            let item_id = if let [only] = dialogues { only.id.as_str() } else { "" };
            self.caller.score(item_id, "style-scores.score-batch", size, |guest| {
                self.caller.exports.contract.score_dialogues(guest, dialogues)
            })
        };
        with_rejections(rejections, || match self.is_recorded {
            true => scoring.batches(&sent, run),
            false => scoring.batch(&sent, run),
        })
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}

/// The reason why a dialogue cannot be expressed in the contract.
fn odd_turns(dialogue: &Dialogue) -> Option<Rejection> {
    let rejected = |detail: String| Some(Rejection::new("invalid_dialogue", detail));
    if dialogue.turns.last().is_none_or(|last| last.role != "assistant") {
        return rejected("the last turn is not the assistant's".into());
    }
    let (turn, number) = dialogue.turns.iter().zip(1..).find(|(turn, _)| !is_role(&turn.role))?;
    rejected(format!("turn {number} is from `{}`; expected system, user or assistant", turn.role))
}
