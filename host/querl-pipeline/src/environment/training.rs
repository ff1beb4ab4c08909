//! The environment of reinforcement learning, and its log of episodes, `episodes.jsonl`.

use super::columns::RowColumns;
use super::judging::Judging;
use super::scorer::{Baselines, ScoreRequest, ScoredEpisode, Scorer, Scores};
use crate::plugin_activity::{self, CallMeter};
use querl_core::fsx::io_problem;
use querl_core::ports::{Environment, EnvironmentError, LogMark, PolicyResponse, ScoredResponses};
use querl_core::records::{DatasetRow, EpisodeRecord, Split};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
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

    fn mark(&self) -> Result<LogMark, EnvironmentError> {
        self.log.mark()
    }

    fn rewind(&self, mark: LogMark) -> Result<Option<String>, EnvironmentError> {
        self.log.rewind(mark)
    }
}

#[derive(Debug)]
pub(crate) struct EpisodeLog {
    path: PathBuf,
    file: Mutex<LogFile>,
}

/// An open log, and the CRC-32C of its first `n_checked` bytes.
#[derive(Debug)]
struct LogFile {
    file: File,
    n_checked: u64,
    crc32c: u32,
}

impl LogFile {
    /// The CRC-32C of the first `length` bytes. Only what an earlier call has not read is read.
    fn checksum(&mut self, length: u64) -> io::Result<u32> {
        if self.n_checked > length {
            (self.n_checked, self.crc32c) = (0, 0);
        }
        self.file.seek(SeekFrom::Start(self.n_checked))?;
        let mut buffer = vec![0; (length - self.n_checked).min(1 << 18) as usize];
        while self.n_checked < length {
            let n_bytes = (length - self.n_checked).min(buffer.len() as u64) as usize;
            self.file.read_exact(&mut buffer[..n_bytes])?;
            self.crc32c = crc32c::crc32c_append(self.crc32c, &buffer[..n_bytes]);
            self.n_checked += n_bytes as u64;
        }
        Ok(self.crc32c)
    }

    fn mark(&mut self) -> io::Result<LogMark> {
        self.file.sync_all()?;
        let length = self.file.metadata()?.len();
        Ok(LogMark { length, crc32c: Some(self.checksum(length)?) })
    }
}

impl EpisodeLog {
    /// Opens the episode log at `path`, which may have records of earlier steps.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        Ok(Self { path: path.into(), file: Mutex::new(LogFile { file, n_checked: 0, crc32c: 0 }) })
    }

    /// Appends the episodes of one batch, in a single write.
    pub(crate) fn append(&self, records: &[EpisodeRecord]) -> Result<(), EnvironmentError> {
        let mut lines = Vec::new();
        for record in records {
            serde_json::to_writer(&mut lines, record).map_err(|error| self.failed(&error.into()))?;
            lines.push(b'\n');
        }
        let mut log = self.file();
        let file = &mut log.file;
        let end = file.metadata().map_err(|error| self.failed(&error))?.len();
        file.write_all(&lines).map_err(|error| {
            // Removes the part that was written; if that fails too, readers skip the torn line.
            let _ = file.set_len(end);
            self.failed(&error)
        })
    }

    pub(crate) fn mark(&self) -> Result<LogMark, EnvironmentError> {
        self.file().mark().map_err(|error| self.failed(&error))
    }

    /// Truncates the file to its content when [`mark`](Self::mark) returned `mark`. If it no longer has this content, it stays as it is, and
    /// the difference is returned.
    pub(crate) fn rewind(&self, mark: LogMark) -> Result<Option<String>, EnvironmentError> {
        let (mut log, path, LogMark { length: wanted, crc32c }) = (self.file(), self.path.display(), mark);
        let length = log.file.metadata().map_err(|error| self.failed(&error))?.len();
        if length < wanted {
            let difference = format!("has {length} bytes, and had {wanted} when the checkpoint was written");
            return Ok(Some(format!("{path}: {difference}")));
        }
        let found = log.checksum(wanted);
        let found = found.map_err(|error| EnvironmentError::Record(format!("{path}: cannot be read: {error}")))?;
        if crc32c.is_some_and(|expected| expected != found) {
            let difference = format!("the first {wanted} bytes were changed after the checkpoint was written");
            return Ok(Some(format!("{path}: {difference}")));
        }
        log.file.set_len(wanted).and_then(|()| log.file.sync_all()).map_err(|error| self.failed(&error))?;
        Ok(None)
    }

    fn file(&self) -> MutexGuard<'_, LogFile> {
        self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn failed(&self, error: &std::io::Error) -> EnvironmentError {
        EnvironmentError::Record(format!("{}: cannot be written: {}", self.path.display(), io_problem(error)))
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
        assert_eq!(second.rewind(mark).unwrap(), None);
        second.score(2, &[response(0, "good")]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!(second.mark().unwrap(), environment(&shop, &path, Phase::Rollout).mark().unwrap());
    }

    /// Regression: only the length was compared, so that a run resumed with a log whose content was damaged.
    #[test]
    fn a_log_that_is_not_what_it_was_at_the_mark_is_named_and_left_as_it_is() {
        let (shop, folder) = (Shop::default(), tempfile::tempdir().unwrap());
        let path = folder.path().join("episodes.jsonl");
        let first = environment(&shop, &path, Phase::Rollout);
        first.score(1, &[response(0, "good")]).unwrap();
        let early = first.mark().unwrap();
        first.score(2, &[response(0, "good")]).unwrap();
        let (late, whole) = (first.mark().unwrap(), std::fs::read(&path).unwrap());
        let rewound = |bytes: &[u8], mark| {
            std::fs::write(&path, bytes).unwrap();
            let difference = environment(&shop, &path, Phase::Rollout).rewind(mark).unwrap();
            let difference = difference.map(|text| text.replace(&path.display().to_string(), "LOG"));
            (difference, std::fs::read(&path).unwrap().len())
        };
        let (n_early, n_late) = (early.length as usize, late.length as usize);
        let cut = format!("LOG: has {} bytes, and had {n_late} when the checkpoint was written", n_late - 1);
        assert_eq!(rewound(&whole[..n_late - 1], late), (Some(cut), n_late - 1));
        assert_eq!(rewound(&whole[..n_late - 1], early), (None, n_early));
        let mut damaged = whole.clone();
        damaged[n_early + 10] = 0xff;
        let changed = format!("LOG: the first {n_late} bytes were changed after the checkpoint was written");
        assert_eq!(rewound(&damaged, late), (Some(changed), n_late));
        assert_eq!(rewound(&damaged, early), (None, n_early));
        // Checkpoints of earlier versions have the length alone.
        let old: LogMark = serde_json::from_str(&n_late.to_string()).unwrap();
        assert_eq!(rewound(&damaged, old), (None, n_late));
        // One process may go back over several checkpoints.
        std::fs::write(&path, &damaged).unwrap();
        let resumed = environment(&shop, &path, Phase::Rollout);
        assert!(resumed.rewind(late).unwrap().is_some());
        assert_eq!((resumed.rewind(early).unwrap(), resumed.mark().unwrap()), (None, early));
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
