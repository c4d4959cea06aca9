//! Control requests: any content type, a JSON object or nothing as the body, and unknown keys named in the answer.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::Response;
use rollspan_generate::{ApiError, Reason};
use serde_json::{Map, Value};

use crate::answer::{self, Failure, internal};
use crate::app::{App, shutting_down};
use crate::body;
use crate::fan_out::{Outcome, agreed, call_all, successes};

/// A control request, while there is an engine for it.
pub(crate) struct Control {
    pub app: Arc<App>,
    query: Vec<(String, String)>,
    fields: Map<String, Value>,
}

impl Control {
    /// Reads a control request.
    ///
    /// # Errors
    /// No live engine (found before the body is read), a body over the limit, or one that is no JSON object.
    pub async fn read(app: Arc<App>, request: Request) -> Result<Self, ApiError> {
        app.check_live()?;
        let (parts, body) = request.into_parts();
        let query = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&parts.uri)
            .map(|query| query.0)
            .unwrap_or_default();
        let bytes = body::read(&parts.headers, body, app.options.max_body_bytes).await?;
        let fields = if bytes.trim_ascii().is_empty() { Map::new() } else { object(&bytes)? };
        Ok(Self { app, query, fields })
    }

    /// A parameter of the query; the last one wins.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// All values of a parameter of the query.
    pub fn parameters(&self, name: &str) -> Vec<Value> {
        self.query.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str().into()).collect()
    }

    /// A parameter of the query, which wins, or a field of the body.
    pub fn given(&self, name: &str) -> Option<Value> {
        self.parameter(name).map(Value::from).or_else(|| self.field(name).cloned())
    }

    /// A field of the body; an explicit null is as good as none.
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// A flag of the query, which wins, or of the body.
    ///
    /// # Errors
    /// It is neither true nor false.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        const ALLOWED: &str = "true or false";
        if let Some(word) = self.parameter(name) {
            return match word.to_ascii_lowercase().as_str() {
                "true" | "1" => Ok(Some(true)),
                "false" | "0" => Ok(Some(false)),
                _ => Err(ApiError::wrong(name, ALLOWED, &word.into())),
            };
        }
        let Some(given) = self.field(name) else { return Ok(None) };
        given.as_bool().map(Some).ok_or_else(|| ApiError::wrong(name, ALLOWED, given))
    }

    /// A field of the body that must be there.
    ///
    /// # Errors
    /// It is not.
    pub fn required(&self, name: &str) -> Result<&Value, ApiError> {
        self.field(name).ok_or_else(|| ApiError::missing(name))
    }

    /// Calls all engines, and waits as long as it takes, or until the server ends.
    ///
    /// # Errors
    /// What an engine says against it, in whatever number of them, or [`Reason::ShuttingDown`].
    pub async fn call(&self, method: &str, arguments: &[Value]) -> Result<Vec<Outcome>, Failure> {
        let engines = self.app.engines.there()?;
        let outcomes = self.until_end(call_all(&engines, method, arguments)).await?;
        successes(&outcomes)?;
        Ok(outcomes)
    }

    /// Asks the engines that take requests something that they must agree on.
    ///
    /// # Errors
    /// What an engine says against it, [`Reason::PartialFailure`] when they differ, or [`Reason::ShuttingDown`].
    pub async fn ask(&self, method: &str) -> Result<Value, Failure> {
        let serving = self.app.engines.serving();
        let engines = if serving.is_empty() { self.app.engines.there()? } else { serving };
        agreed(&self.until_end(call_all(&engines, method, &[])).await?)
    }

    /// Waits for calls of engines, or until the server ends.
    ///
    /// # Errors
    /// [`Reason::ShuttingDown`].
    async fn until_end<T>(&self, calls: impl Future<Output = T>) -> Result<T, ApiError> {
        tokio::select! {
            outcome = calls => Ok(outcome),
            () = self.app.ended() => Err(shutting_down()),
        }
    }

    /// Runs a change of several steps to its end, also when its client goes away in the middle: the client would find it
    /// half done when it comes back.
    ///
    /// # Errors
    /// Those of the change, or [`Reason::ShuttingDown`].
    pub async fn complete<F>(self, change: impl FnOnce(Self) -> F) -> Result<Response, Failure>
    where
        F: Future<Output = Result<Response, Failure>> + Send + 'static,
    {
        let app = Arc::clone(&self.app);
        let change = tokio::spawn(change(self));
        tokio::select! {
            outcome = change => outcome.unwrap_or_else(|error| Err(internal(format!("a control call: {error}")).into())),
            () = app.ended() => Err(shutting_down().into()),
        }
    }

    /// [`Control::answer`] to a call of all engines: of a set it tells the outcome of each.
    pub fn answer_of_all(&self, mut value: Value, known: &[&str], outcomes: &[Outcome]) -> Response {
        if self.app.engines.size() > 1 {
            value["engines"] = outcomes.iter().map(Outcome::to_json).collect();
        }
        self.answer(&value, known)
    }

    /// Answers with `value`, and names the fields of the body that are not among `known`.
    pub fn answer(&self, value: &Value, known: &[&str]) -> Response {
        let unknown = self.fields.keys().filter(|name| !known.contains(&name.as_str()));
        let mut ignored: Vec<String> = unknown.cloned().collect();
        ignored.sort_unstable();
        self.app.log_ignored(&ignored);
        let mut response = answer::value(value);
        answer::add_headers(response.headers_mut(), None, &ignored);
        response
    }
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(ApiError::new(Reason::InvalidRequest, "request body must be a JSON object")),
        Err(error) => Err(ApiError::new(Reason::InvalidJson, format!("request body is not valid JSON: {error}"))),
    }
}
