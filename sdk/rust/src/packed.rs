//! The packed form of episodes and results, whose encoding is specified in `wit/packed-rewards.wit`.
//!
//! Used in components; also compiled for native tests, which check it with the test vectors of the specification.

use crate::{
    CallFailure, Candidate, Column, ColumnValue, Context, Episode, FailureKind, FinishReason, GroupReward, Hit,
    JudgeScore, Message, Rejection, Reward, Role, Scalar, Score, Split, StyleProbability,
};
use std::mem::ManuallyDrop;

/// Scores the episodes of a packed batch.
pub(crate) fn score_batch(plugin: &impl Reward, batch: Vec<u8>) -> Vec<u8> {
    // The texts of all episodes are slices of the batch, which must outlive them. Leaking it is safe: the instance ends with this call.
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

/// Scores the episodes of a packed group.
pub(crate) fn score_group(plugin: &impl GroupReward, group: Vec<u8>) -> Vec<u8> {
    let episodes = ManuallyDrop::new(Reader { left: group.leak() }.list(Reader::episode));
    let results = plugin.score_group(&episodes);
    let mut packed = Vec::with_capacity(64 * (results.len() + 1));
    put_u32(&mut packed, results.len());
    results.into_iter().for_each(|result| put_result(&mut packed, result));
    packed
}

/// Frees the lists of an episode, so that the next episode reuses their memory, and none of its texts, which are part of the batch.
fn give_back_lists(episode: Episode) {
    for candidate in [Some(episode.policy), episode.baseline].into_iter().flatten() {
        let Candidate { rewrite, retrieval, judgement, style, n_tokens: _, finish_reason } = candidate;
        std::mem::forget((rewrite, judgement, finish_reason));
        match retrieval {
            Some(Ok(hits)) => hits.into_iter().for_each(std::mem::forget),
            other => std::mem::forget(other),
        }
        style.into_iter().flatten().for_each(std::mem::forget);
    }
    episode.gold_ids.into_iter().flatten().for_each(std::mem::forget);
    episode.prompt.into_iter().flatten().for_each(std::mem::forget);
    for Column { name, value } in episode.columns {
        std::mem::forget(name);
        match value {
            ColumnValue::Items(items) => items.into_iter().for_each(std::mem::forget),
            other => std::mem::forget(other),
        }
    }
    std::mem::forget((episode.id, episode.group_id, episode.split, episode.query, episode.context, episode.response));
}

/// Reads values from the front of a packed batch. The host wrote the bytes, so invalid bytes are an error of the host, and reading them
/// panics.
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
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    #[inline]
    fn f64(&mut self) -> f64 {
        f64::from_le_bytes(self.array())
    }

    /// A text that uses the batch as its buffer, without a copy. It must never be dropped or resized: the functions above pass it to the
    /// plugin by shared reference and then forget it.
    #[inline]
    fn text(&mut self) -> String {
        let n_bytes = self.u32() as usize;
        let bytes = self.take(n_bytes);
        // SAFETY: the bytes are a text of the host, which is UTF-8. They live as long as the instance, and nothing else refers to
        // them. They were not allocated as a block of their own, which is relevant only if the text is dropped or resized.
        unsafe { String::from_raw_parts(bytes.as_mut_ptr(), n_bytes, n_bytes) }
    }

    #[inline]
    fn list<T>(&mut self, entry: impl Fn(&mut Self) -> T) -> Vec<T> {
        let n_entries = self.u32();
        (0..n_entries).map(|_| entry(self)).collect()
    }

    #[inline]
    fn option<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.u8() == 0 { None } else { Some(value(self)) }
    }

    fn episode(&mut self) -> Episode {
        Episode {
            id: self.text(),
            group_id: self.text(),
            sample_index: self.u32(),
            step: self.option(Self::u64),
            split: self.option(|reader| match reader.u8() {
                0 => Split::Train,
                1 => Split::Validation,
                2 => Split::Test,
                _ => Split::Other(reader.text()),
            }),
            query: self.text(),
            context: Context { user_profile: self.option(Self::text), history_summary: self.option(Self::text) },
            gold_ids: self.option(|reader| reader.list(Self::text)),
            columns: self.list(Self::column),
            prompt: self.option(|reader| reader.list(Self::message)),
            response: self.option(Self::text),
            policy: self.candidate(),
            baseline: self.option(Self::candidate),
        }
    }

    #[inline(never)]
    fn column(&mut self) -> Column {
        let name = self.text();
        let value = match self.u8() {
            0 => ColumnValue::Text(self.text()),
            1 => ColumnValue::Number(self.f64()),
            2 => ColumnValue::Flag(self.u8() != 0),
            _ => ColumnValue::Items(self.list(|reader| match reader.u8() {
                0 => Scalar::Text(reader.text()),
                1 => Scalar::Number(reader.f64()),
                _ => Scalar::Flag(reader.u8() != 0),
            })),
        };
        Column { name, value }
    }

    #[inline(never)]
    fn message(&mut self) -> Message {
        let role = match self.u8() {
            0 => Role::System,
            1 => Role::User,
            _ => Role::Assistant,
        };
        Message { role, content: self.text() }
    }

    fn candidate(&mut self) -> Candidate {
        Candidate {
            rewrite: self.option(Self::text),
            retrieval: self.option(|reader| match reader.u8() {
                0 => Ok(reader.list(Self::hit)),
                _ => Err(reader.call_failure()),
            }),
            judgement: self.option(|reader| match reader.u8() {
                0 => Ok(JudgeScore { score: reader.f64(), reason: reader.text() }),
                _ => Err(reader.call_failure()),
            }),
            style: self.option(|reader| {
                reader.list(|reader| StyleProbability { label: reader.text(), probability: reader.f64() })
            }),
            n_tokens: self.option(Self::u32),
            finish_reason: self.option(|reader| match reader.u8() {
                0 => FinishReason::Stop,
                1 => FinishReason::Length,
                _ => FinishReason::Other(reader.text()),
            }),
        }
    }

    #[inline]
    fn hit(&mut self) -> Hit {
        Hit {
            id: self.option(Self::text),
            text: self.text(),
            reranker_score: self.f64(),
            retrieval_score: self.option(Self::f64),
            rank: self.u32(),
        }
    }

    #[inline(never)]
    fn call_failure(&mut self) -> CallFailure {
        let kind = match self.u8() {
            0 => FailureKind::Timeout,
            1 => FailureKind::Unreachable,
            2 => FailureKind::Unauthorized,
            3 => FailureKind::Rejected,
            4 => FailureKind::RateLimited,
            5 => FailureKind::ServerError,
            6 => FailureKind::InvalidResponse,
            7 => FailureKind::NotRecorded,
            _ => FailureKind::Other(self.text()),
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
    // A component's memory has at most 4 GiB, so every length fits in 32 bits.
    to.extend_from_slice(&(number as u32).to_le_bytes());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::form::EpisodeForm;
    use crate::{SettingError, Settings};
    use serde::Deserialize;
    use serde_json::Value;
    use serde_json::value::RawValue;
    use std::cell::RefCell;
    use std::ops::RangeInclusive;

    thread_local! {
        static SEEN: RefCell<Vec<Episode>> = const { RefCell::new(Vec::new()) };
    }

    /// A reward that stores the episodes that it scores.
    struct Witness;

    impl Reward for Witness {
        fn new(_: &Settings) -> Result<Self, SettingError> {
            Ok(Self)
        }

        fn range(&self) -> RangeInclusive<f64> {
            0.0..=1.0
        }

        fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
            SEEN.with_borrow_mut(|seen| seen.push(episode.clone()));
            Ok(Score::new(0.5))
        }
    }

    #[derive(Deserialize)]
    struct Vectors {
        #[serde(borrow)]
        arguments: Vec<Vector<'static>>,
        #[serde(borrow)]
        results: Vec<Vector<'static>>,
    }

    #[derive(Deserialize)]
    struct Vector<'a> {
        name: String,
        /// As JSON text, because columns keep the order of the object's keys.
        #[serde(borrow)]
        json: Vec<&'a RawValue>,
        packed: String,
    }

    fn vectors() -> Vectors {
        serde_json::from_str(include_str!("../../../docs/spec/vectors/packed-0.2.json")).unwrap()
    }

    impl GroupReward for Witness {
        fn new(_: &Settings) -> Result<Self, SettingError> {
            Ok(Self)
        }

        fn range(&self) -> RangeInclusive<f64> {
            0.0..=1.0
        }

        fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
            episodes.iter().map(|episode| self.score(episode)).collect()
        }
    }

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn packed_episodes_of_the_specification_are_those_of_its_json() {
        for vector in vectors().arguments {
            let alone = score_batch(&Witness, bytes(&vector.packed));
            let seen = SEEN.take();
            assert_eq!(score_group(&Witness, bytes(&vector.packed)), alone, "{}", vector.name);
            assert_eq!(SEEN.take(), seen, "{}", vector.name);
            assert_eq!(seen.len(), vector.json.len(), "{}", vector.name);
            for (episode, json) in seen.into_iter().zip(vector.json) {
                let form: EpisodeForm = serde_json::from_str(json.get()).unwrap();
                assert_eq!(episode, form.named(""), "{}", vector.name);
            }
        }
    }

    #[test]
    fn packed_results_are_those_of_the_specification() {
        for vector in vectors().results {
            let mut packed = Vec::new();
            put_u32(&mut packed, vector.json.len());
            vector.json.into_iter().for_each(|json| put_result(&mut packed, result_of(json.get())));
            assert_eq!(packed, bytes(&vector.packed), "{}", vector.name);
        }
    }

    fn result_of(json: &str) -> Result<Score, Rejection> {
        let json: Value = serde_json::from_str(json).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        if let Some(rejected) = json.get("rejected") {
            return Err(Rejection::new(text(&rejected["code"]), text(&rejected["detail"])));
        }
        let scored = &json["scored"];
        let part = |score: Score, part: &Value| score.with(text(&part["name"]), part["value"].as_f64().unwrap());
        Ok(scored["components"].as_array().unwrap().iter().fold(Score::new(scored["total"].as_f64().unwrap()), part))
    }
}
