//! The outcome of a tolerant decode.

use std::convert::identity;

use crate::error::{DecodeError, DecodeErrorKind as Kind};
use crate::source::Source;
use crate::wire::Wire;

/// Deepest nesting of arrays and maps in a message.
pub const MAX_DEPTH: usize = 64;

pub(crate) type Result<T> = std::result::Result<T, DecodeError>;

/// A message, and how much of it was newer than this decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded<T> {
    /// The message.
    pub value: T,
    /// Array elements behind the last known one that were passed over.
    pub skipped_fields: u64,
}

/// Reads the value at the start of `source`.
pub(crate) fn read<T: Wire>(source: &Source<'_>) -> Result<T> {
    let mut deserializer = rmp_serde::Deserializer::new(source);
    // It refuses the level that uses the last of the depth up, and counts an extension value as a level.
    deserializer.set_max_depth(MAX_DEPTH + 1);
    T::read(&mut deserializer, source, identity).map_err(|error| source.failure(&error))
}

/// Reads the one value of `payload`; `name` is the root of the path in errors.
pub(crate) fn decode<T: Wire>(name: &str, payload: &[u8], buffers: &[&[u8]]) -> Result<Decoded<T>> {
    let source = Source::new(payload, buffers);
    let value = read(&source).map_err(|error| error.at(name))?;
    match source.rest().len() {
        0 => Ok(Decoded { value, skipped_fields: source.skipped() }),
        left => Err(DecodeError::from(Kind::TrailingBytes(left)).at(name)),
    }
}
