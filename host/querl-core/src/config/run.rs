//! The sections of a configuration file, and what the key `device` may be.

use super::plugins::PluginsConfig;
use super::rollout::RolloutConfig;
use super::services::{CacheConfig, CallsConfig};
use super::sources::{EndpointConfig, JudgeConfig, RetrievalConfig, RetrievalKind, TeacherConfig, TeacherKind};
use super::training::{RlConfig, SftConfig};
use crate::records::Split;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The configuration of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Tenant id, sent to the retrieval service.
    pub tenant: String,
    /// `auto`, `cpu`, `cuda:N`, or several GPUs: `cuda:0,1` or `cuda:0-3`. `cpu:2` runs two ranks on the CPU: a test of
    /// multi-GPU behaviour, not faster.
    #[serde(default = "defaults::device")]
    pub device: String,
    /// Seed of initialisation, shuffling and sampling; the split has its own seed (`data.split_seed`).
    #[serde(default = "defaults::seed")]
    pub seed: u64,
    /// Worker threads for the CPU; 0 takes all cores.
    #[serde(default)]
    #[schemars(range(max = 1024))]
    pub threads: usize,
    /// Run directory.
    #[serde(default = "defaults::output_dir")]
    pub output_dir: PathBuf,
    /// Maximum cost of external calls in the currency of the prices; a run that would exceed it stops with exit code 3 and can be resumed.
    #[schemars(range(min = 0.0))]
    pub budget: Option<f64>,
    /// The query table.
    pub data: DataConfig,
    /// The teacher model: its rewrites are the SFT targets and the RL baseline. Required without `data.dataset`.
    #[serde(default)]
    pub teacher: TeacherConfig,
    /// The teacher for rows on which `teacher` failed; unused if `base_url` is not set.
    #[serde(default)]
    pub fallback_teacher: EndpointConfig,
    /// The judge of rewrites.
    #[serde(default)]
    pub judge: JudgeConfig,
    /// Passage retrieval.
    pub retrieval: RetrievalConfig,
    /// Settings of all external calls.
    #[serde(default)]
    pub calls: CallsConfig,
    /// The response cache.
    #[serde(default)]
    pub cache: CacheConfig,
    /// The model to train.
    pub model: ModelConfig,
    /// Supervised fine-tuning.
    #[serde(default)]
    pub sft: SftConfig,
    /// Reinforcement learning.
    #[serde(default)]
    pub rl: RlConfig,
    /// Where the responses of reinforcement learning are generated.
    #[serde(default)]
    pub rollout: RolloutConfig,
    /// Evaluation.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Experiment tracker.
    #[serde(default)]
    pub tracking: TrackingConfig,
    /// WebAssembly components.
    pub plugins: PluginsConfig,
}

