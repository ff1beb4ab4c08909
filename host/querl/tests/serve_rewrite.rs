//! `querl serve rewrite` through the command line: rewrites of several tenants, reloading, and runs that cannot be served.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::time::Duration;
use support::results::{copy, damage};
use support::server::{Server, until};
use support::tenants::{RUNS, evaluated, project};
use support::{Project, model};

const SERVE: [&str; 2] = ["serve", "rewrite"];

fn assert_rewritten(response: &Value, query: &str, expected: &str) {
    match expected.is_empty() {
        false => assert_eq!((&response["rewrite"], &response["fallback"]), (&json!(expected), &Value::Null), "{query}"),
        true => assert_eq!((&response["rewrite"], &response["fallback"]), (&json!(query), &json!("no_rewrite"))),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewrites_of_tenants_that_share_batches_are_those_of_eval() {
    let server = Server::start(&RUNS, &SERVE, &["run", "other", "--deadline_ms", "60000"]);
    server.ready().await;
    let (first, second) = (evaluated("run", "fivedoctors"), evaluated("other", "other"));
    assert!(first.iter().zip(&second).any(|(a, b)| a.2 != b.2), "the tenants' models differ");
    let all: Vec<_> = first.iter().zip(&second).flat_map(|(a, b)| [a, b]).collect();
    let responses =
        futures::future::join_all(all.iter().map(|(request, _, _)| server.ask("/v1/rewrite", request))).await;
    for ((status, response), (_, query, expected)) in responses.iter().zip(&all) {
        assert_eq!(*status, 200, "{response}");
        assert_rewritten(response, query, expected);
    }
    let models = server.client.get(format!("{}/v1/models", server.url)).send().await.unwrap();
    let models: Value = models.json().await.unwrap();
    let names: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert!(names.contains(&"fivedoctors") && names.contains(&"other/rewrite"), "{names:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_is_replaced_without_a_failed_or_mixed_response() {
    let project = project();
    let args = ["run", "--admin_key_env", "TEST_KEY", "--cache", "0", "--deadline_ms", "60000"];
    let written = std::time::UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    std::fs::File::open(project.path("run/rl/best")).unwrap().set_modified(written).unwrap();
    let mut server = Server::start(&project, &SERVE, &args);
    server.ready().await;
    let cases = evaluated("run", "fivedoctors");
    let client = async {
        for (request, query, expected) in cases.iter().cycle().take(60) {
            let (status, response) = server.ask("/v1/rewrite", request).await;
            assert_eq!(status, 200, "{response}");
            assert_rewritten(&response, query, expected);
        }
    };
    let operator = async {
        for _ in 0..5 {
            let load = server.client.post(format!("{}/admin/tenants", server.url)).bearer_auth("secret");
            let path = project.path("run");
            let response = load.json(&json!({"path": path})).send().await.unwrap();
            assert!(response.status().is_success(), "{:?}", response.text().await);
        }
        let load = server.client.post(format!("{}/admin/tenants", server.url)).bearer_auth("secret");
        let refused = load.json(&json!({"path": project.path("nothing")})).send().await.unwrap();
        assert_eq!(refused.status(), 422);
    };
    tokio::join!(client, operator);
    // Regression: `created` was the time of the last reload.
    let models = server.client.get(format!("{}/v1/models", server.url)).send().await.unwrap();
    let models: Value = models.json().await.unwrap();
    assert_eq!(models["data"][0]["created"], 1_600_000_000, "{models}");
    let load = server.client.post(format!("{}/admin/tenants", server.url)).json(&json!({"path": project.path("run")}));
    assert_eq!(load.send().await.unwrap().status(), 401);

    // SIGHUP loads the runs of the command line again, here another model under the same path and tenant.
    let version = async || server.ask("/v1/rewrite", &cases[0].0).await.1["version"].clone();
    let before = version().await;
    assert!(before.is_string(), "{before}");
    std::fs::remove_dir_all(project.path("run")).unwrap();
    copy(&RUNS.path("other"), &project.path("run"));
    let resolved = project.read("run/config.resolved.toml");
    project.write("run/config.resolved.toml", &resolved.replace("tenant = \"other\"", "tenant = \"fivedoctors\""));
    server.signal("-HUP");
    until(async || version().await != before).await;
    assert_ne!(version().await, before);
    assert_eq!(server.end("-TERM"), Some(0));
}

/// Waits for a line in the server's log that ends with this text.
async fn logged(project: &Project, end: &str) -> String {
    let find = |log: &str| log.lines().find(|line| line.ends_with(end)).map(str::to_owned);
    until(async || find(&project.read("server.log")).is_some()).await;
    let log = project.read("server.log");
    find(&log).unwrap_or_else(|| panic!("no `{end}` in {log}"))
}

/// Changes the tenant of a run.
fn rename(project: &Project, run: &str, (from, to): (&str, &str)) {
    let (file, from) = (format!("{run}/config.resolved.toml"), format!("tenant = \"{from}\""));
    let resolved = project.read(&file);
    assert!(resolved.contains(&from));
    project.write(&file, &resolved.replacen(&from, &format!("tenant = \"{to}\""), 1));
}

/// Regression: SIGHUP removed all tenants of a deployment whose folder was missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_of_a_missing_deployment_are_still_served() {
    let project = project();
    project.querl(&["deploy", "run", "other", "--out", "deployment"]).ok();
    let server = Server::start(&project, &SERVE, &["deployment", "--deadline_ms", "60000"]);
    server.ready().await;
    let status =
        async |tenant: &str| server.ask("/v1/rewrite", &json!({"tenant": tenant, "query": "胶原蛋白怎么吃"})).await.0;
    std::fs::rename(project.path("deployment"), project.path("elsewhere")).unwrap();
    server.signal("-HUP");
    let writes = "expected a run's folder, which `querl run` writes, or its configuration";
    let problem = logged(&project, writes).await;
    assert!(problem.contains("not loaded again: deployment: "), "{problem}");
    // Tenants are removed at the end of a reload.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!((status("fivedoctors").await, status("other").await), (200, 200));

    std::fs::rename(project.path("elsewhere"), project.path("deployment")).unwrap();
    std::fs::remove_dir_all(project.path("deployment/tenants/other")).unwrap();
    server.signal("-HUP");
    logged(&project, "tenant other: removed, since deployment/tenants/other is no longer a run of this tenant").await;
    assert_eq!((status("fivedoctors").await, status("other").await), (200, 404));
}

/// Regression: a tenant that moved to another deployment, where it could not be loaded, was removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_that_moved_to_a_damaged_run_is_still_served() {
    let project = project();
    project.querl(&["deploy", "run", "other", "--out", "a"]).ok();
    copy(&project.path("a"), &project.path("b"));
    std::fs::remove_dir_all(project.path("b/tenants/fivedoctors")).unwrap();
    std::fs::rename(project.path("b/tenants/other"), project.path("b/tenants/third")).unwrap();
    rename(&project, "b/tenants/third", ("other", "third"));
    let server = Server::start(&project, &SERVE, &["a", "b", "--deadline_ms", "60000"]);
    server.ready().await;
    let request = json!({"tenant": "other", "query": "胶原蛋白怎么吃"});
    let version = async || server.ask("/v1/rewrite", &request).await.1["version"].clone();
    let before = version().await;
    assert!(before.is_string(), "{before}");

    std::fs::rename(project.path("a/tenants/other"), project.path("b/tenants/other")).unwrap();
    for (file, n_loaded) in [("config.resolved.toml", 5), ("rl/best/adapter_model.safetensors", 7)] {
        let file = project.path(&format!("b/tenants/other/{file}"));
        let elsewhere = project.path("elsewhere");
        std::fs::rename(&file, &elsewhere).unwrap();
        server.signal("-HUP");
        // Three tenants are loaded at the start, and two at each reload.
        until(async || project.read("server.log").matches(": version ").count() == n_loaded).await;
        // Tenants are removed at the end of a reload.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let log = project.read("server.log");
        assert!(log.matches(": version ").count() == n_loaded && !log.contains(": removed, "), "{log}");
        assert_eq!(log.matches("not loaded again: ").count(), (n_loaded - 3) / 2, "{log}");
        assert_eq!(version().await, before);
        std::fs::rename(&elsewhere, &file).unwrap();
    }
    server.signal("-HUP");
    logged(&project, " of b/tenants/other").await;
    assert_eq!(version().await, before);
}

/// Regression: a tenant that was renamed by SIGHUP was open to every client, and a key for the new name could not be set in advance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_with_a_key_is_renamed_where_the_new_name_has_one() {
    let project = project();
    let keys = ["--tenant_key_env", "other=TEST_KEY", "--tenant_key_env", "fourth=TEST_KEY"];
    let server = Server::start(&project, &SERVE, &[&["other"][..], &keys].concat());
    server.ready().await;
    assert!(project.read("server.log").contains("warning: --tenant_key_env: no tenant `fourth` is served"));
    rename(&project, "other", ("other", "third"));
    server.signal("-HUP");
    let refused = logged(&project, "and `other` had one; restart with --tenant_key_env third=NAME").await;
    assert!(refused.contains("not loaded again: other: tenant `third` has no key"), "{refused}");
    rename(&project, "other", ("third", "fourth"));
    server.signal("-HUP");
    logged(&project, "tenant other: removed, since other is no longer a run of this tenant").await;
    assert_eq!(server.ask("/v1/rewrite", &json!({"tenant": "fourth", "query": "胶原蛋白怎么吃"})).await.0, 401);
}

