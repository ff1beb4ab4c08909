//! `querl data`: prints statistics of the query table and the data stages (`stats`); makes a query table from a request log (`from-log`).

mod from_log;

use crate::args::{ConfigArgs, Format};
use crate::terminal::StageProgress;
use clap::{Args, Subcommand};
use querl_core::config::Config;
use querl_core::records::{QueryRow, Split};
use querl_core::run_dir::RunDir;
use querl_data::{Findings, Leaks, QueryTable, Rows, check_knowledge_base, check_recording, open_queries};
use querl_pipeline::ledger::{Ledger, StageName};
use querl_pipeline::plan::script_warning;
use querl_pipeline::stages::{funnel, leaks};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Print statistics of the query table, of each data stage and of the splits; leaks between splits; warnings
    Stats(StatsArgs),
    /// Write a query table of the requests and the feedback that a server logged
    #[command(name = "from-log")]
    FromLog(from_log::FromLogArgs),
}

#[derive(Debug, Args)]
pub struct StatsArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    format: Format,
}

pub fn run(command: &DataCommand) -> anyhow::Result<()> {
    let args = match command {
        DataCommand::Stats(args) => args,
        DataCommand::FromLog(args) => return from_log::run(args),
    };
    let stats = Stats::of(&args.config.load_without_model()?)?;
    args.format.print(&stats, || stats.lines().join("\n") + "\n")
}

/// Result of `querl data stats`.
#[derive(Debug, Serialize)]
struct Stats {
    table: TableStats,
    funnel: Vec<funnel::Step>,
    splits: BTreeMap<&'static str, u64>,
    /// Leaks from train to val and test, by split. Before `convert` has finished, those of the split that it will make.
    leaks: BTreeMap<&'static str, Leaks>,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct TableStats {
    file: String,
    #[serde(flatten)]
    findings: Findings,
    n_with_profile: usize,
    n_with_history: usize,
    n_with_gold: usize,
    query_length: Lengths,
}

/// Median, 95th percentile and maximum of lengths, in characters.
#[derive(Debug, Default, Serialize)]
struct Lengths {
    p50: u32,
    p95: u32,
    max: u32,
}

impl Stats {
    fn of(config: &Config) -> anyhow::Result<Self> {
        let table = open_queries(&config.data)?.with_merged_cells()?;
        let unknown_gold_ids = check_knowledge_base(config, &table)?;
        let dir = RunDir::new(&config.output_dir);
        let ledger = Ledger::open(&dir.stages())?;
        let is_converted = ledger.finished(StageName::Convert).is_some();
        let progress = StageProgress::start("data");
        let (mut splits, mut leaks) = (BTreeMap::new(), BTreeMap::new());
        let found = if is_converted {
            for split in Split::ALL {
                splits.insert(split.name(), leaks::n_lines(&dir, split)?);
            }
            Some(leaks::of_dataset(&dir, &config.data, &progress)?)
        } else {
            leaks::of_table_if_split(&table, &config.data, &progress)?
        };
        let mut warnings = table.findings().notes();
        warnings.extend(script_warning(config, &table)?);
        warnings.extend(unknown_gold_ids.map(|unknown| unknown.to_string()));
        warnings.extend(sizes(&ledger, table.findings()));
        let rewritten = ledger.finished(StageName::Rewrite);
        warnings.extend(match rewritten {
            Some(entry) => funnel::not_recorded(config, &entry.facts),
            // Compares the table with the recorded teacher; a finished stage has the counts in its ledger entry.
            None => check_recording(config, &table)?,
        });
        warnings.extend(funnel::notes(&ledger, &dir)?);
        if let Some(found) = found {
            warnings.extend(found.sentences());
            leaks.extend([(Split::Val.name(), found.val), (Split::Test.name(), found.test)]);
        }
        let table = TableStats::of(&table, config)?;
        Ok(Self { table, funnel: funnel::steps(&ledger, &dir)?, splits, leaks, warnings })
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = self.table.lines();
        lines.push("stages".into());
        match self.funnel.is_empty() {
            true => lines.push("  none is finished yet".into()),
            false => lines.extend(funnel::lines(&self.funnel)),
        }
        if !self.splits.is_empty() {
            lines.push("splits".into());
        }
        for split in Split::ALL.iter().filter(|split| self.splits.contains_key(split.name())) {
            let leaked = self.leaks.get(split.name()).map(|leaks| format!(", {} like a row of train", leaks.n_leaked));
            lines.push(format!(
                "  {:<8}  {} rows{}",
                split.name(),
                self.splits[split.name()],
                leaked.unwrap_or_default()
            ));
        }
        lines.extend(self.warnings.iter().map(|warning| format!("warning: {warning}")));
        lines
    }
}

