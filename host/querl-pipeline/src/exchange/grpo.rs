//! Settings common to the GRPO trainers of TRL and ms-swift, which are both built on `TrainingArguments` of transformers and on TRL's
//! `GRPOConfig`.

use super::mapping::{Mapping, float};
use super::source::ExportedRun;
use querl_core::config::{BaseDtype, LossAgg, LrScheduler, PolicyLossKind, RlConfig};

/// Number of samples per query if the run has one: the default of both engines.
const N_SAMPLES: usize = 8;

/// Batch sizes and step counts in the units of TRL and ms-swift.
pub(super) struct GrpoSizes {
    pub(super) n_samples: usize,
    /// Number of responses of a rollout batch. `mini_batch` (an optimizer step) divides it, and `pass` (a forward pass) divides that.
    pub(super) batch: usize,
    pub(super) mini_batch: usize,
    pub(super) pass: usize,
    /// Number of optimizer steps per rollout batch.
    pub(super) updates: usize,
    /// Number of rollout batches of the training.
    pub(super) steps: usize,
}

impl GrpoSizes {
    pub(super) fn of(run: &ExportedRun) -> Self {
        let rl = &run.config.rl;
        let n_samples = if rl.n_samples < 2 { N_SAMPLES } else { rl.n_samples };
        // Incomplete batches are dropped: with a batch larger than the split, nothing would be trained.
        let batch = rl.batch_size.min(run.train.len()) * n_samples;
        let mini_batch = largest_divisor(batch, rl.mini_batch_size);
        let pass = largest_divisor(mini_batch, mini_batch.div_ceil(rl.gradient_accumulation_steps));
        let updates = batch / mini_batch * rl.ppo_epochs;
        Self { n_samples, batch, mini_batch, pass, updates, steps: rl.n_steps(run.train.len()) }
    }

    /// Number of optimizer steps of the learning-rate warm-up.
    pub(super) fn n_warmup(&self, rl: &RlConfig) -> usize {
        (rl.warmup_ratio * (self.steps * self.updates) as f64).ceil() as usize
    }

    /// Notes on sizes that differ from those of the run, on the dtype of the base, and on validation.
    pub(super) fn notes(&self, run: &ExportedRun, engine: &str) -> Vec<String> {
        let (config, mut notes) = (&run.config, Vec::new());
        let rl = &config.rl;
        if rl.n_samples < 2 {
            let (own, there) = (self.batch / self.n_samples, self.batch);
            notes.push(format!(
                "rl.n_samples is {}, and GRPO compares samples: {N_SAMPLES} are taken, so that a rollout batch has {there} responses in \
                 place of {own}",
                rl.n_samples
            ));
        }
        notes.extend(run.batch_note(engine).into_iter().chain(run.mini_batch_note(self.mini_batch)));
        if matches!(config.model.dtype, BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4) {
            notes.push(format!("the base model is bf16 in place of {}", config.model.dtype.name()));
        }
        notes.push("validation samples with the temperature of training, not greedily".to_owned());
        notes
    }
}

/// The largest divisor of `n` that is at most `limit`, at least 1.
fn largest_divisor(n: usize, limit: usize) -> usize {
    (1..=limit.min(n)).rev().find(|divisor| n.is_multiple_of(*divisor)).unwrap_or(1)
}

