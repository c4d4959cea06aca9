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

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use axum::middleware::from_fn;
    use axum::routing::get;
    use tower::ServiceExt;

    #[tokio::test]
    async fn a_panic_in_a_handler_is_a_500_in_the_one_shape_of_errors() {
        let panics = || async { assert!(std::hint::black_box(false), "on purpose") };
        let router = Router::new().route("/panics", get(panics)).layer(from_fn(super::caught));
        let request = Request::get("/panics").body(Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["error"]["reason"], "internal_error");
    }
}
