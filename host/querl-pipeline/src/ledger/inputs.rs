//! Inputs of a stage as named digests: when an input changes, the stage runs again and reports the input's name.

use super::{Ledger, StageName};
use crate::failure::Stop;
use anyhow::Context;
use querl_core::config::{ModelConfig, keys};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::LazyLock;

/// Files of a model folder above this size are identified by size and modification time instead of content, because reading gigabytes of
/// weights before every run would take longer than most runs of a small model.
const LARGEST_READ_BYTES: u64 = 256 << 20;

/// Prefixes or suffixes of input names, each with the controlling input, without which a stage does not have them.
const FOLLOWED: [(&str, &str); 22] = [
    (FORMS_OF_EDITS, "data.rewrite_form"),
    (FORMAT_OF_EXPANSIONS, "data.rewrite_form"),
    (FORMAT_OF_EXPANSIONS, "data.expansion_terms"),
    ("tenant", "data.rewrite_form"),
    ("retrieval.", "data.rewrite_form"),
    ("knowledge base", "data.rewrite_form"),
    ("lexicon", "data.rewrite_form"),
    ("user dictionary", "data.rewrite_form"),
    ("synonyms", "data.rewrite_form"),
    ("language of the passages", "data.rewrite_form"),
    ("embedding model", "data.rewrite_form"),
    ("cross-encoder", "data.rewrite_form"),
    ("retrieval.", "retrieval.kind"),
    ("retrieval.embedding.", "retrieval.embedding.kind"),
    ("embedding model", "retrieval.embedding.kind"),
    ("retrieval.rerank.", "retrieval.rerank.kind"),
    ("cross-encoder", "retrieval.rerank.kind"),
    ("teacher.", "teacher.kind"),
    ("of the teacher", "teacher.kind"),
    ("fallback_teacher.", "fallback_teacher.base_url"),
    ("judge.", "judge.kind"),
    ("rollout.", "rollout.engine"),
];

/// Name of the input that has the version of the edit forms of rewrites.
pub(crate) const FORMS_OF_EDITS: &str = "forms of edits";

/// Name of the input that has the version of expansions.
pub(crate) const FORMAT_OF_EXPANSIONS: &str = "format of expansions";

/// Name of the input that has the version of the embedded retrieval index.
pub(crate) const INDEX: &str = "retrieval.index";

/// Defaults of configuration keys, in the form of [`Inputs::section`], and the versions that ledgers without them have.
static DEFAULTS: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let value = |default: &str| toml::from_str::<toml::Table>(&format!("value = {default}")).ok()?.remove("value");
    let of_keys = keys().into_iter().filter_map(|info| Some((info.key, value(&info.default?)?.to_string())));
    of_keys
        .chain([(FORMS_OF_EDITS, "2"), (INDEX, "3")].map(|(name, value)| (name.to_owned(), value.to_owned())))
        .collect()
});

/// Inputs of a stage: digests or short values by name. Paths do not count, so a moved file is the same input.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inputs(BTreeMap<String, String>);

impl Inputs {
    pub(crate) fn text(&mut self, name: &str, value: impl ToString) -> &mut Self {
        self.0.insert(name.into(), value.to_string());
        self
    }

    /// Adds the keys of a configuration section other than those in `except`: keys that cannot change a result, and paths. A key that an
    /// earlier version of querl did not have counts as unchanged at its default: [`Self::changed_since`].
    pub(crate) fn section(
        &mut self,
        name: &str,
        section: &impl Serialize,
        except: &[&str],
    ) -> anyhow::Result<&mut Self> {
        let table = toml::Table::try_from(section).with_context(|| format!("[{name}] has no TOML form"))?;
        for (key, value) in table.iter().filter(|(key, _)| !except.contains(&key.as_str())) {
            self.0.insert(format!("{name}.{key}"), value.to_string());
        }
        Ok(self)
    }

    /// Adds the digest of a file of the user.
    pub(crate) fn file(&mut self, name: &str, path: &Path) -> anyhow::Result<&mut Self> {
        self.0.insert(name.into(), digest_file(path)?);
        Ok(self)
    }

