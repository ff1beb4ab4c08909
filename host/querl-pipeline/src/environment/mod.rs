//! The environment of training and evaluation: from a rewrite to an episode with hits, judgements and a score.
//!
//! A failed call (retrieval, judge, teacher) drops the episode with its reason and never becomes a score. A response of the policy that is
//! empty or cannot be parsed is scored as a rewrite that retrieves nothing: dropping it would reward garbage where the policy would lose.

mod calls;
mod judging;
mod rewards;
mod scorer;
#[cfg(test)]
pub(crate) mod testing;
mod training;

pub(crate) use judging::{Comparison, Judging, JudgingForm};
pub(crate) use rewards::WeightedReward;
pub(crate) use scorer::{
    Baseline, Baselines, DEADLINE_CODE, ScoreRequest, ScoredEpisode, Scorer, Services, WrittenRewrite,
};
pub(crate) use training::{EpisodeLog, Phase, TrainingEnvironment};
