//! A step for which a card has no memory left, in the middle of a batch's updates: what was reached is saved, and the next try
//! leaves what an unbroken run leaves.
#![allow(clippy::unwrap_used)]

use super::testing::{Fixture, config, record};
use super::{RlData, RlTask, train};
use crate::checkpoint::{BEST, LAST, STATE};
use crate::recording::Recorder;
use crate::{TrainError, fault};
use querl_core::config::RlConfig;
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses};
use querl_core::records::{EpisodeRecord, Reward};
use querl_model::{Mesh, RankFailure, run_ranks};
use std::path::Path;
use std::sync::Mutex;

/// Worth what its letters say; keeps a log.
#[derive(Default)]
struct World(Mutex<Vec<String>>);

impl Environment for World {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let record = |response: &PolicyResponse| {
            self.0.lock().unwrap().push(format!("{step} {} {}", response.row_index, response.text));
            let total = f64::from(response.text.bytes().map(u32::from).sum::<u32>() % 7);
            EpisodeRecord { outcome: Ok(Reward { total, components: Vec::new() }), ..record() }
        };
        Ok(responses.iter().map(record).collect::<Vec<_>>().into())
    }

    fn mark(&self) -> Result<u64, EnvironmentError> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        self.0.lock().unwrap().truncate(mark as usize);
        Ok(())
    }
}

fn bytes(folder: &Path) -> Vec<Vec<u8>> {
    [BEST, LAST].map(|name| std::fs::read(folder.join(name).join("adapter_model.safetensors")).unwrap()).into()
}

/// What one try says, on a model that knows nothing of tries before.
fn try_once(
    config: &RlConfig,
    world: &World,
    sink: &mut Recorder,
    folder: &Path,
) -> Result<super::RlSummary, TrainError> {
    try_as(Mesh::alone(), config, world, sink, folder)
}

fn try_as(
    mesh: Mesh,
    config: &RlConfig,
    world: &World,
    sink: &mut Recorder,
    folder: &Path,
) -> Result<super::RlSummary, TrainError> {
    let fixture = Fixture::new();
    let prompts: Vec<Vec<u32>> = (0..6).map(|row| vec![7, 8, 20 + row]).collect();
    let task = RlTask {
        train: RlData { prompts: &prompts, environment: world },
        val: RlData { prompts: &prompts[..2], environment: world },
        fingerprint: Some("inputs"),
        output_dir: folder,
        mesh: &mesh,
        ..fixture.task(config)
    };
    train(&task, sink)
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
            return try_as(Mesh::of_data(ranks), config, world, &mut Recorder::default(), folder);
        }
        try_as(Mesh::of_data(ranks), config, world, &mut sink.lock().unwrap(), folder)
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
        let config = RlConfig {
            batch_size: 4,
            mini_batch_size: 2,
            max_steps: 5,
            save_steps: 100,
            eval_steps: 100,
            off_by_one,
            ..config()
        };
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
        assert_eq!(*world.0.lock().unwrap(), *expected_world.0.lock().unwrap());
        assert!(bytes(broken.path()) == bytes(unbroken.path()));
    }
}

#[test]
fn a_step_without_memory_is_taken_again_from_its_beginning() {
    for off_by_one in [false, true] {
        let config = RlConfig {
            batch_size: 4,
            mini_batch_size: 2,
            max_steps: 5,
            save_steps: 100,
            eval_steps: 100,
            off_by_one,
            ..config()
        };
        let (unbroken, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut expected, expected_world) = (Recorder::default(), World::default());
        let expected_summary = try_once(&config, &expected_world, &mut expected, unbroken.path()).unwrap();
        let (mut sink, world) = (Recorder::default(), World::default());
        fault::arm(4, "pass");
        let error = try_once(&config, &world, &mut sink, broken.path()).unwrap_err();
        assert!(matches!(error, TrainError::OutOfMemory { stage: "rl", step: 4, saved: Some(3), .. }), "{error:?}");
        assert!(broken.path().join(STATE).join("step-3.state").is_file());
        let summary = try_once(&config, &world, &mut sink, broken.path()).unwrap();
        assert_eq!((summary, &sink.0), (expected_summary, &expected.0));
        assert_eq!(*world.0.lock().unwrap(), *expected_world.0.lock().unwrap());
        assert!(bytes(broken.path()) == bytes(unbroken.path()));
    }
}