/// Regression: after SIGHUP a run replaced the tenant of another run, and a renamed tenant was served under both names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_takes_no_tenant_of_another_run_and_removes_renamed_ones() {
    let project = project();
    let mut server = Server::start(&project, &SERVE, &["run", "other", "--deadline_ms", "60000"]);
    server.ready().await;
    let request = |tenant: &str| json!({"tenant": tenant, "query": "胶原蛋白怎么吃"});
    let version = async |tenant: &str| server.ask("/v1/rewrite", &request(tenant)).await.1["version"].clone();
    let before = (version("fivedoctors").await, version("other").await);
    assert!(before.0.is_string() && before.1.is_string() && before.0 != before.1, "{before:?}");
    // Regression: SIGHUP without a change was logged as a start.
    server.signal("-HUP");
    logged(&project, "loaded again: nothing has changed; tenants: 2").await;
    assert_eq!(project.read("server.log").matches(": version ").count(), 2, "those of the start");
    rename(&project, "other", ("other", "fivedoctors"));
    server.signal("-HUP");
    logged(&project, "not loaded again: other has tenant `fivedoctors`, which is served from run").await;
    assert_eq!((version("fivedoctors").await, version("other").await), before, "both are served as before");

    rename(&project, "other", ("fivedoctors", "third"));
    server.signal("-HUP");
    let removed = logged(&project, "tenant other: removed, since other is no longer a run of this tenant").await;
    assert!(removed.as_bytes()[0] == b'2' && removed.as_bytes()[10] == b'T', "it begins with the time: {removed}");
    assert!(version("third").await.is_string());
    assert_eq!(server.ask("/v1/rewrite", &request("other")).await.0, 404);
    assert_eq!(version("fivedoctors").await, before.0);

    // The two names are swapped. `run` is loaded first, while `other` is still served as `third`.
    let third = version("third").await;
    rename(&project, "run", ("fivedoctors", "third"));
    rename(&project, "other", ("third", "fivedoctors"));
    server.signal("-HUP");
    until(async || version("fivedoctors").await != before.0 && version("third").await != third).await;
    assert_ne!((version("fivedoctors").await, version("third").await), (before.0, third));
    let log = project.read("server.log");
    assert!(log.matches("not loaded again").count() == 1 && log.matches(": removed, ").count() == 1, "{log}");
    assert_eq!(server.end("-TERM"), Some(0));
    logged(&project, "stopping: requests in progress are answered, for at most 60s; interrupt again to stop at once")
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fallbacks_are_summed_up_in_the_log_with_the_id_of_a_request() {
    let project = project();
    let server = Server::start(&project, &SERVE, &["run"]);
    server.ready().await;
    let (_, first) = server.ask("/v1/rewrite", &json!({"query": "0", "deadline_ms": 0})).await;
    assert_eq!(first["fallback"], "timeout");
    let started = std::time::Instant::now();
    for number in 1..40 {
        let (status, _) = server.ask("/v1/rewrite", &json!({"query": number.to_string(), "deadline_ms": 0})).await;
        assert_eq!(status, 200);
    }
    let log = project.read("server.log");
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("tenant fivedoctors: timeout: ")).collect();
    assert!(lines.len() <= started.elapsed().as_secs() as usize + 2, "{log}");
    let id = format!("request{{id={}}}", first["id"].as_str().unwrap());
    assert!(lines[0].contains(&id), "{log}");
}

