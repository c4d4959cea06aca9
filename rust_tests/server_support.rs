//! A server on a scripted engine, and a small HTTP client that shows every byte.
#![allow(dead_code, reason = "each test crate uses its part")]
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what goes wrong in a test double fails the test")]

use std::net::SocketAddr;
use std::time::Duration;

use bytes::BytesMut;
use rollspan_engine_client::mock::{MockEngine, MockLink, hello};
use rollspan_protocol::EngineHello;
use rollspan_server::{Event, Options, ServeError, serve};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// The generate route.
pub const GENERATE: &str = "/inference/v1/generate";

/// A server that is being tested.
pub struct Server {
    pub address: SocketAddr,
    pub events: mpsc::UnboundedReceiver<Event>,
    pub serving: JoinHandle<Result<(), ServeError>>,
    pub stop: oneshot::Sender<()>,
}

impl Server {
    /// Starts a server, whose engine may come later.
    pub async fn start(options: Options) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, mut events) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let announce = move |event: &Event| drop(sender.send(event.clone()));
        let serving = tokio::spawn(serve(listener, options, announce, async { drop(stopped.await) }));
        assert_eq!(events.recv().await, Some(Event::Listening(address)));
        Self { address, events, serving, stop }
    }

    /// Starts a server with these options on a scripted engine.
    pub async fn with_engine(adjust: impl FnOnce(&mut Options), hello: &EngineHello) -> (Self, MockLink, MockEngine) {
        let engine = MockEngine::bind();
        let mut options = Options::new(engine.path());
        adjust(&mut options);
        let mut server = Self::start(options).await;
        let link = engine.accept(hello).await;
        assert_eq!(server.events.recv().await, Some(Event::Ready));
        (server, link, engine)
    }

    /// A server with the default options on a scripted engine.
    pub async fn ready() -> (Self, MockLink, MockEngine) {
        Self::with_engine(|_| {}, &hello()).await
    }

    /// Opens a connection and sends a request.
    pub async fn send(&self, method: &str, path: &str, body: &[u8]) -> Connection {
        let length = format!("Content-Length: {}", body.len());
        let mut connection = self.begin(method, path, &[length.as_str()]).await;
        connection.write(body).await;
        connection
    }

    /// Opens a connection and sends the head of a request.
    pub async fn begin(&self, method: &str, path: &str, headers: &[&str]) -> Connection {
        let socket = TcpStream::connect(self.address).await.unwrap();
        let mut connection = Connection { socket, unread: BytesMut::new() };
        let head = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n{}\r\n\r\n", headers.join("\r\n"));
        connection.write(head.as_bytes()).await;
        connection
    }

    /// Sends a request and reads its answer.
    pub async fn ask(&self, method: &str, path: &str, body: &Value) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.send(method, path, body.as_bytes()).await.answer().await
    }

    /// Posts a generate request.
    pub async fn generate(&self, body: &Value) -> Connection {
        self.send("POST", GENERATE, body.to_string().as_bytes()).await
    }
}

/// A connection on which one request was sent.
pub struct Connection {
    socket: TcpStream,
    unread: BytesMut,
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Status and reason of an error.
    pub fn failure(&self) -> (u16, String) {
        (self.status, self.json()["error"]["reason"].as_str().unwrap_or_default().to_owned())
    }

    /// A header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The data of the events, the last of which must be `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let text = std::str::from_utf8(&self.body).unwrap();
        let events = text.strip_suffix("data: [DONE]\n\n").expect("a stream ends with [DONE]");
        let data = events.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

impl Connection {
    /// Sends more bytes of the request.
    pub async fn write(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).await.unwrap();
    }

    async fn read_some(&mut self) {
        assert!(self.socket.read_buf(&mut self.unread).await.unwrap() > 0, "the server closed in the middle");
    }

    /// Reads up to and with `end`.
    async fn until(&mut self, end: &[u8]) -> Vec<u8> {
        loop {
            if let Some(position) = self.unread.windows(end.len()).position(|bytes| bytes == end) {
                return self.unread.split_to(position + end.len()).to_vec();
            }
            self.read_some().await;
        }
    }

    async fn exactly(&mut self, length: usize) -> Vec<u8> {
        while self.unread.len() < length {
            self.read_some().await;
        }
        self.unread.split_to(length).to_vec()
    }

    /// Reads status and headers.
    pub async fn head(&mut self) -> (u16, String) {
        let head = String::from_utf8(self.until(b"\r\n\r\n").await).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head)
    }

    /// Reads one piece of a chunked body; `None` at its end.
    pub async fn piece(&mut self) -> Option<Vec<u8>> {
        let size = String::from_utf8(self.until(b"\r\n").await).unwrap();
        let size = usize::from_str_radix(size.trim_end(), 16).unwrap();
        let piece = self.exactly(size).await;
        self.exactly(2).await;
        (size > 0).then_some(piece)
    }

    /// Reads the answer to its end.
    pub async fn answer(mut self) -> Answer {
        let (status, head) = self.head().await;
        self.rest(status, head).await
    }

    /// Reads what is behind the head.
    pub async fn rest(mut self, status: u16, head: String) -> Answer {
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let body = if let Some(length) = length {
            self.exactly(length.parse().unwrap()).await
        } else {
            let mut body = Vec::new();
            while let Some(piece) = self.piece().await {
                body.extend(piece);
            }
            body
        };
        Answer { status, head, body }
    }
}

/// Makes sure that the server has taken in everything that the engine sent so far: its messages come in order.
pub async fn settle(server: &Server, link: &mut MockLink) {
    let asked = server.send("GET", "/is_paused", b"").await;
    let call = link.call().await;
    assert_eq!(call.method, "is_scheduler_paused");
    link.answer(call.call_id, Ok(Value::Bool(false))).await;
    assert_eq!(asked.answer().await.status, 200);
}

/// Fails a test that hangs.
pub async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.expect("this takes too long")
}
