//! Vocabulary check: names, comments, messages and documentation use the terms of docs/glossary.md.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Forbidden words and phrases in names, comments, messages and Markdown, and their replacements. Case is ignored, parts of identifiers
/// count as words, and a phrase may cross the end of a line.
const WORDS: &[(&str, &str)] = &[
    ("card", "GPU or device"),
    ("cards", "GPUs or devices"),
    ("beside", "next to, with, in addition to"),
    ("besides", "in addition, other than"),
    ("anew", "again"),
    ("whoever", "the caller, the user"),
    ("told", "reported, passed, given"),
    ("tells apart", "distinguishes"),
    ("of which", "a sentence of its own, or `whose`"),
    ("go on", "continue, resume"),
    ("goes on", "continues, resumes"),
    ("going on", "continuing, resuming"),
    ("gone on", "continued, resumed"),
    ("went on", "continued, resumed"),
    ("dear", "expensive"),
    ("likewise", "also, the same for"),
    ("deaf", "no-op"),
    ("ears", "callbacks"),
    ("meeting", "rendezvous"),
    ("refuses to know", "must not depend on"),
    ("refuse to know", "must not depend on"),
    ("fault of querl", "internal error, please report it"),
    ("numbers that are none", "NaN or Inf"),
    ("far enough", "KL early stopping"),
    ("lent", "borrowed"),
    ("standing", "state, trainer state"),
    ("turned", "RoPE applied, converted, made into"),
];

/// Permitted phrases that contain a forbidden word: terms of the field, or plain English.
const TERMS: &[&str] = &[
    "beside bytes",
    "cuda card",
    "model card",
    "model s card",
    "model cards",
    "dataset card",
    "turned off",
    "turned on",
    "turned into",
];

/// Forbidden type names, which say nothing in a search, and their replacements.
const TYPES: &[(&str, &str)] = &[
    ("Asked", "a request: `RetrievalRequest`, `JudgeRequest`"),
    ("Fitting", "`SftJob`"),
    ("Found", "what was found: `Hits`, `ParameterGradients`"),
    ("Generating", "`GenerateJob`"),
    ("Kept", "what is saved: `SavedActivations`"),
    ("Lent", "`Cow`"),
    ("Measuring", "`BenchJob`"),
    ("Meeting", "`Rendezvous`"),
    ("Outside", "`ServiceContext`"),
    ("Part", "which part: `Shard`, `MicroBatch`"),
    ("Party", "`ProcessGroup`"),
    ("Place", "`Device`, `Rank`, `SourceLocation`"),
    ("Reinforcing", "`RlJob`"),
    ("Said", "a response, a reported event"),
    ("Scored", "what is scored: `ScoredEpisode`, `ScoredResponse`"),
    ("Standing", "`TrainerState`"),
    ("Steps", "`LayerBackend`"),
    ("Sums", "which sums: f32 residual"),
    ("Taker", "`LogitsProcessor`, `LogitsConsumer`"),
    ("Told", "a report, a message"),
    ("Values", "which values: bf16 activations"),
    ("Wanted", "`RequestedRows`, `RequestedOutputs`"),
    ("Whole", "what is whole: `FullWeight`"),
];

/// Extensions of the files that are checked.
const ENDINGS: &[&str] = &["rs", "cuh", "cu", "cpp", "h", "py", "js", "ts", "sh", "toml", "wit", "html", "md"];

/// Files and folders that are not checked: this list, the glossary, and recorded data.
const EXEMPT: &[&str] = &["docs/glossary.md", "tests/e2e/tests/vocabulary.rs", "tests/reference/golden/"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The checked files, which are tracked by git, with their text.
fn files() -> Vec<(String, String)> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().unwrap();
    assert!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let read = |path: &&str| {
        let ending = Path::new(path).extension().and_then(|ending| ending.to_str()).unwrap_or("");
        // A tracked file may be deleted in the work tree.
        ENDINGS.contains(&ending) && !EXEMPT.iter().any(|exempt| path.starts_with(exempt)) && !path.contains("/deps/")
    };
    let with_text = |path: &str| Some((path.to_owned(), fs::read_to_string(root().join(path)).ok()?));
    listed.split_terminator('\0').filter(read).filter_map(with_text).collect()
}

