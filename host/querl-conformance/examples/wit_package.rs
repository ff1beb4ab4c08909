//! Writes the contract as a binary WIT package and as an OCI image layout: `wit/package.sh OUT`.
//!
//! `OUT/querl-plugin-VERSION.wasm` is what `wkg wit build` writes, without the metadata (name, version, producer) that the tool adds.
//! `OUT/oci` has one manifest with the tag VERSION: a config `application/vnd.wasm.config.v0+json` and a layer `application/wasm`, as
//! `wkg oci push` sends them. The same text gives the same bytes.

use querl_core::fsx::digest_hex;
use serde_json::{Value, json};
use std::error::Error;
use std::fs;
use std::path::Path;
use wit_component::DecodedWasm;
use wit_parser::Resolve;

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.wasm.config.v0+json";
const LAYER_TYPE: &str = "application/wasm";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [wit, out] = arguments.as_slice() else {
        return Err("expected two arguments: the folder of WIT files and the output folder".into());
    };
    let out = Path::new(out);
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(wit)?;
    let name = resolve.packages[package].name.clone();
    let version = name.version.as_ref().ok_or("the package has no version")?.to_string();
    let encoded = wit_component::encode(&resolve, package)?;
    // The encoded package must decode to the same package, with all its interfaces and worlds.
    let DecodedWasm::WitPackage(read, read_package) = wit_component::decode(&encoded)? else {
        return Err("the encoded package reads back as a component".into());
    };
    let interfaces: Vec<String> =
        read.packages[read_package].interfaces.values().filter_map(|id| read.id_of(*id)).collect();
    let expected = &resolve.packages[package];
    if interfaces.len() != expected.interfaces.len()
        || read.packages[read_package].worlds.len() != expected.worlds.len()
    {
        return Err("the encoded package reads back with other interfaces or worlds".into());
    }
    fs::create_dir_all(out.join("oci/blobs/sha256"))?;
    let file = format!("{}-{}-{version}.wasm", name.namespace, name.name);
    fs::write(out.join(&file), &encoded)?;
    write_layout(&out.join("oci"), &file, &version, &encoded, &interfaces)?;
    println!("{}: {} bytes, {} interfaces", out.join(file).display(), encoded.len(), interfaces.len());
    Ok(())
}

fn write_layout(
    folder: &Path,
    file: &str,
    version: &str,
    package: &[u8],
    interfaces: &[String],
) -> Result<(), Box<dyn Error>> {
    let config = json!({
        "created": "1970-01-01T00:00:00Z",
        "author": null,
        "architecture": "wasm",
        "os": "wasip2",
        "layerDigests": [format!("sha256:{}", digest_hex(package))],
        "component": {"exports": interfaces, "imports": [], "target": null},
    });
    let layer = blob(folder, LAYER_TYPE, package, json!({"org.opencontainers.image.title": file}))?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": blob(folder, CONFIG_TYPE, config.to_string().as_bytes(), Value::Null)?,
        "layers": [layer],
        "annotations": {
            "org.opencontainers.image.title": "querl:plugin",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.description": "The contract between querl and its plugins, as a WIT package",
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    });
    let tag = json!({"org.opencontainers.image.ref.name": version});
    let index =
        json!({"schemaVersion": 2, "manifests": [blob(folder, MANIFEST_TYPE, manifest.to_string().as_bytes(), tag)?]});
    fs::write(folder.join("index.json"), index.to_string())?;
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    Ok(())
}

/// Writes a blob and returns its descriptor.
fn blob(folder: &Path, media_type: &str, content: &[u8], annotations: Value) -> Result<Value, Box<dyn Error>> {
    let digest = digest_hex(content);
    fs::write(folder.join("blobs/sha256").join(&digest), content)?;
    let mut descriptor = json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len()});
    if !annotations.is_null() {
        descriptor["annotations"] = annotations;
    }
    Ok(descriptor)
}
