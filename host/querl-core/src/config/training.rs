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

/// What happens before RL if the fine-tuned model is noise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNoise {
    /// The run stops after SFT.
    Stop,
    /// A warning is printed.
    Warn,
}

section! {
    /// Supervised fine-tuning.
    SftConfig {
        /// Trained weights: LoRA adapters or all.
        method: TuningMethod = TuningMethod::Lora,
        /// Peak learning rate.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
        learning_rate: f64 = 5e-5,
        /// Passes over the training split.
        #[schemars(range(min = 1))]
        epochs: usize = 3,
        /// Maximum number of optimizer steps; 0 for no limit.
        max_steps: usize = 0,
        /// Rank of the adapters.
        #[schemars(range(min = 1, max = 1024))]
        lora_rank: usize = 16,
        /// Adapter scale is `lora_alpha / lora_rank`.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        lora_alpha: f64 = 32.0,
        /// Share of an adapter's inputs set to zero in training.
        #[schemars(range(min = 0.0, max = 0.9))]
        lora_dropout: f64 = 0.0,
        /// Adapted layers: `all-linear`, or the last parts of their names (`q_proj`, `v_proj`).
        lora_target_modules: Vec<String> = vec!["all-linear".into()],
        /// Adapter scale is `lora_alpha / sqrt(lora_rank)` (rsLoRA) instead of `lora_alpha / lora_rank`.
        use_rslora: bool = false,
        /// Adapters with a trained magnitude per output (DoRA).
        use_dora: bool = false,
        /// Rows of one optimizer step are `batch_size * gradient_accumulation_steps`; `model.tokens_per_pass` cuts them into passes.
        #[schemars(range(min = 1, max = 65_536))]
        batch_size: usize = 2,
        /// Factor of `batch_size` in the rows of one optimizer step; the result depends on the product only.
        #[schemars(range(min = 1))]
        gradient_accumulation_steps: usize = 8,
        /// Learning rate schedule after warm-up.
        lr_scheduler: LrScheduler = LrScheduler::Cosine,
        /// Warm-up: share of steps with rising learning rate.
        #[schemars(range(min = 0.0, max = 1.0))]
        warmup_ratio: f64 = 0.05,
        /// Decoupled weight decay of matrices; biases and norms are not decayed.
        #[schemars(range(min = 0.0, max = 1.0))]
        weight_decay: f64 = 0.0,
        /// Global gradient norm above which gradients are scaled down.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        max_grad_norm: f64 = 1.0,
        /// Maximum number of tokens of a row; a longer row is an error that names the row.
        #[schemars(range(min = 1))]
        max_length: usize = 2048,
        /// Optimizer steps between evaluations on the validation split; 0 for once an epoch.
        eval_steps: usize = 100,
        /// Optimizer steps between checkpoints from which training can be resumed; 0 for once an epoch.
        save_steps: usize = 100,
        /// Seconds after which a checkpoint to resume from is written, whatever `save_steps` says; 0 for never.
        save_interval_s: u64 = 60,
        /// Number of checkpoints to keep in addition to `best` and `last`.
        #[schemars(range(min = 1))]
        save_total_limit: usize = 3,
        /// Evaluations without improvement after which training stops; 0 for never.
        early_stopping_patience: usize = 3,
        /// What happens before RL if the eval loss is above 0.9 of a unigram model's: `stop` ends the run with exit code 3, `warn` prints a
        /// warning and continues, as always with `data.rewrite_form = "edit"`, where the limit is the unigram model's loss.
        on_noise: OnNoise = OnNoise::Stop,
    }
}

/// RL algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RlAlgorithm {
    /// Proximal policy optimisation with a critic.
    Ppo,
    /// GRPO: the advantage is the score minus the mean of its query's samples, over their standard deviation; the loss is averaged per
    /// response.
    Grpo,
    /// Dr. GRPO: GRPO without division by the standard deviation and by the response length.
    DrGrpo,
    /// RLOO: the advantage is the score minus the mean of the other samples of its query.
    Rloo,
    /// REINFORCE++: no critic and no groups; returns whitened over the batch, KL in the reward.
    ReinforcePlusPlus,
    /// RAFT, rejection-sampling fine-tuning: cross-entropy of the best sample of each query.
    Raft,
}

impl RlAlgorithm {
    /// True if the algorithm compares the samples of one query: `n_samples` must be 2 or more.
    pub fn needs_groups(self) -> bool {
        matches!(self, Self::Grpo | Self::DrGrpo | Self::Rloo | Self::Raft)
    }
}

/// Where the KL to the reference policy is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlPlacement {
    /// The KL is subtracted from the reward of each token.
    Reward,
    /// The KL is added to the loss.
    Loss,
}

