//! Hyperparameters of fine-tuning and reinforcement learning.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What fine-tuning changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TuningMethod {
    /// Low-rank adapters beside frozen weights.
    Lora,
    /// Every weight.
    Full,
}

/// Supervised fine-tuning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SftConfig {
    /// What is trained.
    pub method: TuningMethod,
    /// Peak learning rate.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub learning_rate: f64,
    /// Passes over the training split.
    #[schemars(range(min = 1))]
    pub epochs: usize,
    /// Stops earlier after so many optimizer steps; 0 for no limit.
    pub max_steps: usize,
    /// Rank of the adapters.
    #[schemars(range(min = 1, max = 1024))]
    pub lora_rank: usize,
    /// Adapter scale is `lora_alpha / lora_rank`.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub lora_alpha: f64,
    /// Rows of one forward pass.
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// Forward passes of one optimizer step.
    #[schemars(range(min = 1))]
    pub gradient_accumulation_steps: usize,
    /// Share of steps with rising learning rate; then cosine to zero.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub warmup_ratio: f64,
    /// Decoupled weight decay.
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
            batch_size: 2,
            gradient_accumulation_steps: 8,
            warmup_ratio: 0.05,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            max_length: 2048,
            eval_steps: 100,
            early_stopping_patience: 0,
        }
    }
}

/// Which algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RlAlgorithm {
    /// Proximal policy optimisation.
    Ppo,
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

/// What the critic is made of, besides the base it shares with the policy.
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
    /// Which algorithm.
    pub algorithm: RlAlgorithm,
    /// Per token or per response.
    pub advantage_form: AdvantageForm,
    /// What the critic is made of.
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
    /// Forward passes of one optimizer step; the result does not depend on it.
    #[schemars(range(min = 1))]
    pub gradient_accumulation_steps: usize,
    /// Peak learning rate of the policy.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub learning_rate: f64,
    /// Learning rate of the critic.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub critic_learning_rate: f64,
    /// Steps in which only the critic learns.
    pub critic_warmup_steps: usize,
    /// Share of steps with rising learning rate.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub warmup_ratio: f64,
    /// Ratios outside `1 - clip_range ..= 1 + clip_range` stop paying.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
    pub clip_range: f64,
    /// Above 1: bounds the loss of tokens with negative advantage at this multiple; 0 for no bound.
    #[schemars(range(min = 0.0))]
    pub dual_clip: f64,
    /// Values move at most so far from the rollout's.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub clip_range_value: f64,
    /// Weight of the value loss.
    #[schemars(range(min = 0.0))]
    pub vf_coef: f64,
    /// Weight of the entropy bonus.
    #[schemars(range(min = 0.0))]
    pub ent_coef: f64,
    /// Weight of the per-token KL to the SFT policy.
    #[schemars(range(min = 0.0))]
    pub kl_coef: f64,
    /// Global gradient norm above which gradients are scaled down.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub max_grad_norm: f64,
    /// Discount.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub gamma: f64,
    /// GAE's lambda.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub gae_lambda: f64,
    /// Divides the logits in rollout, reference and update alike.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 10.0))]
    pub temperature: f64,
    /// Longer answers are cut off and marked.
    #[schemars(range(min = 1))]
    pub max_new_tokens: usize,
    /// Subtracted from the score of a cut-off response.
    #[schemars(range(min = 0.0))]
    pub truncation_penalty: f64,
    /// Steps between evaluations on the validation split.
    #[schemars(range(min = 1))]
    pub eval_steps: usize,
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
            warmup_ratio: 0.0,
            clip_range: 0.2,
            dual_clip: 0.0,
            clip_range_value: 0.2,
            vf_coef: 0.5,
            ent_coef: 0.01,
            kl_coef: 0.05,
            max_grad_norm: 0.5,
            gamma: 0.99,
            gae_lambda: 0.95,
            temperature: 1.0,
            max_new_tokens: 150,
            truncation_penalty: 0.0,
            eval_steps: 10,
            early_stopping_patience: 0,
            max_drop_rate: 0.2,
        }
    }
}
