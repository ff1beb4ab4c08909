//! What the plugins that score have in common: batches whose items do not depend on each other.

use crate::bindings::types;
use crate::call::{Caller, Load};
use crate::convert;
use crate::text::{is_code, printable};
use querl_core::ports::{PluginFault, RewardRange};
use querl_core::records::{Rejection, Reward, RewardComponent};

/// One item's score, as the ports have it.
pub(crate) type Scored = Result<Reward, Rejection>;

/// What a plugin says of one item, whichever its kind: total and components, or a rejection.
pub(crate) type Said = Result<(f64, Vec<(String, f64)>), types::Rejection>;

/// How the items of one kind of plugin are called and checked.
pub(crate) struct Scoring<'a, T> {
    pub(crate) caller: &'a Caller,
    /// `episode` or `dialogue`.
    pub(crate) what: &'static str,
    pub(crate) id: fn(&T) -> &str,
    /// Totals outside of it are faults.
    pub(crate) range: RewardRange,
    /// `the declared range` or what else the range is called.
    pub(crate) range_name: &'static str,
}

impl<T> Scoring<'_, T> {
    /// One result for each item, in order; `run` is one call into the plugin.
    ///
    /// Where the call hits a limit and limits drop, each item is tried alone with the fuel of the whole batch, and those that hit
    /// a limit even so are dropped: whether one is depends on itself and the size of its batch, never on what its neighbours are.
    ///
    /// # Errors
    /// A fault, with the item at which it happened as far as that can be found.
    pub(crate) fn batch(
        &self,
        items: &[T],
        run: impl Fn(&[T], Load) -> Result<Vec<Said>, PluginFault>,
    ) -> Result<Vec<Scored>, PluginFault> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let alone = Load::part_of(items.len(), 1);
        match (run(items, Load::of(items.len())), items) {
            (Ok(said), _) => self.checked(items, said),
            (Err(fault), [item]) if self.caller.drops(&fault) => Ok(vec![Err(self.dropped(&fault, item)?)]),
            (Err(fault), _) if self.caller.drops(&fault) => self.one_by_one(items, |item| run(item, alone)),
            (Err(fault), _) => {
                let try_alone = |index: usize| run(&items[index..=index], alone).map(drop);
                Err(self.caller.located(fault, self.what, &self.ids(items), try_alone))
            }
        }
    }

    /// Each item alone, without those that hit a limit.
    fn one_by_one(
        &self,
        items: &[T],
        run: impl Fn(&[T]) -> Result<Vec<Said>, PluginFault>,
    ) -> Result<Vec<Scored>, PluginFault> {
        let patience = self.caller.patience();
        let mut scored = Vec::with_capacity(items.len());
        for item in items.chunks(1) {
            self.caller.check(patience, self.what, &self.ids(items))?;
            match run(item) {
                Ok(said) => scored.extend(self.checked(item, said)?),
                Err(fault) if self.caller.drops(&fault) => scored.push(Err(self.dropped(&fault, &item[0])?)),
                Err(fault) => return Err(self.caller.in_batch(&fault, self.what, &self.ids(item))),
            }
        }
        Ok(scored)
    }

    fn dropped(&self, fault: &PluginFault, item: &T) -> Result<Rejection, PluginFault> {
        self.caller.dropped(fault, self.what, (self.id)(item))
    }

    fn checked(&self, items: &[T], said: Vec<Said>) -> Result<Vec<Scored>, PluginFault> {
        if said.len() != items.len() {
            return Err(self.caller.wrong_length(said.len(), "scores", self.what, &self.ids(items)));
        }
        let check = |(item, said): (&T, Said)| {
            let named = |message| self.caller.wrong(format!("{} `{}`: {message}", self.what, (self.id)(item)));
            self.score(said).map_err(named)
        };
        items.iter().zip(said).map(check).collect()
    }

    fn score(&self, said: Said) -> Result<Scored, String> {
        let (total, parts) = match said {
            Ok(score) => score,
            Err(rejection) => return convert::rejection(rejection).map(Err),
        };
        let RewardRange { min, max } = self.range;
        if !(min..=max).contains(&total) {
            let name = self.range_name;
            return Err(format!("total is {total}; expected a number within {name} {min} to {max}"));
        }
        Ok(Ok(Reward { total, components: components(parts)? }))
    }

    fn ids<'b>(&self, items: &'b [T]) -> Vec<&'b str> {
        items.iter().map(self.id).collect()
    }
}

fn components(parts: Vec<(String, f64)>) -> Result<Vec<RewardComponent>, String> {
    for (name, value) in &parts {
        if !is_code(name) {
            let shown = printable(name, 100);
            return Err(format!("component name is `{shown}`; expected 1 to 64 of a to z, 0 to 9 and _"));
        }
        if !value.is_finite() {
            return Err(format!("component `{name}` is {value}; expected a finite number"));
        }
    }
    let mut names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("component `{}` appears twice", twice[0]));
    }
    Ok(parts.into_iter().map(|(name, value)| RewardComponent { name, value }).collect())
}
