//! Group reward: penalty for similarity to another rewrite of the same query, so that the samples of a group stay diverse.
//!
//! ```text
//! total = -overlap        the largest similarity to another rewrite of the group: 0 to 1
//! ```
//!
//! Similarity is the Jaccard similarity of n-grams, or the cosine similarity of embeddings of the run's text encoder (host function
//! `embed`). A single rewrite in its group, as in an evaluation with one sample per query, scores 0. A response without a rewrite scores
//! -1.

use querl_sdk::{Episode, GroupReward, Rejection, Score, SettingError, Settings, host, text};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// A rewrite is cut to this number of characters, above the length of a usual rewrite, because each pair of rewrites costs fuel.
const MAX_CHARS: usize = 500;
/// Maximum number of texts per call of `embed`.
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
        let features = match self.features(rewrites.iter().flatten().cloned().collect()) {
            Ok(features) => features,
            Err(rejection) => return episodes.iter().map(|_| Err(rejection.clone())).collect(),
        };
        let compared: Vec<_> = rewrites.iter().map(|rewrite| features.get_key_value(rewrite.as_deref()?)).collect();
        let mut overlaps: Vec<f64> = compared.iter().map(|rewrite| if rewrite.is_some() { 0.0 } else { 1.0 }).collect();
        for (i, a) in compared.iter().enumerate() {
            for (j, b) in compared.iter().enumerate().skip(i + 1) {
                if let (Some(a), Some(b)) = (a, b) {
                    // Equal texts have similarity 1 even if they are shorter than an n-gram.
                    let similarity = if a.0 == b.0 { 1.0 } else { a.1.similarity(b.1) };
                    (overlaps[i], overlaps[j]) = (overlaps[i].max(similarity), overlaps[j].max(similarity));
                }
            }
        }
        overlaps.into_iter().map(|overlap| Ok(Score::new(0.0 - overlap))).collect()
    }
}

/// Features of a text, by which it is compared.
enum Features {
    /// Indices of the n-grams in a vocabulary of the group.
    Ngrams(BTreeSet<usize>),
    /// L2-normalised embedding.
    Vector(Vec<f32>),
}

impl Features {
    /// Similarity, 0 to 1. A negative cosine counts as 0.
    fn similarity(&self, other: &Self) -> f64 {
        match (self, other) {
            (Self::Ngrams(a), Self::Ngrams(b)) => {
                let n_both = a.intersection(b).count();
                n_both as f64 / (a.len() + b.len() - n_both).max(1) as f64
            }
            (Self::Vector(a), Self::Vector(b)) => {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>().clamp(0.0, 1.0)
            }
            _ => 0.0,
        }
    }
}

impl Diversity {
    /// The features of each text, computed once and not per pair. The texts are sorted, so that the calls of the encoder do not depend on
    /// the order of the group.
    fn features(&self, texts: BTreeSet<String>) -> Result<BTreeMap<String, Features>, Rejection> {
        let texts: Vec<String> = texts.into_iter().collect();
        if !self.embeds {
            let mut numbers = BTreeMap::new();
            let mut ngrams = |text: &String| {
                let number = |ngram: &[String]| {
                    let next = numbers.len();
                    *numbers.entry(ngram.to_vec()).or_insert(next)
                };
                Features::Ngrams(text::units(text).windows(self.n).map(number).collect())
            };
            return Ok(texts.iter().map(|text| (text.clone(), ngrams(text))).collect());
        }
        let mut vectors = Vec::new();
        for texts in texts.chunks(MAX_TEXTS) {
            vectors.extend(host::embed(texts).map_err(|error| error.rejection("similarity"))?);
        }
        Ok(texts.into_iter().zip(vectors.into_iter().map(Features::Vector)).collect())
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
