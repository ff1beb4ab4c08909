//! `querl cache`: prints statistics of the response cache (teacher, judge, retrieval), and clears it.

use crate::args::{Format, one_of};
use anyhow::Context;
use clap::{Args, Subcommand};
use querl_data::{CacheTable, cache_stats, clear_cache};
use querl_pipeline::failure::Stop;
use querl_pipeline::run::cache_path;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Print number, size and age of the cached responses
    Stats(StatsArgs),
    /// Clear the cache
    Clear(ClearArgs),
}

#[derive(Debug, Args)]
pub struct StatsArgs {
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
pub struct ClearArgs {
    #[command(flatten)]
    cache: CacheArgs,
    /// Only responses of this kind; may be given several times [default: all]
    #[arg(long, value_name = "TABLE", value_parser = one_of(CacheTable::ALL.map(|table| (table.name(), table, ""))))]
    table: Vec<CacheTable>,
}

#[derive(Debug, Args)]
struct CacheArgs {
    /// The file [default: answers.redb in the user's cache folder]
    #[arg(long, value_name = "FILE")]
    path: Option<PathBuf>,
}

impl CacheArgs {
    fn path(&self) -> anyhow::Result<PathBuf> {
        let missing =
            || Stop::usage("there is no cache folder: set QUERL_CACHE_DIR or HOME, or name the file with --path");
        Ok(cache_path(self.path.as_deref()).ok_or_else(missing)?)
    }
}

pub fn run(command: &CacheCommand) -> anyhow::Result<()> {
    match command {
        CacheCommand::Stats(args) => stats(args),
        CacheCommand::Clear(args) => {
            let tables: Vec<CacheTable> = match args.table.as_slice() {
                [] => CacheTable::ALL.to_vec(),
                named => named.to_vec(),
            };
            let path = args.cache.path()?;
            clear_cache(&path, &tables)?;
            let names: Vec<&str> = tables.iter().map(|table| table.name()).collect();
            writeln!(std::io::stdout(), "{}: {} cleared", path.display(), names.join(", ")).context("stdout")
        }
    }
}

fn stats(args: &StatsArgs) -> anyhow::Result<()> {
    let path = args.cache.path()?;
    let stats = cache_stats(&path)?;
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let age_s = |oldest_s: Option<u64>| oldest_s.map(|oldest_s| now_s.saturating_sub(oldest_s));
    let tables = stats.iter().map(|one| {
        json!({"table": one.table.name(), "answers": one.n_answers, "bytes": one.n_bytes, "oldest_age_s": age_s(one.oldest_s)})
    });
    let result = json!({"path": path, "tables": tables.collect::<Vec<_>>()});
    args.format.print(&result, || {
        if stats.is_empty() {
            return format!("{}: no responses are cached\n", path.display());
        }
        let mut text = format!("{}\n", path.display());
        for one in &stats {
            let age = age_s(one.oldest_s).map(|age_s| format!(", the oldest {:.1} h old", age_s as f64 / 3600.0));
            let (name, size) = (one.table.name(), one.n_bytes as f64 / 1024.0);
            text += &format!("  {name:<10}  {} answers, {size:.1} KiB{}\n", one.n_answers, age.unwrap_or_default());
        }
        text
    })
}
