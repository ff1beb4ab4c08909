//! `querl rag serve`: the embedded retrieval of one or more configurations over the `general_rag` interface.

use crate::failure::Stop;
use crate::interrupt;
use crate::retrieval::local_models;
use anyhow::Context;
use clap::Args;
use querl_core::config::{Overrides, RetrievalConfig, RetrievalKind, load};
use querl_data::Outside;
use querl_serve::{GENERAL_RAG_ROUTE, KnowledgeBase, general_rag, serve};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::TcpListener;

/// Options of `querl rag serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration files: one for each knowledge base
    #[arg(value_name = "CONFIG", required = true)]
    configs: Vec<PathBuf>,
    /// Where to listen; port 0 takes a free one. There is no password: other machines than this should not reach it
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8000")]
    addr: SocketAddr,
    /// Replace a key of every file: dotted key, TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Serves until interrupted.
///
/// # Errors
/// A configuration or its knowledge base cannot be used, two are of one tenant and name, or the address cannot be had.
pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let knowledge_bases = args.configs.iter().map(|path| open(path, &args.set)).collect::<anyhow::Result<Vec<_>>>()?;
    for base in &knowledge_bases {
        println!("tenant {}, knowledge base {}", base.tenant, base.kb_name);
    }
    let app = general_rag(knowledge_bases).map_err(|error| Stop::usage(error.to_string()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    runtime.block_on(async {
        let taken = |error| Stop::usage(format!("{}: cannot be listened on: {error}; give another --addr", args.addr));
        let listener = TcpListener::bind(args.addr).await.map_err(taken)?;
        println!("listening on http://{}{GENERAL_RAG_ROUTE}", listener.local_addr()?);
        std::io::stdout().flush()?;
        serve(listener, app, interrupted()).await.context("the server failed")
    })
}

/// Whatever kind of retrieval the configuration's own runs use: the same file may serve here and ask there.
fn open(path: &Path, set: &[String]) -> anyhow::Result<KnowledgeBase> {
    let config = load(path, &Overrides { set: set.to_vec(), ..Overrides::default() })?;
    let retrieval = RetrievalConfig { kind: RetrievalKind::Embedded, ..config.retrieval };
    let search =
        querl_data::open_search(&retrieval, &config.tenant, &local_models(&retrieval)?, &Outside::new(&config.calls))?;
    Ok(KnowledgeBase { tenant: config.tenant, kb_name: retrieval.kb_name, search })
}

async fn interrupted() {
    while interrupt::check().is_ok() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
