//! A step for which a card has no memory left, in the middle of a batch's updates: what was reached is saved, and the next try
//! leaves what an unbroken run leaves.
#![allow(clippy::unwrap_used)]

use super::testing::{Fixture, config};
use super::whole_runs::{World, bytes, try_as, try_once};
use crate::checkpoint::STATE;
use crate::recording::Recorder;
use crate::{TrainError, fault};
use querl_core::config::RlConfig;
use querl_model::{Mesh, RankFailure, run_ranks};
use std::path::Path;
use std::sync::Mutex;

/// Five steps, of which none is saved by itself.
fn five_steps(off_by_one: bool) -> RlConfig {
    let (batch_size, mini_batch_size, max_steps) = (4, 2, 5);
    let (save_steps, eval_steps) = (100, 100);
    RlConfig { batch_size, mini_batch_size, max_steps, save_steps, eval_steps, off_by_one, ..config() }
}

/// What the first of two ranks says; the second lacks memory in a step, where one is named.
fn try_with_two(
    config: &RlConfig,
    world: &World,
    sink: &mut Recorder,
    folder: &Path,
    step: Option<u64>,
) -> Result<super::RlSummary, TrainError> {
    let sink = Mutex::new(sink);
    let ended = run_ranks(2, |ranks| {
        if !ranks.is_first() {
            step.into_iter().for_each(|step| fault::arm(step, "pass"));
            return try_as(&Fixture::new(), Mesh::of_data(ranks), config, world, &mut Recorder::default(), folder);
        }
        try_as(&Fixture::new(), Mesh::of_data(ranks), config, world, &mut sink.lock().unwrap(), folder)
    });
    match ended {
        Ok(summaries) => Ok(summaries.into_iter().next().unwrap()),
        Err(failures) => match failures.into_iter().find(|failure| failure.rank() == 0) {
            Some(RankFailure::Failed { error, .. }) => Err(error),
            other => panic!("the first rank: {other:?}"),
        },
    }
}

#[test]
fn memory_that_the_second_rank_lacks_is_heard_of_by_the_first_which_keeps_what_both_did() {
    for off_by_one in [false, true] {
        let config = five_steps(off_by_one);
        let (unbroken, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut expected, expected_world) = (Recorder::default(), World::default());
        let expected_summary = try_with_two(&config, &expected_world, &mut expected, unbroken.path(), None).unwrap();
        let (mut sink, world) = (Recorder::default(), World::default());
        let error = try_with_two(&config, &world, &mut sink, broken.path(), Some(4)).unwrap_err();
        let message = "rl step 4: the device has no memory left (rank 1 failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of \
                       memory\")); what was done until step 3 is saved, and the same command goes on from there";
        assert_eq!(error.to_string(), message);
        let summary = try_with_two(&config, &world, &mut sink, broken.path(), None).unwrap();
        assert_eq!((summary, &sink.0), (expected_summary, &expected.0));
        assert_eq!(*world.log.lock().unwrap(), *expected_world.log.lock().unwrap());
        assert!(bytes(broken.path()) == bytes(unbroken.path()));
    }
}

#[test]
fn a_step_without_memory_is_taken_again_from_its_beginning() {
    for off_by_one in [false, true] {
        let config = five_steps(off_by_one);
        let (unbroken, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut expected, expected_world) = (Recorder::default(), World::default());
        let expected_summary =
            try_once(&Fixture::new(), &config, &expected_world, &mut expected, unbroken.path()).unwrap();
        let (mut sink, world) = (Recorder::default(), World::default());
        fault::arm(4, "pass");
        let error = try_once(&Fixture::new(), &config, &world, &mut sink, broken.path()).unwrap_err();
        assert!(matches!(error, TrainError::OutOfMemory { stage: "rl", step: 4, saved: Some(3), .. }), "{error:?}");
        assert!(broken.path().join(STATE).join("step-3.state").is_file());
        let summary = try_once(&Fixture::new(), &config, &world, &mut sink, broken.path()).unwrap();
        assert_eq!((summary, &sink.0), (expected_summary, &expected.0));
        assert_eq!(*world.log.lock().unwrap(), *expected_world.log.lock().unwrap());
        assert!(bytes(broken.path()) == bytes(unbroken.path()));
    }
}
