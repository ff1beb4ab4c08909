//! What training and evaluation see of the world: a rewrite goes in, an episode with hits, judgements and a score comes out.
//!
//! An outside failure (retrieval, judge, a teacher that never answered) drops the episode with its reason; it never becomes a
//! score. An answer of the policy that is empty or that the tenant's parser cannot read is not a failure of the world but the
//! policy's own: it is scored as a rewrite that finds nothing. Dropping it instead would let a policy that stands to lose
//! escape by writing garbage.

mod baseline;
mod calls;
mod comparison;
mod episode_log;
mod judging;
mod memo;
mod rewards;
mod sampling;
mod scorer;
mod styles;
#[cfg(test)]
pub mod testing;
mod training;

pub use baseline::{Baseline, Baselines};
pub use comparison::Comparison;
pub use episode_log::EpisodeLog;
pub use judging::JudgingForm;
pub use rewards::WeightedReward;
pub use sampling::Judging;
pub use scorer::{DEADLINE_CODE, ScoreRequest, Scored, Scorer, Services, Written};
pub use training::{Phase, TrainingEnvironment};
