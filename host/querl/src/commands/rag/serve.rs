//! `querl serve rag`: the embedded retrieval of one or more configurations over the `general_rag` interface.

use anyhow::Context;
use clap::Args;
use querl_core::config::{EmbeddingKind, Overrides, RetrievalConfig, RetrievalKind, load};
use querl_data::ServiceContext;
use querl_pipeline::failure::Stop;
use querl_pipeline::interrupt;
use querl_pipeline::retrieval::ModelShelf;
use querl_serve::{GENERAL_RAG_ROUTE, KnowledgeBase, ServerLimits, general_rag, serve};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::TcpListener;

/// Options of `querl serve rag`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration files: one for each knowledge base
    #[arg(value_name = "CONFIG", required = true)]
    configs: Vec<PathBuf>,
    /// Where to listen; port 0 takes a free one. It has no authentication: keep it unreachable for other machines
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8000")]
    addr: SocketAddr,
    /// Replace a key of every file: dotted key, TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let mut shelf = ModelShelf::default();
    let mut open = |path: &PathBuf| open(path, &args.set, &mut shelf);
    let knowledge_bases = args.configs.iter().map(&mut open).collect::<anyhow::Result<Vec<_>>>()?;
    for base in &knowledge_bases {
        println!("tenant {}, knowledge base {}", base.tenant, base.kb_name);
    }
    let app = general_rag(knowledge_bases).map_err(|error| Stop::usage(error.to_string()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    let served = runtime.block_on(async {
        let taken = |error| Stop::usage(format!("{}: cannot be listened on: {error}; give another --addr", args.addr));
        let listener = TcpListener::bind(args.addr).await.map_err(taken)?;
        println!("listening on http://{}{GENERAL_RAG_ROUTE}", listener.local_addr()?);
        std::io::stdout().flush()?;
        serve(listener, app, ServerLimits::default(), interrupted()).await;
        Ok::<(), anyhow::Error>(())
    });
    // A model that is at work for nobody any more is not waited for.
    runtime.shutdown_background();
    served
}

/// Whatever kind of retrieval the configuration's own runs use: the same file may serve here and ask there.
fn open(path: &Path, set: &[String], shelf: &mut ModelShelf) -> anyhow::Result<KnowledgeBase> {
    let config = load(path, &Overrides { set: set.to_vec(), ..Overrides::default() })?;
    let retrieval = RetrievalConfig { kind: RetrievalKind::Embedded, ..config.retrieval };
    if retrieval.embedding.kind == EmbeddingKind::Openai {
        let problem = "retrieval.embedding.kind is \"openai\"; the embedded index that is served here makes its vectors in this process, \
                       expected local or none (--set retrieval.embedding.kind=none)";
        return Err(Stop::usage(format!("{}: {problem}", path.display())).into());
    }
    let search = querl_data::open_retrieval_backend(
        &retrieval,
        &config.tenant,
        &shelf.models(&retrieval)?,
        &ServiceContext::new(&config.calls),
    )?;
    let timeout = Duration::try_from_secs_f64(retrieval.timeout_s).context("retrieval.timeout_s")?;
    Ok(KnowledgeBase { tenant: config.tenant, kb_name: retrieval.kb_name, search, timeout })
}

async fn interrupted() {
    while interrupt::check().is_ok() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
