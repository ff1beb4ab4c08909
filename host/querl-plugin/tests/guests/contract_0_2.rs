//! Guests of contract 0.2: the guests of contract 0.1 built for it, and guests that only contract 0.2 permits.

use crate::common::{
    assert_others_are_served, cache_dir, episode, guest, host, host_with, load_bytes, load_guest, wat,
    with_plenty_of_fuel,
};
use querl_core::config::{OnLimit, PluginLimits};
use querl_core::ports::{EpisodeInputs, FaultKind, HostFunctions, InputUse, PluginFault, RewardModel};
use querl_core::records::{Episode, HostCallError, HostRequest, HostResponse};
use querl_plugin::{
    HostInterface, HostOptions, Observer, Outcome, Plugin, PluginHost, PluginKind, PluginPort, PluginSettings,
    Rechecks, RewardForm,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Host functions that return results and record plugin and item of each call.
#[derive(Default)]
struct Answers {
    asked: Mutex<Vec<(String, String)>>,
    judge_time: Duration,
}

impl HostFunctions for Answers {
    fn call(&self, plugin: &str, item_id: &str, request: &HostRequest) -> Result<HostResponse, HostCallError> {
        self.asked.lock().unwrap().push((plugin.into(), item_id.into()));
        match request {
            HostRequest::CountTokens(_) => Ok(HostResponse::Count(4)),
            HostRequest::Embed(texts) => Ok(HostResponse::Vectors(vec![vec![1.0]; texts.len()])),
            HostRequest::AskJudge(_) => {
                std::thread::sleep(self.judge_time);
                Ok(HostResponse::Text("5".into()))
            }
            _ => Err(HostCallError::NotConfigured),
        }
    }
}

fn open(
    host: &PluginHost,
    plugin: &Plugin,
    functions: Option<Arc<dyn HostFunctions>>,
) -> Result<Box<dyn RewardModel>, String> {
    let port = PluginPort::reward().with_functions(functions);
    host.open(plugin, &PluginSettings::default(), port).map_err(|error| error.to_string())
}

/// The error in loading or opening the guest, or the fault of a batch whose second episode has an unusual query. Afterwards a normal batch
/// of the same plugin and one of another plugin are scored.
fn breach(name: &str) -> (String, Option<FaultKind>) {
    // A time limit of a minute, so that it has no effect.
    let host = host_with(PluginLimits { timeout_ms: 60_000, ..PluginLimits::default() });
    let functions: Arc<dyn HostFunctions> = Arc::new(Answers::default());
    let opened = match load_guest(&host, name) {
        Ok(plugin) => open(&host, &plugin, Some(functions)),
        Err(error) => Err(error.to_string()),
    };
    let breach = match opened {
        Err(message) => (message, None),
        Ok(reward) => {
            let batch = [episode("step-1/a/0", "好"), episode("step-1/a/1", "x"), episode("step-1/a/2", "好")];
            let fault = match reward.score_batch(&batch) {
                Ok(scores) => return (format!("{scores:?}"), None),
                Err(fault) => fault,
            };
            assert!(fault.to_string().contains(" 0.1.0: "), "{name}: names plugin and version: {fault}");
            if !ALWAYS_ODD.contains(&name) {
                let next = reward.score_batch(&[episode("step-2/a/0", "好")]);
                assert_eq!(next.unwrap()[0].as_ref().unwrap().total, 0.5, "{name}: the next call is served");
            }
            (fault.message.clone(), Some(fault.kind))
        }
    };
    assert_others_are_served(&host);
    breach
}

/// Guests that violate the contract for every episode.
const ALWAYS_ODD: [&str; 3] = ["endless-list@0.2", "loops-in-realloc@0.2", "too-many-scores@0.2"];

fn assert_breaches(cases: &[(&str, &str, Option<FaultKind>)]) {
    let is_plain = |message: &str| !message.contains(['\n', '\u{1b}', '\u{202e}']);
    let found = cases.iter().map(|(name, expected, kind)| (name, expected, kind, breach(name)));
    let unexpected: Vec<_> = found
        .filter(|(_, expected, kind, (message, found))| {
            !message.contains(*expected) || found != *kind || !is_plain(message)
        })
        .collect();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
}

const LIMIT: Option<FaultKind> = Some(FaultKind::Limit);
const RESULT: Option<FaultKind> = Some(FaultKind::Result);
const TRAP: Option<FaultKind> = Some(FaultKind::Trap);

#[test]
fn guests_of_contract_0_1_are_contained_at_0_2() {
    assert_breaches(&[
        ("amplified-result@0.2", "returned more than 16777216 bytes", LIMIT),
        ("asks-settings@0.2", "used up its fuel", LIMIT),
        ("bad-code@0.2", "rejected with the code `", RESULT),
        ("bad-pointer@0.2", "string pointer/length out of bounds of memory", RESULT),
        ("bad-tag@0.2", "returned what cannot be read: ", RESULT),
        ("bulk-copy@0.2", "used up its fuel", LIMIT),
        ("deep-recursion@0.2", "recursed too deeply", TRAP),
        ("divides-by-zero@0.2", "integer divide by zero", TRAP),
        ("endless-list@0.2", "list pointer/length out of bounds of memory", RESULT),
        ("escapes-in-name@0.2", "it calls itself `a[2Jbc`", None),
        ("huge-memory@0.2", "memory has a minimum byte size", None),
        ("huge-result@0.2", "returned more than 16777216 bytes", LIMIT),
        ("huge-table@0.2", "table index 0 has a minimum element size", None),
        ("infinite-component@0.2", "component `part` is -inf", RESULT),
        ("infinite-range@0.2", "declares the range -inf to inf; expected two finite numbers", None),
        ("infinite-total@0.2", "total is inf", RESULT),
        ("invalid-utf8-result@0.2", "returned what cannot be read: ", RESULT),
        ("logs-megabytes@0.2", "used up its fuel", LIMIT),
        ("loops-after-return@0.2", "used up its fuel", LIMIT),
        ("loops-at-start@0.2", "used up its fuel", None),
        ("loops-in-describe@0.2", "(not yet described): used up its fuel", None),
        ("loops-in-realloc@0.2", "used up its fuel", LIMIT),
        ("missing-info@0.2", "it does not export `info` of `querl:plugin`", None),
        ("missing-kind@0.2", "it exports none of `prompts`", None),
        ("missing-range@0.2", "does not have export `range`", None),
        ("other-range@0.2", "its `rewards` is not of the contract's types", None),
        ("repeated-component@0.2", "component `part` appears twice", RESULT),
        ("table-bomb@0.2", "requested a table of 100001 elements", LIMIT),
        ("too-many-memories@0.2", "defined memories count of 3 exceeds", None),
        ("too-many-scores@0.2", "returned 1000 scores for 3 episodes", RESULT),
        ("unknown-import@0.2", "it imports `surprise`, which this host does not offer", None),
    ]);
}

#[test]
fn packed_results_of_contract_0_2_are_believed_no_more_than_others() {
    for (name, expected, kind) in [
        ("packed-garbage@0.2", "byte 5 of its packed results", FaultKind::Result),
        ("packed-too-many@0.2", "its packed results are 4294967295; expected 1", FaultKind::Result),
        ("packed-amplified@0.2", "returned more than 16777216 bytes", FaultKind::Limit),
        ("packed-flood@0.2", "returned more than 16777216 bytes", FaultKind::Limit),
    ] {
        let host = host();
        let plugin = guest(&host, name);
        let fault = plugin.score_batch(&[episode("a", "x"), episode("b", "好")]).unwrap_err();
        assert!(fault.message.contains(expected) && fault.kind == kind, "{fault}");
        assert_eq!(plugin.score_batch(&[episode("a", "好")]).unwrap()[0].as_ref().unwrap().total, 0.5);
        assert_others_are_served(&host);
    }
}

#[test]
fn odd_descriptions_are_refused() {
    assert_breaches(&[
        ("settings-too-many", "its `describe` has 257 settings; expected at most 256", None),
        ("settings-endless", "returned what cannot be read: list pointer/length out of bounds of memory", None),
        ("settings-flood", "returned more than 16777216 bytes", None),
        ("setting-odd-key", "has the setting `0.1.0`; expected 1 to 64 of a to z, 0 to 9 and _", None),
        ("setting-bad-default", "setting `depth`: its default is `depth`; expected a number", None),
        ("setting-nan-bound", "setting `depth`: has a bound that is not finite", None),
        ("setting-unknown-type", "its type is `depth`, which this host does not know", None),
        ("kinds-lie", "its kinds are `filter`; it exports those of `reward`", None),
        ("kinds-none", "its kinds are ``; it exports those of `reward`", None),
        ("kinds-twice", "its kinds are `reward, reward`; it exports those of `reward`", None),
        ("kinds-bad-tag", "returned what cannot be read: ", None),
        (
            "range-not-described",
            "its `describe` says that its range is 0 to 2; under default settings the component declares 0 to 1",
            None,
        ),
        ("range-nan", "declares the range 0 to NaN; expected two finite numbers", None),
        (
            "version-not-semantic",
            "version `0.1`; expected lower-case letters, digits and `-`, and a semantic version",
            None,
        ),
        ("range-missing", "its `describe` has no range, and every setting has a default", None),
        ("input-unknown", "it requires the input `0.1.0`, which this host does not know", None),
        ("input-twice", "has the input `response` twice", None),
        ("inputs-endless", "list pointer/length out of bounds of memory", None),
    ]);
}

#[test]
fn describe_is_the_same_every_time() {
    let host = host();
    for _ in 0..3 {
        // A second host calls it again, because an instance exists for one call only.
        assert_eq!(load_guest(&crate::common::host(), "describe-changes").unwrap().id(), "describe");
    }
    let plugin = load_guest(&host, "describe-asks-settings").unwrap();
    assert_eq!(plugin.kinds(), [PluginKind::Reward], "no setting has a value in `describe`");
    assert_others_are_served(&host);
}

#[test]
fn component_alone_refuses_settings_by_its_description() {
    let host = host();
    let plugin = load_guest(&host, "ordinary@0.2").unwrap();
    let description = plugin.description();
    assert_eq!((description.contract.as_str(), description.inputs), ("0.2.0", EpisodeInputs::default()));
    assert!(description.settings.as_ref().unwrap().is_empty() && description.range.is_some());
    let error = host.open(&plugin, &toml::from_str("colour = 1").unwrap(), PluginPort::reward()).err().unwrap();
    assert!(error.to_string().ends_with("setting `colour`: the plugin has no settings"), "{error}");
}

#[test]
fn json_results_are_believed_no_more_than_others() {
    assert_breaches(&[
        ("json-garbage", "its JSON of results: invalid type: map", RESULT),
        ("json-nan", "its JSON of results: expected value", RESULT),
        ("json-infinite", "its JSON of results: number out of range", RESULT),
        ("json-wrong-case", "its JSON of results: unknown variant `praised`", RESULT),
        ("json-too-few", "returned 1 scores for 3 episodes", RESULT),
        ("json-too-many", "returned 100000 scores for 3 episodes", RESULT),
        ("json-deep", "its JSON of results: ", RESULT),
        ("json-huge", "returned more than 16777216 bytes", LIMIT),
        ("json-not-utf8", "returned what cannot be read: ", RESULT),
    ]);
}

#[test]
fn odd_combinations_of_interfaces_are_refused() {
    assert_breaches(&[
        ("two-forms", "it exports `packed-rewards` and `json-rewards`; expected one of them", None),
        ("two-rewards", "it exports `rewards` and `group-rewards`; expected one of them", None),
        ("filter-asks-judge", "it imports `querl:plugin/judge@0.2.0`, which is not for a filter plugin", None),
    ]);
    let mut bytes = wat::component("ordinary@0.2");
    let (from, to) = (b"querl:plugin/rewards@0.2.0", b"querl:plugin/rewards@0.1.0");
    let starts: Vec<_> = (0..bytes.len() - from.len()).filter(|start| bytes[*start..].starts_with(from)).collect();
    starts.iter().for_each(|start| bytes[*start..][..to.len()].copy_from_slice(to));
    let message = load_bytes(&host(), &bytes).unwrap_err().to_string();
    assert!(message.contains("it does not export `info`"), "{message}");
}

#[test]
fn host_functions_are_limited() {
    assert_breaches(&[
        (
            "host-call-bomb",
            "episode `step-1/a/1`: called the host more often than 64 times (`plugins.limits.host_calls_per_item`)",
            LIMIT,
        ),
        ("embeds-65", "episode `step-1/a/1`: called `similarity.embed` with 65 texts; expected at most 64", TRAP),
        ("embeds-endless", "episode `step-1/a/1`: returned what cannot be read: ", RESULT),
        ("asks-bad-role", "episode `step-1/a/1`: returned what cannot be read: ", RESULT),
    ]);
}

#[test]
fn host_calls_are_attributed_to_the_episode_and_the_others_are_scored() {
    let limits = PluginLimits { on_limit: OnLimit::Drop, ..PluginLimits::default() };
    let host = host_with(limits);
    let answers = Arc::new(Answers::default());
    let batch: Vec<Episode> =
        (0..20).map(|n| episode(&format!("e/{n}"), if n % 2 == 0 { "x" } else { "好" })).collect();
    let plugin = load_guest(&host, "counts-tokens").unwrap();
    assert_eq!(plugin.host_functions(), [HostInterface::Tokens]);
    let scores = open(&host, &plugin, Some(answers.clone())).unwrap().score_batch(&batch).unwrap();
    let totals: Vec<_> = scores.into_iter().map(|score| score.unwrap().total).collect();
    assert_eq!(totals, [0.25, 0.5].repeat(10));
    let mut asked = std::mem::take(&mut *answers.asked.lock().unwrap());
    asked.sort_by_key(|(_, item)| batch.iter().position(|episode| episode.id == *item));
    let expected: Vec<_> = (0..20).step_by(2).map(|n| ("counts-tokens".to_owned(), format!("e/{n}"))).collect();
    assert_eq!(asked, expected);
    let bomb = open(&host, &load_guest(&host, "host-call-bomb").unwrap(), Some(answers)).unwrap();
    let scores = bomb.score_batch(&batch).unwrap();
    assert_eq!(scores[0].as_ref().unwrap_err().code, "plugin_limit");
    assert_eq!(scores[1].as_ref().unwrap().total, 0.5);
}

#[test]
fn function_that_the_run_lacks_is_not_configured() {
    let host = host();
    let plugin = open(&host, &load_guest(&host, "counts-tokens").unwrap(), None).unwrap();
    let fault = plugin.score_batch(&[episode("a", "x")]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Trap, "the guest traps where the call has no result: {fault}");
}

#[test]
fn time_of_the_judge_does_not_count_towards_the_call() {
    let host = host_with(with_plenty_of_fuel(200));
    let slow = Arc::new(Answers { judge_time: Duration::from_millis(400), ..Answers::default() });
    let plugin = open(&host, &load_guest(&host, "asks-judge").unwrap(), Some(slow)).unwrap();
    let batch: Vec<_> = (0..8).map(|n| episode(&format!("e/{n}"), "x")).collect();
    let start = Instant::now();
    assert_eq!(plugin.score_batch(&batch).unwrap().len(), 8);
    assert!(start.elapsed() < Duration::from_millis(1600), "they wait together: {:?}", start.elapsed());
}

fn checked_host() -> PluginHost {
    let options = HostOptions { cache_dir: cache_dir(), rechecks: Rechecks::Every, ..HostOptions::default() };
    PluginHost::new(options).unwrap()
}

fn fault_of_recheck(name: &str, ids: [&str; 2]) -> PluginFault {
    let host = checked_host();
    let fault = guest(&host, name).score_batch(&ids.map(|id| episode(id, "好"))).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Result);
    assert_others_are_served(&host);
    fault
}

