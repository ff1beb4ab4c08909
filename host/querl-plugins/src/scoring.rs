//! What the plugins that score have in common: batches whose items do not depend on each other.

use crate::bindings::types;
use crate::call::Caller;
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
    /// Where the call hits a limit and limits drop, each item is scored alone, and those that hit one alone are dropped: by the
    /// contract a result depends on its own item only. Items that fit their batch's budget together stay together, so that an
    /// item may use what its neighbours leave.
    ///
    /// # Errors
    /// A fault, with the item at which it happened as far as that can be found.
    pub(crate) fn batch(
        &self,
        items: &[T],
        run: impl Fn(&[T]) -> Result<Vec<Said>, PluginFault>,
    ) -> Result<Vec<Scored>, PluginFault> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        match run(items) {
            Ok(said) => self.checked(items, said),
            Err(fault) if self.caller.drops(&fault) => match items {
                [item] => Ok(vec![Err(self.caller.dropped(&fault, self.what, (self.id)(item))?)]),
                _ => items.chunks(1).map(|item| self.alone(item, &run)).collect(),
            },
            Err(fault) => {
                let alone = |index: usize| run(&items[index..=index]).map(drop);
                Err(self.caller.located(fault, self.what, &self.ids(items), alone))
            }
        }
    }

    fn alone(&self, item: &[T], run: impl Fn(&[T]) -> Result<Vec<Said>, PluginFault>) -> Result<Scored, PluginFault> {
        match run(item) {
            Ok(said) => self.checked(item, said).map(|mut scored| scored.remove(0)),
            Err(fault) if self.caller.drops(&fault) => {
                self.caller.dropped(&fault, self.what, (self.id)(&item[0])).map(Err)
            }
            Err(fault) => Err(self.caller.in_batch(&fault, self.what, &self.ids(item))),
        }
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
