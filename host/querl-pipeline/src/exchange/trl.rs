//! Export of a run to the `GRPOTrainer` of TRL.
//!
//! Names of arguments: `trl/trainer/grpo_config.py` of TRL 1.16.0 and `TrainingArguments` of transformers.

use super::folder::{EngineFiles, Exported, HERE, RewardProcesses, TRAIN, plain, write_rows, write_shared};
use super::grpo::{self, GrpoSizes};
use super::mapping::{Mapping, flag, float};
use super::rows::PromptRow;
use super::source::ExportedRun;
use crate::serving::BaseFiles;
use querl_core::config::{BaseDtype, KlEstimator, KlPlacement, RlAlgorithm, RlConfig};
use std::fmt::Write;
use std::path::Path;

/// Writes a folder from which TRL trains the run.
///
/// # Errors
/// A plugin is not the one of the run, or a file cannot be read or written.
pub fn export_trl(run: &ExportedRun, base: BaseFiles, out: &Path) -> anyhow::Result<Exported> {
    let reward = RewardProcesses { n_processes: 1, rows: TRAIN };
    let shared = write_shared(run, base, &reward, out)?;
    write_rows(run, out, PromptRow::clone)?;
    let model = plain(&shared.model)?.to_owned();
    let sizes = GrpoSizes::of(run);
    let mapping = mapping(run, &sizes)?;
    let python_model = match model.strip_prefix(HERE) {
        Some(rest) => format!("str(HERE) + \"{rest}\""),
        None => format!("\"{model}\""),
    };
    let (arguments, lora) = (python_lines(mapping.settings()), lora(run));
    let values = [
        ("@ARGUMENTS@", arguments.as_str()),
        ("@LORA@", lora.as_str()),
        ("@DTYPE@", grpo::dtype(run.config.model.dtype)),
        ("@MODEL@", python_model.as_str()),
    ];
    let notes = notes(run, &sizes);
    let files = EngineFiles { engine: "GRPOConfig", mapping: &mapping, notes, templates: &FILES, values: &values };
    files.write(run, shared, out)
}

const FILES: [(&str, &str); 4] = [
    ("README.md", include_str!("files/trl/README.md")),
    ("grpo.py", include_str!("files/trl/grpo.py.template")),
    ("mapping.md", include_str!("files/trl/mapping.md")),
    ("requirements.txt", include_str!("files/trl/requirements.txt")),
];

fn mapping(run: &ExportedRun, sizes: &GrpoSizes) -> anyhow::Result<Mapping> {
    let mut mapping = Mapping::of(&run.config)?;
    let rl = &run.config.rl;
    algorithm(&mut mapping, rl);
    kl(&mut mapping, rl);
    let mini_batch = [
        ("per_device_train_batch_size", sizes.pass.to_string()),
        ("gradient_accumulation_steps", (sizes.mini_batch / sizes.pass).to_string()),
    ];
    let note = "the product of both is an optimizer step, a divisor of the batch";
    grpo::batches(&mut mapping, rl, sizes, (&mini_batch, note));
    sampling(&mut mapping, rl);
    grpo::optimizer(&mut mapping, rl, sizes, text);
    grpo::intervals(&mut mapping, rl, sizes);
    mapping.early_stopping(rl, "TRL", "; add EarlyStoppingCallback of transformers");
    mapping.fixed("logging_steps", "1");
    mapping.fixed("report_to", text("none"));
    let config = &run.config;
    if let Some(enable_thinking) = config.model.enable_thinking {
        let variables = format!("{{\"enable_thinking\": {}}}", flag(enable_thinking));
        mapping.set("model.enable_thinking", &[("chat_template_kwargs", variables)], "");
    }
    mapping.set("seed", &[("seed", config.seed.to_string())], "");
    let checkpointing = flag(config.model.gradient_checkpointing);
    mapping.set("model.gradient_checkpointing", &[("gradient_checkpointing", checkpointing)], "");
    mapping.fixed("bf16", flag(config.model.dtype == BaseDtype::Bf16));
    mapping.fixed("disable_dropout", flag(true));
    mapping.reward("rl.episode_deadline_ms");
    Ok(mapping)
}

fn text(value: &str) -> String {
    format!("\"{value}\"")
}

