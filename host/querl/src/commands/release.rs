//! `querl release`: checks a run before its release, promotes it for its tenant, and returns to the previous one.

use super::serve::{key_in, served_run};
use crate::args::{Format, one_of, usage};
use crate::terminal;
use anyhow::Context;
use clap::{Args, Subcommand};
use querl_core::serving::CandidateMode;
use querl_core::text::printable;
use querl_eval::{ComparisonVerdict, Metric};
use querl_pipeline::release::{
    Action, Against, CheckOptions, HistoryEntry, PromoteOptions, ReleasesFolder, check, promote, rollback, tenants_of,
};
use querl_serve::{CandidateLimits, check_server, reload_server};
use serde_json::json;
use std::fmt::Write as _;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum ReleaseCommand {
    /// Compare a run with another one on held-out queries; exit code 0 only where the interval of the difference excludes a loss
    Check(CheckArgs),
    /// Make a run the one that serves its tenant, or a candidate next to it
    Promote(PromoteArgs),
    /// End a candidate; where there is none, return to the run that served before
    Rollback(RollbackArgs),
    /// Print the history of releases
    History(HistoryArgs),
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct CheckArgs {
    /// The run: its folder or configuration
    #[arg(value_name = "CONFIG|RUN_DIR")]
    run: PathBuf,
    /// What it is compared with: another run, or `raw` or `teacher` of its own evaluation
    #[arg(long, value_name = "CONFIG|RUN_DIR|raw|teacher")]
    against: PathBuf,
    /// The metric that decides; next to one that does not use gold passages, top-1 accuracy by these is printed too
    #[arg(long, value_name = "METRIC", default_value = "top1", value_parser = one_of(Metric::COMPARED.map(|metric| (metric.name(), metric, ""))))]
    metric: Metric,
    /// The largest loss that is accepted, in units of the metric: 0.01 of top1 is one query of a hundred. At most a tenth of its scale
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative)]
    margin: f64,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct FolderArgs {
    /// The folder with the history of releases
    #[arg(long, value_name = "DIR", default_value = "releases")]
    releases: PathBuf,
}

/// Options for a server that is notified of a change.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct ServerArgs {
    /// A running `querl serve rewrite --releases DIR` that shall read the folder again
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// The environment variable that holds the server's admin key
    #[arg(long, visible_alias = "admin-key-env", value_name = "NAME", requires = "server")]
    admin_key_env: Option<String>,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct PromoteArgs {
    /// The run: its folder or configuration
    #[arg(value_name = "CONFIG|RUN_DIR")]
    run: PathBuf,
    /// Promote it as a candidate that answers this share of the requests, above 0 and below 1
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "shadow")]
    canary: Option<f64>,
    /// Promote it as a candidate whose rewrites are compared and not returned
    #[arg(long)]
    shadow: bool,
    /// Promote without a passed check; the history keeps the reason
    #[arg(long, visible_alias = "without-check", value_name = "REASON", value_parser = reason)]
    without_check: Option<String>,
    #[command(flatten)]
    folder: FolderArgs,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct RollbackArgs {
    /// The tenant; required if the folder has several
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    #[command(flatten)]
    folder: FolderArgs,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct HistoryArgs {
    /// Only this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    #[command(flatten)]
    folder: FolderArgs,
    #[command(flatten)]
    format: Format,
}

const LIMITS: CandidateLimits = CandidateLimits::DEFAULT;

/// Options of a server that follows releases.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct FollowArgs {
    /// Serve what `querl release promote` has put into this folder, in place of named runs; SIGHUP and POST /admin/releases read it again
    #[arg(long, value_name = "DIR")]
    pub releases: Option<PathBuf>,
    /// Requests of the candidate and of the current model before limits apply
    #[arg(long, visible_alias = "candidate-min-requests", conflicts_with = "runs", value_name = "N", default_value_t = LIMITS.min_requests as u32, value_parser = clap::value_parser!(u32).range(1..=1000))]
    candidate_min_requests: u32,
    /// End a candidate whose share of failures of model or plugin is larger than the current model's by more than this
    #[arg(long, visible_alias = "candidate-max-errors", conflicts_with = "runs", value_name = "SHARE", default_value_t = LIMITS.max_errors, value_parser = not_negative)]
    candidate_max_errors: f64,
    /// End a candidate whose share of fallbacks is larger than the current model's by more than this
    #[arg(long, visible_alias = "candidate-max-fallbacks", conflicts_with = "runs", value_name = "SHARE", default_value_t = LIMITS.max_fallbacks, value_parser = not_negative)]
    candidate_max_fallbacks: f64,
    /// End a candidate whose 95% quantile of the latency is more than this times the current model's, and 50 ms longer
    #[arg(long, visible_alias = "candidate-max-latency", conflicts_with = "runs", value_name = "FACTOR", default_value_t = LIMITS.max_latency_ratio, value_parser = not_negative)]
    candidate_max_latency: f64,
}

