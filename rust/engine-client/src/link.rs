//! The socket: connecting, hellos, and the two loops that read and write frames.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use rollspan_protocol::{
    ClientHello, Dead, DecodeError, EngineHello, FrameKind, MAX_FRAME_BYTES, decode_outputs, encode_frame,
    recover_request_ids, split_frame,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::client::Shared;
use crate::error::{ConnectError, Death};

/// How often a socket that is not there yet is tried: there is nothing to wait on for a file to appear.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Bytes that one read asks for.
const READ_BYTES: usize = 64 * 1024;

/// Frames that one write gathers.
const WRITE_BATCH: usize = 64;

/// A link after its hellos; `unread` holds bytes that came behind the engine's hello.
pub(crate) struct Link {
    socket: UnixStream,
    unread: BytesMut,
}

/// Largest frame that the engine behind this hello takes, in bytes.
pub(crate) fn frame_limit(hello: &EngineHello) -> usize {
    usize::try_from(hello.limits.max_frame_bytes).map_or(MAX_FRAME_BYTES, |limit| limit.min(MAX_FRAME_BYTES))
}

/// Connects, as often as it takes, and exchanges hellos.
pub(crate) async fn connect(path: &Path) -> Result<(Link, EngineHello), ConnectError> {
    let mut socket = connect_socket(path).await?;
    let hello = ClientHello::new("rollspan-http", MAX_FRAME_BYTES as u64).encode();
    let frame = encode_frame(FrameKind::ClientHello, &hello, MAX_FRAME_BYTES)?;
    socket.write_all(&frame).await.map_err(|error| closed_early(&error))?;
    let mut unread = BytesMut::new();
    loop {
        if let Some((kind, payload, rest)) = split_frame(&unread, MAX_FRAME_BYTES)? {
            let rest = rest.len();
            let hello = match kind {
                FrameKind::EngineHello => EngineHello::decode(payload)?.value,
                FrameKind::Dead => return Err(last_words(payload).into()),
                other => return Err(ConnectError::Refused(format!("its first frame is {other:?}"))),
            };
            unread.advance(unread.len() - rest);
            return Ok((Link { socket, unread }, hello));
        }
        unread.reserve(READ_BYTES);
        match socket.read_buf(&mut unread).await {
            Ok(0) => return Err(Death::engine("the engine closed the link before its hello").into()),
            Ok(_) => {}
            Err(error) => return Err(closed_early(&error)),
        }
    }
}

async fn connect_socket(path: &Path) -> Result<UnixStream, ConnectError> {
    let mut tries = tokio::time::interval(RETRY_INTERVAL);
    loop {
        tries.tick().await;
        match UnixStream::connect(path).await {
            Ok(socket) => return Ok(socket),
            Err(error) if is_early(&error) => {}
            Err(error) => return Err(ConnectError::Socket { path: path.display().to_string(), error }),
        }
    }
}

/// Whether the engine may just not have come so far (or has its backlog full).
fn is_early(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock)
}

fn closed_early(error: &io::Error) -> ConnectError {
    Death::engine(format!("the engine closed the link before its hello: {error}")).into()
}

fn last_words(payload: &[u8]) -> Death {
    match Dead::decode(payload) {
        Ok(dead) => Death::engine(format!("the engine stopped: {}", dead.value.message)),
        Err(error) => Death::engine(format!("the engine stopped, and its last words cannot be read: {error}")),
    }
}

/// Carries frames both ways until the engine is gone or breaks the protocol; then ends all requests and calls.
pub(crate) async fn run(link: Link, shared: Arc<Shared>, frames: mpsc::UnboundedReceiver<Vec<u8>>) {
    let (read_half, write_half) = link.socket.into_split();
    // Tasks of their own, so that a panic in one of them ends the link and not the knowledge of it.
    let mut reader = tokio::spawn(read(read_half, link.unread, Arc::clone(&shared)));
    let mut writer = tokio::spawn(write(write_half, frames));
    let stop = AbortOnDrop(vec![reader.abort_handle(), writer.abort_handle()]);
    let ended = tokio::select! {
        ended = &mut reader => ended,
        // A failed write says less than what the engine may have written before it closed: the reader sees its end, too.
        ended = &mut writer => match ended {
            Ok(_) => (&mut reader).await,
            panicked => panicked,
        },
    };
    drop(stop);
    let death = ended.unwrap_or_else(|error| Death::internal(format!("the engine link failed: {error}")));
    shared.die(&death);
}

struct AbortOnDrop(Vec<tokio::task::AbortHandle>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

/// Reads frames and hands them on, never waiting for anybody but the engine. Returns why it ended.
async fn read(mut socket: OwnedReadHalf, mut unread: BytesMut, shared: Arc<Shared>) -> Death {
    loop {
        loop {
            let (kind, payload, rest) = match split_frame(&unread, MAX_FRAME_BYTES) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => {
                    shared.observer().decode_error(error.reason());
                    return Death::undecodable(format!("the engine broke the link's framing: {error}"));
                }
            };
            let rest = rest.len();
            if let Some(death) = take_frame(kind, payload, &shared) {
                return death;
            }
            unread.advance(unread.len() - rest);
        }
        unread.reserve(READ_BYTES);
        match socket.read_buf(&mut unread).await {
            Ok(0) => return Death::engine("the engine is gone: it closed its link"),
            Ok(_) => {}
            Err(error) => return Death::engine(format!("the engine is gone: {error}")),
        }
    }
}

/// Handles one frame; returns why the link must end, if it must.
fn take_frame(kind: FrameKind, payload: &[u8], shared: &Shared) -> Option<Death> {
    match kind {
        FrameKind::Outputs => match decode_outputs(&[payload]) {
            Ok(decoded) => {
                if decoded.skipped_fields > 0 {
                    shared.observer().skipped_fields(decoded.skipped_fields);
                }
                shared.receive(decoded.value);
                None
            }
            Err(error) => Some(refuse(payload, &error, shared)),
        },
        FrameKind::Dead => Some(last_words(payload)),
        other => {
            shared.observer().decode_error("frame_kind");
            Some(Death::undecodable(format!("the engine sent a frame of kind {other:?}, which only frontends send")))
        }
    }
}

/// A message that cannot be decoded is loud: it ends the requests that it names, and the link, and so all others.
fn refuse(payload: &[u8], error: &DecodeError, shared: &Shared) -> Death {
    shared.observer().decode_error(error.reason());
    let death = Death::undecodable(format!("a message of the engine cannot be decoded: {error}"));
    let named = recover_request_ids(&[payload]);
    if named.is_empty() {
        return death;
    }
    shared.fail_requests(&named, &death);
    Death::engine(format!("the engine link was closed: {death}"))
}

/// Writes frames in order, many at once when many wait.
async fn write(mut socket: OwnedWriteHalf, mut frames: mpsc::UnboundedReceiver<Vec<u8>>) -> Death {
    let mut batch = Vec::with_capacity(WRITE_BATCH);
    let mut buffer = Vec::new();
    while frames.recv_many(&mut batch, WRITE_BATCH).await > 0 {
        let written = if let [only] = batch.as_slice() {
            socket.write_all(only).await
        } else {
            buffer.clear();
            for frame in &batch {
                buffer.extend_from_slice(frame);
            }
            socket.write_all(&buffer).await
        };
        batch.clear();
        if let Err(error) = written {
            return Death::engine(format!("the engine is gone: {error}"));
        }
    }
    Death::engine("the engine link was closed")
}