/// A word in lower case, its line, and whether only spaces, underscores or comment markers separate it from the previous word.
struct Word {
    text: String,
    line: usize,
    follows: bool,
}

/// Words of a text: runs of ASCII letters, split between a lower-case and an upper-case letter.
fn words(text: &str) -> Vec<Word> {
    let (mut words, mut line, mut last, mut follows) = (Vec::<Word>::new(), 1, ' ', true);
    for character in text.chars() {
        if character.is_ascii_alphabetic() {
            if !last.is_ascii_alphabetic() || (last.is_ascii_lowercase() && character.is_ascii_uppercase()) {
                words.push(Word { text: String::new(), line, follows });
                follows = true;
            }
            words.last_mut().unwrap().text.push(character.to_ascii_lowercase());
        } else {
            follows &= character.is_whitespace() || "_/!*#\\'".contains(character);
            line += usize::from(character == '\n');
        }
        last = character;
    }
    words
}

/// True if the words at `at` are those of `phrase`.
fn is_at(words: &[Word], at: usize, phrase: &str) -> bool {
    phrase.split(' ').enumerate().all(|(offset, part)| {
        words.get(at + offset).is_some_and(|word| word.text == part && (offset == 0 || word.follows))
    })
}

/// True if the word at `at` is part of a permitted phrase.
fn in_term(words: &[Word], at: usize) -> bool {
    TERMS.iter().any(|term| {
        let length = term.split(' ').count();
        (0..length).any(|offset| at >= offset && is_at(words, at - offset, term))
    })
}

/// All forbidden words of a file: line, word, replacement.
fn private_words(path: &str, text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let words = words(text);
    let mut found = Vec::new();
    for at in 0..words.len() {
        let hits = WORDS.iter().filter(|(phrase, _)| is_at(&words, at, phrase) && !in_term(&words, at));
        found.extend(hits.map(|(phrase, remedy)| (words[at].line, *phrase, *remedy)));
    }
    if path.ends_with(".rs") {
        for (number, line) in text.lines().enumerate() {
            let mut parts = line.split(|character: char| !character.is_alphanumeric() && character != '_');
            if parts.any(|part| ["enum", "struct", "trait", "type", "union"].contains(&part)) {
                let name = parts.next().unwrap_or("");
                let hits = TYPES.iter().filter(|(listed, _)| *listed == name && !line.trim_start().starts_with("//"));
                found.extend(hits.map(|(listed, remedy)| (number + 1, *listed, *remedy)));
            }
        }
    }
    found
}

#[test]
fn names_comments_messages_and_pages_use_the_terms_of_the_field() {
    let mut failures = Vec::new();
    for (path, text) in files() {
        let found = private_words(&path, &text);
        failures.extend(found.iter().map(|(line, word, remedy)| format!("{path}:{line}: \"{word}\"; write: {remedy}")));
    }
    assert!(
        failures.is_empty(),
        "{} private words (docs/glossary.md has the terms):\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn words_are_found_in_names_phrases_and_over_lines_but_not_in_other_words() {
    let text = "/// It goes\n/// on with graphicsCard, a discarded postcard and a model card.\nstruct Place;\nstruct Places;\n";
    let found: Vec<(usize, &str)> =
        private_words("a.rs", text).into_iter().map(|(line, word, _)| (line, word)).collect();
    assert_eq!(found, [(1, "goes on"), (2, "card"), (3, "Place")]);
    assert!(private_words("a.md", "It goes. On Monday it is not `foldertold`, and turned off.").is_empty());
}