    /// Adds the digest of a file or folder that an earlier stage wrote.
    pub(crate) fn made_by(&mut self, ledger: &Ledger, stage: StageName, path: &Path) -> anyhow::Result<&mut Self> {
        let entry = ledger.entry(stage);
        // Files of an unfinished stage are not results.
        if entry.is_some_and(|entry| !entry.finished) {
            let run = ledger.root().display();
            let message = format!("{stage} was stopped on the way; `querl run CONFIG --out {run}` resumes it");
            return Err(Stop::usage(message).into());
        }
        if entry.is_none() && path.exists() {
            let problem = format!("has no entry of {stage} for {}", path.display());
            let remedy =
                format!("put the file back, or run `querl {stage} CONFIG --from {stage}` to make the result again");
            return Err(Stop::usage(format!("{}: {problem}; {remedy}", ledger.path().display())).into());
        }
        // A folder that lost all of its files is reported with its recorded digests.
        if entry.is_none_or(|entry| entry.outputs.is_empty() && !path.exists()) {
            let message = format!("{}: not there yet; run `querl {stage}` first, or `querl run`", path.display());
            return Err(Stop::usage(message).into());
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let written = entry.map(|entry| &entry.outputs);
        written.map_or(Ok(()), |outputs| outputs.check(ledger.root(), stage, path))?;
        let digest = match written.and_then(|outputs| outputs.digest(ledger.root(), path)) {
            Some(digest) => digest,
            // Ledgers of earlier versions have no digests of outputs.
            None if path.is_dir() => digest_folder(path, |_| true)?,
            None => digest_file(path)?,
        };
        self.0.insert(format!("{name} of {stage}"), digest);
        Ok(self)
    }

    /// Adds the digest of a Hugging Face model folder, only of the files from which the model is loaded: a README changes no result.
    pub(crate) fn model(&mut self, name: &str, path: &Path) -> anyhow::Result<&mut Self> {
        self.0.insert(name.into(), digest_folder(path, is_of_model)?);
        Ok(self)
    }

    pub(crate) fn digest(&self) -> String {
        querl_core::fsx::digest_hex(format!("{:?}", self.0).as_bytes())
    }

    /// Whether the recorded digest of a file of `stage` is that of its current content; true if there is no digest or no file.
    pub(crate) fn is_of(&self, stage: StageName, path: &Path) -> anyhow::Result<bool> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self.0.get(&format!("{name} of {stage}")) {
            Some(digest) if path.exists() => Ok(digest_file(path)? == *digest),
            _ => Ok(true),
        }
    }

    /// Names of the inputs that earlier stages wrote, each with its stage.
    pub(crate) fn upstream(&self) -> Vec<(&str, StageName)> {
        let stage_of = |name: &str| StageName::ALL.into_iter().find(|stage| name.ends_with(&format!(" of {stage}")));
        self.0.keys().filter_map(|name| Some((name.as_str(), stage_of(name)?))).collect()
    }

    /// Fingerprint of a training: digest of the inputs and of everything else that affects the last bits of its results, such as tokens per
    /// pass, the program version and the GPU type. A checkpoint is only resumed with the same fingerprint. Finished stages are not compared
    /// by it, since results with another fingerprint differ by rounding only.
    pub(crate) fn fingerprint(&self, model: &ModelConfig, arithmetic: Option<String>) -> String {
        let mut exact = self.clone();
        exact.text("model.tokens_per_pass", model.tokens_per_pass);
        exact.text("model.gradient_checkpointing", model.gradient_checkpointing);
        if model.tensor_parallel > 1 {
            exact.text("model.tensor_parallel", model.tensor_parallel);
        }
        exact.text("program", format_args!("{} {ARITHMETIC}", env!("CARGO_PKG_VERSION")));
        if let Some(arithmetic) = arithmetic {
            exact.text("device", arithmetic);
        }
        // A new key at its default must not change the fingerprint.
        let set = exact.0.iter().filter(|(name, value)| DEFAULTS.get(*name) != Some(*value));
        let lines: String = set.map(|(name, value)| format!("{name:?} {value:?}\n")).collect();
        querl_core::fsx::digest_hex(lines.as_bytes())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Value of the first input whose name begins with `prefix`.
    pub(crate) fn first_of(&self, prefix: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name.starts_with(prefix)).map(|(_, value)| value.as_str())
    }

