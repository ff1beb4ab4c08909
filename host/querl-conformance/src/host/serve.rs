//! querl's own host behind the protocol of docs/spec/host-protocol.md: `querl plugin host`.

use crate::golden::prompt_task;
use crate::subject::recorded;
use querl_core::config::PluginLimits;
use querl_core::ports::{
    FaultKind, Filter, HostFunctions, InputUse, PluginFault, PromptInput, Prompts, RewardModel, StyleScorer,
};
use querl_core::records::{
    Context, Dialogue, Episode, HostCall, HostCallError, HostRequest, HostResponse, Rejection, Sample,
};
use querl_plugin::{
    Compiler, HostOptions, Plugin, PluginError, PluginHost, PluginKind, PluginPort, PluginSettings, Rechecks,
};
use querl_sdk::testing::golden_case::GoldenTask;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Serves requests of the host protocol, one JSON object a line, until the request `end` or the end of `input`.
///
/// # Errors
/// `input` cannot be read or `output` written.
pub fn serve_host(input: impl BufRead, mut output: impl Write, compiler: &Compiler) -> std::io::Result<()> {
    let mut ports = None;
    for line in input.lines() {
        let line = line?;
        let reply = match serde_json::from_str(&line) {
            Ok(Request::End) => {
                return writeln!(output, "{}", json!({"ok": null}));
            }
            Ok(Request::Load(load)) => Ports::open(load, compiler).map(|opened| {
                let contract = opened.plugin.description().contract.clone();
                ports = Some(opened);
                json!({"contract": contract})
            }),
            Ok(request) => match &ports {
                Some(ports) => ports.answer(request),
                None => Err(refused("load", "no plugin is loaded")),
            },
            Err(error) => Err(refused("host", &format!("not a request of the protocol: {error}"))),
        };
        let reply = reply.map_or_else(
            |(kind, message)| json!({"fault": {"kind": kind, "message": message}}),
            |ok| json!({"ok": ok}),
        );
        writeln!(output, "{reply}")?;
        output.flush()?;
    }
    Ok(())
}

