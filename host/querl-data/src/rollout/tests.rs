//! A server with the API of vLLM or SGLang, and one with another API.

use super::*;
use querl_core::config::CallsConfig;
use querl_faulty::{Answer, FaultyServer, RecordedRequest, Reply};
use std::sync::atomic::AtomicBool;
use tokio::runtime::Runtime;

const VLLM: RolloutServerKind = RolloutServerKind::Vllm;

/// A client with its runtime.
fn open(server: &FaultyServer, kind: RolloutServerKind) -> (RolloutServer, Runtime) {
    open_at(&server.url(), kind)
}

fn open_at(url: &str, kind: RolloutServerKind) -> (RolloutServer, Runtime) {
    let config = RolloutConfig {
        server: kind,
        base_url: Some(format!("{url}/v1/")),
        model: Some("base".into()),
        max_retries: 0,
        ..RolloutConfig::default()
    };
    let runtime = Runtime::new().unwrap();
    let client = RolloutServer::open(&config, &ServiceContext::new(&CallsConfig::default()), runtime.handle().clone());
    (client.unwrap(), runtime)
}

fn prompt(seed: u64, n: usize) -> RolloutPrompt {
    RolloutPrompt { token_ids: vec![5, 6, 7], seed, n }
}

fn sampling() -> RolloutSampling {
    RolloutSampling {
        temperature: 0.8,
        top_p: 0.9,
        top_k: 0,
        min_new_tokens: 1,
        max_new_tokens: 4,
        stop_strings: vec!["。".into()],
        stop_token_ids: vec![2],
    }
}

/// Choices in reverse order; the first token of each is its index.
fn completion(request: &Value) -> Value {
    let choice = |index: u64| {
        json!({
            "index": index, "text": "", "finish_reason": "stop", "token_ids": [index, 2],
            "prompt_token_ids": request["prompt"], "logprobs": {"token_logprobs": [-0.5, -0.25]},
        })
    };
    let n = request["n"].as_u64().unwrap();
    json!({"choices": (0..n).rev().map(choice).collect::<Vec<_>>()})
}

/// `models`: base model and adapters of `GET /v1/models`. vLLM answers a handover in plain text.
fn respond(request: &RecordedRequest, models: &Value) -> Reply {
    match request.path.as_str() {
        "/v1/models" => Answer::json(200, &json!({"object": "list", "data": models})).into(),
        "/v1/completions" => Answer::json(200, &completion(&request.json())).into(),
        path if path.ends_with("load_lora_adapter") => Answer::text(200, "text/plain", "Success: done.").into(),
        _ => Answer::json(404, &json!({"detail": "Not Found"})).into(),
    }
}

fn server() -> FaultyServer {
    let models = json!([{"id": "base", "parent": null}, {"id": "querl-1-2-v9", "parent": "base"}, {"id": "other", "parent": "base"}]);
    FaultyServer::start(move |request| respond(request, &models))
}

/// Paths and adapter names of the requests, without the parts that differ between processes.
fn calls(server: &FaultyServer) -> Vec<String> {
    let shown = |request: &RecordedRequest| {
        let body = request.json();
        let name = ["lora_name", "lora_path", "model"].iter().find_map(|key| body[*key].as_str()).unwrap_or_default();
        let (first, last) = (name.split('-').next().unwrap_or_default(), name.rsplit('-').next().unwrap_or_default());
        format!("{} {first} {last}", request.path)
    };
    server.requests().iter().map(shown).collect()
}

