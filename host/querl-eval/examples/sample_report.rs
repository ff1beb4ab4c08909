//! Writes a report of synthetic records to the given path (default `sample-report.html`) and prints the table, to look at the page
//! without a training run. `cargo run --release -p querl-eval --example sample_report -- report.html`

#[path = "../tests/support/mod.rs"]
mod support;

use querl_core::records::Split;
use querl_eval::{EvalOptions, FunnelStep, Lookups, ReportInput, StageTiming, evaluate, report_html, table};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "sample-report.html".to_owned());
    let records = support::invented_records(96);
    let metrics = support::invented_metrics(60);
    let options = EvalOptions { split: Split::Test, seed: 42, n_resamples: 2000, lookups: Lookups::Made };
    let evaluation = evaluate(&records, &options)?;
    let facts = support::facts();
    let step = |label: &str, n, parts: &[(&str, u64)]| FunnelStep {
        label: label.to_owned(),
        n,
        parts: parts.iter().map(|(label, n)| ((*label).to_owned(), *n)).collect(),
    };
    let funnel = [
        step("rows read", 482, &[("empty", 2)]),
        step("rewritten", 480, &[]),
        step("looked up", 478, &[("timeout", 2)]),
        step("kept by the filters", 431, &[("top1_below_threshold", 35), ("unchanged", 8), ("lost_key_term", 4)]),
        step("in the dataset", 480, &[("train", 288), ("val", 96), ("test", 96)]),
    ];
    let timings = [("rewrite", 0.4), ("validate", 1.9), ("convert", 0.6), ("sft", 88.1), ("rl", 201.5), ("eval", 21.0)]
        .map(|(stage, seconds)| StageTiming { stage: stage.to_owned(), seconds });
    let page = report_html(&ReportInput {
        facts: &facts,
        evaluation: &evaluation,
        records: &records,
        metrics: &metrics,
        funnel: &funnel,
        timings: &timings,
        calls: &[],
        n_examples: 20,
    })?;
    querl_core::fsx::write_atomic(std::path::Path::new(&path), page.as_bytes())?;
    print!("{}", table(&evaluation, &facts));
    Ok(())
}
