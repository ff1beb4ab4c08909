//! Tokenizer, chat template, and training of a byte-level BPE tokenizer for small models.

use crate::ModelError;
use crate::checkpoint::required;
use crate::export::read_json;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use querl_core::records::Message;
use std::collections::BTreeSet;
use std::path::Path;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

/// A model directory's tokenizer, chat template and stop tokens.
pub struct TextTokenizer {
    inner: Tokenizer,
    template: ChatTemplate,
    eos_id: u32,
    stop_ids: BTreeSet<u32>,
}

impl TextTokenizer {
    /// Loads `tokenizer.json`, `tokenizer_config.json`, the chat template and, where there is one, `generation_config.json`.
    ///
    /// # Errors
    /// A file is missing or damaged, or no end-of-sequence token is named.
    pub fn load(directory: &Path) -> Result<Self, ModelError> {
        let path = required(directory, "tokenizer.json")?;
        let inner = Tokenizer::from_file(&path).map_err(|error| ModelError::bad_file(&path, error))?;
        let config_path = required(directory, "tokenizer_config.json")?;
        let config = read_json(&config_path)?;
        let eos = token_text(&config["eos_token"]).ok_or_else(|| {
            ModelError::bad_file(&config_path, "names no eos_token; the end of a response must be known")
        })?;
        let eos_id = inner
            .token_to_id(&eos)
            .ok_or_else(|| ModelError::bad_file(&config_path, format!("eos_token `{eos}` is not in tokenizer.json")))?;
        let generation_path = directory.join("generation_config.json");
        let generation = if generation_path.is_file() { read_json(&generation_path)? } else { Default::default() };
        let template = ChatTemplate::load(directory, &config)?;
        Ok(Self { inner, template, eos_id, stop_ids: stop_ids(&generation["eos_token_id"], eos_id) })
    }

    /// Tokens of a text. Special tokens in it are recognised, none is added.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The prompt of a response: the conversation in the chat template, with the assistant's turn opened.
    ///
    /// # Errors
    /// The template or the tokenizer fails.
    pub fn encode_prompt(&self, messages: &[Message]) -> Result<Vec<u32>, ModelError> {
        self.encode(&self.template.render(messages, true)?)
    }

    /// A response: its tokens and the end-of-sequence token. Encoded separately from the prompt, so that
    /// fine-tuning sees the same tokens as a rollout does.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode_response(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let mut ids = self.encode(text)?;
        ids.push(self.eos_id);
        Ok(ids)
    }

    /// Text of tokens, special ones left out.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, true).map_err(|error| ModelError::Tokenizer(error.to_string()))
    }

    /// Tokens that end a response.
    pub fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.stop_ids
    }

    /// Tokens, special ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

/// `eos_token_id` of a generation config is a number, a list or absent.
fn stop_ids(value: &serde_json::Value, eos_id: u32) -> BTreeSet<u32> {
    let listed = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
    listed.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).chain([eos_id]).collect()
}

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
                needs: "a chat template in this file or in tokenizer_config.json; use an instruct model, which has one",
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

/// Settings of a new tokenizer.
pub struct TokenizerSettings<'a> {
    /// Tokens, special ones included.
    pub vocab_size: usize,
    /// First ids, in order: `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`.
    pub special_tokens: &'a [&'a str],
}

/// Trains a tokenizer on `texts` and writes `tokenizer.json`. The same texts give the same file.
///
/// # Errors
/// Training fails or the file cannot be written.
pub fn train_tokenizer(
    texts: &[String],
    settings: &TokenizerSettings<'_>,
    path: &Path,
) -> Result<Tokenizer, ModelError> {
    let failed = |error: tokenizers::Error| ModelError::Tokenizer(error.to_string());
    let special: Vec<AddedToken> = settings.special_tokens.iter().map(|text| AddedToken::from(*text, true)).collect();
    let mut trainer: TrainerWrapper = BpeTrainerBuilder::new()
        .vocab_size(settings.vocab_size)
        .min_frequency(2)
        .special_tokens(special.clone())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .max_token_length(Some(12)) // bytes: four Chinese characters
        .show_progress(false)
        .build()
        .into();
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_normalizer(Some(NFC)).map_err(failed)?;
    // Letters, digits, marks and spaces apart: a word is the same tokens at the start of a line and in the middle.
    let pieces = SplitPattern::Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+".into());
    let pieces = Split::new(pieces, SplitDelimiterBehavior::Isolated, false).map_err(failed)?;
    let bytes = ByteLevel::new(false, false, false);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![pieces.into(), bytes.into()])));
    tokenizer.with_decoder(Some(ByteLevel::new(false, false, false)));
    tokenizer.train(&mut trainer, texts.iter().map(String::as_str)).map_err(failed)?;
    tokenizer.add_special_tokens(special).map_err(failed)?;
    let text = tokenizer.to_string(true).map_err(failed)?;
    querl_core::fsx::write_atomic(path, text.as_bytes()).map_err(ModelError::io(path))?;
    Ok(tokenizer)
}
