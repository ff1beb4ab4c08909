//! The reward service over real sockets, with the requests of other engines' clients and an environment that scores by length.
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::ports::{EnvironmentError, FaultKind, PluginFault, RewardRange};
use querl_core::records::{
    CallFailure, Candidate, Episode, EpisodeRecord, FailureKind, Rejection, Reward, RewardComponent,
};
use querl_core::scoring::{RewardQuery, RewardRequest, RewardService};
use querl_serve::{RewardOptions, ServerLimits, reward_router};
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use support::{answer, http, serve_app};

/// An environment whose score is a hundredth of the response's number of characters; certain responses select other behaviour. Requests are
/// recorded.
#[derive(Default)]
struct ByLength {
    requests: Mutex<Vec<RewardRequest>>,
    /// Whether responses `held` may end.
    is_released: Mutex<bool>,
    released: Condvar,
}

impl ByLength {
    fn last(&self) -> RewardRequest {
        self.requests.lock().unwrap().last().unwrap().clone()
    }

    fn release(&self) {
        *self.is_released.lock().unwrap() = true;
        self.released.notify_all();
    }

    fn record(&self, request: &RewardRequest) -> Result<EpisodeRecord, EnvironmentError> {
        let query = match &request.query {
            RewardQuery::Id(id) if id == "q1" => "胶原蛋白怎么吃".to_owned(),
            RewardQuery::Id(id) => {
                return Err(EnvironmentError::Request(format!("query `{id}` is not among the 1 rows")));
            }
            RewardQuery::Inline(own) => own.query.clone(),
        };
        let n_chars = request.response.chars().count();
        let component = |name: &str, value| RewardComponent { name: name.into(), value };
        let scored = |total| Ok(Reward { total, components: vec![component("length", total), component("win", 1.0)] });
        let outcome = match request.response.as_str() {
            "reject" => Err(Rejection::by_host("policy_retrieval_failed", "timeout")),
            "nan" => scored(f64::NAN),
            "plugin" => return Err(EnvironmentError::Plugin(plugin_fault())),
            "down" => return Err(EnvironmentError::Service(failure(FailureKind::Down))),
            "broken" => return Err(EnvironmentError::Service(failure(FailureKind::ServerError))),
            "panic" => panic!("as a plugin host may"),
            "held" => {
                let guard = self.is_released.lock().unwrap();
                drop(self.released.wait_while(guard, |is_released| !*is_released).unwrap());
                scored(0.0)
            }
            _ => scored(n_chars as f64 / 100.0),
        };
        let policy = Candidate { rewrite: request.response.clone(), ..Candidate::default() };
        let episode = Episode { id: format!("{query}/{n_chars}"), query, policy, ..Episode::default() };
        Ok(EpisodeRecord { format: EpisodeRecord::FORMAT, step: 0, episode, calls: Vec::new(), outcome })
    }
}

fn plugin_fault() -> PluginFault {
    let (plugin, version, message) = ("reward-x".into(), "0.1.0".into(), "/secret/path: out of fuel".into());
    PluginFault { plugin, version, message, kind: FaultKind::Limit, log: Vec::new() }
}

fn failure(kind: FailureKind) -> CallFailure {
    CallFailure { kind, message: "http://secret: as the log reports".into() }
}

impl RewardService for ByLength {
    fn score(&self, requests: &[RewardRequest]) -> Result<Vec<EpisodeRecord>, EnvironmentError> {
        self.requests.lock().unwrap().extend_from_slice(requests);
        requests.iter().map(|request| self.record(request)).collect()
    }

    fn range(&self) -> RewardRange {
        RewardRange { min: -1.0, max: 1.0 }
    }
}

struct Server {
    url: String,
    client: Client,
    service: Arc<ByLength>,
}

impl Server {
    async fn start(options: RewardOptions) -> Self {
        let service = Arc::new(ByLength::default());
        let url = serve_app(reward_router(service.clone(), options), ServerLimits::default()).await;
        Self { url, client: http(), service }
    }

    fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url))
    }

    async fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        answer(self.post(path).json(body)).await
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let response = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }
}

fn with_rejected_reward() -> RewardOptions {
    RewardOptions { rejected_reward: Some(-1.0), ..RewardOptions::default() }
}

/// A request as sent by `_fetch_rewards_via_http` of OpenRLHF 0.11.
fn openrlhf(responses: &[&str]) -> Value {
    let prompt = "<|im_start|>user\n胶原蛋白怎么吃<|im_end|>\n<|im_start|>assistant\n";
    let queries: Vec<String> = responses.iter().map(|response| format!("{prompt}{response}<|im_end|>")).collect();
    json!({"query": queries, "prompts": vec![prompt; responses.len()], "labels": vec!["q1"; responses.len()]})
}

/// A request as sent by `remote_rm` of slime 0.3.
fn slime(response: &str) -> Value {
    json!({"prompt": "胶原蛋白怎么吃", "response": format!("{response}<|im_end|>"), "label": "q1"})
}

/// A request as posted to `/verify` by the simple agent of NeMo Gym 0.5.
fn nemo_gym(response: &str) -> Value {
    json!({
        "responses_create_params": {"input": [{"role": "user", "content": "胶原蛋白怎么吃"}], "tools": []},
        "agent_ref": {"type": "responses_api_agents", "name": "querl_simple_agent"},
        "querl": "q1",
        "response": {
            "id": "resp_1", "created_at": 1_700_000_000.0, "model": "policy", "object": "response", "parallel_tool_calls": true,
            "tool_choice": "auto", "tools": [], "incomplete_details": {"reason": "max_output_tokens"},
            "usage": {"input_tokens": 9, "output_tokens": 7, "total_tokens": 16},
            "output": [
                {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "想一想"}]},
                {
                    "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": response, "annotations": []}],
                },
            ],
        },
    })
}

#[tokio::test]
async fn scores_and_rejections_are_results() {
    let server = Server::start(RewardOptions::default()).await;
    let inline = json!({"query": "鱼油怎么吃", "gold_ids": ["p1"]});
    let body = json!({"requests": [
        {"query": "q1", "response": "十个字", "step": 3, "group_id": "g", "sample_index": 1, "n_tokens": 4, "truncated": true},
        {"query": inline, "response": "reject"},
        {"query": inline.to_string(), "response": ""},
    ]});
    let (status, found) = server.ask("/v1/score", &body).await;
    assert_eq!(status, 200, "{found}");
    let rejected = json!({"code": "policy_retrieval_failed", "detail": "timeout", "by": "host"});
    let expected = json!([
        {"id": "胶原蛋白怎么吃/3", "total": 0.03, "components": {"length": 0.03, "win": 1.0}, "rewrite": "十个字"},
        {"id": "鱼油怎么吃/6", "rejected": rejected},
        {"id": "鱼油怎么吃/0", "total": 0.0, "components": {"length": 0.0, "win": 1.0}, "rewrite": ""},
    ]);
    assert_eq!(found, json!({"results": expected, "range": {"min": -1.0, "max": 1.0}}));
    let first = server.service.requests.lock().unwrap()[0].clone();
    assert_eq!((first.step, first.sample_index, first.n_tokens, first.truncated), (Some(3), Some(1), 4, true));
}

