//! A scripted engine for tests: it speaks the protocol over a real socket and does what the test says, nothing else.
#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    missing_docs,
    reason = "what goes wrong in a test double fails the test"
)]

use std::path::{Path, PathBuf};

use bytes::{Buf, BytesMut};
use rollspan_protocol::{
    Admission, Batch, Body, ClientHello, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineHello,
    FinishReason, FrameKind, Limits, MAX_FRAME_BYTES, ModelFacts, SchedulerStats, UtilityFailure, UtilityOutput,
    UtilityRequest, VERSION, decode_abort, encode_frame, split_frame,
};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// An engine that listens in a directory of its own, which goes with it.
pub struct MockEngine {
    directory: TempDir,
    listener: UnixListener,
}

/// One frontend's link, seen from the engine.
pub struct MockLink {
    socket: UnixStream,
    unread: BytesMut,
}

/// What a frontend sent.
#[derive(Debug)]
pub enum Message {
    Add(Box<EngineCoreRequest>),
    Abort(Vec<String>),
    Utility(UtilityRequest),
}

/// Path of the socket in an engine's directory.
pub fn socket_path(directory: &Path) -> PathBuf {
    directory.join("engine.sock")
}

impl MockEngine {
    /// Binds a socket in a new directory.
    pub fn bind() -> Self {
        Self::bind_in(tempfile::tempdir().expect("a temporary directory"))
    }

    /// Binds [`socket_path`] in `directory`.
    pub fn bind_in(directory: TempDir) -> Self {
        let listener = UnixListener::bind(socket_path(directory.path())).expect("a free socket path");
        Self { directory, listener }
    }

    /// Path of the socket.
    pub fn path(&self) -> PathBuf {
        socket_path(self.directory.path())
    }

    /// Takes a frontend's link and its hello, and answers with `hello`.
    pub async fn accept(&self, hello: &EngineHello) -> MockLink {
        let mut link = self.accept_silently().await;
        link.send_frame(FrameKind::EngineHello, &hello.encode()).await;
        link
    }

    /// Takes a frontend's link and its hello, and says nothing.
    pub async fn accept_silently(&self) -> MockLink {
        let (socket, _) = self.listener.accept().await.expect("a frontend connects");
        let mut link = MockLink { socket, unread: BytesMut::new() };
        let (kind, payload) = link.frame().await.expect("a frontend begins with its hello");
        assert_eq!(kind, FrameKind::ClientHello);
        ClientHello::decode(&payload).expect("a valid hello");
        link
    }
}

