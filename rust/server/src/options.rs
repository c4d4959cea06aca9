//! What a frontend is started with.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of one frontend.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Unix sockets of the engines, by their indices.
    pub engines: Vec<PathBuf>,
    /// Name of the model in the API; the engine's own when `None`.
    pub served_model_name: Option<String>,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// Most open generate requests.
    pub max_queued_requests: usize,
    /// Refuse unknown request fields.
    pub strict_requests: bool,
    /// How long the engine may take to start.
    pub engine_ready_timeout: Duration,
    /// How long open requests may go on once the frontend is told to stop.
    pub shutdown_timeout: Duration,
    /// Private directory for uploads of weights; they are refused when `None`.
    pub weights_spool: Option<PathBuf>,
    /// Most bytes of all uploads of weights together; two models in float32 and some room when `None`.
    pub max_weight_upload_bytes: Option<u64>,
    /// How long an upload of weights may be idle before it is deleted.
    pub weight_update_timeout: Duration,
}

impl Options {
    /// The defaults for one engine behind this socket.
    pub fn new(engine: impl Into<PathBuf>) -> Self {
        Self {
            engines: vec![engine.into()],
            served_model_name: None,
            max_body_bytes: 64 * 1024 * 1024,
            max_queued_requests: 4096,
            strict_requests: false,
            engine_ready_timeout: Duration::from_secs(600),
            shutdown_timeout: Duration::from_secs(5),
            weights_spool: None,
            max_weight_upload_bytes: None,
            weight_update_timeout: Duration::from_secs(600),
        }
    }
}
