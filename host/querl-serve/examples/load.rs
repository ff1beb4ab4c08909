//! Loads `POST /predict` of a running `querl rm serve`: `load URL FILE CLIENTS REQUESTS`.
//!
//! So many clients at once send so many requests in all, each the next text of FILE (a JSON list of objects with `input`), and wait for the
//! answer before the next. Prints one line of JSON: requests a second, the median and the 99th percentile of the time to an answer in
//! milliseconds, and how many answers had another status than 200.

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
    let rows: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let bodies: Vec<Value> = rows.iter().map(|row| json!({"text": row["input"]})).collect();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (client, bodies, next) = (reqwest::Client::new(), Arc::new(bodies), Arc::new(AtomicUsize::new(0)));
    let started = Instant::now();
    let clients: Vec<_> = (0..n_clients)
        .map(|_| {
            let (client, bodies, next, url) = (client.clone(), bodies.clone(), next.clone(), format!("{url}/predict"));
            tokio::spawn(async move {
                let (mut times, mut n_failed) = (Vec::new(), 0);
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= n_requests {
                        return Ok::<_, reqwest::Error>((times, n_failed));
                    }
                    let asked = Instant::now();
                    let response = client.post(&url).json(&bodies[number % bodies.len()]).send().await?;
                    n_failed += usize::from(response.status() != 200);
                    response.bytes().await?;
                    times.push(asked.elapsed().as_secs_f64() * 1e3);
                }
            })
        })
        .collect();
    let (mut times, mut n_failed) = (Vec::new(), 0);
    for client in clients {
        let (of_client, failed) = client.await??;
        times.extend(of_client);
        n_failed += failed;
    }
    let seconds = started.elapsed().as_secs_f64();
    times.sort_by(f64::total_cmp);
    let quantile = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    println!(
        "{}",
        json!({
            "clients": n_clients, "requests": times.len(), "per_second": times.len() as f64 / seconds, "p50_ms": quantile(0.5),
            "p99_ms": quantile(0.99), "failed": n_failed,
        })
    );
    Ok(())
}
