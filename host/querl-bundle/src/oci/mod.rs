//! Plugin bundles in an OCI registry: [`push`], [`pull`], [`versions`].
//!
//! One version has two tags. `VERSION` (a `+` written as `_`) is the component alone, as `wkg oci push` writes it: a layer
//! `application/wasm` with a config `application/vnd.wasm.config.v0+json`. `VERSION.querl` is the whole bundle: an artifact of
//! type `application/vnd.querl.bundle.v1+zstd` with the archive as its only layer and the component's manifest as its
//! subject. A pushed version is never replaced by other content; signatures may be added to it.

mod artifact;
mod client;
mod credentials;
mod pinned;
mod reference;
mod transfer;

pub use client::{RegistryError, Transport};
pub use credentials::Credentials;
pub use pinned::PinnedReference;
pub use reference::RegistryReference;
pub use transfer::{Pulled, Pushed, pull, push, versions};