#[tokio::test]
async fn openrlhf_gets_lists_and_the_response_without_its_prompt_and_end_token() {
    let server = Server::start(with_rejected_reward()).await;
    let (status, found) = server.ask("/openrlhf", &openrlhf(&["食用方法", "reject"])).await;
    // Regression: with components a response that lacks one logged a number that nothing had computed, and the names grew with the requests.
    let logs = json!({"rejected": [0.0, 1.0]});
    assert_eq!((status, &found), (200, &json!({"rewards": [0.04, -1.0], "scores": [0.04, -1.0], "extra_logs": logs})));
    assert_eq!(server.service.requests.lock().unwrap()[0].response, "食用方法");
    let (_, found) = server.ask("/openrlhf", &openrlhf(&["reject"])).await;
    assert_eq!(found["extra_logs"], json!({"rejected": [1.0]}));
    // With more servers than queries a server gets empty lists.
    let (status, found) = server.ask("/openrlhf", &openrlhf(&[])).await;
    assert_eq!((status, &found["rewards"]), (200, &json!([])));
}

#[tokio::test]
async fn slime_gets_a_number_or_an_object_with_a_score() {
    let server = Server::start(with_rejected_reward()).await;
    assert_eq!(server.ask("/slime", &slime("食用方法")).await, (200, json!(0.04)));
    assert_eq!(server.service.last().response, "食用方法");
    assert_eq!(server.service.last().prompt, None);
    assert_eq!(server.ask("/slime", &slime("reject")).await, (200, json!(-1.0)));
    let (_, found) = server.ask("/slime/dict", &slime("食用方法")).await;
    assert_eq!(found, json!({"score": 0.04, "length": 0.04, "win": 1.0}));
    let (_, found) = server.ask("/slime/dict", &slime("reject")).await;
    assert_eq!((&found["score"], &found["rejected"]["code"]), (&json!(-1.0), &json!("policy_retrieval_failed")));
    // With `--apply-chat-template` left out, a prompt of the data set may be a list of messages, and the label an object.
    let body = json!({
        "prompt": [{"role": "user", "content": "鱼油"}], "response": "食用", "label": {"query": "鱼油怎么吃"},
    });
    assert_eq!(server.ask("/slime", &body).await, (200, json!(0.02)));
    assert_eq!(server.service.last().prompt.unwrap()[0].content, "鱼油");
}

#[tokio::test]
async fn nemo_gym_gets_the_row_with_its_reward() {
    let server = Server::start(with_rejected_reward()).await;
    let mut row = nemo_gym("食用方法");
    assert_eq!(server.ask("/seed_session", &row).await, (200, json!({})));
    let (status, found) = server.ask("/verify", &row).await;
    row["reward"] = json!(0.04);
    row["reward_components"] = json!({"length": 0.04, "win": 1.0});
    assert_eq!((status, found), (200, row.clone()));
    let scored = server.service.last();
    assert_eq!((scored.response.as_str(), scored.n_tokens, scored.truncated), ("食用方法", 7, true));
    assert_eq!(scored.prompt.unwrap()[0].content, "胶原蛋白怎么吃");

    let (_, found) = server.ask("/ng-rollout/r-1/verify", &nemo_gym("reject")).await;
    assert_eq!((&found["reward"], &found["_ng_failure_class"]), (&json!(-1.0), &json!("rejected")));
    assert_eq!(found["rejected"]["code"], "policy_retrieval_failed");
    // A response with reasoning only is scored as an empty text.
    row["response"]["output"].as_array_mut().unwrap().pop();
    assert_eq!(server.ask("/verify", &row).await.1["reward"], 0.0);

    let rows =
        json!({"verify_responses": [{"_ng_task_index": 0, "reward": 0.5}, {"_ng_task_index": 1, "reward": 0.0}]});
    let mean = json!({"mean/reward": 0.25});
    let expected = json!({"group_level_metrics": [], "agent_metrics": mean, "key_metrics": mean});
    assert_eq!(server.ask("/aggregate_metrics", &rows).await, (200, expected));
    assert_eq!(server.get("/reverify_mode").await, (200, "\"stateless\"".into()));
}

