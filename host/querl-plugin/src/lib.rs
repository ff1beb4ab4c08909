//! Runs plugins: WebAssembly components for the contract in `wit/`.
//!
//! In: a `.querl` bundle, a `.wasm` component or a folder with source, settings, limits. Out: the ports
//! [`Prompts`](querl_core::ports::Prompts), [`Filter`](querl_core::ports::Filter),
//! [`RewardModel`](querl_core::ports::RewardModel) and [`StyleScorer`](querl_core::ports::StyleScorer), whose every fault names
//! the plugin, its version and the item. This crate refuses to know training, models, HTTP and any async runtime; no other host
//! crate knows wasmtime.
//!
//! A call gets a fresh instance from a pool, and with it: instructions by the call and by the item (fuel, the same on every
//! machine), a wall-clock deadline (epochs, the backstop), memory, an allowance of output and of log; a plugin with a manifest
//! may ask for less of each. A batch has the fuel of all its items. Where limits drop, the item that hits one is left out and
//! counted, and the others are worked on. It gets no power: [`wasi`] is the
//! whole of what a guest's standard library finds, and it blocks nowhere. The ports are synchronous; they may be called from
//! any thread, inside or outside of an async runtime.

mod bindings;
mod cache;
mod call;
mod compile;
mod contract;
mod convert;
mod digest;
mod engine;
mod error;
mod fault;
mod filter;
mod guest;
mod host;
mod interfaces;
mod limits;
mod load;
mod log;
mod open;
mod packed;
mod prompts;
mod prune;
mod reward;
mod scoring;
mod settings;
mod slots;
mod source;
mod style;
mod text;
mod wasi;

pub use call::{CallReport, LIMIT_CODE, Observer};
pub use compile::{CompileError, Compiler, compile_child};
pub use error::PluginError;
pub use host::{HostOptions, PluginHost, PluginSettings};
pub use load::{Plugin, PluginKind};
pub use open::{BundleFacts, Source};
pub use reward::RewardForm;
pub use source::{Built, build};
