//! A plugin as a file: its manifest, the archive that holds it, digest and signatures of the archive, and the lock file that pins the plugins
//! of a run.
//!
//! In: a plugin's folder with the component built from it, the bytes of an archive, the text of a manifest or a lock file. Out:
//! checked values, and archives that are byte-equal when packed again from the same content. It must not depend on WebAssembly
//! engines. Only the feature `oci` (module `oci`: push and pull) may depend on a network client and an async runtime.
//!
//! # The archive
//!
//! `ID-VERSION.querl` is one zstd frame around a tar (ustar) stream, followed by a zstd skippable frame, the seal, with the
//! SHA-256 of the frame before it; `zstd -d` and `tar` read it. Entries are plain files in the order of their names:
//!
//! ```text
//! LICENSE          README.md
//! SHA256SUMS       one line for each other file but `signatures`, as sha256sum writes it
//! golden/*.jsonl   golden cases
//! plugin.toml      the manifest, completed with what packing knows
//! plugin.wasm      the component
//! signatures       where it is signed: `ed25519:KEY SIGNATURE` in hexadecimal, one a line
//! ```
//!
//! The digest of a bundle is the SHA-256 of its `SHA256SUMS`, which covers the name and every byte of each file but the
//! signatures: `zstd -dc X.querl | tar -xO SHA256SUMS | sha256sum` shows it.

mod archive;
mod bundle;
mod document;
mod error;
pub mod lock;
mod manifest;
#[cfg(feature = "oci")]
pub mod oci;
mod signatures;

pub use archive::ArchiveLimits;
pub use bundle::{Bundle, check_component, pack};
pub use error::BundleError;
pub use manifest::{
    BUNDLE_FORMAT, BuildSection, BundleSection, CONTRACT, CONTRACTS, HostInterface, Kind, Language, Manifest,
    PluginSection, RequestedLimits, SettingProblem, SettingSpec, SettingType, check_settings,
};
pub use signatures::{BundleSignature, KeyForm, PublicKey, SigningKey, sign};
