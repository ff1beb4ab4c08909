//! Charges a rewrite for saying what another sample of its query says, so that the samples of a group stay different.
//!
//! ```text
//! total = -overlap        the largest similarity to another rewrite of the group: 0 to 1
//! ```
//!
//! Similarity is the Jaccard similarity of n-grams, or the cosine of vectors of the run's text encoder (host function `embed`). A rewrite that is alone in
//! its group, as in an evaluation with one sample a query, overlaps with nothing: 0. A response without a rewrite scores -1.

use querl_sdk::{Episode, GroupReward, Rejection, Score, SettingError, Settings, host, text};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// A rewrite is compared up to here: it is a line, and pairs cost fuel.
const MAX_CHARS: usize = 100;
/// The most texts of one call of `embed`.
const MAX_TEXTS: usize = 64;

/// The reward, with its settings.
#[derive(Debug)]
pub struct Diversity {
    embeds: bool,
    n: usize,
}

impl GroupReward for Diversity {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            embeds: settings.choice("measure", "ngrams", &["ngrams", "embedding"])? == "embedding",
            n: settings.integer("ngram", 2, 1..=8)? as usize,
        })
    }

    fn range(&self) -> RangeInclusive<f64> {
        -1.0..=0.0
    }

    fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
        let head = |rewrite: &String| text::normalise(&rewrite.chars().take(MAX_CHARS).collect::<String>());
        let rewrites: Vec<_> = episodes.iter().map(|episode| episode.policy.rewrite.as_ref().map(head)).collect();
        let vectors = match self.vectors(&rewrites) {
            Ok(vectors) => vectors,
            Err(rejection) => return episodes.iter().map(|_| Err(rejection.clone())).collect(),
        };
        let mut overlaps: Vec<f64> = rewrites.iter().map(|rewrite| if rewrite.is_some() { 0.0 } else { 1.0 }).collect();
        for (i, a) in rewrites.iter().enumerate() {
            for (j, b) in rewrites.iter().enumerate().skip(i + 1) {
                if let (Some(a), Some(b)) = (a, b) {
                    let similarity = self.similarity(&vectors, a, b);
                    (overlaps[i], overlaps[j]) = (overlaps[i].max(similarity), overlaps[j].max(similarity));
                }
            }
        }
        overlaps.into_iter().map(|overlap| Ok(Score::new(0.0 - overlap))).collect()
    }
}

impl Diversity {
    /// The vector of each text, where vectors are compared. Each text once and sorted: the request does not depend on the order of the group.
    fn vectors(&self, rewrites: &[Option<String>]) -> Result<BTreeMap<String, Vec<f32>>, Rejection> {
        let mut texts: Vec<String> = rewrites.iter().flatten().filter(|_| self.embeds).cloned().collect();
        texts.sort_unstable();
        texts.dedup();
        let mut vectors = BTreeMap::new();
        for texts in texts.chunks(MAX_TEXTS) {
            let embedded = host::embed(texts).map_err(|error| error.rejection("similarity"))?;
            vectors.extend(texts.iter().cloned().zip(embedded));
        }
        Ok(vectors)
    }

    /// 0 to 1; opposite directions are 0.
    fn similarity(&self, vectors: &BTreeMap<String, Vec<f32>>, a: &str, b: &str) -> f64 {
        match (vectors.get(a), vectors.get(b)) {
            // Also of texts that are shorter than an n-gram.
            _ if a == b => 1.0,
            (Some(a), Some(b)) => {
                let cosine: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                cosine.clamp(0.0, 1.0)
            }
            _ => text::jaccard(a, b, self.n),
        }
    }
}

querl_sdk::export!(group_reward: Diversity);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::Diversity;
    use querl_sdk::host::CallError;
    use querl_sdk::{CallFailure, FailureKind, Settings, testing};

    fn totals(settings: Settings, rewrites: &[&str]) -> Vec<f64> {
        let group = testing::group_reward::<Diversity>(settings);
        let episodes = rewrites.iter().zip(0..).map(|(rewrite, index)| {
            testing::episode("胶原咋吃").id(format!("g/{index}")).group("g", index).policy(*rewrite)
        });
        group.score(episodes).into_iter().map(|score| score.unwrap().total).collect()
    }

    fn by_embedding() -> Settings {
        Settings::from_pairs([("measure", "embedding")])
    }

    #[test]
    fn golden_cases_hold() {
        testing::golden("golden").group_reward::<Diversity>();
    }

    #[test]
    fn a_sample_alone_repeats_nothing() {
        assert_eq!(totals(Settings::none(), &["胶原蛋白肽"]), [0.0]);
    }

    #[test]
    fn vectors_are_compared_where_asked_and_each_text_is_sent_once_and_sorted() {
        let embed = |texts: &[String]| {
            assert_eq!(texts, ["服用方法", "胶原", "胶原蛋白"]);
            Ok(vec![vec![-1.0, 0.0], vec![1.0, 0.0], vec![0.6, 0.8]])
        };
        let _installed = testing::HostFunctions::default().embed(embed).install();
        let expected = [-1.0, -f64::from(0.6_f32), 0.0, -1.0];
        assert_eq!(totals(by_embedding(), &["胶原", "胶原蛋白", "服用方法", "胶原"]), expected);
    }

    #[test]
    fn a_failed_encoder_rejects_the_group() {
        let failed = CallError::Failed(CallFailure { kind: FailureKind::Timeout, message: "late".into() });
        for (error, code) in [(failed, "similarity_failed"), (CallError::NotConfigured, "similarity_not_configured")] {
            let _installed = testing::HostFunctions::default().embed(move |_| Err(error.clone())).install();
            let group = testing::group_reward::<Diversity>(by_embedding());
            let results =
                group.score([testing::episode("胶原咋吃").policy("胶原"), testing::episode("胶原咋吃").id("b")]);
            assert!(results.iter().all(|result| result.as_ref().unwrap_err().code == code), "{results:?}");
        }
    }
}
