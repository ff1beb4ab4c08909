//! What is sent to a host under test, and what it has to reply.

use serde_json::{Value, json};

/// A probe of `tests/guests/host-probe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    /// A reward that declares `response` and `retrieval`, a filter and prompts.
    Plain,
    /// A reward that declares `columns`, `baseline` and `style`, and a style scorer; imports every host function.
    Functions,
    /// A reward of groups that declares `prompt` and `judgement`.
    Group,
}

impl Probe {
    pub(crate) fn component(self) -> &'static [u8] {
        match self {
            Self::Plain => include_bytes!("../../probes/plain.wasm"),
            Self::Functions => include_bytes!("../../probes/functions.wasm"),
            Self::Group => include_bytes!("../../probes/group.wasm"),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Functions => "functions",
            Self::Group => "group",
        }
    }

    fn inputs(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &["response", "retrieval"],
            Self::Functions => &["columns", "baseline", "style"],
            Self::Group => &["prompt", "judgement"],
        }
    }

    /// `episode` without the inputs that the probe does not declare.
    pub(crate) fn stripped(self, episode: &Value) -> Value {
        let without = |record: &mut Value, inputs: &[&str]| {
            if let Some(fields) = record.as_object_mut() {
                fields.retain(|name, _| !inputs.contains(&name.as_str()) || self.inputs().contains(&name.as_str()));
            }
        };
        let mut episode = episode.clone();
        without(&mut episode, &["response", "prompt", "columns", "baseline"]);
        for side in ["policy", "baseline"] {
            if let Some(candidate) = episode.get_mut(side) {
                without(candidate, &["retrieval", "judgement", "style"]);
            }
        }
        episode
    }
}

/// The reply that is expected from a host.
#[derive(Debug, Clone)]
pub(crate) enum Expected {
    Ok(Value),
    /// An object with at least these fields.
    Has(Value),
    /// A fault of one of these kinds whose message contains the text.
    Fault(&'static [&'static str], &'static str),
    /// A fault of one of these kinds if the host refuses the guest's call, or this value if the host returns an empty result.
    FaultOr(&'static [&'static str], Value),
}

/// One request to a loaded probe.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) rule: &'static str,
    pub(crate) probe: Probe,
    pub(crate) settings: Value,
    pub(crate) limits: Value,
    /// The request; `None` if the reply to `load` itself is compared with `expected`.
    pub(crate) request: Option<Value>,
    pub(crate) expected: Expected,
}

const TRAP: &[&str] = &["trap"];
const LIMIT: &[&str] = &["limit"];
const TRAP_OR_LIMIT: &[&str] = &["trap", "limit"];
const RESULT: &[&str] = &["result"];
const SETTINGS: &[&str] = &["settings"];

const PASSES_ALL: &str = "every field reaches the plugin unchanged, and inputs that it does not declare are absent";
const FRESH: &str = "a call runs in a fresh instance";
const DETERMINISTIC: &str =
    "clocks stand at 0, random numbers are a fixed sequence, there are no arguments and no environment";
const NO_IO: &str = "a plugin does no input or output";
const CONTAINED: &str = "a trap is a fault that names the plugin, and the host runs the next call";
const LIMITED: &str = "each call has limits: instructions, time, memory, size of the result, host calls";
const CHECKED: &str = "numbers are finite and in range, names and codes are 1 to 64 of a to z, 0 to 9 and _, at most 64 components, lists \
                       of results are as long as the arguments";
const SETTINGS_RULE: &str = "numbers in decimal notation, booleans as true or false, texts as they are, lists as JSON; a key that the plugin \
                             does not read is refused";
const RECORDED: &str = "host functions return the recorded result of the item; without one they fail with not_recorded";

