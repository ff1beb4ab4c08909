//! `querl plugin pack`, `sign`, `verify`, `push` and `pull`: packs, signs, verifies and distributes bundles.

use crate::args::Format;
use crate::terminal;
use anyhow::Context;
use clap::Args;
use querl_bundle::oci::{Credentials, RegistryReference, Transport};
use querl_bundle::{Bundle, BundleError, KeyForm, Manifest, PublicKey, SigningKey};
use querl_conformance::{Outcome, Report, SuiteOptions};
use querl_core::config::PluginLimits;
use querl_core::fsx::{io_problem, write_atomic};
use querl_pipeline::failure::Stop;
use querl_pipeline::plugins::{compiler, open_host};
use querl_plugin::SourceFolders;
use serde_json::json;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Repetitions of a call in the test of determinism: enough to detect random numbers. `querl plugin test` has more.
const N_REPEATS: usize = 20;

#[derive(Debug, Args)]
pub struct PackArgs {
    /// The plugin's folder: plugin.toml, README.md, LICENSE, golden cases, source
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Where ID-VERSION.querl is written
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Sign it with this private key, as `querl plugin sign` does
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    /// Replace a bundle there even if a signature is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    format: Format,
}

/// Runs `querl plugin pack`: builds the folder, packs it, tests the bundle, and writes it if it conforms to the contract. Packing is
/// reproducible: the same folder gives the same bytes.
pub fn pack(args: &PackArgs) -> anyhow::Result<()> {
    let folder = &args.folder;
    super::folder::check(folder)?;
    let key = args.sign.as_deref().map(read_key).transpose()?;
    let manifest = Manifest::read(folder)?;
    let plugin = open_host(&PluginLimits::default(), &[], SourceFolders::Build)?.load(folder)?;
    let component =
        std::fs::read(plugin.path()).with_context(|| format!("{}: cannot be read", plugin.path().display()))?;
    let mut bytes = querl_bundle::pack(folder, &component)?;
    test_bundle(&manifest, &bytes)?;
    if let Some(key) = &key {
        bytes = querl_bundle::sign(&bytes, key)?;
    }
    let path = bundle_path(&args.out, &manifest);
    if !args.force
        && let Some(lost) = lost_signers(&path, &Bundle::from_bytes(&bytes, &path.display().to_string())?)
    {
        let remedy =
            "choose another folder with `--out`, sign with the same key with `--sign`, or replace it with `--force`";
        return Err(Stop::usage(format!("{}: is there already with {lost}; {remedy}", path.display())).into());
    }
    write_bundle(&path, &bytes)?;
    let bundle = Bundle::from_bytes(&bytes, &path.display().to_string())?;
    if bundle.golden().all(|(_, text)| text.trim_ascii().is_empty()) {
        let golden = folder.join(&manifest.plugin.golden);
        terminal::print(&format!(
            "warning: {}: no golden cases, so nothing tests what the plugin scores or keeps; add *.jsonl there, one case per line: an input \
             and what it gives under `expect`",
            golden.display()
        ));
    }
    print_packed(&path, &bundle, bytes.len(), key.as_ref(), args.format)
}

/// Path of the bundle in `folder`, without `./`.
fn bundle_path(folder: &Path, manifest: &Manifest) -> PathBuf {
    if folder == Path::new(".") { manifest.file_name().into() } else { folder.join(manifest.file_name()) }
}

/// Runs the conformance suite on the bundle's bytes, not on the folder that they were packed from.
fn test_bundle(manifest: &Manifest, bytes: &[u8]) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("no folder for temporary files")?;
    let path = folder.path().join(manifest.file_name());
    std::fs::write(&path, bytes).with_context(|| format!("{}: cannot be written", path.display()))?;
    let options = SuiteOptions { n_repeats: N_REPEATS, compiler: compiler()?, ..SuiteOptions::default() };
    let report = querl_conformance::run(&path, &options)?;
    if !report.passed() {
        terminal::print(report.text().trim_end());
    }
    conforms(&report).context("not packed")
}

fn print_packed(
    path: &Path,
    bundle: &Bundle,
    n_bytes: usize,
    key: Option<&SigningKey>,
    format: Format,
) -> anyhow::Result<()> {
    let key = key.map(|key| key.public().to_string());
    let result = json!({ "path": path, "digest": bundle.digest(), "bytes": n_bytes, "signed_by": key });
    format.print(&result, || match &key {
        Some(key) => signed_line(path, bundle.digest(), key),
        None => format!("{} {}\n", path.display(), bundle.digest()),
    })
}

