//! Checks of rewards while they run: a result depends on its own episode (or its group, in any order), and is the same in every form of
//! the batch.

use crate::call::{LIMIT_CODE, Rechecks};
use crate::limits::CallSize;
use crate::reward::{ItemScore, RewardForm, RewardPlugin};
use querl_core::ports::{FaultKind, PluginFault};
use querl_core::records::{EpisodeRef, Reward};
use sha2::{Digest, Sha256};

/// One of this many batches is scored again.
const SAMPLED: u8 = 64;

/// Maximum number of episodes of a sampled batch that are scored again, because each call starts an interpreter.
const MAX_SAMPLED_EPISODES: usize = 4;

impl RewardPlugin {
    /// Scores a part of a batch a second time, and compares the results with its `scores`.
    ///
    /// # Errors
    /// A result that differs, with both values.
    pub(crate) fn recheck(&self, episodes: &[EpisodeRef<'_>], scores: &[ItemScore]) -> Result<(), PluginFault> {
        let [first, .., last] = episodes else { return Ok(()) };
        if self.caller.rechecks == Rechecks::Off {
            return Ok(());
        }
        let is_every = self.caller.rechecks == Rechecks::Every;
        // The first and last id suffice, because ids are unique in a run; hashing more ids would take longer than the checks.
        let digest = Sha256::new().chain_update(first.id).chain_update(last.id).finalize();
        if !is_every && !digest[0].is_multiple_of(SAMPLED) {
            return Ok(());
        }
        let other_form = self.other_form();
        let in_form = other_form.filter(|_| is_every || digest[1].is_multiple_of(2));
        if let Some(form) = in_form {
            self.recheck_in(form, episodes, scores, usize::from(digest[2]))?;
        }
        if is_every || in_form.is_none() {
            self.recheck_order(episodes, scores, usize::from(digest[2]))?;
        }
        Ok(())
    }

    /// Indices of the episodes that are scored again.
    fn chosen(&self, n_episodes: usize, seed: usize) -> Vec<usize> {
        let n_chosen = match self.caller.rechecks {
            Rechecks::Every => n_episodes,
            _ => n_episodes.min(MAX_SAMPLED_EPISODES),
        };
        (0..n_chosen).map(|n| (seed + n * n_episodes / n_chosen) % n_episodes).collect()
    }

    /// Compares with another form of the batch: a complete group, or the chosen episodes.
    fn recheck_in(
        &self,
        form: RewardForm,
        episodes: &[EpisodeRef<'_>],
        scores: &[ItemScore],
        seed: usize,
    ) -> Result<(), PluginFault> {
        let chosen = match self.is_of_groups() {
            true => (0..episodes.len()).collect(),
            false => self.chosen(episodes.len(), seed),
        };
        let difference =
            format!("in the form {:?} and {{}} in the form {:?}; expected equal results", self.form(), form);
        self.rescore(form, episodes, scores, &chosen, &difference)
    }

    /// Compares with another order: a group in reverse order, or chosen episodes alone.
    fn recheck_order(&self, episodes: &[EpisodeRef<'_>], scores: &[ItemScore], seed: usize) -> Result<(), PluginFault> {
        if self.is_of_groups() {
            let reversed: Vec<_> = (0..episodes.len()).rev().collect();
            let difference =
                "and {} with the episodes of its group in reverse order; a result must not depend on the order";
            return self.rescore(self.form(), episodes, scores, &reversed, difference);
        }
        let n = episodes.len();
        let difference = format!("in a batch of {n} and {{}} alone; a result must depend on its own episode only");
        let mut chosen = self.chosen(n, seed).into_iter();
        chosen.try_for_each(|index| self.rescore(self.form(), episodes, scores, &[index], &difference))
    }

    fn rescore(
        &self,
        form: RewardForm,
        episodes: &[EpisodeRef<'_>],
        scores: &[ItemScore],
        chosen: &[usize],
        difference: &str,
    ) -> Result<(), PluginFault> {
        let again: Vec<_> = chosen.iter().map(|index| episodes[*index]).collect();
        let results = match self.run(form, &again, CallSize::part_of(episodes.len(), again.len())) {
            Ok(results) => self.scoring().checked(&again, results)?,
            // Not an error: fuel use differs between forms, and a busy machine may exceed the time limit.
            Err(fault) if matches!(fault.kind, FaultKind::Limit | FaultKind::Host) => return Ok(()),
            Err(fault) => {
                let ids: Vec<_> = again.iter().map(|episode| episode.id).collect();
                return Err(self.caller.in_batch(&fault, "episode", &ids));
            }
        };
        for (index, second) in chosen.iter().zip(&results) {
            let first = &scores[*index];
            let is_dropped = |score: &ItemScore| score.as_ref().is_err_and(|rejection| rejection.code == LIMIT_CODE);
            if is_same(first, second) || is_dropped(first) {
                continue;
            }
            let difference = difference.replacen("{}", &shown(second), 1);
            let message = format!("episode `{}`: {} {difference}", episodes[*index].id, shown(first));
            return Err(self.caller.invalid_result(message));
        }
        Ok(())
    }
}

/// True if the results are bit-identical.
fn is_same(one: &ItemScore, other: &ItemScore) -> bool {
    match (one, other) {
        (Ok(one), Ok(other)) => bits(one).eq(bits(other)),
        (Err(one), Err(other)) => one == other,
        _ => false,
    }
}

fn bits(score: &Reward) -> impl Iterator<Item = (&str, u64)> {
    let parts = score.components.iter().map(|part| (part.name.as_str(), part.value.to_bits()));
    std::iter::once(("total", score.total.to_bits())).chain(parts)
}

fn shown(score: &ItemScore) -> String {
    match score {
        Err(rejection) => format!("is rejected with `{}`", rejection.code),
        Ok(Reward { total, components }) => {
            let parts: Vec<_> = components.iter().map(|part| format!("{} {}", part.name, part.value)).collect();
            if parts.is_empty() { format!("is {total}") } else { format!("is {total} ({})", parts.join(", ")) }
        }
    }
}