#[test]
fn adapters_are_handed_over_in_order_and_the_earlier_one_is_unloaded_first() {
    let (server, sampling) = (server(), sampling());
    let (client, _runtime) = open(&server, VLLM);
    client.set_policy(0, Path::new("/run/rl/rollout/v0")).unwrap();
    client.set_policy(0, Path::new("/run/rl/rollout/v0")).unwrap();
    client.generate(&[prompt(1, 1)], &sampling).unwrap();
    client.set_policy(1, Path::new("/run/rl/rollout/v1")).unwrap();
    client.generate(&[prompt(1, 1)], &sampling).unwrap();
    client.unload().unwrap();
    client.unload().unwrap();
    let expected = [
        "/v1/models  ",
        // An adapter of an earlier process.
        "/v1/unload_lora_adapter querl v9",
        "/v1/load_lora_adapter querl v0",
        "/v1/completions querl v0",
        "/v1/unload_lora_adapter querl v0",
        "/v1/load_lora_adapter querl v1",
        "/v1/completions querl v1",
        "/v1/unload_lora_adapter querl v1",
    ];
    assert_eq!(calls(&server), expected);
    assert_eq!(server.requests()[2].json()["lora_path"], "/run/rl/rollout/v0");
}

#[test]
fn only_names_of_the_same_form_are_adapters_of_the_configuration() {
    for name in ["querl-1-2-v9", "querl-1764180000123456789-0-v12"] {
        assert!(is_adapter_of("querl-", name), "{name}");
    }
    for name in
        ["querl-1-2", "querl-1-2-9", "querl-1-2-v", "querl-a-2-v9", "querl-b-1-2-v9", "querl2-1-2-v9", "other-1-2-v9"]
    {
        assert!(!is_adapter_of("querl-", name), "{name}");
    }
}

#[test]
fn no_two_clients_share_a_name() {
    let server = server();
    let (one, _runtime) = open(&server, VLLM);
    let (other, _runtime) = open(&server, VLLM);
    assert_ne!(one.name_prefix, other.name_prefix);
    assert!(is_adapter_of("querl-", &format!("{}v0", one.name_prefix)), "{}", one.name_prefix);
}

/// Responses to `unload`, and whether the adapter then counts as unloaded.
#[test]
fn an_adapter_stays_noted_until_the_server_has_unloaded_it() {
    for (status, message, is_unloaded) in [
        (404, "The lora adapter cannot be found.", true),
        (400, "LoRA with name x does not exist.", true),
        (400, "unknown field", false),
        (500, "out of memory", false),
    ] {
        let server = FaultyServer::start(move |request| match request.path.as_str() {
            "/v1/unload_lora_adapter" => Answer::json(status, &json!({"error": {"message": message}})).into(),
            _ => respond(request, &base()),
        });
        let (client, _runtime) = open(&server, VLLM);
        client.set_policy(0, Path::new("/v0")).unwrap();
        assert_eq!(client.set_policy(1, Path::new("/v1")).is_ok(), is_unloaded, "{message}");
        assert_eq!(client.unload().is_ok(), is_unloaded, "{message}");
        assert_eq!(client.state().loaded.is_none(), is_unloaded, "{message}");
    }
}

#[test]
fn an_adapter_whose_handover_failed_is_unloaded_and_never_asked() {
    let server = FaultyServer::start(|request| match request.path.as_str() {
        "/v1/load_lora_adapter" => Answer::json(500, &json!({"error": {"message": "no memory"}})).into(),
        _ => respond(request, &base()),
    });
    let (client, _runtime) = open(&server, VLLM);
    client.set_policy(0, Path::new("/v0")).unwrap_err();
    client.generate(&[prompt(1, 1)], &sampling()).unwrap_err();
    client.unload().unwrap();
    assert_eq!(calls(&server).last().unwrap(), "/v1/unload_lora_adapter querl v0");
}

/// The stop flag of an interrupted run blocks all other requests.
#[test]
fn the_last_adapter_is_unloaded_after_a_stop_too() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let (server, runtime) = (server(), Runtime::new().unwrap());
    let config = RolloutConfig {
        base_url: Some(format!("{}/v1", server.url())),
        model: Some("base".into()),
        max_retries: 0,
        ..RolloutConfig::default()
    };
    let services = ServiceContext::new(&CallsConfig::default()).until(&STOP);
    let client = RolloutServer::open(&config, &services, runtime.handle().clone()).unwrap();
    client.set_policy(0, Path::new("/v0")).unwrap();
    STOP.store(true, Ordering::Relaxed);
    client.generate(&[prompt(1, 1)], &sampling()).unwrap_err();
    client.unload().unwrap();
    assert_eq!(calls(&server).last().unwrap(), "/v1/unload_lora_adapter querl v0");
}