#[derive(Debug, Args)]
pub struct SignArgs {
    /// The bundle; signed in place, in addition to the signatures it has
    #[arg(value_name = "BUNDLE", required_unless_present = "new_key")]
    bundle: Option<PathBuf>,
    /// The private key: ed25519, PKCS#8 PEM, as `openssl genpkey -algorithm ed25519` writes it too
    #[arg(long, value_name = "FILE", required_unless_present = "new_key")]
    key: Option<PathBuf>,
    /// Create a private key in this file and its public key in FILE.pub, and print the public key; with --key, write that key again in the
    /// form that OpenSSL reads
    #[arg(long, value_name = "FILE")]
    new_key: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// Runs `querl plugin sign`: creates a key if one is requested, and signs the bundle if one is given.
pub fn sign(args: &SignArgs) -> anyhow::Result<()> {
    let key = match (&args.new_key, &args.key) {
        (Some(path), old) => {
            let key = old.as_deref().map_or_else(SigningKey::generate, SigningKey::read)?;
            write_key(&key, path)?;
            key
        }
        (None, Some(path)) => read_key(path)?,
        (None, None) => return Err(Stop::usage("--key FILE or --new-key FILE is missing").into()),
    };
    let signed = args.bundle.as_deref().map(|path| sign_file(path, &key)).transpose()?;
    let public = key.public().to_string();
    let result = json!({ "key": public, "bundle": args.bundle, "digest": signed });
    args.format.print(&result, || match (&args.bundle, &signed) {
        (Some(path), Some(digest)) => signed_line(path, digest, &public),
        _ => format!("{public}\n"),
    })
}

/// Writes a private key, and its public key next to it.
fn write_key(key: &SigningKey, path: &Path) -> anyhow::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".pub");
    let public = PathBuf::from(name);
    if public.exists() && !path.exists() {
        let message = "is there already; a key is never overwritten, choose another name";
        return Err(Stop::usage(format!("{}: {message}", public.display())).into());
    }
    key.write_new(path)?;
    write_atomic(&public, key.public().to_pem().as_bytes())
        .map_err(|error| Stop::usage(format!("{}: cannot be written: {}", public.display(), io_problem(&error))).into())
}

/// Refuses a path that is not a file.
fn check_file(path: &Path, expected: &str) -> Result<(), Stop> {
    let problem = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => "is a folder",
        Err(error) if error.kind() == ErrorKind::NotFound => "there is no such file",
        _ => return Ok(()),
    };
    Err(Stop::usage(format!("{}: {problem}; expected {expected}", path.display())))
}

fn open_bundle(path: &Path) -> anyhow::Result<Bundle> {
    check_file(path, "a `.querl` bundle, which `querl plugin pack` makes")?;
    Ok(Bundle::open(path)?)
}

/// Reads a private key; prints a note if it is in a form that OpenSSL does not read.
fn read_key(path: &Path) -> anyhow::Result<SigningKey> {
    check_file(path, "a private key, which `querl plugin sign --new-key FILE` makes")?;
    let key = SigningKey::read(path)?;
    if key.form() == KeyForm::Pkcs8WithPublicKey {
        let path = path.display();
        terminal::print(&format!(
            "{path}: a key file of an earlier querl, which OpenSSL does not read; `querl plugin sign --key {path} --new-key NEW` writes \
             the same key in a form that it does"
        ));
    }
    Ok(key)
}

/// Parses public keys of the command line: `ed25519:...`, or paths of PEM files.
fn public_keys(texts: &[String]) -> anyhow::Result<Vec<PublicKey>> {
    let key = |text: &String| -> anyhow::Result<PublicKey> {
        let path = Path::new(text);
        match text.starts_with("ed25519:") || !path.is_file() {
            true => Ok(PublicKey::parse(text, "--key")?),
            false => {
                let pem = std::fs::read_to_string(path)
                    .map_err(|error| Stop::usage(format!("{text}: cannot be read: {error}")))?;
                Ok(PublicKey::parse(pem.trim(), text)?)
            }
        }
    };
    texts.iter().map(key).collect()
}

