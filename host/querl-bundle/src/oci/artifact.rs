//! The form of a plugin in a registry: two manifests and their contents.

use crate::Bundle;
use oci_client::annotations::{
    ORG_OPENCONTAINERS_IMAGE_DESCRIPTION, ORG_OPENCONTAINERS_IMAGE_LICENSES, ORG_OPENCONTAINERS_IMAGE_TITLE,
    ORG_OPENCONTAINERS_IMAGE_VERSION,
};
use oci_client::manifest::{OCI_IMAGE_MEDIA_TYPE, OciDescriptor, OciImageManifest};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use wasmparser::{Encoding, Parser, Payload};

pub(crate) const MANIFEST_TYPE: &str = OCI_IMAGE_MEDIA_TYPE;
/// The media type that `wkg` writes and requires.
const COMPONENT_TYPE: &str = "application/wasm";
const COMPONENT_CONFIG_TYPE: &str = "application/vnd.wasm.config.v0+json";
pub(crate) const BUNDLE_TYPE: &str = "application/vnd.querl.bundle.v1+zstd";
/// OCI image specification 1.1: the config of an artifact without one.
const EMPTY_CONFIG_TYPE: &str = "application/vnd.oci.empty.v1+json";
const EMPTY_CONFIG: &[u8] = b"{}";
/// A fixed time, so that the same bundle gives the same manifest.
const CREATED: &str = "1970-01-01T00:00:00Z";
/// Annotation with the bundle's digest, which does not cover its signatures.
const DIGEST_ANNOTATION: &str = "querl.bundle.digest";

/// An OCI manifest with the blobs that it refers to.
pub(crate) struct Artifact {
    pub(crate) manifest: Vec<u8>,
    pub(crate) blobs: Vec<Vec<u8>>,
}

pub(crate) fn component(bundle: &Bundle) -> Result<Artifact, String> {
    let component = bundle.component().to_vec();
    let config = config(bundle)?;
    let plugin = &bundle.manifest().plugin;
    let manifest = OciImageManifest {
        media_type: Some(MANIFEST_TYPE.to_owned()),
        config: descriptor(COMPONENT_CONFIG_TYPE, &config, None),
        layers: vec![descriptor(COMPONENT_TYPE, &component, Some(format!("{}.wasm", plugin.id)))],
        annotations: Some(annotations(bundle)),
        ..OciImageManifest::default()
    };
    Ok(Artifact { manifest: text(&manifest), blobs: vec![component, config] })
}

/// The manifest of the archive `bytes`, whose subject is the component's manifest.
pub(crate) fn bundle(bundle: &Bundle, bytes: &[u8], subject: &[u8]) -> Artifact {
    let manifest = OciImageManifest {
        media_type: Some(MANIFEST_TYPE.to_owned()),
        artifact_type: Some(BUNDLE_TYPE.to_owned()),
        config: descriptor(EMPTY_CONFIG_TYPE, EMPTY_CONFIG, None),
        layers: vec![descriptor(BUNDLE_TYPE, bytes, Some(bundle.manifest().file_name()))],
        subject: Some(descriptor(MANIFEST_TYPE, subject, None)),
        annotations: Some(annotations(bundle)),
        ..OciImageManifest::default()
    };
    Artifact { manifest: text(&manifest), blobs: vec![bytes.to_vec(), EMPTY_CONFIG.to_vec()] }
}

/// The bundle's digest in the annotation that querl writes; `None` without it.
pub(crate) fn bundle_digest(manifest: &OciImageManifest) -> Option<&str> {
    Some(manifest.annotations.as_ref()?.get(DIGEST_ANNOTATION)?.as_str())
}

/// The digest of the component's layer, if there is one.
pub(crate) fn component_digest(manifest: &OciImageManifest) -> Option<&str> {
    match manifest.layers.as_slice() {
        [layer] if layer.media_type == COMPONENT_TYPE => Some(&layer.digest),
        _ => None,
    }
}