/// Symptom: a temperature of 1e-39 was 500, which counted as a failure of a candidate's model, and a text of 1 MB was tokenized.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_requests_with_extreme_values_are_answered_or_refused() {
    let server = Server::start(&RUNS, &SERVE, &["run"]);
    server.ready().await;
    let ask = async |fields: Value| {
        let messages = json!([{"role": "user", "content": "益生菌怎么吃"}]);
        let mut request = json!({"model": "fivedoctors", "messages": messages, "max_tokens": 3});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, body) = server.ask("/v1/chat/completions", &request).await;
        let message = body["error"]["message"].as_str().unwrap_or_default().to_owned();
        (status, body["choices"][0]["message"]["content"].clone(), message)
    };
    let greedy = ask(json!({"temperature": 0})).await;
    assert!(greedy.0 == 200 && greedy.1.is_string(), "{greedy:?}");
    for temperature in [1e-6, 1e-38, 1e-39, 1e-45, 5e-324] {
        assert_eq!(ask(json!({"temperature": temperature})).await, greedy, "{temperature:e}");
    }
    for top_p in [0.0, 5e-324, 1e-300] {
        let found = ask(json!({"temperature": 1, "top_p": top_p, "seed": i64::MIN})).await;
        assert_eq!(found, greedy, "only the most probable token is sampled");
    }
    let (status, _, message) = ask(json!({"max_tokens": u64::MAX})).await;
    assert!(status == 422 && message.contains("with max_tokens 18446744073709551615 it goes beyond"), "{message}");
    let long = json!([{"role": "user", "content": "鱼油 ".repeat(100_000)}]);
    let (status, _, message) = ask(json!({"messages": long})).await;
    assert!(status == 422 && message.contains(" characters; it goes beyond the model's "), "{message}");
}

