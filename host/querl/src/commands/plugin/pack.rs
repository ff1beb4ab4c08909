//! `querl plugin pack`: one file from a plugin's folder, once it keeps what its manifest says.

use super::{sign, test};
use crate::args::Format;
use crate::terminal;
use anyhow::Context;
use clap::Args;
use querl_bundle::{Bundle, Manifest, SigningKey};
use querl_conformance::SuiteOptions;
use querl_core::config::PluginLimits;
use querl_core::fsx::write_atomic;
use querl_pipeline::failure::Stop;
use querl_pipeline::plugins::host;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Enough to see a plugin that draws random numbers; `querl plugin test` repeats more.
const N_REPEATS: usize = 20;

/// Options of `querl plugin pack`.
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
    #[command(flatten)]
    format: Format,
}

/// Builds the folder, packs it, tests the bundle, and writes it where it conforms. The same folder gives the same bytes.
pub fn run(args: &PackArgs) -> anyhow::Result<()> {
    let folder = &args.folder;
    if !folder.is_dir() {
        return Err(Stop::usage(format!("{}: expected a plugin's folder", folder.display())).into());
    }
    let key = args.sign.as_deref().map(SigningKey::read).transpose()?;
    let manifest = Manifest::read(folder)?;
    let plugin = host::open(&PluginLimits::default(), &[])?.load(folder)?;
    let component =
        std::fs::read(plugin.path()).with_context(|| format!("{}: cannot be read", plugin.path().display()))?;
    let mut bytes = querl_bundle::pack(folder, &component)?;
    check(&manifest, &bytes)?;
    if let Some(key) = &key {
        bytes = querl_bundle::sign(&bytes, key)?;
    }
    let path = written_to(&args.out, &manifest);
    std::fs::create_dir_all(&args.out)
        .and_then(|()| write_atomic(&path, &bytes))
        .map_err(|error| Stop::usage(format!("{}: cannot be written: {error}", path.display())))?;
    show(&path, &bytes, key.as_ref(), args.format)
}

/// The bundle's place in `folder`, as a person would write it.
pub fn written_to(folder: &Path, manifest: &Manifest) -> PathBuf {
    match folder == Path::new(".") {
        true => manifest.file_name().into(),
        false => folder.join(manifest.file_name()),
    }
}

/// Tests what would be handed out, not what it was made from.
fn check(manifest: &Manifest, bytes: &[u8]) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("no folder for temporary files")?;
    let path = folder.path().join(manifest.file_name());
    std::fs::write(&path, bytes).with_context(|| format!("{}: cannot be written", path.display()))?;
    let options = SuiteOptions { n_repeats: N_REPEATS, compiler: host::compiler()?, ..SuiteOptions::default() };
    let report = querl_conformance::run(&path, &options)?;
    if !report.passed() {
        terminal::say(report.text().trim_end());
    }
    test::conforms(&report).context("not packed")
}

fn show(path: &Path, bytes: &[u8], key: Option<&SigningKey>, format: Format) -> anyhow::Result<()> {
    let bundle = Bundle::from_bytes(bytes, &path.display().to_string())?;
    let key = key.map(|key| key.public().to_string());
    let mut stdout = std::io::stdout().lock();
    if format.json {
        let result = json!({ "path": path, "digest": bundle.digest(), "bytes": bytes.len(), "signed_by": key });
        return Ok(writeln!(stdout, "{result:#}")?);
    }
    match key {
        Some(key) => writeln!(stdout, "{}", sign::line(path, bundle.digest(), &key))?,
        None => writeln!(stdout, "{} {}", path.display(), bundle.digest())?,
    }
    Ok(())
}
