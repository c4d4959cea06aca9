//! The handle on one engine.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rollspan_protocol::{Body, EngineCoreOutputs, EngineHello, FrameKind, UtilityRequest, encode_abort, encode_frame};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::error::{CallError, ConnectError, Death, SubmitError};
use crate::link::{self, Link};
use crate::mailbox::Mailbox;
use crate::observer::Observer;
use crate::registry::{Registry, Step};
use crate::status::EngineStatus;
use crate::stream::{RequestStream, Submission};
use crate::utility::Calls;

/// Ids in one ABORT frame; far below the size limit of any engine.
const ABORT_IDS: usize = 1024;

/// A link to one engine; clones share it. The link is closed when the last clone and the last stream are dropped.
#[derive(Clone)]
pub struct EngineClient {
    pub(crate) shared: Arc<Shared>,
    _task: Arc<TaskGuard>,
}

/// Ends the link's task with the last handle.
struct TaskGuard(AbortHandle);

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// State of one link.
pub(crate) struct Shared {
    hello: EngineHello,
    /// Largest frame that the engine takes, in bytes.
    frame_limit: usize,
    /// Frames to write, in order. Unbounded: what waits here is held by its open request or call, whose number is bounded.
    outbox: mpsc::UnboundedSender<Vec<u8>>,
    registry: Registry,
    calls: Calls,
    status: Mutex<EngineStatus>,
    death: watch::Sender<Option<Death>>,
    observer: Box<dyn Observer>,
}

/// An engine that has said hello, before requests go to it.
pub struct Connection {
    link: Link,
    hello: EngineHello,
}

impl Connection {
    /// Connects to the engine behind the Unix socket `path` and waits for its hello, `timeout` in all. A socket that is
    /// not there yet, or where nobody listens yet, is tried again.
    ///
    /// # Errors
    /// The engine was not ready in time, is of another version, or died before its hello.
    pub async fn open(path: &Path, timeout: Duration) -> Result<Self, ConnectError> {
        let connecting = link::connect(path);
        let (link, hello) =
            tokio::time::timeout(timeout, connecting).await.map_err(|_| ConnectError::Timeout(timeout))??;
        Ok(Self { link, hello })
    }

    /// What the engine said of itself.
    pub fn hello(&self) -> &EngineHello {
        &self.hello
    }

    /// Begins to carry messages, on a task of the current runtime.
    pub fn start(self, observer: Box<dyn Observer>) -> EngineClient {
        let Self { link, hello } = self;
        let (outbox, frames) = mpsc::unbounded_channel();
        observer.weight_commit(hello.weight_commit);
        let shared = Arc::new(Shared {
            frame_limit: link::frame_limit(&hello),
            outbox,
            registry: Registry::default(),
            calls: Calls::default(),
            status: Mutex::new(EngineStatus::at_start(&hello)),
            death: watch::Sender::new(None),
            observer,
            hello,
        });
        let task = tokio::spawn(link::run(link, Arc::clone(&shared), frames)).abort_handle();
        EngineClient { shared, _task: Arc::new(TaskGuard(task)) }
    }
}

impl EngineClient {
    /// What the engine said of itself when the link began.
    pub fn hello(&self) -> &EngineHello {
        &self.shared.hello
    }

    /// What the engine last said of itself.
    pub fn status(&self) -> EngineStatus {
        self.shared.status().clone()
    }

    /// Why the engine is gone, once it is.
    pub fn death(&self) -> Option<Death> {
        self.shared.death.borrow().clone()
    }

    /// Whether the engine is gone.
    pub fn is_dead(&self) -> bool {
        self.shared.death.borrow().is_some()
    }

    /// Waits until the engine is gone.
    pub async fn died(&self) -> Death {
        let mut watch = self.shared.death.subscribe();
        let gone = watch.wait_for(Option::is_some).await.ok().and_then(|death| death.clone());
        gone.unwrap_or_else(|| Death::engine("the engine link was closed"))
    }

    /// Number of open submissions.
    pub fn open_requests(&self) -> usize {
        self.shared.registry.len()
    }

    /// Whether a submission of this external id is open.
    pub fn is_open(&self, external_id: &str) -> bool {
        self.shared.registry.is_open(external_id)
    }

