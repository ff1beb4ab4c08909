//! Calls reported to the observer, and style scorers with a model.
#![allow(clippy::unwrap_used)]

mod common;

use common::{cache_dir, episode, host_with, load_guest, repository, sample};
use querl_core::config::PluginLimits;
use querl_core::ports::{FaultKind, HostFunctions, StyleModel, StyleScorer};
use querl_core::records::{
    CallFailure, Dialogue, FailureKind, HostCallError, HostRequest, HostResponse, Message, Sample, StyleProbability,
    Verdict,
};
use querl_plugin::{CallReport, HostOptions, PluginHost, PluginKind, PluginPort, PluginSettings};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A reported call, without its time.
#[derive(Debug, Clone, PartialEq)]
struct Heard {
    plugin: String,
    function: &'static str,
    n_items: usize,
    fuel: u64,
    memory_bytes: usize,
    failed: bool,
}

type Calls = Arc<Mutex<Vec<Heard>>>;

fn observed(limits: PluginLimits) -> (PluginHost, Calls) {
    let calls = Calls::default();
    let log = calls.clone();
    let observer = move |call: &CallReport<'_>| {
        assert!(call.wall > Duration::ZERO);
        let CallReport { plugin, function, n_items, fuel, memory_bytes, failed, .. } = *call;
        log.lock().unwrap().push(Heard { plugin: plugin.to_owned(), function, n_items, fuel, memory_bytes, failed });
    };
    let options =
        HostOptions { limits, cache_dir: cache_dir(), observer: Some(Arc::new(observer)), ..Default::default() };
    (PluginHost::new(options).unwrap(), calls)
}

fn working(query: &str, kib: &str) -> querl_core::records::Episode {
    let mut episode = episode("a", query);
    episode.baseline.as_mut().unwrap().rewrite = kib.to_owned();
    episode
}

#[test]
fn every_call_is_reported_with_what_it_used() {
    let (host, calls) = observed(PluginLimits::default());
    let plugin = host.load(&repository().join("plugins/reward-competition")).unwrap();
    let reward = host.open(&plugin, &PluginSettings::new(), PluginPort::reward()).unwrap();
    calls.lock().unwrap().clear();
    let batch = [episode("a", "胶原咋吃"), episode("b", "胶原咋吃")];
    reward.score_batch(&batch).unwrap();
    reward.score_batch(&batch).unwrap();
    let heard = calls.lock().unwrap().clone();
    assert_eq!(heard.len(), 2);
    assert_eq!(heard[0], heard[1], "the same call uses the same");
    let call = &heard[0];
    assert_eq!((call.plugin.as_str(), call.function), ("reward-competition", "rewards.score-batch"));
    assert_eq!((call.n_items, call.failed), (2, false));
    assert!(call.fuel > 1000 && call.fuel < 1_000_000, "{}", call.fuel);
    assert!(call.memory_bytes >= 65_536 && call.memory_bytes % 65_536 == 0, "{}", call.memory_bytes);
}

#[test]
fn loading_and_configuring_are_reported_too() {
    let (host, calls) = observed(PluginLimits::default());
    let folder = repository().join("plugins/tenant-chengla");
    let plugin = host.load(&folder).unwrap();
    host.open(&plugin, &PluginSettings::new(), PluginPort::prompts()).unwrap();
    let functions: Vec<_> = calls.lock().unwrap().iter().map(|call| call.function).collect();
    assert_eq!(functions, ["info.describe", "info.check-settings"]);
}

#[test]
fn more_work_is_more_fuel_and_more_memory() {
    let (host, calls) = observed(PluginLimits::default());
    let plugin = load_guest(&host, "works").unwrap();
    let reward = host.open(&plugin, &PluginSettings::new(), PluginPort::reward()).unwrap();
    calls.lock().unwrap().clear();
    for (turns, kib) in [("0", "0"), ("100000", "0"), ("0", "8192")] {
        reward.score_batch(&[working(turns, kib)]).unwrap();
    }
    let heard = calls.lock().unwrap().clone();
    assert!(heard[1].fuel > heard[0].fuel + 100_000, "{heard:?}");
    assert_eq!(heard[1].memory_bytes, heard[0].memory_bytes);
    assert!(heard[2].memory_bytes >= heard[0].memory_bytes + (8 << 20), "{heard:?}");
}

