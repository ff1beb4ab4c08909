//! Test kit for plugins under `cargo test`. It calls the plugin as the host calls the component: with settings, a new plugin for each
//! call, and checks of results against the contract. Compiled in native builds only.
//!
//! Inputs come from builders ([`episode`], [`sample`], [`dialogue`]) or files ([`golden`], [`read_episodes`]). The functions return the
//! plugin's results. They panic, with the expected and the actual value, on a result that the host would refuse, and on an input that the
//! host never sends.
//!
//! ```
//! use querl_sdk::{Episode, FailureKind, Input, Inputs, Rejection, Reward, Score, SettingError, Settings, testing};
//! # use std::ops::RangeInclusive;
//! # struct TopHit { scale: f64 }
//! # impl Reward for TopHit {
//! #     const INPUTS: Inputs = Inputs::NONE.requires(Input::Retrieval);
//! #     fn new(settings: &Settings) -> Result<Self, SettingError> {
//! #         Ok(Self { scale: settings.number("scale", 1.0, 0.0..=10.0)? })
//! #     }
//! #     fn range(&self) -> RangeInclusive<f64> { 0.0..=10.0 }
//! #     fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
//! #         Ok(Score::new(self.scale * episode.policy.hits("policy")?.first().map_or(0.0, |hit| hit.reranker_score)))
//! #     }
//! # }
//! // `TopHit` is a reward: the score of the policy's best hit.
//! let reward = testing::reward::<TopHit>(Settings::from_pairs([("scale", "2")]));
//!
//! let found = testing::episode("一天几粒啊").policy("深海鱼油 食用方法").hit("kb-7", 0.8).baseline("鱼油");
//! assert_eq!(reward.score(&found).unwrap().total, 1.6);
//!
//! let failed = testing::episode("一天几粒啊").policy("鱼油").retrieval_failed(FailureKind::Timeout, "no response within 30 s");
//! assert_eq!(reward.score(&failed).unwrap_err().code, "policy_retrieval_failed");
//! ```

mod build;
mod check;
pub(crate) mod form;
mod golden;
pub mod golden_case;
pub(crate) mod host;
pub(crate) mod run;

pub use build::{
    DialogueBuilder, EpisodeBuilder, PromptInputBuilder, SampleBuilder, StandInModel, dialogue, episode,
    failing_style_model, no_style_model, prompt_input, sample, style_model,
};
pub use form::read_episodes;
pub use golden::{Golden, golden};
pub use host::{HostFunctions, InstalledHostFunctions};
pub use run::{
    FilterTest, GroupRewardTest, PromptTest, RewardTest, StyleScorerTest, assert_close, filter, group_reward, prompt,
    reward, style_scorer,
};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
