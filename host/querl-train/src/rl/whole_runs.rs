//! Whole optimisations of the tiny decoder, and what is left of them.
#![allow(clippy::unwrap_used)]

use super::testing::{Fixture, record};
use super::{RlData, RlSummary, RlTask, train};
use crate::TrainError;
use crate::checkpoint::{BEST, LAST};
use crate::recording::Recorder;
use querl_core::config::RlConfig;
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses};
use querl_core::records::{EpisodeRecord, Reward};
use querl_model::Mesh;
use std::path::Path;
use std::sync::Mutex;

/// Worth what its letters say; keeps a log. Asked for the answers of one step, it may fail.
#[derive(Default)]
pub(super) struct World {
    pub(super) log: Mutex<Vec<String>>,
    pub(super) fails_at: Option<u64>,
}

impl Environment for World {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        if self.fails_at == Some(step) {
            return Err(EnvironmentError::Record("the world ends".into()));
        }
        let record = |response: &PolicyResponse| {
            self.log.lock().unwrap().push(format!("{step} {} {}", response.row_index, response.text));
            let total = f64::from(response.text.bytes().map(u32::from).sum::<u32>() % 7);
            EpisodeRecord { outcome: Ok(Reward { total, components: Vec::new() }), ..record() }
        };
        Ok(responses.iter().map(record).collect::<Vec<_>>().into())
    }

    fn mark(&self) -> Result<u64, EnvironmentError> {
        Ok(self.log.lock().unwrap().len() as u64)
    }

    fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        self.log.lock().unwrap().truncate(mark as usize);
        Ok(())
    }
}

/// The policies that are left.
pub(super) fn bytes(folder: &Path) -> Vec<Vec<u8>> {
    [BEST, LAST].map(|name| std::fs::read(folder.join(name).join("adapter_model.safetensors")).unwrap()).into()
}

/// What one try says, on a model that knows nothing of tries before.
pub(super) fn try_once(
    fixture: &Fixture,
    config: &RlConfig,
    world: &World,
    sink: &mut Recorder,
    folder: &Path,
) -> Result<RlSummary, TrainError> {
    try_as(fixture, Mesh::alone(), config, world, sink, folder)
}

/// The same, by one of several ranks.
pub(super) fn try_as(
    fixture: &Fixture,
    mesh: Mesh,
    config: &RlConfig,
    world: &World,
    sink: &mut Recorder,
    folder: &Path,
) -> Result<RlSummary, TrainError> {
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
