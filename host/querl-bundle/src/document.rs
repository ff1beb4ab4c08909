//! TOML documents with positions: every error names file, line and key. Also reads files, with a limit on their size.

use crate::error::BundleError;
use querl_core::text::disturbs;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use toml::Value;
use toml::de::{DeTable, DeValue};

/// Maximum length of a value in a message.
const EXCERPT_BYTES: usize = 120;

/// A TOML text with its values. Lines are looked up only for an error: a table of the lines of all keys could be much larger
/// than the text.
#[derive(Debug)]
pub(crate) struct Document<'t> {
    origin: String,
    text: &'t str,
    table: toml::Table,
}

/// A step of a path to a value.
#[derive(Debug, Clone, Copy)]
enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

/// A table of a document, with the path to it, by which an error finds its line.
#[derive(Debug, Clone)]
pub(crate) struct Section<'a> {
    document: &'a Document<'a>,
    steps: Vec<Step<'a>>,
    table: &'a toml::Table,
}

impl<'t> Document<'t> {
    /// Parses `text`, named `origin` in messages.
    pub(crate) fn parse(text: &'t str, origin: &str) -> Result<Self, BundleError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let table = text.parse::<toml::Table>().map_err(|error| BundleError::Text {
            origin: origin.to_owned(),
            line: error.span().map_or(1, |span| line_of(text, span.start)),
            message: format!("not valid TOML: {}", one_line(error.message())),
        })?;
        Ok(Self { origin: origin.to_owned(), text, table })
    }

    /// The whole document as a section, which may have only these `keys`.
    pub(crate) fn root(&self, keys: &[&str]) -> Result<Section<'_>, BundleError> {
        let section = Section { document: self, steps: Vec::new(), table: &self.table };
        section.refuse_unknown(keys)?;
        Ok(section)
    }

    /// The line of the value at the path `steps`, or of the nearest section around it.
    fn line(&self, steps: &[Step<'_>]) -> usize {
        let Ok(root) = DeTable::parse(self.text) else { return 1 };
        let mut line = 1;
        let mut value = &DeValue::Table(root.into_inner());
        for step in steps {
            let (start, next) = match (step, value) {
                (Step::Key(key), DeValue::Table(table)) => match table.iter().find(|(name, _)| name.get_ref() == key) {
                    Some((name, value)) => (name.span().start, value.get_ref()),
                    None => return line,
                },
                (Step::Index(index), DeValue::Array(items)) => match items.get(*index) {
                    Some(item) => (item.span().start, item.get_ref()),
                    None => return line,
                },
                _ => return line,
            };
            (line, value) = (line_of(self.text, start), next);
        }
        line
    }
}

impl<'a> Section<'a> {
    /// An error at `key` of this section; at the section itself if `key` is empty.
    pub(crate) fn error(&self, key: &str, message: impl std::fmt::Display) -> BundleError {
        let path = self.path_of(key);
        let message = match path.is_empty() {
            true => message.to_string(),
            false => format!("{path} {message}"),
        };
        self.error_at(&self.steps_to(key), message)
    }

