//! Bytes of a file that one request brings.

use std::fs;
use std::ops::Range;
use std::sync::Arc;

use rollspan_generate::ApiError;
use serde_json::Value;

use super::spool::{Spool, unusable};

/// What of a file a request brings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// A range of a file of so many bytes.
    Range(Range<u64>, u64),
    /// A whole file, which replaces what was there; its size, where the request says it.
    Whole(Option<u64>),
}

impl Part {
    /// The bytes that the request may bring.
    pub fn range(&self) -> Range<u64> {
        match self {
            Self::Range(range, _) => range.clone(),
            Self::Whole(length) => 0..length.unwrap_or(u64::MAX),
        }
    }

    /// Size of the file, as far as the request says it.
    pub fn total(&self) -> u64 {
        match self {
            Self::Range(_, total) => *total,
            Self::Whole(length) => length.unwrap_or(0),
        }
    }

    /// Whether the file begins anew.
    pub fn is_whole(&self) -> bool {
        matches!(self, Self::Whole(_))
    }

    /// Whether the size of the file shows only when all of it has come.
    pub fn grows(&self) -> bool {
        *self == Self::Whole(None)
    }
}

/// Bytes of a file that nobody else may write meanwhile. When they were not recorded before this is dropped, they are
/// missing again.
pub(super) struct Claim {
    pub spool: Arc<Spool>,
    pub upload: String,
    pub upload_id: u64,
    pub file: String,
    pub range: Range<u64>,
    pub recorded: bool,
}

impl Claim {
    /// Bytes have come; `grown` of them are more than was announced.
    ///
    /// # Errors
    /// There is no room for them, or the upload was deleted.
    pub fn received(&self, grown: u64) -> Result<(), ApiError> {
        let mut state = self.spool.state();
        if grown > 0 {
            self.spool.check_room(state.announced(), 0, grown)?;
        }
        state.claimed(self)?.total += grown;
        Ok(())
    }

    /// Records its first `length` bytes as received; a file of which nothing is missing any more gets its name. Gives what
    /// clients are told of the file.
    ///
    /// # Errors
    /// The upload was deleted.
    pub fn record(mut self, length: u64) -> Result<Value, ApiError> {
        let spool = Arc::clone(&self.spool);
        let mut state = spool.state();
        let file = state.claimed(&self)?;
        file.writing.retain(|range| *range != self.range);
        file.received.add(self.range.start..self.range.start + length);
        self.recorded = true;
        if file.writing.is_empty() && file.received.missing(file.total).is_none() {
            let (partial, whole) = (spool.part_path(&self.upload, &self.file), spool.path(&self.upload, &self.file));
            if let Err(error) = fs::rename(partial, whole) {
                file.received.remove(&self.range);
                return Err(unusable(&self.upload, &error));
            }
            file.whole = true;
        }
        Ok(file.to_json())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.recorded {
            return;
        }
        let spool = Arc::clone(&self.spool);
        let mut state = spool.state();
        let Ok(file) = state.claimed(self) else { return };
        file.writing.retain(|range| *range != self.range);
        if file.received.is_empty() && file.writing.is_empty() {
            if let Err(error) = fs::remove_file(spool.part_path(&self.upload, &self.file)) {
                tracing::warn!("upload {}: {} cannot be deleted: {error}", self.upload, self.file);
            }
            spool.forget_file(&mut state, &self.upload, &self.file);
        }
    }
}
