//! HTTP/2 over TLS, with hyper.

use crate::{Answer, Reply, Shared};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::AUTHORIZATION;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

/// A TLS configuration for `localhost` that offers only HTTP/2, and its certificate as PEM.
pub(crate) fn acceptor() -> (TlsAcceptor, String) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("the name is a name");
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("the key was just made");
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("ring has them").with_no_client_auth();
    let mut config = builder.with_single_cert(vec![made.cert.der().clone()], key).expect("both were just made");
    config.alpn_protocols = vec![b"h2".to_vec()];
    (TlsAcceptor::from(Arc::new(config)), made.cert.pem())
}

pub(crate) async fn serve(listener: TcpListener, acceptor: TlsAcceptor, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, shared) = (acceptor.clone(), shared.clone());
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service = service_fn(move |request| answer(request, shared.clone()));
            let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            // A disconnected client is not an error of the server.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> io::Result<Response<Half>> {
    let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
    let body = read(request.into_body()).await?;
    let mut reply = shared.meet(&method, &path, authorization, body);
    while let Reply::After(pause, inner) = reply {
        tokio::time::sleep(pause).await;
        reply = *inner;
    }
    match reply {
        Reply::Answer(answer) => Ok(response(answer, Ending::Complete)),
        Reply::ResetMidBody(answer) | Reply::Cut(answer) => Ok(response(answer, Ending::Broken)),
        Reply::Reset => Err(io::Error::other("scripted")),
        _ => std::future::pending().await,
    }
}

async fn read(mut body: Incoming) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
            bytes.extend_from_slice(&data);
        }
    }
    Ok(bytes)
}

fn response(answer: Answer, ending: Ending) -> Response<Half> {
    let mut builder = Response::builder().status(answer.status).header("content-type", answer.content_type);
    for (name, value) in &answer.headers {
        builder = builder.header(name.to_lowercase(), value);
    }
    let n_sent = if ending == Ending::Complete { answer.body.len() } else { answer.body.len() / 2 };
    let body = Half { bytes: Some(Bytes::copy_from_slice(&answer.body[..n_sent])), ending };
    builder.body(body).expect("a script's headers are headers")
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Complete,
    Broken,
}

/// A body in one piece, which may be followed by an error.
struct Half {
    bytes: Option<Bytes>,
    ending: Ending,
}

impl Body for Half {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let frame = match (self.bytes.take(), self.ending) {
            (Some(bytes), _) => Some(Ok(Frame::data(bytes))),
            (None, Ending::Complete) => None,
            (None, Ending::Broken) => Some(Err(io::Error::other("scripted"))),
        };
        Poll::Ready(frame)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
