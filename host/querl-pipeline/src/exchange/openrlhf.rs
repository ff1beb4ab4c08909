//! Export of a run to OpenRLHF, with `querl serve reward` as the reward server.
//!
//! Names of arguments: `openrlhf/cli/train_ppo_ray.py` of OpenRLHF 0.11.2; advantages: `openrlhf/trainer/ppo_utils/experience_maker.py`.

use super::folder::{
    EngineFiles, Exported, HERE, RewardProcesses, TRAIN, argument_lines, plain, write_rows, write_shared,
};
use super::grpo;
use super::mapping::{Mapping, float};
use super::rows::PromptRow;
use super::source::ExportedRun;
use crate::serving::BaseFiles;
use querl_core::config::{BaseDtype, KlPlacement, LossAgg, PolicyLossKind, RlAlgorithm, RlConfig};
use std::path::Path;

/// Writes a folder from which OpenRLHF trains the run.
///
/// # Errors
/// A plugin is not the one of the run, or a file cannot be read or written.
pub fn export_openrlhf(run: &ExportedRun, base: BaseFiles, out: &Path) -> anyhow::Result<Exported> {
    let reward = RewardProcesses { n_processes: 1, rows: TRAIN };
    let shared = write_shared(run, base, &reward, out)?;
    write_rows(run, out, PromptRow::clone)?;
    let model = plain(&shared.model)?.replace(HERE, "$HERE");
    let sizes = Sizes::of(run);
    let mapping = mapping(run, &sizes)?;
    let settings = argument_lines(mapping.settings());
    let values = [("@SETTINGS@", settings.as_str()), ("@MODEL@", model.as_str())];
    let notes = notes(run, &sizes);
    let files = EngineFiles { engine: "OpenRLHF", mapping: &mapping, notes, templates: &FILES, values: &values };
    files.write(run, shared, out)
}

const FILES: [(&str, &str); 5] = [
    ("README.md", include_str!("files/openrlhf/README.md")),
    ("mapping.md", include_str!("files/openrlhf/mapping.md")),
    ("requirements.txt", include_str!("files/openrlhf/requirements.txt")),
    ("reward.sh", include_str!("files/openrlhf/reward.sh")),
    ("train.sh", include_str!("files/openrlhf/train.sh")),
];

/// The value for a disabled limit, which is never reached.
const NO_LIMIT: &str = "1000000.0";

/// Sizes in OpenRLHF's units.
struct Sizes {
    n_samples: usize,
    /// Number of queries per rollout batch.
    batch: usize,
    /// Number of responses per optimizer step.
    mini_batch: usize,
    /// Number of passes over the training split.
    episodes: usize,
    /// Maximum number of tokens of a prompt with its response, rounded up and with a margin for another chat template.
    length: usize,
}

impl Sizes {
    fn of(run: &ExportedRun) -> Self {
        let (rl, n_rows) = (&run.config.rl, run.train.len());
        let (batch, n_samples) = (rl.batch_size.min(n_rows), rl.n_samples.max(1));
        Self {
            n_samples,
            batch,
            mini_batch: rl.mini_batch_size.min(batch * n_samples),
            episodes: (rl.n_steps(n_rows) * batch).div_ceil(n_rows),
            length: (run.longest_prompt + 16).next_multiple_of(64) + rl.max_new_tokens,
        }
    }
}

fn mapping(run: &ExportedRun, sizes: &Sizes) -> anyhow::Result<Mapping> {
    let mut mapping = Mapping::of(&run.config)?;
    let rl = &run.config.rl;
    algorithm(&mut mapping, rl);
    kl(&mut mapping, rl);
    losses(&mut mapping, rl);
    batches(&mut mapping, rl, sizes);
    sampling(&mut mapping, rl, sizes);
    optimizers(&mut mapping, rl);
    intervals(&mut mapping, rl);
    model(&mut mapping, run);
    if run.config.model.enable_thinking.is_some() {
        mapping.none("model.enable_thinking", "OpenRLHF hands no variables to the chat template: its default holds");
    }
    mapping.set("seed", &[("train.seed", run.config.seed.to_string())], "");
    mapping.reward("rl.episode_deadline_ms");
    Ok(mapping)
}

