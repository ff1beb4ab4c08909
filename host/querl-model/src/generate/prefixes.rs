//! What prompts have in common: found, computed once, and kept as long as the policy stays.

use crate::cache::{BLOCK_TOKENS, SequenceCache};

/// Prefixes whose keys and values are kept.
pub(super) struct Prefixes {
    kept: Vec<Kept>,
    max_tokens: usize,
    clock: u64,
}

struct Kept {
    tokens: Vec<u32>,
    cache: SequenceCache,
    used_at: u64,
}

/// Tokens that a prefix must add to the one before it: for fewer, a pass of its own costs more than it saves.
const WORTH_SHARING: usize = 4;

impl Prefixes {
    /// At most `max_tokens` are kept, a block that is not full counted as one that is.
    pub(super) fn new(max_tokens: usize) -> Self {
        Self { kept: Vec::new(), max_tokens, clock: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }

    /// The cache of the longest kept beginning of `tokens`; `None` where no token is the same.
    pub(super) fn longest(&mut self, tokens: &[u32]) -> Option<SequenceCache> {
        let common = |kept: &Kept| common_tokens(&kept.tokens, tokens);
        let (index, len) =
            (0..self.kept.len()).map(|index| (index, common(&self.kept[index]))).max_by_key(|(_, len)| *len)?;
        if len == 0 {
            return None;
        }
        self.clock += 1;
        self.kept[index].used_at = self.clock;
        Some(self.kept[index].cache.prefix(len))
    }

    pub(super) fn keep(&mut self, tokens: &[u32], cache: SequenceCache) {
        self.clock += 1;
        self.kept.push(Kept { tokens: tokens.to_vec(), cache, used_at: self.clock });
    }

    /// Lets go of those that were not used for longest, until the limit holds.
    pub(super) fn trim(&mut self) {
        self.kept.sort_by_key(|kept| std::cmp::Reverse(kept.used_at));
        let mut n_tokens = 0;
        self.kept.retain(|kept| {
            n_tokens += kept.tokens.len().next_multiple_of(BLOCK_TOKENS);
            n_tokens <= self.max_tokens
        });
    }
}

/// Beginnings that two or more of the prompts share, each worth a pass of its own beyond the one before it, shortest first.
/// `prompts`: sorted, all different.
pub(super) fn shared_beginnings<'p>(prompts: &[&'p [u32]]) -> Vec<&'p [u32]> {
    let mut found = Vec::new();
    collect(prompts, 0, &mut found);
    found.sort_by_key(|tokens: &&[u32]| tokens.len());
    found
}

/// Adds the beginning of all `prompts`, of which `n_known` tokens are covered, and those of parts of them.
fn collect<'p>(prompts: &[&'p [u32]], n_known: usize, found: &mut Vec<&'p [u32]>) {
    let [first, .., last] = prompts else { return };
    // The last token of a prompt is computed with its answer: its hidden state is what the answer begins from.
    let shortest = prompts.iter().map(|prompt| prompt.len()).min().unwrap_or(0);
    let common = common_tokens(first, last);
    let n_shared = common.min(shortest - 1);
    let n_known = if n_shared >= n_known + WORTH_SHARING {
        found.push(&first[..n_shared]);
        n_shared
    } else {
        n_known
    };
    for part in prompts.chunk_by(|a, b| a.get(common) == b.get(common)) {
        if part.len() < prompts.len() {
            collect(part, n_known, found);
        }
    }
}

fn common_tokens(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cache::{BlockPool, BlockShape};

    #[test]
    fn beginnings_are_found_at_every_depth() {
        let base: Vec<u32> = (0..10).collect();
        let with = |rest: &[u32]| [base.as_slice(), rest].concat();
        let prompts = [with(&[20, 21, 22, 23, 24, 30]), with(&[20, 21, 22, 23, 24, 31]), with(&[40]), with(&[41, 42])];
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let lengths: Vec<usize> = shared_beginnings(&prompts).iter().map(|tokens| tokens.len()).collect();
        assert_eq!(lengths, [10, 15]);
    }

    #[test]
    fn every_prompt_is_left_a_token_of_its_own() {
        let (short, long): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (0..12).collect());
        let found = shared_beginnings(&[&short, &long]);
        assert_eq!(found, [&short[..7]]);
        assert!(shared_beginnings(&[&long]).is_empty());
    }

    #[test]
    fn the_prefixes_used_last_are_kept() {
        let pool = BlockPool::new(BlockShape::of(1, 1, 2));
        let mut prefixes = Prefixes::new(64);
        let tokens: Vec<Vec<u32>> = (0..3).map(|i| vec![i; 20]).collect();
        for tokens in &tokens {
            let mut cache = SequenceCache::new(&pool);
            cache.extend(20).unwrap();
            prefixes.keep(tokens, cache);
        }
        assert_eq!(prefixes.longest(&[0, 0, 0, 5]).map(|cache| cache.len()), Some(3));
        prefixes.trim();
        assert_eq!(pool.n_live(), 4);
        assert!(prefixes.longest(&tokens[1]).is_none() && prefixes.longest(&tokens[2]).is_some());
    }
}
