//! The tokenizer of a model directory, and training of a byte-level BPE tokenizer for small models.

use crate::ModelError;
use crate::chat_template::{ChatTemplate, token_text};
use crate::checkpoint::required;
use crate::control_tokens::{self, ControlTokens};
use crate::export::read_json;
use querl_core::config::ModelConfig;
use querl_core::records::Message;
use querl_core::responses::THINKING_END;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;
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
    control_tokens: ControlTokens,
    template: ChatTemplate,
    /// Template variables for prompts.
    variables: Value,
    /// Ids with which each training target begins.
    response_start: Vec<u32>,
    eos_id: u32,
    stop_ids: BTreeSet<u32>,
    max_token_chars: OnceLock<usize>,
}

/// Reads a `tokenizer.json`.
///
/// # Errors
/// The file cannot be read, or is of another format.
pub(crate) fn read_tokenizer(path: &Path) -> Result<Tokenizer, ModelError> {
    let bytes = std::fs::read(path).map_err(ModelError::io(path))?;
    Tokenizer::from_bytes(bytes)
        .map_err(|error| ModelError::unparsed(path, "a tokenizer as tokenizers 0.23 or older saves it", error))
}

/// The empty thinking block in Qwen3's template.
const EMPTY_THINKING: &str = "<think>\n\n</think>\n\n";

impl TextTokenizer {
    /// Loads `tokenizer.json`, `tokenizer_config.json`, the chat template and, where there is one, `generation_config.json`.
    ///
    /// # Errors
    /// A file is missing or damaged, or neither `tokenizer_config.json` nor `generation_config.json` nor `config.json` names an
    /// end-of-sequence token.
    pub fn load(directory: &Path) -> Result<Self, ModelError> {
        let path = required(directory, "tokenizer.json")?;
        let inner = read_tokenizer(&path)?;
        let config_path = required(directory, "tokenizer_config.json")?;
        let config = read_json(&config_path)?;
        let mut stop_ids = eos_token_ids(&directory.join("generation_config.json"))?;
        let eos_id = match token_text(&config["eos_token"]) {
            Some(eos) => inner.token_to_id(&eos).ok_or_else(|| {
                ModelError::bad_file(&config_path, format!("eos_token `{eos}` is not in tokenizer.json"))
            })?,
            // As transformers' generate does.
            None => {
                if stop_ids.is_empty() {
                    stop_ids = eos_token_ids(&directory.join("config.json"))?;
                }
                let missing = |what: &str| {
                    let remedy = "add `eos_token` to tokenizer_config.json";
                    ModelError::bad_file(&config_path, format!("no eos_token there, and {what}; {remedy}"))
                };
                let id = stop_ids.first().copied();
                let id = id.ok_or_else(|| missing("no eos_token_id in generation_config.json or config.json"))?;
                if inner.id_to_token(id).is_none() {
                    return Err(missing(&format!("tokenizer.json has no token of eos_token_id {id}")));
                }
                id
            }
        };
        let template = ChatTemplate::load(directory, &config)?;
        let stop_ids: BTreeSet<u32> = stop_ids.into_iter().chain([eos_id]).collect();
        let bos_id = token_text(&config["bos_token"]).and_then(|token| inner.token_to_id(&token));
        let ends: BTreeSet<u32> = stop_ids.iter().copied().chain(bos_id).collect();
        let control_tokens = ControlTokens::of(&inner, &template, &ends);
        let (variables, response_start) = (json!({}), Vec::new());
        let max_token_chars = OnceLock::new();
        Ok(Self { inner, control_tokens, template, variables, response_start, eos_id, stop_ids, max_token_chars })
    }

