//! Bundles to and from an OCI registry.