impl FollowArgs {
    pub fn limits(&self) -> CandidateLimits {
        CandidateLimits {
            min_requests: self.candidate_min_requests as usize,
            max_errors: self.candidate_max_errors,
            max_fallbacks: self.candidate_max_fallbacks,
            max_latency_ratio: self.candidate_max_latency,
        }
    }
}

fn number(text: &str, expected: &str, is_valid: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|value: &f64| value.is_finite() && is_valid(*value))
        .ok_or_else(|| format!("expected {expected}"))
}

fn share(text: &str) -> Result<f64, String> {
    let expected = "a share above 0 and below 1, such as 0.1; without --canary the run answers all requests";
    number(text, expected, |share| share > 0.0 && share < 1.0)
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number of 0 or more", |value| value >= 0.0)
}

fn reason(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.is_empty() { Err("expected a reason".into()) } else { Ok(text.to_owned()) }
}

pub fn run(command: &ReleaseCommand) -> anyhow::Result<()> {
    match command {
        ReleaseCommand::Check(args) => run_check(args),
        ReleaseCommand::Promote(args) => run_promote(args),
        ReleaseCommand::Rollback(args) => run_rollback(args),
        ReleaseCommand::History(args) => run_history(args),
    }
}

fn run_check(args: &CheckArgs) -> anyhow::Result<()> {
    let run = served_run(&args.run)?;
    let against = match args.against.to_str() {
        Some("raw") => Against::Raw,
        Some("teacher") => Against::Teacher,
        _ => Against::Run(Box::new(served_run(&args.against)?)),
    };
    let checked = check(&run, &against, &CheckOptions { metric: args.metric, margin: args.margin })?;
    let names = [checked.names[0].as_str(), &checked.names[1]];
    let by_gold = checked.by_gold.as_ref().map(|comparison| comparison.by_gold(names));
    args.format.print(&checked.evidence, || {
        let lines = by_gold.iter().map(|sentence| printable(sentence, usize::MAX) + "\n");
        checked.comparison.to_text(names) + &lines.collect::<String>()
    })?;
    let conclusion = checked.comparison.conclusion(names);
    anyhow::ensure!(checked.comparison.verdict == ComparisonVerdict::Passed, "{conclusion}");
    terminal::print(&conclusion);
    Ok(())
}

fn run_promote(args: &PromoteArgs) -> anyhow::Result<()> {
    if args.without_check.as_ref().is_some_and(|reason| reason.contains(char::is_control)) {
        return Err(usage("--without_check: expected a reason on one line, without control characters").into());
    }
    let (folder, run) = (ReleasesFolder::new(&args.folder.releases), served_run(&args.run)?);
    let candidate = match args.canary {
        Some(share) => Some(CandidateMode::Canary(share)),
        None => args.shadow.then_some(CandidateMode::Shadow),
    };
    let options = PromoteOptions { candidate, without_check: args.without_check.clone(), who: user() };
    let server = args.server.open()?;
    let entry = promote(&folder, &run, &options)?;
    let (tenant, name) = (&run.config.tenant, run.dir.root().display());
    let state = folder.tenants()?.remove(tenant).unwrap_or_default();
    match &entry {
        Some(entry) => {
            args.format.print(entry, || sentence(&folder, entry) + "\n")?;
            if let Some((_, reason)) = state.returned.filter(|(version, _)| *version == entry.release.identity.version)
            {
                let reason = printable(&reason, usize::MAX);
                terminal::print(&format!("{name}: it was a candidate before, which a server ended: {reason}"));
            }
        }
        None => {
            args.format.print(&json!({"unchanged": true}), || format!("tenant {tenant}: {name} is that already\n"))?
        }
    }
    notify(server)
}

fn run_rollback(args: &RollbackArgs) -> anyhow::Result<()> {
    let folder = ReleasesFolder::new(&args.folder.releases);
    let server = args.server.open()?;
    let entry = rollback(&folder, args.tenant.as_deref(), user(), served_run)?;
    args.format.print(&entry, || sentence(&folder, &entry) + "\n")?;
    notify(server)
}