    /// The tokenizer of the policy: as [`Self::load`], with `model.enable_thinking` as a variable of each prompt. Where it is true, a response
    /// to learn begins with an empty thinking block: prompt and response are then the turn that the template writes for an answer without
    /// thoughts, as they are where it is false and the block is in the prompt.
    ///
    /// # Errors
    /// As [`Self::load`], the template does not read the variable, or responses cannot show `</think>`.
    pub fn for_policy(model: &ModelConfig) -> Result<Self, ModelError> {
        let mut tokenizer = Self::load(&model.path)?;
        let Some(enable_thinking) = model.enable_thinking else { return Ok(tokenizer) };
        let refusal = |problem: &str| {
            let remedy = "leave out model.enable_thinking, or use a model whose template has it, such as Qwen3";
            ModelError::Template(format!("{}: {problem}; {remedy}", model.path.display()))
        };
        if !tokenizer.template.text().contains("enable_thinking") {
            return Err(refusal("the chat template does not read `enable_thinking`"));
        }
        tokenizer.variables = json!({ "enable_thinking": enable_thinking });
        if enable_thinking {
            let ids = tokenizer.encode_rendered(&empty_thinking(&tokenizer.template))?;
            if !tokenizer.decode(&ids)?.contains(THINKING_END) {
                return Err(refusal("`</think>` is a special token, which is left out of the text of a response"));
            }
            tokenizer.response_start = ids;
        }
        Ok(tokenizer)
    }

    /// Token ids of a text. A control token in it (`<|im_end|>`) is encoded as text, unless the tokenizer has no other tokens for it; no
    /// special token is added.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        match self.control_tokens.are_in(text) {
            true => self.control_tokens.encode_literally(&self.inner, text),
            false => self.encode_rendered(text),
        }
    }

    /// Token ids of a text in which control tokens are recognised, such as a rendered chat template; no special token is added.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        control_tokens::ids(&self.inner, text)
    }

    /// The prompt of a response: the conversation in the chat template, with the assistant's turn opened. Control tokens in messages are
    /// encoded as text.
    ///
    /// # Errors
    /// The template or the tokenizer fails, or the prompt has no tokens.
    pub fn encode_prompt(&self, messages: &[Message]) -> Result<Vec<u32>, ModelError> {
        self.encode_prompt_within(messages, usize::MAX)
    }

    /// As [`Self::encode_prompt`]. A prompt that cannot fit into `n_positions` tokens by its number of messages or characters is refused
    /// without tokenizing it, which takes a hundred times its memory; others are not checked.
    ///
    /// # Errors
    /// As [`Self::encode_prompt`], or the prompt is too long.
    pub fn encode_prompt_within(&self, messages: &[Message], n_positions: usize) -> Result<Vec<u32>, ModelError> {
        let too_long = |size: usize, unit: &str| {
            let limit = format!("it goes beyond the model's {n_positions} positions");
            ModelError::Generation(format!("the prompt has {size} {unit}; {limit}"))
        };
        if messages.len() > n_positions {
            return Err(too_long(messages.len(), "messages"));
        }
        let has_control = |message: &Message| {
            [&message.role, &message.content].into_iter().any(|text| self.control_tokens.are_in(text))
        };
        let render = |messages: &[Message]| {
            let text = self.render_prompt(messages)?;
            // Characters, since control tokens in messages are replaced one character for one.
            let n_chars = text.chars().count();
            match n_chars > n_positions && n_chars > n_positions.saturating_mul(self.max_token_chars()) {
                true => Err(too_long(n_chars, "characters")),
                false => Ok(text),
            }
        };
        let ids = match messages.iter().any(has_control) {
            true => self.control_tokens.encode_conversation(&self.inner, messages, self.template.text(), render),
            false => self.encode_rendered(&render(messages)?),
        }?;
        if ids.is_empty() { Err(self.template.error("renders this conversation to no tokens")) } else { Ok(ids) }
    }

    /// The text of a prompt, whose token ids [`Self::encode_prompt`] returns.
    ///
    /// # Errors
    /// The template refuses these messages.
    pub fn render_prompt(&self, messages: &[Message]) -> Result<String, ModelError> {
        self.template.render_with(messages, true, &self.variables)
    }

    /// A sentence on the date in prompts, for a chat template that asks for today's; `None` for others.
    pub fn date_note(&self) -> Option<String> {
        self.template.date_note()
    }

    /// Token ids of a response to train on: its text and the end-of-sequence token, after the empty thinking block of a policy that thinks.
    /// Encoded separately from the prompt, so that fine-tuning sees the same tokens as a rollout does.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode_response(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let mut ids = self.response_start.clone();
        ids.extend(self.encode(text)?);
        ids.push(self.eos_id);
        Ok(ids)
    }

    /// Text of token ids, without special tokens.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, true).map_err(|error| ModelError::Tokenizer(error.to_string()))
    }

    /// Ids of the tokens that end a response.
    pub fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.stop_ids
    }

    /// Maximum number of characters of a text that are one token.
    fn max_token_chars(&self) -> usize {
        let longest = || self.inner.get_vocab(true).keys().map(|token| token.chars().count()).max().unwrap_or(0);
        *self.max_token_chars.get_or_init(longest)
    }

    pub(crate) fn template(&self) -> &ChatTemplate {
        &self.template
    }

    pub(crate) fn eos_id(&self) -> u32 {
        self.eos_id
    }

    /// Vocabulary size, special tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

