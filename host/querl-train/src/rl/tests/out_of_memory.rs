//! Out-of-memory in the middle of a batch's updates: the state before is saved, and the resumed run writes the files of an
//! uninterrupted one. And checkpoints of several ranks.

use super::super::train_loop::Trainer;
use super::super::{RlData, RlSummary, RlTask};
use super::{Fixture, LetterEnvironment, adapters, config, run_once, run_rank};
use crate::TrainError;
use crate::checkpoint::STATE;
use crate::testing::{Recorder, inject_out_of_memory};
use querl_core::config::{CriticKind, RlConfig};
use querl_model::{Mesh, RankFailure, run_ranks};
use std::path::Path;
use std::sync::Mutex;

/// Five steps without a periodic checkpoint.
fn five_steps(off_by_one: bool) -> RlConfig {
    let (batch_size, mini_batch_size, max_steps) = (4, 2, 5);
    let (save_steps, eval_steps) = (100, 100);
    RlConfig { batch_size, mini_batch_size, max_steps, save_steps, eval_steps, off_by_one, ..config() }
}

/// The first rank's result; the second runs out of memory at `step`.
fn run_two_ranks(
    config: &RlConfig,
    environment: &LetterEnvironment,
    sink: &mut Recorder,
    folder: &Path,
    step: Option<u64>,
) -> Result<RlSummary, TrainError> {
    let sink = Mutex::new(sink);
    let ended = run_ranks(2, |ranks| {
        if !ranks.is_first() {
            step.into_iter().for_each(|step| inject_out_of_memory(step, "pass"));
            return run_rank(
                &Fixture::new(),
                Mesh::of_data(ranks),
                config,
                environment,
                &mut Recorder::default(),
                folder,
            );
        }
        run_rank(&Fixture::new(), Mesh::of_data(ranks), config, environment, &mut sink.lock().unwrap(), folder)
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
fn out_of_memory_on_the_second_rank_reaches_the_first_which_saves() {
    for off_by_one in [false, true] {
        let config = five_steps(off_by_one);
        let (unbroken, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut expected, expected_environment) = (Recorder::default(), LetterEnvironment::default());
        let expected_summary =
            run_two_ranks(&config, &expected_environment, &mut expected, unbroken.path(), None).unwrap();
        let (mut sink, environment) = (Recorder::default(), LetterEnvironment::default());
        let error = run_two_ranks(&config, &environment, &mut sink, broken.path(), Some(4)).unwrap_err();
        let message = "rl step 4: out of device memory (rank 1 failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")); \
                       step 3 is saved; run the same command again to resume";
        assert_eq!(error.to_string(), message);
        let summary = run_two_ranks(&config, &environment, &mut sink, broken.path(), None).unwrap();
        assert_eq!((summary, &sink.0), (expected_summary, &expected.0));
        assert_eq!(*environment.log.lock().unwrap(), *expected_environment.log.lock().unwrap());
        assert!(adapters(broken.path()) == adapters(unbroken.path()));
    }
}

#[test]
fn a_step_out_of_memory_is_taken_again_from_its_beginning() {
    for off_by_one in [false, true] {
        let config = five_steps(off_by_one);
        let (unbroken, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut expected, expected_environment) = (Recorder::default(), LetterEnvironment::default());
        let expected_summary =
            run_once(&Fixture::new(), &config, &expected_environment, &mut expected, unbroken.path()).unwrap();
        let (mut sink, environment) = (Recorder::default(), LetterEnvironment::default());
        inject_out_of_memory(4, "pass");
        let error = run_once(&Fixture::new(), &config, &environment, &mut sink, broken.path()).unwrap_err();
        assert!(matches!(error, TrainError::OutOfMemory { stage: "rl", step: 4, saved: Some(3), .. }), "{error:?}");
        assert!(broken.path().join(STATE).join("step-3.state").is_file());
        let summary = run_once(&Fixture::new(), &config, &environment, &mut sink, broken.path()).unwrap();
        assert_eq!((summary, &sink.0), (expected_summary, &expected.0));
        assert_eq!(*environment.log.lock().unwrap(), *expected_environment.log.lock().unwrap());
        assert!(adapters(broken.path()) == adapters(unbroken.path()));
    }
}

/// The symptom: policies were compared before a checkpoint and critics were not; the first rank's critic was saved for all.
#[test]
fn a_critic_that_differs_between_ranks_is_detected_before_it_is_saved() {
    for critic in [CriticKind::Head, CriticKind::Adapter] {
        let (config, folder) = (RlConfig { critic, ..config() }, tempfile::tempdir().unwrap());
        let save_twice = |ranks: querl_model::Ranks| {
            let (rank, mesh, fixture) = (ranks.rank(), Mesh::of_data(ranks), Fixture::new());
            let (environment, prompts) = (LetterEnvironment::default(), vec![vec![7, 8, 20]; 4]);
            let task = RlTask {
                train: RlData { prompts: &prompts, environment: &environment },
                val: RlData { prompts: &prompts[..1], environment: &environment },
                fingerprint: Some("inputs"),
                output_dir: folder.path(),
                mesh: &mesh,
                ..fixture.task(&config)
            };
            let mut trainer = Trainer::new(&task, &mut Recorder::default())?;
            trainer.save(&mut Recorder::default())?;
            if rank == 0 {
                std::fs::remove_file(folder.path().join(STATE).join("step-0.state")).unwrap();
            } else {
                let var = trainer.learner.critic.as_ref().unwrap().vars().values().next().unwrap();
                var.set(&(var.as_tensor() + 0.5).unwrap()).unwrap();
            }
            trainer.save(&mut Recorder::default())
        };
        let failures = run_ranks(2, save_twice).map(drop).unwrap_err();
        assert!(failures[0].to_string().contains("the weights of the ranks differ"), "{failures:?}");
        assert!(!folder.path().join(STATE).join("step-0.state").exists());
    }
}