    /// Sends a submission to the engine.
    ///
    /// # Errors
    /// Its external id is open already, it does not fit into a frame, or the engine is gone. Nothing was sent then.
    pub fn submit(&self, submission: Submission) -> Result<RequestStream, SubmitError> {
        let Submission { external_id, requests, delivery } = submission;
        let shared = &self.shared;
        let frames = requests
            .iter()
            .map(|request| encode_frame(FrameKind::Add, &request.encode(), shared.frame_limit))
            .collect::<Result<Vec<_>, _>>()
            .map_err(SubmitError::TooLarge)?;
        let ids = requests.iter().map(|request| request.request_id.as_str().into()).collect();
        let prompt_tokens =
            requests.first().and_then(|request| request.prompt_token_ids.as_ref()).map_or(0, |ids| ids.len());
        let mailbox = Arc::new(Mailbox::new(external_id.into(), ids, prompt_tokens, delivery));
        shared.registry.open(&mailbox)?;
        let stream = RequestStream { mailbox, client: self.clone() };
        for frame in frames {
            shared.send(frame);
        }
        Ok(stream)
    }

    /// Ends open submissions by external id: their streams get what is there already and finish with `abort`. Gives how
    /// many were open.
    pub fn abort(&self, external_ids: &[String]) -> usize {
        self.shared.abort(Some(external_ids))
    }

    /// [`EngineClient::abort`] for all open submissions.
    pub fn abort_all(&self) -> usize {
        self.shared.abort(None)
    }

    /// Calls a method of the engine and waits for its answer as long as it takes. Dropping the future forgets the
    /// answer, not the call.
    ///
    /// # Errors
    /// The engine answered with a failure or is gone.
    pub async fn call(&self, method: &str, args: Vec<Value>) -> Result<Value, CallError> {
        let shared = &self.shared;
        let (call_id, answer) = shared.calls.begin();
        let forget = ForgetCall { shared, call_id };
        let call = UtilityRequest { client_index: 0, call_id, method: method.to_owned(), args };
        let frame =
            encode_frame(FrameKind::Utility, &call.encode(), shared.frame_limit).map_err(CallError::TooLarge)?;
        // Looked at behind `begin`: a death in between has either failed the call already or is seen here.
        if let Some(death) = self.death() {
            return Err(death.into());
        }
        shared.send(frame);
        let result = answer.await.unwrap_or_else(|_| Err(Death::engine("the engine link was closed").into()));
        drop(forget);
        result
    }
}

struct ForgetCall<'a> {
    shared: &'a Shared,
    call_id: u64,
}

impl Drop for ForgetCall<'_> {
    fn drop(&mut self) {
        self.shared.calls.forget(self.call_id);
    }
}

impl Shared {
    fn status(&self) -> MutexGuard<'_, EngineStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, frame: Vec<u8>) {
        // The outbox closes when the engine dies, and `die` has told everybody then.
        drop(self.outbox.send(frame));
    }

    fn send_abort(&self, ids: &[Arc<str>]) {
        for ids in ids.chunks(ABORT_IDS) {
            match encode_frame(FrameKind::Abort, &encode_abort(ids), self.frame_limit) {
                Ok(frame) => self.send(frame),
                Err(error) => {
                    tracing::error!("requests go on in the engine: their abort does not fit a frame: {error}");
                }
            }
        }
    }

    fn abort(&self, external_ids: Option<&[String]>) -> usize {
        let (found, ids) = self.registry.abort(external_ids, self.hello.engine_index, self.observer());
        self.send_abort(&ids);
        found
    }

    pub fn abandon(&self, mailbox: &Mailbox) {
        let ids = self.registry.abandon(mailbox, self.observer());
        self.send_abort(&ids);
    }

    pub fn observer(&self) -> &dyn Observer {
        &*self.observer
    }

    /// Takes in one message of the engine.
    pub fn receive(&self, message: EngineCoreOutputs) {
        match message.body {
            Body::Batch(batch) => {
                if let Some(commit) = message.weight_commit {
                    self.observer().weight_commit(commit);
                }
                let stats = batch.scheduler_stats.as_ref();
                if let Some(stats) = stats {
                    self.observer().scheduler_stats(stats);
                }
                self.status().update(stats, message.weight_version.as_ref(), message.weight_commit);
                let step = Step {
                    engine_index: message.engine_index,
                    weight_version: message.weight_version,
                    weight_commit: message.weight_commit,
                    received: Instant::now(),
                };
                let siblings = self.registry.deliver(batch.outputs, &step, self.observer());
                self.send_abort(&siblings);
            }
            Body::Utility(output) => self.calls.answer(output),
            Body::WaveComplete(_) | Body::StartWave(_) => {}
        }
    }

    /// Ends the requests that an undecodable message names.
    pub fn fail_requests(&self, ids: &[String], error: &Death) {
        self.registry.fail(ids, error, self.observer());
    }

    /// Ends everything: the engine is gone, or the link had to be closed.
    pub fn die(&self, death: &Death) {
        tracing::error!(reason = death.reason, "engine link lost: {death}");
        self.death.send_replace(Some(death.clone()));
        self.status().stop();
        self.registry.die(death, self.observer());
        self.calls.fail(death);
    }
}