/// The line that is printed for a signed bundle.
fn signed_line(path: &Path, digest: &str, key: &str) -> String {
    format!("{} {digest} signed by {key}\n", path.display())
}

/// Adds a signature to the file at `path` and returns the bundle's digest.
fn sign_file(path: &Path, key: &SigningKey) -> anyhow::Result<String> {
    let digest = open_bundle(path)?.digest().to_owned();
    let bytes = std::fs::read(path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let signed = querl_bundle::sign(&bytes, key)?;
    write_atomic(path, &signed).with_context(|| format!("{}: cannot be written", path.display()))?;
    Ok(digest)
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The bundle
    #[arg(value_name = "BUNDLE")]
    bundle: PathBuf,
    /// Require a signature by this public key, as `querl plugin sign` prints it, or a PEM file; if given several times, by one of them
    #[arg(long, value_name = "PUBLIC")]
    key: Vec<String>,
    #[command(flatten)]
    format: Format,
}

/// Runs `querl plugin verify`: checks all digests and signatures; if keys are given, requires a signature by one of them.
pub fn verify(args: &VerifyArgs) -> anyhow::Result<()> {
    let keys = public_keys(&args.key)?;
    let bundle = open_bundle(&args.bundle).map_err(verdict)?;
    let signed_by = match keys.is_empty() {
        true => None,
        false => Some(bundle.verify(&keys).map_err(|error| verdict(error.into()))?.to_string()),
    };
    let signers: Vec<String> = bundle.signatures().iter().map(|signature| signature.key().to_string()).collect();
    let result = json!({ "digest": bundle.digest(), "signers": signers, "signed_by": signed_by });
    args.format.print(&result, || {
        let manifest = &bundle.manifest().plugin;
        let signed = match &signed_by {
            Some(key) => format!("signed by {key}"),
            None if signers.is_empty() => "not signed".to_owned(),
            None => format!("signed by {}; --key PUBLIC requires a signature that you trust", signers.join(", ")),
        };
        format!("{} {} {}: intact\n{signed}\n", manifest.id, manifest.version, bundle.digest())
    })
}

/// Converts the error about an invalid bundle to a failure (exit code 1): it is the result of this command, not a usage error.
fn verdict(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<BundleError>() {
        Some(BundleError::Archive { .. } | BundleError::Untrusted { .. }) => anyhow::anyhow!("{error}"),
        _ => error,
    }
}

#[derive(Debug, Args)]
pub struct PushArgs {
    /// The bundle
    #[arg(value_name = "BUNDLE")]
    bundle: PathBuf,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
pub struct PullArgs {
    #[command(flatten)]
    registry: RegistryArgs,
    /// Where ID-VERSION.querl is written
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Replace a bundle there even if it is another one, or a signature is lost
    #[arg(long)]
    force: bool,
    /// Accept only a bundle that is signed by this public key, or by one of several; the key, or a PEM file
    #[arg(long, value_name = "PUBLIC")]
    key: Vec<String>,
    #[command(flatten)]
    format: Format,
}

/// Options for a registry. Credentials are QUERL_REGISTRY_USER and QUERL_REGISTRY_PASSWORD for QUERL_REGISTRY_HOST, or else those of
/// `docker login`.
#[derive(Debug, Args)]
struct RegistryArgs {
    /// HOST[:PORT]/REPO[:VERSION], REPO ending with the plugin's id; without a version, the bundle's own or the highest
    #[arg(value_name = "REFERENCE")]
    reference: String,
    /// Allow plain HTTP to another machine, without credentials: insecure, since others in the network can read and change all data
    #[arg(long)]
    plain_http: bool,
}

impl RegistryArgs {
    fn open(&self) -> anyhow::Result<(RegistryReference, Credentials, Transport)> {
        let location = RegistryReference::parse(&self.reference)?;
        let credentials = Credentials::find(&location)?;
        let transport = if self.plain_http { Transport::PlainHttp } else { Transport::Secure };
        Ok((location, credentials, transport))
    }
}

/// Runs `querl plugin push`: pushes a bundle to a registry, and its component as a separate artifact for other tools.
pub fn push(args: &PushArgs) -> anyhow::Result<()> {
    open_bundle(&args.bundle)?;
    let bytes = std::fs::read(&args.bundle).with_context(|| format!("{}: cannot be read", args.bundle.display()))?;
    let (location, credentials, transport) = args.registry.open()?;
    let runtime = runtime()?;
    let pushed = querl_bundle::oci::push(&bytes, &location, &credentials, transport);
    let pushed = runtime.block_on(pushed)?;
    let result = json!({
        "component": pushed.component,
        "component_manifest": pushed.component_manifest,
        "bundle": pushed.bundle,
        "bundle_manifest": pushed.bundle_manifest,
    });
    args.format.print(&result, || {
        let (bundle, component) = (&pushed.bundle, &pushed.component);
        let (of_bundle, of_component) = (&pushed.bundle_manifest, &pushed.component_manifest);
        format!("bundle     {bundle} {of_bundle}\ncomponent  {component} {of_component}\n")
    })
}

/// Runs `querl plugin pull`: pulls a bundle, checks its digests and, if keys are given, its signatures, and writes it.
pub fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let keys = public_keys(&args.key)?;
    let (location, credentials, transport) = args.registry.open()?;
    let runtime = runtime()?;
    let pulled = runtime.block_on(querl_bundle::oci::pull(&location, &credentials, transport))?;
    if !keys.is_empty() {
        pulled.bundle.verify(&keys).map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    let path = bundle_path(&args.out, pulled.bundle.manifest());
    if !args.force
        && let Some(difference) = difference(&path, &pulled.bundle)
    {
        let remedy = "choose another folder with `--out`, or replace it with `--force`";
        return Err(Stop::usage(format!("{}: is there already with {difference}; {remedy}", path.display())).into());
    }
    write_bundle(&path, &pulled.bytes)?;
    let signers: Vec<String> = pulled.bundle.signatures().iter().map(|signature| signature.key().to_string()).collect();
    let result = json!({
        "path": path,
        "location": pulled.location.to_string(),
        "id": pulled.bundle.manifest().plugin.id,
        "version": pulled.bundle.manifest().plugin.version.to_string(),
        "digest": pulled.bundle.digest(),
        "signers": signers,
    });
    args.format.print(&result, || {
        let signed = if signers.is_empty() { "not signed".into() } else { format!("signed by {}", signers.join(", ")) };
        format!("{} {} {signed}\n", path.display(), pulled.bundle.digest())
    })
}

fn write_bundle(path: &Path, bytes: &[u8]) -> Result<(), Stop> {
    let folder = path.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder)
        .and_then(|()| write_atomic(path, bytes))
        .map_err(|error| Stop::usage(format!("{}: cannot be written: {}", path.display(), io_problem(&error))))
}

/// Why `new` must not replace the file at `path` without `--force`: content or signatures would be lost. `None` if nothing would be.
fn difference(path: &Path, new: &Bundle) -> Option<String> {
    path.symlink_metadata().ok()?;
    match Bundle::open(path) {
        Ok(old) if old.digest() != new.digest() => {
            Some(format!("other content ({}; the registry has {})", short(old.digest()), short(new.digest())))
        }
        Ok(_) => lost_signers(path, new),
        Err(_) => Some("content that is no intact bundle".to_owned()),
    }
}

/// The signatures of the bundle at `path` that `new` does not have.
fn lost_signers(path: &Path, new: &Bundle) -> Option<String> {
    let stays = |key: &PublicKey| new.signatures().iter().any(|signature| signature.key() == key);
    let old = Bundle::open(path).ok()?;
    let signers = old.signatures().iter().map(|signature| signature.key());
    let lost: Vec<String> = signers.filter(|key| !stays(key)).map(PublicKey::to_string).collect();
    (!lost.is_empty()).then(|| format!("a signature of {}, which would be lost", lost.join(", ")))
}

fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the async runtime (tokio)")
}

/// An error if a check of the conformance suite has failed.
pub(super) fn conforms(report: &Report) -> anyhow::Result<()> {
    let failed = report.checks.iter().filter(|check| matches!(check.outcome, Outcome::Failed(_)));
    let names: Vec<_> = failed.map(|check| format!("`{}`", check.name)).collect();
    if names.is_empty() {
        return Ok(());
    }
    let (plugin, n_failed, n_checks) = (&report.plugin, names.len(), report.checks.len());
    let title = format!("{plugin} {}", report.version);
    anyhow::bail!("plugin {}: {n_failed} of {n_checks} checks failed: {}", title.trim_end(), names.join(", "))
}