/// Kind and message of a fault.
type Fault = (&'static str, String);

fn refused(kind: &'static str, message: &str) -> Fault {
    (kind, message.to_owned())
}

fn of_call(fault: PluginFault) -> Fault {
    let kind = match fault.kind {
        FaultKind::Trap => "trap",
        FaultKind::Limit | FaultKind::TooManyDropped => "limit",
        FaultKind::Result => "result",
        FaultKind::Host => "host",
    };
    (kind, fault.to_string())
}

fn of_plugin(error: PluginError) -> Fault {
    match error {
        PluginError::Fault(fault) => of_call(fault),
        PluginError::Setting { .. } => ("settings", error.to_string()),
        _ => ("load", error.to_string()),
    }
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Request {
    Load(Load),
    Describe,
    Score {
        episodes: Vec<Episode>,
        #[serde(default)]
        calls: HashMap<String, Vec<HostCall>>,
    },
    Filter {
        samples: Vec<SampleForm>,
        #[serde(default)]
        calls: HashMap<String, Vec<HostCall>>,
    },
    Prompt {
        task: GoldenTask,
        input: Input,
    },
    ParseRewrite {
        text: String,
    },
    ParseJudgement {
        text: String,
    },
    Style {
        dialogues: Vec<Dialogue>,
        #[serde(default)]
        calls: HashMap<String, Vec<HostCall>>,
    },
    End,
}

#[derive(Deserialize)]
struct Load {
    component: PathBuf,
    #[serde(default)]
    settings: PluginSettings,
    #[serde(default)]
    limits: PluginLimits,
}

/// A sample whose context may be left out.
#[derive(Deserialize)]
struct SampleForm {
    #[serde(default)]
    context: Context,
    #[serde(flatten)]
    fields: serde_json::Map<String, Value>,
}

impl SampleForm {
    fn sample(mut self) -> Result<Sample, Fault> {
        self.fields.insert("context".into(), json!(self.context));
        serde_json::from_value(Value::Object(self.fields))
            .map_err(|error| refused("host", &format!("not a sample: {error}")))
    }
}

#[derive(Deserialize)]
struct Input {
    query: String,
    #[serde(default)]
    context: Context,
    rewrite: Option<String>,
}

/// The ports of a loaded plugin.
struct Ports {
    plugin: Plugin,
    reward: Option<Box<dyn RewardModel>>,
    filter: Option<Box<dyn Filter>>,
    prompts: Option<Box<dyn Prompts>>,
    style: Option<Box<dyn StyleScorer>>,
    recorded: Arc<Recorded>,
}

impl Ports {
    /// Loads the plugin in a new host, because a host counts the names of components over its lifetime.
    fn open(load: Load, compiler: &Compiler) -> Result<Self, Fault> {
        let options = HostOptions {
            limits: load.limits,
            compiler: compiler.clone(),
            rechecks: Rechecks::Off,
            n_slots: 1,
            ..HostOptions::default()
        };
        let host = PluginHost::new(options).map_err(of_plugin)?;
        let plugin = host.load(&load.component).map_err(of_plugin)?;
        let recorded = Arc::new(Recorded::default());
        let functions = || Some(recorded.clone() as Arc<dyn HostFunctions>);
        let mut ports = Self {
            plugin: plugin.clone(),
            reward: None,
            filter: None,
            prompts: None,
            style: None,
            recorded: recorded.clone(),
        };
        let settings = &load.settings;
        for kind in plugin.kinds() {
            let opened = match kind {
                PluginKind::Reward | PluginKind::GroupReward => {
                    let port = PluginPort::reward().with_functions(functions());
                    host.open(&plugin, settings, port).map(|reward| ports.reward = Some(reward))
                }
                PluginKind::Filter => {
                    let port = PluginPort::filter().with_functions(functions());
                    host.open(&plugin, settings, port).map(|filter| ports.filter = Some(filter))
                }
                PluginKind::Prompt => {
                    host.open(&plugin, settings, PluginPort::prompts()).map(|prompts| ports.prompts = Some(prompts))
                }
                PluginKind::StyleScorer => {
                    let port = PluginPort::style_scorer(None).with_functions(functions());
                    host.open(&plugin, settings, port).map(|style| ports.style = Some(style))
                }
            };
            opened.map_err(of_plugin)?;
        }
        Ok(ports)
    }

    fn answer(&self, request: Request) -> Result<Value, Fault> {
        match request {
            Request::Load(_) | Request::End => Err(refused("host", "internal error, please report it")),
            Request::Describe => Ok(self.describe()),
            Request::Score { episodes, calls } => {
                self.recorded.replace(calls);
                let scored = port(self.reward.as_deref())?.score_batch(&episodes).map_err(of_call)?;
                Ok(scored.into_iter().map(|scored| outcome("scored", scored)).collect())
            }
            Request::Filter { samples, calls } => {
                self.recorded.replace(calls);
                let samples: Vec<_> = samples.into_iter().map(SampleForm::sample).collect::<Result<_, _>>()?;
                let verdicts = port(self.filter.as_deref())?.check_batch(&samples).map_err(of_call)?;
                Ok(json!(verdicts))
            }
            Request::Prompt { task, input } => {
                let input =
                    PromptInput { query: &input.query, context: &input.context, rewrite: input.rewrite.as_deref() };
                let made = port(self.prompts.as_deref())?.messages(prompt_task(task), &input).map_err(of_call)?;
                Ok(json!({"messages": made}))
            }
            Request::ParseRewrite { text } => {
                let parsed = port(self.prompts.as_deref())?.parse_rewrite(&text).map_err(of_call)?;
                Ok(outcome("rewrite", parsed))
            }
            Request::ParseJudgement { text } => {
                let parsed = port(self.prompts.as_deref())?.parse_judgement(&text).map_err(of_call)?;
                Ok(outcome("judgement", parsed.map(|judged| json!({"score": judged.score, "reason": judged.reason}))))
            }
            Request::Style { dialogues, calls } => {
                self.recorded.replace(calls);
                let scored = port(self.style.as_deref())?.score_batch(&dialogues).map_err(of_call)?;
                Ok(scored.into_iter().map(|scored| outcome("scored", scored)).collect())
            }
        }
    }

    fn describe(&self) -> Value {
        let description = self.plugin.description();
        let kinds: Vec<_> = description.kinds.iter().map(|kind| kind.name().replace('-', "_")).collect();
        let range =
            self.reward.as_ref().map(|reward| reward.range()).map(|range| json!({"min": range.min, "max": range.max}));
        let input = |(name, used): (&str, InputUse)| json!({"input": name, "required": used == InputUse::Required});
        json!({
            "name": description.name, "version": description.version, "kinds": kinds, "range": range,
            "inputs": description.inputs.used().map(input).collect::<Vec<_>>(),
        })
    }
}

fn port<P: ?Sized>(port: Option<&P>) -> Result<&P, Fault> {
    port.ok_or_else(|| refused("load", "the plugin is of another kind"))
}

/// A value under its name, or a rejection.
fn outcome<T: serde::Serialize>(name: &str, outcome: Result<T, Rejection>) -> Value {
    match outcome {
        Ok(value) => json!({name: value}),
        Err(rejection) => json!({"rejected": rejection}),
    }
}

/// Recorded host calls by the item's id.
#[derive(Default)]
struct Recorded(Mutex<HashMap<String, Vec<HostCall>>>);

impl Recorded {
    fn replace(&self, calls: HashMap<String, Vec<HostCall>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = calls;
    }
}

impl HostFunctions for Recorded {
    fn call(&self, _: &str, item_id: &str, request: &HostRequest) -> Result<HostResponse, HostCallError> {
        let calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recorded(calls.get(item_id).map_or(&[], Vec::as_slice), request)
    }
}