fn algorithm(m: &mut Mapping, rl: &RlConfig) {
    let (loss_type, scale, is_replaced) = match rl.algorithm {
        RlAlgorithm::Grpo => ("grpo", "group", false),
        RlAlgorithm::DrGrpo => ("dr_grpo", "none", false),
        RlAlgorithm::Ppo | RlAlgorithm::Rloo | RlAlgorithm::ReinforcePlusPlus | RlAlgorithm::Raft => {
            ("grpo", "group", true)
        }
    };
    if is_replaced {
        m.none("rl.algorithm", "GRPOTrainer has no critic and no other baseline: GRPO takes its place");
        m.fixed("scale_rewards", text(scale));
    } else {
        m.set("rl.algorithm", &[("scale_rewards", text(scale))], "");
    }
    grpo::set_loss_type(m, rl, loss_type, text);
    grpo::set_ratios(m, rl, text);
    grpo::without_equivalent(m, "TRL");
    m.none("rl.dynamic_sampling", "TRL does not replace groups");
    m.none("rl.max_resampled_batches", "used with `rl.dynamic_sampling` alone");
    m.none("rl.overlong_buffer_len", "TRL has it as a reward function, `get_soft_overlong_punishment`");
    m.none("rl.missing_eos_penalty", "TRL has `mask_truncated_completions`, which is not the same");
    let delta = if rl.dual_clip > 1.0 { float(rl.dual_clip) } else { "None".into() };
    m.set("rl.dual_clip", &[("delta", delta)], "");
}

fn kl(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.kl_coef", &[("beta", float(rl.kl_coef))], "in the loss, with the estimator k3");
    match rl.kl_placement {
        KlPlacement::Loss => m.set("rl.kl_placement", &[], "TRL has it in the loss"),
        KlPlacement::Reward => m.none("rl.kl_placement", "TRL has it in the loss"),
    }
    match rl.kl_estimator {
        KlEstimator::K3 => m.set("rl.kl_estimator", &[], "TRL has k3"),
        KlEstimator::K1 | KlEstimator::K2 => m.none("rl.kl_estimator", "TRL has k3"),
    }
}

fn sampling(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.temperature", &[("temperature", float(rl.temperature))], "");
    m.set("rl.top_p", &[("top_p", float(rl.top_p))], "");
    m.set("rl.top_k", &[("top_k", rl.top_k.to_string())], "");
    m.set("rl.max_new_tokens", &[("max_completion_length", rl.max_new_tokens.to_string())], "");
    let penalty = [("repetition_penalty", float(rl.repetition_penalty))];
    m.set("rl.repetition_penalty", &penalty, "transformers counts tokens of the prompt too");
    let (least, size) = (rl.min_new_tokens, rl.no_repeat_ngram_size);
    let generation = format!("{{\"min_new_tokens\": {least}, \"no_repeat_ngram_size\": {size}}}");
    let generation = if (least, size) == (0, 0) { "None".to_owned() } else { generation };
    m.set("rl.min_new_tokens", &[("generation_kwargs", generation)], "");
    m.set("rl.no_repeat_ngram_size", &[], "in `generation_kwargs`; transformers counts n-grams of the prompt too");
    m.none("rl.stop_strings", "TRL does not pass its tokenizer to generation, which stop strings need");
}

/// Arguments of a new adapter, if there is no SFT adapter.
fn lora(run: &ExportedRun) -> String {
    let (rank, alpha) = run.lora();
    let sft = &run.config.sft;
    let targets = match sft.lora_target_modules.as_slice() {
        [all] if all == "all-linear" => text(all),
        names => format!("[{}]", names.iter().map(|name| text(name)).collect::<Vec<_>>().join(", ")),
    };
    let settings = [
        ("r", rank.to_string()),
        ("lora_alpha", float(alpha)),
        ("target_modules", targets),
        ("use_rslora", flag(sft.use_rslora)),
        ("use_dora", flag(sft.use_dora)),
    ];
    python_lines(&settings.map(|(name, value)| (name.to_owned(), value)))
}

/// Keyword arguments, one per line.
fn python_lines(settings: &[(String, String)]) -> String {
    let mut lines = String::new();
    for (name, value) in settings {
        let _ = writeln!(lines, "    {name}={value},");
    }
    lines
}

