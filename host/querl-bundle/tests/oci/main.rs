//! Pushing bundles to OCI registries and pulling them.
#![allow(clippy::unwrap_used)]

mod common;
mod faults;
mod registry;
