//! Texts as batches of tokens, cut to what the model takes and padded to the longest.

use crate::directory::{Architecture, Directory};
use crate::error::EncoderError;
use candle_core::{Device, Tensor};
use tokenizers::{EncodeInput, Encoding, Tokenizer, TruncationParams, TruncationStrategy};

/// Numbers in the attention scores of one layer in one forward pass, `B * heads * T * T`: 64 MiB of f32. A layer has about three such
/// tensors at once; one text may need more than this alone.
const SCORES_PER_PASS: usize = 1 << 24;
/// Texts of one forward pass, however short: more of them are not quicker.
const TEXTS_PER_PASS: usize = 32;

/// A tokenizer with the frame of its model (`[CLS]`, `[SEP]`).
pub(crate) struct Tokens {
    tokenizer: Tokenizer,
    architecture: Architecture,
    pad_id: u32,
    n_heads: usize,
}

/// A batch, each `(B, T)` u32.
pub(crate) struct Batch {
    /// Which of the texts these are.
    pub(crate) positions: Vec<usize>,
    pub(crate) ids: Tensor,
    pub(crate) type_ids: Tensor,
    /// 1 where a token counts, 0 for padding.
    pub(crate) mask: Tensor,
}

impl Tokens {
    /// Reads tokenizer.json. Texts are cut to `max_length` tokens, those of the frame included.
    ///
    /// # Errors
    /// It is not there, or no tokenizer.
    pub(crate) fn open(directory: &Directory, max_length: usize) -> Result<Self, EncoderError> {
        let path = directory.path("tokenizer.json");
        let mut tokenizer = Tokenizer::from_file(&path).map_err(|error| EncoderError::file(&path, error))?;
        // Whatever the file says: lengths are needed before texts are put into batches.
        tokenizer.with_padding(None);
        let truncation =
            TruncationParams { max_length, strategy: TruncationStrategy::LongestFirst, ..TruncationParams::default() };
        tokenizer.with_truncation(Some(truncation)).map_err(|error| EncoderError::file(&path, error))?;
        Ok(Self {
            tokenizer,
            architecture: directory.architecture,
            pad_id: directory.pad_id(),
            n_heads: directory.number("num_attention_heads")?,
        })
    }

    /// Single texts, or pairs of texts, in batches of texts of similar length, the longest first.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub(crate) fn batches<'a, T: Into<EncodeInput<'a>> + Send>(
        &self,
        texts: Vec<T>,
    ) -> Result<Vec<Batch>, EncoderError> {
        let encodings =
            self.tokenizer.encode_batch(texts, true).map_err(|error| EncoderError::Tokenizer(error.to_string()))?;
        let lengths: Vec<usize> = encodings.iter().map(Encoding::len).collect();
        cuts(&lengths, self.n_heads).into_iter().map(|positions| self.batch(&encodings, positions)).collect()
    }

    fn batch(&self, encodings: &[Encoding], positions: Vec<usize>) -> Result<Batch, EncoderError> {
        let longest = positions.iter().map(|position| encodings[*position].len()).max().unwrap_or_default();
        let tensor = |numbers: fn(&Encoding) -> &[u32], padding: u32| {
            let padded = |position: &usize| {
                let numbers = numbers(&encodings[*position]);
                numbers.iter().copied().chain(std::iter::repeat_n(padding, longest - numbers.len()))
            };
            let all: Vec<u32> = positions.iter().flat_map(padded).collect();
            Tensor::from_vec(all, (positions.len(), longest), &Device::Cpu)
        };
        let ids = tensor(Encoding::get_ids, self.pad_id)?;
        let type_ids = match self.architecture {
            Architecture::Bert => tensor(Encoding::get_type_ids, 0)?,
            // It has one type; transformers passes over what a tokenizer says.
            Architecture::XlmRoberta => ids.zeros_like()?,
        };
        let mask = tensor(Encoding::get_attention_mask, 0)?;
        Ok(Batch { positions, ids, type_ids, mask })
    }
}

/// Positions of texts of these lengths in batches: texts of similar length together, so that little is padded, and no more than
/// memory allows.
fn cuts(lengths: &[usize], n_heads: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|position| std::cmp::Reverse(lengths[*position]));
    let mut batches = Vec::new();
    let mut rest = order.as_slice();
    while let Some(longest) = rest.first() {
        let scores_of_one = n_heads * lengths[*longest].pow(2).max(1);
        let n_texts = (SCORES_PER_PASS / scores_of_one).clamp(1, TEXTS_PER_PASS).min(rest.len());
        let (batch, others) = rest.split_at(n_texts);
        batches.push(batch.to_vec());
        rest = others;
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps away: 32 texts of 8192 tokens in one pass, whose attention scores are 137 GB.
    #[test]
    fn batches_are_cut_by_the_memory_of_their_attention_scores() {
        let lengths: Vec<usize> = (0..40).map(|index| if index % 8 == 3 { 512 } else { 16 }).collect();
        let batches = cuts(&lengths, 16);
        let scores = |batch: &Vec<usize>| {
            let longest = batch.iter().map(|position| lengths[*position]).max().unwrap_or_default();
            16 * batch.len() * longest * longest
        };
        assert!(batches.iter().all(|batch| scores(batch) <= SCORES_PER_PASS), "{batches:?}");
        assert_eq!(batches[0], [3, 11, 19, 27], "the longest come first, those of one length in their order");
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 32]);
        let mut all = batches.concat();
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
        assert_eq!(cuts(&[8192, 8192], 16).len(), 2, "one text at a time where even one is more than that");
        assert!(cuts(&[], 16).is_empty());
    }
}
