//! Answers: JSON bodies, the one shape of an error, and the headers that belong to both.

use axum::body::Body;
use axum::http::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use rollspan_engine_client::{CallError, Death, RequestError, SubmitError};
use rollspan_generate::{ApiError, Reason, ignored_fields_header};
use serde_json::Value;

/// Names a request, in both directions.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Names the unknown fields of a request.
const IGNORED_FIELDS: HeaderName = HeaderName::from_static("x-ignored-fields");

/// A 200 with a JSON body.
pub(crate) fn json(body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A 200 with this value.
pub(crate) fn value(value: &Value) -> Response {
    json(value.to_string())
}

/// Adds `X-Request-Id` and `X-Ignored-Fields`, where there is something to say.
pub(crate) fn add_headers(headers: &mut HeaderMap, request_id: Option<&str>, ignored_fields: &[String]) {
    if let Some(value) = request_id.and_then(request_id_value) {
        headers.insert(REQUEST_ID, value);
    }
    if let Some(value) = ignored_fields_header(ignored_fields).and_then(|names| HeaderValue::try_from(names).ok()) {
        headers.insert(IGNORED_FIELDS, value);
    }
}

/// The id as UTF-8; spaces at its ends are percent-encoded, because header values lose them.
fn request_id_value(id: &str) -> Option<HeaderValue> {
    let inner = id.trim_matches(' ');
    let leading = id.len() - id.trim_start_matches(' ').len();
    let trailing = id.len() - inner.len() - leading;
    let encoded = format!("{}{inner}{}", "%20".repeat(leading), "%20".repeat(trailing));
    HeaderValue::from_bytes(encoded.as_bytes()).ok()
}

/// A failed request on its way out, with the id of the request where it is known.
#[derive(Debug)]
pub(crate) struct Failure {
    error: ApiError,
    request_id: Option<String>,
    allow: Option<&'static str>,
    /// What became of a call in each engine of a set.
    engines: Option<Vec<Value>>,
}

impl Failure {
    /// Says which request failed.
    pub fn of_request(mut self, request_id: Option<&str>) -> Self {
        self.request_id = request_id.map(str::to_owned);
        self
    }

    /// Says what became of a call in each engine.
    pub fn in_engines(mut self, engines: Vec<Value>) -> Self {
        self.engines = Some(engines);
        self
    }

    /// Why it failed.
    pub fn reason(&self) -> Reason {
        self.error.reason
    }

    /// Says which methods a route takes.
    pub fn allowing(mut self, methods: &'static str) -> Self {
        self.allow = Some(methods);
        self
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self { error, request_id: None, allow: None, engines: None }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self { error, request_id, allow, engines } = self;
        log_failure(&error, request_id.as_deref());
        let mut body = error.body();
        if let Some(engines) = engines {
            body["engines"] = engines.into();
        }
        let mut response = value(&body);
        *response.status_mut() = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        add_headers(headers, request_id.as_deref(), &[]);
        if let Some(seconds) = error.reason.retry_after() {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        if let Some(methods) = allow {
            headers.insert(ALLOW, HeaderValue::from_static(methods));
        }
        response
    }
}

/// Logs a failure that is not the client's, under the id that the client was told.
pub(crate) fn log_failure(error: &ApiError, request_id: Option<&str>) {
    if error.status() == 500 {
        tracing::error!(request_id, reason = error.reason.as_str(), "{error}");
    }
}

/// A failure that is ours.
pub(crate) fn internal(message: impl Into<String>) -> ApiError {
    ApiError::new(Reason::InternalError, message)
}

fn of_death(death: &Death) -> ApiError {
    ApiError::new(Reason::from_name(death.reason), death.message.clone())
}

/// How a request's client is told of its failure.
pub(crate) fn of_request(error: &RequestError) -> ApiError {
    match error {
        RequestError::Engine(error) => ApiError::from(error),
        RequestError::Dead(death) => of_death(death),
        other => internal(other.to_string()),
    }
}

/// How a request's client is told that it was not sent.
pub(crate) fn of_submission(error: &SubmitError) -> ApiError {
    match error {
        SubmitError::Duplicate(_) => {
            ApiError::new(Reason::DuplicateRequestId, error.to_string()).with_param("request_id")
        }
        SubmitError::Dead(death) => of_death(death),
        other => internal(other.to_string()),
    }
}

/// How the caller of a control route is told of the engine's failure.
pub(crate) fn of_call(error: &CallError) -> ApiError {
    match error {
        CallError::Failed(failure) => ApiError::from(failure),
        CallError::Dead(death) => of_death(death),
        other => internal(other.to_string()),
    }
}
