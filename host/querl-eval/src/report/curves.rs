//! Training curves of the report, from metrics in `metrics.jsonl`.

use crate::evaluation::Evaluation;
use crate::facts::ServiceName;
use crate::metric::Metric;
use crate::page::charts::{LineChart, Points};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

struct ChartSpec {
    stage: &'static str,
    title: &'static str,
    y_label: &'static str,
    curves: &'static [CurveSpec],
}

/// The label of a curve and its names in `metrics.jsonl`; the first recorded one is drawn.
type CurveSpec = (&'static str, &'static [&'static str]);

/// The charts. Metric names are those of verl and TRL, and those that earlier versions recorded.
const CHARTS: &[ChartSpec] = &[
    ChartSpec {
        stage: "rl",
        title: "Reward",
        y_label: "reward",
        curves: &[("rollouts", &["avg_reward", "critic/score/mean"]), ("validation", &["val/reward"])],
    },
    ChartSpec {
        stage: "rl",
        title: WIN_RATE_TITLE,
        y_label: "share",
        curves: &[("rollouts", &[WIN_RATE]), ("validation", &["val/win_rate"])],
    },
    ChartSpec {
        stage: "rl",
        title: "Top-1 score",
        y_label: "score",
        curves: &[
            ("policy", &["avg_top1", "avg_top1/policy", "avg_top1_policy"]),
            ("teacher", &["avg_top1_teacher", "avg_top1/teacher"]),
            ("validation", &["val/avg_top1", "val/top1_score"]),
        ],
    },
    ChartSpec {
        stage: "rl",
        title: "KL divergence",
        y_label: "nats / token",
        curves: &[
            (
                "to the SFT policy",
                &["kl", "kl_to_ref", "actor/kl", "actor/ref_kl", "actor/kl_loss", "actor/reward_kl_penalty"],
            ),
            ("to the rollout policy", &["actor/ppo_kl"]),
        ],
    },
    ChartSpec {
        stage: "rl",
        title: "Policy loss",
        y_label: "loss",
        curves: &[("policy", &["actor/pg_loss", "policy_loss"])],
    },
    ChartSpec {
        stage: "rl",
        title: "Value loss",
        y_label: "loss",
        curves: &[("value", &["critic/vf_loss", "value_loss"])],
    },
    ChartSpec {
        stage: "rl",
        title: "Clip fraction",
        y_label: "share of tokens",
        curves: &[("policy", &["actor/pg_clipfrac", "clip_fraction"]), ("value", &["critic/vf_clipfrac"])],
    },
    ChartSpec {
        stage: "rl",
        title: "Entropy",
        y_label: "nats / token",
        curves: &[("policy", &["actor/entropy", "entropy"])],
    },
    ChartSpec {
        stage: "rl",
        title: "Response length",
        y_label: "tokens",
        curves: &[("mean", &["response_length/mean"]), ("longest", &["response_length/max"])],
    },
    ChartSpec {
        stage: "sft",
        title: "Fine-tuning loss",
        y_label: "nats / token",
        curves: &[("training", &["loss"]), ("validation", &["eval_loss"])],
    },
];

/// Name of retrieval in a run without retrieval, and the metrics that then do not apply.
const NO_RETRIEVAL: &str = "none";
const OF_RETRIEVAL: [&str; 4] = ["win_rate", "avg_top1", "avg_top1_teacher", "avg_quality"];

const WIN_RATE: &str = "win_rate";
const WIN_RATE_TITLE: &str = "Win rate against the teacher";

#[derive(Debug, Serialize)]
pub(super) struct Curves {
    rl: Vec<LineChart>,
    sft: Vec<LineChart>,
    /// Titles of charts without a value in `metrics.jsonl`.
    missing: Vec<&'static str>,
    others: Vec<OtherMetric>,
    n_others_left_out: usize,
}

/// Maximum number of listed metrics without a chart.
const MOST_OTHERS: usize = 400;

/// A metric in `metrics.jsonl` that is in no chart of the report.
#[derive(Debug, Serialize)]
pub(super) struct OtherMetric {
    stage: String,
    name: String,
    n: usize,
    first: String,
    last: String,
    least: String,
    greatest: String,
}

/// Values by stage and name, then by step.
type Recorded = BTreeMap<(String, String), BTreeMap<u64, f64>>;

impl Curves {
    /// The curves in `rows`, without the win rate where the tables leave it out.
    pub(super) fn new(rows: &[Value], retrieval: &ServiceName, evaluation: &Evaluation) -> Self {
        let mut recorded = read(rows);
        let has_win_rate = evaluation.shows(Metric::WinRate);
        if !has_win_rate {
            recorded.retain(|(_, name), _| name.trim_start_matches("val/") != WIN_RATE);
        }
        if retrieval.name == NO_RETRIEVAL {
            recorded.retain(|(_, name), _| !OF_RETRIEVAL.contains(&name.trim_start_matches("val/")));
        }
        let mut curves =
            Self { rl: Vec::new(), sft: Vec::new(), missing: Vec::new(), others: Vec::new(), n_others_left_out: 0 };
        for spec in CHARTS.iter().filter(|spec| has_win_rate || spec.title != WIN_RATE_TITLE) {
            let found = spec.curves.iter().filter_map(|curve| take(&mut recorded, spec.stage, curve)).collect();
            match LineChart::new(spec.title, spec.y_label, found) {
                Some(chart) if spec.stage == "sft" => curves.sft.push(chart),
                Some(chart) => curves.rl.push(chart),
                None => curves.missing.push(spec.title),
            }
        }
        curves.others = recorded.into_iter().filter_map(OtherMetric::new).collect();
        curves.n_others_left_out = curves.others.len().saturating_sub(MOST_OTHERS);
        if curves.n_others_left_out > 0 {
            curves.others.sort_by_key(|other| std::cmp::Reverse(other.n));
            curves.others.truncate(MOST_OTHERS);
            curves.others.sort_by(|one, other| (&one.stage, &one.name).cmp(&(&other.stage, &other.name)));
        }
        curves
    }
}

impl OtherMetric {
    fn new(((stage, name), points): ((String, String), BTreeMap<u64, f64>)) -> Option<Self> {
        let text = |value: f64| {
            if value.fract() == 0.0 && value.abs() < 1e9 { value.to_string() } else { format!("{value:.4}") }
        };
        Some(Self {
            stage,
            name,
            n: points.len(),
            first: text(*points.values().next()?),
            last: text(*points.values().next_back()?),
            least: text(points.values().copied().min_by(f64::total_cmp)?),
            greatest: text(points.values().copied().max_by(f64::total_cmp)?),
        })
    }
}

/// The numbers of rows that have a stage and a step.
fn read(rows: &[Value]) -> Recorded {
    let mut recorded = Recorded::new();
    for row in rows {
        let (Some(stage), Some(step)) = (row["stage"].as_str(), row["step"].as_u64()) else { continue };
        let numbers = row.as_object().into_iter().flatten().filter(|(name, _)| *name != "step");
        for (name, value) in numbers.filter_map(|(name, value)| Some((name, value.as_f64()?))) {
            recorded.entry((stage.to_owned(), name.clone())).or_default().insert(step, value);
        }
    }
    recorded
}

fn take(recorded: &mut Recorded, stage: &str, (label, names): &CurveSpec) -> Option<Points> {
    let (name, points) = names.iter().find_map(|name| {
        let points = recorded.remove(&(stage.to_owned(), (*name).to_owned()))?;
        Some(((*name).to_owned(), points))
    })?;
    Some(Points { label, name, points: points.into_iter().map(|(step, value)| (step as f64, value)).collect() })
}
