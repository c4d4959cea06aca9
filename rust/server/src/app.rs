//! What the routes share.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rollspan_generate::{ApiError, Reason, shown};
use serde_json::Value;
use tokio::sync::watch;

use crate::engine::Engine;
use crate::engine_set::{EngineSet, Reserved};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::set_update::SetUpdate;
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
    /// The engines behind it.
    pub engines: Arc<EngineSet>,
    /// The weight update that clients are doing.
    pub update: SetUpdate,
    /// Held by weight updates that are one request: a second one waits for the first.
    pub directory_update: tokio::sync::Mutex<()>,
    metrics: OnceLock<Metrics>,
    spool: OnceLock<Arc<Spool>>,
    closing: AtomicBool,
    /// Whether what is still open must end now.
    ended: watch::Sender<bool>,
    open_requests: AtomicUsize,
    logged_names: Mutex<HashSet<String>>,
}

/// One generate request that counts as open until this is dropped.
pub(crate) struct OpenRequest {
    app: Arc<App>,
    /// Index of its engine, once it has one.
    engine: Option<usize>,
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.app.open_requests.fetch_sub(1, Ordering::Relaxed);
        if let Some(index) = self.engine {
            self.app.engines.close_request(index);
        }
    }
}

impl App {
    pub fn new(options: Options) -> Self {
        let engines = Arc::new(EngineSet::new(options.engines.len()));
        Self {
            options,
            started: now().0,
            update: SetUpdate::new(Arc::clone(&engines)),
            engines,
            directory_update: tokio::sync::Mutex::default(),
            metrics: OnceLock::new(),
            spool: OnceLock::new(),
            closing: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            open_requests: AtomicUsize::new(0),
            logged_names: Mutex::default(),
        }
    }

    /// All engines have said hello, in the order of their indices: from now on routes answer.
    pub fn engines_ready(&self, engines: Vec<Engine>) {
        let options = &self.options;
        let parameters = engines.first().map_or(0, |engine| engine.client.hello().model.num_parameters);
        if let Some(directory) = &options.weights_spool {
            let copies = UPLOADED_COPIES * parameters * size_of::<f32>() as u64;
            let limit = options.max_weight_upload_bytes.unwrap_or(copies + UPLOADED_HEADERS);
            let spool = Spool::new(directory.clone(), limit, options.weight_update_timeout);
            drop(self.spool.set(Arc::new(spool)));
        }
        self.engines.ready(engines);
    }

    /// Metrics of the served model, made by the first engine that says hello.
    ///
    /// # Errors
    /// One cannot be registered, which means a bug here.
    pub fn metrics(&self, model: &str) -> prometheus::Result<&Metrics> {
        if let Some(metrics) = self.metrics.get() {
            return Ok(metrics);
        }
        let made = Metrics::new(model)?;
        Ok(self.metrics.get_or_init(|| made))
    }

    /// The text of the metrics.
    ///
    /// # Errors
    /// [`Reason::EngineStarting`], or a bug here.
    pub fn render_metrics(&self) -> Result<Vec<u8>, ApiError> {
        let engines = self.engines.greeted()?;
        let metrics = self.metrics(&self.engines.first()?.served.model);
        let text = metrics.and_then(|metrics| metrics.render(&engines));
        text.map_err(|error| crate::answer::internal(error.to_string()))
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

    /// Deletes all uploads, at the end.
    pub fn discard_uploads(&self) {
        if let Some(spool) = self.spool.get() {
            spool.close();
        }
    }

    /// From now on requests are refused.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    /// Ends calls that still wait for an engine.
    pub fn end_calls(&self) {
        self.ended.send_replace(true);
    }

    /// Waits for [`App::end_calls`].
    pub async fn ended(&self) {
        let mut ended = self.ended.subscribe();
        // The sender lives in `self`, so waiting cannot fail.
        drop(ended.wait_for(|ended| *ended).await);
    }

    /// Refuses work that no engine could do. Gives an engine whose limits and model are those of all.
    ///
    /// # Errors
    /// [`Reason::ShuttingDown`], [`Reason::EngineStarting`] or [`Reason::EngineDead`].
    pub fn check_live(&self) -> Result<Arc<Engine>, ApiError> {
        if self.closing.load(Ordering::Relaxed) {
            return Err(shutting_down());
        }
        self.engines.there()?;
        self.engines.first()
    }

    /// Uploads of weights, while there is an engine for them.
    ///
    /// # Errors
    /// No live engine, or [`Reason::NotFound`] without a directory for them.
    pub fn spool(&self) -> Result<&Arc<Spool>, ApiError> {
        self.check_live()?;
        let off = "weight uploads are off: start the server with --weights-spool DIR";
        self.spool.get().ok_or_else(|| ApiError::new(Reason::NotFound, off))
    }

    /// Counts a generate request as open, in the engine that takes it. Nobody else can take its id until `Reserved` is
    /// dropped; then it must be open in the engine.
    ///
    /// # Errors
    /// [`Reason::QueueFull`], [`Reason::DuplicateRequestId`], or no engine takes it.
    pub fn open_request(
        self: &Arc<Self>,
        request_id: &str,
        session_id: Option<&str>,
        rank: Option<usize>,
    ) -> Result<(OpenRequest, Arc<Engine>, Reserved<'_>), ApiError> {
        let limit = self.options.max_queued_requests;
        let mut open = OpenRequest { app: Arc::clone(self), engine: None };
        if self.open_requests.fetch_add(1, Ordering::Relaxed) >= limit {
            return Err(ApiError::new(Reason::QueueFull, format!("{limit} requests are open, which is the limit")));
        }
        let (index, engine, reserved) = self.engines.open_request(request_id, session_id, rank)?;
        open.engine = Some(index);
        Ok((open, engine, reserved))
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