fn run_history(args: &HistoryArgs) -> anyhow::Result<()> {
    let folder = ReleasesFolder::new(&args.folder.releases);
    let mut entries = folder.entries()?;
    let states = tenants_of(&entries);
    let is_unknown = |tenant: &String| !states.contains_key(tenant);
    if entries.is_empty() || args.tenant.as_ref().is_some_and(is_unknown) {
        let of = args.tenant.as_ref().map_or(String::new(), |tenant| format!(" of tenant `{tenant}`"));
        let message =
            format!("{}: no releases{of} here; run `querl release promote RUN_DIR` first", folder.path().display());
        return Err(usage(message).into());
    }
    entries.retain(|entry| args.tenant.as_ref().is_none_or(|tenant| *tenant == entry.tenant));
    args.format.print(&entries, || {
        let mut text = String::new();
        for entry in &entries {
            let who = entry.who.as_ref().map_or(String::new(), |who| format!(" by {}", printable(who, usize::MAX)));
            let _ = writeln!(text, "{}{who}: {}", entry.time, sentence(&folder, entry));
        }
        for (tenant, state) in
            states.iter().filter(|(tenant, _)| args.tenant.as_ref().is_none_or(|name| name == *tenant))
        {
            let current = state.current.as_ref().map(|release| folder.run_folder(release).display().to_string());
            let candidate = state.candidate.as_ref().map(|candidate| {
                let run = folder.run_folder(&candidate.release);
                match candidate.mode {
                    CandidateMode::Canary(share) => format!("; candidate {} with a share of {share}", run.display()),
                    CandidateMode::Shadow => format!("; candidate {} in shadow", run.display()),
                }
            });
            let _ = writeln!(
                text,
                "tenant {tenant}: {} serves{}",
                current.unwrap_or_default(),
                candidate.unwrap_or_default()
            );
        }
        text
    })
}

/// A sentence about an entry of the history, without its time and user. Printable: earlier versions kept any reason.
fn sentence(folder: &ReleasesFolder, entry: &HistoryEntry) -> String {
    let HistoryEntry { tenant, action, release, share, replaced, evidence, reason, .. } = entry;
    let run = format!("{} (version {})", folder.run_folder(release).display(), release.identity.version);
    let mut text = match action {
        Action::Promote => format!("tenant {tenant}: {run} serves"),
        Action::Canary => format!("tenant {tenant}: {run} is a candidate with a share of {}", share.unwrap_or(0.0)),
        Action::Shadow => format!("tenant {tenant}: {run} is a candidate in shadow"),
        Action::Rollback => format!("tenant {tenant}: back to {run}"),
        Action::EndCandidate => format!("tenant {tenant}: candidate {run} ended"),
        Action::AutomaticReturn => format!("tenant {tenant}: candidate {run} ended by the server"),
    };
    if let Some(replaced) = replaced {
        let _ = write!(text, ", in place of version {}", replaced.version);
    }
    if let Some(evidence) = evidence {
        let [against, metric] = ["against", "metric"].map(|name| evidence[name].as_str().unwrap_or_default());
        let _ = write!(text, ", checked against {against} by {metric}");
    }
    if let Some(reason) = reason {
        let what = if matches!(action, Action::AutomaticReturn) { "" } else { "without check: " };
        let _ = write!(text, ", {what}{reason}");
    }
    printable(&text, usize::MAX)
}

fn user() -> Option<String> {
    ["USER", "LOGNAME", "USERNAME"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|user| !user.is_empty()))
}

impl ServerArgs {
    /// Address and admin key of the server, after a check that it accepts the key, before anything is changed.
    fn open(&self) -> anyhow::Result<Option<(String, String)>> {
        let Some(url) = self.server.clone() else { return Ok(None) };
        let missing =
            || usage("--server requires --admin_key_env NAME, the environment variable with the server's admin key");
        let key = key_in("--admin_key_env", self.admin_key_env.as_deref().ok_or_else(missing)?)?;
        check_server(&url, &key).context("nothing is changed: the server was asked first")?;
        Ok(Some((url, key)))
    }
}

fn notify(server: Option<(String, String)>) -> anyhow::Result<()> {
    let Some((url, key)) = server else { return Ok(()) };
    let what = "the history is written, and the server does not serve it yet; do not repeat this command: send the server SIGHUP, or \
                `POST /admin/releases`";
    reload_server(&url, &key).context(what)
}
