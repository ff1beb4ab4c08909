//! Hyperparameters of fine-tuning and reinforcement learning.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Trained weights of SFT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TuningMethod {
    /// LoRA adapters on frozen weights.
    Lora,
    /// Every weight.
    Full,
}

/// Learning rate schedule after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrScheduler {
    /// Cosine decay to zero.
    Cosine,
    /// Linear decay to zero.
    Linear,
    /// No decay.
    Constant,
}

/// Supervised fine-tuning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SftConfig {
    /// Trained weights: LoRA adapters or all.
    pub method: TuningMethod,
    /// Peak learning rate.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub learning_rate: f64,
    /// Passes over the training split.
    #[schemars(range(min = 1))]
    pub epochs: usize,
    /// Maximum number of optimizer steps; 0 for no limit.
    pub max_steps: usize,
    /// Rank of the adapters.
    #[schemars(range(min = 1, max = 1024))]
    pub lora_rank: usize,
    /// Adapter scale is `lora_alpha / lora_rank`.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lora_alpha: f64,
    /// Share of an adapter's inputs set to zero in training.
    #[schemars(range(min = 0.0, max = 0.9))]
    pub lora_dropout: f64,
    /// Adapted layers: `all-linear`, or the last parts of their names (`q_proj`, `v_proj`).
    pub lora_target_modules: Vec<String>,
    /// Adapter scale is `lora_alpha / sqrt(lora_rank)` instead.
    pub use_rslora: bool,
    /// Adapters with a trained magnitude per output (DoRA).
    pub use_dora: bool,
    /// Rows of one optimizer step are `batch_size * gradient_accumulation_steps`; `model.tokens_per_pass` cuts them into passes.
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// See `batch_size`; the result depends on the product alone.
    #[schemars(range(min = 1))]
    pub gradient_accumulation_steps: usize,
    /// Learning rate schedule after warm-up.
    pub lr_scheduler: LrScheduler,
    /// Share of steps with rising learning rate.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub warmup_ratio: f64,
    /// Decoupled weight decay of matrices; biases and norms are not decayed.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub weight_decay: f64,
    /// Global gradient norm above which gradients are scaled down.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub max_grad_norm: f64,
    /// Longer rows are an error, named by row.
    #[schemars(range(min = 1))]
    pub max_length: usize,
    /// Optimizer steps between evaluations on the validation split; 0 for once an epoch.
    pub eval_steps: usize,
    /// Optimizer steps between checkpoints from which training can be resumed; 0 for once an epoch.
    pub save_steps: usize,
    /// Number of checkpoints to keep in addition to `best` and `last`.
    #[schemars(range(min = 1))]
    pub save_total_limit: usize,
    /// Evaluations without improvement after which training stops; 0 for never.
    pub early_stopping_patience: usize,
}

impl Default for SftConfig {
    fn default() -> Self {
        Self {
            method: TuningMethod::Lora,
            learning_rate: 5e-5,
            epochs: 3,
            max_steps: 0,
            lora_rank: 16,
            lora_alpha: 32.0,
            lora_dropout: 0.0,
            lora_target_modules: vec!["all-linear".into()],
            use_rslora: false,
            use_dora: false,
            batch_size: 2,
            gradient_accumulation_steps: 8,
            lr_scheduler: LrScheduler::Cosine,
            warmup_ratio: 0.05,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            max_length: 2048,
            eval_steps: 100,
            save_steps: 100,
            save_total_limit: 3,
            early_stopping_patience: 0,
        }
    }
}

/// RL algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RlAlgorithm {
    /// Proximal policy optimisation with a critic.
    Ppo,
    /// Group relative: scores of one query's samples against each other, over their spread; mean per response.
    Grpo,
    /// GRPO without the spread and without the length in the mean ("GRPO done right").
    DrGrpo,
    /// Each score against the mean of the query's other samples.
    Rloo,
    /// No critic and no groups: returns whitened over the batch, KL in the reward.
    ReinforcePlusPlus,
}

impl RlAlgorithm {
    /// True where samples of one query are compared with each other: `n_samples` must be 2 or more.
    pub fn needs_groups(self) -> bool {
        matches!(self, Self::Grpo | Self::DrGrpo | Self::Rloo)
    }
}

/// Where the KL to the reference policy is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlPlacement {
    /// Subtracted from the reward of each token.
    Reward,
    /// Added to the loss.
    Loss,
}

