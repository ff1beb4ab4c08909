//! `querl plugin push` and `querl plugin pull`: bundles to and from an OCI registry.

use super::pack::written_to;
use crate::args::Format;
use anyhow::Context;
use clap::Args;
use querl_bundle::oci::{Credentials, RegistryReference, Transport};
use querl_bundle::{Bundle, PublicKey};
use querl_core::fsx::write_atomic;
use querl_pipeline::failure::Stop;
use querl_pipeline::interrupt;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Options of `querl plugin push`.
#[derive(Debug, Args)]
pub struct PushArgs {
    /// The bundle
    #[arg(value_name = "BUNDLE")]
    bundle: PathBuf,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    format: Format,
}

/// Options of `querl plugin pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    #[command(flatten)]
    place: Place,
    /// Where ID-VERSION.querl is written
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Take a bundle alone that this public key has signed; or any one of them where there are several
    #[arg(long, value_name = "PUBLIC")]
    key: Vec<String>,
    #[command(flatten)]
    format: Format,
}

/// Where, and how it is spoken to. Credentials are QUERL_REGISTRY_USER and QUERL_REGISTRY_PASSWORD for QUERL_REGISTRY_HOST, else
/// those of `docker login`.
#[derive(Debug, Args)]
struct Place {
    /// HOST[:PORT]/REPO[:VERSION], REPO ending with the plugin's id; without a version, the bundle's own or the highest
    #[arg(value_name = "REFERENCE")]
    reference: String,
    /// Speak plain http to another machine too, without credentials: whoever is on the way reads and changes everything
    #[arg(long)]
    plain_http: bool,
}

impl Place {
    fn open(&self) -> anyhow::Result<(RegistryReference, Credentials, Transport)> {
        let location = RegistryReference::parse(&self.reference)?;
        let credentials = Credentials::find(&location)?;
        let transport = if self.plain_http { Transport::PlainHttp } else { Transport::Secure };
        Ok((location, credentials, transport))
    }
}

/// Puts a bundle into a registry, with its component beside it for other tools.
pub fn push(args: &PushArgs) -> anyhow::Result<()> {
    Bundle::open(&args.bundle)?;
    let bytes = std::fs::read(&args.bundle).with_context(|| format!("{}: cannot be read", args.bundle.display()))?;
    let (location, credentials, transport) = args.place.open()?;
    let runtime = runtime()?;
    let pushed = querl_bundle::oci::push(&bytes, &location, &credentials, transport);
    let pushed = interrupt::block_on(&runtime, pushed)??;
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        let result = json!({
            "component": pushed.component,
            "component_manifest": pushed.component_manifest,
            "bundle": pushed.bundle,
            "bundle_manifest": pushed.bundle_manifest,
        });
        return Ok(writeln!(stdout, "{result:#}")?);
    }
    writeln!(stdout, "bundle     {} {}", pushed.bundle, pushed.bundle_manifest)?;
    Ok(writeln!(stdout, "component  {} {}", pushed.component, pushed.component_manifest)?)
}

/// Fetches a bundle and writes it once it is whole and, where keys are asked for, signed.
pub fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let keys = args.key.iter().map(|text| PublicKey::parse(text, "--key")).collect::<Result<Vec<_>, _>>()?;
    let (location, credentials, transport) = args.place.open()?;
    let runtime = runtime()?;
    let pulled = interrupt::block_on(&runtime, querl_bundle::oci::pull(&location, &credentials, transport))??;
    if !keys.is_empty() {
        pulled.bundle.verify(&keys).map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    let path = written_to(&args.out, pulled.bundle.manifest());
    std::fs::create_dir_all(&args.out)
        .and_then(|()| write_atomic(&path, &pulled.bytes))
        .map_err(|error| Stop::usage(format!("{}: cannot be written: {error}", path.display())))?;
    let signers: Vec<String> = pulled.bundle.signatures().iter().map(|signature| signature.key().to_string()).collect();
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        let result = json!({
            "path": path,
            "location": pulled.location.to_string(),
            "id": pulled.bundle.manifest().plugin.id,
            "version": pulled.bundle.manifest().plugin.version.to_string(),
            "digest": pulled.bundle.digest(),
            "signers": signers,
        });
        return Ok(writeln!(stdout, "{result:#}")?);
    }
    let signed = if signers.is_empty() { "not signed".to_owned() } else { format!("signed by {}", signers.join(", ")) };
    Ok(writeln!(stdout, "{} {} {signed}", path.display(), pulled.bundle.digest())?)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("no async runtime")
}
