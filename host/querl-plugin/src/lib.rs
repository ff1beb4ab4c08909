//! The host for plugins: WebAssembly components for the contract in `wit/`.
//!
//! In: a `.querl` bundle, a `.wasm` component or a source folder, settings, limits. Out: the ports
//! [`Prompts`](querl_core::ports::Prompts), [`Filter`](querl_core::ports::Filter),
//! [`RewardModel`](querl_core::ports::RewardModel) and [`StyleScorer`](querl_core::ports::StyleScorer), whose faults name the
//! plugin, its version and the item. This crate must not depend on training, models, HTTP and any async runtime; no other host
//! crate depends on wasmtime.
//!
//! Each call runs in a fresh instance from a pool, with limits: fuel by the call and by the item (deterministic), CPU time
//! (checked at every tick of the epoch), memory, output bytes and log bytes; a manifest may lower each of them. A batch
//! has the fuel of all its items. With `on_limit = "drop"`, an item that hits a limit is dropped and counted, and the others are
//! scored. A guest has no capabilities: [`wasi`] is all that its standard library can call, and it never blocks. The ports are
//! synchronous; they can be called from any thread, inside or outside of an async runtime.

mod cache;
mod call;
mod children;
mod compile;
mod contract;
mod description;
mod engine;
mod error;
mod fault;
mod filter;
mod guest;
mod host;
mod host_functions;
mod json;
mod limits;
mod load;
mod log;
mod packed;
mod prompts;
mod recheck;
mod reward;
mod series;
mod source;
mod text;
mod v0_1;
mod v0_2;
mod wasi;

pub use cache::CacheAccess;
pub use call::{CallReport, LIMIT_CODE, Observer, Outcome, Rechecks};
pub use children::{Scratch, child_output, child_output_within, end_children, kill_children};
pub use compile::{CompileError, Compiler, compile_child};
pub use description::Description;
pub use engine::MemoryReservation;
pub use error::PluginError;
pub use host::{HostOptions, PluginHost, PluginPort, PluginSettings};
pub use limits::{MAX_COMPONENT, MAX_COMPONENTS, MAX_NAMES, MAX_TOTAL};
pub use load::{BundleInfo, Plugin, PluginFile, PluginKind, Source};
pub use querl_bundle::HostInterface;
pub use reward::{RewardForm, RewardRules};
pub use source::{BuildOutput, COMPONENTIZE_PY, JAVASCRIPT_PACKAGES, NativeFolder, SourceFolders, build};
