//! Loads `POST /predict` of a running `querl rm serve`: `load URL FILE CLIENTS REQUESTS`.
//!
//! So many clients at once send so many requests in all, each the next text of FILE (a JSON list of objects with `input`), and wait for the
//! answer before the next. Prints one line of JSON: answered requests a second, the median and the 99th percentile of the time to an answer in
//! milliseconds, how many answers had another status than 200, and how many requests had none, because the connection broke. The clients are
//! in one process, and wait for each other's bytes to be read: figures err to the slow side.

use serde_json::{Value, json};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, file, n_clients, n_requests] = arguments.as_slice() else {
        return Err("expected URL FILE CLIENTS REQUESTS".into());
    };
    let (n_clients, n_requests): (usize, usize) = (n_clients.parse()?, n_requests.parse()?);
    if n_clients == 0 || n_requests == 0 {
        return Err(format!("{n_clients} clients and {n_requests} requests; expected 1 of each at least").into());
    }
    let rows: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let bodies: Vec<Value> = rows.iter().map(|row| json!({"text": row["input"]})).collect();
    if bodies.is_empty() {
        return Err(format!("{file}: no text there; expected a list of objects with `input`").into());
    }
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (client, bodies, next) = (reqwest::Client::new(), Arc::new(bodies), Arc::new(AtomicUsize::new(0)));
    let started = Instant::now();
    let clients: Vec<_> = (0..n_clients)
        .map(|_| {
            let (client, bodies, next, url) = (client.clone(), bodies.clone(), next.clone(), format!("{url}/predict"));
            tokio::spawn(async move {
                let mut seen = Seen::default();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= n_requests {
                        return seen;
                    }
                    let asked = Instant::now();
                    match ask(&client, &url, &bodies[number % bodies.len()]).await {
                        Ok(status) => {
                            seen.n_failed += usize::from(status != 200);
                            seen.times.push(asked.elapsed().as_secs_f64() * 1e3);
                        }
                        Err(_) => seen.n_broken += 1,
                    }
                }
            })
        })
        .collect();
    let mut all = Seen::default();
    for client in clients {
        let Seen { times, n_failed, n_broken } = client.await?;
        all.times.extend(times);
        all.n_failed += n_failed;
        all.n_broken += n_broken;
    }
    let seconds = started.elapsed().as_secs_f64();
    all.times.sort_by(f64::total_cmp);
    // Where nothing was answered there is no time to an answer.
    let quantile = |share: f64| {
        let last = all.times.len().checked_sub(1)?;
        Some(all.times[(last as f64 * share).round() as usize])
    };
    println!(
        "{}",
        json!({
            "clients": n_clients, "requests": n_requests, "per_second": all.times.len() as f64 / seconds, "p50_ms": quantile(0.5),
            "p99_ms": quantile(0.99), "failed": all.n_failed, "broken": all.n_broken,
        })
    );
    Ok(())
}

/// What one client met with.
#[derive(Default)]
struct Seen {
    /// To an answer, in milliseconds.
    times: Vec<f64>,
    n_failed: usize,
    n_broken: usize,
}

/// The status of an answer that came whole.
async fn ask(client: &reqwest::Client, url: &str, body: &Value) -> Result<u16, reqwest::Error> {
    let response = client.post(url).json(body).send().await?;
    let status = response.status().as_u16();
    response.bytes().await?;
    Ok(status)
}
