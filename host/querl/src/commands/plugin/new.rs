//! `querl plugin new`: a plugin's folder to start from, with everything in it that building needs but the tools.

mod files;
#[cfg(test)]
mod tests;

use clap::{Args, ValueEnum};
use querl_bundle::{Kind, Language};
use querl_pipeline::failure::Stop;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `querl plugin new`.
#[derive(Debug, Args)]
pub struct NewArgs {
    /// The plugin's name, and that of its folder: a letter, then letters, digits and `-`, all lower case
    #[arg(value_name = "NAME")]
    name: String,
    /// What the plugin is for
    #[arg(long, value_enum)]
    kind: KindName,
    /// What it is written in
    #[arg(long, value_enum)]
    lang: LanguageName,
    /// Where the folder is made
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

/// The kinds, as the command line has them.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum KindName {
    /// Scores what the policy wrote against what the teacher wrote
    Reward,
    /// A tenant's prompts, and the parsing of answers to them
    Prompt,
    /// Keeps samples in the training data or drops them
    Filter,
    /// Scores the style of answers
    StyleScorer,
}

/// The languages, as the command line has them.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum LanguageName {
    /// Quickest by far, smallest
    Rust,
    /// CPython in the component
    Python,
    /// SpiderMonkey in the component
    #[value(name = "javascript")]
    JavaScript,
}

impl From<KindName> for Kind {
    fn from(name: KindName) -> Self {
        match name {
            KindName::Reward => Self::Reward,
            KindName::Prompt => Self::Prompt,
            KindName::Filter => Self::Filter,
            KindName::StyleScorer => Self::StyleScorer,
        }
    }
}

impl From<LanguageName> for Language {
    fn from(name: LanguageName) -> Self {
        match name {
            LanguageName::Rust => Self::Rust,
            LanguageName::Python => Self::Python,
            LanguageName::JavaScript => Self::JavaScript,
        }
    }
}

/// Makes the folder and says what comes next.
pub fn run(args: &NewArgs) -> anyhow::Result<()> {
    let (kind, language) = (args.kind.into(), args.lang.into());
    check_name(&args.name, language).map_err(Stop::usage)?;
    let folder = args.dir.join(&args.name);
    check_free(&folder).map_err(Stop::usage)?;
    for file in files::of(&args.name, kind, language) {
        let path = folder.join(&file.name);
        let parent = path.parent().unwrap_or(&folder);
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&path, file.bytes))
            .map_err(|error| Stop::usage(format!("{}: cannot be written: {error}", path.display())))?;
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}: a {kind} plugin in {}\n\nnext:", folder.display(), files::spelled(language))?;
    for (command, what) in steps(&folder, language) {
        writeln!(stdout, "  {command:<34} {what}")?;
    }
    Ok(())
}

/// What to do with a new folder.
fn steps(folder: &Path, language: Language) -> Vec<(String, &'static str)> {
    let (test, tools) = match language {
        Language::Rust => ("cargo test", "rustup target add wasm32-wasip2"),
        Language::Python => {
            ("python3 -m unittest", "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt")
        }
        Language::JavaScript => ("npm test", "npm install --ignore-scripts"),
    };
    vec![
        (format!("cd {}", folder.display()), "read README.md there"),
        (test.into(), "the plugin's own tests"),
        (tools.into(), "once: what builds components"),
        ("querl plugin build .".into(), "the component"),
        ("querl plugin test .".into(), "the contract and the golden cases"),
        ("querl plugin pack .".into(), "one file to sign and to ship"),
    ]
}

/// The grammar of a plugin's id, a crate's and a package's name.
fn check_name(name: &str, language: Language) -> Result<(), String> {
    let refused = |reason: &str| Err(format!("`{name}` is no name for a plugin: {reason}"));
    let grammar = "expected a letter, then letters, digits and `-`, all lower case, at most 64";
    let is_plain = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
    let begins_and_ends = name.starts_with(|c: char| c.is_ascii_lowercase()) && !name.ends_with('-');
    if !begins_and_ends || name.len() > 64 || !name.chars().all(is_plain) || name.contains("--") {
        return refused(grammar);
    }
    if name == "querl-sdk" {
        return refused("the SDK has it");
    }
    if language == Language::Rust && files::RESERVED_IN_RUST.contains(&name) {
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