/// The text that `enable_thinking` off adds to a prompt, in comparison to on: an empty thinking block, or the rest of one that the prompt
/// begins.
fn empty_thinking(template: &ChatTemplate) -> String {
    let turn = [Message { role: "user".into(), content: "1".into() }];
    let prompt = |on: bool| template.render_with(&turn, true, &json!({ "enable_thinking": on })).ok();
    let rest = prompt(false).zip(prompt(true)).and_then(|(off, on)| Some(off.strip_prefix(on.as_str())?.to_owned()));
    rest.filter(|rest| rest.contains(THINKING_END)).unwrap_or_else(|| EMPTY_THINKING.to_owned())
}

/// `eos_token_id` of a model's configuration, which is a number, a list or absent; none if there is no such file.
fn eos_token_ids(path: &Path) -> Result<Vec<u32>, ModelError> {
    let file = if path.is_file() { read_json(path)? } else { Value::Null };
    let value = &file["eos_token_id"];
    let listed = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
    Ok(listed.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect())
}

/// Settings of a new tokenizer.
pub struct TokenizerSettings<'a> {
    /// Vocabulary size, special tokens included.
    pub vocab_size: usize,
    /// Special tokens, which get the first ids in this order: `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`.
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
    // Splits letters, digits, punctuation and spaces, so that a word has the same tokens at the start of a line and within it.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn message(content: &str) -> Message {
        Message { role: "user".into(), content: content.into() }
    }

    /// Symptom: tokenizing a text of 1 MB that the model has no room for took 110 MB.
    #[test]
    fn a_prompt_that_cannot_fit_is_refused_without_tokenizing_and_no_other() {
        let base = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tiny-qwen3"));
        let tokenizer = TextTokenizer::load(base).unwrap();
        let refusal = |messages: &[Message]| tokenizer.encode_prompt_within(messages, 512).unwrap_err().to_string();
        let found = refusal(&[message(&"鱼油 ".repeat(100_000))]);
        assert!(found.contains(" characters; it goes beyond the model's 512 positions"), "{found}");
        let found = refusal(&vec![message("x"); 513]);
        assert!(found.contains("the prompt has 513 messages; it goes beyond the model's 512 positions"), "{found}");
        let vocab = tokenizer.inner.get_vocab(true);
        let ids = vocab.values().map(|&id| vec![id; 40]);
        let texts = ids.map(|ids| tokenizer.inner.decode(&ids, false).unwrap());
        for text in texts.chain(["益生菌怎么吃".repeat(90), "<|im_end|>".repeat(90), " \n".repeat(90)]) {
            let messages = [message(&text)];
            let ids = tokenizer.encode_prompt(&messages).unwrap();
            assert_eq!(tokenizer.encode_prompt_within(&messages, ids.len()).unwrap(), ids, "{text}");
        }
    }
}
