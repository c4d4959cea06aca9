//! A handler that panics costs its own request a 500, and nothing else.

use std::panic::AssertUnwindSafe;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;

use crate::answer::{Failure, internal};

/// Runs the handler; a panic in it becomes an `internal_error`.
pub(crate) async fn caught(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    // Handlers share only what is behind locks that survive a panic.
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_) => Failure::from(internal(format!("the handler of {path} panicked"))).into_response(),
    }
}
