//! Frames of the engine link: `length:u32 big-endian | kind:u8 | payload`, where the length counts kind and payload.

use crate::error::FrameError;

/// Bytes in front of each payload: the length and the kind.
pub const HEADER_BYTES: usize = 5;

/// Largest length (kind and payload) that a peer takes unless its hello says less.
pub const MAX_FRAME_BYTES: usize = 256 * 1024 * 1024;

/// What a frame's payload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// To the engine: an `EngineCoreRequest`.
    Add = 0x00,
    /// To the engine: internal ids of requests to end.
    Abort = 0x01,
    /// To the engine: a utility call.
    Utility = 0x03,
    /// To the engine: the frontend's hello, its first frame.
    ClientHello = 0x10,
    /// To the frontend: the engine's hello, its first frame.
    EngineHello = 0x20,
    /// To the frontend: `EngineCoreOutputs`.
    Outputs = 0x21,
    /// To the frontend: last words of a failing engine.
    Dead = 0x22,
}

impl TryFrom<u8> for FrameKind {
    type Error = FrameError;

    fn try_from(byte: u8) -> Result<Self, FrameError> {
        [Self::Add, Self::Abort, Self::Utility, Self::ClientHello, Self::EngineHello, Self::Outputs, Self::Dead]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
            .ok_or(FrameError::UnknownKind(byte))
    }
}

/// The first [`HEADER_BYTES`] bytes of a frame, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the payload is.
    pub kind: FrameKind,
    /// Bytes of payload that follow the header.
    pub payload_bytes: usize,
}

impl FrameHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// The length is zero or over `limit` (checked before anything is allocated), or the kind is unknown.
    pub fn parse(header: [u8; HEADER_BYTES], limit: usize) -> Result<Self, FrameError> {
        let [a, b, c, d, kind] = header;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if length == 0 {
            return Err(FrameError::Empty);
        }
        if length > limit {
            return Err(FrameError::TooLarge { length, limit });
        }
        Ok(Self { kind: FrameKind::try_from(kind)?, payload_bytes: length - 1 })
    }
}

/// Puts the header in front of `payload`.
///
/// # Errors
/// The frame would be over `limit` bytes or over 4 GiB.
pub fn encode_frame(kind: FrameKind, payload: &[u8], limit: usize) -> Result<Vec<u8>, FrameError> {
    let length = payload.len() + 1;
    let too_large = FrameError::TooLarge { length, limit };
    if length > limit {
        return Err(too_large);
    }
    let header = u32::try_from(length).map_err(|_| too_large)?;
    let mut frame = Vec::with_capacity(HEADER_BYTES + payload.len());
    frame.extend_from_slice(&header.to_be_bytes());
    frame.push(kind as u8);
    frame.extend_from_slice(payload);
    Ok(frame)
}

/// A frame's kind, its payload and the bytes behind it.
pub type Split<'a> = (FrameKind, &'a [u8], &'a [u8]);

/// Takes the first frame off `bytes`; `None` when more bytes are needed.
///
/// # Errors
/// As [`FrameHeader::parse`]: the link must be closed, since where the next frame begins is unknown.
pub fn split_frame(bytes: &[u8], limit: usize) -> Result<Option<Split<'_>>, FrameError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let header = FrameHeader::parse(*header, limit)?;
    Ok(rest.split_at_checked(header.payload_bytes).map(|(payload, rest)| (header.kind, payload, rest)))
}
