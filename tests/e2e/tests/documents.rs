//! The documentation names only files and tests that exist.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Pages whose paths and test names are checked.
const PAGES: &[&str] = &[
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/decisions.md",
    "docs/migration-0.2.md",
    "docs/spec/README.md",
    "docs/spec/encoding.md",
    "docs/spec/host-protocol.md",
    "docs/spec/limits.md",
    "docs/spec/security.md",
    "docs/spec/semantics.md",
    "docs/spec/versions.md",
    "docs/start/ml-engineer.md",
    "docs/start/platform-engineer.md",
    "docs/start/plugin-author.md",
];

/// Folders of the repository that a path may start with.
const FOLDERS: &[&str] = &[".ci", "docs", "examples", "host", "plugins", "sdk", "tests", "wit"];

/// Paths that commands of the pages create.
const GENERATED: &[&str] = &["tests/reference/.venv", "plugins/target", "examples/fivedoctors/runs"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The words of a page, without the delimiters of code and links.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c.is_whitespace() || "`()[];\"'|".contains(c))
        .map(|word| word.trim_end_matches(['.', ',', ':']).trim_end_matches('/'))
        .filter(|word| !word.is_empty())
}

/// Expands `a/{b,c}.rs` to `a/b.rs` and `a/c.rs`.
fn expanded(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((choices, after)) = rest.split_once('}') else { return Vec::new() };
    choices.split(',').flat_map(|choice| expanded(&format!("{before}{choice}{after}"))).collect()
}

/// The path that `word` names: relative to the repository, or to `host/` if it starts with the name of a crate.
fn repository_path(word: &str) -> Option<String> {
    let first = word.split('/').next()?;
    let is_pattern = word.contains(['*', '<', '$', '=', '…']) || word.chars().any(|c| c.is_ascii_uppercase());
    if !word.contains('/') || is_pattern && !word.ends_with(".md") {
        return None;
    }
    match FOLDERS.contains(&first) {
        true => Some(word.to_owned()),
        false => first.starts_with("querl-").then(|| format!("host/{word}")),
    }
}

#[test]
fn paths_named_in_pages_exist() {
    let mut missing = Vec::new();
    for page in PAGES {
        let text = fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        let folder = root().join(page).parent().unwrap().to_owned();
        for word in words(&text) {
            let link = word.split('#').next().unwrap();
            if link.ends_with(".md") && !link.contains("://") && !link.contains('*') {
                if ![folder.clone(), root(), root().join("docs")].iter().any(|folder| folder.join(link).exists()) {
                    missing.push(format!("{page}: {link}"));
                }
                continue;
            }
            for path in repository_path(link).iter().flat_map(|path| expanded(path)) {
                if !root().join(&path).exists() && !GENERATED.contains(&path.as_str()) {
                    missing.push(format!("{page}: {path}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "no such files; update the page or the path:\n{}", missing.join("\n"));
}

/// Texts that operators and plugin authors search for, by page of docs/. The pages of both languages must contain them.
const LOOKED_UP: &[(&str, &[&str])] = &[
    // Signatures: key formats, key rotation, Python packages in components.
    (
        "plugins.md",
        &[
            "`openssl genpkey -algorithm ed25519`",
            "`querl plugin sign BUNDLE --key NEW`",
            "`querl plugin sign --key OLD --new-key NEW`",
            "`plugins.trusted_keys`",
            "numpy",
            "jieba",
            "`words`",
        ],
    ),
    // TLS by a reverse proxy, limits per client.
    (
        "start/platform-engineer.md",
        &["listen 443 ssl;", "proxy_pass http://querl;", "limit_conn querl_clients", "`--max_connections_per_peer`"],
    ),
    // A loader that skips rows without an assistant message.
    ("files.md", &["load_dataset(\"json\", data_files=files)", "row[\"metadata\"][\"dropped\"] == \"\""]),
];

#[test]
fn pages_of_both_languages_have_what_operators_look_up() {
    for (page, texts) in LOOKED_UP {
        for folder in ["docs", "docs/zh-CN"] {
            let text = fs::read_to_string(root().join(folder).join(page)).unwrap();
            let missing: Vec<_> = texts.iter().filter(|wanted| !text.contains(*wanted)).collect();
            assert!(missing.is_empty(), "{folder}/{page} lacks {missing:?}");
        }
    }
    for (page, rotation, revocation) in [
        ("docs/plugins.md", "**Rotation of a key.**", "**Revocation of a key**"),
        ("docs/zh-CN/plugins.md", "**更换密钥。**", "**吊销密钥**"),
    ] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        assert!(text.contains(rotation) && text.contains(revocation), "{page}");
    }
}

/// A word with three underscores or more in ARCHITECTURE.md is the name of a test.
#[test]
fn tests_named_in_the_architecture_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let output =
        Command::new("git").args(["grep", "-hoE", "fn [a-z0-9_]+", "--", "*.rs"]).current_dir(root()).output().unwrap();
    let functions = String::from_utf8(output.stdout).unwrap();
    let functions: BTreeSet<&str> = functions.lines().filter_map(|line| line.strip_prefix("fn ")).collect();
    let is_name =
        |word: &&str| word.matches('_').count() >= 3 && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let missing: Vec<&str> = words(&text).filter(is_name).filter(|name| !functions.contains(name)).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md names tests that do not exist:\n{}", missing.join("\n"));
}

#[test]
fn the_architecture_page_has_at_most_2500_words() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let n_words = text.split_whitespace().count();
    assert!(n_words <= 2500, "{n_words} words; move details to docs/ or to the code");
}
