//! The environment of reinforcement learning, and its log of episodes, `episodes.jsonl`.

use super::columns::RowColumns;
use super::judging::Judging;
use super::scorer::{Baselines, ScoreRequest, ScoredEpisode, Scorer, Scores};
use crate::plugin_activity::{self, CallMeter};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses};
use querl_core::records::{DatasetRow, EpisodeRecord, Split};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Rollout,
    /// Validation: the same queries are judged each time, so that evaluations can be compared.
    Validation,
}

/// Environment of one split: scores responses to its rows and logs every episode.
pub(crate) struct TrainingEnvironment {
    pub scorer: Arc<Scorer>,
    /// Rows of the split, to which [`PolicyResponse::row_index`] refers.
    pub rows: Vec<DatasetRow>,
    pub columns: RowColumns,
    pub baselines: Arc<Baselines>,
    /// Number of samples of a query in a group; at least 1.
    pub n_samples: usize,
    pub judging: Judging,
    pub phase: Phase,
    pub log: Arc<EpisodeLog>,
    /// Meter of the time and fuel of plugin calls.
    pub meter: Arc<CallMeter>,
}

impl TrainingEnvironment {
    fn request(&self, step: u64, response: &PolicyResponse) -> Result<ScoreRequest<'_>, EnvironmentError> {
        let row = &self.rows[response.row_index];
        let query = &row.metadata.query;
        let (phase, split) = match self.phase {
            Phase::Rollout => ("step", Split::Train),
            Phase::Validation => ("val", Split::Val),
        };
        let id = format!("{phase}-{step:06}/{}/{}", query.id, response.sample_index);
        // A query that occurs twice in a batch has two groups, which may be scored in different parts of the batch.
        let group_id = match response.sample_index / self.n_samples {
            0 => format!("{phase}-{step:06}/{}", query.id),
            n_before => format!("{phase}-{step:06}/{}#{}", query.id, n_before + 1),
        };
        let judged = match self.phase {
            Phase::Rollout => self.judging.samples(&id),
            Phase::Validation => self.judging.samples(&query.id),
        };
        Ok(ScoreRequest {
            id,
            group_id,
            sample_index: (response.sample_index % self.n_samples) as u32,
            step: Some(step),
            split,
            query,
            columns: self.columns.of(query),
            prompt: Some(row.prompt()),
            policy: self.scorer.parse(query, response)?,
            baseline: self.baselines.of(&query.id),
            judged,
        })
    }
}

impl Environment for TrainingEnvironment {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let started = Instant::now();
        self.meter.take();
        let requests = responses.iter().map(|response| self.request(step, response)).collect::<Result<Vec<_>, _>>()?;
        let parse_s = started.elapsed().as_secs_f64();
        let Scores { scored, by_reward, mut timings } = self.scorer.score(&requests)?;
        timings.plugin_s += parse_s;
        let mut plugins = BTreeMap::new();
        if self.phase == Phase::Rollout {
            plugins = self.meter.take();
            for (label, activity) in plugin_activity::results(self.scorer.rewards(), &by_reward) {
                *plugins.entry(label).or_default() += activity;
            }
        }
        let record = |one: ScoredEpisode| EpisodeRecord {
            format: EpisodeRecord::FORMAT,
            step,
            episode: one.episode,
            calls: one.calls,
            outcome: one.outcome,
        };
        let records: Vec<EpisodeRecord> = scored.into_iter().map(record).collect();
        self.log.append(&records)?;
        Ok(ScoredResponses { records, timings, plugins })
    }

    fn mark(&self) -> Result<u64, EnvironmentError> {
        self.log.mark()
    }

    fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        self.log.rewind(mark)
    }
}

#[derive(Debug)]
pub(crate) struct EpisodeLog {
    path: PathBuf,
    file: Mutex<File>,
}

