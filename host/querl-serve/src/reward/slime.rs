//! slime's remote reward model: `--rm-type remote_rm --rm-url`, read in `slime/rollout/rm_hub/__init__.py` of 0.3.1.
//!
//! Its client sends one response a request and takes the JSON of the response as the sample's reward: a number, or with `--reward-key` an
//! object with that key. It repeats a request that fails nine times, at most half a minute apart; then the rollout fails. It cannot send
//! a key.

use super::dialect::{labelled, messages, without_end_tokens};
use super::outcome::{components, number as outcome_number, rejection};
use crate::body::JsonFields;
use crate::error::ErrorResponse;
use querl_core::records::EpisodeRecord;
use querl_core::scoring::RewardRequest;
use serde_json::{Map, Value};

pub(super) const EXPECTED: &str = "{\"prompt\": ..., \"response\": ..., \"label\": ...}";

pub(super) fn request(mut fields: JsonFields) -> Result<RewardRequest, ErrorResponse> {
    let response: String = fields.take_required("response", "a text")?;
    let label: Value = fields.take_required("label", "the id of a query, or an object with `query`")?;
    let prompt: Option<Value> = fields.take("prompt", "a text or a list of messages")?;
    let request = labelled(&label, "`label`", without_end_tokens(&response))?;
    Ok(RewardRequest { prompt: prompt.as_ref().and_then(messages), ..request })
}

pub(super) fn number(record: &EpisodeRecord, rejected_reward: Option<f64>) -> Result<Value, ErrorResponse> {
    outcome_number(0, record, rejected_reward).map(Value::from)
}

/// The response to slime with `--reward-key`: the reward as `score`, with its components or the reason of a rejection.
pub(super) fn dict(record: &EpisodeRecord, rejected_reward: Option<f64>) -> Result<Value, ErrorResponse> {
    let score = outcome_number(0, record, rejected_reward)?;
    let mut fields = match &record.outcome {
        Ok(reward) => components(reward),
        Err(reason) => Map::from_iter([("rejected".to_owned(), rejection(reason))]),
    };
    fields.insert("score".into(), score.into());
    Ok(Value::Object(fields))
}
