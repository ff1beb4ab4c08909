//! A plugin for tests of hosts (`querl-conformance --host`). The setting `mode` selects its behaviour: `echo` reports the arguments in the
//! JSON form of the contract; other modes violate one rule each, or report what the host exposes. Reports are details of rejections.

// Each feature has its own world and uses a part of this file.
#![allow(dead_code, unused_imports)]

mod breach;
mod json;

#[cfg(not(any(feature = "functions", feature = "group")))]
mod bindings {
    wit_bindgen::generate!({
        inline: "package querl:probe; world probe {
            import querl:plugin/settings@0.2.0;
            import querl:plugin/log@0.2.0;
            export querl:plugin/info@0.2.0;
            export querl:plugin/rewards@0.2.0;
            export querl:plugin/filters@0.2.0;
            export querl:plugin/prompts@0.2.0;
        }",
        path: "../../../wit/0.2.0",
        generate_all,
    });
}

#[cfg(feature = "functions")]
mod bindings {
    wit_bindgen::generate!({
        inline: "package querl:probe; world probe {
            import querl:plugin/settings@0.2.0;
            import querl:plugin/log@0.2.0;
            import querl:plugin/tokens@0.2.0;
            import querl:plugin/words@0.2.0;
            import querl:plugin/similarity@0.2.0;
            import querl:plugin/judge@0.2.0;
            import querl:plugin/style-model@0.2.0;
            export querl:plugin/info@0.2.0;
            export querl:plugin/rewards@0.2.0;
            export querl:plugin/style-scores@0.2.0;
        }",
        path: "../../../wit/0.2.0",
        generate_all,
    });
}

#[cfg(feature = "group")]
mod bindings {
    wit_bindgen::generate!({
        inline: "package querl:probe; world probe {
            import querl:plugin/settings@0.2.0;
            import querl:plugin/log@0.2.0;
            export querl:plugin/info@0.2.0;
            export querl:plugin/group-rewards@0.2.0;
        }",
        path: "../../../wit/0.2.0",
        generate_all,
    });
}

use bindings::exports::querl::plugin::info;
use bindings::querl::plugin::settings;
use bindings::querl::plugin::types::{Bounds, Component, Rejection, Score};
use serde_json::{Value, json};

struct Probe;

bindings::export!(Probe with_types_in bindings);

/// The setting `mode`.
fn mode() -> String {
    settings::get("mode").unwrap_or_default()
}

fn report(value: &Value) -> Rejection {
    Rejection { code: "report".into(), detail: value.to_string() }
}

fn score(total: f64) -> Score {
    Score { total, components: Vec::new() }
}

const KEYS: [&str; 6] = ["mode", "text", "number", "integer", "flag", "texts"];

impl info::Guest for Probe {
    fn describe() -> info::Description {
        let setting = |key: &str, value_type, default: &str| info::Setting {
            key: key.into(),
            value_type,
            default: Some(default.into()),
            minimum: None,
            maximum: None,
            choices: None,
            doc: None,
        };
        let input = |input, required| info::InputUse { input, required };
        let (kinds, inputs) = if cfg!(feature = "group") {
            let inputs = vec![input(info::Input::Prompt, false), input(info::Input::Judgement, false)];
            (vec![info::Kind::GroupReward], inputs)
        } else if cfg!(feature = "functions") {
            let inputs = [info::Input::Columns, info::Input::Baseline, info::Input::Style];
            (vec![info::Kind::Reward, info::Kind::StyleScorer], inputs.map(|name| input(name, false)).into())
        } else {
            let inputs = vec![input(info::Input::Response, true), input(info::Input::Retrieval, false)];
            (vec![info::Kind::Prompt, info::Kind::Filter, info::Kind::Reward], inputs)
        };
        info::Description {
            name: "host-probe".into(),
            version: "1.2.3".into(),
            kinds,
            settings: vec![
                setting("mode", info::SettingType::Text, ""),
                setting("text", info::SettingType::Text, ""),
                setting("number", info::SettingType::Number, "0"),
                setting("integer", info::SettingType::Integer, "0"),
                setting("flag", info::SettingType::Flag, "false"),
                setting("texts", info::SettingType::Texts, "[]"),
            ],
            range: Some(Bounds { min: 0.0, max: 1.0 }),
            inputs,
        }
    }