#[test]
fn result_that_depends_on_the_batch_or_its_form_is_found() {
    let fault = fault_of_recheck("batch-by-order", ["a", "b"]);
    let expected = "plugin batch-by-order 0.1.0: episode `b`: is 0.5 in a batch of 2 and is 0.25 alone; a result must depend on its own episode only";
    assert_eq!(fault.to_string(), expected);
    for name in ["packed-differs", "packed-differs@0.2"] {
        let fault = fault_of_recheck(name, ["a", "b"]);
        let expected = "episode `a`: is 0.5 in the form Packed and is 0.25 in the form Records; expected equal results";
        assert_eq!(fault.message, expected);
    }
    let fault = fault_of_recheck("group-by-order", ["g/0", "g/1"]);
    let expected = "episode `g/1`: is 0.5 and is 0.25 with the episodes of its group in reverse";
    assert!(fault.message.starts_with(expected), "{fault}");
}

#[test]
fn about_one_in_64_batches_is_checked() {
    let host = host();
    let plugin = guest(&host, "batch-by-order");
    let is_found = |n: &usize| plugin.score_batch(&[episode(&format!("{n}/a"), "好"), episode("b", "好")]).is_err();
    let found: Vec<_> = (0..640).filter(is_found).collect();
    assert!((2..30).contains(&found.len()), "{found:?}");
    assert_eq!(found, (0..640).filter(is_found).collect::<Vec<_>>(), "the choice is deterministic");
}