section! {
    /// The query table and how it becomes a dataset.
    DataConfig {
        /// A table of queries: xlsx, csv, tsv, jsonl or parquet. Required without `dataset`.
        input: Option<PathBuf> = None,
        /// Column of the query; the default also finds `original_query`.
        query_column: String = DataConfig::QUERY_COLUMN.into(),
        /// Column of the user profile; the default also finds `user_profile`, and without either it reads as empty.
        profile_column: String = DataConfig::PROFILE_COLUMN.into(),
        /// Column of the history summary; the default also finds `history_summary`, and without either it reads as empty.
        history_column: String = DataConfig::HISTORY_COLUMN.into(),
        /// Column of gold passage ids, separated by commas, semicolons or spaces; the default also finds `gold_ids`, and without
        /// either they are unknown.
        gold_column: String = DataConfig::GOLD_COLUMN.into(),
        /// Column whose equal values make one group; by default the gold ids, else the normalised query.
        group_column: Option<String> = None,
        /// Shares of train, val and test; sum 1.
        #[schemars(inner(range(min = 0.0, max = 1.0)))]
        split: [f64; 3] = [0.8, 0.1, 0.1],
        /// Seed of the split, separate from `seed`, so that runs with other seeds share a test set.
        split_seed: u64 = 42,
        /// What the policy writes: `full`, the whole search text; `edit`, `=` to keep the query, `+ TEXT` to add to it, `& TEXT` to add the history
        /// summary or write the learned expansion, and TEXT (which may be missing), or the whole text. The targets of fine-tuning are then the form that retrieves most. With a small model
        /// (`hidden_size` below 512) the default is `edit`, unless `retrieval.kind` is `none`.
        rewrite_form: RewriteForm = RewriteForm::Full,
        /// With `rewrite_form = "edit"`: maximum number of distinct expansion terms in the text that `&` stands for: words of passage titles that
        /// query and history predict. 0: no learned expansions, in which words of the query may be weighted too. Used only if they retrieve more on train (docs/data.md).
        #[schemars(range(max = 100))]
        expansion_terms: usize = 10,
        /// Full-width letters, digits and spaces of queries, profiles and histories as half-width ones: `keep` changes nothing,
        /// `letters` leaves punctuation as it is, `all` changes punctuation too.
        width: TextWidth = TextWidth::Keep,
        /// Tables written next to `rewrites.jsonl` and `validated.jsonl`: any of xlsx, csv, tsv, parquet.
        export: Vec<TableFormat> = vec![TableFormat::Xlsx],
        /// Similarity to a row of train from which rows of val and test count as leaked; 1 is equal up to width, case, space and
        /// punctuation.
        #[schemars(range(min = 0.7, max = 1.0))]
        leak_similarity: f64 = 0.8,
        /// What happens before training if rows of test have leaked: `refuse` stops, `warn` prints a warning and continues.
        on_leak: OnLeak = OnLeak::Refuse,
        /// A dataset of another framework.
        dataset: DatasetConfig = DatasetConfig::default(),
    }
}

section! {
    /// A dataset of another framework, whose prompts and completions replace the query table and the teacher: JSON lines or parquet.
    DatasetConfig {
        /// Training split; without `val` and `test` it is divided by `data.split`.
        train: Option<PathBuf> = None,
        /// Validation split.
        val: Option<PathBuf> = None,
        /// Test split.
        test: Option<PathBuf> = None,
    }
}

impl DatasetConfig {
    /// True if a dataset is configured.
    pub fn is_set(&self) -> bool {
        self.files().next().is_some()
    }

    /// True if the dataset has a file for `val` or `test`; otherwise its only file is divided into splits.
    pub fn has_splits(&self) -> bool {
        self.val.is_some() || self.test.is_some()
    }

    /// The files in the order in which their rows are numbered.
    pub fn files(&self) -> impl Iterator<Item = (Split, &Path)> {
        let files = [(Split::Train, &self.train), (Split::Val, &self.val), (Split::Test, &self.test)];
        files.into_iter().filter_map(|(split, path)| Some((split, path.as_deref()?)))
    }
}

/// What the policy writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewriteForm {
    /// The whole search text.
    #[default]
    Full,
    /// An edit of the query.
    Edit,
}

/// Handling of leaked test rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnLeak {
    /// Training does not start.
    #[default]
    Refuse,
    /// A warning is printed.
    Warn,
}

/// Conversion of full-width characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TextWidth {
    /// No conversion.
    #[default]
    Keep,
    /// Letters, digits and spaces become half-width.
    Letters,
    /// Letters, digits, spaces and punctuation become half-width.
    All,
}

named_enum! {
    /// Output format of tables.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum TableFormat {
        /// Excel workbook.
        Xlsx = "xlsx",
        /// Comma-separated text.
        Csv = "csv",
        /// Tab-separated text.
        Tsv = "tsv",
        /// Apache Parquet.
        Parquet = "parquet",
    }
}

impl Config {
    /// The kind of teacher that is called; `None` where the rewrites are those of `data.dataset`.
    pub fn called_teacher(&self) -> Option<TeacherKind> {
        (!self.data.dataset.is_set()).then_some(self.teacher.kind)
    }
}

