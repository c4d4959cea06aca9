//! The frontend's end of the engine link.
//!
//! [`Connection::open`] waits for an engine and exchanges hellos; the [`EngineClient`] then carries any number of requests and utility
//! calls over one socket. What comes back for a request gathers in its mailbox until its [`RequestStream`] takes it: the
//! link's reader never waits for a slow taker, and what waits is merged, so that its size is bounded by the request's
//! own `max_tokens`. A dropped stream aborts its request; a dead engine ends every request and call at once.

mod client;
mod delivery;
mod error;
mod link;
mod mailbox;
#[cfg(feature = "test-util")]
pub mod mock;
mod observer;
mod registry;
mod status;
mod stream;
mod utility;

pub use client::{Connection, EngineClient};
pub use delivery::Delivery;
pub use error::{CallError, ConnectError, Death, RequestError, SubmitError};
pub use mailbox::Delta;
pub use observer::{Finished, NoObserver, Observer};
pub use status::EngineStatus;
pub use stream::{RequestStream, Submission};