#[test]
fn call_that_faults_is_reported_with_all_its_fuel() {
    let limits = PluginLimits { fuel_per_call: 1_000_000, fuel_per_item: 500_000, ..PluginLimits::default() };
    let (host, calls) = observed(limits);
    let plugin = load_guest(&host, "infinite-loop").unwrap();
    let reward = host.open(&plugin, &PluginSettings::new(), PluginPort::reward()).unwrap();
    calls.lock().unwrap().clear();
    reward.score_batch(&[episode("a", "loop")]).unwrap_err();
    let heard = calls.lock().unwrap().clone();
    assert_eq!((heard.len(), heard[0].failed, heard[0].fuel), (1, true, 1_500_000));
}

/// A model with two classes; the question determines its result.
struct Model;

impl StyleModel for Model {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let class = |label: &str, probability| StyleProbability { label: label.to_owned(), probability };
        match turns[0].content.as_str() {
            "退款" => Ok(vec![class("售前", 0.25), class("投诉", 0.75)]),
            "慢" => {
                std::thread::sleep(Duration::from_millis(400));
                Ok(vec![class("售前", 1.0)])
            }
            "断" => Err(CallFailure { kind: FailureKind::Unreachable, message: "no model there".into() }),
            _ => Ok(vec![class("售前", 1.0), class("投诉", 0.0)]),
        }
    }
}

fn dialogue(id: &str, question: &str) -> Dialogue {
    let turn = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    Dialogue {
        id: id.into(), turns: vec![turn("user", question), turn("assistant", "您好，请问订单号是多少？")]
    }
}

fn scorer(host: &PluginHost, model: Option<Arc<dyn StyleModel>>) -> Box<dyn StyleScorer> {
    let plugin = host.load(&repository().join("tests/guests/odd-style-scorer")).unwrap();
    assert_eq!(plugin.kinds(), [PluginKind::StyleScorer]);
    host.open(&plugin, &PluginSettings::new(), PluginPort::style_scorer(model)).unwrap()
}

#[test]
fn style_scorer_asks_the_model_of_the_run() {
    let scorer = scorer(&host_with(PluginLimits::default()), Some(Arc::new(Model)));
    assert_eq!(scorer.name(), "odd-style-scorer");
    let scored = scorer.score_batch(&[dialogue("a", "退款"), dialogue("b", "多少钱"), dialogue("c", "断")]).unwrap();
    let first = scored[0].as_ref().unwrap();
    assert_eq!(first.total, 0.25);
    assert_eq!((first.components[0].name.as_str(), first.components[0].value), ("complaint", 0.75));
    assert_eq!(scored[1].as_ref().unwrap().total, 1.0);
    let lost = scored[2].as_ref().unwrap_err();
    assert_eq!(lost.code, "no_style");
    assert!(lost.detail.contains("no model there"), "{}", lost.detail);
}

/// Host functions (style model and words) that record the items for which they were called.
#[derive(Default)]
struct Attributed(Mutex<Vec<String>>);

impl HostFunctions for Attributed {
    fn call(&self, _: &str, item_id: &str, request: &HostRequest) -> Result<HostResponse, HostCallError> {
        self.0.lock().unwrap().push(item_id.to_owned());
        match request {
            HostRequest::ClassifyStyle(turns) => {
                Model.classify(turns).map(HostResponse::Style).map_err(HostCallError::Failed)
            }
            HostRequest::SegmentWords(text) => Ok(HostResponse::Texts(vec![text.clone()])),
            other => panic!("{other:?}"),
        }
    }
}

