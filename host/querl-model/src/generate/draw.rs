//! Whoever looks at the logits that follow a sequence.

use super::beam::Continuations;
use super::filters::Rules;
use super::sampling::{Choice, choose};
use super::{Decoding, EndedBy, Generated};
use crate::ModelError;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// What is done with a row of logits.
pub enum Taker<'s> {
    /// A token is chosen, wherever the logits are.
    Draw(&'s mut Draw),
    /// The best are compared with those of other beams, on the host.
    Beam(&'s mut Continuations),
}

impl Taker<'_> {
    /// Takes the logits of the whole vocabulary; they may be changed.
    pub fn take(&mut self, logits: &mut [f32], rules: &Rules<'_>) -> Result<(), ModelError> {
        match self {
            Self::Draw(draw) => draw.take(logits, rules),
            Self::Beam(continuations) => continuations.take(logits, rules),
        }
    }
}

/// Draws the tokens of one answer.
pub struct Draw {
    pub rng: ChaCha8Rng,
    pub decoding: Decoding,
    pub token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    behaviour_logprobs: Vec<f32>,
}

impl Draw {
    pub fn new(seed: u64, sample: usize, decoding: Decoding) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(sample as u64);
        Self { rng, decoding, token_ids: Vec::new(), logprobs: Vec::new(), behaviour_logprobs: Vec::new() }
    }

    fn take(&mut self, logits: &mut [f32], rules: &Rules<'_>) -> Result<(), ModelError> {
        let choice = choose(logits, &self.token_ids, rules, self.decoding, &mut self.rng)?;
        self.push(choice);
        Ok(())
    }

    /// The answer goes on with this token.
    pub fn push(&mut self, choice: Choice) {
        self.token_ids.push(choice.token);
        self.logprobs.push(choice.logprob);
        self.behaviour_logprobs.push(choice.behaviour_logprob);
    }

    pub fn generated(self, ended_by: EndedBy) -> Generated {
        Generated {
            token_ids: self.token_ids,
            logprobs: self.logprobs,
            behaviour_logprobs: self.behaviour_logprobs,
            truncated: ended_by == EndedBy::Length,
            ended_by,
        }
    }
}
