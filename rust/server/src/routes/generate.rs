//! `POST /inference/v1/generate`: collected or streamed, aborted as soon as its client is gone.
//!
//! Everything of a request lives in its handler's future, or in its answer's body: the server drops these when the
//! connection ends, and the dropped [`RequestStream`] aborts the request.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use bytes::Bytes;
use rollspan_engine_client::{Delivery, RequestStream, Submission};
use rollspan_generate::{AnswerFacts, ApiError, Choice, GenerateRequest, Reason, check_request_id, collected, shown};
use serde_json::Value;

use super::header_text;
use super::stream::EventStream;
use crate::answer::{self, Failure, REQUEST_ID, internal};
use crate::app::{App, OpenRequest, now};
use crate::body;
use crate::engine::Engine;

const SESSION_ID: &str = "x-session-id";
const RANK: &str = "X-data-parallel-rank";
const MEDIA_TYPE: &str = "application/json";

/// Work on more bytes or tokens than this leaves the threads that serve connections.
const LARGE: usize = 256 * 1024;

/// A validated request that was sent to the engine.
pub(super) struct Running {
    pub request: GenerateRequest,
    pub facts: AnswerFacts,
    pub choices: Vec<Choice>,
    pub stream: RequestStream,
    _open: OpenRequest,
}

/// The route.
pub(super) async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    let header_id = header_text(&parts.headers, REQUEST_ID.as_str());
    // An id that was refused is not repeated.
    let echo = header_id.as_deref().filter(|id| check_request_id(&Value::from(*id), "").is_ok());
    let refused = |error: ApiError| Failure::from(error).of_request(echo);
    let engine = app.check_live().map_err(refused)?;
    check_content_type(&parts.headers).map_err(refused)?;
    let body = body::read(&parts.headers, body, app.options.max_body_bytes).await.map_err(refused)?;
    let request = parse(&app, &engine, body, header_id.clone()).await.map_err(refused)?;
    app.log_ignored(&request.ignored_fields);
    let external_id = match &request.request_id {
        Some(id) => id.clone(),
        None => hex::encode(random::<16>().map_err(refused)?),
    };
    let session_id = header_text(&parts.headers, SESSION_ID);
    let submitted = rank(&parts.headers, app.engines.size())
        .and_then(|rank| submit(&app, request, &external_id, session_id.as_deref(), rank));
    let answered = match submitted {
        Ok(running) if running.request.stream => stream(running).await,
        Ok(running) => collect(running).await,
        Err(error) => Err(error),
    };
    answered.map_err(|error| Failure::from(error).of_request(Some(&external_id)))
}

async fn parse(
    app: &App,
    engine: &Arc<Engine>,
    body: Bytes,
    header_id: Option<String>,
) -> Result<GenerateRequest, ApiError> {
    let strict = app.options.strict_requests;
    if body.len() < LARGE {
        return GenerateRequest::parse(&body, header_id.as_deref(), &engine.served, strict);
    }
    let engine = Arc::clone(engine);
    let parse = move || GenerateRequest::parse(&body, header_id.as_deref(), &engine.served, strict);
    tokio::task::spawn_blocking(parse).await.map_err(|error| internal(format!("parsing a request: {error}")))?
}

fn submit(
    app: &Arc<App>,
    request: GenerateRequest,
    external_id: &str,
    session_id: Option<&str>,
    rank: Option<usize>,
) -> Result<Running, ApiError> {
    let (open, engine, reserved) = app.open_request(external_id, session_id, rank)?;
    let (created, arrival_time) = now();
    let suffix = u32::from_ne_bytes(random()?);
    let delivery = if request.stream { Delivery::EachStep } else { Delivery::WhenFinished };
    let requests = request.engine_requests(external_id, suffix, arrival_time, session_id);
    let choices = request.choices();
    let submission = Submission { external_id: external_id.to_owned(), requests, delivery };
    let stream = engine.client.submit(submission).map_err(|error| answer::of_submission(&error))?;
    drop(reserved);
    let facts = AnswerFacts {
        request_id: external_id.to_owned(),
        model: engine.served.model.clone(),
        created,
        engine_index: engine.index(),
    };
    Ok(Running { request, facts, choices, stream, _open: open })
}