#[test]
fn vllm_gets_tokens_seed_and_every_setting_and_returns_tokens() {
    let server = server();
    let (client, _runtime) = open(&server, VLLM);
    client.set_policy(0, Path::new("/v0")).unwrap();
    let seed = u64::MAX - 1;
    let responses = client.generate(&[prompt(seed, 3), prompt(4, 1)], &sampling()).unwrap();
    let response = |first| RolloutResponse { token_ids: vec![first, 2], logprobs: vec![-0.5, -0.25], truncated: false };
    assert_eq!(responses, [vec![response(0), response(1), response(2)], vec![response(0)]]);
    let completions = server.requests().into_iter().filter(|request| request.path == "/v1/completions");
    let mut body = completions.map(|request| request.json()).find(|body| body["n"] == 3).unwrap();
    let adapter = body.as_object_mut().unwrap().remove("model").unwrap();
    assert!(adapter.as_str().unwrap().ends_with("-v0"), "{adapter}");
    let expected = json!({
        "prompt": [5, 6, 7], "n": 3, "seed": -2, "temperature": 0.8, "top_p": 0.9, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 1, "max_tokens": 4,
        "stop": ["。"], "stop_token_ids": [2], "return_token_ids": true, "logprobs": 0,
    });
    assert_eq!(body, expected);
    let greedy = RolloutSampling { temperature: 0.0, ..sampling() };
    assert_eq!(client.generate(&[prompt(4, 1)], &greedy).unwrap()[0][0].logprobs, Vec::<f32>::new());
}

