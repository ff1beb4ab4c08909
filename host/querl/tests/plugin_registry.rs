//! Bundles from a registry: what `plugin pull` may replace, and bundles that a configuration names by reference and digest.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::json;
use sha2::{Digest, Sha256};
use support::{Project, repository};
use wiremock::matchers::{method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

const BUNDLE: &str = "reward-competition-0.2.0.querl";
const REPOSITORY: &str = "/v2/reward-competition";
const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// A registry with one version of one plugin.
struct Registry {
    runtime: tokio::runtime::Runtime,
    server: MockServer,
}

impl Registry {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let server = runtime.block_on(MockServer::start());
        Self { runtime, server }
    }

    fn host(&self) -> String {
        self.server.address().to_string()
    }

    /// Replaces the archive in the registry. Returns the digest of the manifest.
    fn put(&self, archive: &[u8]) -> String {
        let bundle = querl_bundle::Bundle::from_bytes(archive, "test").unwrap();
        let layer = |media_type: &str, bytes: &[u8]| json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() });
        let config = layer("application/vnd.oci.empty.v1+json", b"{}");
        let manifest = |layer: serde_json::Value| {
            json!({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": [layer]}).to_string()
        };
        let of_bundle = manifest(layer("application/vnd.querl.bundle.v1+zstd", archive));
        let of_component = manifest(layer("application/wasm", bundle.component()));
        let texts = [
            (format!("{REPOSITORY}/manifests/0.2.0.querl"), of_bundle.clone()),
            (format!("{REPOSITORY}/manifests/{}", digest(of_bundle.as_bytes())), of_bundle.clone()),
            (format!("{REPOSITORY}/manifests/0.2.0"), of_component),
        ];
        self.runtime.block_on(async {
            self.server.reset().await;
            for (place, text) in texts {
                let answer = ResponseTemplate::new(200).set_body_raw(text, MANIFEST_TYPE);
                Mock::given(method("GET")).and(path(place)).respond_with(answer).mount(&self.server).await;
            }
            let blob = ResponseTemplate::new(200).set_body_bytes(archive.to_vec());
            let place = format!("{REPOSITORY}/blobs/{}", digest(archive));
            Mock::given(method("GET")).and(path(place)).respond_with(blob).mount(&self.server).await;
        });
        digest(of_bundle.as_bytes())
    }

    fn n_requests(&self) -> usize {
        self.runtime.block_on(self.server.received_requests()).unwrap().len()
    }
}

fn reward() -> String {
    repository().join("plugins/reward-competition").display().to_string()
}

/// Packs the reward. Returns the archive.
fn pack(project: &Project, args: &[&str]) -> Vec<u8> {
    project.querl(&[&["plugin", "pack", &reward(), "--out", "packed"], args].concat()).ok();
    std::fs::read(project.path(&format!("packed/{BUNDLE}"))).unwrap()
}

/// Symptom: pulling the same version without a signature replaced the signed bundle.
#[test]
fn a_signed_bundle_is_not_replaced_by_an_unsigned_or_another_one() {
    let (project, registry) = (Project::new(), Registry::start());
    let key = project.querl(&["plugin", "sign", "--new-key", "key.pem"]).ok().stdout.trim_end().to_owned();
    let unsigned = pack(&project, &[]);
    let signed = pack(&project, &["--sign", "key.pem"]);
    let refused = project.refusal(&["plugin", "pack", &reward(), "--out", "packed"], 2);
    let expected = format!("packed/{BUNDLE}: is there already with a signature of {key}, ");
    assert!(refused.starts_with(&expected), "{refused}");

    let reference = format!("{}/reward-competition:0.2.0", registry.host());
    let here = || std::fs::read(project.path(BUNDLE)).unwrap();
    registry.put(&signed);
    project.querl(&["plugin", "pull", &reference]).ok();
    project.querl(&["plugin", "pull", &reference]).ok();
    registry.put(&unsigned);
    let refused = project.refusal(&["plugin", "pull", &reference], 2);
    assert!(refused.starts_with(&format!("{BUNDLE}: is there already with a signature of {key}, ")), "{refused}");
    assert!(refused.ends_with("choose another folder with `--out`, or replace it with `--force`"), "{refused}");
    assert!(here() == signed);
    project.querl(&["plugin", "pull", &reference, "--out", "elsewhere"]).ok();
    project.querl(&["plugin", "pull", &reference, "--force"]).ok();
    assert!(here() == unsigned);
    registry.put(&signed);
    project.querl(&["plugin", "pull", &reference]).ok();
    assert!(here() == signed, "a signature may be added");

    project.write(BUNDLE, "a note");
    let refused = project.refusal(&["plugin", "pull", &reference], 2);
    let expected = format!("{BUNDLE}: is there already with content that is no intact bundle");
    assert!(refused.starts_with(&expected), "{refused}");
}

