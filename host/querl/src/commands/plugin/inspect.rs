//! `querl plugin inspect`: what a bundle, a component or a source folder is, before it is used.

mod shown;

use crate::args::Format;
use clap::Args;
use querl_bundle::{Bundle, Manifest, RequestedLimits};
use querl_core::config::PluginLimits;
use querl_pipeline::failure::{self, Stop};
use querl_pipeline::plugins::host;
use querl_plugin::{Plugin, PluginError};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `querl plugin inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A bundle, a component or a source folder, which is built where that is needed
    #[arg(value_name = "PATH")]
    path: PathBuf,
    #[command(flatten)]
    format: Format,
}

/// Looks and tells. A bundle that this host would not run is shown too, with the reason.
pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let found = Found::look(&args.path)?;
    let mut stdout = std::io::stdout().lock();
    match args.format.json {
        true => writeln!(stdout, "{:#}", shown::json(&found))?,
        false => stdout.write_all(shown::text(&found).as_bytes())?,
    }
    Ok(())
}

/// What is known of a plugin.
struct Found {
    bundle: Option<Bundle>,
    manifest: Option<Manifest>,
    /// The component as the host sees it, or why the host does not run it.
    plugin: Result<Plugin, String>,
}

impl Found {
    fn look(path: &Path) -> anyhow::Result<Self> {
        let bundle = is_bundle(path).then(|| Bundle::open(path)).transpose()?;
        let loaded = host::open(&PluginLimits::default(), &[])?.load(path);
        let manifest = match &bundle {
            Some(bundle) => Some(bundle.manifest().clone()),
            None => loaded.as_ref().ok().and_then(|plugin| plugin.manifest().cloned()),
        };
        let plugin = match loaded {
            Ok(plugin) => Ok(plugin),
            Err(error) if bundle.is_some() => Err(failure::sentence(&error.into())),
            Err(error) => return Err(nothing(path, error)),
        };
        Ok(Self { bundle, manifest, plugin })
    }
}

fn is_bundle(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "querl")
}

fn nothing(path: &Path, error: PluginError) -> anyhow::Error {
    match path.exists() {
        true => error.into(),
        false => Stop::usage(format!("{}: there is no such file or folder", path.display())).into(),
    }
}

/// The limits that are asked for, by key.
fn asked(limits: &RequestedLimits) -> Vec<(&'static str, u64)> {
    let keys = [
        ("fuel_per_call", limits.fuel_per_call),
        ("fuel_per_item", limits.fuel_per_item),
        ("timeout_ms", limits.timeout_ms),
        ("memory_bytes", limits.memory_bytes.map(|bytes| bytes as u64)),
        ("output_bytes", limits.output_bytes.map(|bytes| bytes as u64)),
        ("log_bytes", limits.log_bytes.map(|bytes| bytes as u64)),
    ];
    keys.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
}
