//! `querl plugin list`: which plugins a configuration uses.

use crate::cli::{ConfigArgs, Format};
use crate::plugins::{Plugins, Used};
use clap::Args;
use std::io::Write;

/// Options of `querl plugin list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    format: Format,
}

/// Loads the plugins and names them, in the order in which they are asked.
///
/// # Errors
/// The configuration cannot be used, or one of its plugins.
pub fn run(args: &ListArgs) -> anyhow::Result<()> {
    let plugins = Plugins::open(&args.config.load()?.plugins)?;
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        serde_json::to_writer_pretty(&mut stdout, plugins.used())?;
        return Ok(writeln!(stdout)?);
    }
    let rows: Vec<[String; 5]> = plugins.used().iter().map(cells).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3].map(width);
    for [role, title, weight, digest, source] in &rows {
        let [role_width, title_width, weight_width, digest_width] = widths;
        writeln!(
            stdout,
            "{role:<role_width$}  {title:<title_width$}  {weight:>weight_width$}  {digest:<digest_width$}  {source}"
        )?;
    }
    Ok(())
}

fn cells(used: &Used) -> [String; 5] {
    let weight = used.weight.map(|weight| format!("x {weight}")).unwrap_or_default();
    // A digest is told apart by its first digits; `--json` has the whole.
    let digest = used.sha256.chars().take(12).collect();
    [used.role.into(), format!("{} {}", used.name, used.version), weight, digest, used.path.display().to_string()]
}
