//! Golden cases of real plugins, sent to a host under test.

use super::{Session, client::Reply};
use crate::golden::{HostTypes, host_call, prompt_task, ranked};
use crate::section::{CheckResult, Violation};
use querl_bundle::Bundle;
use querl_core::episodes;
use querl_core::records::Sample;
use querl_sdk::testing::golden_case::{
    Comparison, ExpectedClass, ExpectedScore, GoldenBody, GoldenCase, GoldenTypes, parse,
};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A plugin with its cases.
pub(super) struct GoldenPlugin {
    name: String,
    component: PathBuf,
    /// Name and text of each file.
    files: Vec<(String, String)>,
}

/// Reads plugins; components of bundles are written to `folder`.
pub(super) fn read(paths: &[PathBuf], folder: &Path) -> Result<Vec<GoldenPlugin>, String> {
    paths.iter().map(|path| read_one(path, folder)).collect()
}

fn read_one(path: &Path, folder: &Path) -> Result<GoldenPlugin, String> {
    let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let at = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let (component, files) = if path.is_dir() {
        let component = match files_in(path, "wasm")?.pop() {
            Some(component) => component,
            None => querl_plugin::build(path).map_err(|error| error.to_string())?.component,
        };
        (component, read_folder(&path.join("golden"))?)
    } else if path.extension().is_some_and(|extension| extension == "querl") {
        let bundle = Bundle::open(path).map_err(|error| at(&error))?;
        let component = folder.join(format!("{name}.wasm"));
        fs::write(&component, bundle.component()).map_err(|error| at(&error))?;
        let text = |(name, bytes): (&str, &[u8])| (name.to_owned(), String::from_utf8_lossy(bytes).into_owned());
        (component, bundle.golden().map(text).collect())
    } else {
        let golden = path.with_file_name("golden");
        let file = golden.join(&name).with_extension("jsonl");
        let files = match fs::read_to_string(&file) {
            Ok(text) => vec![(file.display().to_string(), text)],
            Err(_) => read_folder(&golden.join(&name))?,
        };
        (path.to_owned(), files)
    };
    match files.is_empty() {
        true => Err(at(&"it has no golden cases")),
        false => Ok(GoldenPlugin { name, component, files }),
    }
}

fn read_folder(folder: &Path) -> Result<Vec<(String, String)>, String> {
    let text = |path: PathBuf| match fs::read_to_string(&path) {
        Ok(text) => Ok((path.display().to_string(), text)),
        Err(error) => Err(format!("{}: {error}", path.display())),
    };
    files_in(folder, "jsonl")?.into_iter().map(text).collect()
}

/// The files with this extension, in order.
fn files_in(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == extension));
    paths.sort();
    Ok(paths)
}

/// Golden cases as JSON, with the checks of `querl plugin test`. `FORMAT` is that of the episodes: 2 for plugins of contract 0.1, 3 for
/// those of 0.2.
struct JsonTypes<const FORMAT: u32>;

type Body<const FORMAT: u32> = GoldenBody<JsonTypes<FORMAT>>;

impl<const FORMAT: u32> GoldenTypes for JsonTypes<FORMAT> {
    type Settings = Map<String, Value>;
    type Episode = Value;
    type Sample = Value;
    type Input = Value;
    type Dialogue = Value;
    type Call = Value;

    fn settings(value: Map<String, Value>) -> Result<Map<String, Value>, String> {
        Ok(value)
    }

    fn episode(value: Value) -> Result<Value, String> {
        HostTypes::episode(value.clone())?;
        // Deserialized as a line of an episode file, which fills in the optional fields of a case.
        let line = json!({"format": FORMAT, "episode": value}).to_string();
        let read = episodes::parse(line.as_bytes(), 1)?.ok_or("`episode` is blank")?;
        serde_json::to_value(read.episode).map_err(|error| error.to_string())
    }