/// The reason why OpenRLHF lacks the run's loss aggregation, and the one used instead.
fn lost_average(rl: &RlConfig) -> Option<(&'static str, LossAgg)> {
    match (rl.policy_loss, rl.loss_agg_in_force()) {
        (_, LossAgg::SeqMeanTokenMean) => None,
        (PolicyLossKind::Gspo, _) => Some((
            "`gspo` of OpenRLHF averages over the tokens of a response, then over responses",
            LossAgg::SeqMeanTokenMean,
        )),
        (_, LossAgg::SeqMeanTokenSum | LossAgg::SeqMeanTokenSumNorm) => {
            Some(("OpenRLHF has `token-mean` and `seq-mean-token-mean`; the first is set", LossAgg::TokenMean))
        }
        (_, LossAgg::TokenMean | LossAgg::Algorithm) => None,
    }
}

fn algorithm(m: &mut Mapping, rl: &RlConfig) {
    let estimator = match rl.algorithm {
        RlAlgorithm::Ppo => "gae",
        RlAlgorithm::Grpo | RlAlgorithm::Raft => "group_norm",
        RlAlgorithm::DrGrpo => "dr_grpo",
        RlAlgorithm::Rloo => "rloo",
        RlAlgorithm::ReinforcePlusPlus => "reinforce",
    };
    if rl.algorithm == RlAlgorithm::Raft {
        m.none("rl.algorithm", "OpenRLHF has no RAFT: GRPO takes its place");
        m.fixed("algo.advantage.estimator", estimator);
    } else {
        m.set("rl.algorithm", &[("algo.advantage.estimator", estimator.to_owned())], "");
    }
    match lost_average(rl) {
        Some((note, other)) => {
            m.none("rl.loss_agg", note);
            m.fixed("actor.loss_agg_mode", other.name());
        }
        None => m.set("rl.loss_agg", &[("actor.loss_agg_mode", rl.loss_agg_in_force().name().to_owned())], ""),
    }
    m.set("rl.gamma", &[("algo.advantage.gamma", float(rl.gamma))], "1 with the estimators of groups");
    m.set("rl.gae_lambda", &[("algo.advantage.lambd", float(rl.gae_lambda))], "");
    let reward_clip = if rl.reward_clip > 0.0 { float(rl.reward_clip) } else { NO_LIMIT.to_owned() };
    let range = format!("-{reward_clip} {reward_clip}");
    m.set("rl.reward_clip", &[("reward.clip_range", range)], "0 is a range that is never left");
    m.all_none(&[
        ("rl.advantage_form", "OpenRLHF has advantages and ratios per token"),
        ("rl.whiten_advantages", "OpenRLHF always whitens with `gae` and `reinforce`, as `true` does"),
        ("rl.advantage_clip", "OpenRLHF does not clip advantages"),
        ("rl.normalize_rewards", "OpenRLHF scales scores of its own reward models alone"),
        ("rl.missing_eos_penalty", "OpenRLHF has `reward.stop_properly_penalty_coef`, which is not the same"),
        ("rl.max_drop_rate", "OpenRLHF stops at the first response without a reward"),
        ("rl.record", "OpenRLHF does not keep tokens and advantages"),
        ("rl.anchor_baseline", "a group of OpenRLHF has its samples alone"),
        (
            "rl.dynamic_sampling",
            "OpenRLHF has `algo.dynamic_filtering_enable`, by the mean of a group's rewards, which is not the same",
        ),
        ("rl.max_resampled_batches", "used with `rl.dynamic_sampling` alone"),
        ("rl.importance_cap", "see `algo.advantage.is_correction_level` of OpenRLHF, which is not the same"),
        ("rl.off_by_one", "see `train.async_enable` of OpenRLHF, which is not the same"),
        ("rl.pipeline_parts", "OpenRLHF generates and scores one by one; no result depends on it"),
    ]);
}

fn kl(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.kl_coef", &[("algo.kl.init_coef", float(rl.kl_coef))], "");
    match rl.kl_placement {
        KlPlacement::Loss => m.set("rl.kl_placement", &[("algo.kl.use_loss", String::new())], ""),
        KlPlacement::Reward => m.set("rl.kl_placement", &[], "in the reward without `algo.kl.use_loss`"),
    }
    m.set("rl.kl_estimator", &[("algo.kl.estimator", rl.kl_estimator.name().into())], "");
    m.none("rl.kl_target", "OpenRLHF's adaptive controller has a target per token, not per response");
    m.none("rl.kl_horizon", "used with `rl.kl_target` alone");
    m.none("rl.target_kl", "OpenRLHF does not skip epochs");
}

