//! Ports: the traits through which stages reach teachers, judges, retrieval and plugins. Each has a real implementation and
//! a stand-in behind the same trait.

use crate::records::{
    CallFailure, Completion, Context, Dialogue, Episode, EpisodeRecord, Hit, Message, QueryRow, Rejection, Reward,
    Sample, StyleProbability, Verdict,
};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};

/// Rewrites queries: a large model behind an endpoint, or a recording of one.
#[async_trait]
pub trait Teacher: Send + Sync {
    /// Rewrites one query. `messages` is the prompt that the tenant's plugin made for it. The text is returned as the model
    /// sent it; parsing is the plugin's.
    async fn rewrite(&self, query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure>;

    /// Whether the answer to this prompt is known without asking anybody.
    fn knows(&self, messages: &[Message]) -> bool {
        let _ = messages;
        false
    }

    /// Forgets an answer to this prompt that turned out to be of no use: the next time is asked anew.
    fn forget(&self, messages: &[Message]) {
        let _ = messages;
    }

    /// Keeps an answer to this prompt that came another way.
    fn keep(&self, messages: &[Message], completion: &Completion) {
        let _ = (messages, completion);
    }

    /// Who is asked for a row that this one failed on.
    fn fallback(&self) -> Option<&dyn Teacher> {
        None
    }

    /// How records and reports name it: `gpt-5`, `recorded (stand-in)`.
    fn name(&self) -> &str;
}

/// What a judge is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgeRequest<'a> {
    /// What the user typed.
    pub query: &'a str,
    /// Who asks, and what was said before.
    pub context: &'a Context,
    /// The rewrite to judge.
    pub rewrite: &'a str,
    /// The prompt that the tenant's plugin made.
    pub messages: &'a [Message],
}

/// Judges a rewrite: a large model, or a rubric that stands in for one.
#[async_trait]
pub trait Judge: Send + Sync {
    /// The judge's answer as text, to be parsed by the tenant's plugin (`parse-judgement`).
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure>;

    /// Forgets an answer to this prompt that turned out to be of no use: the next time is asked anew.
    fn forget(&self, messages: &[Message]) {
        let _ = messages;
    }

    /// How reports name it: `gpt-5`, `rubric (stand-in)`.
    fn name(&self) -> &str;
}

/// What retrieval is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct RetrievalRequest<'a> {
    /// What the user typed: passages are scored against this.
    pub original_query: &'a str,
    /// Who asks, and what was said before.
    pub context: &'a Context,
    /// What is looked up.
    pub rewritten_query: &'a str,
}

/// Finds passages.
#[async_trait]
pub trait Retriever: Send + Sync {
    /// Passages for one rewrite, best reranker score first, ranks from 1. An empty list is an answer: nothing was found.
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure>;

    /// How reports name it.
    fn name(&self) -> &str;
}

/// Why a model in this process gave no answer, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LocalModelError(pub String);

/// Makes vectors of texts, in this process.
pub trait Embedder: Send + Sync {
    /// One vector of length 1 a text, in order. The same text gives the same vector, beside rounding.
    ///
    /// # Errors
    /// The model failed.
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError>;

    /// Numbers in a vector.
    fn dimension(&self) -> usize;

    /// Stands for everything that decides a vector.
    fn digest(&self) -> &str;

    /// What the model wants before a query where nobody says otherwise.
    fn query_prefix(&self) -> &str {
        ""
    }

    /// What the model wants before a passage.
    fn passage_prefix(&self) -> &str {
        ""
    }
}

/// Says how well texts answer a query, in this process.
pub trait PairScorer: Send + Sync {
    /// One number from 0 to 1 a text, in order.
    ///
    /// # Errors
    /// The model failed.
    fn scores(&self, query: &str, texts: &[&str]) -> Result<Vec<f64>, LocalModelError>;

    /// Stands for everything that decides a number.
    fn digest(&self) -> &str;
}

/// What a prompt is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptTask {
    /// The teacher's prompt: long, with the tenant's rules.
    TeacherRewrite,
    /// The policy's prompt: short; what a rule says is learned.
    PolicyRewrite,
    /// The judge's prompt.
    Judge,
}

/// What goes into a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptInput<'a> {
    /// What the user typed.
    pub query: &'a str,
    /// Who asks, and what was said before.
    pub context: &'a Context,
    /// The rewrite to judge; `None` in the rewrite tasks.
    pub rewrite: Option<&'a str>,
}

/// A judgement as parsed.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedJudgement {
    /// 综合得分, 0 to 5.
    pub score: f64,
    /// Why, in words.
    pub reason: String,
}

/// A plugin's fault: names plugin, version and what it did.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("plugin {plugin} {version}: {message}")]
pub struct PluginFault {
    /// The plugin's name.
    pub plugin: String,
    /// Its version.
    pub version: String,
    /// What it did and what the contract says.
    pub message: String,
    /// What sort of breach.
    pub kind: FaultKind,
}

/// The sorts of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// It stopped by itself: a panic, a trap.
    Trap,
    /// A limit stopped it: fuel, time, memory, output.
    Limit,
    /// It returned what the contract does not allow.
    Result,
    /// The machine could not run it: no breach of the plugin's.
    Host,
    /// More items were dropped at limits than `plugins.limits.max_dropped` allows.
    TooManyDropped,
}

