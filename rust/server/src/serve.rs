//! One frontend from its first connection to its last.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use futures::future::{join_all, try_join_all};
use rollspan_engine_client::{ConnectError, Connection};
use rollspan_generate::Served;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::app::App;
use crate::engine::Engine;
use crate::metrics::LinkMetrics;
use crate::routes;

/// How long answers may take to leave once their requests were aborted at shutdown.
const FLUSH_TIME: Duration = Duration::from_secs(2);

/// Between two attempts to reach an engine that is being restarted.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// What whoever started the frontend may wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Connections are accepted.
    Listening(SocketAddr),
    /// All engines have said hello.
    Ready,
}

/// Why a frontend ended by itself.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// There is no engine to serve, or one of them is missing.
    #[error(transparent)]
    Engine(#[from] ConnectError),
    /// The listener cannot be used.
    #[error("the listener failed: {0}")]
    Listener(#[from] std::io::Error),
    /// An engine is not the one that was expected behind its socket.
    #[error("{0}")]
    Index(String),
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
    let _end = End(Arc::clone(&app));
    serve_app(listener, &app, announce, stop).await
}

/// Deletes uploads when serving ends, also where it is dropped because nobody is there any more to serve for: they may lie
/// in memory, where nobody would look for them.
struct End(Arc<App>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.close();
        self.0.discard_uploads();
    }
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

    let engines = tokio::select! {
        connected = connect_all(app) => Some(connected?),
        ended = &mut serving => return Ok(ended?),
        () = &mut stop => None,
    };
    if let Some(engines) = engines {
        app.engines_ready(engines);
        announce(&Event::Ready);
        tokio::select! {
            ended = &mut serving => return Ok(ended?),
            () = app.expire_uploads() => {}
            () = reconnect(app) => {}
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
    let engines = app.engines.greeted().unwrap_or_default();
    let aborted: usize = engines.iter().map(|engine| engine.client.abort_all()).sum();
    tracing::info!(aborted, "aborted the requests that are still open");
    if let Ok(ended) = tokio::time::timeout(FLUSH_TIME, &mut serving).await {
        return Ok(ended?);
    }
    tracing::warn!("some connections did not take their answers in time");
    Ok(())
}

/// Waits for all engines.
async fn connect_all(app: &App) -> Result<Vec<Engine>, ServeError> {
    try_join_all((0..app.engines.size()).map(|index| connect(app, index))).await
}

/// Waits for the engine with this index.
async fn connect(app: &App, index: usize) -> Result<Engine, ServeError> {
    let options = &app.options;
    let path = &options.engines[index];
    let connection = Connection::open(path, options.engine_ready_timeout).await?;
    let hello = connection.hello();
    if hello.engine_index != index as u64 {
        let (path, found) = (path.display(), hello.engine_index);
        return Err(ServeError::Index(format!("the engine at {path} says that it is number {found}, not {index}")));
    }
    tracing::info!("engine {index} is ready and serves {}", hello.model.name);
    let served = Served::new(hello, options.served_model_name.as_deref());
    let metrics = LinkMetrics::new(app.metrics(&served.model)?, hello.engine_index);
    Ok(Engine { client: connection.start(Box::new(metrics)), served })
}

/// Awaits engines of a set that die again, and never ends. A single one that dies stays dead.
async fn reconnect(app: &App) {
    if app.engines.size() == 1 {
        return std::future::pending().await;
    }
    let engines = app.engines.greeted().unwrap_or_default();
    join_all(engines.into_iter().zip(0..).map(|(engine, index)| replace(app, index, engine))).await;
}

/// Puts an engine that was restarted into the place of the one that died there, again and again.
async fn replace(app: &App, index: usize, mut engine: Arc<Engine>) {
    loop {
        let death = engine.client.died().await;
        tracing::error!("engine {index} is gone: {death}");
        let again = loop {
            tokio::time::sleep(RECONNECT_INTERVAL).await;
            match connect(app, index).await {
                Ok(again) => break again,
                Err(error) => tracing::debug!("engine {index}: {error}"),
            }
        };
        tracing::info!("engine {index} is back; it takes requests after the next weight update");
        match app.engines.replace(index, again) {
            Some(placed) => engine = placed,
            None => return,
        }
    }
}
