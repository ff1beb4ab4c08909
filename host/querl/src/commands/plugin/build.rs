//! `querl plugin build`: the component of a plugin's folder.

use crate::args::Format;
use anyhow::Context;
use clap::Args;
use querl_pipeline::failure::Stop;
use querl_plugin::BuildOutput;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// Options of `querl plugin build`.
#[derive(Debug, Args)]
pub struct BuildArgs {
    /// A plugin's folder
    #[arg(value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,
    #[command(flatten)]
    format: Format,
}

/// Builds where a source is newer than the component, and says where the component is.
pub fn run(args: &BuildArgs) -> anyhow::Result<()> {
    let folder = &args.folder;
    if !folder.is_dir() {
        return Err(Stop::usage(format!("{}: expected a plugin's folder", folder.display())).into());
    }
    let start = Instant::now();
    let BuildOutput { component, language, was_stale } = querl_plugin::build(folder)?;
    let n_bytes = std::fs::metadata(&component).with_context(|| component.display().to_string())?.len();
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        let built = json!({
            "component": component, "language": language.name(), "component_bytes": n_bytes, "was_stale": was_stale,
        });
        writeln!(stdout, "{built:#}")?;
        return Ok(());
    }
    let how = match was_stale {
        true => format!("built in {:.1} s", start.elapsed().as_secs_f64()),
        false => "up to date".to_owned(),
    };
    writeln!(stdout, "{}  {:.1} MB, {how}", component.display(), n_bytes as f64 / 1e6)?;
    Ok(())
}