/// A tenant's prompts and the parsing of answers.
pub trait Prompts: Send + Sync {
    /// The conversation for one task.
    fn messages(&self, task: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault>;

    /// A rewrite out of a model's answer; the inner error says why there is none.
    fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault>;

    /// A judgement out of a judge's answer; the inner error says why there is none.
    fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault>;
}

/// Keeps or drops dataset rows.
pub trait Filter: Send + Sync {
    /// One verdict per sample, in order.
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault>;

    /// The plugin's name.
    fn name(&self) -> &str;
}

/// The range a reward declares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RewardRange {
    /// No total lies below.
    pub min: f64,
    /// No total lies above.
    pub max: f64,
}

/// Scores episodes.
pub trait RewardModel: Send + Sync {
    /// One result per episode, in order. A rejection drops the episode; it is not a score.
    fn score_batch(&self, episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault>;

    /// The declared range of totals.
    fn range(&self) -> RewardRange;

    /// The plugin's name.
    fn name(&self) -> &str;
}

/// A classifier of style: of the last answer of a dialogue and the question before it.
pub trait StyleModel: Send + Sync {
    /// The distribution over the model's classes, in the model's order. The same dialogue gives the same distribution.
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure>;

    /// The same for several dialogues, in order; a model that gains by it looks at them together.
    fn classify_all(&self, dialogues: &[Vec<Message>]) -> Vec<Result<Vec<StyleProbability>, CallFailure>> {
        dialogues.iter().map(|turns| self.classify(turns)).collect()
    }
}

/// Scores the style of answers.
pub trait StyleScorer: Send + Sync {
    /// One result per dialogue, in order; totals lie in 0 to 1. A rejection drops the dialogue; it is not a score.
    fn score_batch(&self, dialogues: &[Dialogue]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault>;

    /// The plugin's name.
    fn name(&self) -> &str;
}

/// What the policy wrote for one query.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyResponse {
    /// Position of the query in the rows that the environment was opened with.
    pub row_index: usize,
    /// Which of the samples of that query, from 0.
    pub sample_index: usize,
    /// The response as decoded, special tokens left out.
    pub text: String,
    /// Tokens generated, end of sequence included.
    pub n_tokens: u32,
    /// True where the token limit cut the response off.
    pub truncated: bool,
}

/// Why a whole batch could not be scored. One episode's failure is in its record instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// A plugin broke its contract.
    #[error(transparent)]
    Plugin(#[from] PluginFault),
    /// A service that every episode needs is down or refuses us.
    #[error(transparent)]
    Service(#[from] crate::records::CallFailure),
    /// A record could not be written.
    #[error("{0}")]
    Record(String),
}

/// Where the time of a call went, in seconds of wall-clock time. Retrieval and judge are asked at once, so theirs may overlap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CallTimings {
    /// Waiting for retrieval.
    pub retrieve_s: f64,
    /// Waiting for the judge, its prompts and the parsing of its answers included.
    pub judge_s: f64,
    /// In plugins that parse answers and score episodes.
    pub plugin_s: f64,
}

impl std::ops::AddAssign for CallTimings {
    fn add_assign(&mut self, other: Self) {
        self.retrieve_s += other.retrieve_s;
        self.judge_s += other.judge_s;
        self.plugin_s += other.plugin_s;
    }
}

/// What became of some responses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ScoredResponses {
    /// One record per response, in order; an episode that cannot be scored carries its rejection.
    pub records: Vec<EpisodeRecord>,
    /// What it took.
    pub timings: CallTimings,
}

impl From<Vec<EpisodeRecord>> for ScoredResponses {
    /// Of an environment that measures nothing.
    fn from(records: Vec<EpisodeRecord>) -> Self {
        Self { records, timings: CallTimings::default() }
    }
}

/// Turns responses into scored episodes: parsing, retrieval, judge, reward plugins. What training sees of the world.
///
/// Training calls it from one thread at a time, not always the same, and waits for the answer: an environment bounds its own
/// calls (`rl.episode_deadline_ms`). Where it keeps a log, a training that goes on from a checkpoint rewinds the log to where
/// it was then, so that each episode stands there once.
pub trait Environment: Send + Sync {
    /// Scores some responses, and records them.
    ///
    /// # Errors
    /// None of them can be scored, or they cannot be recorded.
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError>;

    /// How far the log has come, with all up to there on disk. 0 where there is no log.
    ///
    /// # Errors
    /// The log cannot be written.
    fn mark(&self) -> Result<u64, EnvironmentError> {
        Ok(0)
    }

    /// Forgets what the log took up since [`mark`](Self::mark) returned `mark`, in this process or an earlier one.
    ///
    /// # Errors
    /// The log ends before that, or cannot be written.
    fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        let _ = mark;
        Ok(())
    }
}

/// Shows how far a stage is.
pub trait Progress: Send + Sync {
    /// `n_done` of `n_total` units are done; `note` is a short live figure such as `loss 0.812`.
    fn update(&self, n_done: u64, n_total: u64, note: &str);

    /// One line that stays on screen.
    fn line(&self, text: &str);

    /// True once nothing more is to be begun: what is under way comes to its end, and the work ends there.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn update(&self, _: u64, _: u64, _: &str) {}

    fn line(&self, _: &str) {}
}
