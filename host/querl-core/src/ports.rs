//! Traits of external components: `Teacher`, `Judge`, `Retriever`, `Embedder`, `PairScorer` (cross-encoder), the plugin kinds
//! (`Prompts`, `Filter`, `RewardModel`, `StyleScorer`), `StyleModel`, the RL `Environment`, and the `RolloutEngine`. Each has a real
//! implementation and a stand-in.

use crate::records::{
    CallFailure, CandidateRef, Completion, Context, Dialogue, Episode, EpisodeRecord, EpisodeRef, Hit, HostCallError,
    HostRequest, HostResponse, Judgement, Message, QueryRow, Rejection, Reward, Sample, StyleProbability, Verdict,
};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Teacher model that rewrites queries: an endpoint, a local model, or a recording.
#[async_trait]
pub trait Teacher: Send + Sync {
    /// Rewrites one query. `messages` is the prompt from the tenant's plugin. Returns the raw text; the plugin parses it.
    async fn rewrite(&self, query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure>;

    /// Whether the answer to this prompt is cached.
    fn knows(&self, _messages: &[Message]) -> bool {
        false
    }

    /// Removes an unusable answer to this prompt from the cache, so that the next call requests it again.
    fn forget(&self, _messages: &[Message]) {}

    /// Adds an answer to this prompt that was obtained elsewhere (batch interface) to the cache.
    fn keep(&self, _messages: &[Message], _completion: &Completion) {}

    /// Clause for messages: why this teacher may have no rewrite for many queries; `None` if there is no known reason.
    fn hint(&self) -> Option<String> {
        None
    }

    /// The teacher for rows on which this one failed, if configured.
    fn fallback(&self) -> Option<&dyn Teacher> {
        None
    }

    /// Name in records and reports: `gpt-5`, `recorded (stand-in)`.
    fn name(&self) -> &str;
}

/// Input of a [`Judge`].
#[derive(Debug, Clone, PartialEq)]
pub struct JudgeRequest<'a> {
    /// The original query.
    pub query: &'a str,
    /// User profile and conversation history.
    pub context: &'a Context,
    /// The rewrite to judge.
    pub rewrite: &'a str,
    /// The prompt from the tenant's plugin.
    pub messages: &'a [Message],
}

/// LLM judge of rewrites, or a rubric in place of one.
#[async_trait]
pub trait Judge: Send + Sync {
    /// The judge's answer as text, to be parsed by the tenant's plugin (`parse-judgement`).
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure>;

    /// Removes an unusable answer to this prompt from the cache, so that the next call requests it again.
    fn forget(&self, _messages: &[Message]) {}

    /// Name in reports: `gpt-5`, `rubric (stand-in)`.
    fn name(&self) -> &str;
}

/// Input of a [`Retriever`].
#[derive(Debug, Clone, PartialEq)]
pub struct RetrievalRequest<'a> {
    /// The original query: passages are scored against it.
    pub original_query: &'a str,
    /// User profile and conversation history.
    pub context: &'a Context,
    /// The search query.
    pub rewritten_query: &'a str,
}

/// Passage retrieval.
#[async_trait]
pub trait Retriever: Send + Sync {
    /// Passages for one rewrite, by descending reranker score, ranks from 1. An empty list is a valid result.
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure>;

    /// Name in reports.
    fn name(&self) -> &str;
}

/// Error of a model in this process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LocalModelError(pub String);

/// Text embedding model in this process.
pub trait Embedder: Send + Sync {
    /// One L2-normalised vector per text, in order. Deterministic up to rounding.
    ///
    /// # Errors
    /// The model failed.
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError>;

    /// Dimension of the vectors.
    fn dimension(&self) -> usize;

    /// Digest of weights, configuration and settings.
    fn digest(&self) -> &str;

    /// Default prefix of queries.
    fn query_prefix(&self) -> &str {
        ""
    }

    /// Prefix of passages.
    fn passage_prefix(&self) -> &str {
        ""
    }
}

/// Cross-encoder in this process: relevance of texts to a query.
pub trait PairScorer: Send + Sync {
    /// One score from 0 to 1 per text, in order.
    ///
    /// # Errors
    /// The model failed.
    fn scores(&self, query: &str, texts: &[&str]) -> Result<Vec<f64>, LocalModelError>;

    /// Digest of weights, configuration and settings.
    fn digest(&self) -> &str;
}