fn notes(run: &ExportedRun, sizes: &GrpoSizes) -> Vec<String> {
    let (rl, mut notes) = (&run.config.rl, Vec::new());
    // Other algorithms are listed with the keys without an equivalent; keys at their default are not listed.
    if rl.algorithm == RlAlgorithm::Ppo {
        notes.push("rl.algorithm is replaced by GRPO, which is what grpo.py trains with".to_owned());
    }
    notes.extend(sizes.notes(run, "TRL"));
    if rl.kl_coef > 0.0 && (rl.kl_placement, rl.kl_estimator) != (KlPlacement::Loss, KlEstimator::K3) {
        notes.push("the KL to the reference is in the loss, with the estimator k3".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::mapping::assert_has_rl_keys_once;
    use crate::exchange::source::testing::run;

    fn mapped(run: &ExportedRun) -> Mapping {
        mapping(run, &GrpoSizes::of(run)).unwrap()
    }

    #[test]
    fn every_key_of_rl_is_in_the_table_once() {
        assert_has_rl_keys_once(&mapped(&run("")));
    }

    #[test]
    fn steps_are_counted_in_updates_and_sizes_divide_each_other() {
        let text = "[rl]\nalgorithm = \"grpo\"\nbatch_size = 4\nn_samples = 3\nmini_batch_size = 5\nppo_epochs = 2\nmax_steps = 10\n\
                    gradient_accumulation_steps = 2\nwarmup_ratio = 0.1\n";
        let mapping = mapped(&run(text));
        let value = |name: &str| mapping.value(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(value("generation_batch_size"), "12");
        // 4 is the largest divisor of 12 up to 5: three updates per epoch.
        assert_eq!((value("per_device_train_batch_size"), value("gradient_accumulation_steps")), ("2", "2"));
        assert_eq!((value("max_steps"), value("warmup_steps")), ("60", "6"));
        assert_eq!(value("lr_scheduler_type"), "\"constant_with_warmup\"");
        assert_eq!((value("loss_type"), value("scale_rewards")), ("\"grpo\"", "\"group\""));
    }

    /// Regression: TRL dropped the only batch, which was incomplete, and trained nothing.
    #[test]
    fn a_batch_has_at_most_the_rows_of_the_training_split() {
        let run = run("[rl]\nalgorithm = \"grpo\"\nbatch_size = 64\nn_samples = 2\nmini_batch_size = 16\n");
        assert_eq!(mapped(&run).value("generation_batch_size"), Some("16"));
        let notes = notes(&run, &GrpoSizes::of(&run));
        let expected = "rl.batch_size is 64, and a batch of TRL has at most the 8 rows of the training split";
        assert!(notes.iter().any(|note| note == expected), "{notes:?}");
    }

    #[test]
    fn what_ppo_loses_is_said() {
        let run = run("[rl]\ngamma = 0.9\n");
        assert_eq!(mapped(&run).without_equivalent(), ["rl.gamma = 0.9: GRPO has no discount"]);
        let notes = notes(&run, &GrpoSizes::of(&run));
        assert!(notes[0].starts_with("rl.algorithm is replaced by GRPO"), "{notes:?}");
        assert!(notes[1].starts_with("rl.n_samples is 1"), "{notes:?}");
    }

    #[test]
    fn an_algorithm_that_is_replaced_has_no_equivalent() {
        let mapping = mapped(&run("[rl]\nalgorithm = \"rloo\"\nn_samples = 4\n"));
        let lost = mapping.without_equivalent();
        assert!(lost.len() == 1 && lost[0].starts_with("rl.algorithm = \"rloo\": GRPOTrainer has"), "{lost:?}");
        let run = run("[rl]\nalgorithm = \"rloo\"\nn_samples = 4\n");
        let notes = notes(&run, &GrpoSizes::of(&run));
        assert!(notes.iter().all(|note| !note.contains("rl.algorithm")), "said once: {notes:?}");
        assert_eq!((mapping.value("scale_rewards"), mapping.value("loss_type")), (Some("\"group\""), Some("\"grpo\"")));
    }

    #[test]
    fn thinking_is_a_variable_of_the_chat_template_where_it_is_set() {
        let mut run = run("[rl]\nalgorithm = \"grpo\"\nn_samples = 2\n");
        assert_eq!(mapped(&run).value("chat_template_kwargs"), None);
        run.config.model.enable_thinking = Some(true);
        assert_eq!(mapped(&run).value("chat_template_kwargs"), Some("{\"enable_thinking\": True}"));
    }

    #[test]
    fn clip_higher_gspo_and_cispo_are_arguments() {
        let with = |settings: &str| mapped(&run(&format!("[rl]\nalgorithm = \"grpo\"\nn_samples = 4\n{settings}")));
        let gspo = with("policy_loss = \"gspo\"\nclip_range_high = 0.28\n");
        assert_eq!(gspo.value("importance_sampling_level"), Some("\"sequence\""));
        assert_eq!((gspo.value("epsilon_high"), gspo.value("loss_type")), (Some("0.28"), Some("\"grpo\"")));
        assert!(gspo.without_equivalent().is_empty());
        let cispo = with("policy_loss = \"cispo\"\nclip_range = 0.3\nclip_range_high = 4.0\n");
        assert_eq!((cispo.value("epsilon_high"), cispo.value("loss_type")), (Some("5.0"), Some("\"cispo\"")));
        let lost = "rl.clip_range = 0.3: `cispo` has no lower bound there, as from 1 on";
        assert_eq!(cispo.without_equivalent(), [lost]);
        assert!(with("policy_loss = \"cispo\"\nclip_range = 1.0\n").without_equivalent().is_empty());
        assert_eq!(with("loss_agg = \"token-mean\"\n").value("loss_type"), Some("\"dapo\""));
        let sum = with("loss_agg = \"seq-mean-token-sum\"\n");
        assert_eq!(sum.value("loss_type"), Some("\"grpo\""));
        assert_eq!(sum.without_equivalent().len(), 1);
    }

    #[test]
    fn arguments_are_python() {
        let settings = [("a".to_owned(), "1e-5".to_owned()), ("b".to_owned(), text("x"))];
        assert_eq!(python_lines(&settings), "    a=1e-5,\n    b=\"x\",\n");
    }
}