impl EpisodeLog {
    /// Opens the episode log at `path`, which may have records of earlier steps.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { path: path.into(), file: Mutex::new(file) })
    }

    /// Appends the episodes of one batch, in a single write.
    pub(crate) fn append(&self, records: &[EpisodeRecord]) -> Result<(), EnvironmentError> {
        let mut lines = Vec::new();
        for record in records {
            serde_json::to_writer(&mut lines, record).map_err(|error| self.failed(&error))?;
            lines.push(b'\n');
        }
        let mut file = self.file();
        let end = file.metadata().map_err(|error| self.failed(&error))?.len();
        file.write_all(&lines).map_err(|error| {
            // Removes the part that was written; if that fails too, readers skip the torn line.
            let _ = file.set_len(end);
            self.failed(&error)
        })
    }

    pub(crate) fn mark(&self) -> Result<u64, EnvironmentError> {
        let file = self.file();
        let length = file.sync_all().and_then(|()| Ok(file.metadata()?.len()));
        length.map_err(|error| self.failed(&error))
    }

    /// Truncates the file to the length that it had when [`mark`](Self::mark) returned `mark`.
    pub(crate) fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        let file = self.file();
        let length = file.metadata().map_err(|error| self.failed(&error))?.len();
        if length < mark {
            return Err(EnvironmentError::Record(format!(
                "{}: has {length} bytes, and had {mark} when the checkpoint was written; run the stage again with `--from rl`",
                self.path.display()
            )));
        }
        file.set_len(mark).and_then(|()| file.sync_all()).map_err(|error| self.failed(&error))
    }

    fn file(&self) -> MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> EnvironmentError {
        EnvironmentError::Record(format!("{}: cannot be written: {error}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Shop, dataset_row, validated};
    use super::*;
    use querl_core::config::RetrievalKind;
    use querl_core::fsx::read_jsonl;

    fn response(row_index: usize, text: &str) -> PolicyResponse {
        PolicyResponse { row_index, sample_index: 0, text: text.into(), n_tokens: 3, truncated: false }
    }

    fn environment(shop: &Shop, log: &std::path::Path, phase: Phase) -> TrainingEnvironment {
        let baselines =
            Baselines::new(vec![validated("a", Ok("poor")), validated("b", Err("no answer"))], RetrievalKind::Embedded);
        TrainingEnvironment {
            scorer: Arc::new(shop.scorer()),
            rows: vec![dataset_row("a"), dataset_row("b")],
            baselines: Arc::new(baselines),
            columns: RowColumns::default(),
            n_samples: 2,
            judging: Judging::Share(0.5),
            phase,
            meter: Arc::default(),
            log: Arc::new(EpisodeLog::open(log).unwrap()),
        }
    }

    #[test]
    fn every_response_gets_a_record_and_a_line_in_the_log() {
        let (shop, folder) = (Shop::default(), tempfile::tempdir().unwrap());
        let path = folder.path().join("episodes.jsonl");
        let environment = environment(&shop, &path, Phase::Rollout);
        let records = environment.score(12, &[response(0, "good"), response(1, "good")]).unwrap().records;
        assert_eq!(records[0].episode.id, "step-000012/a/0");
        assert_eq!(records[1].outcome.as_ref().unwrap_err().code, "baseline_missing");
        environment.score(13, &[response(0, "good")]).unwrap();
        let logged: Vec<EpisodeRecord> = read_jsonl(&path).unwrap();
        assert_eq!((logged.len(), &logged[..2], logged[2].step), (3, &records[..], 13));
        let third = PolicyResponse { sample_index: 2, ..response(0, "good") };
        let episode = environment.score(14, &[third]).unwrap().records.remove(0).episode;
        assert_eq!((episode.id.as_str(), episode.sample_index), ("step-000014/a/2", 0));
        assert_eq!((episode.group_id.as_str(), episode.step), ("step-000014/a#2", Some(14)));
        assert_eq!((episode.response.as_deref(), episode.prompt.map(|prompt| prompt.len())), (Some("good"), Some(1)));
    }

    #[test]
    fn a_rewound_log_has_each_episode_once_and_a_torn_line_is_gone() {
        let (shop, folder) = (Shop::default(), tempfile::tempdir().unwrap());
        let path = folder.path().join("episodes.jsonl");
        let first = environment(&shop, &path, Phase::Rollout);
        first.score(1, &[response(0, "good")]).unwrap();
        let mark = first.mark().unwrap();
        first.score(2, &[response(0, "good")]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], b"{\"format\":3,\"st"].concat()).unwrap();
        let second = environment(&shop, &path, Phase::Rollout);
        second.rewind(mark).unwrap();
        second.score(2, &[response(0, "good")]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        let error = second.rewind(1_000_000).unwrap_err().to_string();
        assert!(error.contains("and had 1000000 when the checkpoint was written"), "{error}");
    }

    #[test]
    fn garbage_is_scored_and_not_dropped() {
        let (shop, folder) = (Shop::default(), tempfile::tempdir().unwrap());
        let environment = environment(&shop, &folder.path().join("e.jsonl"), Phase::Rollout);
        for text in ["", "garbage"] {
            let record = &environment.score(0, &[response(0, text)]).unwrap().records[0];
            assert_eq!(record.episode.policy.rewrite, "");
            assert!(record.outcome.as_ref().unwrap().total < 0.0, "{record:?}");
        }
    }

    #[test]
    fn validation_judges_the_same_queries_each_time() {
        let (shop, folder) = (Shop::default(), tempfile::tempdir().unwrap());
        let environment = environment(&shop, &folder.path().join("e.jsonl"), Phase::Validation);
        let judged =
            |step| environment.score(step, &[response(0, "good")]).unwrap().records[0].episode.policy.judgement.clone();
        assert!((0..20).all(|step| judged(step) == judged(0)));
    }
}