/// Adds the keys that have no equivalent in TRL or ms-swift.
pub(super) fn without_equivalent(m: &mut Mapping, engine: &str) {
    m.all_none(&[
        ("rl.advantage_form", "GRPO has one advantage for a response, and ratios per token"),
        ("rl.gamma", "GRPO has no discount"),
        ("rl.gae_lambda", "GRPO has no values"),
        ("rl.critic", "GRPO has no critic"),
        ("rl.critic_learning_rate", "GRPO has no critic"),
        ("rl.critic_warmup_steps", "GRPO has no critic"),
        ("rl.clip_range_value", "GRPO has no critic"),
        ("rl.value_loss", "GRPO has no critic"),
        ("rl.vf_coef", "GRPO has no critic"),
        ("rl.whiten_advantages", "advantages of a group have mean 0, and with `scale_rewards` deviation 1"),
        ("rl.kl_target", "`beta` does not change"),
        ("rl.kl_horizon", "used with `rl.kl_target` alone"),
        ("rl.overlong_penalty_factor", "used with `rl.overlong_buffer_len` alone"),
    ]);
    for (key, note) in [
        ("rl.target_kl", "does not skip epochs"),
        ("rl.advantage_clip", "does not clip advantages"),
        ("rl.normalize_rewards", "does not scale scores over batches"),
        ("rl.reward_clip", "does not clip scores"),
        ("rl.max_drop_rate", "does not stop where many responses have no score"),
        ("rl.anchor_baseline", "compares the samples of a query alone"),
        ("rl.ent_coef", "has no entropy bonus"),
        ("rl.importance_cap", "generates with the policy itself"),
        ("rl.off_by_one", "generates and trains in turn"),
        ("rl.record", "does not keep tokens and advantages"),
        ("rl.pipeline_parts", "generates and scores without parts; no result depends on it"),
        ("rl.save_interval_s", "saves by steps alone"),
    ] {
        m.none(key, &format!("{engine} {note}"));
    }
}

