//! Reward for retrieving the gold passages, whose ids are in the query table: recall@k and NDCG@k.
//!
//! ```text
//! recall = gold passages among the first k hits / all gold passages
//! ndcg   = sum of 1 / log2(rank + 1) over the gold passages found / the same sum for the ideal ranking, gold passages first
//! total  = weight_recall * recall + (1 - weight_recall) * ndcg          0 to 1
//! ```
//!
//! NDCG is that of Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002, with gains of 0 and 1. A passage
//! that appears twice counts at its better rank. `log2` is that of the crate libm, compiled into the component, so that results are
//! bit-identical on every machine.

use querl_sdk::{Episode, Hit, Input, Inputs, Rejection, Reward, Score, SettingError, Settings};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// The reward, with its settings.
#[derive(Debug)]
pub struct Gold {
    k: usize,
    weight_recall: f64,
}

impl Reward for Gold {
    const INPUTS: Inputs = Inputs::NONE.requires(Input::Retrieval);

    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            k: settings.integer("k", 10, 1..=1000)? as usize,
            weight_recall: settings.number("weight_recall", 0.5, 0.0..=1.0)?,
        })
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let Some(gold) = &episode.gold_ids else {
            return Err(Rejection::new("gold_ids_missing", "the row names no passages that answer the query"));
        };
        // A response without a rewrite has no retrieval: it finds nothing.
        let hits = if episode.policy.rewrite.is_some() { episode.policy.hits("policy")? } else { &[] };
        let gold: BTreeSet<&str> = gold.iter().map(String::as_str).collect();
        let ranks = self.ranks(hits, gold.clone());
        let ideal = (1..=gold.len().min(self.k) as u32).collect::<Vec<_>>();
        let recall = ranks.len() as f64 / gold.len() as f64;
        let ndcg = discounted(&ranks) / discounted(&ideal);
        // A weighted mean of 1 and 1 can exceed 1 by rounding.
        let total = (self.weight_recall * recall + (1.0 - self.weight_recall) * ndcg).min(1.0);
        Ok(Score::new(total).with("recall", recall).with("ndcg", ndcg))
    }
}

impl Gold {
    /// Ranks of the gold passages among the first k hits, each passage once.
    fn ranks(&self, hits: &[Hit], mut gold: BTreeSet<&str>) -> Vec<u32> {
        let mut is_gold = |hit: &&Hit| hit.id.as_deref().is_some_and(|id| gold.remove(id));
        hits.iter().take(self.k).filter(|hit| is_gold(hit)).map(|hit| hit.rank).collect()
    }
}

fn discounted(ranks: &[u32]) -> f64 {
    ranks.iter().map(|rank| 1.0 / libm::log2(f64::from(rank + 1))).sum()
}

querl_sdk::export!(reward: Gold);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::Gold;
    use querl_sdk::{FailureKind, Settings, testing};

    #[test]
    fn golden_cases_hold() {
        testing::golden("golden").reward::<Gold>();
    }

    #[test]
    fn both_measures_are_one_exactly_where_all_gold_passages_come_first() {
        for weight in ["0", "0.1", "0.3", "0.7", "1"] {
            let reward = testing::reward::<Gold>(Settings::from_pairs([("weight_recall", weight)]));
            let found = testing::episode("胶原咋吃").gold(["a", "b", "c"]).policy("胶原蛋白肽 用法");
            let score = reward.score(&found.hit("c", 0.9).hit("a", 0.8).hit("b", 0.7)).unwrap();
            assert!((score.total - 1.0).abs() < 1e-15, "{score:?}");
        }
    }

    #[test]
    fn a_failed_retrieval_is_a_rejection_and_an_empty_one_a_score() {
        let reward = testing::reward::<Gold>(Settings::none());
        let episode = testing::episode("胶原咋吃").gold(["a"]).policy("胶原蛋白肽");
        assert_eq!(reward.score(&episode.clone().nothing_found()).unwrap().total, 0.0);
        let failed = episode.retrieval_failed(FailureKind::Timeout, "late");
        assert_eq!(reward.score(&failed).unwrap_err().code, "policy_retrieval_failed");
    }
}
