//! `querl data from-log`: a query table from the request log of `querl serve rewrite`.

use crate::args::{Format, usage};
use clap::Args;
use querl_core::text::{grouped, printable};
use querl_data::{LogTableReport, LogTableSettings, is_day, table_from_log};
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct FromLogArgs {
    /// The folder of `querl serve rewrite --request_log`
    #[arg(value_name = "LOG_DIR")]
    log: PathBuf,
    /// The query table to write: .jsonl, .xlsx, .csv, .tsv or .parquet
    #[arg(long, value_name = "TABLE")]
    out: PathBuf,
    /// The tenant whose requests are used [default: that of the log, where it has one]
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// The first day (UTC) of requests
    #[arg(long, value_name = "YYYY-MM-DD", value_parser = day)]
    since: Option<String>,
    /// The last day of requests
    #[arg(long, value_name = "YYYY-MM-DD", value_parser = day)]
    until: Option<String>,
    /// Replace an existing table
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    format: Format,
}

fn day(text: &str) -> Result<String, String> {
    is_day(text).then(|| text.to_owned()).ok_or_else(|| "expected a date as YYYY-MM-DD".to_owned())
}

pub fn run(args: &FromLogArgs) -> anyhow::Result<()> {
    let FromLogArgs { log, out, tenant, since, until, force, format } = args;
    if let (Some(since), Some(until)) = (since, until)
        && since > until
    {
        return Err(usage(format!("--since {since} is after --until {until}; exchange them")).into());
    }
    if out.exists() && !force {
        let remedy = "choose another table with `--out`, or replace it with `--force`";
        return Err(usage(format!("{}: is there already; {remedy}", out.display())).into());
    }
    let (tenant, since, until) = (tenant.as_deref(), since.as_deref(), until.as_deref());
    let report = table_from_log(&LogTableSettings { folder: log, out, tenant, since, until })?;
    format.print(&report, || lines(args, &report).join("\n") + "\n")
}

/// Maximum length of the shown problem of a damaged line.
const MAX_PROBLEM_BYTES: usize = 200;

fn lines(args: &FromLogArgs, report: &LogTableReport) -> Vec<String> {
    let LogTableReport { n_files, days: [first, last], tenant, .. } = report;
    let figure = |name: &str, n: u64| format!("  {name:<14}  {}", grouped(n));
    let reason = |(reason, n): (&&str, &u64)| format!("    {}  {reason}", grouped(*n));
    let mut lines = vec![format!("request log {}: {n_files} file(s), {first} to {last}", args.log.display())];
    lines.extend([figure("lines", report.n_lines), figure("damaged", report.n_damaged)]);
    lines.extend(report.damaged.iter().map(|damaged| {
        let problem = printable(&damaged.problem, MAX_PROBLEM_BYTES);
        format!("    {}:{} {problem}", damaged.file, damaged.line)
    }));
    lines.extend([figure("others", report.n_others), figure("rewrites", report.n_rewrites)]);
    lines.push(figure("left out", report.left_out.values().sum()));
    lines.extend(report.left_out.iter().map(reason));
    lines.extend([figure("repeated", report.n_repeated), figure("fallbacks", report.n_fallbacks)]);
    lines.push(figure("feedback", report.n_feedback));
    lines.extend(report.feedback_left_out.iter().map(reason));
    if report.n_contradicting > 0 {
        lines.push(format!("    {}  passages judged in different ways", grouped(report.n_contradicting)));
    }
    lines.push(format!("query table {} of tenant {tenant}", args.out.display()));
    let largest = format!("the largest of {} row(s)", grouped(report.n_largest_group as u64));
    lines.extend([
        figure("rows", report.n_rows),
        format!("{}, {largest}", figure("groups", report.n_groups as u64)),
        figure("with gold ids", report.n_with_gold),
    ]);
    let unjoined =
        [(report.n_unjoined_gold, "row(s) that share a gold passage"), (report.n_unjoined, "reformulation(s)")];
    for (n, what) in unjoined.into_iter().filter(|(n, _)| *n > 0) {
        let n = grouped(n);
        lines.push(format!("warning: {n} {what} are in another group, since one of both would be too large"));
    }
    let table = args.out.display();
    let unset = "unset data.query_column, profile_column, history_column, gold_column";
    lines.push(format!("use it with data.input = \"{table}\" and data.group_column = \"group\"; {unset}"));
    lines
}