/// Answers the next request.
fn answer_once(listener: &std::net::TcpListener, status: &str, body: &str) {
    use std::io::{Read, Write};
    let (mut stream, _) = listener.accept().unwrap();
    let (mut request, mut part) = (Vec::new(), [0; 4096]);
    while !request.ends_with(b"}") {
        let n_bytes = stream.read(&mut part).unwrap();
        assert!(n_bytes > 0);
        request.extend_from_slice(&part[..n_bytes]);
    }
    let n_bytes = body.len();
    let response = format!("HTTP/1.1 {status}\r\ncontent-length: {n_bytes}\r\nconnection: close\r\n\r\n{body}");
    stream.write_all(response.as_bytes()).unwrap();
}

/// Regression: each request to an unavailable upstream service wrote a line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_of_an_upstream_have_one_line_each_in_the_log_without_the_query() {
    let project = project();
    let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = Server::start(&project, &SERVE, &["run", "--upstream", &format!("http://{addr}")]);
    server.ready().await;
    let request = json!({"query": "胶原蛋白怎么吃", "rewritten_query": "胶原蛋白 食用方法"});
    let status = async || server.ask("/api/chat/general_rag", &request).await.0;
    for _ in 0..5 {
        assert_eq!(status().await, 502);
    }
    let listener = std::net::TcpListener::bind(addr).unwrap();
    const ECHO: &str = "{\"detail\": \"胶原蛋白怎么吃\"}";
    let upstream = std::thread::spawn(move || {
        answer_once(&listener, "200 OK", "{}");
        for status in ["503 Service Unavailable", "503 ", "404 Not Found", "422 Unprocessable Entity", "302 Found"] {
            answer_once(&listener, status, ECHO);
        }
    });
    for expected in [200, 503, 503, 404, 422] {
        assert_eq!(status().await, expected);
    }
    let retrieval = json!({"query": "胶原蛋白怎么吃", "knowledge_id": "fivedoctors"});
    assert_eq!(server.ask("/retrieval", &retrieval).await.0, 502);
    upstream.join().unwrap();
    // Symptom: an error response of the upstream service left no line, and an unreadable one its text; a request that only its client can
    // correct left a warning, and a redirect nothing.
    for (level, end) in [
        ("INFO", ": responds again after 5 failure(s)"),
        ("WARN", ": server error: status 503 Service Unavailable"),
        ("INFO", ": responds without a status of 5xx again after 2 failure(s)"),
        ("WARN", ": request rejected: status 404 Not Found"),
        ("INFO", ": invalid request: status 422 Unprocessable Entity"),
        ("WARN", ": unreadable response: status 302 Found and no readable passages"),
    ] {
        let line = logged(&project, end).await;
        assert!(line.contains(level), "{line}");
    }
    assert!(!project.read("server.log").contains("胶原蛋白"), "{}", project.read("server.log"));
    let log = project.read("server.log");
    // Regression: the line contained the address twice and not the cause.
    let failed: Vec<&str> = log.lines().filter(|line| line.contains(": request failed: ")).collect();
    assert!(failed.len() == 1 && failed[0].contains(": request failed: Connection refused"), "{log}");
    assert_eq!(failed[0].matches(&addr.to_string()).count(), 1, "{log}");
}

