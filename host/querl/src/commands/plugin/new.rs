//! `querl plugin new`: creates a plugin's folder from a template. `vendor/` has the SDK of the language and the contract, so that a build
//! needs only the language's tools.

use crate::args::one_of;
use clap::Args;
use clap::builder::TypedValueParser;
use querl_bundle::{Kind, Language};
use querl_core::fsx::io_problem;
use querl_pipeline::failure::Stop;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct NewArgs {
    /// The plugin's name, and that of its folder: a letter, then letters, digits and `-`, all lower case
    #[arg(value_name = "NAME")]
    name: String,
    /// Kind of plugin
    #[arg(long, value_parser = kind())]
    kind: Kind,
    /// Programming language
    #[arg(long, value_parser = language())]
    lang: Language,
    /// The folder in which it is created
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

fn kind() -> impl TypedValueParser<Value = Kind> {
    one_of([
        ("reward", Kind::Reward, "Scores what the policy generated"),
        ("group-reward", Kind::GroupReward, "Scores all samples of one query together, for diversity or rank"),
        ("prompt", Kind::Prompt, "A tenant's prompts, and the parsing of responses to them"),
        ("filter", Kind::Filter, "Keeps samples in the training data or drops them"),
        ("style-scorer", Kind::StyleScorer, "Scores the style of responses"),
    ])
}

fn language() -> impl TypedValueParser<Value = Language> {
    one_of([
        ("rust", Language::Rust, "Fastest by far, smallest"),
        ("python", Language::Python, "CPython in the component"),
        ("javascript", Language::JavaScript, "SpiderMonkey in the component"),
    ])
}

/// Runs `querl plugin new`: creates the folder and prints the next steps.
pub fn run(args: &NewArgs) -> anyhow::Result<()> {
    let (kind, language) = (args.kind, args.lang);
    check_name(&args.name, language).map_err(Stop::usage)?;
    let folder = args.dir.join(&args.name);
    check_free(&folder).map_err(Stop::usage)?;
    for (name, bytes) in files_of(&args.name, kind, language) {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(&folder);
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&path, bytes))
            .map_err(|error| Stop::usage(format!("{}: cannot be written: {}", path.display(), io_problem(&error))))?;
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}: a {kind} plugin in {}\n\nnext:", folder.display(), spelled(language))?;
    for (command, what) in steps(&folder, language) {
        writeln!(stdout, "  {command:<34} {what}")?;
    }
    Ok(())
}

fn steps(folder: &Path, language: Language) -> Vec<(String, &'static str)> {
    let test = match language {
        Language::Rust => "cargo test",
        Language::Python => "python3 -m unittest",
        Language::JavaScript => "npm test",
    };
    vec![
        (format!("cd {}", folder.display()), "read README.md there"),
        (test.into(), "the plugin's own tests"),
        ("querl plugin doctor . --install".into(), "once: what builds components"),
        ("querl plugin dev .".into(), "while you edit: tests, scores and component after each save"),
        ("querl plugin build .".into(), "the component"),
        ("querl plugin test .".into(), "the contract and the golden cases"),
        ("querl plugin pack .".into(), "one file to sign and to ship"),
    ]
}

/// Checks that a name is valid as plugin id and as name of a crate or package.
fn check_name(name: &str, language: Language) -> Result<(), String> {
    let refused = |reason: &str| Err(format!("`{name}` is not a name for a plugin: {reason}"));
    let grammar = "expected a letter, then letters, digits and `-`, all lower case, at most 64";
    let is_plain = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
    let begins_and_ends = name.starts_with(|c: char| c.is_ascii_lowercase()) && !name.ends_with('-');
    if !begins_and_ends || name.len() > 64 || !name.chars().all(is_plain) || name.contains("--") {
        return refused(grammar);
    }
    if name == "querl-sdk" {
        return refused("the SDK has it");
    }
    if language == Language::Rust && RESERVED_IN_RUST.split(' ').any(|reserved| reserved == name) {
        return refused("Rust has another meaning for it");
    }
    Ok(())
}

