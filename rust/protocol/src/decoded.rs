//! The outcome of a tolerant decode.

use crate::reader::{Reader, Result};

/// A message, and how much of it was newer than this decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded<T> {
    /// The message.
    pub value: T,
    /// Array elements behind the last known one that were passed over.
    pub skipped_fields: u64,
}

/// Reads the one value of `payload`; `name` is the root of the path in errors.
pub(crate) fn decode<'a, T>(
    name: &'static str,
    payload: &'a [u8],
    buffers: &'a [&'a [u8]],
    read: impl FnOnce(&mut Reader<'a>) -> Result<T>,
) -> Result<Decoded<T>> {
    let mut reader = Reader::new(payload, buffers);
    let value = read(&mut reader).map_err(|error| error.at(name))?;
    reader.finish().map_err(|error| error.at(name))?;
    Ok(Decoded { value, skipped_fields: reader.skipped })
}
