//! Prefix caching: prefixes that prompts share are found, computed once, and kept until the policy changes.

use super::cpu_backend::{Adapter, AdapterWeights};
use super::logits_processor::LogitsProcessor;
use super::model_runner::{HiddenState, Policy, ScheduledSequence};
use crate::ModelError;
use crate::kv_cache::{BLOCK_TOKENS, BlockPool, SequenceKvCache};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

pub(super) struct PrefixCache {
    prefixes: Vec<CachedPrefix>,
    max_tokens: usize,
    clock: u64,
}

struct CachedPrefix {
    /// The adapter that computed the prefix. Weak, so that a replaced adapter is freed before its prefixes are evicted.
    adapter: Option<Weak<AdapterWeights>>,
    tokens: Vec<u32>,
    cache: SequenceKvCache,
    used_at: u64,
}

/// Minimum number of tokens that a prefix adds to the previous one. For fewer tokens a separate pass costs more than it saves.
const WORTH_SHARING: usize = 4;

impl PrefixCache {
    /// A cache of at most `max_tokens` tokens, in complete blocks.
    pub(super) fn new(max_tokens: usize) -> Self {
        Self { prefixes: Vec::new(), max_tokens, clock: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.prefixes.clear();
    }

    /// The KV cache of the adapter's longest cached prefix of `tokens`; `None` if not even the first token matches.
    pub(super) fn longest(&mut self, adapter: &Adapter, tokens: &[u32]) -> Option<SequenceKvCache> {
        let of_adapter = self.prefixes.iter().enumerate().filter(|(_, prefix)| prefix.is_of(adapter));
        let common = of_adapter.map(|(index, prefix)| (index, common_tokens(&prefix.tokens, tokens)));
        let (index, len) = common.max_by_key(|(_, len)| *len)?;
        if len == 0 {
            return None;
        }
        self.clock += 1;
        self.prefixes[index].used_at = self.clock;
        Some(self.prefixes[index].cache.prefix(len))
    }

    pub(super) fn keep(&mut self, adapter: &Adapter, tokens: &[u32], cache: SequenceKvCache) {
        self.clock += 1;
        let adapter = adapter.as_ref().map(Arc::downgrade);
        self.prefixes.push(CachedPrefix { adapter, tokens: tokens.to_vec(), cache, used_at: self.clock });
    }

    /// Evicts the prefixes of adapters that no longer exist, and the least recently used ones above the limit.
    pub(super) fn trim(&mut self) {
        self.prefixes.retain(|prefix| prefix.adapter.as_ref().is_none_or(|adapter| adapter.strong_count() > 0));
        let n_tokens = |prefix: &CachedPrefix| prefix.tokens.len().next_multiple_of(BLOCK_TOKENS);
        if self.prefixes.iter().map(n_tokens).sum::<usize>() <= self.max_tokens {
            return;
        }
        self.prefixes.sort_by_key(|prefix| std::cmp::Reverse(prefix.used_at));
        let mut n_kept = 0;
        self.prefixes.retain(|prefix| {
            n_kept += n_tokens(prefix);
            n_kept <= self.max_tokens
        });
    }
}

impl CachedPrefix {
    fn is_of(&self, adapter: &Adapter) -> bool {
        self.adapter.as_ref().map(Weak::as_ptr) == adapter.as_ref().map(Arc::as_ptr)
    }
}

/// Prefixes that two or more prompts share, if a separate pass for the prefix is worth its cost; shortest first. `prompts`: sorted and
/// distinct.
fn shared_prefixes<'p>(prompts: &[&'p [u32]]) -> Vec<&'p [u32]> {
    let mut found = Vec::new();
    collect(prompts, 0, &mut found);
    found.sort_by_key(|tokens: &&[u32]| tokens.len());
    found
}

/// Adds the common prefix of all `prompts`, if it exceeds `n_known` tokens by enough, and recursively the prefixes of subsets.
fn collect<'p>(prompts: &[&'p [u32]], n_known: usize, found: &mut Vec<&'p [u32]>) {
    let [first, .., last] = prompts else { return };
    // The last token of a prompt is excluded: its own prefill computes the hidden state that is needed.
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

/// KV caches of responses that were stopped before their end, by seed and sample index. Kept until the next call.
pub(super) type StoppedSequences = BTreeMap<(u64, usize), SequenceKvCache>;

pub(super) struct EngineCore<'e> {
    pub(super) policy: &'e mut Policy,
    /// The adapter of all sequences.
    pub(super) adapter: &'e Adapter,
    pub(super) pool: &'e Arc<BlockPool>,
    pub(super) prefixes: &'e mut PrefixCache,
    pub(super) stopped: &'e mut StoppedSequences,
    pub(super) max_sequences: usize,
    /// Blocks for responses and their prompts; `None` means unlimited.
    pub(super) n_blocks: Option<usize>,
}

