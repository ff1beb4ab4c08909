//! Texts as batches of tokens, cut to what the model takes and padded to the longest.

use crate::directory::Directory;
use crate::error::EncoderError;
use candle_core::{Device, Tensor};
use tokenizers::{
    EncodeInput, Encoding, PaddingDirection, PaddingParams, PaddingStrategy, Tokenizer, TruncationParams,
    TruncationStrategy,
};

/// A tokenizer with the frame of its model (`[CLS]`, `[SEP]`).
pub(crate) struct Tokens {
    tokenizer: Tokenizer,
}

/// A batch, each `(B, T)` u32.
pub(crate) struct Batch {
    pub(crate) ids: Tensor,
    pub(crate) type_ids: Tensor,
    /// 1 where a token counts, 0 for padding.
    pub(crate) mask: Tensor,
}

impl Tokens {
    /// Reads tokenizer.json.
    ///
    /// # Errors
    /// It is not there, or no tokenizer.
    pub(crate) fn open(directory: &Directory) -> Result<Self, EncoderError> {
        let path = directory.path("tokenizer.json");
        let mut tokenizer = Tokenizer::from_file(&path).map_err(|error| EncoderError::file(&path, error))?;
        let pad_id = directory.pad_id()?;
        let pad_token = tokenizer.id_to_token(pad_id).unwrap_or_default();
        tokenizer.with_padding(Some(PaddingParams {
            strategy: PaddingStrategy::BatchLongest,
            direction: PaddingDirection::Right,
            pad_to_multiple_of: None,
            pad_id,
            pad_type_id: 0,
            pad_token,
        }));
        let truncation = TruncationParams {
            max_length: directory.max_length()?,
            strategy: TruncationStrategy::LongestFirst,
            ..TruncationParams::default()
        };
        tokenizer.with_truncation(Some(truncation)).map_err(|error| EncoderError::file(&path, error))?;
        Ok(Self { tokenizer })
    }

    /// Single texts, or pairs of texts.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub(crate) fn batch<'a, T: Into<EncodeInput<'a>> + Send>(&self, texts: Vec<T>) -> Result<Batch, EncoderError> {
        let encodings =
            self.tokenizer.encode_batch(texts, true).map_err(|error| EncoderError::Tokenizer(error.to_string()))?;
        let tensor = |numbers: fn(&Encoding) -> &[u32]| {
            let shape = (encodings.len(), encodings.first().map_or(0, Encoding::len));
            let all: Vec<u32> = encodings.iter().flat_map(|encoding| numbers(encoding).iter().copied()).collect();
            Tensor::from_vec(all, shape, &Device::Cpu)
        };
        Ok(Batch {
            ids: tensor(Encoding::get_ids)?,
            type_ids: tensor(Encoding::get_type_ids)?,
            mask: tensor(Encoding::get_attention_mask)?,
        })
    }
}
