//! Ctrl-C: the first stops the running stage at its next safe point, the second ends the program at once.

use crate::terminal;
use anyhow::Context;
use querl_pipeline::failure::Ending;
use querl_pipeline::interrupt::flag;
use std::sync::atomic::Ordering;

/// Handles SIGINT, SIGTERM and SIGHUP.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if flag().swap(true, Ordering::SeqCst) {
            std::process::exit(Ending::Interrupted as i32);
        }
        terminal::say("stopping at the next safe point; interrupt again to stop at once");
    })
    .context("interrupts cannot be handled")
}
