//! What the routes share.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rollspan_engine_client::EngineClient;
use rollspan_generate::{ApiError, Reason, Served, shown};
use serde_json::Value;
use tokio::sync::watch;

use crate::metrics::Metrics;
use crate::options::Options;
use crate::uploads::Spool;

/// So many different ignored names are remembered; each is logged once.
const LOGGED_NAMES: usize = 1000;

/// Uploads of weights may together take so many copies of the model in float32, and bytes for the headers of their files.
const UPLOADED_COPIES: u64 = 2;
const UPLOADED_HEADERS: u64 = 64 * 1024 * 1024;

/// State of one frontend.
pub(crate) struct App {
    pub options: Options,
    /// Seconds since 1970.
    pub started: u64,
    /// Held by weight updates that are one request: a second one waits for the first.
    pub directory_update: tokio::sync::Mutex<()>,
    engine: OnceLock<Arc<Engine>>,
    spool: OnceLock<Arc<Spool>>,
    closing: AtomicBool,
    /// Whether what is still open must end now.
    ended: watch::Sender<bool>,
    open_requests: AtomicUsize,
    logged_names: Mutex<HashSet<String>>,
}

/// An engine that has said hello.
pub(crate) struct Engine {
    pub client: EngineClient,
    pub metrics: Arc<Metrics>,
    pub served: Served,
}

/// One generate request that counts as open until this is dropped.
pub(crate) struct OpenRequest(Arc<App>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.open_requests.fetch_sub(1, Ordering::Relaxed);
    }
}

impl App {
    pub fn new(options: Options) -> Self {
        Self {
            options,
            started: now().0,
            directory_update: tokio::sync::Mutex::default(),
            engine: OnceLock::new(),
            spool: OnceLock::new(),
            closing: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            open_requests: AtomicUsize::new(0),
            logged_names: Mutex::default(),
        }
    }

    /// The engine has said hello: from now on routes answer.
    pub fn engine_ready(&self, engine: Engine) {
        let options = &self.options;
        if let Some(directory) = &options.weights_spool {
            let copies = UPLOADED_COPIES * engine.client.hello().model.num_parameters * size_of::<f32>() as u64;
            let limit = options.max_weight_upload_bytes.unwrap_or(copies + UPLOADED_HEADERS);
            let spool = Spool::new(directory.clone(), limit, options.weight_update_timeout);
            drop(self.spool.set(Arc::new(spool)));
        }
        drop(self.engine.set(Arc::new(engine)));
    }

    /// Deletes uploads that are idle for too long, and never ends.
    pub async fn expire_uploads(&self) {
        let Some(spool) = self.spool.get() else { return std::future::pending().await };
        loop {
            let spool = Arc::clone(spool);
            let wait = tokio::task::spawn_blocking(move || spool.expire()).await;
            tokio::time::sleep(wait.unwrap_or(self.options.weight_update_timeout)).await;
        }
    }

    /// Deletes all uploads.
    pub async fn discard_uploads(&self) {
        if let Some(spool) = self.spool.get().map(Arc::clone) {
            let closed = tokio::task::spawn_blocking(move || spool.close()).await;
            closed.unwrap_or_else(|error| tracing::warn!("deleting uploads: {error}"));
        }
    }

    /// From now on requests are refused.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    /// Ends calls that still wait for the engine.
    pub fn end_calls(&self) {
        self.ended.send_replace(true);
    }

    /// Waits for [`App::end_calls`].
    pub async fn ended(&self) {
        let mut ended = self.ended.subscribe();
        // The sender lives in `self`, so waiting cannot fail.
        drop(ended.wait_for(|ended| *ended).await);
    }

    /// The engine, dead or alive, once it has said hello.
    ///
    /// # Errors
    /// [`Reason::EngineStarting`].
    pub fn engine(&self) -> Result<&Arc<Engine>, ApiError> {
        self.engine.get().ok_or_else(|| ApiError::new(Reason::EngineStarting, "the engine is still starting"))
    }

    /// The engine, when it can take requests.
    ///
    /// # Errors
    /// [`Reason::ShuttingDown`], [`Reason::EngineStarting`] or [`Reason::EngineDead`].
    pub fn live_engine(&self) -> Result<&Arc<Engine>, ApiError> {
        if self.closing.load(Ordering::Relaxed) {
            return Err(shutting_down());
        }
        let engine = self.engine()?;
        match engine.client.death() {
            Some(death) => Err(ApiError::new(Reason::EngineDead, death.message)),
            None => Ok(engine),
        }
    }

    /// Uploads of weights, on a live engine.
    ///
    /// # Errors
    /// No live engine, or [`Reason::NotFound`] without a directory for them.
    pub fn spool(&self) -> Result<&Arc<Spool>, ApiError> {
        self.live_engine()?;
        let off = "weight uploads are off: start the server with --weights-spool DIR";
        self.spool.get().ok_or_else(|| ApiError::new(Reason::NotFound, off))
    }

    /// Counts a generate request as open.
    ///
    /// # Errors
    /// [`Reason::QueueFull`].
    pub fn open_request(self: &Arc<Self>) -> Result<OpenRequest, ApiError> {
        let limit = self.options.max_queued_requests;
        let open = OpenRequest(Arc::clone(self));
        if self.open_requests.fetch_add(1, Ordering::Relaxed) < limit {
            return Ok(open);
        }
        Err(ApiError::new(Reason::QueueFull, format!("{limit} requests are open, which is the limit")))
    }

    /// Logs unknown field names, each once.
    pub fn log_ignored(&self, names: &[String]) {
        if names.is_empty() {
            return;
        }
        let mut logged = self.logged_names.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names.iter().map(|name| shown(&Value::from(name.as_str()))) {
            if logged.len() < LOGGED_NAMES && !logged.contains(&name) {
                tracing::info!(field = %name, "ignoring an unknown request field");
                logged.insert(name);
            }
        }
    }
}

/// The answer of a server that is going away.
pub(crate) fn shutting_down() -> ApiError {
    ApiError::new(Reason::ShuttingDown, "the server is shutting down")
}

/// Seconds since 1970, whole and exact.
pub(crate) fn now() -> (u64, f64) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs(), since.as_secs_f64())
}
