//! Server-sent events of one request.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use axum::response::Response;
use bytes::Bytes;
use futures::Stream;
use rollspan_generate::{ApiError, ChunkWriter};
use rollspan_protocol::{EngineCoreOutput, FinishReason};

use super::generate::Running;
use crate::answer::{self, internal};

/// Deltas that one piece of the body may carry: what is ready goes out together, without keeping others waiting.
const DELTAS_AT_ONCE: usize = 64;

/// The body of a streamed answer. It is polled when the connection can take more: until then new tokens gather in the
/// mailbox of the request.
pub(super) struct EventStream {
    running: Running,
    writer: ChunkWriter,
    /// Choices that have something to say, in order.
    unread: Vec<usize>,
    ended: bool,
}

impl EventStream {
    /// The events of `running`, whose choice `first` has something to say already.
    pub fn new(running: Running, first: usize) -> Self {
        Self { running, writer: ChunkWriter::default(), unread: vec![first], ended: false }
    }

    /// Makes `response` a stream.
    pub fn answer(self, response: &mut Response) {
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        *response.body_mut() = Body::from_stream(self);
    }

    /// Takes what is ready; at the end gives how the request ended.
    fn gather(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<(), ApiError>>> {
        for _ in 0..DELTAS_AT_ONCE {
            match self.running.stream.poll_next(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(Some(Ok(()))),
                Poll::Ready(Some(delta)) => {
                    let taken = delta.map_err(|error| answer::of_request(&error));
                    match taken.and_then(|delta| self.running.take(delta)) {
                        Ok(index) if self.unread.last() == Some(&index) => {}
                        Ok(index) => self.unread.push(index),
                        Err(error) => return Poll::Ready(Some(Err(error))),
                    }
                }
            }
        }
        Poll::Ready(None)
    }

    /// Writes the chunks of the choices that have something to say.
    fn write_chunks(&mut self, out: &mut Vec<u8>) -> Result<(), ApiError> {
        for index in self.unread.drain(..) {
            let Running { request, facts, choices, .. } = &mut self.running;
            let chunk = self.writer.chunk(request, facts, choices, index).map_err(|error| unwritable(&error))?;
            if let Some(chunk) = chunk {
                write_event(out, &chunk);
            }
        }
        Ok(())
    }

    /// Ends every choice that is still open with what it has and `error`, then says why.
    fn write_failure(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        for choice in &mut self.running.choices {
            let failed = EngineCoreOutput { finish_reason: Some(FinishReason::Error), ..EngineCoreOutput::default() };
            // The choice's own error is of no interest: the stream ends with the request's.
            drop(choice.push(failed, None, None));
        }
        self.unread = (0..self.running.choices.len()).collect();
        let ended = self.write_chunks(out);
        let error = ended.as_ref().err().unwrap_or(error);
        answer::log_failure(error, Some(&self.running.facts.request_id));
        write_event(out, error.body().to_string().as_bytes());
    }

    fn write_usage(&mut self, out: &mut Vec<u8>) -> Result<(), ApiError> {
        let Running { request, facts, choices, .. } = &self.running;
        let usage = self.writer.usage_chunk(request, facts, choices).map_err(|error| unwritable(&error))?;
        if let Some(usage) = usage {
            write_event(out, &usage);
        }
        Ok(())
    }
}

impl Stream for EventStream {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let mut out = Vec::new();
        loop {
            let gathered = this.gather(context);
            let written = this.write_chunks(&mut out);
            let end = match (written, gathered) {
                (Err(error), _) => Some(Err(error)),
                (Ok(()), Poll::Ready(end)) => end,
                (Ok(()), Poll::Pending) if out.is_empty() => return Poll::Pending,
                (Ok(()), Poll::Pending) => None,
            };
            if let Some(end) = end {
                this.ended = true;
                if let Err(error) = end.and_then(|()| this.write_usage(&mut out)) {
                    this.write_failure(&mut out, &error);
                }
                write_event(&mut out, b"[DONE]");
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(out.into())));
            }
        }
    }
}

fn write_event(out: &mut Vec<u8>, data: &[u8]) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(data);
    out.extend_from_slice(b"\n\n");
}

fn unwritable(error: &serde_json::Error) -> ApiError {
    internal(format!("writing a chunk: {error}"))
}