impl DataConfig {
    /// The files that queries are read from: those of `dataset`, else the query table.
    pub fn query_files(&self) -> Vec<&Path> {
        match self.dataset.is_set() {
            true => self.dataset.files().map(|(_, path)| path).collect(),
            false => self.input.as_deref().into_iter().collect(),
        }
    }

    /// Default of `query_column`.
    pub const QUERY_COLUMN: &str = "问题";
    /// Default of `profile_column`.
    pub const PROFILE_COLUMN: &str = "用户画像";
    /// Default of `history_column`.
    pub const HISTORY_COLUMN: &str = "历史摘要";
    /// Default of `gold_column`.
    pub const GOLD_COLUMN: &str = "相关文档";

    /// Alias of a default column name, used in exported tables; `None` for other names.
    pub fn other_name(column: &str) -> Option<&'static str> {
        match column {
            Self::QUERY_COLUMN => Some("original_query"),
            Self::PROFILE_COLUMN => Some("user_profile"),
            Self::HISTORY_COLUMN => Some("history_summary"),
            Self::GOLD_COLUMN => Some("gold_ids"),
            _ => None,
        }
    }
}

named_enum! {
    /// Storage type of frozen weights.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum BaseDtype {
        /// 4 bytes a weight.
        #[default]
        F32 = "f32",
        /// 2 bytes: the exponent of f32, 8 bits of mantissa.
        Bf16 = "bf16",
        /// 2 bytes: 11 bits of mantissa, at most 65504.
        F16 = "f16",
        /// 1 byte and a scale per group of 64.
        Int8 = "int8",
        /// 1 byte: 4 bits of exponent and 3 of mantissa (e4m3), with a scale per output.
        Fp8 = "fp8",
        /// 4 bits and a scale per group of 64: the 16 values of QLoRA's NormalFloat.
        Nf4 = "nf4",
    }
}

/// The model to train.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// A Hugging Face directory, or a model's name on a hub: `ORG/NAME` or `ORG/NAME@REVISION`.
    pub path: PathBuf,
    /// Storage type of the frozen base weights. Accumulation, adapters and losses are f32.
    #[serde(default)]
    pub dtype: BaseDtype,
    /// Maximum number of tokens of one forward and backward pass: bounds memory; the result does not depend on it.
    #[serde(default = "defaults::tokens_per_pass")]
    #[schemars(range(min = 1))]
    pub tokens_per_pass: usize,
    /// Save only the input of each layer and recompute activations in the backward pass: less memory, a third more time.
    #[serde(default)]
    pub gradient_checkpointing: bool,
    /// Tensor parallel size: number of devices that share one copy of the model, for models that do not fit on one GPU. The
    /// number of devices in `device` must be a multiple of it.
    #[serde(default = "defaults::tensor_parallel")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_parallel: usize,
    /// Variable `enable_thinking` of the chat template (Qwen3): `false` ends the prompt with an empty thinking block; with `true` the rewrite
    /// is what follows `</think>` in a response. By default the template does not see the variable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_thinking: Option<bool>,
}