/// With one seed, SGLang's deterministic sampler returns equal responses to a request for several responses.
#[test]
fn sglang_gets_a_request_for_each_response_and_adapters_at_its_own_route() {
    let server = server();
    let (client, _runtime) = open(&server, RolloutServerKind::Sglang);
    client.set_policy(3, Path::new("/v3")).unwrap();
    let responses = client.generate(&[prompt(7, 2), prompt(1, 1)], &sampling()).unwrap();
    assert_eq!(responses.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
    let paths: Vec<String> = server.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(&paths[..3], ["/v1/models", "/unload_lora_adapter", "/load_lora_adapter"]);
    let bodies = server.requests().into_iter().skip(3).map(|request| request.json());
    let mut seen: Vec<(i64, bool)> = bodies
        .map(|body| {
            assert_eq!((&body["model"], &body["n"]), (&json!("base"), &json!(1)));
            (body["seed"].as_i64().unwrap(), body["lora_path"].as_str().unwrap().ends_with("-v3"))
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, [(1, true), (7, true), (8, true)]);
}

#[test]
fn a_server_sees_the_adapter_where_its_mount_is() {
    let server = server();
    let (client, _runtime) = open(&server, VLLM);
    let client = RolloutServer { adapter_dir: Some("/mnt/adapters/".into()), ..client };
    client.set_policy(0, Path::new("/run/rl/rollout/v0")).unwrap();
    assert_eq!(server.requests()[2].json()["lora_path"], "/mnt/adapters/v0");
}

/// The message of a handover or of a rollout.
fn failure(script: impl Fn(&RecordedRequest) -> Reply + Send + Sync + 'static) -> String {
    let server = FaultyServer::start(script);
    let (client, _runtime) = open(&server, VLLM);
    let outcome =
        client.set_policy(0, Path::new("/v0")).and_then(|()| client.generate(&[prompt(1, 1)], &sampling()).map(drop));
    outcome.unwrap_err().to_string().replace(&server.url(), "SERVER")
}

fn base() -> Value {
    json!([{"id": "base"}])
}

/// The error message for a completion that was modified by `change`.
fn broken(change: impl Fn(&mut Value) + Send + Sync + 'static) -> String {
    failure(move |request| match request.path.as_str() {
        "/v1/completions" => {
            let mut body = completion(&request.json());
            change(&mut body["choices"][0]);
            Answer::json(200, &body).into()
        }
        _ => respond(request, &base()),
    })
}

#[test]
fn a_server_without_the_model_or_adapters_is_named_with_the_remedy() {
    let other = failure(|request| respond(request, &json!([{"id": "m1"}, {"id": "m2"}, {"id": "a", "parent": "m1"}])));
    assert!(other.ends_with("rollout.model is `base`, and the server has `m1`, `m2`"), "{other}");
    let refused = |status: u16, message: &'static str| {
        failure(move |request| match request.path.as_str() {
            "/v1/load_lora_adapter" => Answer::json(status, &json!({"error": {"message": message}})).into(),
            _ => respond(request, &base()),
        })
    };
    let none = refused(404, "Not Found");
    assert!(none.contains("POST SERVER/v1/load_lora_adapter: answered 404 Not Found: Not Found; the adapter is at /v0; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"), "{none}");
    let rank = refused(400, "LoRA rank 64 is greater than max_lora_rank 16.");
    assert!(rank.contains("max_lora_rank 16.; the adapter is at /v0; start vLLM"), "{rank}");
}

/// Regression: the answer to a handover was lost, and the retry was refused.
#[test]
fn an_adapter_that_is_loaded_already_was_loaded_by_an_attempt_whose_answer_was_lost() {
    let server = FaultyServer::start(|request| match request.path.as_str() {
        "/v1/load_lora_adapter" => {
            Answer::json(400, &json!({"error": {"message": "The lora adapter 'x' has already been loaded."}})).into()
        }
        _ => respond(request, &base()),
    });
    let (client, _runtime) = open(&server, VLLM);
    client.set_policy(0, Path::new("/v0")).unwrap();
    assert_eq!(client.generate(&[prompt(1, 1)], &sampling()).unwrap().len(), 1);
}

#[test]
fn answers_that_are_no_rollouts_are_named() {
    let cases = [
        ("/token_ids", Value::Null, "a response without `token_ids`; the server must support `return_token_ids`"),
        ("/logprobs", Value::Null, "a response without `logprobs.token_logprobs`; let the server return them"),
        ("/logprobs/token_logprobs", json!([-0.5]), "1 log-probabilities for the 2 tokens of a response"),
        ("/logprobs/token_logprobs", json!([null, -0.5]), "no log-probability for token 0 of a response"),
        (
            "/prompt_token_ids",
            json!([1, 5, 6, 7]),
            "a response to another prompt, of 4 tokens, than the one of 3 tokens that was sent",
        ),
        ("/token_ids", json!([1, 1, 1, 1, 2]), "a response of 5 tokens; expected at most `max_tokens`, 4"),
        ("/finish_reason", json!("abort"), "a response was broken off (finish_reason `abort`)"),
        ("/token_ids", json!(["a"]), "expected u32"),
    ];
    for (field, value, expected) in cases {
        let message = broken(move |choice| *choice.pointer_mut(field).unwrap() = value.clone());
        assert!(message.contains("SERVER/v1/completions: ") && message.ends_with(expected), "{message}");
    }
    let few = failure(|request| match request.path.as_str() {
        "/v1/completions" => Answer::json(200, &json!({"choices": []})).into(),
        _ => respond(request, &base()),
    });
    assert!(few.ends_with("0 responses; expected 1"), "{few}");
}

#[test]
fn a_server_that_is_down_is_unreachable() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let (client, _runtime) = open_at(&url, VLLM);
    let failure = client.set_policy(0, Path::new("/v0")).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unreachable);
    assert!(failure.message.starts_with(&format!("GET {url}/v1/models: ")), "{failure}");
}
