//! Checkpoints of several ranks.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::recording::Recorder;
use crate::rl::RlData;
use crate::rl::testing::{Fixture, config};
use crate::rl::whole_runs::World;
use querl_core::config::{CriticKind, RlConfig};
use querl_model::run_ranks;

/// The symptom: the policies were compared before a checkpoint and the critics were not, of which the first rank's was kept for all.
#[test]
fn a_critic_that_differs_between_ranks_is_found_before_it_is_kept() {
    for critic in [CriticKind::Head, CriticKind::Adapter] {
        let (config, folder) = (RlConfig { critic, ..config() }, tempfile::tempdir().unwrap());
        let save_twice = |ranks: querl_model::Ranks| {
            let (rank, mesh, fixture, world) = (ranks.rank(), Mesh::of_data(ranks), Fixture::new(), World::default());
            let prompts = vec![vec![7, 8, 20]; 4];
            let task = RlTask {
                train: RlData { prompts: &prompts, environment: &world },
                val: RlData { prompts: &prompts[..1], environment: &world },
                fingerprint: Some("inputs"),
                output_dir: folder.path(),
                mesh: &mesh,
                ..fixture.task(&config)
            };
            let mut run = Run::begin(&task, &mut Recorder::default())?;
            run.save(&mut Recorder::default())?;
            if rank == 0 {
                std::fs::remove_file(folder.path().join(STATE).join("step-0.state")).unwrap();
            } else {
                let var = run.learner.critic.as_ref().unwrap().vars().values().next().unwrap();
                var.set(&(var.as_tensor() + 0.5).unwrap()).unwrap();
            }
            run.save(&mut Recorder::default())
        };
        let failures = run_ranks(2, save_twice).map(drop).unwrap_err();
        assert!(failures[0].to_string().contains("the ranks have come to different weights"), "{failures:?}");
        assert!(!folder.path().join(STATE).join("step-0.state").exists());
    }
}
