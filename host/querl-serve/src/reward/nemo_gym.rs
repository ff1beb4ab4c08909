//! A resources server of NeMo Gym, read in `nemo_gym/base_resources_server.py` of 0.5.1.
//!
//! Its agent posts a row of the data set to `/seed_session`, and with the field `response`, an OpenAI Responses object, to `/verify`. The
//! response repeats the row and adds `reward`. The label is the row's field `querl`, else `label`. A rejected response that has a number
//! also has `_ng_failure_class`, by which Gym writes the row to its file of failures and leaves it out of its metrics. It cannot send a
//! key.

use super::dialect::{labelled, messages};
use super::outcome::{components, number, rejection};
use crate::body::{JsonFields, quoted};
use crate::error::ErrorResponse;
use querl_core::records::EpisodeRecord;
use querl_core::scoring::RewardRequest;
use serde_json::{Map, Value, json};

pub(super) const EXPECTED: &str =
    "{\"responses_create_params\": ..., \"response\": {\"output\": [...]}, \"querl\": ...}";
/// Fields of a row that may hold the label.
const LABELS: [&str; 2] = ["querl", "label"];
/// Gym's field for the reason of a failure.
const FAILURE_CLASS: &str = "_ng_failure_class";

/// A row of the data set with the policy's response.
#[derive(Debug)]
pub(super) struct Row(Map<String, Value>);

impl Row {
    pub(super) fn new(fields: JsonFields) -> Result<Self, ErrorResponse> {
        let row = Self(fields.into_map());
        let found = match row.0.get("responses_create_params") {
            Some(Value::Object(_)) => return Ok(row),
            Some(other) => quoted(other),
            None => "missing".into(),
        };
        Err(ErrorResponse::value(format!("`responses_create_params` is {found}; expected an object")))
    }

    pub(super) fn request(&self) -> Result<RewardRequest, ErrorResponse> {
        let (name, label) = self.label()?;
        let response = self.0.get("response").unwrap_or(&Value::Null);
        let missing = "`response` has no list `output`; expected an OpenAI Responses object";
        let output = response["output"].as_array().ok_or_else(|| ErrorResponse::value(missing))?;
        let n_tokens = response["usage"]["output_tokens"].as_u64().unwrap_or_default();
        Ok(RewardRequest {
            truncated: response["incomplete_details"]["reason"] == "max_output_tokens",
            n_tokens: u32::try_from(n_tokens).unwrap_or(u32::MAX),
            prompt: messages(&self.0["responses_create_params"]["input"]),
            ..labelled(label, &format!("`{name}`"), &last_text(output))?
        })
    }

    fn label(&self) -> Result<(&'static str, &Value), ErrorResponse> {
        let labels = LABELS.into_iter().filter_map(|name| Some((name, self.0.get(name)?)));
        let mut labels = labels.filter(|(_, label)| !label.is_null());
        let missing = "the row has neither `querl` nor `label`; expected the id of a query, or an object with `query`";
        labels.next().ok_or_else(|| ErrorResponse::value(missing))
    }

    /// The response to `/verify`: the row with its reward.
    pub(super) fn response(self, record: &EpisodeRecord, rejected_reward: Option<f64>) -> Result<Value, ErrorResponse> {
        let reward = number(0, record, rejected_reward)?;
        let mut row = self.0;
        row.insert("reward".into(), reward.into());
        match &record.outcome {
            Ok(reward) => {
                row.insert("reward_components".into(), components(reward).into());
            }
            Err(reason) => {
                row.insert("rejected".into(), rejection(reason));
                row.insert(FAILURE_CLASS.into(), "rejected".into());
            }
        }
        Ok(Value::Object(row))
    }
}

/// The text of the last message of the assistant; empty where there is none, for example after reasoning alone.
fn last_text(output: &[Value]) -> String {
    let is_message = |item: &&Value| item["type"] == "message" && item["role"] == "assistant";
    let message = output.iter().rev().find(is_message);
    let parts = message.and_then(|message| message["content"].as_array()).into_iter().flatten();
    parts.filter(|part| part["type"] == "output_text").filter_map(|part| part["text"].as_str()).collect()
}

/// The response to `/aggregate_metrics`: the mean reward of all rows, under NeMo Gym's name.
pub(super) fn aggregate_metrics(mut fields: JsonFields) -> Result<Value, ErrorResponse> {
    let rows: Vec<Value> = fields.take_required("verify_responses", "a list of rows with `reward`")?;
    let reward = |(index, row): (usize, &Value)| {
        let missing = || ErrorResponse::value(format!("`verify_responses`, index {index}: `reward` is not a number"));
        row["reward"].as_f64().ok_or_else(missing)
    };
    let rewards: Vec<f64> = rows.iter().enumerate().map(reward).collect::<Result<_, _>>()?;
    let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
    let metrics = if mean.is_finite() { json!({"mean/reward": mean}) } else { json!({}) };
    Ok(json!({"group_level_metrics": [], "agent_metrics": metrics, "key_metrics": metrics}))
}
