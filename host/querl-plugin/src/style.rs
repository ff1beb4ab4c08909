//! Style scorer plugins behind the port.

use crate::bindings::{style_scores, types};
use crate::call::{Caller, Load};
use crate::convert;
use crate::scoring::{Said, Scored, Scoring};
use querl_core::ports::{PluginFault, RewardRange, StyleScorer};
use querl_core::records::Dialogue;

/// The contract's, for every style scorer.
const RANGE: RewardRange = RewardRange { min: 0.0, max: 1.0 };

/// A configured style scorer plugin.
pub(crate) struct StylePlugin {
    caller: Caller,
    indices: style_scores::GuestIndices,
}

/// A dialogue in the words of the contract.
struct Sendable<'a> {
    id: &'a str,
    turns: Vec<types::MessageParam<'a>>,
}

impl StylePlugin {
    pub(crate) fn new(caller: Caller, indices: style_scores::GuestIndices) -> Self {
        Self { caller, indices }
    }

    fn run(&self, dialogues: &[Sendable<'_>], load: Load) -> Result<Vec<Said>, PluginFault> {
        let arguments: Vec<_> =
            dialogues.iter().map(|sent| style_scores::Dialogue { id: sent.id, turns: &sent.turns }).collect();
        let said = self.caller.call("style-scores.score-batch", load, |store, instance| {
            self.indices.load(&mut *store, instance)?.call_score_batch(store, &arguments)
        })?;
        let parts =
            |parts: Vec<style_scores::Component>| parts.into_iter().map(|part| (part.name, part.value)).collect();
        Ok(said.into_iter().map(|said| said.map(|score| (score.total, parts(score.components)))).collect())
    }
}

impl StyleScorer for StylePlugin {
    fn score_batch(&self, dialogues: &[Dialogue]) -> Result<Vec<Scored>, PluginFault> {
        let (mut sendable, mut rejections) = (Vec::new(), Vec::new());
        for dialogue in dialogues {
            let turns = convert::turns(dialogue);
            rejections.push(turns.map(|turns| sendable.push(Sendable { id: &dialogue.id, turns })));
        }
        let scoring = Scoring {
            caller: &self.caller,
            what: "dialogue",
            id: |dialogue: &Sendable<'_>| dialogue.id,
            range: RANGE,
            range_name: "the contract's range",
        };
        let mut scored = scoring.batch(&sendable, |dialogues, load| self.run(dialogues, load))?.into_iter();
        let mut next = || scored.next().expect("one result for each dialogue that was sent");
        Ok(rejections.into_iter().map(|sent| sent.and_then(|()| next())).collect())
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}
