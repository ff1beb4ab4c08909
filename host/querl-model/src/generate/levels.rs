//! Generation at each level of this processor against its best one.
#![allow(clippy::unwrap_used)]

use super::{Decoding, Generated, GenerationRequest, SamplingSettings, TokenText, generate};
use crate::kernels::Level;
use crate::{Decoder, ModelError, Weights};
use std::collections::BTreeSet;
use std::path::Path;

/// Nothing ends an answer but its length.
struct NoText(BTreeSet<u32>);

impl TokenText for NoText {
    fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.0
    }

    fn text(&self, _ids: &[u32]) -> Result<String, ModelError> {
        Err(ModelError::Generation("no text is asked for".into()))
    }
}

fn answers(level: Level, decoding: Decoding) -> Vec<Generated> {
    level.with(|| {
        let directory =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen3-untied");
        let decoder = Decoder::load(&directory, Weights::Frozen).unwrap();
        let prompts: [&[u32]; 3] = [&[5, 9, 2, 7], &[5, 9, 2, 7, 11, 30], &[5, 9, 44]];
        let requests = prompts.map(|prompt| GenerationRequest { prompt, seed: 3, n: 3 });
        let sampling = SamplingSettings { max_new_tokens: 20, ..SamplingSettings::default() };
        generate(&decoder, None, &requests, decoding, &sampling, &NoText(BTreeSet::new())).unwrap()
    })
}

#[test]
fn answers_and_their_logprobs_agree_at_every_level() {
    for decoding in [Decoding::Greedy, Decoding::Sample] {
        let expected = answers(*Level::all().last().unwrap(), decoding);
        assert!(expected.iter().all(|answer| answer.token_ids.len() == 20));
        for level in Level::all() {
            for (found, expected) in answers(level, decoding).iter().zip(&expected) {
                assert_eq!(found.token_ids, expected.token_ids, "{level:?}");
                for (found, expected) in found.logprobs.iter().zip(&expected.logprobs) {
                    assert!((found - expected).abs() <= 1e-5, "{level:?}: {found} against {expected}");
                }
            }
        }
    }
}
