//! Responses, and errors with an HTTP status and a sentence, in the form that the clients of a route expect.

use crate::connections::RequestLimitError;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

#[derive(Debug)]
pub(crate) struct ErrorResponse {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// Error code of OpenAI's API (or of querl), if it says more than the HTTP status.
    pub(crate) code: Option<&'static str>,
    /// Name of the request field that is wrong.
    pub(crate) param: Option<&'static str>,
}

/// Form of the body of an error response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    /// `{error, error_type}`, as text-embeddings-inference returns it.
    TextEmbeddingsInference,
    /// `{error: {message, type, param, code}}`, with the types of vLLM and the status as code.
    Vllm,
    /// `{error: {message, type, param, code}}`, with OpenAI's types and codes.
    OpenAi,
    /// `{status, msg, data: null}`, as `general_rag` services return it.
    GeneralRag,
    /// `{error_code, error_msg}`, as Dify expects it of an external knowledge service.
    Dify,
}

impl ErrorResponse {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), code: None, param: None }
    }

    /// Error 422 for a value that cannot be used.
    pub(crate) fn value(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// Error 422 for a field whose value cannot be used.
    pub(crate) fn field(param: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param), ..Self::value(message) }
    }

    pub(crate) fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub(crate) fn into_body(self, form: ErrorForm) -> Response {
        let Self { status, message, code, param } = self;
        let body = match form {
            ErrorForm::TextEmbeddingsInference => json!({"error": message, "error_type": plain_type(status)}),
            ErrorForm::Vllm => {
                json!({"error": {"message": message, "type": vllm_type(status), "param": null, "code": status.as_u16()}})
            }
            ErrorForm::OpenAi => openai_error(status, &message, code, param),
            ErrorForm::GeneralRag => json!({"status": status.as_u16(), "msg": message, "data": null}),
            ErrorForm::Dify => json!({"error_code": dify_code(status, code), "error_msg": message}),
        };
        // Dify reports a missing or wrong key only for status 403.
        let status = match form {
            ErrorForm::Dify if status == StatusCode::UNAUTHORIZED => StatusCode::FORBIDDEN,
            _ => status,
        };
        with_error_headers((status, Json(body)).into_response())
    }
}

/// A response with a JSON body, or an error in the form of the route's clients.
pub(crate) fn json_response(result: Result<Value, ErrorResponse>, form: ErrorForm) -> Response {
    result.map_or_else(|error| error.into_body(form), |body| Json(body).into_response())
}

impl From<RequestLimitError> for ErrorResponse {
    fn from(error: RequestLimitError) -> Self {
        Self::new(error.status(), error.to_string())
    }
}

/// Adds the headers that some statuses require: when to retry, and the scheme of the key.
fn with_error_headers(mut response: Response) -> Response {
    let header = match response.status() {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => (header::RETRY_AFTER, "1"),
        StatusCode::UNAUTHORIZED => (header::WWW_AUTHENTICATE, "Bearer"),
        _ => return response,
    };
    response.headers_mut().insert(header.0, HeaderValue::from_static(header.1));
    response
}

/// Error types of text-embeddings-inference, which has none for a missing key.
fn plain_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::TOO_MANY_REQUESTS => "Overloaded",
        StatusCode::SERVICE_UNAVAILABLE => "Unhealthy",
        StatusCode::INTERNAL_SERVER_ERROR => "Backend",
        StatusCode::UNAUTHORIZED => "Unauthorized",
        _ => "Validation",
    }
}

fn vllm_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::TOO_MANY_REQUESTS => "RateLimitError",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
        StatusCode::INTERNAL_SERVER_ERROR => "InternalServerError",
        StatusCode::UNAUTHORIZED => "AuthenticationError",
        StatusCode::UNPROCESSABLE_ENTITY => "UnprocessableEntityError",
        _ => "BadRequestError",
    }
}

pub(crate) fn openai_error(status: StatusCode, message: &str, code: Option<&str>, param: Option<&str>) -> Value {
    let (kind, default) = match status {
        StatusCode::TOO_MANY_REQUESTS => ("rate_limit_error", Some("rate_limit_exceeded")),
        StatusCode::UNAUTHORIZED => ("authentication_error", Some("invalid_api_key")),
        StatusCode::FORBIDDEN => ("permission_error", None),
        status if status.is_server_error() => ("server_error", None),
        _ => ("invalid_request_error", None),
    };
    json!({"error": {"message": message, "type": kind, "param": param, "code": code.or(default)}})
}

/// Codes of Dify's specification; other errors have their status.
fn dify_code(status: StatusCode, code: Option<&str>) -> u16 {
    match (status, code) {
        (StatusCode::UNAUTHORIZED, Some(crate::key::MALFORMED)) => 1001,
        (StatusCode::UNAUTHORIZED, _) => 1002,
        (StatusCode::NOT_FOUND, _) => 2001,
        (status, _) => status.as_u16(),
    }
}
