//! Metrics for Prometheus.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::Response;

use crate::answer::Failure;
use crate::app::App;
use crate::metrics;

/// GET /metrics
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let mut response = Response::new(app.render_metrics()?.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
    Ok(response)
}