impl EngineCore<'_> {
    /// KV caches from which the prompts are prefilled; each lacks at least the prompt's last token. New prefixes that several prompts share
    /// are computed now and cached. `prompts`: sorted and distinct.
    pub(super) fn prompt_caches(
        &mut self,
        prompts: &[&[u32]],
        processor: &LogitsProcessor<'_>,
    ) -> Result<Vec<SequenceKvCache>, ModelError> {
        let mut left = shared_prefixes(prompts);
        if let [prompt] = prompts
            && self.longest_cached(prompt).len() * 2 < prompt.len()
        {
            // A single prompt without a cached prefix: the next prompt may share its beginning.
            left.push(&prompt[..prompt.len() - 1]);
        }
        while !left.is_empty() {
            let waits =
                |tokens: &[u32]| left.iter().any(|other| other.len() < tokens.len() && tokens.starts_with(other));
            let (waiting, ready): (Vec<_>, Vec<_>) = left.iter().copied().partition(|tokens| waits(tokens));
            self.prefill(&ready, processor)?;
            left = waiting;
        }
        let caches = prompts.iter().map(|prompt| self.longest_cached(&prompt[..prompt.len() - 1])).collect();
        self.prefixes.trim();
        Ok(caches)
    }

    /// Computes and caches prefixes, where none is a prefix of another one.
    fn prefill(&mut self, prefixes: &[&[u32]], processor: &LogitsProcessor<'_>) -> Result<(), ModelError> {
        let is_new = |tokens: &&[u32]| self.longest_cached(tokens).len() < tokens.len();
        let new: Vec<&[u32]> = prefixes.iter().copied().filter(is_new).collect();
        let mut caches: Vec<SequenceKvCache> = new.iter().map(|tokens| self.longest_cached(tokens)).collect();
        let mut hidden: Vec<HiddenState> = new.iter().map(|_| HiddenState::Unknown).collect();
        let mut sequences: Vec<ScheduledSequence<'_>> = caches
            .iter_mut()
            .zip(&mut hidden)
            .zip(&new)
            .map(|((cache, hidden), tokens)| {
                let tokens = &tokens[cache.len()..];
                let adapter = self.adapter.clone();
                let consumers = Vec::new();
                ScheduledSequence { adapter, sampling: None, tokens, cache, hidden, keeps_hidden: false, consumers }
            })
            .collect();
        self.policy.forward(&mut sequences, processor)?;
        drop(sequences);
        new.into_iter().zip(caches).for_each(|(tokens, cache)| self.prefixes.keep(self.adapter, tokens, cache));
        Ok(())
    }

    /// The KV cache of the longest cached prefix of the tokens; empty without one.
    fn longest_cached(&mut self, tokens: &[u32]) -> SequenceKvCache {
        self.prefixes.longest(self.adapter, tokens).unwrap_or_else(|| SequenceKvCache::new(self.pool))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::BlockShape;

    #[test]
    fn shared_prefixes_are_found_at_every_depth() {
        let base: Vec<u32> = (0..10).collect();
        let with = |rest: &[u32]| [base.as_slice(), rest].concat();
        let prompts = [with(&[20, 21, 22, 23, 24, 30]), with(&[20, 21, 22, 23, 24, 31]), with(&[40]), with(&[41, 42])];
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let lengths: Vec<usize> = shared_prefixes(&prompts).iter().map(|tokens| tokens.len()).collect();
        assert_eq!(lengths, [10, 15]);
    }

    #[test]
    fn every_prompt_keeps_a_token_of_its_own() {
        let (short, long): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (0..12).collect());
        let found = shared_prefixes(&[&short, &long]);
        assert_eq!(found, [&short[..7]]);
        assert!(shared_prefixes(&[&long]).is_empty());
    }

    #[test]
    fn recently_used_prefixes_are_kept() {
        let pool = BlockPool::new(BlockShape::of(1, 1, 2));
        let mut prefixes = PrefixCache::new(64);
        let tokens: Vec<Vec<u32>> = (0..3).map(|i| vec![i; 20]).collect();
        for tokens in &tokens {
            let mut cache = SequenceKvCache::new(&pool);
            cache.extend(20).unwrap();
            prefixes.keep(&None, tokens, cache);
        }
        assert_eq!(prefixes.longest(&None, &[0, 0, 0, 5]).map(|cache| cache.len()), Some(3));
        prefixes.trim();
        assert_eq!(pool.n_live(), 4);
        assert!(prefixes.longest(&None, &tokens[1]).is_none() && prefixes.longest(&None, &tokens[2]).is_some());
    }
}