#[test]
fn a_configuration_names_a_bundle_by_reference_and_digest() {
    let (project, registry) = (Project::new(), Registry::start());
    let archive = pack(&project, &[]);
    let manifest = registry.put(&archive);
    let own = project.json(&["plugin", "verify", &format!("packed/{BUNDLE}")])["digest"].as_str().unwrap().to_owned();
    let (place, config) = (format!("oci://{}/reward-competition", registry.host()), project.read("querl.toml"));
    let with = |reference: &str| project.write("querl.toml", &config.replace(&reward(), reference));
    let querl = |args: &[&str]| {
        let mut command = project.command(args);
        command.env("QUERL_CACHE_DIR", project.path("cache"));
        support::CommandOutput::of(command.output().unwrap(), project.folder.path())
    };
    for reference in
        [format!("{place}@{manifest}"), format!("{place}:0.2.0@{manifest}"), format!("{place}:0.2.0@sha256:{own}")]
    {
        std::fs::remove_dir_all(project.path("cache")).ok();
        with(&reference);
        querl(&["run", "querl.toml", "--to", "rewrite", "-q"]).ok();
        let lock = project.read("querl.lock");
        assert!(lock.contains(&own), "{lock}");
        let n_requests = registry.n_requests();
        let listed = querl(&["plugin", "list", "querl.toml"]).ok();
        assert!(listed.stdout.contains(&reference), "{listed:#?}");
        assert_eq!(registry.n_requests(), n_requests, "a cached bundle needs no network");
    }
    assert!(project.read("querl.lock").contains("path = \"oci://"));

    // A modified file in the cache is downloaded again.
    let cached = project.path(&format!("cache/bundles/sha256-{own}.querl"));
    std::fs::write(&cached, "changed").unwrap();
    querl(&["config", "check", "querl.toml"]).ok();
    assert!(std::fs::read(&cached).unwrap() == archive);

    let refusal = |reference: &str| {
        with(reference);
        let output = querl(&["config", "check", "querl.toml", "-q"]);
        assert_eq!((output.code, output.stderr.lines().count()), (Some(2), 1), "{output:#?}");
        output.stderr
    };
    let other = "ab".repeat(32);
    let said = refusal(&format!("{place}:0.2.0@sha256:{other}"));
    assert!(said.contains(&format!("has the digest sha256:{own}")) && said.contains(&other), "{said}");
    assert!(refusal(&format!("{place}@sha256:{other}")).contains("has no bundle with the digest sha256:abab"));
    assert!(refusal(&format!("{place}:0.3.0@{manifest}")).contains("has version 0.2.0"));
    assert!(refusal(&format!("{place}:0.2.0")).contains("expected oci://HOST[:PORT]/REPO[:VERSION]@sha256:DIGEST"));
    assert!(refusal(&format!("oci://127.0.0.1:1/reward-competition@sha256:{other}")).contains("cannot be reached"));
}
