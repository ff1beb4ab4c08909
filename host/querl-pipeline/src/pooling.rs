//! Differences between runs other than their seeds. Runs with such differences are pooled only on request.
//!
//! The ledger has everything that the results of a stage depend on: settings by their key, files, models and plugins by their digest. Of
//! the outputs of earlier stages only the dataset is compared, since a teacher may rewrite differently with the same settings; rewrites,
//! hits and checkpoints depend on the other inputs and the seed.

use crate::failure::Stop;
use crate::ledger::{Entry, Ledger, StageName};
use querl_bundle::lock::LockFile;
use querl_core::run_dir::RunDir;
use querl_eval::cut;

/// Which runs may be pooled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Only runs that differ only in their seed.
    Seeds,
    /// All runs that were evaluated on the same queries.
    Any,
}

/// Refuses a folder that is named twice, also by another path.
///
/// # Errors
/// Two of `runs` are one folder.
pub fn check_distinct(runs: &[RunDir]) -> Result<(), Stop> {
    let real: Vec<_> = runs.iter().map(|run| run.root().canonicalize().unwrap_or_else(|_| run.root().into())).collect();
    for (index, run) in runs.iter().enumerate() {
        if let Some(other) = real[..index].iter().position(|other| *other == real[index]) {
            let (other, run) = (runs[other].root().display(), run.root().display());
            return Err(Stop::usage(format!("{other} and {run} are the same run; name each run once")));
        }
    }
    Ok(())
}

/// An input, or a finished stage, in which two runs differ, with both values.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RunDifference {
    name: String,
    values: [String; 2],
}

impl std::fmt::Display for RunDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [one, other] = &self.values;
        write!(f, "{} ({one} and {other})", self.name)
    }
}

/// Maximum width of a value in a message, in columns.
const MAX_VALUE_WIDTH: usize = 100;

/// Maximum number of names in a message; the others are counted.
const MAX_NAMES: usize = 12;

/// Inputs that do not affect metrics, or that make the runs samples of one experiment.
const NOT_COMPARED: [&str; 2] = ["seed", "data.export"];

/// Differences of two runs, sorted by name. A stage that only one run has finished is one difference.
///
/// # Errors
/// A ledger cannot be read.
pub(crate) fn differences(one: &RunDir, other: &RunDir) -> anyhow::Result<Vec<RunDifference>> {
    let sides = [Side::read(one)?, Side::read(other)?];
    let mut found = Vec::new();
    for stage in StageName::ALL {
        match sides.each_ref().map(|side| side.ledger.finished(stage)) {
            [Some(one), Some(other)] => {
                for name in one.inputs.changed_since(&other.inputs).into_iter().filter(|name| is_compared(name)) {
                    let values = [(&sides[0], one), (&sides[1], other)].map(|(side, entry)| side.shown(entry, &name));
                    found.push(RunDifference { name, values });
                }
            }
            [None, None] => {}
            entries => {
                let state = |entry: Option<&Entry>| if entry.is_some() { "finished" } else { "not run" };
                let values = entries.map(|entry| state(entry).to_owned());
                found.push(RunDifference { name: format!("the stage {stage}"), values });
            }
        }
    }
    // Several stages depend on the same plugins and settings.
    found.sort();
    found.dedup();
    Ok(found)
}

/// Lists the differences as a part of a sentence.
pub(crate) fn listed(differences: &[RunDifference]) -> String {
    let shown: Vec<String> = differences.iter().take(MAX_NAMES).map(ToString::to_string).collect();
    match differences.len().saturating_sub(MAX_NAMES) {
        0 => shown.join(", "),
        n_more => format!("{} and {n_more} more", shown.join(", ")),
    }
}

/// Whether an input is compared. Of the outputs of stages only the dataset is: checkpoints differ by the seed, and rows of data stages have
/// times and costs.
fn is_compared(name: &str) -> bool {
    let left_by = StageName::ALL.into_iter().find(|stage| name.ends_with(&format!(" of {stage}")));
    !NOT_COMPARED.contains(&name) && left_by.is_none_or(|stage| stage == StageName::Convert)
}

struct Side {
    ledger: Ledger,
    lock: LockFile,
}

impl Side {
    fn read(dir: &RunDir) -> anyhow::Result<Self> {
        // Without a lock file plugins have digests but no versions.
        let lock = LockFile::read(&dir.lock()).unwrap_or_default();
        Ok(Self { ledger: Ledger::open(&dir.stages())?, lock })
    }