    /// Adds the inputs of `other`, which replace inputs of the same name.
    pub(crate) fn extend(&mut self, other: &Self) {
        self.0.extend(other.0.iter().map(|(name, value)| (name.clone(), value.clone())));
    }

    /// The inputs for whose names `is_kept` is true.
    pub(crate) fn only(&self, is_kept: impl Fn(&str) -> bool) -> Self {
        Self(
            self.0
                .iter()
                .filter(|(name, _)| is_kept(name))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        )
    }

    /// Names of the inputs that were added, removed or changed since `earlier`, sorted. A missing key counts with its default. Inputs
    /// that were added or removed because a controlling key changed are left out.
    pub(crate) fn changed_since(&self, earlier: &Self) -> Vec<String> {
        let names: BTreeSet<&str> = self.0.keys().chain(earlier.0.keys()).map(String::as_str).collect();
        let changed: BTreeSet<&str> =
            names.into_iter().filter(|name| self.value(name) != earlier.value(name)).collect();
        let follows = |name: &str| {
            let decides = |(part, key): &(&str, &str)| {
                name != *key && (name.starts_with(*part) || name.ends_with(*part)) && changed.contains(key)
            };
            self.has(name) != earlier.has(name) && FOLLOWED.iter().any(decides)
        };
        changed.iter().filter(|name| !follows(name)).map(|name| (*name).to_owned()).collect()
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.get(name).or_else(|| DEFAULTS.get(name).map(String::as_str))
    }
}

/// Incremented with each change of what a training computes; a stopped training then starts over.
const ARITHMETIC: u32 = 2;

fn digest_file(path: &Path) -> anyhow::Result<String> {
    querl_core::fsx::digest_file(path).with_context(|| format!("{}: cannot be read", path.display()))
}

/// Digest of `NAME DIGEST` lines in any order.
pub(super) fn digest_lines(mut lines: Vec<String>) -> String {
    lines.sort();
    querl_core::fsx::digest_hex(lines.join("\n").as_bytes())
}

/// Whether querl or transformers read a file of this name to load a model or its tokenizer.
pub(crate) fn is_of_model(file: &str) -> bool {
    const NAMES: [&str; 12] = [
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        // Classifiers: names of the classes, temperature.
        "label_mapping.json",
        "pytorch_model.bin",
        "calibration.json",
        // Embedding models: truncation and pooling.
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    ];
    let starts = ["tokenizer", "chat_template"].iter().any(|start| file.starts_with(start));
    starts || NAMES.contains(&file) || file.ends_with(".safetensors") || file.ends_with(".safetensors.index.json")
}

/// Digest of the files of a folder whose names are `wanted`, without subfolders.
fn digest_folder(path: &Path, wanted: impl Fn(&str) -> bool) -> anyhow::Result<String> {
    let unreadable = || format!("{}: cannot be read", path.display());
    let mut lines = Vec::new();
    for entry in std::fs::read_dir(path).with_context(unreadable)? {
        let entry = entry.with_context(unreadable)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !wanted(&name) {
            continue;
        }
        let meta = std::fs::metadata(entry.path()).with_context(unreadable)?;
        if meta.is_file() {
            let digest = match meta.len() {
                n_bytes if n_bytes > LARGEST_READ_BYTES => format!("{n_bytes} {:?}", meta.modified().ok()),
                _ => digest_file(&entry.path())?,
            };
            lines.push(format!("{name} {digest}"));
        }
    }
    Ok(digest_lines(lines))
}

#[cfg(test)]
mod tests {
    use super::super::Entry;
    use super::*;

    #[test]
    fn changed_section_keys_are_named_and_exceptions_ignored() {
        let mut before = Inputs::default();
        before.section("sft", &querl_core::config::SftConfig::default(), &["eval_steps"]).unwrap();
        let changed = querl_core::config::SftConfig { epochs: 9, eval_steps: 1, ..Default::default() };
        let mut after = Inputs::default();
        after.section("sft", &changed, &["eval_steps"]).unwrap();
        assert_eq!(after.changed_since(&before), ["sft.epochs"]);
    }

