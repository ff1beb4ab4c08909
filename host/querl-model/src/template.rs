//! Chat templates: the Jinja text that turns messages into the string a model was trained on.

use crate::ModelError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use querl_core::records::Message;
use std::path::Path;

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Vec<(String, String)>,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// Compiles a template. `special_tokens` (name, text) such as `eos_token` are visible to it.
    ///
    /// # Errors
    /// The template does not parse.
    pub fn new(source: &str, special_tokens: Vec<(String, String)>) -> Result<Self, ModelError> {
        let mut environment = Environment::new();
        // As transformers renders: both on, Python's string methods, and a way for the template to complain.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| ModelError::Template(error.to_string()))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|error| ModelError::Template(error.to_string()))?;
        Ok(Self { environment, special_tokens })
    }

    /// The template of a model directory: `chat_template.jinja`, or the key in `tokenizer_config.json`.
    pub(crate) fn load(directory: &Path, tokenizer_config: &serde_json::Value) -> Result<Self, ModelError> {
        let path = directory.join("chat_template.jinja");
        let source = if path.is_file() {
            std::fs::read_to_string(&path).map_err(ModelError::io(&path))?
        } else if let Some(source) = tokenizer_config["chat_template"].as_str() {
            source.to_owned()
        } else {
            return Err(ModelError::MissingFile {
                directory: directory.to_owned(),
                file: "chat_template.jinja".into(),
                needs: "a chat template there or in tokenizer_config.json; an instruct model has one",
            });
        };
        let special_tokens = ["bos_token", "eos_token", "pad_token", "unk_token"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), token_text(&tokenizer_config[name])?)))
            .collect();
        Self::new(&source, special_tokens)
    }

    /// The conversation as text. With `add_generation_prompt`, the assistant's turn is opened.
    ///
    /// # Errors
    /// The template refuses these messages.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ModelError> {
        self.render_with(messages, add_generation_prompt, &serde_json::json!({}))
    }

    /// As [`ChatTemplate::render`], with further variables such as `enable_thinking`.
    ///
    /// # Errors
    /// The template refuses these messages.
    pub fn render_with(
        &self,
        messages: &(impl serde::Serialize + ?Sized),
        add_generation_prompt: bool,
        variables: &serde_json::Value,
    ) -> Result<String, ModelError> {
        let (messages, variables) = (Value::from(Serde(messages)), Value::from(Serde(variables)));
        let special_tokens: Value = self.special_tokens.iter().cloned().collect();
        let given = context! { messages, add_generation_prompt };
        let variables = minijinja::value::merge_maps([given, variables, special_tokens]);
        let rendered = self.environment.get_template(NAME).and_then(|template| template.render(variables));
        rendered.map_err(|error| ModelError::Template(error.to_string()))
    }
}

/// A special token in `tokenizer_config.json`: a string, or an object with `content`.
pub(crate) fn token_text(value: &serde_json::Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}