named_enum! {
    /// The purpose of a prompt.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum PromptTask {
        /// The teacher's prompt: long, with the tenant's rules.
        TeacherRewrite = "teacher_rewrite",
        /// The policy's prompt: short, since the policy learns the rules.
        PolicyRewrite = "policy_rewrite",
        /// The judge's prompt.
        Judge = "judge",
    }
}

/// Values that a prompt plugin renders a prompt from.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptInput<'a> {
    /// The original query.
    pub query: &'a str,
    /// User profile and conversation history.
    pub context: &'a Context,
    /// The rewrite to judge; `None` in the rewrite tasks.
    pub rewrite: Option<&'a str>,
}

/// A parsed judgement.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedJudgement {
    /// Overall score (综合得分), 0 to 5.
    pub score: f64,
    /// The judge's explanation.
    pub reason: String,
}

/// Error of a plugin that breaks its contract or exceeds a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("plugin {plugin} {version}: {message}")]
pub struct PluginFault {
    /// Name of the plugin.
    pub plugin: String,
    /// Version of the plugin.
    pub version: String,
    /// What happened and what the contract requires.
    pub message: String,
    /// Category of the fault.
    pub kind: FaultKind,
    /// What the plugin logged in the call, one entry per line: `info: no hits`.
    pub log: Vec<String>,
}

impl PluginFault {
    /// Plugin and category, without [`message`](Self::message), which may quote the texts of the call: for logs of a service, whose texts
    /// are those of its users.
    pub fn without_texts(&self) -> String {
        let what = match self.kind {
            FaultKind::Trap => "it panicked or trapped",
            FaultKind::Limit => "it exceeded a limit of fuel, time, memory or output",
            FaultKind::Result => "its result violates the contract",
            FaultKind::Host => "the host could not run it",
            FaultKind::TooManyDropped => "it dropped more items at limits than plugins.limits.max_dropped allows",
        };
        format!("plugin {} {}: {what}", self.plugin, self.version)
    }
}

/// Categories of plugin faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The plugin panicked or trapped.
    Trap,
    /// A limit was exceeded: fuel, time, memory or output.
    Limit,
    /// The result violates the contract.
    Result,
    /// The host could not run the plugin.
    Host,
    /// More items were dropped at limits than `plugins.limits.max_dropped` allows.
    TooManyDropped,
}

/// Prompt plugin: a tenant's prompts and the parsers of the answers.
pub trait Prompts: Send + Sync {
    /// The conversation for one task.
    fn messages(&self, task: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault>;

    /// Parses a rewrite from a model's answer; the inner error is the plugin's rejection.
    fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault>;

    /// Parses a judgement from a judge's answer; the inner error is the plugin's rejection.
    fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault>;

    /// Name and version of the plugin.
    fn title(&self) -> &str {
        "prompts"
    }
}

/// Filter plugin: keeps or drops dataset rows.
pub trait Filter: Send + Sync {
    /// One verdict per sample, in order.
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault>;

    /// Whether the plugin reads [`Sample::columns`].
    fn reads_columns(&self) -> InputUse {
        InputUse::Unused
    }

    /// Name of the plugin.
    fn name(&self) -> &str;
}

/// The range of totals that a reward plugin declares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RewardRange {
    /// Lower bound, inclusive.
    pub min: f64,
    /// Upper bound, inclusive.
    pub max: f64,
}

/// Whether a plugin reads an input that costs the host something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum InputUse {
    /// Not read: neither computed nor passed.
    #[default]
    Unused,
    /// Read if the run has the input.
    Optional,
    /// Read and required: a run that cannot provide the input is refused.
    Required,
}

/// Inputs that a reward plugin reads from an episode, or a filter from a sample (`columns` only).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct EpisodeInputs {
    pub response: InputUse,
    pub prompt: InputUse,
    pub columns: InputUse,
    pub baseline: InputUse,
    pub retrieval: InputUse,
    pub judgement: InputUse,
    pub style: InputUse,
}

impl EpisodeInputs {
    /// Inputs of a plugin of contract 0.1, which cannot declare them.
    pub const CONTRACT_0_1: Self = Self {
        response: InputUse::Unused,
        prompt: InputUse::Unused,
        columns: InputUse::Unused,
        baseline: InputUse::Required,
        retrieval: InputUse::Required,
        judgement: InputUse::Optional,
        style: InputUse::Optional,
    };

