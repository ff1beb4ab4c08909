//! `querl plugin bench`: measures fuel, time and memory of a plugin by batch size, and suggests limits with a margin.

mod episodes;

use crate::args::{Format, parse_settings};
use anyhow::Context;
use clap::Args;
use querl_core::config::PluginLimits;
use querl_core::ports::{
    Filter, HostFunctions, PluginFault, PromptInput, PromptTask, Prompts, RewardModel, StyleScorer,
};
use querl_core::records::{Dialogue, Episode, Sample};
use querl_pipeline::host_functions::{RecordedCalls, RunHostFunctions};
use querl_pipeline::plugins::host_options;
use querl_plugin::{CallReport, HostOptions, Plugin, PluginHost, PluginKind, PluginPort, PluginSettings};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// A bundle, a component or a source folder
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Episodes to call it with, as a run records them or written by hand [default: 256 generated ones]
    #[arg(long, value_name = "FILE.jsonl")]
    episodes: Option<PathBuf>,
    /// Batch sizes
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 8, 64],
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: Vec<u32>,
    /// A setting of the plugin, such as max_chars=40, not a key of a configuration: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Factor between the measured maximum and the suggested limits
    #[arg(long, value_name = "FACTOR", default_value_t = 4.0, value_parser = factor)]
    margin: f64,
    #[command(flatten)]
    format: Format,
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(factor) if (1.0..=1000.0).contains(&factor) => Ok(factor),
        _ => Err("expected a number from 1 to 1000".into()),
    }
}

/// Calls the plugin with batches of each size and prints fuel, time, memory and limits.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let settings = parse_settings(&args.settings, "--settings")?;
    let (episodes, calls) = match &args.episodes {
        Some(path) => episodes::read(path)?,
        None => (episodes::generated(), RecordedCalls::default()),
    };
    let calls: Arc<dyn HostFunctions> = Arc::new(calls);
    let bench = Bench::open(&args.path)?;
    let mut results = Vec::new();
    for kind in bench.plugin.kinds() {
        let job = Job::new(&bench, *kind, &settings, (&episodes, &calls))?;
        // A prompt is made for one query at a time.
        let batches = if *kind == PluginKind::Prompt { &[1][..] } else { &args.batch };
        for n_items in batches {
            results.push(bench.measure(&job, *n_items as usize)?);
        }
    }
    let suggestion = Suggestion::of(&results, args.margin);
    let result = report_json(&bench, &results, &suggestion);
    args.format.print(&result, || report_text(&bench, &results, &suggestion))
}

/// Maximum and minimum number of calls per batch size. The maximum is enough for a 95th percentile; after [`PATIENCE`], only the minimum is
/// measured.
const MOST_CALLS: usize = 500;
const FEWEST_CALLS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(3);

/// A loaded plugin, the duration of its compilation and loading, and the observed calls.
struct Bench {
    plugin: Plugin,
    compile: Duration,
    load: Duration,
    host: PluginHost,
    heard: Heard,
}

#[derive(Debug, Clone, Copy)]
struct Call {
    /// Items of the batch that the host passed: one, if the plugin has host functions.
    n_items: usize,
    fuel: u64,
    wall: Duration,
    memory_bytes: usize,
}

/// The measured calls of one kind of plugin and one batch size.
#[derive(Debug, Clone)]
struct Measured {
    kind: PluginKind,
    n_items: usize,
    calls: Vec<Call>,
}

#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Call>>>);

