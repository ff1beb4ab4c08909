//! HTTP/1.1 without a library, so that a response can be truncated, delayed or wrong at any byte.

use crate::{Answer, CHUNK_BYTES, Reply, Shared};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            // A disconnected client is not an error of the server.
            let _ = converse(stream, &shared).await;
        });
    }
}

struct Request {
    method: String,
    path: String,
    authorization: Option<String>,
    body: Vec<u8>,
}

async fn converse(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::new();
    while let Some(request) = read(&mut stream, &mut buffer, shared.reading_pause).await? {
        let mut reply = shared.meet(&request.method, &request.path, request.authorization, request.body);
        while let Reply::After(pause, inner) = reply {
            tokio::time::sleep(pause).await;
            reply = *inner;
        }
        let Reply::Answer(answer) = reply else { return fail(stream, reply).await };
        stream.write_all(&[head(&answer, Some(answer.body.len())).as_bytes(), &answer.body].concat()).await?;
    }
    Ok(())
}

/// Reads the next request; `None` at the end of the connection.
async fn read(stream: &mut TcpStream, buffer: &mut Vec<u8>, pause: Duration) -> io::Result<Option<Request>> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
    let header = |wanted: &str| {
        let fields = head.lines().skip(1).filter_map(|line| line.split_once(':'));
        let mut values = fields.filter(|(name, _)| name.eq_ignore_ascii_case(wanted));
        values.next().map(|(_, value)| value.trim().to_owned())
    };
    let length: usize = header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    while buffer.len() < end + length {
        tokio::time::sleep(pause).await;
        let chunk = &mut chunk[..CHUNK_BYTES.min(end + length - buffer.len())];
        stream.read_exact(chunk).await?;
        buffer.extend_from_slice(chunk);
    }
    let mut words = head.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let body = buffer[end..end + length].to_vec();
    buffer.drain(..end + length);
    Ok(Some(Request { method, path, authorization: header("authorization"), body }))
}

fn head(answer: &Answer, length: Option<usize>) -> String {
    let mut head = format!("HTTP/1.1 {} Scripted\r\nContent-Type: {}\r\n", answer.status, answer.content_type);
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    match length {
        Some(length) => head.push_str(&format!("Content-Length: {length}\r\n\r\n")),
        None => head.push_str("Connection: close\r\n\r\n"),
    }
    head
}

async fn fail(mut stream: TcpStream, reply: Reply) -> io::Result<()> {
    match reply {
        Reply::Answer(_) | Reply::After(..) => Ok(()),
        Reply::Hang => std::future::pending().await,
        Reply::Reset => reset(stream),
        Reply::ResetMidBody(answer) => {
            let half = &answer.body[..answer.body.len() / 2];
            stream.write_all(&[head(&answer, Some(answer.body.len())).as_bytes(), half].concat()).await?;
            // After a reset the client discards data that is still in transit.
            tokio::time::sleep(Duration::from_millis(20)).await;
            reset(stream)
        }
        Reply::Cut(answer) => {
            let half = &answer.body[..answer.body.len() / 2];
            stream.write_all(&[head(&answer, None).as_bytes(), half].concat()).await?;
            stream.shutdown().await
        }
        Reply::SlowHead(pause) => loop {
            for byte in b"HTTP/1.1 200 Scripted\r\nX-Slow: " {
                stream.write_all(&[*byte]).await?;
                tokio::time::sleep(pause).await;
            }
        },
        Reply::HeadOnly => {
            stream.write_all(b"HTTP/1.1 200 Scripted\r\nContent-Length: 9\r\n\r\n").await?;
            std::future::pending().await
        }
        Reply::Stall(answer) => {
            let half = &answer.body[..answer.body.len() / 2];
            stream.write_all(&[head(&answer, Some(answer.body.len())).as_bytes(), half].concat()).await?;
            std::future::pending().await
        }
        Reply::Trickle(answer, pause) => {
            stream.write_all(head(&answer, None).as_bytes()).await?;
            for tenth in answer.body.chunks(answer.body.len().div_ceil(10).max(1)) {
                tokio::time::sleep(pause).await;
                stream.write_all(tenth).await?;
            }
            stream.shutdown().await
        }
        Reply::Enormous(n_bytes) => enormous(stream, n_bytes).await,
    }
}

/// Ends the connection with RST instead of FIN.
fn reset(stream: TcpStream) -> io::Result<()> {
    stream.set_zero_linger()
}

async fn enormous(mut stream: TcpStream, n_bytes: u64) -> io::Result<()> {
    let head = format!("HTTP/1.1 200 Scripted\r\nContent-Type: application/json\r\nContent-Length: {n_bytes}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let chunk = vec![b' '; 1 << 16];
    let mut n_left = n_bytes;
    while n_left > 0 {
        let n_now = n_left.min(chunk.len() as u64) as usize;
        stream.write_all(&chunk[..n_now]).await?;
        n_left -= n_now as u64;
    }
    stream.shutdown().await
}
