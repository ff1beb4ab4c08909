//! Tests with real registry processes on loopback, which `tests/registry/run.sh` starts.

use crate::common::{TestPlugin, bundle, location};
use oci_client::Client;
use oci_client::client::{ClientConfig, ClientProtocol, Config, ImageLayer};
use oci_client::manifest::OciManifest;
use oci_client::secrets::RegistryAuth;
use querl_bundle::oci::{Credentials, RegistryReference, Transport, pull, push, versions};
use querl_bundle::{SigningKey, sign};

/// A repository used only by this test, in the registry without access control.
fn open(repository: &str) -> RegistryReference {
    in_registry("QUERL_TEST_REGISTRY", repository)
}

fn locked(repository: &str) -> RegistryReference {
    in_registry("QUERL_TEST_REGISTRY_LOCKED", repository)
}

fn in_registry(variable: &str, repository: &str) -> RegistryReference {
    let host = std::env::var(variable).expect("run tests/registry/run.sh, which starts the registry");
    location(&host, &format!("{repository}/reward-brevity"))
}

fn nobody() -> Credentials {
    Credentials::anonymous()
}

fn other_client() -> Client {
    Client::new(ClientConfig { protocol: ClientProtocol::Http, ..ClientConfig::default() })
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn pushed_bundle_comes_back_byte_for_byte() {
    let place = open("querl/there-and-back");
    let key = SigningKey::generate().unwrap();
    let bytes = sign(&bundle(&TestPlugin::default()), &key).unwrap();
    let pushed = push(&bytes, &place, &nobody(), Transport::Secure).await.unwrap();
    assert_eq!(pushed.component, format!("{place}:0.1.0"));
    assert_eq!(pushed.bundle, format!("{place}:0.1.0.querl"));
    for from in [&place, &pushed.location] {
        let pulled = pull(from, &nobody(), Transport::Secure).await.unwrap();
        assert_eq!(pulled.bytes, bytes);
        assert_eq!(pulled.location, pushed.location);
        assert_eq!(pulled.bundle.verify(&[key.public()]).unwrap(), key.public());
    }
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn component_next_to_the_bundle_is_as_wkg_expects_it() {
    let place = open("querl/for-wkg");
    let plugin = TestPlugin::default();
    push(&bundle(&plugin), &place, &nobody(), Transport::Secure).await.unwrap();
    let reference = format!("{place}:0.1.0").parse().unwrap();
    let (manifest, _, config) =
        other_client().pull_manifest_and_config(&reference, &RegistryAuth::Anonymous).await.unwrap();
    assert_eq!(manifest.media_type.as_deref(), Some("application/vnd.oci.image.manifest.v1+json"));
    assert_eq!(manifest.config.media_type, "application/vnd.wasm.config.v0+json");
    let [layer] = &manifest.layers[..] else { panic!("{manifest}") };
    assert_eq!(layer.media_type, "application/wasm");
    let annotation =
        |key: &str| manifest.annotations.as_ref().unwrap()[&format!("org.opencontainers.image.{key}")].clone();
    let expected = ["reward-brevity", "0.1.0", "短的改写得分高", "Apache-2.0"];
    assert_eq!(["title", "version", "description", "licenses"].map(annotation), expected);
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let expected = serde_json::json!({
        "created": "1970-01-01T00:00:00Z", "author": null, "architecture": "wasm", "os": "wasip2",
        "layerDigests": [layer.digest],
        "component": { "imports": [], "exports": ["querl:plugin/rewards@0.1.0"], "target": null },
    });
    assert_eq!(config, expected);
    let mut component = Vec::new();
    other_client().pull_blob(&reference, layer, &mut component).await.unwrap();
    assert_eq!(component, plugin.component);
    // For the script's comparison with what wkg pulls.
    let folder = std::env::var_os("QUERL_TEST_FOLDER").expect("run tests/registry/run.sh, which names a folder");
    std::fs::write(std::path::Path::new(&folder).join("for-wkg.wasm"), component).unwrap();
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn bundle_is_an_artifact_that_names_its_component() {
    let place = open("querl/artifact");
    let pushed = push(&bundle(&TestPlugin::default()), &place, &nobody(), Transport::Secure).await.unwrap();
    let reference = pushed.bundle.parse().unwrap();
    let (manifest, digest) = other_client().pull_manifest(&reference, &RegistryAuth::Anonymous).await.unwrap();
    let OciManifest::Image(manifest) = manifest else { panic!("{manifest}") };
    assert_eq!(digest, pushed.bundle_manifest);
    assert_eq!(manifest.artifact_type.as_deref(), Some("application/vnd.querl.bundle.v1+zstd"));
    assert_eq!(manifest.subject.unwrap().digest, pushed.component_manifest);
    let expected = "reward-brevity-0.1.0.querl";
    assert_eq!(manifest.layers[0].annotations.as_ref().unwrap()["org.opencontainers.image.title"], expected);
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn a_version_keeps_its_content_and_may_gain_signatures() {
    let place = open("querl/kept");
    let first = bundle(&TestPlugin::default());
    let pushed = push(&first, &place, &nobody(), Transport::Secure).await.unwrap();
    assert_eq!(push(&first, &place, &nobody(), Transport::Secure).await.unwrap(), pushed);
    let signed = sign(&first, &SigningKey::generate().unwrap()).unwrap();
    push(&signed, &place, &nobody(), Transport::Secure).await.unwrap();
    assert_eq!(pull(&place, &nobody(), Transport::Secure).await.unwrap().bytes, signed);
    let other = bundle(&TestPlugin { readme: "# 另一个\n".into(), ..TestPlugin::default() });
    let error = push(&other, &place, &nobody(), Transport::Secure).await.unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "{place}:0.1.0: is there already with other content; give the plugin a new version in plugin.toml and pack it again"
        )
    );
    assert_eq!(pull(&place, &nobody(), Transport::Secure).await.unwrap().bytes, signed);
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn signatures_are_not_lost_by_pushing_a_bundle_without_them() {
    let place = open("querl/signed");
    let (one, two) = (SigningKey::generate().unwrap(), SigningKey::generate().unwrap());
    let unsigned = bundle(&TestPlugin::default());
    let signed = sign(&unsigned, &one).unwrap();
    push(&signed, &place, &nobody(), Transport::Secure).await.unwrap();
    for fewer in [&unsigned, &sign(&unsigned, &two).unwrap()] {
        let error = push(fewer, &place, &nobody(), Transport::Secure).await.unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{place}:0.1.0: is there already with a signature of {}, which would be lost; pull the bundle, sign that one and push it",
                one.public()
            )
        );
        assert_eq!(pull(&place, &nobody(), Transport::Secure).await.unwrap().bytes, signed);
    }
    // Follows the remedy in the error message.
    let both = sign(&pull(&place, &nobody(), Transport::Secure).await.unwrap().bytes, &two).unwrap();
    push(&both, &place, &nobody(), Transport::Secure).await.unwrap();
    assert_eq!(pull(&place, &nobody(), Transport::Secure).await.unwrap().bytes, both);
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn highest_release_is_pulled_and_missing_versions_are_reported() {
    let place = open("querl/many");
    for version in ["0.9.0", "0.10.0", "0.11.0-rc.1", "0.2.0+build.7"] {
        let plugin = TestPlugin { version: version.into(), ..TestPlugin::default() };
        push(&bundle(&plugin), &place, &nobody(), Transport::Secure).await.unwrap();
    }
    let found = versions(&place, &nobody(), Transport::Secure).await.unwrap();
    let expected = ["0.2.0+build.7", "0.9.0", "0.10.0", "0.11.0-rc.1"];
    assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
    let pulled = pull(&place, &nobody(), Transport::Secure).await.unwrap();
    assert_eq!(pulled.location.to_string(), format!("{place}:0.10.0"));
    let named = place.with_version("0.2.0+build.7".parse().unwrap());
    assert_eq!(pull(&named, &nobody(), Transport::Secure).await.unwrap().location, named);
    let missing = place.with_version("3.0.0".parse().unwrap());
    let error = pull(&missing, &nobody(), Transport::Secure).await.unwrap_err().to_string();
    let expected = format!("{missing}: there is no such version; available: 0.2.0+build.7, 0.9.0, 0.10.0, 0.11.0-rc.1");
    assert_eq!(error, expected);
    let error = pull(&open("querl/none"), &nobody(), Transport::Secure).await.unwrap_err().to_string();
    let expected = "querl/none/reward-brevity: the registry has no such repository; check the name";
    assert!(error.ends_with(expected), "{error}");
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn bundle_of_another_version_than_its_place_is_refused() {
    let place = open("querl/other-version").with_version("9.0.0".parse().unwrap());
    let error =
        push(&bundle(&TestPlugin::default()), &place, &nobody(), Transport::Secure).await.unwrap_err().to_string();
    assert!(error.contains("the bundle has version 0.1.0; push it to"), "{error}");
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn component_that_was_replaced_is_noticed() {
    let place = open("querl/replaced");
    push(&bundle(&TestPlugin::default()), &place, &nobody(), Transport::Secure).await.unwrap();
    push_component(&format!("{place}:0.1.0"), b"\0asm\x0d\0\x01\0").await;
    let error = pull(&place, &nobody(), Transport::Secure).await.unwrap_err().to_string();
    assert!(error.contains("is not the one in the bundle") && error.contains("was replaced after pushing"), "{error}");
    let again = TestPlugin { readme: "# 三\n".into(), ..TestPlugin::default() };
    let error = push(&bundle(&again), &place, &nobody(), Transport::Secure).await.unwrap_err().to_string();
    assert!(error.contains("is there already with other content"), "{error}");
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn component_that_another_tool_pushed_is_no_bundle_and_is_not_replaced() {
    let place = open("querl/by-others").with_version("0.1.0".parse().unwrap());
    push_component(&place.to_string(), b"\0asm\x0d\0\x01\0").await;
    let error = pull(&place, &nobody(), Transport::Secure).await.unwrap_err().to_string();
    let expected = "has a component there but no bundle: another tool pushed it; `wkg oci pull` reads it";
    assert!(error.ends_with(expected), "{error}");
    let error =
        push(&bundle(&TestPlugin::default()), &place, &nobody(), Transport::Secure).await.unwrap_err().to_string();
    assert!(error.contains("is there already with another component"), "{error}");
}

async fn push_component(reference: &str, component: &'static [u8]) {
    let layer = ImageLayer::new(component, "application/wasm".into(), None);
    let config = Config::new(b"{}".as_slice(), "application/vnd.wasm.config.v0+json".into(), None);
    let reference = reference.parse().unwrap();
    other_client().push(&reference, &[layer], config, &RegistryAuth::Anonymous, None).await.unwrap();
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn registry_with_a_password_wants_it_and_no_message_shows_it() {
    let place = locked("querl/private");
    let bytes = bundle(&TestPlugin::default());
    for wrong in [nobody(), Credentials::basic("tester", "falsch-4711")] {
        let error = push(&bytes, &place, &wrong, Transport::Secure).await.unwrap_err();
        let message = error.to_string();
        assert!(message.contains(&format!("run `docker login {}`", place.host())), "{message}");
        assert!(!format!("{error:?} {error} {wrong:?}").contains("4711"));
        assert!(pull(&place, &wrong, Transport::Secure).await.is_err());
    }
    let right = Credentials::basic("tester", "geheim");
    push(&bytes, &place, &right, Transport::Secure).await.unwrap();
    assert_eq!(pull(&place, &right, Transport::Secure).await.unwrap().bytes, bytes);
}

#[tokio::test]
#[ignore = "needs docker-registry"]
async fn credentials_of_docker_login_are_used() {
    let place = locked("querl/by-docker-login");
    let found = Credentials::find(&place).unwrap();
    assert_eq!(found, Credentials::basic("tester", "geheim"));
    push(&bundle(&TestPlugin::default()), &place, &found, Transport::Secure).await.unwrap();
    assert_eq!(Credentials::find(&open("querl/x")).unwrap(), nobody());
}
