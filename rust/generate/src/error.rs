//! The one table of errors: a stable reason, its HTTP status and its type, and the error that carries them.

use rollspan_protocol::{EngineError, UtilityFailure};
use serde_json::{Value, json};
use thiserror::Error;

use crate::shown::shown;

macro_rules! reasons {
    ($($variant:ident $name:literal $status:literal $kind:literal $doc:literal,)*) => {
        /// Why a request failed; decides the HTTP status and the type of the error.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason { $(#[doc = $doc] $variant,)* }

        impl Reason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Stable name.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// HTTP status, the `code` of the body.
            pub const fn status(self) -> u16 {
                match self { $(Self::$variant => $status,)* }
            }

            /// `OpenAI`'s name for the class of the error.
            pub const fn kind(self) -> &'static str {
                match self { $(Self::$variant => $kind,)* }
            }
        }
    };
}

reasons! {
    InvalidJson "invalid_json" 400 "BadRequestError" "The body is no JSON.",
    InvalidRequest "invalid_request" 400 "BadRequestError" "A field is missing or outside its range.",
    UnsupportedField "unsupported_field" 400 "BadRequestError" "A known field that is not implemented.",
    UnknownField "unknown_field" 400 "BadRequestError" "An unknown field, in strict mode.",
    PromptTooLong "prompt_too_long" 400 "BadRequestError" "No room for one output token.",
    WeightsInvalid "weights_invalid" 400 "BadRequestError" "The new weights do not fit or cannot be read.",
    ChecksumMismatch "checksum_mismatch" 400 "BadRequestError" "A chunk of an upload differs from its checksum.",
    InvalidLabel "invalid_label" 400 "BadRequestError" "No weight version.",
    UnknownMethod "unknown_method" 400 "BadRequestError" "A utility call that the engine does not have.",
    NotFound "not_found" 404 "NotFoundError" "No such route.",
    ModelNotFound "model_not_found" 404 "NotFoundError" "No such model.",
    MethodNotAllowed "method_not_allowed" 405 "MethodNotAllowedError" "The route has another method.",
    DuplicateRequestId "duplicate_request_id" 409 "ConflictError" "An open request has that id.",
    UpdateActive "update_active" 409 "ConflictError" "A weight update is under way.",
    NoUpdateActive "no_update_active" 409 "ConflictError" "No weight update is under way.",
    UpdateAborted "update_aborted" 409 "ConflictError" "The weight update was dropped while the call ran.",
    DigestMismatch "digest_mismatch" 409 "ConflictError" "The weights are not those that the caller expects.",
    BaseMismatch "base_mismatch" 409 "ConflictError" "A delta is based on other weights than those in force.",
    PauseRequired "pause_required" 409 "ConflictError" "Weights that are changed in place need a pause.",
    UploadIncomplete "upload_incomplete" 409 "ConflictError" "Chunks of an upload are missing.",
    StaleWeights "stale_weights" 409 "ConflictError" "The weights in force are older than the request allows.",
    EngineSleeping "engine_sleeping" 409 "ConflictError" "The engine sleeps.",
    PauseSuperseded "pause_superseded" 409 "ConflictError" "A later pause or resume took over.",
    BodyTooLarge "body_too_large" 413 "RequestEntityTooLargeError" "The body is over the limit.",
    UnsupportedMediaType "unsupported_media_type" 415 "UnsupportedMediaTypeError" "Another content type than JSON.",
    QueueFull "queue_full" 429 "TooManyRequestsError" "Too many open requests.",
    InternalError "internal_error" 500 "InternalServerError" "Our fault.",
    EngineError "engine_error" 500 "InternalServerError" "The engine failed on the request.",
    NanLogits "nan_logits" 500 "InternalServerError" "The model computed NaN.",
    DecodeError "decode_error" 500 "InternalServerError" "An engine message that cannot be read.",
    TransferFailed "transfer_failed" 502 "BadGatewayError" "The sender of weights is gone, or said something else than agreed.",
    PartialFailure "partial_failure" 502 "BadGatewayError" "Some of the engines did what was asked, others did not.",
    EnginePaused "engine_paused" 503 "ServiceUnavailableError" "Generation is paused.",
    WeightsInconsistent "weights_inconsistent" 503 "ServiceUnavailableError" "The weights are half changed.",
    WeightsUndeclared "weights_undeclared" 503 "ServiceUnavailableError" "No trainer has declared a weight version yet.",
    EngineStarting "engine_starting" 503 "ServiceUnavailableError" "The engine is not ready yet.",
    EngineDead "engine_dead" 503 "ServiceUnavailableError" "The engine is gone.",
    ShuttingDown "shutting_down" 503 "ServiceUnavailableError" "The server is going away.",
}

impl Reason {
    /// The reason with that name; [`Reason::InternalError`] for a name that the table has not.
    pub fn from_name(name: &str) -> Self {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == name).unwrap_or(Self::InternalError)
    }

    /// Seconds for the header `Retry-After`, where trying again may help.
    pub const fn retry_after(self) -> Option<u32> {
        match self.status() {
            429 | 503 => Some(1),
            _ => None,
        }
    }
}

/// A failed request, as its client is told.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct ApiError {
    /// What was wrong, where, and what is allowed.
    pub message: String,
    /// Decides status and type.
    pub reason: Reason,
    /// Dotted path of the field at fault.
    pub param: Option<String>,
}

impl ApiError {
    /// An error without a field at fault.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { message: message.into(), reason, param: None }
    }

    /// Names the field at fault.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// A field that must be there.
    pub fn missing(path: &str) -> Self {
        Self::new(Reason::InvalidRequest, format!("{path} is required")).with_param(path)
    }

    /// A field outside its range: `{path} must be {allowed}, got {value}`.
    pub fn wrong(path: &str, allowed: &str, value: &Value) -> Self {
        Self::new(Reason::InvalidRequest, format!("{path} must be {allowed}, got {}", shown(value))).with_param(path)
    }

    /// A list whose element is outside its range.
    pub fn wrong_element(path: &str, allowed: &str, value: &Value, index: usize) -> Self {
        let error = Self::wrong(path, allowed, value);
        Self { message: format!("{} at index {index}", error.message), ..error }
    }

    /// HTTP status.
    pub const fn status(&self) -> u16 {
        self.reason.status()
    }

    /// The body of the answer, or the data of the event in a stream.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.reason.kind(),
            "param": self.param,
            "code": self.status(),
            "reason": self.reason.as_str(),
        }})
    }
}

impl From<&EngineError> for ApiError {
    fn from(error: &EngineError) -> Self {
        let reason = match (error.reason.as_deref(), error.code.as_str()) {
            (Some(reason), _) => Reason::from_name(reason),
            (None, "validation_error") => Reason::InvalidRequest,
            (None, code) => Reason::from_name(code),
        };
        Self { param: error.param.clone(), ..Self::new(reason, error.message.clone()) }
    }
}

impl From<&UtilityFailure> for ApiError {
    fn from(failure: &UtilityFailure) -> Self {
        let reason = failure.reason.as_deref().map_or(Reason::InternalError, Reason::from_name);
        Self::new(reason, failure.message.clone())
    }
}
