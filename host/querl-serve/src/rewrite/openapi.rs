//! The OpenAPI document of the service, and a page made from it.

use crate::openapi::{Form, get, post, reference};
use serde_json::{Value, json};

/// An object with one list.
fn list(field: &str, schema: &str) -> Value {
    json!({"type": "object", "required": [field], "properties": {field: {"type": "array", "items": reference(schema)}}})
}

const ERRORS: [(&str, &str); 12] = [
    ("400", "The body is not JSON"),
    ("401", "The key is missing or wrong"),
    ("404", "The tenant is not served, or no upstream service is configured"),
    ("408", "The body was not received in time"),
    ("413", "Body or list too large"),
    ("415", "The content type is not JSON, or the body is compressed"),
    ("422", "A value is missing, wrong, or too long for the model"),
    ("429", "The queue is full, or too many requests of one address are in progress"),
    ("500", "The model failed"),
    ("502", "The upstream service cannot be reached, failed or has an unreadable response"),
    ("503", "The models are being loaded, or too many requests are in progress"),
    ("504", "The response or the upstream service took too long"),
];

pub(super) fn document() -> Value {
    let mut admin = post(
        "Load a run or a configuration as a tenant, or in place of the tenant of its name",
        &json!({"type": "object", "required": ["path"], "properties": {"path": {"type": "string"}}}),
        &reference("Tenant"),
        ("OpenAiError", &ERRORS),
    );
    admin["get"] = get("The tenants that are served")["get"].clone();
    let mut releases = get("Candidates against the current models of their tenants");
    releases["post"] = get("Read the releases again")["get"].clone();
    let name = json!({"name": "name", "in": "path", "required": true, "schema": {"type": "string"}});
    let success = json!({"200": {"description": "Success"}});
    let remove = json!({"summary": "Remove a tenant", "parameters": [name], "responses": success});
    let mut model = get("One of these models");
    model["get"]["parameters"] =
        json!([{"name": "model", "in": "path", "required": true, "schema": {"type": "string"}}]);
    let mut queries = list("queries", "Query");
    queries["additionalProperties"] = false.into();
    let dify_errors = ERRORS.map(|(status, what)| (if status == "401" { "403" } else { status }, what));
    let paths = json!({
        "/v1/rewrite": post(
            "Rewrite a query, or several",
            &json!({"oneOf": [reference("Query"), queries]}),
            &json!({"oneOf": [reference("Rewrite"), list("results", "Rewrite")]}),
            ("OpenAiError", &ERRORS),
        ),
        "/v1/chat/completions": post(
            "OpenAI's chat completions; the model is TENANT or TENANT/rewrite",
            &reference("ChatRequest"),
            &json!({"type": "object"}),
            ("OpenAiError", &ERRORS),
        ),
        "/v1/models": get("The models of the tenants that the key permits"),
        "/v1/models/{model}": model,
        "/v1/feedback": post(
            "What a user did with the passages of an earlier request, for the request log",
            &reference("Feedback"),
            &json!({"type": "object", "properties": {"id": {"type": "string"}, "accepted": {"type": "boolean"}}}),
            ("OpenAiError", &ERRORS),
        ),
        "/api/chat/general_rag": post(
            "Fill in rewritten_query and forward the request to the upstream service",
            &reference("RagRequest"),
            &json!({"type": "object"}),
            ("RagError", &ERRORS),
        ),
        "/retrieval": post(
            "External knowledge of Dify, with rewritten queries",
            &reference("DifyRequest"),
            &reference("DifyResponse"),
            ("DifyError", &dify_errors),
        ),
        "/admin/tenants": admin,
        "/admin/tenants/{name}": {"delete": remove},
        "/admin/releases": releases,
        "/releases": get("A page that compares candidates with current models"),
        "/health": get("Whether the process runs"),
        "/ready": get("Whether the models are loaded and the queue has room; else 503"),
        "/metrics": get("Metrics in Prometheus' text format"),
    });
    crate::openapi::document("querl serve rewrite", "Rewrites of queries for a knowledge base", &paths, &schemas())
}

