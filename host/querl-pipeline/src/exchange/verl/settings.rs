//! Settings of verl that are equivalent to `[rl]`.
//!
//! Names: `verl/trainer/config/` of verl 0.9.1; advantages and losses: `verl/trainer/ppo/core_algos.py`; how batches are divided over GPUs:
//! `verl/utils/config.py`.

use crate::exchange::folder::{HERE, n_reward_processes};
use crate::exchange::mapping::{Mapping, flag, float};
use crate::exchange::source::ExportedRun;
use crate::failure::Stop;
use querl_core::config::{
    Config, CriticKind, KlEstimator, KlPlacement, LrScheduler, PolicyLossKind, RlAlgorithm, RlConfig,
};

/// Nodes and GPUs of a training with verl.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cluster {
    /// Number of nodes.
    pub n_nodes: usize,
    /// Number of GPUs per node.
    pub gpus_per_node: usize,
}

/// Agent loop manager with reward workers that Ray restarts: host/querl-python/python/querl/integrations/verl_ray.py.
const AGENT_LOOP_MANAGER: &str = "querl.integrations.verl_ray.RestartingAgentLoopManager";

/// Maximum number of Ray actors that compute rewards: verl's default of `reward.num_workers`.
pub(super) const MAX_REWARD_WORKERS: usize = 8;

/// The value for a disabled limit, which is never reached.
const NO_LIMIT: &str = "1000000.0";

pub(super) const TRAIN: &str = "train.parquet";
pub(super) const VAL: &str = "val.parquet";

/// Batch sizes and lengths in verl's units.
pub(super) struct Sizes {
    /// Number of queries of a rollout batch, at most one epoch, because verl forms no batches across epochs.
    pub(super) batch: usize,
    /// Number of queries of an optimizer step.
    pub(super) mini_batch: usize,
    pub(super) n_samples: usize,
    steps: usize,
    epochs: usize,
    /// Maximum number of tokens of a prompt, rounded up and with a margin for another chat template.
    prompt: usize,
    /// Number of tokens per pass; at least one response with its prompt.
    pass: usize,
    /// Number of processes that compute rewards.
    pub(super) reward_workers: usize,
}

impl Sizes {
    pub(super) fn of(run: &ExportedRun) -> Self {
        let (rl, n_rows) = (&run.config.rl, run.train.len());
        let (batch, n_samples) = (rl.batch_size.min(n_rows), rl.n_samples.max(1));
        let steps = rl.n_steps(n_rows);
        let prompt = (run.longest_prompt + 16).next_multiple_of(64);
        Self {
            batch,
            mini_batch: (rl.mini_batch_size / n_samples).clamp(1, batch),
            n_samples,
            steps,
            epochs: steps.div_ceil(n_rows / batch),
            prompt,
            pass: run.config.model.tokens_per_pass.max(prompt + rl.max_new_tokens),
            reward_workers: n_reward_processes(&run.config, MAX_REWARD_WORKERS),
        }
    }

    pub(super) fn check(&self, cluster: Cluster) -> Result<(), Stop> {
        let n_gpus = cluster.n_nodes * cluster.gpus_per_node;
        match indivisible(self.batch * self.n_samples, self.mini_batch * self.n_samples, n_gpus) {
            Some((what, n)) => Err(Stop::usage(format!(
                "{what} has {n} responses, which verl cannot divide evenly over {n_gpus} GPUs; change that key, or --nodes and --gpus"
            ))),
            None => Ok(()),
        }
    }
}

/// The size that verl cannot divide evenly over `n_gpus`, of the batch and the optimizer step, as the key's name and the number of
/// responses; `None` if both can be divided.
pub(crate) fn indivisible(batch: usize, mini_batch: usize, n_gpus: usize) -> Option<(&'static str, usize)> {
    let sizes = [
        ("a rollout batch (rl.batch_size * rl.n_samples)", batch),
        ("an optimizer step (rl.mini_batch_size)", mini_batch),
    ];
    sizes.into_iter().find(|(_, n)| !n.is_multiple_of(n_gpus))
}

/// The settings for verl, with the mapping of each key.
pub(super) fn mapping(run: &ExportedRun, sizes: &Sizes, cluster: Cluster) -> anyhow::Result<Mapping> {
    let mut mapping = Mapping::of(&run.config)?;
    let rl = &run.config.rl;
    data_and_reward(&mut mapping, run, sizes);
    algorithm(&mut mapping, rl);
    kl(&mut mapping, rl);
    losses(&mut mapping, rl);
    batches(&mut mapping, rl, sizes);
    sampling(&mut mapping, rl);
    optimizers(&mut mapping, rl);
    lora(&mut mapping, run);
    intervals(&mut mapping, run);
    cluster_settings(&mut mapping, &run.config, cluster);
    Ok(mapping)
}