    #[test]
    fn a_key_that_an_earlier_version_did_not_have_is_no_change_at_its_default() {
        use querl_core::config::{RlConfig, RolloutConfig, SftConfig};
        let of = |rl: &RlConfig| {
            let mut inputs = Inputs::default();
            inputs.section("rl", rl, &[]).unwrap().section("sft", &SftConfig::default(), &[]).unwrap();
            inputs.section("rollout", &RolloutConfig::default(), &[]).unwrap().clone()
        };
        let (now, earlier) = (of(&RlConfig::default()), Inputs::default());
        assert!(now.has("rl.dynamic_sampling") && now.has("sft.learning_rate") && now.has("rollout.engine"));
        assert!(now.changed_since(&earlier).is_empty(), "{:?}", now.changed_since(&earlier));
        assert!(earlier.changed_since(&now).is_empty());
        let model = model(512);
        assert_eq!(now.fingerprint(&model, None), earlier.fingerprint(&model, None));
        let set = of(&RlConfig { dynamic_sampling: true, clip_range_high: Some(0.3), ..RlConfig::default() });
        assert_eq!(set.changed_since(&earlier), ["rl.clip_range_high", "rl.dynamic_sampling"]);
        assert_eq!(earlier.changed_since(&set), ["rl.clip_range_high", "rl.dynamic_sampling"]);
        assert_ne!(set.fingerprint(&model, None), now.fingerprint(&model, None));
    }

    /// Symptom: finished RL of an earlier querl was trained again, for hours, on the same targets.
    #[test]
    fn a_training_of_before_the_forms_of_edits_had_a_version_is_redone_where_its_targets_changed() {
        let of = |version: Option<u32>, train: &str| {
            let mut inputs = Inputs::default();
            inputs.text("data.rewrite_form", "edit").text("train.jsonl of convert", train);
            if let Some(version) = version {
                inputs.text(FORMS_OF_EDITS, version);
            }
            inputs
        };
        let (earlier, now) = (of(None, "aa"), of(Some(2), "aa"));
        assert!(now.changed_since(&earlier).is_empty());
        assert_eq!(now.fingerprint(&model(512), None), earlier.fingerprint(&model(512), None));
        assert_eq!(of(Some(2), "bb").changed_since(&earlier), ["train.jsonl of convert"]);
        assert_eq!(of(Some(3), "aa").changed_since(&earlier), [FORMS_OF_EDITS]);
    }

    /// Symptom: a run resumed after an update with the hits of two rankings.
    #[test]
    fn a_ledger_without_the_version_of_the_index_is_of_version_3() {
        let of = |version: Option<u32>| {
            let mut inputs = Inputs::default();
            inputs.text("retrieval.kind", "\"embedded\"");
            if let Some(version) = version {
                inputs.text(INDEX, version);
            }
            inputs
        };
        assert_eq!(of(Some(4)).changed_since(&of(None)), [INDEX]);
        assert_ne!(of(Some(4)).fingerprint(&model(512), None), of(None).fingerprint(&model(512), None));
        assert!(of(Some(3)).changed_since(&of(None)).is_empty());
    }