fn schemas() -> Value {
    let text = json!({"type": "string"});
    let history = json!({
        "description": "A text, a list of texts, or a list of messages with `content`",
        "oneOf": [text, {"type": "array", "items": {"oneOf": [text, {"type": "object", "properties": {"content": text}}]}}],
    });
    let fallback = json!({
        "type": ["string", "null"],
        "description": "Why `rewrite` is the query itself: timeout, plugin_fault, no_rewrite, model_failed, removed",
    });
    json!({
        "Query": {
            "type": "object", "required": ["query"], "additionalProperties": false,
            "properties": {
                "query": text, "user_profile": text, "history": history,
                "tenant": {"type": "string", "description": "May be left out where the key permits one tenant"},
                "deadline_ms": {"type": "integer", "minimum": 0, "description": "Shortens the server's deadline"},
                "user": {"type": "string", "description": "Id of the user, for canary releases; the request log has a hash of it"},
            },
        },
        "Feedback": {
            "type": "object", "required": ["id"], "additionalProperties": false,
            "properties": {
                "id": {"type": "string", "description": "Id of the rewrite, or the response's x-request-id"},
                "tenant": {"type": "string", "description": "May be left out where the key permits one tenant"},
                "clicked": {"type": "array", "items": text, "maxItems": 100, "description": "Ids of passages that the user opened"},
                "passage": {"type": "string", "description": "Id of the passage that `useful` and `score` are about, else those of `clicked`"},
                "useful": {"type": "boolean"}, "score": {"type": "number", "minimum": 0, "maximum": 1},
            },
        },
        "Rewrite": {
            "type": "object",
            "properties": {
                "id": text, "rewrite": text, "tenant": text, "version": text,
                "latency_ms": {"type": "number"},
                "queue_ms": {"type": ["number", "null"], "description": "Time before prefill: waiting, prompt plugin, tokenizer; null for a fallback"},
                "cached": {"type": "boolean"}, "fallback": fallback,
            },
        },
        "ChatRequest": {
            "type": "object", "required": ["model", "messages"],
            "properties": {
                "model": text, "messages": {"type": "array", "items": {"type": "object"}},
                "stream": {"type": "boolean", "default": false}, "stream_options": {"type": "object"},
                "temperature": {"type": "number", "default": 0, "minimum": 0, "maximum": 2}, "top_p": {"type": "number", "default": 1},
                "max_completion_tokens": {"type": "integer"}, "max_tokens": {"type": "integer"},
                "stop": {"oneOf": [text, {"type": "array", "items": text}]}, "seed": {"type": "integer"}, "n": {"const": 1}, "user": text,
            },
        },
        "RagRequest": {
            "type": "object", "required": ["query"],
            "properties": {"query": text, "tenant_id": text, "rewritten_query": text, "user_profile": text, "history": history,
                "user_id": {"type": ["string", "number"]}},
        },
        "DifyRequest": {
            "type": "object", "required": ["knowledge_id", "query"],
            "properties": {
                "knowledge_id": {"type": "string", "description": "TENANT or TENANT:KB_NAME"}, "query": text,
                "retrieval_setting": {"type": "object", "properties": {"top_k": {"type": "integer"}, "score_threshold": {"type": "number"}}},
            },
        },
        "DifyResponse": {
            "type": "object",
            "properties": {"records": {"type": "array", "items": {"type": "object", "properties": {
                "content": text, "score": {"type": "number"}, "title": text, "metadata": {"type": "object"},
            }}}},
        },
        "Tenant": {
            "type": "object",
            "properties": {"name": text, "version": text, "source": text, "loaded_at": {"type": "integer"}, "has_own_key": {"type": "boolean"}},
        },
        "OpenAiError": {
            "type": "object",
            "properties": {"error": {"type": "object", "properties": {
                "message": text, "type": text, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            }}},
        },
        "RagError": {"type": "object", "properties": {"status": {"type": "integer"}, "msg": text, "data": {"type": "null"}}},
        "DifyError": {"type": "object", "properties": {"error_code": {"type": "integer"}, "error_msg": text}},
    })
}

/// The routes as an HTML page.
pub(super) fn page() -> String {
    let form = Form {
        fields: "<label>Tenant, where several are served <input id=\"tenant\"></label>\n",
        text: "胶原蛋白怎么吃",
        route: "/v1/rewrite",
        request: "{ query: element(\"text\").value, tenant: element(\"tenant\").value || null }",
    };
    crate::openapi::page("querl serve rewrite", &document(), &form)
}
