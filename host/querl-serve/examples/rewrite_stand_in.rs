//! The rewriting service without models, to try clients with: `cargo run --release -p querl-serve --example rewrite_stand_in -- [UPSTREAM]`.
//! Tenants `shop` and `rival`, the second with the key `rival-key`; the admin key is `admin`.

#[path = "../tests/support/mod.rs"]
mod support;

use querl_serve::{RewriteOptions, RewriteService, ServerLimits, Upstream};
use std::time::Duration;

fn main() -> anyhow::Result<()> {
    let upstream = std::env::args().nth(1).map(|url| Upstream::new(&url, Duration::from_secs(10)));
    let options = RewriteOptions {
        max_body_bytes: 1 << 20,
        max_queries: 64,
        body_timeout: Duration::from_secs(10),
        deadline: Duration::from_secs(2),
        chat_timeout: Duration::from_secs(10),
        max_cached_rewrites: 1000,
        api_key: None,
        admin_key: Some("admin".into()),
        upstream: upstream.transpose().map_err(anyhow::Error::msg)?,
        access_log: Some("/dev/stderr".into()),
        server: ServerLimits::default(),
    };
    let tenants = vec![support::tenant("rival", 1, Some("rival-key")), support::tenant("shop", 1, None)];
    let on_bound = |addr| {
        println!("listening on http://{addr}");
        Ok(())
    };
    let work = |service: std::sync::Arc<RewriteService>| {
        service.set_ready(support::StandInRewriter::new(tenants));
        loop {
            std::thread::park();
        }
    };
    RewriteService::new(options)?.run("127.0.0.1:8077".parse()?, on_bound, work, || false)
}
