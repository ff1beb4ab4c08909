//! The OpenAPI document of the service, and a page made from it.
//!
//! Written by hand: utoipa 5.5 needs types for both forms of a request, for the four of a response and for two routes of one handler,
//! which `protocol.rs` reads as JSON values. The same document by its macros took 19 s of building (the crate 8,
//! its macros 4, the derives 7).

use crate::openapi::{Form, get, post, reference};
use serde_json::{Value, json};

const ERRORS: [(&str, &str); 9] = [
    ("400", "The body is not JSON"),
    ("401", "The key is missing or wrong"),
    ("408", "The body was not received in time"),
    ("413", "Body, list or text too large"),
    ("415", "The content type is not JSON, or the body is compressed"),
    ("422", "A value is missing or wrong"),
    ("429", "The queue is full, or too many requests of one address are in progress"),
    ("500", "The model failed"),
    ("503", "The model is being loaded or takes too long, or too many requests are in progress"),
];

/// A route that classifies.
fn classifying(summary: &str, request: &Value, response: &Value) -> Value {
    let mut route = post(summary, request, response, ("Error", &ERRORS));
    route["post"]["requestBody"]["required"] = json!(false);
    route["post"]["responses"]["200"]["description"] = json!("The classification");
    route
}

pub(super) fn document() -> Value {
    let list = |items: &Value| json!({"type": "array", "items": items});
    let (prediction, scores) = (reference("Prediction"), list(&reference("Score")));
    let mut predict = classifying(
        "Classify a text, or texts in text-embeddings-inference's form",
        &json!({"oneOf": [reference("TextRequest"), reference("InputsRequest")]}),
        &json!({"oneOf": [prediction, list(&prediction), scores, list(&scores)]}),
    );
    predict["post"]["parameters"] = json!([{
        "name": "text", "in": "query", "required": false, "schema": {"type": "string"},
        "description": "The text; instead of a body",
    }]);
    let (request, response) = (reference("ClassifyRequest"), reference("ClassifyResponse"));
    let classify = classifying("Classify texts, in vLLM's form", &request, &response);
    let paths = json!({
        "/predict": predict,
        "/classify": classify,
        "/v1/classify": classify,
        "/health": get("Whether the process runs"),
        "/ready": get("Whether the model is loaded and the queue has room; else 503"),
        "/info": get("The model, its classes and the limits"),
        "/metrics": get("Metrics in Prometheus' text format"),
    });
    crate::openapi::document("querl serve", "A classifier of the style of answers", &paths, &schemas())
}

fn schemas() -> Value {
    let texts = json!({"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]});
    json!({
        "TextRequest": {
            "type": "object", "required": ["text"],
            "properties": {
                "text": texts.clone(),
                "english": {"type": "boolean", "default": false, "description": "Name classes in English"},
            },
        },
        "InputsRequest": {
            "type": "object", "required": ["inputs"],
            "properties": {
                "inputs": {
                    "description": "A text; a list of one text or of a question and its answer; or a list of such lists",
                    "oneOf": [{"type": "string"}, {"type": "array", "items": texts.clone()}],
                },
                "raw_scores": {"type": "boolean", "default": false, "description": "Logits, not probabilities"},
                "truncate": {"type": "boolean", "default": true, "description": "Shorten what is too long; else 413"},
            },
        },
        "Prediction": {
            "type": "object", "required": ["predicted_label", "confidence", "probabilities"],
            "properties": {
                "predicted_label": {"type": "string"},
                "confidence": {"type": "number"},
                "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
            },
        },
        "Score": {
            "type": "object", "required": ["label", "score"],
            "properties": {"label": {"type": "string"}, "score": {"type": "number"}},
        },
        "ClassifyRequest": {
            "type": "object", "required": ["input"],
            "properties": {
                "model": {"type": "string"}, "input": texts,
                "use_activation": {"type": "boolean", "default": true, "description": "Probabilities; false for logits"},
            },
        },
        "ClassifyResponse": {
            "type": "object",
            "properties": {
                "id": {"type": "string"}, "object": {"const": "list"}, "created": {"type": "integer"}, "model": {"type": "string"},
                "data": {"type": "array", "items": {"type": "object", "properties": {
                    "index": {"type": "integer"}, "label": {"type": "string"},
                    "probs": {"type": "array", "items": {"type": "number"}}, "num_classes": {"type": "integer"},
                }}},
                "usage": {"type": "object"},
            },
        },
        "Error": {
            "type": "object",
            "properties": {
                "error": {"description": "A sentence; for /classify, an object with `message`, `type` and `code`"},
                "error_type": {"type": "string"},
            },
        },
    })
}

/// The routes as an HTML page.
pub(super) fn page() -> String {
    let form = Form {
        fields: "",
        text: "用户问题：这个产品有什么优缺点？\n回答：优点是轻，缺点也有：续航短，冬天更明显。",
        route: "/predict",
        request: "{ text: element(\"text\").value }",
    };
    crate::openapi::page("querl serve style", &document(), &form)
}