    fn check_settings() -> Result<(), info::SettingError> {
        for key in KEYS {
            settings::get(key);
        }
        match mode().as_str() {
            "settings-refused" => {
                Err(info::SettingError { key: "mode".into(), message: "expected another mode".into() })
            }
            "settings-panic" => panic!("the probe panics in check-settings"),
            _ => Ok(()),
        }
    }
}

fn range() -> Bounds {
    match mode().as_str() {
        "range-empty" => Bounds { min: 1.0, max: 1.0 },
        "range-nan" => Bounds { min: f64::NAN, max: 1.0 },
        "range-large" => Bounds { min: 0.0, max: 1e10 },
        _ => Bounds { min: 0.0, max: 1.0 },
    }
}

/// Results of a batch of items `(query, arguments passed by the host)`.
fn results(items: Vec<(String, Value)>) -> Vec<Result<Score, Rejection>> {
    let mode = mode();
    let n_items = items.len();
    let item = |(query, seen): (String, Value)| match mode.as_str() {
        "echo" => Err(report(&seen)),
        "settings" => {
            let values = KEYS.iter().map(|key| ((*key).to_owned(), json!(settings::get(key))));
            Err(report(&Value::Object(values.collect())))
        }
        "n-items" => Err(report(&json!(n_items))),
        #[cfg(feature = "functions")]
        "calls" => Err(report(&functions::all(&query))),
        #[cfg(feature = "functions")]
        "many-calls" => Err(report(&functions::many(&query))),
        mode => breach::result(mode, &query),
    };
    let mut results: Vec<_> = items.into_iter().map(item).collect();
    match mode.as_str() {
        "one-short" => drop(results.pop()),
        "one-more" => results.push(Ok(score(0.5))),
        _ => {}
    }
    results
}

#[cfg(not(feature = "group"))]
impl bindings::exports::querl::plugin::rewards::Guest for Probe {
    fn range() -> Bounds {
        range()
    }

    fn score_batch(episodes: Vec<bindings::querl::plugin::types::Episode>) -> Vec<Result<Score, Rejection>> {
        results(episodes.into_iter().map(|episode| (episode.query.clone(), json::episode(&episode))).collect())
    }
}

#[cfg(feature = "group")]
impl bindings::exports::querl::plugin::group_rewards::Guest for Probe {
    fn range() -> Bounds {
        range()
    }

    fn score_group(episodes: Vec<bindings::querl::plugin::types::Episode>) -> Vec<Result<Score, Rejection>> {
        results(episodes.into_iter().map(|episode| (episode.query.clone(), json::episode(&episode))).collect())
    }
}

#[cfg(not(any(feature = "functions", feature = "group")))]
mod tenant {
    use super::*;
    use bindings::exports::querl::plugin::filters::{self, Sample, Verdict};
    use bindings::exports::querl::plugin::prompts::{self, Input, Task};
    use bindings::querl::plugin::types::{JudgeScore, Message, Role};

    impl filters::Guest for Probe {
        fn check_batch(samples: Vec<Sample>) -> Vec<Verdict> {
            let mut seen = Vec::new();
            let mut verdict = |sample: Sample| match mode().as_str() {
                "echo" => Verdict::Drop(report(&json::sample(&sample))),
                "bad-code" => Verdict::Drop(Rejection { code: "Bad code".into(), detail: String::new() }),
                _ if seen.contains(&sample.original_query) => {
                    Verdict::Drop(Rejection { code: "repeated".into(), detail: String::new() })
                }
                _ => {
                    seen.push(sample.original_query);
                    Verdict::Keep
                }
            };
            let mut verdicts: Vec<_> = samples.into_iter().map(&mut verdict).collect();
            if mode() == "one-short" {
                verdicts.pop();
            }
            verdicts
        }
    }

