//! `querl serve reward` through the command line: the scores of a run's own episodes, and refused requests.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use support::Project;
use support::server::Server;

const SERVE: [&str; 2] = ["serve", "reward"];

/// A recorded episode as a request, with its query by id.
fn request(record: &Value) -> Value {
    let episode = &record["episode"];
    let (_, id) = episode["group_id"].as_str().unwrap().rsplit_once('/').unwrap();
    json!({
        "id": episode["id"],
        "query": id,
        "response": episode["response"],
        "truncated": episode["policy"]["finish_reason"] == "length",
        "n_tokens": episode["policy"]["n_tokens"].as_u64().unwrap_or(0),
        "step": episode["step"],
        "group_id": episode["group_id"],
        "sample_index": episode["sample_index"].as_u64().unwrap_or(0),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn episodes_of_a_run_have_their_scores_over_http() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "rl"]).ok();
    let mut steps: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
    for record in project.rows("run/episodes.jsonl") {
        steps.entry(record["step"].as_u64().unwrap_or(0)).or_default().push(record);
    }
    let mut server = Server::start(&project, &SERVE, &["run"]);
    server.ready().await;
    for records in steps.values() {
        let requests: Vec<Value> = records.iter().map(request).collect();
        let (status, found) = server.ask("/v1/score", &json!({"requests": requests})).await;
        assert_eq!(status, 200, "{found}");
        for (result, record) in found["results"].as_array().unwrap().iter().zip(records) {
            assert_eq!(result["id"], record["episode"]["id"]);
            assert_eq!(result["total"], record["outcome"]["scored"]["total"], "{record}");
            assert_eq!(result["rejected"]["code"], record["outcome"]["rejected"]["code"], "{record}");
        }
    }
    let scored = steps.values().flatten().find(|record| record["outcome"]["scored"].is_object()).unwrap();
    let sample = json!({"prompt": "", "response": scored["episode"]["response"], "label": request(scored)["query"]});
    let (status, number) = server.ask("/slime", &sample).await;
    assert!(status == 200 && number.is_number(), "{status}, {number}");
    assert_eq!(server.end("-INT"), Some(0));
}

#[test]
fn what_cannot_be_served_is_refused_with_what_to_do() {
    let project = Project::new();
    std::fs::create_dir(project.path("empty")).unwrap();
    let serve = |args: &[&str]| project.refusal(&[&SERVE, args].concat(), 2);
    assert!(serve(&["empty"]).starts_with("empty: not a run's folder: it has no config.resolved.toml"));
    assert!(serve(&["nothing.toml"]).contains("nothing.toml: no such file"));
    assert!(serve(&["querl.toml", "--api_key_env", "NO_SUCH_KEY"]).contains("`NO_SUCH_KEY` holds no key"));
}

#[tokio::test]
async fn a_configuration_without_a_run_scores_queries_that_come_with_the_request() {
    let project = Project::new();
    let server =
        Server::start(&project, &SERVE, &["querl.toml", "--api_key_env", "TEST_KEY", "--rejected_reward", "-1"]);
    server.ready().await;
    let body = json!({"requests": [{"query": {"query": "胶原蛋白肽饮怎么吃"}, "response": "胶原蛋白肽饮 食用方法"}]});
    assert_eq!(server.ask("/v1/score", &body).await.0, 401);
    let post = |body: &Value| server.client.post(format!("{}/v1/score", server.url)).bearer_auth("secret").json(body);
    let response = post(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let found: Value = response.json().await.unwrap();
    // The reward of this project compares with the teacher's rewrite, which the request does not have.
    assert!(found["results"][0]["rejected"]["code"].is_string(), "{found}");
    let with_baseline = json!({"requests": [{
        "query": {"query": "胶原蛋白肽饮怎么吃", "baseline": "胶原蛋白肽饮 怎么吃"}, "response": "胶原蛋白肽饮 食用方法",
    }]});
    let found: Value = post(&with_baseline).send().await.unwrap().json().await.unwrap();
    assert!(found["results"][0]["total"].is_number(), "{found}");
    let unknown = json!({"requests": [{"query": "no-such-id", "response": ""}]});
    let response = post(&unknown).send().await.unwrap();
    assert_eq!(response.status(), 422);
    let found: Value = response.json().await.unwrap();
    let expected = "query `no-such-id` is not among the 0 rows";
    assert!(found["error"]["message"].as_str().unwrap().contains(expected), "{found}");
}
