//! A job of several ranks: threads of this process, each with a device. The first alone speaks with the host.

use super::Rank;
use crate::{Answered, Device, Ending, Failure, Host, Job, JobError, Outcome, Refused};
use querl_core::ports::{EnvironmentError, PolicyResponse, Progress, ScoredResponses};
use querl_core::records::Split;
use querl_model::{Mesh, ModelError, RankFailure, run_ranks};
use querl_train::Metrics;
use std::io;
use std::sync::atomic::AtomicBool;

/// Does a job with a rank on each device.
pub(super) fn do_together(job: &Job, devices: &[Device], host: &dyn Host) -> Result<Outcome, JobError> {
    #[cfg(feature = "cuda")]
    if devices.iter().any(|device| *device != Device::Cpu) {
        let version = querl_model::nccl_version();
        version.map_err(|error| Failure { ending: Ending::Usage, message: error.to_string() })?;
    }
    let outcomes = run_ranks(devices.len(), |ranks| {
        let (rank, device) = (ranks.rank(), devices[ranks.rank()]);
        let mesh = Mesh::new(ranks, job.model.tensor_parallel).map_err(ModelError::from)?;
        let rank_of_job = Rank { job, device, mesh };
        if rank == 0 { rank_of_job.work(host) } else { rank_of_job.work(&Silent(host)) }
    });
    match outcomes {
        Ok(outcomes) => Ok(outcomes.into_iter().next().expect("a job has at least one rank")),
        Err(failures) => Err(decisive(failures, devices)),
    }
}

/// The failure to tell of several. The first rank's where it has kept what was done before; else what came first, of which all
/// others follow.
fn decisive(failures: Vec<RankFailure<JobError>>, devices: &[Device]) -> JobError {
    let has_kept = |failure: &RankFailure<JobError>| {
        let endings = [Ending::OutOfMemory, Ending::Interrupted];
        matches!(failure, RankFailure::Failed { rank: 0, error: JobError::Failed(failure) } if endings.contains(&failure.ending))
    };
    let chosen = failures.iter().position(has_kept).unwrap_or(0);
    let failure = failures.into_iter().nth(chosen).expect("ranks failed");
    let name = |rank: usize| format!("rank {rank} ({})", devices[rank]);
    match failure {
        RankFailure::Failed { rank: 0, error } => error,
        RankFailure::Failed { rank, error: JobError::Failed(Failure { ending, message }) } => {
            Failure { ending, message: format!("{}: {message}", name(rank)) }.into()
        }
        RankFailure::Failed { error, .. } => error,
        RankFailure::Panicked { rank, message } => {
            let sentence = "this is a fault of querl, please report it";
            Failure::failed(format!("{} stopped by itself: {message}; {sentence}", name(rank))).into()
        }
    }
}

/// The host as ranks after the first have it: it tells them when to stop, and hears nothing.
struct Silent<'a>(&'a dyn Host);

impl Progress for Silent<'_> {
    fn update(&self, _: u64, _: u64, _: &str) {}

    fn line(&self, _: &str) {}
}

impl Host for Silent<'_> {
    fn stop(&self) -> &AtomicBool {
        self.0.stop()
    }

    fn record(&self, _: &str, _: u64, _: &Metrics) -> io::Result<()> {
        Ok(())
    }

    fn mark_metrics(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn rewind_metrics(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn score(&self, _: Split, _: u64, _: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let message = "a rank after the first asks for scores; this is a fault of querl, please report it";
        Err(EnvironmentError::Record(message.into()))
    }

    fn mark_episodes(&self, _: Split) -> Result<u64, EnvironmentError> {
        Ok(0)
    }

    fn rewind_episodes(&self, _: Split, _: u64) -> Result<(), EnvironmentError> {
        Ok(())
    }

    fn take(&self, _: Vec<Answered>) -> Result<(), Refused> {
        Ok(())
    }
}