/// Estimator of the KL from sampled tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `log p - log q`.
    K1,
    /// Half its square; as a loss, the one whose gradient is the divergence's.
    K2,
    /// `q/p - 1 - log(q/p)`.
    K3,
}

/// Loss of the critic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ValueLossKind {
    /// Half its square.
    Squared,
    /// Half its square up to 1, linear beyond.
    Huber,
}

/// How advantages and ratios are formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageForm {
    /// Per token: KL in the reward, GAE, a ratio per token.
    Token,
    /// The source plan's plain form: one reward, `A = R - V(s)`, a ratio of the whole response.
    Sequence,
}

/// Trained parameters of the critic on the base that it shares with the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CriticKind {
    /// A LoRA adapter of its own and a value head: costs a forward and backward pass more per update.
    Adapter,
    /// A value head on the frozen reference policy's hidden states, which are computed anyway.
    Head,
}

/// Reinforcement learning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RlConfig {
    /// RL algorithm.
    pub algorithm: RlAlgorithm,
    /// Per token or per response: advantages, ratios, and KL and entropy in the loss.
    pub advantage_form: AdvantageForm,
    /// Trained parameters of the critic: an adapter with a value head, or a value head alone.
    pub critic: CriticKind,
    /// Rollout batches.
    #[schemars(range(min = 1))]
    pub max_steps: usize,
    /// Queries of one rollout batch.
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// Responses sampled per query.
    #[schemars(range(min = 1))]
    pub n_samples: usize,
    /// Passes over one rollout batch.
    #[schemars(range(min = 1))]
    pub ppo_epochs: usize,
    /// Responses of one optimizer step.
    #[schemars(range(min = 1))]
    pub mini_batch_size: usize,
    /// Forward passes of one optimizer step, at least; `model.tokens_per_pass` may make more. The result does not depend on it.
    #[schemars(range(min = 1))]
    pub gradient_accumulation_steps: usize,
    /// Peak learning rate of the policy.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub learning_rate: f64,
    /// Learning rate of the critic.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub critic_learning_rate: f64,
    /// Steps in which only the critic is trained.
    pub critic_warmup_steps: usize,
    /// Schedule of the policy's learning rate after warm-up.
    pub lr_scheduler: LrScheduler,
    /// Share of steps with rising learning rate.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub warmup_ratio: f64,
    /// Decoupled weight decay of the policy's and the critic's matrices.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub weight_decay: f64,
    /// PPO clip range: ratios are clipped to `1 - clip_range ..= 1 + clip_range`.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub clip_range: f64,
    /// Above 1: bounds the loss of tokens with negative advantage at this multiple; 0 for no bound.
    #[schemars(range(min = 0.0))]
    pub dual_clip: f64,
    /// Clip range of values around the rollout's values; 0 for no clipping.
    #[schemars(range(min = 0.0))]
    pub clip_range_value: f64,
    /// Loss of the critic.
    pub value_loss: ValueLossKind,
    /// Weight of the value loss. The critic's own AdamW does not see the scale: it matters for clipping by `max_grad_norm` alone.
    #[schemars(range(min = 0.0))]
    pub vf_coef: f64,
    /// Weight of the entropy bonus.
    #[schemars(range(min = 0.0))]
    pub ent_coef: f64,
    /// Weight of the per-token KL to the SFT policy.
    #[schemars(range(min = 0.0))]
    pub kl_coef: f64,
    /// Where the KL is applied: in the reward or in the loss.
    pub kl_placement: KlPlacement,
    /// Estimator of the KL.
    pub kl_estimator: KlEstimator,
    /// Above 0: `kl_coef` is adapted to keep the KL of a response (summed over tokens) near this many nats.
    #[schemars(range(min = 0.0))]
    pub kl_target: f64,
    /// Episodes over which `kl_coef` adapts.
    #[schemars(range(min = 1))]
    pub kl_horizon: usize,
    /// Above 0: KL early stopping; skips the remaining epochs of a batch once the KL to the rollout policy exceeds this many nats per token.
    #[schemars(range(min = 0.0))]
    pub target_kl: f64,
    /// Shift and scale advantages to mean 0 and variance 1 over the batch (PPO and REINFORCE++).
    pub whiten_advantages: bool,
    /// Above 0: advantages are clipped to this size.
    #[schemars(range(min = 0.0))]
    pub advantage_clip: f64,
    /// Divide scores by their running standard deviation.
    pub normalize_rewards: bool,
    /// Above 0: scores are clipped to this size.
    #[schemars(range(min = 0.0))]
    pub reward_clip: f64,
    /// Global gradient norm above which gradients are scaled down.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub max_grad_norm: f64,
    /// Discount factor.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub gamma: f64,
    /// GAE's lambda.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub gae_lambda: f64,
    /// Divides the logits in rollout, reference and update alike.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 10.0))]
    pub temperature: f64,
    /// Nucleus sampling in rollouts; 1 disables it.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub top_p: f64,
    /// Top-k sampling in rollouts; 0 disables it.
    pub top_k: usize,
    /// Divides (or multiplies, below zero) the logits of tokens that the answer has; 1 for none.
    #[schemars(range(min = 1.0, max = 10.0))]
    pub repetition_penalty: f64,
    /// Above 0: n-grams of this size are not repeated within an answer.
    pub no_repeat_ngram_size: usize,
    /// Minimum number of tokens of an answer.
    pub min_new_tokens: usize,
    /// Longer answers are cut off and marked.
    #[schemars(range(min = 1))]
    pub max_new_tokens: usize,
    /// An answer ends where one of these appears.
    pub stop_strings: Vec<String>,
    /// Subtracted from the score of a response that does not end by itself.
    #[schemars(range(min = 0.0))]
    pub missing_eos_penalty: f64,
    /// Parts of a batch: one is scored while the next is generated.
    #[schemars(range(min = 1))]
    pub pipeline_parts: usize,
    /// Generate the next batch, with the policy as it was, while this one is learned from; its tokens are weighted.
    pub off_by_one: bool,
    /// Maximum importance weight with `off_by_one`.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub importance_cap: f64,
    /// An episode with a call to retrieval or judge that takes longer is dropped and counted.
    #[schemars(range(min = 1))]
    pub episode_deadline_ms: u64,
    /// Steps between evaluations on the validation split.
    #[schemars(range(min = 1))]
    pub eval_steps: usize,
    /// Steps between checkpoints from which training can be resumed.
    #[schemars(range(min = 1))]
    pub save_steps: usize,
    /// Number of checkpoints to keep in addition to `best` and `last`.
    #[schemars(range(min = 1))]
    pub save_total_limit: usize,
    /// Evaluations without improvement after which training stops; 0 for never.
    pub early_stopping_patience: usize,
    /// A batch that loses more than this share of its episodes stops the run.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_drop_rate: f64,
}

