//! Export of a run to the GRPO trainer of ms-swift.
//!
//! Names of arguments: `swift/arguments/rlhf_args.py`, `swift/rlhf_trainers/args_mixin.py` and `swift/arguments/tuner_args.py` of ms-swift 4.6.

use super::folder::{
    EngineFiles, Exported, HERE, RewardProcesses, TRAIN, argument_lines, plain, shell_word, write_rows, write_shared,
};
use super::grpo::{self, GrpoSizes};
use super::mapping::{Mapping, float};
use super::rows::PromptRow;
use super::source::ExportedRun;
use crate::serving::BaseFiles;
use querl_core::config::{KlEstimator, KlPlacement, RlAlgorithm, RlConfig};
use querl_core::records::Message;
use querl_model::Family;
use serde::Serialize;
use std::path::Path;

/// Writes a folder from which ms-swift trains the run.
///
/// # Errors
/// A plugin is not the one of the run, or a file cannot be read or written.
pub fn export_swift(run: &ExportedRun, base: BaseFiles, out: &Path) -> anyhow::Result<Exported> {
    let reward = RewardProcesses { n_processes: 1, rows: TRAIN };
    let shared = write_shared(run, base, &reward, out)?;
    let row = |row: &PromptRow| SwiftRow { messages: row.prompt.clone(), querl: row.querl.clone() };
    write_rows(run, out, row)?;
    let model = plain(&shared.model)?.replace(HERE, "$HERE");
    let sizes = GrpoSizes::of(run);
    let mapping = mapping(run, &sizes)?;
    let accumulation = (sizes.mini_batch / sizes.pass).to_string();
    let settings = argument_lines(mapping.settings());
    let values =
        [("@ACCUMULATION@", accumulation.as_str()), ("@SETTINGS@", settings.as_str()), ("@MODEL@", model.as_str())];
    let notes = notes(run, &sizes);
    let files = EngineFiles { engine: "ms-swift", mapping: &mapping, notes, templates: &FILES, values: &values };
    files.write(run, shared, out)
}

/// A row without the response of the assistant, which ms-swift generates.
#[derive(Serialize)]
struct SwiftRow {
    messages: Vec<Message>,
    querl: String,
}

const FILES: [(&str, &str); 5] = [
    ("README.md", include_str!("files/swift/README.md")),
    ("mapping.md", include_str!("files/swift/mapping.md")),
    ("plugin.py", include_str!("files/swift/plugin.py.template")),
    ("requirements.txt", include_str!("files/swift/requirements.txt")),
    ("train.sh", include_str!("files/swift/train.sh")),
];

fn mapping(run: &ExportedRun, sizes: &GrpoSizes) -> anyhow::Result<Mapping> {
    let mut mapping = Mapping::of(&run.config)?;
    let rl = &run.config.rl;
    algorithm(&mut mapping, rl);
    kl(&mut mapping, rl);
    let pass = [("per_device_train_batch_size", sizes.pass.to_string())];
    let note = "times `gradient_accumulation_steps`, which train.sh divides over the GPUs: a divisor of the batch";
    grpo::batches(&mut mapping, rl, sizes, (&pass, note));
    sampling(&mut mapping, rl);
    grpo::optimizer(&mut mapping, rl, sizes, str::to_owned);
    // As in querl and transformers; ms-swift's default is 0.95.
    mapping.fixed("adam_beta2", "0.999");
    grpo::intervals(&mut mapping, rl, sizes);
    mapping.early_stopping(rl, "ms-swift", "; see its `early_stop_interval`");
    mapping.fixed("logging_steps", "1");
    mapping.fixed("report_to", "none");
    lora(&mut mapping, run);
    model(&mut mapping, run);
    let config = &run.config;
    let seed = config.seed.to_string();
    mapping.set("seed", &[("seed", seed.clone()), ("data_seed", seed)], "");
    let checkpointing = config.model.gradient_checkpointing.to_string();
    mapping.set("model.gradient_checkpointing", &[("gradient_checkpointing", checkpointing)], "");
    mapping.set("model.dtype", &[("torch_dtype", grpo::dtype(config.model.dtype).into())], "");
    mapping.reward("rl.episode_deadline_ms");
    Ok(mapping)
}