section! {
    /// Evaluation.
    EvalConfig {
        /// Any of `raw` (the user's words), `with_history` (these and the history summary), `expanded` (the learned expansion that `&` stands for), `prompted` and `hyde` (the base model without training: a rewrite, and a pseudo-answer as the
        /// search text), `teacher`, `sft`, `best_of_n`, `rl`.
        systems: Vec<String> = ["raw", "teacher", "sft", "rl"].map(String::from).into(),
        /// Number of beams for the answers of trained models; 1 is greedy decoding.
        #[schemars(range(min = 1, max = 64))]
        n_beams: usize = 1,
        /// Number of bootstrap resamples.
        #[schemars(range(min = 1, max = 1_000_000))]
        bootstrap: usize = 2000,
        /// Number of example rewrites in the report.
        n_examples: usize = 20,
        /// `prompted`: the prompt of the base model, that of the policy or that of the teacher.
        prompted_with: PromptedWith = PromptedWith::Policy,
        /// `prompted`: number of rewrites of the training split that the prompt shows as examples.
        #[schemars(range(max = 64))]
        few_shot: usize = 0,
        /// Above 1: number of samples of the SFT model for each query in the system `best_of_n`. The sample with the highest mean
        /// log-probability per token is the rewrite.
        #[schemars(range(max = 1024))]
        best_of_n: usize = 0,
        /// Above 0: pass@k of `sft` and `rl` for k up to this number of samples for each query.
        #[schemars(range(max = 1024))]
        pass_at_k: usize = 0,
        /// A retriever not used in training, for the same rewrites: `lexical` (character n-grams), `semantic` (an embedding model) or
        /// `none`. `auto` is `lexical` with the embedded index, else `none`.
        second_retrieval: SecondRetrieval = SecondRetrieval::Auto,
        /// `second_retrieval = "semantic"`: folder of the embedding model; by default `retrieval.embedding.path`.
        embedding_path: Option<PathBuf> = None,
    }
}

/// Systems that can be evaluated, in the order of the tables.
pub const EVAL_SYSTEMS: [&str; 9] =
    ["raw", "with_history", "expanded", "prompted", "hyde", "teacher", "sft", "best_of_n", "rl"];

impl EvalConfig {
    /// Names of the systems to evaluate: `systems`, and `best_of_n` if its number of samples is set.
    pub fn evaluated_systems(&self) -> Vec<&str> {
        let mut systems: Vec<&str> = self.systems.iter().map(String::as_str).collect();
        if self.best_of_n > 1 && !systems.contains(&"best_of_n") {
            systems.push("best_of_n");
        }
        systems
    }
}

/// Prompt of the system `prompted`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PromptedWith {
    /// The policy's prompt: short.
    #[default]
    Policy,
    /// The teacher's prompt: with the tenant's rules.
    Teacher,
}

/// Kind of the retriever that only the evaluation uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SecondRetrieval {
    /// `lexical` with the embedded index, else `none`.
    #[default]
    Auto,
    /// TF-IDF over character n-grams of the knowledge base.
    Lexical,
    /// Vectors of a local embedding model.
    Semantic,
    /// No second retriever.
    None,
}

impl Config {
    /// The kind of the second retriever, `auto` resolved.
    pub fn second_retrieval(&self) -> SecondRetrieval {
        match self.eval.second_retrieval {
            SecondRetrieval::Auto if self.retrieval.kind == RetrievalKind::Embedded => SecondRetrieval::Lexical,
            SecondRetrieval::Auto => SecondRetrieval::None,
            kind => kind,
        }
    }

    /// Folder of the embedding model of a semantic second retriever.
    pub fn second_embedding_path(&self) -> Option<&Path> {
        self.eval.embedding_path.as_deref().or(self.retrieval.embedding.path.as_deref())
    }
}

named_enum! {
    /// Experiment trackers, by the name of their Python library.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum TrackerKind {
        /// No tracker.
        #[default]
        None = "none",
        /// Weights & Biases.
        Wandb = "wandb",
        /// MLflow.
        Mlflow = "mlflow",
        /// SwanLab.
        Swanlab = "swanlab",
        /// Trackio.
        Trackio = "trackio",
    }
}

section! {
    /// An experiment tracker, to which a process next to `run`, `sft`, `rl` and `eval` mirrors the run. No result depends on it.
    TrackingConfig {
        /// The tracker.
        to: TrackerKind = TrackerKind::None,
        /// Name of the project at the tracker.
        project: String = "querl".into(),
        /// Name of the run at the tracker; by default the name of the run directory.
        name: Option<String> = None,
        /// Keep the records on this machine, as the tracker's offline mode does.
        offline: bool = false,
        /// Number of validation queries whose rewrites are recorded at each evaluation of `rl`; 0 for none.
        #[schemars(range(max = 1000))]
        samples: usize = 8,
    }
}