/// An episode with every field.
pub(crate) fn full_episode(id: &str, group: &str, index: u32) -> Value {
    json!({
        "id": id, "group_id": group, "sample_index": index, "step": 9_007_199_254_740_993_u64, "split": "validation",
        "query": "胶原 \"咋\"吃\u{1f9b4}\n", "context": {"user_profile": "女，40岁", "history_summary": "问过鱼油"},
        "gold_ids": ["p1", ""],
        "columns": {"类别": "保健", "price": 0.1, "count": 3.0, "flag": true, "list": ["a", 2.5, false], "empty": ""},
        "prompt": [{"role": "system", "content": "改写"}, {"role": "user", "content": "胶原咋吃"}],
        "response": "<think>\t</think>胶原蛋白肽 服用方法",
        "policy": {
            "rewrite": "胶原蛋白肽 服用方法",
            "retrieval": {"hits": [
                {"id": "p1", "text": "每日一袋。", "reranker_score": 0.987_654_321_012_345_6, "retrieval_score": -1e-7, "rank": 1},
                {"text": "", "reranker_score": 0.0, "rank": 2}]},
            "judgement": {"scored": {"score": 4.5, "reason": "意图完整"}},
            "style": [{"label": "售前", "probability": 0.75}, {"label": "售后", "probability": 0.25}],
            "n_tokens": 17, "finish_reason": "length"},
        "baseline": {
            "rewrite": "胶原 用法",
            "retrieval": {"failed": {"kind": "rate_limited", "message": "429"}},
            "judgement": {"failed": {"kind": "invalid_response", "message": "没有分数"}},
            "style": [{"label": "售前", "probability": 1.0}],
            "finish_reason": "content_filter"},
    })
}

/// An episode without anything optional.
pub(crate) fn bare_episode(id: &str, query: &str) -> Value {
    json!({"id": id, "group_id": id, "sample_index": 0, "query": query, "policy": {}})
}

fn report(value: &Value) -> Value {
    rejected("report", value)
}

/// The probe has to report `value` of its only item.
fn reported(value: &Value) -> Expected {
    Expected::Ok(json!([report(value)]))
}

fn fault(kinds: &'static [&'static str]) -> Expected {
    Expected::Fault(kinds, "host-probe")
}

fn scored(total: f64) -> Value {
    json!({"scored": {"total": total, "components": []}})
}

fn rejected(code: &str, detail: &Value) -> Value {
    json!({"rejected": {"code": code, "detail": detail}})
}

fn score(episodes: &[Value]) -> Option<Value> {
    Some(json!({"op": "score", "episodes": episodes}))
}

fn case(name: &'static str, rule: &'static str, mode: &str, request: Option<Value>, expected: Expected) -> Case {
    Case { name, rule, probe: Probe::Plain, settings: json!({"mode": mode}), limits: json!({}), request, expected }
}

/// An episode without a query is scored.
fn of_one(name: &'static str, rule: &'static str, mode: &str, expected: Expected) -> Case {
    case(name, rule, mode, score(&[bare_episode("a/0", "")]), expected)
}

/// All cases with probes, in the order in which they run.
pub(crate) fn all() -> Vec<Case> {
    [arguments(), settings(), isolation(), faults(), filters_and_prompts(), host_functions()]
        .into_iter()
        .flatten()
        .collect()
}

fn arguments() -> Vec<Case> {
    let full = [full_episode("g/0", "g", 0), bare_episode("h", "")];
    let echo = |name, probe: Probe| {
        let expected = Expected::Ok(full.iter().map(|one| report(&probe.stripped(one))).collect());
        Case { probe, ..case(name, PASSES_ALL, "echo", score(&full), expected) }
    };
    let in_order: Vec<_> =
        ["0.25", "0", "1", "0.1"].iter().map(|query| bare_episode(&format!("e/{query}"), query)).collect();
    let grouped =
        [("a/0", "a", 0), ("b/0", "b", 0), ("a/1", "a", 1)].map(|(id, group, index)| full_episode(id, group, index));
    let sizes = |sizes: &[u32]| Expected::Ok(sizes.iter().map(|size| report(&json!(size))).collect());
    let (order, apart) =
        ("a list of results has the order of the arguments", "all episodes of a call of score-group have one group_id");
    let alone = "a plugin that imports a host function gets one episode per call";
    let totals = Expected::Ok([0.25, 0.0, 1.0, 0.1].map(scored).into_iter().collect());
    let parts = json!([{"name": "b", "value": 0.1}, {"name": "a", "value": -1e18}]);
    let parts = Expected::Ok(json!([{"scored": {"total": 0.5, "components": parts}}]));
    let rejects = Expected::Ok(json!([rejected("probe_rejects", &json!(""))]));
    vec![
        echo("inputs: response and retrieval", Probe::Plain),
        echo("inputs: columns, baseline and style", Probe::Functions),
        echo("inputs: prompt and judgement", Probe::Group),
        case("results keep the order", order, "", score(&in_order), totals),
        Case {
            probe: Probe::Group,
            ..case("groups are called apart", apart, "n-items", score(&grouped), sizes(&[2, 1, 2]))
        },
        Case {
            probe: Probe::Functions,
            ..case("one episode per call with host functions", alone, "n-items", score(&in_order[..2]), sizes(&[1, 1]))
        },
        of_one("components", "components keep the plugin's order", "parts", parts),
        of_one("rejection", "a rejection is a result", "reject", rejects),
    ]
}