fn algorithm(m: &mut Mapping, rl: &RlConfig) {
    let (estimator, loss, scale, note) = match rl.algorithm {
        RlAlgorithm::Grpo => ("grpo", "grpo", "group", ""),
        RlAlgorithm::DrGrpo => ("grpo", "dr_grpo", "none", ""),
        RlAlgorithm::Rloo => ("rloo", "dapo", "none", ""),
        RlAlgorithm::ReinforcePlusPlus => ("reinforce_plus_plus", "dapo", "batch", ""),
        RlAlgorithm::Ppo => ("grpo", "grpo", "group", "GRPO has no critic: it takes the place of PPO"),
        RlAlgorithm::Raft => ("grpo", "grpo", "group", "ms-swift has no RAFT: GRPO takes its place"),
    };
    let settings = [("advantage_estimator", estimator), ("scale_rewards", scale)];
    let settings = settings.map(|(name, value)| (name, value.to_owned()));
    if note.is_empty() {
        m.set("rl.algorithm", &settings, "");
    } else {
        m.none("rl.algorithm", note);
        settings.into_iter().for_each(|(name, value)| m.fixed(name, value));
    }
    grpo::set_loss_type(m, rl, loss, str::to_owned);
    grpo::set_ratios(m, rl, str::to_owned);
    grpo::without_equivalent(m, "ms-swift");
    m.set("rl.dynamic_sampling", &[("dynamic_sample", rl.dynamic_sampling.to_string())], "");
    m.set("rl.max_resampled_batches", &[("max_resample_times", rl.max_resampled_batches.to_string())], "");
    m.none("rl.overlong_buffer_len", "ms-swift has it as the reward function `soft_overlong`");
    m.none("rl.missing_eos_penalty", "ms-swift has `overlong_filter`, which is not the same");
    match rl.dual_clip > 1.0 {
        true => m.set("rl.dual_clip", &[("delta", float(rl.dual_clip))], ""),
        false => m.set("rl.dual_clip", &[], "without `delta` there is no such bound, as with 0"),
    }
}

fn kl(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.kl_coef", &[("beta", float(rl.kl_coef))], "");
    let in_reward = rl.kl_placement == KlPlacement::Reward;
    m.set("rl.kl_placement", &[("kl_in_reward", in_reward.to_string())], "");
    match (rl.kl_estimator, in_reward) {
        (KlEstimator::K3, false) => m.set("rl.kl_estimator", &[], "ms-swift has k3 in the loss"),
        (KlEstimator::K1, true) => m.set("rl.kl_estimator", &[], "ms-swift has k1 in the reward, summed over tokens"),
        _ => m.none("rl.kl_estimator", "ms-swift has k3 in the loss and k1 in the reward"),
    }
}

fn sampling(m: &mut Mapping, rl: &RlConfig) {
    m.set("rl.temperature", &[("temperature", float(rl.temperature))], "");
    m.set("rl.top_p", &[("top_p", float(rl.top_p))], "");
    let top_k = if rl.top_k == 0 { "-1".to_owned() } else { rl.top_k.to_string() };
    m.set("rl.top_k", &[("top_k", top_k)], "-1 disables it");
    m.set("rl.max_new_tokens", &[("max_completion_length", rl.max_new_tokens.to_string())], "");
    let penalty = [("repetition_penalty", float(rl.repetition_penalty))];
    m.set("rl.repetition_penalty", &penalty, "tokens of the prompt count too");
    let stops: Vec<String> = rl.stop_strings.iter().map(|text| shell_word(text)).collect();
    match stops.is_empty() {
        true => m.set("rl.stop_strings", &[], ""),
        false => m.set("rl.stop_strings", &[("stop_words", stops.join(" "))], ""),
    }
    for key in ["rl.min_new_tokens", "rl.no_repeat_ngram_size"] {
        m.none(key, "GRPO of ms-swift has no such setting");
    }
}

/// Adds the names by which ms-swift knows the model and its template, and how its prompts end.
fn model(m: &mut Mapping, run: &ExportedRun) {
    let names = ModelNames::of(run);
    if let Some(ModelNames { model_type, template, .. }) = names {
        m.fixed("model_type", model_type);
        m.fixed("template", template);
    }
    let enable_thinking = names.and_then(|names| names.enable_thinking).or(run.config.model.enable_thinking);
    if let Some(enable_thinking) = enable_thinking {
        let note = "with true, no empty thinking block ends the prompt; ms-swift's default for Qwen3 is false";
        m.set("model.enable_thinking", &[("enable_thinking", enable_thinking.to_string())], note);
    }
}

/// A template of ms-swift that writes the prompts of the tokenizer's chat template.
#[derive(Clone, Copy)]
struct ModelNames {
    model_type: &'static str,
    template: &'static str,
    /// The setting with which the template ends a prompt as the tokenizer's does; `None` for a template without thinking.
    enable_thinking: Option<bool>,
}