    /// The inputs that are read, with their names in the plugin contract, in the contract's order.
    pub fn used(&self) -> impl Iterator<Item = (&'static str, InputUse)> + use<> {
        let all = [
            ("response", self.response),
            ("prompt", self.prompt),
            ("columns", self.columns),
            ("baseline", self.baseline),
            ("retrieval", self.retrieval),
            ("judgement", self.judgement),
            ("style", self.style),
        ];
        all.into_iter().filter(|(_, used)| *used != InputUse::Unused)
    }

    /// The parts of an episode that a plugin with these inputs gets.
    pub fn of<'a>(&self, episode: &'a Episode) -> EpisodeRef<'a> {
        let is_read = |input: InputUse| input != InputUse::Unused;
        let parts = |candidate: CandidateRef<'a>| CandidateRef {
            retrieval: candidate.retrieval.filter(|_| is_read(self.retrieval)),
            judgement: if is_read(self.judgement) { candidate.judgement } else { &Judgement::NotSampled },
            style: candidate.style.filter(|_| is_read(self.style)),
            ..candidate
        };
        let whole = EpisodeRef::from(episode);
        EpisodeRef {
            columns: if is_read(self.columns) { whole.columns } else { &[] },
            prompt: whole.prompt.filter(|_| is_read(self.prompt)),
            response: whole.response.filter(|_| is_read(self.response)),
            policy: parts(whole.policy),
            baseline: whole.baseline.filter(|_| is_read(self.baseline)).map(parts),
            ..whole
        }
    }

    /// The inputs that concern the teacher's rewrite; its hits, judgement and style are required only if the rewrite is required.
    #[must_use]
    pub fn of_baseline(self) -> Self {
        let baseline = self.baseline;
        Self {
            baseline,
            retrieval: self.retrieval.min(baseline),
            judgement: self.judgement.min(baseline),
            style: self.style.min(baseline),
            ..Self::default()
        }
    }

    /// The inputs of two plugins together: for each input the stronger [`InputUse`].
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self {
            response: self.response.max(other.response),
            prompt: self.prompt.max(other.prompt),
            columns: self.columns.max(other.columns),
            baseline: self.baseline.max(other.baseline),
            retrieval: self.retrieval.max(other.retrieval),
            judgement: self.judgement.max(other.judgement),
            style: self.style.max(other.style),
        }
    }
}

/// Host functions of plugins: tokenizer, segmentation, encoder, judge, style model. Implementations record each result, or answer from a
/// recording.
pub trait HostFunctions: Send + Sync {
    /// The result of one call that `plugin` makes while it scores the item `item_id`. May block on an external service.
    ///
    /// # Errors
    /// The run has no such service, the call failed, or the recording has no result for it.
    fn call(&self, plugin: &str, item_id: &str, request: &HostRequest) -> Result<HostResponse, HostCallError>;
}

/// Reward plugin: scores episodes.
pub trait RewardModel: Send + Sync {
    /// One result per episode, in order. A rejection drops the episode. Episodes of one `group_id` must be in one batch.
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault>;

    /// The inputs that the plugin reads.
    fn inputs(&self) -> EpisodeInputs {
        EpisodeInputs::CONTRACT_0_1
    }

    /// The declared range of totals.
    fn range(&self) -> RewardRange;

    /// Name of the plugin.
    fn name(&self) -> &str;
}

/// Style reward model: classifies the last answer of a dialogue together with the question before it.
pub trait StyleModel: Send + Sync {
    /// The distribution over the model's classes, in the model's order. Deterministic.
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure>;

    /// [`classify`](Self::classify) for several dialogues, in order; implementations may batch them.
    fn classify_all(&self, dialogues: &[Vec<Message>]) -> Vec<Result<Vec<StyleProbability>, CallFailure>> {
        dialogues.iter().map(|turns| self.classify(turns)).collect()
    }
}

/// Style plugin: scores the style of answers.
pub trait StyleScorer: Send + Sync {
    /// One result per dialogue, in order; totals are 0 to 1. A rejection drops the dialogue.
    fn score_batch(&self, dialogues: &[Dialogue]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault>;

    /// Name of the plugin.
    fn name(&self) -> &str;
}

/// One response of the policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyResponse {
    /// Index of the query in the rows that the environment was opened with.
    pub row_index: usize,
    /// Index of the sample of that query, from 0.
    pub sample_index: usize,
    /// The decoded response without special tokens.
    pub text: String,
    /// Number of generated tokens, end of sequence included.
    pub n_tokens: u32,
    /// True if the finish reason is the token limit.
    pub truncated: bool,
}