#[test]
fn groups_are_scored_together_and_returned_in_the_order_of_the_batch() {
    let host = host();
    let ordinary = guest(&host, "group-ordinary");
    let batch = ["g/0", "h/0", "g/1", "h/1", "g/2"].map(|id| episode(id, "好"));
    assert_eq!(ordinary.score_batch(&batch).unwrap().len(), 5);
    let by_order = guest(&host, "group-by-order");
    let totals = by_order.score_batch(&batch).unwrap().into_iter().map(|score| score.unwrap().total);
    assert_eq!(totals.collect::<Vec<_>>(), [0.25, 0.25, 0.5, 0.5, 0.5]);
    let fault = guest(&host, "group-wrong-length").score_batch(&batch).unwrap_err();
    assert_eq!(fault.message, "group `g`: returned 1000 scores for 3 episodes");
    let fault = guest(&host, "group-panics").score_batch(&[episode("g/0", "好"), episode("h/0", "x")]).unwrap_err();
    assert!(
        fault.message.starts_with("group `h`: aborted") || fault.message.starts_with("group `h`: trapped"),
        "{fault}"
    );
    assert_others_are_served(&host);
}

#[test]
fn episode_without_baseline_is_rejected_by_0_1_and_scored_by_0_2() {
    let host = host();
    let lone = Episode { baseline: None, ..episode("b", "好") };
    let batch = [episode("a", "好"), lone, episode("c", "好")];
    for form in [RewardForm::Packed, RewardForm::Records] {
        let reward = |name| {
            host.open(&load_guest(&host, name).unwrap(), &PluginSettings::default(), PluginPort::reward_in(form))
                .unwrap()
        };
        let scores = reward("ordinary").score_batch(&batch).unwrap();
        let codes: Vec<_> =
            scores.iter().map(|score| score.as_ref().err().map(|reason| reason.code.as_str())).collect();
        assert_eq!(codes, [None, Some("baseline_missing"), None]);
        assert!(reward("ordinary@0.2").score_batch(&batch).unwrap().iter().all(Result::is_ok));
    }
}

