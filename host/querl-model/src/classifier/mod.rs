//! Text classifiers: a decoder and a classification head that maps the hidden state of a text's last token to a logit per class.
//!
//! They are read from and written to the layout of transformers' `Qwen2ForSequenceClassification` and
//! `Qwen3ForSequenceClassification`, or PEFT's of an adapter for such a model. Texts are packed without padding, so that the result
//! of a text does not depend on the others in its batch.

mod batcher;
mod files;
mod labels;

pub use batcher::{
    BatchLimits, BatchObserver, BatchStats, BatchWorker, Batcher, Classification, MAX_UNSPLIT_TEXTS, QueueError,
    RequestCallback,
};
pub use files::{ClassifierTokenizer, Encoded};
pub use labels::Labels;

use crate::adapter::SCORE;
use crate::{Decoder, LoraAdapter, LoraSettings, ModelError, PackedBatch, Pass, Weights};
use candle_core::{DType, Device, Tensor, Var};
use files::Opened;
use querl_core::config::BaseDtype;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::path::Path;

const HEAD_WEIGHT: &str = "score.weight";

/// Which weights of a new classifier are trained in addition to its head.
#[derive(Debug, Clone, PartialEq)]
pub enum Tuning {
    /// Every weight of the decoder.
    Full,
    /// A new LoRA adapter; the decoder's weights are frozen.
    Lora(LoraSettings),
}

/// A text classifier: a decoder with a classification head.
pub struct Classifier {
    decoder: Decoder,
    adapter: Option<LoraAdapter>,
    score: Tensor, // (classes, H)
    labels: Labels,
    pad_id: Option<u32>,
    vars: BTreeMap<String, Var>,
}

impl Classifier {
    /// Makes a classifier to train: the decoder of a language model or a classifier, and a new head with normally distributed weights of
    /// the configuration's `initializer_range`, as in transformers.
    ///
    /// # Errors
    /// A file is missing or damaged, the architecture is not supported, or the adapter's settings do not fit the model.
    pub fn fresh(
        base: &Path,
        labels: Labels,
        tuning: &Tuning,
        (dtype, seed): (BaseDtype, u64),
    ) -> Result<Self, ModelError> {
        let opened = Opened::open(base)?;
        let weights = if *tuning == Tuning::Full { Weights::Trained } else { Weights::Frozen };
        let decoder = opened.decoder(weights, dtype)?;
        let (hidden, deviation) = (decoder.config().hidden_size, decoder.config().initializer_range as f32);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values: Vec<f32> =
            (0..labels.n_classes() * hidden).map(|_| crate::random::standard_normal(&mut rng) * deviation).collect();
        let score = Var::from_vec(values, (labels.n_classes(), hidden), &Device::Cpu)?;
        let adapter = match tuning {
            Tuning::Full => None,
            Tuning::Lora(settings) => {
                let mut settings = settings.clone();
                settings.modules_to_save.retain(|name| name != SCORE);
                Some(LoraAdapter::new(&decoder, settings, seed)?.with_score(&score))
            }
        };
        Ok(Self::assemble(decoder, adapter, score, labels, files::pad_id(base)?))
    }

    /// Loads a classifier that transformers or querl saved with all its weights.
    ///
    /// # Errors
    /// A file is missing or damaged, the architecture is not a classifier's, the head has another size than the labels, or the problem type
    /// is not single-label classification.
    pub fn load(directory: &Path, weights: Weights, dtype: BaseDtype) -> Result<Self, ModelError> {
        let opened = Opened::open(directory)?;
        files::check_problem_type(directory)?;
        let labels = Labels::read(directory)?;
        let score = opened.score()?.ok_or_else(|| {
            let message = format!(
                "no tensor `{HEAD_WEIGHT}` there: this is not a classifier; train one with `querl style train`"
            );
            ModelError::bad_file(directory, message)
        })?;
        let decoder = opened.decoder(weights, dtype)?;
        let score = checked(&score, &labels, decoder.config().hidden_size)
            .map_err(|message| ModelError::bad_file(directory, message))?;
        let score = Var::from_tensor(&score.to_dtype(DType::F32)?)?;
        Ok(Self::assemble(decoder, None, score, labels, files::pad_id(directory)?))
    }

    /// Class names of a classifier folder, read without its weights: those of [`Classifier::load`], or with `base` those of
    /// [`Classifier::load_adapted`].
    ///
    /// # Errors
    /// No file in the folder has class names.
    pub fn labels_in(directory: &Path, base: Option<&Path>) -> Result<Labels, ModelError> {
        match base {
            Some(base) if !Labels::are_in(directory) => Labels::read(base),
            _ => Labels::read(directory),
        }
    }

    /// Loads a base model with an adapter that PEFT (`task_type` `SEQ_CLS`) or querl saved. The head is the adapter's; labels are the
    /// adapter's if its folder has any, or else the base's.
    ///
    /// # Errors
    /// As [`Classifier::load`]; the adapter is for another model, or has no head.
    pub fn load_adapted(base: &Path, adapter: &Path, dtype: BaseDtype) -> Result<Self, ModelError> {
        let decoder = Opened::open(base)?.decoder(Weights::Frozen, dtype)?;
        files::check_problem_type(base)?;
        let labels = if Labels::are_in(adapter) { Labels::read(adapter)? } else { Labels::read(base)? };
        let loaded = LoraAdapter::load(adapter, decoder.config())?;
        let bad = |message: String| ModelError::bad_file(adapter, message);
        let score = loaded.score().cloned().ok_or_else(|| {
            bad(format!(
                "no tensor `{HEAD_WEIGHT}` there: an adapter for a classifier has `score` among its modules_to_save"
            ))
        })?;
        let score = checked(&score, &labels, decoder.config().hidden_size).map_err(bad)?;
        let score = Var::from_tensor(&score.to_dtype(DType::F32)?)?;
        let loaded = loaded.with_score(&score);
        Ok(Self::assemble(decoder, Some(loaded), score, labels, files::pad_id(base)?))
    }