impl Default for RlConfig {
    fn default() -> Self {
        Self {
            algorithm: RlAlgorithm::Ppo,
            advantage_form: AdvantageForm::Token,
            critic: CriticKind::Adapter,
            max_steps: 100,
            batch_size: 64,
            n_samples: 1,
            ppo_epochs: 4,
            mini_batch_size: 64,
            gradient_accumulation_steps: 4,
            learning_rate: 1e-5,
            critic_learning_rate: 1e-4,
            critic_warmup_steps: 0,
            lr_scheduler: LrScheduler::Constant,
            warmup_ratio: 0.0,
            weight_decay: 0.0,
            clip_range: 0.2,
            dual_clip: 0.0,
            clip_range_value: 0.2,
            value_loss: ValueLossKind::Squared,
            vf_coef: 0.5,
            ent_coef: 0.01,
            kl_coef: 0.05,
            kl_placement: KlPlacement::Reward,
            kl_estimator: KlEstimator::K1,
            kl_target: 0.0,
            kl_horizon: 10_000,
            target_kl: 0.0,
            whiten_advantages: true,
            advantage_clip: 0.0,
            normalize_rewards: false,
            reward_clip: 0.0,
            max_grad_norm: 0.5,
            gamma: 0.99,
            gae_lambda: 0.95,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            min_new_tokens: 0,
            max_new_tokens: 150,
            stop_strings: Vec::new(),
            missing_eos_penalty: 0.0,
            pipeline_parts: 2,
            off_by_one: false,
            importance_cap: 2.0,
            episode_deadline_ms: 120_000,
            eval_steps: 10,
            save_steps: 10,
            save_total_limit: 3,
            early_stopping_patience: 0,
            max_drop_rate: 0.2,
        }
    }
}
