//! Chat templates, rendered as transformers renders them.
//!
//! A template is a program that somebody else wrote: its steps, time, memory and output are limited. minijinja counts steps; a string that
//! doubles takes few of them, so a template has a thread on which it is rendered, and the caller reads the memory of the process meanwhile.
//! A thread cannot be ended from outside: after an error for time or memory the program is expected to end with it.

use crate::ModelError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, StringInput, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, context, filters};
use querl_core::memory::private_memory_bytes;
use querl_core::records::Message;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Maximum size of a template's source. Templates of published models have up to 20 KB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Maximum number of minijinja instructions per rendering. A conversation of 1,000 messages takes about 200,000.
const MAX_STEPS: u64 = 10_000_000;
/// Time limit of a rendering. Counted in polls, so that a suspended process or machine adds only one poll.
const MAX_TIME: Duration = Duration::from_secs(2);
/// Maximum growth of the process's memory during a rendering.
const MAX_MEMORY_BYTES: u64 = 512 << 20;
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Maximum width or indentation in a format string: minijinja allocates that many characters at once.
const MAX_WIDTH: usize = 1_000_000;
/// Interval at which the memory of the process is read.
const POLL: Duration = Duration::from_millis(10);
/// Stack size of the rendering thread, and the instruction limit with it. A loop can build values nested as deeply as the instruction limit
/// permits, and freeing them is recursive. If the first stack cannot be allocated, the second is used.
const STACKS: [(usize, u64); 2] = [(512 << 20, MAX_STEPS), (64 << 20, MAX_STEPS / 8)];

const NAME: &str = "chat";
const REMEDY: &str = "correct the template, or use a model whose template renders this conversation";

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    special_tokens: Vec<(String, String)>,
    text: String,
    source: TemplateSource,
    /// The rendering thread: started by the first rendering, abandoned if a rendering exceeds a limit.
    renderer: Mutex<Option<Renderer>>,
}

type Rendered = Result<String, Failure>;

/// Channel to a rendering thread: template variables, and the channel for the rendered text.
type Renderer = mpsc::Sender<(Value, SyncSender<Rendered>)>;

/// Location of a template, for error messages.
enum TemplateSource {
    /// The file `chat_template.jinja`.
    File(String),
    /// A key of `tokenizer_config.json`.
    Key(String),
}

impl TemplateSource {
    fn error(&self, line: Option<usize>, message: &str) -> ModelError {
        let place = match (self, line) {
            (Self::File(path), Some(line)) => format!("{path}:{line}: chat template"),
            (Self::File(path), None) => format!("{path}: chat template"),
            (Self::Key(path), Some(line)) => format!("{path}: `chat_template`, line {line}"),
            (Self::Key(path), None) => format!("{path}: `chat_template`"),
        };
        ModelError::Template(format!("{place}: {message}; {REMEDY}"))
    }

    fn of(&self, error: &Error) -> ModelError {
        let message = match (error.kind(), error.detail()) {
            (kind, Some(detail)) => format!("{kind}: {detail}"),
            (kind, None) => kind.to_string(),
        };
        self.error(error.line(), &message)
    }
}