fn losses(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.clip_range", &[("actor.eps_clip", float(rl.clip_range))], "");
    match rl.clip_range_high {
        Some(high) => {
            let range = format!("{} {}", float(rl.clip_range), float(high));
            m.set("rl.clip_range_high", &[("actor.eps_clip_low_high", range)], "");
        }
        None => m.set("rl.clip_range_high", &[], "without `actor.eps_clip_low_high` both sides have `actor.eps_clip`"),
    }
    match rl.policy_loss {
        PolicyLossKind::Ppo | PolicyLossKind::Gspo => {
            let settings = [("actor.policy_loss_type", rl.policy_loss.name().to_owned())];
            m.set("rl.policy_loss", &settings, "`gspo` averages over the tokens of a response, then over responses");
        }
        PolicyLossKind::Cispo => m.none("rl.policy_loss", "OpenRLHF has `ppo` and `gspo`"),
    }
    let overlong = ["rl.overlong_buffer_len", "rl.overlong_penalty_factor"];
    if rl.overlong_buffer_len > 0 {
        let buffer = [("reward.overlong_buffer_len", rl.overlong_buffer_len.to_string())];
        m.set(overlong[0], &buffer, "");
        m.set(overlong[1], &[("reward.overlong_penalty_factor", float(rl.overlong_penalty_factor))], "");
    } else {
        for key in overlong {
            m.set(key, &[], "without `reward.overlong_buffer_len` there is no penalty, as with 0");
        }
    }
    match rl.dual_clip > 1.0 {
        true => m.set("rl.dual_clip", &[("actor.dual_clip", float(rl.dual_clip))], ""),
        false => m.set("rl.dual_clip", &[], "without `actor.dual_clip` there is no such bound, as with 0"),
    }
    let clip_value = if rl.clip_range_value > 0.0 { float(rl.clip_range_value) } else { NO_LIMIT.to_owned() };
    m.set("rl.clip_range_value", &[("critic.value_clip", clip_value)], "0 is a range that is never left");
    m.none("rl.value_loss", "OpenRLHF's value loss is the square");
    m.none("rl.vf_coef", "the critic of OpenRLHF is a model with an optimizer of its own, which does not see a scale");
    m.none("rl.critic", "OpenRLHF's critic is a model of its own with the settings `ds.lora`");
    match rl.ent_coef > 0.0 {
        true => m.set("rl.ent_coef", &[("actor.entropy_coef", float(rl.ent_coef))], ""),
        false => m.set("rl.ent_coef", &[], "without `actor.entropy_coef` there is no bonus, as with 0"),
    }
}

fn batches(m: &mut Mapping, rl: &RlConfig, sizes: &Sizes) {
    let batch = [("rollout.batch_size", sizes.batch.to_string())];
    m.set("rl.batch_size", &batch, "at most the rows of the training split");
    m.set("rl.n_samples", &[("rollout.n_samples_per_prompt", sizes.n_samples.to_string())], "");
    let mini_batch = [("train.batch_size", sizes.mini_batch.to_string())];
    m.set("rl.mini_batch_size", &mini_batch, "at most the responses of a batch; a multiple of the GPUs");
    m.set("rl.ppo_epochs", &[("train.max_epochs", rl.ppo_epochs.to_string())], "");
    let passes = ["train.micro_batch_size", "rollout.micro_batch_size"];
    m.set_all("rl.gradient_accumulation_steps", &passes, "1", "the result does not depend on it");
    let episodes = [("train.num_episodes", sizes.episodes.to_string())];
    m.set("rl.max_steps", &episodes, "in passes over the training split, rounded up");
    m.set("rl.epochs", &[], "see `rl.max_steps`");
    m.set("rl.critic_warmup_steps", &[("critic.freezing_steps", rl.critic_warmup_steps.to_string())], "");
}

fn sampling(m: &mut Mapping, rl: &RlConfig, sizes: &Sizes) {
    m.set("rl.temperature", &[("rollout.temperature", float(rl.temperature))], "");
    m.set("rl.top_p", &[("rollout.top_p", float(rl.top_p))], "");
    m.set("rl.max_new_tokens", &[("rollout.max_new_tokens", rl.max_new_tokens.to_string())], "");
    m.fixed("data.max_len", sizes.length.to_string());
    for key in ["rl.top_k", "rl.min_new_tokens", "rl.repetition_penalty", "rl.no_repeat_ngram_size", "rl.stop_strings"]
    {
        m.none(key, "OpenRLHF's rollouts have no such setting");
    }
    m.fixed("eval.temperature", "0.0");
    m.fixed("eval.n_samples_per_prompt", "1");
}