fn check_free(folder: &Path) -> Result<(), String> {
    match std::fs::read_dir(folder).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("{}: the folder is not empty; expected a name that is free", folder.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("{}: {error}; expected a name that is free", folder.display())),
    }
}

/// Names and contents of the files that `build.rs` embeds: `rust/...`, `python/...`, `javascript/...`, `wit/...` and `LICENSE`.
static EMBEDDED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Names that a crate cannot have: keywords, and crates of the standard library.
const RESERVED_IN_RUST: &str = "abstract alloc as async await become box break const continue core crate do dyn else enum extern false \
    final fn for gen if impl in let loop macro match mod move mut proc-macro pub ref return self static std \
    struct super test trait try";

/// Names and contents of the files of a new folder. A language's templates are in `templates/common` and `templates/KIND`; their
/// placeholder is `{{name}}`.
fn files_of(plugin: &str, kind: Kind, language: Language) -> BTreeMap<String, Cow<'static, [u8]>> {
    let mut files: BTreeMap<String, Cow<'static, [u8]>> = BTreeMap::new();
    files.insert("LICENSE".into(), embedded("LICENSE"));
    files.insert(".gitignore".into(), gitignore(language).as_bytes().into());
    for folder in ["common", kind.name()] {
        let prefix = format!("{}/templates/{folder}/", language.name());
        for (name, bytes) in embedded_under(&prefix) {
            files.insert(fill(name, plugin), fill(&String::from_utf8_lossy(bytes), plugin).into_bytes().into());
        }
    }
    for (from, to) in vendored(language) {
        let inside = |name: &str| !name.starts_with("templates/") && !name.starts_with("tests/");
        for (name, bytes) in embedded_under(from).filter(|(name, _)| inside(name)) {
            files.insert(format!("vendor/{to}/{name}"), bytes.into());
        }
    }
    files
}

/// Name of a language for messages.
fn spelled(language: Language) -> &'static str {
    match language {
        Language::Rust => "Rust",
        Language::Python => "Python",
        Language::JavaScript => "JavaScript",
    }
}

/// Embedded folders that are copied to `vendor/`, and their names there. The version of the contract is that in the templates'
/// `plugin.toml`.
fn vendored(language: Language) -> &'static [(&'static str, &'static str)] {
    match language {
        // The Rust SDK contains a link to the contract.
        Language::Rust => &[("rust/", "querl-sdk")],
        Language::Python => &[("python/querl_sdk/", "querl_sdk"), ("wit/0.2.0/", "wit")],
        Language::JavaScript => &[("javascript/", "querl-sdk"), ("wit/0.2.0/", "wit")],
    }
}

fn gitignore(language: Language) -> &'static str {
    match language {
        Language::Rust => "/target\n*.querl\n",
        Language::Python => "/dist\n/.venv\n__pycache__/\n*.querl\n",
        Language::JavaScript => "/dist\n/node_modules\n*.querl\n",
    }
}

fn fill(text: &str, plugin: &str) -> String {
    text.replace("{{name}}", plugin)
}

/// Embedded files whose names begin with a prefix: names without it, and contents.
fn embedded_under(prefix: &str) -> impl Iterator<Item = (&'static str, &'static [u8])> {
    EMBEDDED.iter().filter_map(move |(name, bytes)| Some((name.strip_prefix(prefix)?, *bytes)))
}