#[tokio::test]
async fn a_rejected_response_is_no_number_without_the_option() {
    let server = Server::start(RewardOptions::default()).await;
    let cases = [
        ("/openrlhf", openrlhf(&["食用方法", "reject"]), 1),
        ("/slime", slime("reject"), 0),
        ("/slime/dict", slime("reject"), 0),
        ("/verify", nemo_gym("reject"), 0),
    ];
    for (path, body, index) in cases {
        let (status, found) = server.ask(path, &body).await;
        let expected = format!(
            "response {index} was rejected with code `policy_retrieval_failed` (timeout) and has no score; start the server with \
             --rejected_reward NUMBER to give rejected responses a number"
        );
        assert_eq!((status, &found["error"]["message"]), (422, &json!(expected)), "{path}");
        assert_eq!(found["error"]["code"], "rejected");
    }
}

#[tokio::test]
async fn wrong_requests_get_a_message() {
    let server =
        Server::start(RewardOptions { max_responses: 2, max_body_bytes: 4000, ..with_rejected_reward() }).await;
    let score = |requests: Value| ("/v1/score", json!({"requests": requests}));
    let without = |mut body: Value, field: &str| {
        body.as_object_mut().unwrap().remove(field);
        body
    };
    let mut shorter = openrlhf(&["a", "b"]);
    shorter["labels"] = json!(["q1"]);
    let mut other_prompt = openrlhf(&["a"]);
    other_prompt["prompts"] = json!(["another prompt"]);
    let mut no_output = nemo_gym("a");
    no_output["response"] = json!({});
    let cases = [
        (score(json!([{"query": "q2", "response": ""}])), 422, "query `q2` is not among the 1 rows"),
        (score(json!([{"query": "q1"}])), 422, "`requests`, index 0: missing field `response`"),
        (score(json!([{"query": 7, "response": ""}])), 422, "expected the id of a query of the run"),
        (score(json!([{"query": "q1", "response": "", "reply": 1}])), 422, "unknown field `reply`"),
        // Regression: scored as 0.
        (
            score(json!([{"query": {"query": " "}, "response": ""}])),
            422,
            "index 0: `query` is empty; expected the user's query",
        ),
        (
            score(json!([{"query": {"query": "鱼油", "columns": {"price": ["x", null]}}, "response": ""}])),
            422,
            "`requests`, index 0: column `price` is [\"x\",null]; expected a text, a number, true, false or a list of these",
        ),
        (score(json!([1, 2, 3])), 413, "3 responses in one request; expected at most 2"),
        (("/v1/score", json!({})), 422, "`requests` is missing"),
        (("/v1/score", json!([])), 422, "the body is []"),
        (("/v1/score", json!({"requests": "长".repeat(2000)})), 413, "the body is larger than 4000 bytes"),
        (("/openrlhf", shorter), 422, "have 2, 2 and 1 items; expected the same number"),
        (("/openrlhf", openrlhf(&["a", "b", "c"])), 413, "expected at most 2"),
        (("/openrlhf", other_prompt), 422, "`query`, index 0: does not begin with its prompt"),
        (("/openrlhf", without(openrlhf(&["a"]), "prompts")), 422, "`prompts` is missing"),
        (("/slime", without(slime("a"), "label")), 422, "`label` is missing"),
        (("/slime", without(slime("a"), "response")), 422, "`response` is missing"),
        (("/verify", without(nemo_gym("a"), "querl")), 422, "the row has neither `querl` nor `label`"),
        (("/verify", without(nemo_gym("a"), "responses_create_params")), 422, "`responses_create_params` is missing"),
        (("/verify", no_output), 422, "`response` has no list `output`"),
        (score(json!([{"query": "q1", "response": "nan"}])), 500, "scoring failed; the server's log says why"),
        (score(json!([{"query": "q1", "response": "plugin"}])), 500, "scoring failed; the server's log says why"),
        (score(json!([{"query": "q1", "response": "panic"}])), 500, "scoring failed; the server's log says why"),
        (score(json!([{"query": "q1", "response": "down"}])), 503, "a service that scoring needs failed"),
        (score(json!([{"query": "q1", "response": "broken"}])), 502, "a service that scoring needs failed"),
    ];
    for ((path, body), expected, sentence) in cases {
        let (status, found) = server.ask(path, &body).await;
        let message = found["error"]["message"].as_str().unwrap();
        assert!(status == expected && message.contains(sentence), "{path} {body}: {status}, {found}");
        assert!(!message.contains("secret"), "{message}");
    }
    let broken = server.post("/openrlhf").header("content-type", "application/json").body("{\"query\": [");
    let (status, found) = answer(broken).await;
    assert!(status == 400 && found["error"]["message"].as_str().unwrap().contains("not valid JSON"), "{found}");
    assert_eq!(answer(server.post("/slime").body("{}")).await.0, 415);
    assert_eq!(server.get("/openrlhf").await.0, 405);
    assert_eq!(server.get("/nothing").await.0, 404);
}

