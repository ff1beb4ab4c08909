//! `querl plugin sign`: makes keys and signs bundles.

use crate::args::Format;
use anyhow::Context;
use clap::Args;
use querl_bundle::{Bundle, SigningKey, sign};
use querl_core::fsx::write_atomic;
use querl_pipeline::failure::Stop;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `querl plugin sign`.
#[derive(Debug, Args)]
pub struct SignArgs {
    /// The bundle; signed in place, beside the signatures it has
    #[arg(value_name = "BUNDLE", required_unless_present = "new_key")]
    bundle: Option<PathBuf>,
    /// The private key: ed25519, PKCS#8 PEM
    #[arg(long, value_name = "FILE", required_unless_present = "new_key")]
    key: Option<PathBuf>,
    /// Make a new private key in this file, and print its public key
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    new_key: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// Makes the key where one is asked for, and signs where there is a bundle.
pub fn run(args: &SignArgs) -> anyhow::Result<()> {
    let key = match (&args.new_key, &args.key) {
        (Some(path), _) => make(path)?,
        (None, Some(path)) => SigningKey::read(path)?,
        (None, None) => return Err(Stop::usage("--key FILE or --new-key FILE is missing").into()),
    };
    let signed = args.bundle.as_deref().map(|path| sign_file(path, &key)).transpose()?;
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        let result = json!({ "key": key.public().to_string(), "bundle": args.bundle, "digest": signed });
        serde_json::to_writer_pretty(&mut stdout, &result)?;
        return Ok(writeln!(stdout)?);
    }
    match (&args.bundle, signed) {
        (Some(path), Some(digest)) => {
            writeln!(stdout, "{}", line(path, &digest, &key.public().to_string()))?;
        }
        _ => writeln!(stdout, "{}", key.public())?,
    }
    Ok(())
}

/// What is printed of a signed bundle.
pub fn line(path: &Path, digest: &str, key: &str) -> String {
    format!("{} {digest} signed by {key}", path.display())
}

fn make(path: &Path) -> anyhow::Result<SigningKey> {
    let key = SigningKey::generate()?;
    key.write_new(path)?;
    Ok(key)
}

/// Adds a signature to the file at `path` and returns the bundle's digest.
fn sign_file(path: &Path, key: &SigningKey) -> anyhow::Result<String> {
    let digest = Bundle::open(path)?.digest().to_owned();
    let bytes = std::fs::read(path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let signed = sign(&bytes, key)?;
    write_atomic(path, &signed).with_context(|| format!("{}: cannot be written", path.display()))?;
    Ok(digest)
}