fn settings() -> Vec<Case> {
    let values = json!({"mode": "settings", "text": "胶 \"x\"", "number": 1e-7, "integer": -3, "flag": true, "texts": ["a", "胶"]});
    let seen = json!({"mode": "settings", "text": "胶 \"x\"", "number": 1e-7, "integer": "-3", "flag": "true", "texts": ["a", "胶"]});
    let refused = |name, settings, kinds, text| Case {
        settings,
        ..case(name, SETTINGS_RULE, "", None, Expected::Fault(kinds, text))
    };
    let describe = json!({
        "name": "host-probe", "version": "1.2.3", "kinds": ["prompt", "filter", "reward"],
        "inputs": [{"input": "response", "required": true}, {"input": "retrieval", "required": false}],
        "range": {"min": 0.0, "max": 1.0},
    });
    vec![
        case(
            "describe",
            "describe says what the plugin is",
            "",
            Some(json!({"op": "describe"})),
            Expected::Has(describe),
        ),
        Case { settings: values, ..of_one("settings as text", SETTINGS_RULE, "", reported(&seen)) },
        refused("refused setting", json!({"mode": "settings-refused"}), SETTINGS, "mode"),
        refused("unknown setting", json!({"colour": "red"}), SETTINGS, "colour"),
        refused("panic in check-settings", json!({"mode": "settings-panic"}), TRAP, "host-probe"),
        refused("empty range", json!({"mode": "range-empty"}), RESULT, "host-probe"),
        refused("range of NaN", json!({"mode": "range-nan"}), RESULT, "host-probe"),
        refused("range beyond 1e9", json!({"mode": "range-large"}), RESULT, "host-probe"),
    ]
}

fn isolation() -> Vec<Case> {
    let nothing =
        |name, mode, expected: &Value| of_one(name, NO_IO, mode, Expected::FaultOr(TRAP, json!([report(expected)])));
    let half = || json!([scored(0.5)]);
    let none = reported(&json!({"variables": [], "arguments": []}));
    vec![
        of_one("fresh instance", FRESH, "state", reported(&json!(0))),
        of_one("clocks", DETERMINISTIC, "clock", reported(&json!({"ns": 0, "elapsed_ns": 0}))),
        of_one("arguments and environment", DETERMINISTIC, "environment", none),
        nothing("reading a file", "file", &Value::Null),
        nothing("writing a file", "write", &json!(false)),
        nothing("opening a socket", "socket", &json!(false)),
        of_one("exit", NO_IO, "exit", fault(TRAP)),
        of_one("sleeping", "no call of a guest blocks the host", "sleep", Expected::FaultOr(TRAP_OR_LIMIT, half())),
        of_one("log", "a log has no effect on a result", "log", Expected::Ok(half())),
        of_one("stdout", "what a guest writes has no effect on a result", "output", Expected::Ok(half())),
    ]
}

