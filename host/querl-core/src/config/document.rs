//! A parsed configuration file with the location of each value.

use std::collections::BTreeMap;
use toml::de::{DeTable, DeValue};

/// Maximum number of names of a dotted key; the deepest keys have five.
const MAX_SEGMENTS: usize = 32;

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    /// 1-based line of the file.
    Line(usize),
    /// A flag of the command line, named without its value (which might be a secret put in the wrong place).
    Flag(String),
}

/// An error in the text or in an override.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DocumentError {
    /// `None` if the location is unknown.
    pub(super) origin: Option<Origin>,
    pub(super) message: String,
}

/// The values of a configuration, and for each key (`plugins.rewards[0].weight`) the line or the flag that set it.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) table: toml::Table,
    origins: BTreeMap<String, Origin>,
}

impl Document {
    /// Reads the text of a file.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        let text = std::str::from_utf8(bytes).map_err(|error| DocumentError {
            origin: Some(Origin::Line(line_of(bytes, error.valid_up_to()))),
            message: "not UTF-8 text; save the file as UTF-8".into(),
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let invalid = |error: toml::de::Error| {
            let unquoted = |span: &std::ops::Range<usize>| {
                let messages = ["string values must be quoted", "invalid boolean", "invalid float"];
                messages.iter().any(|message| error.message().starts_with(message))
                    && text.get(span.clone()).is_some_and(|text| text.starts_with(char::is_alphabetic))
            };
            let message = match error.span().filter(unquoted).and_then(|span| text.get(span)) {
                Some(value) => {
                    let value = shorten(&format!("{value:?}"));
                    format!("the value is no number, true or false; a text needs quotes: {value}")
                }
                None => one_line(error.message()),
            };
            DocumentError {
                origin: error.span().map(|span| Origin::Line(line_of(text.as_bytes(), span.start))),
                message: format!("not valid TOML: {message}"),
            }
        };
        let table = text.parse::<toml::Table>().map_err(invalid)?;
        let spans = DeTable::parse(text).map_err(invalid)?;
        let mut origins = BTreeMap::new();
        note_table("", spans.get_ref(), text.as_bytes(), &mut origins);
        Ok(Self { table, origins })
    }

    /// Applies `--set KEY=VALUE`. The value is TOML; a bare word that is not is taken as a string.
    pub(super) fn set(&mut self, assignment: &str) -> Result<(), DocumentError> {
        let Some((key, value)) = assignment.split_once('=') else {
            let message = "expected KEY=VALUE, such as --set rl.max_steps=20".into();
            return Err(DocumentError { origin: Some(Origin::Flag(format!("--set {assignment}"))), message });
        };
        let key = key.trim();
        let origin = Origin::Flag(format!("--set {key}"));
        let at_flag = |message| DocumentError { origin: Some(origin.clone()), message };
        let value = parse_value(value.trim()).map_err(at_flag)?;
        self.put(key, value, origin.clone()).map_err(at_flag)
    }

    /// Sets the value of a dotted key.
    pub(super) fn put(&mut self, key: &str, value: toml::Value, origin: Origin) -> Result<(), String> {
        let segments: Vec<&str> = key.split('.').collect();
        if segments.len() > MAX_SEGMENTS || segments.iter().any(|segment| segment.is_empty()) {
            return Err(format!("`{key}` is not a key; expected dotted names such as rl.max_steps"));
        }
        let path = put_at(&mut self.table, &segments, value)?;
        let is_inside = |other: &String| other.strip_prefix(&path).is_some_and(|rest| rest.starts_with(['.', '[']));
        self.origins.retain(|other, _| !is_inside(other));
        self.origins.insert(path, origin);
        Ok(())
    }

    /// Whether `key` itself was written, not only a section around it.
    pub(super) fn is_written(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// Location of the only key that is `key` or ends with `.key`.
    pub(super) fn ending_with(&self, key: &str) -> Option<&Origin> {
        let ending = format!(".{key}");
        let mut found = self.origins.iter().filter(|(written, _)| *written == key || written.ends_with(&ending));
        let (_, origin) = found.next()?;
        found.next().is_none().then_some(origin)
    }

    /// Location of `key`; of a key within it if flags alone have set the section; or else of the innermost enclosing section.
    pub(super) fn origin(&self, key: &str) -> Option<&Origin> {
        if !self.is_written(key) {
            let prefix = format!("{key}.");
            let inside = self.origins.range(prefix.clone()..).next().filter(|(other, _)| other.starts_with(&prefix));
            if let Some((_, origin)) = inside {
                return Some(origin);
            }
        }
        let mut key = key;
        loop {
            if let Some(origin) = self.origins.get(key) {
                return Some(origin);
            }
            key = &key[..key.rfind(['.', '['])?];
        }
    }
}

fn line_of(bytes: &[u8], offset: usize) -> usize {
    1 + bytes[..offset.min(bytes.len())].iter().filter(|byte| **byte == b'\n').count()
}

/// A library's message, folded into one line.
fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// At most 80 characters.
pub(super) fn shorten(text: &str) -> String {
    const LONGEST: usize = 80;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}

fn note_table(prefix: &str, table: &DeTable<'_>, text: &[u8], origins: &mut BTreeMap<String, Origin>) {
    for (key, value) in table {
        let path = join(prefix, key.get_ref());
        origins.insert(path.clone(), Origin::Line(line_of(text, key.span().start)));
        note_value(&path, value.get_ref(), text, origins);
    }
}