    impl prompts::Guest for Probe {
        fn messages(task: Task, input: Input) -> Result<Vec<Message>, Rejection> {
            let message = |role, content: &str| Message { role, content: content.into() };
            match mode().as_str() {
                "no-messages" => Ok(Vec::new()),
                "assistant-last" => Ok(vec![message(Role::Assistant, "")]),
                "system-later" => Ok(vec![message(Role::User, ""), message(Role::System, ""), message(Role::User, "")]),
                "reject" => Err(report(&Value::Null)),
                _ => {
                    let seen = json!({"task": json::task(&task), "input": json::prompt_input(&input)}).to_string();
                    Ok(vec![message(Role::System, "probe"), message(Role::User, &seen)])
                }
            }
        }

        fn parse_rewrite(text: String) -> Result<String, Rejection> {
            match mode().as_str() {
                "blank" => Ok("  ".into()),
                "reject" => Err(report(&json!(text))),
                _ => Ok(text),
            }
        }

        fn parse_judgement(text: String) -> Result<JudgeScore, Rejection> {
            match text.parse() {
                Ok(score) => Ok(JudgeScore { score, reason: "理由".into() }),
                Err(_) => Err(report(&json!(text))),
            }
        }
    }
}

#[cfg(feature = "functions")]
mod functions {
    use super::*;
    use bindings::exports::querl::plugin::style_scores::{self, Dialogue};
    use bindings::querl::plugin::calls::CallError;
    use bindings::querl::plugin::types::{Message, Role};
    use bindings::querl::plugin::{judge, similarity, style_model, tokens, words};

    fn result<T>(result: Result<T, CallError>, value: impl Fn(T) -> Value) -> Value {
        match result {
            Ok(found) => json!({"ok": value(found)}),
            Err(CallError::NotConfigured) => json!("not_configured"),
            Err(CallError::Failed(failure)) => json!({"failed": json::failure(&failure)}),
        }
    }

    fn user(text: &str) -> Message {
        Message { role: Role::User, content: text.into() }
    }

    /// The result of each host function for a text.
    pub(super) fn all(text: &str) -> Value {
        let dialogue = [user(text), Message { role: Role::Assistant, content: "在的".into() }];
        json!({
            "count": result(tokens::count(text), |count| json!(count)),
            "split": result(tokens::split(text), |texts| json!(texts)),
            "segment": result(words::segment(text), |texts| json!(texts)),
            "embed": result(similarity::embed(&[text.to_owned(), "b".into()]), |vectors| json!(vectors)),
            "ask": result(judge::ask(&[user(text)]), |answer| json!(answer)),
            "classify": result(style_model::classify(&dialogue), |classes| json::style(&classes)),
        })
    }

    /// Calls `tokens.count` as often as the text says.
    pub(super) fn many(text: &str) -> Value {
        let n_calls: u32 = text.parse().unwrap_or(0);
        json!((0..n_calls).map(|_| tokens::count("a").unwrap_or(0)).sum::<u32>())
    }

    impl style_scores::Guest for Probe {
        fn score_batch(dialogues: Vec<Dialogue>) -> Vec<Result<Score, Rejection>> {
            let seen = |dialogue: Dialogue| {
                let classes = result(style_model::classify(&dialogue.turns), |classes| json::style(&classes));
                let turns: Vec<_> = dialogue.turns.iter().map(json::message).collect();
                let query = dialogue.turns.first().map(|turn| turn.content.clone()).unwrap_or_default();
                (query, json!({"id": dialogue.id, "turns": turns, "style": classes}))
            };
            results(dialogues.into_iter().map(seen).collect())
        }
    }
}
