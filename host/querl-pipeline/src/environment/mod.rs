//! What training and evaluation see of the world: a rewrite goes in, an episode with hits, judgements and a score comes out.
//!
//! An outside failure (retrieval, judge, a teacher that never answered) drops the episode with its reason; it never becomes a
//! score. An answer of the policy that is empty or that the tenant's parser cannot read is not a failure of the world but the
//! policy's own: it is scored as a rewrite that finds nothing. Dropping it instead would let a policy that stands to lose
//! escape by writing garbage.

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
