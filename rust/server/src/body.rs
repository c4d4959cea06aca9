//! Request bodies, read up to a limit.

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_LENGTH;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use rollspan_generate::{ApiError, Reason};

/// Reads a body, and never holds more than `limit` bytes of it.
///
/// # Errors
/// [`Reason::BodyTooLarge`], or the body came to no end.
pub(crate) async fn read(headers: &HeaderMap, mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
    if announced(headers).is_some_and(|length| length > limit as u64) {
        return Err(too_large(limit));
    }
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| unreadable(&error))?;
        let Ok(piece) = frame.into_data() else { continue };
        if first.len() + all.len() + piece.len() > limit {
            return Err(too_large(limit));
        }
        if first.is_empty() && all.is_empty() {
            first = piece;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&piece);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(Reason::BodyTooLarge, format!("request body must be at most {limit} bytes"))
}

/// The body of a request came to no end.
pub(crate) fn unreadable(error: &axum::Error) -> ApiError {
    ApiError::new(Reason::InvalidRequest, format!("request body cannot be read: {error}"))
}
