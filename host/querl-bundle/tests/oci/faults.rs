//! Registries on loopback that fail or send wrong data.

use crate::common::{TestPlugin, bundle, location};
use querl_bundle::oci::{Credentials, RegistryReference, Transport, pull, push, versions};
use querl_bundle::{Bundle, SigningKey, sign};
use serde_json::json;
use sha2::{Digest, Sha256};
use wiremock::matchers::{method, path, path_regex};
use wiremock::{Mock, MockServer, ResponseTemplate};

fn place(server: &MockServer) -> RegistryReference {
    location(&server.address().to_string(), "reward-brevity").with_version("0.1.0".parse().unwrap())
}

async fn pulled(server: &MockServer) -> String {
    pull(&place(server), &Credentials::anonymous(), Transport::Secure).await.unwrap_err().to_string()
}

/// The answer with a bundle's manifest whose layer is `layer`.
fn manifest(layer: serde_json::Value, annotations: serde_json::Value) -> ResponseTemplate {
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": "application/vnd.querl.bundle.v1+zstd",
        "config": { "mediaType": "application/vnd.oci.empty.v1+json", "digest": digest(b"{}"), "size": 2 },
        "layers": [layer],
        "annotations": annotations,
    });
    ResponseTemplate::new(200).set_body_raw(manifest.to_string(), "application/vnd.oci.image.manifest.v1+json")
}

async fn serve_manifest(server: &MockServer, layer: serde_json::Value) {
    serve_annotated(server, layer, json!({})).await;
}

async fn serve_annotated(server: &MockServer, layer: serde_json::Value, annotations: serde_json::Value) {
    Mock::given(method("GET"))
        .and(path("/v2/reward-brevity/manifests/0.1.0.querl"))
        .respond_with(manifest(layer, annotations))
        .mount(server)
        .await;
}

async fn serve_blob(server: &MockServer, content: Vec<u8>) {
    let answer = ResponseTemplate::new(200).set_body_bytes(content);
    Mock::given(method("GET")).and(path_regex("^/v2/reward-brevity/blobs/")).respond_with(answer).mount(server).await;
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Serves the manifest and the archive of `bytes`, as after a push.
async fn serve_bundle(server: &MockServer, bytes: &[u8]) {
    let bundle = Bundle::from_bytes(bytes, "test").unwrap();
    let annotations = json!({ "querl.bundle.digest": bundle.digest() });
    serve_annotated(server, layer(bytes), annotations).await;
    serve_blob(server, bytes.to_vec()).await;
}

fn layer(content: &[u8]) -> serde_json::Value {
    json!({ "mediaType": "application/vnd.querl.bundle.v1+zstd", "digest": digest(content), "size": content.len() })
}

#[tokio::test]
async fn registry_that_is_not_there_is_reported_with_the_remedy() {
    // A port on which nothing listens.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    drop(listener);
    let place = location(&host, "reward-brevity");
    let error = push(&bundle(&TestPlugin::default()), &place, &Credentials::anonymous(), Transport::Secure).await;
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with(&format!("{place}:0.1.0: cannot be reached: ")), "{error}");
    assert!(error.contains("check the address"), "{error}");
}

#[tokio::test]
async fn failing_registry_is_reported_on_one_line() {
    let server = MockServer::start().await;
    let answer =
        ResponseTemplate::new(503).set_body_string(format!("down\n\u{1b}[2J\u{202e}\u{200b}{}", "x".repeat(1000)));
    Mock::given(method("GET")).respond_with(answer).mount(&server).await;
    let error = pulled(&server).await;
    assert!(error.contains("the registry answered with status 503: down [2Jxxx"), "{error}");
    assert!(error.len() < 450 && !error.contains(['\n', '\u{1b}', '\u{202e}', '\u{200b}']), "{error}");
}

#[tokio::test]
async fn content_without_its_digest_is_refused() {
    let server = MockServer::start().await;
    serve_manifest(&server, layer(b"expected")).await;
    serve_blob(&server, b"other".to_vec()).await;
    assert!(pulled(&server).await.contains("the transfer broke off"), "{}", pulled(&server).await);
}

#[tokio::test]
async fn bundle_that_is_too_large_is_not_read_to_its_end() {
    let server = MockServer::start().await;
    let mut announced = layer(b"x");
    announced["size"] = json!(100 << 20);
    serve_manifest(&server, announced).await;
    assert!(pulled(&server).await.contains("larger than the 75497472 bytes that are read"));
    // A layer with a wrong size.
    let server = MockServer::start().await;
    let mut small = layer(b"x");
    small["size"] = json!(1);
    serve_manifest(&server, small).await;
    serve_blob(&server, vec![0; 73 << 20]).await;
    assert!(pulled(&server).await.contains("larger than the 75497472 bytes that are read"));
}

