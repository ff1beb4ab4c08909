//! The SDK for querl plugins in Rust: a trait for each kind of plugin, plain types, and one macro that exports an implementation as a
//! component.
//!
//! An author implements [`Reward`], [`GroupReward`], [`Filter`], [`Prompt`] or [`StyleScorer`] for a type and passes it to [`export!`]. The
//! crate then builds as a WebAssembly component for the contract `querl:plugin@0.2.0`. This crate must not depend on host crates, files,
//! network and models.
//!
//! ```
//! use querl_sdk::{Episode, Rejection, Reward, Score, SettingError, Settings};
//! use std::ops::RangeInclusive;
//!
//! /// Rewards a rewrite for being short.
//! struct Brevity {
//!     max_chars: f64,
//! }
//!
//! impl Reward for Brevity {
//!     fn new(settings: &Settings) -> Result<Self, SettingError> {
//!         Ok(Self { max_chars: settings.number("max_chars", 40.0, 1.0..=1000.0)? })
//!     }
//!
//!     fn range(&self) -> RangeInclusive<f64> {
//!         0.0..=1.0
//!     }
//!
//!     fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
//!         let n_chars = episode.policy.rewrite("policy")?.chars().count() as f64;
//!         Ok(Score::new((1.0 - n_chars / self.max_chars).max(0.0)))
//!     }
//! }
//!
//! querl_sdk::export!(reward: Brevity);
//! # fn main() {
//! let brevity = Brevity::new(&Settings::from_pairs([("max_chars", "10")])).unwrap();
//! let mut episode = Episode::default();
//! episode.policy.rewrite = Some("胶原蛋白肽".into());
//! assert_eq!(brevity.score(&episode).unwrap().total, 0.5);
//! # }
//! ```
//!
//! Tests of a plugin run natively under `cargo test`, without WebAssembly. The module [`testing`] calls the plugin as the host does,
//! fails where the host would refuse a value or result, and runs golden cases.
//!
//! `Cargo.toml` needs `crate-type = ["cdylib", "rlib"]`: `cdylib` for the component, `rlib` for tests. The component is built by
//! `cargo build --release --target wasm32-wasip2`, which querl runs for a plugin that is configured as a folder.

#![deny(missing_docs)]

#[cfg(all(target_family = "wasm", not(all(target_os = "wasi", target_env = "p2"))))]
compile_error!(
    "a querl plugin is a WebAssembly component: build it with `--target wasm32-wasip2` (`rustup target add wasm32-wasip2`), or \
     let `querl plugin build` do it"
);

#[doc(hidden)]
#[cfg(all(feature = "dev", not(target_arch = "wasm32")))]
#[path = "dev.rs"]
pub mod __dev;
#[doc(hidden)]
#[cfg(target_arch = "wasm32")]
#[path = "guest/mod.rs"]
pub mod __guest;
mod export;
pub mod host;
mod kinds;
pub mod log;
#[cfg(any(target_arch = "wasm32", test))]
mod packed;
mod settings;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;
pub mod text;
mod types;

/// Runs the examples of the README as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use kinds::{
    Component, Dialogue, Episode, Filter, GroupReward, Input, Inputs, Prompt, PromptInput, PromptTask, Reward, Sample,
    Score, StyleModel, StyleScorer, Verdict,
};
#[doc(hidden)]
pub use settings::{Setting as __Setting, SettingType as __SettingType};
pub use settings::{SettingError, Settings};
pub use types::{
    CallFailure, Candidate, Column, ColumnValue, Context, FailureKind, FinishReason, Hit, JudgeScore, Message,
    Rejection, Role, Scalar, Split, StyleProbability,
};
