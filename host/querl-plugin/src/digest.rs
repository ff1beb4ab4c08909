//! The name under which everything about a component is kept.

use querl_core::fsx::digest_hex;

/// Lower-case hexadecimal SHA-256 of a component's bytes. Made from the bytes alone: what a file says of itself is no digest,
/// else the code of one component could be kept, and later run, as another's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ComponentDigest(String);

impl ComponentDigest {
    pub(crate) fn of(component: &[u8]) -> Self {
        Self(digest_hex(component))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}
