//! `querl plugin list`: which plugins a configuration uses.

use crate::args::{ConfigArgs, Format};
use clap::Args;
use querl_pipeline::plugins::{Plugins, Used};
use serde_json::{Value, json};
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
pub fn run(args: &ListArgs) -> anyhow::Result<()> {
    let plugins = Plugins::open(&args.config.load()?)?;
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        let plugins: Vec<Value> = plugins.used().iter().map(as_json).collect();
        serde_json::to_writer_pretty(&mut stdout, &plugins)?;
        return Ok(writeln!(stdout)?);
    }
    let rows: Vec<[String; 5]> = plugins.used().iter().map(cells).collect();
    let [role, name, what, weight] =
        [0, 1, 2, 3].map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    for [a, b, c, d, e] in &rows {
        writeln!(stdout, "{a:<role$}  {b:<name$}  {c:<what$}  {d:<weight$}  {e}")?;
    }
    Ok(())
}

fn cells(used: &Used) -> [String; 5] {
    let entry = &used.entry;
    let weight = used.weight.map(|weight| format!("weight {weight}")).unwrap_or_default();
    let signer = match &entry.signed_by {
        Some(key) => format!("signed by {key}"),
        None => "not signed".to_owned(),
    };
    let name = used.label.as_ref().unwrap_or(&entry.id).clone();
    let source = format!("{}, {signer}: {}", entry.source.name(), entry.path.display());
    [entry.role.clone(), name, entry.title(), weight, source]
}

fn as_json(used: &Used) -> Value {
    let entry = &used.entry;
    json!({
        "role": entry.role,
        "id": entry.id,
        "version": entry.version.to_string(),
        "label": used.label,
        "weight": used.weight,
        "source": entry.source.name(),
        "path": entry.path,
        "sha256": entry.sha256,
        "bundle": entry.bundle,
        "manifest": entry.manifest,
        "signed_by": entry.signed_by,
    })
}