fn note_value(path: &str, value: &DeValue<'_>, text: &[u8], origins: &mut BTreeMap<String, Origin>) {
    match value {
        DeValue::Table(table) => note_table(path, table, text, origins),
        DeValue::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                let path = format!("{path}[{index}]");
                origins.insert(path.clone(), Origin::Line(line_of(text, item.span().start)));
                note_value(&path, item.get_ref(), text, origins);
            }
        }
        _ => {}
    }
}

/// `rl` and `gamma` make `rl.gamma`.
pub(super) fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.into() } else { format!("{prefix}.{key}") }
}

fn parse_value(text: &str) -> Result<toml::Value, String> {
    match text.parse::<toml::Value>() {
        Ok(value) => Ok(value),
        Err(error) if text.starts_with(['"', '\'', '[', '{']) => {
            Err(format!("not a valid TOML value: {}", one_line(error.message())))
        }
        Err(_) => Ok(toml::Value::String(text.into())),
    }
}

/// Sets a value below `table`; returns the key in the form of [`Document`].
fn put_at(table: &mut toml::Table, segments: &[&str], value: toml::Value) -> Result<String, String> {
    let (first, rest) = segments.split_first().expect("a split string has a first part");
    let mut path = (*first).to_owned();
    let mut slot = table.entry(*first).or_insert_with(|| toml::Value::Table(toml::Table::new()));
    for segment in rest {
        slot = match slot {
            toml::Value::Table(inner) => {
                path = join(&path, segment);
                inner.entry(*segment).or_insert_with(|| toml::Value::Table(toml::Table::new()))
            }
            toml::Value::Array(items) => {
                let n_items = items.len();
                let index = segment.parse::<usize>().ok().filter(|index| *index < n_items);
                let index = index.ok_or_else(|| {
                    format!("{path} has {n_items} entries; expected an index below {n_items}, got {segment}")
                })?;
                path = format!("{path}[{index}]");
                &mut items[index]
            }
            _ => return Err(format!("{path} is a value, not a section; it has no key {segment}")),
        };
    }
    *slot = value;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "seed = 1\n[rl]\ngamma = 0.9\n[[plugins.rewards]]\npath = 'a'\n[[plugins.rewards]]\npath = 'b'\n";

    #[test]
    fn values_remember_their_lines() {
        let document = Document::parse(TEXT.as_bytes()).unwrap();
        assert_eq!(document.origin("rl.gamma"), Some(&Origin::Line(3)));
        assert_eq!(document.origin("plugins.rewards[1].path"), Some(&Origin::Line(7)));
        assert_eq!(document.origin("plugins.rewards[1].weight"), Some(&Origin::Line(6)));
        assert_eq!(document.origin("rl.unwritten"), Some(&Origin::Line(2)));
        assert_eq!(document.origin("eval"), None);
    }

    #[test]
    fn set_takes_toml_values_and_bare_words() {
        let mut document = Document::parse(TEXT.as_bytes()).unwrap();
        for assignment in
            ["rl.gamma=0.5", "device = cpu", "plugins.rewards.1.path=/c d.wasm", "data.split=[0.6, 0.2, 0.2]"]
        {
            document.set(assignment).unwrap();
        }
        assert_eq!(document.table["rl"]["gamma"].as_float(), Some(0.5));
        assert_eq!(document.table["device"].as_str(), Some("cpu"));
        assert_eq!(document.table["plugins"]["rewards"][1]["path"].as_str(), Some("/c d.wasm"));
        assert_eq!(document.table["data"]["split"].as_array().unwrap().len(), 3);
        assert_eq!(
            document.origin("plugins.rewards[1].path"),
            Some(&Origin::Flag("--set plugins.rewards.1.path".into()))
        );
        assert_eq!(document.origin("rl.clip_range"), Some(&Origin::Line(2)));
    }

    #[test]
    fn bad_overrides_name_the_flag() {
        let mut document = Document::parse(TEXT.as_bytes()).unwrap();
        for (assignment, flag, message) in [
            ("rl.gamma", "--set rl.gamma", "expected KEY=VALUE, such as --set rl.max_steps=20"),
            ("rl..x=1", "--set rl..x", "`rl..x` is not a key; expected dotted names such as rl.max_steps"),
            ("seed.x=1", "--set seed.x", "seed is a value, not a section; it has no key x"),
            (
                "plugins.rewards.2.weight=1",
                "--set plugins.rewards.2.weight",
                "plugins.rewards has 2 entries; expected an index below 2, got 2",
            ),
        ] {
            let fault = document.set(assignment).unwrap_err();
            assert_eq!(fault, DocumentError { origin: Some(Origin::Flag(flag.into())), message: message.into() });
        }
        assert!(document.set("data.split=[0.1").unwrap_err().message.starts_with("not a valid TOML value"));
    }

    #[test]
    fn text_faults_have_lines() {
        let fault = Document::parse(b"a = 1\nb = \n").unwrap_err();
        assert_eq!(fault.origin, Some(Origin::Line(2)));
        let fault = Document::parse(b"a = 1\n# \xff\n").unwrap_err();
        assert_eq!(
            fault,
            DocumentError { origin: Some(Origin::Line(2)), message: "not UTF-8 text; save the file as UTF-8".into() }
        );
    }
}
