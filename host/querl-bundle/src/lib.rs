//! Plugin bundles.
