//! Metrics for Prometheus.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::Response;

use crate::answer::{Failure, internal};
use crate::app::App;
use crate::metrics;

/// GET /metrics
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let engine = app.engine()?;
    let text = engine.metrics.render(&engine.client.status());
    let mut response = Response::new(text.map_err(|error| internal(error.to_string()))?.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
    Ok(response)
}