fn limit(what: &str) -> String {
    format!("rendering ran into its limit of {what}")
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens`: (name, text) pairs such as `eos_token`, which the template can use as variables.
    ///
    /// # Errors
    /// The template is too large or does not parse.
    pub fn new(source: &str, special_tokens: Vec<(String, String)>) -> Result<Self, ModelError> {
        Self::compile(source, special_tokens, TemplateSource::File("chat_template.jinja".into()))
    }

    /// Loads the template of a model directory: `chat_template.jinja`, or the key `chat_template` of `tokenizer_config.json`.
    pub(crate) fn load(directory: &Path, tokenizer_config: &serde_json::Value) -> Result<Self, ModelError> {
        let path = directory.join("chat_template.jinja");
        let key = || TemplateSource::Key(directory.join("tokenizer_config.json").display().to_string());
        let (text, source) = if path.is_file() {
            (read_bounded(&path)?, TemplateSource::File(path.display().to_string()))
        } else if let Some(text) = default_template(&tokenizer_config["chat_template"], &key())? {
            (text.to_owned(), key())
        } else {
            return Err(ModelError::MissingFile {
                directory: directory.to_owned(),
                file: "chat_template.jinja".into(),
                needs: "a chat template in this file or in tokenizer_config.json; use an instruct model, which has one",
            });
        };
        let special_tokens = ["bos_token", "eos_token", "pad_token", "unk_token"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), token_text(&tokenizer_config[name])?)))
            .collect();
        Self::compile(&text, special_tokens, source)
    }

    fn compile(text: &str, special_tokens: Vec<(String, String)>, source: TemplateSource) -> Result<Self, ModelError> {
        if text.len() > MAX_SOURCE_BYTES {
            let n_bytes = text.len();
            return Err(source.error(None, &format!("has {n_bytes} bytes; expected at most {MAX_SOURCE_BYTES}")));
        }
        let mut environment = environment().map_err(|error| source.of(&error))?;
        environment.add_template_owned(NAME, without_generation_tags(text)).map_err(|error| source.of(&error))?;
        let environment = Arc::new(environment);
        Ok(Self { environment, special_tokens, text: text.to_owned(), source, renderer: Mutex::new(None) })
    }

    pub(crate) fn error(&self, message: &str) -> ModelError {
        self.source.error(None, message)
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// For a template that reads the date of the day (`strftime_now` of transformers), which is not defined here: a sentence that says so.
    pub(crate) fn date_note(&self) -> Option<String> {
        let text = &self.text;
        if !text.contains("strftime_now") {
            return None;
        }
        let value = match default_date(text) {
            Some(date) => format!("{date:?}"),
            None => "the template's fallback".into(),
        };
        let elsewhere = match text.contains("date_string is ") {
            true => format!(
                "for the same prompts elsewhere set its variable `date_string` to {value} (`chat_template_kwargs` of TRL and vLLM, \
                 `data.apply_chat_template_kwargs` of verl; ms-swift and OpenRLHF have no such setting)"
            ),
            false => "TRL, vLLM and verl write the date into the prompt".into(),
        };
        Some(format!(
            "the chat template asks for today's date; querl renders it without (`strftime_now` is undefined), so that prompts do not \
             change with the day; {elsewhere}"
        ))
    }

    /// Renders a conversation as text; `add_generation_prompt` appends the beginning of the assistant's turn.
    ///
    /// # Errors
    /// The template refuses these messages.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ModelError> {
        self.render_with(messages, add_generation_prompt, &serde_json::json!({}))
    }

    /// Like [`ChatTemplate::render`], with further variables for the template, such as `enable_thinking`.
    ///
    /// # Errors
    /// The template refuses these messages, or reaches a limit of steps, time, memory or output.
    pub fn render_with(
        &self,
        messages: &(impl serde::Serialize + ?Sized),
        add_generation_prompt: bool,
        variables: &serde_json::Value,
    ) -> Result<String, ModelError> {
        let (messages, variables) = (Value::from(Serde(messages)), Value::from(Serde(variables)));
        let special_tokens: BTreeMap<_, _> = self.special_tokens.iter().cloned().collect();
        let special_tokens = Value::from(Serde(&special_tokens));
        let given = context! { messages, add_generation_prompt };
        let variables = minijinja::value::merge_maps([given, variables, special_tokens]);
        match self.rendered(variables) {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(Failure::Template(error))) => Err(self.source.of(&error)),
            Ok(Err(Failure::Steps { line, most })) => Err(self.source.error(line, &limit(&format!("{most} steps")))),
            Ok(Err(Failure::Output)) => {
                Err(self.source.error(None, &limit(&format!("{} MiB of output", MAX_OUTPUT_BYTES >> 20))))
            }
            Ok(Err(Failure::Thread(error))) => Err(ModelError::Template(format!(
                "no thread to render the chat template on: {error}; it takes {} MiB of address space: free memory, or raise the limit \
                 (ulimit -v, ulimit -u)",
                STACKS[STACKS.len() - 1].0 >> 20
            ))),
            Err(message) => Err(self.source.error(None, &message)),
        }
    }

    fn rendered(&self, variables: Value) -> Result<Rendered, String> {
        // Held during the rendering: waiting for another rendering must not count as rendering time.
        let mut renderer = self.renderer.lock().unwrap_or_else(PoisonError::into_inner);
        let requests = match renderer.take() {
            Some(requests) => requests,
            None => match start(&self.environment) {
                Ok(requests) => requests,
                Err(error) => return Ok(Err(Failure::Thread(error))),
            },
        };
        let (reply, receiver) = mpsc::sync_channel(1);
        requests.send((variables, reply)).map_err(|_| PANICKED)?;
        let rendered = wait(&receiver, private_memory_bytes)?;
        *renderer = Some(requests);
        Ok(rendered)
    }
}

const PANICKED: &str = "rendering panicked";

/// Starts a thread that serves requests until the channel is closed, on the largest stack that can be allocated.
fn start(environment: &Arc<Environment<'static>>) -> io::Result<Renderer> {
    let [large, small] = STACKS;
    start_on(large, environment.clone()).or_else(|_| {
        let mut environment = Environment::clone(environment);
        environment.set_fuel(Some(small.1));
        start_on(small, Arc::new(environment))
    })
}

fn start_on((stack_bytes, _): (usize, u64), environment: Arc<Environment<'static>>) -> io::Result<Renderer> {
    let (sender, requests) = mpsc::channel::<(Value, SyncSender<Rendered>)>();
    let thread = std::thread::Builder::new().name("chat template".into()).stack_size(stack_bytes);
    thread.spawn(move || {
        for (variables, reply) in requests {
            // Fails if the caller has given up.
            let _ = reply.send(render(&environment, variables));
        }
    })?;
    Ok(sender)
}

/// The value of the key `chat_template`: a template, or a list of named ones; transformers takes the one called `default`.
fn default_template<'a>(value: &'a serde_json::Value, source: &TemplateSource) -> Result<Option<&'a str>, ModelError> {
    let Some(list) = value.as_array() else { return Ok(value.as_str()) };
    let named = list.iter().filter_map(|entry| Some((entry["name"].as_str()?, entry["template"].as_str()?)));
    let templates: Vec<(&str, &str)> = named.collect();
    if let Some(&(_, text)) = templates.iter().find(|(name, _)| *name == "default") {
        return Ok(Some(text));
    }
    let names: Vec<String> = templates.iter().map(|(name, _)| format!("`{name}`")).collect();
    let found = if names.is_empty() { "none".into() } else { names.join(", ") };
    Err(source.error(None, &format!("a list of templates without one called `default`; found {found}")))
}

/// The text that a template assigns to `date_string`.
fn default_date(text: &str) -> Option<&str> {
    text.split("date_string").skip(1).find_map(|rest| {
        let value = rest.trim_start().strip_prefix('=')?.trim_start();
        let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        Some(value[1..].split_once(quote)?.0)
    })
}

/// Replaces the tags `generation` and `endgeneration` by `with` and `endwith`, which have the same scope and whitespace control. In
/// transformers they mark the assistant's tokens and render to their body (`AssistantTracker` in `utils/chat_template_utils.py`); minijinja
/// has no custom tags.
fn without_generation_tags(source: &str) -> String {
    let (mut text, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find('{') {
        text.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = match rest.as_bytes().get(1) {
            Some(b'#') => rest[2..].find("#}").map(|at| at + 4),
            Some(b'{') => tag_length(rest, "}}"),
            Some(b'%') => tag_length(rest, "%}"),
            _ => Some(1),
        };
        // A tag that is not closed: the parser reports it.
        let Some(length) = length else { break };
        let (tag, after) = rest.split_at(length);
        rest = after;
        match tag.strip_prefix("{%").map(tag_name) {
            Some("generation") => text.push_str(&tag.replacen("generation", "with", 1)),
            Some("endgeneration") => text.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            Some("raw") => {
                let mut tags = rest.match_indices("{%").map(|(at, _)| at);
                let end = tags.find(|at| tag_name(&rest[at + 2..]) == "endraw").unwrap_or(rest.len());
                text.push_str(tag);
                text.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            _ => text.push_str(tag),
        }
    }
    text + rest
}

/// The first word of a block tag, after its `{%`.
fn tag_name(tag: &str) -> &str {
    let tag = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_start();
    &tag[..tag.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(tag.len())]
}

/// Length of the tag at the start of a template in bytes, with the first `close` outside of strings; `None` if it is not closed.
fn tag_length(template: &str, close: &str) -> Option<usize> {
    let (bytes, mut at, mut quote) = (template.as_bytes(), 2, None);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (None, b'\'' | b'"') => quote = Some(bytes[at]),
            (None, _) if bytes[at..].starts_with(close.as_bytes()) => return Some(at + close.len()),
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            _ => {}
        }
        at += 1;
    }
    None
}

fn read_bounded(path: &Path) -> Result<String, ModelError> {
    let n_bytes = path.metadata().map_err(ModelError::io(path))?.len();
    if n_bytes > MAX_SOURCE_BYTES as u64 {
        let message = format!("has {n_bytes} bytes; expected a chat template of at most {MAX_SOURCE_BYTES}");
        return Err(ModelError::bad_file(path, message));
    }
    querl_core::fsx::read_text_bounded(path, MAX_SOURCE_BYTES as u64).map_err(ModelError::io(path))
}

/// Jinja settings of transformers: `trim_blocks`, `lstrip_blocks`, Python's string methods and `raise_exception`.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_unknown_method_callback(|state, value, method, args| {
        if let ("format", Some(format)) = (method, value.as_str()) {
            fields(format, '{').try_for_each(|field| check_format(after_name(field), &[]))?;
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("format", |state: &mut State, format: &Value, args: Rest<ValueOrKwargs>| {
        let values: Vec<Value> = args.iter().map(|arg| Value::clone(arg)).collect();
        let mut conversions = fields(format.as_str().unwrap_or_default(), '%');
        conversions.try_for_each(|conversion| check_format(after_key(conversion), &values))?;
        filters::format(state, format, args)
    });
    environment.add_filter("indent", indent);
    environment.add_filter("tojson", |value: &Value, indent: Option<Value>, kwargs: Kwargs| {
        let width = indent.clone().or(kwargs.get::<Option<Value>>("indent")?);
        check_width(width.and_then(|width| width.as_usize()))?;
        filters::tojson(value, indent, kwargs)
    });
    Ok(environment)
}

fn indent(
    value: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let named = kwargs.get::<Option<usize>>("width")?;
    check_width(width.or(named))?;
    filters::indent(value, width, first, blank, kwargs)
}

fn check_width(width: Option<usize>) -> Result<(), Error> {
    match width {
        Some(width) if width > MAX_WIDTH => {
            let message = format!("a width of {width}; expected at most {MAX_WIDTH}");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
        _ => Ok(()),
    }
}

/// The text after each `%` or `{` of a format string. A doubled character is an escape and skipped.
fn fields(format: &str, mark: char) -> impl Iterator<Item = &str> {
    let mut rest = format;
    std::iter::from_fn(move || {
        loop {
            let (_, after) = rest.split_once(mark)?;
            let Some(literal) = after.strip_prefix(mark) else {
                rest = after;
                return Some(after);
            };
            rest = literal;
        }
    })
}

/// A `%` conversion without its key: `5d` for `(name)5d`.
fn after_key(conversion: &str) -> &str {
    match conversion.strip_prefix('(') {
        Some(key) => key.split_once(')').map_or("", |(_, format)| format),
        None => conversion,
    }
}

/// The format of a `{}` field without name, fill and alignment: `5}` for `names[0]:*>5}`.
fn after_name(field: &str) -> &str {
    let mut rest = field;
    while let Some(at) = rest.find(['[', ':', '{', '}']) {
        let after = &rest[at + 1..];
        match rest.as_bytes()[at] {
            b'[' => rest = after.split_once(']').map_or("", |(_, path)| path),
            b':' => {
                let mut chars = after.chars();
                let is_filled = matches!((chars.next(), chars.next()), (Some(_), Some('<' | '>' | '^')));
                return if is_filled { chars.as_str() } else { after };
            }
            _ => break,
        }
    }
    ""
}

/// Checks the width and precision at the start of a format, including those taken from arguments (`*d`).
fn check_format(text: &str, args: &[Value]) -> Result<(), Error> {
    let is_format = |c: char| c.is_ascii_digit() || "<>^+- #,_.*".contains(c);
    let format = &text[..text.find(|c: char| !is_format(c)).unwrap_or(text.len())];
    for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
        check_width(Some(digits.parse().unwrap_or(usize::MAX)))?;
    }
    let from_arguments = format.contains('*');
    args.iter().filter(|_| from_arguments).try_for_each(|arg| check_width(arg.as_usize()))
}

enum Failure {
    Template(Error),
    Steps { line: Option<usize>, most: u64 },
    Output,
    Thread(io::Error),
}

fn render(environment: &Environment<'_>, variables: Value) -> Rendered {
    let mut output = BoundedOutput { bytes: Vec::new(), is_full: false };
    let template = environment.get_template(NAME).map_err(Failure::Template)?;
    let rendered = template.render_captured_to(variables, &mut output).map(drop);
    match (rendered, output.is_full) {
        (_, true) => Err(Failure::Output),
        (Err(error), false) => Err(match (error.kind(), environment.fuel()) {
            (ErrorKind::OutOfFuel, Some(most)) => Failure::Steps { line: error.line(), most },
            _ => Failure::Template(error),
        }),
        (Ok(()), false) => String::from_utf8(output.bytes)
            .map_err(|error| Failure::Template(Error::new(ErrorKind::WriteFailure, error.to_string()))),
    }
}

struct BoundedOutput {
    bytes: Vec<u8>,
    is_full: bool,
}

impl Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.is_full = true;
            return Err(io::Error::other("too much output"));
        }
        self.bytes.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits for the rendered text. The error names the limit that was exceeded.
fn wait<T>(receiver: &Receiver<T>, memory_bytes: impl Fn() -> u64) -> Result<T, String> {
    let mut memory_before = None;
    for _ in 0..MAX_TIME.as_millis() / POLL.as_millis() {
        match receiver.recv_timeout(POLL) {
            Ok(rendered) => return Ok(rendered),
            Err(RecvTimeoutError::Disconnected) => return Err(PANICKED.into()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let memory = memory_bytes();
        if memory.saturating_sub(*memory_before.get_or_insert(memory)) > MAX_MEMORY_BYTES {
            return Err(limit(&format!("{} MiB of memory", MAX_MEMORY_BYTES >> 20)));
        }
    }
    receiver.try_recv().map_err(|error| match error {
        TryRecvError::Empty => limit(&format!("{} s", MAX_TIME.as_secs())),
        TryRecvError::Disconnected => PANICKED.into(),
    })
}

/// A special token in `tokenizer_config.json`: a string, or an object with `content`.
pub(crate) fn token_text(value: &serde_json::Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(template: &str) -> String {
        let messages = [Message { role: "user".into(), content: "x".into() }];
        ChatTemplate::new(template, Vec::new())
            .and_then(|template| template.render(&messages, true))
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn templates_that_do_not_end_or_write_too_much_are_stopped() {
        let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        assert!(failure(nested).contains("rendering ran into its limit of "), "{}", failure(nested));
        let long = "{% set x = 'abcdefgh' * 1000000 %}{% for a in range(9) %}{{ x }}{% endfor %}";
        let expected =
            "chat_template.jinja: chat template: rendering ran into its limit of 64 MiB of output; correct the ";
        assert!(failure(long).starts_with(expected), "{}", failure(long));
        let recursive = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
        assert!(failure(recursive).starts_with("chat_template.jinja:1: chat template: "), "{}", failure(recursive));
        for wide in [
            "{{ 'a\nb' | indent(99999999999999) }}",
            "{{ 'a\nb' | indent(width=99999999999999) }}",
            "{{ messages | tojson(indent=99999999999999) }}",
            "{{ '%99999999999999d' | format(1) }}",
            "{{ '%*d' | format(99999999999999, 1) }}",
            "{{ '{:99999999999999}'.format(1) }}",
            "{{ '{0[a:b]:}<99999999999999}'.format(1) }}",
            "{{ '%%%(a)-99999999999999d' | format({'a': 1}) }}",
        ] {
            assert!(failure(wide).contains("a width of 99999999999999; expected at most 1000000"), "{}", failure(wide));
        }
        assert!(failure(&" ".repeat(MAX_SOURCE_BYTES + 1)).contains("has 1048577 bytes; expected at most 1048576"));
    }

    /// Regression: every number in a format string was taken as a width.
    #[test]
    fn numbers_in_the_text_of_a_format_are_text() {
        for (template, expected) in [
            ("{{ '20250101 {}'.format(1) }}", "20250101 1"),
            ("{{ '{{20250101}} {:>3}: 20250101'.format(1) }}", "{20250101}   1: 20250101"),
            ("{{ '20250101 * %d 20250101' | format(20250101) }}", "20250101 * 20250101 20250101"),
            ("{{ '%% 20250101 %s' | format(1) }}", "% 20250101 1"),
        ] {
            let found = ChatTemplate::new(template, Vec::new()).and_then(|template| template.render(&[], true));
            assert_eq!(found.unwrap(), expected, "{template}");
        }
    }

    /// Regression: the time limit included time in which the process was suspended, and the memory limit included memory that other tests
    /// allocated. A reply that arrives before the last poll is accepted.
    #[test]
    fn the_limit_of_time_counts_polls() {
        let (sender, receiver) = mpsc::sync_channel::<()>(1);
        assert_eq!(wait(&receiver, || 0), Err(limit("2 s")));
        drop(sender);
        assert_eq!(wait(&receiver, || 0), Err(PANICKED.into()));
        let (stack, environment) = (STACKS[1], Arc::new(environment().unwrap()));
        assert!(start_on(stack, environment).is_ok());
    }

    /// Regression: a value nested this deeply overflowed the stack when it was freed.
    #[test]
    fn deeply_nested_values_are_freed() {
        let nested = "{% set ns = namespace(x=1) %}{% for a in range(99) %}{% for b in range(10000) %}\
                      {% set ns.x = [ns.x] %}{% endfor %}{% endfor %}done";
        let template = ChatTemplate::new(nested, Vec::new()).unwrap();
        match template.render(&[], true) {
            Ok(text) => assert_eq!(text, "done"),
            Err(error) => assert!(error.to_string().contains("rendering ran into its limit of "), "{error}"),
        }
    }

    #[test]
    fn errors_name_file_line_and_what_the_template_says() {
        let template = "{{ messages[0].content }}\n{% if true %}\n{{ raise_exception('no tools, please') }}{% endif %}";
        let remedy = "correct the template, or use a model whose template renders this conversation";
        let expected = "chat_template.jinja:3: chat template: invalid operation: no tools, please";
        assert_eq!(failure(template), format!("{expected}; {remedy}"));
        let folder = tempfile::tempdir().unwrap();
        let load = |template: &str| {
            let template = ChatTemplate::load(folder.path(), &serde_json::json!({ "chat_template": template }));
            template.and_then(|template| template.render(&[], true)).unwrap_err().to_string()
        };
        let path = folder.path().join("tokenizer_config.json").display().to_string();
        let expected = format!("{path}: `chat_template`, line 2: unknown filter: filter nope is unknown; {remedy}");
        assert_eq!(load("\n{{ 'x' | nope }}"), expected);
        assert!(load("{% if %}").starts_with(&format!("{path}: `chat_template`, line 1: syntax error: ")));
        let file = folder.path().join("chat_template.jinja");
        std::fs::write(&file, "{{ raise_exception('no') }}").unwrap();
        assert!(load("{{ 'x' }}").starts_with(&format!("{}:1: chat template: ", file.display())));
        std::fs::write(&file, vec![b' '; MAX_SOURCE_BYTES + 1]).unwrap();
        assert!(load("").ends_with("has 1048577 bytes; expected a chat template of at most 1048576"));
    }

    /// Expected texts: transformers 5.10, `render_jinja_template`. Symptom: a syntax error for the templates that TRL trains with.
    #[test]
    fn generation_tags_render_to_their_body() {
        let turns = ["user", "assistant"].map(|role| Message { role: role.into(), content: role[..1].into() });
        for (template, expected) in [
            ("a\n  {% generation %}\n b \n  {% endgeneration %}\nc", "a\n b \nc"),
            ("a\n {%- generation -%} \n b \n {%- endgeneration -%} \nc", "abc"),
            ("{%+ generation +%}\nb\n{%+ endgeneration +%}\nc", "\nb\n\nc"),
            (
                "{#{% generation %}#}x{% raw %}{% generation %}it's{% endraw %}{{ '{% generation %}' }}",
                "x{% generation %}it's{% generation %}",
            ),
            (
                "{% for m in messages %}{% generation %}{% set x = loop.index %}{{ x }}{{ m.content }}{% endgeneration %}\
                 {{ 'x' if x is defined else '.' }}{% endfor %}",
                "1u.2a.",
            ),
            ("{{ {'a': {'b': 1}}['a']['b'] }}{%\n generation\n%}z{%endgeneration%}", "1z"),
        ] {
            let found = ChatTemplate::new(template, Vec::new()).and_then(|template| template.render(&turns, true));
            assert_eq!(found.unwrap(), expected, "{template}");
        }
        let line = failure("{% generation %}\n{% endgeneration %}\n{{ raise_exception('no') }}");
        assert!(line.starts_with("chat_template.jinja:3: chat template: "), "{line}");
        assert!(failure("{% generation %}").contains("syntax error: "), "{}", failure("{% generation %}"));
    }

    #[test]
    fn of_named_templates_the_default_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let load = |names: &[&str]| {
            let list: Vec<_> = names
                .iter()
                .map(|name| serde_json::json!({ "name": name, "template": format!("of {name}") }))
                .collect();
            let template = ChatTemplate::load(folder.path(), &serde_json::json!({ "chat_template": list }));
            template.and_then(|template| template.render(&[], true)).map_err(|error| error.to_string())
        };
        assert_eq!(load(&["tool_use", "default"]), Ok("of default".into()));
        let path = folder.path().join("tokenizer_config.json").display().to_string();
        let expected = format!("{path}: `chat_template`: a list of templates without one called `default`; found ");
        let missing = load(&["tool_use", "rag"]).unwrap_err();
        assert!(missing.starts_with(&format!("{expected}`tool_use`, `rag`; ")), "{missing}");
        assert!(load(&[]).unwrap_err().starts_with(&format!("{expected}none; ")));
    }

    /// The beginning of the template of Llama 3.2.
    #[test]
    fn a_template_that_asks_for_the_date_renders_its_fixed_one_and_is_noted() {
        let of = |source: &str| ChatTemplate::new(source, Vec::new()).unwrap();
        let llama = of("{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n        \
                        {%- set date_string = strftime_now(\"%d %b %Y\") %}\n    {%- else %}\n        \
                        {%- set date_string = \"26 Jul 2024\" %}\n    {%- endif %}\n{%- endif %}\nToday Date: {{ date_string }}");
        assert_eq!(llama.render(&[], true).unwrap(), "Today Date: 26 Jul 2024");
        let note = llama.date_note().unwrap();
        let expected = "; for the same prompts elsewhere set its variable `date_string` to \"26 Jul 2024\" (`chat_template_kwargs` of ";
        assert!(note.starts_with("the chat template asks for today's date; ") && note.contains(expected), "{note}");
        let fixed = of("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}").date_note().unwrap();
        assert!(fixed.ends_with("; TRL, vLLM and verl write the date into the prompt"), "{fixed}");
        let without =
            of("{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}");
        assert_eq!(without.date_note(), None);
    }
}