/// The system message that a template of ms-swift adds to a conversation without one (`swift/template/templates/qwen.py`).
const DEFAULT_SYSTEMS: [(&str, &str); 2] = [
    ("qwen2_5", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    ("qwen", "You are a helpful assistant."),
];
const EMPTY_THINKING: &str = "<think>\n\n</think>\n\n";

impl ModelNames {
    /// The names for a Qwen2 or Qwen3 whose prompts are those of a template of ms-swift, as a rendered prompt shows; `None` for others,
    /// such as Llama, for whose architecture ms-swift has several types and templates.
    fn of(run: &ExportedRun) -> Option<Self> {
        let message = |role: &str| Message { role: role.into(), content: "1".into() };
        let turn = |role: &str| format!("<|im_start|>{role}\n1<|im_end|>\n");
        let (system, user, start) = (turn("system"), turn("user"), "<|im_start|>assistant\n");
        let with_system = run.tokenizer.render_prompt(&[message("system"), message("user")]).ok()?;
        let alone = run.tokenizer.render_prompt(&[message("user")]).ok()?;
        let end = with_system.strip_prefix(&format!("{system}{user}{start}"))?;
        match run.family? {
            Family::Qwen3 => {
                let is_alike = alone == format!("{user}{start}{end}");
                let (template, enable_thinking) = match end {
                    "" => ("qwen3", true),
                    EMPTY_THINKING => ("qwen3", false),
                    "<think>\n" => ("qwen3_thinking", true),
                    _ => return None,
                };
                let enable_thinking = Some(enable_thinking);
                is_alike.then_some(Self { model_type: "qwen3", template, enable_thinking })
            }
            Family::Qwen2 if end.is_empty() => {
                let is_default = |text: &str| alone == format!("<|im_start|>system\n{text}<|im_end|>\n{user}{start}");
                let (template, _) = DEFAULT_SYSTEMS.into_iter().find(|&(_, text)| is_default(text))?;
                Some(Self { model_type: "qwen2", template, enable_thinking: None })
            }
            Family::Qwen2 | Family::Llama | Family::Mistral => None,
        }
    }
}

/// Adds the LoRA settings of a new adapter; an SFT adapter has its own settings.
fn lora(m: &mut Mapping, run: &ExportedRun) {
    let (rank, alpha) = run.lora();
    let sft = &run.config.sft;
    m.fixed("tuner_type", "lora");
    m.set("sft.lora_rank", &[("lora_rank", rank.to_string())], "");
    // ms-swift takes an integer.
    m.set("sft.lora_alpha", &[("lora_alpha", format!("{}", alpha.round() as i64))], "");
    m.set("sft.lora_target_modules", &[("target_modules", sft.lora_target_modules.join(" "))], "");
    m.set("sft.use_rslora", &[("use_rslora", sft.use_rslora.to_string())], "");
    m.set("sft.use_dora", &[("use_dora", sft.use_dora.to_string())], "");
    m.fixed("lora_dropout", "0");
}

fn notes(run: &ExportedRun, sizes: &GrpoSizes) -> Vec<String> {
    let mut notes = Vec::new();
    // RAFT is listed with the keys without an equivalent; keys at their default are not listed.
    if run.config.rl.algorithm == RlAlgorithm::Ppo {
        notes.push("rl.algorithm is replaced by GRPO, which is what train.sh trains with".to_owned());
    }
    notes.extend(sizes.notes(run, "ms-swift"));
    if run.adapter.is_none() {
        notes.extend(run.alpha_note("ms-swift"));
    }
    notes.push(match ModelNames::of(run) {
        Some(ModelNames { template, .. }) => {
            format!("prompts are written with ms-swift's template `{template}`, as the tokenizer's writes them")
        }
        None => "prompts are written with ms-swift's template that `--template` names: choose one that writes those of the tokenizer's"
            .to_owned(),
    });
    notes.push("a rejected response gets the mean of its group, so that its advantage is 0".to_owned());
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::mapping::assert_has_rl_keys_once;
    use crate::exchange::source::testing::{run, tokenizer_with};

    fn mapped(run: &ExportedRun) -> Mapping {
        mapping(run, &GrpoSizes::of(run)).unwrap()
    }

    #[test]
    fn every_key_of_rl_is_in_the_table_once() {
        assert_has_rl_keys_once(&mapped(&run("")));
    }

    #[test]
    fn settings_are_those_of_the_run() {
        let text = "[rl]\nalgorithm = \"grpo\"\nbatch_size = 4\nn_samples = 3\nmini_batch_size = 5\nppo_epochs = 2\nmax_steps = 10\n\
                    gradient_accumulation_steps = 2\nkl_placement = \"loss\"\nkl_estimator = \"k3\"\ndual_clip = 3.0\n\
                    stop_strings = [\"it's\", \"</s>\"]\n";
        let mapping = mapped(&run(text));
        let value = |name: &str| mapping.value(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!((value("generation_batch_size"), value("per_device_train_batch_size")), ("12", "2"));
        assert_eq!((value("max_steps"), value("num_iterations"), value("top_k")), ("60", "2", "-1"));
        assert_eq!((value("kl_in_reward"), value("delta"), value("loss_type")), ("false", "3.0", "grpo"));
        assert_eq!(value("stop_words"), "$'it\\'s' '</s>'");
        assert!(mapping.without_equivalent().is_empty());
    }

    /// Symptom: ms-swift ended the prompts of Qwen3 with an empty thinking block, with which the exported adapter was not trained; and
    /// without the names it did not start.
    #[test]
    fn names_and_thinking_follow_from_a_rendered_prompt() {
        let mut run = run("");
        let names = |run: &ExportedRun| {
            let mapping = mapped(run);
            ["model_type", "template", "enable_thinking"].map(|name| mapping.value(name).unwrap_or("").to_owned())
        };
        let last_note = |run: &ExportedRun| notes(run, &GrpoSizes::of(run)).into_iter().nth_back(1).unwrap();
        // The template of the example does not read the variable.
        assert_eq!(names(&run), ["qwen3", "qwen3", "true"]);
        assert!(last_note(&run).contains("ms-swift's template `qwen3`, as the tokenizer's"), "{}", last_note(&run));
        run.tokenizer = tokenizer_with(include_str!("../../../../tests/reference/qwen3.jinja"));
        assert_eq!(names(&run), ["qwen3", "qwen3", "true"]);
        let chatml = |start: &str, end: &str| {
            let turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
            let generation = "{% if add_generation_prompt %}<|im_start|>assistant\n";
            tokenizer_with(&[start, turns, generation, end, "{% endif %}"].concat())
        };
        run.tokenizer = chatml("", "<think>\n\n</think>\n\n");
        assert_eq!(names(&run), ["qwen3", "qwen3", "false"]);
        run.tokenizer = chatml("", "<think>\n");
        assert_eq!(names(&run), ["qwen3", "qwen3_thinking", "true"]);

        run.family = Some(Family::Qwen2);
        let default = |text: &str| {
            let system = format!("<|im_start|>system\n{text}<|im_end|>\n");
            chatml(&["{% if messages[0].role != 'system' %}", &system, "{% endif %}"].concat(), "")
        };
        run.tokenizer = default("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
        assert_eq!(names(&run), ["qwen2", "qwen2_5", ""]);
        run.tokenizer = default("You are a helpful assistant.");
        assert_eq!(names(&run), ["qwen2", "qwen", ""]);

        // Prompts of no template of ms-swift, and an architecture with several types of models.
        run.tokenizer = default("You are another assistant.");
        assert_eq!(names(&run), ["", "", ""]);
        assert!(last_note(&run).contains("that `--template` names"), "{}", last_note(&run));
        (run.family, run.tokenizer) = (Some(Family::Llama), chatml("", ""));
        run.config.model.enable_thinking = Some(false);
        assert_eq!(names(&run), ["", "", "false"]);
    }

    #[test]
    fn groups_without_variance_are_sampled_again() {
        let text = "[rl]\nalgorithm = \"grpo\"\nn_samples = 4\nkl_placement = \"loss\"\nkl_estimator = \"k3\"\ndynamic_sampling = true\n\
                    max_resampled_batches = 5\nclip_range_high = 0.28\nloss_agg = \"token-mean\"\n";
        let mapping = mapped(&run(text));
        let value = |name: &str| mapping.value(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!((value("dynamic_sample"), value("max_resample_times")), ("true", "5"));
        assert_eq!((value("epsilon_high"), value("loss_type")), ("0.28", "dapo"));
        assert_eq!(value("importance_sampling_level"), "token");
        assert!(mapping.without_equivalent().is_empty());
    }

    #[test]
    fn baselines_are_arguments_and_raft_is_replaced() {
        let with = |algorithm: &str| mapped(&run(&format!("[rl]\nalgorithm = \"{algorithm}\"\nn_samples = 4\n")));
        let rloo = with("rloo");
        assert_eq!((rloo.value("advantage_estimator"), rloo.value("loss_type")), (Some("rloo"), Some("dapo")));
        assert!(rloo.without_equivalent().is_empty());
        let raft = with("raft");
        assert_eq!((raft.value("advantage_estimator"), raft.value("loss_type")), (Some("grpo"), Some("grpo")));
        let lost = "rl.algorithm = \"raft\": ms-swift has no RAFT: GRPO takes its place";
        assert_eq!(raft.without_equivalent(), [lost]);
    }

    #[test]
    fn what_has_no_equivalent_is_said() {
        let run = run("[rl]\nkl_estimator = \"k2\"\nmin_new_tokens = 2\n");
        let lost = mapped(&run).without_equivalent();
        assert_eq!(lost.len(), 2, "{lost:?}");
        assert!(lost.iter().any(|key| key.starts_with("rl.kl_estimator = \"k2\": ms-swift has k3")), "{lost:?}");
        let notes = notes(&run, &GrpoSizes::of(&run));
        assert!(notes[0].starts_with("rl.algorithm is replaced by GRPO"), "{notes:?}");
    }
}
