//! One upload: files that go to the engine together, and what of them is there.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use rollspan_generate::{ApiError, Reason};
use serde_json::{Value, json};

use super::byte_ranges::ByteRanges;

const SUFFIX: &str = ".safetensors";
const NAME_ALLOWED: &str = "1 to 128 of A-Z, a-z, 0-9, dot, underscore and dash, no dot at the start";
const NAME_BYTES: usize = 128;

/// Files that go to the engine together.
pub(super) struct Upload {
    /// Tells it from one of the same name that was deleted.
    pub id: u64,
    /// When bytes last came.
    pub touched: Instant,
    /// How many weight updates read it at the moment.
    pub readers: usize,
    pub files: BTreeMap<String, UploadedFile>,
}

#[derive(Default)]
pub(super) struct UploadedFile {
    /// Its size, as far as clients have said it.
    pub total: u64,
    /// What of it is on disk and verified.
    pub received: ByteRanges,
    /// Ranges that are just being received.
    pub writing: Vec<Range<u64>>,
    /// Whether it has its own name already.
    pub whole: bool,
}

impl UploadedFile {
    /// What clients are told of it.
    pub fn to_json(&self) -> Value {
        json!({"received": self.received.to_json(), "total": self.total})
    }
}

impl Upload {
    pub fn new(id: u64) -> Self {
        Self { id, touched: Instant::now(), readers: 0, files: BTreeMap::new() }
    }

    /// Forgets files that are not in `directory` any more: an engine may have used them up in an update that failed.
    pub fn forget_lost(&mut self, directory: &Path) {
        for (name, file) in &mut self.files {
            if file.whole && !directory.join(name).exists() {
                file.received = ByteRanges::default();
                file.whole = false;
            }
        }
    }

    /// Refuses changes while the engine reads the files.
    ///
    /// # Errors
    /// [`Reason::UpdateActive`].
    pub fn check_unread(&self, name: &str) -> Result<(), ApiError> {
        let message = || format!("upload {name} is being read by a weight update");
        if self.readers == 0 { Ok(()) } else { Err(ApiError::new(Reason::UpdateActive, message())) }
    }

    /// Refuses an upload of which something is missing; `path` is the field that named it.
    ///
    /// # Errors
    /// [`Reason::UploadIncomplete`] with the first thing that is missing.
    pub fn check_complete(&self, name: &str, path: &str) -> Result<(), ApiError> {
        let missing = |(file_name, file): (&String, &UploadedFile)| {
            let range = file.received.missing(file.total)?;
            let (start, last, total) = (range.start, range.end - 1, file.total);
            Some(format!("is incomplete: {file_name} lacks bytes {start} to {last} of {total}"))
        };
        let nothing = || self.files.is_empty().then(|| "holds no files".to_owned());
        match self.files.iter().find_map(missing).or_else(nothing) {
            None => Ok(()),
            Some(problem) => Err(incomplete(format!("upload {name} {problem}"), path)),
        }
    }
}

/// Gives `value` when it may name an upload; `path` is where it came from.
///
/// # Errors
/// Says what may.
pub(super) fn check_upload_name<'a>(value: &'a Value, path: &str) -> Result<&'a str, ApiError> {
    value.as_str().filter(|name| is_name(name)).ok_or_else(|| ApiError::wrong(path, NAME_ALLOWED, value))
}

/// Refuses what may not name a file of an upload.
///
/// # Errors
/// Says what may.
pub(crate) fn check_file_name(name: &str) -> Result<(), ApiError> {
    if is_name(name) && name.ends_with(SUFFIX) {
        return Ok(());
    }
    Err(ApiError::wrong("file", &format!("{NAME_ALLOWED}, {SUFFIX} at the end"), &name.into()))
}

fn is_name(name: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=NAME_BYTES).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(known)
}

/// [`Reason::UploadIncomplete`] for the field or header `path`.
pub(super) fn incomplete(message: String, path: &str) -> ApiError {
    ApiError::new(Reason::UploadIncomplete, message).with_param(path)
}
