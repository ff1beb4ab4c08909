//! Scores and rejections as JSON, and as numbers for engines that have no form for a rejection.

use crate::error::ErrorResponse;
use querl_core::records::{EpisodeRecord, Rejection, Reward};
use serde_json::{Map, Value, json};

/// The components of a reward as a JSON object by name.
pub(super) fn components(reward: &Reward) -> Map<String, Value> {
    reward.components.iter().map(|component| (component.name.clone(), Value::from(component.value))).collect()
}

pub(super) fn rejection(rejection: &Rejection) -> Value {
    json!({"code": rejection.code, "detail": rejection.detail, "by": rejection.by})
}

/// The number that is the reward of a response: its total, or `rejected_reward` if it was rejected.
///
/// # Errors
/// It was rejected, and there is no `rejected_reward`.
pub(super) fn number(index: usize, record: &EpisodeRecord, rejected_reward: Option<f64>) -> Result<f64, ErrorResponse> {
    match &record.outcome {
        Ok(reward) => Ok(reward.total),
        Err(rejection) => rejected_reward.ok_or_else(|| rejected(index, rejection)),
    }
}

fn rejected(index: usize, Rejection { code, detail, .. }: &Rejection) -> ErrorResponse {
    let what = format!(
        "response {index} was rejected with code `{code}` ({detail}) and has no score; start the server with --rejected_reward NUMBER to \
         give rejected responses a number"
    );
    ErrorResponse { code: Some("rejected"), ..ErrorResponse::value(what) }
}
