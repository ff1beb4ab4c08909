//! `POST /v1/score`: the form that carries everything, rejections included.

use super::dialect::check_count;
use super::outcome::{components, rejection};
use super::server::RewardOptions;
use crate::body::JsonFields;
use crate::error::ErrorResponse;
use querl_core::ports::RewardRange;
use querl_core::records::EpisodeRecord;
use querl_core::scoring::RewardRequest;
use serde_json::{Value, json};

pub(super) const EXPECTED: &str = "{\"requests\": [{\"query\": ..., \"response\": ...}]}";

pub(super) fn requests(mut fields: JsonFields, options: &RewardOptions) -> Result<Vec<RewardRequest>, ErrorResponse> {
    let requests: Vec<Value> = fields.take_required("requests", "a list of objects with `query` and `response`")?;
    check_count(requests.len(), options)?;
    let request = |(index, request): (usize, Value)| {
        let wrong = |error: serde_json::Error| ErrorResponse::value(format!("`requests`, index {index}: {error}"));
        serde_json::from_value::<RewardRequest>(request).map_err(wrong)
    };
    requests.into_iter().enumerate().map(request).collect()
}

pub(super) fn response(records: &[EpisodeRecord], range: RewardRange) -> Value {
    let results: Vec<Value> = records.iter().map(result).collect();
    json!({"results": results, "range": {"min": range.min, "max": range.max}})
}

fn result(EpisodeRecord { episode, outcome, .. }: &EpisodeRecord) -> Value {
    match outcome {
        Ok(reward) => json!({
            "id": episode.id,
            "total": reward.total,
            "components": components(reward),
            "rewrite": episode.policy.rewrite,
        }),
        Err(reason) => json!({"id": episode.id, "rejected": rejection(reason)}),
    }
}
