//! The key that clients send as `Authorization: Bearer KEY`.

use crate::error::ErrorResponse;
use axum::http::{HeaderMap, StatusCode, header};
use querl_core::fsx::digest_hex;

/// Error code of a 401 response if the key is missing or not sent as `Bearer KEY`.
pub(crate) const MALFORMED: &str = "malformed_authorization";

pub(crate) fn unauthorized(headers: &HeaderMap) -> ErrorResponse {
    let what = "the key is missing or wrong; send it as `Authorization: Bearer KEY`";
    let code = bearer(headers).is_none().then_some(MALFORMED);
    ErrorResponse { code, ..ErrorResponse::new(StatusCode::UNAUTHORIZED, what) }
}

/// The key of a request. The case of `Bearer` does not matter (RFC 9110, 11.1).
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes().trim_ascii();
    let (scheme, key) = value.split_at_checked("bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// An API key, stored as its digest. Comparing digests takes the same time for every key that a client sends.
pub(crate) struct ApiKey(String);

impl ApiKey {
    pub(crate) fn new(key: &str) -> Self {
        Self(digest_hex(key.as_bytes()))
    }

    pub(crate) fn is_in(&self, headers: &HeaderMap) -> bool {
        let Some(key) = bearer(headers) else { return false };
        let digest = digest_hex(key);
        digest.bytes().zip(self.0.bytes()).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn the_scheme_has_any_case_and_the_key_has_not() {
        let key = ApiKey::new("Right");
        let is_in = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            key.is_in(&headers)
        };
        for value in ["Bearer Right", "bearer Right", "BEARER   Right "] {
            assert!(is_in(value), "{value}");
        }
        for value in
            ["Bearer right", "Bearer Right2", "Bearer Righ", "Basic Right", "Right", "Bearer", "Bearer ", "", "钥匙"]
        {
            assert!(!is_in(value), "{value}");
        }
        assert!(!key.is_in(&HeaderMap::new()));
    }
}
