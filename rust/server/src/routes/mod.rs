//! The routes, one resource a file.

mod abort;
mod cache;
mod generate;
mod health;
mod info;
mod metrics;
mod models;
mod pause;
mod sleep;
mod stream;
mod uploads;
mod weight_facts;
mod weights;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::middleware::from_fn;
use axum::routing::{get, post, put};
use rollspan_generate::{ApiError, Reason};

use crate::answer::Failure;
use crate::app::App;
use crate::{panics, unread};

/// All routes over `app`.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/inference/v1/generate", post(generate::generate).fallback(only_post))
        .route("/inference/v1/abort_requests", post(abort::given).fallback(only_post))
        .route("/abort_requests", post(abort::given_or_all).fallback(only_post))
        .route("/pause", post(pause::pause).fallback(only_post))
        .route("/resume", post(pause::resume).fallback(only_post))
        .route("/reset_prefix_cache", post(cache::reset).fallback(only_post))
        .route("/server_info", get(info::server_info).fallback(only_get))
        .route("/is_paused", get(pause::is_paused).fallback(only_get))
        .route("/sleep", post(sleep::sleep).fallback(only_post))
        .route("/wake_up", post(sleep::wake_up).fallback(only_post))
        .route("/is_sleeping", get(sleep::is_sleeping).fallback(only_get))
        .route("/init_weight_transfer_engine", post(weights::init_transfer).fallback(only_post))
        .route("/shutdown_weight_transfer_engine", post(weights::shut_down_transfer).fallback(only_post))
        .route("/start_weight_update", post(weights::start).fallback(only_post))
        .route("/start_draft_weight_update", post(weights::start_draft).fallback(only_post))
        .route("/update_weights", post(weights::update).fallback(only_post))
        .route("/finish_weight_update", post(weights::finish).fallback(only_post))
        .route("/abort_weight_update", post(weights::abort).fallback(only_post))
        .route("/update_weight_version", post(weight_facts::relabel).fallback(only_post))
        .route("/weight_info", get(weight_facts::info).fallback(only_get))
        .route("/weight_history", get(weight_facts::history).fallback(only_get))
        .route("/weight_checker", post(weight_facts::check).fallback(only_post))
        .route("/weight_uploads/{upload}/{file}", put(uploads::put).fallback(only_put))
        .route("/weight_uploads/{upload}", get(uploads::get).delete(uploads::delete).fallback(only_get_or_delete))
        .route("/get_world_size", get(info::world_size).fallback(only_get))
        .route("/health", get(health::health).fallback(only_get))
        .route("/version", get(health::version).fallback(only_get))
        .route("/v1/models", get(models::list).fallback(only_get))
        .route("/metrics", get(metrics::metrics).fallback(only_get))
        .fallback(unknown)
        .layer(from_fn(unread::discarded))
        .layer(from_fn(panics::caught))
        .with_state(app)
}

async fn unknown(request: Request) -> Failure {
    ApiError::new(Reason::NotFound, format!("{} does not exist", request.uri().path())).into()
}

async fn only_post(request: Request) -> Failure {
    other_method(&request).allowing("POST")
}

async fn only_get(request: Request) -> Failure {
    other_method(&request).allowing("GET, HEAD")
}

async fn only_put(request: Request) -> Failure {
    other_method(&request).allowing("PUT")
}

async fn only_get_or_delete(request: Request) -> Failure {
    other_method(&request).allowing("DELETE, GET, HEAD")
}

fn other_method(request: &Request) -> Failure {
    let message = format!("{} does not take {}", request.uri().path(), request.method());
    ApiError::new(Reason::MethodNotAllowed, message).into()
}

/// A header as text; what is no UTF-8 is replaced.
fn header_text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
}
