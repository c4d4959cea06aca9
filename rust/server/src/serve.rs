//! One frontend from its first connection to its last.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use rollspan_engine_client::{ConnectError, Connection};
use rollspan_generate::Served;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::app::{App, Engine};
use crate::metrics::{LinkObserver, Metrics};
use crate::routes;

/// How long answers may take to leave once their requests were aborted at shutdown.
const FLUSH_TIME: Duration = Duration::from_secs(2);

/// What whoever started the frontend may wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Connections are accepted.
    Listening(SocketAddr),
    /// The engine has said hello.
    Ready,
}

/// Why a frontend ended by itself.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// There is no engine to serve.
    #[error(transparent)]
    Engine(#[from] ConnectError),
    /// The listener cannot be used.
    #[error("the listener failed: {0}")]
    Listener(#[from] std::io::Error),
    /// A metric cannot be registered, which means a bug here.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Serves on `listener` until `stop` is there; then refuses new work, lets open requests go on for the shutdown timeout,
/// and ends those that take longer with what they have.
///
/// # Errors
/// The engine cannot start or does not in time, or the listener fails.
pub async fn serve(
    listener: TcpListener,
    options: crate::Options,
    announce: impl FnMut(&Event),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let app = Arc::new(App::new(options));
    let ended = serve_app(listener, &app, announce, stop).await;
    app.discard_uploads().await;
    ended
}

async fn serve_app(
    listener: TcpListener,
    app: &Arc<App>,
    mut announce: impl FnMut(&Event),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let address = listener.local_addr()?;
    let (close, closed) = oneshot::channel::<()>();
    // A token that waits for the next one to fill a segment would make the stream stutter.
    let listener = listener.tap_io(|socket| {
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY: {error}");
        }
    });
    let serving = axum::serve(listener, routes::router(Arc::clone(app))).with_graceful_shutdown(async {
        // A sender that is gone closes, too.
        drop(closed.await);
    });
    let mut serving = pin!(serving.into_future());
    let mut stop = pin!(stop);
    announce(&Event::Listening(address));
    tracing::info!("listening on http://{address}");

    let engine = tokio::select! {
        connected = connect(app) => Some(connected?),
        ended = &mut serving => return Ok(ended?),
        () = &mut stop => None,
    };
    if let Some(engine) = engine {
        app.engine_ready(engine);
        announce(&Event::Ready);
        tokio::select! {
            ended = &mut serving => return Ok(ended?),
            () = app.expire_uploads() => {}
            () = &mut stop => {}
        }
    }

    tracing::info!("shutting down");
    app.close();
    drop(close);
    if let Ok(ended) = tokio::time::timeout(app.options.shutdown_timeout, &mut serving).await {
        return Ok(ended?);
    }
    app.end_calls();
    if let Ok(engine) = app.engine() {
        let aborted = engine.client.abort_all();
        tracing::info!(aborted, "aborted the requests that are still open");
    }
    if let Ok(ended) = tokio::time::timeout(FLUSH_TIME, &mut serving).await {
        return Ok(ended?);
    }
    tracing::warn!("some connections did not take their answers in time");
    Ok(())
}

/// Waits for the engine.
async fn connect(app: &App) -> Result<Engine, ServeError> {
    let options = &app.options;
    let connection = Connection::open(&options.engine, options.engine_ready_timeout).await?;
    let hello = connection.hello();
    tracing::info!("engine {} is ready and serves {}", hello.engine_index, hello.model.name);
    let served = Served::new(hello, options.served_model_name.as_deref());
    let metrics = Arc::new(Metrics::new(&served.model)?);
    let client = connection.start(Box::new(LinkObserver(Arc::clone(&metrics))));
    Ok(Engine { client, metrics, served })
}