/// Warnings about too few rows: of the finished stages, or of the table if none is finished.
fn sizes(ledger: &Ledger, findings: &Findings) -> Vec<String> {
    let finished = |stage: StageName| Some((stage, ledger.finished(stage)?));
    let of_stages: Vec<_> = StageName::ALL.into_iter().filter_map(finished).collect();
    if of_stages.is_empty() {
        return funnel::table_size_warning(findings.n_rows as u64).into_iter().collect();
    }
    of_stages.into_iter().filter_map(|(stage, entry)| funnel::size_warning(stage, &entry.facts, ledger)).collect()
}

impl TableStats {
    fn of(table: &QueryTable, config: &Config) -> anyhow::Result<Self> {
        let names = config.data.query_files().into_iter().filter_map(|path| path.file_name());
        let file = names.map(|name| name.to_string_lossy()).collect::<Vec<_>>().join(", ");
        let (mut n_with_profile, mut n_with_history, mut n_with_gold) = (0, 0, 0);
        let mut lengths = Vec::new();
        for row in table.read()? {
            let QueryRow { original_query, user_profile, history_summary, gold_ids, .. } = row?;
            n_with_profile += usize::from(!user_profile.is_empty());
            n_with_history += usize::from(!history_summary.is_empty());
            n_with_gold += usize::from(!gold_ids.is_empty());
            lengths.push(original_query.chars().count() as u32);
        }
        let (findings, query_length) = (table.findings().clone(), Lengths::of(lengths));
        Ok(Self { file, findings, n_with_profile, n_with_history, n_with_gold, query_length })
    }

    fn lines(&self) -> Vec<String> {
        let findings = &self.findings;
        let encoding = findings.encoding.map(|encoding| format!(" ({encoding})")).unwrap_or_default();
        let Lengths { p50, p95, max } = self.query_length;
        let figures = [
            ("rows", findings.n_rows),
            ("usable", findings.n_usable),
            ("groups", findings.n_groups),
            ("empty", findings.empty.n),
            ("repeated", findings.repeated.n),
            ("alike", findings.alike.n),
            ("conflicting", findings.conflicting.n),
            ("with a profile", self.n_with_profile),
            ("with a history", self.n_with_history),
            ("with gold ids", self.n_with_gold),
        ];
        let mut lines = vec![format!("query table {}{encoding}", self.file)];
        lines.extend(figures.iter().map(|(name, n)| format!("  {name:<14}  {n}")));
        lines.push(format!("  {:<14}  median {p50} characters, 95th percentile {p95}, maximum {max}", "queries"));
        lines
    }
}

impl Lengths {
    fn of(mut lengths: Vec<u32>) -> Self {
        lengths.sort_unstable();
        let at = |share: f64| lengths.get(((lengths.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied();
        let at = |share| at(share).unwrap_or_default();
        Self { p50: at(0.5), p95: at(0.95), max: at(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_of_the_middle_and_of_the_ends() {
        let Lengths { p50, p95, max } = Lengths::of((1..=100).rev().collect());
        assert_eq!((p50, p95, max), (50, 95, 100));
        let Lengths { p50, p95, max } = Lengths::of(Vec::new());
        assert_eq!((p50, p95, max), (0, 0, 0));
    }
}
