//! The environment of training and evaluation, which makes an episode with hits, judgements and a score of a rewrite.
//!
//! A failed call (retrieval, judge, teacher) drops the episode with its reason and never becomes a score. A response of the policy that is
//! empty or cannot be parsed is scored as a rewrite that retrieves nothing: dropping it would reward garbage where the policy would lose.

pub(crate) mod calls;
mod columns;
mod judging;
mod rewards;
mod scorer;
mod service;
#[cfg(test)]
pub(crate) mod testing;
mod training;

pub(crate) use columns::RowColumns;
pub(crate) use judging::{Comparison, Judging, JudgingForm};
pub(crate) use rewards::{Outcome, WeightedReward, inputs, inputs_of_baseline};
pub(crate) use scorer::{
    Baseline, BaselineScoring, Baselines, DEADLINE_CODE, ScoreRequest, ScoredEpisode, Scorer, Services, WrittenRewrite,
};
pub use service::RewardEnvironment;
pub(crate) use training::{EpisodeLog, Phase, TrainingEnvironment};