/// The layer of the archive, if there is one.
pub(crate) fn bundle_layer(manifest: &OciImageManifest) -> Option<&OciDescriptor> {
    match manifest.layers.as_slice() {
        [layer] if layer.media_type == BUNDLE_TYPE => Some(layer),
        _ => None,
    }
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

fn descriptor(media_type: &str, content: &[u8], title: Option<String>) -> OciDescriptor {
    OciDescriptor {
        media_type: media_type.to_owned(),
        digest: digest(content),
        size: i64::try_from(content.len()).expect("an archive is far smaller"),
        annotations: title.map(|title| BTreeMap::from([(ORG_OPENCONTAINERS_IMAGE_TITLE.to_owned(), title)])),
        ..OciDescriptor::default()
    }
}

fn annotations(bundle: &Bundle) -> BTreeMap<String, String> {
    let plugin = &bundle.manifest().plugin;
    let pairs = [
        (ORG_OPENCONTAINERS_IMAGE_TITLE, plugin.id.clone()),
        (ORG_OPENCONTAINERS_IMAGE_VERSION, plugin.version.to_string()),
        (ORG_OPENCONTAINERS_IMAGE_DESCRIPTION, plugin.description.clone()),
        (ORG_OPENCONTAINERS_IMAGE_LICENSES, plugin.license.clone()),
        (DIGEST_ANNOTATION, bundle.digest().to_owned()),
    ];
    pairs.map(|(key, value)| (key.to_owned(), value)).into()
}

fn text(manifest: &OciImageManifest) -> Vec<u8> {
    serde_json::to_vec(manifest).expect("a manifest of texts and numbers is JSON")
}

fn config(bundle: &Bundle) -> Result<Vec<u8>, String> {
    let (imports, exports) = interfaces(bundle.component())?;
    let config = json!({
        "created": CREATED,
        "author": null,
        "architecture": "wasm",
        "os": "wasip2",
        "layerDigests": [digest(bundle.component())],
        "component": { "exports": exports, "imports": imports, "target": null },
    });
    Ok(config.to_string().into_bytes())
}

/// Names of the imports and exports of the component itself, not of components inside it.
fn interfaces(component: &[u8]) -> Result<(Vec<String>, Vec<String>), String> {
    let failed = |error: wasmparser::BinaryReaderError| format!("its component cannot be read: {}", error.message());
    let (mut imports, mut exports) = (Vec::new(), Vec::new());
    let mut depth = 0_usize;
    for payload in Parser::new(0).parse_all(component) {
        match payload.map_err(failed)? {
            Payload::Version { encoding: Encoding::Module, .. } if depth == 0 => {
                return Err("its component is a core module".to_owned());
            }
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth = depth.saturating_sub(1),
            Payload::ComponentImportSection(section) if depth == 0 => {
                for import in section {
                    imports.push(import.map_err(failed)?.name.name.to_owned());
                }
            }
            Payload::ComponentExportSection(section) if depth == 0 => {
                for export in section {
                    exports.push(export.map_err(failed)?.name.name.to_owned());
                }
            }
            _ => {}
        }
    }
    Ok((imports, exports))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_inner_components_are_not_the_components_own() {
        let component = wat::parse_str(
            r#"(component
                (import "querl:plugin/settings@0.1.0" (instance))
                (core module (func (export "inner")))
                (component (import "inner-import" (func)) (component) (export "inner-export" (func 0)))
                (instance $rewards)
                (export "querl:plugin/rewards@0.1.0" (instance $rewards)))"#,
        );
        let (imports, exports) = interfaces(&component.unwrap()).unwrap();
        assert_eq!(imports, ["querl:plugin/settings@0.1.0"]);
        assert_eq!(exports, ["querl:plugin/rewards@0.1.0"]);
    }

    #[test]
    fn other_files_than_components_are_refused() {
        assert!(interfaces(b"\0asm\x01\0\0\0").unwrap_err().contains("core module"));
        assert!(interfaces(b"\0asm\x0d\0\x01\0\xff").unwrap_err().contains("cannot be read"));
    }
}