    fn samples(value: Value) -> Result<Vec<Value>, String> {
        HostTypes::samples(value.clone())?;
        let samples = value.as_array().cloned().unwrap_or_default();
        samples.into_iter().map(sample).collect()
    }

    fn input(value: Value) -> Result<Value, String> {
        HostTypes::input(value.clone())?;
        Ok(present(value))
    }

    fn dialogue(value: Value) -> Result<Value, String> {
        HostTypes::dialogue(value.clone())?;
        Ok(value)
    }

    fn call(value: Value) -> Result<Value, String> {
        let call = host_call(value)?;
        serde_json::to_value(call).map_err(|error| error.to_string())
    }
}

/// A sample with defaults for the optional fields of a case: context, hits, ranks.
fn sample(mut value: Value) -> Result<Value, String> {
    let fields = value.as_object_mut().ok_or("a sample is no object")?;
    fields.entry("context").or_insert_with(|| json!({}));
    fields.entry("hits").or_insert_with(|| json!([]));
    let mut sample: Sample = serde_json::from_value(value).map_err(|error| format!("`samples`: {error}"))?;
    sample.hits = ranked(sample.hits);
    serde_json::to_value(sample).map(present).map_err(|error| error.to_string())
}

/// Removes unknown values: null, and empty texts that stand for a missing cell of a table.
fn present(mut value: Value) -> Value {
    let fields = value.as_object_mut().into_iter().flatten();
    for (name, field) in fields {
        match field {
            Value::Object(inner) if name == "context" => {
                inner.retain(|_, text| text.as_str() != Some("") && !text.is_null())
            }
            Value::Array(hits) if name == "hits" => {
                for hit in hits.iter_mut().filter_map(Value::as_object_mut) {
                    hit.retain(|key, field| !field.is_null() && (key != "id" || field != ""));
                }
            }
            _ => {}
        }
    }
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|_, field| !field.is_null());
    }
    value
}

impl Session<'_> {
    /// All cases of a plugin.
    pub(super) fn golden(&mut self, plugin: &GoldenPlugin) {
        match self.load_golden(plugin, &json!({})) {
            Ok(contract) if contract.starts_with("0.1.") => self.golden_cases::<2>(plugin),
            Ok(_) => self.golden_cases::<3>(plugin),
            // The plugin may have required settings, which its golden cases contain.
            Err(_) => self.golden_cases::<3>(plugin),
        }
    }

    /// The contract of the plugin.
    fn load_golden(&mut self, plugin: &GoldenPlugin, settings: &Value) -> Result<String, Violation> {
        let request = json!({"op": "load", "component": plugin.component, "settings": settings});
        match self.ask(&request)? {
            Reply::Ok(loaded) => Ok(loaded["contract"].as_str().unwrap_or_default().to_owned()),
            fault => Err(Violation::new(request.to_string(), fault.to_string())),
        }
    }

    fn golden_cases<const FORMAT: u32>(&mut self, plugin: &GoldenPlugin) {
        for (name, text) in &plugin.files {
            for (origin, case) in parse::<JsonTypes<FORMAT>>(text, name) {
                let found = match &case {
                    Ok(case) => self.golden_case(plugin, case),
                    Err(error) => Err(Violation::new(origin.as_str(), error.as_str())),
                };
                let title = case.map_or_else(|_| origin.clone(), |case| case.name);
                self.add(
                    format!("{}: {title}", plugin.name),
                    "a plugin gives the results of its golden cases in every host",
                    found,
                );
            }
        }
    }

    fn golden_case<const FORMAT: u32>(
        &mut self,
        plugin: &GoldenPlugin,
        case: &GoldenCase<JsonTypes<FORMAT>>,
    ) -> CheckResult {
        self.load_golden(plugin, &Value::Object(case.settings.clone()))?;
        let request = request(&case.body, &case.calls);
        match self.ask(&request)? {
            Reply::Ok(result) => compare(&case.body, &result).map(|()| String::new()).map_err(|expected| Violation {
                expected: Some(expected),
                ..Violation::new(request.to_string(), result.to_string())
            }),
            fault => Err(Violation::new(request.to_string(), fault.to_string())),
        }
    }
}

