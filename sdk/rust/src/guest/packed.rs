//! Episodes out of one block of bytes, results into another. The encoding is that of `wit/packed-rewards.wit`.

use crate::{
    CallFailure, Candidate, Context, Episode, FailureKind, Hit, Judgement, Rejection, Reward, Score, StyleProbability,
};
use std::mem::ManuallyDrop;

/// Scores the episodes of a packed batch.
pub(super) fn score_batch(plugin: &impl Reward, batch: Vec<u8>) -> Vec<u8> {
    // The texts of all episodes lie in the batch: it must outlive them, and the instance ends with this call.
    let mut reader = Reader { left: batch.leak() };
    let n_episodes = reader.u32();
    let mut results = Vec::with_capacity(64 * (n_episodes as usize + 1));
    put_u32(&mut results, n_episodes as usize);
    for _ in 0..n_episodes {
        let episode = ManuallyDrop::new(reader.episode());
        put_result(&mut results, plugin.score(&episode));
        give_back_lists(ManuallyDrop::into_inner(episode));
    }
    results
}

/// Frees the lists of an episode, which the next one can use, and none of its texts, which lie in the batch.
fn give_back_lists(episode: Episode) {
    for candidate in [episode.policy, episode.baseline] {
        let Candidate { rewrite, retrieval, judgement, style, .. } = candidate;
        std::mem::forget((rewrite, judgement));
        match retrieval {
            Ok(hits) => hits.into_iter().for_each(std::mem::forget),
            Err(failure) => std::mem::forget(failure),
        }
        style.into_iter().flatten().for_each(std::mem::forget);
    }
    episode.gold_ids.into_iter().for_each(std::mem::forget);
    std::mem::forget((episode.id, episode.query, episode.context));
}

/// Reads from the front. The host wrote the bytes: what cannot be read is the host's mistake, and ends in a panic.
struct Reader {
    left: &'static mut [u8],
}

impl Reader {
    #[inline]
    fn take(&mut self, n_bytes: usize) -> &'static mut [u8] {
        let (taken, left) = std::mem::take(&mut self.left).split_at_mut(n_bytes);
        self.left = left;
        taken
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let (taken, left) = std::mem::take(&mut self.left).split_first_chunk_mut().expect("the batch is whole");
        self.left = left;
        *taken
    }

    #[inline]
    fn u8(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    #[inline]
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    #[inline]
    fn f64(&mut self) -> f64 {
        f64::from_le_bytes(self.array())
    }

    /// A text that lies in the batch. It must never be dropped, grown or shrunk: `score_batch` lends it to the plugin behind a
    /// shared reference and then forgets it.
    #[inline]
    fn text(&mut self) -> String {
        let n_bytes = self.u32() as usize;
        let bytes = self.take(n_bytes);
        // SAFETY: the bytes are the host's texts, which are UTF-8; they live as long as the instance and nothing else refers
        // to them. They are not a block of the allocator of their own, which matters only where the text is dropped or resized.
        unsafe { String::from_raw_parts(bytes.as_mut_ptr(), n_bytes, n_bytes) }
    }

    #[inline]
    fn list<T>(&mut self, entry: impl Fn(&mut Self) -> T) -> Vec<T> {
        let n_entries = self.u32();
        (0..n_entries).map(|_| entry(self)).collect()
    }

    fn episode(&mut self) -> Episode {
        Episode {
            id: self.text(),
            query: self.text(),
            context: Context { user_profile: self.text(), history_summary: self.text() },
            gold_ids: self.list(Self::text),
            policy: self.candidate(),
            baseline: self.candidate(),
        }
    }

    fn candidate(&mut self) -> Candidate {
        Candidate {
            rewrite: self.text(),
            retrieval: match self.u8() {
                0 => Ok(self.list(Self::hit)),
                _ => Err(self.call_failure()),
            },
            judgement: match self.u8() {
                0 => Judgement::Scored { score: self.f64(), reason: self.text() },
                1 => Judgement::NotSampled,
                _ => Judgement::Failed(self.call_failure()),
            },
            style: match self.u8() {
                0 => None,
                _ => Some(self.list(|reader| StyleProbability { label: reader.text(), probability: reader.f64() })),
            },
            n_tokens: self.u32(),
            truncated: self.u8() != 0,
        }
    }

    #[inline]
    fn hit(&mut self) -> Hit {
        Hit {
            id: self.text(),
            text: self.text(),
            reranker_score: self.f64(),
            retrieval_score: match self.u8() {
                0 => None,
                _ => Some(self.f64()),
            },
            rank: self.u32(),
        }
    }

    fn call_failure(&mut self) -> CallFailure {
        let kind = match self.u8() {
            0 => FailureKind::Timeout,
            1 => FailureKind::Unreachable,
            2 => FailureKind::Unauthorized,
            3 => FailureKind::Rejected,
            4 => FailureKind::RateLimited,
            5 => FailureKind::ServerError,
            6 => FailureKind::InvalidResponse,
            _ => FailureKind::NotRecorded,
        };
        CallFailure { kind, message: self.text() }
    }
}

fn put_result(to: &mut Vec<u8>, result: Result<Score, Rejection>) {
    match result {
        Ok(score) => {
            to.push(0);
            to.extend_from_slice(&score.total.to_le_bytes());
            put_u32(to, score.components.len());
            for part in &score.components {
                put_text(to, &part.name);
                to.extend_from_slice(&part.value.to_le_bytes());
            }
        }
        Err(rejection) => {
            to.push(1);
            put_text(to, &rejection.code);
            put_text(to, &rejection.detail);
        }
    }
}

#[inline]
fn put_text(to: &mut Vec<u8>, text: &str) {
    put_u32(to, text.len());
    to.extend_from_slice(text.as_bytes());
}

#[inline]
fn put_u32(to: &mut Vec<u8>, number: usize) {
    // A component's memory has 4 GiB: every length in it fits.
    to.extend_from_slice(&(number as u32).to_le_bytes());
}