fn optimizers(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.learning_rate", &[("actor.adam.lr", float(rl.learning_rate))], "");
    m.set("rl.critic_learning_rate", &[("critic.adam.lr", float(rl.critic_learning_rate))], "");
    let n_warmup = usize::from(rl.warmup_ratio > 0.0);
    m.set("rl.lr_scheduler", &[("actor.lr_scheduler", grpo::schedule(rl.lr_scheduler, n_warmup).into())], "");
    m.fixed("critic.lr_scheduler", "constant");
    m.set("rl.warmup_ratio", &[("actor.lr_warmup_ratio", float(rl.warmup_ratio))], "");
    m.fixed("critic.lr_warmup_ratio", "0.0");
    let decays = ["actor.adam.weight_decay", "critic.adam.weight_decay"];
    m.set_all("rl.weight_decay", &decays, &float(rl.weight_decay), "");
    m.set_all("rl.max_grad_norm", &["actor.max_norm", "critic.max_norm"], &float(rl.max_grad_norm), "");
    // As in querl and transformers; OpenRLHF's default is 0.95.
    for name in ["actor.adam.betas", "critic.adam.betas"] {
        m.fixed(name, "0.9 0.999");
    }
}

fn intervals(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.eval_steps", &[("eval.steps", rl.eval_steps.to_string())], "");
    m.set("rl.save_steps", &[("ckpt.save_steps", rl.save_steps.to_string())], "");
    m.set("rl.save_total_limit", &[("ckpt.max_num", rl.save_total_limit.to_string())], "");
    m.fixed("ckpt.save_hf", "");
    m.none("rl.save_interval_s", "OpenRLHF saves by steps alone");
    m.early_stopping(rl, "OpenRLHF", "");
}

fn model(m: &mut Mapping, run: &ExportedRun) {
    let (rank, alpha) = run.lora();
    let config = &run.config;
    m.set("sft.lora_rank", &[("ds.lora.rank", rank.to_string())], "");
    // OpenRLHF takes an integer.
    m.set("sft.lora_alpha", &[("ds.lora.alpha", format!("{}", alpha.round() as i64))], "");
    m.set("sft.lora_target_modules", &[("ds.lora.target_modules", config.sft.lora_target_modules.join(" "))], "");
    m.none("sft.use_rslora", "OpenRLHF has plain LoRA");
    m.none("sft.use_dora", "OpenRLHF has plain LoRA");
    let dtype = if config.model.dtype == BaseDtype::F16 { "fp16" } else { "bf16" };
    m.set("model.dtype", &[("ds.param_dtype", dtype.into())], "bf16 or fp16");
    match config.model.gradient_checkpointing {
        true => m.set("model.gradient_checkpointing", &[("actor.gradient_checkpointing_enable", String::new())], ""),
        false => m.set("model.gradient_checkpointing", &[], ""),
    }
    m.fixed("ds.attn_implementation", "sdpa");
}

