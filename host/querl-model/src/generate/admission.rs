//! Which answers may begin: a card has a fixed number of blocks, and an answer that has begun must be able to end.

use super::sizes::{blocks_of_answer, blocks_of_prompt};
use std::collections::BTreeMap;

/// Blocks that answers in progress may come to hold, against those that there are.
pub(super) struct Admission {
    n_left: usize,
    of_answer: usize,
    in_progress: BTreeMap<usize, InProgress>,
}

/// A prompt whose answers are in progress.
struct InProgress {
    n_answers: usize,
    n_blocks: usize,
}

impl Admission {
    /// `n_blocks`: for answers and their prompts; `None` where there is no end.
    pub(super) fn new(n_blocks: Option<usize>, max_new_tokens: usize) -> Self {
        let n_left = n_blocks.unwrap_or(usize::MAX);
        Self { n_left, of_answer: blocks_of_answer(max_new_tokens), in_progress: BTreeMap::new() }
    }

    /// Keeps room for a further answer to a prompt, if there is any.
    pub(super) fn admit(&mut self, prompt: usize, n_tokens: usize) -> bool {
        let of_prompt = if self.in_progress.contains_key(&prompt) { 0 } else { blocks_of_prompt(n_tokens) };
        let Some(n_left) = self.n_left.checked_sub(of_prompt + self.of_answer) else { return false };
        self.n_left = n_left;
        let entry = self.in_progress.entry(prompt).or_insert(InProgress { n_answers: 0, n_blocks: of_prompt });
        entry.n_answers += 1;
        true
    }

    /// Gives back the room of an answer that has ended, and of its prompt behind the last.
    pub(super) fn end(&mut self, prompt: usize) {
        let Some(InProgress { n_answers, n_blocks }) = self.in_progress.get_mut(&prompt) else { return };
        *n_answers -= 1;
        self.n_left += self.of_answer;
        if *n_answers == 0 {
            self.n_left += *n_blocks;
            self.in_progress.remove(&prompt);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_waits_until_others_have_ended() {
        // A prompt of 20 tokens takes three blocks at most, an answer of 16 two.
        let mut admission = Admission::new(Some(9), 16);
        assert_eq!([admission.admit(0, 20), admission.admit(0, 20), admission.admit(1, 20)], [true, true, false]);
        assert!(admission.admit(0, 20), "what answers to one prompt share is counted once");
        admission.end(0);
        admission.end(0);
        assert!(!admission.admit(1, 20));
        admission.end(0);
        assert!(admission.admit(1, 20) && !admission.admit(2, 20));
    }

    #[test]
    fn without_an_end_everything_is_admitted() {
        let mut admission = Admission::new(None, 1000);
        assert!((0..1000).all(|prompt| admission.admit(prompt, 4000)));
    }
}
