//! Uploads of weights, below `/weight_uploads`.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_LENGTH;
use axum::response::Response;
use http_body_util::BodyExt;
use rollspan_generate::{ApiError, Reason};
use serde_json::{Value, json};

use super::header_text;
use crate::answer::{Failure, internal, value};
use crate::app::App;
use crate::body::unreadable;
use crate::uploads::{CONTENT_RANGE, Part, Writer, check_file_name, parse_content_range, wrong_length};

const CHECKSUM: &str = "X-Checksum";

/// PUT `/weight_uploads/{upload}/{file}`: a range of a file, or a whole one.
pub(super) async fn put(
    State(app): State<Arc<App>>,
    path: Result<Path<(String, String)>, PathRejection>,
    request: Request,
) -> Result<Response, Failure> {
    let spool = Arc::clone(app.spool()?);
    let Path((upload, file)) = path.map_err(|error| unreadable_path(&error))?;
    let (parts, mut body) = request.into_parts();
    let length = header_text(&parts.headers, CONTENT_LENGTH.as_str()).and_then(|text| text.parse().ok());
    let range = header_text(&parts.headers, CONTENT_RANGE).map(|text| parse_content_range(&text)).transpose()?;
    let checksum = checksum(&parts.headers)?;
    check_file_name(&file)?;
    let part = match range {
        Some((range, total)) => Part::Range(range, total),
        None => Part::Whole(length),
    };
    let range = part.range();
    if let Some(length) = length.filter(|length| *length != range.end - range.start) {
        return Err(wrong_length(&part, length).into());
    }
    let mut writer = Writer::begin(spool, upload.clone(), file.clone(), part, checksum).await?;
    while let Some(frame) = body.frame().await {
        if let Ok(piece) = frame.map_err(|error| unreadable(&error))?.into_data() {
            writer.write(piece).await?;
        }
    }
    let received = writer.finish().await?;
    Ok(value(&json!({
        "upload": upload,
        "file": file,
        "received": received["received"],
        "total": received["total"],
    })))
}

/// GET `/weight_uploads/{upload}`: what of its files is there.
pub(super) async fn get(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Response, Failure> {
    let spool = app.spool()?;
    let Path(upload) = path.map_err(|error| unreadable_path(&error))?;
    Ok(value(&spool.describe(&upload)?))
}

/// DELETE `/weight_uploads/{upload}`
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Response, Failure> {
    let spool = Arc::clone(app.spool()?);
    let Path(upload) = path.map_err(|error| unreadable_path(&error))?;
    let name = upload.clone();
    let deleted = tokio::task::spawn_blocking(move || spool.delete(&name)).await;
    deleted.map_err(|error| internal(format!("deleting an upload: {error}")))??;
    tracing::info!("upload {upload} deleted");
    Ok(value(&json!({"status": "deleted"})))
}

fn checksum(headers: &HeaderMap) -> Result<Option<blake3::Hash>, ApiError> {
    let Some(text) = header_text(headers, CHECKSUM) else { return Ok(None) };
    let digits =
        text.trim().strip_prefix("blake3:").filter(|digits| !digits.bytes().any(|byte| byte.is_ascii_uppercase()));
    let hash = digits.and_then(|digits| blake3::Hash::from_hex(digits).ok());
    let refused = || ApiError::wrong(CHECKSUM, "blake3: and 64 lower-case hex digits", &Value::from(text.as_str()));
    hash.map(Some).ok_or_else(refused)
}

fn unreadable_path(error: &PathRejection) -> ApiError {
    ApiError::new(Reason::InvalidRequest, format!("the path cannot be read: {error}"))
}