/// Error of a whole batch. The failure of a single episode is in its record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// A plugin broke its contract.
    #[error(transparent)]
    Plugin(#[from] PluginFault),
    /// A service that every episode needs is down or rejects the credentials.
    #[error(transparent)]
    Service(#[from] CallFailure),
    /// A record could not be written.
    #[error("{0}")]
    Record(String),
    /// A scoring request of another trainer is invalid: it names an unknown query, or repeats an id.
    #[error("{0}")]
    Request(String),
}

/// Wall-clock time of [`Environment::score`] in seconds. Retrieval and judge run concurrently, so their times may overlap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CallTimings {
    /// Time of retrieval calls.
    pub retrieve_s: f64,
    /// Time of judge calls, prompt and parser plugins included.
    pub judge_s: f64,
    /// Time of plugins that parse responses and score episodes.
    pub plugin_s: f64,
}

impl std::ops::AddAssign for CallTimings {
    fn add_assign(&mut self, other: Self) {
        self.retrieve_s += other.retrieve_s;
        self.judge_s += other.judge_s;
        self.plugin_s += other.plugin_s;
    }
}

/// Result of [`Environment::score`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ScoredResponses {
    /// One record per response, in order; an episode that cannot be scored has a rejection.
    pub records: Vec<EpisodeRecord>,
    /// Wall-clock time by kind of call.
    pub timings: CallTimings,
    /// Activity by plugin name, for metrics; empty if it is not measured, as in evaluations.
    #[serde(default)]
    pub plugins: BTreeMap<String, PluginActivity>,
}

/// What a plugin did while rollouts were scored.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PluginActivity {
    /// Wall-clock time of the plugin's calls in seconds.
    pub time_s: f64,
    /// Fuel (executed WebAssembly instructions) of the plugin's calls; the same on every machine.
    pub fuel: u64,
    /// Results of a reward plugin; `None` for other plugins.
    pub results: Option<RewardResults>,
}

/// The results of a reward plugin.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardResults {
    /// Width of the declared range of totals.
    pub range_width: f64,
    /// Episodes that the plugin rejected.
    pub n_rejected: u64,
    /// Totals of the episodes that were not rejected, in order.
    pub totals: Vec<f64>,
    /// Values of each component by name, as pairs (value, total of the episode).
    pub components: BTreeMap<String, Vec<(f64, f64)>>,
}

impl std::ops::AddAssign for PluginActivity {
    fn add_assign(&mut self, other: Self) {
        self.time_s += other.time_s;
        self.fuel = self.fuel.saturating_add(other.fuel);
        let Some(other) = other.results else { return };
        let results = self.results.get_or_insert_default();
        results.range_width = other.range_width;
        results.n_rejected += other.n_rejected;
        results.totals.extend(other.totals);
        for (name, values) in other.components {
            results.components.entry(name).or_default().extend(values);
        }
    }
}

impl From<Vec<EpisodeRecord>> for ScoredResponses {
    /// Scored responses without timings and plugin activity.
    fn from(records: Vec<EpisodeRecord>) -> Self {
        Self { records, ..Self::default() }
    }
}

/// Position in a log, which a checkpoint keeps, with a checksum of the log up to there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredMark")]
pub struct LogMark {
    /// Length of the log: bytes of an episode log, lines of a metrics log.
    pub length: u64,
    /// CRC-32C of the log; `None`: not known, and not compared.
    pub crc32c: Option<u32>,
}

/// A mark in a checkpoint. Those of earlier versions are the length alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredMark {
    Length(u64),
    Mark { length: u64, crc32c: Option<u32> },
}

impl From<StoredMark> for LogMark {
    fn from(stored: StoredMark) -> Self {
        match stored {
            StoredMark::Length(length) => Self { length, crc32c: None },
            StoredMark::Mark { length, crc32c } => Self { length, crc32c },
        }
    }
}

