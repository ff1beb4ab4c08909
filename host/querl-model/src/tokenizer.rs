//! Text to tokens and back, and a conversation to the tokens that a model is prompted with.

use crate::checkpoint::required;
use crate::template::token_text;
use crate::{ChatTemplate, ModelError};
use querl_core::records::Message;
use std::collections::BTreeSet;
use std::path::Path;
use tokenizers::Tokenizer;

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
            ModelError::bad_file(&config_path, "names no eos_token; the end of an answer must be known")
        })?;
        let eos_id = inner
            .token_to_id(&eos)
            .ok_or_else(|| ModelError::bad_file(&config_path, format!("eos_token `{eos}` is not in tokenizer.json")))?;
        let generation_path = directory.join("generation_config.json");
        let generation = if generation_path.is_file() { read_json(&generation_path)? } else { Default::default() };
        let template = ChatTemplate::load(directory, &config)?;
        Ok(Self { inner, template, eos_id, stop_ids: stop_ids(&generation["eos_token_id"], eos_id) })
    }

    /// Tokens of a text as it stands, special tokens in it recognised, none added.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The prompt for an answer: the conversation through the chat template, the assistant's turn opened.
    ///
    /// # Errors
    /// The template or the tokenizer fails.
    pub fn encode_prompt(&self, messages: &[Message]) -> Result<Vec<u32>, ModelError> {
        self.encode(&self.template.render(messages, true)?)
    }

    /// An answer as the model is to write it: its tokens and the end of the turn. Encoded apart from the prompt, so that
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

    /// Tokens that end an answer.
    pub fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.stop_ids
    }

    /// Tokens, special ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

fn read_json(path: &Path) -> Result<serde_json::Value, ModelError> {
    let text = std::fs::read_to_string(path).map_err(ModelError::io(path))?;
    serde_json::from_str(&text).map_err(|error| ModelError::bad_file(path, error))
}

/// `eos_token_id` of a generation config is a number, a list or absent.
fn stop_ids(value: &serde_json::Value, eos_id: u32) -> BTreeSet<u32> {
    let listed = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
    listed.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).chain([eos_id]).collect()
}