#[test]
fn what_cannot_be_served_is_refused_with_what_to_do() {
    let project = project();
    // It may listen already, because models are loaded while the server responds.
    let serve = |args: &[&str]| {
        let output = project.querl(&[&SERVE, args, &["--addr", "127.0.0.1:0", "-q"]].concat());
        assert_eq!((output.code, output.stderr.lines().count()), (Some(2), 1), "{output:#?}");
        output.stderr.trim_end().strip_prefix("error: ").unwrap().to_owned()
    };
    let nothing =
        "nothing: no such file or folder; expected a run's folder, which `querl run` writes, or its configuration";
    assert_eq!(serve(&["nothing"]), nothing);
    assert!(serve(&["nothing.toml"]).starts_with("nothing.toml: no such file"));
    // An address reserved for documentation (RFC 5737), on which no process can listen.
    let warning = "192.0.2.1: other machines may reach this address, and no key is required of tenant `fivedoctors`;";
    project.querl(&["serve", "rewrite", "run", "--addr", "192.0.2.1:8000"]).refused(warning);
    for address in ["localhost:8000", "8000"] {
        let wrong = project.querl(&["serve", "style", "--addr", address]);
        wrong.refused("expected an IP address and a port, such as 127.0.0.1:8000");
    }
    std::fs::create_dir(project.path("empty")).unwrap();
    assert!(serve(&["empty"]).contains("empty: not a run's folder"));
    assert!(serve(&["run", "--upstream", "ftp://x"]).starts_with("--upstream: "));
    assert!(serve(&["run", "--admin_key_env", "NO_SUCH_KEY"]).contains("`NO_SUCH_KEY` holds no key"));
    assert!(serve(&[]).ends_with("or follow releases by --releases DIR"));
    // A key for a misspelled tenant would leave the tenant open. `QUERL_CACHE_DIR` is a variable that is set.
    let misspelled = "fivedoctor=QUERL_CACHE_DIR";
    let unknown = "--tenant_key_env: no tenant `fivedoctor` is served; did you mean `fivedoctors`?";
    assert_eq!(serve(&["run", "--tenant_key_env", misspelled]), unknown);
    let keys = ["--tenant_key_env", misspelled, "--admin_key_env", "QUERL_CACHE_DIR", "--addr", "192.0.2.1:8000"];
    let later = project.querl(&[&["serve", "rewrite", "run"][..], &keys].concat());
    later.refused(&format!("warning: {unknown}\n")).refused("no key is required of tenant `fivedoctors`;");
    // Symptom: the address was announced before the check.
    let twice = project.querl(&[&SERVE[..], &["run", "run", "--addr", "127.0.0.1:0"]].concat());
    assert!(twice.stderr.contains("are both of tenant `fivedoctors`"), "{twice:#?}");
    assert_eq!((twice.code, twice.stdout.as_str()), (Some(2), ""), "{twice:#?}");

    damage(&project.path("run/rl/best/adapter_model.safetensors"));
    let damaged = serve(&["run"]);
    assert!(damaged.contains("adapter_model.safetensors") && damaged.contains("querl rl"), "{damaged}");

    // Another base model: one byte of its weights differs.
    project.copy_model("model");
    damage(&project.path("model/model.safetensors"));
    let resolved = project.read("other/config.resolved.toml");
    let (own, other) = (model().display().to_string(), project.path("model").display().to_string());
    assert!(resolved.contains(&own));
    project.write("other/config.resolved.toml", &resolved.replace(&own, &other));
    let (intact, path) = (RUNS.path("run").display().to_string(), project.path("other").display().to_string());
    let refused = serve(&[&intact, &path]);
    assert!(refused.contains("different base models by one process each"), "{refused}");
}