/// RL environment: turns responses into scored episodes (parsing, retrieval, judge, reward plugins).
///
/// The trainer calls it from one thread at a time and blocks; the environment limits its own calls
/// (`rl.episode_deadline_ms`). When training resumes from a checkpoint, the episode log is rewound to the checkpoint's
/// [`mark`](Self::mark), so that each episode is logged once.
pub trait Environment: Send + Sync {
    /// Scores and logs a batch of responses.
    ///
    /// # Errors
    /// The batch cannot be scored or logged.
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError>;

    /// Syncs the episode log and returns its end; the default mark without a log.
    ///
    /// # Errors
    /// The log cannot be written.
    fn mark(&self) -> Result<LogMark, EnvironmentError> {
        Ok(LogMark::default())
    }

    /// Truncates the episode log to `mark`, which [`mark`](Self::mark) returned in this process or an earlier one. If the log is shorter or
    /// its content up to there was changed, it stays as it is, and the difference is returned: the path and what differs.
    ///
    /// # Errors
    /// The log cannot be read or written.
    fn rewind(&self, _mark: LogMark) -> Result<Option<String>, EnvironmentError> {
        Ok(None)
    }
}

/// A prompt of a [`RolloutEngine`], and how many responses to it are sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutPrompt {
    /// Token ids of the prompt; at least one.
    pub token_ids: Vec<u32>,
    /// Seed of the responses to this prompt; each response has its own random stream.
    pub seed: u64,
    /// Number of responses to sample.
    pub n: usize,
}

/// Sampling settings and limits of a [`RolloutEngine`], as in training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutSampling {
    /// Sampling temperature; 0 is greedy decoding.
    pub temperature: f64,
    /// Threshold of nucleus sampling; 1 disables it.
    pub top_p: f64,
    /// Number of tokens of top-k sampling; 0 disables it.
    pub top_k: usize,
    /// Minimum number of tokens of a response.
    pub min_new_tokens: usize,
    /// Maximum number of tokens of a response; longer responses are truncated.
    pub max_new_tokens: usize,
    /// Stop strings; a response ends with the token that completes one of them.
    pub stop_strings: Vec<String>,
    /// Tokens that end a response.
    pub stop_token_ids: Vec<u32>,
}

/// One response of a [`RolloutEngine`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutResponse {
    /// Token ids of the response, stop token included.
    pub token_ids: Vec<u32>,
    /// Log-probability of each token, in nats, under the distribution that it was sampled from; empty with greedy decoding.
    pub logprobs: Vec<f32>,
    /// True if the finish reason is the token limit.
    pub truncated: bool,
}

/// Generates the responses of reinforcement learning in another process, such as a vLLM server. The trainer calls it from one thread at a
/// time and blocks.
pub trait RolloutEngine: Send + Sync {
    /// Loads the policy for the following calls of `generate`: a PEFT adapter in the folder `adapter`, which must stay until the next
    /// call.
    /// `version` identifies the weights; with the version of the last call nothing is done.
    ///
    /// # Errors
    /// The engine cannot load the adapter, or does not have the base model.
    fn set_policy(&self, version: u64, adapter: &Path) -> Result<(), CallFailure>;

    /// Generates `n` responses to each prompt; the outer list has the order of `prompts`.
    ///
    /// # Errors
    /// The engine failed, was interrupted, or returned something else.
    fn generate(
        &self,
        prompts: &[RolloutPrompt],
        sampling: &RolloutSampling,
    ) -> Result<Vec<Vec<RolloutResponse>>, CallFailure>;
}

/// Progress display and stop flag of a stage.
pub trait Progress: Send + Sync {
    /// `n_done` of `n_total` units are done; `note` is a short live value such as `loss 0.812`.
    fn update(&self, n_done: u64, n_total: u64, note: &str);

    /// Prints one permanent line.
    fn line(&self, text: &str);

    /// True once a stop was requested: running work finishes, no new work starts.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// No-op progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn update(&self, _: u64, _: u64, _: &str) {}

    fn line(&self, _: &str) {}
}

/// Where a library reports to the user. The command line prints it on stderr.
pub trait Reporter: Send + Sync {
    /// Reports one line.
    fn message(&self, text: &str);

    /// Starts to show the progress of a named unit of work; it ends when the value is dropped.
    fn stage(&self, name: &'static str) -> Box<dyn Progress>;
}

impl Reporter for Silent {
    fn message(&self, _: &str) {}

    fn stage(&self, _: &'static str) -> Box<dyn Progress> {
        Box::new(Self)
    }
}
