//! The stages of a run, one file each, and what runs them.

mod convert;
mod dependencies;
mod eval;
pub mod funnel;
pub mod leaks;
mod local_teacher;
mod rewrite;
mod rl;
pub mod runner;
mod sft;
pub mod spending;
mod stage;
mod validate;

use crate::ledger::StageName;
use stage::Stage;

/// The stage of a name.
fn stage_of(name: StageName) -> &'static dyn Stage {
    match name {
        StageName::Rewrite => &rewrite::Rewrite,
        StageName::Validate => &validate::Validate,
        StageName::Convert => &convert::Convert,
        StageName::Sft => &sft::Sft,
        StageName::Rl => &rl::Rl,
        StageName::Eval => &eval::Eval,
    }
}
