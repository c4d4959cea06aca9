//! The bytes of one request on their way into a file of an upload: hashed and written by threads that may wait for the
//! disk, while the next bytes come.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use rollspan_generate::{ApiError, Reason};
use serde_json::Value;
use tokio::task::JoinHandle;

use super::byte_ranges::CONTENT_RANGE;
use super::claim::{Claim, Part};
use super::spool::{Spool, unusable};
use super::upload::check_file_name;
use crate::answer::internal;

/// So many bytes are gathered before a thread takes them.
const GATHERED_BYTES: usize = 1 << 20;

/// Receives a part of a file. Nothing of it counts until [`Writer::finish`] has verified it.
pub(crate) struct Writer {
    name: String,
    part: Part,
    checksum: Option<blake3::Hash>,
    /// Bytes that have come.
    length: u64,
    gathered: Vec<Bytes>,
    gathered_bytes: usize,
    sink: Stage,
}

/// Whether a thread works on what came before.
enum Stage {
    Idle(Sink),
    Busy(JoinHandle<Result<Sink, ApiError>>),
    /// It has failed.
    Gone,
}

/// Where bytes go. Owns the claim: as long as a thread writes, even for a client that is gone, nobody else may.
struct Sink {
    claim: Claim,
    file: File,
    offset: u64,
    hasher: Option<Box<blake3::Hasher>>,
}

impl Writer {
    /// Begins to receive a part of the file `name`; `checksum` is that of these bytes.
    ///
    /// # Errors
    /// The file or the part is refused.
    pub async fn begin(
        spool: Arc<Spool>,
        upload: String,
        name: String,
        part: Part,
        checksum: Option<blake3::Hash>,
    ) -> Result<Self, ApiError> {
        check_file_name(&name)?;
        let (file_name, asked) = (name.clone(), part.clone());
        let opened = tokio::task::spawn_blocking(move || {
            let (claim, file) = spool.claim(&upload, &file_name, &asked)?;
            let offset = claim.range.start;
            Ok(Sink { claim, file, offset, hasher: checksum.map(|_| Box::default()) })
        });
        let sink = Stage::Idle(joined(opened).await?);
        Ok(Self { name, part, checksum, length: 0, gathered: Vec::new(), gathered_bytes: 0, sink })
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// There are more than was announced, no room for them, or they cannot be written.
    pub async fn write(&mut self, piece: Bytes) -> Result<(), ApiError> {
        let range = self.part.range();
        self.length += piece.len() as u64;
        if self.length > range.end - range.start {
            return Err(self.wrong_length());
        }
        self.gathered_bytes += piece.len();
        self.gathered.push(piece);
        if self.gathered_bytes >= GATHERED_BYTES { self.flush().await } else { Ok(()) }
    }

    /// Waits for the thread that works on what came before.
    async fn idle(&mut self) -> Result<Sink, ApiError> {
        match std::mem::replace(&mut self.sink, Stage::Gone) {
            Stage::Idle(sink) => Ok(sink),
            Stage::Busy(thread) => joined(thread).await,
            Stage::Gone => Err(internal("an upload that has failed goes on")),
        }
    }

    /// Hands what was gathered to a thread, once the one before is done.
    async fn flush(&mut self) -> Result<(), ApiError> {
        let mut sink = self.idle().await?;
        let pieces = std::mem::take(&mut self.gathered);
        let grown = if self.part.grows() { self.gathered_bytes as u64 } else { 0 };
        self.gathered_bytes = 0;
        sink.claim.received(grown)?;
        self.sink = Stage::Busy(tokio::task::spawn_blocking(move || {
            sink.write(&pieces).map_err(|error| unusable(&sink.claim.upload, &error))?;
            Ok(sink)
        }));
        Ok(())
    }

    /// Verifies what came and records it. Gives what clients are told of the file.
    ///
    /// # Errors
    /// There are fewer bytes than announced, their checksum differs, or the upload was deleted meanwhile.
    pub async fn finish(mut self) -> Result<Value, ApiError> {
        self.flush().await?;
        let sink = self.idle().await?;
        let range = self.part.range();
        if !self.part.grows() && self.length != range.end - range.start {
            return Err(self.wrong_length());
        }
        if let (Some(hasher), Some(expected)) = (&sink.hasher, self.checksum) {
            let found = hasher.finalize();
            if found != expected {
                let message =
                    format!("{}: the body's digest is blake3:{found}, X-Checksum says blake3:{expected}", self.name);
                return Err(ApiError::new(Reason::ChecksumMismatch, message).with_param("X-Checksum"));
            }
        }
        let length = self.length;
        joined(tokio::task::spawn_blocking(move || sink.claim.record(length))).await
    }

    fn wrong_length(&self) -> ApiError {
        wrong_length(&self.part, self.length)
    }
}

/// The body has another length than its range.
pub(crate) fn wrong_length(part: &Part, length: u64) -> ApiError {
    let range = part.range();
    let message = format!("{CONTENT_RANGE} says {} bytes, the body holds {length}", range.end - range.start);
    ApiError::new(Reason::InvalidRequest, message).with_param(CONTENT_RANGE)
}

impl Sink {
    fn write(&mut self, pieces: &[Bytes]) -> io::Result<()> {
        for piece in pieces {
            if let Some(hasher) = &mut self.hasher {
                hasher.update(piece);
            }
            self.file.write_all_at(piece, self.offset)?;
            self.offset += piece.len() as u64;
        }
        Ok(())
    }
}

async fn joined<T>(
    task: impl Future<Output = Result<Result<T, ApiError>, tokio::task::JoinError>>,
) -> Result<T, ApiError> {
    task.await.unwrap_or_else(|error| Err(internal(format!("receiving an upload: {error}"))))
}
