//! What a handler leaves of a request's body is read and thrown away.
//!
//! A client may still be writing the body when its refusal is on the way. A connection that is closed under its hands
//! would take the answer away, or the next request that the client's pool sends on it.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody};
use axum::extract::Request;
use axum::http::header::EXPECT;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::runtime::Handle;

/// For how long.
const DISCARD_TIME: Duration = Duration::from_secs(10);

/// The part of a body that nobody has read yet; `None` once it has come to its end.
struct Unread(Option<BodyDataStream>);

/// Runs the handler, and reads the rest of the body when it drops it.
pub(crate) async fn discarded(request: Request, next: Next) -> Response {
    // A client that asks before it sends a body sends none after a refusal.
    if request.body().is_end_stream() || request.headers().contains_key(EXPECT) {
        return next.run(request).await;
    }
    next.run(request.map(|body| Body::from_stream(Unread(Some(body.into_data_stream()))))).await
}

impl Stream for Unread {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(rest) = &mut self.0 else { return Poll::Ready(None) };
        let polled = rest.poll_next_unpin(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.0 = None;
        }
        polled
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let Some(mut rest) = self.0.take() else { return };
        // Without a runtime the connection is gone already.
        if let Ok(runtime) = Handle::try_current() {
            let discard = async move { while matches!(rest.next().await, Some(Ok(_))) {} };
            runtime.spawn(tokio::time::timeout(DISCARD_TIME, discard));
        }
    }
}
