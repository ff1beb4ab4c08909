//! Modes that violate a rule, and modes that report what the host exposes of the machine.

use crate::bindings::querl::plugin::log;
use crate::bindings::querl::plugin::types::{Component, Rejection, Score};
use crate::{report, score};
use serde_json::json;
use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Number of calls of this instance.
static N_CALLS: AtomicU32 = AtomicU32::new(0);

/// The result of one item. Without a mode, the total is the number in the query, or 0.5.
pub(crate) fn result(mode: &str, query: &str) -> Result<Score, Rejection> {
    let component = |name: &str, value| Component { name: name.into(), value };
    let rejection = |code: &str| Err(Rejection { code: code.into(), detail: String::new() });
    let with_parts = |components| Ok(Score { total: 0.5, components });
    match mode {
        "" => Ok(score(query.parse().unwrap_or(0.5))),
        "reject" => rejection("probe_rejects"),
        "parts" => with_parts(vec![component("b", 0.1), component("a", -1e18)]),

        "panic" => panic!("the probe panics on purpose"),
        "panic-on-bad" if query != "bad" => Ok(score(0.5)),
        "panic-on-bad" => panic!("the probe panics on purpose"),
        "loop" => loop {
            black_box(query);
        },
        "recurse" => Ok(score(depth(1))),
        "allocate" => {
            let mut held = Vec::new();
            loop {
                held.push(black_box(vec![1_u8; 1 << 20]));
            }
        }
        "sleep" => {
            std::thread::sleep(Duration::from_secs(3600));
            Ok(score(0.5))
        }
        "nan" => Ok(score(f64::NAN)),
        "infinite" => Ok(score(f64::INFINITY)),
        "above" => Ok(score(1.5)),
        "below" => Ok(score(-0.5)),
        "component-nan" => with_parts(vec![component("a", f64::NAN)]),
        "component-large" => with_parts(vec![component("a", 2e18)]),
        "component-name" => with_parts(vec![component("Bad name", 0.0)]),
        "component-repeated" => with_parts(vec![component("a", 0.0), component("a", 0.0)]),
        "component-65" => with_parts((0..65).map(|n| component(&format!("a_{n}"), 0.0)).collect()),
        "component-names" => {
            let first: u32 = query.parse().unwrap_or(0);
            with_parts((first..first + 50).map(|n| component(&format!("a_{n}"), 0.0)).collect())
        }
        "code" => rejection("Bad code"),
        "code-empty" => rejection(""),
        "code-long" => rejection(&"a".repeat(65)),
        "flood" => Err(Rejection { code: "flood".into(), detail: "x".repeat(16 << 20) }),
        "utf8" => {
            // SAFETY: deliberately violated: the text is passed to the host, which has to reject it.
            let detail = unsafe { String::from_utf8_unchecked(vec![b'a', 0xff, b'b']) };
            Err(Rejection { code: "utf8".into(), detail })
        }
        "file" => {
            Err(report(&json!(std::fs::read_to_string("/etc/hostname").map_err(|error| error.kind().to_string()).ok())))
        }
        "write" => Err(report(&json!(std::fs::write("/tmp/probe", "x").is_ok()))),
        "socket" => Err(report(&json!(std::net::TcpStream::connect("127.0.0.1:1").is_ok()))),
        "exit" => std::process::exit(0),
        "environment" => {
            let variables: Vec<_> = std::env::vars().collect();
            let arguments: Vec<_> = std::env::args().collect();
            Err(report(&json!({"variables": variables, "arguments": arguments})))
        }
        "clock" => {
            let start = Instant::now();
            (0..100_000).for_each(|n| {
                black_box(n);
            });
            let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            Err(report(&json!({"ns": since_1970.as_nanos() as u64, "elapsed_ns": start.elapsed().as_nanos() as u64})))
        }
        "random" => Err(report(&json!(RandomState::new().hash_one(query).to_string()))),
        "state" => Err(report(&json!(N_CALLS.fetch_add(1, Ordering::Relaxed)))),
        "log" => {
            (0..10_000).for_each(|_| log::log(log::Level::Warn, &"line \u{1b}[31m".repeat(20)));
            Ok(score(0.5))
        }
        "output" => {
            (0..1000).for_each(|_| println!("{}", "x".repeat(1000)));
            Ok(score(0.5))
        }
        _ => rejection("unknown_mode"),
    }
}

#[allow(unconditional_recursion)]
fn depth(n: u64) -> f64 {
    black_box(depth(black_box(n + 1))) + 1.0
}
