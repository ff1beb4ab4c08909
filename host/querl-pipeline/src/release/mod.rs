//! Releases: the run that serves each tenant, the evidence for it, and the releases before it.
//!
//! In: finished runs. Out: evidence in the folder of a run ([`check()`]), and the history of a releases folder ([`ReleasesFolder`]), which a
//! service follows ([`FollowedReleases`]).

mod check;
mod followed;
mod history;
mod promote;

pub use check::{Against, CheckOptions, CheckedComparison, check};
pub use followed::FollowedReleases;
pub use history::{Action, CandidateRelease, HistoryEntry, Release, ReleasesFolder, TenantReleases, tenants_of};
pub use promote::{PromoteOptions, promote, rollback};
