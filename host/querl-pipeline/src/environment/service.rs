//! The environment for other training frameworks: scores responses to queries that are rows of the run or are part of the request.

use super::columns::RowColumns;
use super::judging::Judging;
use super::scorer::{Baseline, Baselines, ScoreRequest, ScoredEpisode, Scorer};
use crate::failure::{check_run_or_config, run_in};
use crate::ledger::{Ledger, StageName, rows_of};
use crate::run::Run;
use anyhow::Context;
use querl_core::config::{Config, EmbeddingKind, Overrides, RerankKind, load, load_resolved};
use querl_core::fsx::digest_hex;
use querl_core::ports::{EnvironmentError, PolicyResponse, Reporter, RewardRange};
use querl_core::records::{CallFailure, Columns, DatasetRow, EpisodeRecord, FailureKind, Message, QueryRow, Split};
use querl_core::scoring::{InlineQuery, RewardQuery, RewardRequest, RewardService};
use querl_data::query_id;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Reward environment of a configuration, for other training frameworks. It takes no lock: several processes can open it at once, and the
/// configured limits and budget apply to each process separately.
pub struct RewardEnvironment {
    run: Run,
    scorer: Scorer,
    rows: HashMap<String, Row>,
    columns: RowColumns,
    baselines: Baselines,
    judging: Judging,
}

struct Row {
    row: DatasetRow,
    split: Split,
}

/// The query of a request, as a row.
struct ResolvedQuery<'a> {
    query: &'a QueryRow,
    columns: &'a Columns,
    prompt: Option<&'a [Message]>,
    split: Split,
    baseline: Baseline,
}

impl RewardEnvironment {
    /// Opens services and plugins; plugins must be those that the run or the configuration at `config_path` pins. Rows and the teacher's
    /// rewrites are read from the run directory, as far as its data stages have written them.
    ///
    /// # Errors
    /// A service or a plugin cannot be opened, a plugin differs from its pin, or a file of the run is damaged.
    pub fn open(config: Config, config_path: &Path, reporter: Arc<dyn Reporter>) -> anyhow::Result<Self> {
        let run = Run::open_for_scoring(config, config_path, reporter)?;
        run.plugins.check_style()?;
        let scorer = run.reward_scorer()?;
        let ledger = Ledger::open(&run.dir.stages())?;
        // Of an unfinished stage, the existing rows are used.
        let check = |stage: StageName, path: &Path| {
            ledger.finished(stage).map_or(Ok(()), |entry| entry.outputs.check(run.dir.root(), stage, path))
        };
        let mut rows = HashMap::new();
        for split in Split::ALL {
            let path = run.dir.split(split);
            check(StageName::Convert, &path)?;
            let found: Vec<DatasetRow> = if path.exists() { rows_of(&path)? } else { Vec::new() };
            rows.extend(found.into_iter().map(|row| (row.metadata.query.id.clone(), Row { row, split })));
        }
        let all: Vec<DatasetRow> = rows.values().map(|row| row.row.clone()).collect();
        let columns = RowColumns::read(scorer.rewards(), &run.config.data, &all)?;
        let validated = run.dir.validated();
        check(StageName::Validate, &validated)?;
        let validated = if validated.exists() { rows_of(&validated)? } else { Vec::new() };
        let baselines = Baselines::new(validated, run.config.retrieval.kind);
        let judging = Judging::of(&run.config.judge);
        Ok(Self { run, scorer, rows, columns, baselines, judging })
    }

    /// Reads the configuration file at `path`, or the one of the run in the folder `path`, and returns it with the file's path. A run
    /// folder may have been moved.
    ///
    /// # Errors
    /// The configuration cannot be used, or the folder is not that of a run.
    pub fn read_config(path: &Path, overrides: &Overrides) -> anyhow::Result<(Config, PathBuf)> {
        check_run_or_config(path)?;
        if !path.is_dir() {
            return Ok((load(path, overrides)?, path.to_owned()));
        }
        let resolved = run_in(path)?.config();
        let config = if overrides.set.is_empty() { load_resolved(&resolved)? } else { load(&resolved, overrides)? };
        let folder = std::path::absolute(path).with_context(|| path.display().to_string())?;
        Ok((Config { output_dir: folder, ..config }, resolved))
    }