#[test]
fn whole_episodes_pass_in_every_form() {
    let host = checked_host();
    let batch: Vec<Episode> = (0..5).map(|n| episode(&format!("e/{n}"), "好")).collect();
    for name in ["reads-all", "reads-all-json"] {
        let plugin = guest(&host, name);
        assert!(plugin.inputs().response == InputUse::Optional && plugin.inputs().style == InputUse::Optional);
        assert!(plugin.score_batch(&batch).unwrap().iter().all(|score| score.as_ref().unwrap().total == 0.5));
    }
}

#[test]
fn observer_gets_totals_and_rejections() {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let seen = reports.clone();
    let observer: Observer = Arc::new(move |report| {
        if report.function == "rewards.score-batch" {
            seen.lock().unwrap().push((report.plugin.to_owned(), report.n_items, report.outcome));
        }
    });
    let options = HostOptions { cache_dir: cache_dir(), observer: Some(observer), ..HostOptions::default() };
    let host = PluginHost::new(options).unwrap();
    let plugin = load_guest(&host, "counts-tokens").unwrap();
    let reward = open(&host, &plugin, Some(Arc::new(Answers::default()))).unwrap();
    reward.score_batch(&[episode("a", "x")]).unwrap();
    let outcome = Outcome { n_rejected: 0, totals: Some((0.25, 0.25)) };
    assert_eq!(*reports.lock().unwrap(), [("counts-tokens".to_owned(), 1, outcome)]);
}
