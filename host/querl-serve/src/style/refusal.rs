//! Requests that are not served.

use super::NotAccepted;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// A request that was not served, in words.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    message: String,
}

/// How clients of a route read errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// `{error, error_type}`, as text-embeddings-inference.
    Plain,
    /// `{error: {message, type, code}}`, as vLLM.
    OpenAi,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// A value that is missing or wrong.
    pub(super) fn value(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// Too much in one request.
    pub(super) fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    /// What the classifier did not take.
    pub(super) fn of(reason: NotAccepted) -> Self {
        match reason {
            NotAccepted::Busy(message) => Self::new(StatusCode::TOO_MANY_REQUESTS, message),
            NotAccepted::Text(message) => Self::value(message),
            NotAccepted::Gone => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the classifier has ended, and the server with it; its log says why",
            ),
        }
    }

    pub(super) fn answer(self, form: Form) -> Response {
        let Self { status, message } = self;
        let body = match form {
            Form::Plain => json!({"error": message, "error_type": plain_type(status)}),
            Form::OpenAi => {
                json!({"error": {"message": message, "type": openai_type(status), "param": null, "code": status.as_u16()}})
            }
        };
        let mut response = (status, Json(body)).into_response();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// As text-embeddings-inference names them; it has no name for a missing key.
fn plain_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::TOO_MANY_REQUESTS => "Overloaded",
        StatusCode::SERVICE_UNAVAILABLE => "Unhealthy",
        StatusCode::INTERNAL_SERVER_ERROR => "Backend",
        StatusCode::UNAUTHORIZED => "Unauthorized",
        _ => "Validation",
    }
}

fn openai_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::TOO_MANY_REQUESTS => "RateLimitError",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
        StatusCode::INTERNAL_SERVER_ERROR => "InternalServerError",
        StatusCode::UNAUTHORIZED => "AuthenticationError",
        StatusCode::UNPROCESSABLE_ENTITY => "UnprocessableEntityError",
        _ => "BadRequestError",
    }
}