mod defaults {
    use std::path::PathBuf;

    pub(super) fn device() -> String {
        "auto".into()
    }
    pub(super) fn seed() -> u64 {
        42
    }
    pub(super) fn output_dir() -> PathBuf {
        "runs/default".into()
    }
    pub(super) fn tokens_per_pass() -> usize {
        8192
    }
    pub(super) fn tensor_parallel() -> usize {
        1
    }
}

/// Maximum number of ranks of one run.
const MAX_RANKS: usize = 64;

/// Value of the key `device`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSetting {
    /// The first GPU if there is one, else the CPU.
    Auto,
    /// The CPU. More than one rank is a test of multi-GPU behaviour, not faster.
    Cpu {
        /// At least 1.
        n_ranks: usize,
    },
    /// GPUs by index, without duplicates, one rank per GPU in this order.
    Cuda(Vec<usize>),
}

impl DeviceSetting {
    /// Number of ranks.
    pub fn n_ranks(&self) -> usize {
        match self {
            Self::Auto => 1,
            Self::Cpu { n_ranks } => *n_ranks,
            Self::Cuda(indices) => indices.len(),
        }
    }

    /// Parses `auto`, `cpu`, `cpu:2`, `cuda:0`, `cuda:0,1,3` or `cuda:0-3`; `None` for anything else.
    pub fn from_name(name: &str) -> Option<Self> {
        match (name, name.strip_prefix("cpu:"), name.strip_prefix("cuda:")) {
            ("auto", ..) => Some(Self::Auto),
            ("cpu", ..) => Some(Self::Cpu { n_ranks: 1 }),
            (_, Some(n_ranks), _) => {
                let n_ranks = number(n_ranks).filter(|n| (1..=MAX_RANKS).contains(n))?;
                Some(Self::Cpu { n_ranks })
            }
            (.., Some(list)) => gpu_indices(list).map(Self::Cuda),
            _ => None,
        }
    }
}

fn gpu_indices(list: &str) -> Option<Vec<usize>> {
    let mut indices = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last - first >= MAX_RANKS {
            return None;
        }
        indices.extend(first..=last);
    }
    let is_duplicate = |(position, index): (usize, &usize)| indices[..position].contains(index);
    (indices.len() <= MAX_RANKS && !indices.iter().enumerate().any(is_duplicate)).then_some(indices)
}

/// Accepts digits only, no sign or space.
fn number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_lists_and_ranges_are_parsed() {
        let cuda = |list: &[usize]| Some(DeviceSetting::Cuda(list.to_vec()));
        assert_eq!(DeviceSetting::from_name("auto"), Some(DeviceSetting::Auto));
        assert_eq!(DeviceSetting::from_name("cpu"), Some(DeviceSetting::Cpu { n_ranks: 1 }));
        assert_eq!(DeviceSetting::from_name("cpu:3"), Some(DeviceSetting::Cpu { n_ranks: 3 }));
        assert_eq!(DeviceSetting::from_name("cuda:12"), cuda(&[12]));
        assert_eq!(DeviceSetting::from_name("cuda:2,0"), cuda(&[2, 0]));
        assert_eq!(DeviceSetting::from_name("cuda:0-3,5"), cuda(&[0, 1, 2, 3, 5]));
    }

    #[test]
    fn invalid_names_and_duplicate_gpus_are_rejected() {
        let names = ["", "gpu", "CPU", "cpu:", "cpu:0", "cpu:65", "cpu:-1", "cuda", "cuda:", "cuda:-1", "cuda:+1"];
        let lists = ["cuda: 1", "cuda:x", "cuda:1,", "cuda:1,1", "cuda:0-2,1", "cuda:3-1", "cuda:0-99", "cuda:0-"];
        for name in names.into_iter().chain(lists) {
            assert_eq!(DeviceSetting::from_name(name), None, "{name}");
        }
    }
}