/// The request of a case, with the calls of the item, group or batch.
fn request<const FORMAT: u32>(body: &Body<FORMAT>, calls: &[Value]) -> Value {
    let calls_of = |id: &Value| json!({id.as_str().unwrap_or_default(): calls});
    match body {
        GoldenBody::Reward(episode, _) => {
            json!({"op": "score", "episodes": [episode], "calls": calls_of(&episode["id"])})
        }
        GoldenBody::Group(episodes, _) => {
            json!({"op": "score", "episodes": episodes, "calls": calls_of(&episodes[0]["group_id"])})
        }
        GoldenBody::Filter(samples, _) => json!({"op": "filter", "samples": samples, "calls": {"": calls}}),
        GoldenBody::Messages(task, input, _) => {
            json!({"op": "prompt", "task": prompt_task(*task).name(), "input": input})
        }
        GoldenBody::ParseRewrite(text, _) => json!({"op": "parse_rewrite", "text": text}),
        GoldenBody::ParseJudgement(text, _) => json!({"op": "parse_judgement", "text": text}),
        GoldenBody::Style(dialogue, classes, _) => {
            let class = |class: &ExpectedClass| json!({"label": class.label, "probability": class.probability});
            let response = match classes {
                Some(classes) => json!({"Ok": {"style": classes.iter().map(class).collect::<Vec<_>>()}}),
                None => json!({"Err": "not_configured"}),
            };
            let call = json!({"plugin": "", "request": {"classify_style": dialogue["turns"]}, "response": response});
            let id = dialogue["id"].as_str().unwrap_or_default();
            json!({"op": "style", "dialogues": [dialogue], "calls": {id: [call]}})
        }
    }
}

fn compare<const FORMAT: u32>(body: &Body<FORMAT>, result: &Value) -> Comparison {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let rejected = |value: &Value| value.get("rejected").map(|rejection| text(&rejection["code"]));
    match body {
        GoldenBody::Reward(_, expected) | GoldenBody::Style(_, _, expected) => compare_score(expected, &result[0]),
        GoldenBody::Group(_, expected) => {
            expected.iter().enumerate().try_for_each(|(index, expected)| compare_score(expected, &result[index]))
        }
        GoldenBody::Filter(_, expected) => expected.iter().enumerate().try_for_each(|(index, expected)| {
            expected.compare(result[index].get("drop").map(|drop| text(&drop["code"])).as_deref())
        }),
        GoldenBody::Messages(_, _, expected) => {
            let messages = result["messages"].as_array().cloned().unwrap_or_default();
            let pairs: Vec<_> =
                messages.iter().map(|message| (text(&message["role"]), text(&message["content"]))).collect();
            expected.compare(&pairs.iter().map(|(role, content)| (role.as_str(), content.as_str())).collect::<Vec<_>>())
        }
        GoldenBody::ParseRewrite(_, expected) => match rejected(result) {
            Some(code) => expected.compare(Err(&code)),
            None => expected.compare(Ok(&text(&result["rewrite"]))),
        },
        GoldenBody::ParseJudgement(_, expected) => match rejected(result) {
            Some(code) => expected.compare(Err(&code)),
            None => {
                let judged = &result["judgement"];
                expected.compare(Ok((judged["score"].as_f64().unwrap_or(f64::NAN), &text(&judged["reason"]))))
            }
        },
    }
}

fn compare_score(expected: &ExpectedScore, result: &Value) -> Comparison {
    if let Some(rejection) = result.get("rejected") {
        return expected.compare(Err(rejection["code"].as_str().unwrap_or_default()));
    }
    let score = &result["scored"];
    let component = |name: &str| {
        let parts = score["components"].as_array()?;
        parts.iter().find(|part| part["name"] == name)?["value"].as_f64()
    };
    expected.compare(Ok((score["total"].as_f64().unwrap_or(f64::NAN), &component)))
}