impl Running {
    /// Waits for the engine's next word on the request. `None` at the end.
    ///
    /// # Errors
    /// The request failed.
    pub async fn advance(&mut self) -> Option<Result<usize, ApiError>> {
        let delta = self.stream.next().await?;
        Some(delta.map_err(|error| answer::of_request(&error)).and_then(|delta| self.take(delta)))
    }

    /// Takes in a delta; gives the index of its choice.
    ///
    /// # Errors
    /// The engine failed on the choice.
    pub fn take(&mut self, delta: rollspan_engine_client::Delta) -> Result<usize, ApiError> {
        self.facts.engine_index = delta.engine_index;
        if let Some(choice) = self.choices.get_mut(delta.choice) {
            choice.push(delta.output, delta.weight_version.as_deref(), delta.weight_commit)?;
        }
        Ok(delta.choice)
    }

    fn add_headers(&self, response: &mut Response) {
        answer::add_headers(response.headers_mut(), Some(&self.facts.request_id), &self.request.ignored_fields);
    }
}

async fn collect(mut running: Running) -> Result<Response, ApiError> {
    while let Some(taken) = running.advance().await {
        taken?;
    }
    let values: usize = running.choices.iter().map(values).sum();
    let write = move || (collected(&running.request, &running.facts, &running.choices), running);
    let (body, running) = if values < LARGE {
        write()
    } else {
        tokio::task::spawn_blocking(write).await.map_err(|error| internal(format!("writing an answer: {error}")))?
    };
    let mut response = answer::json(body.map_err(|error| internal(format!("writing an answer: {error}")))?);
    running.add_headers(&mut response);
    Ok(response)
}

/// Roughly how many values a choice puts into an answer.
fn values(choice: &Choice) -> usize {
    let width = 1 + choice.logprobs().map_or(0, |logprobs| logprobs.width);
    let prompt = choice.prompt_logprobs().map_or(0, |logprobs| logprobs.token_ids.len());
    let experts = choice.routed_experts().map_or(0, |experts| experts.data().len() / 4);
    choice.tokens() * width + prompt + experts
}

/// Waits for the first event before the headers, so that a refusal has its real status.
async fn stream(mut running: Running) -> Result<Response, ApiError> {
    let first = match running.advance().await {
        Some(taken) => taken?,
        None => return Err(internal("the engine ended a request without a word")),
    };
    let mut response = Response::default();
    running.add_headers(&mut response);
    EventStream::new(running, first).answer(&mut response);
    Ok(response)
}

/// The engine that has to take the request; `None` for any.
fn rank(headers: &HeaderMap, engines: usize) -> Result<Option<usize>, ApiError> {
    let Some(value) = header_text(headers, RANK) else { return Ok(None) };
    let is_number = value.len() <= 9 && value.bytes().all(|byte| byte.is_ascii_digit());
    let rank = value.parse().ok().filter(|rank| is_number && *rank < engines);
    let allowed = || format!("an integer from 0 to {}", engines - 1);
    rank.map(Some).ok_or_else(|| ApiError::wrong(RANK, &allowed(), &value.as_str().into()))
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = header_text(headers, CONTENT_TYPE.as_str()) else { return Ok(()) };
    let media_type = value.split(';').next().unwrap_or_default().trim();
    if media_type.eq_ignore_ascii_case(MEDIA_TYPE) {
        return Ok(());
    }
    let message = format!("Content-Type must be {MEDIA_TYPE}, got {}", shown(&value.as_str().into()));
    Err(ApiError::new(Reason::UnsupportedMediaType, message))
}

fn random<const N: usize>() -> Result<[u8; N], ApiError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| internal(format!("no random numbers: {error}")))?;
    Ok(bytes)
}