    /// The value of an input; of a plugin also the version, and of a digest the beginning.
    fn shown(&self, entry: &Entry, name: &str) -> String {
        let Some(value) = entry.inputs.get(name) else { return "not set".to_owned() };
        let (first, rest) = value.split_once(' ').unwrap_or((value, ""));
        let locked = self.lock.entries.iter().find(|plugin| plugin.sha256 == first);
        let text = match locked {
            Some(plugin) => format!("{} {rest}", plugin.title()),
            None if is_digest(first) => format!("{} {rest}", &first[..12]),
            None => value.to_owned(),
        };
        cut(&text.split_whitespace().collect::<Vec<_>>().join(" "), MAX_VALUE_WIDTH)
    }
}

/// Whether this is a SHA-256.
fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Inputs;
    use querl_core::fsx::digest_hex;

    /// A run whose stages have these inputs.
    fn run(stages: &[(StageName, &[(&str, &str)])]) -> (tempfile::TempDir, RunDir) {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::new(folder.path());
        let mut ledger = Ledger::open(&dir.stages()).unwrap();
        for (stage, values) in stages {
            let mut inputs = Inputs::default();
            for (name, value) in *values {
                inputs.text(name, value);
            }
            ledger.put(*stage, Entry { finished: true, ..Entry::begun(inputs) }).unwrap();
        }
        (folder, dir)
    }

    fn found(one: &[(StageName, &[(&str, &str)])], other: &[(StageName, &[(&str, &str)])]) -> String {
        let (one, other) = (run(one), run(other));
        listed(&differences(&one.1, &other.1).unwrap())
    }

    #[test]
    fn seeds_and_what_follows_from_them_are_no_difference() {
        let of_seed = |seed: &'static str| {
            [
                ("seed", seed),
                ("best of sft", seed),
                ("validated.jsonl of validate", seed),
                ("train.jsonl of convert", "t"),
            ]
        };
        let (one, other) = (of_seed("1"), of_seed("2"));
        assert_eq!(
            found(
                &[(StageName::Sft, &one), (StageName::Rl, &one)],
                &[(StageName::Sft, &other), (StageName::Rl, &other)]
            ),
            ""
        );
    }

    #[test]
    fn settings_have_values_data_have_digests_and_stages_are_counted_once() {
        let (a, b) = (digest_hex(b"a"), digest_hex(b"b"));
        let one = [("rl.kl_coef", "0.05"), ("train.jsonl of convert", a.as_str()), ("rl.record", "x")];
        let other = [("rl.kl_coef", "0.2"), ("train.jsonl of convert", b.as_str())];
        let expected = format!(
            "rl.kl_coef (0.05 and 0.2), rl.record (x and not set), train.jsonl of convert ({} and {})",
            &a[..12],
            &b[..12]
        );
        assert_eq!(
            found(
                &[(StageName::Sft, &one), (StageName::Rl, &one)],
                &[(StageName::Sft, &other), (StageName::Rl, &other)]
            ),
            expected
        );
        assert_eq!(found(&[(StageName::Sft, &one)], &[]), "the stage sft (finished and not run)");
    }

    #[test]
    fn a_plugin_has_its_version() {
        let sha = digest_hex(b"component");
        let (one, other) = (format!("{sha} {{}} weight 1"), format!("{} {{}} weight 1", digest_hex(b"other")));
        let (one, other) = (
            run(&[(StageName::Rl, &[("reward plugin 1 (r)", &one)])]),
            run(&[(StageName::Rl, &[("reward plugin 1 (r)", &other)])]),
        );
        let lock = format!(
            "format = 1\n[[plugin]]\nrole = \"reward\"\nid = \"r\"\nversion = \"0.2.0\"\npath = \"/r\"\nsource = \"component\"\nsha256 = \"{sha}\"\n"
        );
        std::fs::write(one.1.lock(), lock).unwrap();
        let text = listed(&differences(&one.1, &other.1).unwrap());
        let expected = format!("reward plugin 1 (r) (0.2.0 (component {}) {{}} weight 1 and ", &sha[..12]);
        assert!(text.starts_with(&expected), "{text}");
    }

    #[test]
    fn many_differences_are_counted() {
        let named = |n: usize| RunDifference { name: format!("key{n:02}"), values: ["1".into(), "2".into()] };
        let many: Vec<RunDifference> = (0..MAX_NAMES + 3).map(named).collect();
        assert!(listed(&many).ends_with("key11 (1 and 2) and 3 more"), "{}", listed(&many));
    }
}
