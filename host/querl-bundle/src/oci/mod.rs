//! Plugin bundles in an OCI registry: [`push`], [`pull`], [`versions`].
//!
//! One version has two tags. `VERSION` (a `+` written as `_`) is the component alone, as `wkg oci push` writes it: a layer
//! `application/wasm` with a config `application/vnd.wasm.config.v0+json`. `VERSION.querl` is the whole bundle: an artifact of
//! type `application/vnd.querl.bundle.v1+zstd` with the archive as its only layer and the component's manifest as its
//! subject. A pushed version is never replaced by other content; signatures may be added to it.

mod artifact;
mod client;
mod credentials;
mod error;
mod pull;
mod push;
mod reference;

pub use client::Transport;
pub use credentials::Credentials;
pub use error::RegistryError;
pub use pull::{Pulled, pull, versions};
pub use push::{Pushed, push};
pub use reference::RegistryReference;
