//! The next token of each answer: logits, the choice on the card, and the one copy back.

use super::places::Places;
use super::step::Step;
use crate::device::{Answers, Drawn, Matrix, SamplingRows, Scale};
use candle_core::Result as TensorResult;
use querl_model::Decoding;
use querl_model::ModelError;
use querl_model::backend::LogitsConsumer;
use querl_model::backend::LogitsProcessor;
use querl_model::backend::SampledToken;
use querl_model::backend::ScheduledSequence;
use std::ops::Range;

impl Step<'_> {
    /// Hands each consumer its token, or the logits. `has_logits`: whether they are there, of the consumers in their order.
    pub(super) fn choose(
        &mut self,
        units: &mut [ScheduledSequence<'_>],
        has_logits: bool,
        rules: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError> {
        let mut consumers: Vec<&mut LogitsConsumer<'_>> =
            units.iter_mut().flat_map(|unit| &mut unit.consumers).collect();
        let (n, n_at_once) = (consumers.len(), self.places.sizes.n_logit_rows);
        for start in (0..n).step_by(n_at_once) {
            let rows = start..n.min(start + n_at_once);
            if !(has_logits && self.has_logits_of(n)) {
                self.logits(rows.clone())?;
            }
            match &consumers[start] {
                LogitsConsumer::Sampler(draw) => self.draw(n, rows, draw.decoding, rules)?,
                LogitsConsumer::BeamCandidates(_) => self.compare(&mut consumers[rows], rules)?,
            }
        }
        if matches!(consumers.first(), Some(LogitsConsumer::Sampler(_))) {
            self.hand_out(&mut consumers)
        } else {
            Ok(())
        }
    }

    /// Logits of the hidden states that some consumers follow.
    pub(super) fn logits(&mut self, rows: Range<usize>) -> TensorResult<()> {
        let (width, n_vocabulary) = (self.config.hidden_size, self.config.vocab_size);
        let Places { hidden, taken, logits, frame, fields, .. } = &mut *self.places;
        let mut logits = logits.slice_mut(..rows.len() * n_vocabulary);
        if fields.taken.is_empty() {
            let hidden = hidden.slice(rows.start * width..rows.end * width);
            return self.weights.head.multiply(
                self.gpu,
                &Matrix::of(self.gpu, &hidden, width)?,
                &mut logits,
                Scale::WRITE,
            );
        }
        let list = frame.words(fields.taken.start + rows.start..fields.taken.start + rows.end);
        let mut taken = taken.slice_mut(..rows.len() * width);
        self.gpu.pick_into(hidden, &list, width, &mut taken)?;
        self.weights.head.multiply(self.gpu, &Matrix::of(self.gpu, &taken, width)?, &mut logits, Scale::WRITE)
    }

    /// Chooses the tokens of some of `n` answers.
    fn draw(
        &mut self,
        n: usize,
        rows: Range<usize>,
        decoding: Decoding,
        rules: &LogitsProcessor<'_>,
    ) -> TensorResult<()> {
        let Places { logits, originals, frame, fields, read_back, .. } = &mut *self.places;
        let of = |range: &Range<usize>, size: usize| range.start + rows.start * size..range.start + rows.end * size;
        let max_tokens = if self.sampling.look_at_answers() { rules.settings.max_new_tokens } else { 0 };
        let answers = (max_tokens > 0).then(|| Answers {
            tokens: frame.words(of(&fields.answers, max_tokens)),
            max_tokens,
            originals: originals.slice_mut(..rows.len() * max_tokens),
        });
        let uniforms = match decoding {
            Decoding::Sample => Some(frame.doubles(of(&fields.uniforms, 2))?),
            Decoding::Greedy | Decoding::Beam { .. } => None,
        };
        let of_answers = SamplingRows { lengths: frame.words(of(&fields.written, 1)), answers, uniforms };
        let mut logits = logits.slice_mut(..rows.len() * self.config.vocab_size);
        read_back.write(n, rows.clone(), |drawn| self.gpu.choose(&mut logits, of_answers, self.sampling, drawn))
    }

    /// Waits for the card, and gives each answer its token.
    fn hand_out(&mut self, consumers: &mut [&mut LogitsConsumer<'_>]) -> Result<(), ModelError> {
        let [tokens, logprobs, behaviour] = self.places.read_back.read(self.gpu, consumers.len())?;
        for (index, consumer) in consumers.iter_mut().enumerate() {
            let LogitsConsumer::Sampler(draw) = consumer else { continue };
            let (token, logprob) = (tokens[index], f32::from_bits(logprobs[index]));
            match token {
                Drawn::NOT_FINITE => {
                    let n = draw.token_ids.len();
                    return Err(ModelError::Generation(format!(
                        "the logits of token {n} of a response are not finite"
                    )));
                }
                Drawn::NOTHING_LEFT => {
                    let message = "no_repeat_ngram_size and min_new_tokens leave no token to sample";
                    return Err(ModelError::Generation(message.into()));
                }
                _ => draw.push(SampledToken { token, logprob, behaviour_logprob: f32::from_bits(behaviour[index]) }),
            }
        }
        Ok(())
    }

    /// Hands beams their logits, on the host.
    fn compare(
        &mut self,
        consumers: &mut [&mut LogitsConsumer<'_>],
        rules: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError> {
        let n_vocabulary = self.config.vocab_size;
        let mut logits = self.gpu.download(&self.places.logits.slice(..consumers.len() * n_vocabulary))?;
        consumers
            .iter_mut()
            .zip(logits.chunks_exact_mut(n_vocabulary))
            .try_for_each(|(consumer, row)| consumer.consume(row, rules))
    }
}