#[tokio::test]
async fn addresses_in_a_manifest_are_not_called() {
    let (server, elsewhere) = (MockServer::start().await, MockServer::start().await);
    let mut with_address = layer(b"content");
    with_address["urls"] = json!([format!("{}/stolen", elsewhere.uri())]);
    serve_manifest(&server, with_address).await;
    serve_blob(&server, b"content".to_vec()).await;
    let error = pulled(&server).await;
    assert!(error.contains("is not a bundle"), "{error}");
    assert!(elsewhere.received_requests().await.unwrap().is_empty());
}

#[tokio::test]
async fn manifest_of_something_else_is_reported() {
    let server = MockServer::start().await;
    serve_manifest(&server, json!({ "mediaType": "application/wasm", "digest": digest(b"x"), "size": 1 })).await;
    let error = pulled(&server).await;
    assert!(error.contains("0.1.0.querl holds no bundle; name one that"), "{error}");
}

/// Pushing a copy without a signature would remove the signature, which others rely on.
#[tokio::test]
async fn push_that_would_lose_a_signature_is_refused_and_uploads_nothing() {
    let server = MockServer::start().await;
    let unsigned = bundle(&TestPlugin::default());
    let keys = [SigningKey::generate().unwrap(), SigningKey::generate().unwrap()];
    let there = sign(&unsigned, &keys[0]).unwrap();
    serve_bundle(&server, &there).await;
    for fewer in [&unsigned, &sign(&unsigned, &keys[1]).unwrap()] {
        let error = push(fewer, &place(&server), &Credentials::anonymous(), Transport::Secure).await.unwrap_err();
        let error = error.to_string();
        let lost = format!("is there already with a signature of {}, which would be lost; pull", keys[0].public());
        assert!(error.contains(&lost), "{error}");
    }
    let is_upload = |request: &wiremock::Request| ["POST", "PUT", "PATCH"].contains(&request.method.as_str());
    assert!(!server.received_requests().await.unwrap().iter().any(is_upload));
    // Adding a signature is allowed, so the push reaches the upload, which this registry rejects.
    let more = sign(&there, &keys[1]).unwrap();
    let error = push(&more, &place(&server), &Credentials::anonymous(), Transport::Secure).await.unwrap_err();
    assert!(!error.to_string().contains("would be lost"), "{error}");
    assert!(server.received_requests().await.unwrap().iter().any(is_upload));
}

#[tokio::test]
async fn bundle_of_another_plugin_is_refused_by_both_ends() {
    let server = MockServer::start().await;
    let bytes = bundle(&TestPlugin::default());
    let other = location(&server.address().to_string(), "team/filter-x").with_version("0.1.0".parse().unwrap());
    let right = format!("{}/team/reward-brevity", other.host());
    let expected = format!("{other}: the plugin is `reward-brevity`, and its repository ends with that: {right}; ");
    let error = push(&bytes, &other, &Credentials::anonymous(), Transport::Secure).await.unwrap_err().to_string();
    assert_eq!(error, format!("{expected}push it there"));
    assert!(server.received_requests().await.unwrap().is_empty());

    let answer = manifest(layer(&bytes), json!({}));
    Mock::given(path_regex("/manifests/")).respond_with(answer).mount(&server).await;
    Mock::given(path_regex("/blobs/"))
        .respond_with(ResponseTemplate::new(200).set_body_bytes(bytes))
        .mount(&server)
        .await;
    let error = pull(&other, &Credentials::anonymous(), Transport::Secure).await.unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "{expected}another plugin was pushed to this place, pull the plugin that you want by its own reference"
        )
    );
}

#[tokio::test]
async fn tags_without_end_are_refused() {
    for (n, is_refused) in [(9_999, false), (10_001, true)] {
        let server = MockServer::start().await;
        let tags: Vec<_> = (0..n).map(|minor| format!("0.{minor}.0.querl")).collect();
        let answer = ResponseTemplate::new(200).set_body_json(json!({ "name": "reward-brevity", "tags": tags }));
        Mock::given(path("/v2/reward-brevity/tags/list")).respond_with(answer).mount(&server).await;
        let found = versions(&place(&server), &Credentials::anonymous(), Transport::Secure).await;
        match found {
            Ok(found) => assert_eq!((found.len(), is_refused), (n, false)),
            Err(error) => {
                let error = error.to_string();
                assert!(is_refused && error.ends_with("more tags than are read (10000); name a version"), "{error}");
            }
        }
    }
}

#[tokio::test]
async fn credentials_are_not_sent_over_plain_http_to_another_machine() {
    // An address reserved for documentation: connecting to it times out.
    let elsewhere = location("192.0.2.1", "reward-brevity");
    let ours = Credentials::basic("tester", "geheim-4711");
    let error = versions(&elsewhere, &ours, Transport::PlainHttp).await.unwrap_err().to_string();
    assert!(error.contains("credentials are not sent over plain http to another machine; leave out"), "{error}");
    assert!(!error.contains("4711"), "{error}");
}