impl MockLink {
    /// The next frame; `None` when the frontend closed the link.
    pub async fn frame(&mut self) -> Option<(FrameKind, Vec<u8>)> {
        loop {
            if let Some((kind, payload, rest)) = split_frame(&self.unread, MAX_FRAME_BYTES).expect("a valid frame") {
                let (payload, rest) = (payload.to_vec(), rest.len());
                self.unread.advance(self.unread.len() - rest);
                return Some((kind, payload));
            }
            match self.socket.read_buf(&mut self.unread).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// The next message; `None` when the frontend closed the link.
    pub async fn message(&mut self) -> Option<Message> {
        let (kind, payload) = self.frame().await?;
        Some(match kind {
            FrameKind::Add => {
                Message::Add(Box::new(EngineCoreRequest::decode(&payload).expect("a valid request").value))
            }
            FrameKind::Abort => Message::Abort(decode_abort(&payload).expect("a valid abort")),
            FrameKind::Utility => Message::Utility(UtilityRequest::decode(&payload).expect("a valid call").value),
            other => panic!("a frontend sent {other:?}"),
        })
    }

    /// The next message, which must be a request.
    pub async fn request(&mut self) -> EngineCoreRequest {
        match self.message().await {
            Some(Message::Add(request)) => *request,
            other => panic!("a request was due, got {other:?}"),
        }
    }

    /// The next message, which must be an abort.
    pub async fn aborted(&mut self) -> Vec<String> {
        match self.message().await {
            Some(Message::Abort(ids)) => ids,
            other => panic!("an abort was due, got {other:?}"),
        }
    }

    /// The next message, which must be a call.
    pub async fn call(&mut self) -> UtilityRequest {
        match self.message().await {
            Some(Message::Utility(call)) => call,
            other => panic!("a call was due, got {other:?}"),
        }
    }

    /// Sends a message.
    pub async fn send(&mut self, outputs: &EngineCoreOutputs) {
        self.send_frame(FrameKind::Outputs, &outputs.encode()).await;
    }

    /// Answers a call.
    pub async fn answer(&mut self, call_id: u64, outcome: Result<Value, UtilityFailure>) {
        self.send(&envelope(Body::Utility(UtilityOutput { call_id, outcome }))).await;
    }

    /// Sends a frame; a frontend that is gone is no error.
    pub async fn send_frame(&mut self, kind: FrameKind, payload: &[u8]) {
        self.send_bytes(&encode_frame(kind, payload, MAX_FRAME_BYTES).expect("a frame within the limit")).await;
    }

    /// Sends bytes as they are; a frontend that is gone is no error.
    pub async fn send_bytes(&mut self, bytes: &[u8]) {
        drop(self.socket.write_all(bytes).await);
    }
}

/// A hello of a small engine with a vocabulary of 100 and room for 64 tokens.
pub fn hello() -> EngineHello {
    EngineHello {
        version: VERSION,
        rollspan_version: "0.0.0".to_owned(),
        engine_index: 0,
        pid: 1,
        limits: Limits {
            max_frame_bytes: MAX_FRAME_BYTES as u64,
            max_model_len: 64,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_logprobs: 20,
            vocab_size: 100,
            block_size: 16,
            num_blocks: 64,
        },
        model: ModelFacts {
            name: "mock".to_owned(),
            architecture: "MockForCausalLM".to_owned(),
            dtype: "float32".to_owned(),
            device: "cpu".to_owned(),
            num_parameters: 1,
            eos_token_ids: vec![2],
        },
        weight_version: "default".to_owned(),
        weight_commit: 0,
        paused: false,
        weight_state: "ready".to_owned(),
    }
}

/// A message without a label.
pub fn envelope(body: Body) -> EngineCoreOutputs {
    EngineCoreOutputs { engine_index: 0, timestamp: 0.0, weight_version: None, weight_commit: None, body }
}

/// What a step launched with these weights says.
pub fn step(weight_version: &str, weight_commit: u64, outputs: Vec<EngineCoreOutput>) -> EngineCoreOutputs {
    EngineCoreOutputs {
        weight_version: Some(weight_version.into()),
        weight_commit: Some(weight_commit),
        ..envelope(Body::Batch(Batch { outputs, ..Batch::default() }))
    }
}

/// A message about the scheduler alone.
pub fn stats(weight_version: &str, weight_commit: u64, stats: SchedulerStats) -> EngineCoreOutputs {
    let batch = Batch { scheduler_stats: Some(stats), ..Batch::default() };
    EngineCoreOutputs { body: Body::Batch(batch), ..step(weight_version, weight_commit, Vec::new()) }
}

/// New tokens of a request that goes on.
pub fn tokens(request_id: &str, token_ids: &[u32]) -> EngineCoreOutput {
    EngineCoreOutput {
        request_id: request_id.to_owned(),
        new_token_ids: token_ids.to_vec(),
        ..EngineCoreOutput::default()
    }
}

/// New tokens of a request that was admitted under these weights.
pub fn admitted(request_id: &str, token_ids: &[u32], weight_version: &str, weight_commit: u64) -> EngineCoreOutput {
    let admission = Some(Admission { weight_version: weight_version.into(), weight_commit });
    EngineCoreOutput { admission, ..tokens(request_id, token_ids) }
}

/// The last tokens of a request.
pub fn finished(request_id: &str, token_ids: &[u32], reason: FinishReason) -> EngineCoreOutput {
    EngineCoreOutput { finish_reason: Some(reason), ..tokens(request_id, token_ids) }
}