fn faults() -> Vec<Case> {
    let wrong = |name, mode| of_one(name, CHECKED, mode, Expected::Fault(RESULT, "a/0"));
    let limited = |name, mode, limits: Value, kinds| Case { limits, ..of_one(name, LIMITED, mode, fault(kinds)) };
    let many_names: Vec<_> = (0..6).map(|n| bare_episode(&format!("n/{n}"), &(n * 50).to_string())).collect();
    let one_bad = [bare_episode("a", ""), bare_episode("b", "bad")];
    vec![
        of_one("panic", CONTAINED, "panic", Expected::Fault(TRAP, "on purpose")),
        case("panic at one of two episodes", CONTAINED, "panic-on-bad", score(&one_bad), fault(TRAP)),
        of_one("endless recursion", CONTAINED, "recurse", fault(TRAP_OR_LIMIT)),
        limited(
            "endless loop, by fuel",
            "loop",
            json!({"fuel_per_call": 50_000_000, "fuel_per_item": 50_000_000}),
            LIMIT,
        ),
        limited(
            "endless loop, by time",
            "loop",
            json!({"fuel_per_item": 1_000_000_000_000_000_u64, "timeout_ms": 500}),
            LIMIT,
        ),
        limited("endless allocation", "allocate", json!({"memory_bytes": 32 << 20}), TRAP_OR_LIMIT),
        limited("result of 16 MiB", "flood", json!({"output_bytes": 1 << 20}), LIMIT),
        wrong("total of NaN", "nan"),
        wrong("infinite total", "infinite"),
        wrong("total above the range", "above"),
        wrong("total below the range", "below"),
        wrong("component of NaN", "component-nan"),
        wrong("component of 2e18", "component-large"),
        wrong("invalid name of a component", "component-name"),
        wrong("component twice", "component-repeated"),
        wrong("65 components", "component-65"),
        wrong("invalid code", "code"),
        wrong("empty code", "code-empty"),
        wrong("code of 65 characters", "code-long"),
        wrong("too few results", "one-short"),
        wrong("too many results", "one-more"),
        case("300 names of components", CHECKED, "component-names", score(&many_names), fault(RESULT)),
        of_one("text that is not UTF-8", CHECKED, "utf8", fault(&["result", "trap"])),
    ]
}

fn filters_and_prompts() -> Vec<Case> {
    let sample = |id: &str, query: &str| {
        json!({
            "id": id, "original_query": query, "rewritten_query": "改写", "context": {"user_profile": "女"},
            "hits": [{"text": "t", "reranker_score": 0.5, "rank": 1}], "columns": {"类别": "保健"},
        })
    };
    let samples = [sample("1", "a"), sample("2", "b"), sample("3", "a")];
    let without_columns = |sample: &Value| {
        let mut sample = sample.clone();
        if let Some(fields) = sample.as_object_mut() {
            fields.remove("columns");
        }
        json!({"drop": {"code": "report", "detail": sample}})
    };
    let filter = Some(json!({"op": "filter", "samples": samples}));
    let repeated = json!(["keep", "keep", {"drop": {"code": "repeated", "detail": ""}}]);
    let input = json!({"query": "咋吃", "context": {"history_summary": "鱼油"}, "rewrite": "鱼油 用法"});
    let prompt = Some(json!({"op": "prompt", "task": "judge", "input": input}));
    let made = json!({"messages": [{"role": "system", "content": "probe"}, {"role": "user", "content": {"task": "judge", "input": input}}]});
    let parse = |what: &str, text: &str| Some(json!({"op": format!("parse_{what}"), "text": text}));
    let conversation = "the last message is from the user, a system message only at the start";
    let judged = "a judgement's score is in 0 to 5; a rewrite is never blank";
    let order = "a verdict may depend on the samples before it";
    let rejection = "a rejected task is a rejection, or a fault where the host needs the messages";
    let seen = Expected::Ok(samples.iter().map(without_columns).collect());
    let in_range = Expected::Ok(json!({"judgement": {"score": 4.5, "reason": "理由"}}));
    let refused = |text: &str| Expected::Ok(report(&json!(text)));
    vec![
        case("samples", PASSES_ALL, "echo", filter.clone(), seen),
        case("a filter sees all samples in order", order, "", filter.clone(), Expected::Ok(repeated)),
        case("too few verdicts", CHECKED, "one-short", filter.clone(), fault(RESULT)),
        case("invalid code of a drop", CHECKED, "bad-code", filter, fault(RESULT)),
        case("messages", PASSES_ALL, "", prompt.clone(), Expected::Ok(made)),
        case("rejected task", rejection, "reject", prompt.clone(), Expected::FaultOr(RESULT, report(&Value::Null))),
        case("no messages", conversation, "no-messages", prompt.clone(), fault(RESULT)),
        case("assistant last", conversation, "assistant-last", prompt.clone(), fault(RESULT)),
        case("system message later", conversation, "system-later", prompt, fault(RESULT)),
        case("rewrite", judged, "", parse("rewrite", "“鱼油”"), Expected::Ok(json!({"rewrite": "“鱼油”"}))),
        case("rejected rewrite", judged, "reject", parse("rewrite", "x"), refused("x")),
        case("blank rewrite", judged, "blank", parse("rewrite", "x"), fault(RESULT)),
        case("judgement", judged, "", parse("judgement", "4.5"), in_range),
        case("rejected judgement", judged, "", parse("judgement", "好"), refused("好")),
        case("judgement above 5", judged, "", parse("judgement", "5.5"), fault(RESULT)),
        case("judgement of NaN", judged, "", parse("judgement", "NaN"), fault(RESULT)),
    ]
}