named_enum! {
    /// Estimator of the KL from sampled tokens.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum KlEstimator {
        /// `log p - log q`, with the probability `p` of the policy and `q` of the reference.
        K1 = "k1",
        /// `(log p - log q)^2 / 2`; as a loss, the estimator whose gradient is that of the KL divergence.
        K2 = "k2",
        /// `q/p - 1 - log(q/p)`.
        K3 = "k3",
    }
}

/// Loss of the critic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ValueLossKind {
    /// Half the squared error.
    Squared,
    /// Huber loss: half the squared error up to an error of 1, linear beyond.
    Huber,
}

/// How advantages and ratios are formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageForm {
    /// Per token: KL in the reward, GAE advantages, an importance ratio per token.
    Token,
    /// Per response: one reward, `A = R - V(s)`, the importance ratio of the whole response.
    Sequence,
}

named_enum! {
    /// Form of the policy loss in the token form.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum PolicyLossKind {
        /// Clipped surrogate with a ratio per token.
        Ppo = "ppo",
        /// Clipped surrogate with one ratio per response, the geometric mean of its tokens' ratios.
        Gspo = "gspo",
        /// Log-likelihood weighted by the clipped ratio, through which no gradient flows: no token is left out.
        Cispo = "cispo",
    }
}

named_enum! {
    /// How token losses are averaged in the token form.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "kebab-case")]
    pub enum LossAgg {
        /// As in the source of the algorithm.
        Algorithm = "algorithm",
        /// Mean over the tokens of all responses.
        TokenMean = "token-mean",
        /// Mean over the tokens of a response, then over responses.
        SeqMeanTokenMean = "seq-mean-token-mean",
        /// Sum over the tokens of a response, mean over responses.
        SeqMeanTokenSum = "seq-mean-token-sum",
        /// Sum over the tokens of a response divided by `max_new_tokens`, mean over responses.
        SeqMeanTokenSumNorm = "seq-mean-token-sum-norm",
    }
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

/// What is recorded of each step of reinforcement learning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RlRecord {
    /// Episodes and metrics.
    Episodes,
    /// Episodes and metrics, and the tensors of the update by token.
    Full,
}