    /// The configuration in use.
    pub fn config(&self) -> &Config {
        &self.run.config
    }

    /// SHA-256 of each plugin, in the order of the configuration.
    pub fn plugin_digests(&self) -> Vec<String> {
        self.run.plugins.used().iter().map(|used| used.entry.sha256.clone()).collect()
    }

    /// Whether scoring uses models in this process, whose threads do not survive a fork.
    pub fn uses_local_models(&self) -> bool {
        let retrieval = &self.run.config.retrieval;
        self.run.plugins.style.is_some()
            || retrieval.embedding.kind == EmbeddingKind::Local
            || retrieval.rerank.kind == RerankKind::Local
    }

    fn resolve<'a>(
        &'a self,
        request: &'a RewardRequest,
        inline: Option<&'a QueryRow>,
    ) -> Result<ResolvedQuery<'a>, EnvironmentError> {
        match &request.query {
            RewardQuery::Inline(own) => Ok(ResolvedQuery {
                query: inline.expect("an inline query has a row"),
                columns: &own.columns,
                prompt: request.prompt.as_deref(),
                split: own.split.unwrap_or(Split::Train),
                baseline: baseline_of(own),
            }),
            RewardQuery::Id(id) => {
                let Row { row, split } = self.rows.get(id).ok_or_else(|| self.unknown(id))?;
                let query = &row.metadata.query;
                let prompt = Some(request.prompt.as_deref().unwrap_or_else(|| row.prompt()));
                let (columns, baseline) = (self.columns.of(query), self.baselines.of(id));
                Ok(ResolvedQuery { query, columns, prompt, split: *split, baseline })
            }
        }
    }

    fn unknown(&self, id: &str) -> EnvironmentError {
        let dir = self.run.dir.root().display();
        let remedy = "run its data stages first, or send the query itself";
        EnvironmentError::Request(format!("query `{id}` is not among the {} rows of {dir}; {remedy}", self.rows.len()))
    }

    fn score_request<'a>(
        &self,
        request: &RewardRequest,
        resolved: ResolvedQuery<'a>,
        ids: &mut EpisodeIds,
    ) -> Result<ScoreRequest<'a>, EnvironmentError> {
        let ResolvedQuery { query, columns, prompt, split, baseline } = resolved;
        let group_id = request.group_id.clone().unwrap_or_else(|| group_of(request.step, split, &query.id));
        let sample_index = request.sample_index.unwrap_or_else(|| ids.next_sample(&group_id));
        let id = match (&request.id, request.step) {
            (Some(id), _) => id.clone(),
            (None, Some(_)) => format!("{}/{sample_index}", group_of(request.step, split, &query.id)),
            (None, None) => {
                let digest = digest_hex(request.response.as_bytes());
                format!("{}/{}", group_of(None, split, &query.id), &digest[..ID_DIGITS])
            }
        };
        let id = ids.unique(id, request.id.is_some())?;
        let response = PolicyResponse {
            row_index: 0,
            sample_index: sample_index as usize,
            text: request.response.clone(),
            n_tokens: request.n_tokens,
            truncated: request.truncated,
        };
        // As in training, a held-out query is judged each time or never.
        let judged = match split {
            Split::Train => self.judging.samples(&id),
            Split::Val | Split::Test => self.judging.samples(&query.id),
        };
        let policy = self.scorer.parse(query, &response)?;
        let step = request.step;
        Ok(ScoreRequest { id, group_id, sample_index, step, split, query, columns, prompt, policy, baseline, judged })
    }
}

impl RewardService for RewardEnvironment {
    fn score(&self, requests: &[RewardRequest]) -> Result<Vec<EpisodeRecord>, EnvironmentError> {
        let inline: Vec<Option<QueryRow>> = requests.iter().map(inline_row).collect();
        let mut ids = EpisodeIds::default();
        let resolved = requests.iter().zip(&inline).map(|(request, inline)| {
            let resolved = self.resolve(request, inline.as_ref())?;
            self.score_request(request, resolved, &mut ids)
        });
        let resolved = resolved.collect::<Result<Vec<_>, _>>()?;
        let scored = self.scorer.score(&resolved)?.scored.into_iter().zip(requests);
        let record = |(one, request): (ScoredEpisode, &RewardRequest)| EpisodeRecord {
            format: EpisodeRecord::FORMAT,
            step: request.step.unwrap_or_default(),
            episode: one.episode,
            calls: one.calls,
            outcome: one.outcome,
        };
        Ok(scored.map(record).collect())
    }

