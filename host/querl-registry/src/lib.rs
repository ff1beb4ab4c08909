//! Plugin bundles in an OCI registry.
//!
//! In: a bundle, a place such as `HOST/REPO:VERSION`, credentials. Out: the bundle in the registry, or a bundle that was read
//! from one and checked. It refuses to know WebAssembly engines, runs and configuration.
//!
//! One version takes two tags. `VERSION` (a `+` written as `_`) is the component alone, as `wkg oci push` writes one: a layer
//! `application/wasm` with a config `application/vnd.wasm.config.v0+json`. `VERSION.querl` is the whole bundle: an artifact of
//! the type `application/vnd.querl.bundle.v1+zstd` with the archive as its one layer and the component's manifest as its
//! subject. A version that is there is not replaced by other content; signatures may be added to it.

mod artifact;
mod client;
mod credentials;
mod error;
mod location;
mod pull;
mod push;

pub use client::Transport;
pub use credentials::Credentials;
pub use error::RegistryError;
pub use location::Location;
pub use pull::{Pulled, pull, versions};
pub use push::{Pushed, push};
