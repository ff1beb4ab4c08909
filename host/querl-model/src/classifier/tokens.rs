//! Texts as tokens of at most so many.

use crate::ModelError;
use crate::checkpoint::required;
use crate::export::read_json;
use crate::tokenizer::token_text;
use std::path::Path;
use tokenizers::Tokenizer;

const FILE: &str = "tokenizer.json";

/// What stands between question and answer in a dialogue of one text.
const ANSWER: &str = "\n回答：";
/// A question that must be shortened keeps this share of the tokens at least, so that the answer is read as an answer to something.
const QUESTION_SHARE: usize = 4;

/// A model folder's tokenizer, for texts alone.
pub struct ClassifierTokenizer {
    inner: Tokenizer,
    pad_id: Option<u32>,
    max_length: usize,
}

/// A text's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// At most as many as asked for.
    pub ids: Vec<u32>,
    /// Tokens that were left out.
    pub n_left_out: usize,
}

/// Whether a folder has a tokenizer.
pub(super) fn is_in(directory: &Path) -> bool {
    directory.join(FILE).is_file()
}

impl ClassifierTokenizer {
    /// Loads `tokenizer.json`; `max_length` is the most tokens of a text, at least 1.
    ///
    /// # Errors
    /// The file is missing or damaged.
    pub fn load(directory: &Path, max_length: usize) -> Result<Self, ModelError> {
        let path = required(directory, FILE)?;
        let bad = |error: tokenizers::Error| ModelError::bad_file(&path, error);
        let mut inner = Tokenizer::from_file(&path).map_err(bad)?;
        // What the file says of padding and cutting is of the program that saved it.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(bad)?;
        let settings = directory.join("tokenizer_config.json");
        let settings = if settings.is_file() { read_json(&settings)? } else { Default::default() };
        // A model without a token for padding is padded with the one that ends texts.
        let pad = token_text(&settings["pad_token"]).or_else(|| token_text(&settings["eos_token"]));
        let pad_id = pad.and_then(|token| inner.token_to_id(&token));
        Ok(Self { inner, pad_id, max_length: max_length.max(1) })
    }

    /// The id that pads a batch elsewhere.
    pub fn pad_id(&self) -> Option<u32> {
        self.pad_id
    }

    /// A text's tokens, with what the tokenizer adds to every text. Of one that is too long the end is left out, as transformers does;
    /// of a dialogue (`用户问题：...\n回答：...`) the end of question and answer each, so that both are there.
    ///
    /// # Errors
    /// The tokenizer fails, or finds no token in the text.
    pub fn encode(&self, text: &str) -> Result<Encoded, ModelError> {
        let mut ids = self.ids(text, true)?;
        if ids.is_empty() {
            return Err(ModelError::Tokenizer(format!(
                "no token in the text `{text}`; expected a question and an answer"
            )));
        }
        let n_left_out = ids.len().saturating_sub(self.max_length);
        if n_left_out > 0 {
            ids = self.shortened(text, ids)?;
        }
        Ok(Encoded { ids, n_left_out })
    }

    fn shortened(&self, text: &str, whole: Vec<u32>) -> Result<Vec<u32>, ModelError> {
        let limit = self.max_length;
        let Some(at) = text.find(ANSWER).filter(|_| limit >= 2 * QUESTION_SHARE) else {
            return Ok(whole.into_iter().take(limit).collect());
        };
        let (question, answer) = (self.ids(&text[..at], false)?, self.ids(&text[at..], false)?);
        let of_question = question.len().min((limit / QUESTION_SHARE).max(limit.saturating_sub(answer.len())));
        let of_answer = limit - of_question;
        Ok(question.into_iter().take(of_question).chain(answer.into_iter().take(of_answer)).collect())
    }

    fn ids(&self, text: &str, adds_special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding =
            self.inner.encode_fast(text, adds_special).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}