#[tokio::test]
async fn scoring_requires_the_key() {
    let server = Server::start(RewardOptions { api_key: Some("right".into()), ..with_rejected_reward() }).await;
    for (path, body) in [("/openrlhf", openrlhf(&["a"])), ("/slime", slime("a")), ("/verify", nemo_gym("a"))] {
        assert_eq!(server.ask(path, &body).await.0, 401, "{path}");
        assert_eq!(answer(server.post(path).bearer_auth("wrong").json(&body)).await.0, 401, "{path}");
        assert_eq!(answer(server.post(path).bearer_auth("right").json(&body)).await.0, 200, "{path}");
    }
    assert_eq!(server.get("/health").await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_answered_with_429_and_is_not_ready() {
    let server = Server::start(RewardOptions { max_concurrent: 1, max_waiting: 1, ..with_rejected_reward() }).await;
    assert_eq!(server.get("/ready").await.0, 200);
    let held = || tokio::spawn(server.post("/slime").json(&slime("held")).send());
    let (first, second) = (held(), held());
    for _ in 0..500 {
        if server.get("/ready").await.0 == 503 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(server.get("/ready").await.0, 503);
    let response = server.post("/slime").json(&slime("a")).send().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"1".parse().unwrap()));
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"]["message"], "queue is full (1 requests); retry later");
    server.service.release();
    for request in [first, second] {
        assert_eq!(request.await.unwrap().unwrap().status().as_u16(), 200);
    }
    assert_eq!(server.ask("/slime", &slime("食用方法")).await, (200, json!(0.04)));
}

#[tokio::test]
async fn requests_and_episodes_are_counted_and_the_interface_describes_itself() {
    let server = Server::start(with_rejected_reward()).await;
    server.ask("/openrlhf", &openrlhf(&["a", "reject"])).await;
    server.ask("/slime", &json!({})).await;
    server.ask("/ng-rollout/r-1/verify", &nemo_gym("a")).await;
    server.get("/some/stranger").await;
    let text = server.get("/metrics").await.1;
    for line in [
        "querl_reward_requests_total{route=\"/openrlhf\",status=\"200\"} 1",
        "querl_reward_requests_total{route=\"/slime\",status=\"422\"} 1",
        "querl_reward_requests_total{route=\"/verify\",status=\"200\"} 1",
        "querl_reward_requests_total{route=\"other\",status=\"404\"} 1",
        "querl_reward_request_duration_seconds_count{route=\"/openrlhf\"} 1",
        "querl_reward_episodes_scored_total 2",
        "querl_reward_episodes_rejected_total{code=\"policy_retrieval_failed\"} 1",
        "querl_reward_running_requests 0",
        "querl_reward_waiting_requests 0",
    ] {
        assert!(text.lines().any(|found| found == line), "no `{line}` in {text}");
    }
    let document: Value = serde_json::from_str(&server.get("/openapi.json").await.1).unwrap();
    for path in ["/v1/score", "/openrlhf", "/slime", "/slime/dict", "/seed_session", "/verify", "/health", "/metrics"] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
}