    /// The error `KEY is VALUE; expected EXPECTED`, at the line of `key`.
    pub(crate) fn wrong(&self, key: &str, value: &Value, expected: impl std::fmt::Display) -> BundleError {
        self.error(key, format!("is {}; expected {expected}", shown(value)))
    }

    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.table.get(key)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.table.keys().map(String::as_str)
    }

    /// The subtable `key`, which may have only these `keys`; `None` if it is missing.
    pub(crate) fn section(&self, key: &'a str, keys: &[&str]) -> Result<Option<Self>, BundleError> {
        let Some(section) = self.open_section(key)? else { return Ok(None) };
        section.refuse_unknown(keys)?;
        Ok(Some(section))
    }

    /// The subtable `key`, which may have any keys; `None` if it is missing.
    pub(crate) fn open_section(&self, key: &'a str) -> Result<Option<Self>, BundleError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Table(table)) => Ok(Some(Self { document: self.document, steps: self.steps_to(key), table })),
            Some(other) => Err(self.wrong(key, other, format!("a section [{}]", self.path_of(key)))),
        }
    }

    /// The tables written as `[[key]]`, each with only these `keys`; empty if there are none.
    pub(crate) fn sections(&self, key: &'a str, keys: &[&str]) -> Result<Vec<Self>, BundleError> {
        let items = match self.value(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(items)) => items,
            Some(other) => return Err(self.wrong(key, other, format!("sections [[{}]]", self.path_of(key)))),
        };
        let mut sections = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            let Value::Table(table) = item else {
                return Err(self.wrong(key, item, format!("sections [[{}]]", self.path_of(key))));
            };
            let mut steps = self.steps_to(key);
            steps.push(Step::Index(index));
            let section = Self { document: self.document, steps, table };
            section.refuse_unknown(keys)?;
            sections.push(section);
        }
        Ok(sections)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, BundleError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, other, "a text")),
        }
    }

    /// A non-empty text on one line without hidden characters; `meaning` describes it in the error.
    pub(crate) fn line(&self, key: &str, meaning: &str) -> Result<&'a str, BundleError> {
        let Some(text) = self.text(key)? else { return Err(self.missing(key, meaning)) };
        if text.trim().is_empty() || text.chars().any(char::is_control) {
            return Err(self.wrong(key, &Value::from(text), format!("{meaning}, on one line")));
        }
        self.refuse_hidden(key, text).map(|()| text)
    }

    /// A text of any number of lines without hidden characters; `None` if the key is missing.
    pub(crate) fn prose(&self, key: &str) -> Result<Option<&'a str>, BundleError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        self.refuse_hidden(key, text).map(|()| Some(text))
    }

    /// Rejects characters that are invisible or reorder text; the caller checks spaces and line breaks.
    fn refuse_hidden(&self, key: &str, text: &str) -> Result<(), BundleError> {
        let Some(c) = text.chars().find(|c| disturbs(*c) && !matches!(c, '\n' | '\r' | '\t')) else { return Ok(()) };
        let message = format!("has the character U+{:04X}, which hides or reorders text; take it out", u32::from(c));
        Err(self.error(key, message))
    }

    pub(crate) fn missing(&self, key: &str, meaning: &str) -> BundleError {
        self.error_at(&self.steps, format!("the key {} is missing; expected {meaning}", self.path_of(key)))
    }

    /// A list of texts without hidden characters; `None` if the key is missing.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, BundleError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let texts = value.as_array().and_then(|items| items.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        let texts = texts.ok_or_else(|| self.wrong(key, value, "a list of texts"))?;
        texts.iter().try_for_each(|text| self.refuse_hidden(key, text))?;
        Ok(Some(texts))
    }

    /// A whole number of at least `minimum`; `None` if the key is missing.
    pub(crate) fn count(&self, key: &str, minimum: i64) -> Result<Option<u64>, BundleError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Integer(number)) if *number >= minimum => Ok(Some(number.unsigned_abs())),
            Some(other) => Err(self.wrong(key, other, format!("a whole number of {minimum} or more"))),
        }
    }

    /// A lower-case hexadecimal SHA-256; `None` if the key is missing.
    pub(crate) fn digest(&self, key: &str) -> Result<Option<String>, BundleError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        match text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            true => Ok(Some(text.to_owned())),
            false => Err(self.wrong(key, &Value::from(text), "a SHA-256 digest: 64 of 0 to 9 and a to f")),
        }
    }

    fn steps_to<'k>(&self, key: &'k str) -> Vec<Step<'k>>
    where
        'a: 'k,
    {
        let step = (!key.is_empty()).then_some(Step::Key(key));
        self.steps.iter().copied().chain(step).collect()
    }

    /// The path in messages: `settings.max_chars.default`, `plugin[1].id`.
    fn path_of(&self, key: &str) -> String {
        let mut path = String::new();
        for step in self.steps_to(key) {
            match step {
                Step::Index(index) => path.push_str(&format!("[{index}]")),
                Step::Key(key) if path.is_empty() => path.push_str(key),
                Step::Key(key) => path.push_str(&format!(".{key}")),
            }
        }
        path
    }

    fn error_at(&self, steps: &[Step<'_>], message: String) -> BundleError {
        BundleError::Text { origin: self.document.origin.clone(), line: self.document.line(steps), message }
    }

    fn refuse_unknown(&self, known: &[&str]) -> Result<(), BundleError> {
        let Some(key) = self.keys().find(|key| !known.contains(key)) else { return Ok(()) };
        let hint = match nearest(key, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("expected {}", or_list(known.iter().copied())),
        };
        Err(self.error_at(&self.steps_to(key), format!("unknown key {}; {hint}", printable(&self.path_of(key)))))
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

/// A library's message, which may quote the text, on one line.
fn one_line(message: &str) -> String {
    const LONGEST_BYTES: usize = 500;
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    querl_core::text::printable(&message, LONGEST_BYTES)
}

/// Formats a value for a message: short, on one line, without control characters.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Table(_) => "a section".to_owned(),
        Value::String(text) => printable(&format!("{text:?}")),
        other => printable(&other.to_string()),
    }
}

/// Formats untrusted text for a message: truncated, on one line, without control characters.
pub(crate) fn printable(text: &str) -> String {
    querl_core::text::printable(text, EXCERPT_BYTES)
}

/// The known name that is most similar to `name`, if one is similar.
pub(crate) fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    querl_core::text::nearest(name, known).into_iter().next()
}

/// Joins words: `a`, `a or b` or `a, b or c`.
pub(crate) fn or_list<'n>(words: impl Iterator<Item = &'n str>) -> String {
    let words: Vec<_> = words.collect();
    match words.as_slice() {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [most @ .., last] => format!("{} or {last}", most.join(", ")),
    }
}

/// Appends `keys` to the TOML `text`, in their order.
pub(crate) fn write_keys(text: &mut String, keys: &[(&str, Value)]) {
    for (key, value) in keys {
        // Written key by key, because the library's table may have another order of keys.
        let line = toml::Table::from_iter([((*key).to_owned(), value.clone())]);
        text.push_str(&line.to_string());
    }
}

/// The content of a regular file of at most `most` bytes; reading a device or pipe could block or never end.
pub(crate) fn read_file(path: &Path, most: u64) -> Result<Vec<u8>, BundleError> {
    let failed = |source| BundleError::io(path, source);
    // Checked before opening, because opening a pipe blocks until its other end is open.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(BundleError::folder(path, "is not a regular file"));
    }
    let mut content = Vec::new();
    // One byte more than is allowed shows that the file is too large, however much it grows meanwhile.
    File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut content)).map_err(failed)?;
    match content.len() as u64 > most {
        true => Err(BundleError::folder(path, format!("has more than the {most} bytes that are read"))),
        false => Ok(content),
    }
}

/// Like [`read_file`], for UTF-8 text.
pub(crate) fn read_text_file(path: &Path, most: u64) -> Result<String, BundleError> {
    String::from_utf8(read_file(path, most)?).map_err(|_| BundleError::folder(path, "is not UTF-8 text"))
}
