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
    let fixture = Fixture::new();
    let prompts: Vec<Vec<u32>> = (0..6).map(|row| vec![7, 8, 20 + row]).collect();
    let task = RlTask {
        train: RlData { prompts: &prompts, environment: world },
        val: RlData { prompts: &prompts[..2], environment: world },
        fingerprint: Some("inputs"),
        output_dir: folder,
        ..fixture.task(config)
    };
    train(&task, sink)
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