/// Regression: the dialogues of a batch went in one call, so that no call of the model could be recorded with its dialogue.
#[test]
fn style_scorer_that_asks_the_model_gets_one_dialogue_a_call() {
    let (host, calls) = observed(PluginLimits::default());
    let plugin = host.load(&repository().join("tests/guests/odd-style-scorer")).unwrap();
    let functions = Arc::new(Attributed::default());
    let port = PluginPort::style_scorer(None).with_functions(Some(functions.clone()));
    let scorer = host.open(&plugin, &PluginSettings::new(), port).unwrap();
    calls.lock().unwrap().clear();
    let scored = scorer.score_batch(&["a", "b", "c"].map(|id| dialogue(id, if id == "b" { "退款" } else { "多少钱" })));
    let totals: Vec<f64> = scored.unwrap().iter().map(|scored| scored.as_ref().unwrap().total).collect();
    assert_eq!(totals, [1.0, 0.25, 1.0]);
    let mut ids = functions.0.lock().unwrap().clone();
    ids.sort();
    assert_eq!(ids, ["a", "b", "c"]);
    assert_eq!(calls.lock().unwrap().iter().map(|call| call.n_items).collect::<Vec<_>>(), [1, 1, 1]);
}

#[test]
fn filter_asks_for_words_in_the_name_of_its_batch() {
    let host = host_with(PluginLimits::default());
    let plugin = load_guest(&host, "filter-words").unwrap();
    let functions = Arc::new(Attributed::default());
    let port = PluginPort::filter().with_functions(Some(functions.clone()));
    let filter = host.open(&plugin, &PluginSettings::new(), port).unwrap();
    let sample = |query: &str| Sample { rewritten_query: String::new(), ..sample(query, query) };
    assert_eq!(filter.check_batch(&["鱼油", "钙片"].map(sample)).unwrap(), [Verdict::Keep, Verdict::Keep]);
    assert_eq!(*functions.0.lock().unwrap(), ["", ""]);
    let fault = filter.check_batch(&[sample("蓝鲸海藻")]).unwrap_err();
    assert!(fault.to_string().contains("sample `蓝鲸海藻`") && fault.message.contains("has the word"), "{fault}");
}

#[test]
fn style_scorer_without_a_model_gets_not_configured() {
    let scored = scorer(&host_with(PluginLimits::default()), None).score_batch(&[dialogue("a", "退款")]).unwrap();
    assert_eq!(scored[0].as_ref().unwrap_err().code, "no_style");
}

#[test]
fn dialogue_that_does_not_end_with_the_assistant_is_rejected_unseen_and_the_others_are_scored() {
    let scorer = scorer(&host_with(PluginLimits::default()), Some(Arc::new(Model)));
    let (mut unanswered, mut strange) = (dialogue("a", "退款"), dialogue("c", "退款"));
    unanswered.turns.pop();
    strange.turns[0].role = "tool".into();
    let scored = scorer.score_batch(&[unanswered, dialogue("b", "退款"), strange]).unwrap();
    assert_eq!(scored[0].as_ref().unwrap_err().code, "invalid_dialogue");
    assert_eq!(scored[1].as_ref().unwrap().total, 0.25);
    let detail = &scored[2].as_ref().unwrap_err().detail;
    assert_eq!(detail, "turn 1 is from `tool`; expected system, user or assistant");
}

#[test]
fn time_in_the_model_is_the_calls_time() {
    let scorer = scorer(&host_with(PluginLimits { timeout_ms: 200, ..PluginLimits::default() }), Some(Arc::new(Model)));
    let start = Instant::now();
    let fault = scorer.score_batch(&[dialogue("a", "慢")]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Limit);
    let expected = "dialogue `a`: ran for longer than 200 ms (`plugins.limits.timeout_ms`)";
    assert!(fault.to_string().ends_with(expected), "{fault}");
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(scorer.score_batch(&[dialogue("b", "退款")]).unwrap()[0].as_ref().unwrap().total, 0.25);
}

#[test]
fn style_scores_outside_of_the_contract_are_faults() {
    let host = host_with(PluginLimits::default());
    let plugin = host.load(&repository().join("tests/guests/odd-style-scorer")).unwrap();
    let settings = toml::from_str("breach = 'long_is_better'").unwrap();
    let scorer = host.open(&plugin, &settings, PluginPort::style_scorer(Some(Arc::new(Model)))).unwrap();
    let mut long = dialogue("a", "退款");
    long.turns[1].content = "好".repeat(2000);
    let fault = scorer.score_batch(&[dialogue("b", "退款"), long]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Result);
    let expected = "dialogue `a`: total is 2; expected a number within the contract's range 0 to 1";
    assert!(fault.to_string().ends_with(expected), "{fault}");
}
