//! Guests written as core modules in text, `tests/guests/wat/NAME.wat`, for code that a compiler would not generate.
//!
//! A module imports and exports under the names of the contract, and `wit-component` converts it to a component. Lines that begin with
//! `;;!` are directives for this file:
//! - `include NAME`: inserts the text of `shared/NAME.wat`.
//! - `contract VERSION`: every `@0.1.0`, of the contract too, becomes this version. A name `NAME@0.2` is `NAME.wat` with `contract 0.2.0`;
//!   `shared/NAME-0.2.wat` then replaces `shared/NAME.wat`.
//! - `adds INTERFACE ITEM`, `lacks INTERFACE ITEM`, `package ITEM`: changes the contract that the guest is built for.
//! - `world ITEM`: a part of the guest's world; without this directive, it is a reward with all imports.
//!
//! Words in double braces are numbers and names that depend on the guest ([`Guest::read`]). A call of `$describe_odd` is removed if the
//! guest has no such function.

use super::repository;
use std::path::{Path, PathBuf};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

const CONTRACT: &str = "0.1.0";
const REWARD_WORLD: [&str; 5] = [
    "import querl:plugin/settings@0.1.0;",
    "import querl:plugin/log@0.1.0;",
    "import querl:plugin/style-model@0.1.0;",
    "export querl:plugin/info@0.1.0;",
    "export querl:plugin/rewards@0.1.0;",
];

pub fn folder() -> PathBuf {
    repository().join("tests/guests/wat")
}

/// The component of the guest `name`.
pub fn component(name: &str) -> Vec<u8> {
    let guest = Guest::read(name);
    let mut module = wat::parse_str(&guest.text).unwrap_or_else(|error| panic!("{name}.wat: {error}"));
    let mut resolve = Resolve::default();
    resolve.push_str("contract.wit", &guest.contract()).unwrap_or_else(|error| panic!("{name}.wat: {error:#}"));
    let package = resolve.push_str("guest.wit", &guest.world()).unwrap_or_else(|error| panic!("{name}.wat: {error:#}"));
    let world = resolve.select_world(&[package], Some("guest")).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).unwrap();
    let encoded = ComponentEncoder::default().module(&module).and_then(|encoder| encoder.encode());
    encoded.unwrap_or_else(|error| panic!("{name}.wat: {error:#}"))
}

/// A module and its directives.
struct Guest {
    text: String,
    version: String,
    /// The first word of a `;;!` line, and the rest.
    directives: Vec<(String, String)>,
}

impl Guest {
    fn read(name: &str) -> Self {
        let (file, asked) =
            name.split_once('@').map_or((name, None), |(file, series)| (file, Some(format!("{series}.0"))));
        let path = folder().join(format!("{file}.wat"));
        let version = asked.or_else(|| {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let line = text.lines().find_map(|line| line.strip_prefix(";;! contract "));
            line.map(str::to_owned)
        });
        let version = version.unwrap_or_else(|| CONTRACT.to_owned());
        let is_0_1 = version.starts_with("0.1.");
        let mut text = with_includes(&path, is_0_1);
        if !text.contains("(func $describe_odd") {
            text = text.replace("(call $describe_odd)", "");
        }
        let exports = |interface: &str| text.contains(&format!(";;! world export querl:plugin/{interface}@"));
        let (kind, reward) = match () {
            () if exports("filters") => ("1", "rewards"),
            () if exports("group-rewards") && !exports("rewards") => ("3", "group-rewards"),
            () if exports("style-scores") => ("4", "rewards"),
            () => ("2", "rewards"),
        };
        let score = if reward == "rewards" { "score-batch" } else { "score-group" };
        // Offsets of an episode's query and its length, and the episode's size: the canonical ABI of `rewards.episode`.
        let [query, query_bytes, episode_bytes] = if is_0_1 { ["8", "12", "184"] } else { ["56", "60", "384"] };
        for (word, value) in [
            ("name", file),
            ("n_name_bytes", &file.len().to_string()),
            ("kind", kind),
            ("has_range", if matches!(kind, "2" | "3") { "1" } else { "0" }),
            ("has_groups", if is_0_1 { "0" } else { "1" }),
            ("range", &format!("querl:plugin/{reward}@{CONTRACT}#range")),
            ("score", &format!("querl:plugin/{reward}@{CONTRACT}#{score}")),
            ("query", query),
            ("query_bytes", query_bytes),
            ("episode_bytes", episode_bytes),
        ] {
            text = text.replace(&format!("{{{{{word}}}}}"), value);
        }
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix(";;! ")?.split_once(' '));
        let directives: Vec<_> = lines.map(|(word, rest)| (word.to_owned(), rest.to_owned())).collect();
        Self { text: at_version(&text, &version), version, directives }
    }

    fn directives_of<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.directives.iter().filter(move |(name, _)| name == word).map(|(_, rest)| rest.as_str())
    }

    /// The contract's files, concatenated and modified by the guest's directives.
    fn contract(&self) -> String {
        let folder = if self.version.starts_with("0.1.") { CONTRACT } else { "0.2.0" };
        let mut wit = format!("package querl:plugin@{};\n", self.version);
        let mut files: Vec<_> = std::fs::read_dir(repository().join("wit").join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(file).unwrap();
            wit.extend(text.lines().filter(|line| !line.starts_with("package ")).flat_map(|line| [line, "\n"]));
        }
        for change in self.directives_of("lacks") {
            let (interface, item) = change.split_once(' ').unwrap();
            let start = wit.find(&format!("interface {interface} {{")).unwrap();
            let item_at = start + wit[start..].find(item).unwrap();
            wit.replace_range(item_at..item_at + item.len(), "");
        }
        for change in self.directives_of("adds") {
            let (interface, item) = change.split_once(' ').unwrap();
            let head = format!("interface {interface} {{");
            wit = wit.replace(&head, &format!("{head} {item}"));
        }
        wit.extend(self.directives_of("package").flat_map(|item| [item, "\n"]));
        wit
    }

    fn world(&self) -> String {
        let mut items: Vec<_> = self.directives_of("world").collect();
        if items.is_empty() {
            items.extend(REWARD_WORLD);
        }
        at_version(&format!("package querl:guest;\nworld guest {{\n{}\n}}", items.join("\n")), &self.version)
    }
}

fn at_version(text: &str, version: &str) -> String {
    text.replace(&format!("@{CONTRACT}"), &format!("@{version}"))
}

fn with_includes(path: &Path, is_0_1: bool) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let included = |line: &str| match line.trim().strip_prefix(";;! include ") {
        Some(name) => {
            let newer = folder().join(format!("shared/{name}-0.2.wat"));
            let path = folder().join(format!("shared/{name}.wat"));
            with_includes(if is_0_1 || !newer.exists() { &path } else { &newer }, is_0_1)
        }
        None => format!("{line}\n"),
    };
    text.lines().map(included).collect()
}
