//! Why a message or a frame was refused: one variant per failure, each with a stable reason for metrics.

use thiserror::Error;

/// A message that cannot be decoded: where in the message, and what was wrong there.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{path}: {kind}")]
pub struct DecodeError {
    path: String,
    kind: DecodeErrorKind,
}

/// What was wrong with a message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// The payload ends inside a value.
    #[error("the payload ends early")]
    Truncated,
    /// The one byte that MessagePack gives no meaning.
    #[error("holds the reserved byte 0xc1")]
    Reserved,
    /// Bytes are left over behind the one value of the payload.
    #[error("{0} bytes are left over after the value")]
    TrailingBytes(usize),
    /// Arrays and maps are nested deeper than [`crate::MAX_DEPTH`].
    #[error("nested deeper than {max} levels", max = crate::MAX_DEPTH)]
    TooDeep,
    /// Another type than the field's.
    #[error("must be {expected}, got {found}")]
    WrongType {
        /// The type of the field, in words.
        expected: &'static str,
        /// The family of the MessagePack value that was there.
        found: &'static str,
    },
    /// An array too short for its required elements, or a map without a required key.
    #[error("is missing")]
    Missing,
    /// A number outside the range of its field.
    #[error("is outside the range of {0}")]
    OutOfRange(&'static str),
    /// An integer that names no value of an enumeration.
    #[error("{value} is not {allowed}")]
    UnknownValue {
        /// The integer that was there.
        value: i64,
        /// The values that there are.
        allowed: &'static str,
    },
    /// A string that is not UTF-8.
    #[error("is not UTF-8")]
    InvalidUtf8,
    /// An extension type other than raw array bytes; pickled data among them.
    #[error("extension type {0} is refused")]
    RefusedExtension(i8),
    /// A utility result with type information, which only pickled data needs.
    #[error("a result with type information is refused")]
    TypeInformation,
    /// An envelope that holds no batch, utility reply or wave event, or more than one of them.
    #[error("must hold exactly one of a batch, a utility reply, wave_complete and start_wave, got {0}")]
    Family(u8),
    /// An n-dimensional array whose parts do not fit together.
    #[error("{0}")]
    InvalidArray(String),
    /// An array refers to an auxiliary buffer that did not come.
    #[error("auxiliary buffer {0} is missing")]
    MissingBuffer(u64),
    /// A hello of another protocol or of another major version.
    #[error("{0}")]
    Incompatible(String),
}

impl DecodeErrorKind {
    /// Stable name of the failure, shared with the Python codec: the label `reason` of the decode-error metric.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Truncated | Self::Reserved | Self::InvalidUtf8 => "malformed",
            Self::TrailingBytes(_) => "trailing_bytes",
            Self::TooDeep => "too_deep",
            Self::WrongType { .. } => "wrong_type",
            Self::Missing => "too_short",
            Self::OutOfRange(_) | Self::UnknownValue { .. } => "out_of_range",
            Self::RefusedExtension(_) | Self::TypeInformation => "bad_extension",
            Self::Family(_) => "family",
            Self::InvalidArray(_) | Self::MissingBuffer(_) => "bad_array",
            Self::Incompatible(_) => "version",
        }
    }
}

impl DecodeError {
    pub(crate) fn new(kind: DecodeErrorKind) -> Self {
        Self { path: String::new(), kind }
    }

    /// Puts the name of the enclosing field in front of the path.
    #[must_use]
    pub(crate) fn at(mut self, name: &str) -> Self {
        if self.path.is_empty() {
            name.clone_into(&mut self.path);
        } else {
            let separator = if self.path.starts_with('[') { "" } else { "." };
            self.path = format!("{name}{separator}{}", self.path);
        }
        self
    }

    /// Dotted path of the value at fault, such as `EngineCoreOutputs.outputs[3].finish_reason`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What was wrong there.
    pub fn kind(&self) -> &DecodeErrorKind {
        &self.kind
    }

    /// Stable name of the kind; see [`DecodeErrorKind::reason`].
    pub const fn reason(&self) -> &'static str {
        self.kind.reason()
    }
}

impl From<DecodeErrorKind> for DecodeError {
    fn from(kind: DecodeErrorKind) -> Self {
        Self::new(kind)
    }
}

/// A frame header that ends the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A length of zero: there is not even a kind.
    #[error("a frame must hold at least its kind")]
    Empty,
    /// More bytes than this side takes.
    #[error("a frame of {length} bytes is over the limit of {limit}")]
    TooLarge {
        /// Length that the header announces.
        length: usize,
        /// Largest length that is taken.
        limit: usize,
    },
    /// A kind that this version of the protocol does not have.
    #[error("frame kind {0:#04x} is unknown")]
    UnknownKind(u8),
}

impl FrameError {
    /// Stable name, the label `reason` of the decode-error metric.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Empty => "frame_empty",
            Self::TooLarge { .. } => "frame_too_large",
            Self::UnknownKind(_) => "frame_kind",
        }
    }
}
