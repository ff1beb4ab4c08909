//! `querl plugin verify`: is a bundle whole, and did somebody who is trusted sign it?

use crate::args::Format;
use clap::Args;
use querl_bundle::{Bundle, BundleError, PublicKey};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Options of `querl plugin verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The bundle
    #[arg(value_name = "BUNDLE")]
    bundle: PathBuf,
    /// Ask for a signature of this public key, as `querl plugin sign` prints it; of any one where there are several
    #[arg(long, value_name = "PUBLIC")]
    key: Vec<String>,
    #[command(flatten)]
    format: Format,
}

/// Checks every byte against its digest and every signature; with keys, that one of them has signed.
pub fn run(args: &VerifyArgs) -> anyhow::Result<()> {
    let keys = args.key.iter().map(|text| PublicKey::parse(text, "--key")).collect::<Result<Vec<_>, _>>()?;
    let bundle = Bundle::open(&args.bundle).map_err(verdict)?;
    let signed_by = match keys.is_empty() {
        true => None,
        false => Some(bundle.verify(&keys).map_err(verdict)?.to_string()),
    };
    let signers: Vec<String> = bundle.signatures().iter().map(|signature| signature.key().to_string()).collect();
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        let result = json!({ "digest": bundle.digest(), "signers": signers, "signed_by": signed_by });
        serde_json::to_writer_pretty(&mut stdout, &result)?;
        return Ok(writeln!(stdout)?);
    }
    let manifest = &bundle.manifest().plugin;
    writeln!(stdout, "{} {} {}: whole", manifest.id, manifest.version, bundle.digest())?;
    match signed_by {
        Some(key) => writeln!(stdout, "signed by {key}")?,
        None if signers.is_empty() => writeln!(stdout, "not signed")?,
        None => writeln!(stdout, "signed by {}; --key PUBLIC asks for a signature that you trust", signers.join(", "))?,
    }
    Ok(())
}

/// A bundle that does not stand the check is this command's answer, not a wrong use of it.
fn verdict(error: BundleError) -> anyhow::Error {
    match error {
        BundleError::Archive { .. } | BundleError::Untrusted { .. } => anyhow::anyhow!("{error}"),
        other => other.into(),
    }
}