    fn assemble(
        decoder: Decoder,
        adapter: Option<LoraAdapter>,
        score: Var,
        labels: Labels,
        pad_id: Option<u32>,
    ) -> Self {
        let mut vars = adapter.as_ref().map_or(decoder.vars(), LoraAdapter::vars).clone();
        vars.insert(HEAD_WEIGHT.to_owned(), score.clone());
        Self { decoder, adapter, score: score.as_tensor().clone(), labels, pad_id, vars }
    }

    /// A view that records no gradients and saves no activations, for evaluation during training. It shares the values, so it follows
    /// training.
    pub fn without_gradient(&self) -> Self {
        Self {
            decoder: self.decoder.without_gradient(),
            adapter: self.adapter.as_ref().map(LoraAdapter::without_gradient),
            score: self.score.detach(),
            labels: self.labels.clone(),
            pad_id: self.pad_id,
            vars: self.vars.clone(),
        }
    }

    /// Class names.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// The decoder below the head.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The adapter; `None` if there is none.
    pub fn adapter(&self) -> Option<&LoraAdapter> {
        self.adapter.as_ref()
    }

    /// Trained variables by name: those of the adapter or the weights, and the head.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// Logits `(N, classes)` of N texts, given as token ids, at least one each. Shared prefixes are computed once.
    ///
    /// `pass`: settings of the forward pass; its adapter must be this classifier's, or a view of it.
    ///
    /// # Errors
    /// A text without tokens, a token outside the vocabulary, or a text longer than the model's positions.
    ///
    /// Source: transformers' `GenericForSequenceClassification.forward`.
    pub fn logits(&self, texts: &[&[u32]], pass: &Pass<'_>) -> Result<Tensor, ModelError> {
        if let Some(index) = texts.iter().position(|text| text.is_empty()) {
            return Err(candle_core::Error::Msg(format!("text {} of the batch has no tokens", index + 1)).into());
        }
        let batch = PackedBatch::shared(texts.iter().copied());
        let rows: Vec<u32> =
            texts.iter().enumerate().map(|(index, text)| batch.row_of(index, self.last_token(text)) as u32).collect();
        let hidden = self.decoder.hidden_at(&batch, &rows, pass)?; // (N, H)
        Ok(hidden.matmul(&self.score.t()?)?) // (N, classes)
    }

    /// Logits of any number of texts, in their order, without gradients. Texts of similar length share a forward pass of at most
    /// `tokens_per_pass` tokens; the result does not depend on that.
    ///
    /// # Errors
    /// As [`Classifier::logits`].
    pub fn logits_of_all(&self, texts: &[&[u32]], tokens_per_pass: usize) -> Result<Vec<Vec<f64>>, ModelError> {
        let view = self.without_gradient();
        let pass = Pass::with(view.adapter());
        let mut found = vec![Vec::new(); texts.len()];
        for indices in by_length(texts, tokens_per_pass) {
            let part: Vec<&[u32]> = indices.iter().map(|&index| texts[index]).collect();
            let logits = view.logits(&part, &pass)?.to_vec2::<f32>()?;
            for (index, row) in indices.into_iter().zip(logits) {
                found[index] = row.into_iter().map(f64::from).collect();
            }
        }
        Ok(found)
    }

    /// Index of the token whose hidden state is classified: the last one that is not padding.
    fn last_token(&self, text: &[u32]) -> usize {
        text.iter().rposition(|id| Some(*id) != self.pad_id).unwrap_or(0)
    }
}

/// Groups indices of texts into passes of at most `limit` tokens, longest texts first; a text longer than that has a pass of its own.
pub fn by_length(texts: &[&[u32]], limit: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..texts.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(texts[index].len()));
    let (mut passes, mut n_tokens) = (Vec::<Vec<usize>>::new(), 0);
    for index in order {
        n_tokens += texts[index].len();
        match passes.last_mut() {
            Some(pass) if n_tokens <= limit => pass.push(index),
            _ => {
                n_tokens = texts[index].len();
                passes.push(vec![index]);
            }
        }
    }
    passes
}

/// Checks that a head has one row per label and the decoder's hidden size.
fn checked<'a>(score: &'a Tensor, labels: &Labels, hidden: usize) -> Result<&'a Tensor, String> {
    let expected = [labels.n_classes(), hidden];
    match score.dims() == expected {
        true => Ok(score),
        false => Err(format!(
            "`{HEAD_WEIGHT}` has shape {:?}; the {} labels and the model's width make it {expected:?}",
            score.dims(),
            labels.n_classes()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::by_length;

    #[test]
    fn texts_of_like_length_go_together() {
        let texts: Vec<Vec<u32>> = [3, 9, 4, 3, 20, 5].into_iter().map(|n| vec![1; n]).collect();
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        assert_eq!(by_length(&texts, 12), [vec![4], vec![1], vec![5, 2, 0], vec![3]]);
        assert!(by_length(&[], 12).is_empty());
    }
}