impl Heard {
    fn add(&self, report: &CallReport<'_>) {
        let CallReport { n_items, fuel, wall, memory_bytes, .. } = *report;
        let call = Call { n_items: n_items.max(1), fuel, wall, memory_bytes };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Bench {
    /// Loads the plugin twice: first with an empty cache of compiled code, which measures compilation, then from the cache.
    fn open(path: &Path) -> anyhow::Result<Self> {
        let cache = tempfile::tempdir().context("no folder for temporary files")?;
        let heard = Heard::default();
        // The build of a source folder is not measured.
        if path.is_dir() {
            querl_plugin::build(path)?;
        }
        let load = || -> anyhow::Result<(PluginHost, Plugin, Duration)> {
            let observed = heard.clone();
            let options = HostOptions {
                cache_dir: Some(cache.path().to_owned()),
                observer: Some(Arc::new(move |report| observed.add(report))),
                ..host_options(&PluginLimits::default())?
            };
            let host = PluginHost::new(options)?;
            let start = Instant::now();
            let plugin = host.load(path)?;
            Ok((host, plugin, start.elapsed()))
        };
        let (_, _, compile) = load()?;
        let (host, plugin, load) = load()?;
        Ok(Self { plugin, compile, load, host, heard })
    }

    /// Measures calls of `job` with batches of `n_items`.
    fn measure(&self, job: &Job<'_>, n_items: usize) -> Result<Measured, PluginFault> {
        // Warm-up: the first call is slower, because memory pages are used for the first time.
        job.call(0, n_items)?;
        self.heard.take();
        let start = Instant::now();
        for index in 0..MOST_CALLS {
            job.call(index, n_items)?;
            if index + 1 >= FEWEST_CALLS && start.elapsed() > PATIENCE {
                break;
            }
        }
        Ok(Measured { kind: job.kind, n_items, calls: self.heard.take() })
    }
}

/// A configured plugin of one kind, and the inputs of its calls.
struct Job<'a> {
    kind: PluginKind,
    port: Port<'a>,
}

enum Port<'a> {
    Prompt(Box<dyn Prompts>, &'a [Episode]),
    Filter(Box<dyn Filter>, Vec<Sample>),
    Reward(Box<dyn RewardModel>, &'a [Episode]),
    Style(Box<dyn StyleScorer>, Vec<Dialogue>),
}

impl<'a> Job<'a> {
    fn new(
        bench: &Bench,
        kind: PluginKind,
        settings: &PluginSettings,
        (episodes, calls): (&'a [Episode], &Arc<dyn HostFunctions>),
    ) -> anyhow::Result<Self> {
        let (host, plugin) = (&bench.host, &bench.plugin);
        let port = match kind {
            PluginKind::Prompt => Port::Prompt(host.open(plugin, settings, PluginPort::prompts())?, episodes),
            PluginKind::Filter => Port::Filter(
                host.open(
                    plugin,
                    settings,
                    PluginPort::filter().with_functions(Some(Arc::new(RunHostFunctions::of_filters(None)))),
                )?,
                episodes.iter().map(episodes::sample).collect(),
            ),
            PluginKind::Reward | PluginKind::GroupReward => {
                let port = PluginPort::reward().with_functions(Some(calls.clone()));
                Port::Reward(host.open(plugin, settings, port)?, episodes)
            }
            PluginKind::StyleScorer => Port::Style(
                host.open(plugin, settings, PluginPort::style_scorer(None))?,
                episodes.iter().map(episodes::dialogue).collect(),
            ),
        };
        Ok(Self { kind, port })
    }

    /// Calls the plugin with batch number `index`; the inputs are repeated cyclically.
    fn call(&self, index: usize, n_items: usize) -> Result<(), PluginFault> {
        match &self.port {
            Port::Filter(filter, samples) => filter.check_batch(&batch(samples, index, n_items)).map(drop),
            Port::Reward(reward, episodes) => reward.score_batch(&batch(episodes, index, n_items)).map(drop),
            Port::Style(scorer, dialogues) => scorer.score_batch(&batch(dialogues, index, n_items)).map(drop),
            Port::Prompt(prompts, episodes) => {
                let episode = &episodes[index % episodes.len()];
                let input = PromptInput { query: &episode.query, context: &episode.context, rewrite: None };
                prompts.messages(PromptTask::PolicyRewrite, &input)?;
                prompts.parse_rewrite(&episode.policy.rewrite).map(drop)
            }
        }
    }
}

/// Batch number `index` of `n_items` items, which are repeated cyclically. With enough items, no id occurs twice in a batch.
fn batch<T: Clone>(items: &[T], index: usize, n_items: usize) -> Vec<T> {
    items.iter().cycle().skip(index * n_items % items.len()).take(n_items).cloned().collect()
}

/// Additional factor of the suggested time limit: wall-clock time varies more than fuel, by machine, load and first calls.
const TIME_MARGIN: f64 = 5.0;
const LEAST_TIMEOUT_MS: u64 = 500;
const MEMORY_STEP: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Suggestion {
    fuel_per_call: u64,
    fuel_per_item: u64,
    timeout_ms: u64,
    memory_bytes: usize,
}

impl Suggestion {
    /// The maximum over all calls times `margin`, rounded up to two digits.
    fn of(results: &[Measured], margin: f64) -> Self {
        let calls = || results.iter().flat_map(|result| &result.calls);
        let wall_ms = calls().map(|call| call.wall.as_secs_f64() * 1e3).fold(0.0, f64::max);
        let memory = calls().map(|call| call.memory_bytes).max().unwrap_or(0);
        let costs = results.iter().map(|result| FuelCost::of(results, result));
        let (call, item) =
            costs.fold((0.0_f64, 0.0_f64), |(call, item), cost| (call.max(cost.call), item.max(cost.item)));
        Self {
            fuel_per_call: round_up((call * margin) as u64),
            fuel_per_item: round_up((item * margin) as u64).max(1),
            timeout_ms: round_up((wall_ms * margin * TIME_MARGIN) as u64).max(LEAST_TIMEOUT_MS),
            memory_bytes: ((memory as f64 * margin) as usize).div_ceil(MEMORY_STEP).max(1) * MEMORY_STEP,
        }
    }

    /// The section `[limits]` for plugin.toml.
    fn to_toml(self) -> String {
        let Self { fuel_per_call, fuel_per_item, timeout_ms, memory_bytes } = self;
        format!(
            "[limits]\nfuel_per_call = {fuel_per_call}\nfuel_per_item = {fuel_per_item}\ntimeout_ms = {timeout_ms}\n\
             memory_bytes = {memory_bytes}\n"
        )
    }
}

/// Fuel of a call, divided into a constant part (starting an instance) and a part per item.
struct FuelCost {
    call: f64,
    item: f64,
}

impl FuelCost {
    /// Estimates both parts from the calls of the same kind as `result`. Fuel per item: the difference between calls with the most and the
    /// fewest items per additional item, plus the spread of the calls with the fewest, since items differ.
    fn of(results: &[Measured], result: &Measured) -> Self {
        let calls = || results.iter().filter(|other| other.kind == result.kind).flat_map(|other| &other.calls);
        let smallest = calls().map(|call| call.n_items).min().unwrap_or(1);
        let largest = calls().map(|call| call.n_items).max().unwrap_or(1);
        let fuel = |n_items: usize| {
            calls().filter(|call| call.n_items == n_items).map(|call| call.fuel as f64).collect::<Vec<_>>()
        };
        let most = |fuel: &[f64]| fuel.iter().copied().fold(0.0, f64::max);
        let least = |fuel: &[f64]| fuel.iter().copied().fold(f64::INFINITY, f64::min);
        let (few, many) = (fuel(smallest), fuel(largest));
        let (call, n_more) = (most(&few), largest - smallest);
        let item = match n_more {
            0 => call / smallest as f64,
            n_more => (most(&many) - least(&few)).max(0.0) / n_more as f64 + (call - least(&few)),
        };
        Self { call, item }
    }
}

/// Rounds up to two leading digits: 1234 becomes 1300.
fn round_up(value: u64) -> u64 {
    let mut step = 1;
    while value / step >= 100 {
        step *= 10;
    }
    value.div_ceil(step) * step
}

/// Median, 95th percentile and maximum of fuel and microseconds per item, and the maximum of memory.
struct Figures {
    fuel: [f64; 3],
    micros: [f64; 3],
    memory_bytes: usize,
}

impl Figures {
    fn of(result: &Measured) -> Self {
        let by_item = |value: fn(&Call) -> f64| {
            let mut values: Vec<f64> = result.calls.iter().map(|call| value(call) / call.n_items as f64).collect();
            values.sort_by(f64::total_cmp);
            let last = values.len().saturating_sub(1) as f64;
            [0.5, 0.95, 1.0].map(|share| values.get((last * share).round() as usize).copied().unwrap_or(f64::NAN))
        };
        Self {
            fuel: by_item(|call| call.fuel as f64),
            micros: by_item(|call| call.wall.as_secs_f64() * 1e6),
            memory_bytes: result.calls.iter().map(|call| call.memory_bytes).max().unwrap_or(0),
        }
    }
}

fn report_text(bench: &Bench, results: &[Measured], suggestion: &Suggestion) -> String {
    let plugin = &bench.plugin;
    let mut text = format!(
        "{} {}, component of {} bytes\ncold start: compiled in {:.1} ms, once; loaded from the cache in {:.2} ms\n\n",
        plugin.id(),
        plugin.version(),
        plugin.n_bytes(),
        millis(bench.compile),
        millis(bench.load),
    );
    text.push_str(&format!(
        "{:<12}  {:>5}  {:>5}  {:>30}  {:>26}  {:>9}\n",
        "kind", "batch", "calls", "fuel by item (p50, p95, max)", "us by item (p50, p95, max)", "memory"
    ));
    for result in results {
        let Figures { fuel, micros, memory_bytes } = Figures::of(result);
        let fuel = fuel.map(|fuel| format!("{fuel:.0}")).join(", ");
        let micros = micros.map(|micros| format!("{micros:.2}")).join(", ");
        text.push_str(&format!(
            "{:<12}  {:>5}  {:>5}  {fuel:>30}  {micros:>26}  {:>5.1} MiB\n",
            result.kind.name(),
            result.n_items,
            result.calls.len(),
            memory_bytes as f64 / f64::from(1 << 20),
        ));
    }
    text.push_str("\nlimits that leave room above this, for plugin.toml:\n");
    text + &suggestion.to_toml()
}

fn report_json(bench: &Bench, results: &[Measured], suggestion: &Suggestion) -> Value {
    let result = |result: &Measured| {
        let Figures { fuel, micros, memory_bytes } = Figures::of(result);
        let spread = |[p50, p95, max]: [f64; 3]| json!({ "p50": p50, "p95": p95, "max": max });
        json!({
            "kind": result.kind.name(),
            "batch": result.n_items,
            "calls": result.calls.len(),
            "fuel_per_item": spread(fuel),
            "micros_per_item": spread(micros),
            "memory_bytes": memory_bytes,
        })
    };
    json!({
        "plugin": bench.plugin.id(),
        "version": bench.plugin.version(),
        "sha256": bench.plugin.digest(),
        "component_bytes": bench.plugin.n_bytes(),
        "compile_ms": millis(bench.compile),
        "cold_start_ms": millis(bench.load),
        "results": results.iter().map(result).collect::<Vec<_>>(),
        "limits": suggestion,
    })
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(n_items: usize, fuel: [u64; 2]) -> Measured {
        let call = |fuel| Call { n_items, fuel, wall: Duration::from_millis(70), memory_bytes: 1_200_000 };
        Measured { kind: PluginKind::Reward, n_items, calls: fuel.map(call).into() }
    }

    #[test]
    fn limits_are_the_most_that_was_measured_with_room_and_round() {
        // 100 per call, 10 per item, and one item of 15.
        let suggestion = Suggestion::of(&[result(1, [110, 115]), result(11, [210, 210])], 4.0);
        let expected = Suggestion { fuel_per_call: 460, fuel_per_item: 60, timeout_ms: 1400, memory_bytes: 5 << 20 };
        assert_eq!(suggestion, expected);
    }

    #[test]
    fn one_size_of_batch_gives_its_share_to_each_item() {
        let suggestion = Suggestion::of(&[result(10, [100, 200])], 2.0);
        assert_eq!((suggestion.fuel_per_call, suggestion.fuel_per_item), (400, 40));
    }

    /// Regression: a plugin with host functions gets one item per call; its figures were divided by the batch size.
    #[test]
    fn figures_are_by_item_of_the_call() {
        let single = |n_items| Measured { n_items, ..result(1, [100, 100]) };
        let results = [single(1), single(64)];
        assert_eq!(Figures::of(&results[1]).fuel, [100.0; 3]);
        assert_eq!(Figures::of(&results[1]).micros, [70_000.0; 3]);
        let suggestion = Suggestion::of(&results, 2.0);
        assert_eq!((suggestion.fuel_per_call, suggestion.fuel_per_item), (200, 200));
    }

    #[test]
    fn figures_round_up_to_two_digits() {
        assert_eq!([0, 7, 99, 100, 101, 1234].map(round_up), [0, 7, 99, 100, 110, 1300]);
    }
}
