//! A byte-level BPE tokenizer made from a text: for small models of one domain.

use crate::ModelError;
use std::path::Path;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

/// What the tokenizer shall be.
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
