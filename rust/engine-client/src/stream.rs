//! A submission and what comes back for it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use rollspan_protocol::EngineCoreRequest;

use crate::client::EngineClient;
use crate::delivery::Delivery;
use crate::error::RequestError;
use crate::mailbox::{Delta, Mailbox};

/// One client request: as many engine requests as it has choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Submission {
    /// The client's id, unique among the open submissions.
    pub external_id: String,
    /// One engine request per choice, in the order of the choices; their ids must be unique.
    pub requests: Vec<EngineCoreRequest>,
    /// When the taker is woken.
    pub delivery: Delivery,
}

/// The outputs of one submission. Dropping it before its end aborts what is still running.
pub struct RequestStream {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) client: EngineClient,
}

impl RequestStream {
    /// The next delta, in order of arrival; `None` after the last choice has finished.
    ///
    /// Deltas that waited come merged: one per run of tokens of the same weights and choice.
    ///
    /// # Errors
    /// The submission failed as a whole; nothing comes after it.
    pub async fn next(&mut self) -> Option<Result<Delta, RequestError>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// [`RequestStream::next`] for hand-written futures.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Delta, RequestError>>> {
        self.mailbox.poll_next(context)
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        self.client.shared.abandon(&self.mailbox);
    }
}
