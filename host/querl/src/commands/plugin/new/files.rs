//! What a new folder holds: a template, and beside it, in `vendor/`, the SDK of its language and the contract.

use querl_bundle::{Kind, Language};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Names and bytes of what `build.rs` embeds: `rust/...`, `python/...`, `javascript/...`, `wit/...` and `LICENSE`.
static EMBEDDED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Keywords that a crate cannot be called by, and crates that every crate sees.
pub(super) const RESERVED_IN_RUST: [&str; 44] = [
    "abstract",
    "alloc",
    "as",
    "async",
    "await",
    "become",
    "box",
    "break",
    "const",
    "continue",
    "core",
    "crate",
    "do",
    "dyn",
    "else",
    "enum",
    "extern",
    "false",
    "final",
    "fn",
    "for",
    "gen",
    "if",
    "impl",
    "in",
    "let",
    "loop",
    "macro",
    "match",
    "mod",
    "move",
    "mut",
    "proc-macro",
    "pub",
    "ref",
    "return",
    "self",
    "static",
    "std",
    "struct",
    "super",
    "test",
    "trait",
    "try",
];

pub(super) struct NewFile {
    /// Relative, with `/`.
    pub(super) name: String,
    pub(super) bytes: Cow<'static, [u8]>,
}

/// The files of a new folder. Templates of a language are in `templates/common` and `templates/KIND`; `{{name}}` and
/// `{{version}}`, that of the SDK, stand in them.
pub(super) fn of(plugin: &str, kind: Kind, language: Language) -> Vec<NewFile> {
    let mut files: BTreeMap<String, Cow<'static, [u8]>> = BTreeMap::new();
    files.insert("LICENSE".into(), embedded("LICENSE"));
    files.insert(".gitignore".into(), ignored(language).as_bytes().into());
    for folder in ["common", kind.name()] {
        let prefix = format!("{}/templates/{folder}/", language.name());
        for (name, bytes) in under(&prefix) {
            files.insert(filled(name, plugin), filled(&String::from_utf8_lossy(bytes), plugin).into_bytes().into());
        }
    }
    for (from, to) in vendored(language) {
        let inside = |name: &str| !name.starts_with("templates/") && !name.starts_with("tests/");
        for (name, bytes) in under(from).filter(|(name, _)| inside(name)) {
            files.insert(format!("vendor/{to}/{name}"), bytes.into());
        }
    }
    files.into_iter().map(|(name, bytes)| NewFile { name, bytes }).collect()
}

/// The language's name as people write it.
pub(super) fn spelled(language: Language) -> &'static str {
    match language {
        Language::Rust => "Rust",
        Language::Python => "Python",
        Language::JavaScript => "JavaScript",
    }
}

/// What of the embedded goes to `vendor/`, and under which name.
fn vendored(language: Language) -> &'static [(&'static str, &'static str)] {
    match language {
        // With a link to the contract in it.
        Language::Rust => &[("rust/", "querl-sdk")],
        Language::Python => &[("python/querl_sdk/", "querl_sdk"), ("wit/", "wit")],
        Language::JavaScript => &[("javascript/", "querl-sdk"), ("wit/", "wit")],
    }
}

fn ignored(language: Language) -> &'static str {
    match language {
        Language::Rust => "/target\n*.querl\n",
        Language::Python => "/dist\n/.venv\n__pycache__/\n*.querl\n",
        Language::JavaScript => "/dist\n/node_modules\n*.querl\n",
    }
}

fn filled(text: &str, plugin: &str) -> String {
    text.replace("{{name}}", plugin).replace("{{version}}", env!("CARGO_PKG_VERSION"))
}

/// What is embedded under a prefix, without it.
fn under(prefix: &str) -> impl Iterator<Item = (&'static str, &'static [u8])> {
    EMBEDDED.iter().filter_map(move |(name, bytes)| Some((name.strip_prefix(prefix)?, *bytes)))
}

fn embedded(name: &str) -> Cow<'static, [u8]> {
    let (_, bytes) = EMBEDDED.iter().find(|(known, _)| *known == name).expect("build.rs embeds it");
    (*bytes).into()
}