    #[test]
    fn inputs_that_come_and_go_with_a_key_are_not_counted() {
        let of = |pairs: &[(&str, &str)]| {
            let mut inputs = Inputs::default();
            for (name, value) in pairs {
                inputs.text(name, value);
            }
            inputs
        };
        let full = of(&[("data.rewrite_form", "\"full\""), ("data.split_seed", "42")]);
        let of_retrieval =
            [("retrieval.kind", "\"http\""), ("retrieval.top_k", "9"), ("knowledge base", "aa"), ("tenant", "shop")];
        let edit = of(&[&of_retrieval[..], &[("data.rewrite_form", "\"edit\""), ("data.split_seed", "42")]].concat());
        assert_eq!(edit.changed_since(&full), ["data.rewrite_form"]);
        assert_eq!(full.changed_since(&edit), ["data.rewrite_form"]);
        // A ledger from before the key existed.
        assert_eq!(edit.changed_since(&of(&[("data.split_seed", "42")])), ["data.rewrite_form"]);
        let other = of(&[&of_retrieval[1..], &[("retrieval.kind", "\"embedded\""), ("data.split_seed", "1")]].concat());
        assert_eq!(other.changed_since(&of(&of_retrieval)), ["data.split_seed", "retrieval.kind"]);
        // A new file without a changed controlling key counts as a change.
        let more = of(&[&of_retrieval[..], &[("synonyms", "bb")]].concat());
        assert_eq!(more.changed_since(&of(&of_retrieval)), ["synonyms"]);
    }

    fn model(tokens_per_pass: usize) -> ModelConfig {
        serde_json::from_value(serde_json::json!({"path": "model", "tokens_per_pass": tokens_per_pass})).unwrap()
    }

    #[test]
    fn a_checkpoint_belongs_to_one_way_of_cutting_passes() {
        let inputs = Inputs::default();
        let cut = |tokens_per_pass| inputs.fingerprint(&model(tokens_per_pass), None);
        assert_eq!(cut(512), cut(512));
        assert_ne!(cut(512), cut(256));
    }

    #[test]
    fn a_checkpoint_belongs_to_one_sort_of_device() {
        let model = model(512);
        let on = |arithmetic: Option<&str>| Inputs::default().fingerprint(&model, arithmetic.map(str::to_owned));
        assert_eq!(on(Some("cuda 90")), on(Some("cuda 90")));
        assert_ne!(on(Some("cuda 90")), on(Some("cuda 80")));
        assert_ne!(on(Some("cuda 90")), on(None));
    }

    #[test]
    fn content_counts_and_place_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        std::fs::write(&one, "same").unwrap();
        std::fs::write(&other, "same").unwrap();
        let of = |path: &Path| Inputs::default().file("data.input", path).unwrap().clone();
        assert_eq!(of(&one), of(&other));
        std::fs::write(&other, "changed").unwrap();
        assert_eq!(of(&other).changed_since(&of(&one)), ["data.input"]);
    }

    #[test]
    fn other_files_in_a_model_folder_are_not_inputs() {
        let folder = tempfile::tempdir().unwrap();
        let of_model = || Inputs::default().model("model", folder.path()).unwrap().clone();
        let put = |file, text| std::fs::write(folder.path().join(file), text).unwrap();
        put("model-00001-of-00002.safetensors", "weights");
        let before = of_model();
        put("README.md", "notes");
        put("corpus.jsonl", "{}");
        assert_eq!(of_model(), before);
        put("tokenizer_config.json", "{}");
        assert_eq!(of_model().changed_since(&before), ["model"]);
    }

    #[test]
    fn what_an_earlier_stage_left_counts_once_that_stage_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.jsonl");
        let mut ledger = Ledger::open(&folder.path().join("stages.json")).unwrap();
        let mut inputs = Inputs::default();
        let refusal = |inputs: &mut Inputs, ledger: &Ledger| {
            inputs.made_by(ledger, StageName::Convert, &path).map(drop).map_err(|error| error.to_string())
        };
        let missing = format!("{}: not there yet; run `querl convert` first, or `querl run`", path.display());
        assert_eq!(refusal(&mut inputs, &ledger), Err(missing));
        std::fs::write(&path, "{}").unwrap();
        ledger.put(StageName::Convert, Entry::begun(Inputs::default())).unwrap();
        let run = folder.path().display();
        let half = format!("convert was stopped on the way; `querl run CONFIG --out {run}` resumes it");
        assert_eq!(refusal(&mut inputs, &ledger), Err(half));
        ledger.put(StageName::Convert, Entry { finished: true, ..Entry::begun(Inputs::default()) }).unwrap();
        assert_eq!(refusal(&mut inputs, &ledger), Ok(()));
        assert_eq!(inputs.upstream(), [("train.jsonl of convert", StageName::Convert)]);
    }
}
