//! Synthetic data: rows of random tokens with a common prefix.

use crate::report::Lengths;
use querl_model::{SPLIT_MIX_STEP, split_mix};
use querl_train::Example;

/// Tokens below this id are special tokens of the benchmark's tokenizer.
const FIRST_TOKEN: u64 = 3;

const END: u32 = 2;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(SPLIT_MIX_STEP);
        split_mix(self.0)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn token(&mut self, vocab_size: usize) -> u32 {
        (FIRST_TOKEN + self.below(vocab_size as u64 - FIRST_TOKEN)) as u32
    }
}

/// Prompts with responses. A row depends only on its number and the seed.
pub(crate) fn examples(n: usize, lengths: &Lengths, vocab_size: usize, seed: u64) -> Vec<Example> {
    let mut random = Random(seed);
    let shared: Vec<u32> = (0..lengths.shared).map(|_| random.token(vocab_size)).collect();
    let example = |index: usize| {
        let mut random = Random(seed ^ (index as u64 + 1).wrapping_mul(SPLIT_MIX_STEP));
        let n_own = lengths.own_least + random.below((lengths.own_most - lengths.own_least) as u64 + 1) as usize;
        let own = (0..n_own).map(|_| random.token(vocab_size)).collect::<Vec<_>>();
        let mut response: Vec<u32> = (1..lengths.answer).map(|_| random.token(vocab_size)).collect();
        response.push(END);
        Example { prompt: [shared.as_slice(), &own].concat(), response }
    };
    (0..n).map(example).collect()
}

pub(crate) fn prompts(n: usize, lengths: &Lengths, vocab_size: usize, seed: u64) -> Vec<Vec<u32>> {
    examples(n, lengths, vocab_size, seed).into_iter().map(|example| example.prompt).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_a_prefix_and_have_the_requested_lengths() {
        let lengths = Lengths { shared: 5, own_least: 2, own_most: 9, answer: 3 };
        let rows = examples(200, &lengths, 50, 7);
        assert!(rows.iter().all(|row| row.prompt[..5] == rows[0].prompt[..5] && row.response.len() == 3));
        assert!(rows.iter().all(|row| row.response[2] == END && row.response[..2].iter().all(|id| *id > END)));
        let own: Vec<usize> = rows.iter().map(|row| row.prompt.len() - 5).collect();
        assert_eq!((own.iter().min(), own.iter().max()), (Some(&2), Some(&9)));
        assert_ne!(rows[0].prompt, rows[1].prompt);
        assert_eq!(examples(3, &lengths, 50, 7), rows[..3]);
    }
}
