//! Violates the rule of the contract that the setting `breach` names; none if it is `none`.

use querl_sdk::{ColumnValue, Episode, FinishReason, Input, Inputs, Rejection, Reward, Score, SettingError, Settings};
use std::cell::Cell;
use std::ops::RangeInclusive;

struct Guest {
    breach: String,
    scale: f64,
    n_scored: Cell<u32>,
}

impl Reward for Guest {
    const INPUTS: Inputs =
        Inputs::NONE.requires(Input::Retrieval).uses(Input::Judgement).uses(Input::Baseline).uses(Input::Columns);

    fn new(settings: &Settings) -> Result<Self, SettingError> {
        let breach = settings.text("breach", "none");
        let default = if breach == "other_default" { 1.0 } else { 0.5 };
        let range = if breach == "refuses_what_is_allowed" { 0.2..=0.8 } else { 0.0..=1.0 };
        let scale = match breach.as_str() {
            "unread_setting" => 0.5,
            _ => settings.number("scale", default, range)?,
        };
        Ok(Self { breach, scale, n_scored: Cell::new(0) })
    }

    fn range(&self) -> RangeInclusive<f64> {
        match self.breach.as_str() {
            "empty_range" => 1.0..=1.0,
            "huge_range" => -1e308..=1e308,
            _ => 0.0..=1.0,
        }
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let policy = &episode.policy;
        let n_before = self.n_scored.replace(self.n_scored.get() + 1);
        let hits = match &policy.retrieval {
            Some(Err(failure)) if self.breach == "unwraps_failures" => panic!("no hits: {failure}"),
            _ => policy.hits("policy")?,
        };
        let score = Score::new(self.scale * hits.first().map_or(0.0, |hit| hit.reranker_score));
        let n_chars = episode.query.chars().count();
        match self.breach.as_str() {
            "looks_at_neighbours" => Ok(Score::new(score.total / f64::from(n_before + 1))),
            "divides_by_length" => Ok(Score::new(score.total * 3.0 / n_chars as f64)),
            "counts_hits" => Ok(Score::new(hits.len() as f64 / 10.0)),
            "no_number_without_a_judge" if policy.judgement.is_none() => Ok(Score::new(f64::NAN)),
            "infinite_component" if policy.finish_reason == Some(FinishReason::Length) => {
                Ok(score.with("tokens", f64::INFINITY))
            }
            "huge_component" => Ok(score.with("tokens", 1e308)),
            "many_components" => Ok((0..65).fold(score, |score, n| score.with(format!("part_{n}"), 0.0))),
            "many_names" => Ok(many_names(score, &episode.id, &episode.query)),
            "bad_code" if Some(policy) == episode.baseline.as_ref() => Err(Rejection::new("Equal Sides", "")),
            "needs_a_column" if episode.column("price").is_none() => panic!("no price"),
            "column_is_a_number" => match episode.column("price") {
                None | Some(ColumnValue::Number(_)) => Ok(score),
                Some(other) => panic!("no number: {other:?}"),
            },
            "quadratic" => Ok(score.with("pairs", n_pairs(&episode.query))),
            "fails_late" => {
                assert!(self.scale < 1.0, "cannot scale by {}", self.scale);
                Ok(score)
            }
            _ => Ok(score),
        }
    }
}

/// Adds 32 components whose names differ between episodes.
fn many_names(score: Score, id: &str, query: &str) -> Score {
    let hash = |text: &str| text.bytes().fold(5381_u32, |hash, byte| hash.wrapping_mul(33) ^ u32::from(byte));
    (0..32).fold(score, |score, n| score.with(format!("of_{:x}_{:x}_{n}", hash(id), hash(query)), 0.0))
}

/// Number of pairs of equal characters, in quadratic time.
fn n_pairs(text: &str) -> f64 {
    let chars: Vec<_> = text.chars().collect();
    let equal = |index: usize| chars[..index].iter().filter(|c| **c == chars[index]).count();
    (0..chars.len()).map(equal).sum::<usize>() as f64
}

querl_sdk::export!(reward: Guest);