/// TRL's `loss_type` for the configured aggregation and policy loss; `None` if there is no equivalent. `of_algorithm`: the `loss_type` if
/// the run leaves the aggregation to its algorithm.
pub(super) fn loss_type(rl: &RlConfig, of_algorithm: &'static str) -> Option<&'static str> {
    match (rl.policy_loss, rl.loss_agg) {
        (PolicyLossKind::Cispo, _) => (rl.loss_agg_in_force() == LossAgg::TokenMean).then_some("cispo"),
        (PolicyLossKind::Gspo, LossAgg::Algorithm) => Some("grpo"),
        (_, LossAgg::Algorithm) => Some(of_algorithm),
        (_, LossAgg::TokenMean) => Some("dapo"),
        (_, LossAgg::SeqMeanTokenMean) => Some("grpo"),
        (_, LossAgg::SeqMeanTokenSumNorm) => Some("dr_grpo"),
        (_, LossAgg::SeqMeanTokenSum) => None,
    }
}

/// Adds the `loss_type` that [`loss_type`] returns, or, if there is no equivalent, a note on the one used instead.
pub(super) fn set_loss_type(m: &mut Mapping, rl: &RlConfig, of_algorithm: &'static str, quote: fn(&str) -> String) {
    match (loss_type(rl, of_algorithm), rl.policy_loss) {
        (Some(loss_type), _) => m.set("rl.loss_agg", &[("loss_type", quote(loss_type))], ""),
        (None, PolicyLossKind::Cispo) => {
            m.none("rl.loss_agg", "`cispo` there is a mean over tokens");
            m.fixed("loss_type", quote("cispo"));
        }
        (None, _) => {
            m.none("rl.loss_agg", "there is no such average; that of GRPO takes its place");
            m.fixed("loss_type", quote("grpo"));
        }
    }
}

/// Adds the level of the probability ratios (per token or per response) and their clip range; CISPO has an upper bound only.
pub(super) fn set_ratios(m: &mut Mapping, rl: &RlConfig, quote: fn(&str) -> String) {
    let level = if rl.policy_loss == PolicyLossKind::Gspo { "sequence" } else { "token" };
    let note = "`cispo` is a `loss_type`, without a lower bound of the ratio";
    let note = if rl.policy_loss == PolicyLossKind::Cispo { note } else { "" };
    m.set("rl.policy_loss", &[("importance_sampling_level", quote(level))], note);
    match rl.policy_loss {
        PolicyLossKind::Cispo if rl.clip_range < 1.0 => {
            m.none("rl.clip_range", "`cispo` has no lower bound there, as from 1 on");
            m.fixed("epsilon", float(rl.clip_range));
        }
        _ => m.set("rl.clip_range", &[("epsilon", float(rl.clip_range))], ""),
    }
    let high = rl.clip_range_high.unwrap_or(rl.clip_range);
    match (rl.policy_loss, rl.clip_range_high) {
        (PolicyLossKind::Cispo, _) => {
            m.set("rl.clip_range_high", &[("epsilon_high", float(1.0 + high))], "the largest ratio");
        }
        (_, Some(high)) => m.set("rl.clip_range_high", &[("epsilon_high", float(high))], ""),
        (_, None) => m.set("rl.clip_range_high", &[], "without `epsilon_high` both sides have `epsilon`"),
    }
}

/// Adds batch sizes. `mini_batch`: the engine's settings for the size of an optimizer step, with a note.
pub(super) fn batches(m: &mut Mapping, rl: &RlConfig, sizes: &GrpoSizes, mini_batch: (&[(&str, String)], &str)) {
    m.set("rl.n_samples", &[("num_generations", sizes.n_samples.to_string())], "at least 2");
    let batch = [("generation_batch_size", sizes.batch.to_string())];
    m.set("rl.batch_size", &batch, "in responses, of at most the rows of the training split");
    m.set("rl.ppo_epochs", &[("num_iterations", rl.ppo_epochs.to_string())], "");
    m.set("rl.mini_batch_size", mini_batch.0, mini_batch.1);
    m.set("rl.gradient_accumulation_steps", &[], "see `rl.mini_batch_size`; the result does not depend on it");
    let steps = (sizes.steps * sizes.updates).to_string();
    m.set("rl.max_steps", &[("max_steps", steps)], "in optimizer steps");
    m.set("rl.epochs", &[], "see `rl.max_steps`");
    m.fixed("per_device_eval_batch_size", sizes.pass.to_string());
    m.fixed("num_generations_eval", "1");
}

pub(super) fn optimizer(m: &mut Mapping, rl: &RlConfig, sizes: &GrpoSizes, quote: fn(&str) -> String) {
    m.set("rl.learning_rate", &[("learning_rate", float(rl.learning_rate))], "");
    let n_warmup = sizes.n_warmup(rl);
    m.set("rl.lr_scheduler", &[("lr_scheduler_type", quote(schedule(rl.lr_scheduler, n_warmup)))], "");
    m.set("rl.warmup_ratio", &[("warmup_steps", n_warmup.to_string())], "");
    m.set("rl.weight_decay", &[("weight_decay", float(rl.weight_decay))], "");
    m.set("rl.max_grad_norm", &[("max_grad_norm", float(rl.max_grad_norm))], "");
}

/// Adds the intervals of evaluation and saving, in optimizer steps.
pub(super) fn intervals(m: &mut Mapping, rl: &RlConfig, sizes: &GrpoSizes) {
    for (key, name, steps) in
        [("rl.eval_steps", "eval_steps", rl.eval_steps), ("rl.save_steps", "save_steps", rl.save_steps)]
    {
        m.set(key, &[(name, (steps * sizes.updates).to_string())], "in optimizer steps");
    }
    m.set("rl.save_total_limit", &[("save_total_limit", rl.save_total_limit.to_string())], "");
}

/// Name of a learning-rate schedule in transformers.
pub(super) fn schedule(scheduler: LrScheduler, n_warmup: usize) -> &'static str {
    match scheduler {
        LrScheduler::Cosine => "cosine",
        LrScheduler::Linear => "linear",
        LrScheduler::Constant if n_warmup > 0 => "constant_with_warmup",
        LrScheduler::Constant => "constant",
    }
}

/// Name of the torch dtype for the base weights.
pub(super) fn dtype(dtype: BaseDtype) -> &'static str {
    match dtype {
        BaseDtype::F32 => "float32",
        BaseDtype::F16 => "float16",
        BaseDtype::Bf16 | BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4 => "bfloat16",
    }
}