/// Quotes a path or a name as a value of a Hydra override. Backslashes are escapes only before a quote, and before `${`, which OmegaConf
/// would resolve.
pub(super) fn quoted(text: &str) -> String {
    let (mut quoted, mut n_backslashes) = ("\"".to_owned(), 0);
    for (at, c) in text.char_indices() {
        if c == '"' || text[at..].starts_with("${") {
            quoted.push_str(&"\\".repeat(n_backslashes + 1));
        }
        n_backslashes = if c == '\\' { n_backslashes + 1 } else { 0 };
        quoted.push(c);
    }
    quoted + &"\\".repeat(n_backslashes) + "\""
}

fn data_and_reward(m: &mut Mapping, run: &ExportedRun, sizes: &Sizes) {
    m.fixed("data.train_files", quoted(&format!("{HERE}/{TRAIN}")));
    // verl reads the file even if validation is disabled, and refuses an empty one.
    let val = if run.val.is_empty() { TRAIN } else { VAL };
    m.fixed("data.val_files", quoted(&format!("{HERE}/{val}")));
    m.fixed("data.max_prompt_length", sizes.prompt.to_string());
    m.fixed("data.truncation", "error");
    if let Some(enable_thinking) = run.config.model.enable_thinking {
        // The section is empty in verl's defaults: Hydra adds the key.
        let setting = ("+data.apply_chat_template_kwargs.enable_thinking", flag(enable_thinking));
        m.set("model.enable_thinking", &[setting], "");
    }
    m.set("seed", &[("data.seed", run.config.seed.to_string())], "seeds the order of the queries");
    m.fixed("reward.num_workers", sizes.reward_workers.to_string());
    m.fixed("reward.custom_reward_function.path", quoted("pkg://querl.integrations.verl"));
    m.fixed("reward.custom_reward_function.name", "compute_score");
    m.fixed("+reward.custom_reward_function.reward_kwargs.config", quoted(&format!("{HERE}/querl.toml")));
    // verl does not restart a reward worker that died, and loses every sample that is sent to it. The key is not in verl's defaults.
    m.fixed("+actor_rollout_ref.rollout.agent.agent_loop_manager_class", AGENT_LOOP_MANAGER);
    m.reward("rl.episode_deadline_ms");
}

fn algorithm(m: &mut Mapping, rl: &RlConfig) {
    let (estimator, by_deviation) = match rl.algorithm {
        RlAlgorithm::Ppo => ("gae", true),
        RlAlgorithm::Grpo | RlAlgorithm::Raft => ("grpo", true),
        RlAlgorithm::DrGrpo => ("grpo", false),
        RlAlgorithm::Rloo => ("rloo", true),
        RlAlgorithm::ReinforcePlusPlus => ("reinforce_plus_plus", true),
    };
    let settings =
        [("algorithm.adv_estimator", estimator.to_owned()), ("algorithm.norm_adv_by_std_in_grpo", flag(by_deviation))];
    if rl.algorithm == RlAlgorithm::Raft {
        m.none("rl.algorithm", "verl has no RAFT: GRPO takes its place");
        settings.into_iter().for_each(|(name, value)| m.fixed(name, value));
    } else {
        m.set("rl.algorithm", &settings, "");
    }
    let average = rl.loss_agg_in_force().name();
    m.set("rl.loss_agg", &[("actor_rollout_ref.actor.loss_agg_mode", average.to_owned())], "");
    m.none("rl.anchor_baseline", "a group of verl has its samples alone");
    let filter = [("algorithm.filter_groups.enable", flag(rl.dynamic_sampling))];
    m.set("rl.dynamic_sampling", &filter, "by the reward, until the batch is complete");
    m.none(
        "rl.max_resampled_batches",
        "verl replaces groups until the batch is complete, and ignores its own `algorithm.filter_groups.max_num_gen_batches`",
    );
    m.none("rl.advantage_form", "verl has advantages and ratios per token");
    m.set("rl.gamma", &[("algorithm.gamma", float(rl.gamma))], "");
    m.set("rl.gae_lambda", &[("algorithm.lam", float(rl.gae_lambda))], "");
    m.none("rl.whiten_advantages", "verl always whitens with `gae` and `reinforce_plus_plus`, as `true` does");
    m.none("rl.advantage_clip", "verl does not clip advantages");
    m.none("rl.normalize_rewards", "verl does not scale scores");
    m.none("rl.reward_clip", "verl does not clip scores");
    m.none("rl.missing_eos_penalty", "the reward of verl does not see whether a response ended");
    m.none("rl.overlong_buffer_len", "verl has it in its reward manager `dapo` alone (`overlong_buffer_cfg`)");
    m.none("rl.overlong_penalty_factor", "used with `rl.overlong_buffer_len` alone");
    m.none("rl.max_drop_rate", "verl does not stop where many responses have no score");
    m.none("rl.record", "verl writes the texts alone, to `trainer.rollout_data_dir`");
}

