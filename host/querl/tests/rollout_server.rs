//! `rl` with a rollout server: vLLM's API over the engine of querl-model, and servers that violate the API.
#![allow(clippy::unwrap_used)]

mod support;

use querl_faulty::{Answer, FaultyServer, RecordedRequest};
use querl_model::{
    Decoder, Decoding, Engine, EngineSettings, Generated, GenerationRequest, LoraAdapter, SamplingSettings,
    TextTokenizer, Weights,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{LazyLock, Mutex};
use support::Project;
use support::results::{copy, prepared};

/// A model and its loaded adapters.
struct ServedModel {
    decoder: Decoder,
    tokenizer: TextTokenizer,
    adapters: Mutex<BTreeMap<String, LoraAdapter>>,
}

fn refusal(status: u16, message: &str) -> Answer {
    Answer::json(status, &json!({"error": {"message": message}}))
}

impl ServedModel {
    fn load(folder: &Path) -> Self {
        let decoder = Decoder::load(folder, Weights::Frozen).unwrap();
        Self { decoder, tokenizer: TextTokenizer::load(folder).unwrap(), adapters: Mutex::default() }
    }

    fn answer(&self, request: &RecordedRequest) -> Answer {
        let body = request.json();
        let name = body["lora_name"].as_str().unwrap_or_default();
        let mut adapters = self.adapters.lock().unwrap();
        match request.path.as_str() {
            "/v1/models" => {
                let adapters = adapters.keys().map(|name| json!({"id": name, "parent": "tiny"}));
                let models: Vec<Value> = [json!({"id": "tiny", "parent": null})].into_iter().chain(adapters).collect();
                Answer::json(200, &json!({"data": models}))
            }
            "/v1/load_lora_adapter" if adapters.contains_key(name) => refusal(400, "has already been loaded"),
            "/v1/load_lora_adapter" => {
                let path = Path::new(body["lora_path"].as_str().unwrap());
                let adapter = LoraAdapter::load(path, self.decoder.config()).unwrap();
                adapters.insert(name.into(), adapter.for_decoder(&self.decoder).unwrap());
                Answer::text(200, "text/plain", "Success: the adapter was added.")
            }
            "/v1/unload_lora_adapter" => match adapters.remove(name) {
                Some(_) => Answer::text(200, "text/plain", "Success: the adapter was removed."),
                None => refusal(404, "the adapter cannot be found"),
            },
            "/v1/completions" => match adapters.get(body["model"].as_str().unwrap()) {
                Some(adapter) => Answer::json(200, &self.completion(&body, adapter)),
                None => refusal(404, "the model does not exist"),
            },
            _ => refusal(404, "Not Found"),
        }
    }

    fn completion(&self, body: &Value, adapter: &LoraAdapter) -> Value {
        let prompt: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
        let temperature = body["temperature"].as_f64().unwrap();
        let (decoding, temperature) = match temperature == 0.0 {
            true => (Decoding::Greedy, 1.0),
            false => (Decoding::Sample, temperature),
        };
        let number = |key: &str| usize::try_from(body[key].as_i64().unwrap()).unwrap();
        let sampling = SamplingSettings {
            temperature,
            min_new_tokens: number("min_tokens"),
            max_new_tokens: number("max_tokens"),
            ..SamplingSettings::default()
        };
        let (seed, n) = (body["seed"].as_i64().unwrap().cast_unsigned(), number("n"));
        let mut engine = Engine::new(&self.decoder, EngineSettings::default()).unwrap();
        engine.set_policy(Some(adapter), 0).unwrap();
        let request = GenerationRequest { prompt: &prompt, seed, n };
        let responses = engine.generate(&[request], decoding, &sampling, &self.tokenizer).unwrap().remove(0);
        let choice = |(index, response): (usize, &Generated)| {
            json!({
                "index": index, "text": self.tokenizer.decode(&response.token_ids).unwrap(),
                "finish_reason": if response.truncated { "length" } else { "stop" },
                "token_ids": response.token_ids, "prompt_token_ids": prompt,
                "logprobs": {"token_logprobs": response.behaviour_logprobs},
            })
        };
        json!({"choices": responses.iter().enumerate().map(choice).collect::<Vec<_>>()})
    }
}

/// A server of the tests' model; `change` may modify its responses.
fn server(change: fn(&RecordedRequest, Answer) -> Answer) -> FaultyServer {
    let model = ServedModel::load(support::model());
    FaultyServer::start(move |request| change(request, model.answer(request)).into())
}

/// A project with finished fine-tuning.
fn project() -> Project {
    static TRAINED: LazyLock<Project> = LazyLock::new(|| {
        let project = Project::new();
        copy(&prepared().path("run"), &project.path("run"));
        project.querl(&["run", "querl.toml", "--to", "sft"]).ok();
        project
    });
    let project = Project::new();
    copy(&TRAINED.path("run"), &project.path("run"));
    project
}

fn with_server(url: &str) -> Project {
    let project = project();
    let section =
        format!("[rollout]\nengine = \"openai\"\nbase_url = \"{url}/v1\"\nmodel = \"tiny\"\nmax_retries = 0\n[eval]\n");
    project.edit("[eval]\n", &section);
    project
}

/// Id, response and score of each episode of the first step and of the evaluation before it.
fn first_episodes(project: &Project) -> Vec<Value> {
    let episodes = project.rows("run/episodes.jsonl").into_iter().filter(|row| row["step"].as_u64().unwrap() <= 1);
    episodes
        .map(|row| json!([row["episode"]["id"], row["episode"]["response"], row["outcome"]["scored"]["total"]]))
        .collect()
}

fn rl_metrics(project: &Project) -> Vec<Value> {
    project.rows("run/metrics.jsonl").into_iter().filter(|row| row["stage"] == "rl").collect()
}

#[test]
fn rollouts_of_a_server_with_the_same_seeds_are_those_of_the_local_engine() {
    let server = server(|_, answer| answer);
    let (local, served) = (project(), with_server(&server.url()));
    let samples = ["run", "querl.toml", "--to", "rl", "--set", "rl.n_samples=2"];
    local.querl(&samples).ok();
    served.querl(&samples).ok();
    let episodes = first_episodes(&served);
    assert!(episodes.len() > 8, "{episodes:?}");
    assert_eq!(episodes, first_episodes(&local));
    let (metrics, expected) = (rl_metrics(&served), rl_metrics(&local));
    assert_eq!(metrics.len(), expected.len());
    for row in &metrics {
        let values = row.as_object().unwrap();
        assert!(values.iter().all(|(name, value)| name == "stage" || value.is_number()), "{row}");
    }
    let (first, of_local) = (&metrics[1], &expected[1]);
    for name in ["avg_reward", "actor/pg_loss", "actor/entropy", "actor/ref_kl", "critic/returns/mean"] {
        let (found, expected) = (first[name].as_f64().unwrap(), of_local[name].as_f64().unwrap());
        assert!((found - expected).abs() < 1e-3, "{name}: {found}, locally {expected}");
    }
    let steps: Vec<&Value> = metrics.iter().filter(|row| row.get("actor/lr").is_some()).collect();
    assert_eq!(steps.len(), 2);
    for row in steps {
        assert!(row["rollout_corr/k3_kl"].as_f64().unwrap().abs() < 1e-6, "{row}");
        assert!((row["rollout_corr/rollout_is_mean"].as_f64().unwrap() - 1.0).abs() < 1e-3, "{row}");
        assert!(row.get("rollout_probs_diff").is_none(), "{row}");
    }

    // One adapter before the first step and one after each step. The previous one is unloaded first, the last one at the end.
    let requests = server.requests();
    let handovers = requests.iter().filter(|request| request.path != "/v1/completions");
    let shown = |request: &RecordedRequest| {
        let body = request.json();
        let version = body["lora_name"].as_str().unwrap_or_default().rsplit('-').next().unwrap().to_owned();
        format!("{} {version}", request.path.trim_start_matches("/v1/").trim_end_matches("_lora_adapter"))
    };
    let expected = ["models ", "load v0", "unload v0", "load v1", "unload v1", "load v2", "unload v2"];
    assert_eq!(handovers.map(shown).collect::<Vec<_>>(), expected);
    let path = requests[1].json()["lora_path"].as_str().unwrap().to_owned();
    assert!(path.ends_with("run/rl/rollout/v0"), "{path}");
    assert!(!served.path("run/rl/rollout").exists() && !served.path("run/rl/state").exists());

    let again = served.querl(&samples).ok();
    assert!(again.stderr.contains("rl: finished earlier, skipped"), "{again:#?}");
    let moved = served.querl(&[&samples[..], &["--set", "rollout.base_url='http://127.0.0.1:9/v1'"]].concat()).ok();
    assert!(moved.stderr.contains("rl: finished earlier, skipped"), "another address is no other input: {moved:#?}");
}

/// Modifies the first choice of a completion.
fn changed(request: &RecordedRequest, answer: Answer, change: fn(&mut Value)) -> Answer {
    if request.path != "/v1/completions" {
        return answer;
    }
    let mut body: Value = serde_json::from_slice(&answer.body).unwrap();
    change(&mut body["choices"][0]);
    Answer::json(answer.status, &body)
}

#[test]
fn a_server_that_cannot_be_used_is_one_sentence() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let down = with_server(&url).refusal(&["rl", "querl.toml"], 2);
    assert!(down.contains(&format!("unreachable: GET {url}/v1/models: ")), "{down}");

    let no_lora: fn(&RecordedRequest, Answer) -> Answer = |request, answer| match request.path.as_str() {
        "/v1/load_lora_adapter" => Answer::json(404, &json!({"detail": "Not Found"})),
        _ => answer,
    };
    let no_tokens =
        |request: &RecordedRequest, answer| changed(request, answer, |choice| choice["token_ids"] = Value::Null);
    let no_logprobs =
        |request: &RecordedRequest, answer| changed(request, answer, |choice| choice["logprobs"] = Value::Null);
    let vocabulary =
        |request: &RecordedRequest, answer| changed(request, answer, |choice| choice["token_ids"][0] = json!(151_643));
    let other_model = |request: &RecordedRequest, answer| {
        let lower = |choice: &mut Value| {
            for logprob in choice["logprobs"]["token_logprobs"].as_array_mut().unwrap() {
                *logprob = json!(logprob.as_f64().unwrap() - 1.0);
            }
        };
        changed(request, answer, lower)
    };
    type Change = fn(&RecordedRequest, Answer) -> Answer;
    let cases: [(Change, i32, &str); 5] = [
        (no_lora, 2, "/v1/load_lora_adapter: answered 404 Not Found: Not Found; the adapter is at "),
        (no_tokens, 2, "/v1/completions: a response without `token_ids`; the server must support `return_token_ids`"),
        (no_logprobs, 2, "/v1/completions: a response without `logprobs.token_logprobs`; "),
        (vocabulary, 2, "the rollout server returned token 151643, and "),
        (other_model, 3, "the training pass is 0.718 a token, above rollout.max_mismatch_kl 0.05; "),
    ];
    for (change, code, expected) in cases {
        let server = server(change);
        let message = with_server(&server.url()).refusal(&["rl", "querl.toml"], code);
        assert!(message.contains(expected), "{message}");
    }

    let server = server(|_, answer| answer);
    let project = with_server(&server.url());
    let message = project.refusal(&["rl", "querl.toml", "--set", "rollout.model=other"], 2);
    assert!(message.ends_with("rollout.model is `other`, and the server has `tiny`"), "{message}");
    let message = project.refusal(&["rl", "querl.toml", "--set", "rollout.api_key_env=NO_SUCH_KEY"], 2);
    let expected = "rollout.api_key_env names the environment variable `NO_SUCH_KEY`, which is not set";
    assert!(message.contains(expected), "{message}");
}