fn notes(run: &ExportedRun, sizes: &Sizes) -> Vec<String> {
    let (config, mut notes) = (&run.config, Vec::new());
    if run.adapter.is_some() {
        notes.push(
            "OpenRLHF begins with a model, not with an adapter: train.sh merges the SFT adapter into the base. What it trains is an adapter of \
             the merged model, which `querl import` cannot bring back to the run"
                .to_owned(),
        );
    }
    notes.extend(run.batch_note("OpenRLHF").into_iter().chain(run.mini_batch_note(sizes.mini_batch)));
    if let (LossAgg::Algorithm, Some((note, _))) = (config.rl.loss_agg, lost_average(&config.rl)) {
        notes.push(format!("the average of losses that rl.algorithm has is another one there: {note}"));
    }
    notes.extend(run.alpha_note("OpenRLHF"));
    if !matches!(config.model.dtype, BaseDtype::Bf16 | BaseDtype::F16) {
        notes.push(format!("weights are bf16 in place of {}", config.model.dtype.name()));
    }
    notes.push("a response whose retrieval or judge failed ends the training; ./reward.sh --rejected_reward NUMBER gives it a reward".to_owned());
    notes.push("OpenRLHF sends no finish reason: responses count as complete".to_owned());
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::mapping::assert_has_rl_keys_once;
    use crate::exchange::source::testing::run;

    fn mapped(run: &ExportedRun) -> Mapping {
        mapping(run, &Sizes::of(run)).unwrap()
    }

    #[test]
    fn every_key_of_rl_is_in_the_table_once() {
        assert_has_rl_keys_once(&mapped(&run("")));
    }

    #[test]
    fn ppo_has_gae_and_kl_in_the_reward() {
        let mapping = mapped(&run("[rl]\nbatch_size = 4\nmini_batch_size = 2\nn_samples = 2\nmax_steps = 10\n"));
        let value = |name: &str| mapping.value(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!((value("algo.advantage.estimator"), value("algo.kl.estimator")), ("gae", "k1"));
        assert_eq!(mapping.value("algo.kl.use_loss"), None);
        assert_eq!((value("rollout.batch_size"), value("train.batch_size")), ("4", "2"));
        // Ten batches of four of eight rows.
        assert_eq!((value("train.num_episodes"), value("reward.clip_range")), ("5", "-1000000.0 1000000.0"));
        // A prompt of 100 tokens and 150 new ones.
        assert_eq!(value("data.max_len"), "278");
        assert!(mapping.without_equivalent().is_empty());
    }

    #[test]
    fn clip_higher_gspo_and_the_overlong_penalty_have_equivalents() {
        let text = "[rl]\nalgorithm = \"grpo\"\nn_samples = 4\nclip_range_high = 0.28\npolicy_loss = \"gspo\"\noverlong_buffer_len = 20\n";
        let mapping = mapped(&run(text));
        let value = |name: &str| mapping.value(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!((value("actor.eps_clip_low_high"), value("actor.policy_loss_type")), ("0.2 0.28", "gspo"));
        assert_eq!((value("reward.overlong_buffer_len"), value("reward.overlong_penalty_factor")), ("20", "1.0"));
        assert_eq!(value("actor.loss_agg_mode"), "seq-mean-token-mean");
        assert!(mapping.without_equivalent().is_empty());
        let sum = mapped(&run("[rl]\nloss_agg = \"seq-mean-token-sum\"\n"));
        assert_eq!(sum.value("actor.loss_agg_mode"), Some("token-mean"));
        let lost = sum.without_equivalent();
        assert!(lost.len() == 1, "{lost:?}");
        assert!(lost[0].starts_with("rl.loss_agg = \"seq-mean-token-sum\": OpenRLHF has"), "{lost:?}");
    }

    #[test]
    fn the_sum_of_dr_grpo_and_other_averages_of_gspo_are_lost() {
        let with = |text: &str| run(&format!("[rl]\nn_samples = 4\n{text}"));
        let dr_grpo = with("algorithm = \"dr_grpo\"\n");
        assert_eq!(mapped(&dr_grpo).value("actor.loss_agg_mode"), Some("token-mean"));
        let notes = notes(&dr_grpo, &Sizes::of(&dr_grpo));
        assert!(notes.iter().any(|note| note.starts_with("the average of losses that rl.algorithm has")), "{notes:?}");
        let gspo = mapped(&with("algorithm = \"grpo\"\npolicy_loss = \"gspo\"\nloss_agg = \"token-mean\"\n"));
        assert_eq!(gspo.value("actor.loss_agg_mode"), Some("seq-mean-token-mean"));
        assert_eq!(gspo.without_equivalent().len(), 1);
    }

    #[test]
    fn flags_have_no_value() {
        let mapping =
            mapped(&run("[rl]\nalgorithm = \"grpo\"\nn_samples = 4\nkl_placement = \"loss\"\nent_coef = 0.0\n"));
        assert_eq!(mapping.value("algo.kl.use_loss"), Some(""));
        assert!(argument_lines(mapping.settings()).contains("    --algo.kl.use_loss \\\n"));
        assert!(mapping.to_markdown("OpenRLHF").contains("| `rl.kl_placement` | `\"loss\"` | `algo.kl.use_loss` |"));
        assert_eq!((mapping.value("actor.entropy_coef"), mapping.value("actor.dual_clip")), (None, None));
    }

    #[test]
    fn what_a_run_loses_is_said() {
        let run = run("[rl]\ntop_k = 20\nbatch_size = 64\nmini_batch_size = 16\n");
        assert_eq!(mapped(&run).without_equivalent(), ["rl.top_k = 20: OpenRLHF's rollouts have no such setting"]);
        let notes = notes(&run, &Sizes::of(&run));
        let expected = "rl.batch_size is 64, and a batch of OpenRLHF has at most the 8 rows of the training split";
        assert!(notes.iter().any(|note| note == expected), "{notes:?}");
        assert!(notes.iter().any(|note| note.starts_with("an optimizer step has 8 responses")), "{notes:?}");
    }
}
