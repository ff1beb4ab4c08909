//! Export of a run to verl on Ray.

mod settings;

pub use settings::Cluster;
pub(crate) use settings::indivisible;

use super::folder::{EngineFiles, Exported, HERE, RewardProcesses, plain, write_shared};
use super::rows::PromptRow;
use super::source::ExportedRun;
use crate::serving::BaseFiles;
use querl_core::config::Config;
use querl_data::{VerlRow, write_verl_rows};
use settings::{MAX_REWARD_WORKERS, Sizes, TRAIN, VAL, mapping};
use std::fmt::Write;
use std::path::Path;

/// Writes a folder from which verl trains the run.
///
/// # Errors
/// The batch cannot be divided over the GPUs, a plugin is not the one of the run, or a file cannot be read or written.
pub fn export_verl(run: &ExportedRun, cluster: Cluster, base: BaseFiles, out: &Path) -> anyhow::Result<Exported> {
    let sizes = Sizes::of(run);
    sizes.check(cluster)?;
    let reward = RewardProcesses { n_processes: sizes.reward_workers, rows: TRAIN };
    let shared = write_shared(run, base, &reward, out)?;
    let shell_model = plain(&shared.model)?.replace(HERE, "$HERE");
    write_rows(&run.config, "train", &run.train, &out.join(TRAIN))?;
    if !run.val.is_empty() {
        write_rows(&run.config, "val", &run.val, &out.join(VAL))?;
    }
    let mapping = mapping(run, &sizes, cluster)?;
    let (n_nodes, n_gpus) = (cluster.n_nodes.to_string(), cluster.gpus_per_node.to_string());
    let settings = shell_lines(mapping.settings());
    let values = [
        ("@NODES@", n_nodes.as_str()),
        ("@GPUS@", n_gpus.as_str()),
        ("@SETTINGS@", settings.as_str()),
        ("@MODEL@", shell_model.as_str()),
    ];
    let notes = notes(run, &sizes);
    let files = EngineFiles { engine: "verl", mapping: &mapping, notes, templates: &FILES, values: &values };
    files.write(run, shared, out)
}

const FILES: [(&str, &str); 6] = [
    ("README.md", include_str!("../files/verl/README.md")),
    ("mapping.md", include_str!("../files/verl/mapping.md")),
    ("merge.sh", include_str!("../files/verl/merge.sh")),
    ("ray.sh", include_str!("../files/verl/ray.sh")),
    ("requirements.txt", include_str!("../files/verl/requirements.txt")),
    ("train.sh", include_str!("../files/verl/train.sh")),
];

fn write_rows(config: &Config, split: &str, rows: &[PromptRow], path: &Path) -> anyhow::Result<()> {
    let row = |(index, row): (usize, &PromptRow)| VerlRow {
        prompt: row.prompt.clone(),
        data_source: config.tenant.clone(),
        ground_truth: row.id.clone(),
        index: index as u64,
        split: split.to_owned(),
        querl: row.querl.clone(),
    };
    Ok(write_verl_rows(path, &rows.iter().enumerate().map(row).collect::<Vec<_>>())?)
}

fn notes(run: &ExportedRun, sizes: &Sizes) -> Vec<String> {
    let (config, mut notes) = (&run.config, Vec::new());
    if run.adapter.is_some() && config.rl.kl_coef > 0.0 {
        notes.push(
            "the reference policy of verl is the model without the adapter: rl.kl_coef keeps the policy near the base model, not near the \
             SFT policy"
                .to_owned(),
        );
    }
    notes.extend(run.batch_note("verl"));
    if run.val.is_empty() {
        notes.push(
            "the validation split has no row: validation is off, data.val_files names the training split, and there is no val.parquet"
                .to_owned(),
        );
    }
    notes.extend(run.mini_batch_note(sizes.mini_batch * sizes.n_samples));
    notes.extend(run.alpha_note("verl"));
    notes.push(format!(
        "weights are f32 in training and bf16 in rollouts, the defaults of verl; model.dtype is {}",
        config.model.dtype.name()
    ));
    let fewer = match sizes.reward_workers < MAX_REWARD_WORKERS {
        true => format!(", fewer than {MAX_REWARD_WORKERS} since the smallest limit is {}", sizes.reward_workers),
        false => String::new(),
    };
    notes.push(format!(
        "limits of retrieval and judge, and the budget, are divided over {} reward processes{fewer}",
        sizes.reward_workers
    ));
    notes
}

/// One shell argument per line; `HERE` and `MODEL` are variables of the script.
fn shell_lines(settings: &[(String, String)]) -> String {
    let mut lines = String::new();
    for (name, value) in settings {
        let text = format!("{name}={value}").replace('\'', "'\\''");
        let text = text.replace(HERE, "'\"$HERE\"'").replace("@MODEL@", "'\"$MODEL\"'");
        let _ = writeln!(lines, "    '{text}' \\");
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::settings::quoted;
    use super::*;
    use crate::exchange::source::testing::run;

    #[test]
    fn settings_are_one_shell_word_each() {
        let settings = [("a.b".to_owned(), quoted("@HERE@/it's")), ("c".to_owned(), "1".to_owned())];
        let expected = "    'a.b=\"'\"$HERE\"'/it'\\''s\"' \\\n    'c=1' \\\n";
        assert_eq!(shell_lines(&settings), expected);
    }

    #[test]
    fn an_empty_validation_split_is_noted() {
        let mut run = run("");
        let is_noted = |run: &ExportedRun| {
            notes(run, &Sizes::of(run)).iter().any(|note| note.starts_with("the validation split has no row"))
        };
        assert!(is_noted(&run));
        run.val = run.train.clone();
        assert!(!is_noted(&run));
    }
}