    fn range(&self) -> RewardRange {
        let ranges = self.scorer.rewards().iter().map(|reward| (reward.model.range(), reward.weight));
        ranges.fold(RewardRange { min: 0.0, max: 0.0 }, |sum, (range, weight)| {
            let (one, other) = (weight * range.min, weight * range.max);
            RewardRange { min: sum.min + one.min(other), max: sum.max + one.max(other) }
        })
    }
}

impl Drop for RewardEnvironment {
    fn drop(&mut self) {
        if let Err(error) = self.run.outside.spend_tracker().save() {
            tracing::warn!("{error}");
        }
    }
}

#[derive(Default)]
struct EpisodeIds {
    used: HashSet<String>,
    n_samples: HashMap<String, u32>,
}

impl EpisodeIds {
    /// The index of a sample whose request has none.
    fn next_sample(&mut self, group_id: &str) -> u32 {
        let n_samples = self.n_samples.entry(group_id.to_owned()).or_default();
        *n_samples += 1;
        *n_samples - 1
    }

    /// Equal responses without a step would have equal ids: later ones get a number.
    fn unique(&mut self, id: String, is_given: bool) -> Result<String, EnvironmentError> {
        if self.used.insert(id.clone()) {
            return Ok(id);
        }
        if is_given {
            return Err(EnvironmentError::Request(format!("two requests have the id `{id}`; expected unique ids")));
        }
        let numbered = (2..).map(|number| format!("{id}#{number}")).find(|id| !self.used.contains(id));
        let id = numbered.expect("there are more numbers than requests");
        self.used.insert(id.clone());
        Ok(id)
    }
}

/// Digits of a response's digest in the id of an episode without a step.
const ID_DIGITS: usize = 8;

/// The group id, as in training if there is a step.
fn group_of(step: Option<u64>, split: Split, query_id: &str) -> String {
    match (step, split) {
        (Some(step), Split::Train) => format!("step-{step:06}/{query_id}"),
        (Some(step), Split::Val | Split::Test) => format!("val-{step:06}/{query_id}"),
        (None, _) => format!("request/{query_id}"),
    }
}

/// The query that a request contains, as a row.
fn inline_row(request: &RewardRequest) -> Option<QueryRow> {
    let RewardQuery::Inline(own) = &request.query else { return None };
    let id = query_id(&own.query, &own.user_profile, &own.history_summary);
    Some(QueryRow {
        group: id.clone(),
        id,
        row: 0,
        original_query: own.query.clone(),
        user_profile: own.user_profile.clone(),
        history_summary: own.history_summary.clone(),
        gold_ids: own.gold_ids.clone(),
        expansion: own.expansion.clone(),
    })
}

/// The teacher's rewrite of an inline query; retrieval is called for it if a reward reads its hits.
fn baseline_of(own: &InlineQuery) -> Baseline {
    match &own.baseline {
        Some(rewrite) => Baseline::Rewritten { rewrite: rewrite.clone(), hits: None, cost: None, latency_ms: None },
        None => {
            let message = "the request has no `baseline`".into();
            Baseline::Missing(CallFailure { kind: FailureKind::NotRecorded, message })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_of_training_and_equal_ones_are_numbered() {
        assert_eq!(group_of(Some(12), Split::Train, "ab"), "step-000012/ab");
        assert_eq!(group_of(Some(0), Split::Val, "ab"), "val-000000/ab");
        let mut ids = EpisodeIds::default();
        let found = ["a", "a", "b", "a"].map(|id| ids.unique(id.into(), false).unwrap());
        assert_eq!(found, ["a", "a#2", "b", "a#3"]);
        assert!(ids.unique("b".into(), true).unwrap_err().to_string().contains("two requests have the id `b`"));
        assert_eq!(["g", "h", "g"].map(|group| ids.next_sample(group)), [0, 0, 1]);
    }
}