fn kl(m: &mut Mapping, rl: &RlConfig) {
    let (is_used, in_reward) = (rl.kl_coef > 0.0, rl.kl_placement == KlPlacement::Reward);
    let estimator = match rl.kl_estimator {
        KlEstimator::K1 => "kl",
        KlEstimator::K2 => "mse",
        KlEstimator::K3 => "low_var_kl",
    };
    let placement = [
        ("algorithm.use_kl_in_reward", flag(is_used && in_reward)),
        ("actor_rollout_ref.actor.use_kl_loss", flag(is_used && !in_reward)),
    ];
    m.set("rl.kl_placement", &placement, "");
    let (coefficient, kind) = match in_reward {
        true => ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
        false => ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_type"),
    };
    m.set("rl.kl_coef", &[(coefficient, float(rl.kl_coef))], "");
    m.set("rl.kl_estimator", &[(kind, estimator.to_owned())], "");
    m.none(
        "rl.kl_target",
        "verl's adaptive controller has a target per token, not per response; `kl_coef` stays as it is",
    );
    m.none("rl.kl_horizon", "used with `rl.kl_target` alone");
    m.none("rl.target_kl", "verl does not skip epochs");
}

fn losses(m: &mut Mapping, rl: &RlConfig) {
    let clips = ["actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio_low"];
    m.set_all("rl.clip_range", &clips, &float(rl.clip_range), "");
    let high = [("actor_rollout_ref.actor.clip_ratio_high", float(rl.clip_range_high.unwrap_or(rl.clip_range)))];
    m.set("rl.clip_range_high", &high, "that of `rl.clip_range` where not set");
    let loss_mode = match rl.policy_loss {
        PolicyLossKind::Ppo => "vanilla",
        PolicyLossKind::Gspo | PolicyLossKind::Cispo => rl.policy_loss.name(),
    };
    m.set("rl.policy_loss", &[("actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode.to_owned())], "");
    let dual_clip = if rl.dual_clip > 1.0 { float(rl.dual_clip) } else { NO_LIMIT.to_owned() };
    m.set("rl.dual_clip", &[("actor_rollout_ref.actor.clip_ratio_c", dual_clip)], "0 is a bound that is never reached");
    let clip_value = if rl.clip_range_value > 0.0 { float(rl.clip_range_value) } else { NO_LIMIT.to_owned() };
    m.set("rl.clip_range_value", &[("critic.cliprange_value", clip_value)], "0 is a range that is never left");
    m.none("rl.value_loss", "verl's value loss is the square");
    m.none("rl.vf_coef", "the critic of verl is a model with an optimizer of its own, which does not see a scale");
    m.set("rl.ent_coef", &[("actor_rollout_ref.actor.entropy_coeff", float(rl.ent_coef))], "");
    m.none("rl.importance_cap", "verl has rollout correction in place of it (`algorithm.rollout_correction`)");
    m.none("rl.off_by_one", "see `trainer.v1.trainer_mode=colocate_async` of verl, which is not the same");
}

fn batches(m: &mut Mapping, rl: &RlConfig, sizes: &Sizes) {
    let batch = [("data.train_batch_size", sizes.batch.to_string())];
    m.set("rl.batch_size", &batch, "at most the rows of the training split");
    m.set("rl.n_samples", &[("actor_rollout_ref.rollout.n", sizes.n_samples.to_string())], "");
    let epochs = ["actor_rollout_ref.actor.ppo_epochs", "critic.ppo_epochs"];
    m.set_all("rl.ppo_epochs", &epochs, &rl.ppo_epochs.to_string(), "");
    let mini_batch = ["actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"];
    m.set_all("rl.mini_batch_size", &mini_batch, &sizes.mini_batch.to_string(), "in queries, not responses");
    let dynamic = [("actor_rollout_ref.actor.use_dynamic_bsz", flag(true))];
    m.set(
        "rl.gradient_accumulation_steps",
        &dynamic,
        "passes are bounded by their tokens; the result does not depend on it",
    );
    let tokens = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"];
    let note = "at least the longest prompt with a response";
    m.set_all("model.tokens_per_pass", &tokens, &sizes.pass.to_string(), note);
    let steps = [("trainer.total_training_steps", sizes.steps.to_string())];
    m.set("rl.max_steps", &steps, "");
    m.set("rl.epochs", &[("trainer.total_epochs", sizes.epochs.to_string())], "as many as the steps need");
    m.set("rl.critic_warmup_steps", &[("trainer.critic_warmup", rl.critic_warmup_steps.to_string())], "");
    m.none("rl.pipeline_parts", "verl generates and scores without parts; no result depends on it");
}

fn sampling(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.temperature", &[("actor_rollout_ref.rollout.temperature", float(rl.temperature))], "");
    m.set("rl.top_p", &[("actor_rollout_ref.rollout.top_p", float(rl.top_p))], "");
    let top_k = if rl.top_k == 0 { "-1".to_owned() } else { rl.top_k.to_string() };
    m.set("rl.top_k", &[("actor_rollout_ref.rollout.top_k", top_k)], "-1 disables it");
    m.set("rl.max_new_tokens", &[("data.max_response_length", rl.max_new_tokens.to_string())], "");
    for key in ["rl.min_new_tokens", "rl.repetition_penalty", "rl.no_repeat_ngram_size", "rl.stop_strings"] {
        m.none(key, "verl's rollouts have no such setting");
    }
}

fn optimizers(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.learning_rate", &[("actor_rollout_ref.actor.optim.lr", float(rl.learning_rate))], "");
    m.set("rl.critic_learning_rate", &[("critic.optim.lr", float(rl.critic_learning_rate))], "");
    let schedule = "actor_rollout_ref.actor.optim.lr_scheduler_type";
    match rl.lr_scheduler {
        LrScheduler::Constant => m.set("rl.lr_scheduler", &[(schedule, "constant".into())], ""),
        LrScheduler::Cosine => m.set("rl.lr_scheduler", &[(schedule, "cosine".into())], ""),
        LrScheduler::Linear => {
            m.none("rl.lr_scheduler", "verl has constant and cosine with FSDP; cosine is set");
            m.fixed(schedule, "cosine");
        }
    }
    let warmup = [("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", float(rl.warmup_ratio))];
    m.set("rl.warmup_ratio", &warmup, "");
    let decays = ["actor_rollout_ref.actor.optim.weight_decay", "critic.optim.weight_decay"];
    m.set_all("rl.weight_decay", &decays, &float(rl.weight_decay), "");
    let norms = [
        "actor_rollout_ref.actor.grad_clip",
        "actor_rollout_ref.actor.optim.clip_grad",
        "critic.grad_clip",
        "critic.optim.clip_grad",
    ];
    m.set_all("rl.max_grad_norm", &norms, &float(rl.max_grad_norm), "");
}

fn lora(m: &mut Mapping, run: &ExportedRun) {
    let (rank, alpha) = run.lora();
    let sft = &run.config.sft;
    let targets = match sft.lora_target_modules.as_slice() {
        [all] if all == "all-linear" => all.clone(),
        names => format!("[{}]", names.join(",")),
    };
    let has_critic = run.config.rl.algorithm == RlAlgorithm::Ppo && run.config.rl.critic == CriticKind::Adapter;
    let mut set = |key: &str, name: &str, value: &str| {
        let names = [format!("actor_rollout_ref.model.{name}"), format!("critic.model.{name}")];
        let names = names.each_ref().map(String::as_str);
        m.set_all(key, &names[..if has_critic { 2 } else { 1 }], value, "");
    };
    set("model.path", "path", &quoted("@MODEL@"));
    set("sft.lora_rank", "lora_rank", &rank.to_string());
    // verl takes an integer.
    set("sft.lora_alpha", "lora_alpha", &format!("{}", alpha.round() as i64));
    set("sft.lora_target_modules", "target_modules", &targets);
    if run.config.rl.algorithm == RlAlgorithm::Ppo && !has_critic {
        m.fixed("critic.model.path", quoted("@MODEL@"));
    }
    m.none("rl.critic", "verl's critic is a model of its own; `head` becomes a critic whose weights are all trained");
    if run.adapter.is_some() {
        m.fixed("actor_rollout_ref.model.lora_adapter_path", quoted(&format!("{HERE}/adapter")));
    }
    m.none("sft.use_rslora", "verl hands rank and alpha to vLLM, and not this");
    m.none("sft.use_dora", "vLLM does not serve DoRA adapters");
    m.fixed("actor_rollout_ref.rollout.name", "vllm");
    m.fixed("actor_rollout_ref.rollout.load_format", "safetensors");
}

fn intervals(m: &mut Mapping, run: &ExportedRun) {
    let (rl, has_val) = (&run.config.rl, !run.val.is_empty());
    let (interval, note) = match has_val {
        true => (rl.eval_steps.to_string(), ""),
        false => ("-1".to_owned(), "-1 disables it: the validation split has no row"),
    };
    m.set("rl.eval_steps", &[("trainer.test_freq", interval)], note);
    m.fixed("trainer.val_before_train", flag(has_val));
    m.set("rl.save_steps", &[("trainer.save_freq", rl.save_steps.to_string())], "");
    let kept = ["trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"];
    let note = "verl keeps no best checkpoint: choose one by its validation reward";
    m.set_all("rl.save_total_limit", &kept, &rl.save_total_limit.to_string(), note);
    m.none("rl.save_interval_s", "verl saves by steps alone");
    m.early_stopping(rl, "verl", "");
}

fn cluster_settings(m: &mut Mapping, config: &Config, cluster: Cluster) {
    let parallel = config.model.tensor_parallel.to_string();
    m.set(
        "model.tensor_parallel",
        &[("actor_rollout_ref.rollout.tensor_model_parallel_size", parallel)],
        "of rollouts",
    );
    let checkpointing = flag(config.model.gradient_checkpointing);
    let setting = "actor_rollout_ref.model.enable_gradient_checkpointing";
    m.set("model.gradient_checkpointing", &[(setting, checkpointing)], "");
    m.fixed("trainer.nnodes", cluster.n_nodes.to_string());
    m.fixed("trainer.n_gpus_per_node", cluster.gpus_per_node.to_string());
    m.fixed("trainer.project_name", "querl");
    m.fixed("trainer.experiment_name", quoted(&config.tenant));
    m.fixed("trainer.logger", "[\"console\",\"file\"]");
    m.fixed("trainer.default_local_dir", quoted(&format!("{HERE}/checkpoints")));
    m.fixed("trainer.rollout_data_dir", quoted(&format!("{HERE}/rollouts")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::mapping::assert_has_rl_keys_once;
    use crate::exchange::source::testing::run;

    fn mapped(run: &ExportedRun) -> Mapping {
        mapping(run, &Sizes::of(run), Cluster { n_nodes: 1, gpus_per_node: 2 }).unwrap()
    }

    #[test]
    fn every_key_of_rl_is_in_the_table_once() {
        assert_has_rl_keys_once(&mapped(&run("")));
    }

    #[test]
    fn ppo_has_gae_and_kl_in_the_reward() {
        let mapping = mapped(&run("[rl]\nbatch_size = 4\nmini_batch_size = 2\nn_samples = 2\nmax_steps = 10\n"));
        let value = |name: &str| mapping.value(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(value("algorithm.adv_estimator"), "gae");
        assert_eq!((value("algorithm.use_kl_in_reward"), value("algorithm.kl_penalty")), ("True", "kl"));
        assert_eq!(value("actor_rollout_ref.actor.clip_ratio_c"), NO_LIMIT);
        // Two responses are one query with two samples.
        assert_eq!(value("actor_rollout_ref.actor.ppo_mini_batch_size"), "1");
        // Ten batches of four of eight rows.
        assert_eq!((value("trainer.total_training_steps"), value("trainer.total_epochs")), ("10", "5"));
        assert!(mapping.without_equivalent().is_empty());
    }

    #[test]
    fn there_are_no_more_reward_workers_than_a_limit_has_calls() {
        let value = |sections: &str| mapped(&run(sections)).value("reward.num_workers").map(str::to_owned);
        assert_eq!(value("").as_deref(), Some("8"));
        assert_eq!(value("[judge]\nmax_concurrent = 2\n").as_deref(), Some("2"));
    }

    #[test]
    fn validation_is_off_where_its_split_has_no_row() {
        let mut run = run("[rl]\neval_steps = 5\n");
        let values = |run: &ExportedRun| {
            let mapping = mapped(run);
            ["trainer.val_before_train", "trainer.test_freq", "data.val_files"]
                .map(|name| mapping.value(name).unwrap_or_default().to_owned())
        };
        assert_eq!(values(&run), ["False", "-1", "\"@HERE@/train.parquet\""]);
        run.val = run.train.clone();
        assert_eq!(values(&run), ["True", "5", "\"@HERE@/val.parquet\""]);
    }

    #[test]
    fn thinking_is_a_variable_of_the_chat_template_where_it_is_set() {
        let mut run = run("");
        let value = |run: &ExportedRun| {
            mapped(run).value("+data.apply_chat_template_kwargs.enable_thinking").map(str::to_owned)
        };
        assert_eq!(value(&run), None);
        run.config.model.enable_thinking = Some(false);
        assert_eq!(value(&run).as_deref(), Some("False"));
    }

    /// Regression: a tenant `${oc.env:HOME}` was replaced by the home folder, and backslashes were doubled. The values that Hydra 1.3 and
    /// OmegaConf 2.3 parse:
    ///
    /// ```python
    /// value = OverridesParser.create().parse_override(f"a={quoted}").value()
    /// OmegaConf.create({"a": value}).a
    /// ```
    #[test]
    fn quotes_and_interpolations_are_escaped() {
        let cases = [
            (r#"a "b" \c"#, r#""a \"b\" \c""#),
            (r#"a\"b"#, r#""a\\\"b""#),
            (r"a\", r#""a\\""#),
            (r"x${oc.env:HOME}", r#""x\${oc.env:HOME}""#),
            (r"x\${y}$b{c}", r#""x\\\${y}$b{c}""#),
        ];
        for (text, expected) in cases {
            assert_eq!(quoted(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_lost_is_named_with_its_value() {
        let text = "[rl]\nalgorithm = \"dr_grpo\"\nn_samples = 4\nkl_placement = \"loss\"\nkl_estimator = \"k3\"\nkl_target = 6.0\n";
        let mapping = mapped(&run(text));
        assert_eq!(mapping.value("algorithm.norm_adv_by_std_in_grpo"), Some("False"));
        assert_eq!(mapping.value("actor_rollout_ref.actor.kl_loss_type"), Some("low_var_kl"));
        let lost = mapping.without_equivalent();
        assert!(lost.len() == 1 && lost[0].starts_with("rl.kl_target = 6.0: verl's adaptive controller"), "{lost:?}");
        assert!(mapping.to_markdown("verl").contains("| `rl.kl_target` | `6.0` | none | verl's"));
    }

    #[test]
    fn dapo_is_clip_higher_token_mean_and_filtered_groups() {
        let text = "[rl]\nalgorithm = \"grpo\"\nn_samples = 4\nclip_range_high = 0.28\nloss_agg = \"token-mean\"\ndynamic_sampling = true\n\
                    policy_loss = \"cispo\"\noverlong_buffer_len = 20\n";
        let mapping = mapped(&run(text));
        let value = |name: &str| mapping.value(name).unwrap_or_else(|| panic!("{name}"));
        let actor = |name: &str| value(&format!("actor_rollout_ref.actor.{name}"));
        assert_eq!((actor("clip_ratio_low"), actor("clip_ratio_high")), ("0.2", "0.28"));
        assert_eq!((actor("loss_agg_mode"), actor("policy_loss.loss_mode")), ("token-mean", "cispo"));
        assert_eq!(value("algorithm.filter_groups.enable"), "True");
        let lost = mapping.without_equivalent();
        assert!(lost.len() == 1 && lost[0].starts_with("rl.overlong_buffer_len = 20: verl has it"), "{lost:?}");
        let plain = mapped(&run("[rl]\nalgorithm = \"grpo\"\nn_samples = 4\n"));
        assert_eq!(plain.value("actor_rollout_ref.actor.clip_ratio_high"), Some("0.2"));
        assert_eq!(plain.value("actor_rollout_ref.actor.policy_loss.loss_mode"), Some("vanilla"));
    }

    #[test]
    fn a_batch_that_cannot_be_divided_over_the_gpus_is_refused() {
        let sizes = Sizes::of(&run("[rl]\nbatch_size = 4\nmini_batch_size = 4\n"));
        sizes.check(Cluster { n_nodes: 2, gpus_per_node: 2 }).unwrap();
        let refusal = sizes.check(Cluster { n_nodes: 1, gpus_per_node: 8 }).unwrap_err().to_string();
        assert!(refusal.starts_with("a rollout batch (rl.batch_size * rl.n_samples) has 4 responses"), "{refusal}");
    }
}