section! {
    /// Reinforcement learning.
    RlConfig {
        /// RL algorithm.
        algorithm: RlAlgorithm = RlAlgorithm::Ppo,
        /// Per token or per response: advantages, ratios, and KL and entropy in the loss.
        advantage_form: AdvantageForm = AdvantageForm::Token,
        /// Trained parameters of the critic: an adapter with a value head, or a value head alone.
        critic: CriticKind = CriticKind::Adapter,
        /// Passes over the training split, in place of `max_steps`: `epochs * rows / batch_size` rollout batches, rounded up.
        #[schemars(range(min = 1))]
        epochs: Option<usize> = None,
        /// Number of rollout batches; if `epochs` is set too, their maximum; 0 for no limit.
        max_steps: usize = 100,
        /// Queries of one rollout batch.
        #[schemars(range(min = 1, max = 65_536))]
        batch_size: usize = 64,
        /// Responses sampled per query.
        #[schemars(range(min = 1, max = 1_024))]
        n_samples: usize = 1,
        /// Passes over one rollout batch.
        #[schemars(range(min = 1))]
        ppo_epochs: usize = 4,
        /// Responses of one optimizer step.
        #[schemars(range(min = 1))]
        mini_batch_size: usize = 64,
        /// Forward passes of one optimizer step, at least; `model.tokens_per_pass` may make more. The result does not depend on it.
        #[schemars(range(min = 1))]
        gradient_accumulation_steps: usize = 4,
        /// Peak learning rate of the policy.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
        learning_rate: f64 = 1e-5,
        /// Learning rate of the critic.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
        critic_learning_rate: f64 = 1e-4,
        /// Steps in which only the critic is trained.
        critic_warmup_steps: usize = 0,
        /// Schedule of the policy's learning rate after warm-up.
        lr_scheduler: LrScheduler = LrScheduler::Constant,
        /// Warm-up: share of steps with rising learning rate.
        #[schemars(range(min = 0.0, max = 1.0))]
        warmup_ratio: f64 = 0.0,
        /// Decoupled weight decay of the policy's and the critic's matrices.
        #[schemars(range(min = 0.0, max = 1.0))]
        weight_decay: f64 = 0.0,
        /// PPO clip range: ratios are clipped to `1 - clip_range ..= 1 + clip_range`.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
        clip_range: f64 = 0.2,
        /// Upper clip range in place of `clip_range`: ratios are clipped to `1 - clip_range ..= 1 + clip_range_high`.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        clip_range_high: Option<f64> = None,
        /// `ppo`: a ratio per token; `gspo`: one per response, over its length; `cispo`: the clipped ratio weights the log-likelihood.
        policy_loss: PolicyLossKind = PolicyLossKind::Ppo,
        /// How token losses are averaged; `algorithm`: as in the source of the algorithm.
        loss_agg: LossAgg = LossAgg::Algorithm,
        /// Above 1: bounds the loss of tokens with negative advantage at this multiple; 0 for no bound.
        #[schemars(range(min = 0.0))]
        dual_clip: f64 = 0.0,
        /// Clip range of values around the rollout's values; 0 for no clipping.
        #[schemars(range(min = 0.0))]
        clip_range_value: f64 = 0.2,
        /// Loss of the critic.
        value_loss: ValueLossKind = ValueLossKind::Squared,
        /// Weight of the value loss; the critic has its own AdamW, which is invariant to gradient scale, so this changes only when
        /// `max_grad_norm` clips.
        #[schemars(range(min = 0.0))]
        vf_coef: f64 = 0.5,
        /// Weight of the entropy bonus.
        #[schemars(range(min = 0.0))]
        ent_coef: f64 = 0.01,
        /// Weight of the per-token KL to the SFT policy.
        #[schemars(range(min = 0.0))]
        kl_coef: f64 = 0.05,
        /// Where the KL is applied: in the reward or in the loss.
        kl_placement: KlPlacement = KlPlacement::Reward,
        /// Estimator of the KL.
        kl_estimator: KlEstimator = KlEstimator::K1,
        /// Above 0: `kl_coef` is adapted to keep the KL of a response (summed over tokens) near this many nats.
        #[schemars(range(min = 0.0))]
        kl_target: f64 = 0.0,
        /// Horizon of the adaptation of `kl_coef`, in episodes.
        #[schemars(range(min = 1))]
        kl_horizon: usize = 10_000,
        /// Above 0: KL early stopping; skips the remaining epochs of a batch once the KL to the rollout policy exceeds this many nats per token.
        #[schemars(range(min = 0.0))]
        target_kl: f64 = 0.0,
        /// Shift and scale advantages to mean 0 and variance 1 over the batch (PPO and REINFORCE++).
        whiten_advantages: bool = true,
        /// Above 0: advantages are clipped to this size.
        #[schemars(range(min = 0.0))]
        advantage_clip: f64 = 0.0,
        /// Divide scores by their running standard deviation.
        normalize_rewards: bool = false,
        /// Above 0: scores are clipped to this size.
        #[schemars(range(min = 0.0))]
        reward_clip: f64 = 0.0,
        /// Global gradient norm above which gradients are scaled down.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        max_grad_norm: f64 = 0.5,
        /// Discount factor.
        #[schemars(range(min = 0.0, max = 1.0))]
        gamma: f64 = 0.99,
        /// GAE's lambda.
        #[schemars(range(min = 0.0, max = 1.0))]
        gae_lambda: f64 = 0.95,
        /// Sampling temperature: divides the logits in rollout, reference and update.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 10.0))]
        temperature: f64 = 1.0,
        /// Nucleus sampling in rollouts; 1 disables it.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 1.0))]
        top_p: f64 = 1.0,
        /// Top-k sampling in rollouts; 0 disables it.
        top_k: usize = 0,
        /// Repetition penalty: divides positive logits of tokens that the answer already has, and multiplies negative ones; 1 for none.
        #[schemars(range(min = 1.0, max = 10.0))]
        repetition_penalty: f64 = 1.0,
        /// Above 0: n-grams of this size are not repeated within an answer.
        no_repeat_ngram_size: usize = 0,
        /// Minimum number of tokens of an answer.
        min_new_tokens: usize = 0,
        /// Maximum number of tokens of an answer; longer answers are truncated and marked.
        #[schemars(range(min = 1))]
        max_new_tokens: usize = 150,
        /// Stop strings: an answer ends where one of them appears.
        stop_strings: Vec<String> = Vec::new(),
        /// Subtracted from the score of a response that does not end by itself.
        #[schemars(range(min = 0.0))]
        missing_eos_penalty: f64 = 0.0,
        /// Above 0: the last so many tokens before `max_new_tokens` cost a penalty that rises linearly from 0.
        overlong_buffer_len: usize = 0,
        /// Penalty of a response of `max_new_tokens` tokens, with `overlong_buffer_len`.
        #[schemars(range(min = 0.0))]
        overlong_penalty_factor: f64 = 1.0,
        /// Fixed reward, counted as one more sample of each group: 0.0 is the teacher's, where the reward is relative to it.
        anchor_baseline: Option<f64> = None,
        /// Replace queries whose samples all have one score by the next queries, before the batch is learned from.
        dynamic_sampling: bool = false,
        /// Maximum number of times that queries of one batch are replaced, with `dynamic_sampling`.
        #[schemars(range(min = 1))]
        max_resampled_batches: usize = 3,
        /// Number of parts of a rollout batch: one part is scored while the next is generated.
        #[schemars(range(min = 1))]
        pipeline_parts: usize = 2,
        /// Generate the next batch, with the policy as it was, while this one is learned from; its tokens are weighted by the
        /// importance ratio, capped at `importance_cap`.
        off_by_one: bool = false,
        /// Maximum importance weight with `off_by_one`.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        importance_cap: f64 = 2.0,
        /// A call to retrieval or judge that takes longer fails; an episode for which a reward requires the result is dropped and counted.
        #[schemars(range(min = 1))]
        episode_deadline_ms: u64 = 120_000,
        /// Steps between evaluations on the validation split.
        #[schemars(range(min = 1))]
        eval_steps: usize = 10,
        /// Steps between checkpoints from which training can be resumed.
        #[schemars(range(min = 1))]
        save_steps: usize = 10,
        /// Seconds after which a checkpoint is written, at the end of a step or within a rollout, whatever `save_steps` says; 0 for never.
        save_interval_s: u64 = 60,
        /// Number of checkpoints to keep in addition to `best` and `last`.
        #[schemars(range(min = 1))]
        save_total_limit: usize = 3,
        /// Evaluations without improvement after which training stops; 0 for never.
        early_stopping_patience: usize = 5,
        /// A batch that loses more than this share of its episodes stops the run.
        #[schemars(range(min = 0.0, max = 1.0))]
        max_drop_rate: f64 = 0.2,
        /// `episodes`: episodes and metrics; `full`: also tokens, log-probabilities, values, rewards, advantages and returns, in `rl/steps`.
        record: RlRecord = RlRecord::Episodes,
    }
}

