//! What can go wrong on the way to an engine and back, one enum per step.

use std::io;
use std::time::Duration;

use rollspan_protocol::{DecodeError, EngineError, FrameError, UtilityFailure};
use thiserror::Error;

/// Why an engine is gone. Every request and call that was open gets a copy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Death {
    /// Stable reason, a key of the error table: `engine_dead`, or `decode_error` or `internal_error` when it was
    /// we who closed the link.
    pub reason: &'static str,
    /// What happened, for people.
    pub message: String,
}

impl Death {
    pub(crate) fn engine(message: impl Into<String>) -> Self {
        Self { reason: "engine_dead", message: message.into() }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self { reason: "internal_error", message: message.into() }
    }

    pub(crate) fn undecodable(message: impl Into<String>) -> Self {
        Self { reason: "decode_error", message: message.into() }
    }
}

/// Why no link to an engine came to be.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody listened, or said hello, in time.
    #[error("the engine was not ready within {} s", .0.as_secs_f64())]
    Timeout(Duration),
    /// The socket is there but cannot be used.
    #[error("cannot use the engine's socket {path}: {error}")]
    Socket {
        /// Path of the socket.
        path: String,
        /// The system's answer.
        error: io::Error,
    },
    /// The engine is gone, or could not start.
    #[error(transparent)]
    Dead(#[from] Death),
    /// The engine speaks another protocol or version, or its hello is broken.
    #[error("the engine's hello was refused: {0}")]
    Refused(String),
}

impl From<FrameError> for ConnectError {
    fn from(error: FrameError) -> Self {
        Self::Refused(error.to_string())
    }
}

impl From<DecodeError> for ConnectError {
    fn from(error: DecodeError) -> Self {
        Self::Refused(error.to_string())
    }
}

/// Why a request was not sent.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// An open request has this external id.
    #[error("request_id \"{0}\" is already in use by an open request")]
    Duplicate(String),
    /// The engine is gone.
    #[error(transparent)]
    Dead(#[from] Death),
    /// The request does not fit into a frame.
    #[error("the request is too large for the engine link: {0}")]
    TooLarge(FrameError),
}

/// Why a request ended without a regular finish.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The engine refused or failed this request.
    #[error("{}", .0.message)]
    Engine(EngineError),
    /// The engine is gone, or what it said about this request could not be read.
    #[error(transparent)]
    Dead(#[from] Death),
}

/// Why a utility call has no result.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CallError {
    /// The engine answered with a failure.
    #[error("{}", .0.message)]
    Failed(UtilityFailure),
    /// The engine is gone.
    #[error(transparent)]
    Dead(#[from] Death),
    /// The call does not fit into a frame.
    #[error("the call is too large for the engine link: {0}")]
    TooLarge(FrameError),
}