fn embedded(name: &str) -> Cow<'static, [u8]> {
    let (_, bytes) = EMBEDDED.iter().find(|(known, _)| *known == name).expect("build.rs embeds it");
    (*bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_bundle::Manifest;

    fn files(name: &str, kind: Kind, language: Language) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        files_of(name, kind, language).into_iter().map(|(name, bytes)| (name, text(&bytes))).collect()
    }

    fn each_template() -> impl Iterator<Item = (Kind, Language)> {
        Kind::ALL.into_iter().flat_map(|kind| Language::ALL.map(|language| (kind, language)))
    }

    #[test]
    fn every_template_is_a_whole_plugin_of_its_kind() {
        for (kind, language) in each_template() {
            let files = files("my-plugin", kind, language);
            let text = |name: &str| files.iter().find(|(file, _)| file == name).map(|(_, text)| text.as_str());
            let of = |name: &str| text(name).unwrap_or_else(|| panic!("{kind} in {}: no {name}", language.name()));
            let manifest = Manifest::parse(of("plugin.toml"), "plugin.toml").unwrap();
            assert_eq!((manifest.plugin.id.as_str(), &manifest.plugin.kinds[..]), ("my-plugin", &[kind][..]));
            assert!(of("LICENSE").contains("Apache License") && of("README.md").contains("my-plugin"));
            assert!(files.iter().any(|(name, text)| name.starts_with("golden/") && text.contains("\"expect\"")));
            let own: Vec<_> = files.iter().filter(|(name, _)| !name.starts_with("vendor/")).collect();
            assert!(
                own.iter().any(|(name, text)| name.contains("test") || text.contains("#[test]")),
                "{kind}: no tests"
            );
            assert!(files.iter().any(|(name, _)| name.starts_with("vendor/") && name.ends_with("wit/worlds.wit")));
        }
    }

    #[test]
    fn no_placeholder_and_no_path_out_of_the_folder_is_left() {
        for (kind, language) in each_template() {
            for (name, text) in files("my-plugin", kind, language) {
                let place = format!("{kind} in {}: {name}", language.name());
                assert!(!name.contains("{{") && !text.contains("{{name}}"), "{place}");
                assert!(!name.starts_with("vendor/querl-sdk/templates") && !name.contains("__pycache__"), "{place}");
            }
        }
    }

    #[test]
    fn a_reward_takes_fifteen_lines_of_code_at_most() {
        for (language, file, comment) in [
            (Language::Rust, "src/lib.rs", &['/'][..]),
            (Language::Python, "plugin.py", &['#', '"'][..]),
            (Language::JavaScript, "plugin.js", &['/', '*'][..]),
        ] {
            let files = files("short", Kind::Reward, language);
            let (_, text) = files.iter().find(|(name, _)| name == file).unwrap();
            let author = text.split("#[cfg(test)]").next().unwrap_or_default();
            let counts = |line: &&str| {
                let is_punctuation = line.chars().all(|c| "{}();,".contains(c));
                !line.is_empty() && !line.starts_with(comment) && !is_punctuation
            };
            let lines: Vec<_> = author.lines().map(str::trim).filter(counts).collect();
            assert!(lines.len() <= 15, "{file} has {} lines: {lines:#?}", lines.len());
        }
    }

    #[test]
    fn names_that_no_plugin_can_have_are_refused_with_the_reason() {
        for (name, reason) in [
            ("Brevity", "expected a letter, then letters"),
            ("9lives", "expected a letter"),
            ("a--b", "expected a letter"),
            ("my_reward", "expected a letter"),
            ("end-", "expected a letter"),
            ("../up", "expected a letter"),
            ("", "expected a letter"),
            ("querl-sdk", "the SDK has it"),
            ("async", "Rust has another meaning"),
        ] {
            let error = check_name(name, Language::Rust).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        assert_eq!(check_name("async", Language::Python), Ok(()));
        assert_eq!(check_name("reward-2", Language::Rust), Ok(()));
    }

    #[test]
    fn folder_with_something_in_it_is_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("x");
        assert_eq!(check_free(&folder), Ok(()));
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(check_free(&folder), Ok(()));
        std::fs::write(folder.join("note"), "").unwrap();
        assert!(check_free(&folder).unwrap_err().ends_with("the folder is not empty; expected a name that is free"));
        assert!(check_free(&folder.join("note")).unwrap_err().ends_with("expected a name that is free"));
    }
}
