//! OpenRLHF's remote reward model: `--reward.remote_url`, read in `openrlhf/utils/agent.py` of 0.11.
//!
//! Its client sends one response a request, `query` being prompt and response as one text with special tokens, and repeats a request
//! that fails four times, a second apart; then the response has no reward. It cannot send a key.

use super::dialect::{check_count, labelled, without_end_tokens};
use super::outcome::number;
use super::server::RewardOptions;
use crate::body::JsonFields;
use crate::error::ErrorResponse;
use querl_core::records::EpisodeRecord;
use querl_core::scoring::RewardRequest;
use serde_json::{Value, json};

pub(super) const EXPECTED: &str = "{\"query\": [...], \"prompts\": [...], \"labels\": [...]}";

pub(super) fn requests(mut fields: JsonFields, options: &RewardOptions) -> Result<Vec<RewardRequest>, ErrorResponse> {
    let queries: Vec<String> = fields.take_required("query", "a list of texts, each a prompt with its response")?;
    let prompts: Vec<String> = fields.take_required("prompts", "a list of texts")?;
    let labels: Vec<Value> = fields.take_required("labels", "a list of labels")?;
    let (n_queries, n_prompts, n_labels) = (queries.len(), prompts.len(), labels.len());
    if n_prompts != n_queries || n_labels != n_queries {
        let what = "`query`, `prompts` and `labels` have";
        let what = format!("{what} {n_queries}, {n_prompts} and {n_labels} items; expected the same number");
        return Err(ErrorResponse::value(what));
    }
    check_count(n_queries, options)?;
    let items = queries.iter().zip(&prompts).zip(&labels).enumerate();
    items.map(|(index, ((query, prompt), label))| request(index, query, prompt, label)).collect()
}

fn request(index: usize, query: &str, prompt: &str, label: &Value) -> Result<RewardRequest, ErrorResponse> {
    let response = query.strip_prefix(prompt).ok_or_else(|| {
        // A prompt that is too long is truncated at its start in `query`, but not in `prompts`.
        let remedy = "raise --data.max_len, or leave long prompts out";
        ErrorResponse::value(format!("`query`, index {index}: does not begin with its prompt; {remedy}"))
    })?;
    labelled(label, &format!("`labels`, index {index}"), without_end_tokens(response))
}

/// The response to OpenRLHF. `scores`, by which it filters groups, are the rewards. `extra_logs` has `rejected` alone: OpenRLHF
/// takes the names of a batch from its first response and averages their values, and a component is not part of each response.
pub(super) fn response(records: &[EpisodeRecord], rejected_reward: Option<f64>) -> Result<Value, ErrorResponse> {
    let numbers = records.iter().enumerate().map(|(index, record)| number(index, record, rejected_reward));
    let rewards: Vec<f64> = numbers.collect::<Result<_, _>>()?;
    let rejected: Vec<f64> = records.iter().map(|record| f64::from(record.outcome.is_err())).collect();
    Ok(json!({"rewards": rewards, "scores": rewards, "extra_logs": {"rejected": rejected}}))
}