impl RlConfig {
    /// Number of rollout batches of a training on `n_rows` queries. A batch continues in the next epoch where an epoch ends within it.
    pub fn n_steps(&self, n_rows: usize) -> usize {
        let Some(epochs) = self.epochs else { return self.max_steps };
        let planned = epochs.saturating_mul(n_rows).div_ceil(self.batch_size.max(1)).max(1);
        if self.max_steps > 0 { planned.min(self.max_steps) } else { planned }
    }

    /// `loss_agg` with `algorithm` resolved: the aggregation of the policy loss (GSPO, CISPO), or else of the algorithm. Source: verl
    /// `compute_policy_loss_gspo`; MiniMax 2025, "MiniMax-M1", equation 4.
    pub fn loss_agg_in_force(&self) -> LossAgg {
        match (self.loss_agg, self.policy_loss, self.algorithm) {
            (LossAgg::Algorithm, PolicyLossKind::Gspo, _) => LossAgg::SeqMeanTokenMean,
            (LossAgg::Algorithm, PolicyLossKind::Cispo, _) => LossAgg::TokenMean,
            (LossAgg::Algorithm, _, RlAlgorithm::Grpo) => LossAgg::SeqMeanTokenMean,
            (LossAgg::Algorithm, _, RlAlgorithm::DrGrpo) => LossAgg::SeqMeanTokenSumNorm,
            (LossAgg::Algorithm, ..) => LossAgg::TokenMean,
            (named, ..) => named,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_are_counted_in_batches_and_bounded_by_max_steps() {
        let steps = |epochs, max_steps| RlConfig { epochs, max_steps, ..RlConfig::default() }.n_steps(1000);
        assert_eq!(steps(None, 100), 100);
        // 10 * 1000 / 64 = 156.25
        assert_eq!(steps(Some(10), 0), 157);
        assert_eq!(steps(Some(10), 20), 20);
        assert_eq!(steps(Some(1), 100), 16);
    }

    #[test]
    fn an_average_left_to_the_algorithm_is_first_that_of_the_policy_loss() {
        let of = |algorithm, policy_loss, loss_agg| {
            RlConfig { algorithm, policy_loss, loss_agg, ..RlConfig::default() }.loss_agg_in_force()
        };
        let (left, grpo) = (LossAgg::Algorithm, RlAlgorithm::Grpo);
        assert_eq!(of(grpo, PolicyLossKind::Ppo, left), LossAgg::SeqMeanTokenMean);
        assert_eq!(of(grpo, PolicyLossKind::Cispo, left), LossAgg::TokenMean);
        assert_eq!(of(RlAlgorithm::DrGrpo, PolicyLossKind::Ppo, left), LossAgg::SeqMeanTokenSumNorm);
        assert_eq!(of(RlAlgorithm::Rloo, PolicyLossKind::Gspo, left), LossAgg::SeqMeanTokenMean);
        assert_eq!(of(grpo, PolicyLossKind::Gspo, LossAgg::TokenMean), LossAgg::TokenMean);
    }
}