fn host_functions() -> Vec<Case> {
    let user = |text: &str| json!([{"role": "user", "content": text}]);
    let dialogue = json!([{"role": "user", "content": "鱼油"}, {"role": "assistant", "content": "在的"}]);
    let style = json!([{"label": "售前", "probability": 0.75}, {"label": "售后", "probability": 0.25}]);
    let call =
        |request: Value, response: Value| json!({"plugin": "host-probe", "request": request, "response": response});
    let failed = json!({"kind": "timeout", "message": "30 s"});
    let calls = json!({"e": [
        call(json!({"count_tokens": "鱼油"}), json!({"Ok": {"count": 2}})),
        call(json!({"split_tokens": "鱼油"}), json!({"Ok": {"texts": ["鱼", "油"]}})),
        call(json!({"segment_words": "鱼油"}), json!({"Ok": {"texts": ["鱼油"]}})),
        call(json!({"embed": ["鱼油", "b"]}), json!({"Ok": {"vectors": [[1.0, 0.0], [0.0, 1.0]]}})),
        call(json!({"ask_judge": user("鱼油")}), json!({"Err": {"failed": failed}})),
        call(json!({"classify_style": dialogue}), json!({"Ok": {"style": style}})),
    ]});
    let seen = json!({
        "count": {"ok": 2}, "split": {"ok": ["鱼", "油"]}, "segment": {"ok": ["鱼油"]}, "embed": {"ok": [[1.0, 0.0], [0.0, 1.0]]},
        "ask": {"failed": failed}, "classify": {"ok": style},
    });
    let not_configured = json!({"e": [call(json!({"count_tokens": "鱼油"}), json!({"Err": "not_configured"}))]});
    let episode = bare_episode("e", "鱼油");
    let functions = |name, mode: &str, request: Value, expected| Case {
        probe: Probe::Functions,
        limits: json!({"host_calls_per_item": 8}),
        ..case(name, RECORDED, mode, Some(request), expected)
    };
    let count = |n_calls: &str| {
        let calls = json!({"m": [call(json!({"count_tokens": "a"}), json!({"Ok": {"count": 1}}))]});
        json!({"op": "score", "episodes": [bare_episode("m", n_calls)], "calls": calls})
    };
    let turns = json!([{"role": "user", "content": "贵吗"}, {"role": "assistant", "content": "不贵"}]);
    let style_calls = json!({"d": [call(json!({"classify_style": turns}), json!({"Ok": {"style": style}}))]});
    let dialogues = json!({"op": "style", "dialogues": [{"id": "d", "turns": turns}], "calls": style_calls});
    let scoring = |calls: &Value| json!({"op": "score", "episodes": [episode], "calls": calls});
    let none = json!({"failed": {"kind": "not_recorded"}});
    let none = Expected::Has(json!([report(&json!({"count": none, "embed": none}))]));
    let off = Expected::Has(json!([report(&json!({"count": "not_configured"}))]));
    let with_style = reported(&json!({"id": "d", "turns": turns, "style": {"ok": style}}));
    let no_calls = json!({"op": "score", "episodes": [episode]});
    vec![
        functions("recorded host calls", "calls", scoring(&calls), reported(&seen)),
        functions("service that is not configured", "calls", scoring(&not_configured), off),
        functions("host call without a recorded result", "calls", no_calls, none),
        functions("as many host calls as allowed", "many-calls", count("8"), reported(&json!(8))),
        functions("one host call too many", "many-calls", count("9"), fault(LIMIT)),
        functions("dialogue with its style", "echo", dialogues, with_style),
    ]
}
