//! Jobs for a device: how they are asked for, and how they are done.
//!
//! In: a [`Job`] (which model, which rows, which settings) and a [`Host`] that takes progress and figures and answers what
//! only it can answer (what an answer is worth). Out: an [`Outcome`], and checkpoints in the job's folder. This crate refuses
//! to know plugins, retrieval, run folders and the command line.
//!
//! A job is done by [`do_job`], in the program itself or in the library `libquerl_cuda` (`host/querl-cuda`), which holds the same
//! code built with CUDA. A program that links CUDA does not start on a machine without its driver; so the two are two files
//! that meet at the C interface of [`interface`]. Both sides need the types of a job, what is said meanwhile and how it ends:
//! they are here and not in querl-train, which would otherwise have to know of generation for the evaluation, of JSON messages
//! and of pointers; and the program's side ([`Library`]) is here as well, so that the border is tested from both sides within
//! ordinary tests. Without the feature `cuda` nothing of CUDA is built.

mod device;
mod ending;
mod host;
pub mod interface;
mod job;
mod library;
mod measuring;
pub mod memory;
mod messages;
mod work;

pub use device::Device;
pub use ending::{Ending, Failure, JobError, Refused, chain_of};
pub use host::Host;
pub use job::{Answered, Fitting, Generating, Job, Outcome, Reinforcing, Work};
pub use library::{Library, LibraryError};
pub use measuring::{
    Ceilings, KernelTime, Lengths, Loaded, Measured, Measuring, MemoryUse, Optimised, Part, RolledOut, Spread, Tuned,
};
pub use messages::{Description, Ended, Event, Reply, Request};
pub use work::{do_job, lora};
