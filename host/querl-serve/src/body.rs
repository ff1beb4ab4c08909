//! The JSON body of a request, read field by field, so that an error names the field, its value and what is expected.

use crate::error::ErrorResponse;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use futures::StreamExt;
use querl_core::text::nearest;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;
use std::time::Duration;

/// Maximum number of characters of a quoted value in a message.
const QUOTED_CHARS: usize = 60;

/// Limits of a request body, and a description of its form for error messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimits<'a> {
    /// Maximum size of the body in bytes; the route also sets it as axum's `DefaultBodyLimit`.
    pub(crate) max_bytes: usize,
    pub(crate) timeout: Duration,
    pub(crate) expected: &'a str,
}

pub(crate) async fn read_fields(request: Request, limits: BodyLimits<'_>) -> Result<JsonFields, ErrorResponse> {
    JsonFields::parse(&read_body(request, limits).await?, limits.expected)
}

pub(crate) async fn read_body(request: Request, limits: BodyLimits<'_>) -> Result<Bytes, ErrorResponse> {
    check_headers(request.headers())?;
    if declared_bytes(request.headers()).is_some_and(|n_bytes| n_bytes > limits.max_bytes as u64) {
        // A client that waits for `100 Continue` has not sent the body.
        if !request.headers().contains_key(header::EXPECT) {
            tokio::spawn(discard(request.into_body(), limits.max_bytes, limits.timeout));
        }
        return Err(too_large(limits));
    }
    let body = tokio::time::timeout(limits.timeout, Bytes::from_request(request, &())).await;
    let late = |_| {
        let what = format!("the body was not received within {:?}", limits.timeout);
        ErrorResponse::new(StatusCode::REQUEST_TIMEOUT, what)
    };
    body.map_err(late)?.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => too_large(limits),
        _ => ErrorResponse::new(StatusCode::BAD_REQUEST, "the body is incomplete or its chunks are malformed"),
    })
}

/// Reads a body up to the limit and drops it. The response is sent meanwhile: a client that is still sending may interpret a closed
/// connection as a network error and not read the response.
async fn discard(body: Body, max_bytes: usize, timeout: Duration) {
    let mut parts = body.into_data_stream();
    let reading = async {
        let mut n_bytes = 0;
        while n_bytes <= max_bytes
            && let Some(Ok(part)) = parts.next().await
        {
            n_bytes += part.len();
        }
    };
    let _ = tokio::time::timeout(timeout, reading).await;
}

fn declared_bytes(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn too_large(limits: BodyLimits<'_>) -> ErrorResponse {
    ErrorResponse::too_large(format!("the body is larger than {} bytes", limits.max_bytes))
}

/// Checks the form of the body that the headers declare.
fn check_headers(headers: &HeaderMap) -> Result<(), ErrorResponse> {
    let text = |name: HeaderName| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let wrong = |what: String| Err(ErrorResponse::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, what));
    match text(header::CONTENT_TYPE) {
        Some(content_type) if is_json(&content_type) => {}
        Some(other) => {
            return wrong(format!("`Content-Type` is `{}`; expected `application/json`", shortened(&other)));
        }
        None => return wrong("`Content-Type` is missing; expected `application/json`".into()),
    }
    if let Some(encoding) = text(header::CONTENT_ENCODING).filter(|encoding| !encoding.eq_ignore_ascii_case("identity"))
    {
        return wrong(format!("`Content-Encoding` is `{}`; expected an uncompressed body", shortened(&encoding)));
    }
    Ok(())
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

/// A JSON value as an error message quotes it, shortened if it is long.
pub(crate) fn quoted(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[derive(Debug, Default)]
pub(crate) struct JsonFields(Map<String, Value>);

impl JsonFields {
    /// Parses the body as a JSON object.
    ///
    /// # Errors
    /// It is not a JSON object, whose form `expected` describes, or a field appears twice, in it or in an object within it.
    pub(crate) fn parse(body: &[u8], expected: &str) -> Result<Self, ErrorResponse> {
        let syntax = |what: String| ErrorResponse::new(StatusCode::BAD_REQUEST, what);
        if body.trim_ascii().is_empty() {
            return Err(syntax(format!("the body is empty; expected {expected}")));
        }
        serde_json::from_slice::<Self>(body).map_err(|error| match serde_json::from_slice::<Value>(body) {
            Err(error) => syntax(format!("the body is not valid JSON: {error}; expected {expected}")),
            Ok(Value::Object(_)) => ErrorResponse::value(error.to_string()),
            Ok(other) => ErrorResponse::value(format!("the body is {}; expected {expected}", quoted(&other))),
        })
    }

    /// Rejects a body with a field that is not in `known`, which would be ignored.
    ///
    /// # Errors
    /// A field is none of `known`.
    pub(crate) fn check_known(&self, known: &[&str]) -> Result<(), ErrorResponse> {
        let Some(name) = self.0.keys().find(|name| !known.contains(&name.as_str())) else { return Ok(()) };
        let remedy = match nearest(name, known.iter().copied()).first() {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("expected `{}`", known.join("`, `")),
        };
        Err(ErrorResponse::value(format!("`{}` is not a field of this request; {remedy}", shortened(name))))
    }

    /// All fields of the body that were not taken, for a response that repeats them.
    pub(crate) fn into_map(self) -> Map<String, Value> {
        self.0
    }

    /// Takes the value of a field out of the body; `None` if it is missing or null.
    ///
    /// # Errors
    /// It has another type than `T`, which `expected` describes.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ErrorResponse> {
        let value = self.0.remove(name).filter(|value| !value.is_null());
        value.map(|value| T::deserialize(&value).map_err(|_| wrong_value(name, &value, expected))).transpose()
    }

    /// Takes the value of a required field out of the body.
    ///
    /// # Errors
    /// It is missing, null, or of another type than `T`.
    pub(crate) fn take_required<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
        expected: &str,
    ) -> Result<T, ErrorResponse> {
        let missing = || ErrorResponse::field(name, format!("`{name}` is missing; expected {expected}"));
        self.take(name, expected)?.ok_or_else(missing)
    }
}

fn wrong_value(name: &'static str, value: &Value, expected: &str) -> ErrorResponse {
    ErrorResponse::field(name, format!("`{name}` is {}; expected {expected}", quoted(value)))
}

impl<'de> Deserialize<'de> for JsonFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

/// Rejects a field that appears twice, since it is unclear which one the client means.
struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = JsonFields;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<JsonFields, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = access.next_key::<String>()? {
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format!("`{name}` appears twice")));
            }
            fields.insert(name, access.next_value::<UniqueFields>()?.0);
        }
        Ok(JsonFields(fields))
    }
}

/// A JSON value without duplicate fields in its objects.
struct UniqueFields(Value);

impl<'de> Deserialize<'de> for UniqueFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor).map(Self)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(UniqueFields(value)) = access.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Value, A::Error> {
        FieldsVisitor.visit_map(access).map(|JsonFields(fields)| fields.into())
    }
}
