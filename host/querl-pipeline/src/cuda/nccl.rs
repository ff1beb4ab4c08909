//! NCCL, which several cards sum with: what the jobs would find.

use super::Missing;

/// NCCL's version, such as `2.28.9`.
///
/// # Errors
/// There is none that can be opened, or it is older than jobs on several cards accept.
pub fn nccl() -> Result<String, Missing> {
    querl_model::nccl_version().map_err(|error| Missing(error.to_string()))
}
