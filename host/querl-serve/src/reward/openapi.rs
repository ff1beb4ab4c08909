//! The OpenAPI document of the reward service.

use crate::openapi::{get, post, reference};
use serde_json::{Value, json};

const ERRORS: [(&str, &str); 10] = [
    ("400", "The body is not JSON"),
    ("401", "The key is missing or wrong"),
    ("408", "The body was not received in time"),
    ("413", "Body or list too large"),
    ("415", "The content type is not JSON, or the body is compressed"),
    ("422", "A value is missing or wrong, the query is unknown, or a response was rejected and has no number"),
    ("429", "The queue is full, or too many requests of one address are in progress"),
    ("500", "A plugin failed"),
    ("502", "A service that scoring needs failed"),
    ("503", "A service that scoring needs is down, or too many requests are in progress"),
];

/// An object with required properties.
fn object(properties: Value) -> Value {
    let required: Vec<String> = properties.as_object().map(|all| all.keys().cloned().collect()).unwrap_or_default();
    json!({"type": "object", "required": required, "properties": properties})
}

fn list(items: &Value) -> Value {
    json!({"type": "array", "items": items})
}

/// Routes that score.
fn scoring() -> Value {
    let (text, number) = (json!({"type": "string"}), json!({"type": "number"}));
    let label = reference("Label");
    let range = object(json!({"min": number, "max": number}));
    let score = object(json!({"results": list(&reference("Result")), "range": range}));
    let openrlhf = object(json!({"query": list(&text), "prompts": list(&text), "labels": list(&label)}));
    let logs = json!({"type": "object", "additionalProperties": list(&number)});
    let rewards = object(json!({"rewards": list(&number), "scores": list(&number), "extra_logs": logs}));
    let slime = object(json!({"response": text, "label": label}));
    let row = object(json!({"responses_create_params": {"type": "object"}, "response": {"type": "object"}}));
    let scored_row = object(json!({"reward": number}));
    let any = json!({"type": "object"});
    let post = |summary: &str, request: &Value, response: &Value| post(summary, request, response, ("Error", &ERRORS));
    json!({
        "/v1/score": post("Score responses", &object(json!({"requests": list(&reference("Request"))})), &score),
        "/openrlhf": post("OpenRLHF's --reward.remote_url", &openrlhf, &rewards),
        "/slime": post("slime's --rm-url: a number", &slime, &number),
        "/slime/dict": post("slime's --rm-url with --reward-key score", &slime, &object(json!({"score": number}))),
        "/seed_session": post("NeMo Gym: begin a session, which has no state", &any, &any),
        "/verify": post("NeMo Gym: the row with its reward; the label is its field `querl` or `label`", &row, &scored_row),
        "/aggregate_metrics": post("NeMo Gym: the mean reward of rows", &any, &any),
    })
}

pub(super) fn document() -> Value {
    let mut paths = scoring();
    let plain = [
        ("/health", "Whether the process runs"),
        ("/ready", "Whether the queue has room; else 503"),
        ("/metrics", "Metrics in Prometheus' text format"),
        ("/reverify_mode", "NeMo Gym: `stateless`"),
    ];
    for (path, summary) in plain {
        paths[path] = get(summary);
    }
    crate::openapi::document("querl serve reward", "Rewards for other RL engines", &paths, &schemas())
}

fn schemas() -> Value {
    let text = json!({"type": "string"});
    json!({
        "Label": {
            "description": "The id of a query of the run; or a query, as an object or as the JSON text of one",
            "oneOf": [text, {"$ref": "#/components/schemas/Query"}],
        },
        "Query": {
            "type": "object", "required": ["query"], "additionalProperties": false,
            "properties": {
                "query": text, "user_profile": text, "history_summary": text,
                "gold_ids": list(&text), "columns": {"type": "object"}, "baseline": text, "expansion": text,
            },
        },
        "Request": {
            "type": "object", "required": ["query", "response"], "additionalProperties": false,
            "properties": {
                "query": reference("Label"), "response": text, "truncated": {"type": "boolean"}, "n_tokens": {"type": "integer"},
                "prompt": list(&json!({"type": "object"})), "step": {"type": "integer"}, "group_id": text,
                "sample_index": {"type": "integer"},
            },
        },
        "Result": {
            "type": "object", "required": ["id"],
            "properties": {
                "id": text, "total": {"type": "number"}, "rewrite": text,
                "components": {"type": "object", "additionalProperties": {"type": "number"}},
                "rejected": {"type": "object", "properties": {"code": text, "detail": text, "by": {"enum": ["plugin", "host"]}}},
            },
        },
        "Error": {
            "type": "object",
            "properties": {"error": {"type": "object", "properties": {"message": text, "type": text, "code": text}}},
        },
    })
}
