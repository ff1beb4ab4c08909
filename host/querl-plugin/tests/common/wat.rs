//! Guests written as core modules in text, `tests/guests/wat/NAME.wat`, for what a compiler does not let an author do.
//!
//! A module imports and exports under the names of the contract, and `wit-component` makes a component of it. Lines that begin
//! with `;;!` are for this file:
//! - `include NAME`: the text of `shared/NAME.wat` stands here.
//! - `contract VERSION`: every `@0.1.0`, of the contract too, becomes this version.
//! - `adds INTERFACE ITEM`, `lacks INTERFACE ITEM`, `package ITEM`: changes the contract that the guest is built for.
//! - `world ITEM`: a part of the guest's world; without any, it is a reward that may import all that there is.

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

/// The component that the guest `name` is.
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

/// A module and what it says of its contract.
struct Guest {
    text: String,
    version: String,
    /// The first word of a `;;!` line, and the rest.
    directives: Vec<(String, String)>,
}

impl Guest {
    fn read(name: &str) -> Self {
        let text = with_includes(&folder().join(format!("{name}.wat")));
        let text = text.replace("{{name}}", name).replace("{{n_name_bytes}}", &name.len().to_string());
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix(";;! ")?.split_once(' '));
        let directives: Vec<_> = lines.map(|(word, rest)| (word.to_owned(), rest.to_owned())).collect();
        let version = directives.iter().find(|(word, _)| word == "contract");
        let version = version.map_or(CONTRACT, |(_, version)| version).to_owned();
        Self { text: at_version(&text, &version), version, directives }
    }

    fn directives_of<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.directives.iter().filter(move |(name, _)| name == word).map(|(_, rest)| rest.as_str())
    }

    /// The contract's files as one, changed as the guest wants it.
    fn contract(&self) -> String {
        let mut wit = format!("package querl:plugin@{};\n", self.version);
        let mut files: Vec<_> =
            std::fs::read_dir(repository().join("wit")).unwrap().map(|entry| entry.unwrap().path()).collect();
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

fn with_includes(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let included = |line: &str| match line.trim().strip_prefix(";;! include ") {
        Some(name) => with_includes(&folder().join(format!("shared/{name}.wat"))),
        None => format!("{line}\n"),
    };
    text.lines().map(included).collect()
}
